//! The journal and the store: small traces whose outcome was worked out by hand.

use forebay_block::{ByteRange, IoOp};
use forebay_trace::{Outcome, Simulate, StoreConfig, StorePolicy, StoreSimulator, TraceRequest};

const BLOCK: u64 = 4096;

fn request(op: IoOp, block: u64, count: u64) -> TraceRequest {
    TraceRequest { nanos: 0, op, fua: false, range: ByteRange::new(block * BLOCK, count * BLOCK) }
}

/// A cache of 256 blocks: a journal of 32 and a store of 224.
fn config(policy: StorePolicy) -> StoreConfig {
    StoreConfig {
        cache_bytes: 256 * BLOCK,
        ram_bytes: 8 * BLOCK,
        policy,
        sequential_threshold: 0,
        journal_percent: 12.5,
        compress: 1.0,
    }
}

fn run(config: &StoreConfig, requests: &[TraceRequest]) -> Outcome {
    let mut simulator = StoreSimulator::new(config);
    requests.iter().for_each(|request| simulator.take(request));
    simulator.outcome()
}

fn reads(blocks: impl Iterator<Item = u64>) -> Vec<TraceRequest> {
    blocks.map(|block| request(IoOp::Read, block, 1)).collect()
}

#[test]
fn reads_go_through_ram_to_the_store_and_some_to_the_journal() {
    let page = |at: u64| request(IoOp::Read, 4 * at, 4);
    let few: Vec<_> = (0..2).chain(0..2).map(page).collect();
    let outcome = run(&config(StorePolicy::Lru), &few);
    assert_eq!((outcome.read_blocks, outcome.read_blocks_missed), (16, 8));
    assert_eq!((outcome.ram_hit_blocks, outcome.ssd_bytes(), outcome.entries), (8, 0, 0));
    // The entry of a unit of four blocks takes this many bytes.
    const FOUR: u64 = 33 + 4 * 16;
    // The third page displaces the first, which enters the store whole. Read again, it comes back
    // to RAM, and displaces the second.
    let three: Vec<_> = (0..3).chain(0..1).map(page).collect();
    let outcome = run(&config(StorePolicy::Lru), &three);
    assert_eq!((outcome.read_requests, outcome.read_requests_missed), (4, 3));
    assert_eq!((outcome.admitted_bytes, outcome.mapping_bytes), (8 * BLOCK, 2 * FOUR));
    assert_eq!((outcome.entries, outcome.logged_bytes, outcome.moved_bytes), (8, 0, 0));
    // The fourth page that leaves RAM goes to the journal, where it needs no other entry.
    let outcome = run(&config(StorePolicy::Lru), &(0..6).map(page).collect::<Vec<_>>());
    assert_eq!((outcome.admitted_bytes, outcome.mapping_bytes), (16 * BLOCK, 3 * FOUR));
}

#[test]
fn what_the_journal_frees_moves_and_what_was_rewritten_does_not() {
    let write = |block| request(IoOp::Write, block, 1);
    // One block over and over: no version but the newest is ever worth moving.
    let same: Vec<_> = (0..500).map(|_| write(7)).collect();
    let outcome = run(&config(StorePolicy::Lru), &same);
    assert_eq!((outcome.logged_bytes, outcome.moved_bytes), (500 * BLOCK, 0));
    assert_eq!((outcome.entries, outcome.write_blocks_missed), (1, 1));
    // Twice as many blocks as the journal holds: all that left it are in the store, and are read.
    let many: Vec<_> = (0..64).map(|at| write(2 * at)).collect();
    let outcome = run(&config(StorePolicy::Lru), &many);
    assert_eq!(outcome.entries, 64);
    assert!(outcome.moved_bytes >= 32 * BLOCK && outcome.moved_bytes < 64 * BLOCK);
    // So does every fourth block that was read; the others are in the store already. Each has an
    // entry there.
    let outcome = run(&config(StorePolicy::Lru), &reads((0..208).map(|at| 2 * at)));
    assert_eq!((outcome.entries, outcome.admitted_bytes), (200, 200 * BLOCK));
    let moved = outcome.moved_bytes / BLOCK;
    assert!((18..50).contains(&moved), "{outcome:?}");
    assert!(outcome.mapping_bytes >= (150 + moved) * 49);
    let again = [many, reads((0..64).map(|at| 2 * at))].concat();
    assert_eq!(run(&config(StorePolicy::Lru), &again).read_blocks_missed, 0);
}

#[test]
fn journal_and_store_hold_what_was_read() {
    let looped = |blocks: u64| reads((0..5 * blocks).map(move |at| at % blocks * 2));
    let fits = run(&config(StorePolicy::Lru), &looped(224));
    assert_eq!((fits.read_blocks_missed, fits.entries), (224, 218));
    // A loop longer than the cache: recency misses nearly always, frequency often enough not.
    let recency = run(&config(StorePolicy::Lru), &looped(280));
    let frequency = run(&config(StorePolicy::Frequency), &looped(280));
    assert!(recency.read_blocks_missed > 1200, "{recency:?}");
    assert!(frequency.read_blocks_missed < 900, "{frequency:?}");
    assert!(recency.live_share > 0.95 && recency.live_share <= 1.0, "{recency:?}");
}

#[test]
fn discards_and_bypassing_writes_drop_blocks() {
    let mut requests = reads(0..100);
    requests.push(request(IoOp::Discard, 0, 50));
    requests.extend(reads(0..100));
    assert_eq!(run(&config(StorePolicy::Lru), &requests).read_blocks_missed, 150);
    let config = StoreConfig { sequential_threshold: 8 * BLOCK, ..config(StorePolicy::Lru) };
    let outcome = run(&config, &[request(IoOp::Write, 0, 64), request(IoOp::Write, 64, 64)]);
    assert_eq!(
        (outcome.bypassed_blocks, outcome.entries),
        (128 - outcome.entries, outcome.entries)
    );
}

#[test]
fn compressed_blocks_take_fewer_pages() {
    let pages = || (0..4000).map(|at| request(IoOp::Read, 4 * at, 4)).collect::<Vec<_>>();
    let large = StoreConfig { cache_bytes: 4096 * BLOCK, ..config(StorePolicy::Lru) };
    let plain = run(&large, &pages());
    let packed = run(&StoreConfig { compress: 2.0, ..large }, &pages());
    assert!(plain.entries > 4000 && packed.entries > 2 * 3800, "{plain:?} {packed:?}");
    assert_eq!(plain.admitted_bytes, 2 * packed.admitted_bytes);
}
