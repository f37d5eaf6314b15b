//! The control side of a device: what it is, and a queue for each thread that uses it.

use std::io;
use std::rc::Rc;

use forebay_block::{DeviceInfo, ErrorKind, Io, IoError, IoOp, IoQueue};

use crate::ring::Ring;

/// A device that any number of threads may use, each through a queue of its own.
///
/// The handle is shared between threads; a queue belongs to the thread of its ring. Dropping a
/// queue drops the completions of what is in flight, not the requests: wait for them first.
pub trait BlockDevice: Send + Sync {
    /// What the device is and can do. Never changes while the device is open.
    fn info(&self) -> &DeviceInfo;

    /// What the user should know of how it was opened, for the log.
    fn remark(&self) -> Option<&str> {
        None
    }

    /// Whether it only stands in for a device that is not there.
    fn is_away(&self) -> bool {
        false
    }

    /// Makes ready for `queues` queues that are opened next, so that opening them waits for nobody:
    /// a device that needs a connection for each makes them here. Queues in use are not counted.
    ///
    /// # Errors
    /// When the device gives fewer at once, as where a server shares an export with nobody.
    fn prepare(&self, queues: usize) -> io::Result<()> {
        let _ = queues;
        Ok(())
    }

    /// Opens a queue whose completions arrive through `ring`.
    ///
    /// # Errors
    /// Why the operating system, or the other side of a connection, refused.
    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>>;
}

/// What every device refuses before it does anything: a range that is not on it, a buffer that
/// does not match its range, a change when it is read-only.
pub(crate) fn check(info: &DeviceInfo, io: &Io) -> Result<(), IoError> {
    let carries_data = matches!(io.op, IoOp::Read | IoOp::Write);
    let fits = io.range.offset.checked_add(io.range.len).is_some_and(|end| end <= info.size);
    if !fits || (carries_data && io.buf.len() as u64 != io.range.len) {
        return Err(ErrorKind::OutOfRange.into());
    }
    if info.read_only && io.op.changes_data() {
        return Err(ErrorKind::ReadOnly.into());
    }
    Ok(())
}
