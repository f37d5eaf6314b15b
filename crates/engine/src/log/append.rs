//! Appending to the log: a record is closed, placed and made ready to be sent (group commit).
//!
//! A block's index entry changes when its record is closed, not when the device has the record. A
//! read in between waits for the record or finds the bytes in RAM.

use std::time::Duration;

use forebay_block::{Instant, IoBuf};
use forebay_format::{
    Entry, EntryKind, EntryTable, Lsn, NamedBase, PAGE, RecordHeader, SegmentSeq, encode_record,
    footer_bytes,
};
use forebay_policy::{EvictionPolicy, Touch};

use crate::api::ShardConfig;
use crate::api::stats::Stats;
use crate::contents::{Contents, Place};
use crate::key::Key;
use crate::limits::{RECORDS_IN_FLIGHT_MAX, SEALING_MAX, WARM_BLOCKS};
use crate::locks::Locks;
use crate::log::builder::{Against, Expect, Payload, Pending, Shared};
use crate::log::{Log, OpenSegment, RecordInFlight, SealingSegment, SegmentState};
use crate::ram::Ram;
use crate::slab::Id;

/// Longest time that a record waits for a client's write to share it.
const HOLD: Duration = Duration::from_millis(5);

/// Ends the hold on the pages of a new payload in the store: its block is there now, or never will
/// be.
fn end_hold(cx: &mut Closing<'_>, item: &Pending) {
    if let Payload::Stored(at) = item.payload
        && at.is_new
    {
        let bytes = at.offset..at.offset + u32::from(item.len);
        let pages = cx.contents.pages();
        pages.release(pages.covered(at.segment, bytes));
    }
}

/// The other rooms that closing a record needs.
pub struct Closing<'a> {
    pub now: Instant,
    pub config: &'a ShardConfig,
    pub contents: &'a mut Contents,
    pub locks: &'a Locks,
    pub ram: &'a mut Ram,
    pub policy: &'a mut dyn EvictionPolicy,
    pub stats: &'a mut Stats,
    /// Whether the copies out of the oldest segment fit into the last free segment.
    pub frees_with_one: bool,
}

/// The result of closing the record being built.
pub enum Closed {
    /// The record is empty.
    Empty,
    /// There is no room for it now.
    NoRoom,
    /// The record must be written.
    Record(Record),
}

/// A record that must be written.
pub struct Record {
    pub lsn: Lsn,
    /// Offset of the record in the shard's area, in bytes.
    pub offset: u64,
    pub buf: IoBuf,
    /// Whether it holds more than copies and checkpoints.
    pub has_news: bool,
    /// Operations whose last block is in the record.
    pub complete: Vec<Id>,
}

impl Log {
    /// Closes the record being built and places it. After the last record before a stop it is
    /// dropped: it would be written after the last flush.
    pub fn close(&mut self, cx: &mut Closing<'_>) -> Closed {
        if self.has_ended {
            assert!(self.builder.waiters.is_empty(), "requests are answered before the end");
            self.builder.clear();
        }
        if self.builder.is_empty() {
            return Closed::Empty;
        }
        if self.in_flight.len() >= RECORDS_IN_FLIGHT_MAX {
            return Closed::NoRoom;
        }
        let pages = self.builder.pages();
        let cells_max = self.builder.cells();
        let Some((index, at)) = self.room(cx, pages, cells_max) else { return Closed::NoRoom };
        let packed_at = self.builder.packed_at();
        let has_news = self.builder.has_news();
        let lsn = self.next_lsn;
        let entries = self.apply_pending(cx, index, at, packed_at);
        if entries.is_empty() {
            assert!(self.builder.waiters.is_empty(), "a client's entries always count");
            self.builder.clear();
            return Closed::Empty;
        }
        self.next_lsn = lsn.next();
        self.held_since = None;
        let mut buf = self.builder.take(pages, packed_at);
        let header = RecordHeader {
            pool: cx.config.pool,
            shard: cx.config.shard,
            seq: self.segments[index].seq,
            lsn,
            at,
            prev_crc: self.last_crc,
            pages: pages as u16,
            durable: self.durable,
            clean: self.clean(cx.contents).min(lsn),
            start: self.start,
            epoch: cx.config.epoch,
            unit_entries: cx.config.unit_entries,
        };
        self.last_crc = encode_record(&mut buf, &header, &entries);
        self.last_start = header.start;
        self.last_clean = header.clean;
        let len = buf.len() as u32;
        self.record_placed(cx.config, index, lsn, at + len, &buf, &entries);
        let waiters = std::mem::take(&mut self.builder.waiters);
        let complete = std::mem::take(&mut self.builder.complete);
        self.in_flight.push_back(RecordInFlight { lsn, index, at, len, done: false, waiters });
        cx.stats.log_records += 1;
        let offset = index as u64 * u64::from(cx.config.segment_size) + u64::from(at);
        Closed::Record(Record { lsn, offset, buf, has_news, complete })
    }

