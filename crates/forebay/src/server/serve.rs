//! `forebay serve`: opens the devices and the cache, starts the shards, the clients' endpoints and
//! the control socket, reports that it is ready, and stops everything in order.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use forebay_block::{BLOCK_SIZE, BufPool};
use forebay_control::config::Config;
use forebay_control::units::{Percent, Size};
use forebay_control::{
    Application, ControlSocket, LeftSnapshot, Monitor, PoolControl, PrimaryHealth, Server,
    VolumeSnapshot, Wanted, WebServer, default_socket,
};
use forebay_engine::{Health, VolumeState};
use forebay_runtime::{Left, Pool, StateDir, Stopped};
use forebay_volume::Registry;
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::disk::block;
use crate::host::overlap;
use crate::keeper::{self, Message};
use crate::output;
use crate::server::applying::Applying;
use crate::server::args::ServeArgs;
use crate::server::cache::{self, Cache};
use crate::server::control::{Facts, Parent, Running};
use crate::server::disks::{self, Disks};
use crate::server::endpoints::{Doors, Endpoints};
use crate::server::events::{self, Came};
use crate::server::kept::{self, Kept};
use crate::server::mount::{MountPoint, NewMount, Prepared, Topics, Unserved};
use crate::server::reconfigure::Reconfiguration;
use crate::server::upgrades::Upgrades;
use crate::server::warm_up::WarmUp;
use crate::server::web::Web;
use crate::server::{history, left_clients, logging, mount, process, rules, takeover, untold};

/// How long a stop waits for `forebay stop` to see that the drain was abandoned.
const TELL_TIME: Duration = Duration::from_secs(1);
const TELL_STEP: Duration = Duration::from_millis(10);
/// Time in which the primaries must tell what they hold at a stop, as long as a flush may take.
const STOP_PATIENCE: Duration = Duration::from_secs(60);
/// The same if the next server waits.
const HAND_OVER_PATIENCE: Duration = Duration::from_secs(4);
/// Signals that come within this time are one.
const ONE_SIGNAL: Duration = Duration::from_millis(300);

/// Serves until told to stop.
pub fn run(mut args: ServeArgs) -> anyhow::Result<()> {
    logging::start(args.log_format)?;
    if args.wants_keeper() {
        return keeper::run();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // From here on the signals are queued, so that none kills a half-started server.
    let mut signals = {
        let _context = runtime.enter();
        Signals::catch()?
    };
    let mut kept = if args.kept { Kept::receive()? } else { Kept::default() };
    let (config, text, warm_up) = if kept.is_successor() {
        prepare_to_take_over(&mut args, &mut kept)?
    } else {
        let (config, text) = args.config(&mut kept)?;
        (config, text, None)
    };
    let is_first = !kept.is_restart();
    process::prepare(config.memory.lock, config.server.fuse.is_some());
    let applying = Applying::of(&config, text.as_deref())?;
    let keeper = kept.line();
    let told = (&config, text.as_deref());
    let started = Serving::start(&args, told, applying.as_ref(), warm_up, kept);
    // Last: until it is ready, the server before may have to come back, and needs these records.
    let started = started.and_then(|serving| {
        serving.end_apply(applying.as_ref(), args.config.as_deref())?;
        Ok(serving)
    });
    let mut serving = started.inspect_err(|error| {
        let unable = Message::Unable { why: crate::explained(error) };
        // It is in the log too.
        let _ = keeper.map(|keeper| keeper.send(&unable, None));
    })?;
    signals.reread = args.config.map(|path| Reread { path, running: serving.running.clone() });
    // First the keeper: a server that says it is ready comes back if it dies.
    serving.kept.tell(&Message::Ready)?;
    serving.take_clients()?;
    if is_first && let Err(error) = output::line(&format!("ready {}", serving.endpoints.join(" ")))
    {
        tracing::warn!(%error, "standard output does not take the line `ready`");
    }
    process::notify(NotifyState::Ready);
    let ended = runtime.block_on(serving.until_stopped(&mut signals));
    if ended.is_err() {
        // A second signal does not wait for what the first one began.
        runtime.shutdown_background();
    }
    ended
}

/// Checks whether this program can take over from the server that serves, and waits until it may.
/// Returns the configuration, its text, and the list for a new cache, which is read before clients
/// wait.
fn prepare_to_take_over(
    args: &mut ServeArgs,
    kept: &mut Kept,
) -> anyhow::Result<(Config, Option<String>, Option<WarmUp>)> {
    let checked = args.config(kept).and_then(|(config, text)| {
        let applying = Applying::of(&config, text.as_deref())?;
        takeover::check(&config, applying.as_ref())?;
        let warm_up = applying.filter(|applying| applying.new_cache).and_then(|applying| {
            let state = StateDir::open(&config.cache.state_dir);
            state.and_then(|state| WarmUp::take(&state, applying.cache)).unwrap_or_else(|error| {
                tracing::warn!(%error, "the cache begins empty");
                None
            })
        });
        Ok((config, text, warm_up))
    });
    if let Err(error) = &checked {
        kept.tell(&Message::Unable { why: crate::explained(error) })?;
    }
    let checked = checked?;
    kept.take_over()?;
    Ok(checked)
}

/// The orders to a server that end its service.
pub enum Order {
    /// Stop, after a drain if demanded.
    Stop { drain: bool },
    /// Leave everything to the next server.
    HandOver,
}

/// The signals that a server handles. SIGHUP does not stop it: it comes from an operator, a closed
/// terminal, or log rotation.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    /// What SIGHUP does; nothing without a configuration file.
    reread: Option<Reread>,
    /// When the last signal that stops the server came.
    last: Option<Instant>,
}

