//! The flow of one volume's dirty blocks, from the writes that make them to the destage writes
//! that take them away: its level and limit, the writes held back, the pace of destaging, and
//! whether its primary answers.
//!
//! All of this is kept by volume, so that a primary that is slow or away holds up the writes of
//! its own volume and nothing else. What volumes share (the log, the destage writes in flight) is
//! divided so that each keeps a part whatever the others do.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::{BLOCK_SIZE, BlockRange, ErrorKind, Instant, VolumeId};
use forebay_policy::{DestagePacer, DestageState, DirtyShares, DrainRate, WriteThrottle};

use crate::Engine;
use crate::api::{Effects, Health, ShardConfig, State};
use crate::key::Key;
use crate::limits::{DESTAGED_UNFLUSHED_MAX, SEGMENTS_MIN};
use crate::slab::Id;

/// The flow of one volume.
#[derive(Debug)]
pub(crate) struct Flow {
    throttle: WriteThrottle,
    /// Writes held back, with the time they may go on.
    delayed: VecDeque<(Instant, Id)>,
    pub pacer: DestagePacer,
    drain_rate: DrainRate,
    /// Destage writes under way, and blocks being collected for them.
    pub destage_writes: u32,
    pub collecting: u64,
    /// Where destaging goes on.
    pub cursor: Key,
    /// Blocks written to the primary that it has not flushed yet, and the highest recent number
    /// of them.
    pub unflushed_blocks: u64,
    unflushed_peak: u64,
    /// When the oldest request was sent that the primary has not answered, as of the last look.
    pub oldest_io: Option<Instant>,
    pub slow_ios: u64,
    was_slow: bool,
}

impl Flow {
    pub fn new(depth: u32, rotational: bool, first: Key) -> Self {
        Self {
            throttle: WriteThrottle::new(),
            delayed: VecDeque::new(),
            pacer: DestagePacer::new(depth, rotational),
            drain_rate: DrainRate::new(),
            destage_writes: 0,
            collecting: 0,
            cursor: first,
            unflushed_blocks: 0,
            unflushed_peak: 0,
            oldest_io: None,
            slow_ios: 0,
            was_slow: false,
        }
    }

    /// Blocks were written to the primary.
    pub fn destaged(&mut self, now: Instant, blocks: u64) {
        self.drain_rate.completed(now, blocks);
        self.unflushed_blocks += blocks;
    }

    /// Remembers how much waited for a flush that has just ended; a lump fades slowly.
    pub fn note_unflushed(&mut self) {
        self.unflushed_peak = self.unflushed_blocks.max(self.unflushed_peak / 8 * 7);
    }

    /// It is looked for requests that the primary has not answered.
    pub fn begin_look(&mut self) {
        self.was_slow = self.slow_ios > 0;
        (self.oldest_io, self.slow_ios) = (None, 0);
    }

    /// The primary has not answered a request that was sent at `at`, for long if it is `slow`;
    /// whether that is news.
    pub fn note_unanswered(&mut self, at: Instant, slow: bool) -> bool {
        self.oldest_io = Some(self.oldest_io.map_or(at, |oldest| oldest.min(at)));
        self.slow_ios += u64::from(slow);
        slow && self.slow_ios == 1 && !self.was_slow
    }

    /// Writes that are held back.
    pub fn held_writes(&self) -> u64 {
        self.delayed.len() as u64
    }
}

/// One part in this many of the segments that hold blocks of a stuck volume is kept free on top of
/// the usual reserve: copies of a full segment may take more than a segment.
const STUCK_RESERVE: u64 = 8;

/// The dirty blocks that a shard may have.
pub(crate) fn dirty_limit(config: &ShardConfig) -> u64 {
    let segments = config.area.len / u64::from(config.segment_size);
    let bytes = (segments - SEGMENTS_MIN / 2) * u64::from(config.segment_size);
    let blocks = (bytes / BLOCK_SIZE as u64).min(config.index_blocks);
    (blocks * u64::from(config.dirty_limit_percent) / 100).max(1)
}

/// How the volumes of a shard share its dirty limit.
pub(crate) fn shares(config: &ShardConfig, limit: u64) -> DirtyShares {
    let last = config.volumes.iter().map(|volume| usize::from(volume.id.0)).max().unwrap_or(0);
    let mut volumes = vec![None; last + 1];
    for volume in &config.volumes {
        volumes[usize::from(volume.id.0)] = Some(volume.share);
    }
    DirtyShares::new(limit, &volumes)
}

impl Engine {
    /// Dirty blocks of all volumes above which writes wait.
    pub(crate) fn dirty_limit(&self) -> u64 {
        self.destaging.dirty_limit
    }

    /// Dirty blocks above which the writes of a volume wait: what the others leave, and at least
    /// its guarantee.
    pub(crate) fn limit_of(&self, volume: VolumeId) -> u64 {
        let level =
            |at: usize| u8::try_from(at).map_or(0, |at| self.contents.dirty_level_of(VolumeId(at)));
        self.destaging.dirty_shares.limit(usize::from(volume.0), level)
    }

    /// Dirty blocks and their limit as pacing sees them. What waits for the primary's flush only is
    /// as good as clean, but becomes clean in lumps, since a flush of disks may take most of a
    /// second: it is left out of the level, and room for the largest recent lump out of the limit.
    fn paced_level(&self, volume: VolumeId) -> (u64, u64) {
        let limit = self.limit_of(volume);
        let flow = &self.volume(volume).flow;
        let level = self.contents.dirty_level_of(volume).saturating_sub(flow.unflushed_blocks);
        (level, limit - flow.unflushed_peak.min(limit / 2))
    }