    /// Whether a checkpoint is needed: a segment cannot be freed, or a direct write cannot proceed,
    /// before the next record is durable, and the builder has no entry that is certain to be
    /// written. Copies may no longer count when the record is closed.
    pub fn needs_checkpoint(&self, patient: u64) -> bool {
        self.waits_for_next(patient)
            && !self.builder.pending.iter().any(|item| item.expect.is_certain())
    }

    /// Whether an operation waits for the next record or, unless more than `patient` segments are
    /// free, a segment does.
    pub fn waits_for_next(&self, patient: u64) -> bool {
        self.free <= patient && self.freeing.iter().any(|&(_, lsn)| lsn == self.next_lsn)
            || self.barrier >= self.next_lsn && !self.waiters.is_empty()
    }

    /// Holds the record being built, if it `may` wait, for a while; returns whether it waits.
    pub fn hold(&mut self, now: Instant, may: bool) -> bool {
        if !may || self.builder.is_empty() {
            self.held_since = None;
            return false;
        }
        now.since(*self.held_since.get_or_insert(now)) < HOLD
    }

    /// When the record being built has waited long enough, if it does.
    pub fn held_until(&self) -> Option<Instant> {
        self.held_since.map(|since| since + HOLD)
    }

    /// Accounts for a record in its segment.
    fn record_placed(
        &mut self,
        config: &ShardConfig,
        index: usize,
        lsn: Lsn,
        end: u32,
        record: &[u8],
        entries: &[Entry],
    ) {
        let segment = &mut self.segments[index];
        if segment.used == 0 {
            segment.first_lsn = lsn;
        }
        let open = self.open.as_mut().expect("a record goes to the open segment");
        open.entries.push_record(record, entries);
        segment.last_lsn = lsn;
        segment.used = end;
        segment.entries = open.entries.len() as u32;
        segment.cells = open.entries.cells() as u32;
        self.note_rest(config.segment_size);
    }

