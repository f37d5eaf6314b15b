//! Small traces whose outcome was worked out by hand.

use forebay_block::{ByteRange, IoOp};
use forebay_policy::Eviction;
use forebay_trace::{Footprint, Outcome, Simulate, SimulateConfig, Simulator, TraceRequest};

const BLOCK: u64 = 4096;

fn request(op: IoOp, block: u64, count: u64) -> TraceRequest {
    TraceRequest { nanos: 0, op, fua: false, range: ByteRange::new(block * BLOCK, count * BLOCK) }
}

/// A cache of this many blocks, without RAM and sequential bypass.
fn config(blocks: u64, eviction: Eviction) -> SimulateConfig {
    let cache_bytes = blocks * BLOCK;
    SimulateConfig { cache_bytes, ram_bytes: 0, eviction, sequential_threshold: 0 }
}

fn run(config: &SimulateConfig, requests: &[TraceRequest]) -> Outcome {
    let mut simulator = Simulator::new(config);
    requests.iter().for_each(|request| simulator.take(request));
    simulator.outcome()
}

/// 64 blocks are 64 segments of one block. Three are kept free and one is open, so that the log
/// holds 60 blocks.
const HELD: u64 = 60;

#[test]
fn fifo_holds_what_the_log_has_room_for() {
    let fifo = config(64, Eviction::Fifo);
    let once: Vec<_> = (0..HELD).map(|block| request(IoOp::Read, block, 1)).collect();
    let twice = [once.clone(), once.clone()].concat();
    let outcome = run(&fifo, &twice);
    assert_eq!((outcome.read_requests, outcome.read_requests_missed), (120, 60));
    assert_eq!((outcome.admitted_bytes / BLOCK, outcome.copied_bytes / BLOCK), (60, 0));
    assert!((outcome.block_miss_ratio() - 0.5).abs() < 1e-9);
    // One block more, and a loop misses every time.
    let more: Vec<_> = (0..=HELD).map(|block| request(IoOp::Read, block, 1)).collect();
    let outcome = run(&fifo, &[more.clone(), more].concat());
    assert_eq!(outcome.read_blocks_missed, 122);
}

#[test]
fn a_miss_waits_in_ram_until_its_place_is_wanted() {
    let config = SimulateConfig { ram_bytes: 8 * BLOCK, ..config(64, Eviction::Frequency) };
    let read = |block, count| request(IoOp::Read, block, count);
    let mut requests: Vec<_> = (0..HELD + 10).map(|block| read(2 * block, 1)).collect();
    // The log has been full since it held 60 blocks and reclaimed the first: later blocks wait.
    let full = run(&config, &requests);
    assert_eq!((full.admitted_bytes / BLOCK, full.read_blocks_missed), (HELD + 1, HELD + 10));
    // A page is read three times, then from RAM; the pages that left RAM for it were read once.
    requests.extend([read(1000, 4), read(1000, 4), read(1000, 4)]);
    let paged = run(&config, &requests);
    assert_eq!((paged.admitted_bytes / BLOCK, paged.ram_hit_blocks), (HELD + 1, 8));
    // Its eviction is put off once; it enters the log as a whole when others take its place.
    requests.extend((0..20).map(|block| read(2000 + 2 * block, 1)));
    let left = run(&config, &requests);
    assert_eq!(left.admitted_bytes / BLOCK, HELD + 1 + 4);
    requests.push(read(1000, 4));
    let again = run(&config, &requests);
    assert_eq!(again.read_blocks_missed, left.read_blocks_missed);
    assert_eq!(again.ram_hit_blocks, left.ram_hit_blocks, "it was the log that had it");
}

#[test]
fn what_is_only_written_is_not_worth_keeping() {
    let frequency = config(128, Eviction::Frequency);
    // One block is rewritten repeatedly, another is read once and then written as often.
    let mut requests = vec![request(IoOp::Read, 2000, 1)];
    requests.extend((0..6).flat_map(|_| [1000, 2000].map(|at| request(IoOp::Write, at, 1))));
    requests.extend((0..120).map(|block| request(IoOp::Read, 2 * block, 1)));
    let mut missed = |block| {
        requests.push(request(IoOp::Read, block, 1));
        let before = run(&frequency, &requests[..requests.len() - 1]).read_blocks_missed;
        run(&frequency, &requests).read_blocks_missed - before
    };
    assert_eq!((missed(2000), missed(1000)), (0, 1));
}

