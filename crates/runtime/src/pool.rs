//! The shard threads as a whole: start, queries, commands, and an orderly stop.
//!
//! A [`Pool`] is a handle that any thread may hold. A stop takes these steps: no new connections or
//! requests; requests in flight are answered; dirty blocks are destaged if requested; every shard
//! stops with its log complete and durable; the threads end.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_block::{
    Arena, BlockRange, BufPool, ByteRange, Endpoint, ErrorKind, IoBuf, IoResult, SHARDS_MAX,
    VolumeId,
};
use forebay_device::{BlockDevice, Clock, STRAGGLE_MAX};
use forebay_engine::{DrainProgress, ListedBlock, Lsn, Setting, Shard, Stats, VolumeState};
use forebay_policy::{RequestRule, RequestRules, RuleCount};
use forebay_volume::Registry;

use crate::blocking::clock;
use crate::channel::{Ask, Disk, Mount, PrefetchProgress, Ranges};
use crate::clients::{CLIENTS, HANDSHAKE_PATIENCE, STALL_PATIENCE, SessionFactory};
use crate::connection::{LeftClient, Patience};
use crate::detached::DetachedList;
use crate::devices::{self, Gates};
use crate::error::StartError;
use crate::events;
use crate::histogram::Histogram;
use crate::listen::Listener;
use crate::mailbox::Mailbox;
use crate::memory::{CLIENT_MEMORY, Memory};
use crate::message::{ClientStats, Command, End, Latencies, Message, Snapshot, TierLatencies};
use crate::places::Places;
use crate::record::{Recording, RecordingPlan};
use crate::thread::{self, Plan, Started};
use crate::witness::{Clerk, Record, Witness};

/// Default for the time in which clients must take their last answers.
pub const FAREWELL_PATIENCE: Duration = Duration::from_secs(10);
/// The same if the next server waits. A request that waits for a primary whose link is broken needs
/// some seconds; its client, cut off, would see an error.
const HAND_OVER_FAREWELL: Duration = STRAGGLE_MAX.saturating_add(Duration::from_secs(2));
/// Time in which the connections that are cut off then must end.
const CUT_OFF_PATIENCE: Duration = Duration::from_secs(1);
/// Time in which the shards must stop.
const STOP_PATIENCE: Duration = Duration::from_secs(120);
/// The same if the next server waits. A primary that hangs keeps its shards: the next server
/// recovers then, as after a crash.
const HAND_OVER_STOP: Duration = Duration::from_secs(3);
/// Time for all of a hand-over if volumes leave the cache: their last blocks must be on the
/// primaries, or the next server cannot go on. The keeper waits for 20 s, in which the server has
/// more to do.
const HAND_OVER_ALL: Duration = Duration::from_secs(13);
/// Time in which a thread must report its state.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// Time in which a volume must answer a read of the server itself.
const READ_PATIENCE: Duration = Duration::from_secs(30);
/// Interval at which a drain before a stop is checked.
const DRAIN_STEP: Duration = Duration::from_millis(20);

/// Creates the shard of a thread, on that thread.
pub type MakeShard = Box<dyn FnOnce(BufPool) -> Box<dyn Shard> + Send>;

/// Told by a shard, by its number, whenever the volumes change of which completed writes were lost
/// and no flush has been told so: a bit for each id.
pub type Untold = Arc<dyn Fn(usize, u64) + Send + Sync>;

/// The parts and settings of a pool.
pub struct PoolConfig {
    /// The volumes.
    pub registry: Registry,
    /// The primary of each volume, in the registry's order.
    pub primaries: Vec<Arc<dyn BlockDevice>>,
    /// The cache device.
    pub cache: Option<Arc<dyn BlockDevice>>,
    /// Creates each thread's shard.
    pub shards: Vec<MakeShard>,
    /// Memory for buffers.
    pub arena: Arc<Arena>,
    /// The clock of every thread; normally [`crate::clock`].
    pub clock: Clock,
    /// Most clients at the same time.
    pub clients: usize,
    /// Memory for requests and answers of all clients, in bytes.
    pub client_memory: u64,
    /// Time in which a client must choose a volume.
    pub handshake: Duration,
    /// Time in which a client must take a byte of its answers, or send one of a write.
    pub stall: Duration,
    /// Longest pause between the requests of a client; unlimited when `None`.
    pub idle: Option<Duration>,
    /// Time in which clients must take their last answers.
    pub farewell: Duration,
    /// Whether a FUSE mount or a ublk disk may be served: the kernel's requests then come over the
    /// threads' rings.
    pub wide: bool,
    /// The witness, its current record, and the list of stripes that the cache device has left.
    pub witness: Option<(Witness, Record, DetachedList)>,
    /// Told of losses, on the shards' threads.
    pub untold: Option<Untold>,
}