impl Signals {
    fn catch() -> std::io::Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        Ok(Self {
            terminate,
            interrupt,
            hangup: signal(SignalKind::hangup())?,
            reread: None,
            last: None,
        })
    }

    /// Waits for a signal that stops the server; returns its name. A service manager may send one
    /// to every process of the service, and the keeper passes its own on: both together are one.
    async fn next(&mut self) -> &'static str {
        loop {
            let name = self.any().await;
            if self.last.is_none_or(|last| last.elapsed() >= ONE_SIGNAL) {
                self.last = Some(Instant::now());
                return name;
            }
        }
    }

    async fn any(&mut self) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                _ = self.hangup.recv() => match &self.reread {
                    Some(reread) => reread.begin(),
                    None => tracing::warn!(
                        "SIGHUP is ignored: there is no configuration file; change settings with \
                         forebay set"
                    ),
                },
            }
        }
    }
}

/// The configuration file, to be applied again.
#[derive(Clone)]
struct Reread {
    path: PathBuf,
    running: Arc<Running>,
}

impl Reread {
    /// Applies the file on another thread: primaries may take long to tell their sizes.
    fn begin(&self) {
        let this = self.clone();
        tokio::task::spawn_blocking(move || this.now());
    }

    /// A file that cannot be applied changes nothing, and is a line in the log.
    fn now(&self) {
        let path = self.path.display();
        let wanted = Config::text(&self.path).and_then(|text| {
            let config = Config::parse(&self.path, &text)?;
            Ok(Wanted { path: self.path.clone(), text, config })
        });
        match wanted.map(|wanted| self.running.apply(&wanted, false)) {
            Ok(Ok(Application { hand_over: Some(_), .. })) => {
                tracing::info!("SIGHUP: {path} comes into force by a hand-over");
            }
            Ok(Ok(Application { differences, .. })) => {
                let changes = differences.settings.len();
                tracing::info!(changes, "SIGHUP: {path} is in force");
            }
            Ok(Err(error)) => tracing::error!("SIGHUP: {path} is not applied: {error}"),
            Err(error) => tracing::error!("SIGHUP: nothing was changed: {error}"),
        }
    }
}

