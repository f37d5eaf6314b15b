//! `forebay trace simulate`: every policy at every size in one pass over the trace. The caches are
//! distributed over the processors; each gets all requests, in batches.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use anyhow::{Context, ensure};
use forebay_control::units::Size;
use forebay_engine::Eviction;
use forebay_trace::{Footprint, Outcome, SimulateConfig, Simulator, TraceRequest};
use serde::Serialize;

use super::args::{CacheSize, SimulateArgs};
use super::input::{self, in_trace};
use crate::output;

/// Requests in a batch, and most batches that wait.
const BATCH: usize = 4096;
const BATCHES_MAX: usize = 8;

/// The parameters and results of the simulations.
#[derive(Serialize)]
struct Report {
    trace: String,
    format: &'static str,
    requests: u64,
    /// Requests dropped during the recording, according to the trace.
    dropped: u64,
    footprint_bytes: u64,
    results: Vec<Row>,
}

/// The result of one cache.
#[derive(Serialize)]
struct Row {
    cache_bytes: u64,
    /// Size of the cache, in percent of the footprint.
    cache_percent: f64,
    ram_bytes: u64,
    policy: &'static str,
    read_block_miss_ratio: f64,
    read_request_miss_ratio: f64,
    reference_miss_ratio: f64,
    ram_hit_blocks: u64,
    read_blocks: u64,
    write_blocks: u64,
    bypassed_blocks: u64,
    ssd_bytes: u64,
    logged_bytes: u64,
    admitted_bytes: u64,
    copied_bytes: u64,
}

impl Row {
    fn new(config: &SimulateConfig, footprint: u64, outcome: &Outcome) -> Self {
        let bytes = |blocks: u64| blocks * forebay_block::BLOCK_SIZE as u64;
        Self {
            cache_bytes: config.cache_bytes,
            cache_percent: 100.0 * config.cache_bytes as f64 / footprint.max(1) as f64,
            ram_bytes: config.ram_bytes,
            policy: config.eviction.name(),
            read_block_miss_ratio: outcome.block_miss_ratio(),
            read_request_miss_ratio: outcome.request_miss_ratio(),
            reference_miss_ratio: outcome.reference_miss_ratio(),
            ram_hit_blocks: outcome.ram_hit_blocks,
            read_blocks: outcome.read_blocks,
            write_blocks: outcome.write_blocks,
            bypassed_blocks: outcome.bypassed_blocks,
            ssd_bytes: outcome.ssd_bytes(),
            logged_bytes: bytes(outcome.logged_blocks),
            admitted_bytes: bytes(outcome.admitted_blocks),
            copied_bytes: bytes(outcome.copied_blocks),
        }
    }
}

/// Simulates all caches, and prints the table.
pub fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    let footprint = footprint(args)?;
    let configs = configs(args, footprint)?;
    let (mut reader, bar) = input::open(&args.input, "simulating")?;
    let format = reader.format().name();
    let jobs: Vec<Simulator> = configs.iter().map(Simulator::new).collect();
    let (requests, outcomes) = thread::scope(|scope| {
        let mut lanes = Lanes::start(scope, jobs);
        let mut requests = 0;
        let mut batch = Vec::with_capacity(BATCH);
        while let Some(request) = reader.next_request()? {
            requests += 1;
            batch.push(request);
            if batch.len() == BATCH {
                lanes.send(std::mem::replace(&mut batch, Vec::with_capacity(BATCH)));
            }
        }
        lanes.send(batch);
        Ok::<_, anyhow::Error>((requests, lanes.finish()))
    })
    .with_context(|| in_trace(&args.input))?;
    bar.finish_and_clear();
    let rows = configs.iter().zip(&outcomes);
    let report = Report {
        trace: in_trace(&args.input),
        format,
        requests,
        dropped: reader.dropped(),
        footprint_bytes: footprint,
        results: rows.map(|(config, outcome)| Row::new(config, footprint, outcome)).collect(),
    };
    match args.json {
        true => Ok(output::line(&serde_json::to_string_pretty(&report)?)?),
        false => Ok(output::print(&table(&report))?),
    }
}

/// Bytes of the distinct blocks that the trace touches.
fn footprint(args: &SimulateArgs) -> anyhow::Result<u64> {
    let (mut reader, bar) = input::open(&args.input, "footprint ")?;
    let mut footprint = Footprint::new();
    while let Some(request) = reader.next_request().with_context(|| in_trace(&args.input))? {
        if request.carries_data() {
            footprint.add(request.range.blocks());
        }
    }
    bar.finish_and_clear();
    ensure!(footprint.blocks() > 0, "{} has no read and no write", in_trace(&args.input));
    Ok(footprint.bytes())
}

