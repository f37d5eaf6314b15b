//! The bodies of the HTTP API, version 1. Fields are only added; a field whose meaning changes gets
//! a new name. Sizes are in bytes and times in seconds unless the name says otherwise.

mod events;
mod settings;
mod statistics;
mod wear;

use std::collections::BTreeMap;

use forebay_block::{BLOCK_SIZE, ByteRange};
use forebay_engine::{Health, State, Stats};
use forebay_policy::RuleCount;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::pool::{
    ClientSnapshot, DiskSnapshot, Keeper, Latency, PoolSnapshot, PrefetchSnapshot, SettingSnapshot,
    ShardSnapshot, TraceSnapshot, UpgradeSnapshot, UpgradeState, VolumeSnapshot,
};
use crate::problems::{of_volume, problems};

pub use events::{Acknowledged, Acknowledgement, Event, EventList, Severity};
pub use settings::{
    Applied, ApplyRequest, CacheSettings, InForce, SettingDifference, VolumeInForce,
    VolumeSettings, VolumeShift,
};
pub use statistics::{
    CacheFigures, LatencyFigures, PageUpdate, Point, Rates, StatisticsStatus, VolumeFigures,
};
pub use wear::WearStatus;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The version in all paths.
pub const VERSION: u32 = 1;

/// The state of the pool.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct PoolStatus {
    /// Version of this API.
    pub api: u32,
    /// Version of the server.
    pub version: String,
    /// `serving`, or the state of the least ready shard: `recovering`, `refused`, `stopping`,
    /// `stopped`.
    pub state: String,
    /// Health of the cache device, the worst of any shard: `good`, `draining` (it failed a write
    /// and is being emptied), or `detached` (the primaries are used without it).
    pub health: String,
    /// Current problems with their remedies, one sentence each; empty if there are none.
    #[serde(default)]
    pub problems: Vec<String>,
    /// Whether a signal or another stop ended the drain that was to come before the stop.
    #[serde(default)]
    pub drain_given_up: bool,
    /// Seconds since the server was ready.
    pub uptime_seconds: u64,
    /// Process id of the server.
    #[serde(default)]
    pub pid: u32,
    /// Process id of its keeper, which starts it again if it dies; `null` if it has none.
    #[serde(default)]
    pub keeper_pid: Option<u32>,
    /// The cache.
    pub cache: CacheStatus,
    /// Endpoints for clients.
    pub endpoints: Vec<String>,
    /// Clients connected.
    pub clients: u64,
    /// The volumes.
    pub volumes: Vec<VolumeStatus>,
    /// The shards.
    pub shards: Vec<ShardStatus>,
    /// Every counter and level, over all shards; see `docs/user/statistics.md`.
    pub counters: BTreeMap<String, u64>,
    /// Every setting in force: first those of the server, then those of volumes.
    #[serde(default)]
    pub settings: Vec<SettingStatus>,
    /// The rules for requests, in their order.
    #[serde(default)]
    pub rules: Vec<RuleStatus>,
}

/// A rule for requests. It counts from the server's start, or since it was added.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct RuleStatus {
    /// Its text.
    pub rule: String,
    /// Reads and writes that it decided on.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl RuleStatus {
    fn of((rule, count): &(String, RuleCount)) -> Self {
        Self { rule: rule.clone(), requests: count.requests, bytes: count.bytes }
    }
}

