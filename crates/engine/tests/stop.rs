//! A stop while writes wait for room in the log: it waits for them, so there must be room.
#![allow(clippy::unwrap_used, reason = "a test ends at the first thing it did not expect")]

use std::time::Duration;

use forebay_block::testing::noise;
use forebay_block::{BLOCK_SIZE, ByteRange, IoOp};
use forebay_engine::testing::{Devices, Harness, SEGMENT, config};
use forebay_engine::{Shard, ShardConfig, State};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// A log of eight segments, which hold about a hundred blocks, and a store of 24.
const LOG: u32 = 8;
const CACHE: u64 = 32 * SEGMENT as u64;
const SIZE: u64 = 4000 * BLOCK;
/// Longest time that a stop may take.
const LIMIT: Duration = Duration::from_secs(10);

fn range(block: u64) -> ByteRange {
    ByteRange::new(block * BLOCK, BLOCK)
}

/// A shard with a full store of clean blocks, and many more writes under way than its log holds.
fn full() -> (Harness, usize) {
    let config = ShardConfig { log_segments: Some(LOG), ..config(CACHE, SIZE) };
    let mut harness = Harness::start(config, Devices::new(CACHE, SIZE));
    for block in 0..600 {
        harness.ask(IoOp::Write, range(block), &noise(block, BLOCK_SIZE)).unwrap();
    }
    harness.drain();
    assert!(harness.stats().stored_blocks > 200, "{:?}", harness.stats());
    harness.replies.clear();
    let writes = 150;
    for block in 1000..1000 + writes {
        harness.submit(IoOp::Write, range(block), &noise(block, BLOCK_SIZE));
    }
    (harness, writes as usize)
}

fn ends(harness: &mut Harness) -> bool {
    let limit = harness.now + LIMIT;
    while *harness.engine.state() != State::Stopped && harness.now < limit {
        harness.settle();
        harness.wait(Duration::from_millis(5));
    }
    *harness.engine.state() == State::Stopped
}

#[test]
fn it_answers_writes_that_wait_for_room_and_ends() {
    let (mut harness, writes) = full();
    harness.stop();
    assert!(ends(&mut harness), "{:?}", harness.stats());
    assert_eq!(harness.replies.len(), writes);
    assert!(harness.replies.iter().all(|reply| reply.result.is_ok()), "{:?}", harness.replies);
}
