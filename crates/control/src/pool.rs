//! What control needs of a running pool. The binary implements [`PoolControl`] over the shard
//! threads; the tests over a table.

use std::path::PathBuf;
use std::time::Duration;

use forebay_block::Instant;
use forebay_engine::{ContentLocality, Eviction, Health, Mode, Primary, State, Stats, VolumeState};

use crate::ControlError;
use crate::settings::{Change, Spec};

/// A running pool, seen from beside. Every call may take as long as a shard's turn, and none
/// longer; calls come from several threads.
pub trait PoolControl: Send + Sync + 'static {
    /// What the pool is and how it is doing, now.
    ///
    /// # Errors
    /// When a shard does not answer.
    fn snapshot(&self) -> Result<PoolSnapshot, ControlError>;

    /// Changes settings, for the next starts too. Dirty blocks stay in the cache and are destaged.
    ///
    /// # Errors
    /// When there is no such volume, or the changes cannot be kept; then nothing is changed.
    fn set(&self, changes: &[Change]) -> Result<(), ControlError>;

    /// Starts, or stops, destaging all of a volume as fast as its primary takes it.
    ///
    /// # Errors
    /// When there is no such volume, or a shard does not answer.
    fn set_drain(&self, volume: &str, on: bool) -> Result<(), ControlError>;

    /// Begins to record what clients ask of a volume, to a new file on the server's host.
    ///
    /// # Errors
    /// When there is no such volume, it is being recorded, or the file cannot be made.
    fn start_trace(&self, volume: &str, to: &TraceTarget) -> Result<(), ControlError>;

    /// The volume's recording, under way or the last one; `None` when there was none.
    ///
    /// # Errors
    /// When there is no such volume.
    fn trace(&self, volume: &str) -> Result<Option<TraceSnapshot>, ControlError>;

    /// Ends the volume's recording, when all that was asked until now is written.
    ///
    /// # Errors
    /// When there is no such volume, or it has not been recorded.
    fn stop_trace(&self, volume: &str) -> Result<TraceSnapshot, ControlError>;

    /// Begins to stop the server and returns at once; with `drain`, once nothing is dirty.
    ///
    /// # Errors
    /// When the pool is stopping already and cannot do it that way.
    fn stop(&self, drain: bool) -> Result<(), ControlError>;
}

/// Where a recording goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceTarget {
    /// The file; it must not exist.
    pub path: PathBuf,
    /// How long it goes on by itself; `None` until it is stopped.
    pub limit: Option<Duration>,
}

/// A recording at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceSnapshot {
    /// Its file.
    pub path: PathBuf,
    /// Whether it goes on.
    pub running: bool,
    /// Time since it began, or that it took.
    pub time: Duration,
    /// Requests written.
    pub requests: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Requests left out, since the file did not take them fast enough.
    pub dropped: u64,
    /// Why it could not go on.
    pub error: Option<String>,
}

/// A pool at one moment.
#[derive(Clone, Debug)]
pub struct PoolSnapshot {
    /// Time since the server was ready.
    pub uptime: Duration,
    /// Whether it has been told to stop.
    pub stopping: bool,
    /// Whether a signal ended the drain that was to come before the stop.
    pub drain_given_up: bool,
    /// The cache device's path.
    pub cache_path: String,
    /// Bytes of it that are used.
    pub cache_bytes: u64,
    /// Bytes that it has.
    pub cache_device_bytes: u64,
    /// How clean blocks are chosen to leave.
    pub eviction: Eviction,
    /// How rewritten blocks are stored.
    pub content: ContentLocality,
    /// The longest a dirty block may wait.
    pub write_cache_depth: Duration,
    /// Where clients connect.
    pub endpoints: Vec<String>,
    /// Clients connected.
    pub clients: u64,
    /// Clients that were refused for want of a place.
    pub clients_refused: u64,
    /// The volumes, in order of their ids.
    pub volumes: Vec<VolumeSnapshot>,
    /// The shards, in order.
    pub shards: Vec<ShardSnapshot>,
    /// How long requests took, by volume and operation.
    pub latencies: Vec<Latency>,
    /// Every setting in force.
    pub settings: Vec<SettingSnapshot>,
}

/// A setting at one moment.
#[derive(Clone, Debug)]
pub struct SettingSnapshot {
    /// The setting.
    pub spec: &'static Spec,
    /// The volume; `None` for a setting of the server.
    pub volume: Option<String>,
    /// What is in force.
    pub value: String,
    /// What the configuration says, and since when, in seconds since 1970, it was set otherwise.
    pub changed: Option<(String, u64)>,
}

/// A volume at one moment.
#[derive(Clone, Debug)]
pub struct VolumeSnapshot {
    /// Its name.
    pub name: String,
    /// Its primary, as configured.
    pub primary: String,
    /// Its size in bytes.
    pub size: u64,
    /// What the cache does for it.
    pub mode: Mode,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The file that it is, where there is a FUSE mount.
    pub file: Option<String>,
    /// The loop devices over that file.
    pub devices: Vec<String>,
    /// Its reads, its dirty and lost blocks.
    pub state: VolumeState,
    /// How its primary is doing.
    pub primary_health: PrimaryHealth,
}

/// How a primary is doing.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PrimaryHealth {
    /// How long it has not answered; `None` while it does.
    pub away: Option<Duration>,
    /// The last request that it failed: how long ago, and how it failed.
    pub last_error: Option<(Duration, String)>,
}

impl PrimaryHealth {
    /// An error that is older does not count as news.
    pub const RECENT: Duration = Duration::from_secs(600);

    /// What the shards saw, seen from `now`.
    #[must_use]
    pub fn of(primary: &Primary, now: Instant) -> Self {
        Self {
            away: primary.away_since.map(|since| now.since(since)),
            last_error: primary.last_error.map(|(at, kind)| (now.since(at), kind.to_string())),
        }
    }

    /// `good`, `errors` (it failed a request in the last ten minutes), or `away`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        let recent = |(ago, _): &(Duration, String)| *ago < Self::RECENT;
        match (&self.away, &self.last_error) {
            (Some(_), _) => "away",
            (None, Some(error)) if recent(error) => "errors",
            _ => "good",
        }
    }
}

/// A shard at one moment.
#[derive(Clone, Debug)]
pub struct ShardSnapshot {
    /// Where its engine is in its life.
    pub state: State,
    /// How its part of the cache device is doing.
    pub health: Health,
    /// Its counters.
    pub stats: Stats,
}

/// How long requests of one operation took since the start.
#[derive(Clone, Debug)]
pub struct Latency {
    /// The volume.
    pub volume: String,
    /// The operation: `read`, `write`, `flush`, ...
    pub operation: &'static str,
    /// Requests.
    pub count: u64,
    /// Their times together, in nanoseconds.
    pub sum_nanos: u64,
    /// Upper bounds in nanoseconds, ascending, each with the number of requests that took at most
    /// that long.
    pub at_most: Vec<(u64, u64)>,
}

impl PoolSnapshot {
    /// The volume of that name.
    ///
    /// # Errors
    /// When there is none; the error lists those that there are.
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
