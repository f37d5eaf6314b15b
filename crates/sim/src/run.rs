//! A whole run: a start, the script with crashes, then healing, after which everything must finish.
//!
//! Safety phase: whatever the script does, no answer differs from the model. Liveness phase: faults
//! are over, every request is answered, everything dirty is destaged, and the primaries alone hold
//! the content.

use std::time::Duration;

use forebay_block::{BlockRange, ByteRange, IoOp};
use forebay_engine::{
    CacheShare, ContentLocality, DirtyShare, Eviction, Health, Pace, Part, Setting,
};
use forebay_engine::{State, Stats, Target, Trust};

use forebay_model::Model;

use crate::atlas::Scenario;
use crate::config::Setup;
use crate::disk::{Fate, Rule};
use crate::failure::Kind;
use crate::pages::Pages;
use crate::planted::Mischief;
use crate::rest;
use crate::script::Step;
use crate::server::Server;
use crate::shard::Maker;
use crate::tally::Tally;
use crate::world::{Failure, World};

pub(crate) const SECOND: u64 = 1_000_000_000;
/// Virtual time in which a request must be answered once all faults are over.
const ANSWER_MAX: u64 = 300 * SECOND;
/// Time after which nothing may be left to do in the background, and for which that is checked.
const QUIET_AFTER: u64 = 600 * SECOND;
const QUIET_TIME: u64 = 60 * SECOND;
/// Most writes of that time: a device that fails is tried again.
const QUIET_MAX: u64 = 10;
/// Virtual time beyond the write-cache depth after which nothing may be dirty, without a drain and
/// without clients.
const AGED_AFTER: u64 = 10 * SECOND;
/// Virtual time after which clients no longer wait for a fault to end by itself.
const PATIENCE: u64 = 5 * SECOND;

/// The result of a run that did not fail.
#[derive(Debug)]
pub struct Report {
    /// Counters of the run.
    pub tally: Tally,
    /// A hash of all events.
    pub hash: u64,
    /// A hash of all disks' content at the end.
    pub content: u64,
    /// Duration in virtual nanoseconds.
    pub time: u64,
    /// Counters of the engines at the end.
    pub stats: Stats,
    /// The operations sent to the disk of [`Options::watch`].
    pub asked: Vec<IoOp>,
}

/// Options of a run.
#[derive(Clone, Default, Debug)]
pub struct Options {
    /// Whether every event is printed.
    pub verbose: bool,
    /// The fates of the writes that are uncertain at the first crash; further writes are dropped.
    pub fates: Option<Vec<Fate>>,
    /// A disk whose requests are recorded, and a fault that begins at one of them.
    pub watch: Option<(Target, Option<(usize, Rule)>)>,
}

/// Runs `steps` in the world of `setup`.
///
/// # Errors
/// The first failure.
pub fn run(
    setup: Setup,
    steps: &[Step],
    make: Maker,
    mischief: Mischief,
    options: Options,
) -> Result<Report, Failure> {
    let mut world = World::new(setup, make, mischief, options.verbose);
    world.fates = options.fates;
    let watched = options.watch.as_ref().map(|(target, _)| *target);
    if let Some((target, planned)) = options.watch {
        world.broken = planned.is_some();
        world.was_broken = world.broken;
        if world.broken {
            world.concerned.extend(0..world.primaries.len());
        }
        world.disk(target).record(planned);
    }
    world.boot(false);
    let mut over = !world.recover(Vec::new(), false)?;
    for (i, step) in steps.iter().enumerate() {
        world.step = i;
        if over {
            break;
        }
        world.act(step)?;
        over = world.server.is_none();
    }
    world.step = steps.len();
    let mut stats = Stats::default();
    if !over {
        world.finish()?;
    }
    world.count_deltas();
    if let Some(server) = &world.server {
        stats = server.stats(world.now).into_iter().next().unwrap_or_default();
    }
    world.tally.struck = world.cache.struck + world.primaries.iter().map(|d| d.struck).sum::<u64>();
    let (hash, time) = (world.trace.hash(), world.now);
    let disks = std::iter::once(&world.cache).chain(&world.primaries);
    let content = disks.fold(0, |sum: u64, disk| sum.rotate_left(17) ^ disk.view().digest());
    let asked = watched.map_or(Vec::new(), |target| world.disk(target).asked().to_vec());
    Ok(Report { tally: world.tally, hash, content, time, stats, asked })
}

