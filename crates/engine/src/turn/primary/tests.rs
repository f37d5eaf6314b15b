//! The flushes of primaries, as the whole engine sees them.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, ByteRange, IoOp};

use crate::testing::rooms::BLOCK;
use crate::testing::{Devices, Harness, SEGMENT, config};

/// Nothing that was read from it entered the cache device until the next start.
#[test]
fn what_is_read_from_a_primary_that_was_away_at_the_start_is_admitted_when_it_is_back() {
    let (cache, size) = (8 * u64::from(SEGMENT), 1000 * BLOCK);
    let mut harness = Harness::start(config(cache, size), Devices::new(cache, size));
    harness.away = true;
    harness.settle();
    let read = |harness: &mut Harness, block: u64| {
        harness.submit(IoOp::Read, ByteRange::new(block * BLOCK, BLOCK), &[0; BLOCK_SIZE]);
        harness.settle();
        harness.replies.pop().expect("it is answered").result.is_ok()
    };
    assert!(!read(&mut harness, 5));
    harness.away = false;
    for _ in 0..20 {
        harness.wait(Duration::from_millis(200));
        harness.settle();
    }
    assert!(read(&mut harness, 6));
    assert_eq!(harness.stats().admitted_blocks, 1);
}