/// The cache device and its content.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct CacheStatus {
    /// Its path.
    pub path: String,
    /// Bytes of the device in use.
    pub size: u64,
    /// Size of the device, or of the part configured for use. It is larger than `size` if there was
    /// not enough memory for the index of all of it when the cache was created.
    #[serde(default)]
    pub device_size: u64,
    /// Eviction policy: `fifo`, `lru`, `frequency`.
    #[serde(default)]
    pub eviction: String,
    /// How blocks are stored that equal or resemble others: `independent`, `rewrite`, `similar`.
    #[serde(default)]
    pub content: String,
    /// Bytes of cached blocks, before compression.
    pub cached_bytes: u64,
    /// Bytes that their payloads take on the cache device, compressed or as deltas, without
    /// headers.
    #[serde(default)]
    pub payload_bytes: u64,
    /// Bytes of cached blocks per byte of the cache device in use, headers and garbage included;
    /// `null` while none is in use.
    #[serde(default)]
    pub held_per_used_byte: Option<f64>,
    /// Bytes written to the cache device per byte written by clients, copies and admissions
    /// included; `null` before the first write.
    #[serde(default)]
    pub written_per_byte: Option<f64>,
    /// Bytes written to the cache device per byte of blocks stored there, headers and footers
    /// included: below 1, packing, deltas and shared payloads save wear. `null` before the first
    /// block.
    #[serde(default)]
    pub written_per_stored_byte: Option<f64>,
    /// Bytes of blocks held in RAM per byte of RAM they take: above 1, compression gains room.
    /// `null` while there are none.
    #[serde(default)]
    pub held_per_ram_byte: Option<f64>,
    /// Bytes newer than on the primary: data at risk if the cache device is lost.
    pub dirty_bytes: u64,
    /// Dirty bytes at which writes wait for destaging.
    pub dirty_limit_bytes: u64,
    /// Seconds that the oldest dirty block has waited.
    pub oldest_dirty_seconds: f64,
    /// Maximum time that a dirty block should wait, in seconds.
    pub write_cache_depth_seconds: f64,
    /// Dirty bytes that cannot be read back: lost data.
    pub fenced_bytes: u64,
    /// Hits and partial hits per hundred lookups, including lookups that bypassed the cache; absent
    /// before the first. `full_hit_percent` is more informative.
    pub hit_percent: Option<f64>,
    /// Reads found entirely in the cache, per hundred reads that did not bypass it. Absent before
    /// the first.
    #[serde(default)]
    pub full_hit_percent: Option<f64>,
    /// Reads found partly in the cache, per hundred reads that did not bypass it.
    #[serde(default)]
    pub partial_hit_percent: Option<f64>,
    /// Failed requests of the cache device.
    #[serde(default)]
    pub device_errors: u64,
    /// The wear of the cache device, if `wear_budget` is set.
    #[serde(default)]
    pub wear: Option<WearStatus>,
}

/// One volume.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VolumeStatus {
    /// Its name.
    pub name: String,
    /// Its primary.
    pub primary: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its mode.
    pub mode: String,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Its file in the FUSE mount, if there is one.
    #[serde(default)]
    pub file: Option<String>,
    /// The disks of this machine over it: loop devices over that file, and those of ublk.
    #[serde(default)]
    pub devices: Vec<String>,
    /// The health of its primary.
    #[serde(default)]
    pub primary_health: PrimaryStatus,
    /// Its reads, counted as pieces at shards, as in the counters.
    #[serde(default)]
    pub reads: ReadStatus,
    /// Bytes of its cached blocks, before compression.
    #[serde(default)]
    pub cached_bytes: u64,
    /// Bytes of them down to which other volumes displace none; 0 without a guarantee.
    #[serde(default)]
    pub cache_guarantee_bytes: u64,
    /// Bytes of them at which its new blocks displace its own; `null` without a limit.
    #[serde(default)]
    pub cache_limit_bytes: Option<u64>,
    /// Bytes newer in the cache than on the primary.
    #[serde(default)]
    pub dirty_bytes: u64,
    /// Dirty bytes that cannot be read back: lost data.
    #[serde(default)]
    pub lost_bytes: u64,
    /// The lost ranges, in address order; at most 1000.
    #[serde(default)]
    pub lost: Vec<LostRange>,
    /// Its current problems, each with its remedy.
    #[serde(default)]
    pub problems: Vec<String>,
    /// Requests of clients since the start, by operation.
    #[serde(default)]
    pub operations: Vec<OperationStatus>,
}

/// Requests of one operation.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct OperationStatus {
    /// `read`, `write`, `flush`, ...
    pub operation: String,
    /// Number of answered requests.
    pub requests: u64,
    /// Mean latency in microseconds; absent before the first request.
    pub mean_micros: Option<f64>,
}

impl OperationStatus {
    fn of(latency: &Latency) -> Self {
        Self::with_mean(latency.operation, latency.count, latency.sum_nanos as f64 / 1e3)
    }

    /// Requests whose latencies add up to `sum_micros`.
    fn with_mean(operation: &str, requests: u64, sum_micros: f64) -> Self {
        let mean_micros = (requests > 0).then(|| sum_micros / requests as f64);
        Self { operation: operation.to_owned(), requests, mean_micros }
    }
}

