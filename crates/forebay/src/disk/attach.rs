//! `forebay attach`: makes a volume a disk of this machine, a loop device with direct I/O over the
//! file that `serve --fuse` mounts; optionally mounts its file system.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;

use crate::client::Daemon;
use crate::disk::loops::{self, LoopDevice};
use crate::disk::{Attached, file_of, list, mounts, need_root, print, sectors};

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

fn described(device: &LoopDevice) -> anyhow::Result<String> {
    let places = device.mounted()?;
    if places.is_empty() {
        return Ok(format!("{}, not mounted", device.path));
    }
    Ok(format!("{}, mounted at {}", device.path, list(&places)))
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
