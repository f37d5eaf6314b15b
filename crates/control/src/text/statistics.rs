//! The statistics of a window as tables.

use forebay_block::BLOCK_SIZE;

use crate::api::{LatencyFigures, StatisticsStatus, VolumeFigures};
use crate::units::Size;

/// Microseconds in a millisecond and in a second.
const MILLI: f64 = 1e3;
const UNIT: f64 = 1e6;

/// What happened in a window: totals, then rates and latencies of each volume.
#[must_use]
pub fn statistics(all: &StatisticsStatus) -> String {
    let cache = &all.cache;
    let since = if all.window == "start" { "since the start" } else { &all.window };
    let mut out = format!("window   {since}: the last {:.0} s", all.seconds);
    if all.resolution_seconds > 0.0 {
        out += &format!(", a snapshot every {:.0} s", all.resolution_seconds);
    }
    out += &format!(
        "\nwear     {} written to the cache device, {} per day at this rate\n",
        Size(cache.written_bytes),
        Size(cache.written_bytes_per_day as u64),
    );
    out += &format!(
        "at risk  {} not on the primaries yet, limit {}; the oldest waits {:.1} s\n",
        Size(cache.dirty_bytes),
        Size(cache.dirty_limit_bytes),
        cache.oldest_dirty_seconds
    );
    let volumes = &all.volumes;
    out + &loads(volumes) + &hits(volumes) + &destaging(volumes) + &latencies(volumes)
}

fn width(volumes: &[VolumeFigures]) -> usize {
    volumes.iter().map(|volume| volume.name.len()).max().unwrap_or(0).max(6)
}

fn loads(volumes: &[VolumeFigures]) -> String {
    let width = width(volumes);
    let mut out = format!(
        "{:width$}  {:>9}  {:>9}  {:>11}  {:>11}  {:>11}  {:>10}\n",
        "VOLUME", "READS/s", "WRITES/s", "READ/s", "WRITTEN/s", "DESTAGED/s", "DIRTY"
    );
    let size = |bytes: f64| Size(bytes as u64).to_string();
    for volume in volumes {
        let rates = &volume.rates;
        out += &format!(
            "{:width$}  {:>9.1}  {:>9.1}  {:>11}  {:>11}  {:>11}  {:>10}\n",
            volume.name,
            rates.reads,
            rates.writes,
            size(rates.read_bytes),
            size(rates.written_bytes),
            size(rates.destaged_bytes),
            Size(volume.dirty_bytes).to_string(),
        );
    }
    out
}

/// Lookups by outcome, blocks by where they came from, and why the cache was bypassed.
fn hits(volumes: &[VolumeFigures]) -> String {
    let width = width(volumes);
    let mut out = format!(
        "{:width$}  {:>10}  {:>10}  {:>10}  {:>10}  {:>8}  {:>6} {:>6} {:>6}  BYPASSED\n",
        "VOLUME", "HITS", "PARTIAL", "MISSES", "BYPASSES", "HIT %", "RAM %", "SSD %", "PRIM %"
    );
    for volume in volumes {
        let reads = &volume.reads;
        let hit = reads.full_hit_percent.map_or("-".to_owned(), |share| format!("{share:.1}"));
        let count = |name: &str| volume.counters.get(name).copied().unwrap_or(0);
        let blocks = ["ram_hit_blocks", "ssd_hit_blocks", "primary_read_blocks"].map(count);
        let total: u64 = blocks.iter().sum();
        let [ram, ssd, primary] = blocks.map(|blocks| match total {
            0 => "-".to_owned(),
            _ => format!("{:.1}", 100.0 * blocks as f64 / total as f64),
        });
        let why = volume.bypassed().filter(|&(_, count)| count > 0);
        let why: Vec<String> = why.map(|(reason, count)| format!("{reason} {count}")).collect();
        let why = if why.is_empty() { "-".to_owned() } else { why.join(", ") };
        out += &format!(
            "{:width$}  {:>10}  {:>10}  {:>10}  {:>10}  {hit:>8}  {ram:>6} {ssd:>6} {primary:>6}  \
             {why}\n",
            volume.name, reads.hits, reads.partial_hits, reads.misses, reads.bypasses
        );
    }
    out
}

/// How long the dirty data has waited, and why data was destaged.
fn destaging(volumes: &[VolumeFigures]) -> String {
    let width = width(volumes);
    let shown = |parts: &mut dyn Iterator<Item = (&'static str, u64)>| {
        let parts = parts.filter(|&(_, blocks)| blocks > 0);
        let size = |blocks: u64| Size(blocks * BLOCK_SIZE as u64);
        let parts: Vec<String> =
            parts.map(|(value, blocks)| format!("{value} {}", size(blocks))).collect();
        if parts.is_empty() { "-".to_owned() } else { parts.join(", ") }
    };
    let mut out = String::new();
    for volume in volumes {
        let waits = shown(&mut volume.dirty_for());
        let why = shown(&mut volume.destaged_for());
        out += &format!("{:width$}  dirty for up to: {waits}; destaged for: {why}\n", volume.name);
    }
    out
}

fn latencies(volumes: &[VolumeFigures]) -> String {
    let width = width(volumes);
    let mut out = format!(
        "{:width$}  {:8}  {:12}  {:>10}  {:>8}  {:>8}  {:>8}  {:>8}  {:>8}\n",
        "VOLUME", "LATENCY", "OPERATION", "REQUESTS", "MEAN", "P50", "P90", "P99", "P99.9"
    );
    for volume in volumes {
        let clients = volume.latencies.iter().map(|figures| ("clients", figures));
        let tiers = volume.tiers.iter().map(|figures| (tier(figures), figures));
        let primary = volume.primary.iter().map(|figures| ("primary", figures));
        for (whose, figures) in clients.chain(tiers).chain(primary) {
            let LatencyFigures { operation, requests, mean_micros, .. } = figures;
            let times = [
                *mean_micros,
                figures.p50_micros,
                figures.p90_micros,
                figures.p99_micros,
                figures.p999_micros,
            ];
            let [mean, p50, p90, p99, p999] = times.map(time);
            out += &format!(
                "{:width$}  {whose:8}  {operation:12}  {requests:>10}  {mean:>8}  {p50:>8}  \
                 {p90:>8}  {p99:>8}  {p999:>8}\n",
                volume.name
            );
        }
    }
    out
}

/// What a client's requests waited for, as a column of latencies.
#[must_use]
pub fn tier(figures: &LatencyFigures) -> &'static str {
    match figures.tier.as_deref() {
        Some("ram") => "  RAM",
        Some("cache") => "  SSD",
        Some(_) => "  past",
        None => "clients",
    }
}

/// A duration given in microseconds, in three digits or so.
#[must_use]
pub fn time(micros: f64) -> String {
    match micros {
        _ if micros < 99.95 => format!("{micros:.1} us"),
        _ if micros < 999.5 => format!("{micros:.0} us"),
        _ if micros < 99.95 * MILLI => format!("{:.1} ms", micros / MILLI),
        _ if micros < 999.5 * MILLI => format!("{:.0} ms", micros / MILLI),
        _ => format!("{:.1} s", micros / UNIT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_unit_that_fits() {
        let shown = [0.0, 99.94, 100.4, 1000.0, 99_940.0, 123_400.0, 1_500_000.0].map(time);
        let expected = ["0.0 us", "99.9 us", "100 us", "1.0 ms", "99.9 ms", "123 ms", "1.5 s"]
            .map(str::to_owned);
        assert_eq!(shown, expected);
    }
}
