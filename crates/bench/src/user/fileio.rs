//! `bench fileio`: the matrix of sysbench's fileio, with fio on the block device: random read,
//! random write, mixed (1.5 reads per write) and sequential write, 16 KiB each; with several
//! numbers of synchronous threads, and asynchronous with 16 threads.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use serde_json::Value;

use crate::load::sample::Latency;
use crate::report::progress;
use crate::report::{Group, Measured, Report};
use crate::rig::cleanup::finish;
use crate::rig::disk::{Disk, Medium};
use crate::rig::image;
use crate::rig::needs;
use crate::rig::place::Place;
use crate::rig::setup::SetUp;
use crate::rig::watch::watch;
use crate::user::options::Shared;

/// Each pattern with its fio arguments.
const PATTERNS: [(&str, &[&str]); 4] = [
    ("random read", &["--rw=randread"]),
    ("random write", &["--rw=randwrite"]),
    ("mixed", &["--rw=randrw", "--rwmixread=60"]),
    ("sequential write", &["--rw=write"]),
];
/// Number of threads of the asynchronous loads, and of requests in flight per thread.
const ASYNC_THREADS: u32 = 16;
const ASYNC_DEPTH: u32 = 8;
/// Seed of the first load. fio multiplies the seed by the thread number, so two loads with small
/// seeds would share the sequences of many threads.
const SEEDS: usize = 1_000_000_000;
const NOTE: &str = "The cache stays warm from one load to the next, in the order of the table. \
    Spread: the standard deviation of the rate over the run, against its mean.";

/// Arguments of the command.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(flatten)]
    pub shared: Shared,
    /// MiB of the disk
    #[arg(long, value_name = "MIB", default_value_t = 2048,
        value_parser = clap::value_parser!(u64).range(256..))]
    pub mib: u64,
    /// Seconds of each load
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: u64,
    /// Numbers of synchronous threads (1,2,4,8,16,32,64,128,256,512,1024 as published)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,4,16,64",
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Vec<u32>,
    /// Seconds of each asynchronous load (hours as published); 0 skips them
    #[arg(long, default_value_t = 10)]
    pub async_seconds: u64,
}

/// One load of the matrix.
struct Cell {
    pattern: &'static str,
    flags: &'static [&'static str],
    /// Number of synchronous threads; `None` for asynchronous.
    threads: Option<u32>,
    /// Seed of its random positions.
    seed: usize,
}

/// Runs the benchmark and reports; returns the path of the page.
pub fn run(args: &Args) -> anyhow::Result<PathBuf> {
    let shared = &args.shared;
    needs::tools(&[("fio", "fio"), ("losetup", "mount"), ("nbdkit", "nbdkit")])?;
    needs::disk_can_be_made(&shared.setups)?;
    shared.binary()?;
    let earlier = shared.earlier("fileio")?;
    let dir = shared.directory()?;
    let cache = (args.mib * shared.cache_percent / 100) << 20;
    needs::space(&dir, (args.mib << 20) + 2 * cache)?;
    let place = Place::new(Some(&dir))?;
    progress("making the primary");
    place.full("primary", args.mib << 20)?;
    let mut report = Report::new("fileio", "the matrix of sysbench fileio, 16 KiB", "IOPS");
    shared.describe(&mut report);
    // No single figure is suitable as the divisor of costs.
    report.prices = None;
    report.set("disk", format!("{} MiB", args.mib));
    report.set("cache", format!("{} MiB", cache >> 20));
    report.set("time", format!("{} s, {} s asynchronous", args.seconds, args.async_seconds));
    let cells = cells(args);
    report.groups = cells.iter().map(group).collect();
    let medium = Medium {
        binary: shared.binary()?,
        primary: "primary".to_owned(),
        model: shared.model.clone(),
        cache,
        ram: shared.ram_mib << 20,
        shards: shared.shards,
        more: shared.serve.clone(),
    };
    for &setup in &shared.setups {
        for name in ["cache", "cache.state", "unused", "unused.state"] {
            place.remove(name);
        }
        image::drop_caches();
        let disk = Disk::start(&place, setup, &medium)?;
        for (cell, group) in cells.iter().zip(&mut report.groups) {
            progress(&format!("{}: {}", setup.name(), group.name));
            let measured = measure(args, &disk, setup, cell);
            group.results.push(measured.with_context(|| format!("{setup:?}: {}", group.name))?);
        }
        disk.stop()?;
    }
    progress("");
    report.notes.push(NOTE.to_owned());
    report.finish(&shared.out, earlier.as_ref())
}

