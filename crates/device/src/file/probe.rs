//! What a file or block device is and can do, found out when it is opened.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use forebay_block::{DeviceInfo, IoBuf};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{Direct, set_direct};
use crate::error::OpenError;

/// Alignments to try with `O_DIRECT`, the smallest first.
const ALIGNMENTS: [u32; 2] = [512, 4096];
/// The preferred unit of I/O where the device does not name one.
const OPTIMAL_IO: u32 = 4096;
/// The longest preferred unit believed.
const OPTIMAL_IO_MAX: u32 = 16 << 20;

/// Bytes in a file or on a block device.
pub(super) fn size(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

/// Turns `O_DIRECT` on as wanted and returns the alignment it needs, or `None` where the page
/// cache is used.
pub(super) fn direct(
    file: &File,
    name: &str,
    wanted: Direct,
    size: u64,
) -> Result<Option<u32>, OpenError> {
    if wanted == Direct::Off {
        return Ok(None);
    }
    let found = set_direct(file, true).and_then(|()| alignment(file));
    let refusal = match found {
        // The last, partial unit could not be written: use the page cache for such a size.
        Ok(align) if !size.is_multiple_of(u64::from(align)) => format!(
            "cannot be used with O_DIRECT: its size, {size} bytes, is not a multiple of {align}"
        ),
        Ok(align) => return Ok(Some(align)),
        Err(error) => format!("cannot be used with O_DIRECT: {error}"),
    };
    if wanted == Direct::On {
        return Err(OpenError::unfit(name, refusal));
    }
    // Where it could be turned on, it can be turned off; where it could not, it is off.
    set_direct(file, false)
        .map_err(|error| OpenError::system(format!("cannot set up {name}"), error))?;
    Ok(None)
}

/// The alignment of direct I/O: what the block device says, or the smallest that a read accepts.
fn alignment(file: &File) -> rustix::io::Result<u32> {
    if let Ok(logical) = rustix::fs::ioctl_blksszget(file) {
        return if logical <= 4096 { Ok(logical.max(512)) } else { Err(Errno::NOTSUP) };
    }
    let mut buf = IoBuf::zeroed(4096);
    let mut refusal = Errno::INVAL;
    for align in ALIGNMENTS {
        match rustix::io::pread(file, &mut buf[..align as usize], 0) {
            Ok(_) => return Ok(align),
            Err(error) => refusal = error,
        }
    }
    Err(refusal)
}

/// Everything an open file tells about itself.
pub(super) fn info(
    file: &File,
    identity: String,
    size: u64,
    direct: Option<u32>,
    is_block: bool,
    read_only: bool,
) -> DeviceInfo {
    let mut info = DeviceInfo::plain(size, identity);
    info.logical_block = direct.unwrap_or(512);
    info.read_only = read_only;
    if is_block {
        let queue = BlockQueue::of(file);
        info.optimal_io = queue.optimal_io();
        info.volatile_cache = queue.text("write_cache").is_none_or(|kind| kind != "write through");
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

/// Whether the file system can free a range; asked beyond the end, where nothing is. The time of
/// the file's last change stays what it was: it tells whether somebody else has changed it.
fn can_punch(file: &File, size: u64) -> bool {
    let before = file.metadata().and_then(|found| found.modified());
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let can = rustix::fs::fallocate(file, mode, size.next_multiple_of(4096), 4096).is_ok();
    if let Ok(before) = before {
        // Where this is not allowed, the file merely looks changed.
        let _ = file.set_modified(before);
    }
    can
}

/// The `queue` directory of a block device, or of the disk that a partition is on.
struct BlockQueue(Option<PathBuf>);

impl BlockQueue {
    fn of(file: &File) -> Self {
        let Ok(found) = file.metadata() else { return Self(None) };
        let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
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
