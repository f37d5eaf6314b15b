//! The dirty limit and its division among volumes, the reserve in the log for blocks that cannot
//! become clean, and the bound on blocks that misses bring in.

use forebay_block::{BLOCK_SIZE, Instant, STRIPE_BLOCKS, VolumeId};
use forebay_format::ENTRY_BYTES;
use forebay_policy::{DirtyShare, DirtyShares, Part, RateBound, Whole, free_blocks};

use crate::api::{DIRTY_MAX_PERCENT, Pace, ShardConfig, VolumeConfig};
use crate::cache::Cache;
use crate::limits::SEGMENTS_MIN;
use crate::slab::Id;

/// One in this many of the segments that hold blocks of a stuck volume is kept free, on top of the
/// usual reserve: copies of a full segment may take more than a segment.
const STUCK_RESERVE: u64 = 8;

/// The dirty limit in blocks, and how the volumes share it.
pub struct DirtyLimit {
    all: Whole,
    shares: DirtyShares,
    /// The fewest blocks that a stripe with dirty blocks counts as. So there is memory for all such
    /// stripes when dirty blocks are scattered over large volumes.
    stripe: u64,
}

impl DirtyLimit {
    /// The limit of a shard with these settings.
    pub fn new(config: &ShardConfig) -> Self {
        let blocks = room(config).part(config.dirty_limit).min(dirty_max(config)).max(1);
        let all = Whole { blocks, shards: config.shards };
        let shares = DirtyShares::new(all, &by_id(config, |volume| volume.share));
        Self { all, shares, stripe: blocks.div_ceil(config.dirty_stripes.max(1)) }
    }
}

/// The most dirty blocks that a shard may have, whatever its limit.
fn dirty_max(config: &ShardConfig) -> u64 {
    room(config).part(Part::Percent(DIRTY_MAX_PERCENT))
}

/// The number of blocks that a shard has room for if none is compressed: all of what shares of the
/// cache are parts of.
pub(super) fn room(config: &ShardConfig) -> Whole {
    let segments = config.area.len / u64::from(config.segment_size);
    let bytes = (segments - SEGMENTS_MIN / 2) * u64::from(config.segment_size);
    let blocks = (bytes / BLOCK_SIZE as u64).min(config.index_blocks);
    Whole { blocks, shards: config.shards }
}

/// The number of blocks of a full stripe of a primary that prefers I/O of `optimal_io` bytes: 1 if
/// it has none. A write ends where a stripe of the cache does. So longer ones count in parts, and
/// shorter ones if they divide it.
pub(super) fn full_stripe_blocks(pace: Pace, optimal_io: u32) -> u64 {
    let bytes = pace.stripe.unwrap_or(optimal_io.into());
    let stripe = STRIPE_BLOCKS * BLOCK_SIZE as u64;
    match bytes {
        0 => 1,
        _ if bytes.is_multiple_of(stripe) => STRIPE_BLOCKS,
        _ if stripe.is_multiple_of(bytes) => (bytes / BLOCK_SIZE as u64).max(1),
        _ => 1,
    }
}

/// A setting of each volume, indexed by its ID.
pub(super) fn by_id<T: Clone>(
    config: &ShardConfig,
    of: impl Fn(&VolumeConfig) -> T,
) -> Vec<Option<T>> {
    let last = config.volumes.iter().map(|volume| usize::from(volume.id.0)).max().unwrap_or(0);
    let mut all = vec![None; last + 1];
    for volume in &config.volumes {
        all[usize::from(volume.id.0)] = Some(of(volume));
    }
    all
}

/// The bound on the missed blocks that enter a shard's part of the cache device.
pub(super) fn fill_bound(config: &ShardConfig) -> RateBound {
    let of_shard = |bytes: u64| bytes as f64 / BLOCK_SIZE as f64 / f64::from(config.shards.max(1));
    RateBound::new(config.fill_rate.map(of_shard))
}

impl Cache {
    /// Changes the dirty limit. If more is dirty than a lower one allows, writes wait until enough
    /// has been destaged.
    pub(crate) fn set_dirty_limit(&mut self, limit: Part) {
        self.config.dirty_limit = limit;
        self.limit = DirtyLimit::new(&self.config);
    }

    /// Changes a volume's share of the dirty limit.
    pub(crate) fn set_dirty_share(&mut self, volume: VolumeId, share: DirtyShare) {
        let mut volumes = self.config.volumes.iter_mut();
        if let Some(config) = volumes.find(|config| config.id == volume) {
            config.share = share;
            self.limit = DirtyLimit::new(&self.config);
        }
    }