fn cells(args: &Args) -> Vec<Cell> {
    let with = |threads: Option<u32>| {
        PATTERNS.map(|(pattern, flags)| Cell { pattern, flags, threads, seed: 0 })
    };
    let mut all: Vec<Cell> = args.threads.iter().flat_map(|threads| with(Some(*threads))).collect();
    if args.async_seconds > 0 {
        all.extend(with(None));
    }
    all.iter_mut().zip(SEEDS..).for_each(|(cell, seed)| cell.seed = seed);
    all
}

fn group(cell: &Cell) -> Group {
    let name = match cell.threads {
        Some(1) => format!("{}, 1 thread", cell.pattern),
        Some(threads) => format!("{}, {threads} threads", cell.pattern),
        None => format!("{}, asynchronous", cell.pattern),
    };
    let family = cell.threads.map(|_| cell.pattern.to_owned());
    Group { name, family, x: cell.threads.map(f64::from), results: Vec::new() }
}

fn measure(args: &Args, disk: &Disk, setup: SetUp, cell: &Cell) -> anyhow::Result<Measured> {
    let threads = cell.threads.unwrap_or(ASYNC_THREADS);
    let seconds = if cell.threads.is_some() { args.seconds } else { args.async_seconds };
    let mut command = Command::new("fio");
    command.arg("--name=fileio").arg(format!("--filename={}", disk.device().display()));
    command.args(cell.flags).args(["--bs=16k", "--direct=1", "--thread", "--group_reporting"]);
    command.args(["--time_based", "--norandommap", "--unified_rw_reporting=1"]);
    command.args(["--refill_buffers", "--output-format=json", "--percentile_list=50:95:99:99.9"]);
    command.arg(format!("--runtime={seconds}")).arg(format!("--numjobs={threads}"));
    match cell.threads {
        Some(_) => command.arg("--ioengine=psync"),
        None => command.args(["--ioengine=libaio", &format!("--iodepth={ASYNC_DEPTH}")]),
    };
    // Each load has its own positions: by default fio repeats the same ones.
    command.arg("--randrepeat=0").arg(format!("--randseed={}", cell.seed));
    let share = (args.mib << 20) / u64::from(threads) / 16_384 * 16_384;
    if cell.pattern == "sequential write" {
        command.arg(format!("--offset_increment={share}")).arg(format!("--size={share}"));
    }
    let programs: Vec<_> =
        disk.processes().iter().map(|(name, process)| (*name, process.pid())).collect();
    let (text, observed) = watch(&programs, disk.cache(), || finish(&mut command));
    let mut measured = read(&text?)?;
    measured.setup = setup.name().to_owned();
    observed.enter(&mut measured);
    Ok(measured)
}

/// Parses fio's JSON output.
pub fn read(text: &str) -> anyhow::Result<Measured> {
    let start = text.find('{').context("fio gave no JSON")?;
    let said: Value = serde_json::from_str(&text[start..]).context("what fio gave")?;
    let mixed = &said["jobs"][0]["mixed"];
    let number = |value: &Value| value.as_f64();
    let millis = |value: &Value| value.as_f64().unwrap_or(0.0) / 1e6;
    let (all, times) = (&mixed["lat_ns"], &mixed["clat_ns"]["percentile"]);
    let rate = number(&mixed["iops"]).context("fio gave no rate")?;
    let mut measured = Measured {
        rate,
        latency: Latency {
            count: mixed["total_ios"].as_u64().unwrap_or(0),
            mean_ms: millis(&all["mean"]),
            p50_ms: millis(&times["50.000000"]),
            p95_ms: millis(&times["95.000000"]),
            p99_ms: millis(&times["99.000000"]),
            p999_ms: millis(&times["99.900000"]),
            max_ms: millis(&all["max"]),
        },
        ..Measured::default()
    };
    if let Some(spread) = number(&mixed["iops_stddev"]) {
        measured.figures.insert("spread".to_owned(), spread / rate);
    }
    Ok(measured)
}
