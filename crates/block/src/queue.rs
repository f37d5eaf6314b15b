//! The contract between a submitter of block I/O and whoever carries it out.

use crate::{Completion, Instant, Io};

/// What a device is and can do. Ask; never assume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Bytes on the device, a multiple of 512.
    pub size: u64,
    /// Offsets and lengths of reads and writes are multiples of this; a power of two of at most
    /// 4096.
    pub logical_block: u32,
    /// The preferred unit of I/O in bytes; for a striped array its stripe.
    pub optimal_io: u32,
    /// Whether completed writes may be lost on power failure until a flush completes.
    pub volatile_cache: bool,
    /// Whether a flush covers only what was completed on its own queue; otherwise on any.
    pub flush_by_queue: bool,
    /// Whether `Discard` does anything.
    pub discard: bool,
    /// Whether `WriteZeroes` is faster than writing zeros.
    pub fast_zero: bool,
    /// Whether seeks cost.
    pub rotational: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// What the device is, to recognize it again whatever it is called: of a disk its own name, of
    /// a file its path, of an export its URI.
    pub identity: String,
    /// What people call it now: a path or a URI. For messages.
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

/// One thread's way to a device. It behaves as an NVMe queue does:
///
/// - Between flushes no order is promised, not even for overlapping requests in flight; whoever
///   needs an order waits for the completion.
/// - A completed `Flush` makes every change durable whose completion was reaped before the flush
///   was submitted, on any queue of the device, or on this one alone where
///   [`DeviceInfo::flush_by_queue`] says so. When it fails, all that was completed and not flushed,
///   on any queue, may be lost, and no later flush says so again. A request completed with `fua`
///   is durable itself.
/// - A change that was never flushed may after a crash be there, not be there, or be there in
///   part, in units of a sector.
/// - Every request taken completes exactly once, and its buffer comes back with it.
/// - Nothing blocks: completions are found by `poll`, which the owner calls when its event loop
///   says that something happened, and at the latest at `deadline`.
pub trait IoQueue {
    /// What the device is and can do.
    fn info(&self) -> &DeviceInfo;

    /// Takes a request.
    ///
    /// # Errors
    /// Gives the request back when the queue is full; try again after a completion.
    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io>;

    /// Appends the requests that have completed.
    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>);

    /// When `poll` must be called although no event came; `None` when only events matter.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}