impl World {
    /// Carries out one step of the script.
    fn act(&mut self, step: &Step) -> Result<(), Failure> {
        match step {
            Step::Request { volume, op, range, fua, again } => {
                let depth = self.setup.client_depth;
                self.wait("room for a request", |world| world.waiting() < depth)?;
                let think = self.setup.think;
                let pause = if think == 0 { 0 } else { self.rng.below(think) };
                self.pass(pause)?;
                let range = self.served(*volume, *range);
                if let Some(range) = range
                    && self.server.is_some()
                    && !self.would_hang(*volume, *op, range)
                {
                    self.request(*volume, *op, range, *fua, *again)?;
                }
                Ok(())
            }
            Step::Pause(nanos) => self.pass(*nanos),
            Step::Settle => {
                self.settle()?;
                self.check_truth()
            }
            Step::Crash { after, recoveries } => {
                if self.crash_in.is_none() {
                    self.crash_in = Some((*after, recoveries.clone()));
                }
                Ok(())
            }
            Step::Restart => self.restart(),
            Step::SetMode(volume, mode) => {
                let Some(id) = self.steering.ids[*volume] else { return Ok(()) };
                self.setup.volumes[*volume].mode = *mode;
                self.switches[*volume] += 1;
                let mode = *mode;
                // A different policy with every mode: over time all pairs occur.
                let eviction = Eviction::NAMES[mode as usize % Eviction::NAMES.len()].1;
                self.setup.eviction = eviction;
                let content =
                    ContentLocality::NAMES[mode as usize % ContentLocality::NAMES.len()].1;
                self.setup.content = content;
                // The same for the other settings of shards.
                let at = self.switches[*volume] as usize + *volume;
                let percent = |percent| Some(Part::Percent(percent));
                let limit = [10, 90, 30, 1, 70].map(Part::Percent)[at % 5];
                let limit = if at % 7 == 3 { Part::Bytes(256 << 10) } else { limit };
                self.setup.dirty_limit = limit;
                let share = [
                    (None, None),
                    (percent(60), None),
                    (percent(0), percent(1)),
                    (None, Some(Part::Bytes(64 << 10))),
                ];
                let (at_least, at_most) = share[at % share.len()];
                let share = DirtyShare { at_least, at_most };
                self.setup.volumes[*volume].share = share;
                let share_of_cache = [
                    (None, percent(5)),
                    (percent(40), None),
                    (None, None),
                    (percent(1), percent(60)),
                ];
                let (at_least, at_most) = share_of_cache[at % 4];
                let cache_share = CacheShare { at_least, at_most };
                self.setup.volumes[*volume].cache_share = cache_share;
                let depth = [1, 10_000, 30, 300].map(Duration::from_millis)[at % 4];
                self.setup.write_cache_depth = depth;
                let target = [50, 0, 90, 20].map(Part::Percent)[at % 4];
                self.setup.dirty_target = target;
                let idle =
                    [Some(5_000), Some(0), None, Some(30)][at % 4].map(Duration::from_millis);
                self.setup.idle_destage = idle;
                let latency = [None, Some(Duration::from_micros(50)), None][at % 3];
                let rate = [None, Some(4 << 20), Some(64 << 20)][at % 3];
                let stripe = [None, Some(0), Some(16 << 10), Some(128 << 10)][at % 4];
                let stripe = stripe.filter(|_| self.setup.striped);
                let pace = Pace { latency, rate, stripe };
                self.setup.volumes[*volume].pace = pace;
                // Nothing, all that is written most, or half of it.
                let hot = self.setup.volumes[*volume].windows[0].blocks();
                let pinned = [0, hot.count, hot.count / 2][at % 3];
                let pinned = [BlockRange { first: hot.first, count: pinned }];
                let fill_rate = [None, Some(1 << 20), Some(64 << 20), Some(1)][at % 4];
                self.setup.fill_rate = fill_rate;
                let wear_budget = [Some(100 << 20), None, Some(1 << 40), Some(1)][at % 4];
                self.setup.wear_budget = wear_budget;
                let forgotten = self.mischief.forgets_switch();
                if let Some(server) = self.server.as_mut() {
                    server.each(|engine| {
                        if !forgotten {
                            engine.set(Setting::Mode(id, mode));
                        }
                        engine.set(Setting::Eviction(eviction));
                        engine.set(Setting::Content(content));
                        engine.set(Setting::DirtyLimit(limit));
                        engine.set(Setting::DirtyShare(id, share));
                        engine.set(Setting::CacheShare(id, cache_share));
                        engine.set(Setting::WriteCacheDepth(depth));
                        engine.set(Setting::DirtyTarget(target));
                        engine.set(Setting::IdleDestage(idle));
                        engine.set(Setting::Pace(id, pace));
                        engine.pin(id, &pinned);
                        engine.set(Setting::FillRate(fill_rate));
                        engine.set(Setting::WearBudget(wear_budget));
                    });
                }
                Ok(())
            }
            Step::Distrust(volume) => {
                if let (Some(id), Some(server)) = (self.steering.ids[*volume], &mut self.server) {
                    server.each(|engine| engine.distrust(id));
                }
                Ok(())
            }
            Step::Drain(on) => {
                self.drain(*on);
                Ok(())
            }
            Step::DrainVolume(volume, on) => {
                if let (Some(id), Some(server)) = (self.steering.ids[*volume], &mut self.server) {
                    server.each(|engine| engine.drain_volume(id, *on));
                }
                Ok(())
            }
            Step::SetPatience(patience) => {
                self.setup.patience = *patience;
                if let Some(server) = &mut self.server {
                    server.each(|engine| engine.set(Setting::Patience(*patience)));
                }
                Ok(())
            }
            Step::Break(seed) => {
                self.break_something(*seed);
                Ok(())
            }
            Step::Heal => {
                self.heal();
                Ok(())
            }
            Step::Steer(change) => self.steer(change),
        }
    }

