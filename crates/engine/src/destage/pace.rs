//! How many destage writes each volume may have under way.
//!
//! All of this is kept by volume, so that a primary that is slow or away holds up the writes of
//! its own volume and nothing else.

use std::time::Duration;

use forebay_block::VolumeId;
use forebay_policy::DestageState;

use crate::Engine;
use crate::api::{Health, State};
use crate::limits::DESTAGED_UNFLUSHED_MAX;

impl Engine {
    /// Destages everything as fast as the primaries take it, or goes back to the usual pace, but
    /// for volumes that [`Engine::drain_volume`] drains.
    pub fn set_drain(&mut self, on: bool) {
        self.destaging.draining = on;
    }

    /// The same of one volume.
    pub fn drain_volume(&mut self, volume: VolumeId, on: bool) {
        if self.cache.known_volume(volume).is_some() {
            self.cache.volume_mut(volume).draining = on;
        }
    }

    pub(crate) fn destage_state(&self, volume: VolumeId) -> DestageState {
        let (level, limit) = self.cache.paced_level(volume);
        let oldest = self.cache.contents.dirty().oldest_of(volume).unwrap_or(self.cache.now);
        DestageState {
            now: self.cache.now,
            dirty_blocks: level.max(self.cache.contents.dirty().blocks_of(volume).min(1)),
            target_blocks: limit / 2,
            limit_blocks: limit,
            oldest_age: self.cache.now.since(oldest),
            age_max: self.cache.config.write_cache_depth,
            quiet: match self.requests.len() {
                0 => self.cache.now.since(self.cache.standing.last_foreground),
                _ => Duration::ZERO,
            },
            draining: self.destaging.draining
                || self.cache.volume(volume).draining
                || self.cache.log.is_pressed()
                || self.cache.standing.overflows
                || self.cache.health() == Health::Draining
                || self.cache.has_leftover(volume),
            in_flight: self.cache.volume(volume).flow.destage_writes,
        }
    }

    /// Destage writes that a volume may have under way. Volumes share the depth; each may always
    /// use its part of half of it, and those that are stuck do not count.
    pub(crate) fn destage_allowance(&mut self, volume: VolumeId, state: &DestageState) -> u32 {
        let stopping = *self.cache.state() == State::Stopping;
        if stopping && !self.destaging.draining && self.cache.health() == Health::Good {
            return 0;
        }
        if self.cache.volume(volume).written.len() >= DESTAGED_UNFLUSHED_MAX {
            return 0;
        }
        let depth = self.cache.config.destage_depth;
        let count = self.cache.volumes.iter().flatten().count() as u32;
        let mut others = 0;
        for other in self.cache.volumes.iter().flatten() {
            let counts = other.config.id != volume && !other.is_stuck(self.cache.now);
            others += if counts { other.flow.destage_writes } else { 0 };
        }
        let guaranteed = if count == 1 { depth } else { (depth / 2 / count).max(1) };
        let mut share = depth.saturating_sub(others).max(guaranteed);
        if self.cache.volume(volume).is_leaving {
            // What writes wait for goes first.
            share = share.min((depth / 8).max(1));
        }
        self.cache.volume_mut(volume).flow.pacer.allowance(state).min(share)
    }
}
