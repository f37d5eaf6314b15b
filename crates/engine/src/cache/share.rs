//! Shares of the cache: the blocks of a volume that others must leave to it, and the blocks above
//! its limit, which leave a few at a time.
//!
//! Dirty blocks count, but never leave. So a volume may exceed its limit for as long as it has more
//! dirty blocks than that, and guarantees yield where nothing else could leave.

use std::ops::Range;
use std::time::Duration;

use forebay_block::{Instant, VolumeId};
use forebay_policy::{CacheShare, CacheShares, LastTouch};

use super::evict::{SCANNED, Sample};
use super::limit::{by_id, room};
use crate::api::{Effects, ShardConfig};
use crate::cache::Cache;
use crate::key::Key;
use crate::limits::{EVICTIONS_MAX, OWN_SCANNED_MAX};

/// Interval between evictions of a volume above its limit, while nothing else happens.
const EXCESS_TICK: Duration = Duration::from_millis(1);
/// Pause after no block was found that could leave.
const EXCESS_PAUSE: Duration = Duration::from_millis(10);

/// How the volumes of a shard share its room.
pub struct Shares {
    shares: CacheShares,
    /// Blocks of each volume whose eviction waits in the record being built.
    leaving: Vec<u64>,
    /// When volumes above their limit are looked at next.
    excess_at: Instant,
}

impl Shares {
    /// The shares of a shard with these settings.
    pub fn new(config: &ShardConfig, now: Instant) -> Self {
        let volumes = by_id(config, |volume| volume.cache_share);
        let leaving = vec![0; volumes.len()];
        Self { shares: CacheShares::new(room(config), &volumes), leaving, excess_at: now }
    }

    /// Notes that the eviction of a block is in the record being built.
    pub fn note_leaving(&mut self, volume: VolumeId) {
        self.leaving[usize::from(volume.0)] += 1;
    }

    /// Notes that the record being built is empty.
    pub fn note_closed(&mut self) {
        self.leaving.fill(0);
    }
}

impl Cache {
    /// Changes a volume's share of the cache.
    pub(crate) fn set_cache_share(&mut self, volume: VolumeId, share: CacheShare) {
        let mut volumes = self.config.volumes.iter_mut();
        if let Some(config) = volumes.find(|config| config.id == volume) {
            config.cache_share = share;
            self.shares.shares = Shares::new(&self.config, self.now).shares;
            self.shares.excess_at = self.now;
        }
    }

    /// Number of blocks down to which other volumes displace none of this one.
    pub(crate) fn guarantee_of(&self, volume: VolumeId) -> u64 {
        self.shares.shares.guarantee(usize::from(volume.0))
    }

    /// Number of blocks at which new blocks of a volume displace its own; `None` if there is no
    /// limit.
    pub(crate) fn cache_limit_of(&self, volume: VolumeId) -> Option<u64> {
        self.shares.shares.limit(usize::from(volume.0))
    }

    /// Whether any volume has a guarantee.
    pub(crate) fn has_guarantee(&self) -> bool {
        self.shares.shares.has_guarantee()
    }

    /// The blocks that a volume holds, without those that are about to leave.
    pub(crate) fn held_by(&self, volume: VolumeId) -> u64 {
        self.contents.held_by(volume).saturating_sub(self.shares.leaving[usize::from(volume.0)])
    }

    /// The number of blocks, out of `leaving` blocks of a volume, that must stay for its guarantee.
    pub(crate) fn must_stay(&self, volume: VolumeId, leaving: u64) -> u64 {
        match self.has_guarantee() {
            true => {
                self.shares.shares.must_stay(usize::from(volume.0), self.held_by(volume), leaving)
            }
            false => 0,
        }
    }

    /// Whether the guarantee of a volume protects any of `leaving` blocks.
    pub(crate) fn guards(&self, volume: VolumeId, leaving: u64) -> bool {
        self.must_stay(volume, leaving) > 0
    }

    /// The number of blocks by which a volume exceeds its limit.
    fn excess_of(&self, volume: VolumeId) -> u64 {
        self.shares.shares.excess(usize::from(volume.0), self.held_by(volume))
    }

    /// Whether new blocks of a volume have room that is theirs: below its guarantee.
    pub(crate) fn is_below_guarantee(&self, volume: VolumeId) -> bool {
        self.has_guarantee() && self.held_by(volume) < self.guarantee_of(volume)
    }

    /// Whether new blocks of a volume must displace its own.
    pub(crate) fn is_at_limit(&self, volume: VolumeId) -> bool {
        self.cache_limit_of(volume).is_some_and(|limit| self.held_by(volume) >= limit)
    }

    /// Whether new blocks are worth more than a block of the same volume.
    pub(crate) fn displace_own(&mut self, keys: Range<u64>, last: LastTouch) -> bool {
        let sample = self.sample_of(Key(keys.start).volume());
        self.displace(sample, keys, last) == Some(true)
    }

    /// Clean blocks of a volume chosen at random.
    fn sample_of(&mut self, own: VolumeId) -> Sample {
        let (all, held) = (self.contents.index().len(), self.held_by(own).max(1));
        let scanned = (SCANNED as u64 * all / held).clamp(SCANNED as u64, OWN_SCANNED_MAX);
        self.sample(scanned as usize, |_, volume, _| volume == own)
    }

    /// When volumes above their limit must be looked at, if there are any.
    pub(crate) fn next_excess(&self) -> Option<Instant> {
        let exceeds = |volume| self.excess_of(volume) > 0;
        let any = self.shares.shares.has_limit() && self.volume_ids().any(exceeds);
        any.then(|| self.shares.excess_at.max(self.now + EXCESS_TICK))
    }

    /// Evicts a few blocks of each volume that exceeds its limit.
    pub(crate) fn pump_excess(&mut self, fx: &mut Effects) {
        if !self.shares.shares.has_limit()
            || self.shares.excess_at > self.now
            || !self.makes_room()
            || self.contents.is_loading()
            || !self.has_client_space()
        {
            return;
        }
        for volume in self.volume_ids() {
            for _ in 0..EVICTIONS_MAX {
                if self.excess_of(volume) == 0 {
                    break;
                }
                let sample = self.sample_of(volume);
                let Some(unit) = self.least_wanted(sample, false) else {
                    self.shares.excess_at = self.now + EXCESS_PAUSE;
                    break;
                };
                if !self.push_eviction(unit, fx) {
                    return;
                }
            }
        }
    }
}
