//! How many destage writes may be in flight, and how fast they have been lately.
//!
//! Blocks are destaged because they grow old, because there are many, or because the primary has
//! nothing else to do; the most urgent of the three decides how many writes are wanted. How many
//! the primary bears beside its foreground requests is learned from their latency, as CoDel and
//! the Linux kernel's writeback throttling (blk-wbt) do: in windows of 100 ms, when even the
//! fastest request took longer than the target, the number is halved, else it grows by one.
//! Which blocks are written, and in which order, is the engine's.
//!
//! Flash is given a fixed number at a time, and so are disks that have nothing else to do. Beside
//! foreground requests disks are given rounds: as many neighbours at once as they bear, which one
//! pass of the heads serves, and then a rest, so that the rounds have the share of the time that is
//! wanted. The same writes one by one would send the heads to and fro between them and every
//! foreground request.

use std::time::Duration;

use forebay_block::Instant;

/// Length of a window in which the fastest foreground request is looked for.
const WINDOW: Duration = Duration::from_millis(100);
/// Silence of the clients after which the primary counts as idle. Databases pause for a second or
/// three when their log is full; to begin with everything then makes the next requests wait.
const QUIET: Duration = Duration::from_secs(5);
/// Share of the limit, in percent, above which foreground latency no longer counts.
const URGENT_PERCENT: u64 = 90;
/// Share of the largest age, in percent, at which destaging for age begins.
const AGEING_PERCENT: u64 = 80;
/// Latency target of the foreground on a primary without moving parts.
const TARGET_FLASH: Duration = Duration::from_millis(2);
/// Latency target of the foreground on a primary of disks.
const TARGET_DISKS: Duration = Duration::from_millis(75);
/// Part of a round that may be outstanding when the next, or the rest before it, begins: the drive
/// may keep the last few waiting for long.
const ROUND_LEFT: u32 = 4;
/// Longest rest between two rounds.
const REST_MAX: Duration = Duration::from_secs(1);

/// What the engine knows when it asks for an allowance.
#[derive(Clone, Copy, Debug)]
pub struct DestageState {
    /// The time.
    pub now: Instant,
    /// Blocks that the primary does not have.
    pub dirty_blocks: u64,
    /// Dirty blocks that may stay for good as far as their number goes; half the limit, usually.
    pub target_blocks: u64,
    /// Dirty blocks at most.
    pub limit_blocks: u64,
    /// Time since the oldest of them was written.
    pub oldest_age: Duration,
    /// Age that no dirty block should exceed: the write-cache depth.
    pub age_max: Duration,
    /// Time since a client last waited for anything.
    pub quiet: Duration,
    /// Whether everything is to be destaged now.
    pub draining: bool,
    /// Destage writes in flight.
    pub in_flight: u32,
}

impl DestageState {
    /// Whether as much as the primary takes is to be destaged, whatever the foreground.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.draining
            || self.dirty_blocks >= percent_of(self.limit_blocks, URGENT_PERCENT)
            || self.oldest_age >= self.age_max
            || self.quiet >= QUIET
    }
}

/// Decides how many destage writes may be in flight.
#[derive(Clone, Debug)]
pub struct DestagePacer {
    depth_max: u32,
    rotational: bool,
    depth: u32,
    window_start: Instant,
    fastest: Option<Duration>,
    /// Foreground requests that the primary has.
    foreground: u32,
    round: Round,
}

/// Where a round of destage writes is.
#[derive(Clone, Copy, Debug)]
enum Round {
    /// Writes are started until the depth is reached.
    Filling { since: Instant },
    /// The primary works on them.
    Ending { since: Instant },
    /// The primary is left to the foreground, if there is any.
    Resting { until: Instant },
}

impl DestagePacer {
    /// A pacer of a primary that takes `depth_max` writes at once, and is made of disks or is not.
    ///
    /// # Panics
    /// If `depth_max` is 0.
    #[must_use]
    pub fn new(depth_max: u32, rotational: bool) -> Self {
        assert!(depth_max > 0, "a primary takes at least one write at a time");
        let window_start = Instant::default();
        let round = Round::Resting { until: window_start };
        let (depth, fastest, foreground) = (depth_max, None, 0);
        Self { depth_max, rotational, depth, window_start, fastest, foreground, round }
    }

    /// A foreground request is sent to the primary.
    pub fn begin_foreground(&mut self) {
        self.foreground += 1;
    }

    /// A foreground request to the primary completed `now`, after `latency`.
    pub fn end_foreground(&mut self, now: Instant, latency: Duration) {
        self.foreground = self.foreground.saturating_sub(1);
        self.close_windows(now);
        self.fastest = Some(self.fastest.map_or(latency, |fastest| fastest.min(latency)));
    }

