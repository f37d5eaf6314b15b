//! The control side of a device: its properties, and a queue for each thread that uses it.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::{DeviceInfo, ErrorKind, Io, IoError, IoOp, IoQueue};

use crate::layer::watch::Watch;
use crate::ring::Ring;

/// A device that any number of threads may use, each through its own queue.
///
/// The handle is shared between threads; a queue belongs to the thread of its ring. Dropping a
/// queue discards the completions of requests in flight, not the requests: wait for them first.
pub trait BlockDevice: Send + Sync {
    /// Properties of the device; constant while the device is open.
    fn info(&self) -> &DeviceInfo;

    /// A remark for the user about how it was opened, for the log.
    fn remark(&self) -> Option<&str> {
        None
    }

    /// Whether its space was allocated in advance and should stay so: a discard would give it back.
    fn keeps_space(&self) -> bool {
        false
    }

    /// Whether it only stands in for an absent device.
    fn is_away(&self) -> bool {
        false
    }

    /// Tells that the last user of the device was killed, and may have requests under way that are
    /// still carried out. Queues opened from now on hold changes back until none of them can be.
    ///
    /// Files and disks need nothing: the kernel does not let go of a file, or of a lock on it,
    /// before the requests of a process that has ended.
    fn await_stragglers(&self) {}

    /// Whether changes that nobody waits for any more may still be carried out: those of a user
    /// that was killed, or those that failed when a connection broke. If the user ends meanwhile,
    /// the next one must [wait](Self::await_stragglers).
    fn has_stragglers(&self) -> bool {
        false
    }

    /// Gives the device what is on record of its content. A device that loses its peer for a time
    /// recognizes it by that, and does not use another one. The first call counts.
    fn recognize_by(&self, record: &Arc<Watch>) {
        let _ = record;
    }

    /// Prepares for opening `queues` more queues, so that opening them does not block: a device
    /// that needs a connection for each makes them here. Queues in use are not counted.
    ///
    /// # Errors
    /// When the device supports fewer at a time, for example because a server does not share an
    /// export.
    fn prepare(&self, queues: usize) -> io::Result<()> {
        let _ = queues;
        Ok(())
    }

    /// Opens a queue whose completions arrive through `ring`.
    ///
    /// # Errors
    /// The reason why the operating system or the peer refused.
    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>>;
}

/// Checks common to all devices: an error if the range is not on the device, the buffer does not
/// match the range, or the device is read-only and the request changes data.
pub(crate) fn check(info: &DeviceInfo, io: &Io) -> Result<(), IoError> {
    let carries_data = matches!(io.op, IoOp::Read | IoOp::Write);
    let fits = io.range.offset.checked_add(io.range.len).is_some_and(|end| end <= info.size);
    if !fits || (carries_data && io.buf.len() as u64 != io.range.len) {
        return Err(ErrorKind::OutOfRange.into());
    }
    if io.op == IoOp::Prefetch {
        return Err(ErrorKind::Unsupported.into());
    }
    if info.read_only && io.op.changes_data() {
        return Err(ErrorKind::ReadOnly.into());
    }
    Ok(())
}
