//! The bodies of the HTTP API, version 1. Fields are only ever added; one that changes its
//! meaning gets a new name. Sizes are bytes and times seconds unless the name says otherwise.

mod settings;

use std::collections::BTreeMap;

use forebay_block::{BLOCK_SIZE, ByteRange};
use forebay_engine::{Health, Lookups, State, Stats};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::pool::{
    Latency, PoolSnapshot, SettingSnapshot, ShardSnapshot, TraceSnapshot, VolumeSnapshot,
};
use crate::problems::{of_volume, problems};

pub use settings::{CacheSettings, InForce, VolumeInForce, VolumeSettings};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The version that paths begin with.
pub const VERSION: u32 = 1;

/// What is served and how it is doing.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct PoolStatus {
    /// Version of this description.
    pub api: u32,
    /// Version of the server.
    pub version: String,
    /// `serving`, or what the slowest shard is at: `recovering`, `refused`, `stopping`, `stopped`.
    pub state: String,
    /// The cache device: `good`, or the worst of any shard: `draining` (it failed a write and is
    /// being emptied), `detached` (the primaries are used without it).
    pub health: String,
    /// What is wrong now and what to do, a sentence each; empty when nothing is.
    #[serde(default)]
    pub problems: Vec<String>,
    /// Whether a signal ended the drain that was to come before the stop.
    #[serde(default)]
    pub drain_given_up: bool,
    /// Seconds since the server was ready.
    pub uptime_seconds: u64,
    /// The cache.
    pub cache: CacheStatus,
    /// Where clients connect.
    pub endpoints: Vec<String>,
    /// Clients connected.
    pub clients: u64,
    /// The volumes.
    pub volumes: Vec<VolumeStatus>,
    /// The shards.
    pub shards: Vec<ShardStatus>,
    /// Every counter and level, over all shards; `docs/user/statistics.md` says what each means.
    pub counters: BTreeMap<String, u64>,
    /// Every setting in force, those of volumes behind those of the server.
    #[serde(default)]
    pub settings: Vec<SettingStatus>,
}

