//! The rules of the destage pacer, one by one, and properties that hold for any input.

use std::sync::Arc;
use std::time::Duration;

use forebay_block::Instant;
use forebay_policy::{DestageCause, DestagePacer, DestageState, QUIET};
use proptest::prelude::*;

const DEPTH: u32 = 32;
const MS: u64 = 1_000_000;

/// A busy primary and a cache with nothing urgent in it.
fn calm(now_ms: u64) -> DestageState {
    DestageState {
        now: Instant(now_ms * MS),
        dirty_blocks: 400,
        target_blocks: 500,
        limit_blocks: 1000,
        oldest_age: Duration::from_secs(1),
        age_max: Duration::from_secs(100),
        quiet: Duration::ZERO,
        quiet_from: Some(QUIET),
        draining: false,
        drain_asked: false,
        in_flight: 0,
    }
}

fn pacer() -> DestagePacer {
    DestagePacer::new(DEPTH, false, Arc::default())
}

/// One foreground request in every window of `windows`, starting at `from_ms`.
fn foreground(pacer: &mut DestagePacer, from_ms: u64, windows: u64, latency: Duration) -> u64 {
    for window in 0..windows {
        pacer.end_foreground(Instant((from_ms + window * 100) * MS), latency);
    }
    from_ms + windows * 100
}

const SLOW: Duration = Duration::from_millis(3);
const FAST: Duration = Duration::from_millis(1);

#[test]
fn nothing_urgent_and_a_busy_primary_destages_nothing() {
    assert_eq!(pacer().allowance(&calm(1000)), 0);
}

#[test]
fn nothing_dirty_destages_nothing_even_when_draining() {
    let state = DestageState { dirty_blocks: 0, draining: true, ..calm(1000) };
    assert_eq!(pacer().allowance(&state), 0);
}

#[test]
fn a_drain_and_a_quiet_primary_take_the_full_depth() {
    let mut pacer = pacer();
    let now = foreground(&mut pacer, 1000, 20, SLOW);
    assert_eq!(pacer.allowance(&DestageState { draining: true, ..calm(now) }), DEPTH);
    let quiet = |ms| DestageState { quiet: Duration::from_millis(ms), ..calm(now) };
    assert_eq!(pacer.allowance(&quiet(4_999)), 0);
    assert_eq!(pacer.allowance(&quiet(5_000)), DEPTH);
}

/// A drain, and writes at the dirty limit, leave disks to the reads of clients for a part of the
/// time: found by `forebay-bench drain`, in which reads waited for a second.
#[test]
fn reads_of_disks_wait_for_a_short_round_of_writes_only() {
    let asked = |now, in_flight| DestageState { drain_asked: true, in_flight, ..calm(now) };
    let full = |now, in_flight| DestageState { dirty_blocks: 950, in_flight, ..calm(now) };
    for (state, pause) in [(&asked as &dyn Fn(u64, u32) -> DestageState, 40), (&full, 13)] {
        let mut pacer = DestagePacer::new(DEPTH, true, Arc::default());
        assert_eq!(pacer.allowance(&state(1000, 0)), DEPTH, "nobody reads");
        pacer.begin_foreground();
        assert_eq!(pacer.allowance(&state(1001, 0)), DEPTH / 4, "a short round");
        assert_eq!(pacer.allowance(&state(1041, DEPTH / 4)), 0, "it is full");
        assert_eq!(pacer.allowance(&state(1041, 2)), 0, "the pause begins");
        assert_eq!(pacer.allowance(&state(1040 + pause, 2)), 0, "{pause}");
        assert_eq!(pacer.allowance(&state(1043 + pause, 2)), DEPTH / 4, "{pause}");
        pacer.end_foreground(Instant(1100 * MS), FAST);
        assert_eq!(pacer.allowance(&state(1200, 0)), DEPTH / 4, "there was a read just now");
        assert_eq!(pacer.allowance(&state(1400, 0)), DEPTH);
    }
    let mut pacer = DestagePacer::new(DEPTH, true, Arc::default());
    pacer.begin_foreground();
    let must = DestageState { draining: true, ..asked(1000, 0) };
    assert_eq!(pacer.allowance(&must), DEPTH, "something waits for it");
}