impl PoolConfig {
    /// A pool of shards made by `shards`, without a cache device, with default settings.
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
            wide: false,
            witness: None,
            untold: None,
        }
    }
}

/// The state of a pool.
#[derive(Clone, Debug)]
pub struct PoolStats {
    /// Time of the report, on the pool's clock.
    pub now: forebay_block::Instant,
    /// The state of every shard.
    pub shards: Vec<Snapshot>,
    /// The sums of the shards' counters and levels.
    pub total: Stats,
    /// The state of each volume, in the registry's order.
    pub volumes: Vec<VolumeStats>,
    /// Number of connected clients.
    pub clients: usize,
    /// Clients refused because of the limit.
    pub clients_refused: u64,
    /// The rules for requests, each with the requests that it decided on.
    pub rules: Vec<(RequestRule, RuleCount)>,
}

/// The state of a volume.
#[derive(Clone, Debug)]
pub struct VolumeStats {
    /// Its id.
    pub id: VolumeId,
    /// Its name.
    pub name: String,
    /// Latencies by operation, in the order of [`crate::OPERATIONS`].
    pub latencies: Latencies,
    /// Latencies by operation and tier, in the order of [`crate::TIERS`].
    pub tier_latencies: TierLatencies,
    /// Latencies of the primary's own requests, by operation.
    pub primary_latencies: Latencies,
    /// Reads, primary, dirty and lost blocks, summed over all shards.
    pub state: VolumeState,
}

/// The outcome of a stop.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stopped {
    /// Whether every shard stopped with its log complete.
    pub complete: bool,
    /// Dirty blocks left in the cache.
    pub dirty_blocks: u64,
    /// Volumes with dirty blocks left.
    pub left: Vec<Left>,
    /// Volumes whose primary failed a flush: it may show data that a power failure would take.
    pub doubtful: Vec<VolumeId>,
    /// The last record of each shard's log; zero where a log was not ended.
    pub log_ends: Vec<Lsn>,
}

/// The dirty blocks of a volume after a stop.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Left {
    /// The volume's name.
    pub volume: String,
    /// Dirty blocks left in the cache.
    pub dirty_blocks: u64,
    /// Number of these that cannot be read back.
    pub lost_blocks: u64,
    /// Whether the primary did not answer.
    pub away: bool,
}

/// A handle to the shard threads. Dropping the last one stops them.
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
    /// Set to abandon a drain before a stop.
    give_up_drain: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The thread that logs the shards' events.
    log: Mutex<Option<JoinHandle<()>>>,
    /// Held by the thread that stops the pool.
    stopping: Mutex<()>,
    stopped: OnceLock<Stopped>,
    /// The connections that the next server can go on with.
    left_clients: Mutex<Vec<LeftClient>>,
}

