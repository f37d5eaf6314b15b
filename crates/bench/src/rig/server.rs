//! Servers as processes: Forebay, and nbdkit for comparison. Each is ended on drop.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::load::{self, Load, Outcome};
use crate::rig::cleanup::Process;
use crate::rig::place::Place;

/// Environment variable with the path of Forebay, set by `forebay bench`.
const FOREBAY: &str = "FOREBAY_BINARY";
/// Time limit for a server to start or stop.
const PATIENCE: Duration = Duration::from_secs(60);
/// Name of the served volume.
pub const VOLUME: &str = "disk";

/// The settings of a Forebay server.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The primary's URI.
    pub primary: String,
    /// Name of the cache file in the place, and its size in bytes.
    pub cache: (String, u64),
    /// The cache mode.
    pub mode: &'static str,
    /// Size of the RAM tier, in bytes.
    pub ram: u64,
    /// Number of threads.
    pub shards: u16,
    /// Additional flags.
    pub more: Vec<String>,
}

impl Setting {
    fn arguments(&self, place: &Place) -> Vec<String> {
        let (cache, size) = &self.cache;
        let mut all = vec![
            "serve".to_owned(),
            format!("--primary={}", self.primary),
            format!("--cache={},size={size}", place.text(cache)),
            format!("--nbd=unix:{}", place.text(&format!("{cache}.nbd"))),
            format!("--control={}", place.text(&format!("{cache}.control"))),
            format!("--state={}", place.text(&format!("{cache}.state"))),
            format!("--name={VOLUME}"),
            format!("--mode={}", self.mode),
            format!("--ram={}", self.ram),
            format!("--shards={}", self.shards),
        ];
        all.extend(self.more.iter().cloned());
        all
    }

    /// The settings as shown in the JSON files and the documents.
    pub fn describe(&self) -> String {
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        let Self { cache: (_, cache), mode, ram, shards, more, .. } = self;
        let more = more.join(" ");
        format!("mode {mode}, cache {}, RAM {}, {shards} shards {more}", mib(*cache), mib(*ram))
    }
}

/// A running server.
pub struct Server {
    process: Process,
    binary: PathBuf,
    /// The socket for clients.
    pub socket: PathBuf,
    /// The name of its export.
    pub export: &'static str,
    control: String,
    /// Time from its start until clients could connect.
    pub started_in: Duration,
}

impl Server {
    /// Starts Forebay and waits until it is ready.
    pub fn forebay(binary: &Path, place: &Place, setting: &Setting) -> anyhow::Result<Self> {
        Self::start(binary, place, &setting.cache.0, &setting.arguments(place), false)
    }

    /// The same with a keeper, which is then the process and starts the server again if it dies.
    pub fn with_keeper(binary: &Path, place: &Place, setting: &Setting) -> anyhow::Result<Self> {
        Self::start(binary, place, &setting.cache.0, &setting.arguments(place), true)
    }

    /// Starts Forebay with a configuration file that has the sockets `cache.nbd` and
    /// `cache.control` in the place, and a volume `disk`.
    pub fn configured(binary: &Path, place: &Place, config: &Path) -> anyhow::Result<Self> {
        Self::of_file(binary, place, config, false)
    }

    /// The same with a keeper.
    pub fn configured_with_keeper(
        binary: &Path,
        place: &Place,
        config: &Path,
    ) -> anyhow::Result<Self> {
        Self::of_file(binary, place, config, true)
    }

    fn of_file(binary: &Path, place: &Place, config: &Path, keeper: bool) -> anyhow::Result<Self> {
        let arguments = ["serve".to_owned(), format!("--config={}", config.display())];
        Self::start(binary, place, "cache", &arguments, keeper)
    }

    fn start(
        binary: &Path,
        place: &Place,
        name: &str,
        arguments: &[String],
        keeper: bool,
    ) -> anyhow::Result<Self> {
        let log = place.path(&format!("{name}.log"));
        let begin = Instant::now();
        let mut command = Command::new(binary);
        command.args(arguments);
        let process = match keeper {
            true => Process::start_keeper(command, &log)?,
            false => Process::start(command, &log, true)?,
        };
        let stdout = process.output()?;
        let mut server = Self {
            process,
            binary: binary.to_owned(),
            socket: place.path(&format!("{name}.nbd")),
            export: VOLUME,
            control: format!("--control={}", place.text(&format!("{name}.control"))),
            started_in: Duration::ZERO,
        };
        let mut ready = String::new();
        BufReader::new(stdout).read_line(&mut ready)?;
        server.started_in = begin.elapsed();
        ensure!(ready.starts_with("ready "), "forebay did not start: {}", server.said());
        Ok(server)
    }

