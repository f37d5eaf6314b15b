//! Bugs found by the simulator, each with its story and a world in which it is likely.

mod support;

use std::time::Duration;

use forebay_block::{ByteRange, IoOp};
use forebay_engine::{Eviction, Mode, Part};
use forebay_sim::atlas::Scenario;
use forebay_sim::config::Setup;
use forebay_sim::planted::Mischief;
use forebay_sim::run::{Options, run};
use forebay_sim::script::Step;
use forebay_sim::shard::real;

/// A world without faults: one shard, one volume in this mode, a log of eight small segments.
fn small(seed: u64, mode: Mode) -> Setup {
    let mut setup = support::one_volume(seed, mode);
    setup.scenario = Scenario::Crashes;
    setup.segments = 8;
    setup.index_blocks = 192;
    setup.compress = false;
    setup.cache.size = (2 << 20) + (576 << 10);
    setup
}

/// The same with a fault: crashes are power failures, and everything is checked after each.
fn faulty(seed: u64, mode: Mode, scenario: Scenario) -> Setup {
    Setup { scenario, power: true, verify_percent: 100, ..small(seed, mode) }
}

fn request(op: IoOp, offset: u64, len: u64) -> Step {
    Step::Request { volume: 0, op, range: ByteRange::new(offset, len), fua: false, again: None }
}

fn hold(setup: Setup, steps: &[Step]) {
    let seed = setup.seed;
    let result = run(setup, steps, real, Mischief::none(), Options::default());
    if let Err(failure) = result {
        panic!("seed {seed} {failure}");
    }
}

/// A destage remembered the place of the version it wrote. While it waited for the primary's flush,
/// the block was rewritten, its segment freed and reused, and the newest version happened to get
/// the very same place: it was mistaken for the destaged one, and marked clean.
#[test]
fn a_newer_version_in_the_place_of_a_destaged_one_stays_dirty() {
    for seed in 0..60 {
        let mut setup = small(seed, Mode::WriteBack);
        setup.primary.latency = (10_000, 50_000);
        setup.primary.flush = (50_000_000, 100_000_000);
        setup.write_cache_depth = Duration::from_millis(2);
        setup.dirty_limit = Part::Percent(70);
        setup.ram_bytes = 256 << 10;
        setup.client_depth = 1 + seed as usize % 3;
        let blocks = 7 + seed % 29;
        let mut steps = Vec::new();
        for round in 0..40 {
            steps.push(request(IoOp::Write, 0, blocks * 4096));
            if round % 3 == seed % 3 {
                steps.push(request(IoOp::Flush, 0, 0));
            }
            steps.push(Step::Pause(seed % 5 * 1_000_000));
        }
        hold(setup, &steps);
    }
}

/// The record builder held blocks read from the primary, about to be admitted, when a direct write
/// changed one of them: the old bytes were admitted after the write.
#[test]
fn an_admission_does_not_outlive_a_direct_write() {
    for seed in 0..60 {
        let mut setup = small(seed, Mode::WriteAround);
        setup.primary.volatile = false;
        setup.primary.latency = (10_000, 200_000);
        setup.cache.latency = (10_000, 2_000_000);
        setup.client_depth = 16;
        setup.think = 20_000;
        let mut steps = Vec::new();
        for round in 0..60u64 {
            let at = (round * 7 + seed) % 16 * 4096;
            steps.push(request(IoOp::Read, at, 8192));
            steps.push(request(IoOp::Write, at, 4096));
        }
        hold(setup, &steps);
    }
}