impl Pool {
    /// Starts the threads and waits until every shard serves.
    ///
    /// # Errors
    /// If one of them fails; then no thread is left running.
    ///
    /// # Panics
    /// If there is no shard, or more than [`SHARDS_MAX`], or not one primary for each volume.
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
            // It ends with the shard threads, when no sender is left.
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
                gates: gates.clone(),
                give_up_drain: AtomicBool::new(false),
                threads: Mutex::new(Vec::new()),
                log: Mutex::new(Some(log)),
                stopping: Mutex::new(()),
                stopped: OnceLock::new(),
                left_clients: Mutex::default(),
            }),
        };
        // Drop it before the pool: the pool's end waits for the log, which waits for the last sink.
        let events = sink;
        let (tell, hear) = mpsc::channel();
        for (index, shard) in config.shards.into_iter().enumerate() {
            let plan = Plan {
                index,
                clock: config.clock,
                arena: Arc::clone(&config.arena),
                cache: config.cache.clone(),
                primaries: primaries.clone(),
                gates: gates.clone(),
                registry: Arc::clone(&registry),
                mailboxes: Arc::clone(&mailboxes),
                places: Arc::clone(&places),
                memory: Arc::clone(&memory),
                patience,
                shard,
                wide: config.wide,
                witness: witness_tell.clone(),
                events: events.clone(),
                untold: config.untold.clone(),
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

    /// Number of shard threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.inner.mailboxes.len()
    }

    /// Serves clients that connect to these listeners from now on.
    ///
    /// # Errors
    /// If the ring has no room for them, or the pool has stopped.
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

    /// Serves a FUSE mount from now on; `text` returns the texts that its files need, and may query
    /// the pool.
    ///
    /// # Errors
    /// If a thread fails to serve it, or the pool has stopped.
    pub fn serve_mount(
        &self,
        mount: Mount,
        text: impl Fn(u64) -> Vec<u8> + Send + 'static,
    ) -> io::Result<()> {
        let (asks, asked) = mpsc::channel::<Ask>();
        let mailboxes = Arc::clone(&self.inner.mailboxes);
        let serve = move || {
            // It ends with the shard threads, when no sender is left.
            for Ask { thread, place, key, topic } in asked {
                mailboxes[thread].send_one(Message::Told { place, key, text: text(topic) });
            }
        };
        std::thread::Builder::new().name("texts".into()).spawn(serve)?;
        let (tell, hear) = mpsc::channel();
        for shard in 0..self.inner.mailboxes.len() {
            let config = mount.share()?;
            self.command(shard, Command::Mount(config, asks.clone(), tell.clone()));
        }
        drop(tell);
        self.await_all(&hear)
    }

    /// Serves a disk from now on: each of its queues on one thread, in turn. It ends when the
    /// kernel removes the disk.
    ///
    /// # Errors
    /// If a thread fails to serve it, or the pool has stopped.
    pub fn serve_disk(&self, disk: &Disk) -> io::Result<()> {
        let (tell, hear) = mpsc::channel();
        for shard in 0..self.inner.mailboxes.len() {
            self.command(shard, Command::Disk(disk.share()?, tell.clone()));
        }
        drop(tell);
        self.await_all(&hear)
    }

    /// Waits until every thread has answered a command.
    fn await_all(&self, hear: &Receiver<io::Result<()>>) -> io::Result<()> {
        self.inner.mailboxes.iter().try_for_each(|_| {
            let answer = hear.recv_timeout(ANSWER_PATIENCE);
            answer.unwrap_or_else(|_| Err(io::Error::other("the pool has stopped")))
        })
    }

    /// Reads a range of a volume, as a client would, of at most 1 MiB.
    ///
    /// # Errors
    /// The volume's; `Timeout` if it takes long, `ShuttingDown` if the pool has stopped.
    pub fn read(&self, endpoint: Endpoint, range: ByteRange) -> IoResult<IoBuf> {
        let (tell, hear) = mpsc::channel();
        self.command(0, Command::Read(endpoint, range, tell));
        hear.recv_timeout(READ_PATIENCE).unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => Err(ErrorKind::Timeout.into()),
            RecvTimeoutError::Disconnected => Err(ErrorKind::ShuttingDown.into()),
        })
    }

    /// The state of the pool; `None` once it has stopped.
    #[must_use]
    pub fn stats(&self) -> Option<PoolStats> {
        let shards = self.snapshots()?;
        let mut total = Stats::default();
        shards.iter().for_each(|shard| total.merge(&shard.stats));
        let volumes = self.registry().volumes().iter().enumerate().map(|(place, volume)| {
            let latencies = merged(shards.iter().map(|shard| &shard.latencies[place]));
            let tier_latencies = merged(shards.iter().map(|shard| &shard.tier_latencies[place]));
            let primary_latencies =
                merged(shards.iter().map(|shard| &shard.primary_latencies[place]));
            let state = state_of(&shards, volume.id);
            let name = volume.name.clone();
            VolumeStats { id: volume.id, name, latencies, tier_latencies, primary_latencies, state }
        });
        let volumes = volumes.collect();
        let places = &self.inner.places;
        let (clients, clients_refused) = (places.connected(), places.refused());
        let now = self.inner.clock.now();
        let rules = shards.iter().map(|shard| (shard.rules.rules(), &shard.rule_counts[..]));
        let rules = counted(rules);
        Some(PoolStats { now, shards, total, volumes, clients, clients_refused, rules })
    }

    /// The clients of sockets, the longest connected first; `None` once the pool has stopped.
    #[must_use]
    pub fn clients(&self) -> Option<Vec<ClientStats>> {
        let mut all: Vec<ClientStats> =
            self.ask_all(Command::Clients)?.into_iter().flatten().collect();
        all.sort_by_key(|client| std::cmp::Reverse(client.connected));
        Some(all)
    }

    fn snapshots(&self) -> Option<Vec<Snapshot>> {
        let mut all = self.ask_all(Command::Snapshot)?;
        all.sort_by_key(|snapshot| snapshot.shard);
        Some(all)
    }

    /// The answer of every thread, in any order; `None` if one does not answer.
    fn ask_all<T>(&self, command: impl Fn(mpsc::Sender<T>) -> Command) -> Option<Vec<T>> {
        if self.inner.stopped.get().is_some() {
            return None;
        }
        self.inner.ask_all(command).all()
    }

    /// Changes a setting on every shard.
    pub fn set(&self, setting: Setting) {
        self.command_all(|| Command::Set(setting));
    }

    /// Changes the length, in bytes, from which a sequential stream of a volume bypasses the cache;
    /// 0 is never.
    ///
    /// # Panics
    /// If the volume is not in the registry.
    pub fn set_sequential_threshold(&self, volume: VolumeId, bytes: u64) {
        assert!(self.inner.registry.volumes().iter().any(|known| known.id == volume));
        self.command_all(|| Command::SetSequentialThreshold(volume, bytes));
    }

    /// Changes how long a client may take to take a byte of an answer or to send a byte of a write
    /// (`stall`), and to send a request (`idle`; unlimited when `None`).
    pub fn set_patience(&self, stall: Duration, idle: Option<Duration>) {
        self.command_all(|| Command::SetPatience { stall, idle });
    }

    /// Brings ranges of a volume into the cache, at most `rate` bytes per second if given.
    #[must_use]
    pub fn prefetch(
        &self,
        endpoint: Endpoint,
        ranges: Ranges,
        rate: Option<u64>,
    ) -> Arc<PrefetchProgress> {
        let progress = Arc::new(PrefetchProgress::default());
        self.command(0, Command::Prefetch(endpoint, ranges, rate, Arc::clone(&progress)));
        progress
    }

    /// Calls `each` for all cached blocks, in no particular order. This takes six seconds for
    /// 100 GiB in blocks of 4 KiB. Blocks that come or go meanwhile may be there or not, and one
    /// may be there twice. Returns false if the pool has stopped.
    pub fn list(&self, mut each: impl FnMut(ListedBlock)) -> bool {
        let mut places: Vec<Option<u64>> = self.inner.mailboxes.iter().map(|_| Some(0)).collect();
        while places.iter().any(Option::is_some) {
            for (shard, place) in places.iter_mut().enumerate() {
                let Some(from) = *place else { continue };
                let (tell, hear) = mpsc::channel();
                self.command(shard, Command::List(from, tell));
                let Ok(part) = hear.recv_timeout(ANSWER_PATIENCE) else { return false };
                part.blocks.into_iter().for_each(&mut each);
                *place = part.next;
            }
        }
        true
    }

    /// Replaces the blocks of a volume that stay in the cache.
    pub fn pin(&self, volume: VolumeId, blocks: &[BlockRange]) {
        let blocks: Arc<[BlockRange]> = blocks.into();
        self.command_all(|| Command::Pin(volume, Arc::clone(&blocks)));
    }

    /// Changes the rules for requests: the next request is subject to the new ones.
    pub fn set_rules(&self, rules: &Arc<RequestRules>) {
        self.command_all(|| Command::SetRules(Arc::clone(rules)));
    }

    /// Records the client requests of a volume, until [`Pool::stop_recording`] or for `limit`. A
    /// separate thread writes the trace to `out`. An earlier recording of this volume that is still
    /// running gets no more requests.
    ///
    /// # Errors
    /// If the thread cannot be started.
    ///
    /// # Panics
    /// If the volume is not in the registry.
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

    /// Ends a recording. Waits until every request that the threads noted is written.
    pub fn stop_recording(&self, volume: VolumeId, recording: &mut Recording) {
        self.command_all(|| Command::Record(volume, None));
        // A thread that answers this query has also processed the command.
        let _ = self.snapshots();
        recording.finish();
    }

    /// Destages all of a volume as fast as its primary accepts; or returns to the usual pace,
    /// unless a stop drains everything. Progress is in [`Pool::stats`].
    pub fn set_drain(&self, volume: VolumeId, on: bool) {
        self.command_all(|| Command::DrainVolume(volume, on));
    }

    /// Gives up the cache device: it is emptied, and then the primaries are used without it.
    pub fn retire(&self) {
        self.command(0, Command::Retire);
    }

    /// Abandons the drain that a stop waits for.
    pub fn give_up_drain(&self) {
        self.inner.give_up_drain.store(true, Ordering::Relaxed);
        self.command_all(|| Command::Drain(false));
    }

    /// Stops in order, and leaves requests that come too late to the next server: those of the
    /// mount stay with the kernel, clients can connect to sockets that others hold, and the next
    /// server can go on with the returned connections. Others are closed. A request that was under
    /// way may have made a block of the `drained` volumes dirty: they get a moment to become clean
    /// again.
    pub fn hand_over(&self, drained: &[VolumeId]) -> (Stopped, Vec<LeftClient>) {
        let stopped = self.inner.end(End::HandOver, Drain::Rest(drained));
        (stopped, std::mem::take(&mut *locked(&self.inner.left_clients)))
    }

    /// Goes on with connections that another server has left. Those that are no longer valid are
    /// closed.
    pub fn adopt(&self, left: Vec<LeftClient>, factory: Arc<dyn SessionFactory>) {
        self.command(0, Command::Adopt(left, factory));
    }

    /// Stops in order, after a drain if `drain` is set. Waits until the threads have ended; a
    /// second call returns the same result.
    pub fn stop(&self, drain: bool) -> Stopped {
        self.inner.end(End::Stop, if drain { Drain::All } else { Drain::Rest(&[]) })
    }

    fn command(&self, shard: usize, command: Command) {
        self.inner.mailboxes[shard].send_one(Message::Command(command));
    }

    fn command_all(&self, command: impl Fn() -> Command) {
        (0..self.inner.mailboxes.len()).for_each(|shard| self.command(shard, command()));
    }
}