/// A server to which clients may connect.
struct Serving {
    pool: Pool,
    running: Arc<Running>,
    cache: Cache,
    mount: Option<Arc<MountPoint>>,
    /// Until clients may come.
    unserved: Option<Unserved>,
    disks: Arc<Disks>,
    control: Server,
    web: Option<WebServer>,
    endpoints: Vec<String>,
    asked: UnboundedReceiver<Order>,
    kept: Kept,
    doors: Doors,
}

impl Serving {
    fn start(
        args: &ServeArgs,
        (config, text): (&Config, Option<&str>),
        applying: Option<&Applying>,
        warm_up: Option<WarmUp>,
        mut kept: Kept,
    ) -> anyhow::Result<Self> {
        // Before anything is taken of what an earlier server has left.
        let came = match (kept.is_successor(), kept.is_restart()) {
            (true, _) => Came::TookOver,
            (false, true) => Came::Restarted,
            (false, false) => Came::Started,
        };
        // First the checks that touch no device.
        overlap::check(config)?;
        let socket = config.control.socket.clone().unwrap_or_else(default_socket);
        let name = format!("control {}", socket.display());
        let socket = match kept.take(&name) {
            Some(left) => ControlSocket::left(&socket, left.descriptor),
            None => ControlSocket::bind(&socket, &config.control.access())?,
        };
        let socket = socket.changed_by(config.control.changes);
        let clients = Endpoints::open(config, &mut kept)?;
        let web = Web::open(&config.web, &mut kept)?;
        tracing::info!(control = %socket.path().display(), "opening");
        let mut endpoints: Vec<String> = clients.addresses().collect();
        let place = config.server.fuse.as_deref();
        let place = place.map(|place| mount::prepare(place, &mut kept)).transpose()?;
        // A process may have a file of the mount open, which the kernel knows by its volume's id.
        let held = place.as_ref().and_then(Prepared::held_ids);
        let lost = untold::take(&mut kept).context("the losses that the keeper holds")?;
        let how = cache::Start { applied: applying, held: held.as_deref(), came, lost: &lost };
        let configured = (config.clone(), text.map(str::to_owned));
        let mut config = config.clone();
        let (mut cache, mut plan, settings) = cache::open(args, &mut config, how)?;
        let config = &config;
        log_settings(config);
        log_volumes(config, &plan.registry);
        plan.wide = place.is_some() || disks::exists();
        plan.untold = untold::hold(&kept, &plan.registry, &lost)?;
        let buffers = BufPool::new(Arc::clone(&plan.arena));
        let pool = Pool::start(plan)?;
        rules::tell_all(&pool, config, cache.bytes());
        cache.note_accepted()?;
        endpoints.extend(place.as_ref().map(|place| format!("fuse:{}", place.display())));
        let transport = config.server.fuse_transport;
        let mount = place.map(|place| place.mount(transport, kept.is_there())).transpose()?;
        let unserved = mount.as_ref().and_then(NewMount::unserved);
        let point = mount.as_ref().map(|mount| Arc::clone(&mount.point));
        let disks = Arc::new(Disks::new(pool.clone(), cache.state().clone()));
        let (stop, asked) = unbounded_channel();
        let facts = Facts {
            endpoints: endpoints.clone(),
            ..facts(config, &cache, &pool, point.as_deref(), &kept)
        };
        let mut in_force = config.clone();
        let division = cache.division(config);
        in_force.server.shards = Some(division.shards);
        in_force.cache.spare = Percent(division.spare_percent);
        in_force.cache.log_share = Percent(division.log_percent);
        let upgrades = Arc::new(Upgrades::new(kept.line()));
        listen_to_keeper(&kept, &upgrades, &stop)?;
        let reconfiguration = Arc::new(Reconfiguration {
            pool: pool.clone(),
            disks: Arc::clone(&disks),
            mount: point.clone(),
            upgrades,
            state: cache.state().clone(),
            cache: cache.uuid(),
            cache_bytes: cache.bytes(),
            source: args.config.clone(),
            in_force: Arc::new(Mutex::new(in_force)),
            gives_up_cache: AtomicBool::new(false),
            leaving: Mutex::new(None),
        });
        if applying.is_some_and(|applying| applying.new_cache) {
            // The server before could not use it, nor a start with another text.
            kept::hold_configuration(kept.line().as_deref(), text)?;
            kept.tell(&Message::NoReturn)?;
        }
        // From here on clients may write: the files of this start stay.
        cache.keep()?;
        if cache.is_retired() {
            tracing::warn!("the cache device was retired: it stays out of use");
            pool.retire();
        }
        let to = (kept.line(), stop);
        let running = Running::new(facts, configured, settings, reconfiguration, to);
        let running = Arc::new(running);
        disks.take_over();
        let observed = Arc::clone(&running) as Arc<dyn PoolControl>;
        let topics = Arc::new(Topics { pool: observed, monitor: OnceLock::new() });
        if let Some(mount) = mount {
            // A server that comes back may find a volume as the one that failed has left it.
            let file = args.config.as_deref();
            let may_differ = applying.is_some() || Applying::is_on_record(cache.state(), file)?;
            mount::serve(mount, &pool, Arc::clone(&topics), &kept, may_differ)?;
        }
        kept.hold(&name, "", socket.as_fd())?;
        let replaced = applying.filter(|applying| applying.new_cache).map(|before| before.cache);
        let caches = (cache.uuid(), replaced);
        let events = events::open(cache.state(), caches, &config.events, came)?;
        cache.take_news().into_iter().for_each(|news| events.tell(news));
        let monitor = Monitor::start(Arc::clone(&running) as Arc<dyn PoolControl>, events)?;
        topics.monitor.get_or_init(|| Arc::downgrade(&monitor));
        let control = Server::start(socket, Arc::clone(&monitor))?;
        let web = web.map(|web| web.serve(&monitor, &kept)).transpose()?;
        let doors = clients.leave_with(&kept, &pool, &buffers)?;
        tracing::info!(endpoints = endpoints.join(" "), "serving");
        if let Some(list) = warm_up {
            running.warm_up(list);
        }
        kept::hold_configuration(kept.line().as_deref(), text)?;
        if let Some(text) = text {
            history::keep_or_warn(cache.state(), text);
        }
        let mount = point;
        Ok(Self {
            pool,
            running,
            cache,
            mount,
            unserved,
            disks,
            control,
            web,
            endpoints,
            asked,
            kept,
            doors,
        })
    }

