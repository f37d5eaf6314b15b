//! Consequences of a failing cache device. The table matches `docs/internals/fault-model.md`:
//!
//! | fault | outcome |
//! |---|---|
//! | write of a record or footer fails, up to twice | the same bytes are written again in the same place |
//! | the third time, or a flush fails | `Draining`: nothing more is written to the device; dirty blocks are destaged; writes go to the primary, each once its stripe is detached ([`crate::life::detach`]) |
//! | no dirty block is left | `Detached`, once that is recorded outside the cache: the primary is used directly |
//! | a dirty block cannot be read back | fenced: errors until overwritten |
//! | a clean block cannot be read back | dropped, read from the primary |
//! | a read of a dirty block fails | a record is written as a probe; if that fails, the rows above apply |
//! | the oldest segment cannot be read at reclaim | retried for some seconds, then treated as a failed write |
//! | a dirty block of that segment is corrupt | written from RAM if there, else the log records that it is lost |

use std::collections::BTreeSet;

use forebay_format::EntryKind;

use crate::Engine;
use crate::api::{Effects, Health, Trust};

impl Engine {
    /// Stops using the cache device for writes: it has failed.
    pub(crate) fn fail_cache(&mut self, fx: &mut Effects) {
        if self.cache.health() != Health::Good {
            return;
        }
        self.cache.set_health(Health::Draining);
        // What could not go so far is tried once more before it counts as lost.
        self.cache.contents.forget_all_immovable();
        self.reclaim.give_up(&mut self.cache.log);
        self.cache.store.give_up();
        self.detach.note_undurable(&mut self.cache);
        // The blocks of writes whose records were sent are dirty in the index, and readable from
        // RAM or from the failed records. The records themselves stay in flight until the device
        // answers.
        self.forget_unlogged();
        let mut waiters = self.cache.log.take_writes();
        let mut seen = BTreeSet::new();
        waiters.retain(|&op| seen.insert(op));
        for op in waiters {
            self.requests.wait_detached(&mut self.cache, op, fx);
        }
        self.leave_durable_waiters(fx);
        while let Some(op) = self.cache.pop_held() {
            self.requests.lock_blocks(&mut self.cache, op, fx);
        }
        self.life.want_trust(Trust::DirtyOnly);
    }

    /// Removes the bytes of writes that never reached the log from RAM.
    fn forget_unlogged(&mut self) {
        for item in &self.cache.log.builder().pending {
            if item.expect.is_certain() && item.kind != EntryKind::Checkpoint {
                self.cache.ram.remove(item.key);
            }
        }
    }
}
