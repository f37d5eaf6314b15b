//! Behavior at the dirty limit: random writes as fast as they are accepted, until the cache has as
//! many dirty blocks as it may; then the drain of the rest.
//!
//! There must be no dips: once the limit is reached, the worst second is compared with the median
//! one, and the worst step of ten seconds with the median step. The drain is compared with the same
//! client writing the same blocks, sorted by address, through the same server without cache to the
//! same primary.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::load::content::Content;
use crate::load::{Load, Outcome, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};

/// Minimum of the worst second as a share of the median one.
const STEADY_TARGET: f64 = 0.8;
/// Minimum rate of the drain as a share of sorted writes.
const DRAIN_TARGET: f64 = 0.95;
/// Seconds of a step.
const STEP: usize = 10;
/// Seconds at the limit that are left out before the rate is judged.
const SETTLING: usize = 5;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// MiB of the primary; the cache is a quarter
    #[arg(long, default_value_t = 2048)]
    mib: u64,
    /// Seconds of writing
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Length of a write in bytes
    #[arg(long, default_value_t = 16384)]
    block: u64,
    /// Writes in flight for the sorted writes
    #[arg(long, default_value_t = 32)]
    depth: usize,
    /// Threads of Forebay
    #[arg(long, default_value_t = 1)]
    shards: u16,
    /// The disk model
    #[arg(long, default_value = "raid10x4")]
    model: String,
}

/// Runs the measurement and reports.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let place = Place::new(args.common.dir.as_deref())?;
    let binary = binary(args.common.forebay.as_deref())?;
    progress("making the primary");
    place.full("primary", args.mib << 20)?;
    let cached = Setting {
        primary: format!("{}?emulate={}", place.text("primary"), args.model),
        cache: ("cache".to_owned(), args.mib << 18),
        mode: "write-back",
        ram: 64 << 20,
        shards: args.shards,
        more: Vec::new(),
    };
    let server = Server::forebay(&binary, &place, &cached)?;
    let (line, saturated) = saturate(args, &server)?;
    server.stop()?;
    let blocks = dirty_chunks(&binary, &place, args.block)?;

    let server = Server::forebay(&binary, &place, &cached)?;
    let dirty = server.status()?.counter("dirty_blocks") * 4096;
    progress("draining");
    let begin = Instant::now();
    server.drain()?;
    let drained = dirty as f64 / begin.elapsed().as_secs_f64();
    server.stop()?;

    let plain =
        Setting { cache: ("unused".to_owned(), 64 << 20), mode: "pass-through", ..cached.clone() };
    let server = Server::forebay(&binary, &place, &plain)?;
    progress("writing the same blocks sorted");
    let sorted = Load {
        loops: args.depth,
        connections: 1,
        block: args.block,
        pattern: Pattern::List(Arc::new(blocks)),
        time: Duration::from_secs(3600),
        seed: 2,
        content: Content::Random,
    };
    let sorted = server.load(&sorted, |_| {})?;
    let sorted = sorted.rate() * args.block as f64;
    progress("");
    let from = saturated + SETTLING;
    ensure!(line.per_second.len() > from + 5, "too short: the limit was reached at {saturated} s");
    let mut steady = line.per_second[from..].to_vec();
    steady.sort_unstable();
    let (worst, median) = (steady[0], steady[steady.len() / 2]);
    let steps = line.per_second[from..].chunks_exact(STEP).map(|step| step.iter().sum::<u64>());
    let mut steps: Vec<u64> = steps.collect();
    steps.sort_unstable();
    let (step_worst, step_median) =
        (steps.first().copied().unwrap_or(0), steps.get(steps.len() / 2).copied().unwrap_or(0));
    let figures = json!({
        "setting": cached.describe(), "primary_bytes": args.mib << 20, "model": args.model,
        "request_bytes": args.block, "per_second": line.per_second,
        "saturated_at_second": saturated, "judged_from_second": from, "worst": worst,
        "median": median, "steadiness": worst as f64 / median as f64,
        "step_worst": step_worst, "step_median": step_median,
        "step_steadiness": step_worst as f64 / step_median as f64,
        "dirty_bytes_drained": dirty, "drain_bytes_per_second": drained,
        "sorted_bytes_per_second": sorted, "drain_ratio": drained / sorted,
    });
    present(&figures)
}

