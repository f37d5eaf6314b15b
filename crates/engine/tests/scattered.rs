//! Dirty blocks that are scattered over a large volume: each stripe with one takes memory.

use forebay_block::{ByteRange, IoOp};
use forebay_engine::testing::{Devices, Harness, config};
use forebay_engine::{Shard, ShardConfig};

const STRIPE: u64 = 1 << 20;
const STRIPES: u64 = 60;
const BLOCK: u64 = 4096;
const CACHE: u64 = 8 << 20;
/// Stripes with dirty blocks for which there is memory.
const MEMORY: u64 = 10;

fn start() -> Harness {
    let config = ShardConfig { dirty_stripes: MEMORY, ..config(CACHE, STRIPES * STRIPE) };
    Harness::start(config, Devices::new(CACHE, STRIPES * STRIPE))
}

fn write(harness: &mut Harness, block: u64) {
    let bytes = [(block % 200) as u8 + 1; BLOCK as usize];
    let written = harness.ask(IoOp::Write, ByteRange::new(block * BLOCK, BLOCK), &bytes);
    written.expect("it waits and does not fail");
}

#[test]
fn scattered_writes_wait_when_there_is_no_memory_for_more_stripes() {
    let mut harness = start();
    let mut most = 0;
    for stripe in 0..STRIPES {
        write(&mut harness, stripe * STRIPE / BLOCK);
        most = most.max(harness.engine.dirty_blocks());
    }
    assert!((MEMORY / 2..=MEMORY).contains(&most), "{most} stripes were dirty");
    let limit = harness.engine.volumes(harness.now)[0].dirty_limit_blocks;
    assert!((MEMORY - 1..=MEMORY).contains(&limit), "the statistics say {limit}");
    harness.drain();
    for stripe in 0..STRIPES {
        let at = (stripe * STRIPE) as usize;
        let expected = (stripe * STRIPE / BLOCK % 200) as u8 + 1;
        assert!(harness.devices.primary[at..][..BLOCK as usize].iter().all(|&b| b == expected));
    }
}

#[test]
fn neighbors_take_no_more_memory() {
    let mut harness = start();
    (0..400).for_each(|block| write(&mut harness, block));
    let dirty = harness.engine.dirty_blocks();
    assert!(dirty > 40 * MEMORY / 2, "{dirty} blocks of two stripes are dirty");
}