    /// Makes every pending entry that still counts the newest version of its block. Returns the
    /// record's entries.
    fn apply_pending(
        &mut self,
        cx: &mut Closing<'_>,
        index: usize,
        at: u32,
        packed_at: usize,
    ) -> Vec<Entry> {
        let pending = std::mem::take(&mut self.builder.pending);
        let mut entries = Vec::with_capacity(pending.len());
        for (n, mut item) in pending.iter().copied().enumerate() {
            if n.is_multiple_of(WARM_BLOCKS) {
                let next = pending[n..].iter().take(WARM_BLOCKS);
                next.for_each(|item| cx.contents.index().warm(item.key));
            }
            let now = cx.contents.get(item.key);
            // A copy forward counts as newly inserted: its hits have been paid for.
            let touch = match item.expect {
                Expect::Always => Touch::of(true, now.is_some()),
                Expect::Over(_) => Touch::Rewritten,
                Expect::Absent | Expect::At(_) | Expect::Dirties(_) => Touch::Read,
            };
            let mut meta = cx.policy.inserted(touch);
            let moves = matches!(item.payload, Payload::Stored(_));
            let is_copied = matches!(item.payload, Payload::Stored(at) if at.is_new);
            let dirties = matches!(item.expect, Expect::Dirties(_));
            if !item.expect.is_again() {
                cx.policy.entered();
            }
            match item.expect {
                Expect::Always => {}
                Expect::Over(base) => {
                    let now = cx.contents.base_of(item.key);
                    let same = now.is_some_and(|now| now.is_same_version(&base));
                    assert!(same, "a base stays until its delta is in the log");
                }
                Expect::Absent if now.is_none() => {}
                // The log may still name an older version of a block that is not named yet.
                Expect::Absent
                    if item.kind == EntryKind::Invalidate && cx.contents.is_unnamed(item.key) => {}
                // A write past the log that has found the block clean would not wait for a destage.
                Expect::Dirties(_) if cx.locks.is_locked(item.key) => {
                    end_hold(cx, &item);
                    continue;
                }
                Expect::At(place) | Expect::Dirties(place) => match now {
                    // A clean block that was made dirty does not leave.
                    Some(now)
                        if now.is_same_version(&place)
                            // The old page of a copy was not held: it may have other bytes.
                            && (!is_copied || now.crc == place.crc)
                            && (item.kind != EntryKind::Invalidate || now.dirty <= place.dirty) =>
                    {
                        meta = if moves { now.meta } else { cx.policy.copied(now.meta) };
                        if item.kind == EntryKind::Lost && !now.dirty {
                            // The block was destaged before its loss was logged.
                            item.kind = EntryKind::Invalidate;
                        }
                        item.dirty = (now.dirty || dirties) && item.kind != EntryKind::Invalidate;
                        if matches!(item.payload, Payload::Stored(at) if !at.is_new) {
                            // It may have left since it was looked up, and come back to its place.
                            (item.len, item.crc) = (now.len, now.crc);
                        }
                    }
                    _ => {
                        end_hold(cx, &item);
                        continue;
                    }
                },
                Expect::Absent => {
                    end_hold(cx, &item);
                    continue;
                }
            }
            let (segment, offset) = match item.payload {
                Payload::None => (index, 0),
                Payload::Page(page) => (index, at + (page * PAGE) as u32),
                Payload::Packed(so_far) => (index, at + (packed_at + so_far) as u32),
                Payload::Shared(old) => (old.segment as usize, old.offset),
                Payload::Stored(at) => (at.segment as usize, at.offset),
            };
            let stored = match item.payload {
                Payload::Stored(at) => Some(at.unit),
                _ => None,
            };
            let shared = match item.payload {
                Payload::Shared(old) => Some(self.share(cx, item.key, &old, index)),
                _ => None,
            };
            let base = item.against.map(|base| self.name_base(cx, item.key, &base, index));
            let place = Place {
                segment: segment as u32,
                offset: match item.payload {
                    Payload::None => at + 8 * (1 + entries.len() as u32),
                    _ => offset,
                },
                len: item.len,
                kind: item.kind,
                crc: item.crc,
                dirty: item.dirty,
                meta,
            };
            // A new one may have been put together from versions that are not durable yet. One that
            // was clean may be lost on the primary from the first write there on.
            let is_new = matches!(item.payload, Payload::Stored(at) if at.is_new);
            if item.dirty && (is_new || dirties) {
                cx.contents.note_unsettled(item.key, self.next_lsn);
            }
            entries.push(Entry {
                volume: item.key.volume(),
                block: item.key.block(),
                kind: item.kind,
                dirty: item.dirty,
                first: entries.is_empty(),
                offset,
                len: item.len,
                count: item.count,
                crc: item.crc,
                shared,
                base,
                stored,
            });
            let is_mapping = matches!(item.payload, Payload::Stored(_));
            cx.stats.log_blocks += u64::from(item.len > 0 && !is_mapping);
            for key in (item.key.0..item.key.0 + u64::from(item.count)).map(Key) {
                match item.kind {
                    EntryKind::Checkpoint => {}
                    _ if is_mapping && now == Some(place) => {
                        cx.contents.note_named(key);
                    }
                    EntryKind::Invalidate => cx.contents.forget(key, cx.ram),
                    _ => {
                        let against = item.against.map(|base| base.place);
                        cx.contents.place(
                            cx.now,
                            key,
                            place,
                            against,
                            item.expect.is_certain(),
                            cx.ram,
                        );
                    }
                }
            }
            end_hold(cx, &item);
        }
        self.builder.pending = pending;
        if entries.is_empty() {
            return entries;
        }
        self.builder.clear_entries();
        entries
    }

