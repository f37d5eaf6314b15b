//! The device of the cache: a file, or as root a disk. One that was replaced is taken out: nobody
//! may use it any more.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use crate::rig::cleanup::{self, Held};
use crate::rig::place::Place;

/// Size of a disk: that of the largest cache.
const BYTES: u64 = 48 << 20;

/// A device for a cache.
pub struct Device {
    /// Its path in the configuration.
    pub path: PathBuf,
    /// The file that it is, or that is behind the disk.
    file: PathBuf,
    held: Option<Held>,
}

impl Device {
    /// A blank device, as the `number`-th of a life.
    pub fn new(place: &Place, number: u64, is_disk: bool) -> anyhow::Result<Self> {
        let name = format!("cache-{number}.img");
        if !is_disk {
            let path = place.path(&name);
            return Ok(Self { file: path.clone(), path, held: None });
        }
        let file = place.sparse(&name, BYTES)?;
        let (path, held) = cleanup::loop_device(&file)?;
        Ok(Self { path, file, held: Some(held) })
    }

    /// Takes the device out. It must not be in use any more.
    pub fn take_out(self) -> anyhow::Result<()> {
        let Self { path, file, held } = self;
        // This waits until nobody has the disk open.
        drop(held);
        let is_attached =
            cleanup::backing(&path).is_ok_and(|found| Path::new(found.trim()) == file);
        ensure!(!is_attached, "{} is in use still", path.display());
        // A server that has the file open is to find nothing in it.
        fs::File::create(&file).and_then(|_| fs::remove_file(&file)).context("an old cache")
    }
}
