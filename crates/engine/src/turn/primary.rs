//! Flushes of primaries: one flush serves destages, client flushes and writes with FUA.

use std::time::Duration;

use forebay_block::{Io, IoResult};

use crate::Engine;
use crate::api::{Effects, State, Target};
use crate::ticket::{PrimaryFlush, Ticket};

/// How long direct changes of a primary may stay unflushed when no client requests a flush. Until
/// they are flushed, blocks read from that primary are not admitted.
const FLUSH_DIRECT_AFTER: Duration = Duration::from_secs(1);

impl Engine {
    /// Sends a flush to every primary that has something to flush and either a waiter or a reason
    /// to flush now.
    pub(crate) fn pump_primary_flushes(&mut self, fx: &mut Effects) {
        let stopping = *self.cache.state() == State::Stopping;
        for i in 0..self.cache.volumes.len() {
            let Some(volume) = self.cache.volumes[i].as_mut() else { continue };
            let waited = !volume.flush_waiters.is_empty() || !volume.fua_waiters.is_empty();
            // Until the first flush, nothing that is read from the primary may be admitted.
            let first = volume.direct_durable == 0;
            let since = self.cache.now.since(volume.direct_since);
            let quiet = first || stopping || since >= FLUSH_DIRECT_AFTER;
            let settles = volume.unsettled && since >= FLUSH_DIRECT_AFTER;
            let settles = settles && volume.primary.away_since.is_none();
            let direct = quiet && volume.has_unflushed() || settles;
            let due = waited || direct || self.destaging.flush_is_due(&self.cache, i);
            let volume = self.cache.volumes[i].as_mut().expect("it was there just now");
            if volume.flushing || !due {
                continue;
            }
            volume.flushing = true;
            let flush = PrimaryFlush {
                volume: volume.config.id,
                direct: volume.direct,
                destages: std::mem::take(&mut volume.written),
                flushes: std::mem::take(&mut volume.flush_waiters),
                writes: std::mem::take(&mut volume.fua_waiters),
            };
            let target = Target::Primary(flush.volume);
            self.cache.send(fx, target, Ticket::PrimaryFlush(Box::new(flush)), Io::flush);
        }
    }

    /// Handles the end of a primary's flush. After a failure, nothing that it covered counts as
    /// durable: dirty blocks stay dirty and are written again; lost direct writes are reported to
    /// flushes.
    pub(crate) fn primary_flushed(
        &mut self,
        flush: PrimaryFlush,
        result: &IoResult<()>,
        fx: &mut Effects,
    ) {
        let PrimaryFlush { volume, direct, mut destages, mut flushes, mut writes } = flush;
        let now = self.cache.now;
        let state = self.cache.volume_mut(volume);
        state.flow.note_unflushed();
        state.flushing = false;
        state.direct_since = now;
        match result {
            Ok(()) => (state.direct_durable, state.unsettled) = (direct, false),
            Err(error) => {
                state.failed_flushes += 1;
                // Data written and operations queued while the flush was in flight share its fate.
                destages.append(&mut state.written);
                flushes.append(&mut state.flush_waiters);
                writes.append(&mut state.fua_waiters);
                // The flushes answered here do not cover direct changes made after this flush was
                // sent.
                let told = !flushes.is_empty() && state.direct == direct;
                state.give_up_direct(error, told);
            }
        }
        for destage in destages {
            self.destaging.flushed(&mut self.cache, destage, result);
        }
        for op in flushes {
            self.requests.flush_part_done(&mut self.cache, op, result.clone(), fx);
        }
        for op in writes {
            self.requests.write_flushed(&mut self.cache, op, result.clone(), fx);
        }
    }
}

#[cfg(test)]
mod tests;
