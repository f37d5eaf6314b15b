//! The pool of shard threads as the control API sees it.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_block::{Endpoint, VolumeId};
use forebay_control::config::{Config, PinEdit, VolumeConfig};
use forebay_control::settings::{self, Change, Differences, NewValue, Online, Spec, Way};
use forebay_control::units::Size;
use forebay_control::{
    Application, ClientSnapshot, ControlError, ControlErrorKind, DiskSnapshot, Keeper, Latency,
    LeftSnapshot, PoolControl, PoolSnapshot, PrefetchSnapshot, PrefetchTarget, PrimaryHealth,
    SettingSnapshot, ShardSnapshot, TraceSnapshot, TraceTarget, UpgradeSnapshot, VolumeSnapshot,
    Wanted,
};
use forebay_engine::Health;
use forebay_runtime::{
    ClientStats, Histogram, OPERATIONS, Pool, PoolStats, Ranges, Served, TIERS, VolumeStats,
};
use rustix::process::Pid;
use tokio::sync::mpsc::UnboundedSender;

use crate::disk::loops;
use crate::keeper::Line;
use crate::server::cache::retired;
use crate::server::disks::Disks;
use crate::server::history;
use crate::server::kept::{self, Kept};
use crate::server::last_word::LastWord;
use crate::server::mount::MountPoint;
use crate::server::prefetch::Prefetch;
use crate::server::primaries;
use crate::server::reconfigure::Reconfiguration;
use crate::server::recording::Trace;
use crate::server::rules;
use crate::server::serve::Order;
use crate::server::settings::{KeptSettings, Wish};
use crate::server::state_health::StateHealth;
use crate::server::upgrades::Upgrades;
use crate::server::warm_up::WarmUp;

/// How long a change that comes early waits until changes are taken, and how often it looks.
const START_PATIENCE: Duration = Duration::from_secs(5);
const START_STEP: Duration = Duration::from_millis(1);

/// Facts that do not change while the pool runs.
pub struct Facts {
    /// The cache device's path.
    pub cache_path: String,
    /// Bytes of it in use, and its size in bytes.
    pub cache_bytes: u64,
    pub cache_device_bytes: u64,
    /// Addresses that clients connect to.
    pub endpoints: Vec<String>,
    /// The volumes in the registry's order.
    pub volumes: Vec<VolumeSnapshot>,
    /// The keeper of the start.
    pub keeper: Parent,
    /// Whether the state directory can be written.
    pub state_health: Arc<StateHealth>,
}

/// The keeper at the start, if there was one: the parent process.
pub struct Parent(Option<Pid>);

impl Parent {
    /// The parent, if it is a keeper.
    pub fn of(kept: &Kept) -> Self {
        Self(rustix::process::getppid().filter(|_| kept.is_there()))
    }

    fn now(&self) -> Keeper {
        match self.0 {
            None => Keeper::None,
            // Orphans get another parent.
            keeper if rustix::process::getppid() != keeper => Keeper::Gone,
            Some(keeper) => Keeper::Process(keeper.as_raw_nonzero().get().cast_unsigned()),
        }
    }
}

/// A running pool. It does not stop by itself: a request to stop, with or without a drain, goes to
/// the other end of the channel.
pub struct Running {
    pool: Pool,
    facts: Facts,
    /// The configuration that the next start has, without the changes kept for it, and its text.
    configured: Mutex<(Config, Option<String>)>,
    /// The line to the keeper, which holds the text.
    keeper: Option<Arc<Line>>,
    /// The settings in force.
    in_force: Arc<Mutex<Config>>,
    kept: Mutex<KeptSettings>,
    /// For each volume, the current or last recording.
    traces: Mutex<Vec<Option<Trace>>>,
    /// For each volume, the running or last prefetch.
    prefetches: Mutex<Vec<Option<Prefetch>>>,
    began: Instant,
    takes_changes: AtomicBool,
    stopping: AtomicBool,
    /// Whether the drain before the stop was abandoned, and whether a client has been told.
    given_up: AtomicBool,
    told: AtomicBool,
    last_word: LastWord,
    mount: Option<Arc<MountPoint>>,
    disks: Arc<Disks>,
    upgrades: Arc<Upgrades>,
    reconfiguration: Arc<Reconfiguration>,
    stop: UnboundedSender<Order>,
}

