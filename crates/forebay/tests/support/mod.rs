//! A server as a process, on files in a directory of its own, and the clients that use it.

#![allow(dead_code, unused_imports)] // each test takes what it needs

pub mod nbd;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub use forebay_block::testing::noise;

/// The variable without which a server has a keeper.
const NO_KEEPER: &str = "FOREBAY_NO_KEEPER";
/// How long a server may take to start or to stop.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something has happened.
///
/// # Panics
/// If it does not happen in time.
pub fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(30);
    while !happened() {
        assert!(Instant::now() < limit, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A directory for a test, and one with a short name for its sockets, whose paths have a limit;
/// both are removed when dropped.
pub struct Place {
    directory: PathBuf,
    sockets: PathBuf,
}

impl Place {
    /// An empty directory.
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("forebay-serve-{}-{number}", std::process::id());
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&name);
        let sockets = std::env::temp_dir().join(&name);
        for made in [&directory, &sockets] {
            let _ = fs::remove_dir_all(made);
            fs::create_dir_all(made).expect("a directory can be made");
        }
        Self { directory, sockets }
    }

    /// A directory with a primary of 64 MiB, and the arguments to serve it with a cache of 32 MiB.
    pub fn with_disk() -> (Self, Vec<String>) {
        let place = Self::new();
        place.make("disk.img", 64 << 20);
        let arguments = place.serve("disk.img", "cache.img,size=32MiB");
        (place, arguments)
    }

    /// Writes a configuration of `disk.img` with more keys of the cache; returns its path.
    pub fn configure(&self, cache: &str) -> String {
        let text = format!(
            "[cache]\npath = {:?}\nsize = \"32MiB\"\nstate_dir = {:?}\n{cache}\n\
             [memory]\nram = \"4MiB\"\n[server]\nnbd = [\"unix:{}\"]\n\
             [control]\nsocket = {:?}\n[[volume]]\nname = \"disk\"\nprimary = {:?}\n",
            self.text("cache.img"),
            self.text("state"),
            self.text("nbd.sock"),
            self.text("control.sock"),
            self.text("disk.img"),
        );
        let config = self.text("forebay.toml");
        fs::write(&config, text).expect("it can be written");
        config
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        let place = if name.ends_with(".sock") { &self.sockets } else { &self.directory };
        place.join(name)
    }

    /// The same as text.
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    /// Makes a file of `size` zero bytes.
    pub fn make(&self, name: &str, size: u64) {
        let file = fs::File::create(self.path(name)).expect("a file can be made");
        file.set_len(size).expect("it can be so long");
    }

    /// The arguments of a server of `primary` with `cache`, both named in this directory.
    pub fn serve(&self, primary: &str, cache: &str) -> Vec<String> {
        vec![
            "serve".to_owned(),
            format!("--primary={}", self.text(primary)),
            format!("--cache={}", self.text(cache)),
            format!("--nbd=unix:{}", self.text("nbd.sock")),
            format!("--control={}", self.text("control.sock")),
            format!("--state={}", self.text("state")),
            "--shards=2".to_owned(),
            "--ram=4MiB".to_owned(),
            "--name=disk".to_owned(),
        ]
    }

    /// Starts a server that must become ready.
    pub fn start(&self, arguments: &[String]) -> Server {
        Server::start(arguments, self.text("control.sock"))
    }

    /// Starts a server with a keeper that must become ready.
    pub fn start_kept(&self, arguments: &[String]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        Server::spawn(command.args(arguments), self.text("control.sock"))
    }

    /// The same with a log that goes there.
    pub fn start_kept_logging(&self, arguments: &[String], log: Stdio) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        Server::spawn_logging(command.args(arguments), log, self.text("control.sock"))
    }

    /// Runs a server that must refuse to start; returns its output.
    pub fn refuse(&self, arguments: &[String]) -> String {
        // A server that starts anyway must fail the test instead of blocking it.
        let mut command = Command::new("timeout");
        command.arg("60").arg(env!("CARGO_BIN_EXE_forebay")).args(arguments);
        let output = command.output().expect("the binary runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "it must not be ready");
        let last = said.lines().last().unwrap_or_default().to_owned();
        assert!(last.starts_with("forebay: "), "the error is the last line: {said}");
        last
    }

    /// Creates a self-signed certificate for this host; returns the files of the certificate and
    /// its key. Clients look for theirs in this directory.
    pub fn certificate(&self) -> (String, String) {
        let (cert, key) = (self.text("server-cert.pem"), self.text("server-key.pem"));
        let made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
                    -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1";
        let mut arguments: Vec<_> = made.split_whitespace().collect();
        arguments.extend(["-keyout", &key, "-out", &cert]);
        client("openssl", &arguments);
        fs::copy(&cert, self.path("ca-cert.pem")).expect("it is there");
        (cert, key)
    }

    /// The URI of the volume for NBD clients.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.text("nbd.sock"))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
        let _ = fs::remove_dir_all(&self.sockets);
    }
}

/// Runs the binary to its end.
pub fn forebay<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(arguments).output().expect("the binary runs")
}

/// A running server; killed when dropped.
pub struct Server {
    child: Child,
    control: String,
    log: Arc<Mutex<String>>,
    /// The line that it printed when ready.
    pub ready: String,
}

