//! The world of a run: disks, server, clients, and a clock that moves from event to event.
//!
//! Everything happens in [`World::event`], in order of time and, at the same time, in order of
//! number. So setup and script alone determine a run. A crash comes between two events.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

use forebay_block::{ByteRange, Completion, Instant, Io, IoOp, IoResult, IoTag, VolumeId};
use forebay_engine::Event as Told;
use forebay_engine::{
    CutOrder, DetachedStripe, Effects, Health, State, Target, Trust, VolumeState,
};
use forebay_model::{Content, History, Model, Violation};
use forebay_volume::{Ask, Asked, Coming, CutGate, Done, FlushGate};

use crate::atlas::Scenario;
use crate::boot::Pool;
use crate::client::Client;
use crate::config::Setup;
use crate::dealer::Dealer;
use crate::disk::{Fate, SimDisk, Slot};
pub use crate::failure::Failure;
use crate::failure::Kind;
use crate::ledger::Ledger;
use crate::pages::Pages;
use crate::planted::{Bug, Deed, Mischief};
use crate::rng::Rng;
use crate::server::{Server, Start};
use crate::shard::Maker;
use crate::steer::Steering;
use crate::takeover::UnderWay;
use crate::tally::Tally;
use crate::trace::Trace;

/// Longest delay of a turn after its cause, in nanoseconds: several causes may meet in one turn.
const TURN_DELAY: u64 = 5_000;
/// Longest time until a busy thread reads its mail, in nanoseconds.
const MAIL_DELAY: u64 = 5_000_000;
/// Longest time to record trust in the witness, in nanoseconds.
const WITNESS_DELAY: u64 = 3_000_000;
/// A shard is checked after about one turn in this many, since a check takes time.
const CHECK_EVERY: u64 = 128;
/// Maximum number of events in a run; a longer run is taken to be looping.
const EVENTS_MAX: u64 = 4_000_000;

/// A future event.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// A disk completes a request of a shard.
    Disk(Target, Slot, usize),
    /// A shard's event loop turns.
    Turn(usize),
    /// An order of the gate of a volume's cuts reaches a shard.
    Cut(usize, VolumeId, CutOrder),
    /// The witness is written.
    Witness(Trust),
    /// The record of stripes that the cache of a shard has left is complete.
    Detached(usize, Vec<DetachedStripe>),
}

/// The disks, server and clients of a run.
pub struct World {
    pub(crate) setup: Setup,
    pub(crate) now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    number: u64,
    pub(crate) rng: Rng,
    pub(crate) cache: SimDisk,
    pub(crate) primaries: Vec<SimDisk>,
    pub(crate) server: Option<Server>,
    gates: BTreeMap<u64, FlushGate>,
    /// The gate of each volume's cuts.
    pub(crate) cut_gates: Vec<CutGate>,
    /// Number of requests to devices that change data.
    pub(crate) writes_sent: u64,
    pub(crate) models: Vec<Model>,
    /// For ordered volumes, all that clients did.
    pub(crate) histories: Vec<Option<History>>,
    /// For volumes whose mode changes, if there is no other fault: a model of the primary alone,
    /// based on the flushes in modes that promise it to be complete.
    pub(crate) alone: Vec<Option<Model>>,
    /// Number of mode switches of each volume.
    pub(crate) switches: Vec<u64>,
    pub(crate) clients: BTreeMap<u64, Client>,
    pub(crate) under_way: UnderWay,
    pub(crate) next_tag: u64,
    /// The last successful writes of whole blocks: volume, number, place.
    pub(crate) written: VecDeque<(usize, u64, ByteRange)>,
    /// The trust that each shard wants to be recorded.
    wanted: Vec<Trust>,
    /// Volumes whose primary has just got all of a cut.
    pub(crate) cuts_written: Vec<usize>,
    /// When the last order of a cut gate reaches each shard.
    ordered_at: Vec<u64>,
    /// When the last of the stripes that the cache has left is recorded.
    recorded_at: u64,
    pub(crate) pool: Pool,
    pub(crate) steering: Steering,
    make: Maker,
    pub(crate) trace: Trace,
    pub(crate) tally: Tally,
    pub(crate) ledger: Ledger,
    pub(crate) mischief: Mischief,
    /// Whether a fault is in progress.
    pub(crate) broken: bool,
    /// Whether a fault has ever begun.
    pub(crate) was_broken: bool,
    /// Volumes that a fault has concerned.
    pub(crate) concerned: BTreeSet<usize>,
    /// Whether writes bypassed a log that was full of blocks that a primary did not accept.
    pub(crate) overflowed: bool,
    /// The primary that is away.
    pub(crate) away: Option<crate::away::Away>,
    /// Whether the cache device will be lost at the next crash.
    pub(crate) lose_cache: bool,
    /// Whether it will be set back to an earlier state at the next crash.
    pub(crate) turn_back: bool,
    pub(crate) step: usize,
    /// A request that no engine may send to a disk.
    misuse: Option<String>,
    /// Whether reads are the first after a crash, so that their blocks must not be mixed.
    pub(crate) strict: bool,
    /// Events until power fails, and until each later recovery is cut off.
    pub(crate) crash_in: Option<(u64, Vec<u64>)>,
    /// The fates for the first crash, if a script specifies them.
    pub(crate) fates: Option<Vec<Fate>>,
}

