//! The number of destage writes allowed in flight, and the recent destage rate.
//!
//! Blocks are destaged because they are old, because there are many, or because the primary is
//! idle; the most urgent of the three determines the number of writes wanted. The number that the
//! primary tolerates during foreground requests is learned from their latency, as CoDel and the
//! Linux kernel's writeback throttling (blk-wbt) do. In windows of 100 ms: if even the fastest
//! request took longer than the target, the number is halved; otherwise it grows by one. The engine
//! decides which blocks are written, and in which order.
//!
//! Flash gets a fixed number of writes at a time, and so do otherwise idle disks. Disks with
//! foreground requests get rounds: as many neighboring writes at once as they tolerate, which one
//! pass of the heads serves, then a rest, so that rounds take the wanted share of the time. The
//! same writes one by one would move the heads to and fro between them and every foreground
//! request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use forebay_block::Instant;

/// Length of the windows over which the fastest foreground request is measured.
const WINDOW: Duration = Duration::from_millis(100);
/// Time without client requests after which the primary counts as idle, if nothing else is set.
/// Databases pause for one to three seconds when their log is full; destaging everything in such a
/// pause makes the next requests wait.
pub const QUIET: Duration = Duration::from_secs(5);
/// Share of the limit, in percent, from which destaging no longer waits for better opportunities.
const URGENT_PERCENT: u64 = 90;
/// Quarters of the primary's time that destaging takes beside clients' requests from there on, and
/// for a drain.
const FULL_QUARTERS: u32 = 3;
const DRAIN_QUARTERS: u32 = 2;
/// Divisor of the depth of a round that is so short that a request can wait for its end.
const SHORT_ROUND: u32 = 4;
/// Time since the last foreground request from which there are none.
const FOREGROUND_OVER: Duration = Duration::from_millis(200);
/// Share of the maximum age, in percent, at which destaging for age begins.
const AGEING_PERCENT: u64 = 80;
/// Foreground latency that destaging aims at on a primary without moving parts.
pub const LATENCY_OF_SSDS: Duration = Duration::from_millis(2);
/// Foreground latency that destaging aims at on a primary of disks.
pub const LATENCY_OF_DISKS: Duration = Duration::from_millis(75);
/// Divisor of the depth: a round ends when at most `depth / ROUND_LEFT` writes are in flight.
/// Waiting for all would take long, since a drive may hold back the last few.
const ROUND_LEFT: u32 = 4;
/// Resolution in which causes are compared.
const PARTS: u32 = 1 << 16;
/// Maximum rest between two rounds.
const REST_MAX: Duration = Duration::from_secs(1);

/// Input of an allowance decision.
#[derive(Clone, Copy, Debug)]
pub struct DestageState {
    /// Current time.
    pub now: Instant,
    /// Blocks newer than on the primary.
    pub dirty_blocks: u64,
    /// Dirty blocks below which their number causes no destaging; usually half the limit.
    pub target_blocks: u64,
    /// Maximum number of dirty blocks.
    pub limit_blocks: u64,
    /// Time since the oldest dirty block was written.
    pub oldest_age: Duration,
    /// Maximum age of a dirty block: the write-cache depth.
    pub age_max: Duration,
    /// Time since a client last waited for anything.
    pub quiet: Duration,
    /// That time from which the primary counts as idle; never when `None`.
    pub quiet_from: Option<Duration>,
    /// Whether something waits for everything to be destaged, so that this goes first.
    pub draining: bool,
    /// Whether a drain was asked for: everything is destaged now, beside requests of clients.
    pub drain_asked: bool,
    /// Destage writes in flight.
    pub in_flight: u32,
}

/// Why blocks are destaged during the usual service.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DestageCause {
    /// They are old.
    Age,
    /// There are many.
    Level,
    /// No client waits for anything.
    Idle,
}

impl DestageState {
    /// The most urgent cause, whether or not a drain is in progress.
    #[must_use]
    pub fn cause(&self) -> DestageCause {
        let level_full = percent_of(self.limit_blocks, URGENT_PERCENT);
        if self.oldest_age >= self.age_max {
            return DestageCause::Age;
        }
        if self.dirty_blocks < level_full && self.is_quiet() {
            return DestageCause::Idle;
        }
        let (level, age) = self.wishes(PARTS);
        if age > level { DestageCause::Age } else { DestageCause::Level }
    }

    /// The writes that the number of dirty blocks and their age call for, out of `most`.
    fn wishes(&self, most: u32) -> (u32, u32) {
        let level_full = percent_of(self.limit_blocks, URGENT_PERCENT);
        let level = share(self.dirty_blocks, self.target_blocks, level_full, most);
        let age_from = self.age_max / 100 * AGEING_PERCENT as u32;
        let age = share(nanos(self.oldest_age), nanos(age_from), nanos(self.age_max), most);
        (level, age)
    }

