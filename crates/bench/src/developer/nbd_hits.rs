//! Reads of 4 KiB at depth 32 through NBD: hits in RAM compared with nbdkit's memory plugin, hits
//! on the cache device compared with the same server in pass-through over the same kind of file.
//!
//! Both servers run all the time and are measured in turns; the ratio is that of the medians.

use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};

use crate::developer::hits::{self, DEPTH, Hits};
use crate::load::content::Content;
use crate::load::fio::{RandomReads, median};
use crate::load::{Load, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::table::{Table, verdict};
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};

const BLOCK: u64 = 4096;
/// RAM hits: at least nbdkit's memory plugin.
const RAM_TARGET: f64 = 1.0;
/// SSD hits: at least nine tenths of the same server without cache.
const SSD_TARGET: f64 = 0.9;

/// Arguments of the commands.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    hits: Hits,
    /// Connections that the 32 requests are spread over
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Threads of Forebay
    #[arg(long, default_value_t = 2)]
    shards: u16,
}

/// The client that generates the load.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tool {
    Own,
    Fio,
}

impl Tool {
    fn name(self) -> &'static str {
        match self {
            Self::Own => "own client",
            Self::Fio => "fio",
        }
    }
}

/// Measures RAM hits, compared with nbdkit.
pub fn ram(args: &Args) -> anyhow::Result<()> {
    let place = Place::new(args.hits.common.dir.as_deref())?;
    let size = args.hits.size();
    let setting = args.hits.setting(&place, args.shards, size * 2)?;
    let forebay = Server::forebay(&binary(args.hits.common.forebay.as_deref())?, &place, &setting)?;
    let other = Server::nbdkit_memory(&place, size)?;
    for server in [&forebay, &other] {
        server.load(&hits::fill(size), |_| {})?;
    }
    forebay.drain()?;
    let before = forebay.status()?;
    let results = compare(args, [&forebay, &other], size)?;
    hits::ensure_ram(&forebay, &before)?;
    let figures = json!({ "setting": setting.describe(), "results": results });
    present("nbd-ram", "nbdkit memory", RAM_TARGET, &figures)
}

/// Measures SSD hits, compared with the same server in pass-through.
pub fn ssd(args: &Args) -> anyhow::Result<()> {
    let place = Place::new(args.hits.common.dir.as_deref())?;
    let size = args.hits.size();
    place.sparse("plain", size)?;
    let setting = args.hits.setting(&place, args.shards, 1 << 20)?;
    let plain = Setting {
        primary: place.text("plain"),
        cache: ("unused".to_owned(), 64 << 20),
        mode: "pass-through",
        ..setting.clone()
    };
    let binary = binary(args.hits.common.forebay.as_deref())?;
    let forebay = Server::forebay(&binary, &place, &setting)?;
    let other = Server::forebay(&binary, &place, &plain)?;
    for server in [&forebay, &other] {
        server.load(&hits::fill(size), |_| {})?;
        server.drain()?;
    }
    let before = forebay.status()?;
    let results = compare(args, [&forebay, &other], size)?;
    let after = forebay.status()?;
    let read = |name| after.counter(name) - before.counter(name);
    let (ssd, ram) = (read("ssd_hit_blocks"), read("ram_hit_blocks"));
    ensure!(read("primary_read_blocks") == 0 && ssd > 20 * ram, "{ssd} SSD hits, {ram} RAM hits");
    let figures = json!({
        "setting": setting.describe(), "compared_with": plain.describe(), "results": results,
    });
    present("nbd-ssd", "pass-through", SSD_TARGET, &figures)
}

/// Measures both servers in turns, with each client.
fn compare(args: &Args, servers: [&Server; 2], size: u64) -> anyhow::Result<Vec<Value>> {
    let mut results = Vec::new();
    for tool in [Tool::Own, Tool::Fio] {
        let turns = args.hits.in_turns(tool.name(), |which, round| {
            let server = servers[which];
            let before = server.cpu();
            let rate = match tool {
                Tool::Own => own(args, server, size, round as u64)?,
                Tool::Fio => fio(args, server, size)?,
            };
            Ok((rate, server.cpu() - before))
        })?;
        let cpu = turns.costs.map(|costs| costs.iter().sum::<f64>() / costs.len().max(1) as f64);
        let [ours, theirs] = turns.rates.map(median);
        results.push(json!({
            "client": tool.name(), "ours": ours, "other": theirs, "ratio": ours / theirs,
            "cpu_us": cpu[0], "other_cpu_us": cpu[1],
        }));
    }
    Ok(results)
}

fn own(args: &Args, server: &Server, size: u64, seed: u64) -> anyhow::Result<f64> {
    let load = Load {
        loops: DEPTH,
        connections: args.connections,
        block: BLOCK,
        pattern: Pattern::Random { read_percent: 100, span: size },
        time: Duration::from_secs(args.hits.seconds),
        seed,
        content: Content::Random,
    };
    Ok(server.load(&load, |_| {})?.rate())
}

fn fio(args: &Args, server: &Server, size: u64) -> anyhow::Result<f64> {
    let place = vec!["--ioengine=nbd".to_owned(), format!("--uri={}", server.uri())];
    let (depth, jobs) = (DEPTH / args.connections, args.connections);
    RandomReads { place, depth, jobs, size, seconds: args.hits.seconds }.run()
}

fn present(name: &str, other: &str, target: f64, figures: &Value) -> anyhow::Result<()> {
    let mut table = Table::new(&[
        "4 KiB random reads, 32 in flight",
        "Forebay, IOPS",
        &format!("{other}, IOPS"),
        "CPU µs each",
        "ratio",
        "target",
        "",
    ]);
    let mut rows = Vec::new();
    for result in figures["results"].as_array().into_iter().flatten() {
        let number = |name: &str| result[name].as_f64().unwrap_or(f64::NAN);
        let client = result["client"].as_str().unwrap_or_default();
        let [ours, theirs, ratio, cost, other_cost] =
            ["ours", "other", "ratio", "cpu_us", "other_cpu_us"].map(number);
        let text = format!(
            "{ours:.0} / {theirs:.0} reads/s, ratio {ratio:.2}; \
             CPU {cost:.1} / {other_cost:.1} µs each"
        );
        let row = Row::new(format!("{name} over {other}, {client}"), text);
        rows.push(row.with_target(format!(">= {target:.1}"), ratio >= target));
        table.row([
            client.to_owned(),
            format!("{ours:.0}"),
            format!("{theirs:.0}"),
            format!("{cost:.1} / {other_cost:.1}"),
            format!("{ratio:.2}"),
            format!(">= {target:.1}"),
            verdict(ratio >= target),
        ]);
    }
    println!("{}", figures["setting"].as_str().unwrap_or_default());
    table.print();
    keep(name, rows, figures.clone())
}