/// The health of a volume's primary.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct PrimaryStatus {
    /// `good`, `errors` (it failed a request in the last ten minutes), `silent` (a request has had
    /// neither an answer nor an error for longer than `patience`), or `away` (it does not answer).
    pub state: String,
    /// Failed reads.
    pub read_errors: u64,
    /// Failed writes, write-zeroes and discards.
    pub write_errors: u64,
    /// Failed flushes.
    pub flush_errors: u64,
    /// The last error.
    pub last_error: Option<String>,
    /// Seconds since the last error.
    pub last_error_seconds: Option<f64>,
    /// Seconds since it stopped answering.
    pub away_seconds: Option<f64>,
    /// How long its oldest request has had no answer, if that is longer than `patience`.
    #[serde(default)]
    pub silent_seconds: Option<f64>,
}

/// Reads of a volume by how much the cache had of them, counted as pieces at shards.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ReadStatus {
    /// All blocks were cached.
    pub hits: u64,
    /// Some blocks, but not all, were cached.
    pub partial_hits: u64,
    /// No block was cached.
    pub misses: u64,
    /// The read bypassed the cache.
    pub bypasses: u64,
    /// Hits per hundred reads that did not bypass the cache; absent before the first.
    pub full_hit_percent: Option<f64>,
}

/// Lost bytes of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct LostRange {
    /// First byte on the volume.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

/// One shard.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ShardStatus {
    /// Lifecycle state of its engine.
    pub state: String,
    /// Why it refuses to serve, if it does.
    pub reason: Option<String>,
    /// Health of its part of the cache device.
    pub health: String,
    /// Its dirty blocks, in bytes.
    pub dirty_bytes: u64,
}

/// A drain job: writes all dirty data of one volume, or of all, to the primary.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// The job's number.
    pub id: u64,
    /// The volume that it drains; absent if it drains all.
    pub volume: Option<String>,
    /// The state of the job.
    pub state: JobState,
    /// Maximum of its volumes' dirty bytes since it began.
    pub total_bytes: u64,
    /// Its volumes' dirty bytes now, or when it ended.
    pub remaining_bytes: u64,
    /// Seconds since it began; if it has ended, its duration.
    pub seconds: f64,
    /// Why it failed.
    pub error: Option<String>,
}

/// The state of a job.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It is running.
    Running,
    /// It is done: nothing is dirty.
    Done,
    /// It was cancelled; data that it has destaged stays destaged.
    Cancelled,
    /// It failed.
    Failed,
}

/// A setting and its value in force.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SettingStatus {
    /// The volume; absent for a setting of the server.
    pub volume: Option<String>,
    /// Its name, as in the configuration.
    pub name: String,
    /// The value in force.
    pub value: String,
    /// The configured value, if `set` has changed it.
    pub configured: Option<String>,
    /// Time of the change by `set`, in seconds since 1970; absent if unchanged.
    pub set_unix_seconds: Option<u64>,
}

/// Parameters of a new recording.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TraceRequest {
    /// Absolute path of the file on the server's host; it must not exist.
    pub path: String,
    /// Maximum duration in seconds; without it the recording runs until stopped.
    pub seconds: Option<u64>,
}

/// What to bring into the cache.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PrefetchRequest {
    /// Ranges of bytes, each from its first to before its last.
    pub ranges: Vec<[u64; 2]>,
    /// The most bytes per second that are read; unlimited when absent.
    pub rate: Option<u64>,
}

/// How far a prefetch is.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct PrefetchStatus {
    /// `running`, `done`, `cancelled` or `failed`.
    pub state: String,
    /// Bytes brought in, or found in the cache.
    pub bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
    /// Seconds since it began; if it has ended, its duration.
    pub seconds: f64,
    /// Why it failed.
    pub error: Option<String>,
}

impl PrefetchStatus {
    /// The status derived from a snapshot.
    #[must_use]
    pub fn of(prefetch: &PrefetchSnapshot) -> Self {
        let state = match prefetch {
            PrefetchSnapshot { running: true, .. } => "running",
            PrefetchSnapshot { error: Some(_), .. } => "failed",
            PrefetchSnapshot { cancelled: true, .. } => "cancelled",
            PrefetchSnapshot { bytes, total, .. } if bytes < total => "cancelled",
            _ => "done",
        };
        Self {
            state: state.to_owned(),
            bytes: prefetch.bytes,
            total_bytes: prefetch.total,
            seconds: prefetch.time.as_secs_f64(),
            error: prefetch.error.clone(),
        }
    }
}