/// The blocks that become clean before the shards stop.
enum Drain<'a> {
    /// All, however long it takes.
    All,
    /// The last ones of volumes that have been drained, in a hand-over.
    Rest(&'a [VolumeId]),
}

impl Inner {
    fn end(&self, end: End, drain: Drain) -> Stopped {
        let _only_one = locked(&self.stopping);
        self.stopped.get_or_init(|| self.stop_threads(end, drain)).clone()
    }

    fn stop_threads(&self, end: End, drain: Drain) -> Stopped {
        let began = Instant::now();
        let farewell = match end {
            End::Stop => self.farewell,
            // Others wait.
            End::HandOver => self.farewell.min(HAND_OVER_FAREWELL),
        };
        let quiet = self.ask_all(|answer| Command::Quiesce(end, answer));
        let mut left = Vec::new();
        if !quiet.await_all(farewell, &mut left) {
            tracing::warn!("clients that did not take their answers are cut off");
            self.tell_all(|| Command::CutOff);
            if end == End::HandOver {
                quiet.await_all(CUT_OFF_PATIENCE, &mut left);
            }
        }
        *locked(&self.left_clients) = left.into_iter().flatten().collect();
        let mut patience = if end == End::HandOver { HAND_OVER_STOP } else { STOP_PATIENCE };
        match drain {
            Drain::All => {
                self.give_up_drain.store(false, Ordering::Relaxed);
                self.await_drain();
            }
            Drain::Rest(&[]) => {}
            Drain::Rest(volumes) => {
                let limit = began + HAND_OVER_ALL;
                self.await_rest(volumes, limit - patience);
                patience = patience.max(limit.saturating_duration_since(Instant::now()));
            }
        }
        // A request that was cut off may end until the shards have stopped.
        let mut last = Vec::new();
        let complete = self.ask_all(Command::Stop).await_all(patience, &mut last);
        let dirty_blocks = last.iter().map(|snapshot| snapshot.dirty_blocks).sum();
        let left = self.left_by_volume(&last);
        let mut log_ends = vec![Lsn(0); self.mailboxes.len()];
        last.iter().for_each(|snapshot| log_ends[snapshot.shard] = snapshot.log_end);
        if complete {
            for thread in locked(&self.threads).drain(..) {
                // A panic would end the process, not only the thread.
                let _ = thread.join();
            }
            // No sender is left: wait until the last events are written.
            let _ = locked(&self.log).take().map(JoinHandle::join);
        } else {
            tracing::error!("a shard did not stop in time: the log is left as after a crash");
        }
        Stopped { complete, dirty_blocks, left, doubtful: self.doubtful(), log_ends }
    }

