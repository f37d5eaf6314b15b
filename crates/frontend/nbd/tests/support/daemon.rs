//! A small server for real clients: one blocking thread for each connection, devices in memory.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::thread;

use forebay_block::{Outbox, Session};
use forebay_frontend_nbd::NbdServer;

use super::Memory;

type Devices = Arc<Vec<Mutex<Memory>>>;

/// A running server. Its threads end with the test process.
pub struct Daemon {
    pub directory: TempDir,
    pub socket: PathBuf,
    pub port: u16,
    pub devices: Devices,
}

impl Daemon {
    /// Serves on a Unix socket and on a port of the loopback interface.
    pub fn start(server: &NbdServer) -> Self {
        let directory = TempDir::new();
        let socket = directory.0.join("nbd.sock");
        let unix = UnixListener::bind(&socket).expect("a socket in a new directory");
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = tcp.local_addr().expect("it is bound").port();
        let sizes = server.exports().iter().map(|export| export.info.size);
        let devices: Devices = Arc::new(sizes.map(|size| Mutex::new(Memory::new(size))).collect());
        let (s, d) = (server.clone(), Arc::clone(&devices));
        thread::spawn(move || {
            for stream in unix.incoming().map_while(Result::ok) {
                let (s, d) = (s.clone(), Arc::clone(&d));
                thread::spawn(move || serve::<UnixStream>(stream, s.session(), &d));
            }
        });
        let (s, d) = (server.clone(), Arc::clone(&devices));
        thread::spawn(move || {
            for stream in tcp.incoming().map_while(Result::ok) {
                let (s, d) = (s.clone(), Arc::clone(&d));
                thread::spawn(move || serve::<TcpStream>(stream, s.session(), &d));
            }
        });
        Self { directory, socket, port, devices }
    }

    /// The URI of an export on the Unix socket.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.0.join(name)
    }
}

/// An event loop for one connection.
fn serve<S: Read + Write>(mut stream: S, mut session: Box<dyn Session>, devices: &Devices) {
    let mut out = Outbox::default();
    let (mut buffer, mut filled) = (vec![0; 256 << 10], 0);
    session.start(&mut out);
    loop {
        let used = session.receive(&buffer[..filled], &mut out);
        buffer.copy_within(used..filled, 0);
        filled -= used;
        let ios = std::mem::take(&mut out.ios);
        let idle = ios.is_empty() && used == 0 && !session.next_turn();
        for (endpoint, io) in ios {
            let done = devices[endpoint.0].lock().expect("no test panics here").run(io);
            session.complete(done, &mut out);
        }
        loop {
            session.speak(&mut out);
            if stream.write_all(&out.bytes).is_err() || out.close {
                return;
            }
            out.bytes.clear();
            if !session.has_more_to_say() {
                break;
            }
        }
        if idle {
            match stream.read(&mut buffer[filled..]) {
                Ok(0) | Err(_) => return,
                Ok(more) => filled += more,
            }
        }
    }
}

/// A directory that is removed on drop.
pub struct TempDir(pub PathBuf);

impl TempDir {
    pub fn new() -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("forebay-nbd-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether all `tools` are installed. A test with missing tools prints that and passes, unless
/// `FOREBAY_TEST_STRICT=1`.
pub fn have(tools: &[&str]) -> bool {
    for tool in tools {
        let found = Path::new("/usr/bin").join(tool).exists()
            || Command::new(tool).arg("--version").output().is_ok();
        if !found {
            assert!(
                std::env::var_os("FOREBAY_TEST_STRICT").is_none_or(|v| v != "1"),
                "{tool} is not installed, and FOREBAY_TEST_STRICT=1"
            );
            eprintln!("skipped: {tool} is not installed");
            return false;
        }
    }
    true
}

/// Runs a client. The system's Python comes first in the path, since libnbd's module belongs to it.
pub fn run(tool: &str, arguments: &[&str]) -> Output {
    let path = std::env::var("PATH").unwrap_or_default();
    Command::new(tool)
        .args(arguments)
        .env("PATH", format!("/usr/bin:/bin:{path}"))
        .output()
        .expect("the client starts")
}

/// Runs a client that must succeed; returns its output.
pub fn succeed(tool: &str, arguments: &[&str]) -> String {
    let output = run(tool, arguments);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {arguments:?}: {}\n{said}{errors}", output.status);
    said
}

/// Runs a client that must fail; returns its error output.
pub fn fail(tool: &str, arguments: &[&str]) -> String {
    let output = run(tool, arguments);
    assert!(!output.status.success(), "{tool} {arguments:?} succeeded");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Creates certificates in `directory` with the names that GnuTLS clients expect: an authority, and
/// a server and a client signed by it, both for `localhost`.
pub fn make_certificates(directory: &Path) {
    let script = include_str!("certificates.sh");
    let output = Command::new("sh").args(["-c", script]).current_dir(directory).output();
    let output = output.expect("a shell");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