/// A direct write with one edge inside a sector was widened to whole blocks, but only that edge
/// was read before: the rest of the other edge's block became zeros.
#[test]
fn a_direct_write_keeps_what_lies_around_it() {
    for seed in 0..40 {
        let mut setup = small(seed, Mode::WriteAround);
        setup.volumes[0].filled = true;
        let steps: Vec<Step> = (0..40u64)
            .map(|i| {
                let (start, len) = (i * 1237 % 60_000, 512 + (i * 911 + seed * 77) % 20_000);
                let start = if i % 2 == 0 { start / 512 * 512 } else { start };
                let end = if i % 3 == 0 { start + len } else { (start + len) / 512 * 512 };
                request(IoOp::Write, start, (end - start).max(1))
            })
            .collect();
        hold(setup, &steps);
    }
}

/// Every recovery used up a segment of a nearly full log, until no segment was left for freeing
/// another one.
#[test]
fn many_crashes_in_a_row_leave_room_in_the_log() {
    for seed in 0..20 {
        let mut setup = small(seed, Mode::WriteBack);
        setup.verify_percent = 30;
        let mut steps = Vec::new();
        for round in 0..30u64 {
            for i in 0..6 {
                steps.push(request(IoOp::Write, (round * 5 + i) % 14 * 16384, 16384));
            }
            steps.push(Step::Crash { after: seed * 7 + round * 3, recoveries: vec![20, 40, 60] });
            steps.push(Step::Settle);
        }
        hold(setup, &steps);
    }
}

/// A cache device vanished while writes waited at the dirty limit. Nothing was written to it any
/// more, so it was never declared failed, and the dirty blocks could not be read: the writes waited
/// forever.
#[test]
fn a_cache_that_vanishes_at_the_dirty_limit_is_given_up() {
    for seed in 0..20 {
        let mut setup = small(seed, Mode::WriteBack);
        setup.scenario = Scenario::CacheVanishes;
        setup.ram_bytes = 0;
        setup.dirty_limit = Part::Percent(10);
        setup.write_cache_depth = Duration::from_secs(30);
        setup.primary.latency = (1_000_000, 20_000_000);
        setup.primary.flush = (50_000_000, 100_000_000);
        setup.client_depth = 16;
        setup.think = 0;
        let mut steps: Vec<Step> = (0..14).map(|i| request(IoOp::Write, i * 8192, 4096)).collect();
        steps.push(Step::Pause(seed * 500_000));
        steps.push(Step::Break(seed));
        steps.push(Step::Settle);
        hold(setup, &steps);
    }
}

/// A reader found the copy of a dirty block bad while its good bytes were on their way to the
/// primary: the block stayed fenced after it had become clean, and the number of dirty blocks
/// became negative.
#[test]
fn a_block_with_a_bad_copy_that_reaches_the_primary_can_be_read() {
    for seed in 0..60 {
        let mut setup = small(seed, Mode::WriteBack);
        setup.scenario = Scenario::CacheRot;
        setup.ram_bytes = 0;
        setup.write_cache_depth = Duration::from_millis(2);
        setup.primary.latency = (1_000_000, 20_000_000);
        setup.primary.flush = (20_000_000, 40_000_000);
        let mut steps = vec![request(IoOp::Write, 0, 64 << 10), request(IoOp::Flush, 0, 0)];
        steps.push(Step::Pause(seed % 12 * 1_000_000));
        for again in 0..4 {
            steps.push(Step::Break(seed * 4 + again));
        }
        steps.push(request(IoOp::Read, 0, 64 << 10));
        steps.push(Step::Pause(200_000_000));
        steps.push(request(IoOp::Write, 128 << 10, 4096));
        hold(setup, &steps);
    }
}

/// A write's bytes were in RAM before they had a place in the log. Destaging mistook them for the
/// previous version, and readers saw them; then the cache device failed, the write failed with it,
/// and its bytes, already seen, disappeared.
#[test]
fn what_has_no_place_in_the_log_is_neither_read_nor_destaged() {
    for seed in 0..80 {
        let mut setup = small(seed, Mode::WriteBack);
        setup.scenario = Scenario::CacheWritesFail;
        setup.ram_bytes = 256 << 10;
        setup.write_cache_depth = Duration::from_millis(2);
        setup.primary.latency = (50_000, 2_000_000);
        setup.client_depth = 8;
        setup.think = 10_000;
        let mut steps = Vec::new();
        for round in 0..6u64 {
            for i in 0..4 {
                steps.push(request(IoOp::Write, (round + i * 3) % 9 * 16384, 24576));
                steps.push(request(IoOp::Read, (round * 5 + i) % 12 * 12288, 16384));
            }
            if round == seed % 6 {
                steps.push(Step::Break(seed));
            }
        }
        hold(setup, &steps);
    }
}

