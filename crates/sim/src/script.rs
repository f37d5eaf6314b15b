//! The actions of clients and of the world in a run: a list of steps derived from the seed.
//! Shrinking a failure drops steps from it.

use std::time::Duration;

use forebay_block::{ByteRange, IoOp, SECTOR_SIZE};
use forebay_engine::Mode;

use crate::atlas::Scenario;
use crate::config::Setup;
use crate::rng::Rng;
use crate::steer::Change;

/// Most bytes of zeros that go through the log.
const ZEROES_MAX: u64 = 60 * 4096;
/// A copy repeats at most the write that many writes back.
pub const COPIED_MAX: usize = 4;

/// One step. Requests are submitted as soon as the clients' depth allows; the other steps happen at
/// their position in the script.
#[derive(Clone, Debug)]
pub enum Step {
    /// A client's request; `fua` only for operations that change data.
    Request {
        /// Index of the volume.
        volume: usize,
        /// The operation.
        op: IoOp,
        /// The byte range; empty for a flush.
        range: ByteRange,
        /// Whether it must be durable when it completes.
        fua: bool,
        /// Whether a write repeats, in another place, an earlier write of whole blocks: the number
        /// of writes back.
        again: Option<u8>,
    },
    /// Nothing is submitted for this many nanoseconds.
    Pause(u64),
    /// Nothing is submitted until every request is answered.
    Settle,
    /// Power fails after some more events; recovery itself is then cut off several times.
    Crash {
        /// Events before the power failure.
        after: u64,
        /// For each attempt to recover, the events before it is cut off.
        recoveries: Vec<u64>,
    },
    /// The server stops in order and starts again.
    Restart,
    /// A volume's mode changes.
    SetMode(usize, Mode),
    /// A volume's primary is said to have been changed: its clean blocks are dropped.
    Distrust(usize),
    /// Begins or ends a drain while requests continue.
    Drain(bool),
    /// Begins or ends a drain of a volume.
    DrainVolume(usize, bool),
    /// Writes wait this long for a primary that is away.
    SetPatience(Duration),
    /// The fault of the scenario begins; the number seeds its details.
    Break(u64),
    /// All faults end.
    Heal,
    /// A volume or the cache changes.
    Steer(Change),
}

