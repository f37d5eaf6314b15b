//! State of the circular log: segments, sequence numbers, what is complete and what is durable.
//!
//! A segment with sequence number `q` lies at position `q % segments`. Live are those from
//! `start` up to the open one. Segments leave at `start` only, so an old copy of a block can
//! never come to light again behind a newer one.
//!
//! Invariant: `durable <= completed < next_lsn`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use forebay_block::IoBuf;
use forebay_format::{Entry, Lsn, SegmentSeq};

use crate::contents::Contents;
use crate::key::Key;
use crate::log::builder::Builder;
use crate::slab::Id;

pub(crate) mod append;
pub(crate) mod builder;
pub(crate) mod durable;
pub(crate) mod read;

/// Where a segment is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SegmentState {
    /// Nothing in it is needed.
    #[default]
    Free,
    /// Records are appended to it.
    Open,
    /// Full; waits until its records are durable and its footer is written.
    Sealing,
    /// Complete, with its footer.
    Sealed,
    /// Nothing in it is needed, but that is not durable yet, or it is still being read.
    Freeing,
}

/// One segment.
#[derive(Clone, Default, Debug)]
pub struct Segment {
    /// Where it is in its life.
    pub state: SegmentState,
    /// Its number in the log.
    pub seq: SegmentSeq,
    /// Reads of it in flight: it is not used again before they have ended.
    readers: u32,
    /// Blocks of it on their way to a primary, or waiting there for a flush.
    pub destaging: u32,
    /// Bytes of records in it.
    pub used: u32,
    /// Bytes from its start that are durable.
    pub durable: u32,
    /// Entries in its records.
    pub entries: u32,
    /// Its first record.
    pub first_lsn: Lsn,
    /// Its last record.
    pub last_lsn: Lsn,
}

/// The segment records are appended to.
#[derive(Debug)]
pub struct OpenSegment {
    /// Its position.
    pub index: usize,
    /// What will be its footer's entries.
    pub entries: Vec<Entry>,
    /// The CRC its first record links back to.
    pub first_prev_crc: u32,
}

/// A full segment on its way to its footer.
#[derive(Debug)]
pub struct SealingSegment {
    /// The segment.
    pub segment: OpenSegment,
    /// CRC of its last record.
    pub last_crc: u32,
    /// What its last record says of `start` and `clean`. What has become true since rests on
    /// later records, which may be lost.
    pub start: SegmentSeq,
    /// See `start`.
    pub clean: Lsn,
    /// The footer is being written.
    pub footer_sent: bool,
}

/// A record being written.
#[derive(Debug)]
pub struct RecordInFlight {
    /// Its number.
    pub lsn: Lsn,
    /// The segment's position.
    pub index: usize,
    /// Bytes from the segment's start.
    pub at: u32,
    /// Its bytes.
    pub len: u32,
    /// The device has it.
    pub done: bool,
    /// Operations that wait for it.
    pub waiters: Vec<Id>,
}

/// A record that could not be written, kept to read from.
#[derive(Debug)]
pub struct FailedRecord {
    /// The segment's position.
    pub index: usize,
    /// Bytes from the segment's start.
    pub at: u32,
    /// The record.
    pub bytes: IoBuf,
}

