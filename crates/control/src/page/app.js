// The page: shows what the server tells, changes nothing. The token comes after # in the address,
// or from the form, and stays in this tab. Texts of the server only ever become text nodes.

const SILENCE_MILLIS = 20_000;
const RETRY_MILLIS = 1_000;
const REFRESH_MILLIS = 10_000;
const EVENTS_MAX = 256;
const POINTS_MAX = 300;
const MIB = 1 << 20;

const state = {
  token: null, window: "5m", volume: null, update: null, statistics: null, lastEvent: 0,
  events: new Map(), live: new Map(), charts: {}, stream: null,
};

const at = (id) => document.getElementById(id);

/** An element with attributes and children; texts become text nodes. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Replaces the content of an element. */
function fill(id, ...children) {
  at(id).replaceChildren(...children);
}

// Numbers as the commands print them.

function size(bytes) {
  const units = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  for (const [unit, name] of units) {
    if (bytes < unit - unit / 20480) continue;
    if (bytes % unit === 0) return `${bytes / unit} ${name}`;
    return `${(bytes / unit).toFixed(1).replace(/\.0$/, "")} ${name}`;
  }
  return `${Math.floor(bytes)} B`;
}

function time(micros) {
  if (micros === null || micros === undefined) return "-";
  if (micros < 99.95) return `${micros.toFixed(1)} us`;
  if (micros < 999.5) return `${micros.toFixed(0)} us`;
  if (micros < 99_950) return `${(micros / 1e3).toFixed(1)} ms`;
  if (micros < 999_500) return `${(micros / 1e3).toFixed(0)} ms`;
  return `${(micros / 1e6).toFixed(1)} s`;
}

const percent = (value) => (value === null || value === undefined ? "-" : `${value.toFixed(1)} %`);
const rate = (value) => value.toFixed(1);
const moment = (seconds) => new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + "Z";

/** A table with a caption for screen readers. */
function table(caption, heads, rows, kind = "") {
  const headRow = make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell, number) =>
    number === 0 ? make("th", { scope: "row" }, cell) : make("td", {}, cell))));
  return make("table", { class: kind, "aria-label": caption },
    make("thead", {}, headRow), make("tbody", {}, ...body));
}

// The server.

/** Asks for JSON. */
async function ask(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  if (answer.status === 401) throw new Refused();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

class Refused extends Error {}

function headers() {
  return state.token ? { Authorization: `Bearer ${state.token}` } : {};
}

/** Follows the stream until it ends; it begins after the last event that was seen. */
async function follow() {
  const stop = new AbortController();
  state.stream = stop;
  let silence = setTimeout(() => stop.abort(), SILENCE_MILLIS);
  try {
    const own = { ...headers(), "Last-Event-ID": String(state.lastEvent) };
    const answer = await fetch("/v1/stream", { headers: own, cache: "no-store", signal: stop.signal });
    if (answer.status === 401) throw new Refused();
    if (!answer.ok) throw new Error(String(answer.status));
    connection("live", false);
    await Promise.all([refresh(), listEvents()]);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let pending = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(silence);
      silence = setTimeout(() => stop.abort(), SILENCE_MILLIS);
      const messages = (pending + value).split("\n\n");
      pending = messages.pop();
      messages.forEach(take);
    }
  } finally {
    clearTimeout(silence);
    stop.abort();
  }
}

/** Takes a message of the stream. */
function take(message) {
  const fields = new Map(message.split("\n").map((line) => {
    const colon = line.indexOf(":");
    return [line.slice(0, colon), line.slice(colon + 1).trimStart()];
  }));
  if (!fields.has("data")) return;
  const data = JSON.parse(fields.get("data"));
  switch (fields.get("event")) {
    case "update": return takeUpdate(data);
    case "event": return takeEvent(data);
    case "acknowledged": return takeAcknowledged(data);
    default:
  }
}

function takeUpdate(update) {
  state.update = update;
  for (const volume of update.statistics.volumes) notePoint(volume);
  if (state.window === "now") state.statistics = update.statistics;
  showUpdate();
}

