//! Where a file lies on a volume: the extents that its file system reports (FIEMAP), on a disk that
//! is the volume.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use fiemap::{Fiemap, FiemapExtentFlags};
use forebay_control::api::VolumeStatus;

/// Extents with fewer bytes than this between them become one, so that a fragmented file has fewer.
const GAP: u64 = 64 << 10;
/// Bytes of a sector in the kernel's files.
const SECTOR: u64 = 512;

/// The bytes of a volume that a file takes, in order. `device` is the disk that is the volume, if
/// the server does not know it.
pub fn of_file(
    path: &Path,
    volume: &VolumeStatus,
    device: Option<&Path>,
) -> anyhow::Result<Vec<std::ops::Range<u64>>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let found = file.metadata()?;
    ensure!(found.is_file(), "{} is not a file", path.display());
    let start = start_on(found.dev(), path, volume, device)?;
    let unknown = FiemapExtentFlags::UNKNOWN
        | FiemapExtentFlags::DELALLOC
        | FiemapExtentFlags::ENCODED
        | FiemapExtentFlags::NOT_ALIGNED;
    // What is not written yet has no place.
    file.sync_all().with_context(|| path.display().to_string())?;
    let mut all: Vec<std::ops::Range<u64>> = Vec::new();
    for extent in Fiemap::new(&file) {
        let extent = extent.with_context(|| {
            format!("{}: its file system does not tell where it lies", path.display())
        })?;
        if extent.fe_flags.intersects(unknown) {
            bail!("{}: a part of it has no plain place on the disk", path.display());
        }
        let from = start + extent.fe_physical;
        let end = from + extent.fe_length;
        ensure!(end <= volume.size, "{} is not on volume {}", path.display(), volume.name);
        all.push(from..end);
    }
    Ok(joined(all))
}

/// Ranges in order, without small gaps.
fn joined(mut all: Vec<std::ops::Range<u64>>) -> Vec<std::ops::Range<u64>> {
    all.sort_by_key(|range| range.start);
    all.dedup_by(|next, range| {
        let near = next.start <= range.end.saturating_add(GAP);
        if near {
            range.end = range.end.max(next.end);
        }
        near
    });
    all
}

/// Where the file system with device number `number` begins on the volume.
fn start_on(
    number: u64,
    path: &Path,
    volume: &VolumeStatus,
    device: Option<&Path>,
) -> anyhow::Result<u64> {
    let numbers = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    let Ok(disk) = fs::canonicalize(format!("/sys/dev/block/{numbers}")) else {
        bail!("{}: its file system is not on one disk; name the range with --range", path.display())
    };
    let read = |disk: &Path, name: &str| {
        let text = fs::read_to_string(disk.join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let (disk, start) = match read(&disk, "partition").and_then(|_| read(&disk, "start")) {
        Some(start) => (disk.parent().map(Path::to_owned).unwrap_or_default(), start * SECTOR),
        None => (disk, 0),
    };
    let name = disk.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let own: Vec<PathBuf> = volume.devices.iter().map(PathBuf::from).collect();
    let is_volume = |known: &Path| {
        let real = fs::canonicalize(known).unwrap_or_else(|_| known.to_owned());
        real == Path::new("/dev").join(&name)
    };
    if own.iter().any(|known| is_volume(known)) || device.is_some_and(is_volume) {
        return Ok(start + read(&disk, "loop/offset").unwrap_or(0));
    }
    bail!(
        "{} is on /dev/{name}, which the server does not know as volume {}; if it is, add --device \
         /dev/{name}",
        path.display(),
        volume.name
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_near_each_other_are_one() {
        let gap = GAP;
        let far = 10 * gap;
        assert_eq!(joined(vec![far..far + 1, 4096..8192, 0..4096]), [0..8192, far..far + 1]);
        let near = joined(vec![0..4096, 4096 + gap..8192 + gap]);
        assert_eq!(near.first(), Some(&(0..8192 + gap)));
        assert_eq!(near.len(), 1);
        assert!(joined(Vec::new()).is_empty());
    }
}
