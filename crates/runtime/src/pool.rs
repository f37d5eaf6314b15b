//! The shard threads as one thing: started, asked, told, and stopped in order.
//!
//! A [`Pool`] is a handle that any thread may hold. Stopping: no new connections or requests, what
//! is in flight is answered, dirty blocks are destaged if that is wished, every shard stops with
//! its log complete and durable, the threads end.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_block::{Arena, BufPool, SHARDS_MAX, VolumeId};
use forebay_device::{BlockDevice, Clock};
use forebay_engine::{DrainProgress, Setting, Shard, Stats, VolumeState};
use forebay_volume::Registry;

use crate::blocking::clock;
use crate::channel::{Ask, Mount};
use crate::clients::{CLIENTS, HANDSHAKE_PATIENCE, STALL_PATIENCE, SessionFactory};
use crate::connection::Patience;
use crate::detached::DetachedList;
use crate::devices::{self, Gates};
use crate::error::StartError;
use crate::events;
use crate::listen::Listener;
use crate::mailbox::Mailbox;
use crate::memory::{CLIENT_MEMORY, Memory};
use crate::message::{Command, Latencies, Message, Snapshot};
use crate::places::Places;
use crate::record::{Recording, RecordingPlan};
use crate::thread::{self, Plan, Started};
use crate::witness::{Clerk, Record, Witness};

/// How long clients may take to take their last answers, unless configured otherwise.
pub const FAREWELL_PATIENCE: Duration = Duration::from_secs(10);
/// How long the shards may take to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(120);
/// How long a thread may take to say how it stands.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// How often a drain that precedes a stop is looked at.
const DRAIN_STEP: Duration = Duration::from_millis(20);

/// Makes the shard of a thread, on that thread.
pub type MakeShard = Box<dyn FnOnce(BufPool) -> Box<dyn Shard> + Send>;

/// What a pool is made from.
pub struct PoolConfig {
    /// The volumes.
    pub registry: Registry,
    /// The primary of each volume, in the registry's order.
    pub primaries: Vec<Arc<dyn BlockDevice>>,
    /// The cache device.
    pub cache: Option<Arc<dyn BlockDevice>>,
    /// One for each thread.
    pub shards: Vec<MakeShard>,
    /// Where buffers come from.
    pub arena: Arc<Arena>,
    /// The clock of every thread; [`crate::clock`] unless there is a reason.
    pub clock: Clock,
    /// Most clients at once.
    pub clients: usize,
    /// Bytes of memory for what clients ask and are answered, all together.
    pub client_memory: u64,
    /// How long a client may take to choose a volume.
    pub handshake: Duration,
    /// How long a client may take to take a byte of its answers, or to send one of a write.
    pub stall: Duration,
    /// How long a client that has chosen one may ask for nothing; for ever when absent.
    pub idle: Option<Duration>,
    /// How long clients may take to take their last answers.
    pub farewell: Duration,
    /// Whether a FUSE mount may be served: its requests may come over the threads' rings.
    pub fuse: bool,
    /// Where the trust in the cache device is recorded, what is recorded now, and the list of the
    /// stripes that it has left.
    pub witness: Option<(Witness, Record, DetachedList)>,
}

impl PoolConfig {
    /// A pool of shards made by `shards`, without a cache device, with the usual settings.
    #[must_use]
    pub fn new(
        registry: Registry,
        primaries: Vec<Arc<dyn BlockDevice>>,
        shards: Vec<MakeShard>,
        arena: Arc<Arena>,
    ) -> Self {
        Self {
            registry,
            primaries,
            cache: None,
            shards,
            arena,
            clock: clock(),
            clients: CLIENTS,
            client_memory: CLIENT_MEMORY,
            handshake: HANDSHAKE_PATIENCE,
            stall: STALL_PATIENCE,
            idle: None,
            farewell: FAREWELL_PATIENCE,
            fuse: false,
            witness: None,
        }
    }
}