    fn doubtful(&self) -> Vec<VolumeId> {
        let ids = self.registry.volumes().iter().map(|volume| volume.id);
        // The gate of the cache device, if there is one, comes before those of the primaries.
        let primaries = self.gates.each.iter().rev().zip(ids.rev());
        let failed = primaries.filter(|(gate, _)| devices::locked(gate).has_failed());
        failed.map(|(_, id)| id).collect()
    }

    fn await_drain(&self) {
        self.tell_all(|| Command::Drain(true));
        let (began, mut progress) = (Instant::now(), DrainProgress::default());
        // Until all threads have answered nobody knows.
        let mut left = u64::MAX;
        loop {
            if let Some(all) = self.ask_all(Command::Snapshot).all() {
                // Blocks that cannot be read back are never destaged.
                let of = |one: &Snapshot| one.dirty_blocks.saturating_sub(one.stats.fenced_blocks);
                left = all.iter().map(of).sum();
            }
            let stalled = progress.is_stalled(began.elapsed(), left);
            if left == 0 || stalled || self.give_up_drain.load(Ordering::Relaxed) {
                return;
            }
            std::thread::sleep(DRAIN_STEP);
        }
    }

    /// Waits until these volumes, which are being drained, are clean.
    fn await_rest(&self, volumes: &[VolumeId], limit: Instant) {
        let of = |state: &&VolumeState| volumes.contains(&state.id);
        let is_clean = |all: &Vec<Snapshot>| {
            all.iter().flat_map(|one| &one.volumes).filter(of).all(|state| state.dirty_blocks == 0)
        };
        while !self.ask_all(Command::Snapshot).all().as_ref().is_some_and(is_clean)
            && Instant::now() < limit
        {
            std::thread::sleep(DRAIN_STEP);
        }
    }

