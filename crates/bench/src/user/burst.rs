//! `bench burst`: a burst of small writes, 4 to 32 KiB, in random order, which together fill an
//! area; written directly to the modeled disks, and absorbed by the cache and drained. The results
//! are how much faster the client completes it, and how close the drain comes to the disks'
//! sequential rate.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::WrongUsage;
use crate::load::{Load, Outcome, Pattern};
use crate::report::progress;
use crate::report::{BASELINE, Group, Measured, Report};
use crate::rig::image;
use crate::rig::needs;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting};
use crate::rig::setup::SetUp;
use crate::rig::watch::watch;
use crate::user::options::Shared;
use crate::user::vdbench::{load, measured, setting};
use forebay_block::testing::Numbers;

/// Granularity of the piece lengths, in bytes.
const STEP: u64 = 4 << 10;
const PIECE_STEPS: u64 = 8;
/// Target: the drain's share of the rate of sequential writes.
const SEQUENTIAL_SHARE: f64 = 0.9;
const MIB: f64 = 1048576.0;
const NOTE: &str = "The pieces fill the area without holes and come in random order, as the \
    ranks of a parallel program write one file. Rates are of the client's bytes: absorbed until \
    the last write and a flush are answered; drained until the primary has all of it and has \
    flushed. The gain of the row `drained` is from the first write to the end of the drain.";

/// Arguments of the command.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(flatten)]
    pub shared: Shared,
    /// MiB of the primary
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    pub mib: u64,
    /// MiB of the burst; must fit in 60 % of what may be dirty
    #[arg(long, value_name = "MIB", default_value_t = 192)]
    pub burst_mib: u64,
    /// Maximum time for the direct writes, in seconds
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
}

/// Runs the benchmark and reports; returns the path of the page.
pub fn run(args: &Args) -> anyhow::Result<PathBuf> {
    let shared = &args.shared;
    let cache = (args.mib * shared.cache_percent / 100) << 20;
    if args.burst_mib == 0 || (args.burst_mib << 20) > cache / 2 {
        let (burst, cache) = (args.burst_mib, cache >> 20);
        let what = format!(
            "--burst-mib {burst}: must be above 0 and at most half the cache of {cache} MiB"
        );
        return Err(WrongUsage(what).into());
    }
    shared.binary()?;
    let earlier = shared.earlier("burst")?;
    let dir = shared.directory()?;
    needs::space(&dir, (args.mib << 20) + 2 * cache)?;
    let place = Place::new(Some(&dir))?;
    progress("making the primary");
    place.full("primary", args.mib << 20)?;
    let mut report =
        Report::new("burst", "random writes of 4 to 32 KiB that fill an area", "MiB/s");
    shared.describe(&mut report);
    report.set("burst", format!("{} MiB", args.burst_mib));
    report.set("cache", format!("{} MiB", cache >> 20));
    report.set("primary", format!("{} MiB", args.mib));
    let pieces = Arc::new(pieces(args.burst_mib << 20));
    let mut group = Group { name: "burst".to_owned(), ..Group::default() };
    group.results.push(direct(args, &place, &pieces)?);
    image::drop_caches();
    group.results.extend(cached(args, &place, cache, &pieces)?);
    progress("");
    report.target(
        "drained / sequential writes",
        group.ratio("drain", "sequential"),
        SEQUENTIAL_SHARE,
    );
    let whole = group.ratio("drained", BASELINE);
    report.target("absorbed / direct", group.ratio("absorbed", BASELINE), 1.0);
    report.target("absorbed and drained / direct", whole, 1.0);
    report.groups.push(group);
    report.prices = None;
    report.notes.push(NOTE.to_owned());
    report.finish(&shared.out, earlier.as_ref())
}

/// Pieces of 4 to 32 KiB that fill `bytes`, in random order.
fn pieces(bytes: u64) -> Vec<(u64, u64)> {
    let mut numbers = Numbers::new(3);
    let mut all = Vec::new();
    let mut at = 0;
    while at < bytes {
        let len = (STEP * (1 + numbers.below(PIECE_STEPS))).min(bytes - at);
        all.push((at, len));
        at += len;
    }
    for i in (1..all.len()).rev() {
        all.swap(i, numbers.below(i as u64 + 1) as usize);
    }
    all
}

/// Total length of the first `count` pieces, in bytes.
fn bytes(pieces: &[(u64, u64)], count: u64) -> f64 {
    pieces.iter().take(count as usize).map(|(_, len)| *len as f64).sum()
}

