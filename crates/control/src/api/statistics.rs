//! The statistics of a window.

use std::collections::BTreeMap;

use forebay_block::BLOCK_SIZE;
use forebay_engine::{Kind, STATISTICS, Shape, Stats};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Job, PoolStatus, ReadStatus, ratio};
use crate::statistics::{History, Sample, Spread, VolumeSample, Window};

const BLOCK: u64 = BLOCK_SIZE as u64;
pub(super) const DAY_SECONDS: f64 = 86_400.0;

/// What happened in a stretch of time that ends now.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct StatisticsStatus {
    /// `now` (the last second or two), `5m`, `1h`, `1d`, or `start`.
    pub window: String,
    /// Its real length: up to `resolution_seconds` longer than its name says, or shorter if the
    /// server is younger.
    pub seconds: f64,
    /// Seconds between two snapshots of this window; 0 for `start`.
    pub resolution_seconds: f64,
    /// The cache.
    pub cache: CacheFigures,
    /// The volumes.
    pub volumes: Vec<VolumeFigures>,
}

/// The cache in a window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct CacheFigures {
    /// Every counter, by how much it grew, and the levels that are kept by volume, as they are now;
    /// the other levels are left out.
    pub counters: BTreeMap<String, u64>,
    /// Reads of all volumes by how much the cache had of them.
    pub reads: ReadStatus,
    /// Bytes written to the cache device.
    pub written_bytes: u64,
    /// The same, per day at this rate.
    pub written_bytes_per_day: f64,
    /// Bytes newer than on the primary, now.
    pub dirty_bytes: u64,
    /// Dirty bytes at which writes wait for destaging.
    pub dirty_limit_bytes: u64,
    /// Seconds that the oldest dirty block has waited.
    pub oldest_dirty_seconds: f64,
}

/// What the server tells a page each second.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct PageUpdate {
    /// The state.
    pub status: PoolStatus,
    /// What happened in the last second or two.
    pub statistics: StatisticsStatus,
    /// The drains, oldest first.
    pub jobs: Vec<Job>,
}

/// A volume in a window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VolumeFigures {
    /// Its name.
    pub name: String,
    /// Its counters, by how much they grew, and its levels, as they are now.
    pub counters: BTreeMap<String, u64>,
    /// Its reads by how much the cache had of them.
    pub reads: ReadStatus,
    /// Rates.
    pub rates: Rates,
    /// Bytes newer than on the primary, now.
    pub dirty_bytes: u64,
    /// Dirty bytes at which its writes wait.
    pub dirty_limit_bytes: u64,
    /// Latencies that clients saw, of the operations that they asked for.
    pub latencies: Vec<LatencyFigures>,
    /// The same of reads and writes, by the slowest tier that they waited for.
    #[serde(default)]
    pub tiers: Vec<LatencyFigures>,
    /// Latencies of the primary's own requests, as the cache saw them.
    pub primary: Vec<LatencyFigures>,
    /// The course of the window, oldest first: one point for each snapshot.
    #[serde(default)]
    pub points: Vec<Point>,
}

/// Requests and bytes per second.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Rates {
    /// Read requests.
    pub reads: f64,
    /// Write requests.
    pub writes: f64,
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes written.
    pub written_bytes: f64,
    /// Bytes destaged to the primary.
    pub destaged_bytes: f64,
}

/// Latencies of one operation.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct LatencyFigures {
    /// `read`, `write`, `flush`, `discard` or `write-zeroes`.
    pub operation: String,
    /// `ram`, `cache` or `primary`; `null` for requests of all tiers.
    #[serde(default)]
    pub tier: Option<String>,
    /// Number of requests.
    pub requests: u64,
    /// The mean in microseconds.
    pub mean_micros: f64,
    /// The latency that half of the requests did not exceed; at most 6 % too high.
    pub p50_micros: f64,
    /// The same for 90 % of them.
    pub p90_micros: f64,
    /// The same for 99 % of them.
    pub p99_micros: f64,
    /// The same for 99.9 % of them.
    pub p999_micros: f64,
}

/// A volume between two snapshots.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Point {
    /// Seconds from its end until now.
    pub seconds_ago: f64,
    /// Rates.
    pub rates: Rates,
    /// Reads found entirely in the cache, per hundred reads that did not bypass it.
    pub full_hit_percent: Option<f64>,
    /// Half of the clients' reads took at most this long.
    pub read_p50_micros: Option<f64>,
    /// 99 % of the clients' reads took at most this long.
    pub read_p99_micros: Option<f64>,
    /// Half of the primary's own reads took at most this long.
    pub primary_read_p50_micros: Option<f64>,
    /// Bytes newer than on the primary, at its end.
    pub dirty_bytes: u64,
}

impl StatisticsStatus {
    /// The statistics of the window that ends with the sample `now`.
    #[must_use]
    pub fn of(history: &History, window: Window, now: &Sample) -> Self {
        let change = history.change(window, now);
        let seconds = change.at.as_secs_f64();
        let mut volumes: Vec<_> =
            change.volumes.iter().map(|volume| VolumeFigures::of(volume, seconds)).collect();
        if window != Window::Now {
            let samples: Vec<&Sample> = history.samples(window).map(|sample| &**sample).collect();
            for step in samples.windows(2) {
                note_points(&mut volumes, step[0], step[1], now);
            }
        }
        Self {
            window: window.name().to_owned(),
            seconds,
            resolution_seconds: window.span().map_or(0.0, |(_, step)| step.as_secs_f64()),
            cache: CacheFigures::of(&change.pool, seconds),
            volumes,
        }
    }
}

