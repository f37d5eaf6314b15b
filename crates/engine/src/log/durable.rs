//! From written to durable: completed records, flushes of the cache device, footers.
//!
//! Records complete in any order but count in LSN order. A flush covers what had completed when
//! it was sent. A footer is written when a flush has covered its segment, so a valid footer says
//! that every payload it names is on the medium.

use forebay_block::{Completion, Io, IoResult};
use forebay_format::{Footer, Lsn, SegmentSeq, encode_footer, footer_bytes};

use crate::Engine;
use crate::api::{Effects, Health, Target};
use crate::limits::WRITE_TRIES;
use crate::log::SegmentState;
use crate::op::{Op, Ticket};

impl Engine {
    /// A record's write ended.
    pub(crate) fn record_written(
        &mut self,
        lsn: Lsn,
        tries: u32,
        done: Completion,
        fx: &mut Effects,
    ) {
        let at = self.log.in_flight.iter().position(|r| r.lsn == lsn);
        let at = at.expect("a record is in flight until it is written or given up");
        let (index, offset) = (self.log.in_flight[at].index, self.log.in_flight[at].at);
        match done.result {
            Ok(()) => self.log.in_flight[at].done = true,
            Err(_) if tries < WRITE_TRIES && self.health() == Health::Good => {
                let offset = self.segment_offset(index) + u64::from(offset);
                let ticket = Ticket::Record { lsn, tries: tries + 1 };
                self.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, done.buf));
                return;
            }
            Err(_) => {
                self.log.keep_failed(index, offset, done.buf);
                self.log.in_flight[at].done = true;
                self.fail_cache(fx);
            }
        }
        if self.health() != Health::Good {
            self.log.in_flight.retain(|record| !record.done);
            return self.wake_readers(fx);
        }
        self.advance_completed(fx);
        self.wake_readers(fx);
    }

    /// Lets reads go on that waited for a record to be written.
    pub(crate) fn wake_readers(&mut self, fx: &mut Effects) {
        for (op, key) in std::mem::take(&mut self.log.read_waiters) {
            self.read_again(op, key, fx);
            self.part_done(op, Ok(()), fx);
        }
    }

    /// Counts the records that have completed without a gap.
    fn advance_completed(&mut self, fx: &mut Effects) {
        while self.log.in_flight.front().is_some_and(|record| record.done) {
            let record = self.log.in_flight.pop_front().expect("there is a front");
            self.log.completed = record.lsn;
            let end = record.at + record.len;
            self.log.undurable.push_back((record.lsn, record.index, end));
            for op in record.waiters {
                self.record_done(op, fx);
            }
        }
        if !self.config.cache_volatile {
            self.advance_durable(self.log.completed, fx);
        }
    }

    /// Everything up to `lsn` is durable now.
    fn advance_durable(&mut self, lsn: Lsn, fx: &mut Effects) {
        if lsn <= self.log.durable {
            return;
        }
        self.log.durable = lsn;
        while self.log.undurable.front().is_some_and(|&(at, _, _)| at <= lsn) {
            let (_, index, end) = self.log.undurable.pop_front().expect("there is a front");
            self.log.segments[index].durable = end;
        }
        self.log.wanted.retain(|&wanted| wanted > lsn);
        self.contents.settle(lsn);
        while let Some(first) = self.log.waiters.first_entry() {
            if first.key().0 > lsn {
                break;
            }
            let op = first.remove();
            match self.requests.get(op) {
                Op::Write(_) => self.write_durable(op, fx),
                Op::Flush(_) => self.flush_part_done(op, Ok(()), fx),
                Op::Read(_) => unreachable!("reads do not wait for durability"),
            }
        }
        self.finish_freeing();
    }

    /// Sends the flush and the footers that are due.
    pub(crate) fn pump_durability(&mut self, fx: &mut Effects) {
        if self.health() != Health::Good {
            return;
        }
        let due = self.log.wanted.first().is_some_and(|&lsn| lsn <= self.log.completed);
        if due && self.log.flushing.is_none() && self.log.completed > self.log.durable {
            self.log.flushing = Some(self.log.completed);
            self.stats.cache_flushes += 1;
            self.send(fx, Target::Cache, Ticket::CacheFlush, Io::flush);
        }
        self.send_footers(fx);
        self.finish_freeing();
    }

    /// A flush of the cache device ended. A failed one is not tried again: what the device had in
    /// its cache may be gone although the next flush would say yes.
    pub(crate) fn cache_flushed(&mut self, result: IoResult<()>, fx: &mut Effects) {
        let covered = self.log.flushing.take().expect("one flush is in flight");
        if self.health() != Health::Good {
            return;
        }
        match result {
            Ok(()) => self.advance_durable(covered, fx),
            Err(_) => self.fail_cache(fx),
        }
    }

    fn send_footers(&mut self, fx: &mut Effects) {
        for i in 0..self.log.sealing.len() {
            let sealing = &self.log.sealing[i];
            let index = sealing.segment.index;
            if sealing.footer_sent || self.log.segments[index].last_lsn > self.log.durable {
                continue;
            }
            self.log.sealing[i].footer_sent = true;
            let seq = self.log.segments[index].seq;
            self.send_footer(i, seq, 1, fx);
        }
    }

    fn send_footer(&mut self, i: usize, seq: SegmentSeq, tries: u32, fx: &mut Effects) {
        let sealing = &self.log.sealing[i];
        let index = sealing.segment.index;
        let segment = &self.log.segments[index];
        let footer = Footer {
            pool: self.config.pool,
            shard: self.config.shard,
            seq,
            first_lsn: segment.first_lsn,
            last_lsn: segment.last_lsn,
            last_crc: sealing.last_crc,
            first_prev_crc: sealing.segment.first_prev_crc,
            start: sealing.start,
            clean: sealing.clean,
            entries: segment.entries,
        };
        let bytes = footer_bytes(sealing.segment.entries.len());
        let mut buf = self.config.buffers.get(bytes);
        encode_footer(&mut buf, &footer, &sealing.segment.entries);
        self.stats.log_bytes += bytes as u64;
        let offset =
            self.segment_offset(index) + u64::from(self.config.segment_size) - bytes as u64;
        let ticket = Ticket::Footer { seq, tries };
        self.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, buf));
    }

    /// A footer's write ended.
    pub(crate) fn footer_written(
        &mut self,
        seq: SegmentSeq,
        tries: u32,
        done: Completion,
        fx: &mut Effects,
    ) {
        let segments = &self.log.segments;
        let found = self.log.sealing.iter().position(|s| segments[s.segment.index].seq == seq);
        let Some(i) = found else { return };
        match done.result {
            Ok(()) => {
                let sealing = self.log.sealing.remove(i).expect("it was found there");
                self.log.segments[sealing.segment.index].state = SegmentState::Sealed;
            }
            Err(_) if tries < WRITE_TRIES && self.health() == Health::Good => {
                self.send_footer(i, seq, tries + 1, fx);
            }
            Err(_) => self.fail_cache(fx),
        }
    }

    /// Segments whose end is durable, and that nobody reads any more, are free.
    pub(crate) fn finish_freeing(&mut self) {
        while let Some(&(seq, lsn)) = self.log.freeing.front() {
            let index = self.log.position(seq);
            if lsn > self.log.durable {
                self.log.want_durable(lsn);
                break;
            }
            if self.log.segments[index].readers > 0 {
                break;
            }
            self.log.freeing.pop_front();
            self.log.segments[index].state = SegmentState::Free;
            self.log.free += 1;
        }
    }

    /// One record that a write or an invalidation waited for has ended.
    fn record_done(&mut self, op: crate::slab::Id, fx: &mut Effects) {
        let Op::Write(write) = self.requests.get_mut(op) else {
            unreachable!("only writes wait for records");
        };
        write.outstanding -= 1;
        self.advance_write(op, fx);
    }

    /// Waits until `lsn` is durable; true when it is already.
    pub(crate) fn wait_durable(&mut self, op: crate::slab::Id, lsn: Lsn) -> bool {
        if lsn <= self.log.durable {
            return true;
        }
        self.log.want_durable(lsn);
        self.log.waited += 1;
        self.log.waiters.insert((lsn, self.log.waited), op);
        false
    }

    /// The device failed: who waits for durability waits for the primary instead.
    pub(crate) fn leave_durable_waiters(&mut self, fx: &mut Effects) {
        while let Some((_, op)) = self.log.waiters.pop_first() {
            match self.requests.get(op) {
                Op::Flush(_) => self.flush_without_log(op, fx),
                _ => self.wait_detached(op, fx),
            }
        }
    }
}
