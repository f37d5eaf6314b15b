//! Pages of the cache device are damaged repeatedly while it is not in use, between crashes.

use forebay_sim::planted::Mischief;
use forebay_sim::rest::world;
use forebay_sim::run::{Options, run};
use forebay_sim::shard::real;

/// Number of worlds to run.
const WORLDS: u64 = 200;

#[test]
fn what_was_damaged_at_rest_is_an_error_or_right_and_never_other_bytes() {
    let (mut crashes, mut pages, mut failed, mut refusals) = (0, 0, 0, 0);
    for seed in 0..WORLDS {
        let (setup, steps) = world(seed);
        match run(setup, &steps, real, Mischief::none(), Options::default()) {
            Ok(report) => {
                crashes += report.tally.crashes;
                pages += report.tally.struck;
                failed += report.tally.failed;
                refusals += report.tally.refusals;
            }
            Err(failure) => panic!("world {seed} failed {failure}; forebay-sim damage"),
        }
    }
    println!("{crashes} crashes, {pages} pages, {failed} requests failed, {refusals} refused");
    // The damage is encountered, and mostly survived.
    assert!(crashes > WORLDS && pages > WORLDS && failed > 0, "{crashes}, {pages}, {failed}");
    assert!(refusals < WORLDS / 2, "{refusals} starts were refused");
}
