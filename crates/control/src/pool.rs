//! The interface that control needs to a running pool. The binary implements [`PoolControl`] over
//! the shard threads, the tests over a table.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_block::Instant;
use forebay_engine::{ContentLocality, Eviction, Health, Mode, State, Stats, VolumeState};
use forebay_policy::RuleCount;

use crate::ControlError;
use crate::config::{Config, PinEdit};
use crate::settings::{Change, Differences, Spec, Way};

/// A running pool, as seen by other threads. A call may take as long as one turn of a shard. Calls
/// come from several threads.
pub trait PoolControl: Send + Sync + 'static {
    /// The pool's current configuration and state.
    ///
    /// # Errors
    /// When a shard does not answer.
    fn snapshot(&self) -> Result<PoolSnapshot, ControlError>;

    /// As [`PoolControl::snapshot`], for the server's own observation: no client has asked.
    ///
    /// # Errors
    /// When a shard does not answer.
    fn observe(&self) -> Result<PoolSnapshot, ControlError> {
        self.snapshot()
    }

    /// Changes settings, also for later starts. Dirty blocks stay in the cache and are destaged.
    ///
    /// # Errors
    /// When there is no such volume, or the changes cannot be saved; then nothing is changed.
    fn set(&self, changes: &[Change]) -> Result<(), ControlError>;

    /// Changes a volume's pins, also for later starts: one change after the other, so that none is
    /// lost.
    ///
    /// # Errors
    /// As for [`PoolControl::set`]; and when the change does not fit the previous pins.
    fn pin(&self, volume: &str, edit: &PinEdit) -> Result<(), ControlError>;

    /// Brings a configuration into force, now and at later starts; nothing if this is a `dry_run`.
    /// If that takes a hand-over, it begins, and this returns at once:
    /// [`PoolControl::last_upgrade`] tells how it ended.
    ///
    /// # Errors
    /// When a difference cannot be brought into force while serving, or the changes cannot be
    /// saved; then nothing is changed.
    fn apply(&self, wanted: &Wanted, dry_run: bool) -> Result<Application, ControlError>;

    /// Starts or stops a drain: destaging all of a volume as fast as its primary accepts it.
    ///
    /// # Errors
    /// When there is no such volume, or a shard does not answer.
    fn set_drain(&self, volume: &str, on: bool) -> Result<(), ControlError>;

    /// Begins to give up the cache device: its dirty data goes to the primaries, which are then
    /// used without it.
    ///
    /// # Errors
    /// When a shard does not answer, or the device has been given up already.
    fn retire(&self) -> Result<(), ControlError>;

    /// Starts recording clients' requests to a volume in a new file on the server's host.
    ///
    /// # Errors
    /// When there is no such volume, it is already being recorded, or the file cannot be created.
    fn start_trace(&self, volume: &str, to: &TraceTarget) -> Result<(), ControlError>;

    /// The volume's recording: the running or the last one; `None` if there was none.
    ///
    /// # Errors
    /// When there is no such volume.
    fn trace(&self, volume: &str) -> Result<Option<TraceSnapshot>, ControlError>;

    /// Ends the volume's recording after all requests received so far are written.
    ///
    /// # Errors
    /// When there is no such volume, or it has never been recorded.
    fn stop_trace(&self, volume: &str) -> Result<TraceSnapshot, ControlError>;

    /// Begins to bring ranges of a volume into the cache, and returns at once.
    ///
    /// # Errors
    /// When there is no such volume, a range is not on it, or one is being prefetched.
    fn start_prefetch(&self, volume: &str, target: &PrefetchTarget) -> Result<(), ControlError>;

    /// The volume's prefetch: the running or the last one; `None` if there was none.
    ///
    /// # Errors
    /// When there is no such volume.
    fn prefetch(&self, volume: &str) -> Result<Option<PrefetchSnapshot>, ControlError>;

    /// Ends the volume's prefetch; no effect if none is running.
    ///
    /// # Errors
    /// When there is no such volume.
    fn stop_prefetch(&self, volume: &str) -> Result<(), ControlError>;

    /// Begins to let another program take over from the server, and returns at once.
    ///
    /// # Errors
    /// When the server has no keeper, an upgrade is under way, or the program cannot be one.
    fn upgrade(&self, program: &Path) -> Result<UpgradeSnapshot, ControlError>;

    /// The last upgrade: the running one, or the one by which this server came, or one that failed.
    fn last_upgrade(&self) -> Option<UpgradeSnapshot>;

    /// The clients of sockets, the longest connected first.
    ///
    /// # Errors
    /// When a shard does not answer.
    fn clients(&self) -> Result<Vec<ClientSnapshot>, ControlError>;

    /// The disks of this machine that the server has made, and those that wait for it.
    ///
    /// # Errors
    /// When the kernel does not answer.
    fn disks(&self) -> Result<Vec<DiskSnapshot>, ControlError>;

    /// Makes a volume a disk of this machine, with sectors of this many bytes, or as the volume's
    /// content requires.
    ///
    /// # Errors
    /// When there is no such volume, it is a disk already, or the kernel makes none: `Unsupported`
    /// if it never does.
    fn attach(&self, volume: &str, sector_size: Option<u32>) -> Result<DiskSnapshot, ControlError>;

    /// Removes a volume's disk.
    ///
    /// # Errors
    /// When there is none, or it is in use.
    fn detach(&self, volume: &str) -> Result<DiskSnapshot, ControlError>;

    /// Begins to stop the server and returns at once. With `drain`, it stops once nothing is dirty.
    ///
    /// # Errors
    /// When the pool is already stopping in a way that conflicts.
    fn stop(&self, drain: bool) -> Result<(), ControlError>;

    /// What the stop has left in the cache; `None` until all but the API has stopped. The server
    /// then waits a short time for this question.
    fn left(&self) -> Option<LeftSnapshot>;
}

