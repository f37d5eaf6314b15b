//! Requirements that a test may lack: programs, and the right to mount. The test then prints the
//! reason and passes, unless `FOREBAY_TEST_STRICT=1` and a program is missing, since programs can
//! be installed.

#![allow(dead_code)] // each test takes what it needs

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Whether all `tools` are installed.
pub fn have(tools: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
    directories.extend(["/usr/bin", "/usr/sbin"].map(PathBuf::from));
    let missing: Vec<&&str> = tools
        .iter()
        .filter(|tool| !directories.iter().any(|directory| directory.join(tool).exists()))
        .collect();
    let strict = std::env::var_os("FOREBAY_TEST_STRICT").is_some_and(|value| value == "1");
    assert!(missing.is_empty() || !strict, "not installed: {missing:?} (make setup)");
    missing.is_empty() || skip(&format!("not installed: {missing:?} (make setup)"))
}

/// Prints why a test is skipped; returns false.
pub fn skip(why: &str) -> bool {
    println!("skipped: {why}");
    eprintln!("skipped: {why}");
    false
}

/// Runs a program; returns whether it succeeded.
pub fn succeeds(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// A small file system in memory, unmounted when dropped.
pub struct Tmpfs {
    at: String,
}

impl Tmpfs {
    /// Mounts one of this size, such as `24m`, at `at`; `None` if mounting is not allowed.
    pub fn mount(at: &Path, size: &str) -> Option<Self> {
        std::fs::create_dir_all(at).expect("a directory can be made");
        let at = at.to_string_lossy().into_owned();
        let options = format!("size={size},mode=700");
        if !succeeds("mount", &["-t", "tmpfs", "-o", &options, "forebay-test", &at]) {
            skip("no right to mount here");
            return None;
        }
        Some(Self { at })
    }

    /// Remounts it read-only or writable. A killed server's files stay in use for a moment.
    pub fn remount(&self, read_only: bool) {
        let option = if read_only { "remount,ro" } else { "remount,rw" };
        let limit = Instant::now() + Duration::from_secs(20);
        while !succeeds("mount", &["-o", option, &self.at]) {
            assert!(Instant::now() < limit, "{option} {}: not in time", self.at);
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        if !succeeds("umount", &[&self.at]) {
            succeeds("umount", &["--lazy", &self.at]);
        }
    }
}