/// How a pool stands.
#[derive(Clone, Debug)]
pub struct PoolStats {
    /// When, on the pool's clock.
    pub now: forebay_block::Instant,
    /// Every shard.
    pub shards: Vec<Snapshot>,
    /// The shards' counters and levels together.
    pub total: Stats,
    /// Each volume, in the registry's order.
    pub volumes: Vec<VolumeStats>,
    /// Clients now.
    pub clients: usize,
    /// Clients refused because of the limit.
    pub clients_refused: u64,
}

/// How a volume stands.
#[derive(Clone, Debug)]
pub struct VolumeStats {
    /// Which.
    pub id: VolumeId,
    /// Its name.
    pub name: String,
    /// Latencies by operation, in the order of [`crate::OPERATIONS`].
    pub latencies: Latencies,
    /// Its reads, its primary, its dirty and lost blocks, of all shards.
    pub state: VolumeState,
}

/// How a pool stopped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stopped {
    /// Whether every shard stopped with its log complete.
    pub complete: bool,
    /// Blocks that only the cache has in their newest form.
    pub dirty_blocks: u64,
    /// Volumes that have any of those.
    pub left: Vec<Left>,
    /// Volumes whose primary failed a flush: it may show what power failure takes from it.
    pub doubtful: Vec<VolumeId>,
}

/// What a stop leaves of a volume in the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Left {
    /// The volume's name.
    pub volume: String,
    /// Blocks that only the cache has in their newest form.
    pub dirty_blocks: u64,
    /// Of these, how many cannot be read back.
    pub lost_blocks: u64,
    /// Whether the primary did not answer.
    pub away: bool,
}

/// A handle to the shard threads. The last one to go stops them.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    registry: Arc<Registry>,
    mailboxes: Arc<[Mailbox<Message>]>,
    places: Arc<Places>,
    farewell: Duration,
    clock: Clock,
    gates: Gates,
    /// Set to give up a drain that precedes a stop.
    give_up_drain: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Writes what the shards tell.
    log: Mutex<Option<JoinHandle<()>>>,
    /// Held by whoever stops the pool.
    stopping: Mutex<()>,
    stopped: OnceLock<Stopped>,
}

impl Pool {
    /// Starts the threads and waits until every shard serves.
    ///
    /// # Errors
    /// When one cannot; then none is left running.
    ///
    /// # Panics
    /// If there is no shard, or more than [`SHARDS_MAX`], or not a primary for each volume.
    pub fn start(config: PoolConfig) -> Result<Self, StartError> {
        let count = config.shards.len();
        assert!((1..=SHARDS_MAX).contains(&count), "1 to {SHARDS_MAX} shards");
        assert_eq!(config.primaries.len(), config.registry.volumes().len());
        let registry = Arc::new(config.registry);
        let ids = registry.volumes().iter().map(|volume| volume.id);
        let primaries: Vec<_> = ids.zip(config.primaries).collect();
        let mailboxes: Arc<[_]> = (0..count).map(|_| Mailbox::default()).collect();
        let places = Arc::new(Places::new(count, config.clients));
        let memory = Memory::new(config.client_memory, places.limit(), Arc::clone(&mailboxes));
        let memory = Arc::new(memory);
        let PoolConfig { handshake, stall, idle, .. } = config;
        let patience = Patience { handshake, stall, idle };
        let all = config.cache.iter().chain(primaries.iter().map(|(_, device)| device));
        let gates = devices::gates(all.map(|device| device.info()), count);
        let (witness_tell, witness_hear) = mpsc::channel();
        if let Some((witness, record, detached)) = config.witness {
            let mailboxes = Arc::clone(&mailboxes);
            let clerk = Clerk { witness, record, detached, mailboxes };
            let builder = std::thread::Builder::new().name("witness".into());
            // It ends with the shard threads, when nobody is left to ask it.
            builder.spawn(move || clerk.serve(&witness_hear))?;
        }
        let (sink, log) = events::start(&registry)?;
        let pool = Self {
            inner: Arc::new(Inner {
                registry: Arc::clone(&registry),
                mailboxes: Arc::clone(&mailboxes),
                places: Arc::clone(&places),
                farewell: config.farewell,
                clock: config.clock,
                gates: Arc::clone(&gates),
                give_up_drain: AtomicBool::new(false),
                threads: Mutex::new(Vec::new()),
                log: Mutex::new(Some(log)),
                stopping: Mutex::new(()),
                stopped: OnceLock::new(),
            }),
        };
        // Goes before the pool does, whose end waits for the log, which waits for the last sink.
        let events = sink;
        let (tell, hear) = mpsc::channel();
        for (index, shard) in config.shards.into_iter().enumerate() {
            let plan = Plan {
                index,
                clock: config.clock,
                arena: Arc::clone(&config.arena),
                cache: config.cache.clone(),
                primaries: primaries.clone(),
                gates: Arc::clone(&gates),
                registry: Arc::clone(&registry),
                mailboxes: Arc::clone(&mailboxes),
                places: Arc::clone(&places),
                memory: Arc::clone(&memory),
                patience,
                shard,
                wide: config.fuse,
                witness: witness_tell.clone(),
                events: events.clone(),
            };
            let tell = tell.clone();
            let builder = std::thread::Builder::new().name(format!("shard-{index}"));
            let thread = builder.spawn(move || thread::run(plan, tell))?;
            locked(&pool.inner.threads).push(thread);
        }
        drop((tell, events));
        pool.await_start(count, &hear)?;
        Ok(pool)
    }