    /// Notes that the configuration is in force, if it was `applied`, and that no other one of this
    /// `file` is about to be.
    fn end_apply(&self, applied: Option<&Applying>, file: Option<&Path>) -> anyhow::Result<()> {
        if applied.is_some() {
            self.running.keep_settings()?;
        }
        let text = applied.map(|applied| applied.text.as_str());
        Applying::end(self.cache.state(), self.cache.uuid(), file, text)?;
        self.running.take_changes();
        Ok(())
    }

    /// Lets clients in, and goes on with those of the server before. The keeper must know that this
    /// one serves: it would give them, and the sockets, to another one otherwise.
    fn take_clients(&mut self) -> anyhow::Result<()> {
        self.control.own_file();
        self.web.iter_mut().for_each(WebServer::own_file);
        let door = self.doors.open(&self.pool)?;
        let clients = left_clients::take(&mut self.kept)?;
        if let Some(mount) = self.unserved.take() {
            mount.keep();
        }
        if !clients.is_empty() {
            tracing::info!(count = clients.len(), "clients of the previous server");
            self.pool.adopt(clients, door);
        }
        Ok(())
    }

    /// Waits for a signal or the control socket, and stops.
    async fn until_stopped(mut self, signals: &mut Signals) -> anyhow::Result<()> {
        let (drain, awaited) = tokio::select! {
            name = signals.next() => {
                tracing::info!("{name}: stopping");
                (false, false)
            }
            Some(order) = self.asked.recv() => match order {
                Order::Stop { drain } => {
                    tracing::info!(drain, "told to stop");
                    (drain, true)
                }
                Order::HandOver => return self.hand_over(),
            },
        };
        process::notify(NotifyState::Stopping);
        if let Err(error) = self.kept.tell(&Message::Stopping) {
            tracing::warn!(%error, "the keeper is gone");
        }
        self.running.set_stopping();
        self.running.refuse_upgrades();
        let health = self.running.snapshot().map_or(Health::Good, |snapshot| snapshot.health());
        let (pool, mount) = (self.pool.clone(), self.mount.clone());
        let disks = self.disks.served();
        let mut stopping = tokio::task::spawn_blocking(move || {
            if !disks.is_empty() {
                let shown = disks.join(", ");
                tracing::warn!("{shown}: syncing their file systems, then they wait for a server");
                block::write_all_back(&disks);
            }
            if let Some(mount) = mount {
                mount.leave();
            }
            pool.stop(drain)
        });
        let mut given_up = false;
        let stopped = loop {
            let why = tokio::select! {
                stopped = &mut stopping => break stopped?,
                name = signals.next() => {
                    if !drain {
                        // The next start recovers as after a crash: nothing flushed is lost.
                        bail!("{name} again: not stopped in order; the next start will recover");
                    }
                    name
                }
                () = stop_without_drain(&mut self.asked), if drain && !given_up => {
                    "told to stop without a drain"
                }
            };
            tracing::warn!("{why}: the drain is abandoned");
            given_up = true;
            self.tell_given_up().await;
            self.pool.give_up_drain();
        };
        // Then a stop without a drain was requested, and that is what happened.
        let left = if drain && !given_up { what_is_left(&stopped) } else { String::new() };
        self.close(&stopped, health, awaited)?;
        anyhow::ensure!(left.is_empty(), "stopped, but not all is drained: {left}");
        Ok(())
    }