/// Derives the script of a setup.
#[must_use]
pub fn script(setup: &Setup) -> Vec<Step> {
    let mut rng = Rng::new(setup.seed ^ 0x5c21_77aa);
    let count = rng.pick(&[20, 60, 120, 240]);
    let count = if setup.striped { 4 * count } else { count };
    let mut mix = Mix::from_rng(&mut rng);
    // Uses random numbers of its own, so that the other steps of a seed stay unchanged.
    let mut copies = Rng::new(setup.seed ^ 0x0d0b_1e55);
    let mut copied = copies.pick(&[0, 20, 60, 90]);
    if setup.meets(Scenario::CacheLost) {
        // Older content of a sector, from a partial write or a copy, would look like damage.
        (mix.bytes, copied) = (0, 0);
    }
    let mut prefetches = Rng::new(setup.seed ^ 0x4f3a_9d21);
    let prefetched = prefetches.pick(&[0, 0, 10, 40]);
    if setup.meets(Scenario::CacheEnds) {
        // The order is that of flushes. Nothing is promised between a crash and the next cut.
        let mut rng = Rng::new(setup.seed ^ 0x000f_1054);
        mix.flush = rng.pick(&[5, 15, 30, 50]);
        mix.write = mix.write.max(50);
        if rng.percent(60) {
            mix.crash_percent = 0;
        }
    }
    if setup.striped {
        let mut rng = Rng::new(setup.seed ^ 0x0057_219f);
        (mix.sequential, mix.zero, mix.odd) = (rng.pick(&[0, 10]), rng.pick(&[0, 5]), 0);
        (mix.write, mix.blocks_max) = (rng.pick(&[40, 70]), rng.pick(&[1, 2, 4]));
    }
    let mut restless = Rng::new(setup.seed ^ 0x4e57_1e56);
    if setup.restless {
        mix.blocks_max = restless.pick(&[1, 4, 80, 600]);
        mix.discard = restless.pick(&[5, 20, 40]);
        mix.zero = restless.pick(&[0, 5, 20]);
    }
    let mut mixed = Rng::new(setup.seed ^ 0x000a_11ee);
    let outcome = setup.outcome();
    let mut steps = Vec::new();
    let mut streams: Vec<Option<u64>> = vec![None; setup.volumes.len()];
    let mut broken = false;
    let break_at = match setup.meets(Scenario::CacheEnds) {
        true => Rng::new(setup.seed ^ 0x000b_4ea4).below(count),
        false => count / 4,
    };
    for i in 0..count {
        let may_crash = outcome.crashes || !broken;
        if may_crash && rng.percent(mix.crash_percent) {
            steps.push(crash(&mut rng));
        } else if may_crash && rng.percent(1) {
            steps.push(Step::Restart);
        } else if rng.percent(mix.pause_percent) {
            steps.push(pause(&mut rng));
        } else if rng.percent(1) {
            steps.push(Step::Drain(rng.percent(50)));
        } else if setup.steered.is_some() && rng.percent(5) {
            steps.push(Step::Steer(Change::from_rng(&mut rng, setup)));
        } else if setup.scenario.changes_modes() && rng.percent(5) {
            let volume = rng.below(setup.volumes.len() as u64) as usize;
            let mode = rng.below(Mode::NAMES.len() as u64) as usize;
            steps.push(Step::SetMode(volume, Mode::NAMES[mode].1));
        } else {
            let mut request = mix.request(setup, &mut rng, &mut streams);
            if let Step::Request { op: IoOp::Write, again, .. } = &mut request {
                let which = copies.below(COPIED_MAX as u64) as u8;
                *again = copies.percent(copied).then_some(which);
            }
            if let Step::Request { op: op @ IoOp::Read, .. } = &mut request
                && prefetches.percent(prefetched)
            {
                *op = IoOp::Prefetch;
            }
            steps.push(request);
        }
        if setup.restless && restless.percent(12) {
            let volume = restless.below(setup.volumes.len() as u64) as usize;
            steps.push(match restless.below(3) {
                0 => Step::Distrust(volume),
                _ => Step::Break(restless.number()),
            });
            broken = true;
        }
        if setup.mixed && mixed.percent(4) {
            steps.push(order(&mut mixed, setup));
        }
        if i >= break_at && !broken {
            steps.push(Step::Break(rng.number()));
            broken = true;
        }
        if broken && outcome.crashes && rng.percent(3) {
            steps.push(if rng.percent(50) { Step::Heal } else { Step::Break(rng.number()) });
        }
    }
    if setup.meets(Scenario::CacheEnds) {
        // It fails, and is gone some time later.
        let first = steps.iter().position(|step| matches!(step, Step::Break(_)));
        let first = first.map_or(steps.len(), |first| first + 1) as u64;
        let at = rng.within(first, steps.len() as u64) as usize;
        steps.insert(at, Step::Break(rng.number()));
    }
    if outcome.crashes && rng.percent(70) {
        steps.push(crash(&mut rng));
    }
    steps
}

fn crash(rng: &mut Rng) -> Step {
    let after = match rng.below(3) {
        0 => rng.below(4),
        1 => rng.below(40),
        _ => rng.below(400),
    };
    let again = if rng.percent(30) { rng.within(1, 3) } else { 0 };
    Step::Crash { after, recoveries: (0..again).map(|_| rng.below(60)).collect() }
}

