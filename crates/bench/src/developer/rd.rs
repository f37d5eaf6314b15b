//! The runs RD1 to RD4 of vdbench, as published for host-side caches: random requests of 16 KiB
//! from 32 loops, a share of them reads, a share of those to a small area.
//!
//! The primary is a file behind the model of four disks in RAID 10; the cache has a quarter of its
//! size. The baseline is the same server in pass-through, and both get the same sequence of
//! requests. The ceiling is the rate of the same client with nbdkit's memory plugin: no gain can
//! exceed it. One table is for the small area of vdbench's default, another for an area larger than
//! the RAM tier.

use std::time::Duration;

use serde_json::{Value, json};

use crate::load::content::Content;
use crate::load::runs::{BLOCK, FLAGS, LOOPS, RUNS, Run, contents};
use crate::load::{Load, Outcome, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, Status, binary};

/// Required share of the ceiling, where the ceiling is below the published gain.
const CEILING_SHARE: f64 = 0.9;

/// Only misses: the primary's random rate, which limits the gain of RD1. Run only if named on the
/// command line.
const MISSES: Run =
    Run { name: "misses", read_percent: 100, hit_percent: 0, hypercache: 0.0, flashsoft: 0.0 };

/// Arguments of the command.
#[derive(clap::Args, Clone)]
pub struct Args {
    #[command(flatten)]
    pub common: Common,
    /// MiB of the primary; the cache is a quarter
    #[arg(long, default_value_t = 4096)]
    pub mib: u64,
    /// Seconds of a cached run
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    /// Seconds of a baseline
    #[arg(long, default_value_t = 15)]
    pub baseline_seconds: u64,
    /// MiB of the RAM tier
    #[arg(long, default_value_t = 64)]
    pub ram_mib: u64,
    /// KiB of the area that read hits go to
    #[arg(long, default_value_t = 1024)]
    pub hit_kib: u64,
    /// Also measure an area larger than the RAM tier, of this many MiB; 0 skips it
    #[arg(long, default_value_t = 256)]
    pub large_hit_mib: u64,
    /// Threads of Forebay
    #[arg(long, default_value_t = 1)]
    pub shards: u16,
    /// The disk model
    #[arg(long, default_value = "raid10x4")]
    pub model: String,
    /// What is read and written: incompressible data, or data that compresses 2 to 1
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "random,compressible",
        value_parser = ["random", "compressible"])]
    pub content: Vec<String>,
    /// A flag for `forebay serve`; may be repeated, and replaces the two flags of TPC-C
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true, default_values = FLAGS)]
    pub serve: Vec<String>,
    /// Run only this one: RD1 to RD4, or misses
    #[arg(long)]
    pub only: Option<String>,
}

/// The results of a run.
struct Measured {
    run: Run,
    content: &'static str,
    baseline: Outcome,
    cached: Outcome,
    ceiling: Outcome,
    /// The second from which so much was dirty that writes were delayed.
    limit_at: Option<usize>,
    before: Status,
    after: Status,
}

impl Measured {
    fn gain(&self) -> f64 {
        self.cached.rate() / self.baseline.rate()
    }

    fn ceiling(&self) -> f64 {
        self.ceiling.rate() / self.baseline.rate()
    }

    /// The required gain.
    fn target(&self) -> f64 {
        self.run.hypercache.min(CEILING_SHARE * self.ceiling())
    }

    fn row(&self, area: u64) -> Row {
        let (gain, target) = (self.gain(), self.target());
        let (before, after) = (self.baseline.rate(), self.cached.rate());
        let name = {
            let (run, content) = (self.run.name, self.content);
            format!("{run}, area of {}, {content}: gain", size_text(area))
        };
        let row = Row::new(name, format!("{before:.0} to {after:.0} IOPS, {gain:.1}"));
        row.with_target(format!(">= {target:.1}"), gain >= target)
    }

    fn json(&self) -> Value {
        let one = |outcome: &Outcome| {
            json!({
                "iops": outcome.rate(), "latency_ms": outcome.latency_ms(),
                "per_second": outcome.per_second,
            })
        };
        let count = |name: &str| self.after.counter(name) - self.before.counter(name);
        json!({
            "run": self.run.name, "content": self.content,
            "baseline": one(&self.baseline), "cached": one(&self.cached),
            "ceiling": one(&self.ceiling), "gain": self.gain(), "ceiling_gain": self.ceiling(),
            "published": { "hypercache": self.run.hypercache, "flashsoft": self.run.flashsoft },
            "target": self.target(), "held_back_from_second": self.limit_at,
            "ram_hit_blocks": count("ram_hit_blocks"), "ssd_hit_blocks": count("ssd_hit_blocks"),
            "primary_read_blocks": count("primary_read_blocks"),
            "destaged_blocks": count("destaged_blocks"),
        })
    }
}

