//! `forebay trace simulate`: every policy at every size. A first pass over the trace finds what it
//! touches, and keeps its block numbers in memory for the textbook policies; a second one serves
//! all caches. They are distributed over the processors; each gets all requests, in batches.

mod jobs;
mod report;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use anyhow::{Context, ensure};
use forebay_block::BLOCK_SIZE;
use forebay_trace::{
    Footprint, Misses, Outcome, References, Simulate, Textbook, TooManyReferences, TraceRequest,
};

use self::report::{Report, Row};
use super::args::SimulateArgs;
use super::input::{self, in_trace};
use crate::output;

/// Requests in a batch, and most batches that wait.
const BATCH: usize = 4096;
const BATCHES_MAX: usize = 8;

/// A simulated cache with its place in the report.
type Job = (usize, Box<dyn Simulate + Send>);

/// Simulates all caches, and prints the table.
pub fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    let kinds = jobs::kinds(args)?;
    let (footprint, references) = survey(args)?;
    let sizes = jobs::sizes(args, footprint)?;
    let jobs = jobs::jobs(args, &sizes, &kinds);
    let (mut reader, bar) = input::open(&args.input, "simulating")?;
    let format = reader.format().name();
    let (requests, outcomes) = thread::scope(|scope| {
        let mut lanes = Lanes::start(scope, jobs.iter().map(jobs::Job::simulator).collect());
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
    let rows = jobs.iter().zip(&outcomes);
    let mut results: Vec<Row> =
        rows.map(|(job, outcome)| Row::of_layout(job, footprint, outcome)).collect();
    if let Some(trace) = &references {
        add_textbook(&mut results, &sizes, kinds.len(), trace);
    }
    let mut report = Report {
        trace: in_trace(&args.input),
        format,
        requests,
        dropped: reader.dropped(),
        footprint_bytes: footprint,
        results,
    };
    report.close_gaps();
    match args.json {
        true => Ok(output::line(&serde_json::to_string_pretty(&report)?)?),
        false => Ok(output::print(&report.table())?),
    }
}

/// Bytes of the distinct blocks that the trace touches, and its references unless the textbook
/// policies are left out.
fn survey(args: &SimulateArgs) -> anyhow::Result<(u64, Option<References>)> {
    let (mut reader, bar) = input::open(&args.input, "footprint ")?;
    let mut footprint = Footprint::new();
    let mut references = (!args.no_textbook).then(References::new);
    while let Some(request) = reader.next_request().with_context(|| in_trace(&args.input))? {
        if !request.carries_data() {
            continue;
        }
        footprint.add(request.range.blocks());
        if let Some(references) = &mut references {
            add(references, &request)
                .context("give --no-textbook to simulate it without the textbook policies")
                .with_context(|| in_trace(&args.input))?;
        }
    }
    bar.finish_and_clear();
    ensure!(footprint.blocks() > 0, "{} has no read and no write", in_trace(&args.input));
    Ok((footprint.bytes(), references))
}

fn add(references: &mut References, request: &TraceRequest) -> Result<(), TooManyReferences> {
    let write = request.op == forebay_block::IoOp::Write;
    request.range.blocks().iter().try_for_each(|key| references.push(key, write))
}

/// Adds the rows of the textbook policies after the `kinds` rows of each size.
fn add_textbook(rows: &mut Vec<Row>, sizes: &[(u64, u64)], kinds: usize, trace: &References) {
    let places = |&(cache, ram): &(u64, u64)| {
        u32::try_from((cache + ram) / BLOCK_SIZE as u64).unwrap_or(u32::MAX)
    };
    let policies = Textbook::NAMES.map(|(_, policy)| policy);
    let all: Vec<(u32, Textbook)> =
        sizes.iter().flat_map(|size| policies.map(|policy| (places(size), policy))).collect();
    let misses = textbook(trace, &all);
    let own = std::mem::take(rows);
    let mut own = own.into_iter();
    for (&size, misses) in sizes.iter().zip(misses.chunks(policies.len())) {
        rows.extend(own.by_ref().take(kinds));
        let each = policies.iter().zip(misses);
        rows.extend(each.map(|(&policy, &misses)| Row::of_textbook(size, policy, trace, misses)));
    }
}

/// The misses of textbook policies, simulated by as many threads as there are processors.
fn textbook(trace: &References, all: &[(u32, Textbook)]) -> Vec<Misses> {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let todo = Mutex::new(all.iter().enumerate());
    let mut done: Vec<(usize, Misses)> = thread::scope(|scope| {
        let work = || {
            let mut done = Vec::new();
            loop {
                let next = todo.lock().expect("a panic ends the process").next();
                let Some((at, &(places, policy))) = next else { return done };
                done.push((at, policy.misses(trace, places)));
            }
        };
        let threads: Vec<_> = (0..processors.min(all.len())).map(|_| scope.spawn(work)).collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.flat_map(|result| result.expect("a panic ends the process")).collect()
    });
    done.sort_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, misses)| misses).collect()
}

/// Simulating threads, each with some of the caches.
struct Lanes<'scope> {
    senders: Vec<SyncSender<Arc<Vec<TraceRequest>>>>,
    threads: Vec<thread::ScopedJoinHandle<'scope, Vec<(usize, Outcome)>>>,
}

impl<'scope> Lanes<'scope> {
    fn start(
        scope: &'scope thread::Scope<'scope, '_>,
        jobs: Vec<Box<dyn Simulate + Send>>,
    ) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let count = processors.min(jobs.len()).max(1);
        let mut shares: Vec<Vec<Job>> = (0..count).map(|_| Vec::new()).collect();
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
    mut share: Vec<Job>,
    batches: &Receiver<Arc<Vec<TraceRequest>>>,
) -> Vec<(usize, Outcome)> {
    for batch in batches {
        for (_, simulator) in &mut share {
            batch.iter().for_each(|request| simulator.take(request));
        }
    }
    share.into_iter().map(|(at, simulator)| (at, simulator.outcome())).collect()
}