/// The cache device and what is in it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct CacheStatus {
    /// Its path.
    pub path: String,
    /// Bytes of it in use.
    pub size: u64,
    /// Bytes that it has, or that it may use: more than `size` where memory for the index of all
    /// of it was short when the cache was made.
    #[serde(default)]
    pub device_size: u64,
    /// How clean blocks are chosen to leave: `fifo`, `lru`, `frequency`.
    #[serde(default)]
    pub eviction: String,
    /// How blocks are stored that are like others: `independent`, `rewrite`, `similar`.
    #[serde(default)]
    pub content: String,
    /// Bytes of blocks in it, before compression.
    pub cached_bytes: u64,
    /// Bytes that those take on the cache device, compressed or as deltas, without headers.
    #[serde(default)]
    pub payload_bytes: u64,
    /// Bytes of blocks for each byte of the cache device that is in use, headers and garbage
    /// included; `null` while none is.
    #[serde(default)]
    pub held_per_used_byte: Option<f64>,
    /// Bytes written to the cache device for each byte that clients wrote, copies and admissions
    /// included; `null` before the first.
    #[serde(default)]
    pub written_per_byte: Option<f64>,
    /// Bytes that are written to the cache device for each byte of blocks put there, headers and
    /// footers included: below 1 is wear saved by packing, deltas and shared payloads. `null`
    /// before the first.
    #[serde(default)]
    pub written_per_stored_byte: Option<f64>,
    /// Bytes of blocks held in RAM for each byte of it that they take: above 1 is what compression
    /// gains. `null` while there are none.
    #[serde(default)]
    pub held_per_ram_byte: Option<f64>,
    /// Bytes newer than on the primary: what is at risk should the device be lost.
    pub dirty_bytes: u64,
    /// Dirty bytes at which writes wait for destaging.
    pub dirty_limit_bytes: u64,
    /// Seconds that the oldest dirty block has waited.
    pub oldest_dirty_seconds: f64,
    /// The longest that one should wait, in seconds.
    pub write_cache_depth_seconds: f64,
    /// Dirty bytes that cannot be read back: lost data.
    pub fenced_bytes: u64,
    /// Hits and partial hits in a hundred lookups, those that were told to go past the cache among
    /// them; absent before the first. `full_hit_percent` says more.
    pub hit_percent: Option<f64>,
    /// Reads found whole in the cache, in a hundred that asked it: those told to go past it do
    /// not count. Absent before the first.
    #[serde(default)]
    pub full_hit_percent: Option<f64>,
    /// Reads found in part, in a hundred of the same.
    #[serde(default)]
    pub partial_hit_percent: Option<f64>,
    /// Requests that the cache device failed.
    #[serde(default)]
    pub device_errors: u64,
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
    /// The file that it is, where there is a FUSE mount.
    #[serde(default)]
    pub file: Option<String>,
    /// The loop devices over that file.
    #[serde(default)]
    pub devices: Vec<String>,
    /// How its primary is doing.
    #[serde(default)]
    pub primary_health: PrimaryStatus,
    /// Its reads; by shard they add up as in the counters.
    #[serde(default)]
    pub reads: ReadStatus,
    /// Bytes newer in the cache than on the primary.
    #[serde(default)]
    pub dirty_bytes: u64,
    /// Of these, bytes that cannot be read back: lost data.
    #[serde(default)]
    pub lost_bytes: u64,
    /// Where those are, in address order; 1000 ranges at most.
    #[serde(default)]
    pub lost: Vec<LostRange>,
    /// What is wrong with it now, each with what to do.
    #[serde(default)]
    pub problems: Vec<String>,
    /// What clients asked of it since the start, by operation.
    #[serde(default)]
    pub operations: Vec<OperationStatus>,
}

/// Requests of one operation.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct OperationStatus {
    /// `read`, `write`, `flush`, ...
    pub operation: String,
    /// Requests that were answered.
    pub requests: u64,
    /// How long they took in the mean, in microseconds; absent before the first.
    pub mean_micros: Option<f64>,
}

impl OperationStatus {
    fn of(latency: &Latency) -> Self {
        let Latency { operation, count, sum_nanos, .. } = latency;
        let mean = (*count > 0).then(|| *sum_nanos as f64 / 1e3 / *count as f64);
        Self { operation: (*operation).to_owned(), requests: *count, mean_micros: mean }
    }
}

/// The primary of a volume.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct PrimaryStatus {
    /// `good`, `errors` (it failed a request in the last ten minutes), or `away` (it does not
    /// answer).
    pub state: String,
    /// Reads that it failed.
    pub read_errors: u64,
    /// Writes, zeroes and discards that it failed.
    pub write_errors: u64,
    /// Flushes that it failed.
    pub flush_errors: u64,
    /// How the last one failed.
    pub last_error: Option<String>,
    /// How many seconds ago.
    pub last_error_seconds: Option<f64>,
    /// How long it has not answered, in seconds.
    pub away_seconds: Option<f64>,
}

/// Reads of a volume by what the cache had of them, as pieces at a shard.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ReadStatus {
    /// All blocks were cached.
    pub hits: u64,
    /// Some blocks were.
    pub partial_hits: u64,
    /// No block was.
    pub misses: u64,
    /// The read was told to go past the cache.
    pub bypasses: u64,
    /// Hits in a hundred of the others; absent before the first.
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
    /// Where it is in its life.
    pub state: String,
    /// Why it refuses to serve, when it does.
    pub reason: Option<String>,
    /// How its part of the cache is doing.
    pub health: String,
    /// Its dirty blocks, in bytes.
    pub dirty_bytes: u64,
}