    pub(crate) fn drain(&mut self, on: bool) {
        if let Some(server) = self.server.as_mut() {
            server.each(|engine| engine.set_drain(on));
        }
    }

    /// Processes the next event, and the crash if it is due. Returns false if there is no event.
    fn advance(&mut self) -> Result<bool, Failure> {
        if let Some((left, recoveries)) = self.crash_in.take() {
            if left == 0 {
                self.crash(recoveries)?;
                return Ok(true);
            }
            self.crash_in = Some((left - 1, recoveries));
        }
        self.event()
    }

    /// Processes events until `enough` is true.
    pub(crate) fn wait(
        &mut self,
        what: &str,
        enough: impl Fn(&Self) -> bool,
    ) -> Result<(), Failure> {
        let mut since = self.now;
        while self.server.is_some() && !enough(self) {
            if !self.advance()? {
                let oldest = self.what_hangs();
                return Err(self.fail(Kind::Stuck, format!("stuck, waiting for {what}: {oldest}")));
            }
            if self.now - since > PATIENCE && self.broken {
                self.heal();
            }
            if self.now - since > ANSWER_MAX {
                let oldest = self.what_hangs();
                return Err(
                    self.fail(Kind::Stuck, format!("too slow, waiting for {what}: {oldest}"))
                );
            }
            since = since.min(self.now);
        }
        Ok(())
    }

    pub(crate) fn settle(&mut self) -> Result<(), Failure> {
        self.wait("the requests in flight", Self::is_idle)
    }

    /// Processes events for `nanos` of virtual time.
    fn pass(&mut self, nanos: u64) -> Result<(), Failure> {
        let until = self.now + nanos;
        while self.next_at().is_some_and(|at| at <= until) && self.server.is_some() {
            self.advance()?;
        }
        self.now = self.now.max(until);
        Ok(())
    }

    /// Crashes, and starts again.
    pub(crate) fn crash(&mut self, recoveries: Vec<u64>) -> Result<(), Failure> {
        let promised = self.is_promised();
        self.cut();
        self.check_primaries()?;
        self.judge(&promised)?;
        let lost = std::mem::take(&mut self.lose_cache);
        if lost {
            self.cache.replace(Pages::new(self.cache.size()));
            self.check_losses()?;
            self.refuse_blank()?;
            if (0..self.models.len()).any(|v| !self.setup.is_complete(v)) {
                return Ok(());
            }
        }
        if std::mem::take(&mut self.turn_back) {
            self.set_back();
        }
        self.damage_at_rest();
        self.now += 1;
        self.change_after_crash();
        self.boot(lost);
        let serves = self.recover(recoveries, lost)?;
        if serves && !self.clients.is_empty() {
            return self.send_again();
        }
        if serves && self.rng.percent(self.setup.verify_percent) {
            self.check_all(!lost)?;
            self.check_lost()?;
        }
        Ok(())
    }

