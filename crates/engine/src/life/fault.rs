//! What a failing cache device leads to. One table with `docs/internals/fault-model.md`:
//!
//! | fault | outcome |
//! |---|---|
//! | write of record or footer, up to twice | the same bytes are written again in their place |
//! | the third time, or a flush fails | `Draining`: nothing more is written to the device; dirty blocks are destaged; writes go to the primary, each once its stripe is detached ([`crate::life::detach`]) |
//! | no dirty block is left | `Detached`, once that is recorded outside of the cache: the primary is used directly |
//! | a dirty block cannot be read back | fenced: errors until overwritten |
//! | a clean block cannot be read back | dropped, read from the primary |
//! | a read of a dirty block fails | a record is written to see whether that still works; if not, as above |
//! | the oldest segment cannot be read at reclaim | tried again for some seconds, then as a failed write |
//! | a dirty block of it has bad bytes | written from RAM if there, else the log says that it is lost |

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_block::Io;
use forebay_format::EntryKind;

use crate::Engine;
use crate::api::{Effects, Health, Target, Trust};
use crate::key::Key;
use crate::log::builder::Expect;
use crate::ticket::Ticket;

/// Shortest time between two records that only show whether the device can be written.
const PROBE_PAUSE: Duration = Duration::from_secs(1);

impl Engine {
    /// The cache device cannot be written any more.
    pub(crate) fn fail_cache(&mut self, fx: &mut Effects) {
        if self.life.health != Health::Good {
            return;
        }
        self.set_health(Health::Draining);
        self.reclaim.give_up();
        self.note_undurable();
        // Writes whose records were sent: their blocks are dirty in the index, readable from RAM
        // or from the failed records. The records themselves stay in flight until the device
        // answers.
        self.forget_unlogged();
        let mut waiters = self.log.take_writes();
        let mut seen = BTreeSet::new();
        waiters.retain(|&op| seen.insert(op));
        for op in waiters {
            self.wait_detached(op, fx);
        }
        self.leave_durable_waiters(fx);
        while let Some(op) = self.pop_delayed() {
            self.lock_blocks(op, fx);
        }
        self.want_trust(Trust::DirtyOnly);
    }

    /// A read of the cache device failed: an empty record tells whether it can still be written.
    /// Else a device that vanished when nothing was to be written, since everything waits for
    /// dirty blocks that only it has, would never count as failed.
    pub(crate) fn probe_cache(&mut self, fx: &mut Effects) {
        if self.life.health != Health::Good || self.now < self.life.probe_at {
            return;
        }
        self.life.probe_at = self.now + PROBE_PAUSE;
        if self.log.builder().is_empty() {
            self.push_bare(fx, Key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
        }
        if !self.close_record(fx) && self.log.is_idle() && self.log.begin_flush() {
            // There is no room for it.
            self.stats.cache_flushes += 1;
            self.send(fx, Target::Cache, Ticket::CacheFlush, Io::flush);
        }
    }

    /// RAM has the bytes of writes that never reached the log.
    fn forget_unlogged(&mut self) {
        for item in &self.log.builder().pending {
            if item.expect.is_certain() && item.kind != EntryKind::Checkpoint {
                self.ram.remove(item.key);
            }
        }
    }

    pub(crate) fn want_trust(&mut self, trust: Trust) {
        self.life.trust_wanted = self.life.trust_wanted.max(trust);
    }

    /// Asks for what has to be recorded, and detaches when nothing is left to save.
    pub(crate) fn pump_health(&mut self, fx: &mut Effects) {
        if self.life.health == Health::Draining
            && self.contents.dirty().blocks() == 0
            && self.destaging.len() == 0
        {
            self.want_trust(Trust::Nothing);
        }
        if self.life.trust_wanted > self.life.trust {
            fx.record_trust = Some(self.life.trust_wanted);
        }
    }

    /// What [`Effects::record_trust`] asked for is durable, for the whole pool: another shard may
    /// have asked for it.
    pub fn trust_recorded(&mut self, now: forebay_block::Instant, trust: Trust, fx: &mut Effects) {
        self.now = now;
        self.life.trust = self.life.trust.max(trust);
        if self.life.trust > Trust::Full && self.life.health == Health::Good {
            self.fail_cache(fx);
        }
        if self.life.trust == Trust::Nothing && self.contents.dirty().blocks() == 0 {
            self.set_health(Health::Detached);
            self.contents.give_up();
        }
        self.poll(now, fx);
    }
}
