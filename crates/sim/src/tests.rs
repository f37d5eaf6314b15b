//! The world itself, tested with a toy engine: correct behavior passes, flaws are detected.

use forebay_engine::Mode;

use crate::atlas::Scenario;
use crate::config::Setup;
use crate::failure::Kind;
use crate::planted::Mischief;
use crate::run::{Options, Report, run};
use crate::script::script;
use crate::shard::Maker;
use crate::toy;
use crate::world::Failure;

fn run_toy(seed: u64, make: Maker) -> Result<Report, Failure> {
    let mut setup = Setup::from_seed(seed);
    setup.scenario = Scenario::Crashes;
    setup.also = None;
    setup.primary.garbles = false;
    setup.volumes.iter_mut().for_each(|volume| volume.mode = Mode::PassThrough);
    let steps = script(&setup);
    run(setup, &steps, make, Mischief::none(), Options::default())
}

fn first_failure(make: Maker) -> Option<Failure> {
    (0..200).find_map(|seed| run_toy(seed, make).err())
}

#[test]
fn a_device_without_a_cache_is_found_to_be_sound() {
    let mut crashes = 0;
    for seed in 0..200 {
        let report = run_toy(seed, toy::sound);
        let report = report.unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
        crashes += report.tally.crashes;
    }
    assert!(crashes > 200, "only {crashes} crashes");
}

#[test]
fn lost_flushes_stale_reads_and_forgotten_requests_are_found() {
    let lost = first_failure(toy::no_flush).expect("found");
    assert!(lost.what.contains("found") && lost.what.contains("allowed"), "{lost}");
    assert!(matches!(lost.kind, Kind::Lost | Kind::Alone), "{lost}");
    let stale = first_failure(toy::stale_reads).expect("found");
    assert!(stale.what.contains("found write"), "{stale}");
    assert_eq!(stale.kind, Kind::Stale, "{stale}");
    let stuck = first_failure(toy::forgets).expect("found");
    assert_eq!(stuck.kind, Kind::Stuck, "{stuck}");
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..20 {
        let hash = || run_toy(seed, toy::sound).expect("sound").hash;
        assert_eq!(hash(), hash(), "seed {seed}");
    }
    let hash = |seed| run_toy(seed, toy::sound).expect("sound").hash;
    assert_ne!(hash(1), hash(2));
}