#[test]
fn lru_copies_what_was_hit() {
    // Segments of two blocks, of which reclaim copies at most one.
    let lru = config(128, Eviction::Lru);
    let mut requests: Vec<_> = (0..120).map(|block| request(IoOp::Read, block, 1)).collect();
    // A block in the oldest segment is hit, then the log wraps.
    requests.push(request(IoOp::Read, 0, 1));
    requests.push(request(IoOp::Read, 1000, 2));
    requests.push(request(IoOp::Read, 0, 1));
    requests.push(request(IoOp::Read, 1, 1));
    let outcome = run(&lru, &requests);
    assert_eq!(outcome.copied_bytes / BLOCK, 1);
    assert_eq!(outcome.read_blocks_missed, 120 + 2 + 1, "block 1 went, block 0 stayed");
    let fifo = run(&config(128, Eviction::Fifo), &requests);
    assert_eq!((fifo.read_blocks_missed, fifo.copied_bytes / BLOCK), (120 + 2 + 2, 0));
}

#[test]
fn a_copy_is_kept_again_only_if_it_is_hit_again() {
    let lru = config(128, Eviction::Lru);
    let mut requests: Vec<_> = (0..110).map(|block| request(IoOp::Read, block, 1)).collect();
    requests.push(request(IoOp::Read, 0, 1));
    requests.extend((110..3000).map(|block| request(IoOp::Read, block, 1)));
    let outcome = run(&lru, &requests);
    assert_eq!(outcome.copied_bytes / BLOCK, 1, "one hit is worth one lap at most");
}

#[test]
fn writes_go_to_the_log_and_count_apart() {
    let requests = [
        request(IoOp::Write, 0, 4),
        request(IoOp::Read, 0, 4),
        request(IoOp::Write, 0, 2),
        request(IoOp::Read, 3, 3),
        TraceRequest::flush(0),
        request(IoOp::Discard, 0, 1 << 40),
        request(IoOp::Read, 0, 1),
    ];
    let outcome = run(&config(64, Eviction::Lru), &requests);
    assert_eq!((outcome.write_blocks, outcome.write_blocks_missed), (6, 4));
    assert_eq!((outcome.read_blocks, outcome.read_blocks_missed), (8, 3));
    assert_eq!((outcome.read_requests, outcome.read_requests_missed), (3, 2));
    assert_eq!((outcome.logged_bytes / BLOCK, outcome.admitted_bytes / BLOCK), (6, 3));
    assert_eq!(outcome.ssd_bytes(), 9 * BLOCK);
    assert!((outcome.reference_miss_ratio() - 0.5).abs() < 1e-9);
}

#[test]
fn ram_is_looked_in_first_and_holds_the_newest() {
    let mut ram = config(64, Eviction::Fifo);
    ram.ram_bytes = 2 * BLOCK;
    let reads = [1, 2, 1, 3, 2, 1].map(|block| request(IoOp::Read, block, 1));
    let outcome = run(&ram, &reads);
    // Block 1 is in RAM at its second read; 2 and then 1 have left it, but are in the log.
    assert_eq!((outcome.ram_hit_blocks, outcome.read_blocks_missed), (1, 3));
}

#[test]
fn streams_go_past_the_cache() {
    let mut passing = config(64, Eviction::Fifo);
    passing.sequential_threshold = 8 * BLOCK;
    let reads: Vec<_> = (0..20).map(|block| request(IoOp::Read, block, 1)).collect();
    let outcome = run(&passing, &reads);
    assert_eq!((outcome.admitted_bytes / BLOCK, outcome.bypassed_blocks), (7, 13));
    assert_eq!(outcome.read_blocks_missed, 20);
}

#[test]
fn a_footprint_counts_each_block_once() {
    let mut footprint = Footprint::new();
    for (offset, len) in [(0, 1), (4095, 2), (8192, 4096), (1 << 50, 512), (1 << 50, 512)] {
        footprint.add(ByteRange::new(offset, len).blocks());
    }
    assert_eq!((footprint.blocks(), footprint.bytes()), (4, 4 * BLOCK));
}
