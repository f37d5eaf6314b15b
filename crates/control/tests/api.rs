//! The HTTP API over a real Unix socket, with a pool that is only a table.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use forebay_block::ByteRange;
use forebay_control::access::SocketAccess;
use forebay_control::api::{
    ApplyRequest, JobState, PoolStatus, PrefetchRequest, TraceRequest, VolumeShift,
};
use forebay_control::config::{Config, FILE_BYTES_MAX, PinEdit};
use forebay_control::events::EventLog;
use forebay_control::settings::{Change, Differences, NewValue, Spec, in_force, parse_named};
use forebay_control::{
    Application, Client, ClientError, ClientSnapshot, ControlError, ControlErrorKind,
    ControlSocket, DiskSnapshot, Keeper, Latency, LeftSnapshot, Monitor, PoolControl, PoolSnapshot,
    PrefetchSnapshot, PrefetchTarget, PrimaryHealth, Server, ShardSnapshot, TraceSnapshot,
    TraceTarget, UpgradeSnapshot, UpgradeState, VolumeSnapshot, Wanted, exposed_name,
};
use forebay_engine::{
    ContentLocality, Eviction, Health, Mode, STATISTICS, State, Stats, VolumeState,
};
use forebay_policy::RuleCount;

/// A pool of two shards and two volumes, without threads or devices.
struct Table {
    mode: Mutex<Mode>,
    /// Dirty blocks of the first and the second volume.
    dirty: AtomicU64,
    other: AtomicU64,
    /// Lost blocks of the first volume.
    lost: AtomicU64,
    /// The calls it received, in order.
    asked: Mutex<Vec<String>>,
    answers: Mutex<Result<(), ControlError>>,
    trace: Mutex<Option<TraceSnapshot>>,
    prefetch: Mutex<Option<PrefetchSnapshot>>,
    upgrade: Mutex<Option<UpgradeSnapshot>>,
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().expect("no test fails while it holds this")
}

impl Table {
    fn ask(&self, what: impl Into<String>) -> Result<(), ControlError> {
        locked(&self.asked).push(what.into());
        locked(&self.answers).clone()
    }

    fn asked(&self) -> Vec<String> {
        locked(&self.asked).clone()
    }
}

fn disk(volume: &str, sector_size: u32) -> DiskSnapshot {
    let (volume, device) = (volume.to_owned(), "/dev/ublkb3".to_owned());
    DiskSnapshot { volume, device, sector_size, served: true }
}

impl PoolControl for Table {
    fn snapshot(&self) -> Result<PoolSnapshot, ControlError> {
        locked(&self.answers).clone()?;
        let shard = |dirty_blocks, hits| ShardSnapshot {
            state: State::Serving,
            health: Health::Good,
            stats: Stats {
                dirty_blocks,
                hits,
                misses: 1,
                bypasses: 90,
                lookups: hits + 91,
                ..Stats::default()
            },
        };
        let lost = self.lost.load(Ordering::SeqCst);
        let mut config = Config::defaults(2);
        config.volumes[0].name = "d b".to_owned();
        config.volumes[0].mode = *locked(&self.mode);
        config.volumes[1].name = "log".to_owned();
        let first = VolumeSnapshot {
            name: "d b".to_owned(),
            primary: "/dev/primary".to_owned(),
            size: 4 << 30,
            mode: *locked(&self.mode),
            file: None,
            devices: Vec::new(),
            read_only: false,
            state: VolumeState {
                stats: Stats {
                    lookups: 100,
                    hits: 6,
                    partial_hits: 1,
                    misses: 1,
                    bypasses: 92,
                    ..Stats::default()
                },
                dirty_blocks: self.dirty.load(Ordering::SeqCst),
                cache_guarantee_blocks: 10,
                cache_limit_blocks: Some(100),
                lost_blocks: lost,
                lost: vec![ByteRange::new(8192, lost * 4096)],
                ..VolumeState::default()
            },
            primary_health: PrimaryHealth {
                away: Some(Duration::from_secs(9)),
                ..PrimaryHealth::default()
            },
        };
        let second = VolumeSnapshot {
            name: "log".to_owned(),
            state: VolumeState {
                dirty_blocks: self.other.load(Ordering::SeqCst),
                ..VolumeState::default()
            },
            primary_health: PrimaryHealth::default(),
            ..first.clone()
        };
        Ok(PoolSnapshot {
            uptime: Duration::from_secs(61),
            pid: 4711,
            keeper: Keeper::Process(4710),
            state_problem: None,
            stopping: false,
            cache_path: "/dev/cache".to_owned(),
            cache_bytes: 1 << 30,
            cache_device_bytes: 1 << 30,
            eviction: Eviction::Lru,
            content: ContentLocality::Rewrite,
            write_cache_depth: Duration::from_secs(30),
            wear_budget: Some(1 << 40),
            endpoints: vec!["unix:/run/nbd.sock".to_owned()],
            drain_given_up: false,
            clients: 3,
            clients_refused: 2,
            volumes: vec![first, second],
            shards: vec![
                shard(self.dirty.load(Ordering::SeqCst), 5),
                shard(self.other.load(Ordering::SeqCst), 3),
            ],
            tier_latencies: vec![Latency {
                volume: "d b".to_owned(),
                operation: "read",
                tier: Some("ram"),
                count: 1,
                sum_nanos: 900,
                at_most: vec![(1_000, 1), (1_000_000, 1)],
                fine: vec![(1_000, 1)],
            }],
            primary_latencies: Vec::new(),
            rules: vec![("bypass volume=a".to_owned(), RuleCount { requests: 3, bytes: 4096 })],
            latencies: vec![Latency {
                volume: "d b".to_owned(),
                operation: "read",
                tier: None,
                count: 3,
                sum_nanos: 1_500_000,
                at_most: vec![(1_000, 1), (1_000_000, 2)],
                fine: vec![(1_000_000, 3)],
            }],
            settings: in_force(&config),
        })
    }

