//! A cache device that fails on command: a file mounted by nbdfuse, over an nbdkit whose error
//! filter has switches. Data stored before a failure is there again after it.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::Place;
use crate::tools::{skip, succeeds};

/// The way in which it fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// All writes fail.
    Writes,
    /// All reads and writes fail.
    Vanished,
}

/// The device; mounted until it is dropped.
pub struct Sick {
    nbdkit: Child,
    nbdfuse: Child,
    mount: PathBuf,
    reads: PathBuf,
    writes: PathBuf,
}

impl Sick {
    /// Mounts a device of `size` bytes as the file `cache.img` of `place`; `None` if that is not
    /// possible.
    pub fn mount(place: &Place, size: u64) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() {
            skip("no /dev/fuse here");
            return None;
        }
        place.make("cache-data", size);
        place.make("cache.img", 0);
        let socket = place.path("sick.sock");
        let switch = |name: &str| place.path(name);
        let (reads, writes) = (switch("no-reads"), switch("no-writes"));
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(["--foreground", "--unix", &socket.to_string_lossy()]);
        nbdkit.args(["--filter=error", "file", &place.text("cache-data")]);
        nbdkit.args(["error=EIO", "error-pread-rate=100%", "error-pwrite-rate=100%"]);
        nbdkit.arg(format!("error-pread-file={}", reads.to_string_lossy()));
        nbdkit.arg(format!("error-pwrite-file={}", writes.to_string_lossy()));
        let nbdkit = quiet(&mut nbdkit);
        until(|| UnixStream::connect(&socket).is_ok());
        let mount = place.path("cache.img");
        let mut nbdfuse = Command::new("nbdfuse");
        nbdfuse.arg(&mount).arg("--unix").arg(&socket);
        let nbdfuse = quiet(&mut nbdfuse);
        let mut sick = Self { nbdkit, nbdfuse, mount, reads, writes };
        let mounted = until(|| {
            let gone = sick.nbdfuse.try_wait().is_ok_and(|status| status.is_some());
            gone || fs::metadata(&sick.mount).is_ok_and(|file| file.len() == size)
        });
        if !mounted || fs::metadata(&sick.mount).is_ok_and(|file| file.len() != size) {
            skip("no right to mount with FUSE here");
            return None;
        }
        Some(sick)
    }

    /// Makes it fail from now on.
    pub fn fail(&self, failure: Failure) {
        let switches: &[&PathBuf] = match failure {
            Failure::Writes => &[&self.writes],
            Failure::Vanished => &[&self.reads, &self.writes],
        };
        switches.iter().for_each(|switch| fs::write(switch, "").expect("a file can be made"));
    }

    /// Makes it work again.
    pub fn heal(&self) {
        for switch in [&self.reads, &self.writes] {
            let _ = fs::remove_file(switch);
        }
    }
}

impl Drop for Sick {
    fn drop(&mut self) {
        succeeds("fusermount3", &["-u", "-z", &self.mount.to_string_lossy()]);
        for child in [&mut self.nbdfuse, &mut self.nbdkit] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn quiet(command: &mut Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("it runs")
}

/// Waits for a while; returns whether it happened.
fn until(mut happened: impl FnMut() -> bool) -> bool {
    let limit = Instant::now() + Duration::from_secs(20);
    while !happened() {
        if Instant::now() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}
