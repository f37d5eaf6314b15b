//! One request of a trace.

use forebay_block::{ByteRange, IoOp};

/// What a client asked for, and when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceRequest {
    /// Nanoseconds from the start of the trace.
    pub nanos: u64,
    /// What to do.
    pub op: IoOp,
    /// With force unit access.
    pub fua: bool,
    /// Where; empty for a flush.
    pub range: ByteRange,
}

impl TraceRequest {
    /// A flush.
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