    /// Checks that a blank device is refused in place of the one that served the primaries.
    fn refuse_blank(&mut self) -> Result<(), Failure> {
        let known = self.pool.witnesses.iter().any(|one| {
            let served = one.primaries.as_ref().is_some_and(|all| !all.is_empty());
            one.dirty && one.trust != Trust::Nothing && served
        });
        self.boot(false);
        let refused = self.refusal().is_some_and(|why| why.contains("use that cache device"));
        self.tally.refusals += u64::from(refused);
        // If there was nothing to lose, the device is accepted, and its start is cut off.
        if refused {
            self.shut();
        } else {
            self.cut();
        }
        if refused == known {
            Ok(())
        } else {
            Err(self.fail(Kind::Taken, "a blank cache device was taken"))
        }
    }

    /// Waits until the server serves; recovery is cut off after each of `cuts` events. Returns
    /// false if the start was refused, which ends the run. `reset`: the cache was given up, and a
    /// start that is cut off before the device knows that is given the same instruction again.
    fn recover(&mut self, mut cuts: Vec<u64>, reset: bool) -> Result<bool, Failure> {
        let mut left = cuts.pop();
        let mut healed = false;
        let since = self.now;
        loop {
            if self.all_in(&State::Serving) {
                self.check_stale()?;
                return Ok(true);
            }
            if let Some(why) = self.refusal() {
                self.tally.refusals += 1;
                if reset && why.contains("use that cache device") {
                    self.boot(true);
                    continue;
                }
                // The process ends when the kernel has finished its requests.
                while self.cache.changes() {
                    self.advance()?;
                }
                if self.is_final(&why) {
                    self.shut();
                    return Ok(false);
                }
                let outcome = self.setup.outcome();
                if !outcome.refusal || !self.broken || healed {
                    return Err(self.fail(Kind::Refused, format!("the start was refused: {why}")));
                }
                self.shut();
                if !outcome.crashes {
                    return Ok(false);
                }
                self.heal();
                healed = true;
                self.boot(false);
                continue;
            }
            if left == Some(0) {
                self.tally.recovery_crashes += 1;
                self.cut();
                self.check_primaries()?;
                self.boot(false);
                left = cuts.pop();
                continue;
            }
            left = left.map(|n| n - 1);
            if !self.event()? {
                return Err(self.fail(Kind::Stuck, "recovery is stuck"));
            }
            if self.now - since > ANSWER_MAX {
                return Err(self.fail(Kind::Stuck, "recovery does not end"));
            }
        }
    }

    /// Whether a refusal is correct and permanent, so that the run ends with it.
    fn is_final(&self, why: &str) -> bool {
        let right = |scenario| match scenario {
            // The earlier state may be from before the first superblock was durable.
            Scenario::CacheStale => {
                self.pool.stale
                    && (why.contains("older copy") || why.contains("use that cache device"))
            }
            // The server that saw the failed flush vouches for nothing; the next one does not know
            // of it.
            Scenario::PrimaryFlushErrors | Scenario::PrimaryVanishes => {
                self.pool.believed && why.contains("was changed since")
            }
            // One shard's failed flush may have lost writes that another's next flush covered.
            Scenario::CacheFlushErrors => {
                self.was_broken && why.contains("perhaps with the newest version")
            }
            Scenario::CacheDamaged => self.was_broken && rest::may_refuse(why),
            _ => false,
        };
        right(self.setup.scenario) || self.setup.also.is_some_and(right)
    }

    /// Stops in order, sometimes switches the power off, and starts again.
    pub(crate) fn restart(&mut self) -> Result<(), Failure> {
        self.settle()?;
        if self.server.is_none() {
            return Ok(());
        }
        let crashes = self.tally.crashes;
        let good = self.server.as_ref().is_some_and(|s| s.health() == Health::Good);
        self.ask_to_stop()?;
        self.wait("the server to stop", |world| {
            world.all_in(&State::Stopped) || world.tally.crashes > crashes
        })?;
        if self.tally.crashes == crashes && self.close() {
            while self.is_on_errand() && self.tally.crashes == crashes {
                self.advance()?;
            }
        }
        if self.tally.crashes > crashes {
            return Ok(());
        }
        let off = self.rng.percent(50);
        if off {
            self.cut();
        } else {
            self.forget_failures();
            self.shut();
        }
        if !good {
            // Blocks whose records could not be written were only in memory.
            self.models.iter_mut().for_each(Model::crash);
            // Unlike the writes that primaries hold and may lose with the power.
            for (model, primary) in self.models.iter_mut().zip(&self.primaries).filter(|_| !off) {
                primary.unflushed().for_each(|range| model.may_go(range));
            }
            if !off {
                self.doubt_log();
            }
        }
        self.damage_at_rest();
        self.change_at_rest()?;
        self.boot(false);
        if self.recover(Vec::new(), false)? && self.rng.percent(self.setup.verify_percent) {
            self.check_all(true)?;
        }
        Ok(())
    }