/// One shard's flush of a primary failed, and the primary lost another shard's writes. The other
/// shard's own flush succeeded shortly after: the writes were marked clean, and were lost.
#[test]
fn a_failed_flush_of_a_primary_is_every_shards() {
    for seed in 0..60 {
        let mut setup = small(seed, Mode::WriteBack);
        setup.shards = 3;
        setup.cache.size += 2 * (576 << 10);
        setup.volumes[0].windows = (0..4).map(|i| ByteRange::new(i << 20, 64 << 10)).collect();
        setup.scenario = Scenario::PrimaryFlushErrors;
        setup.power = true;
        setup.write_cache_depth = Duration::from_millis(2);
        setup.primary.volatile = true;
        setup.primary.latency = (10_000, 500_000);
        setup.primary.flush = (1_000_000, 20_000_000);
        setup.client_depth = 4;
        let mut steps = vec![Step::Break(seed)];
        for round in 0..6u64 {
            for i in 0..4 {
                steps.push(request(IoOp::Write, (i << 20) + round * 8192, 8192));
            }
            steps.push(Step::Pause((seed % 7 + 1) * 5_000_000));
        }
        steps.push(Step::Pause(400_000_000));
        steps.push(Step::Crash { after: 0, recoveries: Vec::new() });
        steps.push(Step::Settle);
        hold(setup, &steps);
    }
}

/// Reclaim evicted a block, but recorded that only when the whole segment was free. A direct write
/// in between found nothing to invalidate; after a crash the segment was still part of the log, and
/// the old version in it was served.
#[test]
fn what_reclaim_evicts_does_not_come_back_after_a_direct_write() {
    for seed in 0..1500 {
        let mut setup = small(seed, Mode::WriteAround);
        setup.volumes[0].windows = vec![ByteRange::new(0, 1 << 20)];
        setup.eviction = Eviction::Lru;
        setup.ram_bytes = 0;
        setup.power = true;
        setup.client_depth = 4;
        setup.think = 0;
        setup.cache.latency = (200_000, 1_000_000);
        setup.cache.flush = (20_000, 100_000);
        setup.primary.latency = (10_000, 30_000);
        let cold = |n: u64| (24 + n % 200) * 4096;
        let mut steps = Vec::new();
        for n in 0..400 {
            steps.push(request(IoOp::Read, cold(n), 4096));
            steps.push(request(IoOp::Read, n * 5 % 24 * 4096, 4096));
        }
        // Blocks read that long ago are being evicted at this point.
        let long = 30 + seed % 60;
        for n in 400..440 {
            steps.push(request(IoOp::Read, cold(n), 4096));
            let range = ByteRange::new(cold(n - long), 4096);
            steps.push(Step::Request { volume: 0, op: IoOp::Write, range, fua: true, again: None });
        }
        steps.insert(800, Step::Crash { after: 50 + seed * 7 % 400, recoveries: Vec::new() });
        steps.push(Step::Settle);
        steps.push(request(IoOp::Read, 0, 1 << 20));
        hold(setup, &steps);
    }
}