/// Adds a point to each volume: from one snapshot to the next.
fn note_points(volumes: &mut [VolumeFigures], from: &Sample, to: &Sample, now: &Sample) {
    let change = to.since(from);
    let seconds = change.at.as_secs_f64();
    let ago = now.at.saturating_sub(to.at).as_secs_f64();
    for (volume, step) in volumes.iter_mut().zip(&change.volumes) {
        let read = step.latency("read");
        let primary = step.primary.iter().find(|(name, _)| *name == "read");
        volume.points.push(Point {
            seconds_ago: ago,
            rates: Rates::of(&step.stats, seconds),
            full_hit_percent: ReadStatus::of(&step.stats).full_hit_percent,
            read_p50_micros: read.and_then(|spread| spread.quantile_micros(0.5)),
            read_p99_micros: read.and_then(|spread| spread.quantile_micros(0.99)),
            primary_read_p50_micros: primary.and_then(|(_, spread)| spread.quantile_micros(0.5)),
            dirty_bytes: step.dirty_blocks * BLOCK,
        });
    }
}

impl CacheFigures {
    fn of(stats: &Stats, seconds: f64) -> Self {
        let counters = STATISTICS.iter().filter(|row| row.kind == Kind::Counter || row.by_volume);
        let counters =
            counters.flat_map(|row| row.fields().into_iter().zip(row.of(stats).iter().copied()));
        let written_bytes = stats.written_bytes();
        Self {
            counters: counters.collect(),
            reads: ReadStatus::of(stats),
            written_bytes,
            written_bytes_per_day: per_second(written_bytes, seconds) * DAY_SECONDS,
            dirty_bytes: stats.dirty_blocks * BLOCK,
            dirty_limit_bytes: stats.dirty_limit_blocks * BLOCK,
            oldest_dirty_seconds: stats.oldest_dirty_nanos as f64 / 1e9,
        }
    }

    /// Reads and writes that bypassed the cache, by reason.
    pub fn bypassed(&self) -> impl Iterator<Item = (&'static str, u64)> {
        by_value(&self.counters, "bypassed")
    }
}

impl VolumeFigures {
    fn of(volume: &VolumeSample, seconds: f64) -> Self {
        let spreads = |all: &[(&'static str, Spread)]| {
            all.iter().map(|(operation, spread)| LatencyFigures::of(operation, spread)).collect()
        };
        let tiers = volume.tiers.iter().map(|((operation, tier), spread)| LatencyFigures {
            tier: Some((*tier).to_owned()),
            ..LatencyFigures::of(operation, spread)
        });
        Self {
            name: volume.name.clone(),
            counters: volume.stats.volume_fields().collect(),
            reads: ReadStatus::of(&volume.stats),
            rates: Rates::of(&volume.stats, seconds),
            dirty_bytes: volume.dirty_blocks * BLOCK,
            dirty_limit_bytes: volume.dirty_limit_blocks * BLOCK,
            latencies: spreads(&volume.latencies),
            tiers: tiers.collect(),
            primary: spreads(&volume.primary),
            points: Vec::new(),
        }
    }

    /// Reads and writes that bypassed the cache, by reason.
    pub fn bypassed(&self) -> impl Iterator<Item = (&'static str, u64)> {
        by_value(&self.counters, "bypassed")
    }

    /// Dirty blocks by the time for which they have been dirty, youngest first.
    pub fn dirty_for(&self) -> impl Iterator<Item = (&'static str, u64)> {
        by_value(&self.counters, "dirty_for")
    }

    /// Blocks destaged, by reason.
    pub fn destaged_for(&self) -> impl Iterator<Item = (&'static str, u64)> {
        by_value(&self.counters, "destaged_for")
    }

    /// The clients' latencies of an operation.
    #[must_use]
    pub fn latency(&self, operation: &str) -> Option<&LatencyFigures> {
        self.latencies.iter().find(|one| one.operation == operation)
    }

    /// The primary's own latencies of an operation.
    #[must_use]
    pub fn primary_latency(&self, operation: &str) -> Option<&LatencyFigures> {
        self.primary.iter().find(|one| one.operation == operation)
    }
}

/// The numbers of a statistic by the values of its label, in their order.
fn by_value(
    counters: &BTreeMap<String, u64>,
    statistic: &str,
) -> impl Iterator<Item = (&'static str, u64)> {
    let values = STATISTICS.iter().find_map(|row| match row.shape {
        Shape::Labeled { metric, values, .. } if metric == statistic => Some(values),
        _ => None,
    });
    values.into_iter().flatten().map(move |&value| {
        (value, counters.get(&format!("{statistic}_{value}")).copied().unwrap_or(0))
    })
}

impl Rates {
    fn of(stats: &Stats, seconds: f64) -> Self {
        Self {
            reads: per_second(stats.reads, seconds),
            writes: per_second(stats.writes, seconds),
            read_bytes: per_second(stats.read_bytes, seconds),
            written_bytes: per_second(stats.write_bytes, seconds),
            destaged_bytes: per_second(stats.destaged_blocks * BLOCK, seconds),
        }
    }
}

impl LatencyFigures {
    fn of(operation: &str, spread: &Spread) -> Self {
        let quantile = |share| spread.quantile_micros(share).unwrap_or_default();
        Self {
            operation: operation.to_owned(),
            tier: None,
            requests: spread.count(),
            mean_micros: spread.mean_micros().unwrap_or_default(),
            p50_micros: quantile(0.5),
            p90_micros: quantile(0.9),
            p99_micros: quantile(0.99),
            p999_micros: quantile(0.999),
        }
    }
}

/// The rate of `count` in a time; 0 in no time.
fn per_second(count: u64, seconds: f64) -> f64 {
    ratio(count, 1).filter(|_| seconds > 0.0).map_or(0.0, |count| count / seconds)
}
