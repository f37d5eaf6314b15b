//! `bench vdbench`: the runs RD1 to RD4 and RD6 on each set-up in turn, through NBD: random
//! requests of 16 KiB from 32 loops, with vdbench's own meaning of hits, once with its small area
//! and once with one larger than the RAM tier. Averages include the filling of the empty cache, as
//! published.

use std::path::PathBuf;
use std::time::Duration;

use crate::WrongUsage;
use crate::load::content::Content;
use crate::load::runs::{BLOCK, LOOPS, RUNS, Run, contents};
use crate::load::{Load, Outcome, Pattern};
use crate::report::progress;
use crate::report::{BOUND, Group, Measured, Report};
use crate::rig::image;
use crate::rig::needs;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting};
use crate::rig::setup::SetUp;
use crate::rig::watch::watch;
use crate::user::options::Shared;

/// The run whose gain was not published.
const RD6: Run =
    Run { name: "RD6", read_percent: 50, hit_percent: 100, hypercache: 0.0, flashsoft: 0.0 };
/// Required share of the ceiling, where the ceiling is below the published gain.
const CEILING_SHARE: f64 = 0.9;
const NOTE: &str = "vdbench's hits are locality of addresses only: read hits go uniformly to an \
    area at the start, everything else, writes included, to the rest. The load comes from one \
    client over NBD; the bare SSD is the same server without cache on a file of the SSD.";

/// Arguments of the command.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(flatten)]
    pub shared: Shared,
    /// MiB of the primary (409600 as published)
    #[arg(long, value_name = "MIB", default_value_t = 4096,
        value_parser = clap::value_parser!(u64).range(256..))]
    pub mib: u64,
    /// Seconds of each run with a cache (1200 as published)
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: u64,
    /// Seconds of each run without cache
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    pub baseline_seconds: u64,
    /// KiB of the area of read hits, for each area
    #[arg(long, value_name = "KIB", value_delimiter = ',', default_value = "1024,262144",
        value_parser = clap::value_parser!(u64).range(32..))]
    pub hit_kib: Vec<u64>,
    /// What is read and written: incompressible data, or data that compresses 2 to 1
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "random,compressible",
        value_parser = ["random", "compressible"])]
    pub content: Vec<String>,
    /// Only these runs
    #[arg(long, value_name = "LIST", value_delimiter = ',',
        value_parser = ["RD1", "RD2", "RD3", "RD4", "RD6"])]
    pub runs: Vec<String>,
}

/// Runs the benchmark and reports; returns the path of the page.
pub fn run(args: &Args) -> anyhow::Result<PathBuf> {
    let shared = &args.shared;
    if let Some(area) = args.hit_kib.iter().find(|&&area| area * 2 > args.mib << 10) {
        let what =
            format!("--hit-kib {area} is more than half of the primary of --mib {}", args.mib);
        return Err(WrongUsage(what).into());
    }
    if shared.has(SetUp::Nbdkit) {
        needs::tools(&[("nbdkit", "nbdkit")])?;
    }
    shared.binary()?;
    let earlier = shared.earlier("vdbench")?;
    let dir = shared.directory()?;
    let size = args.mib << 20;
    needs::space(&dir, size + 2 * cache(args))?;
    let place = Place::new(Some(&dir))?;
    let mut report = Report::new("vdbench", "16 KiB random, 32 loops, RD1 to RD6", "IOPS");
    shared.describe(&mut report);
    report.set("primary", format!("{} MiB", args.mib));
    report.set("cache", format!("{} MiB", cache(args) >> 20));
    report.set("time", format!("{} s, {} s without cache", args.seconds, args.baseline_seconds));
    report.set("content", args.content.join(", "));
    let mut primary_reads = None;
    for content in contents(&args.content) {
        progress("making the primary");
        place.full_of("primary", size, content.1)?;
        let misses = match primary_reads {
            Some(misses) => misses,
            None => *primary_reads.insert(misses(args, &place)?),
        };
        report.set("random reads of the primary", format!("{misses:.0}/s"));
        all(args, &place, content, misses, &mut report)?;
    }
    progress("");
    report.notes.push(NOTE.to_owned());
    report.finish(&shared.out, earlier.as_ref())
}

