//! Ended records, flushes and footers: the operations that waited for them proceed.

use forebay_block::{Completion, Io, IoResult};
use forebay_format::{Lsn, SegmentSeq};

use crate::Engine;
use crate::api::{Effects, Health, Target};
use crate::limits::WRITE_TRIES;
use crate::log::durable::FooterWrite;
use crate::request::op::Op;
use crate::slab::Id;
use crate::ticket::Ticket;

impl Engine {
    /// Handles the end of a record's write.
    pub(crate) fn record_written(
        &mut self,
        lsn: Lsn,
        tries: u32,
        done: Completion,
        fx: &mut Effects,
    ) {
        match done.result {
            Ok(()) => self.cache.log.end_record(lsn),
            Err(_) if tries < WRITE_TRIES && self.cache.health() == Health::Good => {
                let (index, at) = self.cache.log.record_at(lsn);
                let offset = self.cache.segment_offset(index) + u64::from(at);
                let ticket = Ticket::Record { lsn, tries: tries + 1 };
                self.cache.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, done.buf));
                return;
            }
            Err(_) => {
                self.cache.log.fail_record(lsn, done.buf);
                self.fail_cache(fx);
            }
        }
        if self.cache.health() == Health::Good {
            self.advance_completed(fx);
        } else {
            self.cache.log.drop_ended();
        }
        self.wake_readers(fx);
    }

    /// Resumes reads that waited for a record to be written.
    fn wake_readers(&mut self, fx: &mut Effects) {
        for (op, key) in self.cache.log.take_read_waiters() {
            self.requests.read_again(&mut self.cache, op, key, fx);
            self.requests.part_done(&mut self.cache, op, Ok(()), fx);
        }
    }

    /// Handles the records that have completed without a gap.
    fn advance_completed(&mut self, fx: &mut Effects) {
        while let Some(writes) = self.cache.log.complete_next() {
            for op in writes {
                self.record_done(op, fx);
            }
        }
        if !self.cache.config.cache_volatile {
            self.advance_durable(self.cache.log.completed(), fx);
        }
    }

    /// Handles the durability of everything up to `lsn`.
    fn advance_durable(&mut self, lsn: Lsn, fx: &mut Effects) {
        if !self.cache.log.advance_durable(lsn) {
            return;
        }
        self.cache.contents.settle(lsn);
        while let Some(op) = self.cache.log.pop_waiter(false) {
            match self.requests.get(op) {
                Op::Write(_) => self.requests.write_durable(&mut self.cache, op, fx),
                Op::Flush(_) => self.requests.flush_part_done(&mut self.cache, op, Ok(()), fx),
                Op::Read(_) => unreachable!("reads do not wait for durability"),
            }
        }
        let patient = self.cache.patient_from();
        self.cache.log.finish_freeing(patient);
    }

    /// Sends the flush and the footers that are due.
    pub(crate) fn pump_durability(&mut self, fx: &mut Effects) {
        if self.cache.health() != Health::Good {
            return;
        }
        let units = self.cache.store.wants_flush(self.cache.now);
        if self.cache.log.begin_wanted_flush() || units && self.cache.log.begin_flush() {
            self.cache.store.begin_flush();
            self.cache.send(fx, Target::Cache, Ticket::CacheFlush, Io::flush);
        }
        while let Some(footer) = self.cache.log.next_footer(&self.cache.config) {
            self.send_footer(footer, 1, fx);
        }
        let patient = self.cache.patient_from();
        self.cache.log.finish_freeing(patient);
    }

    /// Handles the end of a cache device flush. A failed flush is not retried: the device may have
    /// dropped its volatile cache, and the next flush would still succeed.
    pub(crate) fn cache_flushed(&mut self, result: IoResult<()>, fx: &mut Effects) {
        let covered = self.cache.log.end_flush();
        if self.cache.health() != Health::Good {
            return;
        }
        match result {
            Ok(()) => {
                self.cache.store.end_flush();
                self.advance_durable(covered, fx);
            }
            Err(_) => self.fail_cache(fx),
        }
    }

    fn send_footer(&mut self, footer: FooterWrite, tries: u32, fx: &mut Effects) {
        let FooterWrite { seq, offset, buf } = footer;
        let offset = self.cache.config.area.offset + offset;
        let ticket = Ticket::Footer { seq, tries };
        self.cache.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, buf));
    }

    /// Handles the end of a footer's write.
    pub(crate) fn footer_written(
        &mut self,
        seq: SegmentSeq,
        tries: u32,
        done: &IoResult<()>,
        fx: &mut Effects,
    ) {
        match done {
            Ok(()) => self.cache.log.end_footer(seq),
            Err(_) if !self.cache.log.awaits_footer(seq) => {}
            Err(_) if tries < WRITE_TRIES && self.cache.health() == Health::Good => {
                if let Some(footer) = self.cache.log.footer_again(seq, &self.cache.config) {
                    self.send_footer(footer, tries + 1, fx);
                }
            }
            Err(_) => self.fail_cache(fx),
        }
    }

    /// Notes that one of the records a write or an invalidation waits for has ended.
    fn record_done(&mut self, op: Id, fx: &mut Effects) {
        let Op::Write(write) = self.requests.get_mut(op) else {
            unreachable!("only writes wait for records");
        };
        write.outstanding -= 1;
        self.requests.advance_write(&mut self.cache, op, fx);
    }

    /// Moves the operations that wait for durability to waiting for the primary: the device failed.
    pub(crate) fn leave_durable_waiters(&mut self, fx: &mut Effects) {
        while let Some(op) = self.cache.log.pop_waiter(true) {
            match self.requests.get(op) {
                Op::Flush(_) => self.requests.flush_without_log(&mut self.cache, op),
                _ => self.requests.wait_detached(&mut self.cache, op, fx),
            }
        }
    }
}

#[cfg(test)]
mod tests;
