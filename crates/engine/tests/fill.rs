//! The bounds on clean blocks that enter the cache device: what they refuse is counted by reason,
//! and clients' writes are never refused.

use std::time::Duration;

use forebay_block::testing::{Numbers, noise};
use forebay_block::{BLOCK_SIZE, BlockRange, ByteRange, IoOp};
use forebay_engine::testing::{Devices, Harness, VOLUME, config};
use forebay_engine::{Eviction, Refusal, Setting, Shard, ShardConfig, Stats};
use forebay_policy::WEAR_BANK;

const BLOCK: u64 = BLOCK_SIZE as u64;
const SEGMENT: u64 = 256 << 10;
const CACHE: u64 = 40 * SEGMENT;
const SIZE: u64 = 8000 * BLOCK;

/// An engine without RAM, so that a missed block enters at once or not at all.
fn start(log_segments: Option<u32>) -> Harness {
    let all = config(CACHE, SIZE);
    let (segment_size, eviction) = (SEGMENT as u32, Eviction::Lru);
    let config = ShardConfig { log_segments, segment_size, eviction, ram_bytes: 0, ..all };
    let devices = Devices { primary: noise(1, SIZE as usize), ..Devices::new(CACHE, SIZE) };
    let mut harness = Harness::start(config, devices);
    harness.settle();
    harness
}

/// Reads blocks that were not read before, one every millisecond; returns what was counted.
fn read(harness: &mut Harness, blocks: std::ops::Range<u64>) -> Stats {
    let before = harness.stats();
    for block in blocks {
        let range = ByteRange::new(block * BLOCK, BLOCK);
        assert!(harness.ask(IoOp::Read, range, &[]).is_some());
        harness.wait(Duration::from_millis(1));
    }
    let stats = harness.stats().since(&before);
    assert_eq!(stats.unadmitted_blocks, stats.unadmitted_by.iter().sum::<u64>());
    harness.engine.check().expect("the counts are right");
    stats
}

#[test]
fn no_more_blocks_enter_in_a_second_than_the_rate_allows() {
    for log_segments in [None, Some(8)] {
        let mut harness = start(log_segments);
        assert_eq!(read(&mut harness, 0..200).admitted_blocks, 200, "without a rate all enter");
        harness.engine.set(Setting::FillRate(Some(100 * BLOCK)));
        // Two seconds, and a tenth of a second's burst.
        let stats = read(&mut harness, 200..2200);
        assert!((190..=212).contains(&stats.admitted_blocks), "{}", stats.admitted_blocks);
        let refused = stats.unadmitted_by[Refusal::Rate as usize];
        assert_eq!(stats.admitted_blocks + refused, 2000);
        // Writes are not bound.
        let range = ByteRange::new(0, 64 * BLOCK);
        for _ in 0..20 {
            assert!(harness.ask(IoOp::Write, range, &noise(2, 64 * BLOCK_SIZE)).is_some());
        }
        assert_eq!(harness.stats().dirty_blocks, 64);
        harness.engine.set(Setting::FillRate(None));
        let stats = read(&mut harness, 2300..2400);
        assert_eq!(stats.unadmitted_by[Refusal::Rate as usize], 0);
    }
}

/// Bytes written to the cache device.
fn written(stats: &Stats) -> u64 {
    stats.log_bytes + stats.store_bytes
}

#[test]
fn a_budget_of_wear_keeps_clean_blocks_out_and_never_writes() {
    for log_segments in [None, Some(8)] {
        let mut harness = start(log_segments);
        // The bank has a quarter of a day's budget.
        let bank = 4 << 20;
        harness.engine.set(Setting::WearBudget(Some(4 * bank)));
        let stats = read(&mut harness, 0..2000);
        let refused = stats.unadmitted_by[Refusal::Wear as usize];
        assert_eq!(stats.admitted_blocks + refused, 2000);
        assert!(refused > 1000 && (bank / 2..=bank).contains(&written(&stats)), "{stats:?}");
        let pressure = harness.stats().wear_pressure_percent;
        assert!((5..100).contains(&pressure), "{pressure}");
        if log_segments.is_some() {
            // With a store requests are counted: a frequent block enters all the same.
            let before = harness.stats().admitted_blocks;
            for _ in 0..8 {
                read(&mut harness, 2000..2001);
            }
            assert!(harness.stats().admitted_blocks > before);
            let hits = read(&mut harness, 2000..2001).hits;
            assert_eq!(hits, 1);
        }
        // Clients write more than the rest of the bank.
        let before = harness.stats();
        for block in (0..2000).step_by(8) {
            let range = ByteRange::new(block * BLOCK, 8 * BLOCK);
            assert!(harness.ask(IoOp::Write, range, &noise(block, 8 * BLOCK_SIZE)).is_some());
        }
        let stats = harness.stats().since(&before);
        assert!(written(&stats) > bank && stats.write_bytes == 2000 * BLOCK);
        assert_eq!((stats.throttled_nanos, harness.stats().wear_pressure_percent), (0, 100));
        let stats = read(&mut harness, 4000..4100);
        assert_eq!((stats.admitted_blocks, stats.unadmitted_by[Refusal::Wear as usize]), (0, 100));
        // What is owed is at most the bank.
        harness.wait(2 * WEAR_BANK);
        let stats = read(&mut harness, 4100..4200);
        assert_eq!((stats.admitted_blocks, stats.wear_pressure_percent), (100, 0));
    }
}

