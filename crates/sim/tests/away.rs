//! A primary that goes away forever stops only the writes of its own volume.

use forebay_sim::away::world;
use forebay_sim::planted::Mischief;
use forebay_sim::run::{Options, run};
use forebay_sim::shard::real;

/// Number of worlds to run.
const WORLDS: u64 = 200;
/// Worlds that once failed: repeated crashes left a shard without room, full of dirty blocks of the
/// volume whose primary was away.
const ONCE: [u64; 9] = [220, 270, 300, 408, 488, 569, 600, 805, 934];

#[test]
fn volumes_do_not_notice_that_the_primary_of_another_is_away() {
    let (mut crashes, mut slowest, mut failed) = (0, 0, 0);
    for seed in (0..WORLDS).chain(ONCE) {
        let (setup, steps) = world(seed);
        match run(setup, &steps, real, Mischief::none(), Options::default()) {
            Ok(report) => {
                crashes += report.tally.crashes;
                failed += report.tally.failed;
                slowest = slowest.max(report.tally.slowest);
            }
            Err(failure) => panic!("world {seed} failed {failure}"),
        }
    }
    println!("{crashes} crashes, {failed} failed requests, slowest {} ms", slowest / 1_000_000);
    assert!(crashes > WORLDS && failed > WORLDS, "{crashes} crashes, {failed} failed");
}
