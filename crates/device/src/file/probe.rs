//! Properties and capabilities of a file or block device, determined when it is opened.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use forebay_block::{DeviceInfo, IoBuf};
use rustix::fs::{AtFlags, FallocateFlags, StatxFlags};
use rustix::io::Errno;

use super::{Direct, set_direct};
use crate::error::OpenError;

/// Alignments to try with `O_DIRECT`, in bytes, smallest first.
const ALIGNMENTS: [u32; 2] = [512, 4096];
/// Preferred unit of I/O in bytes, if the device does not report one.
const OPTIMAL_IO: u32 = 4096;
/// Maximum plausible preferred unit, in bytes.
const OPTIMAL_IO_MAX: u32 = 16 << 20;

/// File systems that can free ranges, by their `statfs` type: ext4, XFS, Btrfs, tmpfs, F2FS.
const PUNCHING: [u64; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010];

/// Size of a file or block device, in bytes.
pub(super) fn size(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

/// Most devices below one another that are followed, such as LVM over md over partitions.
const LAYERS_MAX: u32 = 8;

/// The sysfs directory of a block device, if there is one.
pub(super) fn node(file: &File) -> Option<PathBuf> {
    let number = file.metadata().ok()?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let node = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    node.is_dir().then_some(node)
}

/// Whether the disk of a block device with this sysfs directory was removed: a partition, LVM and
/// md keep their size, and fail requests as a bad sector does. Devices over several disks count as
/// removed when all of these are.
pub(super) fn is_removed(node: &Path) -> bool {
    !is_there(node, LAYERS_MAX)
}

fn is_there(node: &Path, layers: u32) -> bool {
    if layers == 0 {
        return true;
    }
    let size = std::fs::read_to_string(node.join("size"));
    if !size.is_ok_and(|size| size.trim() != "0") {
        return false;
    }
    if node.join("partition").exists() {
        return is_there(&node.join(".."), layers - 1);
    }
    let Ok(below) = std::fs::read_dir(node.join("slaves")) else { return true };
    // The link to a removed disk stays, and leads nowhere.
    let mut below = below.filter_map(Result::ok).peekable();
    below.peek().is_none() || below.any(|one| is_there(&one.path(), layers - 1))
}

/// How a file is read and written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// Bypassing the page cache, in multiples of this many bytes.
    Direct(u32),
    /// Through the page cache, with the reason.
    PageCache(String),
}

impl Way {
    /// A remark for the user; `None` for direct I/O.
    pub(super) fn remark(&self, name: &str) -> Option<String> {
        let Self::PageCache(why) = self else { return None };
        Some(format!("{name} {why}; it is used through the page cache, and flushed at every flush"))
    }
}

/// Turns `O_DIRECT` on as `wanted`. `extent` is the full size of the file or block device, in
/// bytes.
pub(super) fn way(file: &File, name: &str, wanted: Direct, extent: u64) -> Result<Way, OpenError> {
    let found = match wanted {
        Direct::Off => Err(Errno::CANCELED),
        _ => set_direct(file, true).and_then(|()| alignment(file)),
    };
    let way = choose(wanted, found, extent).map_err(|reason| OpenError::unfit(name, reason))?;
    if matches!(way, Way::PageCache(_)) && wanted != Direct::Off {
        // Turning it off works wherever turning it on did; elsewhere it is off anyway.
        set_direct(file, false)
            .map_err(|error| OpenError::system(format!("cannot set up {name}"), error))?;
    }
    Ok(way)
}

/// Decides between `O_DIRECT` and the page cache from what is wanted, the alignment found, and the
/// size. An error if `O_DIRECT` is required and impossible.
fn choose(wanted: Direct, found: Result<u32, Errno>, extent: u64) -> Result<Way, String> {
    let refusal = match (wanted, found) {
        (Direct::Off, _) => {
            return Ok(Way::PageCache("is opened without O_DIRECT, as requested".to_owned()));
        }
        // The last, partial unit would not be writable.
        (_, Ok(align)) if !extent.is_multiple_of(u64::from(align)) => format!(
            "cannot be used with O_DIRECT: its size, {extent} bytes, is not a multiple of {align}"
        ),
        (_, Ok(align)) => return Ok(Way::Direct(align)),
        (_, Err(error)) => format!("cannot be used with O_DIRECT: {error}"),
    };
    if wanted == Direct::On { Err(refusal) } else { Ok(Way::PageCache(refusal)) }
}

