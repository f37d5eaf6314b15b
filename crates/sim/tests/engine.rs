//! The real engine and volume in the simulator: the seeds that once failed, some others, the
//! systematic crashes of the shortest scripts, and every planted bug.

use std::panic::{AssertUnwindSafe, catch_unwind};

use forebay_engine::Mode;
use forebay_sim::config::{
    MIXED_SEEDS, ORDERED_SEEDS, RESTLESS_SEEDS, STEERED_SEEDS, STRIPED_SEEDS,
};
use forebay_sim::errors::Script;
use forebay_sim::planted::Bug;
use forebay_sim::runner::{Keep, proves, run_seed, seeds_for};
use forebay_sim::shard::real;
use forebay_sim::systematic::{crash_everywhere, scripts};

/// Number of seeds in addition to those that once failed.
const SEEDS: u64 = 150;
/// Most seeds that it may take to find a planted bug.
const PLANTED_SEEDS: usize = 4000;

fn known_seeds() -> Vec<u64> {
    let seed = |line: &str| line.split_whitespace().next()?.parse().ok();
    include_str!("../seeds.txt").lines().filter_map(seed).collect()
}

fn check(seed: u64) -> u64 {
    match run_seed(seed, &Keep::default(), None, false) {
        Ok(report) => report.tally.crashes,
        Err(failure) => panic!("seed {seed} failed {failure}; forebay-sim replay {seed}"),
    }
}

#[test]
fn seeds_that_once_failed_hold() {
    let seeds = known_seeds();
    assert!(!seeds.is_empty());
    seeds.into_iter().for_each(|seed| {
        check(seed);
    });
}

#[test]
fn some_seeds_hold() {
    let crashes: u64 = (0..SEEDS).map(check).sum();
    assert!(crashes > SEEDS, "only {crashes} crashes");
}

/// The cache device is lost under ordered volumes.
#[test]
fn the_primaries_of_ordered_volumes_are_left_at_one_moment() {
    (ORDERED_SEEDS..ORDERED_SEEDS + SEEDS).for_each(|seed| {
        check(seed);
    });
}

/// Stripes of arrays are filled with blocks that were clean.
#[test]
fn stripes_are_filled_without_a_lost_byte() {
    (STRIPED_SEEDS..STRIPED_SEEDS + SEEDS).for_each(|seed| {
        check(seed);
    });
}

/// Volumes grow, leave and return, and the cache is made again, under clients and crashes.
#[test]
fn changes_of_volumes_and_of_the_cache_lose_nothing() {
    (STEERED_SEEDS..STEERED_SEEDS + SEEDS).for_each(|seed| {
        check(seed);
    });
}

/// Links to primaries break and are there again, under long requests.
#[test]
fn restless_primaries_lose_nothing() {
    (RESTLESS_SEEDS..RESTLESS_SEEDS + SEEDS).for_each(|seed| {
        check(seed);
    });
}

/// Worlds that are several of these at once.
#[test]
fn mixed_worlds_lose_nothing() {
    (MIXED_SEEDS..MIXED_SEEDS + SEEDS).for_each(|seed| {
        check(seed);
    });
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..30 {
        let hash = || run_seed(seed, &Keep::default(), None, false).map(|report| report.hash);
        assert_eq!(hash(), hash(), "seed {seed}");
    }
}

#[test]
fn short_scripts_survive_a_crash_after_every_event() {
    let mut crashes = 0;
    for (name, steps) in scripts().into_iter().take(4) {
        for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround] {
            let result = crash_everywhere(name, &steps, mode, real);
            crashes += result.unwrap_or_else(|found| panic!("{found}"));
        }
    }
    assert!(crashes > 300, "only {crashes} crashes");
}

#[test]
fn short_scripts_survive_an_error_of_every_request() {
    let mut errors = 0;
    for script in Script::all().into_iter().rev().take(3) {
        let result = script.fail_everywhere(Mode::WriteBack, real);
        errors += result.unwrap_or_else(|found| panic!("{found}"));
    }
    assert!(errors > 500, "only {errors} errors");
}

#[test]
fn every_planted_bug_is_caught() {
    let missed: Vec<Bug> = Bug::ALL.into_iter().filter(|&bug| !is_caught(bug)).collect();
    assert!(missed.is_empty(), "not caught in {PLANTED_SEEDS} seeds: {missed:?}");
}

/// Whether a seed that passes fails with this bug planted, by the kind of failure that it causes.
/// An assertion of the engine would prove nothing about the checks of the simulator.
fn is_caught(bug: Bug) -> bool {
    seeds_for(bug).take(PLANTED_SEEDS).any(|seed| {
        let run = |bug| run_seed(seed, &Keep::default(), bug, false);
        let planted = catch_unwind(AssertUnwindSafe(|| run(Some(bug))));
        matches!(planted, Ok(Err(failure)) if proves(bug, &failure)) && run(None).is_ok()
    })
}