    /// Leaves everything to the next server. Signals are the keeper's business now.
    fn hand_over(mut self) -> anyhow::Result<()> {
        tracing::info!("another program takes over");
        // A stop that comes now would be lost.
        self.asked.close();
        let health = self.running.snapshot().map_or(Health::Good, |snapshot| snapshot.health());
        self.running.set_stopping();
        let (stopped, clients) = self.pool.hand_over(&self.running.leaving());
        if let Err(error) = left_clients::leave(clients, &self.kept) {
            tracing::warn!(%error, "not all clients could be handed over");
        }
        let closed = if stopped.complete {
            let gives_up = self.running.gives_up_cache();
            self.cache.close(health, &stopped, gives_up, HAND_OVER_PATIENCE)
        } else {
            Err(anyhow::anyhow!("a shard did not stop in time; the next program will recover"))
        };
        self.control.leave();
        if let Some(web) = self.web {
            web.leave();
        }
        closed
    }

    /// Gives `forebay stop` time to see that the drain is abandoned, before the server stops
    /// answering.
    async fn tell_given_up(&self) {
        self.running.set_given_up();
        let limit = Instant::now() + TELL_TIME;
        while !self.running.has_told() && Instant::now() < limit {
            tokio::time::sleep(TELL_STEP).await;
        }
    }

    /// Ends everything else after the shards. If a stop was `awaited`, it tells what is left.
    fn close(self, stopped: &Stopped, health: Health, awaited: bool) -> anyhow::Result<()> {
        let closed = if stopped.complete {
            self.cache.close(health, stopped, false, STOP_PATIENCE)
        } else {
            Err(anyhow::anyhow!("a shard did not stop in time; the next start will recover"))
        };
        tracing::info!(dirty_blocks = stopped.dirty_blocks, "stopped");
        if awaited && stopped.complete {
            self.running.last_word().tell(left_of(stopped));
        }
        drop(self.web);
        // Last, since `forebay stop` waits for it.
        drop(self.control);
        closed
    }
}

