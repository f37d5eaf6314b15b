//! The report of `forebay trace simulate`: a row for each cache, as a table or JSON.

use forebay_control::units::Size;
use forebay_trace::{Misses, Outcome, References, Textbook};
use serde::Serialize;

use super::jobs::Job;

/// Smallest gap from LRU to the optimum of which a share says something.
const GAP_MIN: f64 = 0.01;

/// The parameters and results of the simulations.
#[derive(Serialize)]
pub struct Report {
    pub trace: String,
    pub format: &'static str,
    pub requests: u64,
    /// Requests dropped during the recording, according to the trace.
    pub dropped: u64,
    pub footprint_bytes: u64,
    pub results: Vec<Row>,
}

/// The result of one cache.
#[derive(Serialize)]
pub struct Row {
    cache_bytes: u64,
    /// Size of the cache, in percent of the footprint.
    cache_percent: f64,
    ram_bytes: u64,
    policy: &'static str,
    /// The policy of a paper, in a cache of `cache_bytes` and `ram_bytes` together.
    textbook: bool,
    /// The layout's policy unless another is set.
    default: bool,
    layout: Option<&'static str>,
    read_block_miss_ratio: f64,
    read_request_miss_ratio: Option<f64>,
    reference_miss_ratio: f64,
    /// Share of the read misses between LRU and the optimum that is avoided.
    gap_closed: Option<f64>,
    #[serde(flatten)]
    writes: Option<Writes>,
}

/// What a textbook policy knows nothing of.
#[derive(Serialize)]
struct Writes {
    ram_hit_blocks: u64,
    read_blocks: u64,
    write_blocks: u64,
    bypassed_blocks: u64,
    ssd_bytes: u64,
    logged_bytes: u64,
    admitted_bytes: u64,
    copied_bytes: u64,
    moved_bytes: u64,
    mapping_bytes: u64,
    live_share: f64,
    entries: u64,
}

impl Row {
    /// The row of a cache with one of Forebay's layouts.
    pub fn of_layout(job: &Job, footprint: u64, outcome: &Outcome) -> Self {
        Self {
            cache_bytes: job.cache_bytes,
            cache_percent: percent(job.cache_bytes, footprint),
            ram_bytes: job.ram_bytes,
            policy: job.kind.policy(),
            textbook: false,
            default: job.kind.is_default(),
            layout: Some(job.kind.layout()),
            read_block_miss_ratio: outcome.block_miss_ratio(),
            read_request_miss_ratio: Some(outcome.request_miss_ratio()),
            reference_miss_ratio: outcome.reference_miss_ratio(),
            gap_closed: None,
            writes: Some(Writes {
                ram_hit_blocks: outcome.ram_hit_blocks,
                read_blocks: outcome.read_blocks,
                write_blocks: outcome.write_blocks,
                bypassed_blocks: outcome.bypassed_blocks,
                ssd_bytes: outcome.ssd_bytes(),
                logged_bytes: outcome.logged_bytes,
                admitted_bytes: outcome.admitted_bytes,
                copied_bytes: outcome.copied_bytes,
                moved_bytes: outcome.moved_bytes,
                mapping_bytes: outcome.mapping_bytes,
                live_share: outcome.live_share,
                entries: outcome.entries,
            }),
        }
    }

    /// The row of a textbook policy in a cache of that size.
    pub fn of_textbook(
        (cache_bytes, ram_bytes): (u64, u64),
        policy: Textbook,
        trace: &References,
        misses: Misses,
    ) -> Self {
        let ratio = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let footprint = u64::from(trace.blocks()) * forebay_block::BLOCK_SIZE as u64;
        Self {
            cache_bytes,
            cache_percent: percent(cache_bytes, footprint),
            ram_bytes,
            policy: policy.name(),
            textbook: true,
            default: false,
            layout: None,
            read_block_miss_ratio: ratio(misses.reads, trace.reads()),
            read_request_miss_ratio: None,
            reference_miss_ratio: ratio(misses.references, trace.len()),
            gap_closed: None,
            writes: None,
        }
    }
}

fn percent(bytes: u64, footprint: u64) -> f64 {
    100.0 * bytes as f64 / footprint.max(1) as f64
}