impl Server {
    /// Value and origin of a setting, as `forebay config` shows them.
    pub fn shown(&self, volume: Option<&str>, name: &str) -> (String, String) {
        let all: serde_json::Value =
            serde_json::from_str(&self.ask(&["config", "--json"])).expect("it prints JSON");
        let is = |one: &&serde_json::Value| one["name"] == name && one["volume"].as_str() == volume;
        let one = all.as_array().expect("a list").iter().find(is).expect("it is shown");
        let text = |key: &str| one[key].as_str().expect("a text").to_owned();
        (text("value"), text("from"))
    }

    /// Starts one without a keeper, so that its process is the server's.
    fn start(arguments: &[String], control: String) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        Self::spawn(command.args(arguments).env(NO_KEEPER, "1"), control)
    }

    fn spawn(command: &mut Command, control: String) -> Self {
        Self::spawn_logging(command, Stdio::piped(), control)
    }

    fn spawn_logging(command: &mut Command, log: Stdio, control: String) -> Self {
        command.stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().expect("the binary runs");
        let stdout = child.stdout.take().expect("it was asked for");
        let mut ready = String::new();
        BufReader::new(stdout).read_line(&mut ready).expect("it can be read");
        if !ready.starts_with("ready ") {
            let mut said = String::new();
            let mut stderr = child.stderr.take().expect("it was asked for");
            stderr.read_to_string(&mut said).expect("it can be read");
            panic!("{command:?} did not start: {said}");
        }
        // Its log must not fill the pipe.
        let log = Arc::<Mutex<String>>::default();
        if let Some(stderr) = child.stderr.take() {
            let kept = Arc::clone(&log);
            std::thread::spawn(move || {
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    kept.lock().expect("nobody panics with it").push_str(&(line + "\n"));
                }
            });
        }
        Self { child, control, log, ready }
    }

    /// Starts a server and kills it soon, so that it may still be recovering.
    pub fn start_and_kill(arguments: &[String], after: Duration) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(arguments).env(NO_KEEPER, "1").stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the binary runs");
        std::thread::sleep(after);
        child.kill().expect("it is our child");
        child.wait().expect("it is our child");
    }

    /// Runs a command that talks to the server, which must succeed; returns its output.
    pub fn ask(&self, arguments: &[&str]) -> String {
        let control = format!("--control={}", self.control);
        let output = forebay(&[arguments, &[control.as_str()]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {said}");
        String::from_utf8(output.stdout).expect("it prints text")
    }

    /// The log so far, once it contains `text`.
    pub fn log(&self, text: &str) -> String {
        let limit = Instant::now() + PATIENCE;
        loop {
            let log = self.log.lock().expect("nobody panics with it").clone();
            if log.contains(text) {
                return log;
            }
            assert!(Instant::now() < limit, "{text:?} is not in the log: {log}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The process id; with a keeper, that of the keeper.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the server of a keeper, and waits until it is gone: until then it may take a client.
    /// Returns its process id.
    pub fn kill_kept(&self) -> u32 {
        let served = children(self.child.id());
        let &[pid] = &served[..] else { panic!("a keeper has one server: {served:?}") };
        send("KILL", pid);
        until("the server is gone", || !children(self.child.id()).contains(&pid));
        pid
    }

    /// The port of its first TCP endpoint.
    pub fn port(&self) -> u16 {
        let place = self.ready.split_whitespace().find_map(|word| word.strip_prefix("tcp:"));
        let port = place.and_then(|place| place.rsplit_once(':')).map(|(_, port)| port.parse());
        port.expect("it has one").expect("it is a number")
    }

    /// The argument that tells a command which server to talk to.
    pub fn control_argument(&self) -> String {
        format!("--control={}", self.control)
    }

    /// Its status.
    pub fn status(&self) -> serde_json::Value {
        serde_json::from_str(&self.ask(&["status", "--json"])).expect("it prints JSON")
    }

    /// Waits until all that was cached is loaded. Before, a clean block counts as not cached.
    pub fn wait_until_loaded(&self) {
        until("all is loaded", || self.status()["counters"]["unloaded_segments"] == 0);
    }

    /// Sends a signal.
    pub fn signal(&self, name: &str) {
        send(name, self.child.id());
    }

    /// Stops it in order, with these flags, and waits for its end.
    pub fn stop(self, flags: &[&str]) {
        self.ask(&[&["stop"], flags].concat());
        assert_eq!(self.wait(), Some(0));
    }

    /// Waits for its end; returns the exit code, or `None` if a signal ended it.
    pub fn wait(mut self) -> Option<i32> {
        let limit = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return status.code();
            }
            assert!(Instant::now() < limit, "the server must stop");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Kills it, as in a crash.
    pub fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it is our child");
    }
}

/// Sends a signal to a process.
fn send(name: &str, pid: u32) {
    let sent = Command::new("kill").args(["-s", name, &pid.to_string()]).status();
    assert!(sent.expect("kill runs").success());
}

/// The children of a process with one thread that starts them.
fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

impl Drop for Server {
    fn drop(&mut self) {
        let kept = children(self.child.id());
        let _ = self.child.kill();
        kept.into_iter().for_each(|pid| send("KILL", pid));
        let _ = self.child.wait();
    }
}

/// Runs a client, which must succeed; returns its output.
pub fn client(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program} (make setup): {error}"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {said}{printed}");
    printed
}
