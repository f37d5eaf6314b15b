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

/// What a read or write of recovery was for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The first page of the segment at this position.
    Head(usize, u32),
    /// Its last page.
    Tail(usize, u32),
    /// All of it.
    Scan(usize, u32),
    /// Its footer.
    Footer(usize, u32),
    /// Erasing its first page, or what lies behind the records of the one that the log goes on in.
    Erase(usize, u32),
    /// Writing its footer.
    Seal(usize, u32),
    /// A flush of the cache device.
    Flush,
}

impl Step {
    /// The same once more, unless it has failed too often.
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

    /// Whether it reads.
    pub fn is_read(self) -> bool {
        !matches!(self, Self::Erase(..) | Self::Seal(..) | Self::Flush)
    }
}