    fn upgrade(&self, program: &Path) -> Result<UpgradeSnapshot, ControlError> {
        self.ask(format!("upgrade to {}", program.display()))?;
        let state = UpgradeState::Running;
        let program = program.to_owned();
        let upgrade =
            UpgradeSnapshot { id: 17, program, state, to_drain: None, pause: None, error: None };
        Ok(locked(&self.upgrade).insert(upgrade).clone())
    }

    fn last_upgrade(&self) -> Option<UpgradeSnapshot> {
        locked(&self.upgrade).clone()
    }

    fn set(&self, changes: &[Change]) -> Result<(), ControlError> {
        for Change { spec, volume, value } in changes {
            let value = match value {
                NewValue::Is(text) => text,
                NewValue::Configured => "as configured",
                NewValue::Unset => "none",
            };
            if spec.key == "mode" {
                *locked(&self.mode) = parse_named(value).unwrap_or(Mode::PassThrough);
            }
            let whose = volume.as_deref().unwrap_or("the cache");
            self.ask(format!("{} of {whose} to {value}", spec.key))?;
        }
        Ok(())
    }

    fn pin(&self, volume: &str, edit: &PinEdit) -> Result<(), ControlError> {
        self.ask(format!("pins of {volume}: {edit:?}"))
    }

    /// As if the configuration in force had another cache device, and another first volume.
    fn apply(&self, wanted: &Wanted, dry_run: bool) -> Result<Application, ControlError> {
        let Wanted { config, text, .. } = wanted;
        let mut now = config.clone();
        now.cache.path = "/before".into();
        now.volumes[0].name = "before".to_owned();
        self.ask(format!("apply {} bytes, dry run {dry_run}", text.len()))?;
        let differences = Differences::between(&now, config);
        let way = differences.way().expect("nothing takes a restart");
        let hand_over = (!dry_run).then(|| self.upgrade(Path::new("/own"))).transpose()?;
        Ok(Application { differences, way, hand_over })
    }

    fn set_drain(&self, volume: &str, on: bool) -> Result<(), ControlError> {
        self.ask(format!("drain {volume} {on}"))
    }

    fn retire(&self) -> Result<(), ControlError> {
        self.ask("retire")
    }

    fn clients(&self) -> Result<Vec<ClientSnapshot>, ControlError> {
        self.ask("clients")?;
        Ok(vec![ClientSnapshot {
            peer: "tcp:192.0.2.7:4711".to_owned(),
            volume: Some("d b".to_owned()),
            connected: Duration::from_secs(90),
            silent: Duration::from_millis(250),
            in_flight: 2,
            memory: 8192,
            operations: vec![("read", 4, Duration::from_millis(2)), ("write", 0, Duration::ZERO)],
            errors: 1,
            bytes: [16384, 0],
        }])
    }

    fn disks(&self) -> Result<Vec<DiskSnapshot>, ControlError> {
        self.ask("disks")?;
        Ok(vec![disk("d b", 4096)])
    }

    fn attach(&self, volume: &str, sector_size: Option<u32>) -> Result<DiskSnapshot, ControlError> {
        self.ask(format!("attach {volume} {sector_size:?}"))?;
        Ok(disk(volume, sector_size.unwrap_or(4096)))
    }

    fn detach(&self, volume: &str) -> Result<DiskSnapshot, ControlError> {
        self.ask(format!("detach {volume}"))?;
        Ok(DiskSnapshot { served: false, ..disk(volume, 512) })
    }

    fn start_trace(&self, volume: &str, to: &TraceTarget) -> Result<(), ControlError> {
        *locked(&self.trace) = Some(TraceSnapshot {
            path: to.path.clone(),
            running: true,
            time: Duration::from_millis(1500),
            requests: 7,
            bytes: 99,
            dropped: 2,
            error: None,
        });
        self.ask(format!("record {volume} for {:?}", to.limit))
    }

    fn trace(&self, _volume: &str) -> Result<Option<TraceSnapshot>, ControlError> {
        Ok(locked(&self.trace).clone())
    }

    fn stop_trace(&self, volume: &str) -> Result<TraceSnapshot, ControlError> {
        self.ask(format!("record {volume} no more"))?;
        let mut trace = locked(&self.trace);
        let trace = trace.as_mut().ok_or_else(|| ControlError::no_trace(volume))?;
        trace.running = false;
        Ok(trace.clone())
    }

