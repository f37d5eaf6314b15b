//! The number of destage writes that each volume may have in flight.
//!
//! All state is per volume, so that a primary that is slow or away delays only the writes of its
//! own volume.

use std::time::Duration;

use forebay_block::VolumeId;
use forebay_policy::{DestageCause, DestageState};

use crate::api::{DestageReason, Health, State};
use crate::cache::Cache;
use crate::destage::Destaging;
use crate::limits::DESTAGED_UNFLUSHED_MAX;

impl Destaging {
    pub(super) fn state(&self, cache: &Cache, volume: VolumeId, is_idle: bool) -> DestageState {
        let (level, limit) = cache.paced_level(volume);
        let target = cache.target_of(limit);
        let mut level = level.max(cache.contents.dirty().blocks_of(volume).min(1));
        let mut oldest = cache.contents.dirty().oldest_of(volume).unwrap_or(cache.now);
        let mut age_max = cache.config.write_cache_depth;
        if cache.is_ordered(volume) {
            // A cut takes time to be written, and until then the primary is as old as the one
            // before.
            age_max /= 2;
            // Ages are kept by stripe, and hot stripes would always seem old.
            oldest = oldest.max(cache.volume(volume).order.primary_since);
            if let Some(since) = self.writing_since(volume) {
                // A cut that was begun is ended, although fewer and younger blocks are left.
                (level, oldest) = (level.max(target + 1), since);
            }
        }
        let pressing = self.pressing(cache, volume);
        // After a failure of the cache device clients' requests go to the primary beside its drain.
        let goes_first = |why| !matches!(why, DestageReason::Drain | DestageReason::Fault);
        DestageState {
            now: cache.now,
            dirty_blocks: level,
            target_blocks: target,
            limit_blocks: limit,
            oldest_age: cache.now.since(oldest),
            age_max,
            quiet: match is_idle {
                true => cache.now.since(cache.standing.last_foreground),
                false => Duration::ZERO,
            },
            quiet_from: cache.config.idle_destage,
            draining: Self::closes(cache) || pressing.is_some_and(goes_first),
            drain_asked: pressing.is_some(),
            in_flight: cache.volume(volume).flow.destage_writes,
        }
    }

    /// Why all blocks of a volume must be destaged now, if they must.
    fn pressing(&self, cache: &Cache, volume: VolumeId) -> Option<DestageReason> {
        if cache.health() == Health::Draining {
            Some(DestageReason::Fault)
        } else if self.draining || cache.volume(volume).draining {
            Some(DestageReason::Drain)
        } else if cache.has_leftover(volume) {
            Some(DestageReason::Mode)
        } else if Self::needs_room(cache) {
            Some(DestageReason::Room)
        } else {
            None
        }
    }

    /// Why a volume's blocks are destaged now, if any are.
    pub(super) fn reason(
        &self,
        cache: &Cache,
        volume: VolumeId,
        state: &DestageState,
    ) -> DestageReason {
        self.pressing(cache, volume).unwrap_or_else(|| match state.cause() {
            DestageCause::Age => DestageReason::Age,
            DestageCause::Level => DestageReason::Level,
            DestageCause::Idle => DestageReason::Idle,
        })
    }

    /// Whether the volume's destages are bound to a rate: not those that something in the cache
    /// waits for.
    pub(super) fn is_bound(cache: &Cache, volume: VolumeId) -> bool {
        cache.health() == Health::Good && !cache.has_leftover(volume) && !Self::needs_room(cache)
    }

    fn needs_room(cache: &Cache) -> bool {
        cache.log.is_pressed() || cache.standing.overflows
    }

    /// The number of destage writes that a volume may have in flight. Volumes share the depth. Each
    /// may always use its part of half of the depth, and stuck volumes do not count.
    pub(super) fn allowance(
        &self,
        cache: &mut Cache,
        volume: VolumeId,
        state: &DestageState,
    ) -> u32 {
        // After the end of the log nothing waits for a destage: it would outlive the shard.
        let ends = !self.draining && self.writing_since(volume).is_none() || cache.log.has_ended();
        if *cache.state() == State::Stopping && ends && cache.health() == Health::Good {
            return 0;
        }
        if cache.volume(volume).written.len() >= DESTAGED_UNFLUSHED_MAX {
            return 0;
        }
        // A disk that chooses the nearest of its requests would serve the awaited ones last. Those
        // of an ordered volume leave with all others of their cut; one that was begun is ended in
        // any mode.
        let in_cuts = cache.is_ordered(volume) || self.writing_since(volume).is_some();
        if cache.volume(volume).flow.pacer.is_awaited() && !in_cuts {
            return 0;
        }
        let depth = cache.config.destage_depth;
        let count = cache.volumes.iter().flatten().count() as u32;
        let mut others = 0;
        for other in cache.volumes.iter().flatten() {
            let counts = other.config.id != volume && !other.is_stuck(cache.now);
            others += if counts { other.flow.destage_writes } else { 0 };
        }
        let guaranteed = if count == 1 { depth } else { (depth / 2 / count).max(1) };
        let mut share = depth.saturating_sub(others).max(guaranteed);
        if cache.volume(volume).is_leaving {
            share = share.min(depth_beside(depth));
        }
        cache.volume_mut(volume).flow.pacer.allowance(state).min(share)
    }
}

/// The number of destages out of `depth` that leaves room for the blocks that writes wait for.
pub fn depth_beside(depth: u32) -> u32 {
    (depth / 8).max(1)
}