    /// Delays a write when the dirty limit is near; true when it waits.
    pub(crate) fn hold_back(&mut self, write: Id, volume: VolumeId, blocks: BlockRange) -> bool {
        let (level, limit) = self.paced_level(volume);
        let waits = !self.volume(volume).flow.delayed.is_empty();
        if level < limit / 2 && !waits {
            return false;
        }
        // A rewrite of a dirty block adds nothing to the level.
        let keys = blocks.iter().map(|block| Key::new(volume, block));
        let blocks = keys.filter(|key| !self.contents.dirty().contains(*key)).count() as u64;
        if blocks == 0 {
            return false;
        }
        let now = self.now;
        let flow = &mut self.volume_mut(volume).flow;
        let rate = flow.drain_rate.per_second(now);
        let delay = flow.throttle.delay(now, level, limit, blocks, rate);
        if delay.is_zero() && !waits {
            return false;
        }
        let last = flow.delayed.back().map_or(Instant(0), |&(at, _)| at);
        flow.delayed.push_back((last.max(now + delay), write));
        self.stats.throttled_nanos += delay.as_nanos() as u64;
        true
    }

    /// Lets writes go on whose delay is over. At the limit itself they wait for room, and get an
    /// error when the primary has been away for so long that there may never be any.
    pub(crate) fn release_delayed(&mut self, fx: &mut Effects) {
        for volume in self.volume_ids() {
            while let Some(&(at, write)) =
                self.known_volume(volume).and_then(|volume| volume.flow.delayed.front())
            {
                let full = self.health() == Health::Good
                    && self.contents.dirty_level_of(volume) >= self.limit_of(volume);
                if at > self.now {
                    break;
                }
                let hopeless = full
                    && self.volume(volume).is_stuck(self.now)
                    && self.now.since(at) >= self.config.patience;
                if full && !hopeless {
                    break;
                }
                self.volume_mut(volume).flow.delayed.pop_front();
                if hopeless {
                    self.stats.given_up_writes += 1;
                    self.end_write(write, Err(ErrorKind::DeviceGone.into()), fx);
                } else {
                    self.lock_blocks(write, fx);
                }
            }
        }
    }

    /// Takes one of the writes that are held back, whatever they wait for.
    pub(crate) fn pop_delayed(&mut self) -> Option<Id> {
        let mut volumes = self.volumes.iter_mut().flatten();
        volumes.find_map(|volume| volume.flow.delayed.pop_front()).map(|(_, write)| write)
    }

    /// When the next write may go on that is held back. Those of a primary that takes nothing are
    /// looked at with the blocks that wait for it.
    pub(crate) fn next_delayed(&self) -> Option<Instant> {
        let moving = self.volumes.iter().flatten().filter(|v| !v.is_stuck(self.now));
        let fronts = moving.filter_map(|v| v.flow.delayed.front());
        fronts.map(|&(at, _)| at).min()
    }

    /// Destages everything as fast as the primaries take it, or goes back to the usual pace, but
    /// for volumes that [`Engine::drain_volume`] drains.
    pub fn set_drain(&mut self, on: bool) {
        self.destaging.draining = on;
    }

    /// The same of one volume.
    pub fn drain_volume(&mut self, volume: VolumeId, on: bool) {
        if self.known_volume(volume).is_some() {
            self.volume_mut(volume).draining = on;
        }
    }

    pub(crate) fn destage_state(&self, volume: VolumeId) -> DestageState {
        let (level, limit) = self.paced_level(volume);
        let oldest = self.contents.dirty().oldest_of(volume).unwrap_or(self.now);
        DestageState {
            now: self.now,
            dirty_blocks: level.max(self.contents.dirty().blocks_of(volume).min(1)),
            target_blocks: limit / 2,
            limit_blocks: limit,
            oldest_age: self.now.since(oldest),
            age_max: self.config.write_cache_depth,
            quiet: match self.requests.len() {
                0 => self.now.since(self.destaging.last_foreground),
                _ => Duration::ZERO,
            },
            draining: self.destaging.draining
                || self.volume(volume).draining
                || self.destaging.log_pressed
                || self.overflows()
                || self.health() == Health::Draining
                || self.has_leftover(volume),
            in_flight: self.volume(volume).flow.destage_writes,
        }
    }

    /// Destage writes that a volume may have under way. Volumes share the depth; each may always
    /// use its part of half of it, and those that are stuck do not count.
    pub(crate) fn destage_allowance(&mut self, volume: VolumeId, state: &DestageState) -> u32 {
        let stopping = *self.state() == State::Stopping;
        if stopping && !self.destaging.draining && self.health() == Health::Good {
            return 0;
        }
        if self.volume(volume).written.len() >= DESTAGED_UNFLUSHED_MAX {
            return 0;
        }
        let depth = self.config.destage_depth;
        let count = self.volumes.iter().flatten().count() as u32;
        let mut others = 0;
        for other in self.volumes.iter().flatten() {
            let counts = other.config.id != volume && !other.is_stuck(self.now);
            others += if counts { other.flow.destage_writes } else { 0 };
        }
        let guaranteed = if count == 1 { depth } else { (depth / 2 / count).max(1) };
        let mut share = depth.saturating_sub(others).max(guaranteed);
        if self.detaches(volume) {
            // What writes wait for goes first.
            share = share.min((depth / 8).max(1));
        }
        self.volume_mut(volume).flow.pacer.allowance(state).min(share)
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
