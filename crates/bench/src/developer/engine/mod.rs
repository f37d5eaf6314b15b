//! CPU time of the engine per operation.
//!
//! The engine runs alone on this thread. Requests come in batches of 32, as many as a busy event
//! loop submits per turn, and its I/O is done at once in memory, outside of the measured time.
//! Measured is the thread's CPU time within the engine, from a request's submission to its reply,
//! including the calls of `poll` and `complete`. Each figure is the best of several rounds, since
//! everything else on the machine can only add to it; the median is shown next to it.

mod harness;
pub mod steps;

use anyhow::ensure;
use forebay_engine::Stats;
use serde_json::json;

use crate::load::content::Content;
use crate::report::kept::{Row, keep};
use crate::report::table::{Table, verdict};
use harness::{BLOCK, Harness, Layout};

/// Maximum size of the index in bytes per block that is cached.
const INDEX_BYTES_MAX: f64 = 18.0;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Rounds of each measurement
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Print the figures as JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Run only measurements whose name contains this
    #[arg(long, default_value = "")]
    only: String,
}

/// The result of a measurement.
struct Figure {
    name: String,
    best: f64,
    median: f64,
    target: Option<f64>,
}

impl Figure {
    fn row(&self) -> Row {
        let name = format!("engine CPU per 4 KiB: {}", self.name);
        let row = Row::new(name, format!("{:.2} µs", self.best));
        match self.target {
            Some(target) => row.with_target(format!("<= {target}"), self.best <= target),
            None => row,
        }
    }
}

/// Runs the measurements and reports.
pub fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let mut figures = Vec::new();
    for (name, target, measure) in measurements() {
        if !name.contains(&args.only) {
            continue;
        }
        let mut rounds = measure(args.rounds)?;
        rounds.sort_by(f64::total_cmp);
        figures.push(Figure { name, best: rounds[0], median: rounds[rounds.len() / 2], target });
    }
    let mut filled = Harness::start(Layout::ssd(Content::Random))?;
    filled.fill()?;
    let index = filled.index_bytes_per_block();
    let saved = json!({
        "unit": "microseconds of CPU time",
        "batch": harness::BATCH,
        "rounds": args.rounds,
        "figures": figures.iter().map(|f| json!({
            "name": f.name, "best": f.best, "median": f.median, "target": f.target,
        })).collect::<Vec<_>>(),
        "index_bytes_per_block": index,
        "index_bytes_per_block_target": INDEX_BYTES_MAX,
    });
    if args.json {
        println!("{saved}");
        return Ok(());
    }
    let mut table = Table::new(&["operation, 4 KiB", "best, µs", "median, µs", "target", ""]);
    for figure in &figures {
        let target = figure.target.map_or(String::new(), |target| format!("<= {target}"));
        let met = figure.target.map_or(String::new(), |target| verdict(figure.best <= target));
        let (best, median) = (format!("{:.2}", figure.best), format!("{:.2}", figure.median));
        table.row([figure.name.clone(), best, median, target, met]);
    }
    table.row([
        "index, bytes per block".to_owned(),
        format!("{index:.2}"),
        String::new(),
        format!("<= {INDEX_BYTES_MAX}"),
        verdict(index <= INDEX_BYTES_MAX),
    ]);
    table.print();
    let mut rows: Vec<Row> = figures.iter().map(Figure::row).collect();
    let index = Row::new("index, bytes per cached block", format!("{index:.2}"))
        .with_target(format!("<= {INDEX_BYTES_MAX}"), index <= INDEX_BYTES_MAX);
    rows.push(index);
    keep("engine", rows, saved)
}

type Measure = Box<dyn Fn(usize) -> anyhow::Result<Vec<f64>>>;