/// The body of a request for a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskRequest {
    /// Bytes in a sector: 512 or 4096. Without it the volume's content decides.
    #[serde(default)]
    pub sector_size: Option<u32>,
}

/// A disk of the server's machine over a volume, made by ublk.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    /// The volume.
    pub volume: String,
    /// Its path.
    pub device: String,
    /// Bytes in a sector.
    pub sector_size: u32,
    /// `serving`, or `waiting`: its volume is not served, and its requests wait until it is.
    pub state: String,
}

impl DiskStatus {
    /// The status of a disk.
    #[must_use]
    pub fn of(disk: DiskSnapshot) -> Self {
        let DiskSnapshot { volume, device, sector_size, served } = disk;
        let state = if served { "serving" } else { "waiting" };
        Self { volume, device, sector_size, state: state.to_owned() }
    }
}

/// A client of a socket, and what it has done so far. Disks of this machine are no clients.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ClientStatus {
    /// Who it is, as in the log.
    pub peer: String,
    /// The volume that it uses; `null` before its first answer.
    pub volume: Option<String>,
    /// Seconds since it connected; since the last upgrade, if it came along.
    pub connected_seconds: f64,
    /// Seconds since bytes were last received from it or sent to it.
    pub silent_seconds: f64,
    /// Requests that are not yet answered.
    pub in_flight: u64,
    /// Bytes of memory that its requests and answers take.
    pub memory_bytes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written, not counting zeroes and discards.
    pub write_bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Answered requests, by operation.
    pub operations: Vec<OperationStatus>,
}

impl ClientStatus {
    /// The status of a client.
    #[must_use]
    pub fn of(client: ClientSnapshot) -> Self {
        let [read_bytes, write_bytes] = client.bytes;
        let operations = client.operations.into_iter().map(|(operation, requests, time)| {
            OperationStatus::with_mean(operation, requests, time.as_secs_f64() * 1e6)
        });
        Self {
            peer: client.peer,
            volume: client.volume,
            connected_seconds: client.connected.as_secs_f64(),
            silent_seconds: client.silent.as_secs_f64(),
            in_flight: client.in_flight,
            memory_bytes: client.memory,
            read_bytes,
            write_bytes,
            errors: client.errors,
            operations: operations.collect(),
        }
    }
}

/// A recording of clients' requests to a volume.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TraceStatus {
    /// The volume.
    pub volume: String,
    /// Path of the trace file.
    pub path: String,
    /// `running`, `done`, or `failed`.
    pub state: String,
    /// Requests written.
    pub requests: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Requests left out because the file accepted them too slowly.
    pub dropped: u64,
    /// Seconds since it began; if it has ended, its duration.
    pub seconds: f64,
    /// Why it failed.
    pub error: Option<String>,
}

impl TraceStatus {
    /// The status derived from a snapshot.
    #[must_use]
    pub fn of(volume: &str, trace: &TraceSnapshot) -> Self {
        let state = match (trace.running, &trace.error) {
            (_, Some(_)) => "failed",
            (true, None) => "running",
            (false, None) => "done",
        };
        Self {
            volume: volume.to_owned(),
            path: trace.path.display().to_string(),
            state: state.to_owned(),
            requests: trace.requests,
            bytes: trace.bytes,
            dropped: trace.dropped,
            seconds: trace.time.as_secs_f64(),
            error: trace.error.clone(),
        }
    }
}

/// How the server is to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    /// Whether to write all dirty data to the primaries first.
    #[serde(default)]
    pub drain: bool,
}

/// What a stop has left in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct StopStatus {
    /// Bytes of dirty data, including lost ones.
    pub dirty_bytes: u64,
    /// Bytes of dirty data that the cache cannot read back.
    pub lost_bytes: u64,
}

/// The program that is to take over from the server.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeRequest {
    /// Absolute path on the server's host.
    pub program: String,
}