#[test]
fn the_time_from_which_a_primary_is_quiet_is_a_setting() {
    let mut pacer = pacer();
    let quiet = |seconds, quiet_from: Option<u64>| DestageState {
        quiet: Duration::from_secs(seconds),
        quiet_from: quiet_from.map(Duration::from_secs),
        ..calm(1000)
    };
    assert_eq!(pacer.allowance(&quiet(59, Some(60))), 0);
    assert_eq!(pacer.allowance(&quiet(60, Some(60))), DEPTH);
    assert_eq!(quiet(60, Some(60)).cause(), DestageCause::Idle);
    let never = quiet(1 << 30, None);
    assert_eq!((pacer.allowance(&never), never.cause()), (0, DestageCause::Level));
}

#[test]
fn the_latency_to_aim_at_is_a_setting() {
    let depth = |target: Option<u64>, rotational| {
        let mut pacer = DestagePacer::new(DEPTH, rotational, Arc::default());
        pacer.set_target(target.map(Duration::from_millis));
        foreground(&mut pacer, 1000, 20, Duration::from_millis(20));
        pacer.depth()
    };
    assert_eq!((depth(None, false), depth(Some(10), false), depth(Some(30), false)), (1, 1, DEPTH));
    assert_eq!((depth(None, true), depth(Some(10), true)), (DEPTH, 1));
}

#[test]
fn the_level_grows_in_proportion_from_the_target_to_ninety_percent() {
    let mut pacer = pacer();
    let mut at = |dirty_blocks| pacer.allowance(&DestageState { dirty_blocks, ..calm(1000) });
    assert_eq!((at(500), at(501)), (0, 1));
    assert_eq!(at(700), DEPTH / 2);
    assert_eq!((at(899), at(900), at(1000)), (DEPTH, DEPTH, DEPTH));
}

#[test]
fn age_begins_at_four_fifths_and_has_its_way_at_the_limit() {
    let mut pacer = pacer();
    let now = foreground(&mut pacer, 1000, 20, SLOW);
    let mut at = |seconds| {
        let oldest_age = Duration::from_secs(seconds);
        pacer.allowance(&DestageState { oldest_age, ..calm(now) })
    };
    assert_eq!((at(80), at(81), at(99)), (0, 1, 1), "the primary bears one write now");
    assert_eq!(at(100), DEPTH, "the write-cache depth holds, whatever the latency");
    let mut rested = self::pacer();
    let oldest_age = Duration::from_secs(90);
    assert_eq!(rested.allowance(&DestageState { oldest_age, ..calm(1000) }), DEPTH / 2);
}

#[test]
fn a_depth_of_no_time_at_all_destages_at_once() {
    let state = DestageState { age_max: Duration::ZERO, oldest_age: Duration::ZERO, ..calm(1) };
    assert_eq!(pacer().allowance(&state), DEPTH);
}

#[test]
fn slow_foreground_halves_and_fast_foreground_adds_one() {
    let mut pacer = pacer();
    let mut now = foreground(&mut pacer, 1000, 1, FAST);
    for expected in [16, 8, 4, 2, 1, 1] {
        now = foreground(&mut pacer, now, 1, SLOW);
        pacer.allowance(&calm(now));
        assert_eq!(pacer.depth(), expected);
    }
    for expected in [2, 3, 4] {
        now = foreground(&mut pacer, now, 1, FAST);
        pacer.allowance(&calm(now));
        assert_eq!(pacer.depth(), expected);
    }
}

