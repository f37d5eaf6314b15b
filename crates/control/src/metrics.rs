//! The table of counters, and its output for Prometheus. Every display of a counter to people uses
//! this table, so that a name means the same everywhere.
//!
//! Conservation: `lookups = hits + partial_hits + misses + bypasses` at any moment, in every shard
//! and therefore in the sums; a shard's counters are read in one turn of its thread.

use std::fmt::Write;

use forebay_engine::{DELTA_SIZES, Health, Lookups, PrimaryErrors, State, Stats};

use crate::pool::{Latency, PoolSnapshot, VolumeSnapshot};

/// How a metric behaves, and how its values in shards are combined.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MetricKind {
    /// Never decreases; the pool's value is the sum over shards.
    Counter,
    /// A level; the pool's value is the sum over shards.
    Gauge,
    /// A level; the pool's value is the maximum over shards.
    Greatest,
}

/// One counter or level of a shard.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name. For Prometheus, `forebay_` is prepended and, for counters, `_total` appended.
    pub name: &'static str,
    /// What it counts, in one line.
    pub help: &'static str,
    /// Counter or level.
    pub kind: MetricKind,
    /// Reads its value.
    pub get: fn(&Stats) -> u64,
}

impl Metric {
    /// The pool's value.
    #[must_use]
    pub fn of_pool<'a>(&self, shards: impl IntoIterator<Item = &'a Stats>) -> u64 {
        let values = shards.into_iter().map(self.get);
        match self.kind {
            MetricKind::Counter | MetricKind::Gauge => values.sum(),
            MetricKind::Greatest => values.max().unwrap_or(0),
        }
    }

    /// Its name in the Prometheus format.
    #[must_use]
    pub fn exposed_name(&self) -> String {
        let suffix = if self.kind == MetricKind::Counter { "_total" } else { "" };
        format!("forebay_{}{suffix}", self.name)
    }
}

macro_rules! table {
    ($($kind:ident $name:ident $help:literal)*) => {
        &[$(Metric {
            name: stringify!($name),
            help: $help,
            kind: MetricKind::$kind,
            get: |stats| stats.$name,
        }),*]
    };
}