    fn start_prefetch(&self, volume: &str, target: &PrefetchTarget) -> Result<(), ControlError> {
        let PrefetchTarget { ranges, rate } = target;
        self.ask(format!("prefetch {ranges:?} of {volume} at {rate:?}"))?;
        let total = ranges.iter().map(|range| range.end - range.start).sum();
        let (bytes, time, error) = (0, Duration::from_secs(2), None);
        let begun = PrefetchSnapshot { running: true, cancelled: false, bytes, total, time, error };
        *locked(&self.prefetch) = Some(begun);
        Ok(())
    }

    fn prefetch(&self, _volume: &str) -> Result<Option<PrefetchSnapshot>, ControlError> {
        Ok(locked(&self.prefetch).clone())
    }

    fn stop_prefetch(&self, volume: &str) -> Result<(), ControlError> {
        self.ask(format!("prefetch no more of {volume}"))?;
        if let Some(prefetch) = &mut *locked(&self.prefetch) {
            (prefetch.running, prefetch.cancelled) = (false, true);
        }
        Ok(())
    }

    fn stop(&self, drain: bool) -> Result<(), ControlError> {
        self.ask(format!("stop {drain}"))
    }

    fn left(&self) -> Option<LeftSnapshot> {
        let stops = self.asked().iter().any(|asked| asked.starts_with("stop "));
        stops.then_some(LeftSnapshot { dirty_bytes: 8192, lost_bytes: 4096 })
    }
}

/// A server over the table; stops and cleans up on drop.
struct Served {
    table: Arc<Table>,
    client: Client,
    directory: PathBuf,
    server: Option<Server>,
}

impl Served {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("forebay-api-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).expect("a temporary directory can be made");
        let socket = directory.join("control.sock");
        let table = Arc::new(Table {
            mode: Mutex::new(Mode::WriteBack),
            dirty: AtomicU64::new(0),
            other: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            asked: Mutex::default(),
            answers: Mutex::new(Ok(())),
            trace: Mutex::default(),
            prefetch: Mutex::default(),
            upgrade: Mutex::default(),
        });
        let pool: Arc<dyn PoolControl> = Arc::clone(&table) as _;
        let bound =
            ControlSocket::bind(&socket, &SocketAccess::default()).expect("the socket is free");
        assert!(
            ControlSocket::bind(&socket, &SocketAccess::default()).is_err(),
            "it is taken before it is served"
        );
        let monitor = Monitor::start(pool, EventLog::start(None, Vec::new()).expect("a thread"))
            .expect("there is a thread to be had");
        let server = Some(Server::start(bound, monitor).expect("there is a thread to be had"));
        Self { table, client: Client::new(socket), directory, server }
    }

