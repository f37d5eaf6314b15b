//! Regular files and block devices.
//!
//! A file is opened once, locked against other processes, and shared by the queues of all threads.
//! `O_DIRECT` is used where the file system supports it, so that the page cache neither holds the
//! data twice nor hides device failures.

mod identity;
mod probe;
mod queue;

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::{DeviceInfo, IoQueue};
use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;

use crate::device::BlockDevice;
use crate::error::OpenError;
use crate::ring::Ring;
use probe::Way;
use queue::FileQueue;

/// Device sizes must be multiples of this, in bytes.
const SECTOR: u64 = 512;

/// Whether to bypass the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Direct {
    /// If the file system supports it.
    #[default]
    Auto,
    /// Always; fail if the file system does not support it.
    On,
    /// Never.
    Off,
}

/// How to open a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenMode {
    /// Refuse writes, and share the lock with other readers.
    pub read_only: bool,
    /// Whether to bypass the page cache.
    pub direct: Direct,
    /// Create the file with this many bytes if it does not exist or is empty; an existing file must
    /// have this size. Of a block device, use this many bytes from the start.
    pub create_size: Option<u64>,
}

/// A regular file or a block device.
#[derive(Clone)]
pub struct FileDevice {
    shared: Arc<Shared>,
}

/// State shared by all queues of a file.
struct Shared {
    file: File,
    info: DeviceInfo,
    direct: bool,
    is_block: bool,
    /// The sysfs directory of a block device, if it had one when it was opened.
    node: Option<PathBuf>,
    /// A remark for the user about how it was opened.
    remark: Option<String>,
}

impl FileDevice {
    /// Opens and locks `path`.
    ///
    /// # Errors
    /// When the system refuses, the file is in use, or it cannot serve as a device.
    pub fn open(path: &Path, mode: OpenMode) -> Result<Self, OpenError> {
        let name = path.display().to_string();
        let is_block = match std::fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => true,
            Ok(found) if found.is_file() => false,
            Ok(_) => return Err(OpenError::unfit(name, "is neither a file nor a block device")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Self::create(path, name, mode);
            }
            Err(error) => return Err(OpenError::system(format!("cannot open {name}"), error)),
        };
        let file = open_file(path, &name, mode, is_block)?;
        lock(&file, (path, &name), mode, is_block)?;
        Self::over(file, path, name, mode, is_block)
    }

    fn create(path: &Path, name: String, mode: OpenMode) -> Result<Self, OpenError> {
        let Some(_) = mode.create_size.filter(|_| !mode.read_only) else {
            let absent = io::Error::from(Errno::NOENT);
            return Err(OpenError::system(format!("cannot open {name}"), absent));
        };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let made = options.open(path);
        let file = made.map_err(|e| OpenError::system(format!("cannot create {name}"), e))?;
        // Somebody else may have found it and be using it.
        lock(&file, (path, &name), mode, false)?;
        let device = Self::over(file, path, name, mode, false);
        if device.is_err() {
            // The file was created by this call and is unused; the first error is the one to
            // report.
            let _ = std::fs::remove_file(path);
        }
        device
    }

    fn over(
        file: File,
        path: &Path,
        name: String,
        mode: OpenMode,
        is_block: bool,
    ) -> Result<Self, OpenError> {
        let size = settle_size(&file, &name, mode, is_block)?;
        // A used part of a block device need not be whole units, since the device extends beyond
        // it.
        let extent = probe::size(&file)
            .map_err(|error| OpenError::system(format!("cannot size {name}"), error))?;
        let way = probe::way(&file, &name, mode.direct, extent)?;
        let remark = way.remark(&name);
        let name = path.canonicalize().map_or(name, |path| path.display().to_string());
        let identity = if is_block { identity::of_block(&file, &name) } else { name.clone() };
        let mut info = probe::info(&file, identity, size, &way, is_block, mode.read_only);
        info.name = name;
        let direct = matches!(way, Way::Direct(_));
        let node = if is_block { probe::node(&file) } else { None };
        let shared = Shared { file, info, direct, is_block, node, remark };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Whether the page cache is bypassed.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.shared.direct
    }
}