/// Every counter and level of a shard.
pub const METRICS: &[Metric] = table![
    Counter lookups "Read requests at a shard: hits + partial hits + misses + bypasses."
    Counter hits "Read requests whose blocks were all cached."
    Counter partial_hits "Read requests of which some blocks, but not all, were cached."
    Counter misses "Read requests of which no block was cached."
    Counter bypasses "Read requests that skipped the cache."
    Counter ram_hit_blocks "Blocks read from RAM."
    Counter ssd_hit_blocks "Blocks read from the cache device."
    Counter primary_read_blocks "Blocks read from a primary for clients."
    Counter ram_compressed_hit_blocks "Blocks found compressed in RAM, for reads and for deltas."
    Counter ram_compression_tries "Blocks compressed when their place in RAM was needed."
    Counter ram_compression_refusals "Blocks dropped from RAM because the CPU budget was used up."
    Counter reads "Read requests of clients, as pieces at a shard."
    Counter read_bytes "Bytes that clients read."
    Counter writes "Write requests of clients, as pieces at a shard."
    Counter write_bytes "Bytes that clients wrote."
    Counter flushes "Flush requests of clients, one for each shard."
    Counter discards "Discard requests of clients, as pieces at a shard."
    Counter admitted_blocks "Blocks that entered the cache device after a miss."
    Counter unadmitted_blocks "Blocks that the eviction policy kept out after a miss."
    Counter read_around_blocks "Blocks read from a primary together with missed ones."
    Counter stale_fills "Fills dropped because a write to the block came first."
    Counter log_records "Records written to the cache device."
    Counter log_bytes "Bytes written to the cache device."
    Counter log_blocks "Blocks put into the log: by clients, after misses, by reclaim."
    Counter copied_blocks "Blocks copied forward when a segment was reclaimed."
    Counter dense_blocks "Blocks that reclaim rewrote in a denser form, by zstd."
    Counter duplicate_blocks "Blocks written that share the payload of another block."
    Counter delta_blocks "Blocks written to the cache device as deltas against their older version."
    Counter delta_bytes "Bytes of the deltas written to the cache device."
    Counter delta_tries "Blocks encoded to see whether a delta is worth storing."
    Counter dense_tries "Blocks encoded to see whether a denser form is worth storing."
    Counter rebased_blocks "Blocks written whole again when their base was reclaimed."
    Counter similar_searches "Blocks for which a similar one was looked for."
    Counter similar_tries "Blocks encoded against a similar one to see whether that pays."
    Counter similar_written "Blocks written to the cache device against similar ones."
    Counter similar_bytes "Bytes of the blocks written against similar ones."
    Counter evicted_blocks "Clean blocks dropped to make room."
    Counter segments_reclaimed "Segments freed."
    Counter destaged_blocks "Dirty blocks written to a primary."
    Counter destage_writes "Writes to a primary that destaged dirty blocks."
    Counter cache_flushes "Flushes of the cache device."
    Counter primary_flushes "Flushes of a primary."
    Counter corrupt_clean "Clean blocks that failed their checksum and were read again."
    Counter corrupt_dirty "Dirty blocks that failed their checksum: data that is lost."
    Counter cache_errors "Requests that the cache device failed."
    Counter primary_errors "Requests that a primary failed."
    Counter given_up_writes "Writes failed at the dirty limit: the primary was away for too long."
    Gauge slow_cache_ios "Requests that the cache device has not answered for a long time."
    Counter cpu_nanos "Nanoseconds of CPU time of the shard's thread."
    Counter throttled_nanos "Nanoseconds that writes were held back near the dirty limit."
    Gauge cached_blocks "Blocks in the cache."
    Gauge dirty_blocks "Blocks newer than on the primary."
    Gauge dirty_limit_blocks "Dirty blocks at which writes wait for destaging."
    Gauge fenced_blocks "Dirty blocks that cannot be read back any more."
    Gauge ram_blocks "Blocks held in RAM."
    Gauge ram_bytes "Bytes of RAM that the blocks held there take."
    Gauge ram_compressed_blocks "Blocks held in RAM in compressed form."
    Gauge ram_compressed_bytes "Bytes of RAM that the compressed blocks take."
    Gauge associate_blocks "Blocks stored as deltas, or against similar ones."
    Gauge similar_blocks "Blocks stored against similar ones."
    Gauge raw_blocks "Blocks, and bases of deltas, stored as they are."
    Gauge lz4_blocks "Blocks, and bases of deltas, stored as LZ4."
    Gauge zstd_blocks "Blocks, and bases of deltas, stored as zstd."
    Gauge zero_blocks "Zero blocks, stored without a payload."
    Gauge payload_bytes "Bytes that the blocks in the cache take, compressed or as deltas."
    Gauge log_used_bytes "Bytes of segments that hold anything: payloads, headers, garbage."
    Gauge index_bytes "Bytes of RAM that the index takes."
    Gauge index_capacity "Blocks that the index has room for."
    Gauge segments "Segments on the cache device."
    Gauge segments_free "Segments with nothing in them."
    Gauge requests_in_flight "Requests of clients not yet answered."
    Greatest oldest_dirty_nanos "Age of the oldest dirty block in nanoseconds."
];

/// Names of the bypass reasons, in the order of `Stats::bypassed_by`.
pub const BYPASS_REASONS: [&str; forebay_engine::Bypass::COUNT] =
    ["sequential", "mode", "degraded"];

