//! FLUSH: every write that completed before it is durable afterwards. The log needs one flush of
//! the cache device. The primary is flushed only if it holds completed writes that the log does
//! not.

use forebay_block::{ErrorKind, IoError, VolumeId};

use crate::api::{Effects, Health, Request};
use crate::cache::Cache;
use crate::note::Note;
use crate::request::op::{FlushOp, Op};
use crate::request::{Requests, reply};
use crate::slab::Id;

impl Requests {
    /// Takes a client's flush.
    pub fn submit_flush(&mut self, cache: &mut Cache, request: Request, fx: &mut Effects) {
        let Request { id, volume, .. } = request;
        cache.stats_of(volume).flushes += 1;
        let known = cache.volume(volume).losses.known();
        let flush = FlushOp { id, volume, outstanding: 1, answered: false, known };
        let op = self.ops.insert(Op::Flush(flush));
        if Self::needs_primary_flush(cache, volume) {
            self.flush(op).outstanding += 1;
            cache.volume_mut(volume).flush_waiters.push(op);
        }
        if cache.has_leftover(volume) {
            self.flush(op).outstanding += 1;
            cache.volume_mut(volume).leftover_waiters.push(op);
        }
        let order = &mut cache.volume_mut(volume).order;
        if order.withholds.is_some() {
            order.withheld.push(op);
            self.flush(op).outstanding += 1;
        }
        if cache.health() != Health::Good {
            return self.flush_without_log(cache, op);
        }
        let covered = cache.log.completed();
        if cache.log.wait_durable(op, covered) {
            self.flush_part_done(cache, op, Ok(()), fx);
        }
    }

    /// Replaces the log's part of a flush once nothing becomes durable in the log any more.
    pub fn flush_without_log(&mut self, cache: &mut Cache, op: Id) {
        let volume = self.flush(op).volume;
        cache.out.note(Note::FlushDetached(volume, op));
    }

    /// Completes flushes whose leftover dirty blocks are all on the primary.
    pub fn pump_leftover(&mut self, cache: &mut Cache, fx: &mut Effects) {
        for id in cache.volume_ids() {
            if cache.known_volume(id).is_some() && cache.settle_leftover(id) {
                for op in std::mem::take(&mut cache.volume_mut(id).leftover_waiters) {
                    self.flush_part_done(cache, op, Ok(()), fx);
                }
            }
        }
    }

    /// Fails the flushes that wait for leftover dirty blocks.
    pub fn give_up_leftover(&mut self, cache: &mut Cache, fx: &mut Effects) {
        for i in 0..cache.volumes.len() {
            let Some(volume) = cache.volumes[i].as_mut() else { continue };
            for op in std::mem::take(&mut volume.leftover_waiters) {
                self.flush_part_done(cache, op, Err(ErrorKind::ShuttingDown.into()), fx);
            }
        }
    }

    fn flush(&mut self, id: Id) -> &mut FlushOp {
        match self.ops.get_mut(id) {
            Op::Flush(flush) => flush,
            _ => unreachable!("a flush's id names a flush"),
        }
    }

    fn needs_primary_flush(cache: &Cache, volume: VolumeId) -> bool {
        let volume = cache.volume(volume);
        let through =
            volume.config.mode.is_complete() && (!volume.written.is_empty() || volume.flushing);
        volume.has_unflushed() || through
    }

    /// Notes that the log or the primary has completed its part of a flush. A failure is answered
    /// immediately: the client must know of it before another client is told that a flush which
    /// began later succeeded.
    pub fn flush_part_done(
        &mut self,
        cache: &mut Cache,
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
            let lost = cache.volume_mut(volume).losses.tell(known);
            let result = result.and(lost.map_or(Ok(()), Err));
            reply(fx, id, result, forebay_block::IoBuf::empty(), None);
        }
        if is_last {
            self.ops.remove(id);
            self.answered -= usize::from(!is_new);
        } else if is_new && is_err {
            self.answered += 1;
        }
    }
}

#[cfg(test)]
mod tests;