/// A row for `bytes` bytes in `time`.
fn row(setup: &str, outcome: &Outcome, bytes: f64, time: Duration) -> Measured {
    let mut one = measured(SetUp::NoCache, outcome);
    let each = bytes / MIB / outcome.ops.max(1) as f64;
    one.per_second.iter_mut().for_each(|count| *count *= each);
    one.setup = setup.to_owned();
    one.rate = bytes / MIB / time.as_secs_f64();
    one
}

fn serve(args: &Args, place: &Place, setting: &Setting) -> anyhow::Result<Server> {
    Server::forebay(&args.shared.binary()?, place, setting)
}

/// Writes the same pieces, then the area sequentially, without a cache.
fn direct(args: &Args, place: &Place, pieces: &Arc<Vec<(u64, u64)>>) -> anyhow::Result<Measured> {
    let server = serve(args, place, &setting(&args.shared, place, 0, SetUp::NoCache))?;
    let load = load(Pattern::Pieces(Arc::clone(pieces)), STEP, Duration::from_secs(args.seconds));
    let programs = [("forebay", server.process().pid())];
    let (outcome, observed) = watch(&programs, None, || {
        server.load(&load, |outcome| {
            let done = outcome.ops * 100 / pieces.len() as u64;
            progress(&format!("direct: {done} %"));
        })
    });
    let outcome = outcome?;
    let mut one = row(BASELINE, &outcome, bytes(pieces, outcome.ops), outcome.elapsed);
    observed.enter(&mut one);
    server.stop()?;
    Ok(one)
}

/// Writes the area sequentially without a cache.
fn sequence(args: &Args, place: &Place) -> anyhow::Result<Measured> {
    let server = serve(args, place, &setting(&args.shared, place, 0, SetUp::NoCache))?;
    progress("writing in sequence");
    let pattern = Pattern::Sequential { read: false, start: 0, end: args.burst_mib << 20 };
    let load: Load = load(pattern, 1 << 20, Duration::from_secs(600));
    let outcome = server.load(&load, |_| {})?;
    server.stop()?;
    Ok(row("sequential", &outcome, (outcome.ops << 20) as f64, outcome.elapsed))
}

/// Absorbs and drains the burst, with the sequential rate as the drain's reference.
fn cached(
    args: &Args,
    place: &Place,
    cache: u64,
    pieces: &Arc<Vec<(u64, u64)>>,
) -> anyhow::Result<Vec<Measured>> {
    let sequential = sequence(args, place)?;
    let mut setting = setting(&args.shared, place, cache, SetUp::Mode("write-back"));
    // The burst must fit below the level at which writes are delayed.
    setting.more.push("--dirty-limit=90%".to_owned());
    let server = serve(args, place, &setting)?;
    let load = load(Pattern::Pieces(Arc::clone(pieces)), STEP, Duration::from_secs(args.seconds));
    let programs = [("forebay", server.process().pid())];
    progress("absorbing");
    let begin = Instant::now();
    let (outcome, observed) = watch(&programs, Some(&server), || server.load(&load, |_| {}));
    let outcome = outcome?;
    server.flush()?;
    let absorbed = begin.elapsed();
    let all = bytes(pieces, outcome.ops);
    ensure!(outcome.ops == pieces.len() as u64, "the burst was not absorbed in {} s", args.seconds);
    let before = server.status()?;
    let dirty = before.counter("dirty_blocks") * 4096;
    progress("draining");
    let drain = Instant::now();
    server.drain()?;
    let (drain, whole) = (drain.elapsed(), begin.elapsed());
    let after = server.status()?;
    let writes = after.counter("destage_writes") - before.counter("destage_writes");
    server.stop()?;
    let mut first = row("absorbed", &outcome, all, absorbed);
    observed.enter(&mut first);
    let empty = Outcome::default();
    let mut second = row("drain", &empty, dirty as f64, drain);
    second.figures.insert(
        "KiB of a write of the drain".to_owned(),
        dirty as f64 / 1024.0 / writes.max(1) as f64,
    );
    let third = row("drained", &empty, all, whole);
    Ok(vec![sequential, first, second, third])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_fill_the_area_once() {
        let mut all = pieces(1 << 20);
        assert!(all.iter().all(|(_, len)| (4 << 10..=32 << 10).contains(len)));
        assert!(!all.is_sorted());
        all.sort_unstable();
        let end = all.iter().fold(0, |at, &(offset, len)| {
            assert_eq!(offset, at);
            at + len
        });
        assert_eq!(end, 1 << 20);
    }
}