/// Every run with this content, for each area.
fn all(
    args: &Args,
    place: &Place,
    content: (&'static str, Content),
    misses: f64,
    report: &mut Report,
) -> anyhow::Result<()> {
    for &area in &args.hit_kib {
        for run in RUNS.into_iter().chain([RD6]) {
            if args.runs.is_empty() || args.runs.iter().any(|name| name == run.name) {
                let mut group = series(args, place, (run, content), area << 10)?;
                bound(args, &mut group, run, misses);
                targets(report, &group, run);
                report.groups.push(group);
            }
        }
    }
    Ok(())
}

fn cache(args: &Args) -> u64 {
    (args.mib * args.shared.cache_percent / 100) << 20
}

/// One run on each set-up.
fn series(
    args: &Args,
    place: &Place,
    (run, content): (Run, (&'static str, Content)),
    area: u64,
) -> anyhow::Result<Group> {
    let area_text = if area < 1 << 20 { (area >> 10, "KiB") } else { (area >> 20, "MiB") };
    let name = format!("{}, area {} {}, {}", run.name, area_text.0, area_text.1, content.0);
    let mut group = Group { name, ..Group::default() };
    for &setup in &args.shared.setups {
        let measured = measure(args, place, (run, content.1), area, setup)?;
        group.results.push(measured);
        // Each set-up starts with an empty cache.
        for name in ["cache", "cache.state", "unused", "unused.state"] {
            place.remove(name);
        }
        image::drop_caches();
    }
    Ok(group)
}

fn measure(
    args: &Args,
    place: &Place,
    (run, content): (Run, Content),
    hit_area: u64,
    setup: SetUp,
) -> anyhow::Result<Measured> {
    let shared = &args.shared;
    let cached = setup.mode().is_some() || setup == SetUp::Nbdkit;
    let seconds = if cached { args.seconds } else { args.baseline_seconds };
    let pattern = Pattern::Vdbench {
        read_percent: run.read_percent,
        hit_percent: run.hit_percent,
        hit_area,
        span: args.mib << 20,
    };
    let time = Duration::from_secs(seconds);
    let load = Load { content, ..load(pattern, BLOCK, time) };
    let server =
        Server::forebay(&shared.binary()?, place, &setting(shared, place, cache(args), setup))?;
    let peer = match setup {
        SetUp::Nbdkit => Some(Server::nbdkit_cache(place, &server, cache(args))?),
        _ => None,
    };
    let name = setup.name();
    let shown = |outcome: &Outcome| {
        let (second, now) = (outcome.per_second.len(), outcome.per_second.last());
        let now = now.copied().unwrap_or(0);
        progress(&format!("{} {name}: {second}/{seconds} s, {now} IOPS", run.name));
    };
    let mut programs = vec![("forebay", server.process().pid()), ("client", std::process::id())];
    programs.extend(peer.iter().map(|peer| ("nbdkit", peer.process().pid())));
    let seen = setup.mode().map(|_| &server);
    let target = peer.as_ref().unwrap_or(&server);
    let (outcome, observed) = watch(&programs, seen, || target.load(&load, shown));
    let mut measured = measured(setup, &outcome?);
    observed.enter(&mut measured);
    drop(peer);
    server.kill();
    Ok(measured)
}

/// A load from 32 loops over one connection.
pub fn load(pattern: Pattern, block: u64, time: Duration) -> Load {
    Load { loops: LOOPS, connections: 1, block, pattern, time, seed: 1, content: Content::Random }
}

/// The server settings of a set-up, on the file `primary` of a place.
pub fn setting(shared: &Shared, place: &Place, cache: u64, setup: SetUp) -> Setting {
    let model = if setup == SetUp::BareSsd { "" } else { &shared.model };
    let emulate = if model.is_empty() { String::new() } else { format!("?emulate={model}") };
    let (mode, cache, mut more) = match setup.mode() {
        Some(mode) => (mode, ("cache".to_owned(), cache), shared.serve.clone()),
        None => ("pass-through", ("unused".to_owned(), 64 << 20), Vec::new()),
    };
    more.extend(setup.flags());
    Setting {
        primary: place.text("primary") + &emulate,
        cache,
        mode,
        ram: shared.ram_mib << 20,
        shards: shared.shards,
        more,
    }
}

/// The result of a load through NBD.
pub fn measured(setup: SetUp, outcome: &Outcome) -> Measured {
    Measured {
        setup: setup.name().to_owned(),
        rate: outcome.rate(),
        per_second: outcome.per_second.iter().map(|count| *count as f64).collect(),
        latency: outcome.times,
        ..Measured::default()
    }
}

/// Random reads per second that the primary delivers.
fn misses(args: &Args, place: &Place) -> anyhow::Result<f64> {
    progress("what the primary gives");
    let setting = setting(&args.shared, place, 0, SetUp::NoCache);
    let server = Server::forebay(&args.shared.binary()?, place, &setting)?;
    let pattern = Pattern::Random { read_percent: 100, span: args.mib << 20 };
    let time = Duration::from_secs(args.baseline_seconds);
    let outcome = server.load(&load(pattern, BLOCK, time), |_| {})?;
    server.stop()?;
    Ok(outcome.rate())
}

/// Adds the maximum gain of any cache of this size in the long run: misses outside of the part that
/// fits into it must wait for the primary, which delivers `misses` reads per second.
fn bound(args: &Args, group: &mut Group, run: Run, misses: f64) {
    let Some(baseline) = group.of(crate::report::BASELINE).map(|one| one.rate) else { return };
    let held = (cache(args) + (args.shared.ram_mib << 20)) as f64 / (args.mib << 20) as f64;
    let share = (run.read_percent * (100 - run.hit_percent)) as f64 / 1e4 * (1.0 - held).max(0.0);
    if share == 0.0 {
        return;
    }
    for one in group.results.iter_mut().filter(|one| one.setup.starts_with("write-")) {
        one.figures.insert(BOUND.to_owned(), misses / share / baseline);
    }
}

/// Adds the target: the published gain, or nine tenths of the ceiling.
fn targets(report: &mut Report, group: &Group, run: Run) {
    let found = group.ratio("write-back", crate::report::BASELINE);
    if let Some(found) = found.filter(|_| run.hypercache > 0.0) {
        let share = group.ratio("write-back", "bare-ssd");
        let what = format!("{}: write-back / no-cache", group.name);
        let or = share.map(|share| ("of the bare SSD".to_owned(), share, CEILING_SHARE));
        let wanted = run.hypercache;
        report.targets.push(crate::report::Target { what, found, wanted, or });
    }
}
