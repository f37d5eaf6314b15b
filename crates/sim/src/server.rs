//! The server as in production, but without threads: a router, the shards with their mailboxes, and
//! the turns of their event loops. It dies with everything in its memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{BufPool, ByteRange, Completion, DeviceInfo, Instant, Io, IoError, VolumeId};
use forebay_engine::{
    CutOrder, DetachedStripe, Effects, Event, Foreground, Health, LastStop, Request, ShardConfig,
    State, Stats, Target, Trust, VolumeConfig, VolumeState,
};
use forebay_policy::RuleSet;
use forebay_volume::{
    ClientKey, Done, FailedFlushes, Registry, Router, RouterConfig, ShardPort, Source, Volume,
};

use crate::config::Setup;
use crate::shard::{Maker, Shard};

/// An input that reaches a shard from outside.
#[derive(Debug)]
enum Input {
    Request(Request),
    Done(Target, Completion),
    Trust(Trust),
    Detached(Vec<DetachedStripe>),
    FlushFailed(Target, IoError),
    Cut(VolumeId, CutOrder),
}

/// A shard's thread.
struct Unit {
    engine: Box<dyn Shard>,
    inbox: VecDeque<Input>,
    requests: usize,
    /// Time of its next turn.
    turn_at: Option<u64>,
    /// Time of its last turn.
    rests_since: u64,
    /// Devices of which it has learned in this turn that a flush failed.
    told: Vec<Target>,
}

/// The parameters of a server's start.
#[derive(Clone, Debug)]
pub struct Start {
    /// Name of the pool.
    pub pool: u64,
    /// Number of starts of this pool.
    pub epoch: u32,
    /// Whether the pool is new.
    pub fresh: bool,
    /// Whether the log may have unit entries.
    pub unit_entries: bool,
    /// Whether the cache device takes discards.
    pub discard: bool,
    /// The trust that the witness recorded.
    pub trust: Trust,
    /// Recorded stripes that a failed cache has left, by shard.
    pub detached: Vec<(usize, DetachedStripe)>,
    /// The last stop of each shard; empty if none is known.
    pub stops: Vec<LastStop>,
}

/// A volume that a server serves.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// Its index in the setup.
    pub volume: usize,
    /// Its ID in the pool.
    pub id: VolumeId,
    /// Its size in bytes.
    pub size: u64,
}

/// The router and the shards.
pub struct Server {
    units: Vec<Unit>,
    router: Router,
    mailbox: usize,
    /// A fault that no event reported.
    unsaid: Option<String>,
    /// Primaries that lost data which they had shown to readers, after a failed flush.
    took_back: Vec<VolumeId>,
}

/// The router's access to the mailboxes.
struct Port<'a> {
    units: &'a mut [Unit],
    limit: usize,
}

impl ShardPort for Port<'_> {
    fn submit(&mut self, shard: usize, request: Request) -> Result<(), Request> {
        let unit = &mut self.units[shard];
        if unit.requests >= self.limit {
            return Err(request);
        }
        unit.requests += 1;
        unit.inbox.push_back(Input::Request(request));
        Ok(())
    }
}

impl Server {
    /// Creates a server that begins to recover; the engines' effects are returned by shard.
    #[must_use]
    pub fn start(
        (setup, served): (&Setup, &[Served]),
        start: Start,
        make: Maker,
        now: u64,
        took_back: Vec<VolumeId>,
    ) -> (Self, Vec<Effects>) {
        let volumes = served.iter().map(|&Served { volume, id, size }| {
            let v = &setup.volumes[volume];
            Volume {
                id,
                name: format!("volume{volume}"),
                info: DeviceInfo { discard: v.discard, ..DeviceInfo::plain(size, "simulated") },
                read_only: false,
                sequential_threshold: v.sequential_threshold,
            }
        });
        let registry = Registry::new(volumes.collect()).expect("the volumes' names differ");
        let router = Router::new(RouterConfig {
            origin: 0,
            shards: setup.shards,
            registry: &registry,
            buffers: BufPool::default(),
        });
        let mut units = Vec::new();
        let mut effects = Vec::new();
        let shared: Vec<Arc<Foreground>> = served.iter().map(|_| Arc::default()).collect();
        for shard in 0..setup.shards {
            let config = shard_config(setup, (served, &shared), &start, shard);
            let mut engine = make(config, Instant(now));
            let mut fx = Effects::default();
            engine.start(Instant(now), &mut fx);
            let (inbox, requests, turn_at, told) = (VecDeque::new(), 0, None, Vec::new());
            units.push(Unit { engine, inbox, requests, turn_at, rests_since: now, told });
            effects.push(fx);
        }
        let mailbox = 4 + setup.seed as usize % 61;
        (Self { units, router, mailbox, unsaid: None, took_back }, effects)
    }