    fn await_start(
        &self,
        count: usize,
        hear: &Receiver<(usize, Started)>,
    ) -> Result<(), StartError> {
        let mut refusal = None;
        for _ in 0..count {
            let Ok((shard, how)) = hear.recv() else {
                return Err(io::Error::other("a shard thread ended without a word").into());
            };
            refusal = refusal.or(match how {
                Started::Serving => None,
                Started::Failed(error) => Some(StartError::Io(error)),
                Started::Refused(why) => Some(StartError::Refused { shard, why }),
            });
        }
        refusal.map_or(Ok(()), Err)
    }

    /// The volumes.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.inner.registry
    }

    /// Serves clients that connect to these listeners from now on.
    ///
    /// # Errors
    /// When the ring has no room for them, or the pool has stopped.
    pub fn listen(
        &self,
        listeners: Vec<Listener>,
        factory: Arc<dyn SessionFactory>,
    ) -> io::Result<()> {
        let (tell, hear) = mpsc::channel();
        self.command(0, Command::Listen(listeners, factory, tell));
        let answer = hear.recv_timeout(ANSWER_PATIENCE);
        answer.unwrap_or_else(|_| Err(io::Error::other("the pool has stopped")))
    }

    /// Serves a FUSE mount from now on; `text` gives the texts that its files ask for, and may
    /// ask the pool for them.
    ///
    /// # Errors
    /// When a thread cannot, or the pool has stopped.
    pub fn serve_mount(
        &self,
        mount: Mount,
        text: impl Fn(u64) -> Vec<u8> + Send + 'static,
    ) -> io::Result<()> {
        let (asks, asked) = mpsc::channel::<Ask>();
        let mailboxes = Arc::clone(&self.inner.mailboxes);
        let serve = move || {
            // It ends with the shard threads, when nobody is left to ask it.
            for Ask { thread, key, topic } in asked {
                mailboxes[thread].send_one(Message::Told { key, text: text(topic) });
            }
        };
        std::thread::Builder::new().name("texts".into()).spawn(serve)?;
        let (tell, hear) = mpsc::channel();
        for shard in 0..self.inner.mailboxes.len() {
            let config = mount.share()?;
            self.command(shard, Command::Mount(config, asks.clone(), tell.clone()));
        }
        drop(tell);
        self.inner.mailboxes.iter().try_for_each(|_| {
            let answer = hear.recv_timeout(ANSWER_PATIENCE);
            answer.unwrap_or_else(|_| Err(io::Error::other("the pool has stopped")))
        })
    }

    /// How everything stands; `None` once the pool has stopped.
    #[must_use]
    pub fn stats(&self) -> Option<PoolStats> {
        let shards = self.snapshots()?;
        let mut total = Stats::default();
        shards.iter().for_each(|shard| total.merge(&shard.stats));
        let volumes = self.registry().volumes().iter().enumerate().map(|(place, volume)| {
            let mut latencies = Latencies::default();
            for shard in &shards {
                let theirs = &shard.latencies[place];
                latencies.iter_mut().zip(theirs).for_each(|(mine, theirs)| mine.merge(theirs));
            }
            let mut state = VolumeState { id: volume.id, ..VolumeState::default() };
            let theirs = shards.iter().flat_map(|shard| &shard.volumes);
            theirs.filter(|one| one.id == volume.id).for_each(|one| state.merge(one));
            VolumeStats { id: volume.id, name: volume.name.clone(), latencies, state }
        });
        let volumes = volumes.collect();
        let places = &self.inner.places;
        let (clients, clients_refused) = (places.connected(), places.refused());
        let now = self.inner.clock.now();
        Some(PoolStats { now, shards, total, volumes, clients, clients_refused })
    }

    fn snapshots(&self) -> Option<Vec<Snapshot>> {
        if self.inner.stopped.get().is_some() {
            return None;
        }
        let (tell, hear) = mpsc::channel();
        let count = self.inner.mailboxes.len();
        self.command_all(|| Command::Snapshot(tell.clone()));
        drop(tell);
        let answers = (0..count).map(|_| hear.recv_timeout(ANSWER_PATIENCE).ok());
        let mut all = answers.collect::<Option<Vec<_>>>()?;
        all.sort_by_key(|snapshot| snapshot.shard);
        Some(all)
    }

    /// Changes a setting, on every shard.
    pub fn set(&self, setting: Setting) {
        self.command_all(|| Command::Set(setting));
    }

    /// Records what clients ask of a volume, from now on until [`Pool::stop_recording`] or for so
    /// long; `out` gets the trace, on a thread of its own. A recording of the volume that is
    /// under way gets no more requests.
    ///
    /// # Errors
    /// When there is no thread to be had.
    ///
    /// # Panics
    /// If the volume is not of the registry.
    pub fn record(
        &self,
        volume: VolumeId,
        limit: Option<Duration>,
        out: Box<dyn io::Write + Send>,
    ) -> io::Result<Recording> {
        let known = self.registry().volumes().iter().find(|known| known.id == volume);
        let known = known.expect("the volume is of the registry");
        let epoch = std::time::SystemTime::UNIX_EPOCH;
        let plan = RecordingPlan {
            name: known.name.clone(),
            size: known.info.size,
            seconds: epoch.elapsed().map_or(0, |since| since.as_secs()),
            limit,
            clock: self.inner.clock,
        };
        let (recording, sink) = Recording::start(plan, out)?;
        self.command_all(|| Command::Record(volume, Some(sink.clone())));
        Ok(recording)
    }

    /// Ends a recording. Waits until all that the threads noted is written.
    pub fn stop_recording(&self, volume: VolumeId, recording: &mut Recording) {
        self.command_all(|| Command::Record(volume, None));
        // An answer of every thread says that it has seen the command.
        let _ = self.snapshots();
        recording.finish();
    }

    /// Destages all of a volume as fast as its primary takes it; or goes back to the usual pace,
    /// unless a stop drains everything. Progress is in [`Pool::stats`].
    pub fn set_drain(&self, volume: VolumeId, on: bool) {
        self.command_all(|| Command::DrainVolume(volume, on));
    }

    /// Gives up the drain that a stop waits for.
    pub fn give_up_drain(&self) {
        self.inner.give_up_drain.store(true, Ordering::Relaxed);
        self.command_all(|| Command::Drain(false));
    }

    /// Stops in order, after a drain if so wished. Waits until the threads have ended; a second
    /// call gives the same answer.
    pub fn stop(&self, drain: bool) -> Stopped {
        self.inner.stop(drain)
    }

    fn command(&self, shard: usize, command: Command) {
        self.inner.mailboxes[shard].send_one(Message::Command(command));
    }

    fn command_all(&self, command: impl Fn() -> Command) {
        (0..self.inner.mailboxes.len()).for_each(|shard| self.command(shard, command()));
    }
}