#[test]
fn one_fast_request_shows_that_slow_ones_are_not_the_queue() {
    let mut pacer = pacer();
    let now = foreground(&mut pacer, 1000, 1, FAST);
    for (at, latency) in [(10, SLOW), (20, FAST), (30, SLOW)] {
        pacer.end_foreground(Instant((now + at) * MS), latency);
    }
    pacer.allowance(&calm(now + 150));
    assert_eq!(pacer.depth(), DEPTH);
}

#[test]
fn urgency_by_level_overrides_latency() {
    let mut pacer = pacer();
    let now = foreground(&mut pacer, 1000, 20, SLOW);
    let mut at = |dirty_blocks| pacer.allowance(&DestageState { dirty_blocks, ..calm(now) });
    assert_eq!((at(899), at(900)), (1, DEPTH));
}

/// A queueing primary: a foreground request waits for the destage writes in flight. The depth
/// settles where the latency meets the target.
#[test]
fn the_depth_settles_where_latency_meets_the_target() {
    let mut pacer = pacer();
    let service = Duration::from_micros(200);
    let mut depths = Vec::new();
    for request in 0..20_000u64 {
        let now = Instant((1000 + request) * MS);
        let in_flight = pacer.allowance(&DestageState { dirty_blocks: 899, now, ..calm(0) });
        pacer.end_foreground(now, service * (1 + in_flight));
        depths.push(in_flight);
    }
    let settled = &depths[5000..];
    let mean = settled.iter().sum::<u32>() / settled.len() as u32;
    // Nine writes of 200 us each plus the request itself take the target of 2 ms.
    assert!((6..=10).contains(&mean), "mean depth {mean}");
    assert!(settled.iter().all(|depth| (4..=10).contains(depth)));
}

/// Disks that finish each round after 10 ms, polled every millisecond for a second. Returns when
/// writes were started, and their number.
fn rounds(dirty_blocks: u64) -> Vec<(u64, u32)> {
    let mut pacer = DestagePacer::new(DEPTH, true, Arc::default());
    pacer.begin_foreground();
    let mut started = Vec::new();
    for ms in 0..1000u64 {
        let recent = |&&(at, _): &&(u64, u32)| at + 10 > ms;
        let in_flight = started.iter().filter(recent).map(|&(_, writes)| writes).sum();
        let now = Instant((1000 + ms) * MS);
        let state = DestageState { now, dirty_blocks, in_flight, ..calm(0) };
        let writes = pacer.allowance(&state).saturating_sub(in_flight);
        if writes > 0 {
            started.push((ms, writes));
        }
    }
    started
}

#[test]
fn disks_get_whole_rounds_with_rests_between() {
    // Halfway from the target to nine tenths of the limit, a quarter of the way, all of the way.
    for (dirty_blocks, every) in [(700, 20), (600, 40), (899, 10)] {
        let rounds = rounds(dirty_blocks);
        assert!(rounds.iter().all(|&(_, writes)| writes == DEPTH), "{rounds:?}");
        let apart = |pair: &[(u64, u32)]| pair[1].0 - pair[0].0 == every;
        assert!(rounds.len() >= 24 && rounds.windows(2).all(apart), "{rounds:?}");
    }
}

#[test]
fn disks_without_foreground_get_what_is_wanted_and_no_rest() {
    let mut pacer = DestagePacer::new(DEPTH, true, Arc::default());
    let mut at = |in_flight| {
        let state = DestageState { dirty_blocks: 700, in_flight, ..calm(1000) };
        pacer.allowance(&state)
    };
    assert_eq!((at(0), at(DEPTH / 2), at(DEPTH)), (DEPTH / 2, DEPTH / 2, DEPTH / 2));
}

