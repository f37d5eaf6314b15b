//! From written to durable: completed records, flushes of the cache device, footers.
//!
//! Records may complete in any order but count in LSN order. A flush covers the records that had
//! completed when it was sent. A footer is written after a flush has covered its segment, so a
//! valid footer means that every payload it names is on the medium.

use forebay_block::IoBuf;
use forebay_format::{Entry, Footer, Lsn, SegmentSeq, encode_footer, footer_bytes};

use crate::api::ShardConfig;
use crate::key::Key;
use crate::log::{Log, SegmentState};
use crate::slab::Id;

/// A footer to be written.
pub struct FooterWrite {
    pub seq: SegmentSeq,
    /// Offset of the footer in the shard's area, in bytes.
    pub offset: u64,
    pub buf: IoBuf,
}

impl Log {
    fn in_flight_at(&self, lsn: Lsn) -> usize {
        let at = self.in_flight.iter().position(|record| record.lsn == lsn);
        at.expect("a record is in flight until it is written or given up")
    }

    /// Place of a record that is being written: position of the segment, and bytes from its start.
    pub fn record_at(&self, lsn: Lsn) -> (usize, u32) {
        let record = &self.in_flight[self.in_flight_at(lsn)];
        (record.index, record.at)
    }

    /// Notes that a record has been written.
    pub fn end_record(&mut self, lsn: Lsn) {
        let at = self.in_flight_at(lsn);
        self.in_flight[at].done = true;
    }

    /// Notes that a record could not be written, and keeps its bytes for reads.
    pub fn fail_record(&mut self, lsn: Lsn, bytes: IoBuf) {
        let (index, at) = self.record_at(lsn);
        self.keep_failed(index, at, bytes);
        self.end_record(lsn);
    }

    /// Drops records that have ended: the device has failed.
    pub fn drop_ended(&mut self) {
        self.in_flight.retain(|record| !record.done);
    }

    /// Takes the reads that waited for a record to be written.
    pub fn take_read_waiters(&mut self) -> Vec<(Id, Key)> {
        std::mem::take(&mut self.read_waiters)
    }

    /// Completes the next record if it has been written; returns the operations that waited for it.
    pub fn complete_next(&mut self) -> Option<Vec<Id>> {
        let record = self.in_flight.pop_front_if(|record| record.done)?;
        self.completed = record.lsn;
        self.undurable.push_back((record.lsn, record.index, record.at + record.len));
        Some(record.waiters)
    }

    /// Notes that everything up to `lsn` is durable; returns whether that is new.
    pub fn advance_durable(&mut self, lsn: Lsn) -> bool {
        if lsn <= self.durable {
            return false;
        }
        self.durable = lsn;
        while let Some((_, index, end)) = self.undurable.pop_front_if(|&mut (at, ..)| at <= lsn) {
            self.segments[index].durable = end;
        }
        self.wanted.retain(|&wanted| wanted > lsn);
        true
    }

    /// The blocks that entries of segments say are dirty, if not all of the segment is durable: all
    /// blocks whose newest version may not be durable, and others. No more than a few segments
    /// have them, whatever the size of the log.
    pub fn doubtful_blocks(&self) -> Vec<Key> {
        let sealing = self.sealing.iter().map(|sealing| &sealing.segment);
        let segments = sealing.chain(&self.open);
        let doubtful = segments.filter(|s| self.segments[s.index].last_lsn > self.durable);
        let entries = doubtful.flat_map(|segment| segment.entries.iter());
        let keys = |entry: Entry| {
            let (volume, first) = (entry.volume, entry.block);
            (first..first + u64::from(entry.count)).map(move |block| Key::new(volume, block))
        };
        entries.filter(|entry| entry.dirty).flat_map(keys).collect()
    }

    /// Takes the next operation that waits for a record that is now durable, or any if `all`.
    pub fn pop_waiter(&mut self, all: bool) -> Option<Id> {
        let first = self.waiters.first_entry()?;
        (all || first.key().0 <= self.durable).then(|| first.remove())
    }

