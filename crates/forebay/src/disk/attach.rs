//! `forebay attach` and `forebay detach`: a volume as a disk of this machine, a loop device over
//! the file that `serve --fuse` mounts, with direct I/O; and its file system mounted.
//!
//! Nothing that could lose data is done: both say what is in the way, and leave it as it is.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use forebay_control::api::VolumeStatus;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::Serialize;

use crate::cli::{AttachArgs, DetachArgs};
use crate::disk::loops::{self, LoopDevice};
use crate::disk::{mounts, sectors};
use crate::output;

/// What `--json` prints of a disk.
#[derive(Serialize)]
struct Attached<'a> {
    volume: &'a str,
    device: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sector_size: Option<u32>,
    mounted: Option<&'a Path>,
}

/// Makes the disk.
pub fn attach(args: &AttachArgs) -> anyhow::Result<()> {
    need_root("attach")?;
    let volume = args.daemon.client().volume(&args.volume)?;
    let file = file_of(&volume)?;
    let place = args.mount.as_deref().map(mount_place).transpose()?;
    let mine = loops::identity(&file).with_context(|| format!("{}", file.display()))?;
    if let Some(device) = loops::all()?.into_iter().find(|device| device.identity == mine) {
        bail!("volume {} is attached already: {}", volume.name, described(&device)?);
    }
    let sector_size = match args.sector_size {
        Some(size) if volume.size.is_multiple_of(size.into()) => size,
        Some(size) => {
            bail!("volume {} has {} bytes: not whole sectors of {size}", volume.name, volume.size)
        }
        None => sectors::fitting(&start_of(&file)?, volume.size),
    };
    let device = loops::attach(&file, sector_size, volume.read_only)?;
    if let Some(place) = &place
        && let Err(error) = mount(&device, place, volume.read_only)
    {
        if let Some(made) = loops::all()?.into_iter().find(|made| made.path == device) {
            loops::detach(&made)?;
        }
        return Err(error.context(format!("volume {} is not attached", volume.name)));
    }
    let (volume, mounted) = (volume.name.as_str(), place.as_deref());
    let attached = Attached { volume, device: &device, sector_size: Some(sector_size), mounted };
    print(args.json, &attached, || device.clone())
}

/// Takes the disk away.
pub fn detach(args: &DetachArgs) -> anyhow::Result<()> {
    need_root("detach")?;
    let volume = args.daemon.client().volume(&args.volume)?;
    let file = file_of(&volume)?;
    let mine = loops::identity(&file).with_context(|| format!("{}", file.display()))?;
    let all = loops::all()?;
    let (ours, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|device| device.identity == mine);
    // What a killed server left: a file of that name whose mount is gone, and nothing to read.
    let name = Path::new("/").join(&volume.name);
    let left =
        |device: &LoopDevice| (device.file == name || device.file == file) && device.is_dead();
    let devices: Vec<_> = ours.into_iter().chain(others.into_iter().filter(left)).collect();
    if devices.is_empty() {
        bail!("volume {} is not attached; see forebay status", volume.name);
    }
    let mut places = Vec::new();
    for device in &devices {
        places.push(release(device)?);
    }
    let detached = devices.iter().zip(&places).map(|(device, place)| Attached {
        volume: &volume.name,
        device: &device.path,
        sector_size: None,
        mounted: place.as_deref(),
    });
    print(args.json, &detached.collect::<Vec<_>>(), || {
        let paths: Vec<&str> = devices.iter().map(|device| device.path.as_str()).collect();
        format!("detached {}", paths.join(" "))
    })
}

/// Unmounts a disk and takes it away, unless somebody uses it; says where it was mounted.
fn release(device: &LoopDevice) -> anyhow::Result<Option<PathBuf>> {
    let path = &device.path;
    let holders = device.holders();
    if !holders.is_empty() {
        bail!("{path} is in use by {}; take those away first", holders.join(", "));
    }
    if device.is_swap() {
        bail!("{path} is swapped to; stop that first (swapoff {path})");
    }
    let places = device.mounted()?;
    if places.len() > 1 {
        bail!("{path} is mounted in several places: {}; unmount all but one", list(&places));
    }
    let dead = device.is_dead();
    let place = places.into_iter().next();
    if let Some(place) = &place {
        let shown = place.to_str().context("the path is not UTF-8")?;
        loops::run("umount", &[shown])
            .with_context(|| format!("{path} is in use and stays attached"))?;
    }
    if !dead {
        alone(path)?;
        loops::write_back(path);
    }
    loops::detach(device)?;
    Ok(place)
}

/// Whether nobody else uses a disk.
fn alone(path: &str) -> anyhow::Result<()> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(_) => Ok(()),
        Err(Errno::BUSY) => bail!(
            "{path} is in use, perhaps mounted in another namespace (a container's, a service's); \
             it stays attached"
        ),
        Err(error) => bail!("{path}: {error}; it stays attached"),
    }
}

fn need_root(command: &str) -> anyhow::Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    bail!("{command} needs root: it makes and mounts a disk of this machine")
}

/// The file that a volume is.
fn file_of(volume: &VolumeStatus) -> anyhow::Result<PathBuf> {
    let file = volume.file.as_ref().map(PathBuf::from);
    file.with_context(|| {
        format!(
            "volume {} is not served as a file; start the server with --fuse DIR, or use an NBD \
             client",
            volume.name
        )
    })
}

fn described(device: &LoopDevice) -> anyhow::Result<String> {
    let places = device.mounted()?;
    if places.is_empty() {
        return Ok(format!("{}, not mounted", device.path));
    }
    Ok(format!("{}, mounted at {}", device.path, list(&places)))
}

fn list(places: &[PathBuf]) -> String {
    let shown: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
    shown.join(", ")
}

/// The directory to mount at: there, and nothing mounted on it.
fn mount_place(place: &Path) -> anyhow::Result<PathBuf> {
    let shown = place.display();
    let found = std::fs::canonicalize(place);
    let found = found.with_context(|| format!("--mount {shown}: name a directory"))?;
    if !found.is_dir() {
        bail!("--mount {shown}: it is no directory");
    }
    if let Some(entry) = mounts::at(&found)? {
        bail!("--mount {shown}: a file system of type {} is mounted there already", entry.kind);
    }
    Ok(found)
}

fn mount(device: &str, place: &Path, read_only: bool) -> anyhow::Result<()> {
    let place = place.to_str().context("the path is not UTF-8")?;
    let mut words = vec![device, place];
    if read_only {
        words.extend(["-o", "ro"]);
    }
    loops::run("mount", &words)
        .map(drop)
        .context("if there is no file system on it yet, attach without --mount and make one")
}

fn start_of(file: &Path) -> anyhow::Result<Vec<u8>> {
    let shown = || format!("{}", file.display());
    let mut start = Vec::new();
    let file = std::fs::File::open(file).with_context(shown)?;
    file.take(sectors::LOOKED_AT as u64).read_to_end(&mut start).with_context(shown)?;
    Ok(start)
}

fn print(json: bool, shown: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let shown = if json { serde_json::to_string_pretty(shown)? } else { text() };
    Ok(output::line(&shown)?)
}
