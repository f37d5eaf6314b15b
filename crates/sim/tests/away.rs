//! A primary that goes away for good stops the writes of its own volume only.

use forebay_sim::away::world;
use forebay_sim::planted::Mischief;
use forebay_sim::run::{Options, run};
use forebay_sim::shard::real;

/// Worlds that are run.
const WORLDS: u64 = 200;

#[test]
fn volumes_do_not_notice_that_the_primary_of_another_is_away() {
    let (mut crashes, mut slowest, mut failed) = (0, 0, 0);
    for seed in 0..WORLDS {
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