/// The size of a file or block device in bytes, whoever is using it.
///
/// # Errors
/// When the system refuses.
pub fn extent(path: &Path) -> Result<u64, OpenError> {
    let name = path.display();
    let failed = |error| OpenError::system(format!("cannot size {name}"), error);
    probe::size(&File::open(path).map_err(failed)?).map_err(failed)
}

impl BlockDevice for FileDevice {
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn remark(&self) -> Option<&str> {
        self.shared.remark.as_deref()
    }

    fn keeps_space(&self) -> bool {
        !self.shared.is_block
    }

    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        let file = ring.register(&self.shared.file)?;
        Ok(Box::new(FileQueue::new(Arc::clone(&self.shared), ring.client(), file)))
    }
}

fn open_file(path: &Path, name: &str, mode: OpenMode, block: bool) -> Result<File, OpenError> {
    let mut options = OpenOptions::new();
    options.read(true).write(!mode.read_only);
    if block {
        // On a block device: fail if it is mounted or opened exclusively elsewhere.
        options.custom_flags(libc::O_EXCL);
    }
    options.open(path).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::BUSY) if block => OpenError::InUse { path: name.to_owned() },
        _ => OpenError::system(format!("cannot open {name}"), error),
    })
}

fn lock(
    file: &File,
    (path, name): (&Path, &str),
    mode: OpenMode,
    is_block: bool,
) -> Result<(), OpenError> {
    if is_block {
        return Ok(()); // O_EXCL did it.
    }
    let kind = if mode.read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    rustix::fs::flock(file, kind).map_err(|error| match error {
        Errno::WOULDBLOCK => OpenError::InUse { path: name.to_owned() },
        _ => OpenError::system(format!("cannot lock {name}"), error),
    })?;
    // Another process may have taken it away between its opening and now, and made a new one.
    let found = file.metadata();
    let found = found.map_err(|error| OpenError::system(format!("cannot open {name}"), error))?;
    let is_it = |there: &Metadata| (there.dev(), there.ino()) == (found.dev(), found.ino());
    match std::fs::metadata(path) {
        Ok(there) if is_it(&there) => Ok(()),
        _ => Err(OpenError::InUse { path: name.to_owned() }),
    }
}

/// The size of the device; an empty file is given the requested size, with its space allocated.
fn settle_size(file: &File, name: &str, mode: OpenMode, is_block: bool) -> Result<u64, OpenError> {
    let failed = |error: io::Error| OpenError::system(format!("cannot size {name}"), error);
    let found = probe::size(file).map_err(failed)?;
    let size = match mode.create_size {
        Some(wanted) if found == 0 && !is_block && !mode.read_only => {
            check_size(name, wanted)?;
            allocate(file, wanted).or_else(|error| {
                // A part may be allocated: it would be taken for a file of another size.
                file.set_len(0).map_err(failed)?;
                Err(failed(error))
            })?;
            wanted
        }
        Some(wanted) if found != wanted && !is_block => {
            let reason = format!(
                "has {found} bytes, not the {wanted} asked for; leave the size out to use it as \
                 it is, or name another file"
            );
            return Err(OpenError::unfit(name, reason));
        }
        Some(wanted) if found < wanted => {
            let reason = format!(
                "has {found} bytes, fewer than the {wanted} asked for; leave the size out to use \
                 all of it"
            );
            return Err(OpenError::unfit(name, reason));
        }
        // A block device may be used in part.
        Some(wanted) => wanted,
        None => found,
    };
    check_size(name, size)?;
    Ok(size)
}

fn check_size(name: &str, size: u64) -> Result<(), OpenError> {
    if size == 0 {
        return Err(OpenError::unfit(name, "is empty; give it a size"));
    }
    if !size.is_multiple_of(SECTOR) {
        let reason = format!("has {size} bytes, which is not a multiple of {SECTOR}");
        return Err(OpenError::unfit(name, reason));
    }
    Ok(())
}

/// Allocates the space now, so that writes do not run out of it later. If the file system cannot,
/// only the size is set.
fn allocate(file: &File, size: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
        Err(Errno::OPNOTSUPP) => file.set_len(size),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(()),
    }
}

/// Turns `O_DIRECT` on or off for an open file.
fn set_direct(file: &File, on: bool) -> rustix::io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, on);
    rustix::fs::fcntl_setfl(file, flags)
}

#[cfg(test)]
mod tests;