    /// The volumes with dirty blocks.
    fn left_by_volume(&self, snapshots: &[Snapshot]) -> Vec<Left> {
        let states = self.registry.volumes().iter().map(|one| (one, state_of(snapshots, one.id)));
        let left = states.filter(|(_, state)| state.dirty_blocks > 0).map(|(volume, state)| Left {
            volume: volume.name.clone(),
            dirty_blocks: state.dirty_blocks,
            lost_blocks: state.lost_blocks,
            away: state.primary.away_since.is_some() || state.slow_ios > 0,
        });
        left.collect()
    }

    /// Sends every thread a command that it answers when it is done.
    fn ask_all<T>(&self, command: impl Fn(mpsc::Sender<T>) -> Command) -> Answers<T> {
        let (tell, hear) = mpsc::channel();
        self.tell_all(|| command(tell.clone()));
        Answers { hear, count: self.mailboxes.len() }
    }

    fn tell_all(&self, command: impl Fn() -> Command) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.send_one(Message::Command(command())));
    }
}

/// The state of a volume, of all threads together.
fn state_of(shards: &[Snapshot], id: VolumeId) -> VolumeState {
    let mut state = VolumeState { id, ..VolumeState::default() };
    let theirs = shards.iter().flat_map(|shard| &shard.volumes);
    theirs.filter(|one| one.id == id).for_each(|one| state.merge(one));
    state
}

