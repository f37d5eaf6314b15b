//! What each device I/O in flight belongs to.

use forebay_block::{ByteRange, Instant, IoOp, VolumeId};
use forebay_format::{Lsn, SegmentSeq};

use crate::api::Target;
use crate::limits::WRITE_TRIES;
use crate::log::read::SegmentRead;
use crate::slab::Id;

/// What a device I/O in flight belongs to.
#[derive(Debug)]
pub enum Ticket {
    /// A record.
    Record {
        /// Its number.
        lsn: Lsn,
        /// How often it was written before.
        tries: u32,
    },
    /// A flush of the cache device.
    CacheFlush,
    /// The footer of the oldest sealing segment, with its place for another try.
    Footer {
        /// The segment.
        seq: SegmentSeq,
        /// How often it was written before.
        tries: u32,
    },
    /// A read of payloads from the log.
    Payloads(SegmentRead),
    /// A read of a primary.
    Fetch(Id),
    /// A destage write.
    DestageWrite(Id),
    /// A flush of a primary.
    PrimaryFlush(PrimaryFlush),
    /// A direct change of a primary.
    Direct(Id),
    /// A read of a primary to compare with.
    ComparePrimary,
    /// The last flush of an orderly stop.
    StopFlush,
    /// A read or write of recovery.
    Recovery(Step),
}

/// A flush of a primary: which changes it covers, and who waits for it.
#[derive(Debug)]
pub struct PrimaryFlush {
    /// The volume.
    pub volume: VolumeId,
    /// Direct changes completed when it was sent.
    pub direct: u64,
    /// Destages written by then.
    pub destages: Vec<Id>,
    /// Flushes of clients.
    pub flushes: Vec<Id>,
    /// Writes with FUA.
    pub writes: Vec<Id>,
}

/// When something was sent, and what it was.
#[derive(Debug)]
pub struct InFlight {
    /// What it belongs to.
    pub ticket: Ticket,
    /// When it was sent.
    pub at: Instant,
    /// What was asked of the device.
    pub op: IoOp,
    /// Where, as the device sees it.
    pub range: ByteRange,
    /// Where.
    pub target: Target,
}

/// A read or write of recovery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// Its purpose.
    pub kind: StepKind,
    /// Position of the segment; 0 for a flush.
    pub at: usize,
    /// Attempts, this one included.
    pub tries: u32,
}

/// The purpose of a read or write of recovery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepKind {
    /// Reads the first page of a segment.
    Head,
    /// Reads its last page.
    Tail,
    /// Reads all of it.
    Scan,
    /// Reads its footer.
    Footer,
    /// Erases its first page, or the part behind the records of the one that the log goes on in.
    Erase,
    /// Writes its footer.
    Seal,
    /// Flushes the cache device.
    Flush,
}

impl Step {
    /// The first attempt for the segment at position `at`.
    pub fn new(kind: StepKind, at: usize) -> Self {
        Self { kind, at, tries: 1 }
    }

    /// The next attempt, unless this one was the last.
    pub fn again(self) -> Option<Self> {
        let may = self.kind != StepKind::Flush && self.tries < WRITE_TRIES;
        may.then_some(Self { tries: self.tries + 1, ..self })
    }

    /// Whether it reads.
    pub fn is_read(self) -> bool {
        matches!(self.kind, StepKind::Head | StepKind::Tail | StepKind::Scan | StepKind::Footer)
    }
}