/// A client of a socket, and what it has done so far.
#[derive(Clone, PartialEq, Debug)]
pub struct ClientSnapshot {
    /// Who it is, as in the log.
    pub peer: String,
    /// The volume that it uses; `None` before its first answer.
    pub volume: Option<String>,
    /// Time since it connected; since the last upgrade, if it came along.
    pub connected: Duration,
    /// Time since bytes were last received from it or sent to it.
    pub silent: Duration,
    /// Requests that are not yet answered.
    pub in_flight: u64,
    /// Bytes of memory that its requests and answers take.
    pub memory: u64,
    /// Its answered requests: operation, number, and the sum of their latencies.
    pub operations: Vec<(&'static str, u64, Duration)>,
    /// The number of those that failed.
    pub errors: u64,
    /// Bytes read and written.
    pub bytes: [u64; 2],
}

/// A disk of this machine over a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskSnapshot {
    /// The volume's name when the disk was made.
    pub volume: String,
    /// The disk's path.
    pub device: String,
    /// Bytes in one of its sectors.
    pub sector_size: u32,
    /// Whether this server serves it. If not, its requests wait.
    pub served: bool,
}

/// What to bring into the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefetchTarget {
    /// Ranges of bytes.
    pub ranges: Vec<Range<u64>>,
    /// The most bytes per second that are read; unlimited when `None`.
    pub rate: Option<u64>,
}

/// A prefetch at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefetchSnapshot {
    /// Whether it goes on.
    pub running: bool,
    /// Whether somebody has ended it.
    pub cancelled: bool,
    /// Bytes brought in, or found in the cache.
    pub bytes: u64,
    /// All bytes.
    pub total: u64,
    /// Time since it began; if it has ended, its duration.
    pub time: Duration,
    /// Why it failed.
    pub error: Option<String>,
}

/// Parameters of a new recording.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceTarget {
    /// The file; it must not exist.
    pub path: PathBuf,
    /// Maximum duration; `None` records until stopped.
    pub limit: Option<Duration>,
}

/// The state of a recording at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceSnapshot {
    /// Path of the trace file.
    pub path: PathBuf,
    /// Whether the recording is running.
    pub running: bool,
    /// Time since it began; if it has ended, its duration.
    pub time: Duration,
    /// Requests written.
    pub requests: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Requests left out because the file accepted them too slowly.
    pub dropped: u64,
    /// Why it failed.
    pub error: Option<String>,
}

/// A configuration to bring into force.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The path of its file on the host of who wants it.
    pub path: PathBuf,
    /// The text of the file.
    pub text: String,
    /// The configuration in it.
    pub config: Config,
}

/// What bringing a configuration into force changes.
#[derive(Clone, Debug)]
pub struct Application {
    /// What differs from the configuration in force.
    pub differences: Differences,
    /// How that comes into force.
    pub way: Way,
    /// The hand-over that has begun.
    pub hand_over: Option<UpgradeSnapshot>,
}

