//! State of the circular log: segments, sequence numbers, and which records are complete and
//! durable.
//!
//! A segment with sequence number `q` is at position `q % segments`. The live segments are those
//! from `start` up to the open one. Segments leave only at `start`, so an old copy of a block can
//! never reappear behind a newer one.
//!
//! Invariant: `durable <= completed < next_lsn`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use forebay_block::{Instant, IoBuf};
use forebay_format::{EntryTable, Lsn, SegmentSeq};

use crate::contents::{Contents, IN_STORE, Place};
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

/// The state of a segment.
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
    /// Nothing in it is needed, but the record that says so is not durable yet, or the segment is
    /// still being read.
    Freeing,
}

/// One segment.
#[derive(Clone, Copy, Default, Debug)]
pub struct Segment {
    /// The state of the segment.
    pub state: SegmentState,
    /// Number of the segment in the log.
    pub seq: SegmentSeq,
    /// Number of reads in flight: the segment is not reused before they have ended.
    readers: u32,
    /// Number of its blocks on their way to a primary, or waiting for the primary's flush.
    pub destaging: u32,
    /// Length of its records, in bytes.
    pub used: u32,
    /// Bytes from the start of the segment that are durable.
    pub durable: u32,
    /// Number of entries in its records.
    pub entries: u32,
    /// Length of these, in cells.
    pub cells: u32,
    /// LSN of its first record.
    pub first_lsn: Lsn,
    /// LSN of its last record.
    pub last_lsn: Lsn,
}

/// The segment to which records are appended.
#[derive(Debug)]
pub struct OpenSegment {
    /// Position of the segment.
    pub index: usize,
    /// The entries for its footer so far.
    pub entries: EntryTable,
    /// The CRC of the record before its first one.
    pub first_prev_crc: u32,
}

/// A full segment that waits for its footer.
#[derive(Debug)]
pub struct SealingSegment {
    /// The segment.
    pub segment: OpenSegment,
    /// CRC of its last record.
    pub last_crc: u32,
    /// The `start` and `clean` of its last record. Newer values depend on later records, which may
    /// be lost.
    pub start: SegmentSeq,
    /// See `start`.
    pub clean: Lsn,
    /// Whether the footer is being written.
    pub footer_sent: bool,
}

/// A record being written.
#[derive(Debug)]
pub struct RecordInFlight {
    /// LSN of the record.
    pub lsn: Lsn,
    /// Position of the segment.
    pub index: usize,
    /// Bytes from the start of the segment.
    pub at: u32,
    /// Length of the record, in bytes.
    pub len: u32,
    /// Whether the record has been written.
    pub done: bool,
    /// Operations that wait for the record.
    pub waiters: Vec<Id>,
}

/// A record that could not be written, kept for reads.
#[derive(Debug)]
pub struct FailedRecord {
    /// Position of the segment.
    pub index: usize,
    /// Bytes from the start of the segment.
    pub at: u32,
    /// The record.
    pub bytes: IoBuf,
}

/// The log of one shard.
#[derive(Debug)]
pub struct Log {
    /// The record being built.
    builder: Builder,
    /// Operations waiting for room, in order.
    queue: VecDeque<Id>,
    /// All segments, indexed by position.
    segments: Vec<Segment>,
    /// Number of free segments.
    free: u64,
    /// The segment to which records are appended.
    open: Option<OpenSegment>,
    /// Full segments without footer, oldest first.
    sealing: VecDeque<SealingSegment>,
    /// Number of the next segment to open.
    head: SegmentSeq,
    /// The oldest live segment.
    start: SegmentSeq,
    /// The last segment from which blocks were evicted.
    evicted_from: SegmentSeq,
    /// LSN of the next record.
    next_lsn: Lsn,
    /// CRC of the last record.
    last_crc: u32,
    /// The `start` and `clean` of the last record.
    last_start: SegmentSeq,
    /// See `last_start`.
    last_clean: Lsn,
    /// Every record up to this one has been written.
    completed: Lsn,
    /// Every record up to this one is durable.
    durable: Lsn,
    /// Records being written, oldest first.
    in_flight: VecDeque<RecordInFlight>,
    /// Completed records that are not durable: LSN, position of the segment, end in the segment.
    undurable: VecDeque<(Lsn, usize, u32)>,
    /// The last record that the flush in flight covers.
    flushing: Option<Lsn>,
    /// Records that must become durable.
    wanted: BTreeSet<Lsn>,
    /// Operations that wait for a record to become durable, by record and then in order of arrival:
    /// of two flushes the first is answered first, since its error may concern the second as well.
    waiters: BTreeMap<(Lsn, u64), Id>,
    /// Number of operations that have ever waited; gives them their order.
    waited: u64,
    /// Segments being freed, each with the record that must be durable first.
    freeing: VecDeque<(SegmentSeq, Lsn)>,
    /// No direct write to a primary may happen before this record is durable: it records that
    /// blocks have left the cache.
    barrier: Lsn,
    /// Records that could not be written, after the device failed.
    failed: Vec<FailedRecord>,
    /// Reads of blocks whose record is still being written.
    read_waiters: Vec<(Id, Key)>,
    leaving: Leaving,
    /// Whether the last record before a stop is closed.
    has_ended: bool,
    /// Since when the record being built waits for a client's write to share it.
    held_since: Option<Instant>,
}

