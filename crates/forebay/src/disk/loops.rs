//! Loop devices: a list of them with their files; created and removed by `losetup`, which
//! every distribution has.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::disk::block::{BLOCK_DEVICES, names};
use crate::output;

/// How long a device may take to disappear once it is unused.
const PATIENCE: Duration = Duration::from_secs(20);
const STEP: Duration = Duration::from_millis(20);
/// A hole that the server refuses if it makes it by writing zeros, in bytes.
const LARGE_HOLE: u64 = 1 << 20;

/// A loop device with a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoopDevice {
    /// Its path.
    pub path: String,
    /// The file's path, as far as the kernel can name it.
    pub file: PathBuf,
    /// Device and inode number of the file.
    pub identity: (u64, u64),
}

impl LoopDevice {
    fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// Whether the server of the file is gone, so that nothing can be read.
    pub fn is_dead(&self) -> bool {
        let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
        let Ok(device) = rustix::fs::open(self.path.as_str(), flags, Mode::empty()) else {
            return true;
        };
        // Direct I/O needs memory aligned to pages.
        let mut page = forebay_block::IoBuf::zeroed(4096);
        matches!(rustix::io::pread(&device, &mut page[..], 0), Err(Errno::IO | Errno::NOTCONN))
    }
}

/// The loop devices over a path, according to the kernel, without access to the file itself.
pub fn over_path(path: &str) -> Vec<String> {
    attached(|file| file == Path::new(path))
}

/// The loop devices over files below a directory.
pub fn below(directory: &Path) -> Vec<String> {
    attached(|file| file.starts_with(directory))
}

fn attached(wanted: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut found: Vec<String> = names(Path::new(BLOCK_DEVICES))
        .into_iter()
        .filter(|name| name.starts_with("loop"))
        .filter(|name| backing_file(name).is_some_and(|file| wanted(&file)))
        .map(|name| format!("/dev/{name}"))
        .collect();
    found.sort();
    found
}

fn backing_file(name: &str) -> Option<PathBuf> {
    let path = format!("{BLOCK_DEVICES}/{name}/loop/backing_file");
    fs::read_to_string(path).ok().map(|text| PathBuf::from(text.trim_end_matches('\n')))
}

/// Every loop device with a file.
pub fn all() -> anyhow::Result<Vec<LoopDevice>> {
    let columns = "NAME,BACK-FILE,BACK-INO,BACK-MAJ:MIN";
    let listed = losetup(&["--list", "--json", "--output", columns])?;
    if listed.stdout.trim_ascii().is_empty() {
        return Ok(Vec::new());
    }
    let listed: serde_json::Value =
        serde_json::from_slice(&listed.stdout).context("the list that losetup prints")?;
    let devices = listed["loopdevices"].as_array().into_iter().flatten();
    Ok(devices.filter_map(device).collect())
}

fn device(listed: &serde_json::Value) -> Option<LoopDevice> {
    let text = |name: &str| listed[name].as_str().map(str::to_owned);
    let inode = listed["back-ino"].as_u64().or_else(|| text("back-ino")?.trim().parse().ok())?;
    let numbers = text("back-maj:min")?;
    let (major, minor) = numbers.trim().split_once(':')?;
    let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    Some(LoopDevice {
        path: text("name")?,
        file: PathBuf::from(text("back-file")?),
        identity: (device, inode),
    })
}

/// Gives the loop devices over a path the size of their file, in bytes, if they have another one.
/// A device that cannot be resized stays as it is, with a warning.
pub fn resize(path: &str, size: u64) {
    for device in over_path(path) {
        let name = device.rsplit('/').next().unwrap_or_default();
        let sectors = fs::read_to_string(format!("{BLOCK_DEVICES}/{name}/size"));
        let now = sectors.ok().and_then(|text| text.trim().parse::<u64>().ok());
        if now.is_none_or(|sectors| sectors * 512 == size) {
            continue;
        }
        match losetup(&["--set-capacity", &device]) {
            Ok(_) => tracing::info!(device, size, "the disk has another size"),
            Err(error) => tracing::warn!(device, "the disk keeps its size: {error:#}"),
        }
    }
}

/// The identity of a file that loop devices report.
pub fn identity(file: &Path) -> io::Result<(u64, u64)> {
    let found = fs::metadata(file)?;
    Ok((found.dev(), found.ino()))
}

