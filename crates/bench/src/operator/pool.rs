//! A server process over a cache and some volumes: its configuration, starts that must succeed or
//! be refused, the operator's commands, and the server's messages.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::device::Device;
use super::volume::Volume;
use crate::rig::cleanup::{self, Process};
use crate::rig::place::Place;
use forebay_block::testing::Numbers;
use forebay_device::STRAGGLE_MAX;
use rustix::process::Signal;

/// Time limit for a start, a stop or a command. A stop with a drain gives up after half a minute
/// without progress.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The configuration of the whole cache.
pub struct Setup {
    text: String,
    /// Whether the server has a keeper, so that it can hand over.
    kept: bool,
    /// The device of the cache.
    device: Device,
    /// Number of devices so far.
    devices: u64,
    /// Whether devices may be disks.
    disks: bool,
    /// Whether the device is retired: the next start or configuration makes a new cache.
    retired: bool,
}

impl Setup {
    /// A random configuration.
    pub fn any(numbers: &mut Numbers, place: &Place, disks: bool) -> anyhow::Result<Self> {
        let mut pick =
            |choices: &[&'static str]| choices[numbers.below(choices.len() as u64) as usize];
        let size = pick(&["16MiB", "24MiB", "48MiB"]);
        let eviction = pick(&["frequency", "lru", "fifo"]);
        let content = pick(&["rewrite", "similar", "independent"]);
        let dirty = pick(&["20%", "50%", "80%"]);
        let depth = pick(&["200ms", "2s", "30s", "1h"]);
        let compress = pick(&["true", "true", "false"]);
        let ram = pick(&["1MiB", "4MiB", "16MiB"]);
        let shards = pick(&["1", "2", "2", "3"]);
        let device = Device::new(place, 0, disks && pick(&["file", "disk"]) == "disk")?;
        let text = format!(
            "[cache]\npath = \"{}\"\nsize = \"{size}\"\nstate_dir = \"{}\"\n\
             eviction = \"{eviction}\"\ncontent = \"{content}\"\ndirty_limit = \"{dirty}\"\n\
             write_cache_depth = \"{depth}\"\ncompress = {compress}\n\
             [memory]\nram = \"{ram}\"\n\
             [control]\nsocket = \"{}\"\n\
             [server]\nshards = {shards}\npatience = \"2s\"\nnbd = [\"unix:{}\"]\n",
            device.path.display(),
            place.text("state"),
            place.text("control.sock"),
            place.text("nbd.sock"),
        );
        let kept = numbers.below(2) == 0;
        Ok(Self { text, kept, device, devices: 1, disks, retired: false })
    }

    /// The configuration in one line.
    pub fn describe(&self) -> String {
        let lines = self.text.lines().filter(|line| line.contains(" = ") && !line.contains('/'));
        let lines = lines.map(|line| line.replace(" = ", "=").replace('"', ""));
        let keeper = self.kept.then(|| "with a keeper".to_owned());
        lines.chain(keeper).collect::<Vec<_>>().join(" ")
    }
}

/// The cache and its volumes, and their server while it runs.
pub struct Pool {
    // Dropped before the things that it uses.
    server: Option<Process>,
    /// The volumes, configured or not.
    pub volumes: Vec<Volume>,
    /// The configuration of the cache.
    setup: Mutex<Setup>,
    /// Whether changes of the last server may still arrive when the next one starts: it was killed,
    /// or a connection broke shortly before it ended.
    killed: bool,
    /// When the server was ready.
    since: Instant,
    /// Number of its predecessors that were killed under the same keeper.
    deaths: usize,
    binary: PathBuf,
    /// The directory for everything.
    pub place: Place,
}

/// The result of a command.
pub struct Said {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

impl Pool {
    /// A pool whose server is not started.
    pub fn new(binary: PathBuf, place: Place, setup: Setup, volumes: Vec<Volume>) -> Self {
        let (setup, since) = (Mutex::new(setup), Instant::now());
        Self { server: None, volumes, setup, killed: false, since, deaths: 0, binary, place }
    }

    /// The socket for clients.
    pub fn socket(&self) -> PathBuf {
        self.place.path("nbd.sock")
    }

    /// The configured volumes.
    pub fn served(&self) -> impl Iterator<Item = &Volume> {
        self.volumes.iter().filter(|volume| volume.served)
    }

    /// The path of the configuration that the server was started with.
    pub fn configuration(&self) -> String {
        self.place.text("forebay.toml")
    }

    /// The path of the cache device.
    pub fn cache(&self) -> PathBuf {
        self.setup().device.path.clone()
    }

