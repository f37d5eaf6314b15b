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
    /// A read of a primary for comparison with the cache.
    ComparePrimary,
    /// The last flush of an orderly stop.
    StopFlush,
    /// A read or write of recovery.
    Recovery(Step),
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

/// The purpose of a read or write of recovery. The fields are the position of the segment and the
/// number of the attempt, from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Reads the first page of the segment.
    Head(usize, u32),
    /// Reads the last page.
    Tail(usize, u32),
    /// Reads the whole segment.
    Scan(usize, u32),
    /// Reads the footer.
    Footer(usize, u32),
    /// Erases the first page or, in the segment in which the log continues, everything after its
    /// records.
    Erase(usize, u32),
    /// Writes the footer.
    Seal(usize, u32),
    /// A flush of the cache device.
    Flush,
}

impl Step {
    /// Returns the step for another attempt, or `None` if there have been too many.
    pub fn again(self) -> Option<Self> {
        let more = |tries: u32| (tries < WRITE_TRIES).then_some(tries + 1);
        match self {
            Self::Head(i, t) => more(t).map(|t| Self::Head(i, t)),
            Self::Tail(i, t) => more(t).map(|t| Self::Tail(i, t)),
            Self::Scan(i, t) => more(t).map(|t| Self::Scan(i, t)),
            Self::Footer(i, t) => more(t).map(|t| Self::Footer(i, t)),
            Self::Erase(i, t) => more(t).map(|t| Self::Erase(i, t)),
            Self::Seal(i, t) => more(t).map(|t| Self::Seal(i, t)),
            Self::Flush => None,
        }
    }

    /// Returns whether the step reads.
    pub fn is_read(self) -> bool {
        !matches!(self, Self::Erase(..) | Self::Seal(..) | Self::Flush)
    }
}
