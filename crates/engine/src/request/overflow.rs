//! A log without room for clients, since a primary takes nothing: what is dirty of that volume can
//! neither leave the log nor be copied together any more. After a crash that may be all of the log,
//! because blocks count as dirty again that had been destaged.
//!
//! Writes to that volume fail then. The other volumes do not wait for its primary. Their writes go
//! to their own primaries until there is room again: a block that is dirty is destaged first, and a
//! block that is cached leaves the cache. Entries that say so may use what is kept for reclaim;
//! they take a page, and nothing of it stays.

use std::collections::VecDeque;

use forebay_block::ErrorKind;

use crate::Engine;
use crate::api::event::Event;
use crate::api::{Bypass, Effects, Health};
use crate::limits::RECLAIM_RESERVE;
use crate::request::op::{Op, Path};
use crate::slab::Id;

impl Engine {
    /// Sees whether the log has had no room for longer than the patience, and lets writes pass by.
    pub(crate) fn pump_overflow(&mut self, fx: &mut Effects) {
        if (self.cache.log.queued() == 0) && self.requests.no_room_since.is_none() {
            return;
        }
        if self.cache.has_client_space() || self.cache.health() != Health::Good {
            self.requests.no_room_since = None;
            self.set_overflow(false);
            return;
        }
        if self.cache.log.queued() == 0 {
            return;
        }
        let since = *self.requests.no_room_since.get_or_insert(self.cache.now);
        let waited = self.cache.now.since(since) >= self.cache.config.patience;
        self.set_overflow(waited && self.cache.is_any_stuck());
        if !self.cache.standing.overflows {
            return;
        }
        let mut kept = VecDeque::new();
        for id in std::mem::take(self.cache.log.queue()) {
            match self.way_of(id) {
                Way::Past => {
                    self.cache.stats.bypassed_by[Bypass::Degraded as usize] += 1;
                    self.go_past(id, fx);
                }
                Way::Wait => kept.push_back(id),
                Way::None => {
                    self.cache.stats.given_up_writes += 1;
                    self.end_write(id, Err(ErrorKind::DeviceGone.into()), fx);
                }
            }
        }
        // Invalidations first: others may have to wait for long.
        let mut queue = std::mem::take(self.cache.log.queue());
        queue.append(&mut kept);
        queue.make_contiguous().sort_by_key(|&id| !self.is_begun(id));
        *self.cache.log.queue() = queue;
    }

    fn set_overflow(&mut self, active: bool) {
        if self.cache.standing.overflows != active {
            self.cache.standing.overflows = active;
            self.cache.tell(Event::Overflow { active });
        }
    }

    /// Whether an operation may use what is kept for reclaim: an invalidation, or the rest of a
    /// write of which a part is in the log.
    pub(crate) fn fits_reserve(&self, id: Id) -> bool {
        self.cache.standing.overflows
            && self.is_begun(id)
            && self.cache.log.free() > RECLAIM_RESERVE
    }

    fn is_begun(&self, id: Id) -> bool {
        match self.requests.get(id) {
            Op::Write(write) => write.path == Path::Direct || write.logged > 0,
            Op::Read(_) | Op::Flush(_) => unreachable!("only writes wait for the log"),
        }
    }

    fn way_of(&self, id: Id) -> Way {
        let Op::Write(write) = self.requests.get(id) else {
            unreachable!("only writes wait for the log");
        };
        let is_dirty = |key| {
            self.cache.contents.dirty().contains(key)
                || self.cache.contents.dirty().is_destaging(key)
        };
        match self.is_begun(id) {
            false if self.cache.is_stuck(write.volume) => Way::None,
            false if !write.keys().any(is_dirty) => Way::Past,
            _ => Way::Wait,
        }
    }
}

/// What becomes of a write that waits for a log without room.
enum Way {
    /// It goes to the primary.
    Past,
    /// It waits until what is dirty of it has been destaged, or for the record that it is in.
    Wait,
    /// There is none: its primary takes nothing.
    None,
}
