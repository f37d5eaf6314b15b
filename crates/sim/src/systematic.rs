//! Short scripts, crashed after every single event, with every outcome of the writes that are not
//! durable at that moment, within bounds.

use std::time::Duration;

use forebay_block::{ByteRange, IoOp};
use forebay_engine::{ContentLocality, Mode, Part};

use crate::atlas::Scenario;
use crate::config::Setup;
use crate::disk::Fate;
use crate::planted::Mischief;
use crate::run::{Options, Report, run};
use crate::script::Step;
use crate::shard::Maker;
use crate::world::Failure;

/// Most uncertain writes for which every combination of outcomes is tried.
const WRITES_ALL: usize = 4;
/// More writes than are uncertain at any crash of these scripts.
const WRITES_KEPT: usize = 256;
/// The outcomes tried for each write in these combinations.
const OUTCOMES: [Fate; 4] = [Fate::Keep, Fate::Drop, Fate::Prefix(1), Fate::Garble(1)];

/// A crash that led to a failure.
#[derive(Debug)]
pub struct Found {
    /// Name of the script.
    pub script: &'static str,
    /// Mode of the volume.
    pub mode: Mode,
    /// Events before the crash.
    pub after: u64,
    /// Outcome of each uncertain write.
    pub fates: Vec<Fate>,
    /// Events of the recovery before it was crashed too, if it was.
    pub recovery: Option<u64>,
    /// The failure.
    pub failure: Failure,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "script '{}' in {}, crashed after {} events with {:?}, recovery after {:?}: {}",
            self.script,
            self.mode.name(),
            self.after,
            self.fates,
            self.recovery,
            self.failure
        )
    }
}

/// Crashes every script in every mode after every event; reports each script and mode when it is
/// done. Returns the number of crashes.
///
/// # Errors
/// The first crash that led to a failure.
pub fn every_crash(
    make: Maker,
    mut progress: impl FnMut(&str, Mode, u64),
) -> Result<u64, Box<Found>> {
    let mut crashes = 0;
    for (name, steps) in scripts() {
        for (_, mode) in Mode::NAMES {
            let done = crash_everywhere(name, &steps, mode, make)?
                + crash_recovery_everywhere(name, &steps, mode, make)?;
            progress(name, mode, done);
            crashes += done;
        }
    }
    Ok(crashes)
}

/// Crashes one script after every event, with every outcome.
///
/// # Errors
/// The first crash that led to a failure.
pub fn crash_everywhere(
    script: &'static str,
    steps: &[Step],
    mode: Mode,
    make: Maker,
) -> Result<u64, Box<Found>> {
    let case = |after, fates| Case { script, steps, mode, after, fates, recovery: None };
    let mut crashes = 0;
    for after in 0.. {
        let first = case(after, Vec::new()).run(make)?;
        crashes += first.tally.crashes;
        if first.tally.crashed_at_end {
            break;
        }
        for fates in combinations(first.tally.uncertain.unwrap_or(0)) {
            crashes += case(after, fates).run(make)?.tally.crashes;
        }
    }
    Ok(crashes)
}

/// Crashes one script after every event, and then its recovery after every event.
///
/// # Errors
/// The first crash that led to a failure.
pub fn crash_recovery_everywhere(
    script: &'static str,
    steps: &[Step],
    mode: Mode,
    make: Maker,
) -> Result<u64, Box<Found>> {
    let mut crashes = 0;
    for after in 0.. {
        for cut in 0.. {
            let fates = vec![Fate::Keep; WRITES_KEPT];
            let recovery = Some(cut);
            let tally = Case { script, steps, mode, after, fates, recovery }.run(make)?.tally;
            crashes += tally.crashes;
            if tally.crashed_at_end {
                return Ok(crashes);
            }
            if tally.recovery_crashes == 0 {
                break;
            }
        }
    }
    Ok(crashes)
}

/// One crash to try.
struct Case<'a> {
    script: &'static str,
    steps: &'a [Step],
    mode: Mode,
    after: u64,
    fates: Vec<Fate>,
    /// Number of events after which recovery is crashed.
    recovery: Option<u64>,
}

impl Case<'_> {
    fn run(self, make: Maker) -> Result<Report, Box<Found>> {
        let Self { script, steps, mode, after, fates, recovery } = self;
        let crash = Step::Crash { after, recoveries: recovery.into_iter().collect() };
        let all: Vec<Step> = std::iter::once(crash).chain(steps.iter().cloned()).collect();
        let options = Options { fates: Some(fates.clone()), ..Options::default() };
        run(setup(mode), &all, make, Mischief::none(), options)
            .map_err(|failure| Box::new(Found { script, mode, after, fates, recovery, failure }))
    }
}

