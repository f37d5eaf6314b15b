//! The write throttle and the drain rate together, against a simulated primary: whether writers
//! at the dirty limit see a steady rate.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::Instant;
use forebay_block::testing::Numbers;
use forebay_policy::{DELAY_MAX, DestagePacer, DestageState, DrainRate, QUIET, WriteThrottle};
use proptest::prelude::*;

/// Length of a step of the simulation.
const TICK: Duration = Duration::from_millis(1);
const TICKS_PER_SECOND: usize = 1000;

/// Writers in closed loops above a cache that is drained at a given rate.
struct Simulation {
    target: u64,
    limit: u64,
    dirty: u64,
    throttle: WriteThrottle,
    drain: DrainRate,
    /// For each writer, when its write is admitted, and its blocks; `None` if its next write is
    /// due.
    writers: Vec<(Option<Instant>, u64)>,
    /// Writers blocked by a full cache.
    blocked: VecDeque<usize>,
    /// Blocks admitted, by second and by writer.
    admitted: Vec<Vec<u64>>,
    highest: u64,
}

impl Simulation {
    fn new(limit: u64, writers: &[u64]) -> Self {
        Self {
            target: limit / 2,
            limit,
            dirty: 0,
            throttle: WriteThrottle::new(),
            drain: DrainRate::new(),
            writers: writers.iter().map(|blocks| (None, *blocks)).collect(),
            blocked: VecDeque::new(),
            admitted: Vec::new(),
            highest: 0,
        }
    }

    /// Runs for `seconds`. `drained` returns the number of blocks that the primary takes in a tick,
    /// given the number of dirty blocks.
    fn run(&mut self, seconds: usize, mut drained: impl FnMut(usize, u64) -> u64) {
        for tick in 0..seconds * TICKS_PER_SECOND {
            let now = Instant(tick as u64 * TICK.as_nanos() as u64);
            if tick % TICKS_PER_SECOND == 0 {
                self.admitted.push(vec![0; self.writers.len()]);
            }
            let blocks = drained(tick, self.dirty).min(self.dirty);
            if blocks > 0 {
                self.dirty -= blocks;
                self.drain.completed(now, blocks);
            }
            while let Some(writer) = self.blocked.front().copied() {
                if !self.admit(writer) {
                    break;
                }
                self.blocked.pop_front();
            }
            for writer in 0..self.writers.len() {
                self.step(writer, now);
            }
            self.highest = self.highest.max(self.dirty);
        }
    }

    /// At most one write per writer and tick: a millisecond is the shortest turnaround.
    fn step(&mut self, writer: usize, now: Instant) {
        if self.blocked.contains(&writer) {
            return;
        }
        let (due, blocks) = self.writers[writer];
        let due = due.unwrap_or_else(|| {
            let rate = self.drain.per_second(now);
            now + self.throttle.delay(now, self.dirty, self.target, self.limit, blocks, rate)
        });
        if due > now {
            self.writers[writer].0 = Some(due);
        } else if !self.admit(writer) {
            self.blocked.push_back(writer);
        }
    }

    fn admit(&mut self, writer: usize) -> bool {
        let blocks = self.writers[writer].1;
        if self.dirty + blocks > self.limit {
            return false;
        }
        self.dirty += blocks;
        self.admitted.last_mut().expect("a second has begun")[writer] += blocks;
        self.writers[writer].0 = None;
        true
    }

    /// Blocks admitted in each second, from second `from` on.
    fn seconds(&self, from: usize) -> Vec<u64> {
        self.admitted[from..].iter().map(|writers| writers.iter().sum()).collect()
    }
}