/// An order to the server, or news for it.
fn order(rng: &mut Rng, setup: &Setup) -> Step {
    let volume = rng.below(setup.volumes.len() as u64) as usize;
    match rng.below(4) {
        0 => Step::Distrust(volume),
        1 if setup.outcome().errors => {
            Step::SetPatience(Duration::from_millis(rng.pick(&[50, 1_000, 30_000])))
        }
        _ => Step::DrainVolume(volume, rng.percent(60)),
    }
}

fn pause(rng: &mut Rng) -> Step {
    match rng.below(4) {
        0 => Step::Settle,
        1 => Step::Pause(rng.below(1_000_000_000)),
        _ => Step::Pause(rng.below(10_000_000)),
    }
}

/// The percentage of each kind of step, and the form of requests.
struct Mix {
    write: u64,
    flush: u64,
    fua: u64,
    zero: u64,
    discard: u64,
    sequential: u64,
    odd: u64,
    bytes: u64,
    hot: u64,
    blocks_max: u64,
    crash_percent: u64,
    pause_percent: u64,
}

impl Mix {
    fn from_rng(rng: &mut Rng) -> Self {
        Self {
            write: rng.pick(&[20, 50, 80, 95]),
            flush: rng.pick(&[0, 3, 10, 30]),
            fua: rng.pick(&[0, 0, 10, 50]),
            zero: rng.pick(&[0, 0, 5, 20]),
            discard: rng.pick(&[0, 0, 5, 20]),
            sequential: rng.pick(&[0, 0, 20, 80]),
            odd: rng.pick(&[0, 10, 50]),
            bytes: rng.pick(&[0, 0, 10]),
            hot: rng.pick(&[0, 50, 90]),
            blocks_max: rng.pick(&[1, 2, 8, 32, 80]),
            crash_percent: rng.pick(&[1, 3, 6, 12]),
            pause_percent: rng.pick(&[0, 2, 8]),
        }
    }

    fn request(&self, setup: &Setup, rng: &mut Rng, streams: &mut [Option<u64>]) -> Step {
        let volume = rng.below(setup.volumes.len() as u64) as usize;
        if rng.percent(self.flush) {
            return Step::Request {
                volume,
                op: IoOp::Flush,
                range: ByteRange::default(),
                fua: false,
                again: None,
            };
        }
        let op = if !rng.percent(self.write) {
            IoOp::Read
        } else if rng.percent(self.zero) {
            IoOp::WriteZeroes
        } else if rng.percent(self.discard) {
            IoOp::Discard
        } else {
            IoOp::Write
        };
        let fua = op.changes_data() && rng.percent(self.fua);
        let windows = &setup.volumes[volume].windows;
        let window = if rng.percent(self.hot) { windows[0] } else { rng.pick(windows) };
        let stream = rng.percent(self.sequential).then_some(&mut streams[volume]);
        let mut range = self.range(rng, window, stream);
        if op == IoOp::WriteZeroes && setup.is_atomic(volume) {
            // Longer ones go directly to the primary, which may tear blocks at a crash.
            range.len = range.len.min(ZEROES_MAX);
        }
        Step::Request { volume, op, range, fua, again: None }
    }

    /// A random range within the window.
    fn range(
        &self,
        rng: &mut Rng,
        window: ByteRange,
        stream: Option<&mut Option<u64>>,
    ) -> ByteRange {
        let sector = SECTOR_SIZE as u64;
        let unit = if rng.percent(self.bytes) {
            1
        } else if rng.percent(self.odd) {
            sector
        } else {
            4096
        };
        let len = match unit {
            4096 => rng.within(1, self.blocks_max) * 4096,
            _ => rng.within(1, self.blocks_max * 4096 / unit) * unit,
        };
        let offset = match stream {
            Some(next) => {
                let at = next.filter(|&at| at >= window.offset && at < window.end());
                let at = at.unwrap_or(window.offset);
                *next = Some(at + len);
                at
            }
            None => {
                let at = window.offset + rng.below(window.len);
                (at - at % unit).max(window.offset)
            }
        };
        ByteRange::new(offset, len.min(window.end() - offset))
    }
}