/// The combinations of outcomes to try for this many uncertain writes.
fn combinations(writes: usize) -> Vec<Vec<Fate>> {
    if writes <= WRITES_ALL {
        let mut all = vec![Vec::new()];
        for _ in 0..writes {
            all = (all.iter())
                .flat_map(|start: &Vec<Fate>| {
                    OUTCOMES.map(|fate| [start.as_slice(), &[fate]].concat())
                })
                .collect();
        }
        return all;
    }
    let mut some = vec![vec![Fate::Keep; writes]];
    for odd in 0..writes {
        for (usual, fate) in [
            (Fate::Keep, Fate::Drop),
            (Fate::Drop, Fate::Keep),
            (Fate::Keep, Fate::Garble(1)),
            (Fate::Drop, Fate::Prefix(1)),
        ] {
            let mut fates = vec![usual; writes];
            fates[odd] = fate;
            some.push(fates);
        }
    }
    some
}

/// One shard, one small volume, fast devices.
pub(crate) fn setup(mode: Mode) -> Setup {
    let mut setup = Setup::from_seed(0);
    setup.shards = 1;
    setup.scenario = Scenario::Crashes;
    setup.also = None;
    setup.volumes.truncate(1);
    let volume = &mut setup.volumes[0];
    volume.size = (1 << 20) - 512;
    volume.mode = mode;
    volume.sequential_threshold = 0;
    volume.windows = vec![ByteRange::new(0, 64 << 10)];
    volume.filled = true;
    setup.segment_size = 64 << 10;
    setup.segments = 8;
    setup.ram_bytes = 64 << 10;
    setup.index_blocks = 512;
    setup.write_cache_depth = Duration::from_millis(2);
    setup.dirty_limit = Part::Percent(50);
    setup.destage_depth = 4;
    setup.compress = true;
    setup.content = ContentLocality::Rewrite;
    setup.cache.size = (2 << 20) + (576 << 10);
    setup.cache.volatile = true;
    setup.cache.garbles = true;
    setup.cache.latency = (10_000, 40_000);
    setup.cache.flush = (20_000, 100_000);
    setup.cache.slow_percent = 0;
    setup.primary.volatile = true;
    setup.primary.garbles = matches!(mode, Mode::WriteBack | Mode::WriteOnly);
    setup.primary.latency = (50_000, 200_000);
    setup.primary.flush = (50_000, 500_000);
    setup.primary.slow_percent = 0;
    setup.client_depth = 4;
    setup.think = 0;
    setup.power = true;
    setup.verify_percent = 100;
    setup
}

fn request(op: IoOp, offset: u64, len: u64, fua: bool) -> Step {
    Step::Request { volume: 0, op, range: ByteRange::new(offset, len), fua, again: None }
}

pub(crate) fn write(offset: u64, len: u64) -> Step {
    request(IoOp::Write, offset, len, false)
}

pub(crate) fn flush() -> Step {
    request(IoOp::Flush, 0, 0, false)
}

/// The scripts; each exercises one path of the engine.
#[must_use]
pub fn scripts() -> Vec<(&'static str, Vec<Step>)> {
    use IoOp::{Discard, Read, WriteZeroes};
    use Step::{Drain, Pause, Restart, Settle};
    vec![
        ("one write", vec![write(0, 4096)]),
        ("write and flush", vec![write(0, 4096), Settle, flush(), Settle]),
        (
            "rewritten after a flush",
            vec![write(0, 8192), Settle, flush(), Settle, write(0, 4096), Settle, write(4096, 512)],
        ),
        ("force unit access", vec![request(IoOp::Write, 0, 4096, true), Settle, write(0, 4096)]),
        ("parts of blocks", vec![write(512, 1024), write(100, 5000), Settle, flush()]),
        ("overlapping", vec![write(0, 16384), write(4096, 4096), write(8192, 16384), flush()]),
        (
            "zeros over data",
            vec![
                write(0, 16384),
                Settle,
                flush(),
                request(WriteZeroes, 4096, 8192, false),
                flush(),
            ],
        ),
        (
            "discard",
            vec![write(0, 16384), Settle, flush(), request(Discard, 0, 16384, false), flush()],
        ),
        (
            "destaged and read again",
            vec![
                write(0, 12288),
                flush(),
                Pause(20_000_000),
                request(Read, 0, 12288, false),
                write(4096, 4096),
                flush(),
                Pause(20_000_000),
            ],
        ),
        ("drained", vec![write(0, 32768), Settle, Drain(true), Pause(50_000_000), write(0, 4096)]),
        ("stopped in order", vec![write(0, 8192), Settle, Restart, write(4096, 8192), flush()]),
        (
            "fill and write",
            vec![
                request(Read, 0, 16384, false),
                write(4096, 4096),
                request(Read, 0, 16384, false),
                Settle,
                write(0, 4096),
                flush(),
            ],
        ),
    ]
}

/// A script that goes once around the log: long, so it is not crashed everywhere by default.
#[must_use]
pub fn around_the_log() -> Vec<Step> {
    let mut steps = Vec::new();
    for round in 0..6u64 {
        for at in 0..4u64 {
            steps.push(write(at * 16384 + round % 2 * 4096, 12288));
        }
        steps.push(Step::Settle);
        steps.push(flush());
        steps.push(Step::Pause(10_000_000));
    }
    steps
}
