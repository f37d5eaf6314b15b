//! A disk's users, by the disk's path: mounts, swap, devices built on it, processes.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::disk::{list, loops, mounts};

/// How long the file systems on disks may take to sync when the server stops.
const SYNC_PATIENCE: Duration = Duration::from_secs(30);
const SYNC_STEP: Duration = Duration::from_millis(10);
/// How long a process may have a disk open that is to be removed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);
const CLOSE_STEP: Duration = Duration::from_millis(50);
/// The kernel's block devices.
pub const BLOCK_DEVICES: &str = "/sys/block";
/// The same with their partitions.
const ALL_BLOCK_DEVICES: &str = "/sys/class/block";

fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// The names in a directory.
pub fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The numbers of block devices, as `7:0`, by their names.
fn numbers(names: &[String]) -> anyhow::Result<Vec<String>> {
    let read = |name: &String| {
        let path = format!("{ALL_BLOCK_DEVICES}/{name}/dev");
        let numbers = fs::read_to_string(&path).with_context(|| path)?;
        Ok(numbers.trim().to_owned())
    };
    names.iter().map(read).collect()
}

/// The device and its partitions, by their names.
fn with_partitions(name: &str) -> Vec<String> {
    let directory = Path::new(ALL_BLOCK_DEVICES).join(name);
    let parts = names(&directory).into_iter();
    let parts = parts.filter(|part| directory.join(part).join("partition").exists());
    std::iter::once(name.to_owned()).chain(parts).collect()
}

/// The device, its partitions, and the devices built on any of them, by their names.
fn with_all_above(name: &str) -> Vec<String> {
    let mut all = with_partitions(name);
    let mut at = 0;
    while at < all.len() {
        let held = names(&Path::new(ALL_BLOCK_DEVICES).join(&all[at]).join("holders"));
        let new: Vec<_> = held.into_iter().filter(|one| !all.contains(one)).collect();
        all.extend(new);
        at += 1;
    }
    all
}

/// Where its file system is mounted, or those on its partitions.
pub fn mounted(path: &str) -> anyhow::Result<Vec<PathBuf>> {
    Ok(mounts::of_devices(Path::new("/"), &numbers(&with_partitions(name(path)))?)?)
}

/// Where file systems are mounted whose data ends up on it.
fn mounted_above(path: &str) -> Vec<PathBuf> {
    let found = numbers(&with_all_above(name(path)));
    let found = found.and_then(|found| Ok(mounts::of_devices(Path::new("/"), &found)?));
    found.unwrap_or_else(|error| {
        tracing::warn!(path, "its file systems are not known: {error:#}");
        Vec::new()
    })
}

/// The devices built on it: device-mapper, RAID.
fn holders(path: &str) -> Vec<String> {
    let held = format!("{BLOCK_DEVICES}/{}/holders", name(path));
    names(Path::new(&held)).into_iter().map(|name| format!("/dev/{name}")).collect()
}

/// Whether it is used as swap.
fn is_swap(path: &str) -> bool {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    swaps.lines().any(|line| line.split_whitespace().next() == Some(path))
}

/// Unmounts the disk's file system, if it is mounted once, and fails if the disk is in use in
/// another way; returns where it was mounted.
pub fn unmount(path: &str) -> anyhow::Result<Option<PathBuf>> {
    let holders = holders(path);
    if !holders.is_empty() {
        bail!("{path} is in use by {}; remove those first", holders.join(", "));
    }
    if is_swap(path) {
        bail!("{path} is used as swap; stop that first (swapoff {path})");
    }
    let places = mounted(path)?;
    if places.len() > 1 {
        bail!("{path} is mounted in several places: {}; unmount all but one", list(&places));
    }
    let place = places.into_iter().next();
    if let Some(place) = &place {
        let shown = place.to_str().context("the path is not UTF-8")?;
        loops::run("umount", &[shown])
            .with_context(|| format!("{path} is in use and stays attached"))?;
    }
    Ok(place)
}

/// Fails if another process uses the disk. One that has it open without a file system must be known
/// before the disk ends: the kernel would wait for that process.
pub fn alone(path: &str) -> anyhow::Result<()> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    // Dropped at once, since it would be found below.
    match rustix::fs::open(path, flags, Mode::empty()).map(drop) {
        Ok(()) => closed(path),
        Err(Errno::BUSY) => bail!(
            "{path} is in use, perhaps mounted in another namespace (a container's, a service's); \
             it stays attached"
        ),
        Err(error) => bail!("{path}: {error}; it stays attached"),
    }
}