    /// The next start reads a log whose device was given up: the end of the log is no longer
    /// flushed, or a flush succeeds although an earlier one lost data.
    fn doubt_log(&mut self) {
        if self.cache.unflushed().next().is_none() && self.cache.lost().next().is_none() {
            return;
        }
        for (model, setup) in self.models.iter_mut().zip(&self.setup.volumes) {
            setup.windows.iter().for_each(|&window| model.may_go(window));
        }
    }

    /// Whether every write of a volume went through the log. Writes past it may be torn by the
    /// primary.
    pub(crate) fn is_atomic(&self, volume: usize) -> bool {
        let ended = self.was_broken && self.setup.may_end_cache();
        !ended && !self.overflowed && self.setup.is_atomic(volume)
    }

    /// The server that knows which flushes of a primary failed ends, while the primary keeps
    /// running. It still shows the data that it lost, and acknowledges the next flush: "Not
    /// survived" in `docs/internals/fault-model.md`. Data that went through the log is not
    /// affected: it stays dirty until a flush has covered it.
    fn forget_failures(&mut self) {
        for volume in 0..self.models.len() {
            if self.is_atomic(volume) {
                continue;
            }
            for sector in self.primaries[volume].lost() {
                self.models[volume].forget_failure(sector);
            }
        }
    }

    /// Checks that devices are left alone when nothing is left to do: work without end wears out
    /// the cache device, and takes the time of others.
    fn check_quiet(&mut self) -> Result<(), Failure> {
        self.pass(QUIET_AFTER)?;
        let before = self.writes_sent;
        self.pass(QUIET_TIME)?;
        let written = self.writes_sent - before;
        if written > QUIET_MAX {
            return Err(self.fail(Kind::Restless, format!("{written} writes without a reason")));
        }
        Ok(())
    }

    /// Checks that blocks become clean by their age alone.
    fn check_aged(&mut self) -> Result<(), Failure> {
        self.pass(self.setup.write_cache_depth.as_nanos() as u64 + AGED_AFTER)?;
        let dirty = self.server.as_ref().map_or(0, Server::dirty_blocks);
        if dirty > 0 {
            let age = self.what_hangs();
            return Err(self.fail(Kind::Stuck, format!("{dirty} blocks stay dirty: {age}")));
        }
        Ok(())
    }

    /// Ends the faults: everything must finish.
    fn finish(&mut self) -> Result<(), Failure> {
        if self.setup.meets(Scenario::CacheEnds) {
            return self.finish_without_cache();
        }
        self.finish_away()?;
        self.heal();
        self.wait("the last crash and the requests in flight", |world| {
            world.crash_in.is_none() || world.is_idle()
        })?;
        if let Some((_, recoveries)) = self.crash_in.take() {
            self.tally.crashed_at_end = true;
            self.crash(recoveries)?;
        }
        self.settle()?;
        if self.server.is_none() {
            return Ok(());
        }
        self.check_all(false)?;
        self.check_stats()?;
        let outcome = self.setup.outcome();
        if self.setup.mixed && !outcome.errors_stay {
            self.check_aged()?;
        }
        self.drain(true);
        let clean = |world: &Self| world.server.as_ref().is_none_or(|s| s.dirty_blocks() == 0);
        if outcome.errors_stay {
            // Blocks that can no longer be read stay dirty forever.
            self.pass(120 * SECOND)?;
        } else {
            self.wait("everything to be destaged", clean)?;
        }
        let drained = clean(self);
        let failed = self.tally.failed;
        for volume in self.steering.configured() {
            self.request(volume, IoOp::Flush, ByteRange::default(), false, None)?;
        }
        self.settle()?;
        if drained && self.tally.failed == failed {
            self.check_alone()?;
        }
        self.check_all(false)?;
        self.check_stats()?;
        if self.setup.mixed {
            self.check_quiet()?;
        }
        self.ask_to_stop()?;
        self.wait("the server to stop", |world| world.all_in(&State::Stopped))?;
        if outcome.crashes && self.rng.percent(30) {
            self.cut();
            self.boot(false);
            if self.recover(Vec::new(), false)? {
                self.check_all(true)?;
                self.settle()?;
            }
        }
        Ok(())
    }
}
