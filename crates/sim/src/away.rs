//! Worlds of two or three volumes in which one primary goes away and does not return: it fails
//! every request, or answers none.
//!
//! The other volumes must not notice: none of their requests fails or takes long, their flushes
//! succeed, and all their dirty data reaches their primaries. Writes to the volume whose primary is
//! away are still there when it finally returns.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, ByteRange, IoOp};
use forebay_engine::Mode;

use crate::atlas::Scenario;
use crate::config::Setup;
use crate::disk::{Fault, Rule};
use crate::failure::Kind;
use crate::rng::Rng;
use crate::script::{Step, script};
use crate::world::{Failure, World};

const SECOND: u64 = 1_000_000_000;
/// Longest virtual time in which a request of another volume must be answered.
pub const OTHERS_ANSWER: u64 = 10 * SECOND;
/// Longest virtual time in which the others' dirty data must be on their primaries.
const OTHERS_DRAIN: u64 = 120 * SECOND;

/// The volume whose primary is away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Away {
    /// Index of the volume.
    pub volume: usize,
    /// Whether it never answers, instead of failing requests.
    pub hangs: bool,
}

/// The world of a seed, and its script.
#[must_use]
pub fn world(seed: u64) -> (Setup, Vec<Step>) {
    let mut rng = Rng::new(seed ^ 0x0a7a_715a);
    let mut setup = Setup::from_seed(seed);
    setup.scenario = Scenario::PrimaryStaysAway;
    setup.also = None;
    let count = rng.within(2, 3) as usize;
    let modes = [Mode::WriteBack, Mode::WriteBack, Mode::WriteBack, Mode::WriteThrough];
    while setup.volumes.len() < count {
        let volume = setup.volumes[0].clone();
        setup.volumes.push(volume);
    }
    setup.volumes.iter_mut().for_each(|volume| volume.mode = rng.pick(&modes));
    // Longer than others may wait.
    setup.patience = Duration::from_secs(30);
    setup.cache.slow_percent = 0;
    setup.primary.slow_percent = 0;
    setup.primary.garbles = false;
    let away = Away::of(&setup);
    if away.hangs {
        setup.volumes[away.volume].mode = Mode::WriteBack;
        setup.volumes[away.volume].sequential_threshold = 0;
    }
    let mut steps = script(&setup);
    // These steps wait for every primary.
    steps.retain(|step| !matches!(step, Step::Restart | Step::Heal | Step::SetMode(..)));
    steps.extend(script(&Setup { seed: seed ^ 1, ..setup.clone() }));
    steps.retain(|step| !matches!(step, Step::Restart | Step::Heal | Step::SetMode(..)));
    (setup, steps)
}

impl Away {
    /// Chooses the volume of a setup, and how its primary goes away.
    #[must_use]
    pub fn of(setup: &Setup) -> Self {
        let mut rng = Rng::new(setup.seed ^ 0x00a7_a700);
        Self { volume: rng.below(setup.volumes.len() as u64) as usize, hangs: rng.percent(40) }
    }
}

impl World {
    /// Makes the primary go away.
    pub(crate) fn send_away(&mut self) {
        let away = Away::of(&self.setup);
        if self.away.replace(away).is_some() {
            return;
        }
        let disk = &mut self.primaries[away.volume];
        if !away.hangs {
            return disk.vanish();
        }
        let ops: &[IoOp] =
            &[IoOp::Read, IoOp::Write, IoOp::WriteZeroes, IoOp::Discard, IoOp::Flush];
        let range = ByteRange::new(0, u64::MAX);
        disk.add_rule(Rule { fault: Fault::Slow(u64::MAX / 4), ops, range, times: u32::MAX });
    }

    /// Whether a request would wait for a primary that never answers.
    pub(crate) fn would_hang(&self, volume: usize, op: IoOp, range: ByteRange) -> bool {
        let hung = self.away.is_some_and(|away| away.hangs && away.volume == volume);
        hung && !(op == IoOp::Write && range.is_aligned(BLOCK_SIZE as u64))
    }

    /// Requests in flight, except those to a primary that never answers.
    pub(crate) fn waiting(&self) -> usize {
        let hung = self.away.filter(|away| away.hangs).map(|away| away.volume);
        self.clients.values().filter(|client| Some(client.volume) != hung).count()
    }

    /// Fails if an answer came too late, and names the cause of the delay.
    pub(crate) fn check_haste(&mut self, volume: usize, took: u64) -> Result<(), Failure> {
        if self.away.is_none_or(|away| away.volume == volume) {
            return Ok(());
        }
        self.tally.slowest = self.tally.slowest.max(took);
        if took <= OTHERS_ANSWER {
            return Ok(());
        }
        let took = took / 1_000_000;
        Err(self
            .fail(Kind::Stuck, format!("volume {volume} waited {took} ms while another was away")))
    }

    /// Lets the other volumes finish; then the primary returns.
    pub(crate) fn finish_away(&mut self) -> Result<(), Failure> {
        let Some(away) = self.away else { return Ok(()) };
        self.wait("the last crash and the requests in flight", |world| {
            world.crash_in.is_none() || world.is_idle()
        })?;
        if let Some((_, recoveries)) = self.crash_in.take() {
            self.crash(recoveries)?;
        }
        self.settle()?;
        self.drain(true);
        let since = self.now;
        let others = |world: &Self| -> u64 {
            let volumes = world.volume_states();
            let others = volumes.iter().filter(|state| usize::from(state.id.0) != away.volume);
            others.map(|state| state.dirty_blocks).sum()
        };
        self.wait("the others to be destaged", |world| {
            others(world) == 0 || world.now > since + OTHERS_DRAIN
        })?;
        let left = others(self);
        if left > 0 {
            let hangs = self.what_hangs();
            return Err(
                self.fail(Kind::Stuck, format!("{left} blocks of others stay dirty: {hangs}"))
            );
        }
        for volume in (0..self.models.len()).filter(|&volume| volume != away.volume) {
            self.request(volume, IoOp::Flush, ByteRange::default(), false, None)?;
        }
        self.settle()?;
        self.drain(false);
        self.away = None;
        self.heal();
        if away.hangs {
            // A request that never completes ends only with the process.
            self.crash(Vec::new())?;
        }
        Ok(())
    }
}