/** A second of a volume, for the charts of `now`. */
function notePoint(volume) {
  const points = state.live.get(volume.name) ?? [];
  const read = volume.latencies.find((one) => one.operation === "read");
  const primary = volume.primary.find((one) => one.operation === "read");
  points.push({
    seconds: Date.now() / 1000, rates: volume.rates, full_hit_percent: volume.reads.full_hit_percent,
    read_p50_micros: read?.p50_micros ?? null, primary_read_p50_micros: primary?.p50_micros ?? null,
    dirty_bytes: volume.dirty_bytes,
  });
  if (points.length > POINTS_MAX) points.shift();
  state.live.set(volume.name, points);
}

/** An event that happens again has a new number, and replaces the one before. */
function takeEvent(event) {
  state.lastEvent = Math.max(state.lastEvent, event.id);
  // A list that cannot be had now comes with the next connection.
  if (event.count > 1) return void listEvents().catch(() => {});
  state.events.set(event.id, event);
  while (state.events.size > EVENTS_MAX) state.events.delete(state.events.keys().next().value);
  showEvents();
}

function takeAcknowledged({ id, by }) {
  const event = state.events.get(id);
  if (!event) return;
  event.acknowledged[by] = Math.floor(Date.now() / 1000);
  showEvents();
}

async function listEvents() {
  const { events } = await ask("/v1/events");
  state.events = new Map(events.map((event) => [event.id, event]));
  showEvents();
}

/** Gets the statistics of the chosen window. */
async function refresh() {
  const chosen = state.window;
  const statistics = await ask(`/v1/statistics?window=${chosen}`);
  if (chosen !== state.window) return;
  state.statistics = statistics;
  showStatistics();
}

// What is shown.

function connection(text, lost) {
  at("connection").textContent = text;
  at("connection").className = lost ? "lost" : "";
}

function showUpdate() {
  const { status, statistics } = state.update;
  const { cache } = status;
  const bad = status.problems.length > 0 || status.state !== "serving" || status.health !== "good";
  const warn = [...state.events.values()].some((event) =>
    event.severity !== "info" && Object.keys(event.acknowledged).length === 0);
  const health = at("health");
  health.className = `health ${bad ? "error" : warn ? "warning" : "good"}`;
  const sentence = bad
    ? `Something is wrong: ${status.state}, cache ${status.health}.`
    : warn ? "All is well now, but there are events that nobody has acknowledged." : "All is well.";
  if (health.textContent !== sentence) health.textContent = sentence;
  fill("problems", ...status.problems.map((problem) => make("li", {}, problem)));
  const risk = cache.dirty_bytes === 0
    ? "Nothing is at risk: the primaries have everything."
    : `At risk if the cache device is lost: ${size(cache.dirty_bytes)}, ` +
      `the oldest for ${cache.oldest_dirty_seconds.toFixed(1)} s.`;
  at("risk").textContent = `${risk} The limit is ${size(cache.dirty_limit_bytes)}.`;
  showVolumeNames(statistics.volumes.map((volume) => volume.name));
  showDrains(state.update.jobs);
  showSettings(status.settings);
  if (state.window === "now") showStatistics();
}

function showVolumeNames(names) {
  const select = at("volume");
  const shown = [...select.options].map((option) => option.value);
  if (shown.join("\n") === names.join("\n")) return;
  select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (!names.includes(state.volume)) state.volume = names[0] ?? null;
  select.value = state.volume ?? "";
}