    /// Changes the most bytes per second of clean blocks that all shards together bring in.
    pub(crate) fn set_fill_rate(&mut self, rate: Option<u64>) {
        self.config.fill_rate = rate;
        self.fill = fill_bound(&self.config);
    }

    /// Changes how destaging treats a volume's primary.
    pub(crate) fn set_pace(&mut self, volume: VolumeId, pace: Pace) {
        let shards = self.config.shards;
        let state = self.volume_mut(volume);
        state.flow.set_pace(pace, shards);
        let unit = full_stripe_blocks(pace, state.config.optimal_io);
        if unit != self.contents.dirty().unit_of(volume) {
            self.contents.set_unit(volume, unit);
            self.volume_mut(volume).flow.stop_filling();
        }
    }

    /// Number of dirty blocks, over all volumes, that the dirty limit is.
    pub(crate) fn dirty_limit(&self) -> u64 {
        self.limit.all.blocks
    }

    /// Number of dirty blocks at which the writes of every volume wait: the dirty limit, or the sum
    /// of the volumes' limits.
    pub(crate) fn dirty_limit_in_force(&self) -> u64 {
        let limits = self.volumes.iter().flatten().map(|volume| self.limit_of(volume.config.id));
        limits.fold(0, u64::saturating_add).min(self.dirty_limit())
    }

    /// The most blocks that may be dirty, whatever the dirty limit.
    pub(crate) fn dirty_max(&self) -> u64 {
        dirty_max(&self.config)
    }

    /// Number of dirty blocks, of a volume that may have `limit`, above which it is destaged.
    pub(crate) fn target_of(&self, limit: u64) -> u64 {
        let all = self.limit.all;
        let target = all.part(self.config.dirty_target);
        (u128::from(limit) * u128::from(target) / u128::from(all.blocks)) as u64
    }

    /// The dirty level of a volume, in blocks: its dirty blocks that can be destaged, or more if
    /// they are scattered.
    fn dirty_level_of(&self, volume: VolumeId) -> u64 {
        let stripes = self.contents.dirty_stripes_of(volume);
        self.contents.dirty_level_of(volume).max(stripes.saturating_mul(self.limit.stripe))
    }

    /// The most that a write of `blocks` blocks adds to the dirty level, if they are neighbors.
    pub(crate) fn dirty_level_by(&self, blocks: u64) -> u64 {
        blocks.max(blocks.div_ceil(STRIPE_BLOCKS).saturating_mul(self.limit.stripe))
    }

    /// The level of a volume at which its writes wait: the part of the dirty limit that the other
    /// volumes leave free, and at least the volume's guarantee.
    fn share_of(&self, volume: VolumeId) -> u64 {
        let level = |at: usize| u8::try_from(at).map_or(0, |at| self.dirty_level_of(VolumeId(at)));
        self.limit.shares.limit(usize::from(volume.0), level)
    }

    /// The most blocks of an ordered volume that may be dirty.
    fn ordered_limit_of(&self, volume: VolumeId) -> Option<u64> {
        self.volume(volume).order.blocks_max.filter(|_| self.is_ordered(volume))
    }

    /// Number of dirty blocks, scattered as they are now, at which the writes of a volume wait.
    pub(crate) fn limit_of(&self, volume: VolumeId) -> u64 {
        let (blocks, level) = (self.contents.dirty_level_of(volume), self.dirty_level_of(volume));
        let mut limit = self.share_of(volume);
        if level > blocks && blocks > 0 {
            limit = (u128::from(limit) * u128::from(blocks) / u128::from(level)) as u64;
        }
        self.ordered_limit_of(volume).map_or(limit, |most| most.min(limit))
    }

    /// The dirty level of a volume and its limit, or the blocks of an ordered volume and theirs,
    /// whichever is closer to the limit.
    pub(crate) fn level_and_limit(&self, volume: VolumeId) -> (u64, u64) {
        let (level, limit) = (self.dirty_level_of(volume), self.share_of(volume));
        let Some(most) = self.ordered_limit_of(volume) else { return (level, limit) };
        let blocks = self.contents.dirty_level_of(volume);
        let is_closer =
            u128::from(blocks) * u128::from(limit) >= u128::from(level) * u128::from(most);
        if is_closer { (blocks, most.min(limit)) } else { (level, limit) }
    }

    /// Whether a volume whose dirty level is higher by `more` is at its dirty limit: its writes
    /// wait until some of its blocks are destaged.
    pub(crate) fn is_full_of_dirty(&self, volume: VolumeId, more: u64) -> bool {
        let (level, limit) = self.level_and_limit(volume);
        level + more >= limit
    }

