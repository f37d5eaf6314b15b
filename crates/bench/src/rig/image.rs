//! Images of disks with a loaded database, made once on the bare SSD and copied for each set-up. A
//! note next to each image describes how it was made; if it does not match, the image is made
//! again.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use crate::report::progress;
use crate::rig::cleanup::{self, finish, tool};
use crate::rig::needs;
use crate::rig::place::Place;

/// A ready image.
#[derive(Clone, Debug)]
pub struct Image {
    /// The file.
    pub path: PathBuf,
    /// Size of the database in it without the redo log, in bytes.
    pub data: u64,
    /// Size of the disk, in bytes.
    pub size: u64,
}

/// The note next to an image.
#[derive(PartialEq, Serialize, Deserialize)]
struct Note {
    made_of: String,
    data: u64,
    size: u64,
}

/// The image `name` in a directory, made as `made_of` describes. If it does not exist, a disk of
/// `size` bytes is formatted with XFS and mounted, and `load` fills the directory.
pub fn prepare(
    dir: &Path,
    name: &str,
    made_of: &str,
    size: u64,
    load: impl FnOnce(&Path, &Path) -> anyhow::Result<()>,
) -> anyhow::Result<Image> {
    let (path, note) = (dir.join(format!("{name}.img")), dir.join(format!("{name}.json")));
    let known = fs::read(&note).ok().and_then(|text| serde_json::from_slice::<Note>(&text).ok());
    if let Some(known) = known
        && known.made_of == made_of
        && known.size == size
        && path.exists()
    {
        progress(&format!("using {}", path.display()));
        return Ok(Image { path, data: known.data, size });
    }
    for old in [&note, &path] {
        if old.exists() {
            fs::remove_file(old).with_context(|| format!("{}", old.display()))?;
        }
    }
    needs::space(dir, size)?;
    let place = Place::new(Some(dir))?;
    place.sparse("new", size)?;
    let data = {
        let (device, _attached) = cleanup::loop_device(&place.path("new"))?;
        finish(tool("mkfs.xfs").args(["-q", "-f", "-K"]).arg(&device))?;
        let at = place.path("mnt");
        let _mounted = cleanup::mount(&device, &at)?;
        load(&at, &place.path("run"))?;
        size_of(&at)?
    };
    fs::rename(place.path("new"), &path)?;
    let text = serde_json::to_string(&Note { made_of: made_of.to_owned(), data, size })?;
    fs::write(&note, text)?;
    Ok(Image { path, data, size })
}

impl Image {
    /// Copies it into a place.
    pub fn copy(&self, place: &Place, name: &str) -> anyhow::Result<()> {
        progress("copying the image");
        let mut command = tool("cp");
        command.args(["--reflink=auto", "--sparse=always"]).arg(&self.path).arg(place.path(name));
        finish(&mut command)?;
        // During measurements the copy must neither be cached in memory nor still be written back.
        let file = fs::File::open(place.path(name))?;
        file.sync_all()?;
        drop_caches();
        Ok(())
    }
}

/// Drops the kernel's page cache; has no effect without root.
pub fn drop_caches() {
    let _ = fs::write("/proc/sys/vm/drop_caches", "3");
}

/// Size in bytes of the database files under a directory, without MariaDB's or PostgreSQL's redo
/// log.
fn size_of(dir: &Path) -> anyhow::Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(dir)? {
        let (entry, path) = entry.map(|entry| (entry.file_type(), entry.path()))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let redo = name.starts_with("ib_log") || name == "pg_wal";
        if entry?.is_dir() && !redo {
            sum += size_of(&path)?;
        } else if !redo {
            sum += path.metadata()?.len();
        }
    }
    ensure!(sum > 0 || dir.exists(), "{}: nothing was loaded", dir.display());
    Ok(sum)
}