    /// Sends raw bytes and reads the answer's first line.
    fn raw(&self, request: &[u8]) -> String {
        let mut stream = UnixStream::connect(self.client.socket()).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("it can be set");
        stream.write_all(request).expect("it takes the request");
        let mut answer = [0; 512];
        let length = stream.read(&mut answer).expect("it answers");
        let answer = String::from_utf8_lossy(&answer[..length]).into_owned();
        answer.lines().next().unwrap_or_default().to_owned()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.take();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn refused(result: Result<impl std::fmt::Debug, ClientError>) -> (u16, String) {
    match result {
        Err(ClientError::Refused { status, error, hint }) => (status, format!("{error}; {hint}")),
        other => panic!("it must be refused: {other:?}"),
    }
}

/// A start that failed late removed the file of a socket that the keeper has for the next one.
#[test]
fn the_file_of_a_socket_that_was_left_stays_until_it_is_owned() {
    let served = Served::new();
    let path = served.directory.join("left.sock");
    let socket = UnixListener::bind(&path).expect("nothing is there");
    socket.set_nonblocking(true).expect("it can be set");
    let start = || {
        let left = socket.try_clone().expect("a descriptor is free");
        let events = EventLog::start(None, Vec::new()).expect("a thread");
        let monitor = Monitor::start(Arc::clone(&served.table) as _, events).expect("a thread");
        Server::start(ControlSocket::left(&path, left.into()), monitor).expect("a thread")
    };
    drop(start());
    assert!(path.exists());
    let mut server = start();
    server.own_file();
    drop(server);
    assert!(!path.exists());
}

#[test]
fn status_tells_what_the_pool_knows() {
    let served = Served::new();
    served.table.dirty.store(10, Ordering::SeqCst);
    served.table.lost.store(3, Ordering::SeqCst);
    let status = served.client.status().expect("it answers");
    assert_eq!((status.state.as_str(), status.health.as_str()), ("serving", "good"));
    assert_eq!((status.clients, status.uptime_seconds), (3, 61));
    assert_eq!(status.cache.dirty_bytes, 40960);
    assert_eq!(status.cache.full_hit_percent, Some(80.0), "what is told to go past is no miss");
    assert_eq!(status.shards.len(), 2);
    assert_eq!(status.shards[0].dirty_bytes, 40960);
    let count = |name: &str| status.counters[name];
    assert_eq!(
        count("lookups"),
        count("hits") + count("partial_hits") + count("misses") + count("bypasses")
    );
    let volume = served.client.volume("d b").expect("it is there");
    assert_eq!((volume.mode.as_str(), volume.size), ("write-back", 4 << 30));
    assert_eq!(volume.reads.full_hit_percent, Some(75.0), "a hit in part is no hit");
    assert_eq!(volume.primary_health.state, "away");
    assert_eq!(
        (volume.operations[0].operation.as_str(), volume.operations[0].requests),
        ("read", 3)
    );
    assert_eq!(volume.operations[0].mean_micros, Some(500.0));
    assert!(volume.problems[0].contains("does not answer"), "{:?}", volume.problems);
    assert_eq!((volume.lost[0].offset, volume.lost[0].length), (8192, 12288));
    let text = forebay_control::text::pool(&status);
    let wear = "wear     0 B written in the last 1 min 1 s, budget 1 TiB per day; now 0 B per day, \
                pressure 0 %\n";
    assert!(text.contains(wear), "{text}");
    let mut without = status.clone();
    without.cache.full_hit_percent = None;
    let text_of = forebay_control::text::pool;
    assert!(text_of(&without).contains("all reads bypassed it"), "{}", text_of(&without));
    without.cache.write_cache_depth_seconds = 0.5;
    assert!(text_of(&without).contains(" s of 0.5 s\n"), "{}", text_of(&without));
    without.volumes.iter_mut().for_each(|volume| volume.reads.bypasses = 0);
    assert!(text_of(&without).contains("no reads yet"), "{}", text_of(&without));
    let wrong: Vec<&str> = text.lines().skip(1).take(2).collect();
    assert!(wrong[0].starts_with("WRONG    volume d b: the primary /dev/primary does not answer"));
    assert!(wrong[1].starts_with("WRONG    volume d b: LOST 12 KiB"), "{text}");
    assert!(wrong[1].contains("12288 bytes at 8192"), "{text}");
    let (status, message) = refused(served.client.volume("other"));
    assert_eq!(status, 404);
    assert!(message.contains("other") && message.contains("d b"), "{message}");
}

#[test]
fn a_drain_is_a_job_with_progress() {
    let served = Served::new();
    served.table.dirty.store(8, Ordering::SeqCst);
    let job = served.client.drain(Some("d b")).expect("it starts");
    assert_eq!((job.state, job.total_bytes), (JobState::Running, 32768));
    let again = served.client.drain(Some("d b")).expect("it joins");
    assert_eq!(again.id, job.id);
    served.table.dirty.store(2, Ordering::SeqCst);
    let half = served.client.job(job.id).expect("it is remembered");
    assert_eq!((half.total_bytes, half.remaining_bytes), (32768, 8192));
    served.table.dirty.store(0, Ordering::SeqCst);

    // The server notices by itself that the drain is done, and switches it off once.
    let limit = Instant::now() + Duration::from_secs(30);
    while !served.table.asked().contains(&"drain d b false".to_owned()) {
        assert!(Instant::now() < limit, "the drain must be switched off");
        std::thread::sleep(Duration::from_millis(10));
    }
    let done = served.client.job(job.id).expect("it is remembered");
    assert_eq!((done.state, done.remaining_bytes), (JobState::Done, 0));
    assert_eq!(served.table.asked(), ["drain d b true", "drain d b false"]);
    assert_eq!(refused(served.client.job(job.id + 1)).0, 404);
}

/// Each job has the figures of its own volume and ends with it, independent of the others; a volume
/// is drained as long as one of its jobs runs.
#[test]
fn a_drain_of_a_volume_is_of_that_volume_alone() {
    let served = Served::new();
    let Served { client, table, .. } = &served;
    table.dirty.store(8, Ordering::SeqCst);
    table.other.store(2, Ordering::SeqCst);
    let first = client.drain(Some("d b")).expect("it starts");
    assert_eq!((first.volume.as_deref(), first.total_bytes), (Some("d b"), 32768));
    let all = client.drain(None).expect("it starts");
    assert_eq!((all.volume.as_deref(), all.total_bytes), (None, 40960));
    let second = client.drain(Some("log")).expect("it starts");
    assert_eq!((second.volume.as_deref(), second.total_bytes), (Some("log"), 8192));
    table.dirty.store(0, Ordering::SeqCst);
    let state = |id| client.job(id).expect("it is remembered").state;
    assert_eq!(state(first.id), JobState::Done);
    assert_eq!((state(all.id), state(second.id)), (JobState::Running, JobState::Running));
    let begun = ["drain d b true", "drain d b true", "drain log true", "drain log true"];
    assert_eq!(table.asked(), begun, "another job drains it");
    client.cancel(all.id).expect("it is there");
    assert_eq!(table.asked()[4..], ["drain d b false"], "the second volume is drained still");
    table.other.store(0, Ordering::SeqCst);
    assert_eq!(state(second.id), JobState::Done);
    assert_eq!(table.asked()[5..], ["drain log false"]);
    let jobs = client.jobs().expect("they are remembered");
    let states: Vec<_> = jobs.iter().map(|job| (job.id, job.state)).collect();
    let expected =
        [(first.id, JobState::Done), (all.id, JobState::Cancelled), (second.id, JobState::Done)];
    assert_eq!(states, expected);
    assert_eq!(refused(client.drain(Some("other"))).0, 404);
}

#[test]
fn a_drain_can_be_cancelled() {
    let served = Served::new();
    served.table.dirty.store(8, Ordering::SeqCst);
    let job = served.client.drain(Some("d b")).expect("it starts");
    assert_eq!(served.client.cancel(job.id).expect("it is there").state, JobState::Cancelled);
    assert_eq!(served.client.job(job.id).expect("it is there").state, JobState::Cancelled);
    assert_eq!(served.table.asked(), ["drain d b true", "drain d b false"]);
    let next = served.client.drain(Some("d b")).expect("another starts");
    assert_ne!(next.id, job.id);
    // Regression: in the next server, its number would have been that of another drain.
    let restarted = Served::new();
    restarted.table.dirty.store(8, Ordering::SeqCst);
    restarted.client.drain(Some("d b")).expect("it starts");
    assert_eq!(refused(restarted.client.cancel(job.id)).0, 404);
}

/// Settings by name, as sent in a request.
fn to(settings: &[(&str, &str)]) -> BTreeMap<String, String> {
    settings.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
}

#[test]
fn settings_are_changed_or_nothing_is() {
    let served = Served::new();
    let volume = |name, settings: &[(&str, &str)]| served.client.set(Some(name), &to(settings));
    let answer = volume("d b", &[("mode", "write-around"), ("eviction", "lru")]);
    let in_force = answer.expect("these are values").settings;
    let named = |name: &str| in_force.iter().find(|setting| setting.name == name);
    let mode = named("mode").expect("the answer has it");
    assert_eq!((mode.volume.as_deref(), mode.value.as_str()), (Some("d b"), "write-around"));
    assert!(named("eviction").is_some(), "settings of the cache are in the answer");
    assert!(in_force.iter().all(|setting| setting.volume.as_deref() != Some("log")));
    let (status, message) = refused(volume("d b", &[("eviction", "fifo"), ("mode", "writeback")]));
    assert_eq!(status, 400);
    assert!(message.contains("writeback") && message.contains("write-back"), "{message}");
    assert_eq!(refused(volume("d b", &[])).0, 400);
    assert_eq!(refused(volume("other", &[("mode", "write-back")])).0, 404);
    assert_eq!(
        served.table.asked(),
        ["eviction of the cache to lru", "mode of d b to write-around"]
    );
}

#[test]
fn a_configuration_is_applied_as_a_whole_or_its_mistake_is_told() {
    let served = Served::new();
    let apply = |config: &str, dry_run| {
        let (config, path) = (config.to_owned(), "/etc/f.toml".to_owned());
        served.client.apply(&ApplyRequest { config, path, dry_run })
    };
    let config = "[cache]\npath = \"/c\"\n[server]\nnbd = [\"unix:/s\"]\n\
                  [[volume]]\nname = \"a\"\nprimary = \"/p\"\n";
    let answer = apply(config, true).expect("it has no mistake");
    let path = answer.differences.iter().find(|one| one.name == "path").expect("it differs");
    assert!(!answer.applied && path.to.as_deref() == Some("/c"), "{answer:?}");
    assert_eq!((answer.way.as_str(), &answer.hand_over), ("new cache", &None));
    let VolumeShift { volume, change, from, .. } = &answer.volumes[0];
    assert_eq!((&**volume, &**change, from.as_deref()), ("a", "renamed", Some("before")));
    let answer = apply(config, false).expect("it has no mistake");
    let hand_over = answer.hand_over.expect("it has begun");
    assert!(!answer.applied && hand_over.id == 17 && hand_over.state == "running");
    let (status, message) = refused(apply(&config.replace("nbd", "ndb"), false));
    assert_eq!(status, 400);
    assert!(message.contains("/etc/f.toml") && message.contains("line 4"), "{message}");
    let length = config.len();
    assert_eq!(
        served.table.asked(),
        [
            format!("apply {length} bytes, dry run true"),
            format!("apply {length} bytes, dry run false"),
            "upgrade to /own".to_owned(),
        ]
    );
}

/// One of more than 256 KiB could be started with, and not applied.
#[test]
fn the_longest_configuration_can_be_applied() {
    let served = Served::new();
    let apply = |bytes: usize| {
        let mut config = "[cache]\npath = \"/c\"\n[server]\nnbd = [\"unix:/s\"]\n\
                          [[volume]]\nname = \"a\"\nprimary = \"/p\"\n"
            .to_owned();
        // JSON doubles a line break.
        config.push_str(&"\n".repeat(bytes - config.len()));
        served.client.apply(&ApplyRequest { config, path: "/f".to_owned(), dry_run: true })
    };
    let longest = usize::try_from(FILE_BYTES_MAX).expect("it is small");
    assert!(apply(longest).expect("it is not too long").hand_over.is_none());
    let (status, message) = refused(apply(longest + 1));
    assert_eq!(status, 400);
    assert!(message.contains("/f: it has 1048577 bytes, and the limit is 1048576"), "{message}");
}

#[test]
fn pins_are_changed_one_by_one() {
    let served = Served::new();
    let answer = served.client.pin("d b", &PinEdit::Add("..4KiB".to_owned())).expect("a pin");
    assert!(answer.settings.iter().any(|one| one.volume.as_deref() == Some("d b")));
    served.client.pin("d b", &PinEdit::Remove("all".to_owned())).expect("all");
    let error = served.client.ask::<serde_json::Value>(
        "POST",
        "/v1/volumes/log/pins",
        Some(&serde_json::json!({"add": "..4KiB", "remove": "all"})),
    );
    assert!(matches!(refused(error).0, 400 | 422), "one at a time");
    let asked = ["pins of d b: Add(\"..4KiB\")", "pins of d b: Remove(\"all\")"];
    assert_eq!(served.table.asked(), asked);
}

#[test]
fn the_device_is_given_up_on_demand() {
    let served = Served::new();
    assert!(served.client.retire().expect("it may be").accepted);
    assert_eq!(served.table.asked(), ["retire"]);
}

#[test]
fn settings_of_the_whole_cache_have_an_address_of_their_own() {
    let served = Served::new();
    let cache = |settings: &[(&str, &str)]| served.client.set(None, &to(settings));
    let in_force = cache(&[("content", "default")]).expect("it is a setting").settings;
    assert!(in_force.iter().all(|setting| setting.volume.is_none()));
    assert!(in_force.iter().any(|setting| setting.name == "content"));
    let (status, message) = refused(cache(&[("mode", "write-back")]));
    assert_eq!((status, message.contains("name the volume")), (400, true), "{message}");
    assert_eq!(served.table.asked(), ["content of the cache to as configured"]);
}

/// A client of an earlier version sends `null` for settings that it leaves unchanged.
#[test]
fn a_setting_that_is_null_stays() {
    let served = Served::new();
    let body = serde_json::json!({"mode": "write-only", "eviction": null});
    let path = "/v1/volumes/d%20b/set";
    let answer: serde_json::Value = served.client.ask("POST", path, Some(&body)).expect("it does");
    assert_eq!(answer["mode"], "write-only", "the volume is in the answer: {answer}");
    assert_eq!(served.table.asked(), ["mode of d b to write-only"]);
}

#[test]
fn the_description_has_every_setting_that_can_be_changed() {
    let served = Served::new();
    let openapi: serde_json::Value =
        served.client.ask("GET", "/openapi.json", None::<&()>).expect("it answers");
    let schemas = &openapi["components"]["schemas"];
    for (schema, of_volume) in [("VolumeSettings", true), ("CacheSettings", false)] {
        let properties = &schemas[schema]["properties"];
        for spec in Spec::changeable(of_volume) {
            let known = &properties[spec.key];
            let said = known["description"].as_str().expect(spec.key);
            assert!(said.starts_with(spec.help), "{known}");
            let mut names = spec.kind.names();
            let expected = if names.is_empty() {
                serde_json::Value::Null
            } else {
                names.push("default");
                serde_json::json!(names)
            };
            assert_eq!(known["enum"], expected, "{}", spec.key);
        }
        let count = properties.as_object().map(serde_json::Map::len);
        assert_eq!(count, Some(Spec::changeable(of_volume).count()));
    }
    assert!(Spec::online().count() > 10);
}

#[test]
fn the_pool_may_say_no() {
    let served = Served::new();
    let early = served.client.left().expect_err("it serves").to_string();
    assert!(early.contains("the server has not stopped"), "{early}");
    assert!(served.client.stop(true).expect("it stops").accepted);
    let left = served.client.left().expect("it has stopped");
    assert_eq!((left.dirty_bytes, left.lost_bytes), (8192, 4096));
    assert_eq!(served.table.asked(), ["stop true"]);
    let no = ControlError::new(ControlErrorKind::Unavailable, "shard 1 is silent", "see the log");
    *locked(&served.table.answers) = Err(no);
    let (status, message) = refused(served.client.status());
    assert_eq!((status, message.as_str()), (503, "shard 1 is silent; see the log"));
}

#[test]
fn metrics_are_what_prometheus_reads() {
    let served = Served::new();
    let (status, body) =
        served.client.exchange("GET", "/metrics", None::<&()>).expect("it answers");
    assert_eq!(status, 200);
    let text = String::from_utf8(body.to_vec()).expect("it is text");
    let mut typed = BTreeSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a name and a kind");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(typed.insert(name.to_owned()), "{name} is described once");
        } else if !line.starts_with("# HELP ") {
            let (sample, value) = line.rsplit_once(' ').expect("a sample and a value");
            value.parse::<f64>().unwrap_or_else(|_| panic!("{line}: a number"));
            let name = sample.split('{').next().unwrap_or(sample);
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|s| name.strip_suffix(s));
            let known = typed.contains(name) || base.is_some_and(|base| typed.contains(base));
            assert!(known, "{line}: described before");
        }
    }
    for row in STATISTICS {
        assert!(typed.contains(&exposed_name(row)), "{}", row.name);
    }
    assert!(text.contains("forebay_hits_total{shard=\"0\"} 5\n"), "{text}");
    assert!(text.contains("forebay_rule_requests_total{rule=\"bypass volume=a\"} 3\n"), "{text}");
    assert!(text.contains("forebay_wear_budget_bytes 1099511627776\n"), "{text}");
    for level in
        ["cache_guarantee_blocks{volume=\"d b\"} 10", "cache_limit_blocks{volume=\"d b\"} 100"]
    {
        assert!(text.contains(&format!("forebay_volume_{level}\n")), "{level}: {text}");
    }
    assert!(
        text.contains(
            "forebay_request_seconds_sum{volume=\"d b\",operation=\"read\"} 0.001500000\n"
        )
    );
    assert!(
        text.contains(
            "forebay_request_seconds_bucket{volume=\"d b\",operation=\"read\",le=\"+Inf\"} 3\n"
        ),
        "{text}"
    );
}