impl World {
    /// In place of a shard, for requests of the server itself.
    pub(crate) const ERRAND: usize = usize::MAX;
    /// In place of a shard, for flushes that a gate sends.
    const GATE: usize = usize::MAX - 1;

    /// A world before its server's first start.
    #[must_use]
    pub fn new(mut setup: Setup, make: Maker, mischief: Mischief, verbose: bool) -> Self {
        let mut rng = Rng::new(setup.seed ^ 0x0030_8d1d);
        let cache = SimDisk::new(setup.cache.clone(), Pages::new(setup.cache.size), rng.fork());
        let mut primaries = Vec::new();
        let mut models = Vec::new();
        let mut alone = Vec::new();
        let mut histories = Vec::new();
        for (i, volume) in setup.volumes.iter().enumerate() {
            let id = VolumeId(i as u8);
            let first_size = setup.steered.as_ref().map_or(volume.size, |sizes| sizes[i]);
            let filled = |sector: u64| {
                let inside = |w: &forebay_block::ByteRange| {
                    let range = w.offset..w.end().min(first_size);
                    range.contains(&(sector * 512)) && volume.filled
                };
                volume.windows.iter().any(inside)
            };
            let initial = |sector| if filled(sector) { Content::Stamp(0) } else { Content::Zero };
            let mut image = Pages::new(volume.size);
            let mut bytes = [0; 512];
            for sector in (0..volume.size / 512).filter(|&sector| filled(sector)) {
                Content::Stamp(0).fill(id, sector, &mut bytes);
                image.write(sector * 512, &bytes);
            }
            let profile = crate::disk::DiskProfile { size: volume.size, ..setup.primary.clone() };
            primaries.push(SimDisk::new(profile, image, rng.fork()));
            let model = Model::new(id, volume.size, initial);
            let judged = volume.ordered.is_some() && setup.meets(Scenario::CacheEnds);
            histories.push(judged.then(|| History::new(id, volume.size, initial)));
            // A second fault may make the primary lose flushed data, with an error.
            let switched = setup.scenario.changes_modes() && setup.also.is_none();
            alone.push(switched.then(|| model.clone().by_flushes_alone()));
            models.push(if setup.is_complete(i) { model.by_flushes_alone() } else { model });
        }
        let steering = Steering::begin(&mut setup);
        Self {
            now: 0,
            events: BinaryHeap::new(),
            number: 0,
            cache,
            primaries,
            server: None,
            gates: BTreeMap::new(),
            cut_gates: Vec::new(),
            writes_sent: 0,
            models,
            histories,
            alone,
            switches: vec![0; setup.volumes.len()],
            clients: BTreeMap::new(),
            under_way: UnderWay::default(),
            next_tag: 1,
            written: VecDeque::new(),
            wanted: vec![Trust::Full; setup.shards],
            cuts_written: Vec::new(),
            ordered_at: vec![0; setup.shards],
            recorded_at: 0,
            pool: Pool::default(),
            steering,
            make,
            trace: Trace::new(verbose),
            tally: Tally::default(),
            ledger: Ledger::default(),
            mischief,
            broken: false,
            away: None,
            was_broken: false,
            concerned: BTreeSet::new(),
            overflowed: false,
            lose_cache: false,
            turn_back: false,
            step: 0,
            misuse: None,
            strict: false,
            crash_in: None,
            fates: None,
            rng,
            setup,
        }
    }

