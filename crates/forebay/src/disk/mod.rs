//! Volumes as disks of this machine: [`attach`] creates them and [`detach`] removes them. Neither
//! does anything that could lose data: if something is in the way, they name it and change nothing.

pub mod attach;
pub mod block;
pub mod detach;
pub mod extents;
pub mod loops;
pub mod mounts;
pub mod sectors;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::ValueEnum;
use forebay_control::api::VolumeStatus;
use serde::Serialize;

use crate::output;

/// What makes a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// The kernel's block devices in user space
    Ublk,
    /// A loop device over the file that serve --fuse mounts
    Fuse,
}

/// The JSON output about a disk.
#[derive(Serialize)]
struct Attached<'a> {
    volume: &'a str,
    device: &'a str,
    via: Via,
    #[serde(skip_serializing_if = "Option::is_none")]
    sector_size: Option<u32>,
    mounted: Option<&'a Path>,
}

fn need_root(command: &str) -> anyhow::Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    bail!("{command} needs root: it makes and mounts a disk of this machine")
}

/// The file of a volume.
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

fn list(places: &[PathBuf]) -> String {
    let shown: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
    shown.join(", ")
}

fn print(json: bool, shown: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let shown = if json { serde_json::to_string_pretty(shown)? } else { text() };
    Ok(output::line(&shown)?)
}
