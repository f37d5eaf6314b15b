//! FLUSH: every write that completed before is durable afterwards. The log takes one flush of the
//! cache device; the primary takes one only if it holds completed writes that the log does not.

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_block::{ErrorKind, Instant, Io, IoError, IoResult, VolumeId};

use crate::Engine;
use crate::api::{Effects, Health, Request, State, Target};
use crate::request::op::{FlushOp, Op};
use crate::slab::Id;
use crate::ticket::Ticket;

/// How long direct changes of a primary wait for a flush that nobody asks for; until then what
/// is read there is not admitted.
const FLUSH_DIRECT_AFTER: Duration = Duration::from_secs(1);

impl Engine {
    /// Takes a client's flush.
    pub(crate) fn submit_flush(&mut self, request: Request, fx: &mut Effects) {
        let Request { id, volume, .. } = request;
        self.stats.flushes += 1;
        let known = self.volume(volume).losses.known();
        let flush = FlushOp { id, volume, outstanding: 1, answered: false, known };
        let op = self.requests.ops.insert(Op::Flush(flush));
        if self.needs_primary_flush(volume) {
            self.flush(op).outstanding += 1;
            self.volume_mut(volume).flush_waiters.push(op);
        }
        if !self.volume(volume).leftover.is_empty() {
            self.flush(op).outstanding += 1;
            self.volume_mut(volume).leftover_waiters.push(op);
        }
        if self.health() != Health::Good {
            return self.flush_without_log(op, fx);
        }
        let covered = self.log.completed();
        if self.log.wait_durable(op, covered) {
            self.flush_part_done(op, Ok(()), fx);
        }
    }

    /// The log's part of a flush, once nothing becomes durable there any more.
    pub(crate) fn flush_without_log(&mut self, op: Id, fx: &mut Effects) {
        let volume = self.flush(op).volume;
        if !self.flush_waits_detached(op, volume) {
            self.flush_part_done(op, Ok(()), fx);
        }
    }

    /// Remembers the dirty blocks of a volume whose mode promises that the primary alone is
    /// complete: they come from a crash or from another mode. What is written from now on waits for
    /// the primary itself.
    pub(crate) fn note_leftover(&mut self, id: VolumeId) {
        let complete = self.volume(id).config.mode.is_complete();
        let leftover =
            if complete { self.contents.dirty().of_volume(id).collect() } else { BTreeSet::new() };
        let volume = self.volume_mut(id);
        volume.leftover = leftover;
        volume.switches += 1;
    }

    /// Lets flushes go on that waited for dirty blocks from an earlier time.
    pub(crate) fn pump_leftover(&mut self, fx: &mut Effects) {
        for i in 0..self.volumes.len() {
            let Some(volume) = self.volumes[i].as_mut() else { continue };
            while let Some(key) = volume.leftover.first() {
                if self.contents.dirty().contains(*key) && !self.contents.fenced().contains(key) {
                    break;
                }
                volume.leftover.pop_first();
            }
            if volume.leftover.is_empty() {
                for op in std::mem::take(&mut volume.leftover_waiters) {
                    self.flush_part_done(op, Ok(()), fx);
                }
            }
        }
    }

    /// Flushes that wait for dirty blocks from an earlier time fail.
    pub(crate) fn give_up_leftover(&mut self, fx: &mut Effects) {
        for i in 0..self.volumes.len() {
            let Some(volume) = self.volumes[i].as_mut() else { continue };
            for op in std::mem::take(&mut volume.leftover_waiters) {
                self.flush_part_done(op, Err(ErrorKind::ShuttingDown.into()), fx);
            }
        }
    }

    /// Whether dirty blocks of a volume from an earlier time have to go to its primary at once.
    pub(crate) fn has_leftover(&self, volume: VolumeId) -> bool {
        !self.volume(volume).leftover.is_empty()
    }

    fn flush(&mut self, id: Id) -> &mut FlushOp {
        match self.requests.ops.get_mut(id) {
            Op::Flush(flush) => flush,
            _ => unreachable!("a flush's id names a flush"),
        }
    }

    fn needs_primary_flush(&self, volume: VolumeId) -> bool {
        let volume = self.volume(volume);
        let through =
            volume.config.mode.is_complete() && (!volume.written.is_empty() || volume.flushing);
        volume.direct > volume.direct_durable || through
    }