    /// Sets the counter of failed flushes of a volume's primary.
    pub fn watch_flushes(&mut self, volume: VolumeId, failed: FailedFlushes) {
        self.router.watch_flushes(volume, failed);
    }

    /// Takes a client's request.
    pub fn submit(&mut self, now: u64, tag: u64, volume: VolumeId, io: Io, done: &mut Vec<Done>) {
        let mut port = Port { units: &mut self.units, limit: self.mailbox };
        let arrived = Instant(now);
        let source = Source { client: ClientKey(tag), rules: RuleSet::default(), arrived };
        let taken = self.router.submit(arrived, (source, volume), io, &mut port, done);
        taken.expect("the router has room for what simulated clients ask");
    }

    /// Takes the completion of a disk.
    pub fn complete(&mut self, shard: usize, target: Target, done: Completion) {
        self.units[shard].inbox.push_back(Input::Done(target, done));
    }

    /// Tells the shards that the witness was written.
    pub fn trust_recorded(&mut self, trust: Trust) {
        for unit in &mut self.units {
            unit.inbox.push_back(Input::Trust(trust));
        }
    }

    /// Tells a shard that its stripes' departure from the cache is recorded.
    pub fn detached(&mut self, shard: usize, stripes: Vec<DetachedStripe>) {
        self.units[shard].inbox.push_back(Input::Detached(stripes));
    }

    /// Tells every shard that a flush of a device failed.
    pub fn flush_failed(&mut self, target: Target, error: &IoError) {
        for unit in &mut self.units {
            unit.inbox.push_back(Input::FlushFailed(target, error.clone()));
        }
    }

    /// Passes an order of a volume's cut gate to a shard.
    pub fn cut(&mut self, shard: usize, volume: VolumeId, order: CutOrder) {
        self.units[shard].inbox.push_back(Input::Cut(volume, order));
    }

    /// Devices of which a shard has learned in its last turn that a flush failed.
    pub fn told(&mut self, shard: usize) -> Vec<Target> {
        std::mem::take(&mut self.units[shard].told)
    }

    /// Schedules a turn at `at` for shards with input and no earlier turn; returns them.
    pub fn wake(&mut self, mut at: impl FnMut() -> u64) -> Vec<(usize, u64)> {
        let mut woken = Vec::new();
        for (shard, unit) in self.units.iter_mut().enumerate() {
            if unit.inbox.is_empty() {
                continue;
            }
            let at = at();
            if unit.turn_at.is_none_or(|turn| turn > at) {
                unit.turn_at = Some(at);
                woken.push((shard, at));
            }
        }
        woken
    }

    /// Number of requests that reach a shard in its turn at `now`, if it has not loaded all clean
    /// blocks since its start.
    pub fn asked_while_loading(&self, shard: usize, now: u64) -> u64 {
        let unit = &self.units[shard];
        let asked = unit.inbox.iter().filter(|input| matches!(input, Input::Request(_))).count();
        let loads = asked > 0
            && unit.turn_at == Some(now)
            && *unit.engine.state() == State::Serving
            && unit.engine.stats(Instant(now)).unloaded_segments > 0;
        if loads { asked as u64 } else { 0 }
    }