    /// Whether blocks go as they come, without waiting for neighbors or rewrites.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.goes_first() || self.is_full() || self.drain_asked
    }

    /// Whether to destage as fast as the primary allows, regardless of the foreground.
    fn goes_first(&self) -> bool {
        self.draining || self.oldest_age >= self.age_max || self.is_quiet()
    }

    /// Whether nearly as many blocks are dirty as may be.
    fn is_full(&self) -> bool {
        self.dirty_blocks >= percent_of(self.limit_blocks, URGENT_PERCENT)
    }

    /// The writes, out of `most`, that are wanted on average beside the requests of clients, so
    /// that neither starve.
    fn least(&self, most: u32) -> u32 {
        match (self.is_full(), self.drain_asked) {
            (true, _) => (most / 4 * FULL_QUARTERS).max(1),
            (false, true) => (most / 4 * DRAIN_QUARTERS).max(1),
            (false, false) => 0,
        }
    }

    fn is_quiet(&self) -> bool {
        self.quiet_from.is_some_and(|from| self.quiet >= from)
    }
}

/// The foreground requests at one primary, of all shards together: destages of one shard delay the
/// requests of another as much as its own.
#[derive(Debug, Default)]
pub struct Foreground {
    in_flight: AtomicU32,
    /// When the last one ended, in nanoseconds.
    ended_at: AtomicU64,
}

impl Foreground {
    fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    fn end(&self, now: Instant) {
        let less = |count: u32| count.checked_sub(1);
        let _ = self.in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        self.ended_at.fetch_max(now.0, Ordering::Relaxed);
    }

    fn exists(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) > 0
    }

    fn is_over(&self, now: Instant) -> bool {
        let ended_at = Instant(self.ended_at.load(Ordering::Relaxed));
        !self.exists() && now.since(ended_at) > FOREGROUND_OVER
    }
}

/// Decides how many destage writes may be in flight.
#[derive(Debug)]
pub struct DestagePacer {
    depth_max: u32,
    rotational: bool,
    /// Foreground latency above which the primary has too much to do.
    target: Duration,
    depth: u32,
    window_start: Instant,
    fastest: Option<Duration>,
    foreground: Arc<Foreground>,
    /// Whether something else than a request waits for the primary.
    is_awaited: bool,
    round: Round,
}

/// The phase of a round of destage writes.
#[derive(Clone, Copy, Debug)]
enum Round {
    /// Writes are started until the depth is reached.
    Filling { since: Instant },
    /// The round is full; the primary works it off.
    Ending { since: Instant },
    /// The primary is left to foreground requests, if there are any.
    Resting { until: Instant },
}

impl DestagePacer {
    /// A pacer for a primary that takes up to `depth_max` writes at once; `rotational` if it has
    /// disks. `foreground` is shared by the pacers of all shards.
    ///
    /// # Panics
    /// If `depth_max` is 0.
    #[must_use]
    pub fn new(depth_max: u32, rotational: bool, foreground: Arc<Foreground>) -> Self {
        assert!(depth_max > 0, "a primary takes at least one write at a time");
        let window_start = Instant::default();
        let round = Round::Resting { until: window_start };
        let (depth, fastest, is_awaited) = (depth_max, None, false);
        let target = if rotational { LATENCY_OF_DISKS } else { LATENCY_OF_SSDS };
        Self {
            depth_max,
            rotational,
            target,
            depth,
            window_start,
            fastest,
            foreground,
            is_awaited,
            round,
        }
    }

    /// Sets the foreground latency to aim at; `None` is that of the kind of primary.
    pub fn set_target(&mut self, target: Option<Duration>) {
        let usual = if self.rotational { LATENCY_OF_DISKS } else { LATENCY_OF_SSDS };
        self.target = target.unwrap_or(usual);
    }

    /// Records that a foreground request is sent to the primary.
    pub fn begin_foreground(&mut self) {
        self.foreground.begin();
    }

    /// Records whether blocks of the volume on their way to the primary are waited for, which
    /// counts as a foreground request.
    pub fn set_awaited(&mut self, now: Instant, is_awaited: bool) {
        match (self.is_awaited, is_awaited) {
            (false, true) => self.foreground.begin(),
            (true, false) => self.foreground.end(now),
            _ => {}
        }
        self.is_awaited = is_awaited;
    }