impl Log {
    /// Returns an empty log of `segments` segments.
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
            has_ended: false,
            held_since: None,
        }
    }

    /// Empties every segment.
    pub fn clear_segments(&mut self) {
        self.segments.fill(Segment::default());
        self.free = self.len();
    }

    /// Position of the segment with a number.
    pub fn position(&self, seq: SegmentSeq) -> usize {
        (seq.0 % self.segments.len() as u64) as usize
    }

    /// The LSN below which every entry of a record is clean and is not the base of a dirty delta.
    ///
    /// The entries of dirty blocks in the store may be anywhere in the log.
    pub fn clean(&self, contents: &mut Contents) -> Lsn {
        let oldest = match contents.has_dirty_in_store() {
            true => self.oldest(),
            false => contents.oldest_dirty(self.head),
        };
        oldest.map_or(self.next_lsn, |seq| self.segments[self.position(seq)].first_lsn)
    }

    /// Whether the record at `offset` of a segment has been written.
    pub fn is_written(&self, index: u32, offset: u32) -> bool {
        !self
            .in_flight
            .iter()
            .any(|r| r.index == index as usize && !r.done && (r.at..r.at + r.len).contains(&offset))
    }

    /// Whether the bytes at `offset` of a segment are durable. Those of blocks in the store are,
    /// before the log names them.
    pub fn is_durable(&self, index: u32, offset: u32) -> bool {
        self.segments.get(index as usize).is_none_or(|segment| offset < segment.durable)
    }

    /// Requests that every record up to `lsn` becomes durable.
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

/// Queries, and updates by other rooms.
impl Log {
    /// The record being built.
    pub fn builder(&mut self) -> &mut Builder {
        &mut self.builder
    }

    /// The record being built.
    pub fn builder_ref(&self) -> &Builder {
        &self.builder
    }

    /// Every record up to this one is durable.
    pub fn durable(&self) -> Lsn {
        self.durable
    }

    /// Writes and invalidations that wait for room, in order.
    pub fn queue(&mut self) -> &mut VecDeque<Id> {
        &mut self.queue
    }

    /// The number of operations in the queue.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// The number of segments.
    pub fn len(&self) -> u64 {
        self.segments.len() as u64
    }

    /// The number of free segments.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// The number of segments that become free when a record is durable or a read has ended.
    pub fn freeing(&self) -> u64 {
        self.freeing.len() as u64
    }

    /// Ends the log: the last record before a stop is closed. Entries that come later are dropped:
    /// copies and mappings, which no request waits for.
    pub fn end(&mut self) {
        self.builder.clear();
        self.has_ended = true;
    }

    /// Whether the log has ended.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Whether at most one segment is free. The last one is reserved for the record that frees
    /// another.
    pub fn is_emergency(&self) -> bool {
        self.free <= 1
    }

    /// Whether no further record can be written now.
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

    /// The segment at a position.
    pub fn segment(&self, index: usize) -> &Segment {
        &self.segments[index]
    }

    /// Number of the segment that holds a place.
    pub fn seq_of(&self, place: &Place) -> SegmentSeq {
        self.segments.get(place.segment as usize).map_or(IN_STORE, |segment| segment.seq)
    }

    /// The oldest live segment, unless there is none.
    pub fn oldest(&self) -> Option<SegmentSeq> {
        (self.start < self.head).then_some(self.start)
    }

    /// Whether a segment is newer than the oldest.
    pub fn is_after_oldest(&self, seq: SegmentSeq) -> bool {
        seq > self.start
    }

    /// Number of segments begun after this one, plus one.
    pub fn age(&self, seq: SegmentSeq) -> u64 {
        self.head.0.saturating_sub(seq.0)
    }

    /// LSN of the next record.
    pub fn next_lsn(&self) -> Lsn {
        self.next_lsn
    }