/// Reads skewed to the first pages of a volume of four times the cache, for two days. Returns the
/// statistics of the second one.
fn second_day(budget: Option<u64>) -> Stats {
    const READS: u64 = 20_000;
    let all = config(CACHE, SIZE);
    let (log_segments, segment_size) = (Some(8), SEGMENT as u32);
    let config = ShardConfig { log_segments, segment_size, ram_bytes: 64 * BLOCK, ..all };
    let config = ShardConfig { wear_budget: budget, ..config };
    let devices = Devices { primary: noise(1, SIZE as usize), ..Devices::new(CACHE, SIZE) };
    let mut harness = Harness::start(config, devices);
    let mut numbers = Numbers::new(5);
    let mut before = Stats::default();
    for read in 0..2 * READS {
        if read == READS {
            before = harness.stats();
        }
        let share = numbers.below(1 << 20) as f64 / f64::from(1 << 20);
        let page = (share.powi(3) * (SIZE / 4 / BLOCK) as f64) as u64;
        let range = ByteRange::new(4 * page * BLOCK, 4 * BLOCK);
        assert!(harness.ask(IoOp::Read, range, &[]).is_some());
        harness.wait(Duration::from_secs(24 * 3600) / READS as u32);
    }
    harness.stats().since(&before)
}

/// The figures of docs/user/tuning.md.
#[test]
fn half_of_the_wear_costs_few_hits() {
    let free = second_day(None);
    let halved = second_day(Some(written(&free) / 2));
    let hits = |stats: &Stats| 100.0 * stats.hits as f64 / stats.lookups as f64;
    let mib = |stats: &Stats| written(stats) as f64 / f64::from(1 << 20);
    println!(
        "without a budget {:.0} MiB a day and {:.1} % hits, with half of it {:.0} MiB and {:.1} %",
        mib(&free),
        hits(&free),
        mib(&halved),
        hits(&halved)
    );
    assert!(written(&halved) <= written(&free) * 55 / 100);
    assert!(hits(&halved) >= hits(&free) * 0.8);
}

/// A pin is no promise where the index, whose memory may be bounded, has no room for anything else.
#[test]
fn writes_go_on_where_pinned_blocks_take_all_of_the_index() {
    let index_blocks = 320;
    let all = config(CACHE, SIZE);
    let (segment_size, log_segments) = (SEGMENT as u32, Some(8));
    let eviction = Eviction::Lru;
    let config =
        ShardConfig { log_segments, segment_size, eviction, index_blocks, ram_bytes: 0, ..all };
    let devices = Devices { primary: noise(1, SIZE as usize), ..Devices::new(CACHE, SIZE) };
    let mut harness = Harness::start(config, devices);
    harness.settle();
    let pinned = 2000;
    harness.engine.pin(VOLUME, &[BlockRange { first: 0, count: pinned }]);
    read(&mut harness, 0..pinned);
    let cached = harness.stats().cached_blocks;
    assert!(cached * 10 > index_blocks * 9, "{cached}");
    for at in 0..2 * index_blocks {
        let range = ByteRange::new((pinned + at) * BLOCK, BLOCK);
        let done = harness.ask(IoOp::Write, range, &noise(at, BLOCK_SIZE));
        assert!(done.is_some(), "write {at}: {:?}", harness.stats());
        harness.wait(Duration::from_millis(1));
    }
    harness.engine.check().expect("the counts are right");
}

/// Blocks of RAM displaced each other from the device forever, a round a minute.
#[test]
fn an_idle_cache_with_more_ram_than_device_goes_quiet() {
    let all = config(CACHE, SIZE);
    let (segment_size, log_segments, ram_bytes) = (SEGMENT as u32, Some(8), 2 * CACHE);
    let config =
        ShardConfig { log_segments, segment_size, eviction: Eviction::Lru, ram_bytes, ..all };
    let devices = Devices { primary: noise(1, SIZE as usize), ..Devices::new(CACHE, SIZE) };
    let mut harness = Harness::start(config, devices);
    harness.settle();
    read(&mut harness, 0..2 * CACHE / BLOCK);
    let pass = |harness: &mut Harness, seconds: u64| {
        let before = harness.stats();
        for _ in 0..seconds * 5 {
            harness.wait(Duration::from_millis(200));
            harness.settle();
        }
        written(&harness.stats().since(&before))
    };
    assert!(pass(&mut harness, 120) > 0, "RAM is visited");
    assert_eq!(pass(&mut harness, 120), 0);
}
