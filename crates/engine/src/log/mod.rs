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

use crate::contents::{Contents, Place};
use crate::key::Key;
use crate::limits::{RECORDS_IN_FLIGHT_MAX, SEALING_MAX};
use crate::log::builder::Builder;
use crate::slab::Id;
use leaving::Leaving;

pub(crate) mod append;
pub(crate) mod builder;
pub(crate) mod durable;
mod leaving;
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
#[derive(Clone, Copy, Default, Debug)]
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
    builder: Builder,
    /// Operations waiting for room, in order.
    queue: VecDeque<Id>,
    /// All segments by position.
    segments: Vec<Segment>,
    /// Segments that are free.
    free: u64,
    /// The segment records are appended to.
    open: Option<OpenSegment>,
    /// Full segments without footer, oldest first.
    sealing: VecDeque<SealingSegment>,
    /// Number of the next segment to open.
    head: SegmentSeq,
    /// The oldest live segment.
    start: SegmentSeq,
    /// The last segment of which blocks were evicted.
    evicted_from: SegmentSeq,
    /// Number of the next record.
    next_lsn: Lsn,
    /// CRC of the last record.
    last_crc: u32,
    /// What the last record says of `start` and `clean`.
    last_start: SegmentSeq,
    /// See `last_start`.
    last_clean: Lsn,
    /// Every record up to this one has been written.
    completed: Lsn,
    /// Every record up to this one is durable.
    durable: Lsn,
    /// Records being written, oldest first.
    in_flight: VecDeque<RecordInFlight>,
    /// Completed records that are not durable: number, segment position, end in the segment.
    undurable: VecDeque<(Lsn, usize, u32)>,
    /// The last record that the flush in flight covers.
    flushing: Option<Lsn>,
    /// Records that somebody wants to be durable.
    wanted: BTreeSet<Lsn>,
    /// Operations waiting for a record to be durable, by the record and then as they came: of two
    /// flushes the first is answered first, since its error may concern the second as well.
    waiters: BTreeMap<(Lsn, u64), Id>,
    /// How many have waited.
    waited: u64,
    /// Segments being freed, and the record that must be durable first.
    freeing: VecDeque<(SegmentSeq, Lsn)>,
    /// Before this record is durable nothing may be written to a primary directly: it says that
    /// blocks have left the cache.
    barrier: Lsn,
    /// Records that could not be written, after the device failed.
    failed: Vec<FailedRecord>,
    /// Reads of blocks whose record is still being written.
    read_waiters: Vec<(Id, Key)>,
    leaving: Leaving,
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
            leaving: Leaving::default(),
        }
    }

    /// Empties every segment.
    pub fn clear_segments(&mut self) {
        self.segments.fill(Segment::default());
        self.free = self.len();
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
    fn keep_failed(&mut self, index: usize, at: u32, bytes: IoBuf) {
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

/// What others may know of it.
impl Log {
    /// The record that is being put together.
    pub fn builder(&mut self) -> &mut Builder {
        &mut self.builder
    }

    /// Writes and invalidations that wait for room, in order.
    pub fn queue(&mut self) -> &mut VecDeque<Id> {
        &mut self.queue
    }

    /// The number of these.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// The number of segments.
    pub fn len(&self) -> u64 {
        self.segments.len() as u64
    }

    /// The number of free ones.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// The number of segments that will be free when a record is durable, or a read has ended.
    pub fn freeing(&self) -> u64 {
        self.freeing.len() as u64
    }

    /// Whether only one segment is free. It is kept for the record that frees another.
    pub fn is_emergency(&self) -> bool {
        self.free <= 1
    }

    /// Whether nothing more can be written now.
    pub fn is_busy(&self) -> bool {
        self.in_flight.len() >= RECORDS_IN_FLIGHT_MAX || self.sealing.len() >= SEALING_MAX
    }

    /// The number of records being written.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether no record is being written.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether a segment waits for its footer.
    pub fn is_sealing(&self) -> bool {
        !self.sealing.is_empty()
    }

    /// A segment, by its position.
    pub fn segment(&self, index: usize) -> &Segment {
        &self.segments[index]
    }

    /// Number of the segment that a place is in.
    pub fn seq_of(&self, place: &Place) -> SegmentSeq {
        self.segments[place.segment as usize].seq
    }

    /// The oldest live segment, if it is not the last.
    pub fn oldest(&self) -> Option<SegmentSeq> {
        (self.start < self.head).then_some(self.start)
    }

    /// Whether a segment is newer than the oldest.
    pub fn is_after_oldest(&self, seq: SegmentSeq) -> bool {
        seq > self.start
    }

    /// Segments that were begun after this one, and one more.
    pub fn age(&self, seq: SegmentSeq) -> u64 {
        self.head.0 - seq.0
    }

    /// Number of the next record.
    pub fn next_lsn(&self) -> Lsn {
        self.next_lsn
    }

    /// Every record up to this one has been written.
    pub fn completed(&self) -> Lsn {
        self.completed
    }

    /// The record that has to be durable before anything is written to a primary directly: it says
    /// that blocks have left the cache.
    pub fn barrier(&self) -> Lsn {
        self.barrier
    }

    /// The next record says that blocks have left the cache.
    pub fn raise_barrier(&mut self) {
        self.barrier = self.barrier.max(self.next_lsn);
    }

    /// Blocks of a segment leave the cache, which no record says.
    pub fn note_evicted(&mut self, seq: SegmentSeq) {
        self.raise_barrier();
        self.evicted_from = seq;
    }

    /// Whether there may be such a segment in the log still.
    pub fn has_evicted(&self) -> bool {
        self.evicted_from >= self.start
    }

    /// The oldest segment is not needed any more: the next record says so.
    pub fn free_oldest(&mut self) {
        let index = self.position(self.start);
        self.segments[index].state = SegmentState::Freeing;
        self.freeing.push_back((self.start, self.next_lsn));
        self.start = self.start.next();
        self.raise_barrier();
    }

    /// A block of a segment is on its way to its primary.
    pub fn begin_destaging(&mut self, index: u32) {
        self.segments[index as usize].destaging += 1;
    }

    /// It is no more. The segment may have been freed since.
    pub fn end_destaging(&mut self, index: u32, seq: SegmentSeq) {
        let segment = &mut self.segments[index as usize];
        if segment.seq == seq {
            segment.destaging -= 1;
        }
    }

    /// A read goes on when the block's record has been written.
    pub fn wait_written(&mut self, op: Id, key: Key) {
        self.read_waiters.push((op, key));
    }

    /// The device has failed: takes the writes that wait for records or for room.
    pub fn take_writes(&mut self) -> Vec<Id> {
        let records = self.in_flight.iter_mut();
        let mut writes: Vec<Id> =
            records.flat_map(|record| std::mem::take(&mut record.waiters)).collect();
        writes.append(&mut self.builder.waiters);
        self.builder.clear();
        writes.extend(self.queue.drain(..));
        writes
    }

    /// Begins a flush of all that has been written, if none is under way; true if it is to be
    /// sent.
    pub fn begin_flush(&mut self) -> bool {
        let begins = self.flushing.is_none();
        if begins {
            self.flushing = Some(self.completed);
        }
        begins
    }
}

/// What recovery found.
impl Log {
    /// A segment of the log, complete, with `entries` entries.
    pub fn load(&mut self, index: usize, seq: SegmentSeq, found: &Loaded) {
        self.segments[index] = Segment {
            state: SegmentState::Sealed,
            seq,
            readers: 0,
            destaging: 0,
            used: found.used,
            durable: found.durable,
            entries: found.entries,
            first_lsn: found.first_lsn,
            last_lsn: found.last_lsn,
        };
        self.free -= 1;
    }

    /// The log is from `start` to before `head`; `last` is its last record, with its CRC, and
    /// `clean` what that says.
    pub fn begin(&mut self, start: SegmentSeq, head: SegmentSeq, last: (Lsn, u32), clean: Lsn) {
        (self.start, self.head) = (start, head);
        (self.last_start, self.last_clean) = (start, clean);
        (self.completed, self.durable, self.next_lsn) = (last.0, last.0, last.0.next());
        self.last_crc = last.1;
    }

    /// The last segment is written further, behind its records.
    pub fn resume(&mut self, index: usize, entries: Vec<Entry>, first_prev_crc: u32, size: u32) {
        let segment = &mut self.segments[index];
        segment.state = SegmentState::Open;
        segment.durable = segment.used;
        self.open = Some(OpenSegment { index, entries, first_prev_crc });
        self.note_rest(size);
    }
}

/// A segment as recovery found it.
#[derive(Debug)]
pub struct Loaded {
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

#[cfg(test)]
mod tests;
