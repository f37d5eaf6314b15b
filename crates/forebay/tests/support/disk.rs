//! A server with a mount, for tests that need one: files, loop devices, file systems.

#![allow(dead_code)] // each test takes what it needs

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{Place, Server, client, forebay, noise};
use crate::tools::{have, skip, succeeds};

/// `O_DIRECT` and `O_DSYNC` of this machine.
pub const O_DIRECT: i32 = if cfg!(target_arch = "aarch64") { 0o200_000 } else { 0o40_000 };
/// Writes are durable when they return.
pub const O_DSYNC: i32 = 0o10_000;

/// A file system, the commands that make and check it, and the programs they need.
pub const FILE_SYSTEMS: [(&str, &[&str], &[&str]); 2] = [
    ("xfs", &["mkfs.xfs", "-q"], &["xfs_repair", "-n"]),
    ("ext4", &["mkfs.ext4", "-q"], &["e2fsck", "-f", "-n"]),
];

/// Whether this machine lets the test mount; prints why if not.
pub fn can_mount() -> bool {
    if !Path::new("/dev/fuse").exists() {
        return skip("there is no /dev/fuse");
    }
    let root = client("id", &["-u"]).trim() == "0";
    root || skip("only root may mount")
}

/// Whether it can also make disks.
pub fn can_attach() -> bool {
    let control = Path::new("/dev/loop-control").exists();
    can_mount() && (control || skip("there is no /dev/loop-control")) && have(&["losetup"])
}

/// Whether this kernel makes disks by ublk.
pub fn has_ublk() -> bool {
    Path::new("/dev/ublk-control").exists()
}

/// The transports that this kernel has.
pub fn transports() -> Vec<&'static str> {
    let switch = Path::new("/sys/module/fuse/parameters/enable_uring");
    if switch.exists() {
        return vec!["io-uring", "device"];
    }
    skip("this kernel has no FUSE over io_uring");
    vec!["device"]
}

/// The arguments of a server of `primary` with its files below `volumes`.
pub fn serve(place: &Place, primary: &str, more: &[&str]) -> Vec<String> {
    std::fs::create_dir_all(place.path("volumes")).expect("a directory can be made");
    place.make("cache", 256 << 20);
    let mut arguments = place.serve(primary, "cache");
    arguments.retain(|argument| !argument.starts_with("--nbd"));
    arguments.push(format!("--fuse={}", place.text("volumes")));
    arguments.extend(more.iter().map(|&more| more.to_owned()));
    arguments
}

/// A primary of `size` bytes, and the arguments to serve it.
pub fn disk_of(size: u64) -> (Place, Cleanup, Vec<String>) {
    let place = Place::new();
    let cleanup = Cleanup::of(&place, &["mounted"]);
    place.make("primary", size);
    let arguments = serve(&place, "primary", &[]);
    (place, cleanup, arguments)
}

/// A directory to mount at, and the flag for it.
pub fn mount_point(place: &Place) -> (PathBuf, String) {
    let mounted = place.path("mounted");
    std::fs::create_dir_all(&mounted).expect("a directory can be made");
    let flag = format!("--mount={}", mounted.display());
    (mounted, flag)
}

/// Attaches the volume; returns the device.
pub fn attach(server: &Server, more: &[&str]) -> String {
    let device = server.ask(&[&["attach", "disk", "--via=fuse"], more].concat()).trim().to_owned();
    assert!(device.starts_with("/dev/loop"), "{device}");
    device
}

/// Runs a command with one more argument, which must succeed; returns its output.
pub fn run(command: &[&str], last: &str) -> String {
    client(command[0], &[&command[1..], &[last]].concat())
}

/// The content of a file of a test, by its number.
pub fn file_content(number: u64) -> Vec<u8> {
    noise(number, 1 + number as usize * 977 % 60_000)
}

/// The volume's file.
pub fn file(place: &Place) -> PathBuf {
    place.path("volumes").join("disk")
}

/// Opens it for reading and writing.
pub fn open(path: &Path, flags: i32) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags);
    options.open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Removes the remains of a failed test: its disk, and its mount.
pub struct Cleanup(pub Vec<PathBuf>, pub PathBuf);

impl Cleanup {
    /// For a place whose disks are mounted at `mounted`.
    pub fn of(place: &Place, mounted: &[&str]) -> Self {
        let mounted = mounted.iter().map(|name| place.path(name)).collect();
        Self(mounted, place.path("volumes"))
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        let quietly = |program: &str, words: &[&str]| {
            let _ = Command::new(program).args(words).output();
        };
        for place in &self.0 {
            if succeeds("mountpoint", &["-q", &place.to_string_lossy()]) {
                quietly("umount", &["--lazy", &place.to_string_lossy()]);
            }
        }
        let below = format!("{}/", self.1.display());
        let listed = Command::new("losetup").args(["-ln", "-O", "NAME,BACK-FILE"]).output();
        let listed = listed.map(|listed| listed.stdout).unwrap_or_default();
        for line in String::from_utf8_lossy(&listed).lines() {
            let mut words = line.split_whitespace();
            if let (Some(device), Some(backing)) = (words.next(), words.next())
                && backing.starts_with(&below)
            {
                quietly("losetup", &["-d", device]);
            }
        }
        quietly("umount", &["--lazy", &self.1.to_string_lossy()]);
    }
}

/// Runs a command of the binary that must fail; returns its output.
pub fn refused(server: &Server, arguments: &[&str]) -> String {
    let control = server.control_argument();
    let output = forebay(&[arguments, &[control.as_str()]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed something");
    said
}

/// Writes files, makes them durable and reads them back, until told to stop. Any error is a
/// failure.
pub fn write_files(directory: &Path, stop: &AtomicBool) -> u64 {
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let path = directory.join(format!("file-{count}"));
        let content = file_content(count);
        let mut file = File::create(&path).expect("it is made");
        file.write_all(&content).expect("it is written");
        file.sync_all().expect("it is durable");
        assert!(fs::read(&path).expect("it is read") == content, "{}", path.display());
        count += 1;
    }
    count
}