/// The flush of a start's superblock failed, and the server was started again at once. The
/// unflushed copy was the newer one, so the durable one was overwritten; then power failed. One
/// copy was gone and the other torn: the start was refused, as an older copy or as damaged.
#[test]
fn a_superblock_that_was_not_flushed_does_not_replace_the_one_that_was() {
    for seed in 0..400 {
        let mut setup = faulty(seed, Mode::WriteBack, Scenario::CacheFlushErrors);
        setup.cache.volatile = true;
        setup.cache.garbles = true;
        let mut steps = Vec::new();
        for round in 0..3 {
            steps.push(request(IoOp::Write, round * 8192, 8192));
            steps.push(request(IoOp::Flush, 0, 0));
            steps.push(if seed % 3 == round { Step::Restart } else { Step::Settle });
        }
        // The flush of the next start fails, and the one after it is cut off.
        steps.push(Step::Break(seed));
        let recoveries = vec![2 + seed % 4];
        steps.push(Step::Crash { after: 0, recoveries });
        steps.push(Step::Settle);
        steps.push(request(IoOp::Read, 0, 64 << 10));
        hold(setup, &steps);
    }
}

/// A primary's flush failed, and the server stopped in order: it flushed again, which succeeded,
/// and took a fingerprint of content that the primary had lost. After a power failure the content
/// differed: the start was refused with the advice to discard the cache, and with it the dirty
/// blocks that had been kept for this very case.
#[test]
fn a_stop_vouches_for_no_primary_whose_flush_failed() {
    for (seed, mode) in
        (0..60).flat_map(|seed| [(seed, Mode::WriteBack), (seed, Mode::WriteAround)])
    {
        let mut setup = faulty(seed, mode, Scenario::PrimaryFlushErrors);
        setup.write_cache_depth = Duration::from_millis(2);
        setup.primary.volatile = true;
        setup.primary.latency = (10_000, 50_000);
        setup.client_depth = 8;
        let mut steps = vec![request(IoOp::Flush, 0, 0), Step::Settle];
        steps.extend((0..8).map(|i| request(IoOp::Write, i * 8192, 8192)));
        steps.push(request(IoOp::Flush, 0, 0));
        steps.push(Step::Settle);
        if mode == Mode::WriteAround {
            steps.push(request(IoOp::Write, 0, 32 << 10));
        }
        // Destages are written and wait for a flush, which comes with the stop.
        steps.push(Step::Pause(seed % 10 * 5_000_000));
        // Every second world ends with a power failure.
        steps.extend([Step::Settle, Step::Break(seed), Step::Restart]);
        hold(setup, &steps);
    }
}

/// Not a bug of the engine: a primary's flush failed, and the server that knew of it stopped. The
/// primary continued to show the data it had lost, the next server read that data into the cache,
/// and power failed. Until the cached block was written, clients saw the lost data, which the model
/// had considered settled. See "Not survived" in `docs/internals/fault-model.md`.
#[test]
fn what_a_primary_gave_up_may_be_seen_by_the_next_server_and_go_with_the_power() {
    for seed in 0..200 {
        let mut setup = faulty(seed, Mode::WriteAround, Scenario::PrimaryFlushErrors);
        setup.ram_bytes = 0;
        setup.eviction = Eviction::Lru;
        setup.cache.volatile = false;
        setup.primary.volatile = true;
        setup.client_depth = 4;
        setup.think = 0;
        let mut steps = vec![request(IoOp::Flush, 0, 0), Step::Settle];
        steps.extend((0..8).map(|i| request(IoOp::Write, i * 4096, 4096)));
        steps.extend([Step::Settle, Step::Break(seed), Step::Restart, Step::Heal]);
        steps.push(Step::Pause(50_000_000));
        steps.push(request(IoOp::Read, 0, 32 << 10));
        steps.extend([Step::Settle, Step::Pause(50_000_000)]);
        steps.push(Step::Crash { after: 0, recoveries: Vec::new() });
        steps.extend([Step::Settle, request(IoOp::Read, 0, 32 << 10), Step::Settle]);
        // The cached block is evicted, and until the write has ended the primary's content may be
        // seen.
        for i in 0..8 {
            steps.push(request(IoOp::Write, i * 4096, 4096));
            steps.push(Step::Pause(60_000));
            steps.push(request(IoOp::Read, i * 4096, 4096));
        }
        hold(setup, &steps);
    }
}