    /// Makes an operation wait until `lsn` is durable; returns true if it already is.
    pub fn wait_durable(&mut self, op: Id, lsn: Lsn) -> bool {
        if lsn <= self.durable {
            return true;
        }
        self.want_durable(lsn);
        self.waited += 1;
        self.waiters.insert((lsn, self.waited), op);
        false
    }

    /// Begins a flush if an operation waits for one; returns true if it must be sent.
    pub fn begin_wanted_flush(&mut self) -> bool {
        let due = self.wanted.first().is_some_and(|&lsn| lsn <= self.completed);
        due && self.has_undurable() && self.begin_flush()
    }

    /// Ends a flush; returns the last record that it covered.
    pub fn end_flush(&mut self) -> Lsn {
        self.flushing.take().expect("one flush is in flight")
    }

    /// The next footer to write: all records of its segment are durable.
    pub fn next_footer(&mut self, config: &ShardConfig) -> Option<FooterWrite> {
        let due = self.sealing.iter().position(|sealing| {
            let segment = &self.segments[sealing.segment.index];
            !sealing.footer_sent && segment.last_lsn <= self.durable
        })?;
        self.sealing[due].footer_sent = true;
        Some(self.footer(due, config))
    }

    /// The footer again, if its segment still waits for it.
    pub fn footer_again(&self, seq: SegmentSeq, config: &ShardConfig) -> Option<FooterWrite> {
        Some(self.footer(self.sealing_at(seq)?, config))
    }

    /// Whether a segment waits for its footer.
    pub fn awaits_footer(&self, seq: SegmentSeq) -> bool {
        self.sealing_at(seq).is_some()
    }

    /// Notes that a footer has been written: its segment is complete.
    pub fn end_footer(&mut self, seq: SegmentSeq) {
        let Some(i) = self.sealing_at(seq) else { return };
        let sealing = self.sealing.remove(i).expect("it was found there");
        self.segments[sealing.segment.index].state = SegmentState::Sealed;
    }

    fn sealing_at(&self, seq: SegmentSeq) -> Option<usize> {
        self.sealing.iter().position(|s| self.segments[s.segment.index].seq == seq)
    }

    fn footer(&self, i: usize, config: &ShardConfig) -> FooterWrite {
        let sealing = &self.sealing[i];
        let index = sealing.segment.index;
        let segment = &self.segments[index];
        let footer = Footer {
            pool: config.pool,
            shard: config.shard,
            seq: segment.seq,
            first_lsn: segment.first_lsn,
            last_lsn: segment.last_lsn,
            last_crc: sealing.last_crc,
            first_prev_crc: sealing.segment.first_prev_crc,
            start: sealing.start,
            clean: sealing.clean,
            entries: segment.entries,
            unit_entries: config.unit_entries,
        };
        let bytes = footer_bytes(segment.cells as usize);
        let mut buf = config.buffers.get(bytes);
        encode_footer(&mut buf, &footer, &sealing.segment.entries);
        let offset = (index as u64 + 1) * u64::from(config.segment_size) - bytes as u64;
        FooterWrite { seq: segment.seq, offset, buf }
    }

    /// Frees the segments whose removal from the log is durable and that nothing reads any more. If
    /// more than `patient` segments are free, the removal waits for a flush that is due anyway: the
    /// one for the next segment that is full.
    pub fn finish_freeing(&mut self, patient: u64) {
        while let Some(&(seq, lsn)) = self.freeing.front() {
            let index = self.position(seq);
            if lsn > self.durable {
                if self.free <= patient {
                    self.want_durable(lsn);
                }
                break;
            }
            if self.segments[index].readers > 0 {
                break;
            }
            self.freeing.pop_front();
            self.segments[index].state = SegmentState::Free;
            self.free += 1;
        }
    }
}
