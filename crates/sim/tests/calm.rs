//! Calm disks and no faults: no write takes much longer than its devices do, in any mode, and none
//! waits for a timer.

mod support;

use std::time::Duration;

use forebay_block::{ByteRange, IoOp};
use forebay_engine::{Mode, Part};
use forebay_sim::atlas::Scenario;
use forebay_sim::config::Setup;
use forebay_sim::planted::Mischief;
use forebay_sim::run::{Options, run};
use forebay_sim::script::Step;
use forebay_sim::shard::real;

const MICRO: u64 = 1_000;
/// The longest times of each device: for a request, and for a flush.
const CACHE: (u64, u64) = (40 * MICRO, 100 * MICRO);
const PRIMARY: (u64, u64) = (200 * MICRO, 2_000 * MICRO);
/// A write may take this many times as long as one request and one flush of each device.
const TIMES: u64 = 10;

fn calm(seed: u64, mode: Mode, depth: usize) -> Setup {
    let mut setup = support::one_volume(seed, mode);
    setup.scenario = Scenario::ModeSwitches;
    setup.segments = 40;
    setup.index_blocks = 960;
    setup.dirty_limit = Part::Percent(70);
    setup.write_cache_depth = Duration::from_millis(200);
    setup.cache.size = (2 << 20) + (2880 << 10);
    (setup.cache.latency, setup.cache.flush) = ((10 * MICRO, CACHE.0), (20 * MICRO, CACHE.1));
    setup.cache.slow_percent = 0;
    (setup.primary.latency, setup.primary.flush) =
        ((50 * MICRO, PRIMARY.0), (500 * MICRO, PRIMARY.1));
    setup.primary.slow_percent = 0;
    (setup.client_depth, setup.think) = (depth, 0);
    setup
}

fn write(offset: u64, len: u64) -> Step {
    let range = ByteRange::new(offset, len);
    Step::Request { volume: 0, op: IoOp::Write, range, fua: false, again: None }
}

/// The patterns of loads that rewrite one place repeatedly.
fn loads() -> [(&'static str, Vec<Step>); 4] {
    [
        ("one block", (0..200).map(|_| write(8192, 4096)).collect()),
        ("a log of sectors", (0..200).map(|i| write(i * 512, 512)).collect()),
        ("overlapping blocks", (0..60).map(|i| write(i * 4096, 8192)).collect()),
        ("other blocks", (0..60).map(|i| write(i * 37 % 60 * 4096, 4096)).collect()),
    ]
}

fn check(what: &str, setup: Setup, steps: &[Step]) {
    let seed = setup.seed;
    let most = TIMES * (CACHE.0 + CACHE.1 + PRIMARY.0 + PRIMARY.1);
    match run(setup, steps, real, Mischief::none(), Options::default()) {
        Err(failure) => panic!("{what}, seed {seed}: {failure}"),
        Ok(report) => {
            let slowest = report.tally.slowest_write;
            assert!(slowest <= most, "{what}, seed {seed}: a write took {slowest} of {most} ns");
        }
    }
}

#[test]
fn no_write_takes_much_longer_than_its_devices() {
    for (name, mode) in Mode::NAMES {
        for (load, steps) in loads() {
            for seed in 0..4 {
                check(&format!("{load}, {name}"), calm(seed, mode, 1 + seed as usize), &steps);
            }
        }
    }
}

#[test]
fn nor_after_the_mode_was_switched() {
    for (name, mode) in Mode::NAMES {
        for (load, mut steps) in loads() {
            steps.insert(steps.len() / 3, Step::SetMode(0, mode));
            for seed in 0..4 {
                let setup = calm(seed, Mode::WriteBack, 1 + seed as usize);
                check(&format!("{load}, then {name}"), setup, &steps);
            }
        }
    }
}