#[test]
fn a_prefetch_is_begun_watched_and_ended() {
    let served = Served::new();
    let (status, message) = refused(served.client.prefetched("a"));
    assert_eq!(status, 404, "{message}");
    let request = PrefetchRequest { ranges: vec![[0, 4096], [8192, 16384]], rate: Some(1000) };
    let begun = served.client.prefetch("a", &request).expect("it begins");
    assert_eq!((begun.state.as_str(), begun.total_bytes), ("running", 12288));
    assert_eq!(served.table.asked(), ["prefetch [0..4096, 8192..16384] of a at Some(1000)"]);
    let ended = served.client.stop_prefetch("a").expect("it ends");
    assert_eq!((ended.state.as_str(), ended.bytes), ("cancelled", 0));
    let seen = served.client.prefetched("a").expect("it is remembered");
    assert_eq!((seen.state.as_str(), seen.seconds), ("cancelled", 2.0));
}

#[test]
fn an_upgrade_is_begun_and_its_outcome_told() {
    let served = Served::new();
    assert_eq!(served.client.last_upgrade().expect("it answers").state, "none");
    let error = served.client.upgrade(Path::new("bin/new")).expect_err("no whole path");
    assert!(error.to_string().contains("bin/new is not a whole path"), "{error}");
    let begun = served.client.upgrade(Path::new("/bin/new")).expect("it begins");
    assert_eq!((begun.id, begun.state.as_str()), (17, "running"));
    assert_eq!(served.table.asked(), ["upgrade to /bin/new"]);
    let failed = UpgradeSnapshot {
        to_drain: None,
        id: 17,
        program: "/bin/new".into(),
        state: UpgradeState::Failed,
        pause: Some(0.5),
        error: Some("too old".to_owned()),
    };
    *locked(&served.table.upgrade) = Some(failed);
    let ended = served.client.last_upgrade().expect("it answers");
    assert_eq!((ended.state.as_str(), ended.pause_seconds), ("failed", Some(0.5)));
    assert_eq!((ended.program.as_str(), ended.error.as_deref()), ("/bin/new", Some("too old")));
}