    /// The dirty level of a volume and its limit, as pacing sees them.
    pub(crate) fn paced_level(&self, volume: VolumeId) -> (u64, u64) {
        self.paced(volume, self.level_and_limit(volume))
    }

    /// A dirty level and limit of a volume, as pacing sees them. Blocks that only wait for
    /// the primary's flush are as good as clean, but they become clean in lumps, since a flush of a
    /// disk may take most of a second. So they are left out of the level, and room for the largest
    /// recent lump is left out of the limit. Blocks that fill stripes of the primary are left out,
    /// too.
    pub(crate) fn paced(&self, volume: VolumeId, (level, limit): (u64, u64)) -> (u64, u64) {
        let flow = &self.volume(volume).flow;
        let mut others = flow.unflushed_blocks + flow.filled_blocks;
        let blocks = self.contents.dirty_level_of(volume);
        if level > blocks && blocks > 0 {
            // As many of the stripes as of the blocks.
            others = (u128::from(others) * u128::from(level) / u128::from(blocks)) as u64;
        }
        let level = level.saturating_sub(others);
        (level, limit - flow.unflushed_peak.min(limit / 2))
    }

    /// The level of a volume, and that up to which its writes are not delayed; `None` if none of
    /// them is held back.
    pub(crate) fn free_level(&self, volume: VolumeId) -> Option<(u64, u64)> {
        self.known_volume(volume)?.flow.first_held()?;
        let (level, limit) = self.paced_level(volume);
        Some((level, free_blocks(self.target_of(limit), limit)))
    }

    /// Takes one of the writes that are held back, no matter what it waits for.
    pub(crate) fn pop_held(&mut self) -> Option<Id> {
        let now = self.now;
        self.volumes.iter_mut().flatten().find_map(|volume| volume.take_held(now))
    }

    /// When the next held-back write may proceed. Writes to a stuck primary are not included: they
    /// are checked together with the dirty blocks that wait for it.
    pub(crate) fn next_held(&self) -> Option<Instant> {
        let moving = self.volumes.iter().flatten().filter(|v| !v.is_stuck(self.now));
        let fronts = moving.filter_map(|v| v.flow.first_held());
        fronts.map(|held| held.at).min()
    }

    /// Whether enough blocks of a volume are dirty that its primary should be flushed now.
    pub(crate) fn is_crowded(&self, volume: VolumeId) -> bool {
        let (level, limit) = self.level_and_limit(volume);
        level > limit / 4 * 3
    }

    /// Number of dirty blocks in a segment that will be destaged soon: blocks of stuck volumes do
    /// not count.
    pub(crate) fn destageable_in(&self, index: usize) -> u32 {
        let stuck = self.volumes.iter().flatten().filter(|v| v.is_stuck(self.now));
        let stuck: u32 = stuck.map(|v| self.contents.dirty_of(index, v.config.id)).sum();
        self.contents.dirty_in(index).saturating_sub(stuck)
    }

    /// Segments kept free, beyond the usual reserve, for copying forward the blocks of stuck
    /// volumes.
    pub(crate) fn stuck_reserve(&self) -> u64 {
        if self.volumes.len() == 1 {
            return 0;
        }
        let stuck = self.volumes.iter().flatten().filter(|v| v.is_stuck(self.now));
        self.reserve_for(stuck.map(|v| self.contents.dirty().blocks_of(v.config.id)).sum())
    }

    /// Number of segments that reclaim needs for `blocks` dirty blocks that cannot become clean.
    pub(crate) fn reserve_for(&self, blocks: u64) -> u64 {
        // Blocks in the store need only entries.
        let each = if self.store.exists() { 2 * ENTRY_BYTES } else { BLOCK_SIZE };
        let bytes = blocks * each as u64;
        let reserve = bytes / u64::from(self.config.segment_size) / STUCK_RESERVE + 1;
        if blocks == 0 { 0 } else { reserve }
    }

    /// Whether a volume's primary takes no blocks.
    pub(crate) fn is_stuck(&self, volume: VolumeId) -> bool {
        self.volume(volume).is_stuck(self.now)
    }

    /// Whether the primary of any volume takes no blocks.
    pub(crate) fn is_any_stuck(&self) -> bool {
        self.volumes.iter().flatten().any(|volume| volume.is_stuck(self.now))
    }

    pub(crate) fn volume_ids(&self) -> impl Iterator<Item = VolumeId> + use<> {
        (0..self.volumes.len() as u8).map(VolumeId)
    }
}