/// The lowest second as a share of the median one.
fn worst_share(seconds: &[u64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_unstable();
    sorted[0] as f64 / sorted[sorted.len() / 2] as f64
}

#[test]
fn a_steady_drain_gives_steady_writes_below_the_limit() {
    let mut sim = Simulation::new(100_000, &[1; 32]);
    sim.run(60, |_, _| 4);
    let seconds = sim.seconds(20);
    assert!(worst_share(&seconds) >= 0.95, "{seconds:?}");
    assert!(sim.highest < 100_000, "the level settled before the limit: {}", sim.highest);
    let mean = seconds.iter().sum::<u64>() / seconds.len() as u64;
    assert!((3800..=4200).contains(&mean), "writes as fast as the drain: {mean}");
}

#[test]
fn a_drain_in_bursts_gives_steady_writes() {
    let mut sim = Simulation::new(50_000, &[16; 8]);
    // Bursts of work, a tenth of a second long, then pauses of up to two tenths.
    let (mut numbers, mut until, mut busy) = (Numbers::new(7), 0, false);
    sim.run(90, move |tick, _| {
        if tick >= until {
            busy = !busy;
            until = tick + if busy { 100 } else { 1 + numbers.below(200) as usize };
        }
        if busy { 1 + numbers.below(9) } else { 0 }
    });
    let seconds = sim.seconds(30);
    assert!(worst_share(&seconds) >= 0.8, "{seconds:?}");
    assert!(sim.highest < 50_000, "the level settled before the limit: {}", sim.highest);
}

/// The pacer decides the drain rate, and the primary also serves four foreground requests at a
/// time, whose latency the pacer measures. It allows few writes below 90 % of the limit and all
/// above, just where the throttle settles.
#[test]
fn a_drain_that_the_pacer_holds_back_gives_steady_writes() {
    for served_per_ms in [2.0, 10.0, 40.0] {
        let limit = 60_000;
        let mut sim = Simulation::new(limit, &[8; 16]);
        let mut pacer = DestagePacer::new(64, false, Arc::default());
        let mut left = 0.0;
        sim.run(120, |tick, dirty_blocks| {
            let now = Instant(tick as u64 * TICK.as_nanos() as u64);
            let depth = f64::from(pacer.allowance(&DestageState {
                now,
                dirty_blocks,
                target_blocks: limit / 2,
                limit_blocks: limit,
                oldest_age: Duration::ZERO,
                age_max: Duration::from_secs(3600),
                quiet: Duration::ZERO,
                quiet_from: Some(QUIET),
                draining: false,
                drain_asked: false,
                in_flight: 0,
            }));
            let latency = (depth + 4.0) / served_per_ms * 1e6;
            pacer.end_foreground(now, Duration::from_nanos(latency as u64));
            left += served_per_ms * depth / (depth + 4.0);
            let blocks = left as u64;
            left -= blocks as f64;
            blocks
        });
        let seconds = sim.seconds(60);
        assert!(worst_share(&seconds) >= 0.8, "{served_per_ms} a millisecond: {seconds:?}");
        assert!(sim.highest < limit, "the level settled before the limit: {}", sim.highest);
    }
}

#[test]
fn nobody_starves_beside_larger_writes() {
    let mut sim = Simulation::new(50_000, &[1, 1, 1, 1, 64, 64, 256, 256]);
    sim.run(60, |_, _| 5);
    for (second, writers) in sim.admitted.iter().enumerate().skip(20) {
        assert!(writers.iter().all(|blocks| *blocks > 0), "second {second}: {writers:?}");
    }
    assert!(worst_share(&sim.seconds(20)) >= 0.8, "{:?}", sim.seconds(20));
}

#[test]
fn a_drain_that_stops_for_a_second_is_recovered_from() {
    let mut sim = Simulation::new(100_000, &[4; 32]);
    sim.run(90, |tick, _| if (40_000..41_000).contains(&tick) { 0 } else { 10 });
    assert!(sim.highest <= 100_000, "the limit held");
    // The stall is spread, not passed on: writers slow down for a while, but none stops.
    let seconds = sim.seconds(20);
    assert!(worst_share(&seconds) >= 0.7, "{seconds:?}");
    assert!(worst_share(&sim.seconds(50)) >= 0.95, "{:?}", sim.seconds(45));
}

#[test]
fn a_drain_never_seen_does_not_stop_writers_before_the_limit() {
    let mut sim = Simulation::new(10_000, &[1; 4]);
    sim.run(120, |_, _| 0);
    assert_eq!(sim.dirty, 10_000, "all that fits got in");
    // When the drain finally begins, all of them continue.
    sim.run(10, |_, _| 1);
    let last = sim.admitted.last().expect("ten seconds ran");
    assert!(last.iter().all(|blocks| *blocks > 0), "{last:?}");
}

#[test]
fn below_sixty_percent_or_a_fifth_above_the_target_nothing_waits() {
    for (target, free) in [(0, 600), (500, 600), (800, 840), (900, 920)] {
        let mut throttle = WriteThrottle::new();
        let mut delay =
            |dirty, blocks| throttle.delay(Instant(0), dirty, target, 1000, blocks, 1.0);
        for dirty in 0..=free {
            assert_eq!(delay(dirty, 1_000_000), Duration::ZERO, "{dirty}, target {target}");
        }
        delay(free + 1, 1_000_000);
        assert_eq!(delay(free + 1, 1), DELAY_MAX, "target {target}");
    }
}

#[test]
fn a_high_target_gives_steady_writes_below_the_limit() {
    for target in [70_000, 80_000, 90_000] {
        let mut sim = Simulation { target, ..Simulation::new(100_000, &[1; 32]) };
        sim.run(60, |_, _| 4);
        let seconds = sim.seconds(30);
        assert!(worst_share(&seconds) >= 0.95, "{target}: {seconds:?}");
        assert!(sim.highest < 100_000, "the level settled before the limit: {}", sim.highest);
    }
}

#[test]
fn the_nearer_the_limit_the_longer_the_delay() {
    let delay_at = |dirty| {
        let mut throttle = WriteThrottle::new();
        throttle.delay(Instant(0), dirty, 500, 1000, 100, 1000.0);
        throttle.delay(Instant(0), dirty, 500, 1000, 100, 1000.0)
    };
    let delays: Vec<_> = (601..=1000).map(delay_at).collect();
    assert!(delays.windows(2).all(|pair| pair[0] < pair[1]), "{delays:?}");
    assert!(delays[0] < Duration::from_millis(1), "it begins smoothly: {:?}", delays[0]);
    let at_ninety = delay_at(900).as_secs_f64();
    assert!((at_ninety - 0.1).abs() < 1e-6, "as fast as the drain at 90 %: {at_ninety}");
    let at_limit = delay_at(1000).as_secs_f64();
    assert!((at_limit - 0.1 / 0.9).abs() < 1e-6, "0.9 of the drain at the limit: {at_limit}");
}

#[test]
fn the_drain_rate_is_remembered_over_a_pause() {
    let mut drain = DrainRate::new();
    assert_eq!(drain.per_second(Instant(5)), 0.0);
    let mut now = Instant(0);
    for _ in 0..2000 {
        now = now + Duration::from_millis(10);
        drain.completed(now, 20);
    }
    let rate = drain.per_second(now);
    assert!((1950.0..2050.0).contains(&rate), "{rate}");
    let after_an_hour = drain.per_second(now + Duration::from_secs(3600));
    assert!(after_an_hour > 0.6 * rate, "{after_an_hour}");
}

proptest! {
    #[test]
    fn any_input_gives_a_bounded_delay(
        calls in prop::collection::vec(
            (any::<u64>(), any::<[u64; 3]>(), any::<u64>(), any::<f64>()), 1..40),
    ) {
        let mut throttle = WriteThrottle::new();
        for (now, [dirty, target, limit], blocks, rate) in calls {
            let delay = throttle.delay(Instant(now), dirty, target, limit, blocks, rate);
            prop_assert!(delay <= DELAY_MAX);
        }
    }
}