/// Writes until the time is over. Returns the result, and the second from which writes were
/// delayed.
fn saturate(args: &Args, server: &Server) -> anyhow::Result<(Outcome, usize)> {
    let load = Load {
        loops: 32,
        connections: 1,
        block: args.block,
        pattern: Pattern::Random { read_percent: 0, span: args.mib << 20 },
        time: Duration::from_secs(args.seconds),
        seed: 1,
        content: Content::Random,
    };
    let mut reached = None;
    let outcome = server.load(&load, |outcome| {
        let second = outcome.per_second.len();
        let now = outcome.per_second.last().copied().unwrap_or(0);
        let Ok(status) = server.status() else { return };
        let (dirty, limit) = (status.counter("dirty_blocks"), status.counter("dirty_limit_blocks"));
        progress(&format!("{second}/{} s, {now} IOPS, {dirty} of {limit} dirty", args.seconds));
        // Writes are delayed from 60 % of the limit on, more the closer they come to it.
        if status.counter("throttled_nanos") > 0 && reached.is_none() {
            reached = Some(second);
        }
    })?;
    Ok((outcome, reached.context("no write was held back; write longer")?))
}

/// The pieces of `block` bytes that contain dirty blocks, in address order.
fn dirty_chunks(binary: &std::path::Path, place: &Place, block: u64) -> anyhow::Result<Vec<u64>> {
    let cache = place.text("cache");
    let output = Command::new(binary).args(["dump", &cache, "--blocks", "--json"]).output()?;
    ensure!(output.status.success(), "dump: {}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let blocks = report["blocks"].as_array().context("dump lists blocks")?;
    let dirty = blocks.iter().filter(|entry| entry["dirty"] == true);
    let numbers = dirty.filter_map(|entry| entry["block"].as_u64());
    let chunks: BTreeSet<u64> = numbers.map(|number| number * 4096 / block).collect();
    Ok(chunks.into_iter().collect())
}

fn present(figures: &Value) -> anyhow::Result<()> {
    let number = |name: &str| figures[name].as_f64().unwrap_or(f64::NAN);
    let mib = |name: &str| format!("{:.1} MiB/s", number(name) / f64::from(1 << 20));
    println!("{}", figures["setting"].as_str().unwrap_or_default());
    let line: Vec<String> =
        figures["per_second"].as_array().into_iter().flatten().map(Value::to_string).collect();
    println!("writes in each second: {}", line.join(" "));
    let mut table = Table::new(&["at the dirty limit", "", "", "ratio", "target", ""]);
    let rows = [
        (
            "worst second / median second",
            [format!("{:.0}", number("worst")), format!("{:.0}", number("median"))],
            number("steadiness"),
            STEADY_TARGET,
        ),
        (
            "worst ten seconds / median ten seconds",
            [format!("{:.0}", number("step_worst")), format!("{:.0}", number("step_median"))],
            number("step_steadiness"),
            STEADY_TARGET,
        ),
        (
            "drain / the same blocks sorted",
            [mib("drain_bytes_per_second"), mib("sorted_bytes_per_second")],
            number("drain_ratio"),
            DRAIN_TARGET,
        ),
    ];
    let mut kept = Vec::new();
    for (name, [first, second], ratio, target) in rows {
        let (ratio_text, target_text) = (format!("{ratio:.2}"), format!(">= {target}"));
        let met = ratio >= target;
        let row = Row::new(name, format!("{first} / {second}, {ratio_text}"));
        kept.push(row.with_target(target_text.clone(), met));
        table.row([name.to_owned(), first, second, ratio_text, target_text, verdict(met)]);
    }
    table.print();
    keep("dirty-limit", kept, figures.clone())
}