/// An upgrade.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct UpgradeStatus {
    /// Its number; 0 if there was none.
    pub id: u64,
    /// Path of the program.
    pub program: String,
    /// `running`, `done`, `failed`, or `none`.
    pub state: String,
    /// Bytes that are to be written to the primaries first, while it is running.
    #[serde(default)]
    pub to_drain_bytes: Option<u64>,
    /// Seconds for which clients waited.
    pub pause_seconds: Option<f64>,
    /// Why it failed.
    pub error: Option<String>,
}

impl UpgradeStatus {
    /// The status derived from a snapshot.
    #[must_use]
    pub fn of(upgrade: Option<&UpgradeSnapshot>) -> Self {
        let Some(upgrade) = upgrade else {
            return Self { state: "none".to_owned(), ..Self::default() };
        };
        let state = match upgrade.state {
            UpgradeState::Running => "running",
            UpgradeState::Done => "done",
            UpgradeState::Failed => "failed",
        };
        Self {
            id: upgrade.id,
            program: upgrade.program.display().to_string(),
            state: state.to_owned(),
            to_drain_bytes: upgrade.to_drain,
            pause_seconds: upgrade.pause,
            error: upgrade.error.clone(),
        }
    }
}

/// Confirms that a command will be carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Accepted {
    /// Always true.
    pub accepted: bool,
}

/// An error.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The problem, with the value.
    pub error: String,
    /// The remedy.
    pub hint: String,
}

impl PoolStatus {
    /// The statistics over all shards.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::from_fields(|name| self.counters.get(name).copied().unwrap_or(0))
    }

    /// The status derived from a snapshot.
    #[must_use]
    pub fn of(pool: &PoolSnapshot) -> Self {
        let stats = pool.stats();
        let slowest = pool.shards.iter().max_by_key(|shard| state_rank(&shard.state));
        let state = slowest.map_or("stopped", |shard| state_name(&shard.state));
        Self {
            api: VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            state: if pool.stopping { "stopping" } else { state }.to_owned(),
            health: health_name(pool.health()).to_owned(),
            problems: problems(pool),
            drain_given_up: pool.drain_given_up,
            uptime_seconds: pool.uptime.as_secs(),
            pid: pool.pid,
            keeper_pid: match pool.keeper {
                Keeper::Process(pid) => Some(pid),
                Keeper::None | Keeper::Gone => None,
            },
            cache: CacheStatus::of(pool, &stats),
            endpoints: pool.endpoints.clone(),
            clients: pool.clients,
            volumes: pool.volumes.iter().map(|volume| VolumeStatus::of(pool, volume)).collect(),
            shards: pool.shards.iter().map(ShardStatus::of).collect(),
            counters: stats.fields().collect(),
            settings: pool.settings.iter().map(SettingStatus::of).collect(),
            rules: pool.rules.iter().map(RuleStatus::of).collect(),
        }
    }
}

impl SettingStatus {
    fn of(setting: &SettingSnapshot) -> Self {
        let changed = setting.changed.as_ref();
        Self {
            volume: setting.volume.clone(),
            name: setting.spec.key.to_owned(),
            value: setting.value.clone(),
            configured: changed.map(|(configured, _)| configured.clone()),
            set_unix_seconds: changed.map(|&(_, since)| since),
        }
    }
}

impl CacheStatus {
    fn of(pool: &PoolSnapshot, stats: &Stats) -> Self {
        let found = stats.hits + stats.partial_hits;
        let asked = found + stats.misses;
        let used = stats.log_used_bytes + stats.store_used_bytes;
        let written = stats.written_bytes();
        let stored = stats.log_blocks + stats.stored_blocks;
        Self {
            path: pool.cache_path.clone(),
            size: pool.cache_bytes,
            device_size: pool.cache_device_bytes,
            eviction: pool.eviction.name().to_owned(),
            content: pool.content.name().to_owned(),
            cached_bytes: stats.cached_blocks * BLOCK,
            payload_bytes: stats.payload_bytes,
            held_per_used_byte: ratio(stats.cached_blocks * BLOCK, used),
            written_per_byte: ratio(written, stats.write_bytes),
            written_per_stored_byte: ratio(written, stored * BLOCK),
            held_per_ram_byte: ratio(stats.ram_blocks * BLOCK, stats.ram_bytes),
            dirty_bytes: stats.dirty_blocks * BLOCK,
            dirty_limit_bytes: stats.dirty_limit_blocks * BLOCK,
            oldest_dirty_seconds: stats.oldest_dirty_nanos as f64 / 1e9,
            write_cache_depth_seconds: pool.write_cache_depth.as_secs_f64(),
            fenced_bytes: stats.fenced_blocks * BLOCK,
            hit_percent: ratio(100 * found, stats.lookups),
            full_hit_percent: ratio(100 * stats.hits, asked),
            partial_hit_percent: ratio(100 * stats.partial_hits, asked),
            device_errors: stats.cache_errors,
            wear: WearStatus::of(pool, stats),
        }
    }
}