/// Runs the measurements and reports.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let areas = [args.hit_kib << 10, args.large_hit_mib << 20];
    let (mut tables, mut rows) = (Vec::new(), Vec::new());
    for area in areas.into_iter().filter(|&area| area > 0) {
        let results = series(args, area)?;
        println!(
            "\nread hits go to {}; {}; flags {}",
            size_text(area),
            settings(args).describe(),
            args.serve.join(" ")
        );
        table(&results).print();
        rows.extend(results.iter().map(|measured| measured.row(area)));
        let results: Vec<Value> = results.iter().map(Measured::json).collect();
        tables.push(json!({ "hit_area": area, "results": results }));
    }
    let figures = json!({
        "primary_bytes": args.mib << 20, "model": args.model, "loops": LOOPS,
        "request_bytes": BLOCK, "setting": settings(args).describe(), "flags": args.serve,
        "tables": tables,
    });
    keep("rd", rows, figures)
}

fn size_text(bytes: u64) -> String {
    if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
}

fn settings(args: &Args) -> Setting {
    Setting {
        primary: String::new(),
        cache: ("cache".to_owned(), args.mib << 18),
        mode: "write-back",
        ram: args.ram_mib << 20,
        shards: args.shards,
        more: args.serve.clone(),
    }
}

/// Measures every run with one hit area.
fn series(args: &Args, area: u64) -> anyhow::Result<Vec<Measured>> {
    let place = Place::new(args.common.dir.as_deref())?;
    let mut all = Vec::new();
    for content in contents(&args.content) {
        progress("making the primary");
        place.full_of("primary", args.mib << 20, content.1)?;
        for run in RUNS.into_iter().chain([MISSES]) {
            let only = args.only.as_deref();
            if only.map_or(run.name != MISSES.name, |only| only == run.name) {
                all.push(measure(args, &place, (run, content), area)?);
            }
        }
    }
    progress("");
    Ok(all)
}

fn measure(
    args: &Args,
    place: &Place,
    (run, content): (Run, (&'static str, Content)),
    hit_area: u64,
) -> anyhow::Result<Measured> {
    let binary = binary(args.common.forebay.as_deref())?;
    let size = args.mib << 20;
    let Run { name, read_percent, hit_percent, .. } = run;
    let load = |seconds: u64| Load {
        loops: LOOPS,
        connections: 1,
        block: BLOCK,
        pattern: Pattern::Vdbench { read_percent, hit_percent, hit_area, span: size },
        time: Duration::from_secs(seconds),
        seed: 1,
        content: content.1,
    };
    let show = |what: &'static str, seconds: u64| {
        move |outcome: &Outcome| {
            let (second, now) = (outcome.per_second.len(), outcome.per_second.last());
            let now = now.copied().unwrap_or(0);
            progress(&format!("{name} {what}: {second}/{seconds} s, {now} IOPS"));
        }
    };
    let primary = format!("{}?emulate={}", place.text("primary"), args.model);
    let cached = Setting { primary, ..settings(args) };
    let plain =
        Setting { cache: ("unused".to_owned(), 64 << 20), mode: "pass-through", ..cached.clone() };

    let server = Server::forebay(&binary, place, &plain)?;
    let seconds = args.baseline_seconds;
    let baseline = server.load(&load(seconds), show("baseline", seconds))?;
    server.stop()?;

    let server = Server::forebay(&binary, place, &cached)?;
    let before = server.status()?;
    let mut limit_at = None;
    let shown = show("cached", args.seconds);
    let cached = server.load(&load(args.seconds), |outcome| {
        shown(outcome);
        let held = server.status().map_or(0, |status| status.counter("throttled_nanos"));
        if held > before.counter("throttled_nanos") && limit_at.is_none() {
            limit_at = Some(outcome.per_second.len());
        }
    })?;
    let after = server.status()?;
    server.kill();
    // Each run starts with an empty cache.
    for name in ["cache", "cache.state", "unused", "unused.state"] {
        place.remove(name);
    }

    let server = Server::nbdkit_memory(place, size)?;
    let seconds = args.baseline_seconds.min(5);
    let ceiling = server.load(&load(seconds), show("ceiling", seconds))?;
    Ok(Measured { run, content: content.0, baseline, cached, ceiling, limit_at, before, after })
}

fn table(results: &[Measured]) -> Table {
    let mut table = Table::new(&[
        "run",
        "content",
        "reads",
        "hits",
        "baseline",
        "cached",
        "gain",
        "ceiling",
        "HyperCache",
        "FlashSoft",
        "ms",
        "held back",
        "target",
        "",
    ]);
    for one in results {
        let (gain, target) = (one.gain(), one.target());
        table.row([
            one.run.name.to_owned(),
            one.content.to_owned(),
            format!("{} %", one.run.read_percent),
            format!("{} %", one.run.hit_percent),
            format!("{:.0}", one.baseline.rate()),
            format!("{:.0}", one.cached.rate()),
            format!("{gain:.1}"),
            format!("{:.1}", one.ceiling()),
            format!("{:.1}", one.run.hypercache),
            format!("{:.1}", one.run.flashsoft),
            format!("{:.2} / {:.2}", one.baseline.latency_ms(), one.cached.latency_ms()),
            one.limit_at.map_or("never".to_owned(), |second| format!("from {second} s")),
            format!(">= {target:.1}"),
            verdict(gain >= target),
        ]);
    }
    table
}