    /// Whether anything written is not durable yet.
    pub fn has_undurable(&self) -> bool {
        self.completed > self.durable
    }

    /// Every record up to this one has been written.
    pub fn completed(&self) -> Lsn {
        self.completed
    }

    /// The record that must be durable before anything is written directly to a primary: it records
    /// that blocks have left the cache.
    pub fn barrier(&self) -> Lsn {
        self.barrier
    }

    /// Notes that the next record says that blocks have left the cache.
    pub fn raise_barrier(&mut self) {
        self.barrier = self.barrier.max(self.next_lsn);
    }

    /// Notes that blocks of a segment leave the cache without an entry that says so.
    pub fn note_evicted(&mut self, seq: SegmentSeq) {
        self.raise_barrier();
        self.evicted_from = seq;
    }

    /// Whether a segment from which blocks were evicted may still be in the log.
    pub fn has_evicted(&self) -> bool {
        self.evicted_from >= self.start
    }

    /// Starts to free the oldest segment, which is no longer needed: the next record says so.
    pub fn free_oldest(&mut self) {
        let index = self.position(self.start);
        self.segments[index].state = SegmentState::Freeing;
        self.freeing.push_back((self.start, self.next_lsn));
        self.start = self.start.next();
        self.raise_barrier();
    }

    /// Notes that a block of a segment is on its way to its primary.
    pub fn begin_destaging(&mut self, index: u32) {
        if let Some(segment) = self.segments.get_mut(index as usize) {
            segment.destaging += 1;
        }
    }

    /// Notes that a block is no longer on its way. The segment may have been freed since.
    pub fn end_destaging(&mut self, index: u32, seq: SegmentSeq) {
        let segment = self.segments.get_mut(index as usize);
        if let Some(segment) = segment.filter(|segment| segment.seq == seq) {
            segment.destaging -= 1;
        }
    }

    /// Makes a read wait until the block's record has been written.
    pub fn wait_written(&mut self, op: Id, key: Key) {
        self.read_waiters.push((op, key));
    }

    /// Takes the writes that wait for records or for room: the device has failed.
    pub fn take_writes(&mut self) -> Vec<Id> {
        let records = self.in_flight.iter_mut();
        let mut writes: Vec<Id> =
            records.flat_map(|record| std::mem::take(&mut record.waiters)).collect();
        writes.append(&mut self.builder.waiters);
        self.builder.clear();
        writes.extend(self.queue.drain(..));
        writes
    }

    /// Whether a flush is in flight.
    pub fn is_flushing(&self) -> bool {
        self.flushing.is_some()
    }

    /// Begins a flush of everything written so far, if none is in flight; returns true if it must
    /// be sent.
    pub fn begin_flush(&mut self) -> bool {
        let begins = self.flushing.is_none();
        if begins {
            self.flushing = Some(self.completed);
        }
        begins
    }
}

/// Loading the log that recovery found.
impl Log {
    /// Loads a complete segment.
    pub fn load(&mut self, index: usize, seq: SegmentSeq, found: &Loaded) {
        self.segments[index] = Segment {
            state: SegmentState::Sealed,
            seq,
            readers: 0,
            destaging: 0,
            used: found.used,
            durable: found.durable,
            entries: found.entries,
            cells: found.cells,
            first_lsn: found.first_lsn,
            last_lsn: found.last_lsn,
        };
        self.free -= 1;
    }

    /// Sets the ends of the log: `start` is its oldest segment, `head` the one after its newest,
    /// `last` its last record with its CRC, and `clean` that record's value.
    pub fn begin(&mut self, start: SegmentSeq, head: SegmentSeq, last: (Lsn, u32), clean: Lsn) {
        (self.start, self.head) = (start, head);
        (self.last_start, self.last_clean) = (start, clean);
        (self.completed, self.durable, self.next_lsn) = (last.0, last.0, last.0.next());
        self.last_crc = last.1;
    }

    /// Reopens the last segment, to append after its records.
    pub fn resume(&mut self, index: usize, entries: EntryTable, first_prev_crc: u32, size: u32) {
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
    /// Length of its records, in bytes.
    pub used: u32,
    /// Bytes from the start of the segment that are durable.
    pub durable: u32,
    /// Number of entries in its records.
    pub entries: u32,
    /// Length of these, in cells.
    pub cells: u32,
    /// LSN of its first record.
    pub first_lsn: Lsn,
    /// LSN of its last record.
    pub last_lsn: Lsn,
}

#[cfg(test)]
mod tests;