/// All measurements: name, maximum cost in microseconds, and procedure.
fn measurements() -> Vec<(String, Option<f64>, Measure)> {
    let mut all: Vec<(String, Option<f64>, Measure)> = Vec::new();
    all.push(("read, RAM hit".to_owned(), Some(1.5), Box::new(ram_hits)));
    all.push(("read, RAM hit, compressed".to_owned(), Some(3.0), Box::new(compressed_hits)));
    for (name, content) in Content::ALL {
        let measure = move |rounds| ssd_hits(content, rounds);
        all.push((format!("read, SSD hit, {name}"), Some(3.0), Box::new(measure)));
    }
    all.push(("read, miss and admission".to_owned(), None, Box::new(misses)));
    for (name, content) in Content::ALL {
        let measure = move |rounds| writes(content, rounds);
        all.push((format!("write, {name}"), Some(6.0), Box::new(measure)));
    }
    all.push(("write, a duplicate".to_owned(), Some(6.0), Box::new(duplicate_writes)));
    all.push(("write, database rows as a delta".to_owned(), Some(6.0), Box::new(delta_writes)));
    all.push(("read, SSD hit, a delta and its base".to_owned(), Some(7.0), Box::new(delta_reads)));
    all.push(("write, its destage included".to_owned(), None, Box::new(writes_for_good)));
    all
}