#[test]
fn foreground_of_one_shard_counts_for_all() {
    let shared = Arc::default();
    let pacers = || DestagePacer::new(DEPTH, true, Arc::clone(&shared));
    let (mut own, mut other) = (pacers(), pacers());
    let drain = |now| DestageState { drain_asked: true, ..calm(now) };
    assert_eq!(own.allowance(&drain(1000)), DEPTH);
    other.begin_foreground();
    assert_eq!(own.allowance(&drain(1001)), DEPTH / 4, "a short round");
    other.end_foreground(Instant(1002 * 1_000_000), Duration::from_millis(1));
    assert_eq!(own.allowance(&drain(1201)), DEPTH / 4, "there may be more");
    assert_eq!(own.allowance(&drain(1203)), DEPTH);
    other.set_awaited(Instant(1204 * 1_000_000), true);
    other.set_awaited(Instant(1204 * 1_000_000), true);
    assert_eq!(own.allowance(&drain(1500)), DEPTH / 4);
    other.set_awaited(Instant(1500 * 1_000_000), false);
    assert_eq!(own.allowance(&drain(1701)), DEPTH);
}

#[test]
fn disks_that_are_slow_beside_a_round_get_smaller_ones() {
    let mut pacer = DestagePacer::new(DEPTH, true, Arc::default());
    let now = foreground(&mut pacer, 1000, 2, Duration::from_millis(76));
    pacer.begin_foreground();
    let state = DestageState { dirty_blocks: 700, ..calm(now) };
    assert_eq!(pacer.allowance(&state), DEPTH / 4);
    let at = |in_flight| DestageState { in_flight, ..state };
    assert_eq!(pacer.allowance(&at(DEPTH / 4)), 0, "the round is full");
    assert_eq!(pacer.allowance(&at(DEPTH / 4 - 1)), 0, "and has not ended");
}

proptest! {
    #[test]
    fn any_state_gives_an_allowance_within_the_depth(
        numbers in any::<[u64; 4]>(),
        times in any::<[u64; 3]>(),
        (draining, drain_asked, is_quiet) in any::<(bool, bool, bool)>(),
        foreground in any::<bool>(),
        latencies in prop::collection::vec((any::<u64>(), any::<u64>()), 0..20),
        depth_max in 1..=u32::MAX,
        in_flight in any::<u32>(),
    ) {
        let mut pacer = DestagePacer::new(depth_max, true, Arc::default());
        for (now, latency) in latencies {
            pacer.end_foreground(Instant(now), Duration::from_nanos(latency));
        }
        if foreground {
            pacer.begin_foreground();
        }
        let [now, dirty_blocks, target_blocks, limit_blocks] = numbers;
        let [oldest_age, age_max, quiet] = times.map(Duration::from_nanos);
        let now = Instant(now);
        let state = DestageState {
            now, dirty_blocks, target_blocks, limit_blocks, oldest_age, age_max, quiet, draining,
            quiet_from: is_quiet.then_some(QUIET), drain_asked, in_flight,
        };
        // A round begins, is full, and has ended; the longest rest is over.
        let mut most = 0;
        for (in_flight, later) in [(0, 0), (u32::MAX, 0), (0, 0), (0, 3)] {
            let now = now + Duration::from_secs(later);
            let allowance = pacer.allowance(&DestageState { in_flight, now, ..state });
            prop_assert!(allowance <= depth_max);
            most = most.max(allowance);
        }
        if dirty_blocks > limit_blocks || (drain_asked && dirty_blocks > 0) {
            prop_assert!(most > 0, "the limit and a drain must be served");
        }
        let allowance = pacer.allowance(&state);
        prop_assert!(allowance <= depth_max);
        prop_assert!((1..=depth_max).contains(&pacer.depth()));
        if draining && dirty_blocks > 0 {
            prop_assert_eq!(allowance, depth_max, "something waits for it");
        }
    }

    #[test]
    fn more_dirty_blocks_never_mean_less_destaging(a in 1u64..1200, b in 1u64..1200) {
        let mut pacer = pacer();
        let mut at = |dirty_blocks| pacer.allowance(&DestageState { dirty_blocks, ..calm(1000) });
        prop_assert!(at(a.min(b)) <= at(a.max(b)));
    }
}