    /// Starts nbdkit with its memory plugin.
    pub fn nbdkit_memory(place: &Place, size: u64) -> anyhow::Result<Self> {
        Self::nbdkit(place, &["memory".to_owned(), format!("size={size}")])
    }

    /// Starts nbdkit over a device or file, which it opens for reading only and does not keep in
    /// the page cache.
    pub fn nbdkit_file(place: &Place, path: &Path) -> anyhow::Result<Self> {
        let file = path.display().to_string();
        Self::nbdkit(
            place,
            &["--readonly".to_owned(), "file".to_owned(), file, "cache=none".to_owned()],
        )
    }

    /// Starts nbdkit with its cache filter in write-through, with a cache of `size` bytes on the
    /// same disk, in front of the export of another server.
    pub fn nbdkit_cache(place: &Place, behind: &Server, size: u64) -> anyhow::Result<Self> {
        let options = [
            "--filter=cache".to_owned(),
            "nbd".to_owned(),
            format!("socket={}", behind.socket.display()),
            format!("export={}", behind.export),
            "cache=writethrough".to_owned(),
            "cache-on-read=true".to_owned(),
            format!("cache-max-size={size}"),
        ];
        Self::nbdkit(place, &options)
    }

    fn nbdkit(place: &Place, plugin: &[String]) -> anyhow::Result<Self> {
        let (socket, log) = (place.path("nbdkit.nbd"), place.path("nbdkit.log"));
        let _ = fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket).args(plugin);
        command.env("TMPDIR", place.path(""));
        let process = Process::start(command, &log, false)?;
        let server = Self {
            process,
            binary: "nbdkit".into(),
            socket: socket.clone(),
            export: "",
            control: String::new(),
            started_in: Duration::ZERO,
        };
        let limit = Instant::now() + PATIENCE;
        while UnixStream::connect(&socket).is_err() {
            ensure!(Instant::now() < limit, "nbdkit did not start: {}", server.said());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// The URI of its export for other clients.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.export, self.socket.display())
    }

    /// Puts a load on it.
    pub fn load(&self, load: &Load, progress: impl FnMut(&Outcome)) -> anyhow::Result<Outcome> {
        let outcome = load::run(&self.socket, self.export, load, progress);
        outcome.with_context(|| format!("{} under load; it said: {}", self.uri(), self.said()))
    }

    /// Runs a command of `forebay` that talks to the server.
    pub fn ask(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = Command::new(&self.binary).args(arguments).arg(&self.control).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "forebay {arguments:?}: {said}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Writes everything dirty to the primary.
    pub fn drain(&self) -> anyhow::Result<()> {
        self.ask(&["drain", VOLUME]).map(drop)
    }

    /// Flushes its export.
    pub fn flush(&self) -> anyhow::Result<()> {
        load::flush(&self.socket, self.export)
    }

    /// Its status.
    pub fn status(&self) -> anyhow::Result<Status> {
        Ok(Status(serde_json::from_str(&self.ask(&["status", "--json"])?)?))
    }

    /// Kills it, as a power failure would.
    pub fn kill(self) {
        self.process.kill();
    }

    /// Stops it in order.
    pub fn stop(self) -> anyhow::Result<()> {
        self.process.stop(PATIENCE)
    }

    /// CPU time used so far by all its threads.
    pub fn cpu(&self) -> Duration {
        self.process.cpu()
    }

    /// Its process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    fn said(&self) -> String {
        self.process.said()
    }
}

/// The output of `forebay status`.
pub struct Status(Value);

impl Status {
    /// A field that is text.
    pub fn text(&self, name: &str) -> &str {
        self.0[name].as_str().unwrap_or_default()
    }

    /// A field that is a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.0[name].as_u64()
    }

    /// The value of a counter or level.
    pub fn counter(&self, name: &str) -> u64 {
        self.0["counters"][name].as_u64().unwrap_or(0)
    }
}

/// The binary of Forebay: the given one, the one that started this process, or the one next to this
/// program.
pub fn binary(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let told = std::env::var_os(FOREBAY).map(PathBuf::from);
    let path = match given.map(Path::to_owned).or(told) {
        Some(path) => path,
        None => std::env::current_exe()?.with_file_name("forebay"),
    };
    ensure!(
        path.exists(),
        "{} does not exist; run `cargo build --release -p forebay`, or give --forebay PATH",
        path.display()
    );
    Ok(path)
}
