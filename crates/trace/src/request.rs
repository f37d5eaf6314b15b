//! One request of a trace.

use forebay_block::{ByteRange, IoOp};

/// A client's request, with its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceRequest {
    /// Nanoseconds from the start of the trace.
    pub nanos: u64,
    /// The operation.
    pub op: IoOp,
    /// With force unit access.
    pub fua: bool,
    /// The byte range; empty for a flush.
    pub range: ByteRange,
}

impl TraceRequest {
    /// A flush at `nanos`.
    #[must_use]
    pub fn flush(nanos: u64) -> Self {
        Self { nanos, op: IoOp::Flush, fua: false, range: ByteRange::default() }
    }

    /// Whether it is a read or a write of data.
    #[must_use]
    pub fn carries_data(&self) -> bool {
        matches!(self.op, IoOp::Read | IoOp::Write)
    }
}