impl VolumeStatus {
    /// The status derived from the snapshots of the pool and of one of its volumes.
    #[must_use]
    pub fn of(pool: &PoolSnapshot, volume: &VolumeSnapshot) -> Self {
        let latencies = pool.latencies.iter().filter(|latency| latency.volume == volume.name);
        Self {
            name: volume.name.clone(),
            primary: volume.primary.clone(),
            size: volume.size,
            mode: volume.mode.name().to_owned(),
            read_only: volume.read_only,
            file: volume.file.clone(),
            devices: volume.devices.clone(),
            primary_health: PrimaryStatus::of(volume),
            reads: ReadStatus::of(&volume.state.stats),
            cached_bytes: volume.state.stats.cached_blocks * BLOCK,
            cache_guarantee_bytes: volume.state.cache_guarantee_blocks * BLOCK,
            cache_limit_bytes: volume.state.cache_limit_blocks.map(|blocks| blocks * BLOCK),
            dirty_bytes: volume.state.dirty_blocks * BLOCK,
            lost_bytes: volume.state.lost_blocks * BLOCK,
            lost: volume.state.lost.iter().map(LostRange::of).collect(),
            problems: of_volume(volume),
            operations: latencies.map(OperationStatus::of).collect(),
        }
    }
}

impl PrimaryStatus {
    fn of(volume: &VolumeSnapshot) -> Self {
        let errors = volume.state.primary.errors;
        let health = &volume.primary_health;
        let last = health.last_error.as_ref();
        Self {
            state: health.name().to_owned(),
            read_errors: errors.reads,
            write_errors: errors.writes,
            flush_errors: errors.flushes,
            last_error: last.map(|(_, how)| how.clone()),
            last_error_seconds: last.map(|(ago, _)| ago.as_secs_f64()),
            away_seconds: health.away.map(|away| away.as_secs_f64()),
            silent_seconds: health.silent.map(|silent| silent.as_secs_f64()),
        }
    }
}

impl ReadStatus {
    pub(crate) fn of(stats: &Stats) -> Self {
        let Stats { hits, partial_hits, misses, bypasses, .. } = *stats;
        let full_hit_percent = ratio(100 * hits, hits + partial_hits + misses);
        Self { hits, partial_hits, misses, bypasses, full_hit_percent }
    }
}

impl LostRange {
    fn of(range: &ByteRange) -> Self {
        Self { offset: range.offset, length: range.len }
    }
}

impl ShardStatus {
    fn of(shard: &ShardSnapshot) -> Self {
        let reason = match &shard.state {
            State::Refused(reason) => Some(reason.clone()),
            _ => None,
        };
        Self {
            state: state_name(&shard.state).to_owned(),
            reason,
            health: health_name(shard.health).to_owned(),
            dirty_bytes: shard.stats.dirty_blocks * BLOCK,
        }
    }
}

/// `part` divided by `whole`; `None` if that is undefined.
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn state_name(state: &State) -> &'static str {
    match state {
        State::Recovering => "recovering",
        State::Serving => "serving",
        State::Refused(_) => "refused",
        State::Stopping => "stopping",
        State::Stopped => "stopped",
    }
}

/// Rank of a state: the pool's state is the shard state that most keeps it from serving.
fn state_rank(state: &State) -> u8 {
    match state {
        State::Serving => 0,
        State::Stopped => 1,
        State::Stopping => 2,
        State::Recovering => 3,
        State::Refused(_) => 4,
    }
}

fn health_name(health: Health) -> &'static str {
    match health {
        Health::Good => "good",
        Health::Draining => "draining",
        Health::Detached => "detached",
    }
}