    /// Runs a turn of a shard's event loop, if it is due at `now`. Answers go to `done`.
    pub fn turn(&mut self, shard: usize, now: u64, done: &mut Vec<Done>) -> Option<Effects> {
        let unit = &mut self.units[shard];
        if unit.turn_at != Some(now) {
            return None;
        }
        unit.turn_at = None;
        let at = Instant(now);
        // Turns take no time here.
        unit.engine.rested(Duration::from_nanos(now - unit.rests_since));
        unit.rests_since = now;
        let mut fx = Effects::default();
        let before = (unit.engine.health(), lost_and_told(&*unit.engine));
        for input in std::mem::take(&mut unit.inbox) {
            match input {
                Input::Request(request) => {
                    unit.requests -= 1;
                    unit.engine.submit(at, request, &mut fx);
                }
                Input::Done(target, completion) => {
                    unit.engine.complete(at, target, completion, &mut fx);
                }
                Input::Trust(trust) => unit.engine.trust_recorded(at, trust, &mut fx),
                Input::Detached(stripes) => unit.engine.detached(at, &stripes, &mut fx),
                Input::Cut(volume, order) => unit.engine.cut(at, volume, order, &mut fx),
                Input::FlushFailed(target, error) => {
                    unit.engine.flush_failed(at, target, &error, &mut fx);
                    unit.told.push(target);
                }
            }
        }
        unit.engine.poll(at, &mut fx);
        if let Some(why) = unsaid(&*unit.engine, before, &fx.events) {
            self.unsaid.get_or_insert(format!("shard {shard}: {why}"));
        }
        let kept = |event: &&Event| match event {
            Event::PrimaryChanged { volume, .. } => !self.took_back.contains(volume),
            _ => false,
        };
        if let Some(changed) = fx.events.iter().find(kept) {
            self.unsaid.get_or_insert(format!("shard {shard}: nobody did that: {changed:?}"));
        }
        for reply in std::mem::take(&mut fx.replies) {
            self.router.reply(reply, done);
        }
        let mut port = Port { units: &mut self.units, limit: self.mailbox };
        self.router.pump(&mut port);
        Some(fx)
    }

    /// Checks the invariants of a shard between calls.
    pub fn check(&self, shard: usize) -> Result<(), String> {
        self.units[shard].engine.check().map_err(|why| format!("shard {shard}: {why}"))
    }

    /// A fault that an engine did not report.
    pub fn unsaid(&mut self) -> Option<String> {
        self.unsaid.take()
    }

    /// Schedules a shard's next turn at `at`, unless it has an earlier one.
    pub fn set_deadline(&mut self, shard: usize, at: u64) -> bool {
        let unit = &mut self.units[shard];
        let sooner = unit.turn_at.is_none_or(|turn| turn > at);
        if sooner {
            unit.turn_at = Some(at);
        }
        sooner
    }

    /// Lets every engine stop; returns their effects.
    pub fn stop(&mut self, now: u64, done: &mut Vec<Done>) -> Vec<Effects> {
        let mut effects = Vec::new();
        for unit in &mut self.units {
            let mut fx = Effects::default();
            unit.engine.stop(Instant(now), &mut fx);
            for reply in std::mem::take(&mut fx.replies) {
                self.router.reply(reply, done);
            }
            effects.push(fx);
        }
        effects
    }

    /// Calls `act` for every engine.
    pub fn each(&mut self, mut act: impl FnMut(&mut dyn Shard)) {
        self.units.iter_mut().for_each(|unit| act(&mut *unit.engine));
    }

    /// Whether every engine is in this state.
    #[must_use]
    pub fn all_in(&self, state: &State) -> bool {
        self.units.iter().all(|unit| unit.engine.state() == state)
    }

    /// Why an engine refuses its log, if one does.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        self.units.iter().find_map(|unit| match unit.engine.state() {
            State::Refused(why) => Some(why.clone()),
            _ => None,
        })
    }

    /// Each shard's counters.
    #[must_use]
    pub fn stats(&self, now: u64) -> Vec<Stats> {
        self.units.iter().map(|unit| unit.engine.stats(Instant(now))).collect()
    }

    /// Requests with parts in a shard, answered or not.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.router.in_flight()
    }

    /// Whether no request has a part in a shard, and every shard knows of all that ended.
    #[must_use]
    pub fn is_up_to_date(&self) -> bool {
        self.in_flight() == 0 && self.units.iter().all(|unit| unit.inbox.is_empty())
    }

    /// The state of the volumes in every shard.
    #[must_use]
    pub fn volumes(&self, now: u64) -> Vec<VolumeState> {
        self.units.iter().flat_map(|unit| unit.engine.volumes(Instant(now))).collect()
    }

    /// What is known of the logs of the shards after an orderly stop; `before` was known already.
    #[must_use]
    pub fn stops(&self, now: u64, before: &[LastStop]) -> Vec<LastStop> {
        let states = self.volumes(now);
        let is_left =
            |id: VolumeId| states.iter().any(|state| state.id == id && state.dirty_blocks > 0);
        let mut drained: Vec<VolumeId> =
            states.iter().map(|state| state.id).filter(|&id| !is_left(id)).collect();
        drained.sort_unstable();
        drained.dedup();
        let next = |(shard, unit): (usize, &Unit)| {
            let before = before.get(shard).cloned().unwrap_or_default();
            before.then(unit.engine.log_end(), &drained)
        };
        self.units.iter().enumerate().map(next).collect()
    }

    /// Dirty blocks of all shards.
    #[must_use]
    pub fn dirty_blocks(&self) -> u64 {
        self.units.iter().map(|unit| unit.engine.dirty_blocks()).sum()
    }

    /// The worst health of any shard: good, draining or detached.
    #[must_use]
    pub fn health(&self) -> Health {
        let of = |unit: &Unit| unit.engine.health();
        let rank = |health: &Health| *health as u8;
        self.units.iter().map(of).max_by_key(rank).unwrap_or_default()
    }
}