    /// Whether the cache device is retired.
    pub fn is_retired(&self) -> bool {
        self.setup().retired
    }

    /// Notes whether the cache device is retired.
    pub fn set_retired(&self, retired: bool) {
        self.setup().retired = retired;
    }

    /// Puts a blank device beside that of the cache, which becomes that of the configuration.
    /// Returns the path of the configuration, and the old device.
    pub fn exchange(&self, numbers: &mut Numbers) -> anyhow::Result<(String, Device)> {
        let mut setup = self.setup();
        let is_disk = setup.disks && numbers.below(2) == 0;
        let new = Device::new(&self.place, setup.devices, is_disk)?;
        setup.devices += 1;
        let path = format!("\"{}\"", new.path.display());
        let old = std::mem::replace(&mut setup.device, new);
        drop(setup);
        Ok((self.reconfigure("path", &path)?, old))
    }

    fn setup(&self) -> MutexGuard<'_, Setup> {
        self.setup.lock().expect("nobody panics with it")
    }

    /// Whether the server has a keeper.
    pub fn is_kept(&self) -> bool {
        self.setup().kept
    }

    /// Writes the configuration, with these tables of volumes; returns its path.
    pub fn configure(&self, volumes: &str) -> anyhow::Result<String> {
        let config = self.configuration();
        fs::write(&config, self.setup().text.clone() + volumes)?;
        Ok(config)
    }

    /// Gives a setting of the cache another value in the configuration; returns its path.
    pub fn reconfigure(&self, key: &str, value: &str) -> anyhow::Result<String> {
        let config = self.configuration();
        let now = fs::read_to_string(&config)?;
        let mut setup = self.setup();
        let volumes = now.strip_prefix(&setup.text).context("it is ours")?.to_owned();
        let start = format!("{key} = ");
        let line = |line: &str| match line.starts_with(&start) {
            true => format!("{start}{value}\n"),
            false => format!("{line}\n"),
        };
        setup.text = setup.text.lines().map(line).collect();
        drop(setup);
        self.configure(&volumes)
    }

    fn command(&self, more: &[String]) -> anyhow::Result<Command> {
        let config = self.configure(&self.served().map(Volume::table).collect::<String>())?;
        let mut command = Command::new(&self.binary);
        command.arg("serve").arg("--config").arg(config).args(more);
        Ok(command)
    }

