//! The way into the log: blocks are encoded into the builder, and a record is closed, placed and
//! sent (group commit).
//!
//! A block's index entry changes when its record is closed, not when the device has it: a read
//! that comes meanwhile waits for the record or finds the bytes in RAM.

use forebay_block::Io;
use forebay_format::{Entry, EntryKind, Lsn, PAGE, RecordHeader, encode_record, footer_bytes};

use crate::Engine;
use crate::api::{Effects, Health, Target};
use crate::contents::Place;
use crate::key::Key;
use crate::limits::{RECLAIM_RESERVE, RECORDS_IN_FLIGHT, RECORDS_IN_FLIGHT_MAX, SEALING_MAX};
use crate::log::builder::{Expect, Payload, Pending};
use crate::log::{Log, OpenSegment, RecordInFlight, SealingSegment, SegmentState};
use crate::op::{Op, Ticket};
use crate::slab::Id;

impl Engine {
    /// Moves what waits for the log into it, as far as there is room.
    pub(crate) fn pump_log(&mut self, fx: &mut Effects) {
        if self.health() != Health::Good {
            return;
        }
        self.pump_copies(fx);
        self.pump_overflow(fx);
        while let Some(&op) = self.log.queue.front() {
            let has_room = self.has_client_space() || self.fits_reserve(op);
            if !has_room || !self.log_op(op, fx) {
                break;
            }
            self.log.queue.pop_front();
        }
        self.checkpoint_if_needed(fx);
        // What nobody waits for yet shares the record with what comes in the next turn.
        let goes_on = self.form.background().turn_is_over() || self.fills_last();
        let grows = goes_on && self.log.builder.complete.is_empty();
        if self.log.in_flight.len() < RECORDS_IN_FLIGHT && !grows {
            self.close_record(fx);
        }
    }

    /// Whether clients and admissions may use the log; the last segments are for reclaim.
    pub(crate) fn has_client_space(&self) -> bool {
        self.log.free > RECLAIM_RESERVE + self.stuck_reserve() && !self.contents.index().is_full()
    }