function showStatistics() {
  const all = state.statistics;
  if (!all) return;
  const every = all.resolution_seconds > 0 ? `, a snapshot every ${all.resolution_seconds.toFixed(0)} s` : "";
  at("length").textContent = `The last ${all.seconds.toFixed(0)} s${every}.`;
  at("window-name").textContent = all.window;
  const heads = ["Volume", "Reads/s", "Writes/s", "Read/s", "Written/s", "Hits", "Read p50, p99",
    "Primary p50, p99", "Write p50, p99", "Dirty, limit"];
  const rows = all.volumes.map((volume) => {
    const of = (list, operation) => list.find((one) => one.operation === operation);
    const read = of(volume.latencies, "read");
    const write = of(volume.latencies, "write");
    const primary = of(volume.primary, "read");
    const times = (one) => (one ? `${time(one.p50_micros)}, ${time(one.p99_micros)}` : "-");
    const { rates } = volume;
    return [volume.name, rate(rates.reads), rate(rates.writes), size(rates.read_bytes),
      size(rates.written_bytes), percent(volume.reads.full_hit_percent), times(read), times(primary),
      times(write), `${size(volume.dirty_bytes)}, ${size(volume.dirty_limit_bytes)}`];
  });
  fill("volumes", table("Volumes in this window", heads, rows));
  at("wear").textContent = `Wear: ${size(all.cache.written_bytes)} written to the cache device, ` +
    `${size(Math.floor(all.cache.written_bytes_per_day))} per day at this rate.`;
  showCharts();
}

function showEvents() {
  const events = [...state.events.values()].reverse();
  if (events.length === 0) return fill("events", make("p", {}, "No events."));
  fill("events", ...events.map((event) => {
    const by = Object.keys(event.acknowledged);
    const again = event.count > 1 ? `, ${event.count} times since ${moment(event.first_unix_seconds)}` : "";
    const whose = event.volume ? `, volume ${event.volume}` : "";
    const meta = `${event.id}: ${moment(event.last_unix_seconds)}, ${event.severity}${whose}, ${event.kind}${again}`;
    const parts = [make("p", { class: "meta" }, meta), make("p", {}, event.text)];
    if (event.remedy) parts.push(make("p", {}, event.remedy));
    parts.push(by.length > 0
      ? make("p", { class: "meta" }, `acknowledged by ${by.join(", ")}`)
      : make("p", { class: "meta" }, "acknowledge: ", make("code", {}, `forebay events ack ${event.id}`)));
    const seen = by.length > 0 ? " is-seen" : "";
    return make("article", { class: `event is-${event.severity}${seen}`, "data-id": event.id }, ...parts);
  }));
}

function showDrains(jobs) {
  if (jobs.length === 0) return fill("drains", make("p", {}, "No drains."));
  const rows = [...jobs].reverse().map((job) => {
    const done = job.total_bytes - job.remaining_bytes;
    const bar = make("progress", {
      max: Math.max(job.total_bytes, 1), value: job.total_bytes === 0 ? 1 : done,
      "aria-label": `Progress of drain ${job.id}`,
    });
    return [String(job.id), job.volume ?? "all", job.state, bar, size(job.remaining_bytes),
      `${job.seconds.toFixed(0)} s`, job.error ?? ""];
  });
  fill("drains", table("Drains", ["Job", "Volume", "State", "Progress", "Left", "Time", "Error"], rows, "text"));
}

function showSettings(settings) {
  const rows = settings.map((one) => [one.name, one.volume ?? "server", one.value,
    one.configured === null || one.configured === undefined ? "" : `configured ${one.configured}`]);
  const text = JSON.stringify(rows);
  if (at("settings").dataset.shown === text) return;
  at("settings").dataset.shown = text;
  fill("settings", table("Settings", ["Setting", "Of", "Value", "Changed"], rows, "text"));
}

// Charts.

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const CHARTS = {
  hits: { max: 100, series: [["hits", "--accent", (point) => point.full_hit_percent]] },
  latency: {
    log: true,
    series: [
      ["clients", "--accent", (point) => millis(point.read_p50_micros)],
      ["primary", "--warning", (point) => millis(point.primary_read_p50_micros)],
    ],
  },
  dirty: {
    series: [
      ["dirty", "--accent", (point) => point.dirty_bytes / MIB],
      ["limit", "--error", (_, volume) => volume.dirty_limit_bytes / MIB],
    ],
  },
  rates: {
    series: [
      ["reads", "--accent", (point) => point.rates.reads],
      ["writes", "--warning", (point) => point.rates.writes],
    ],
  },
};