/// Waits for the order to stop without a drain. May be dropped and called again.
async fn stop_without_drain(asked: &mut UnboundedReceiver<Order>) {
    while let Some(order) = asked.recv().await {
        if matches!(order, Order::Stop { drain: false }) {
            return;
        }
    }
    std::future::pending().await
}

/// Carries out the keeper's orders from now on.
fn listen_to_keeper(
    kept: &Kept,
    upgrades: &Arc<Upgrades>,
    stop: &UnboundedSender<Order>,
) -> anyhow::Result<()> {
    let (upgrades, stop) = (Arc::clone(upgrades), stop.clone());
    kept.listen(move |message| match message {
        Some(Message::Upgraded(outcome)) => upgrades.ended(&outcome),
        // A server that has begun to stop goes on with that.
        Some(Message::HandOver) => drop(stop.send(Order::HandOver)),
        Some(_) => {}
        None => upgrades.lose_keeper(),
    })?;
    Ok(())
}

/// Logs the settings of this start.
fn log_settings(config: &Config) {
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        cache = %config.cache.path.display(),
        state = %config.cache.state_dir.display(),
        ram = %config.memory.ram,
        eviction = config.cache.eviction.name(),
        content = config.cache.content.name(),
        compress = config.cache.compress,
        write_cache_depth_seconds = config.cache.write_cache_depth.0.as_secs_f64(),
        max_clients = config.server.max_clients,
        client_memory = %config.server.client_memory,
        "starting"
    );
}

fn log_volumes(config: &Config, registry: &Registry) {
    for (configured, volume) in config.volumes.iter().zip(registry.volumes()) {
        tracing::info!(
            volume = %volume.name,
            primary = %configured.primary,
            size = %Size(volume.info.size),
            mode = configured.mode.name(),
            read_only = volume.read_only,
            "volume"
        );
    }
}

/// What is left in the cache.
fn left_of(stopped: &Stopped) -> LeftSnapshot {
    let lost: u64 = stopped.left.iter().map(|left| left.lost_blocks).sum();
    let bytes = |blocks: u64| blocks * BLOCK_SIZE as u64;
    LeftSnapshot { dirty_bytes: bytes(stopped.dirty_blocks), lost_bytes: bytes(lost) }
}

/// The dirty data that a drain before the stop has left, and why.
fn what_is_left(stopped: &Stopped) -> String {
    let of_volume = |left: &Left| {
        let size = |blocks: u64| Size(blocks * BLOCK_SIZE as u64);
        let mut all = Vec::new();
        if left.lost_blocks > 0 {
            all.push(format!("{} cannot be read back from the cache", size(left.lost_blocks)));
        }
        let whole = left.dirty_blocks.saturating_sub(left.lost_blocks);
        if whole > 0 {
            let why = if left.away { "its primary does not answer" } else { "no progress" };
            all.push(format!("{} stay in the cache: {why}", size(whole)));
        }
        format!("volume {}: {}", left.volume, all.join(", "))
    };
    stopped.left.iter().map(of_volume).collect::<Vec<_>>().join("; ")
}

fn facts(
    config: &Config,
    cache: &Cache,
    pool: &Pool,
    mount: Option<&MountPoint>,
    kept: &Kept,
) -> Facts {
    let volumes = config.volumes.iter().zip(pool.registry().volumes());
    let volumes = volumes.map(|(configured, volume)| VolumeSnapshot {
        name: volume.name.clone(),
        primary: configured.primary.clone(),
        size: volume.info.size,
        mode: configured.mode,
        read_only: volume.read_only,
        file: mount.map(|mount| mount.file(&volume.name)),
        devices: Vec::new(),
        state: VolumeState::default(),
        primary_health: PrimaryHealth::default(),
    });
    Facts {
        cache_path: config.cache.path.display().to_string(),
        cache_bytes: cache.bytes(),
        cache_device_bytes: cache.device_bytes(),
        endpoints: Vec::new(),
        volumes: volumes.collect(),
        keeper: Parent::of(kept),
        state_health: cache.state_health(),
    }
}