/// All metrics in Prometheus' text format, version 0.0.4.
#[must_use]
pub fn exposition(pool: &PoolSnapshot) -> String {
    let mut out = String::with_capacity(16 << 10);
    for metric in METRICS {
        let kind = if metric.kind == MetricKind::Counter { "counter" } else { "gauge" };
        let name = metric.exposed_name();
        head(&mut out, &name, kind, metric.help);
        for (number, shard) in pool.shards.iter().enumerate() {
            line(&mut out, &name, &[("shard", &number.to_string())], (metric.get)(&shard.stats));
        }
    }
    let name = "forebay_bypassed_total";
    head(&mut out, name, "counter", "Reads and writes that skipped the cache, by reason.");
    for (number, shard) in pool.shards.iter().enumerate() {
        for (reason, count) in BYPASS_REASONS.iter().zip(shard.stats.bypassed_by) {
            line(&mut out, name, &[("shard", &number.to_string()), ("reason", reason)], count);
        }
    }
    delta_sizes(&mut out, pool);
    levels(&mut out, pool);
    volumes(&mut out, pool);
    latencies(&mut out, &pool.latencies);
    out
}

/// The metrics of each volume, over all shards.
fn volumes(out: &mut String, pool: &PoolSnapshot) {
    let name = "forebay_volume_lookups_total";
    head(out, name, "counter", "Read requests of a volume, by how much of them was cached.");
    for volume in &pool.volumes {
        let Lookups { hits, partial_hits, misses, bypasses } = volume.state.lookups;
        let results =
            [("hit", hits), ("partial", partial_hits), ("miss", misses), ("bypass", bypasses)];
        for (result, count) in results {
            line(out, name, &[("volume", &volume.name), ("result", result)], count);
        }
    }
    let name = "forebay_volume_primary_errors_total";
    head(out, name, "counter", "Requests that a volume's primary failed.");
    for volume in &pool.volumes {
        let PrimaryErrors { reads, writes, flushes } = volume.state.primary.errors;
        for (operation, count) in [("read", reads), ("write", writes), ("flush", flushes)] {
            line(out, name, &[("volume", &volume.name), ("operation", operation)], count);
        }
    }
    let mut level = |name, help, of: fn(&VolumeSnapshot) -> u64| {
        head(out, name, "gauge", help);
        for volume in &pool.volumes {
            line(out, name, &[("volume", &volume.name)], of(volume));
        }
    };
    let help = "1 while a volume's primary answers, 0 while it is away.";
    let answers = |volume: &VolumeSnapshot| u64::from(volume.primary_health.away.is_none());
    level("forebay_volume_primary_up", help, answers);
    let help = "Blocks of a volume newer than on its primary.";
    level("forebay_volume_dirty_blocks", help, |volume| volume.state.dirty_blocks);
    let help = "Blocks of a volume that cannot be read back any more.";
    level("forebay_volume_lost_blocks", help, |volume| volume.state.lost_blocks);
}

fn delta_sizes(out: &mut String, pool: &PoolSnapshot) {
    let name = "forebay_delta_size_bytes";
    head(out, name, "histogram", "Sizes of the deltas written.");
    for (number, shard) in pool.shards.iter().enumerate() {
        let (stats, number) = (&shard.stats, number.to_string());
        let mut count = 0;
        for (most, deltas) in DELTA_SIZES.iter().zip(stats.deltas_by_size) {
            count += deltas;
            let labels = [("shard", number.as_str()), ("le", &most.to_string())];
            line(out, &format!("{name}_bucket"), &labels, count);
        }
        let shard = [("shard", number.as_str())];
        line(out, &format!("{name}_bucket"), &[shard[0], ("le", "+Inf")], count);
        line(out, &format!("{name}_sum"), &shard, stats.delta_bytes);
        line(out, &format!("{name}_count"), &shard, count);
    }
}

