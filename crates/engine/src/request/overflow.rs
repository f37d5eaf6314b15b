//! Overflow: the log has no room for clients because a primary takes no blocks. The dirty blocks of
//! that volume can neither leave the log nor be compacted by copying. After a crash they may fill
//! the whole log, because blocks that had been destaged count as dirty again.
//!
//! Writes to that volume fail in the end. The other volumes do not wait for its primary: until
//! there is room again, their writes go to their own primaries. A dirty block is destaged first,
//! and a cached block leaves the cache. The entries that record this may use the reserve of
//! reclaim: they take a page, and nothing of it has to be kept.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::ErrorKind;

use crate::api::event::Event;
use crate::api::{Bypass, Effects, Health};
use crate::cache::Cache;
use crate::limits::RECLAIM_RESERVE;
use crate::request::Requests;
use crate::request::op::{Op, Path};
use crate::slab::Id;

/// How long the writes of a volume wait for room that the primary of another one does not make.
const OTHERS_WAIT: Duration = Duration::from_secs(1);

impl Requests {
    /// Checks for how long the log has had no room. After a while writes bypass it; when patience
    /// is at its end, those that cannot do so fail.
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
        let waited = cache.now.since(since);
        let patience = cache.config.patience;
        Self::set_overflow(cache, waited >= OTHERS_WAIT.min(patience) && cache.is_any_stuck());
        if !cache.standing.overflows {
            return;
        }
        let mut kept = VecDeque::new();
        for id in std::mem::take(cache.log.queue()) {
            match self.way_of(cache, id) {
                Way::Past => {
                    let volume = self.write(id).volume;
                    cache.stats_of(volume).bypassed_by[Bypass::Degraded as usize] += 1;
                    self.go_past(cache, id, fx);
                }
                Way::None if waited >= patience => {
                    let volume = self.write(id).volume;
                    cache.stats_of(volume).given_up_writes += 1;
                    self.end_write(cache, id, Err(ErrorKind::DeviceGone.into()), fx);
                }
                Way::Wait | Way::None => kept.push_back(id),
            }
        }
        // Invalidations go first: other entries may have to wait for long.
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

    /// Whether an operation may put entries into the log.
    pub fn has_room(&self, cache: &Cache, id: Id) -> bool {
        cache.has_client_space() || self.fits_reserve(cache, id)
    }

    /// Whether an operation may use the reserve of reclaim: an invalidation, or the rest of a write
    /// that is partly in the log.
    fn fits_reserve(&self, cache: &Cache, id: Id) -> bool {
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
        let in_part = write.path != Path::Direct && write.outstanding == 0;
        let is_dirty = |key| cache.contents.dirty().is_unsettled(key);
        match self.is_begun(id) {
            // Past the log, a write would be out of order.
            false if cache.is_stuck(write.volume) || cache.is_ordered(write.volume) => Way::None,
            false if !write.keys().any(is_dirty) => Way::Past,
            // A write that fails may have been done in part.
            true if in_part && cache.is_stuck(write.volume) => Way::None,
            _ => Way::Wait,
        }
    }
}

/// The way out for a write that waits while the log has no room.
enum Way {
    /// It goes to the primary.
    Past,
    /// It waits until its dirty blocks have been destaged, or for the record that holds a part of
    /// it.
    Wait,
    /// There is none: its primary takes no blocks. A part of it may be in the log already.
    None,
}
