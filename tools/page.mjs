// Checks the page in a real browser, over a real server: no errors, the numbers of the API, events
// and acknowledgements as they happen, a server that goes and comes, keyboard, narrow screens, and
// accessibility (axe-core).
//
// Usage: node tools/page.mjs [FOREBAY] [--shots DIR]; the binary is target/debug/forebay by default.

import { spawn, spawnSync } from "node:child_process";
import fs from "node:fs";
import { createRequire } from "node:module";
import net from "node:net";
import os from "node:os";
import path from "node:path";

const ROOT = path.resolve(import.meta.dirname ?? path.dirname(new URL(import.meta.url).pathname), "..");
const TOOLS = path.join(process.env.CARGO_TARGET_DIR ?? path.join(ROOT, "target"), "tools/page/");
const require = createRequire(path.join(TOOLS, "package.json"));
const { chromium } = require("playwright-core");
const AXE = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const TOKEN = "a-token-for-this-test-only";
const PATIENCE = 30_000;

const words = process.argv.slice(2);
const shots = words.includes("--shots") ? words[words.indexOf("--shots") + 1] : null;
const binary = words[0] && !words[0].startsWith("--") ? words[0] : path.join(ROOT, "target/debug/forebay");
const place = fs.mkdtempSync(path.join(os.tmpdir(), "forebay-page-"));
const at = (name) => path.join(place, name);
const started = [];
const problems = [];

function check(what, good, found) {
  if (!good) throw new Error(`${what}: ${JSON.stringify(found)}`);
  console.log(`ok: ${what}`);
}