impl Running {
    /// Wraps a pool that is ready now, with the settings that are configured and the parts that a
    /// hand-over needs, which have the settings in force.
    pub fn new(
        facts: Facts,
        configured: (Config, Option<String>),
        settings: KeptSettings,
        reconfiguration: Arc<Reconfiguration>,
        (keeper, stop): (Option<Arc<Line>>, UnboundedSender<Order>),
    ) -> Self {
        let traces = Mutex::new(facts.volumes.iter().map(|_| None).collect());
        let prefetches = Mutex::new(facts.volumes.iter().map(|_| None).collect());
        let kept = Mutex::new(settings);
        let [takes_changes, stopping, given_up, told] = [false; 4].map(AtomicBool::new);
        Self {
            pool: reconfiguration.pool.clone(),
            facts,
            configured: Mutex::new(configured),
            keeper,
            in_force: Arc::clone(&reconfiguration.in_force),
            kept,
            traces,
            prefetches,
            began: Instant::now(),
            takes_changes,
            stopping,
            given_up,
            told,
            last_word: LastWord::default(),
            mount: reconfiguration.mount.clone(),
            disks: Arc::clone(&reconfiguration.disks),
            upgrades: Arc::clone(&reconfiguration.upgrades),
            reconfiguration,
            stop,
        }
    }

    /// Stores the settings that were changed while serving, as they are now.
    pub fn keep_settings(&self) -> io::Result<()> {
        locked(&self.kept).store()
    }

    /// Takes changes from now on, and those that wait.
    pub fn take_changes(&self) {
        self.takes_changes.store(true, Ordering::SeqCst);
    }

    /// Waits until changes are taken: what the start has on record must be settled first.
    fn await_start(&self) -> Result<(), ControlError> {
        let began = Instant::now();
        while !self.takes_changes.load(Ordering::SeqCst) {
            if began.elapsed() >= START_PATIENCE {
                let kind = ControlErrorKind::Unavailable;
                return Err(ControlError::new(kind, "the server is still starting", "try again"));
            }
            std::thread::sleep(START_STEP);
        }
        Ok(())
    }

    /// Brings the blocks of the cache before, which was given up, into this one, in the background.
    pub fn warm_up(&self, mut list: WarmUp) {
        list.fit(self.facts.cache_bytes);
        let mut prefetches = locked(&self.prefetches);
        for (place, volume) in self.facts.volumes.iter().enumerate() {
            let (bytes, ranges) = list.of_volume(&volume.name, volume.size);
            if bytes > 0 && volume.mode.admits_reads() {
                let (volume, bytes_shown) = (&volume.name, Size(bytes));
                tracing::info!(volume, bytes = %bytes_shown, "blocks of the previous cache return");
                let all = (bytes, Box::new(ranges) as Ranges);
                let begun = Prefetch::start(&self.pool, Endpoint(place), all, None);
                prefetches[place] = Some(begun);
            }
        }
    }

    /// Whether the cache is to be given up when this server leaves.
    pub fn gives_up_cache(&self) -> bool {
        self.reconfiguration.gives_up_cache.load(Ordering::SeqCst)
    }

    /// The volumes that were drained to be in no cache after this server, or in another one.
    pub fn leaving(&self) -> Vec<VolumeId> {
        self.reconfiguration.leaving()
    }

    /// No other program takes over any more: the server stops.
    pub fn refuse_upgrades(&self) {
        self.upgrades.stop();
    }