/// A drain: writing all that is dirty of a volume, or of all, to the primary.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Its number.
    pub id: u64,
    /// The volume that it drains; all of them if there is none.
    pub volume: Option<String>,
    /// How far it is.
    pub state: JobState,
    /// Dirty bytes of what it drains when there were most of them since it began.
    pub total_bytes: u64,
    /// Dirty bytes of what it drains now, or when it ended.
    pub remaining_bytes: u64,
    /// Seconds since it began, or that it took.
    pub seconds: f64,
    /// Why it failed.
    pub error: Option<String>,
}

/// How far a job is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It goes on.
    Running,
    /// Nothing is dirty.
    Done,
    /// It was cancelled; what was destaged stays so.
    Cancelled,
    /// It cannot go on.
    Failed,
}

/// A setting in force.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SettingStatus {
    /// The volume; absent for one of the server.
    pub volume: Option<String>,
    /// Its name, as in the configuration.
    pub name: String,
    /// What is in force.
    pub value: String,
    /// What the configuration says, where `set` has changed it.
    pub configured: Option<String>,
    /// When `set` has changed it, in seconds since 1970.
    pub set_unix_seconds: Option<u64>,
}

/// A recording to begin.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TraceRequest {
    /// The file on the server's host, by its whole path; it must not exist.
    pub path: String,
    /// Seconds after which it ends by itself; absent until it is stopped.
    pub seconds: Option<u64>,
}

/// A recording of what clients ask of a volume.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TraceStatus {
    /// The volume.
    pub volume: String,
    /// The file.
    pub path: String,
    /// `running`, `done`, or `failed`.
    pub state: String,
    /// Requests written.
    pub requests: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Requests left out, since the file did not take them fast enough.
    pub dropped: u64,
    /// Seconds since it began, or that it took.
    pub seconds: f64,
    /// Why it failed.
    pub error: Option<String>,
}

impl TraceStatus {
    /// The status that a snapshot shows.
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

/// How to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    /// Whether everything dirty is written to the primaries first.
    #[serde(default)]
    pub drain: bool,
}

/// It will be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Accepted {
    /// Always true.
    pub accepted: bool,
}

/// Why something was not done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What is wrong, with the value.
    pub error: String,
    /// What to do.
    pub hint: String,
}

impl PoolStatus {
    /// The statistics over all shards.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::from_fields(|name| self.counters.get(name).copied().unwrap_or(0))
    }

    /// The status that a snapshot shows.
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
            cache: CacheStatus::of(pool, &stats),
            endpoints: pool.endpoints.clone(),
            clients: pool.clients,
            volumes: pool.volumes.iter().map(|volume| VolumeStatus::of(pool, volume)).collect(),
            shards: pool.shards.iter().map(ShardStatus::of).collect(),
            counters: stats.fields().collect(),
            settings: pool.settings.iter().map(SettingStatus::of).collect(),
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
        Self {
            path: pool.cache_path.clone(),
            size: pool.cache_bytes,
            device_size: pool.cache_device_bytes,
            eviction: pool.eviction.name().to_owned(),
            content: pool.content.name().to_owned(),
            cached_bytes: stats.cached_blocks * BLOCK,
            payload_bytes: stats.payload_bytes,
            held_per_used_byte: ratio(stats.cached_blocks * BLOCK, stats.log_used_bytes),
            written_per_byte: ratio(stats.log_bytes, stats.write_bytes),
            written_per_stored_byte: ratio(stats.log_bytes, stats.log_blocks * BLOCK),
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
        }
    }
}

impl VolumeStatus {
    /// The status that the snapshot of a volume, of the snapshot of its pool, shows.
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
            reads: ReadStatus::of(&volume.state.lookups),
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
        }
    }
}

impl ReadStatus {
    fn of(lookups: &Lookups) -> Self {
        let Lookups { hits, partial_hits, misses, bypasses } = *lookups;
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

/// A share, of something.
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

/// The state that speaks for the pool is the one that keeps it most from serving.
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