/// Every cache to simulate.
fn configs(args: &SimulateArgs, footprint: u64) -> anyhow::Result<Vec<SimulateConfig>> {
    let all = Eviction::NAMES.map(|(_, policy)| policy);
    let policies = if args.policy.is_empty() { &all[..] } else { &args.policy[..] };
    let mut configs = Vec::new();
    for &size in &args.size {
        let cache_bytes = size.of(footprint);
        let least = Simulator::CACHE_BYTES_MIN;
        if cache_bytes < least {
            let what = match size {
                CacheSize::Bytes(_) => "a cache",
                CacheSize::Percent(_) => "a share of the trace's footprint",
            };
            let (found, least) = (Size(cache_bytes), Size(least));
            return Err(crate::WrongUsage(format!(
                "{what} of {found} is too small to simulate; {least} is the least"
            ))
            .into());
        }
        configs.extend(policies.iter().map(|&eviction| SimulateConfig {
            cache_bytes,
            ram_bytes: args.ram.of(cache_bytes),
            eviction,
            sequential_threshold: args.sequential_threshold.0,
        }));
    }
    Ok(configs)
}

/// Simulating threads, each with some of the caches.
struct Lanes<'scope> {
    senders: Vec<SyncSender<Arc<Vec<TraceRequest>>>>,
    threads: Vec<thread::ScopedJoinHandle<'scope, Vec<(usize, Outcome)>>>,
}

impl<'scope> Lanes<'scope> {
    fn start(scope: &'scope thread::Scope<'scope, '_>, jobs: Vec<Simulator>) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let count = processors.min(jobs.len()).max(1);
        let mut shares: Vec<Vec<(usize, Simulator)>> = (0..count).map(|_| Vec::new()).collect();
        for (at, job) in jobs.into_iter().enumerate() {
            shares[at % count].push((at, job));
        }
        let (mut senders, mut threads) = (Vec::new(), Vec::new());
        for share in shares {
            let (sender, receiver) = sync_channel(BATCHES_MAX);
            senders.push(sender);
            threads.push(scope.spawn(move || simulate(share, &receiver)));
        }
        Self { senders, threads }
    }

    fn send(&mut self, batch: Vec<TraceRequest>) {
        let batch = Arc::new(batch);
        for sender in &self.senders {
            sender.send(Arc::clone(&batch)).expect("a lane ends after its sender");
        }
    }

    /// The outcomes in the order of the jobs.
    fn finish(self) -> Vec<Outcome> {
        drop(self.senders);
        let results = self.threads.into_iter().map(|thread| thread.join());
        let mut all: Vec<(usize, Outcome)> =
            results.flat_map(|result| result.expect("a panic ends the process")).collect();
        all.sort_by_key(|&(at, _)| at);
        all.into_iter().map(|(_, outcome)| outcome).collect()
    }
}

fn simulate(
    mut share: Vec<(usize, Simulator)>,
    batches: &Receiver<Arc<Vec<TraceRequest>>>,
) -> Vec<(usize, Outcome)> {
    for batch in batches {
        for (_, simulator) in &mut share {
            batch.iter().for_each(|request| simulator.take(request));
        }
    }
    share.into_iter().map(|(at, simulator)| (at, simulator.outcome())).collect()
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "{}: {}, {} requests, {} touched\n",
        report.trace,
        report.format,
        report.requests,
        Size(report.footprint_bytes)
    );
    if report.dropped > 0 {
        text += &format!("{} more requests were dropped when it was recorded\n", report.dropped);
    }
    text += "cache            policy      read misses        all  SSD written  \
             clients'   admitted     copied\n";
    text += "                           blocks requests   misses\n";
    for row in &report.results {
        let size = format!("{} ({:.1}%)", Size(row.cache_bytes), row.cache_percent);
        let rounded = |bytes: u64| Size(bytes).to_string();
        text += &format!(
            "{size:<16} {:<10} {:>6.4}   {:>6.4}   {:>6.4} {:>12} {:>9} {:>10} {:>10}\n",
            row.policy,
            row.read_block_miss_ratio,
            row.read_request_miss_ratio,
            row.reference_miss_ratio,
            rounded(row.ssd_bytes),
            rounded(row.logged_bytes),
            rounded(row.admitted_bytes),
            rounded(row.copied_bytes),
        );
    }
    text
}