/// Waits a moment until no process has the disk or a partition of it open, and fails
/// otherwise: udev opens a disk for a short time when it changes.
fn closed(path: &str) -> anyhow::Result<()> {
    let numbers = numbers(&with_partitions(name(path)))?;
    let limit = Instant::now() + CLOSE_PATIENCE;
    loop {
        let Users { known: users, hidden } = users(&numbers);
        if users.is_empty() {
            if hidden > 0 {
                tracing::info!(path, "{hidden} processes may have it open and cannot be examined");
            }
            return Ok(());
        }
        if Instant::now() >= limit {
            let shown = users.join(", ");
            bail!("{path} is open in {shown}; end that first, the disk stays attached");
        }
        std::thread::sleep(CLOSE_STEP);
    }
}

/// The processes that have a disk open.
struct Users {
    known: Vec<String>,
    /// The number of processes whose open files this process may not see.
    hidden: usize,
}

/// The processes that have one of these block devices open.
fn users(numbers: &[String]) -> Users {
    let mut users = Users { known: Vec::new(), hidden: 0 };
    for id in names(Path::new("/proc")).into_iter().filter(|name| name.parse::<u32>().is_ok()) {
        let process = Path::new("/proc").join(&id);
        match has_open(&process, numbers) {
            Ok(false) => {}
            Ok(true) => {
                let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
                users.known.push(format!("process {id} ({})", name.trim()));
            }
            Err(Hidden) => users.hidden += 1,
        }
    }
    users
}

/// This process may not see the open files of another one.
struct Hidden;

/// Whether a process has one of these block devices open, by its directory. One that ends meanwhile
/// has nothing open.
fn has_open(process: &Path, numbers: &[String]) -> Result<bool, Hidden> {
    let files = match fs::read_dir(process.join("fd")) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(Hidden),
        files => files.into_iter().flatten().flatten(),
    };
    let mut hidden = false;
    for file in files {
        match is_one_of(&file.path(), numbers) {
            Ok(true) => return Ok(true),
            Err(Errno::ACCESS | Errno::PERM) => hidden = true,
            Ok(false) | Err(_) => {}
        }
    }
    if hidden { Err(Hidden) } else { Ok(false) }
}

/// Whether an open file is one of these block devices. No file system is asked, as it may not
/// answer.
fn is_one_of(file: &Path, numbers: &[String]) -> Result<bool, Errno> {
    let known = rustix::fs::statx(CWD, file, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    let number = format!("{}:{}", known.stx_rdev_major, known.stx_rdev_minor);
    let is_block = FileType::from_raw_mode(known.stx_mode.into()) == FileType::BlockDevice;
    Ok(is_block && numbers.contains(&number))
}

/// Makes all writes to a disk durable that nobody else uses; fails if that cannot be done.
pub fn write_back(path: &str) -> anyhow::Result<()> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let written = rustix::fs::open(path, flags, Mode::empty()).and_then(rustix::fs::fsync);
    if let Err(error) = written {
        bail!(
            "{path}: not all writes could be made durable ({error}); it stays attached, and what \
             was mounted is unmounted; see forebay status for the reason, then detach it again"
        );
    }
    Ok(())
}

/// Flushes several disks and the file systems on them, for a limited time. Other processes do it: a
/// server's thread that waits for a disk of this very server would keep the server from ending, and
/// the kernel waits for that end before it hands a ublk device to the next one.
pub fn write_all_back(disks: &[String]) {
    let syncs = disks.iter().flat_map(|disk| {
        let places = mounted_above(disk).into_iter();
        let file_systems = places.map(|place| sync(&["--file-system".as_ref(), place.as_os_str()]));
        file_systems.chain([sync(&[disk.as_ref()])]).collect::<Vec<_>>()
    });
    let mut running: Vec<Child> = syncs.flatten().collect();
    let deadline = Instant::now() + SYNC_PATIENCE;
    while !running.is_empty() {
        if Instant::now() >= deadline {
            return tracing::warn!("not all of it was written in time");
        }
        std::thread::sleep(SYNC_STEP);
        running.retain_mut(|child| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) if status.success() => false,
            ended => {
                tracing::warn!(?ended, "not all of it was written");
                false
            }
        });
    }
}

fn sync(arguments: &[&OsStr]) -> Option<Child> {
    let started = Command::new("sync").args(arguments).stdin(Stdio::null()).spawn();
    started.inspect_err(|error| tracing::warn!(%error, ?arguments, "not written back")).ok()
}