/// A clean block could not be read from the cache device, and was dropped. The record of that was
/// not durable yet when a direct write found nothing to invalidate and changed the primary; after a
/// crash the old copy was back, and was served instead of the durable new data.
#[test]
fn a_clean_block_that_cannot_be_read_does_not_come_back_after_a_direct_write() {
    for seed in 0..100 {
        let mut setup = faulty(seed, Mode::WriteAround, Scenario::CacheReadErrors);
        setup.ram_bytes = 0;
        setup.eviction = Eviction::Lru;
        setup.cache.volatile = true;
        setup.primary.volatile = seed % 2 == 0;
        let mut steps = vec![request(IoOp::Flush, 0, 0), Step::Settle, Step::Pause(100_000_000)];
        steps.extend([request(IoOp::Read, 0, 32 << 10), Step::Settle]);
        // Makes the block's copy on the cache device durable.
        steps.extend([request(IoOp::Write, 64 << 10, 4096), request(IoOp::Flush, 0, 0)]);
        steps.extend([Step::Settle, Step::Break(seed)]);
        steps.extend([request(IoOp::Read, 0, 4096), Step::Settle]);
        let range = ByteRange::new(0, 4096);
        steps.push(Step::Request { volume: 0, op: IoOp::Write, range, fua: true, again: None });
        steps.extend([Step::Settle, Step::Crash { after: 0, recoveries: Vec::new() }]);
        steps.extend([request(IoOp::Read, 0, 32 << 10), Step::Settle]);
        hold(setup, &steps);
    }
}

/// Up to three quarters of a reclaimed segment are copied, and a record that does not fit leaves
/// the end of a segment unused. In a log of small segments, each three quarters full of blocks
/// worth keeping, reclaim filled as many segments as it freed: it never ended, although nothing
/// needed the space.
#[test]
fn reclaim_comes_to_rest() {
    for seed in 0..40 {
        let mut setup = small(seed, Mode::WriteBack);
        setup.eviction = Eviction::Frequency;
        setup.ram_bytes = 16 << 10;
        setup.volumes[0].filled = true;
        setup.cache.latency = (10_000, 40_000);
        setup.cache.flush = (20_000, 300_000);
        setup.client_depth = 1 + seed as usize % 16;
        let mut steps = Vec::new();
        for round in 0..2 + seed % 3 {
            let piece = |i: u64| request(IoOp::Read, i * 32768, 4096 * (8 - round % 2));
            steps.extend((0..8).map(piece));
            steps.push(Step::Settle);
            if round == 0 {
                steps.push(Step::Restart);
            }
        }
        steps.push(Step::Pause(40_000_000_000));
        hold(setup, &steps);
    }
}

/// Two flushes waited for the same record; the first had been told that the primary's flush failed.
/// They were answered in random order: the second could succeed just before the first reported the
/// data as doubtful.
#[test]
fn a_flush_that_failed_is_answered_before_a_later_one() {
    for seed in 0..400 {
        let mut setup = faulty(seed, Mode::WriteAround, Scenario::PrimaryFlushErrors);
        setup.ram_bytes = 0;
        setup.volumes[0].filled = true;
        setup.eviction = Eviction::Lru;
        setup.cache.volatile = true;
        setup.cache.latency = (10_000, 40_000);
        setup.cache.flush = (2_000_000, 9_000_000);
        setup.primary.volatile = true;
        setup.primary.latency = (50_000, 100_000);
        setup.primary.flush = (50_000, 500_000);
        setup.client_depth = 16;
        setup.think = 20_000;
        let mut steps = vec![request(IoOp::Flush, 0, 0), Step::Settle, Step::Break(seed)];
        for round in 0..8 {
            // Blocks read now are admitted, but not durable yet.
            steps.push(request(IoOp::Read, round * 8192, 4096));
            steps.extend([request(IoOp::Read, round * 8192, 512), Step::Settle]);
            steps.push(request(IoOp::Read, round * 4096, 512));
            steps.push(request(IoOp::Write, (40 + round) * 4096, 4096));
            steps.push(Step::Pause(300_000));
            steps.push(request(IoOp::Flush, 0, 0));
            steps.push(Step::Pause(seed % 7 * 100_000));
            steps.push(request(IoOp::Flush, 0, 0));
            steps.push(Step::Settle);
        }
        steps.push(Step::Crash { after: 0, recoveries: Vec::new() });
        steps.push(Step::Settle);
        hold(setup, &steps);
    }
}