/// Lost blocks that events must have reported: recovery reports its losses at its end. A refusal
/// says that blocks are lost, and nothing is served.
fn lost_and_told(engine: &dyn Shard) -> u64 {
    match engine.state() {
        State::Recovering | State::Refused(_) => 0,
        _ => engine.lost_blocks(),
    }
}

/// A change for the worse in a turn that no event reported.
fn unsaid(engine: &dyn Shard, before: (Health, u64), events: &[Event]) -> Option<String> {
    let (health, lost) = before;
    let now = engine.health();
    let says = |event: &Event| matches!(event, Event::Health { to, .. } if *to == now);
    if now != health && !events.iter().any(says) {
        return Some(format!("no event says that health went from {health:?} to {now:?}"));
    }
    let fenced = |event: &Event| matches!(event, Event::Fenced { .. } | Event::Omitted(_));
    (lost_and_told(engine) > lost && !events.iter().any(fenced))
        .then(|| "no event says that a block is lost".into())
}

fn shard_config(
    setup: &Setup,
    (served, shared): (&[Served], &[Arc<Foreground>]),
    start: &Start,
    shard: usize,
) -> ShardConfig {
    let len = setup.segments * u64::from(setup.segment_size);
    let volumes = served.iter().zip(shared).map(|(&Served { volume, id, size }, foreground)| {
        let v = &setup.volumes[volume];
        VolumeConfig {
            id,
            size,
            mode: v.mode,
            discard: v.discard,
            rotational: v.rotational,
            foreground: Arc::clone(foreground),
            optimal_io: v.optimal_io,
            share: v.share,
            cache_share: v.cache_share,
            pace: v.pace,
            ordered: v.ordered,
            // Data that was not changed must not be reported as changed.
            suspect: setup.seed.is_multiple_of(2),
            lost: false,
        }
    });
    ShardConfig {
        shard: shard as u16,
        shards: setup.shards as u16,
        pool: start.pool,
        area: ByteRange::new((1 << 20) + shard as u64 * len, len),
        segment_size: setup.segment_size,
        log_segments: setup.log_segments,
        unit_entries: start.unit_entries,
        volumes: volumes.collect(),
        ram_bytes: setup.ram_bytes,
        index_blocks: setup.index_blocks,
        dirty_stripes: setup.dirty_stripes.unwrap_or(u64::MAX),
        eviction: setup.eviction,
        write_cache_depth: setup.write_cache_depth,
        dirty_limit: setup.dirty_limit,
        dirty_target: setup.dirty_target,
        idle_destage: setup.idle_destage,
        fill_rate: setup.fill_rate,
        wear_budget: setup.wear_budget,
        patience: setup.patience,
        destage_depth: setup.destage_depth,
        compress: setup.compress,
        compress_ram: setup.compress_ram,
        content: setup.content,
        cache_volatile: setup.cache.volatile,
        discard: start.discard,
        discarded: true,
        buffers: BufPool::default(),
        fresh: start.fresh,
        trust: start.trust,
        detached: (start.detached.iter())
            .filter(|(of, _)| *of == shard)
            .map(|&(_, stripe)| stripe)
            .collect(),
        accept_loss: false,
        epoch: start.epoch,
        last_stop: start.stops.get(shard).cloned().unwrap_or_default(),
    }
}
