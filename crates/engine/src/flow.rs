//! The flow of one volume's dirty blocks, from the writes that make them to the destage writes
//! that take them away: its level and limit, the writes held back, the pace of destaging, and
//! whether its primary answers.
//!
//! All of this is kept by volume, so that a primary that is slow or away holds up the writes of
//! its own volume and nothing else. What volumes share (the log, the destage writes in flight) is
//! divided so that each keeps a part whatever the others do.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::Instant;
use forebay_policy::{DestagePacer, DrainRate, WriteThrottle};

use crate::key::Key;
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
    pub unflushed_peak: u64,
    /// When the oldest request was sent that the primary has not answered, as of the last look.
    pub oldest_io: Option<Instant>,
    pub slow_ios: u64,
    was_slow: bool,
}

impl Flow {
    /// Of a volume that may have `depth` destage writes under way.
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

    /// Holds back a write of `blocks` blocks that are not dirty, while `level` of at most `limit`
    /// blocks are; for how long, if it has to wait.
    pub fn hold(
        &mut self,
        now: Instant,
        write: Id,
        (level, limit): (u64, u64),
        blocks: u64,
    ) -> Option<Duration> {
        let rate = self.drain_rate.per_second(now);
        let delay = self.throttle.delay(now, level, limit, blocks, rate);
        if delay.is_zero() && self.delayed.is_empty() {
            return None;
        }
        let last = self.delayed.back().map_or(Instant(0), |&(at, _)| at);
        self.delayed.push_back((last.max(now + delay), write));
        Some(delay)
    }

    /// The write that has been held back longest, and when it may go on.
    pub fn first_held(&self) -> Option<(Instant, Id)> {
        self.delayed.front().copied()
    }

    /// Takes the write that has been held back longest.
    pub fn pop_held(&mut self) -> Option<Id> {
        self.delayed.pop_front().map(|(_, write)| write)
    }

    /// Writes that are held back.
    pub fn held_writes(&self) -> u64 {
        self.delayed.len() as u64
    }
}
