//! The counters of a pool at one moment.

use std::time::Duration;

use forebay_engine::Stats;

use super::Spread;
use crate::pool::{Latency, PoolSnapshot, VolumeSnapshot};

/// The counters and levels of a pool at one moment, or what has changed between two moments.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Time since the start; of a difference, its length.
    pub at: Duration,
    /// All shards together.
    pub pool: Stats,
    /// The volumes, in the registry's order.
    pub volumes: Vec<VolumeSample>,
}

/// The counters and levels of a volume.
#[derive(Clone, Debug, Default)]
pub struct VolumeSample {
    /// Its name.
    pub name: String,
    /// The statistics that are kept by volume.
    pub stats: Stats,
    /// Blocks that are newer than on the primary, and their limit.
    pub dirty_blocks: u64,
    /// Dirty blocks at which its writes wait.
    pub dirty_limit_blocks: u64,
    /// Latencies that clients saw, by operation.
    pub latencies: Vec<(&'static str, Spread)>,
    /// The same by operation and tier.
    pub tiers: Vec<(OfTier, Spread)>,
    /// Latencies of the primary's own requests, by operation.
    pub primary: Vec<(&'static str, Spread)>,
}

/// An operation, and the slowest tier that its requests waited for.
pub type OfTier = (&'static str, &'static str);

impl Sample {
    /// The counters of a snapshot.
    #[must_use]
    pub fn of(pool: &PoolSnapshot) -> Self {
        let volumes = pool.volumes.iter().map(|volume| VolumeSample::of(pool, volume));
        Self { at: pool.uptime, pool: pool.stats(), volumes: volumes.collect() }
    }

    /// What has changed since `before`; levels stay as they are.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let nothing = VolumeSample::default();
        let volumes = self
            .volumes
            .iter()
            .enumerate()
            .map(|(place, volume)| volume.since(before.volumes.get(place).unwrap_or(&nothing)));
        Self {
            at: self.at.saturating_sub(before.at),
            pool: self.pool.since(&before.pool),
            volumes: volumes.collect(),
        }
    }
}

impl VolumeSample {
    fn of(pool: &PoolSnapshot, volume: &VolumeSnapshot) -> Self {
        let is_own = |one: &&Latency| one.volume == volume.name && one.count > 0;
        let spreads = |all: &[Latency]| {
            all.iter().filter(is_own).map(|one| (one.operation, Spread::of(one))).collect()
        };
        let of_tiers = pool.tier_latencies.iter().filter(is_own);
        let tiers = of_tiers.filter_map(|one| Some(((one.operation, one.tier?), Spread::of(one))));
        Self {
            name: volume.name.clone(),
            stats: volume.state.stats.clone(),
            dirty_blocks: volume.state.dirty_blocks,
            dirty_limit_blocks: volume.state.dirty_limit_blocks,
            latencies: spreads(&pool.latencies),
            tiers: tiers.collect(),
            primary: spreads(&pool.primary_latencies),
        }
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            name: self.name.clone(),
            stats: self.stats.since(&before.stats),
            dirty_blocks: self.dirty_blocks,
            dirty_limit_blocks: self.dirty_limit_blocks,
            latencies: grown(&self.latencies, &before.latencies),
            tiers: grown(&self.tiers, &before.tiers),
            primary: grown(&self.primary, &before.primary),
        }
    }

    /// The latencies of an operation of clients.
    #[must_use]
    pub fn latency(&self, operation: &str) -> Option<&Spread> {
        self.latencies.iter().find(|(name, _)| *name == operation).map(|(_, spread)| spread)
    }
}

/// The requests since `before`, of kinds that had any.
fn grown<K: Copy + PartialEq>(now: &[(K, Spread)], before: &[(K, Spread)]) -> Vec<(K, Spread)> {
    let change = |(kind, spread): &(K, Spread)| {
        let earlier = before.iter().find(|(name, _)| name == kind);
        let change = earlier.map_or_else(|| spread.clone(), |(_, before)| spread.since(before));
        (*kind, change)
    };
    now.iter().map(change).filter(|(_, spread)| spread.count() > 0).collect()
}