impl Inner {
    fn stop(&self, drain: bool) -> Stopped {
        let _only_one = locked(&self.stopping);
        self.stopped.get_or_init(|| self.stop_threads(drain)).clone()
    }

    fn stop_threads(&self, drain: bool) -> Stopped {
        let quiet = self.ask_all(self.farewell, Command::Quiesce);
        if !quiet {
            tracing::warn!("clients that did not take their answers are cut off");
            self.tell_all(|| Command::CutOff);
        }
        if drain {
            self.give_up_drain.store(false, Ordering::Relaxed);
            self.await_drain();
        }
        let (dirty_blocks, _, left) = self.left();
        let complete = self.ask_all(STOP_PATIENCE, Command::Stop);
        if complete {
            for thread in locked(&self.threads).drain(..) {
                // A panic ends the process, not the thread.
                let _ = thread.join();
            }
            // Nobody tells it anything any more: what was told last is written.
            let _ = locked(&self.log).take().map(JoinHandle::join);
        } else {
            tracing::error!("a shard did not stop in time: the log is left as after a crash");
        }
        Stopped { complete, dirty_blocks, left, doubtful: self.doubtful() }
    }

    fn doubtful(&self) -> Vec<VolumeId> {
        let ids = self.registry.volumes().iter().map(|volume| volume.id);
        // The gate of the cache device, if there is one, comes before those of the primaries.
        let primaries = self.gates.iter().rev().zip(ids.rev());
        let failed = primaries.filter(|(gate, _)| devices::locked(gate).has_failed());
        failed.map(|(_, id)| id).collect()
    }

