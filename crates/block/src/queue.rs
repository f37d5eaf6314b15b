//! The contract between a submitter of block I/O and the device or layer that performs it.

use crate::{Completion, Instant, Io};

/// Properties and capabilities of a device. Callers check them and assume nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Bytes on the device, a multiple of 512.
    pub size: u64,
    /// Unit of offsets and lengths of reads and writes, in bytes; a power of two, at most 4096.
    pub logical_block: u32,
    /// The preferred unit of I/O in bytes; for a striped array its stripe.
    pub optimal_io: u32,
    /// Whether completed writes may be lost on power failure until a flush completes.
    pub volatile_cache: bool,
    /// Whether a flush covers only requests completed on its own queue, rather than on any queue.
    pub flush_by_queue: bool,
    /// Whether `Discard` does anything.
    pub discard: bool,
    /// Whether `WriteZeroes` is faster than writing zeros.
    pub fast_zero: bool,
    /// Whether the device has seek costs.
    pub rotational: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Stable identity, to recognize the device under any name: a disk's own ID, a file's path, an
    /// export's URI.
    pub identity: String,
    /// Current name, a path or a URI; for messages.
    pub name: String,
}

impl DeviceInfo {
    /// A device of `size` bytes with nothing special about it: 512-byte logical blocks, a
    /// volatile cache, discard and write-zeroes.
    #[must_use]
    pub fn plain(size: u64, identity: impl Into<String>) -> Self {
        let identity = identity.into();
        Self {
            size,
            logical_block: 512,
            optimal_io: 4096,
            volatile_cache: true,
            flush_by_queue: false,
            discard: true,
            fast_zero: false,
            rotational: false,
            read_only: false,
            name: identity.clone(),
            identity,
        }
    }
}

/// One thread's access to a device. It behaves as an NVMe queue does:
///
/// - Between flushes no order is promised, not even for overlapping requests in flight; a caller
///   that needs an order waits for the completion.
/// - A completed `Flush` makes durable every change whose completion was reaped before the flush
///   was submitted, on any queue of the device, or on this queue alone if
///   [`DeviceInfo::flush_by_queue`] is set. If a flush fails, every completed and unflushed change,
///   on any queue, may be lost, and no later flush reports it again. A request completed with `fua`
///   is durable itself.
/// - After a crash, an unflushed change may be present, absent, or partly present, in units of a
///   sector.
/// - Every accepted request completes exactly once, and its buffer comes back with it.
/// - No call blocks. Completions are found by `poll`, which the owner calls when its event loop
///   reports an event, and at `deadline` at the latest.
pub trait IoQueue {
    /// Properties of the device.
    fn info(&self) -> &DeviceInfo;

    /// Accepts a request.
    ///
    /// # Errors
    /// Returns the request if the queue is full; try again after a completion.
    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io>;

    /// Appends the completed requests to `done`.
    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>);

    /// The time by which `poll` must be called even without an event; `None` if events suffice.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}