async function until(what, happened) {
  const limit = Date.now() + PATIENCE;
  for (;;) {
    const result = await happened();
    if (result) return result;
    if (Date.now() > limit) throw new Error(`${what}: not in ${PATIENCE} ms`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

function freePort() {
  return new Promise((resolve) => {
    const probe = net.createServer().listen(0, "127.0.0.1", () => {
      const { port } = probe.address();
      probe.close(() => resolve(port));
    });
  });
}

function configure(port) {
  for (const name of ["db.img", "log.img"]) {
    fs.closeSync(fs.openSync(at(name), "w"));
    fs.truncateSync(at(name), 64 << 20);
  }
  fs.writeFileSync(at("token"), `${TOKEN}\n`, { mode: 0o600 });
  fs.writeFileSync(at("forebay.toml"), `
[cache]
path = "${at("cache.img")}"
size = "64MiB"
state_dir = "${at("state")}"
[memory]
ram = "8MiB"
[server]
shards = 2
nbd = ["unix:${at("nbd.sock")}"]
[control]
socket = "${at("control.sock")}"
[web]
listen = "127.0.0.1:${port}"
token_file = "${at("token")}"
[[volume]]
name = "db"
primary = "${at("db.img")}?emulate=san"
[[volume]]
name = "log"
primary = "${at("log.img")}"
mode = "write-through"
`);
}

/** Starts the server, and waits until it is ready. */
async function serve() {
  const log = fs.openSync(at("serve.log"), "a");
  const env = { ...process.env, FOREBAY_NO_KEEPER: "1" };
  const server = spawn(binary, ["serve", "--config", at("forebay.toml")], { stdio: ["ignore", "pipe", log], env });
  started.push(server);
  await new Promise((resolve, reject) => {
    const fail = () => reject(new Error(fs.readFileSync(at("serve.log"), "utf8")));
    server.once("exit", fail);
    server.stdout.once("data", () => {
      server.off("exit", fail);
      resolve();
    });
  });
  return server;
}

function stopped(child) {
  return new Promise((resolve) => {
    if (child.exitCode !== null || child.signalCode !== null) resolve();
    child.once("exit", resolve);
  });
}

function forebay(...command) {
  const done = spawnSync(binary, [...command, `--control=${at("control.sock")}`], { encoding: "utf8" });
  if (done.status !== 0) throw new Error(`${command.join(" ")}: ${done.stderr}`);
  return done.stdout;
}

function load(seconds) {
  const jobs = ["--ioengine=nbd", "--time_based=1", `--runtime=${seconds}`, "--bs=4k", "--iodepth=8",
    "--size=16m", "--output=/dev/null"];
  for (const [volume, kind] of [["db", "randrw"], ["log", "randwrite"]]) {
    jobs.push(`--name=${volume}`, `--uri=nbd+unix:///${volume}?socket=${at("nbd.sock")}`, `--rw=${kind}`,
      "--random_distribution=zipf:1.2", "--rate_iops=600");
  }
  const fio = spawn("fio", jobs, { stdio: "ignore" });
  started.push(fio);
  return fio;
}

async function ask(site, asked) {
  const answer = await fetch(site + asked, { headers: { Authorization: `Bearer ${TOKEN}` } });
  if (!answer.ok) throw new Error(`${asked}: ${answer.status}`);
  return answer.json();
}

async function open(browser, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 900 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
  page.on("console", (message) => {
    // A server that is away, and a wrong token, are reported by the browser itself.
    const expected = /net::ERR_|401 \(Unauthorized\)/.test(message.text());
    if (!expected && message.type() !== "log") problems.push(`console: ${message.text()}`);
  });
  return page;
}

const text = (page, selector) => page.locator(selector).innerText();
const isLive = async (page) => (await text(page, "#connection")) === "live";

async function checkToken(browser, site) {
  const page = await open(browser);
  await page.goto(site);
  await page.fill("#entry-token", "not-the-token-of-this-server");
  await page.keyboard.press("Enter");
  await until("a wrong token is refused", async () => (await text(page, "#entry-error")).includes("not the token"));
  await page.fill("#entry-token", TOKEN);
  await page.keyboard.press("Enter");
  await until("the token opens the page", () => isLive(page));
  console.log("ok: the form takes the token, and no other");
  await page.context().close();
}

/** The numbers of the page are those of the API; the server is idle, so they stay. */
async function checkNumbers(page, site) {
  await page.getByRole("button", { name: "start" }).click();
  await until("the window is chosen", async () => (await text(page, "#window-name")) === "start");
  const times = (one) => one && `${micros(one.p50_micros)}, ${micros(one.p99_micros)}`;
  const statistics = await ask(site, "/v1/statistics?window=start");
  for (const [row, volume] of statistics.volumes.entries()) {
    const cells = await page.locator("#volumes tbody tr").nth(row).locator("th, td").allInnerTexts();
    const of = (list, operation) => list.find((one) => one.operation === operation);
    const { full_hit_percent: hits } = volume.reads;
    const expected = [volume.name, hits === null ? "-" : `${hits.toFixed(1)} %`,
      times(of(volume.latencies, "read")) ?? "-", times(of(volume.primary, "read")) ?? "-",
      times(of(volume.latencies, "write")) ?? "-"];
    const shown = [cells[0], cells[5], cells[6], cells[7], cells[8]];
    check(`volume ${volume.name} has the numbers of the API`,
      JSON.stringify(shown) === JSON.stringify(expected), { shown, expected });
  }
  const status = await ask(site, "/v1/status");
  check("nothing is at risk after a drain", status.cache.dirty_bytes === 0, status.cache);
  await until("the page says so", async () => (await text(page, "#risk")).startsWith("Nothing is at risk"));
  await until("every setting is there", async () =>
    (await page.locator("#settings tbody tr").count()) === status.settings.length);
  await until("the drain is there", async () => (await page.locator("#drains tbody tr").count()) === 1);
}

function micros(value) {
  if (value < 99.95) return `${value.toFixed(1)} us`;
  if (value < 999.5) return `${value.toFixed(0)} us`;
  if (value < 99_950) return `${(value / 1e3).toFixed(1)} ms`;
  if (value < 999_500) return `${(value / 1e3).toFixed(0)} ms`;
  return `${(value / 1e6).toFixed(1)} s`;
}

async function checkEvents(page) {
  forebay("set", "db", "mode=write-around");
  const changed = page.locator(".event", { hasText: "mode was changed from write-back to write-around" });
  await changed.waitFor();
  const id = await changed.getAttribute("data-id");
  forebay("events", "ack", id, "--by=night-shift");
  await page.locator(".event", { hasText: "acknowledged by night-shift" }).waitFor();
  console.log("ok: events and acknowledgements come as they happen");
}

async function checkRestart(page, server) {
  server.kill("SIGTERM");
  await stopped(server);
  await until("the page sees that the server is gone", async () => !(await isLive(page)));
  const next = await serve();
  await until("the page finds the next server", () => isLive(page));
  await page.locator(".event", { hasText: "2 times since" }).waitFor();
  check("the acknowledgement is kept", (await page.getByText("acknowledged by night-shift").count()) === 1);
  return next;
}

async function checkKeyboard(page) {
  await page.locator("body").press("Tab");
  for (let step = 0; step < 5; step += 1) {
    if ((await page.evaluate(() => document.activeElement?.dataset?.window)) === "now") break;
    await page.keyboard.press("Tab");
  }
  await page.keyboard.press("Enter");
  await until("Enter chooses a window", async () => (await text(page, "#window-name")) === "now");
  console.log("ok: the keyboard chooses a window");
}

async function checkAxe(page, name) {
  // The policy of the page forbids scripts of others; evaluate() is not bound by it.
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => window.axe.run());
  const serious = violations.filter(({ impact }) => impact === "serious" || impact === "critical");
  check(`${name}: axe finds nothing serious (${violations.length} in all)`, serious.length === 0,
    serious.map(({ id, nodes }) => [id, nodes.map(({ html }) => html).slice(0, 3)]));
}

async function checkLooks(browser, url) {
  const looks = { light: {}, dark: { colorScheme: "dark" }, narrow: { viewport: { width: 360, height: 800 } } };
  for (const [name, options] of Object.entries(looks)) {
    const page = await open(browser, options);
    await page.goto(url);
    await page.locator("#volumes table").waitFor();
    await page.locator("#chart-hits canvas").waitFor();
    const fits = await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth);
    check(`${name}: nothing sticks out`, fits);
    await checkAxe(page, name);
    if (shots) await page.screenshot({ path: path.join(shots, `page-${name}.png`) });
    await page.context().close();
  }
}

async function main() {
  const port = await freePort();
  configure(port);
  let server = await serve();
  const site = `http://127.0.0.1:${port}`;
  const url = `${site}/#token=${TOKEN}`;
  const options = { executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] };
  const browser = await chromium.launch(options);
  try {
    const busy = load(shots ? 45 : 6);
    await checkToken(browser, site);
    const page = await open(browser);
    await page.goto(url);
    await until("the page is live", () => isLive(page));
    check("the token is not in the address", !page.url().includes(TOKEN), page.url());
    if (shots) {
      await new Promise((resolve) => setTimeout(resolve, 35_000));
      await checkLooks(browser, url);
    }
    await stopped(busy);
    forebay("drain");
    await checkNumbers(page, site);
    await checkEvents(page);
    await checkKeyboard(page);
    server = await checkRestart(page, server);
    if (!shots) await checkLooks(browser, url);
    check("no errors", problems.length === 0, problems);
  } finally {
    await browser.close();
    for (const child of started) child.kill("SIGKILL");
    fs.rmSync(place, { recursive: true, force: true });
  }
  console.log("page: all is well");
}

await main();