    fn await_drain(&self) {
        self.tell_all(|| Command::Drain(true));
        let (began, mut progress) = (Instant::now(), DrainProgress::default());
        loop {
            let (dirty, lost, _) = self.left();
            // What cannot be read back is never destaged.
            let left = dirty.saturating_sub(lost);
            let stalled = progress.is_stalled(began.elapsed(), left);
            if left == 0 || stalled || self.give_up_drain.load(Ordering::Relaxed) {
                return;
            }
            std::thread::sleep(DRAIN_STEP);
        }
    }

    /// Dirty and lost blocks of all the shards that answer, and by volume.
    fn left(&self) -> (u64, u64, Vec<Left>) {
        let (tell, hear) = mpsc::channel();
        self.tell_all(|| Command::Snapshot(tell.clone()));
        drop(tell);
        let (mut dirty, mut lost, mut states) = (0, 0, Vec::<VolumeState>::new());
        for snapshot in self.mailboxes.iter().flat_map(|_| hear.recv_timeout(ANSWER_PATIENCE)) {
            dirty += snapshot.dirty_blocks;
            lost += snapshot.stats.fenced_blocks;
            for state in snapshot.volumes {
                match states.iter_mut().find(|known| known.id == state.id) {
                    Some(known) => known.merge(&state),
                    None => states.push(state),
                }
            }
        }
        let volumes = self.registry.volumes().iter();
        let name = |id| volumes.clone().find(|one| one.id == id).map(|one| one.name.clone());
        let left = states.iter().filter(|state| state.dirty_blocks > 0).map(|state| Left {
            volume: name(state.id).unwrap_or_default(),
            dirty_blocks: state.dirty_blocks,
            lost_blocks: state.lost_blocks,
            away: state.primary.away_since.is_some() || state.slow_ios > 0,
        });
        (dirty, lost, left.collect())
    }

    /// Gives every thread a command that it answers when it got there. False when one did not in
    /// time.
    fn ask_all(
        &self,
        patience: Duration,
        command: impl Fn(mpsc::Sender<usize>) -> Command,
    ) -> bool {
        let (tell, hear) = mpsc::channel();
        self.tell_all(|| command(tell.clone()));
        drop(tell);
        let deadline = Instant::now() + patience;
        self.mailboxes.iter().all(|_| {
            let left = deadline.saturating_duration_since(Instant::now());
            match hear.recv_timeout(left) {
                Ok(_) => true,
                // A thread that is gone has nothing in flight.
                Err(RecvTimeoutError::Disconnected) => true,
                Err(RecvTimeoutError::Timeout) => false,
            }
        })
    }

    fn tell_all(&self, command: impl Fn() -> Command) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.send_one(Message::Command(command())));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop(false);
    }
}

/// What is behind these locks is replaced whole, so that a panic leaves nothing half-changed.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