    /// Writes that the primary bears beside its foreground requests, as learned so far.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// How many destage writes may be in flight now, those already in flight included.
    pub fn allowance(&mut self, state: &DestageState) -> u32 {
        self.close_windows(state.now);
        if state.dirty_blocks == 0 {
            return 0;
        }
        if state.is_urgent() {
            return self.depth_max;
        }
        let level_full = percent_of(state.limit_blocks, URGENT_PERCENT);
        let dirty = state.dirty_blocks;
        let level = share(dirty, state.target_blocks, level_full, self.depth_max);
        let age_from = state.age_max / 100 * AGEING_PERCENT as u32;
        let age =
            share(nanos(state.oldest_age), nanos(age_from), nanos(state.age_max), self.depth_max);
        let wanted = level.max(age);
        if wanted > 0 && self.rotational {
            self.in_rounds(state, wanted)
        } else {
            wanted.min(self.depth)
        }
    }

    /// Writes allowed in flight to disks, where `wanted` of the most possible are wanted on
    /// average beside the foreground.
    fn in_rounds(&mut self, state: &DestageState, wanted: u32) -> u32 {
        let now = state.now;
        if let Round::Filling { since } = self.round
            && state.in_flight >= self.depth
        {
            self.round = Round::Ending { since };
        }
        if let Round::Ending { since } = self.round {
            if state.in_flight > self.depth / ROUND_LEFT {
                return 0;
            }
            let round = now.since(since).min(REST_MAX);
            let rest = round * (self.depth_max - wanted) / wanted;
            self.round = Round::Resting { until: now + rest.min(REST_MAX) };
        }
        if let Round::Resting { until } = self.round {
            if self.foreground == 0 {
                return wanted.min(self.depth);
            }
            if now < until {
                return 0;
            }
            self.round = Round::Filling { since: now };
        }
        self.depth
    }

    /// Ends the windows that are over by `now` and learns from them.
    fn close_windows(&mut self, now: Instant) {
        let over = now.since(self.window_start).as_nanos() / WINDOW.as_nanos();
        if over == 0 {
            return;
        }
        let target = if self.rotational { TARGET_DISKS } else { TARGET_FLASH };
        let slow = self.fastest.take().is_some_and(|fastest| fastest > target);
        let grown = if slow {
            self.depth = (self.depth / 2).max(1);
            over - 1
        } else {
            over
        };
        let grown = u32::try_from(grown).unwrap_or(u32::MAX);
        self.depth = self.depth.saturating_add(grown).min(self.depth_max);
        self.window_start = now;
    }
}

fn percent_of(value: u64, percent: u64) -> u64 {
    value / 100 * percent + value % 100 * percent / 100
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// 0 up to `from`, then at least 1, growing in proportion to `most` at `to`.
fn share(value: u64, from: u64, to: u64, most: u32) -> u32 {
    if value <= from {
        return 0;
    }
    let (part, whole) = (u128::from(value - from), u128::from(to.saturating_sub(from).max(1)));
    let share = (part * u128::from(most)).div_ceil(whole);
    u32::try_from(share).unwrap_or(u32::MAX).min(most)
}

/// Blocks destaged per second lately: an average over some [`DrainRate::MEMORY`] of destaging.
/// A pause is counted for [`DrainRate::PAUSE_MAX`] at most, so that what the primary can do is
/// remembered while there is nothing to destage.
#[derive(Clone, Debug, Default)]
pub struct DrainRate {
    last: Option<Instant>,
    blocks: f64,
    seconds: f64,
}

impl DrainRate {
    /// Time after which what was seen has lost most of its weight.
    pub const MEMORY: Duration = Duration::from_secs(5);
    /// Longest pause that counts.
    pub const PAUSE_MAX: Duration = Duration::from_secs(1);
    /// Shortest time that a rate is told from: the first few completions say little.
    const SHORTEST: Duration = Duration::from_millis(100);

    /// A rate of which nothing is known.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// `blocks` were destaged, at `now`.
    pub fn completed(&mut self, now: Instant, blocks: u64) {
        if let Some(last) = self.last {
            (self.blocks, self.seconds) = self.faded(now.since(last));
            self.blocks += blocks as f64;
        }
        // What came before the first completion is not known, so its blocks cannot count.
        self.last = self.last.max(Some(now));
    }

    /// Blocks per second; 0 when nothing is known.
    #[must_use]
    pub fn per_second(&self, now: Instant) -> f64 {
        let Some(last) = self.last else {
            return 0.0;
        };
        let (blocks, seconds) = self.faded(now.since(last));
        blocks / seconds.max(Self::SHORTEST.as_secs_f64())
    }

    /// Blocks and seconds after a pause, with the weight that they then have.
    fn faded(&self, pause: Duration) -> (f64, f64) {
        let pause = pause.min(Self::PAUSE_MAX).as_secs_f64();
        let memory = Self::MEMORY.as_secs_f64();
        let weight = memory / (memory + pause);
        (self.blocks * weight, self.seconds * weight + pause)
    }
}
