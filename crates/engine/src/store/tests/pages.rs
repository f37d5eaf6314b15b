//! Pages of a database on their way from clients through the log into the store.

use forebay_block::testing::noise;
use forebay_block::{BLOCK_SIZE, ByteRange, IoOp, STRIPE_BLOCKS};

use crate::api::ShardConfig;
use crate::testing::{Devices, Harness, SEGMENT, config};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Blocks of a page.
const PAGE_BLOCKS: u64 = 4;
/// Pages written: twice as many bytes as the log has, and fewer blocks than may be dirty.
const PAGES: u64 = 120;

/// A page of which a good half of each block is noise, so that it fits three pages of the store.
fn page(number: u64) -> Vec<u8> {
    let mut page = vec![0; (PAGE_BLOCKS * BLOCK) as usize];
    for (i, block) in page.chunks_exact_mut(BLOCK_SIZE).enumerate() {
        block[..2300].copy_from_slice(&noise(number * PAGE_BLOCKS + i as u64, 2300));
    }
    page
}

/// The place of a page on the volume: no page begins at a multiple of its length.
fn range(number: u64) -> ByteRange {
    let in_stripe = STRIPE_BLOCKS / PAGE_BLOCKS - 1;
    let first = number / in_stripe * STRIPE_BLOCKS + number % in_stripe * PAGE_BLOCKS + 1;
    ByteRange::new(first * BLOCK, PAGE_BLOCKS * BLOCK)
}

/// A cache whose store is empty.
fn harness() -> Harness {
    let cache = 64 * u64::from(SEGMENT);
    let primary = 2 * PAGES * PAGE_BLOCKS * BLOCK;
    let config = ShardConfig { log_segments: Some(8), compress: true, ..config(cache, primary) };
    let mut harness = Harness::start(config, Devices::new(cache, primary));
    harness.settle();
    harness
}

/// Every page can be read, and pages are in the store as whole units: parts of a page would take a
/// page of the store each, and all together four.
fn assert_whole(mut harness: Harness) {
    let stats = harness.stats();
    assert!(stats.stored_blocks > PAGES, "{stats:?}");
    let held = (stats.stored_blocks * BLOCK) as f64 / stats.store_bytes as f64;
    assert!(held > 1.25, "a byte of the store holds {held:.2}");
    for number in 0..PAGES {
        let found = harness.ask(IoOp::Read, range(number), &[]);
        assert!(found.is_some_and(|found| found[..] == page(number)[..]), "page {number}");
    }
}

#[test]
fn a_page_is_one_unit_wherever_it_begins() {
    let mut harness = harness();
    for number in 0..PAGES {
        assert!(harness.ask(IoOp::Write, range(number), &page(number)).is_some());
    }
    assert_whole(harness);
}

#[test]
fn pages_whose_blocks_alternate_in_the_log_are_units_too() {
    let mut harness = harness();
    for first in (0..PAGES).step_by(2) {
        for i in 0..PAGE_BLOCKS {
            for number in [first, first + 1] {
                let at = ByteRange::new(range(number).offset + i * BLOCK, BLOCK);
                let bytes = &page(number)[(i * BLOCK) as usize..][..BLOCK_SIZE];
                assert!(harness.ask(IoOp::Write, at, bytes).is_some());
            }
        }
    }
    assert_whole(harness);
}

/// Blocks of zeros are in the log alone. Where they fill the index, only the oldest segment can
/// make room, and the record that frees it must not wait for the writes that need the room.
#[test]
fn a_write_gets_room_in_an_index_that_is_full_of_zeros() {
    let (cache, primary) = (64 * u64::from(SEGMENT), 400 * BLOCK);
    let (log_segments, ram_bytes) = (Some(8), 0);
    let config =
        ShardConfig { log_segments, ram_bytes, index_blocks: 176, ..config(cache, primary) };
    let mut harness = Harness::start(config, Devices::new(cache, primary));
    harness.settle();
    for round in 0..4 {
        for block in 0..300 {
            let at = ByteRange::new(block * BLOCK, BLOCK);
            assert!(harness.ask(IoOp::Read, at, &[]).is_some());
        }
        for block in 300..330 {
            let at = ByteRange::new(block * BLOCK, BLOCK);
            let bytes = noise(1000 * round + block, BLOCK_SIZE);
            assert!(harness.ask(IoOp::Write, at, &bytes).is_some());
        }
    }
}