    /// Starts the server. Returns the time that it took, or its message if it refused.
    pub fn try_start(&mut self, more: &[String]) -> anyhow::Result<Result<Duration, String>> {
        ensure!(self.server.is_none(), "there is a server already");
        let log = self.place.path("server.log");
        let begin = Instant::now();
        let command = self.command(more)?;
        let process = match self.is_kept() {
            true => Process::start_keeper(command, &log)?,
            false => Process::start(command, &log, true)?,
        };
        let mut out = BufReader::new(process.output()?);
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut ready = String::new();
            let _ = out.read_line(&mut ready);
            let _ = send.send(ready);
        });
        let ready = receive.recv_timeout(PATIENCE).with_context(|| {
            format!("no start within {} s: {}", PATIENCE.as_secs(), process.said())
        })?;
        if ready.starts_with("ready ") {
            self.server = Some(process);
            (self.deaths, self.since) = (0, Instant::now());
            self.hold();
            return Ok(Ok(begin.elapsed()));
        }
        let status = process.wait(PATIENCE)?;
        let said = fs::read_to_string(&log).unwrap_or_default();
        let last = said.lines().last().unwrap_or_default().to_owned();
        ensure!(
            status.code() == Some(1) && last.starts_with("forebay: "),
            "a start ended with {status}, and not with a reason: {}",
            tail(&said)
        );
        Ok(Err(last))
    }

    /// Notes that changes of the volumes wait if the server before this one was killed.
    pub fn hold(&self) {
        let held = self.volumes.iter().filter(|one| self.killed && one.san().is_some());
        held.for_each(|volume| volume.notice.hold());
    }

    /// Kills the server. Returns the time until another one serves, which its keeper has started.
    pub fn die(&mut self) -> anyhow::Result<Duration> {
        let process = |status: &Value| status["pid"].as_u64().context("a status has a pid");
        let (before, begin) = (process(&self.status()?)?, Instant::now());
        cleanup::send(u32::try_from(before)?, Signal::KILL)?;
        (self.killed, self.deaths) = (true, self.deaths + 1);
        while self.status().and_then(|status| process(&status)).map_or(true, |now| now == before) {
            ensure!(begin.elapsed() < PATIENCE, "nothing serves after a death: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        self.since = Instant::now();
        Ok(begin.elapsed())
    }

    /// Starts the server, which must succeed.
    pub fn start(&mut self, more: &[String]) -> anyhow::Result<Duration> {
        match self.try_start(more)? {
            Ok(time) => Ok(time),
            Err(said) => bail!("a start was refused: {said}"),
        }
    }

    /// Starts the server, which must refuse with a message that contains one of these words.
    pub fn refuse(&mut self, words: &[&str]) -> anyhow::Result<String> {
        match self.try_start(&[])? {
            Ok(_) => bail!("a start was not refused, with a word of {words:?}"),
            Err(said) => {
                ensure!(
                    words.iter().all(|word| said.contains(word)),
                    "a start was refused without a word of {words:?}: {said}"
                );
                Ok(said)
            }
        }
    }

    /// Starts the server and kills it `after` this time, perhaps during recovery.
    pub fn start_and_kill(&mut self, after: Duration) -> anyhow::Result<()> {
        let log = self.place.path("server.log");
        let process = Process::start(self.command(&[])?, &log, false)?;
        std::thread::sleep(after);
        process.kill();
        self.killed = true;
        Ok(())
    }

    /// Kills the server.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.killed = true;
        self.server.take().context("there is a server")?.kill();
        Ok(())
    }

    /// Waits for the server to exit after it was told to stop.
    pub fn ended(&mut self) -> anyhow::Result<()> {
        let server = self.server.take().context("there is a server")?;
        let status = server.wait(PATIENCE)?;
        ensure!(status.success(), "the server stopped with {status}: {}", server.said());
        self.killed = self.has_list()?;
        Ok(())
    }

    /// Whether the server that ended has left a list of primaries, for which the next one waits.
    fn has_list(&self) -> anyhow::Result<bool> {
        let mut files = fs::read_dir(self.place.path("state"))?.flatten();
        Ok(files.any(|file| file.file_name().to_string_lossy().ends_with(".uses")))
    }

    /// Whether the server waits for changes of one that was killed.
    pub fn waits(&self) -> bool {
        self.killed && self.since.elapsed() < STRAGGLE_MAX
    }

    /// Checks that the server is running as expected.
    pub fn is_well(&self) -> anyhow::Result<()> {
        let server = self.server.as_ref().context("there is a server")?;
        if let Some(status) = server.ended()? {
            bail!("the server ended by itself, with {status}: {}", self.log());
        }
        // By its keeper, so that nobody has noticed.
        let deaths = fs::read_to_string(self.place.path("server.log"))?;
        let deaths = deaths.matches("is started again").count();
        ensure!(deaths == self.deaths, "the server died: {}", self.log());
        Ok(())
    }

    /// The last lines of the server's log.
    pub fn log(&self) -> String {
        tail(&fs::read_to_string(self.place.path("server.log")).unwrap_or_default())
    }

    /// Runs a command of `forebay` to completion.
    pub fn run(&self, arguments: &[&str]) -> anyhow::Result<Said> {
        run(Command::new(&self.binary).args(arguments), &self.place)
            .with_context(|| format!("forebay {arguments:?}"))
    }

    /// Runs a command that talks to the server.
    pub fn ask(&self, arguments: &[&str]) -> anyhow::Result<Said> {
        let control = format!("--control={}", self.place.text("control.sock"));
        self.run(&[arguments, &[control.as_str()]].concat())
    }

    /// Runs a command that talks to the server and must succeed.
    pub fn must(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let said = self.ask(arguments)?;
        ensure!(said.status.success(), "forebay {arguments:?} failed: {}", said.err.trim());
        Ok(said.out)
    }

    /// The server's status.
    pub fn status(&self) -> anyhow::Result<Value> {
        let out = self.must(&["status", "--json"])?;
        serde_json::from_str(&out).context("the status as JSON")
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n  ")
}

/// Runs a command to completion, within the time limit.
fn run(command: &mut Command, place: &Place) -> anyhow::Result<Said> {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let paths = ["out", "err"].map(|name| place.path(&format!("command-{number}.{name}")));
    let [out, err] = [File::create(&paths[0])?, File::create(&paths[1])?];
    let mut child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn()?;
    let limit = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > limit {
            child.kill()?;
            child.wait()?;
            bail!("no end within {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let [out, err] = paths.map(|path| take(&path));
    Ok(Said { status, out, err })
}

fn take(path: &Path) -> String {
    let text = fs::read(path).unwrap_or_default();
    let _ = fs::remove_file(path);
    String::from_utf8_lossy(&text).into_owned()
}