/// Whether a completed write may be lost in a power failure before a flush completes. The page
/// cache is volatile, whatever the device below guarantees; so are writes that a file system holds
/// back.
fn is_volatile(way: &Way, is_block: bool, write_cache: Option<&str>) -> bool {
    let kept_below = is_block && write_cache == Some("write through");
    matches!(way, Way::PageCache(_)) || !kept_below
}

/// The alignment for direct I/O: as reported by the block device or file system, or the smallest
/// that a read accepts.
fn alignment(file: &File) -> rustix::io::Result<u32> {
    let fits = |align: u32| if align <= 4096 { Ok(align.max(512)) } else { Err(Errno::NOTSUP) };
    if let Ok(logical) = rustix::fs::ioctl_blksszget(file) {
        return fits(logical);
    }
    // Since Linux 6.1.
    let told = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(told) = told
        && told.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let align = told.stx_dio_offset_align;
        return if align == 0 { Err(Errno::INVAL) } else { fits(align) };
    }
    let mut buf = IoBuf::zeroed(4096);
    let mut refusal = Errno::INVAL;
    // A read of a hole tells nothing: file systems answer it without asking the device.
    let least = BlockQueue::below(file).number("logical_block_size").unwrap_or(0);
    for align in ALIGNMENTS.into_iter().filter(|&align| u64::from(align) >= least) {
        match rustix::io::pread(file, &mut buf[..align as usize], 0) {
            Ok(_) => return Ok(align),
            Err(error) => refusal = error,
        }
    }
    Err(refusal)
}

/// The device information of an open file.
pub(super) fn info(
    file: &File,
    identity: String,
    size: u64,
    way: &Way,
    is_block: bool,
    read_only: bool,
) -> DeviceInfo {
    let mut info = DeviceInfo::plain(size, identity);
    info.logical_block = if let Way::Direct(align) = way { *align } else { 512 };
    info.read_only = read_only;
    if is_block {
        let queue = BlockQueue::of(file);
        info.optimal_io = queue.optimal_io();
        let write_cache = queue.text("write_cache");
        info.volatile_cache = is_volatile(way, is_block, write_cache.as_deref());
        info.rotational = queue.number("rotational") == Some(1);
        info.discard = queue.number("discard_max_bytes").is_some_and(|most| most > 0);
        info.fast_zero = queue.number("write_zeroes_max_bytes").is_some_and(|most| most > 0);
    } else {
        info.optimal_io = OPTIMAL_IO;
        info.discard = !read_only && can_punch(file, size);
        info.fast_zero = info.discard;
    }
    info
}

/// Whether the file system can free a range. Known file systems are not probed, because a probe
/// changes the modification time, which tells whether anybody else has changed the file. Others are
/// probed beyond the end of the file.
fn can_punch(file: &File, size: u64) -> bool {
    let kind = rustix::fs::fstatfs(file).map(|found| found.f_type as u64 & u64::from(u32::MAX));
    if kind.is_ok_and(|kind| PUNCHING.contains(&kind)) {
        return true;
    }
    let before = file.metadata().and_then(|found| found.modified());
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let can = rustix::fs::fallocate(file, mode, size.next_multiple_of(4096), 4096).is_ok();
    if let Ok(before) = before {
        // If this is not permitted, the file looks modified.
        let _ = file.set_modified(before);
    }
    can
}

/// The sysfs `queue` directory of a block device; for a partition, that of its disk.
struct BlockQueue(Option<PathBuf>);

impl BlockQueue {
    /// That of a block device.
    fn of(file: &File) -> Self {
        Self::with(file.metadata().map(|found| found.rdev()))
    }

    /// That of the block device below a file's file system, if there is one.
    fn below(file: &File) -> Self {
        Self::with(file.metadata().map(|found| found.dev()))
    }