#[test]
fn the_description_lists_every_route() {
    let served = Served::new();
    let openapi: serde_json::Value =
        served.client.ask("GET", "/openapi.json", None::<&()>).expect("it answers");
    let paths: BTreeSet<&str> =
        openapi["paths"].as_object().expect("paths").keys().map(String::as_str).collect();
    let known = [
        "/metrics",
        "/openapi.json",
        "/v1/apply",
        "/v1/clients",
        "/v1/disks",
        "/v1/drain",
        "/v1/events",
        "/v1/events/stream",
        "/v1/events/{id}/ack",
        "/v1/jobs",
        "/v1/jobs/{id}",
        "/v1/retire",
        "/v1/set",
        "/v1/statistics",
        "/v1/status",
        "/v1/stop",
        "/v1/stream",
        "/v1/upgrade",
        "/v1/volumes/{name}",
        "/v1/volumes/{name}/disk",
        "/v1/volumes/{name}/drain",
        "/v1/volumes/{name}/pins",
        "/v1/volumes/{name}/prefetch",
        "/v1/volumes/{name}/set",
        "/v1/volumes/{name}/trace",
    ];
    assert_eq!(paths.into_iter().collect::<Vec<_>>(), known);
    let items = openapi["paths"].as_object().expect("paths").values();
    let mut responses = 0;
    for operation in items.flat_map(|item| item.as_object().expect("operations").values()) {
        for (status, response) in operation["responses"].as_object().expect("responses") {
            let said = response["description"].as_str().unwrap_or_default();
            assert!(!said.is_empty(), "{status} of {operation} has no description");
            responses += 1;
        }
    }
    assert!(responses >= 28, "{responses}");
    let status = &openapi["components"]["schemas"]["PoolStatus"]["properties"];
    assert!(status["cache"].is_object(), "{openapi}");
}

