//! Random small writes in a cached part of an array with parity, at the dirty limit: with stripes
//! of the array filled from the cache, and written as they are.

use std::time::Duration;

use serde_json::json;

use crate::load::content::Content;
use crate::load::{Load, Outcome, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, VOLUME, binary};

/// Least gain in writes per second.
const TARGET: f64 = 1.5;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// MiB that are written; the cache is larger by 60 %
    #[arg(long, default_value_t = 160)]
    mib: u64,
    /// Seconds of writing that count
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Seconds of writing before
    #[arg(long, default_value_t = 15)]
    ramp: u64,
    /// Share of the cache that may be dirty
    #[arg(long, default_value = "20%")]
    dirty_limit: String,
    /// Length of a write in bytes
    #[arg(long, default_value_t = 4096)]
    block: u64,
    /// The disk model
    #[arg(long, default_value = "raid5x5")]
    model: String,
}

/// Runs the measurement and reports.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let binary = binary(args.common.forebay.as_deref())?;
    let mut found = Vec::new();
    for (name, stripe) in [("as they are", "0"), ("filled", "default")] {
        let place = Place::new(args.common.dir.as_deref())?;
        place.full("primary", (args.mib << 20) * 8)?;
        let setting = Setting {
            primary: format!("{}?emulate={}", place.text("primary"), args.model),
            cache: ("cache".to_owned(), (args.mib << 20) / 5 * 8),
            mode: "write-back",
            ram: 16 << 20,
            shards: 1,
            more: vec![format!("--dirty-limit={}", args.dirty_limit)],
        };
        let server = Server::forebay(&binary, &place, &setting)?;
        server.ask(&["set", VOLUME, &format!("stripe_size={stripe}")])?;
        progress(&format!("{name}: filling the cache"));
        let all = Pattern::Sequential { read: false, start: 0, end: args.mib << 20 };
        // Streams of shorter requests do not bypass the cache.
        server.load(&load(args, all, 32 << 10, Duration::from_secs(600)), |_| {})?;
        server.drain()?;
        let random = Pattern::Random { read_percent: 0, span: args.mib << 20 };
        progress(&format!("{name}: writing"));
        server.load(&load(args, random.clone(), args.block, seconds(args.ramp)), |_| {})?;
        let before = server.status()?;
        let outcome =
            server.load(&load(args, random, args.block, seconds(args.seconds)), |_| {})?;
        let after = server.status()?;
        let count = |name: &str| after.counter(name) - before.counter(name);
        let (blocks, writes) = (count("destaged_blocks"), count("destage_writes"));
        let filled = count("stripe_filled_blocks");
        found.push((name, setting.describe(), outcome, [blocks, filled, writes]));
        server.stop()?;
    }
    progress("");
    present(args, &found)
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn load(args: &Args, pattern: Pattern, block: u64, time: Duration) -> Load {
    let loops = if block == args.block { 16 } else { 4 };
    Load { loops, connections: 1, block, pattern, time, seed: 1, content: Content::Random }
}

type Found = (&'static str, String, Outcome, [u64; 3]);

fn present(args: &Args, found: &[Found]) -> anyhow::Result<()> {
    let mut table =
        Table::new(&["stripes", "writes/s", "p99 ms", "blocks destaged", "of them filling", "in"]);
    for (name, _, outcome, [blocks, filled, writes]) in found {
        table.row([
            (*name).to_owned(),
            format!("{:.0}", outcome.rate()),
            format!("{:.1}", outcome.times.p99_ms),
            blocks.to_string(),
            filled.to_string(),
            format!("{writes} writes"),
        ]);
    }
    table.print();
    let rates: Vec<f64> = found.iter().map(|(_, _, outcome, _)| outcome.rate()).collect();
    let gain = rates[1] / rates[0];
    println!("gain {gain:.1}, at least {TARGET}: {}", verdict(gain >= TARGET));
    let result = format!("{:.0} / {:.0} writes a second, {gain:.1}", rates[1], rates[0]);
    let row = Row::new("stripes of an array filled / as they are, at the dirty limit", result);
    let figures: Vec<_> = found
        .iter()
        .map(|(name, setting, outcome, [blocks, filled, writes])| {
            json!({
                "stripes": name, "setting": setting, "per_second": outcome.per_second,
                "p99_ms": outcome.times.p99_ms, "destaged_blocks": blocks,
                "stripe_filled_blocks": filled, "destage_writes": writes,
            })
        })
        .collect();
    let figures = json!({ "model": args.model, "request_bytes": args.block, "runs": figures });
    keep("stripes", vec![row.with_target(format!(">= {TARGET}"), gain >= TARGET)], figures)
}