/// Blocks that only RAM has enter the log when their places are needed, or within a minute: never
/// with their content from before a direct write, nor with data that the primary may still lose.
/// (No bug was found here; if the engine ignored which data the primary has flushed, this test
/// would fail.)
#[test]
fn what_ram_has_alone_does_not_outlive_a_direct_write() {
    for seed in 0..300 {
        let mut setup = small(seed, Mode::WriteAround);
        setup.volumes[0].windows = vec![ByteRange::new(0, 1 << 20)];
        setup.volumes[0].filled = true;
        setup.eviction = Eviction::Frequency;
        setup.ram_bytes = 32 << 10;
        setup.power = true;
        setup.client_depth = 8;
        setup.think = 0;
        setup.cache.latency = (200_000, 1_000_000);
        setup.cache.flush = (20_000, 100_000);
        setup.primary.latency = (10_000, 300_000);
        let mut steps = Vec::new();
        // The log is full, so that from here on the policy chooses.
        steps.extend((0..200).map(|n| request(IoOp::Read, (24 + n) * 4096, 4096)));
        for n in 0..300 {
            let hot = n * 7 % 12 * 4096;
            steps.push(request(IoOp::Read, hot, 8192));
            steps.push(request(IoOp::Read, (30 + n * 11 % 190) * 4096, 4096));
            if n % 3 == seed % 3 {
                steps.push(request(IoOp::Write, hot, 4096));
            }
        }
        steps.insert(300, Step::Crash { after: 50 + seed * 7 % 400, recoveries: Vec::new() });
        steps.push(Step::Pause(if seed % 5 == 0 { 70_000_000_000 } else { 0 }));
        steps.push(Step::Settle);
        steps.push(Step::Crash { after: 1, recoveries: Vec::new() });
        steps.push(request(IoOp::Read, 0, 1 << 20));
        hold(setup, &steps);
    }
}

/// After a switch to a mode in which the primary alone is complete, a write that touched a dirty
/// block went to the log with all of its blocks, and was answered there. No flush waited for the
/// other blocks, and overlapping writes carried this on.
#[test]
fn what_is_written_beside_dirty_blocks_after_a_switch_is_on_the_primary_after_a_flush() {
    let block = 4096;
    for mode in [Mode::WriteThrough, Mode::WriteAround, Mode::PassThrough] {
        for seed in 0..20 {
            let mut setup = faulty(seed, Mode::WriteBack, Scenario::ModeSwitches);
            setup.write_cache_depth = Duration::from_secs(30);
            setup.dirty_limit = Part::Percent(70);
            setup.client_depth = 1 + seed as usize % 4;
            let flush = || request(IoOp::Flush, 0, 0);
            let mut steps = vec![request(IoOp::Write, 0, 2 * block), flush()];
            steps.push(Step::SetMode(0, mode));
            for i in 1..12 {
                steps.push(request(IoOp::Write, i * block, 2 * block));
                steps.push(flush());
            }
            steps.extend([Step::Settle, Step::Crash { after: 0, recoveries: Vec::new() }]);
            hold(setup, &steps);
        }
    }
}