fn levels(out: &mut String, pool: &PoolSnapshot) {
    head(out, "forebay_up", "gauge", "1 for each shard that serves.");
    for (number, shard) in pool.shards.iter().enumerate() {
        let serves = u64::from(shard.state == State::Serving);
        line(out, "forebay_up", &[("shard", &number.to_string())], serves);
    }
    head(out, "forebay_cache_good", "gauge", "1 while the shard's cache device takes writes.");
    for (number, shard) in pool.shards.iter().enumerate() {
        let good = u64::from(shard.health == Health::Good);
        line(out, "forebay_cache_good", &[("shard", &number.to_string())], good);
    }
    head(out, "forebay_cache_bytes", "gauge", "Bytes of the cache device in use.");
    line(out, "forebay_cache_bytes", &[("path", &pool.cache_path)], pool.cache_bytes);
    head(out, "forebay_clients", "gauge", "Clients connected.");
    line(out, "forebay_clients", &[], pool.clients);
    let refused = "forebay_clients_refused_total";
    head(out, refused, "counter", "Clients refused because the limit of clients was reached.");
    line(out, refused, &[], pool.clients_refused);
    head(out, "forebay_uptime_seconds", "gauge", "Seconds since the server was ready.");
    line(out, "forebay_uptime_seconds", &[], pool.uptime.as_secs());
    head(out, "forebay_volume_bytes", "gauge", "Size of a volume, and its mode.");
    for volume in &pool.volumes {
        let labels = [("volume", volume.name.as_str()), ("mode", volume.mode.name())];
        line(out, "forebay_volume_bytes", &labels, volume.size);
    }
}

fn latencies(out: &mut String, latencies: &[Latency]) {
    if latencies.is_empty() {
        return;
    }
    let name = "forebay_request_seconds";
    head(out, name, "histogram", "Time from a client's request to its answer.");
    for latency in latencies {
        let labels = [("volume", latency.volume.as_str()), ("operation", latency.operation)];
        let bucket = format!("{name}_bucket");
        for &(bound, count) in &latency.at_most {
            line(out, &bucket, &[labels[0], labels[1], ("le", &seconds(bound))], count);
        }
        line(out, &bucket, &[labels[0], labels[1], ("le", "+Inf")], latency.count);
        let sum = seconds(latency.sum_nanos);
        put(out, &format!("{name}_sum"), &labels, &sum);
        line(out, &format!("{name}_count"), &labels, latency.count);
    }
}

fn seconds(nanos: u64) -> String {
    format!("{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000)
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("a string takes it");
}

fn line(out: &mut String, name: &str, labels: &[(&str, &str)], value: u64) {
    put(out, name, labels, &value.to_string());
}

fn put(out: &mut String, name: &str, labels: &[(&str, &str)], value: &str) {
    out.push_str(name);
    for (number, (label, text)) in labels.iter().enumerate() {
        let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let before = if number == 0 { '{' } else { ',' };
        write!(out, "{before}{label}=\"{text}\"").expect("a string takes it");
    }
    if !labels.is_empty() {
        out.push('}');
    }
    writeln!(out, " {value}").expect("a string takes it");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_is_in_the_table() {
        // The debug output of Stats lists all its fields, also those missing in the table.
        let listed = format!("{:?}", Stats::default());
        let fields: Vec<&str> =
            listed.split([' ', '{', ',']).filter_map(|word| word.strip_suffix(':')).collect();
        for field in &fields {
            let known = METRICS.iter().any(|metric| metric.name == *field);
            let lists = ["bypassed_by", "deltas_by_size"];
            assert!(known || lists.contains(field), "{field} is not in the table");
        }
        assert_eq!(fields.len(), METRICS.len() + 2);
    }

    #[test]
    fn shards_add_up_or_the_greatest_counts() {
        let a = Stats { hits: 3, oldest_dirty_nanos: 7, ..Stats::default() };
        let b = Stats { hits: 4, oldest_dirty_nanos: 5, ..Stats::default() };
        let of = |name: &str| {
            let metric = METRICS.iter().find(|metric| metric.name == name);
            metric.expect("it is in the table").of_pool([&a, &b])
        };
        assert_eq!((of("hits"), of("oldest_dirty_nanos")), (7, 7));
    }

    #[test]
    fn labels_are_escaped() {
        let mut out = String::new();
        line(&mut out, "m", &[("path", "a\"b\\c\nd")], 1);
        assert_eq!(out, "m{path=\"a\\\"b\\\\c\\nd\"} 1\n");
        assert_eq!(seconds(1_500_000_000), "1.500000000");
    }
}
