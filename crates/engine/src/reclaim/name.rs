//! Naming again: blocks of the store that the oldest segment names get another entry, since that
//! one is about to go.
//!
//! Entries have no pages of their own while there is time. A record takes whole pages, of which a
//! client's write rarely fills the last one, so the entries go there.

use std::time::Duration;

use crate::api::Effects;
use crate::cache::Cache;
use crate::limits::{RECLAIM_RESERVE, WARM_BLOCKS};
use crate::reclaim::Reclaim;

/// Longest time that entries wait for room in records of clients.
pub(super) const NAME_PATIENCE: Duration = Duration::from_millis(100);

impl Reclaim {
    /// Names the blocks that the segment names, unless they may wait.
    pub(super) fn name_again(&mut self, cache: &mut Cache, fx: &mut Effects) {
        if !self.may_wait(cache) {
            self.name_while(cache, fx, |_| true);
        }
    }

    /// Puts entries into the room that the record being built has left.
    pub fn fill_record(&mut self, cache: &mut Cache, fx: &mut Effects) {
        if cache.log.builder().has_news() {
            self.name_while(cache, fx, |cache| cache.log.builder().has_room_in_page());
        }
    }

    /// Whether there are enough free segments until the next records of clients.
    fn may_wait(&self, cache: &Cache) -> bool {
        let free = cache.log.free() + cache.log.freeing();
        let enough = RECLAIM_RESERVE + Self::ahead(cache) / 2;
        let is_urgent = cache.log.is_emergency() || cache.index_is_tight();
        free > enough && !is_urgent && cache.now < self.name_at
    }

    /// Names blocks in their order, as long as there is room and `goes_on`.
    fn name_while(
        &mut self,
        cache: &mut Cache,
        fx: &mut Effects,
        mut goes_on: impl FnMut(&mut Cache) -> bool,
    ) {
        let mut warm = 0;
        while let Some(job) = self.job_mut()
            && let Some(&item) = job.to_name.front()
            && goes_on(cache)
        {
            if warm == 0 {
                warm = WARM_BLOCKS;
                let (pages, _) = cache.contents.pages_and_index();
                job.to_name.iter().take(WARM_BLOCKS).for_each(|item| pages.warm(&item.place));
            }
            warm -= 1;
            // Whether it is still there is found out when the record is closed.
            let is_named = !cache.contents.is_unnamed(item.key);
            if is_named && !cache.push_mapping(fx, item.key, item.place) {
                return;
            }
            let job = self.going();
            job.to_name.pop_front();
            let seq = job.seq;
            if is_named {
                self.named.note(seq, item.key);
            }
        }
    }
}
