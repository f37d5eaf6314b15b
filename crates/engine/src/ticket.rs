//! Tickets: the owner of each device I/O in flight.

use forebay_block::{ByteRange, Instant, IoOp, VolumeId};
use forebay_format::{Lsn, SegmentSeq};

use crate::api::Target;
use crate::limits::WRITE_TRIES;
use crate::log::read::SegmentRead;
use crate::slab::Id;

/// The owner of a device I/O in flight, which decides how it continues.
#[derive(Debug)]
pub enum Ticket {
    /// A write of a record.
    Record {
        /// LSN of the record.
        lsn: Lsn,
        /// Number of this attempt, from 1.
        tries: u32,
    },
    /// A flush of the cache device.
    CacheFlush,
    /// A write of the footer of a sealing segment.
    Footer {
        /// The segment, by its number in the log.
        seq: SegmentSeq,
        /// Number of this attempt, from 1.
        tries: u32,
    },
    /// A write of a unit of the store.
    Unit {
        /// The unit.
        id: Id,
        /// Number of this attempt, from 1.
        tries: u32,
    },
    /// A discard of an extent of the store.
    Discard,
    /// A read of payloads from the log or the store.
    Payloads(SegmentRead),
    /// A read of a primary.
    Fetch(Id),
    /// A destage write.
    DestageWrite(Id),
    /// A flush of a primary.
    PrimaryFlush(Box<PrimaryFlush>),
    /// A direct change of a primary.
    Direct(Id),
    /// A read of a primary for comparison with the cache.
    ComparePrimary,
    /// A read that finds out whether a primary answers again.
    PrimaryProbe,
    /// The last flush of an orderly stop.
    StopFlush,
    /// A read or write of recovery.
    Recovery(Step),
    /// A read of the footer of the segment at this position, for late loading.
    LateFooter(usize),
}

/// A flush of a primary: the changes it covers, and the operations that wait for it.
#[derive(Debug)]
pub struct PrimaryFlush {
    /// The volume.
    pub volume: VolumeId,
    /// Number of direct changes completed when the flush was sent.
    pub direct: u64,
    /// Destages written when the flush was sent.
    pub destages: Vec<Id>,
    /// Client flushes that wait for it.
    pub flushes: Vec<Id>,
    /// Writes with FUA that wait for it.
    pub writes: Vec<Id>,
}

/// A device I/O in flight.
#[derive(Debug)]
pub struct InFlight {
    /// Its owner.
    pub ticket: Ticket,
    /// When it was sent.
    pub at: Instant,
    /// The requested operation.
    pub op: IoOp,
    /// The byte range on the device or volume; empty for a flush.
    pub range: ByteRange,
    /// The device.
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

    /// Returns whether the step reads.
    pub fn is_read(self) -> bool {
        matches!(self.kind, StepKind::Head | StepKind::Tail | StepKind::Scan | StepKind::Footer)
    }
}