#[test]
fn recordings_are_started_asked_about_and_ended() {
    let served = Served::new();
    let request = |path: &str| TraceRequest { path: path.to_owned(), seconds: Some(5) };
    let none = served.client.trace("d b").expect_err("nothing is recorded").to_string();
    assert!(none.contains("not being recorded") && none.contains("trace record"), "{none}");
    let relative = served.client.start_trace("d b", &request("x")).expect_err("no whole path");
    assert!(relative.to_string().contains("x is not a whole path"), "{relative}");
    let started = served.client.start_trace("d b", &request("/tmp/x")).expect("it is started");
    assert_eq!((started.state.as_str(), started.path.as_str()), ("running", "/tmp/x"));
    assert_eq!((started.requests, started.bytes, started.dropped), (7, 99, 2));
    assert!((started.seconds - 1.5).abs() < 1e-9);
    assert_eq!(served.client.stop_trace("d b").expect("it ends").state, "done");
    assert_eq!(served.client.trace("d b").expect("it is remembered").state, "done");
    assert_eq!(served.table.asked(), ["record d b for Some(5s)", "record d b no more"]);
}

#[test]
fn hostile_requests_are_answered_or_dropped() {
    let served = Served::new();
    assert_eq!(served.raw(b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"), "HTTP/1.1 404 Not Found");
    let get_drain = served.raw(b"GET /v1/drain HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(get_drain, "HTTP/1.1 405 Method Not Allowed");
    for path in
        ["events?after=x", "events/stream?after=-1", "stream?after=x", "statistics?window=%"]
    {
        let (status, body) =
            served.client.exchange("GET", &format!("/v1/{path}"), None::<&()>).expect("it answers");
        let said: serde_json::Value = serde_json::from_slice(&body).expect("it is JSON");
        assert!(status == 400 && said["error"].is_string() && said["hint"].is_string(), "{said}");
    }
    let garbage = served.raw(b"\x16\x03\x01\x00garbage\r\n\r\n");
    assert!(garbage.starts_with("HTTP/1.1 400"), "{garbage}");
    let post = |body: &[u8]| {
        let length = body.len();
        let head = format!(
            "POST /v1/stop HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n"
        );
        served.raw(&[head.as_bytes(), body].concat())
    };
    assert!(post(b"{").starts_with("HTTP/1.1 400"));
    assert!(post(b"{\"drian\":true}").starts_with("HTTP/1.1 422"));
    assert!(post(&vec![b' '; 257 << 10]).starts_with("HTTP/1.1 413"));
    assert_eq!(served.table.asked(), Vec::<String>::new(), "nothing came of it");
}

#[test]
fn more_connections_than_places_wait_their_turn() {
    let served = Served::new();
    let connect = || UnixStream::connect(served.client.socket()).expect("it listens");
    let idle: Vec<UnixStream> = (0..32).map(|_| connect()).collect();
    std::thread::sleep(Duration::from_millis(100));
    let client = served.client.clone();
    let waiting = std::thread::spawn(move || client.status());
    std::thread::sleep(Duration::from_millis(100));
    assert!(!waiting.is_finished(), "every place is taken");
    drop(idle);
    let status: PoolStatus = waiting.join().expect("no panic").expect("now there is a place");
    assert_eq!(status.api, 1);
}

#[test]
fn the_socket_goes_with_the_server() {
    let mut served = Served::new();
    served.server.take();
    assert!(!served.client.socket().exists());
    let error = served.client.status().expect_err("nobody listens");
    assert!(matches!(error, ClientError::NotRunning(_)), "{error}");
    assert!(error.to_string().contains("forebay serve"), "{error}");
}

#[test]
fn clients_are_listed_with_what_they_have_done() {
    let served = Served::new();
    let all = served.client.clients().expect("they are listed");
    assert_eq!(all.len(), 1);
    let one = &all[0];
    assert_eq!((one.volume.as_deref(), one.read_bytes, one.errors), (Some("d b"), 16384, 1));
    let means: Vec<_> = one.operations.iter().map(|operation| operation.mean_micros).collect();
    assert_eq!(means, [Some(500.0), None]);
    let shown = forebay_control::text::clients(&all);
    assert!(shown.contains("tcp:192.0.2.7:4711  d b") && shown.contains("500 us"), "{shown}");
    *locked(&served.table.answers) =
        Err(ControlError::new(ControlErrorKind::Unavailable, "it ends", "wait"));
    assert!(served.client.clients().is_err());
}

#[test]
fn disks_are_made_listed_and_removed() {
    let served = Served::new();
    let (table, client) = (&served.table, &served.client);
    let made = client.attach("d b", Some(512)).expect("it is made");
    assert_eq!((made.device.as_str(), made.sector_size), ("/dev/ublkb3", 512));
    assert_eq!(client.disks().expect("they are listed")[0].state, "serving");
    assert_eq!(client.detach("d b").expect("it is removed").state, "waiting");
    assert_eq!(table.asked(), ["attach d b Some(512)", "disks", "detach d b"]);
    let error = ControlError::new(ControlErrorKind::Unsupported, "no ublk", "load it");
    *locked(&table.answers) = Err(error);
    let error = client.attach("d b", None).expect_err("it is refused");
    assert!(error.is_unsupported(), "{error}");
}
