//! `forebay detach`: unmounts an attached volume and removes its disk, unless it is in use.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use forebay_control::Client;
use forebay_control::api::{DiskStatus, VolumeStatus};

use crate::client::Daemon;
use crate::disk::loops::{self, LoopDevice};
use crate::disk::{Attached, Via, block, file_of, need_root, print};

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
    let client = args.daemon.client();
    let made = client.disks()?.into_iter().find(|disk| disk.volume == args.volume);
    let released = match made {
        Some(disk) => vec![release_ublk(&client, &disk)?],
        None => release_loops(&client.volume(&args.volume)?)?,
    };
    let detached = released.iter().map(|released| Attached {
        volume: &args.volume,
        device: &released.device,
        via: released.via,
        sector_size: None,
        mounted: released.mounted.as_deref(),
    });
    print(args.json, &detached.collect::<Vec<_>>(), || {
        let paths: Vec<&str> = released.iter().map(|one| one.device.as_str()).collect();
        format!("detached {}", paths.join(" "))
    })
}

/// A removed disk, and where it was mounted.
struct Released {
    device: String,
    via: Via,
    mounted: Option<PathBuf>,
}

/// Unmounts a disk made by ublk, and has the server remove it, unless it is in use. One that waits
/// for a server would let nobody unmount: it is removed first. Of one that has ended, only the
/// server's record is left.
fn release_ublk(client: &Client, disk: &DiskStatus) -> anyhow::Result<Released> {
    let device = disk.device.clone();
    let has_ended = !Path::new(&device).exists();
    let mounted = if has_ended {
        client.detach(&disk.volume)?;
        None
    } else if disk.state == "serving" {
        let mounted = block::unmount(&device)?;
        block::alone(&device)?;
        block::write_back(&device)?;
        client.detach(&disk.volume)?;
        mounted
    } else {
        let places = block::mounted(&device)?;
        client.detach(&disk.volume)?;
        for place in &places {
            loops::run("umount", &[place.to_str().context("the path is not UTF-8")?])?;
        }
        places.into_iter().next()
    };
    Ok(Released { device, via: Via::Ublk, mounted })
}

/// Unmounts the loop devices over a volume's file, and removes them, unless they are in use.
fn release_loops(volume: &VolumeStatus) -> anyhow::Result<Vec<Released>> {
    let file = file_of(volume)?;
    let mine = loops::identity(&file).with_context(|| format!("{}", file.display()))?;
    let all = loops::all()?;
    let (ours, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|device| device.identity == mine);
    // A killed server leaves a file of that name whose mount is gone, and that cannot be read.
    let name = Path::new("/").join(&volume.name);
    let left =
        |device: &LoopDevice| (device.file == name || device.file == file) && device.is_dead();
    // Errors of one with a server are the primary's.
    let served = ours.iter().map(|device| release(device, true));
    let left = others.iter().filter(|device| left(device)).map(|device| release(device, false));
    let released = served.chain(left).collect::<anyhow::Result<Vec<_>>>()?;
    if released.is_empty() {
        bail!("volume {} is not attached; see forebay status", volume.name);
    }
    Ok(released)
}

fn release(device: &LoopDevice, served: bool) -> anyhow::Result<Released> {
    let path = device.path.clone();
    let mounted = block::unmount(&path)?;
    if served {
        block::alone(&path)?;
        block::write_back(&path)?;
    }
    loops::detach(device)?;
    Ok(Released { device: path, via: Via::Fuse, mounted })
}