    fn with(number: io::Result<u64>) -> Self {
        let Ok(number) = number else { return Self(None) };
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let own = device.join("queue");
        Self(Some(if own.is_dir() { own } else { device.join("../queue") }))
    }

    fn text(&self, name: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.0.as_ref()?.join(name)).ok()?;
        Some(text.trim().to_owned())
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    fn optimal_io(&self) -> u32 {
        let told = self.number("optimal_io_size").and_then(|n| u32::try_from(n).ok());
        told.unwrap_or(0).clamp(OPTIMAL_IO, OPTIMAL_IO_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory as sysfs has it: a disk and its partition, LVM over md over both, and LVM over
    /// the partition.
    struct Sysfs(PathBuf);

    impl Sysfs {
        fn new() -> Self {
            let all = std::env::temp_dir().join(format!("forebay-sysfs-{}", std::process::id()));
            let sysfs = Self(all);
            for (name, below) in [
                ("disk", &[][..]),
                ("disk/part", &[]),
                ("other", &[]),
                ("md", &["disk/part", "other"]),
                ("lvm", &["md"]),
                ("single", &["disk/part"]),
            ] {
                let slaves = sysfs.node(name).join("slaves");
                std::fs::create_dir_all(&slaves).unwrap();
                sysfs.resize(name, 8);
                for (at, one) in below.iter().enumerate() {
                    let link = slaves.join(at.to_string());
                    std::os::unix::fs::symlink(sysfs.node(one), link).unwrap();
                }
            }
            std::fs::write(sysfs.node("disk/part/partition"), "1\n").unwrap();
            sysfs
        }

        fn node(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }

        fn resize(&self, name: &str, sectors: u64) {
            std::fs::write(self.node(name).join("size"), format!("{sectors}\n")).unwrap();
        }

        fn removed(&self) -> Vec<&'static str> {
            let all = ["disk", "disk/part", "md", "lvm", "single"];
            all.into_iter().filter(|name| is_removed(&self.node(name))).collect()
        }
    }

    impl Drop for Sysfs {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_device_is_removed_with_all_disks_below_it() {
        let sysfs = Sysfs::new();
        assert_eq!(sysfs.removed(), [""; 0]);
        sysfs.resize("disk", 0);
        assert_eq!(sysfs.removed(), ["disk", "disk/part", "single"]);
        sysfs.resize("disk", 8);
        assert_eq!(sysfs.removed(), [""; 0]);
        std::fs::remove_dir_all(sysfs.node("disk")).unwrap();
        assert_eq!(sysfs.removed(), ["disk", "disk/part", "single"]);
        sysfs.resize("other", 0);
        assert_eq!(sysfs.removed(), ["disk", "disk/part", "md", "lvm", "single"]);
    }

    /// Every combination of sectors, size, refusal of `O_DIRECT` and reported volatility. A flush
    /// may be skipped only with direct I/O to a device without a volatile cache.
    #[test]
    fn no_flush_is_left_out_where_the_page_cache_is_used() {
        let wanted = [Direct::Auto, Direct::On, Direct::Off];
        let found = [Ok(512), Ok(4096), Err(Errno::INVAL)];
        for (wanted, found) in wanted.into_iter().flat_map(|w| found.map(|f| (w, f))) {
            for extent in [1_000_000_000u64, 1 << 30] {
                let fits = found.is_ok_and(|align| extent.is_multiple_of(u64::from(align)));
                let way = match choose(wanted, found, extent) {
                    Ok(way) => way,
                    Err(why) => {
                        assert!(wanted == Direct::On && !fits, "{why}");
                        continue;
                    }
                };
                let direct = matches!(way, Way::Direct(_));
                assert_eq!(direct, wanted != Direct::Off && fits, "{wanted:?} {found:?} {extent}");
                for write_cache in [None, Some("write back"), Some("write through")] {
                    let kept = direct && write_cache == Some("write through");
                    assert_eq!(is_volatile(&way, true, write_cache), !kept, "{way:?}");
                    assert!(is_volatile(&way, false, write_cache), "a file system has a cache");
                }
            }
        }
    }
}
