//! Devices that have bytes in common under different names: hard links of a file, a loop device and
//! its file, a partition and its disk. The locks of files and devices do not tell: two of them are
//! locked on their own.
//!
//! Disks of device-mapper and md hold what they are made of, so the kernel refuses to open that.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::bail;
use forebay_control::config::Config;
use forebay_device::primary_path;

use crate::disk::loops;

/// Sectors of sysfs have this size, whatever those of the device are.
const SECTOR: u64 = 512;

/// The bytes of a file or block device, in what it is made of in the end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    of: Base,
    bytes: Range<u64>,
}

/// What is made of nothing else that is known here.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Base {
    /// Device and inode number.
    File(u64, u64),
    /// Major and minor number.
    Disk(u32, u32),
}

impl Span {
    /// The bytes of the file or block device at `path`; `None` if there is none.
    pub fn of(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        if found.file_type().is_block_device() {
            return Self::of_device(found.rdev());
        }
        // Whatever its size is, and becomes.
        let of = Base::File(found.dev(), found.ino());
        found.is_file().then_some(Self { of, bytes: 0..u64::MAX })
    }

    fn of_device(number: u64) -> Option<Self> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let link = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let directory = link.canonicalize().ok()?;
        let text = |name: &str| fs::read_to_string(directory.join(name)).ok();
        let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
        let size = number("size")?.saturating_mul(SECTOR);
        if let Some(start) = number("start") {
            let disk = fs::read_to_string(directory.parent()?.join("dev")).ok()?;
            let (major, minor) = disk.trim().split_once(':')?;
            let disk = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
            return Some(Self::of_device(disk)?.part(start.saturating_mul(SECTOR), size));
        }
        match text("loop/backing_file") {
            None => Some(Self { of: Base::Disk(major, minor), bytes: 0..size }),
            Some(file) => {
                let name = directory.file_name()?.to_string_lossy().into_owned();
                let below = below_loop(&name, Path::new(file.trim_end_matches('\n')))?;
                Some(below.part(number("loop/offset").unwrap_or(0), size))
            }
        }
    }

    /// `size` bytes of it from `from`.
    fn part(self, from: u64, size: u64) -> Self {
        let start = self.bytes.start.saturating_add(from);
        Self { of: self.of, bytes: start..start.saturating_add(size) }
    }

    /// Whether both have bytes in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (&self.bytes, &other.bytes);
        self.of == other.of && a.start < b.end && b.start < a.end
    }
}

/// What a loop device is made of. Its file may have another name by now, which `losetup` sees
/// through.
fn below_loop(name: &str, file: &Path) -> Option<Span> {
    let is_block = fs::metadata(file).is_ok_and(|found| found.file_type().is_block_device());
    let path = format!("/dev/{name}");
    let known = || loops::all().ok()?.into_iter().find(|device| device.path == path);
    match if is_block { None } else { known() } {
        Some(device) => {
            let (dev, inode) = device.identity;
            Some(Span { of: Base::File(dev, inode), bytes: 0..u64::MAX })
        }
        None => Span::of(file),
    }
}

/// Fails if the cache and a primary, or two primaries, have bytes in common. What is not there, or
/// on a network, has none.
pub fn check(config: &Config) -> anyhow::Result<()> {
    let cache = &config.cache.path;
    let mut known = Vec::new();
    known.extend(Span::of(cache).map(|span| ("the cache".to_owned(), cache.clone(), span)));
    for volume in &config.volumes {
        let Ok(Some(path)) = primary_path(&volume.primary) else { continue };
        let Some(span) = Span::of(&path) else { continue };
        if let Some((other, at, _)) = known.iter().find(|(.., known)| known.overlaps(&span)) {
            bail!(
                "volume {}: primary {} has bytes in common with {other}, {}: one would overwrite \
                 the other; name different devices",
                volume.name,
                path.display(),
                at.display()
            );
        }
        known.push((format!("the primary of volume {}", volume.name), path, span));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_one_thing_overlap_where_they_have_bytes_in_common() {
        let disk = Span { of: Base::Disk(8, 0), bytes: 0..1 << 30 };
        let part = |from: u64, size: u64| disk.clone().part(from << 20, size << 20);
        let (first, second) = (part(1, 10), part(11, 10));
        assert!(!first.overlaps(&second) && !second.overlaps(&first));
        assert!(first.overlaps(&disk) && disk.overlaps(&second));
        assert!(part(5, 10).overlaps(&first) && part(5, 10).overlaps(&second));
        // A partition of a loop device over a part of the disk.
        assert!(part(11, 10).part(1 << 20, 1 << 20).overlaps(&second));
        assert!(!part(11, 10).part(1 << 20, 1 << 20).overlaps(&first));
        assert!(!Span { of: Base::Disk(8, 16), ..disk.clone() }.overlaps(&disk));
    }

    #[test]
    fn a_file_is_the_same_under_each_of_its_names() {
        let place = std::env::temp_dir().join(format!("forebay-overlap-{}", std::process::id()));
        fs::create_dir_all(&place).expect("a directory can be made");
        let [one, link, other] = ["one", "link", "other"].map(|name| place.join(name));
        fs::write(&one, "x").expect("it is written");
        fs::write(&other, "x").expect("it is written");
        fs::hard_link(&one, &link).expect("it is linked");
        let span = |path: &Path| Span::of(path).expect("it is there");
        assert!(span(&one).overlaps(&span(&link)));
        assert!(!span(&one).overlaps(&span(&other)));
        assert_eq!(Span::of(&place.join("absent")), None);
        fs::remove_dir_all(&place).expect("it is ours");
    }
}
