//! nbdkit, a third-party NBD server, in the role of a SAN.

#![allow(dead_code)] // each test takes what it needs

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::until;

/// A server, which is killed when dropped.
pub struct Nbdkit(Child);

impl Nbdkit {
    /// Starts one at `socket`, with a plugin and what it takes; it is ready when this returns.
    pub fn start(socket: &Path, arguments: &[&str]) -> Self {
        let _ = fs::remove_file(socket);
        let child = Command::new("nbdkit")
            .args(["--foreground", "--exit-with-parent", "--unix", &socket.to_string_lossy()])
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("nbdkit runs (make setup)");
        until("nbdkit listens", || UnixStream::connect(socket).is_ok());
        Self(child)
    }

    /// Sends it a signal, such as `STOP`.
    pub fn signal(&self, name: &str) {
        let id = self.0.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &id]).status().expect("it runs").success());
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