    /// A failure at this point of the run.
    pub(crate) fn fail(&self, kind: Kind, what: impl Into<String>) -> Failure {
        Failure { kind, what: what.into(), step: self.step }
    }

    pub(crate) fn violated(&self, violation: &Violation) -> Failure {
        Failure::of_read(violation, self.step)
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at, self.number, event)));
    }

    /// Time of the next event.
    pub(crate) fn next_at(&self) -> Option<u64> {
        self.events.peek().map(|Reverse((at, _, _))| *at)
    }

    /// Starts the shards.
    pub(crate) fn start_server(&mut self, start: Start) {
        self.trace.line(self.now, || format!("start: {start:?}"));
        let changed = self.primaries.iter().enumerate().filter(|(_, disk)| disk.took_back());
        let changed = changed.filter_map(|(volume, _)| self.steering.ids[volume]).collect();
        let served = self.serves();
        let mut setup = Cow::Borrowed(&self.setup);
        let never = [Bug::DepthForgotten, Bug::AgeIgnored];
        if never.into_iter().any(|bug| self.mischief.interferes(bug)) {
            setup.to_mut().write_cache_depth = Duration::from_secs(3600);
        }
        let (mut server, effects) =
            Server::start((&setup, &served), start, self.make, self.now, changed);
        self.gates.clear();
        self.cut_gates = vec![CutGate::new(self.setup.shards); self.models.len()];
        for volume in served.iter().map(|served| served.id) {
            server.watch_flushes(volume, self.gate(Target::Primary(volume)).failed());
        }
        self.server = Some(server);
        self.ledger = Ledger::default();
        self.tally.starts += 1;
        for (shard, fx) in effects.into_iter().enumerate() {
            self.carry_out(shard, fx);
        }
    }

    pub(crate) fn forget_wanted_trust(&mut self) {
        self.wanted.fill(Trust::Full);
    }

    /// Lets the engines stop in order.
    pub(crate) fn ask_to_stop(&mut self) -> Result<(), Failure> {
        let Some(server) = self.server.as_mut() else { return Ok(()) };
        let mut done = Vec::new();
        for (shard, fx) in server.stop(self.now, &mut done).into_iter().enumerate() {
            self.carry_out(shard, fx);
            self.turn_soon(shard);
        }
        self.answers(done)
    }

    fn turn_soon(&mut self, shard: usize) {
        let at = self.now + 1;
        if self.server.as_mut().is_some_and(|server| server.set_deadline(shard, at)) {
            self.schedule(at, Event::Turn(shard));
        }
    }

    /// The server's process ends after it stopped; the machine keeps running.
    pub(crate) fn shut(&mut self) {
        self.server = None;
        self.drop_errand();
        self.events.clear();
        self.cache.forget_reads();
        self.primaries.iter_mut().for_each(SimDisk::forget_reads);
        self.mischief.crash();
        self.now += 1;
        self.trace.line(self.now, || "the server ended".into());
    }

    /// Whether every engine is in this state.
    pub(crate) fn all_in(&self, state: &State) -> bool {
        self.server.as_ref().is_some_and(|server| server.all_in(state))
    }

    /// Processes the next event. Returns false if there is none.
    pub(crate) fn event(&mut self) -> Result<bool, Failure> {
        let Some(Reverse((at, _, event))) = self.events.pop() else { return Ok(false) };
        self.now = at;
        self.tally.events += 1;
        if self.tally.events > EVENTS_MAX {
            return Err(self.fail(Kind::Stuck, format!("no end after {EVENTS_MAX} events")));
        }
        match event {
            Event::Disk(target, slot, shard) => self.disk_event(target, slot, shard),
            Event::Turn(shard) => self.turn_event(shard)?,
            Event::Cut(shard, volume, order) => {
                if let Some(server) = self.server.as_mut() {
                    server.cut(shard, volume, order);
                }
            }
            Event::Witness(trust) => {
                let trust = self.store_trust(trust);
                if let Some(server) = self.server.as_mut() {
                    server.trust_recorded(trust);
                }
            }
            Event::Detached(shard, stripes) => {
                if !self.mischief.forgets_detached() {
                    self.store_detached(shard, &stripes);
                }
                if let Some(server) = self.server.as_mut() {
                    server.detached(shard, stripes);
                }
            }
        }
        if let Some(misuse) = self.misuse.take() {
            return Err(self.fail(Kind::Misuse, misuse));
        }
        self.wake();
        Ok(true)
    }

    /// Schedules a turn for shards with input.
    pub(crate) fn wake(&mut self) {
        let (now, rng) = (self.now, &mut self.rng);
        let Some(server) = self.server.as_mut() else { return };
        for (shard, at) in server.wake(|| now + rng.below(TURN_DELAY)) {
            self.schedule(at, Event::Turn(shard));
        }
    }

    /// The disk behind a target.
    pub(crate) fn disk(&mut self, target: Target) -> &mut SimDisk {
        match target {
            Target::Cache => &mut self.cache,
            Target::Primary(volume) => {
                let volume = self.volume_of(volume);
                &mut self.primaries[volume]
            }
        }
    }

    fn disk_event(&mut self, target: Target, slot: Slot, shard: usize) {
        let (op, range) = match self.disk(target).request(slot) {
            Some(io) => (io.op, io.range),
            None => return,
        };
        let done = self.disk(target).finish(slot);
        if self.mischief.is_swallowed(target, slot) {
            return;
        }
        let done = self.mischief.ending(target, op, range, done);
        self.trace.mix(&[self.now, target_number(target), op as u64, range.offset, range.len]);
        self.trace.mix(&[shard as u64, done.tag.0, u64::from(done.result.is_ok())]);
        self.trace.mix_bytes(&done.buf);
        self.trace.line(self.now, || {
            let result = done.result.as_ref().map_or_else(|e| e.to_string(), |()| "ok".into());
            format!("shard {shard}: {target:?} {op:?} {range}: {result}")
        });
        if shard < self.setup.shards {
            self.note_told(shard, target, (op, range), &done.result);
        }
        self.deliver(shard, target, done);
    }

    /// Notes in the ledger that a shard is told of the end of a request.
    fn note_told(
        &mut self,
        shard: usize,
        target: Target,
        (op, range): (IoOp, ByteRange),
        result: &IoResult<()>,
    ) {
        match target {
            Target::Cache => self.ledger.cache_ended(shard, (op, range), result),
            Target::Primary(id) => {
                let volume = self.volume_of(id);
                self.ledger.primary_ended((shard, volume), (op, range), result);
            }
        }
    }

    fn deliver(&mut self, shard: usize, target: Target, done: Completion) {
        if shard == Self::GATE {
            return self.flush_ended(target, &done.result);
        }
        if shard == Self::ERRAND {
            return self.errand_done(&done);
        }
        if let Some(server) = self.server.as_mut() {
            server.complete(shard, target, done);
        }
    }

    fn turn_event(&mut self, shard: usize) -> Result<(), Failure> {
        let now = self.now;
        let Some(server) = self.server.as_mut() else { return Ok(()) };
        let mut done = Vec::new();
        self.tally.while_loading += server.asked_while_loading(shard, now);
        let Some(fx) = server.turn(shard, now, &mut done) else { return Ok(()) };
        if let Some(why) = server.unsaid() {
            return Err(self.fail(Kind::Unsaid, why));
        }
        // The checksum saves the client, but the bytes were overwritten too early, or named before
        // they were durable.
        let rotten = |event: &Told| matches!(event, Told::CleanCorrupt { .. });
        if let Some(event) = fx.events.iter().find(|event| rotten(event))
            && !self.setup.may_spoil_cache()
        {
            let what = format!("a clean block is corrupt without a fault: {event:?}");
            return Err(self.fail(Kind::Rotten, what));
        }
        if self.tally.events.is_multiple_of(CHECK_EVERY)
            && let Err(why) = server.check(shard)
        {
            return Err(self.fail(Kind::Counters, why));
        }
        let past = |event: &Told| matches!(event, Told::Overflow { .. });
        self.overflowed |= fx.events.iter().any(past);
        if self.overflowed && !self.was_broken {
            return Err(self.fail(Kind::Error, "writes went past the cache without a fault"));
        }
        let given_up = self.server.as_ref().is_some_and(|server| server.health() != Health::Good);
        if given_up && !self.setup.may_end_cache() {
            return Err(self.fail(Kind::Error, "the cache was given up without a fault"));
        }
        for target in self.server.as_mut().map(|server| server.told(shard)).unwrap_or_default() {
            self.gate(target).told(shard);
        }
        self.carry_out(shard, fx);
        self.judge_cuts()?;
        self.answers(done)
    }

    /// Takes the answers to clients' requests.
    pub(crate) fn answers(&mut self, done: Vec<Done>) -> Result<(), Failure> {
        for done in done {
            self.answer(done)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, shard: usize, mut fx: Effects) {
        for (target, io) in fx.ios.drain(..) {
            self.ask_io(shard, target, io);
        }
        if let Some(trust) = fx.record_trust.filter(|&trust| trust != self.wanted[shard]) {
            self.wanted[shard] = trust;
            self.record_trust();
        }
        if !fx.detach.is_empty() {
            // One after the other, in order.
            self.recorded_at = self.recorded_at.max(self.now) + 1 + self.rng.below(WITNESS_DELAY);
            self.schedule(self.recorded_at, Event::Detached(shard, fx.detach));
        }
        for report in fx.cuts {
            let volume = report.volume;
            let of = self.volume_of(volume);
            let gate = &mut self.cut_gates[of];
            let before = gate.complete();
            let order = gate.take(shard, report.news);
            if gate.complete().is_some() && gate.complete() != before {
                self.cuts_written.push(of);
            }
            self.trace.line(self.now, || format!("shard {shard}: {report:?}: {order:?}"));
            let shards = self.setup.shards;
            for (shard, order) in self.mischief.ordering(report.news, order, shard, shards) {
                // Threads are slow to read their mail, but read it in order.
                let busy = self.setup.seed % 4 * 20;
                let delay = [TURN_DELAY, MAIL_DELAY][usize::from(self.rng.percent(busy))];
                let at = (self.now + self.rng.below(delay)).max(self.ordered_at[shard]);
                self.ordered_at[shard] = at;
                self.schedule(at, Event::Cut(shard, volume, order));
            }
        }
        let now = self.now;
        let deadline = fx.deadline.filter(|&at| at != Instant::NEVER);
        if let (Some(at), Some(server)) = (deadline, self.server.as_mut()) {
            let at = at.0.max(now + 1);
            if server.set_deadline(shard, at) {
                self.schedule(at, Event::Turn(shard));
            }
        }
        assert!(fx.replies.is_empty(), "the server took the answers");
    }

    /// The pool's trust falls as soon as one shard asks for less, but to nothing only when every
    /// shard does: until then one of them may still hold data that no primary has.
    fn record_trust(&mut self) {
        let worst = self.wanted.iter().copied().max().unwrap_or_default();
        let best = self.wanted.iter().copied().min().unwrap_or_default();
        let trust = if best == Trust::Nothing { best } else { worst.min(Trust::DirtyOnly) };
        self.trace.line(self.now, || format!("record trust {trust:?}"));
        let at = self.now + 1 + self.rng.below(WITNESS_DELAY);
        self.schedule(at, Event::Witness(trust));
    }

    /// The gate for the shards' flushes of a disk.
    fn gate(&mut self, target: Target) -> &mut FlushGate {
        let shards = self.setup.shards;
        self.gates
            .entry(target_number(target))
            .or_insert_with(|| FlushGate::new(shards, false, Coming::new(shards)))
    }

    /// Whether a flush of a primary has failed since the server's start.
    pub(crate) fn has_failed_flush(&self, volume: VolumeId) -> bool {
        let gate = self.gates.get(&target_number(Target::Primary(volume)));
        gate.is_some_and(FlushGate::has_failed)
    }

    /// Handles the end of a gate's flush.
    fn flush_ended(&mut self, target: Target, result: &IoResult<()>) {
        let ended = self.gate(target).ended(0, result);
        for Asked { shard, tag } in ended.answered {
            self.note_told(shard, target, (IoOp::Flush, ByteRange::default()), &ended.result);
            self.deliver(shard, target, Io::flush(tag).complete(ended.result.clone()));
        }
        if let (Err(error), Some(server)) = (&ended.result, self.server.as_mut()) {
            server.flush_failed(target, error);
        }
        if !ended.send.is_empty() {
            self.start_io(Self::GATE, target, Io::flush(IoTag(0)));
        }
    }

    /// Takes a shard's request; flushes pass the gate of their disk.
    fn ask_io(&mut self, shard: usize, target: Target, io: Io) {
        if io.op != IoOp::Flush {
            if target == Target::Cache {
                self.ledger.sent(shard, &io);
            }
            return self.start_io(shard, target, io);
        }
        match self.gate(target).ask(Asked { shard, tag: io.tag }) {
            Ask::Send => self.start_io(Self::GATE, target, io),
            Ask::Wait => {}
            Ask::Fail(error) => {
                let result = Err(error);
                self.note_told(shard, target, (io.op, io.range), &result);
                self.deliver(shard, target, io.complete(result));
            }
        }
    }

    /// Hands a request to its disk.
    pub(crate) fn start_io(&mut self, shard: usize, target: Target, io: Io) {
        self.writes_sent += u64::from(io.op.changes_data());
        if let Err(why) = self.disk(target).would_take(&io) {
            self.misuse.get_or_insert(format!("shard {shard}, {target:?} {:?}: {why}", io.op));
            return;
        }
        self.trace
            .line(self.now, || format!("shard {shard}: {target:?} {:?} {} ...", io.op, io.range));
        self.trace.mix(&[self.now, target_number(target), io.op as u64, io.range.offset]);
        match self.mischief.beginning(target, io) {
            Deed::Pass(io) => {
                let (slot, took) = self.disk(target).submit(io);
                self.schedule(self.now + took, Event::Disk(target, slot, shard));
            }
            Deed::Answer(io) => self.deliver(shard, target, io.complete(Ok(()))),
            Deed::Both(io, early) => {
                let (slot, took) = self.disk(target).submit(io);
                self.mischief.swallow(target, slot);
                self.schedule(self.now + took, Event::Disk(target, slot, shard));
                self.deliver(shard, target, early);
            }
        }
    }

    /// The state of the volumes in every shard; empty without a server.
    pub(crate) fn volume_states(&self) -> Vec<VolumeState> {
        self.server.as_ref().map(|server| server.volumes(self.now)).unwrap_or_default()
    }

    /// Adds the counters of the engines, before they are lost.
    pub(crate) fn count_deltas(&mut self) {
        for stats in self.server.as_ref().map(|server| server.stats(self.now)).unwrap_or_default() {
            self.tally.count(&stats);
        }
    }

    /// Power fails, or the server dies: everything in memory is lost.
    pub(crate) fn cut(&mut self) {
        self.count_deltas();
        self.server = None;
        self.drop_errand();
        self.events.clear();
        for history in self.histories.iter_mut().flatten() {
            history.doubt(self.now);
        }
        let dies = self.only_dies();
        self.tally.crashes += 1;
        let mut dealer = Dealer::new(self.rng.fork(), self.fates.take());
        let power = self.setup.power && !dies;
        // What the process alone has is as what a volatile cache alone has.
        let memory = dies && self.mischief.interferes(Bug::AnsweredFromMemory);
        let cache = std::iter::once((&mut self.cache, power || memory));
        let primaries = self.primaries.iter_mut().map(|disk| (disk, power));
        for (disk, loses_unflushed) in cache.chain(primaries) {
            let mut fates = |sectors| dealer.deal(sectors);
            if loses_unflushed {
                disk.crash(&mut fates);
            } else if self.setup.power {
                disk.outlive(&mut fates);
            } else {
                disk.abandon(&mut fates);
            }
        }
        for (at, bytes) in self.mischief.pages_after_crash(power && self.setup.cache.volatile) {
            self.cache.spoil(at, &bytes);
        }
        self.mischief.crash();
        if dies {
            let volumes = 0..self.primaries.len() as u8;
            self.mischief.leave(volumes.map(|volume| Target::Primary(VolumeId(volume))));
        }
        self.tally.uncertain.get_or_insert(dealer.dealt.len());
        self.trace.mix(&[self.now, 0xdead]);
        let what = if dies { "the server dies" } else { "crash" };
        self.trace.line(self.now, || format!("{what}; fates: {:?}", dealer.dealt));
    }

    /// Whether no request is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting() == 0
    }
}

fn target_number(target: Target) -> u64 {
    match target {
        Target::Cache => 0,
        Target::Primary(volume) => 1 + u64::from(volume.0),
    }
}