/// An upgrade, or a hand-over to the same program, at one moment.
#[derive(Clone, PartialEq, Debug)]
pub struct UpgradeSnapshot {
    /// Its number, larger than those of earlier ones.
    pub id: u64,
    /// The program.
    pub program: PathBuf,
    /// Whether it is running, or how it ended.
    pub state: UpgradeState,
    /// Bytes that must be written to the primaries first.
    pub to_drain: Option<u64>,
    /// The time for which clients waited, in seconds.
    pub pause: Option<f64>,
    /// Why it failed.
    pub error: Option<String>,
}

/// The state of an upgrade.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpgradeState {
    /// The program checks whether it can take over, or takes over.
    Running,
    /// The program serves.
    Done,
    /// The program before it serves.
    Failed,
}

/// What a stop has left in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeftSnapshot {
    /// Bytes of dirty data, including lost ones.
    pub dirty_bytes: u64,
    /// Bytes of dirty data that cannot be read back.
    pub lost_bytes: u64,
}

/// The state of a pool at one moment.
#[derive(Clone, Debug)]
pub struct PoolSnapshot {
    /// Time since the server was ready.
    pub uptime: Duration,
    /// The server's process id.
    pub pid: u32,
    /// Its keeper.
    pub keeper: Keeper,
    /// Why the state directory cannot be written, if so.
    pub state_problem: Option<String>,
    /// Whether it has been told to stop.
    pub stopping: bool,
    /// Whether a signal or another stop ended the drain that was to come before the stop.
    pub drain_given_up: bool,
    /// The cache device's path.
    pub cache_path: String,
    /// Bytes of the cache device in use.
    pub cache_bytes: u64,
    /// Size of the cache device, in bytes.
    pub cache_device_bytes: u64,
    /// Eviction policy.
    pub eviction: Eviction,
    /// How blocks are stored that equal or resemble others.
    pub content: ContentLocality,
    /// Maximum time that a dirty block may wait before it is written to the primary.
    pub write_cache_depth: Duration,
    /// Bytes per day that may be written to the cache device; no budget when `None`.
    pub wear_budget: Option<u64>,
    /// Endpoints for clients.
    pub endpoints: Vec<String>,
    /// Clients connected.
    pub clients: u64,
    /// Clients refused because the limit of clients was reached.
    pub clients_refused: u64,
    /// The volumes, in order of their ids.
    pub volumes: Vec<VolumeSnapshot>,
    /// The shards, in order.
    pub shards: Vec<ShardSnapshot>,
    /// Request latencies, by volume and operation.
    pub latencies: Vec<Latency>,
    /// The same by volume, operation and tier.
    pub tier_latencies: Vec<Latency>,
    /// Latencies of the primaries' own requests, by volume and operation.
    pub primary_latencies: Vec<Latency>,
    /// Every setting in force.
    pub settings: Vec<SettingSnapshot>,
    /// The rules for requests, each with those that it decided on.
    pub rules: Vec<(String, RuleCount)>,
}

/// The process that starts the server again if it dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keeper {
    /// The server was started without one.
    None,
    /// Its process id.
    Process(u32),
    /// There was one, which is gone.
    Gone,
}

/// The value of a setting at one moment.
#[derive(Clone, Debug)]
pub struct SettingSnapshot {
    /// The setting.
    pub spec: &'static Spec,
    /// The volume; `None` for a setting of the server.
    pub volume: Option<String>,
    /// The value in force.
    pub value: String,
    /// If `set` has changed it: the configured value, and the time of the change in seconds since
    /// 1970.
    pub changed: Option<(String, u64)>,
}

/// The state of a volume at one moment.
#[derive(Clone, Debug)]
pub struct VolumeSnapshot {
    /// Its name.
    pub name: String,
    /// Its primary, as configured.
    pub primary: String,
    /// Its size in bytes.
    pub size: u64,
    /// The cache mode.
    pub mode: Mode,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Its file in the FUSE mount, if there is one.
    pub file: Option<String>,
    /// The loop devices over that file.
    pub devices: Vec<String>,
    /// Reads, dirty blocks and lost blocks.
    pub state: VolumeState,
    /// The health of its primary.
    pub primary_health: PrimaryHealth,
}

/// The health of a primary.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PrimaryHealth {
    /// Time since it stopped answering; `None` while it answers.
    pub away: Option<Duration>,
    /// How long its oldest request has had neither an answer nor an error, if that is longer than
    /// the configured patience.
    pub silent: Option<Duration>,
    /// The last request that failed: how long ago, and the error.
    pub last_error: Option<(Duration, String)>,
}