/// The rules of the first thread, each with the requests that it decided on in all threads. While
/// the rules are changed, another thread may have others.
fn counted<'a>(
    threads: impl Iterator<Item = (&'a [RequestRule], &'a [RuleCount])> + Clone,
) -> Vec<(RequestRule, RuleCount)> {
    let (rules, _) = threads.clone().next().unwrap_or_default();
    let sum = |(at, rule): (usize, &RequestRule)| {
        let counts = threads.clone().map(|(rules, counts)| {
            let moved = || rules.iter().position(|other| other == rule);
            let at = if rules.get(at) == Some(rule) { Some(at) } else { moved() };
            at.and_then(|at| counts.get(at)).copied().unwrap_or_default()
        });
        (rule.clone(), counts.fold(RuleCount::default(), |sum, count| sum + count))
    };
    rules.iter().enumerate().map(sum).collect()
}

/// The latencies of all threads together.
fn merged<'a, const N: usize>(all: impl Iterator<Item = &'a [Histogram; N]>) -> [Histogram; N] {
    let mut sum = std::array::from_fn(|_| Histogram::default());
    for latencies in all {
        sum.iter_mut().zip(latencies).for_each(|(mine, theirs)| mine.merge(theirs));
    }
    sum
}

/// The answers of all threads to a command.
struct Answers<T> {
    hear: Receiver<T>,
    count: usize,
}

impl<T> Answers<T> {
    /// The answer of every thread, in any order; `None` if one does not answer.
    fn all(self) -> Option<Vec<T>> {
        (0..self.count).map(|_| self.hear.recv_timeout(ANSWER_PATIENCE).ok()).collect()
    }

    /// Appends the answers to `all`, until every thread has answered. Returns false if one did not
    /// in time.
    fn await_all(&self, patience: Duration, all: &mut Vec<T>) -> bool {
        let deadline = Instant::now() + patience;
        while all.len() < self.count {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.hear.recv_timeout(left) {
                Ok(answer) => all.push(answer),
                // A thread that is gone has nothing in flight.
                Err(RecvTimeoutError::Disconnected) => return true,
                Err(RecvTimeoutError::Timeout) => return false,
            }
        }
        true
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.end(End::Stop, Drain::Rest(&[]));
    }
}

/// The values behind these locks are replaced whole, so a panic leaves nothing half-changed.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: counts were given to the rules that were in force a moment later.
    #[test]
    fn requests_are_counted_with_the_rule_that_decided_on_them() {
        let [a, b] = ["bypass volume=a", "bypass volume=b"].map(|text| {
            text.parse::<RequestRule>().unwrap_or_else(|error| panic!("{text}: {error}"))
        });
        let count = |requests| RuleCount { requests, bytes: 0 };
        let (two, one) = ([a.clone(), b.clone()], [b.clone()]);
        let (counts, others) = ([count(1), count(2)], [count(40)]);
        let before = (&two[..], &counts[..]);
        let after = (&one[..], &others[..]);
        assert_eq!(
            counted([before, before].into_iter()),
            [(a.clone(), count(2)), (b.clone(), count(4))]
        );
        assert_eq!(counted([after, before].into_iter()), [(b.clone(), count(42))]);
        assert_eq!(counted([before, after].into_iter()), [(a, count(1)), (b, count(42))]);
        assert_eq!(counted([].into_iter()), []);
    }
}
