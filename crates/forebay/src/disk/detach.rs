//! `forebay detach`: unmounts an attached volume and removes its disk, unless it is in use.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::client::Daemon;
use crate::disk::loops::{self, LoopDevice};
use crate::disk::{Attached, file_of, list, need_root, print};

/// Arguments of `forebay detach`.
#[derive(Args, Debug)]
pub struct DetachArgs {
    /// The volume
    pub volume: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Removes the disk.
pub fn run(args: &DetachArgs) -> anyhow::Result<()> {
    need_root("detach")?;
    let volume = args.daemon.client().volume(&args.volume)?;
    let file = file_of(&volume)?;
    let mine = loops::identity(&file).with_context(|| format!("{}", file.display()))?;
    let all = loops::all()?;
    let (ours, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|device| device.identity == mine);
    // A killed server leaves a file of that name whose mount is gone, and that cannot be read.
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

/// Unmounts a disk and removes it, unless it is in use; returns where it was mounted.
fn release(device: &LoopDevice) -> anyhow::Result<Option<PathBuf>> {
    let path = &device.path;
    let holders = device.holders();
    if !holders.is_empty() {
        bail!("{path} is in use by {}; remove those first", holders.join(", "));
    }
    if device.is_swap() {
        bail!("{path} is used as swap; stop that first (swapoff {path})");
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

/// Fails if another process uses the disk.
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
