//! The statistics as Prometheus reads them: those of [`STATISTICS`] for each shard, then levels of
//! the pool, volumes and latencies.
//!
//! Conservation: `lookups = hits + partial_hits + misses + bypasses` at any moment, in every shard
//! and therefore in the sums; a shard's counters are read in one turn of its thread.

use std::fmt::Write;

use forebay_engine::{Health, Kind, PrimaryErrors, STATISTICS, Shape, State, Statistic, Stats};

use forebay_policy::RuleCount;

use crate::pool::{Latency, PoolSnapshot, VolumeSnapshot};

/// The name of a statistic in Prometheus.
#[must_use]
pub fn exposed_name(row: &Statistic) -> String {
    let (name, is_number) = match row.shape {
        Shape::One => (row.name, true),
        Shape::Labeled { metric, .. } => (metric, true),
        Shape::Buckets { metric, .. } => (metric, false),
    };
    let suffix = if is_number && row.kind == Kind::Counter { "_total" } else { "" };
    format!("forebay_{name}{suffix}")
}

/// All metrics in Prometheus' text format, version 0.0.4.
#[must_use]
pub fn exposition(pool: &PoolSnapshot) -> String {
    let mut out = String::with_capacity(16 << 10);
    for row in STATISTICS {
        let name = exposed_name(row);
        head(&mut out, &name, kind(row), &row.help());
        for (number, shard) in pool.shards.iter().enumerate() {
            statistic(&mut out, &name, row, ("shard", &number.to_string()), &shard.stats);
        }
    }
    levels(&mut out, pool);
    volumes(&mut out, pool);
    rules(&mut out, pool);
    let help = "Time from a client's request to its answer.";
    latencies(&mut out, "forebay_request_seconds", help, &pool.latencies);
    let help = "The same, of reads and writes, by the slowest tier that they waited for.";
    latencies(&mut out, "forebay_tier_request_seconds", help, &pool.tier_latencies);
    let help = "Time that a volume's primary took for a request of the cache.";
    latencies(&mut out, "forebay_primary_request_seconds", help, &pool.primary_latencies);
    out
}

/// The kind of metric that a statistic is in Prometheus.
fn kind(row: &Statistic) -> &'static str {
    match (row.shape, row.kind) {
        (Shape::Buckets { .. }, _) => "histogram",
        (_, Kind::Counter) => "counter",
        (_, Kind::Level | Kind::Greatest) => "gauge",
    }
}

/// The name of a volume's statistic in Prometheus; `None` for lookups, which have one metric.
#[must_use]
pub fn volume_name(row: &Statistic) -> Option<String> {
    let of_lookups = ["lookups", "hits", "partial_hits", "misses", "bypasses"].contains(&row.name);
    let own = exposed_name(row);
    let own = own.strip_prefix("forebay_").unwrap_or(&own);
    (row.by_volume && !of_lookups).then(|| format!("forebay_volume_{own}"))
}

/// The numbers of a statistic in one shard or volume.
fn statistic(out: &mut String, name: &str, row: &Statistic, whose: (&str, &str), stats: &Stats) {
    let numbers = row.of(stats).iter().copied();
    match row.shape {
        Shape::One => numbers.for_each(|value| line(out, name, &[whose], value)),
        Shape::Labeled { label, values, .. } => {
            for (of, value) in values.iter().zip(numbers) {
                line(out, name, &[whose, (label, of)], value);
            }
        }
        Shape::Buckets { bounds, sum, .. } => {
            let mut count = 0;
            for (most, of_bucket) in bounds.iter().zip(numbers) {
                count += of_bucket;
                let labels = [whose, ("le", &most.to_string())];
                line(out, &format!("{name}_bucket"), &labels, count);
            }
            line(out, &format!("{name}_bucket"), &[whose, ("le", "+Inf")], count);
            line(out, &format!("{name}_sum"), &[whose], sum(stats));
            line(out, &format!("{name}_count"), &[whose], count);
        }
    }
}