impl PrimaryHealth {
    /// Age up to which an error counts as recent.
    pub const RECENT: Duration = Duration::from_secs(600);

    /// The health according to the shards' observations, at time `now`.
    #[must_use]
    pub fn of(state: &VolumeState, now: Instant) -> Self {
        let primary = &state.primary;
        let oldest = state.oldest_io.filter(|_| state.slow_ios > 0);
        Self {
            away: primary.away_since.map(|since| now.since(since)),
            silent: oldest.map(|at| now.since(at)),
            last_error: primary.last_error.map(|(at, kind)| (now.since(at), kind.to_string())),
        }
    }

    /// `good`, `errors` (it failed a request in the last ten minutes), `silent`, or `away`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        let recent = |(ago, _): &(Duration, String)| *ago < Self::RECENT;
        match (&self.away, &self.silent, &self.last_error) {
            (Some(_), _, _) => "away",
            (None, Some(_), _) => "silent",
            (None, None, Some(error)) if recent(error) => "errors",
            _ => "good",
        }
    }

    /// Whether it answers: it is neither away nor silent.
    #[must_use]
    pub fn answers(&self) -> bool {
        self.away.is_none() && self.silent.is_none()
    }
}

/// The state of a shard at one moment.
#[derive(Clone, Debug)]
pub struct ShardSnapshot {
    /// Lifecycle state of its engine.
    pub state: State,
    /// Health of its part of the cache device.
    pub health: Health,
    /// Its counters.
    pub stats: Stats,
}

/// Latencies of one operation since the start, of all requests or of one tier.
#[derive(Clone, Debug)]
pub struct Latency {
    /// The volume.
    pub volume: String,
    /// The operation: `read`, `write`, `flush`, ...
    pub operation: &'static str,
    /// The slowest tier that the requests waited for: `ram`, `cache` or `primary`; `None` for
    /// requests of all tiers.
    pub tier: Option<&'static str>,
    /// Number of requests.
    pub count: u64,
    /// Sum of their latencies, in nanoseconds.
    pub sum_nanos: u64,
    /// Histogram: upper bounds in nanoseconds, ascending, each with the number of requests that
    /// took at most that long.
    pub at_most: Vec<(u64, u64)>,
    /// The same for every non-empty bucket as measured, for percentiles.
    pub fine: Vec<(u64, u64)>,
}

impl PoolSnapshot {
    /// The volume with this name.
    ///
    /// # Errors
    /// When there is no such volume; the error lists the existing ones.
    pub fn volume(&self, name: &str) -> Result<&VolumeSnapshot, ControlError> {
        self.volumes.iter().find(|volume| volume.name == name).ok_or_else(|| {
            ControlError::no_volume(name, self.volumes.iter().map(|volume| volume.name.as_str()))
        })
    }

    /// The statistics of all shards together.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::merged(self.shards.iter().map(|shard| &shard.stats))
    }

    /// Dirty blocks in all shards.
    #[must_use]
    pub fn dirty_blocks(&self) -> u64 {
        self.shards.iter().map(|shard| shard.stats.dirty_blocks).sum()
    }

    /// Dirty blocks that cannot be read back, in all shards.
    #[must_use]
    pub fn lost_blocks(&self) -> u64 {
        self.shards.iter().map(|shard| shard.stats.fenced_blocks).sum()
    }

    /// The worst health of any shard.
    #[must_use]
    pub fn health(&self) -> Health {
        let rank = |health: &Health| match health {
            Health::Good => 0,
            Health::Draining => 1,
            Health::Detached => 2,
        };
        self.shards.iter().map(|shard| shard.health).max_by_key(rank).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::ErrorKind;
    use forebay_engine::Primary;

    use super::*;

    #[test]
    fn a_primary_that_leaves_requests_unanswered_is_not_good() {
        let now = Instant(100_000_000_000);
        let mut state = VolumeState {
            oldest_io: Some(Instant(60_000_000_000)),
            primary: Primary { last_error: Some((now, ErrorKind::Media)), ..Primary::default() },
            ..VolumeState::default()
        };
        let health = PrimaryHealth::of(&state, now);
        assert_eq!((health.name(), health.answers()), ("errors", true), "it may be slow");
        state.slow_ios = 3;
        let health = PrimaryHealth::of(&state, now);
        assert_eq!((health.name(), health.answers()), ("silent", false));
        assert_eq!(health.silent, Some(Duration::from_secs(40)));
        state.primary.away_since = Some(now);
        assert_eq!(PrimaryHealth::of(&state, now).name(), "away");
    }
}
