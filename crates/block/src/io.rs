//! A request on its way down, and its completion on its way up. The buffer travels with them.

use crate::{ByteRange, IoBuf, IoError};

/// The submitter's name for a request. A queue returns it unchanged and does not interpret it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct IoTag(pub u64);

/// The operation to perform on a range.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IoOp {
    /// Fill the buffer from the range.
    Read,
    /// Write the buffer to the range.
    Write,
    /// Make every write that completed before this submission durable. The range is empty.
    Flush,
    /// The range's content is no longer needed; a later read returns the old bytes or zeros.
    Discard,
    /// The range reads as zeros afterwards.
    WriteZeroes,
    /// The range will be read: a cache may fetch it. There is no data; devices do not support it.
    Prefetch,
}

impl IoOp {
    /// Whether the operation changes the data that a read returns.
    #[must_use]
    pub fn changes_data(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes)
    }
}

/// Modifiers of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct IoFlags {
    /// Force unit access: a completion means that this request's own change is durable.
    pub fua: bool,
    /// For `WriteZeroes`: keep the space allocated instead of punching a hole.
    pub no_hole: bool,
    /// For `WriteZeroes`: fail with `Unsupported` rather than be as slow as a write.
    pub fast_only: bool,
}

/// One request. For a read `buf` has the range's length and is filled; for a write it holds the
/// data; otherwise it is empty.
#[derive(Debug)]
pub struct Io {
    /// The submitter's name for the request.
    pub tag: IoTag,
    /// Operation to perform.
    pub op: IoOp,
    /// Bytes that the operation covers; empty for a flush.
    pub range: ByteRange,
    /// Modifiers of the operation.
    pub flags: IoFlags,
    /// Data of the operation; the queue owns it until the completion returns it.
    pub buf: IoBuf,
}

impl Io {
    /// A read of `range` into `buf`, whose length must be that of the range.
    #[must_use]
    pub fn read(tag: IoTag, range: ByteRange, buf: IoBuf) -> Self {
        assert_eq!(buf.len() as u64, range.len, "a read's buffer has the length of its range");
        Self { tag, op: IoOp::Read, range, flags: IoFlags::default(), buf }
    }

    /// A write of all of `buf` at `offset`.
    #[must_use]
    pub fn write(tag: IoTag, offset: u64, buf: IoBuf) -> Self {
        let range = ByteRange::new(offset, buf.len() as u64);
        Self { tag, op: IoOp::Write, range, flags: IoFlags::default(), buf }
    }

    /// A flush.
    #[must_use]
    pub fn flush(tag: IoTag) -> Self {
        Self::bare(tag, IoOp::Flush, ByteRange::default())
    }

    /// A request without data: flush, discard or write-zeroes.
    #[must_use]
    pub fn bare(tag: IoTag, op: IoOp, range: ByteRange) -> Self {
        assert!(!matches!(op, IoOp::Read | IoOp::Write), "reads and writes carry a buffer");
        let (flags, buf) = (IoFlags::default(), IoBuf::empty());
        Self { tag, op, range, flags, buf }
    }

    /// The same request, with force unit access set or cleared.
    #[must_use]
    pub fn with_fua(mut self, fua: bool) -> Self {
        self.flags.fua = fua;
        self
    }

    /// The completion of this request.
    #[must_use]
    pub fn complete(self, result: Result<(), IoError>) -> Completion {
        Completion { tag: self.tag, result, buf: self.buf }
    }
}

/// The end of a request. A queue sends exactly one for each request that it accepted.
#[derive(Debug)]
pub struct Completion {
    /// The submitter's name for the request.
    pub tag: IoTag,
    /// Outcome of the request. After a failed write the range holds the old data, the new data, or
    /// a mixture.
    pub result: Result<(), IoError>,
    /// The request's buffer. It holds the data after a successful read; after a failed one its
    /// content is unspecified.
    pub buf: IoBuf,
}
