//! `forebay attach`: makes a volume a disk of this machine, and optionally mounts its file system.
//! The server makes the disk by ublk; where it cannot, the disk is a loop device with direct I/O
//! over the file that `serve --fuse` mounts.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use forebay_control::Client;
use forebay_control::api::{DiskStatus, VolumeStatus};

use crate::client::Daemon;
use crate::disk::{Attached, Via, block, file_of, list, loops, mounts, need_root, print, sectors};

/// Arguments of `forebay attach`.
#[derive(Args, Debug)]
pub struct AttachArgs {
    /// The volume
    pub volume: String,
    /// Mount the file system on it here
    #[arg(long, value_name = "DIR")]
    pub mount: Option<PathBuf>,
    /// Bytes in a sector of the disk: 512 or 4096 [default: according to the volume's content; 4096
    /// if it is empty]
    #[arg(long, value_name = "BYTES", value_parser = sector_size)]
    pub sector_size: Option<u32>,
    /// What makes the disk [default: ublk if the kernel has it, else fuse]
    #[arg(long, value_enum)]
    pub via: Option<Via>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

fn sector_size(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" => Ok(4096),
        _ => Err("a sector has 512 or 4096 bytes".to_owned()),
    }
}

/// Makes the disk.
pub fn run(args: &AttachArgs) -> anyhow::Result<()> {
    need_root("attach")?;
    let client = args.daemon.client();
    let volume = client.volume(&args.volume)?;
    let place = args.mount.as_deref().map(mount_place).transpose()?;
    if let Some(device) = volume.devices.first() {
        bail!("volume {} is attached already: {}", volume.name, described(device)?);
    }
    let disk = make(&client, &volume, args)?;
    if let Some(place) = &place
        && let Err(error) = mount(&disk.device, place, volume.read_only)
    {
        disk.remove(&client, &volume)?;
        return Err(error.context(format!("volume {} is not attached", volume.name)));
    }
    let Made { device, via, sector_size } = &disk;
    let (volume, sector_size) = (volume.name.as_str(), Some(*sector_size));
    let mounted = place.as_deref();
    let attached = Attached { volume, device, via: *via, sector_size, mounted };
    print(args.json, &attached, || device.clone())
}

/// A new disk.
struct Made {
    device: String,
    via: Via,
    sector_size: u32,
}

impl Made {
    /// Removes it again.
    fn remove(&self, client: &Client, volume: &VolumeStatus) -> anyhow::Result<()> {
        match self.via {
            Via::Ublk => Ok(client.detach(&volume.name).map(drop)?),
            Via::Fuse => {
                let made = loops::all()?.into_iter().find(|made| made.path == self.device);
                made.map_or(Ok(()), |made| loops::detach(&made))
            }
        }
    }
}

/// Makes a disk in the way that is asked for, or in the best one that there is.
fn make(client: &Client, volume: &VolumeStatus, args: &AttachArgs) -> anyhow::Result<Made> {
    if args.via == Some(Via::Fuse) {
        return make_fuse(volume, args.sector_size);
    }
    match client.attach(&volume.name, args.sector_size) {
        Ok(DiskStatus { device, sector_size, .. }) => {
            Ok(Made { device, via: Via::Ublk, sector_size })
        }
        Err(why) if why.is_unsupported() && args.via.is_none() => {
            make_fuse(volume, args.sector_size).map_err(|error| error.context(why))
        }
        Err(error) => Err(error).context(format!("volume {} is not attached", volume.name)),
    }
}

fn make_fuse(volume: &VolumeStatus, sector_size: Option<u32>) -> anyhow::Result<Made> {
    let file = file_of(volume)?;
    let mine = loops::identity(&file).with_context(|| format!("{}", file.display()))?;
    if let Some(device) = loops::all()?.into_iter().find(|device| device.identity == mine) {
        bail!("volume {} is attached already: {}", volume.name, described(&device.path)?);
    }
    let sector_size = match sector_size {
        Some(size) if volume.size.is_multiple_of(size.into()) => size,
        Some(size) => {
            bail!("volume {} has {} bytes: not whole sectors of {size}", volume.name, volume.size)
        }
        None => sectors::fitting(&start_of(&file)?, volume.size),
    };
    let device = loops::attach(&file, sector_size, volume.read_only)?;
    Ok(Made { device, via: Via::Fuse, sector_size })
}

fn described(device: &str) -> anyhow::Result<String> {
    let places = block::mounted(device)?;
    if places.is_empty() {
        return Ok(format!("{device}, not mounted"));
    }
    Ok(format!("{device}, mounted at {}", list(&places)))
}

/// The directory to mount on: it must exist, with nothing mounted on it.
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