    /// Log or primary is done with its part of a flush. A failure is answered at once: the client
    /// has to know before another one is told that its flush, which began later, succeeded.
    pub(crate) fn flush_part_done(
        &mut self,
        id: Id,
        result: Result<(), IoError>,
        fx: &mut Effects,
    ) {
        let flush = self.flush(id);
        flush.outstanding -= 1;
        let (is_last, is_new, is_err) = (flush.outstanding == 0, !flush.answered, result.is_err());
        if is_new && (is_last || is_err) {
            flush.answered = true;
            let FlushOp { id, volume, known, .. } = *flush;
            let lost = self.volume_mut(volume).losses.tell(known);
            let result = result.and(lost.map_or(Ok(()), Err));
            self.reply(fx, id, result, forebay_block::IoBuf::empty());
        }
        if is_last {
            self.requests.ops.remove(id);
            self.requests.answered -= usize::from(!is_new);
        } else if is_new && is_err {
            self.requests.answered += 1;
        }
    }

    /// Sends a flush to every primary that has something to flush and someone to tell, or much.
    pub(crate) fn pump_primary_flushes(&mut self, fx: &mut Effects) {
        let stopping = *self.state() == State::Stopping;
        for i in 0..self.volumes.len() {
            let Some(volume) = self.volumes[i].as_mut() else { continue };
            let waited = !volume.flush_waiters.is_empty() || !volume.fua_waiters.is_empty();
            // Until the first one nothing that is read from the primary may be admitted.
            let first = volume.direct_durable == 0;
            let since = self.now.since(volume.direct_since);
            let quiet = first || stopping || since >= FLUSH_DIRECT_AFTER;
            let direct = quiet && volume.direct > volume.direct_durable;
            let due = waited || direct || self.destage_flush_is_due(i);
            let volume = self.volumes[i].as_mut().expect("it was there just now");
            if volume.flushing || !due {
                continue;
            }
            volume.flushing = true;
            let ticket = Ticket::PrimaryFlush {
                volume: volume.config.id,
                direct: volume.direct,
                destages: std::mem::take(&mut volume.written),
                flushes: std::mem::take(&mut volume.flush_waiters),
                writes: std::mem::take(&mut volume.fua_waiters),
            };
            let target = Target::Primary(volume.config.id);
            self.stats.primary_flushes += 1;
            self.send(fx, target, ticket, Io::flush);
        }
    }

    /// A flush of a primary ended. After a failure nothing it covered counts as durable: dirty
    /// blocks stay dirty and are written again; direct writes are reported to those who flush.
    pub(crate) fn primary_flushed(
        &mut self,
        ticket: Ticket,
        result: IoResult<()>,
        fx: &mut Effects,
    ) {
        let Ticket::PrimaryFlush { volume, direct, mut destages, mut flushes, mut writes } = ticket
        else {
            unreachable!("called with a primary flush");
        };
        let now = self.now;
        let state = self.volume_mut(volume);
        state.flow.note_unflushed();
        state.flushing = false;
        state.direct_since = now;
        match &result {
            Ok(()) => state.direct_durable = direct,
            Err(error) => {
                // What was written or waited meanwhile shares its fate.
                destages.append(&mut state.written);
                flushes.append(&mut state.flush_waiters);
                writes.append(&mut state.fua_waiters);
                // What was done after it was sent is none of what those asked for who are told.
                let told = !flushes.is_empty() && state.direct == direct;
                state.give_up_direct(error, told);
            }
        }
        for destage in destages {
            self.destage_flushed(destage, &result, fx);
        }
        for op in flushes {
            self.flush_part_done(op, result.clone(), fx);
        }
        for op in writes {
            self.write_flushed(op, result.clone(), fx);
        }
    }

    /// Another shard's flush of a device failed: the device may have given up what this shard
    /// wrote, and its next flush would not say so.
    pub fn flush_failed(
        &mut self,
        now: Instant,
        target: Target,
        error: &IoError,
        fx: &mut Effects,
    ) {
        self.now = now;
        let Target::Primary(volume) = target else { return self.fail_cache(fx) };
        self.volume_mut(volume).flush_failures += 1;
        let flushing = self.volume(volume).flushing;
        let (destages, flushes, writes) = Default::default();
        let direct = self.volume(volume).direct;
        let ticket = Ticket::PrimaryFlush { volume, direct, destages, flushes, writes };
        self.primary_flushed(ticket, Err(error.clone()), fx);
        // If one of its own is on its way, it fails as well and says so itself.
        self.volume_mut(volume).flushing = flushing;
    }
}