/// The log of one shard.
#[derive(Debug)]
pub struct Log {
    /// The record that is being put together.
    pub builder: Builder,
    /// Operations waiting for room, in order.
    pub queue: VecDeque<Id>,
    /// All segments by position.
    pub segments: Vec<Segment>,
    /// Segments that are free.
    pub free: u64,
    /// The segment records are appended to.
    pub open: Option<OpenSegment>,
    /// Full segments without footer, oldest first.
    pub sealing: VecDeque<SealingSegment>,
    /// Number of the next segment to open.
    pub head: SegmentSeq,
    /// The oldest live segment.
    pub start: SegmentSeq,
    /// The last segment of which blocks were evicted.
    pub evicted_from: SegmentSeq,
    /// Number of the next record.
    pub next_lsn: Lsn,
    /// CRC of the last record.
    pub last_crc: u32,
    /// What the last record says of `start` and `clean`.
    pub last_start: SegmentSeq,
    /// See `last_start`.
    pub last_clean: Lsn,
    /// Every record up to this one has been written.
    pub completed: Lsn,
    /// Every record up to this one is durable.
    pub durable: Lsn,
    /// Records being written, oldest first.
    pub in_flight: VecDeque<RecordInFlight>,
    /// Completed records that are not durable: number, segment position, end in the segment.
    pub undurable: VecDeque<(Lsn, usize, u32)>,
    /// The last record that the flush in flight covers.
    pub flushing: Option<Lsn>,
    /// Records that somebody wants to be durable.
    pub wanted: BTreeSet<Lsn>,
    /// Operations waiting for a record to be durable, by the record and then as they came: of two
    /// flushes the first is answered first, since its error may concern the second as well.
    pub waiters: BTreeMap<(Lsn, u64), Id>,
    /// How many have waited.
    pub waited: u64,
    /// Segments being freed, and the record that must be durable first.
    pub freeing: VecDeque<(SegmentSeq, Lsn)>,
    /// Before this record is durable nothing may be written to a primary directly: it says that
    /// blocks have left the cache.
    pub barrier: Lsn,
    /// Records that could not be written, after the device failed.
    pub failed: Vec<FailedRecord>,
    /// Reads of blocks whose record is still being written.
    pub read_waiters: Vec<(Id, Key)>,
}

impl Log {
    /// An empty log of `segments` segments.
    pub fn new(segments: usize, builder: Builder) -> Self {
        Self {
            builder,
            queue: VecDeque::new(),
            segments: vec![Segment::default(); segments],
            free: segments as u64,
            open: None,
            sealing: VecDeque::new(),
            head: SegmentSeq(1),
            start: SegmentSeq(1),
            evicted_from: SegmentSeq(0),
            next_lsn: Lsn(1),
            last_crc: 0,
            last_start: SegmentSeq(1),
            last_clean: Lsn(1),
            completed: Lsn(0),
            durable: Lsn(0),
            in_flight: VecDeque::new(),
            undurable: VecDeque::new(),
            flushing: None,
            wanted: BTreeSet::new(),
            waiters: BTreeMap::new(),
            waited: 0,
            freeing: VecDeque::new(),
            barrier: Lsn(0),
            failed: Vec::new(),
            read_waiters: Vec::new(),
        }
    }

    /// Empties every segment.
    pub fn clear_segments(&mut self) {
        self.segments.fill(Segment::default());
    }

    /// Position of the segment with this number.
    pub fn position(&self, seq: SegmentSeq) -> usize {
        (seq.0 % self.segments.len() as u64) as usize
    }

    /// Every entry of a record below this one is clean, and no dirty delta is against it.
    pub fn clean(&self, contents: &mut Contents) -> Lsn {
        let oldest = contents.oldest_dirty(self.head);
        oldest.map_or(self.next_lsn, |seq| self.segments[self.position(seq)].first_lsn)
    }

    /// Whether the bytes from `offset` of a segment have been written.
    pub fn is_written(&self, index: u32, offset: u32) -> bool {
        !self
            .in_flight
            .iter()
            .any(|r| r.index == index as usize && !r.done && (r.at..r.at + r.len).contains(&offset))
    }

    /// Whether the bytes from `offset` of a segment are durable.
    pub fn is_durable(&self, index: u32, offset: u32) -> bool {
        offset < self.segments[index as usize].durable
    }

    /// Asks for every record up to `lsn` to become durable.
    pub fn want_durable(&mut self, lsn: Lsn) {
        if lsn > self.durable {
            self.wanted.insert(lsn);
        }
    }
}

impl Log {
    /// Keeps a record that could not be written, so that its blocks can still be read.
    pub fn keep_failed(&mut self, index: usize, at: u32, bytes: IoBuf) {
        self.failed.push(FailedRecord { index, at, bytes });
    }

    /// A payload of a record that could not be written.
    pub fn failed_payload(&self, index: u32, offset: u32, len: u16) -> Option<&[u8]> {
        let record = self.failed.iter().find(|r| {
            r.index == index as usize && (r.at..r.at + r.bytes.len() as u32).contains(&offset)
        })?;
        let start = (offset - record.at) as usize;
        record.bytes.get(start..start + usize::from(len))
    }
}

impl Log {
    /// The segment that left the log last.
    pub fn start_before(&self) -> SegmentSeq {
        SegmentSeq(self.start.0 - 1)
    }
}