/// Measures the cost of `ops` operations per round. `check` sees the statistics before and
/// after each; then everything is destaged, so that every round begins alike.
fn in_rounds(
    harness: &mut Harness,
    (rounds, ops): (usize, u64),
    mut measure: impl FnMut(&mut Harness, u64) -> anyhow::Result<f64>,
    check: impl Fn(&Stats, &Stats) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<f64>> {
    (0..rounds)
        .map(|_| {
            let before = harness.stats();
            let cost = measure(harness, ops)?;
            check(&before, &harness.stats())?;
            harness.drain()?;
            Ok(cost)
        })
        .collect()
}

fn ram_hits(rounds: usize) -> anyhow::Result<Vec<f64>> {
    let mut harness = Harness::start(Layout::ram())?;
    harness.fill()?;
    let ops = 200_000;
    in_rounds(&mut harness, (rounds, ops), Harness::reads, |before, after| {
        ensure!(after.ram_hit_blocks - before.ram_hit_blocks == ops, "all hit RAM");
        Ok(())
    })
}

/// Reads that hit RAM, many of them compressed blocks. The limit is that of an SSD hit.
fn compressed_hits(rounds: usize) -> anyhow::Result<Vec<f64>> {
    let mut harness = Harness::start(Layout::compressed_ram())?;
    harness.fill()?;
    let ops = 200_000;
    // The tier reaches its balance of compressed blocks.
    (0..5).try_for_each(|_| harness.reads(ops).map(|_| ()))?;
    in_rounds(&mut harness, (rounds, ops), Harness::reads, |before, after| {
        let hits = after.ram_hit_blocks - before.ram_hit_blocks;
        let compressed = after.ram_compressed_hit_blocks - before.ram_compressed_hit_blocks;
        println!(
            "{:.1} % of reads hit RAM, {:.1} % compressed; {:.2} bytes held for each",
            100.0 * hits as f64 / ops as f64,
            100.0 * compressed as f64 / ops as f64,
            (after.ram_blocks * BLOCK as u64) as f64 / after.ram_bytes as f64
        );
        Ok(())
    })
}

fn ssd_hits(content: Content, rounds: usize) -> anyhow::Result<Vec<f64>> {
    let mut harness = Harness::start(Layout::ssd(content))?;
    harness.fill()?;
    let ops = 100_000;
    in_rounds(&mut harness, (rounds, ops), Harness::reads, |before, after| {
        let hits = after.ssd_hit_blocks - before.ssd_hit_blocks;
        ensure!(hits > ops * 95 / 100, "{hits} of {ops} reads hit the SSD");
        ensure!(after.primary_read_blocks == before.primary_read_blocks, "none missed");
        Ok(())
    })
}

fn misses(rounds: usize) -> anyhow::Result<Vec<f64>> {
    let mut harness = Harness::start(Layout::ssd(Content::Random))?;
    let ops = 10_000u64.min(harness.layout().blocks / rounds as u64);
    let mut next = 0;
    let read = |harness: &mut Harness, ops| {
        let first = next;
        next += ops;
        harness.reads_in_turn(first, ops)
    };
    in_rounds(&mut harness, (rounds, ops), read, |before, after| {
        ensure!(after.misses - before.misses == ops, "all missed");
        let admitted = after.admitted_blocks - before.admitted_blocks;
        ensure!(admitted > ops * 9 / 10, "{admitted} of {ops} were admitted: {after:?}");
        Ok(())
    })
}

/// Writes of cached blocks into a log with room, up to the acknowledgment.
fn writes(content: Content, rounds: usize) -> anyhow::Result<Vec<f64>> {
    let mut harness = Harness::start(Layout::ssd(content))?;
    harness.fill()?;
    let ops = 20_000;
    in_rounds(&mut harness, (rounds, ops), Harness::writes, |before, after| {
        ensure!(after.writes - before.writes == ops && after.throttled_nanos == 0);
        ensure!(after.duplicate_blocks == 0, "every block is written by itself");
        Ok(())
    })
}

/// Writes of blocks equal to others written just before.
fn duplicate_writes(rounds: usize) -> anyhow::Result<Vec<f64>> {
    let mut harness = Harness::start(Layout::ssd(Content::Database))?;
    harness.fill()?;
    let ops = 10_016;
    in_rounds(&mut harness, (rounds, ops), Harness::repeated_writes, |before, after| {
        let found = after.duplicate_blocks - before.duplicate_blocks;
        ensure!(found > ops * 95 / 100, "{found} of {ops} were found");
        Ok(())
    })
}

/// Writes of blocks whose older version is in RAM and differs little.
fn delta_writes(rounds: usize) -> anyhow::Result<Vec<f64>> {
    let mut harness = Harness::start(Layout::rewrites(160 << 20))?;
    harness.fill()?;
    let ops = 20_000;
    in_rounds(&mut harness, (rounds, ops), Harness::writes, |before, after| {
        let deltas = after.delta_blocks - before.delta_blocks;
        ensure!(deltas > ops * 95 / 100, "{deltas} of {ops} became deltas");
        let (bytes, log) = (
            (after.delta_bytes - before.delta_bytes) / deltas,
            (after.log_bytes - before.log_bytes) / ops,
        );
        println!("a delta of {bytes} bytes; {log} bytes of log for each write");
        Ok(())
    })
}

/// Reads of blocks stored as deltas. The limit is that of an SSD hit plus 4 microseconds.
fn delta_reads(rounds: usize) -> anyhow::Result<Vec<f64>> {
    let mut harness = Harness::start(Layout::rewrites(8 << 20))?;
    harness.fill_twice()?;
    let (ops, blocks) = (50_000, harness.layout().blocks);
    in_rounds(&mut harness, (rounds, ops), Harness::reads, |before, after| {
        ensure!(before.associate_blocks > blocks * 9 / 10, "{before:?}");
        let hits = after.ssd_hit_blocks - before.ssd_hit_blocks;
        ensure!(hits > ops * 80 / 100, "{hits} of {ops} reads hit the SSD");
        Ok(())
    })
}

/// Writes including their later cost: destaging, and reclaiming the blocks that they displaced.
fn writes_for_good(rounds: usize) -> anyhow::Result<Vec<f64>> {
    let mut harness = Harness::start(Layout::ssd(Content::Random))?;
    harness.fill()?;
    let ops = 40_000;
    let write = |harness: &mut Harness, ops| {
        let before = harness.cpu();
        harness.writes(ops)?;
        harness.drain()?;
        Ok((harness.cpu() - before).as_nanos() as f64 / 1e3 / ops as f64)
    };
    in_rounds(&mut harness, (rounds, ops), write, |_, _| Ok(()))
}

const _: () = assert!(BLOCK == 4096);