    /// Adds an entry without which a segment cannot be freed, if nothing else is there that is
    /// certain to carry the news: what is copied may count no more when the record is closed.
    fn checkpoint_if_needed(&mut self, fx: &mut Effects) {
        let waits = self.log.freeing.iter().any(|&(_, lsn)| lsn == self.log.next_lsn)
            || self.log.barrier >= self.log.next_lsn && !self.log.waiters.is_empty();
        if waits && !self.log.builder.pending.iter().any(|item| item.expect.is_certain()) {
            self.push_bare(fx, Key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
        }
    }

    /// Adds an entry without payload; false when there is no room now.
    pub(crate) fn push_bare(
        &mut self,
        fx: &mut Effects,
        key: Key,
        count: u32,
        kind: EntryKind,
        dirty: bool,
        expect: Expect,
    ) -> bool {
        if !self.log.builder.fits_bare() && !self.close_record(fx) {
            return false;
        }
        let payload = Payload::None;
        let (len, crc, against) = (0, 0, None);
        let pending = Pending { key, count, kind, dirty, payload, len, crc, expect, against };
        self.log.builder.pending.push(pending);
        true
    }

    /// Notes that `op` waits for the record being built, and whether that is its last.
    pub(crate) fn wait_for_builder(&mut self, op: Id, complete: bool) {
        if self.log.builder.add_waiter(op)
            && let Op::Write(write) = self.requests.get_mut(op)
        {
            write.outstanding += 1;
        }
        if complete {
            self.log.builder.complete.push(op);
        }
    }

    /// Closes the record, places it and sends it. True when the builder is empty afterwards.
    pub(crate) fn close_record(&mut self, fx: &mut Effects) -> bool {
        if self.log.builder.is_empty() {
            return true;
        }
        if self.log.in_flight.len() >= RECORDS_IN_FLIGHT_MAX || self.health() != Health::Good {
            return false;
        }
        let pages = self.log.builder.pages();
        let entries_max = self.log.builder.pending.len();
        let Some((index, at)) = self.room(pages, entries_max) else { return false };
        let packed_at = self.log.builder.packed_at();
        let has_news = self.log.builder.has_news();
        let lsn = self.log.next_lsn;
        let entries = self.apply_pending(index, at, packed_at);
        if entries.is_empty() {
            assert!(self.log.builder.waiters.is_empty(), "a client's entries always count");
            self.log.builder.clear();
            return true;
        }
        self.log.next_lsn = lsn.next();
        let mut buf = self.log.builder.take(pages, packed_at);
        let header = RecordHeader {
            pool: self.config.pool,
            shard: self.config.shard,
            seq: self.log.segments[index].seq,
            lsn,
            at,
            prev_crc: self.log.last_crc,
            pages: pages as u16,
            durable: self.log.durable,
            clean: self.log.clean(&mut self.contents).min(lsn),
            start: self.log.start,
            epoch: self.config.epoch,
        };
        self.log.last_crc = encode_record(&mut buf, &header, &entries);
        self.log.last_start = header.start;
        self.log.last_clean = header.clean;
        self.record_placed(index, lsn, at + buf.len() as u32, &entries);
        let waiters = std::mem::take(&mut self.log.builder.waiters);
        let len = buf.len() as u32;
        if has_news {
            self.reclaim.note_client_bytes(len);
        }
        self.log.in_flight.push_back(RecordInFlight { lsn, index, at, len, done: false, waiters });
        self.stats.log_records += 1;
        self.stats.log_bytes += u64::from(len);
        let offset = self.segment_offset(index) + u64::from(at);
        let ticket = Ticket::Record { lsn, tries: 1 };
        self.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, buf));
        for op in std::mem::take(&mut self.log.builder.complete) {
            self.write_applied(op, lsn, fx);
        }
        true
    }

    /// Accounts a record to its segment.
    fn record_placed(&mut self, index: usize, lsn: Lsn, end: u32, entries: &[Entry]) {
        let segment = &mut self.log.segments[index];
        if segment.used == 0 {
            segment.first_lsn = lsn;
        }
        segment.last_lsn = lsn;
        segment.used = end;
        segment.entries += entries.len() as u32;
        let open = self.log.open.as_mut().expect("a record goes to the open segment");
        open.entries.extend_from_slice(entries);
        self.log.note_rest(self.config.segment_size);
    }

    /// Makes every pending entry that still counts the newest version of its block; returns the
    /// record's entries.
    fn apply_pending(&mut self, index: usize, at: u32, packed_at: usize) -> Vec<Entry> {
        let pending = std::mem::take(&mut self.log.builder.pending);
        let mut entries = Vec::with_capacity(pending.len());
        for mut item in pending.iter().copied() {
            match item.expect {
                Expect::Always => {}
                Expect::Over(base) => {
                    let now = self.contents.base_of(item.key);
                    let same = now.is_some_and(|now| now.is_same_version(&base));
                    assert!(same, "a base stays until its delta is in the log");
                }
                Expect::Absent if self.contents.get(item.key).is_none() => {}
                Expect::At(place) => match self.contents.get(item.key) {
                    Some(now) if now.is_same_version(&place) => {
                        if item.kind == EntryKind::Lost && !now.dirty {
                            // The primary got it before its loss was logged.
                            item.kind = EntryKind::Invalidate;
                        }
                        item.dirty = now.dirty && item.kind != EntryKind::Invalidate;
                    }
                    _ => continue,
                },
                Expect::Absent => continue,
            }
            let (segment, offset) = match item.payload {
                Payload::None => (index, 0),
                Payload::Page(page) => (index, at + (page * PAGE) as u32),
                Payload::Packed(so_far) => (index, at + (packed_at + so_far) as u32),
                Payload::Shared(old) => (old.segment as usize, old.offset),
            };
            let shared = match item.payload {
                Payload::Shared(old) => Some(self.share(item.key, &old, index)),
                _ => None,
            };
            let base = item.against.map(|base| self.name_base(item.key, &base, index));
            let place = Place {
                segment: segment as u32,
                offset: if offset == 0 { at + 8 * (1 + entries.len() as u32) } else { offset },
                len: item.len,
                kind: item.kind,
                crc: item.crc,
                dirty: item.dirty,
                // A copy forward counts as inserted anew: its hits have been paid for.
                meta: self.policy.inserted(),
            };
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
            });
            self.stats.log_blocks += u64::from(item.len > 0);
            for key in (item.key.0..item.key.0 + u64::from(item.count)).map(Key) {
                match item.kind {
                    EntryKind::Checkpoint => {}
                    EntryKind::Invalidate => self.contents.forget(key, &mut self.ram),
                    _ => {
                        let against = item.against.map(|base| base.place);
                        self.contents.place(
                            self.now,
                            key,
                            place,
                            against,
                            item.expect.is_certain(),
                            &mut self.ram,
                        );
                    }
                }
            }
        }
        self.log.builder.pending = pending;
        if entries.is_empty() {
            return entries;
        }
        self.log.builder.pending.clear();
        entries
    }

    /// Finds room for a record, in a new segment if need be: position and offset.
    fn room(&mut self, pages: usize, entries: usize) -> Option<(usize, u32)> {
        if let Some(open) = &self.log.open {
            let used = self.log.segments[open.index].used;
            let end = used as usize + pages * PAGE + footer_bytes(open.entries.len() + entries);
            if end <= self.config.segment_size as usize {
                return Some((open.index, used));
            }
            self.seal_open_segment();
        }
        self.open_segment().map(|index| (index, 0))
    }

    /// Takes the open segment out of use; its footer follows when its records are durable.
    pub(crate) fn seal_open_segment(&mut self) {
        let Some(segment) = self.log.open.take() else { return };
        let state = &mut self.log.segments[segment.index];
        state.state = SegmentState::Sealing;
        let last_lsn = state.last_lsn;
        self.log.sealing.push_back(SealingSegment {
            segment,
            last_crc: self.log.last_crc,
            start: self.log.last_start,
            clean: self.log.last_clean,
            footer_sent: false,
        });
        self.log.want_durable(last_lsn);
        self.policy.sealed(self.log.segments.len() as u64);
    }

    fn open_segment(&mut self) -> Option<usize> {
        let index = self.log.position(self.log.head);
        if self.log.sealing.len() >= SEALING_MAX
            || self.log.segments[index].state != SegmentState::Free
        {
            return None;
        }
        // The last one is for a record that frees another, so that crashes, which each leave a
        // segment half empty, never leave a log that cannot go on.
        let frees = self.log.start > self.log.last_start || !self.contents.fenced().is_empty();
        if self.log.free == 1 && !frees && !self.frees_with_one() {
            return None;
        }
        let segment = &mut self.log.segments[index];
        assert_eq!(segment.readers, 0, "a free segment");
        self.contents.begin_segment(index, self.log.head);
        *segment = crate::log::Segment {
            state: SegmentState::Open,
            seq: self.log.head,
            first_lsn: self.log.next_lsn,
            ..Default::default()
        };
        self.log.head = self.log.head.next();
        self.log.free -= 1;
        let first_prev_crc = self.log.last_crc;
        self.log.open = Some(OpenSegment { index, entries: Vec::new(), first_prev_crc });
        Some(index)
    }
}

impl Log {
    /// Tells the builder how much room the open segment, of `size` bytes, has left.
    pub(super) fn note_rest(&mut self, size: u32) {
        let Some(open) = &self.open else { return };
        let left = size - self.segments[open.index].used;
        self.builder.set_rest(left as usize, open.entries.len());
    }
}