/// Creates a loop device over a file, with direct I/O; returns its path.
pub fn attach(file: &Path, sector_size: u32, read_only: bool) -> anyhow::Result<String> {
    let path = file.to_str().context("the path is not UTF-8")?;
    let size = sector_size.to_string();
    let mut words =
        vec!["--find", "--show", "--nooverlap", "--direct-io=on", "--sector-size", &size];
    if read_only {
        words.push("--read-only");
    }
    words.push(path);
    let made = losetup(&words)?;
    let device = String::from_utf8_lossy(&made.stdout).trim().to_owned();
    if !Path::new(&device).exists() {
        bail!("losetup says {device:?}, but there is no such device");
    }
    if !read_only && let Err(error) = pass_flushes_on(&device) {
        // Without flushes it is no disk for anything that calls fsync.
        let _ = losetup(&["--detach", &device]);
        return Err(error);
    }
    if !read_only && takes_large_holes(file).is_ok_and(|can| !can) {
        output::say(&format!(
            "forebay: {device} takes no discards, since the primary makes no holes faster than it \
             writes zeros: fstrim frees nothing there, even if it says so"
        ));
    }
    Ok(device)
}

/// Whether the server makes holes of any size in the file. The question changes nothing: the hole
/// is behind the end. The kernel keeps a refusal to itself, and offers discards all the same; its
/// switch for them (`discard_max_bytes`) would stay off for the loop device's later files.
fn takes_large_holes(file: &Path) -> io::Result<bool> {
    let file = fs::File::options().write(true).open(file)?;
    let end = file.metadata()?.len();
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(&file, mode, end, LARGE_HOLE) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Makes sure that the kernel sends flushes to the file. It sends none to a loop device whose write
/// cache was once declared write-through, and remembers that for the device's later files
/// (Documentation/block/writeback_cache_control.rst).
fn pass_flushes_on(device: &str) -> anyhow::Result<()> {
    let name = device.rsplit('/').next().unwrap_or_default();
    let switch = format!("{BLOCK_DEVICES}/{name}/queue/write_cache");
    let is_on = || fs::read_to_string(&switch).map(|text| text.trim() == "write back");
    if !is_on().context(switch.clone())? {
        fs::write(&switch, "write back").context(switch.clone())?;
        if !is_on().context(switch.clone())? {
            bail!("{switch} cannot be set to `write back`: flushes would not reach the server");
        }
    }
    Ok(())
}

/// Removes a loop device, and waits until it is gone.
pub fn detach(device: &LoopDevice) -> anyhow::Result<()> {
    losetup(&["--detach", &device.path])?;
    let deadline = Instant::now() + PATIENCE;
    while backing_file(device.name()).is_some_and(|file| file == device.file) {
        if Instant::now() > deadline {
            bail!(
                "{} is still open elsewhere after {} s; it is removed once it is closed",
                device.path,
                PATIENCE.as_secs()
            );
        }
        std::thread::sleep(STEP);
    }
    Ok(())
}

fn losetup(words: &[&str]) -> anyhow::Result<Output> {
    run("losetup", words)
}

/// Runs a program to its end; its own error output is the error.
pub fn run(program: &str, words: &[&str]) -> anyhow::Result<Output> {
    let output = match Command::new(program).args(words).output() {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("{program} is not installed; it comes with util-linux")
        }
        Err(error) => bail!("{program}: {error}"),
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{program} {}: {}", words.join(" "), said.trim());
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_new_losetup_are_understood() {
        let new = serde_json::json!({ "name": "/dev/loop0", "back-file": "/v/db",
            "back-ino": 4096, "back-maj:min": "0:43" });
        let old = serde_json::json!({ "name": "/dev/loop0", "back-file": "/v/db",
            "back-ino": "4096", "back-maj:min": "  0:43" });
        let expected = LoopDevice {
            path: "/dev/loop0".to_owned(),
            file: PathBuf::from("/v/db"),
            identity: (rustix::fs::makedev(0, 43), 4096),
        };
        assert_eq!(device(&new), Some(expected.clone()));
        assert_eq!(device(&old), Some(expected));
        assert_eq!(device(&serde_json::json!({ "name": "/dev/loop1" })), None);
    }
}
