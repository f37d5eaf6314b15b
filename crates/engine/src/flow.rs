//! The flow of one volume's dirty blocks, from the client writes that create them to the destage
//! writes that clean them: level and limit, writes held back, destage pacing, and whether the
//! primary answers.
//!
//! All state here is per volume, so that a primary that is slow or away delays only the writes of
//! its own volume. The resources that volumes share (the log, the destage writes in flight) are
//! divided so that each volume keeps a guaranteed part.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_block::{BLOCK_SIZE, Instant};
use forebay_policy::{DestagePacer, DrainRate, RateBound, WriteThrottle};

use crate::api::{Pace, VolumeConfig};
use crate::contents::Stored;
use crate::key::Key;
use crate::slab::Id;

/// A stripe of the primary that is being filled.
#[derive(Debug)]
pub(crate) struct Filling {
    /// Its first block.
    pub start: Key,
    /// Since when it is being filled.
    pub since: Instant,
    /// The blocks of it that were clean.
    pub holes: Vec<Stored>,
    /// The reads that check these blocks and have not ended. After the last one they are dirty.
    pub reads: u32,
}

impl Filling {
    /// The number of blocks that were made dirty.
    pub fn filled(&self) -> u64 {
        if self.reads > 0 { 0 } else { self.holes.len() as u64 }
    }
}

/// A write that is held back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub write: Id,
    /// The number of blocks that it makes dirty.
    pub blocks: u64,
    /// When it arrived.
    pub since: Instant,
    /// When it may proceed.
    pub at: Instant,
}

/// The flow of one volume.
#[derive(Debug)]
pub(crate) struct Flow {
    throttle: WriteThrottle,
    /// Writes held back.
    delayed: VecDeque<Held>,
    pub pacer: DestagePacer,
    /// Bounds the blocks destaged per second.
    pub bound: RateBound,
    drain_rate: DrainRate,
    /// Destage writes in flight, and blocks whose bytes are being gathered for more of them.
    pub destage_writes: u32,
    pub collecting: u64,
    /// The block at which destaging continues.
    pub cursor: Key,
    /// The stripes of the primary that are being filled.
    pub filling: VecDeque<Filling>,
    /// Blocks that were made dirty to fill stripes and are not on the primary yet.
    pub filled_blocks: u64,
    /// Blocks written to the primary that it has not flushed yet, and the recent peak of that
    /// number.
    pub unflushed_blocks: u64,
    pub unflushed_peak: u64,
    /// Send time of the oldest request that the primary has not answered, as of the last check.
    pub oldest_io: Option<Instant>,
    pub slow_ios: u64,
    was_slow: bool,
}

impl Flow {
    /// Returns the flow of a volume that may have `depth` destage writes in flight.
    pub fn new(depth: u32, config: &VolumeConfig) -> Self {
        let foreground = Arc::clone(&config.foreground);
        Self {
            throttle: WriteThrottle::new(),
            delayed: VecDeque::new(),
            pacer: DestagePacer::new(depth, config.rotational, foreground),
            bound: RateBound::new(None),
            drain_rate: DrainRate::new(),
            destage_writes: 0,
            collecting: 0,
            cursor: Key::new(config.id, 0),
            filling: VecDeque::new(),
            filled_blocks: 0,
            unflushed_blocks: 0,
            unflushed_peak: 0,
            oldest_io: None,
            slow_ios: 0,
            was_slow: false,
        }
    }

    /// Sets how destaging treats the primary; each of the `shards` gets an equal part of the rate.
    pub fn set_pace(&mut self, pace: Pace, shards: u16) {
        self.pacer.set_target(pace.latency);
        let of_shard = |bytes: u64| bytes as f64 / BLOCK_SIZE as f64 / f64::from(shards.max(1));
        self.bound = RateBound::new(pace.rate.map(of_shard));
    }

    /// Counts blocks that were written to the primary; `filled` of them were dirty only to fill a
    /// stripe.
    pub fn destaged(&mut self, now: Instant, blocks: u64, filled: u64) {
        self.drain_rate.completed(now, blocks.saturating_sub(filled));
        self.unflushed_blocks += blocks;
        self.filled_blocks -= filled;
    }

    /// Gives up filling stripes: what was made dirty for them is destaged as any other block.
    pub fn stop_filling(&mut self) {
        let blocks: u64 = self.filling.drain(..).map(|filling| filling.filled()).sum();
        self.filled_blocks -= blocks;
    }

    /// Updates the peak of unflushed blocks when a flush has just ended; a peak decays slowly.
    pub fn note_unflushed(&mut self) {
        self.unflushed_peak = self.unflushed_blocks.max(self.unflushed_peak / 8 * 7);
    }

    /// Begins a check for requests that the primary has not answered.
    pub fn begin_look(&mut self) {
        self.was_slow = self.slow_ios > 0;
        (self.oldest_io, self.slow_ios) = (None, 0);
    }

    /// Notes that the primary has not answered a request sent at `at`; `slow` means for longer than
    /// the configured patience. Returns whether to report it.
    pub fn note_unanswered(&mut self, at: Instant, slow: bool) -> bool {
        self.oldest_io = Some(self.oldest_io.map_or(at, |oldest| oldest.min(at)));
        self.slow_ios += u64::from(slow);
        slow && self.slow_ios == 1 && !self.was_slow
    }

    /// Holds back a write that dirties `blocks` more blocks while `level` of at most `limit` blocks
    /// are dirty, and `target` are no cause to destage; if `is_full`, it waits in any case. Returns
    /// whether it has to wait.
    pub fn hold(
        &mut self,
        now: Instant,
        write: Id,
        (level, target, limit): (u64, u64, u64),
        blocks: u64,
        is_full: bool,
    ) -> bool {
        let rate = self.drain_rate.per_second(now);
        let delay = self.throttle.delay(now, level, target, limit, blocks, rate);
        if delay.is_zero() && self.delayed.is_empty() && !is_full {
            return false;
        }
        let last = self.delayed.back().map_or(Instant(0), |held| held.at);
        self.delayed.push_back(Held { write, blocks, since: now, at: last.max(now + delay) });
        true
    }

    /// Returns the write that has been held back longest.
    pub fn first_held(&self) -> Option<Held> {
        self.delayed.front().copied()
    }

    /// Takes the write that has been held back longest.
    pub fn pop_held(&mut self) -> Option<Held> {
        self.delayed.pop_front()
    }

    /// Returns the number of writes held back.
    pub fn held_writes(&self) -> u64 {
        self.delayed.len() as u64
    }
}
