//! Reads while dirty data is drained to a slow primary, compared with the same reads before. Most
//! of them miss, so they need the primary too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use forebay_block::testing::Numbers;
use serde_json::json;

use crate::load::content::Content;
use crate::load::{Load, Outcome, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, VOLUME, binary};

/// The most that the 99th percentile may grow.
const TARGET: f64 = 2.0;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// MiB of the primary; the cache is a quarter
    #[arg(long, default_value_t = 2048)]
    mib: u64,
    /// Seconds of reading before the drain, and during it
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Reads in flight
    #[arg(long, default_value_t = 8)]
    depth: usize,
    /// Length of a request in bytes
    #[arg(long, default_value_t = 16384)]
    block: u64,
    /// The disk model
    #[arg(long, default_value = "raid10x4")]
    model: String,
}

/// Runs the measurement and reports.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let binary = binary(args.common.forebay.as_deref())?;
    let place = Place::new(args.common.dir.as_deref())?;
    progress("making the primary");
    place.full("primary", args.mib << 20)?;
    let more = ["--dirty-limit=90%", "--write-cache-depth=1h", "--idle-destage=0s"];
    let setting = Setting {
        primary: format!("{}?emulate={}", place.text("primary"), args.model),
        cache: ("cache".to_owned(), args.mib << 18),
        mode: "write-back",
        ram: 16 << 20,
        shards: 1,
        more: more.map(str::to_owned).to_vec(),
    };
    let server = Server::forebay(&binary, &place, &setting)?;
    server.ask(&["set", "dirty_target=90%"])?;
    let span = args.mib << 20;
    progress("writing");
    // A part of the limit that needs no destaging.
    let limit = server.status()?.counter("dirty_limit_blocks") * 4096;
    let count = limit / 2 / args.block;
    let mut numbers = Numbers::new(1);
    let blocks = (0..count).map(|_| numbers.below(span / args.block));
    let list = Pattern::List(Arc::new(blocks.collect()));
    let load = |pattern, seed, time| Load {
        loops: args.depth,
        connections: 1,
        block: args.block,
        pattern,
        time,
        seed,
        content: Content::Random,
    };
    server.load(&load(list, 1, Duration::from_secs(600)), |_| {})?;
    let reads = Pattern::Random { read_percent: 100, span };
    let time = Duration::from_secs(args.seconds);
    progress("reading");
    server.load(&load(reads.clone(), 2, Duration::from_secs(5)), |_| {})?;
    let before = server.load(&load(reads.clone(), 3, time), |_| {})?;
    let dirty = server.status()?.counter("dirty_blocks");
    progress("reading during a drain");
    let began = Instant::now();
    server.ask(&["drain", VOLUME, "--background"])?;
    let during = server.load(&load(reads, 4, time), |_| {})?;
    let elapsed = began.elapsed().as_secs_f64();
    let left = server.status()?.counter("dirty_blocks");
    server.stop()?;
    progress("");
    ensure!(left > 0, "the drain of {dirty} blocks was over before the reads; read for less time");
    let drained = (dirty - left) as f64 * 4096.0 / elapsed / f64::from(1 << 20);
    present(args, &setting.describe(), [&before, &during], drained)
}

fn present(
    args: &Args,
    setting: &str,
    [before, during]: [&Outcome; 2],
    drained: f64,
) -> anyhow::Result<()> {
    println!("{setting}");
    let mut table = Table::new(&["reads", "per second", "median ms", "p99 ms", "drained"]);
    let rate = ["-".to_owned(), format!("{drained:.1} MiB/s")];
    for ((name, outcome), rate) in
        [("before", before), ("during a drain", during)].into_iter().zip(rate)
    {
        table.row([
            name.to_owned(),
            format!("{:.0}", outcome.rate()),
            format!("{:.1}", outcome.times.p50_ms),
            format!("{:.1}", outcome.times.p99_ms),
            rate,
        ]);
    }
    table.print();
    let ratio = during.times.p99_ms / before.times.p99_ms;
    let met = ratio <= TARGET;
    println!("p99 during a drain / before: {ratio:.2}, at most {TARGET}: {}", verdict(met));
    let result = format!("{:.0} / {:.0} ms, {ratio:.2}", during.times.p99_ms, before.times.p99_ms);
    let row = Row::new("99th percentile of reads during a drain / before", result);
    let figures = json!({
        "setting": setting, "model": args.model, "request_bytes": args.block, "depth": args.depth,
        "before": { "per_second": before.rate(), "p99_ms": before.times.p99_ms },
        "during": { "per_second": during.rate(), "p99_ms": during.times.p99_ms },
        "drained_mib_per_second": drained, "ratio": ratio,
    });
    keep("drain", vec![row.with_target(format!("<= {TARGET}"), met)], figures)
}
