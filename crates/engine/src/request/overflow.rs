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

use crate::api::event::Event;
use crate::api::{Bypass, Effects, Health};
use crate::cache::Cache;
use crate::limits::RECLAIM_RESERVE;
use crate::request::Requests;
use crate::request::op::{Op, Path};
use crate::slab::Id;

impl Requests {
    /// Sees whether the log has had no room for longer than the patience, and lets writes pass by.
    pub fn pump_overflow(&mut self, cache: &mut Cache, fx: &mut Effects) {
        if (cache.log.queued() == 0) && self.no_room_since.is_none() {
            return;
        }
        if cache.has_client_space() || cache.health() != Health::Good {
            self.no_room_since = None;
            Self::set_overflow(cache, false);
            return;
        }
        if cache.log.queued() == 0 {
            return;
        }
        let since = *self.no_room_since.get_or_insert(cache.now);
        let waited = cache.now.since(since) >= cache.config.patience;
        Self::set_overflow(cache, waited && cache.is_any_stuck());
        if !cache.standing.overflows {
            return;
        }
        let mut kept = VecDeque::new();
        for id in std::mem::take(cache.log.queue()) {
            match self.way_of(cache, id) {
                Way::Past => {
                    cache.stats.bypassed_by[Bypass::Degraded as usize] += 1;
                    self.go_past(cache, id, fx);
                }
                Way::Wait => kept.push_back(id),
                Way::None => {
                    cache.stats.given_up_writes += 1;
                    self.end_write(cache, id, Err(ErrorKind::DeviceGone.into()), fx);
                }
            }
        }
        // Invalidations first: others may have to wait for long.
        let mut queue = std::mem::take(cache.log.queue());
        queue.append(&mut kept);
        queue.make_contiguous().sort_by_key(|&id| !self.is_begun(id));
        *cache.log.queue() = queue;
    }

    fn set_overflow(cache: &mut Cache, active: bool) {
        if cache.standing.overflows != active {
            cache.standing.overflows = active;
            cache.tell(Event::Overflow { active });
        }
    }

    /// Whether an operation may use what is kept for reclaim: an invalidation, or the rest of a
    /// write of which a part is in the log.
    pub fn fits_reserve(&self, cache: &Cache, id: Id) -> bool {
        cache.standing.overflows && self.is_begun(id) && cache.log.free() > RECLAIM_RESERVE
    }

    fn is_begun(&self, id: Id) -> bool {
        match self.get(id) {
            Op::Write(write) => write.path == Path::Direct || write.logged > 0,
            Op::Read(_) | Op::Flush(_) => unreachable!("only writes wait for the log"),
        }
    }

    fn way_of(&self, cache: &Cache, id: Id) -> Way {
        let Op::Write(write) = self.get(id) else {
            unreachable!("only writes wait for the log");
        };
        let is_dirty = |key| cache.contents.dirty().is_unsettled(key);
        match self.is_begun(id) {
            false if cache.is_stuck(write.volume) => Way::None,
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