    /// Changes the reported state to `stopping`.
    pub fn set_stopping(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Reports from now on that the drain before the stop was abandoned.
    pub fn set_given_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Whether a client has queried the status since then.
    pub fn has_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// What a stop has left, for whoever asks.
    pub fn last_word(&self) -> &LastWord {
        &self.last_word
    }

    /// The index of the named volume in the registry.
    fn place(&self, volume: &str) -> Result<usize, ControlError> {
        let volumes = self.pool.registry().volumes();
        volumes.iter().position(|known| known.name == volume).ok_or_else(|| {
            ControlError::no_volume(volume, volumes.iter().map(|known| known.name.as_str()))
        })
    }

    fn volumes(&self, in_force: &Config, stats: &PoolStats) -> Vec<VolumeSnapshot> {
        let volumes = self.facts.volumes.iter().zip(&in_force.volumes).zip(&stats.volumes);
        type Parts<'a> = (usize, ((&'a VolumeSnapshot, &'a VolumeConfig), &'a VolumeStats));
        let now = |(place, ((volume, config), stands)): Parts<'_>| {
            let mode = self.reconfiguration.mode(place, config.mode);
            let file = volume.file.as_deref();
            let mut devices = file.map(loops::over_path).unwrap_or_default();
            devices.extend(self.disks.device(place));
            let state = stands.state.clone();
            let primary_health = PrimaryHealth::of(&state, stats.now);
            VolumeSnapshot { mode, devices, state, primary_health, ..volume.clone() }
        };
        volumes.enumerate().map(now).collect()
    }

    /// The settings in force; changed ones also with their configured values.
    fn settings(&self, in_force: &Config) -> Vec<SettingSnapshot> {
        let kept = locked(&self.kept);
        let mut all = settings::in_force(in_force);
        for setting in &mut all {
            let named = setting.volume.as_deref().map(|name| self.place(name));
            let id = match named {
                None => None,
                Some(Ok(at)) => Some(self.pool.registry().volumes()[at].id),
                Some(Err(_)) => continue,
            };
            let found = kept.find(id, setting.spec.key);
            setting.changed = found.map(|found| (found.configured.clone(), found.since));
        }
        all
    }
}

/// Gives a configuration the values of another one, of the same volumes, that a server can change.
fn take_online(config: &mut Config, from: &Config) {
    let mut from = from.clone();
    for spec in Spec::online() {
        let places = if spec.is_of_volume() { config.volumes.len() } else { 1 };
        for place in 0..places {
            let value = spec.field(&mut from, place).text();
            let restored = spec.restore(config, place, value.as_deref());
            debug_assert_eq!(restored, Ok(()), "{} was in force", spec.key);
        }
    }
}

/// The values behind these locks are replaced whole, so a panic leaves nothing half-changed.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Upper bounds of the reported latencies, in microseconds.
const BOUNDS_MICROS: [u64; 16] = [
    10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 500_000,
    1_000_000, 10_000_000,
];

/// For each bound, the number of requests that certainly took at most that long.
fn at_most(histogram: &Histogram) -> Vec<(u64, u64)> {
    let mut fine = histogram.cumulative().peekable();
    let mut count = 0;
    let counted = BOUNDS_MICROS.map(|micros| {
        let bound = Duration::from_micros(micros);
        while let Some((_, below)) = fine.next_if(|&(at, _)| at <= bound) {
            count = below;
        }
        (nanos(bound), count)
    });
    counted.to_vec()
}

/// The latencies of each volume that `of` names, which are those of these operations and tiers.
fn latencies(
    stats: &PoolStats,
    of: fn(&VolumeStats) -> &[Histogram],
    kinds: &[(&'static str, Option<&'static str>)],
) -> Vec<Latency> {
    let of_volume = |volume: &VolumeStats| {
        let name = volume.name.clone();
        let of_kind = kinds.iter().zip(of(volume).iter());
        of_kind
            .map(|(&(operation, tier), histogram)| Latency {
                volume: name.clone(),
                operation,
                tier,
                count: histogram.count(),
                sum_nanos: nanos(histogram.sum()),
                at_most: at_most(histogram),
                fine: histogram.cumulative().map(|(at, count)| (nanos(at), count)).collect(),
            })
            .collect::<Vec<_>>()
    };
    stats.volumes.iter().flat_map(of_volume).collect()
}