    /// Notes that a block shares a payload from this record on, which is placed in the segment at
    /// position `index`. Returns the distance back to the payload, in segments.
    fn share(&self, cx: &mut Closing<'_>, key: Key, old: &Shared, index: usize) -> u16 {
        cx.contents.note_unsettled(key, self.next_lsn);
        self.name_payload(cx, key, old.segment, old.seq, index)
    }

    /// Names the base of a block that is stored against a payload from this record on.
    fn name_base(&self, cx: &mut Closing<'_>, key: Key, base: &Against, index: usize) -> NamedBase {
        let Place { segment, offset, len, kind, .. } = base.place;
        let back = self.name_payload(cx, key, segment, base.seq, index);
        NamedBase { back, offset, len, kind }
    }

    /// Notes that an entry of the block, in the segment at position `index`, names a payload in
    /// segment `old`, at position `at`. Returns the distance between the two segments.
    fn name_payload(
        &self,
        cx: &mut Closing<'_>,
        key: Key,
        at: u32,
        old: SegmentSeq,
        index: usize,
    ) -> u16 {
        let now = self.segments[index].seq;
        cx.contents.note_sharer(key, at as usize, old, now);
        u16::try_from(now.0 - old.0).expect("only near payloads are named")
    }

    /// Finds room for a record, in a new segment if necessary. Returns position and offset.
    fn room(&mut self, cx: &mut Closing<'_>, pages: usize, cells: usize) -> Option<(usize, u32)> {
        if let Some(open) = &self.open {
            let segment = &self.segments[open.index];
            let used = segment.used;
            let end = used as usize + pages * PAGE + footer_bytes(segment.cells as usize + cells);
            if end <= cx.config.segment_size as usize {
                return Some((open.index, used));
            }
            self.seal_open(&mut *cx.policy);
        }
        self.open_segment(cx).map(|index| (index, 0))
    }

    /// Seals the open segment; its footer follows when its records are durable.
    pub fn seal_open(&mut self, policy: &mut dyn EvictionPolicy) {
        let Some(segment) = self.open.take() else { return };
        let state = &mut self.segments[segment.index];
        state.state = SegmentState::Sealing;
        let last_lsn = state.last_lsn;
        self.sealing.push_back(SealingSegment {
            segment,
            last_crc: self.last_crc,
            start: self.last_start,
            clean: self.last_clean,
            footer_sent: false,
        });
        self.want_durable(last_lsn);
        policy.sealed(self.segments.len() as u64);
    }

    fn open_segment(&mut self, cx: &mut Closing<'_>) -> Option<usize> {
        let index = self.position(self.head);
        if self.sealing.len() >= SEALING_MAX || self.segments[index].state != SegmentState::Free {
            return None;
        }
        // The last free segment is reserved for a record that frees another one. So crashes, each
        // of which leaves a segment half empty, never leave a log that cannot continue.
        let frees = self.start > self.last_start || !cx.contents.fenced().is_empty();
        if self.free == 1 && !frees && !cx.frees_with_one {
            return None;
        }
        let segment = &mut self.segments[index];
        assert_eq!(segment.readers, 0, "a free segment");
        cx.contents.begin_segment(index, self.head);
        *segment = crate::log::Segment {
            state: SegmentState::Open,
            seq: self.head,
            first_lsn: self.next_lsn,
            ..Default::default()
        };
        self.head = self.head.next();
        self.free -= 1;
        let first_prev_crc = self.last_crc;
        let entries = EntryTable::new(cx.config.unit_entries);
        self.open = Some(OpenSegment { index, entries, first_prev_crc });
        Some(index)
    }
}

impl Log {
    /// Tells the builder how much room is left in the open segment of `size` bytes.
    pub(super) fn note_rest(&mut self, size: u32) {
        let Some(open) = &self.open else { return };
        let segment = &self.segments[open.index];
        let left = size - segment.used;
        self.builder.set_rest(left as usize, segment.cells as usize);
    }
}
