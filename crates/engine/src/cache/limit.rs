//! How much may be dirty, by volume, and what is kept free in the log for blocks that do not get
//! clean.

use forebay_block::{BLOCK_SIZE, Instant, VolumeId};
use forebay_policy::DirtyShares;

use crate::api::ShardConfig;
use crate::cache::Cache;
use crate::limits::SEGMENTS_MIN;
use crate::slab::Id;

/// One part in this many of the segments that hold blocks of a stuck volume is kept free on top of
/// the usual reserve: copies of a full segment may take more than a segment.
const STUCK_RESERVE: u64 = 8;

/// Dirty blocks that there may be, and how the volumes share them.
pub struct DirtyLimit {
    blocks: u64,
    shares: DirtyShares,
}

impl DirtyLimit {
    /// Of a shard with these settings.
    pub fn new(config: &ShardConfig) -> Self {
        let blocks = dirty_limit(config);
        Self { blocks, shares: shares(config, blocks) }
    }
}

/// The dirty blocks that a shard may have.
fn dirty_limit(config: &ShardConfig) -> u64 {
    let segments = config.area.len / u64::from(config.segment_size);
    let bytes = (segments - SEGMENTS_MIN / 2) * u64::from(config.segment_size);
    let blocks = (bytes / BLOCK_SIZE as u64).min(config.index_blocks);
    (blocks * u64::from(config.dirty_limit_percent) / 100).max(1)
}

/// How the volumes of a shard share its dirty limit.
fn shares(config: &ShardConfig, limit: u64) -> DirtyShares {
    let last = config.volumes.iter().map(|volume| usize::from(volume.id.0)).max().unwrap_or(0);
    let mut volumes = vec![None; last + 1];
    for volume in &config.volumes {
        volumes[usize::from(volume.id.0)] = Some(volume.share);
    }
    DirtyShares::new(limit, &volumes)
}

impl Cache {
    /// Dirty blocks of all volumes above which writes wait.
    pub(crate) fn dirty_limit(&self) -> u64 {
        self.limit.blocks
    }

    /// Dirty blocks above which the writes of a volume wait: what the others leave, and at least
    /// its guarantee.
    pub(crate) fn limit_of(&self, volume: VolumeId) -> u64 {
        let level =
            |at: usize| u8::try_from(at).map_or(0, |at| self.contents.dirty_level_of(VolumeId(at)));
        self.limit.shares.limit(usize::from(volume.0), level)
    }

    /// Dirty blocks and their limit as pacing sees them. What waits for the primary's flush only is
    /// as good as clean, but becomes clean in lumps, since a flush of disks may take most of a
    /// second: it is left out of the level, and room for the largest recent lump out of the limit.
    pub(crate) fn paced_level(&self, volume: VolumeId) -> (u64, u64) {
        let limit = self.limit_of(volume);
        let flow = &self.volume(volume).flow;
        let level = self.contents.dirty_level_of(volume).saturating_sub(flow.unflushed_blocks);
        (level, limit - flow.unflushed_peak.min(limit / 2))
    }

    /// Takes one of the writes that are held back, whatever they wait for.
    pub(crate) fn pop_held(&mut self) -> Option<Id> {
        let mut volumes = self.volumes.iter_mut().flatten();
        volumes.find_map(|volume| volume.flow.pop_held())
    }

    /// When the next write may go on that is held back. Those of a primary that takes nothing are
    /// looked at with the blocks that wait for it.
    pub(crate) fn next_held(&self) -> Option<Instant> {
        let moving = self.volumes.iter().flatten().filter(|v| !v.is_stuck(self.now));
        let fronts = moving.filter_map(|v| v.flow.first_held());
        fronts.map(|(at, _)| at).min()
    }

    /// Whether more of a volume is dirty than it should be while writes wait for clean blocks.
    pub(crate) fn is_crowded(&self, volume: VolumeId) -> bool {
        self.contents.dirty().blocks_of(volume) > self.limit_of(volume) / 4 * 3
    }

    /// Dirty blocks of a segment that will be destaged soon: not those of volumes that are stuck.
    pub(crate) fn destageable_in(&self, index: usize) -> u32 {
        let stuck = self.volumes.iter().flatten().filter(|v| v.is_stuck(self.now));
        let stuck: u32 = stuck.map(|v| self.contents.dirty_of(index, v.config.id)).sum();
        self.contents.dirty_in(index).saturating_sub(stuck)
    }

    /// Segments kept free, beyond the usual, to copy forward what stuck volumes have in the log.
    pub(crate) fn stuck_reserve(&self) -> u64 {
        if self.volumes.len() == 1 {
            return 0;
        }
        let stuck = self.volumes.iter().flatten().filter(|v| v.is_stuck(self.now));
        self.reserve_for(stuck.map(|v| self.contents.dirty().blocks_of(v.config.id)).sum())
    }

    /// Segments that reclaim needs for `blocks` dirty blocks that do not get clean.
    pub(crate) fn reserve_for(&self, blocks: u64) -> u64 {
        let bytes = blocks * BLOCK_SIZE as u64;
        let reserve = bytes / u64::from(self.config.segment_size) / STUCK_RESERVE + 1;
        if blocks == 0 { 0 } else { reserve }
    }

    /// Whether a volume's primary takes no blocks.
    pub(crate) fn is_stuck(&self, volume: VolumeId) -> bool {
        self.volume(volume).is_stuck(self.now)
    }

    /// Whether any volume's does.
    pub(crate) fn is_any_stuck(&self) -> bool {
        self.volumes.iter().flatten().any(|volume| volume.is_stuck(self.now))
    }

    pub(crate) fn volume_ids(&self) -> impl Iterator<Item = VolumeId> + use<> {
        (0..self.volumes.len() as u8).map(VolumeId)
    }
}