    /// Whether they are.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.is_awaited
    }

    /// Records that a foreground request to the primary completed at `now`, after `latency`.
    pub fn end_foreground(&mut self, now: Instant, latency: Duration) {
        self.foreground.end(now);
        self.close_windows(now);
        self.fastest = Some(self.fastest.map_or(latency, |fastest| fastest.min(latency)));
    }

    /// Destage writes that the primary tolerates during foreground requests, as learned so far.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Maximum number of destage writes in flight now, including those already in flight.
    pub fn allowance(&mut self, state: &DestageState) -> u32 {
        self.close_windows(state.now);
        if state.dirty_blocks == 0 {
            return 0;
        }
        if state.goes_first() || state.is_urgent() && self.foreground.is_over(state.now) {
            return self.depth_max;
        }
        let (level, age) = state.wishes(self.depth_max);
        let least = state.least(self.depth_max);
        let wanted = level.max(age).max(least);
        match (wanted, self.rotational) {
            (0, _) => 0,
            (_, true) if least > 0 => {
                let short = (self.depth_max / SHORT_ROUND).max(1);
                self.in_rounds(state, least, self.depth.min(short))
            }
            (_, true) => self.in_rounds(state, wanted, self.depth),
            (_, false) if state.is_full() => self.depth_max,
            (_, false) => wanted.min(self.depth.max(least / 2)),
        }
    }

    /// Maximum number of writes in flight to disks, if `wanted` out of `depth_max` are wanted on
    /// average during foreground load, and rounds of `depth` writes.
    fn in_rounds(&mut self, state: &DestageState, wanted: u32, depth: u32) -> u32 {
        let now = state.now;
        if let Round::Filling { since } = self.round
            && state.in_flight >= depth
        {
            self.round = Round::Ending { since };
        }
        if let Round::Ending { since } = self.round {
            if state.in_flight > depth / ROUND_LEFT {
                return 0;
            }
            let round = now.since(since).min(REST_MAX);
            let rest = round * (self.depth_max - wanted) / wanted;
            self.round = Round::Resting { until: now + rest.min(REST_MAX) };
        }
        if let Round::Resting { until } = self.round {
            if !self.foreground.exists() {
                return wanted.min(depth);
            }
            if now < until {
                return 0;
            }
            self.round = Round::Filling { since: now };
        }
        depth
    }

    /// Closes the windows that ended by `now`, and adapts the depth.
    fn close_windows(&mut self, now: Instant) {
        let over = now.since(self.window_start).as_nanos() / WINDOW.as_nanos();
        if over == 0 {
            return;
        }
        let slow = self.fastest.take().is_some_and(|fastest| fastest > self.target);
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

/// 0 up to `from`, then at least 1, growing linearly to `most` at `to`.
fn share(value: u64, from: u64, to: u64, most: u32) -> u32 {
    if value <= from {
        return 0;
    }
    let (part, whole) = (u128::from(value - from), u128::from(to.saturating_sub(from).max(1)));
    let share = (part * u128::from(most)).div_ceil(whole);
    u32::try_from(share).unwrap_or(u32::MAX).min(most)
}

/// Recent destage rate in blocks per second: an average over about [`DrainRate::MEMORY`] of
/// destaging. A pause counts as [`DrainRate::PAUSE_MAX`] at most, so that the primary's rate is
/// remembered while there is nothing to destage.
#[derive(Clone, Debug, Default)]
pub struct DrainRate {
    last: Option<Instant>,
    blocks: f64,
    seconds: f64,
}

impl DrainRate {
    /// Time after which a measurement has lost most of its weight.
    pub const MEMORY: Duration = Duration::from_secs(5);
    /// Maximum length of a pause that counts.
    pub const PAUSE_MAX: Duration = Duration::from_secs(1);
    /// Minimum time before a rate is computed: the first few completions say little.
    const SHORTEST: Duration = Duration::from_millis(100);

    /// A rate without measurements.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that `blocks` were destaged, at `now`.
    pub fn completed(&mut self, now: Instant, blocks: u64) {
        if let Some(last) = self.last {
            (self.blocks, self.seconds) = self.faded(now.since(last));
            self.blocks += blocks as f64;
        }
        // The time before the first completion is unknown, so its blocks cannot count.
        self.last = self.last.max(Some(now));
    }

    /// Blocks per second; 0 if unknown.
    #[must_use]
    pub fn per_second(&self, now: Instant) -> f64 {
        let Some(last) = self.last else {
            return 0.0;
        };
        let (blocks, seconds) = self.faded(now.since(last));
        blocks / seconds.max(Self::SHORTEST.as_secs_f64())
    }

    /// The remembered blocks and seconds, weighted down after `pause`.
    fn faded(&self, pause: Duration) -> (f64, f64) {
        let pause = pause.min(Self::PAUSE_MAX).as_secs_f64();
        let memory = Self::MEMORY.as_secs_f64();
        let weight = memory / (memory + pause);
        (self.blocks * weight, self.seconds * weight + pause)
    }
}