/// The metrics of each volume, over all shards.
fn volumes(out: &mut String, pool: &PoolSnapshot) {
    let name = "forebay_volume_lookups_total";
    head(out, name, "counter", "Read requests of a volume, by how much of them was cached.");
    for volume in &pool.volumes {
        let Stats { hits, partial_hits, misses, bypasses, .. } = volume.state.stats;
        let results =
            [("hit", hits), ("partial", partial_hits), ("miss", misses), ("bypass", bypasses)];
        for (result, count) in results {
            line(out, name, &[("volume", &volume.name), ("result", result)], count);
        }
    }
    for row in STATISTICS {
        let Some(name) = volume_name(row) else { continue };
        head(out, &name, kind(row), &row.help());
        for volume in &pool.volumes {
            statistic(out, &name, row, ("volume", &volume.name), &volume.state.stats);
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
    let help = "1 while a volume's primary answers, 0 while it is away or silent.";
    let answers = |volume: &VolumeSnapshot| u64::from(volume.primary_health.answers());
    level("forebay_volume_primary_up", help, answers);
    let help = "Blocks of a volume newer than on its primary.";
    level("forebay_volume_dirty_blocks", help, |volume| volume.state.dirty_blocks);
    let help = "Dirty blocks of a volume at which its writes wait.";
    level("forebay_volume_dirty_limit_blocks", help, |volume| volume.state.dirty_limit_blocks);
    let help =
        "Blocks of a volume down to which no other one displaces any; 0 without a guarantee.";
    let guarantee = |volume: &VolumeSnapshot| volume.state.cache_guarantee_blocks;
    level("forebay_volume_cache_guarantee_blocks", help, guarantee);
    let help = "Blocks of a volume at which its new blocks displace its own; 0 without a limit.";
    let limit = |volume: &VolumeSnapshot| volume.state.cache_limit_blocks.unwrap_or(0);
    level("forebay_volume_cache_limit_blocks", help, limit);
    let help = "Blocks of a volume that cannot be read back any more.";
    level("forebay_volume_lost_blocks", help, |volume| volume.state.lost_blocks);
}

/// The requests that each rule has decided on.
fn rules(out: &mut String, pool: &PoolSnapshot) {
    if pool.rules.is_empty() {
        return;
    }
    let mut counter = |name, help, of: fn(&RuleCount) -> u64| {
        head(out, name, "counter", help);
        for (rule, count) in &pool.rules {
            line(out, name, &[("rule", rule)], of(count));
        }
    };
    let help = "Reads and writes that a rule has decided on.";
    counter("forebay_rule_requests_total", help, |count| count.requests);
    counter("forebay_rule_bytes_total", "Their bytes.", |count| count.bytes);
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
    let help = "Bytes per day that may be written to the cache device; 0 without a budget.";
    head(out, "forebay_wear_budget_bytes", "gauge", help);
    line(out, "forebay_wear_budget_bytes", &[], pool.wear_budget.unwrap_or(0));
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

fn latencies(out: &mut String, name: &str, help: &str, latencies: &[Latency]) {
    if latencies.is_empty() {
        return;
    }
    head(out, name, "histogram", help);
    for latency in latencies {
        let mut labels =
            vec![("volume", latency.volume.as_str()), ("operation", latency.operation)];
        labels.extend(latency.tier.map(|tier| ("tier", tier)));
        let bucket = format!("{name}_bucket");
        let up_to = |bound: &str, count, out: &mut String| {
            let labels: Vec<_> = labels.iter().copied().chain([("le", bound)]).collect();
            line(out, &bucket, &labels, count);
        };
        for &(bound, count) in &latency.at_most {
            up_to(&seconds(bound), count, out);
        }
        up_to("+Inf", latency.count, out);
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
    fn labels_are_escaped() {
        let mut out = String::new();
        line(&mut out, "m", &[("path", "a\"b\\c\nd")], 1);
        assert_eq!(out, "m{path=\"a\\\"b\\\\c\\nd\"} 1\n");
        assert_eq!(seconds(1_500_000_000), "1.500000000");
    }
}
