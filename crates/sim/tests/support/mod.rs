//! The world that tests with their own script begin with.

use forebay_block::ByteRange;
use forebay_engine::Mode;
use forebay_sim::config::Setup;

/// A world of one shard with small segments, and one volume of 4 MiB in this mode, of which
/// clients use the first 256 KiB. Scenario, log size and devices are those of the seed.
pub fn one_volume(seed: u64, mode: Mode) -> Setup {
    let mut setup = Setup::from_seed(seed);
    setup.also = None;
    setup.shards = 1;
    setup.volumes.truncate(1);
    let volume = &mut setup.volumes[0];
    volume.size = 4 << 20;
    volume.mode = mode;
    volume.sequential_threshold = 0;
    volume.windows = vec![ByteRange::new(0, 256 << 10)];
    setup.segment_size = 64 << 10;
    setup.primary.garbles = false;
    setup
}