/** The time of day, as precise as the window needs. */
function clock(seconds) {
  const precise = state.window === "now" || state.window === "5m";
  const parts = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Date(seconds * 1000).toLocaleTimeString([], precise ? { ...parts, second: "2-digit" } : parts);
}

const millis = (micros) => (micros === null || micros === undefined ? null : micros / 1000);

function points(volume) {
  if (state.window === "now") return state.live.get(volume.name) ?? [];
  const now = Date.now() / 1000;
  return (volume.points ?? []).map((point) => ({ ...point, seconds: now - point.seconds_ago }));
}

function showCharts() {
  const volume = state.statistics?.volumes.find((one) => one.name === state.volume);
  if (!volume) return;
  const course = points(volume);
  for (const [name, chart] of Object.entries(CHARTS)) {
    const data = [course.map((point) => point.seconds),
      ...chart.series.map(([, , of]) => course.map((point) => of(point, volume) ?? null))];
    draw(name, data, chart);
  }
}

function draw(name, data, { series, max, log }) {
  const place = at(`chart-${name}`);
  const width = Math.max(place.clientWidth, 240);
  let chart = state.charts[name];
  if (!chart) {
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
    chart = new uPlot({
      width, height: 180, cursor: { drag: { setScale: false } },
      scales: { y: log ? { distr: 3 } : { range: (_, low, high) => [0, max ?? Math.max(high ?? 0, 0.001) * 1.1] } },
      axes: [{ ...axis, values: (_, splits) => splits.map(clock), space: 80 }, { ...axis, size: 56 }],
      series: [{ value: (_, seconds) => (seconds === null ? "-" : clock(seconds)) }, ...series.map(([label, stroke]) => ({ label, stroke: color(stroke), width: 2, spanGaps: false }))],
    }, data, place);
    state.charts[name] = chart;
    return;
  }
  if (chart.width !== width) chart.setSize({ width, height: 180 });
  chart.setData(data);
}

/** Draws the charts again: the colors or the volume have changed. */
function redraw() {
  for (const chart of Object.values(state.charts)) chart.destroy();
  state.charts = {};
  showCharts();
}

// What the reader does.

function choose(window) {
  state.window = window;
  for (const button of document.querySelectorAll("[data-window]")) {
    button.setAttribute("aria-pressed", String(button.dataset.window === window));
  }
  if (window === "now" && state.update) {
    state.statistics = state.update.statistics;
    showStatistics();
  } else {
    refresh().catch(() => {});
  }
}

/** Asks for the token. */
function enter(error) {
  at("content").hidden = true;
  at("entry").hidden = false;
  at("entry-error").textContent = error;
  at("entry-token").focus();
  connection("no token", false);
}

function readToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return given ?? sessionStorage.getItem("token");
}

async function run() {
  at("entry").hidden = true;
  at("content").hidden = false;
  for (;;) {
    try {
      await follow();
      connection("the server has gone; looking for it", true);
    } catch (error) {
      if (error instanceof Refused) {
        sessionStorage.removeItem("token");
        return enter(state.token ? "That is not the token." : "");
      }
      connection("the server does not answer; looking for it", true);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MILLIS));
  }
}

at("entry-form").addEventListener("submit", (submit) => {
  submit.preventDefault();
  state.token = at("entry-token").value.trim();
  sessionStorage.setItem("token", state.token);
  at("entry-token").value = "";
  run();
});
for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => choose(button.dataset.window));
}
at("volume").addEventListener("change", () => {
  state.volume = at("volume").value;
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", showCharts);
setInterval(() => {
  if (state.window !== "now" && state.update) refresh().catch(() => {});
}, REFRESH_MILLIS);
document.querySelector('[data-window="5m"]').setAttribute("aria-pressed", "true");
for (const button of document.querySelectorAll("[data-window]")) {
  if (!button.hasAttribute("aria-pressed")) button.setAttribute("aria-pressed", "false");
}
state.token = readToken();
run();