impl Report {
    /// Computes the share of the gap from LRU to the optimum that each cache closes.
    pub fn close_gaps(&mut self) {
        let missed = |rows: &[Row], like: &Row, policy: Textbook| {
            let size = (like.cache_bytes, like.ram_bytes);
            let same = |row: &&Row| row.textbook && (row.cache_bytes, row.ram_bytes) == size;
            let found = rows.iter().filter(same).find(|row| row.policy == policy.name());
            found.map(|row| row.read_block_miss_ratio)
        };
        let shares = self.results.iter().map(|row| {
            let lru = missed(&self.results, row, Textbook::Lru)?;
            let gap = lru - missed(&self.results, row, Textbook::Optimum)?;
            (gap >= GAP_MIN).then(|| (lru - row.read_block_miss_ratio) / gap)
        });
        let shares: Vec<_> = shares.collect();
        for (row, share) in self.results.iter_mut().zip(shares) {
            row.gap_closed = share;
        }
    }

    /// The table.
    pub fn table(&self) -> String {
        let Self { trace, format, requests, .. } = self;
        let touched = Size(self.footprint_bytes);
        let mut text = format!("{trace}: {format}, {requests} requests, {touched} touched\n");
        if self.dropped > 0 {
            text += &format!("{} more requests were dropped when it was recorded\n", self.dropped);
        }
        text += "cache            layout        policy      read misses        all    gap  \
                 SSD written  clients'   admitted     copied      moved    mapping  live \
                 entries\n";
        text += &format!("{:43}blocks requests   misses closed\n", "");
        self.results.iter().for_each(|row| text += &line(row));
        text
    }
}

fn line(row: &Row) -> String {
    let size = format!("{} ({:.1}%)", Size(row.cache_bytes), row.cache_percent);
    let share = |share: Option<f64>, places: usize| {
        share.map_or_else(|| "-".to_string(), |share| format!("{share:.places$}"))
    };
    let mut text = format!(
        "{size:<16} {:<13} {:<10} {:>6.4}   {:>6}   {:>6.4} {:>6}",
        row.layout.unwrap_or("textbook"),
        row.policy,
        row.read_block_miss_ratio,
        share(row.read_request_miss_ratio, 4),
        row.reference_miss_ratio,
        share(row.gap_closed, 2),
    );
    if let Some(writes) = &row.writes {
        let rounded = |bytes: u64| Size(bytes).to_string();
        text += &format!(
            " {:>12} {:>9} {:>10} {:>10} {:>10} {:>10} {:>5.2} {:>8}",
            rounded(writes.ssd_bytes),
            rounded(writes.logged_bytes),
            rounded(writes.admitted_bytes),
            rounded(writes.copied_bytes),
            rounded(writes.moved_bytes),
            rounded(writes.mapping_bytes),
            writes.live_share,
            writes.entries,
        );
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(policy: &'static str, textbook: bool, misses: f64) -> Row {
        Row {
            cache_bytes: 1,
            cache_percent: 1.0,
            ram_bytes: 1,
            policy,
            textbook,
            default: false,
            layout: None,
            read_block_miss_ratio: misses,
            read_request_miss_ratio: None,
            reference_miss_ratio: misses,
            gap_closed: None,
            writes: None,
        }
    }

    fn shares(rows: Vec<Row>) -> Vec<Option<f64>> {
        let (trace, format) = (String::new(), "csv");
        let mut report =
            Report { trace, format, requests: 1, dropped: 0, footprint_bytes: 1, results: rows };
        report.close_gaps();
        let share = |row: &Row| row.gap_closed.map(|share| (share * 100.0).round() / 100.0);
        report.results.iter().map(share).collect()
    }

    #[test]
    fn the_gap_is_between_lru_and_the_optimum() {
        let bounds = || vec![row("LRU", true, 0.5), row("optimum", true, 0.3)];
        let mut rows = bounds();
        rows.extend([row("lru", false, 0.45), row("fifo", false, 0.6)]);
        assert_eq!(shares(rows), [Some(0.0), Some(1.0), Some(0.25), Some(-0.5)]);
        let mut other = bounds();
        other.push(Row { cache_bytes: 2, ..row("lru", false, 0.4) });
        assert_eq!(shares(other)[2], None, "of another size");
        let close = vec![row("LRU", true, 0.305), row("optimum", true, 0.3)];
        assert_eq!(shares(close), [None, None], "too close");
    }
}