/// Why a change cannot be made: a start would not find it.
fn not_kept(error: &io::Error) -> ControlError {
    let what = format!("the change cannot be kept for the next start: {error}");
    let (kind, hint) = match error.kind() {
        io::ErrorKind::FileTooLarge => {
            let hint = "nothing was changed; use shorter names of pins, or shorter rules";
            (ControlErrorKind::Invalid, hint)
        }
        _ => (ControlErrorKind::Unavailable, "nothing was changed; see to the state directory"),
    };
    ControlError::new(kind, what, hint)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Running {
    /// Tells the pool a setting's value in `config`; `place` is the index of the volume `id`.
    fn tell(&self, spec: &Spec, id: Option<VolumeId>, config: &Config, place: usize) {
        let volume = || &config.volumes[place];
        match (spec.online, id) {
            (Online::Cache(setting), _) => self.pool.set(setting(config)),
            (Online::Volume(setting), Some(id)) => self.pool.set(setting(id, volume())),
            (Online::Streams, Some(id)) => {
                self.pool.set_sequential_threshold(id, volume().sequential_threshold.0);
            }
            (Online::Clients, _) => {
                let server = &config.server;
                self.pool.set_patience(server.client_stall_timeout.0, server.idle());
            }
            (Online::Pins, Some(id)) => rules::tell_pins(&self.pool, id, &volume().pinned),
            (Online::Rules, _) => rules::tell(&self.pool, &config.cache.rules),
            (Online::Restart | Online::HandOver | Online::NewCache, _)
            | (Online::Volume(_) | Online::Streams | Online::Pins, None) => {
                unreachable!("{} is a change that Change::parse accepts", spec.key)
            }
        }
    }

    /// The configuration to compare `wanted` with: settings that only a start changes as they were
    /// configured, since the start chose some of them, and the others as they are in force.
    fn comparable(&self, in_force: &Config, wanted: &Config) -> Config {
        let mut all = locked(&self.configured).0.clone();
        if wanted.server.shards == in_force.server.shards || wanted.server.shards.is_none() {
            // The cache has this number, whoever chose it.
            all.server.shards = wanted.server.shards;
        }
        // So do its size and its division stay, whatever was configured when it was opened.
        all.cache.size = in_force.cache.size;
        all.cache.spare = in_force.cache.spare;
        all.cache.log_share = in_force.cache.log_share;
        take_online(&mut all, in_force);
        all
    }

    /// Keeps changes for the next start.
    fn keep(&self, wishes: &[Wish]) -> io::Result<()> {
        locked(&self.kept).keep(wishes)
    }

    /// Takes a configuration for the one of the next start, which reads this text. So nothing of
    /// what was changed before is kept.
    fn adopt(&self, text: &str) -> io::Result<()> {
        let (keeper, configured) = (self.keeper.as_deref(), locked(&self.configured));
        let before = configured.1.as_deref();
        // First the text: what was changed before over another value counts no more with it.
        kept::hold_configuration(keeper, Some(text))?;
        locked(&self.kept).clear().inspect_err(|_| {
            if let Err(error) = kept::hold_configuration(keeper, before) {
                tracing::warn!(%error, "a restart by the keeper reads the new configuration");
            }
        })
    }

    /// Makes the changes, all or none, once they are kept for the next start by `keep`. The caller
    /// holds the lock of `in_force`, so that the reported values are the ones last sent to the
    /// shards.
    fn change(
        &self,
        in_force: &mut Config,
        changes: &[Change],
        keep: impl FnOnce(&[Wish]) -> io::Result<()>,
    ) -> Result<(), ControlError> {
        let mut config = in_force.clone();
        let invalid =
            |what| ControlError::new(ControlErrorKind::Invalid, what, "nothing was changed");
        let (mut places, mut wishes) = (Vec::new(), Vec::new());
        for Change { spec, volume, value } in changes {
            let at = volume.as_deref().map(|name| self.place(name)).transpose()?;
            let (place, id) = (at.unwrap_or(0), at.map(|at| self.pool.registry().volumes()[at].id));
            let configured = spec.text(&locked(&self.configured).0, place);
            let value = match value {
                NewValue::Is(text) => Some(text.as_str()),
                NewValue::Configured => configured.as_deref(),
                NewValue::Unset => None,
            };
            spec.restore(&mut config, place, value)
                .map_err(|what| invalid(format!("{}: {what}", spec.key)))?;
            if matches!(spec.online, Online::Pins) {
                let (volume, size) = (&config.volumes[place], self.facts.volumes[place].size);
                rules::check_pins(&volume.pinned, &volume.name, size).map_err(invalid)?;
            }
            let value = spec.text(&config, place).unwrap_or_default();
            let configured = configured.unwrap_or_default();
            wishes.push(Wish { volume: id, spec, value, configured });
            places.push(place);
        }
        let checked = config.check_shares().and_then(|()| config.check_rules());
        let checked = checked.and_then(|()| config.check_pins(self.facts.cache_bytes));
        checked.map_err(|error| invalid(error.to_string()))?;
        config.cache.rules.check_users().map_err(|what| invalid(format!("rules: {what}")))?;
        keep(&wishes).map_err(|error| not_kept(&error))?;
        for (Wish { spec, volume, .. }, &place) in wishes.iter().zip(&places) {
            self.tell(spec, *volume, &config, place);
        }
        *in_force = config;
        for (Wish { spec, value, .. }, change) in wishes.iter().zip(changes) {
            tracing::info!(volume = change.volume, value, "{} changed", spec.key);
        }
        Ok(())
    }

    /// Brings a configuration into force that differs from the one in force by these changes.
    fn apply_live(
        &self,
        in_force: &mut Config,
        wanted: &Wanted,
        changes: &[Change],
    ) -> Result<(), ControlError> {
        let text = &wanted.text;
        let adopts = self.reconfiguration.will_read(text);
        match (changes.is_empty(), adopts) {
            (true, false) => return Ok(()),
            (true, true) => self.adopt(text).map_err(|error| not_kept(&error))?,
            (false, _) => self.change(in_force, changes, |wishes| match adopts {
                true => self.adopt(text),
                false => self.keep(wishes),
            })?,
        }
        if adopts {
            let mut configured = locked(&self.configured);
            take_online(&mut configured.0, in_force);
            configured.1 = Some(text.clone());
        }
        if !changes.is_empty() {
            history::keep_or_warn(&self.reconfiguration.state, text);
        }
        Ok(())
    }

    /// Why the shards do not answer.
    fn silence(&self) -> ControlError {
        let (what, hint) = match self.stopping.load(Ordering::Relaxed) {
            true => ("the server is ending", "do this again with the next one"),
            false => ("the shards do not answer", "see the server's log"),
        };
        ControlError::new(ControlErrorKind::Unavailable, what, hint)
    }
}

impl PoolControl for Running {
    fn snapshot(&self) -> Result<PoolSnapshot, ControlError> {
        let snapshot = self.observe()?;
        self.told.fetch_or(snapshot.drain_given_up, Ordering::Relaxed);
        Ok(snapshot)
    }

    fn observe(&self) -> Result<PoolSnapshot, ControlError> {
        let given_up = self.given_up.load(Ordering::Relaxed);
        let stopping = self.stopping.load(Ordering::Relaxed);
        let stats = self.pool.stats().ok_or_else(|| self.silence())?;
        let operations = OPERATIONS.map(|(_, operation)| (operation, None));
        let name =
            |op| OPERATIONS.iter().find(|(known, _)| *known == op).map_or("", |(_, name)| name);
        let tiers = TIERS.map(|(op, _, tier)| (name(op), Some(tier)));
        let primary_latencies = latencies(&stats, |volume| &volume.primary_latencies, &operations);
        let tier_latencies = latencies(&stats, |volume| &volume.tier_latencies, &tiers);
        let latencies = latencies(&stats, |volume| &volume.latencies, &operations);
        let in_force = locked(&self.in_force).clone();
        let volumes = self.volumes(&in_force, &stats);
        let shards = stats.shards.into_iter().map(|shard| ShardSnapshot {
            state: shard.state,
            health: shard.health,
            stats: shard.stats,
        });
        Ok(PoolSnapshot {
            uptime: self.began.elapsed(),
            pid: std::process::id(),
            keeper: self.facts.keeper.now(),
            state_problem: self.facts.state_health.problem(),
            stopping,
            drain_given_up: given_up,
            cache_path: self.facts.cache_path.clone(),
            cache_bytes: self.facts.cache_bytes,
            cache_device_bytes: self.facts.cache_device_bytes,
            eviction: in_force.cache.eviction,
            content: in_force.cache.content,
            write_cache_depth: in_force.cache.write_cache_depth.0,
            wear_budget: in_force.cache.wear_budget(),
            endpoints: self.facts.endpoints.clone(),
            clients: stats.clients as u64,
            clients_refused: stats.clients_refused,
            volumes,
            shards: shards.collect(),
            latencies,
            tier_latencies,
            primary_latencies,
            settings: self.settings(&in_force),
            rules: stats.rules.iter().map(|(rule, count)| (rule.to_string(), *count)).collect(),
        })
    }

    fn set(&self, changes: &[Change]) -> Result<(), ControlError> {
        self.await_start()?;
        let mut in_force = locked(&self.in_force);
        self.reconfiguration.refuse_under_way()?;
        self.change(&mut in_force, changes, |wishes| self.keep(wishes))
    }

    fn pin(&self, volume: &str, edit: &PinEdit) -> Result<(), ControlError> {
        self.await_start()?;
        let mut in_force = locked(&self.in_force);
        self.reconfiguration.refuse_under_way()?;
        let now = &in_force.volumes[self.place(volume)?].pinned;
        let pins = now.edited(edit).map_err(|what| {
            let hint = format!("nothing was changed; see `forebay pin {volume} --list`");
            ControlError::new(ControlErrorKind::Invalid, what, hint)
        })?;
        if pins == *now {
            return Ok(());
        }
        self.change(&mut in_force, &[Change::pins(volume, &pins)], |wishes| self.keep(wishes))
    }

    fn apply(&self, wanted: &Wanted, dry_run: bool) -> Result<Application, ControlError> {
        let config = &wanted.config;
        self.await_start()?;
        // Before the lock: a primary on a network may take long to tell.
        let sizes = primaries::sizes(config).map_err(|error| {
            let hint = "nothing was changed; try again";
            ControlError::new(ControlErrorKind::Unavailable, format!("{error:#}"), hint)
        })?;
        let mut in_force = locked(&self.in_force);
        if !dry_run {
            self.reconfiguration.refuse_under_way()?;
        }
        let mut differences = Differences::between(&self.comparable(&in_force, config), config);
        let grown = self.reconfiguration.grown(config, &differences, &sizes);
        differences.volumes.extend(grown);
        let way = differences.way().map_err(|what| {
            let hint = "nothing was changed; restart the server with this configuration";
            ControlError::new(ControlErrorKind::Invalid, what, hint)
        })?;
        let hand_over = match &way {
            Way::Live(changes) => {
                if !dry_run {
                    // The next program may have read the file before it was written.
                    self.upgrades.refuse_under_way()?;
                    self.apply_live(&mut in_force, wanted, changes)?;
                }
                None
            }
            Way::HandOver | Way::NewCache => {
                self.reconfiguration.check(&in_force, wanted, &differences, &way)?;
                let begin = || self.reconfiguration.begin(wanted, &differences, &way);
                (!dry_run).then(begin).transpose()?
            }
        };
        Ok(Application { differences, way, hand_over })
    }

    fn set_drain(&self, volume: &str, on: bool) -> Result<(), ControlError> {
        let at = self.place(volume)?;
        tracing::info!(volume, on, "drain");
        self.pool.set_drain(self.pool.registry().volumes()[at].id, on);
        Ok(())
    }

    fn retire(&self) -> Result<(), ControlError> {
        let health = self.observe()?.health();
        if health != Health::Good {
            let what = "the cache device is out of use already";
            let hint = "forebay status tells what is left of it";
            return Err(ControlError::new(ControlErrorKind::Conflict, what, hint));
        }
        tracing::warn!("told to give up the cache device");
        let Reconfiguration { state, cache, .. } = &*self.reconfiguration;
        retired::mark(state, *cache).map_err(|error| {
            let what = format!("it cannot be put on record that the device is retired: {error}");
            let hint = "nothing was changed; see to the state directory";
            ControlError::new(ControlErrorKind::Unavailable, what, hint)
        })?;
        self.pool.retire();
        Ok(())
    }

    fn start_trace(&self, volume: &str, to: &TraceTarget) -> Result<(), ControlError> {
        let at = self.place(volume)?;
        let mut traces = locked(&self.traces);
        if traces[at].as_ref().is_some_and(|trace| trace.snapshot().running) {
            let what = format!("volume {volume:?} is being recorded already");
            let hint = "end that with DELETE, or wait until it has ended";
            return Err(ControlError::new(ControlErrorKind::Conflict, what, hint));
        }
        let id = self.pool.registry().volumes()[at].id;
        traces[at] = Some(Trace::start(&self.pool, id, to)?);
        tracing::info!(volume, path = %to.path.display(), "recording");
        Ok(())
    }

    fn trace(&self, volume: &str) -> Result<Option<TraceSnapshot>, ControlError> {
        let at = self.place(volume)?;
        let traces = locked(&self.traces);
        Ok(traces[at].as_ref().map(Trace::snapshot))
    }

    fn stop_trace(&self, volume: &str) -> Result<TraceSnapshot, ControlError> {
        let at = self.place(volume)?;
        let mut traces = locked(&self.traces);
        let trace = traces[at].as_mut().ok_or_else(|| ControlError::no_trace(volume))?;
        trace.stop(&self.pool, self.pool.registry().volumes()[at].id);
        tracing::info!(volume, "recording ended");
        Ok(trace.snapshot())
    }

    fn start_prefetch(&self, volume: &str, target: &PrefetchTarget) -> Result<(), ControlError> {
        let place = self.place(volume)?;
        let size = self.facts.volumes[place].size;
        let on_it = |range: &std::ops::Range<u64>| range.start < range.end && range.end <= size;
        if let Some(range) = target.ranges.iter().find(|range| !on_it(range)) {
            let what = format!("{}..{} is not a range of the volume", range.start, range.end);
            let hint = format!("use bytes from 0 to {size}");
            return Err(ControlError::new(ControlErrorKind::Invalid, what, hint));
        }
        let stats = self.pool.stats().ok_or_else(|| self.silence())?;
        let conflict = |what: String, hint: &str| {
            Err(ControlError::new(ControlErrorKind::Conflict, what, hint))
        };
        if stats.total.unloaded_segments > 0 {
            let what = "the server is still learning what the cache holds".to_owned();
            return conflict(what, "try again in some seconds");
        }
        let mut prefetches = locked(&self.prefetches);
        if prefetches[place].as_ref().is_some_and(Prefetch::is_running) {
            let what = format!("volume {volume:?} is being prefetched already");
            return conflict(what, "wait for its end, or end it with `forebay prefetch --cancel`");
        }
        tracing::info!(volume, ranges = target.ranges.len(), rate = target.rate, "prefetch");
        prefetches[place] = Some(Prefetch::asked(&self.pool, Endpoint(place), target));
        Ok(())
    }

    fn prefetch(&self, volume: &str) -> Result<Option<PrefetchSnapshot>, ControlError> {
        let place = self.place(volume)?;
        Ok(locked(&self.prefetches)[place].as_ref().map(Prefetch::snapshot))
    }

    fn stop_prefetch(&self, volume: &str) -> Result<(), ControlError> {
        let place = self.place(volume)?;
        locked(&self.prefetches)[place].iter().for_each(Prefetch::cancel);
        Ok(())
    }

    fn clients(&self) -> Result<Vec<ClientSnapshot>, ControlError> {
        let all = self.pool.clients().ok_or_else(|| self.silence())?;
        let name = |id| {
            let mut volumes = self.pool.registry().volumes().iter();
            volumes.find(|volume| volume.id == id).map(|volume| volume.name.clone())
        };
        let client = |client: ClientStats| {
            let Served { requests, times, errors, read_bytes, write_bytes } = client.served;
            let counted = requests.into_iter().zip(times);
            let operations = OPERATIONS.iter().zip(counted);
            ClientSnapshot {
                peer: client.peer,
                volume: client.volume.and_then(name),
                connected: client.connected,
                silent: client.silent,
                in_flight: client.in_flight as u64,
                memory: client.memory,
                operations: operations
                    .map(|(&(_, operation), (count, time))| (operation, count, time))
                    .collect(),
                errors,
                bytes: [read_bytes, write_bytes],
            }
        };
        Ok(all.into_iter().map(client).collect())
    }

    fn disks(&self) -> Result<Vec<DiskSnapshot>, ControlError> {
        self.disks.all()
    }

    fn attach(&self, volume: &str, sector_size: Option<u32>) -> Result<DiskSnapshot, ControlError> {
        self.reconfiguration.refuse_under_way()?;
        let place = self.place(volume)?;
        let file = self.facts.volumes[place].file.as_deref();
        if let Some(device) = file.map(loops::over_path).unwrap_or_default().first() {
            let what = format!("volume {volume} is attached already: {device}");
            return Err(ControlError::new(ControlErrorKind::Conflict, what, "detach it first"));
        }
        self.disks.attach(place, sector_size)
    }

    fn detach(&self, volume: &str) -> Result<DiskSnapshot, ControlError> {
        self.disks.detach(self.place(volume).ok(), volume)
    }

    fn stop(&self, drain: bool) -> Result<(), ControlError> {
        let ending = || {
            let what = "the server is ending already";
            ControlError::new(ControlErrorKind::Conflict, what, "wait until it has ended")
        };
        // Without a drain, it ends the drain of a stop.
        if drain && self.stopping.load(Ordering::Relaxed) {
            return Err(ending());
        }
        let disks = self.disks.devices();
        if !disks.is_empty() {
            let what = format!("volumes are attached as {}", disks.join(", "));
            let hint = "detach them first; SIGTERM stops the server even so, and the disks wait \
                        for its next start";
            return Err(ControlError::new(ControlErrorKind::Conflict, what, hint));
        }
        if let Some(mount) = &self.mount
            && let Err(what) = mount.leave_unused()
        {
            let hint = "detach or close them first; SIGTERM stops the server even so";
            return Err(ControlError::new(ControlErrorKind::Conflict, what, hint));
        }
        self.stop.send(Order::Stop { drain }).map_err(|_| ending())
    }

    fn left(&self) -> Option<LeftSnapshot> {
        self.last_word.ask()
    }

    fn upgrade(&self, program: &Path) -> Result<UpgradeSnapshot, ControlError> {
        if self.mount.as_ref().is_some_and(|mount| !mount.lasts()) {
            let what = "the requests of the mount cannot be handed over";
            let hint = "see the log for the reason; stop the server, and start the other program";
            return Err(ControlError::new(ControlErrorKind::Conflict, what, hint));
        }
        self.upgrades.begin(program)
    }

    fn last_upgrade(&self) -> Option<UpgradeSnapshot> {
        self.upgrades.last()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_counted_once_they_are_below_a_bound() {
        let mut histogram = Histogram::default();
        for micros in [5, 15, 15, 900, 20_000_000] {
            histogram.record(Duration::from_micros(micros));
        }
        let shown = at_most(&histogram);
        let count = |micros: u64| {
            let found = shown.iter().find(|&&(bound, _)| bound == micros * 1_000);
            found.map(|&(_, count)| count)
        };
        assert_eq!(count(10), Some(1));
        assert_eq!(count(20), Some(3));
        assert_eq!(count(500), Some(3));
        assert_eq!(count(1_000), Some(4));
        assert_eq!(count(10_000_000), Some(4));
        assert!(BOUNDS_MICROS.is_sorted());
    }
}
