//! The price of shards: bytes written to the cache device for each stored byte, and CPU time of
//! each write, by number of shards. Random writes over one connection: at depth 32 the writes of a
//! turn share a record, but only with those of the same shard; at depth 1 each has a record of its
//! own.

use std::time::Duration;

use serde_json::json;

use crate::load::content::Content;
use crate::load::{Load, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::Table;
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};

/// Sizes of a write, in bytes.
const SIZES: [u64; 2] = [4 << 10, 16 << 10];

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// Numbers of shards
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8,16")]
    shards: Vec<u16>,
    /// Requests in flight
    #[arg(long, default_value_t = 32)]
    depth: usize,
    /// Seconds of each load
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// MiB of the primary; the cache has the same size
    #[arg(long, default_value_t = 512)]
    mib: u64,
}

/// The figures of one number of shards and size.
struct Measured {
    shards: u16,
    size: u64,
    /// Payloads in a record.
    grouped: f64,
    /// Bytes of log and store for each stored byte.
    written: f64,
    /// CPU time of the server for each write, in microseconds.
    cpu: f64,
    rate: f64,
    /// Median and 99 % of the latency at depth 1, in milliseconds.
    alone: [f64; 2],
}

/// Runs the measurement and reports.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for size in SIZES {
        for &shards in &args.shards {
            progress(&format!("{} KiB, {shards} shards", size >> 10));
            all.push(measure(args, shards, size)?);
        }
    }
    progress("");
    table(&all, args.depth).print();
    let row = |one: &Measured| {
        let name = format!("log and store, {} KiB writes, {} shards", one.size >> 10, one.shards);
        let text = format!("{:.3} bytes a byte, CPU {:.1} µs a write", one.written, one.cpu);
        Row::new(name, text)
    };
    let json = |one: &Measured| {
        json!({
            "shards": one.shards, "write_bytes": one.size, "payloads_in_a_record": one.grouped,
            "written_per_stored_byte": one.written, "cpu_us": one.cpu, "rate": one.rate,
            "depth_1_ms": { "p50": one.alone[0], "p99": one.alone[1] },
        })
    };
    let figures: Vec<_> = all.iter().map(json).collect();
    let figures = json!({ "depth": args.depth, "seconds": args.seconds, "results": figures });
    keep("shards", all.iter().map(row).collect(), figures)
}

fn measure(args: &Args, shards: u16, block: u64) -> anyhow::Result<Measured> {
    let place = Place::new(args.common.dir.as_deref())?;
    let bytes = args.mib << 20;
    place.sparse("primary", bytes)?;
    let setting = Setting {
        primary: place.text("primary"),
        cache: ("cache".to_owned(), bytes),
        mode: "write-back",
        ram: 64 << 20,
        shards,
        more: vec!["--sequential-threshold=0".to_owned()],
    };
    let server = Server::forebay(&binary(args.common.forebay.as_deref())?, &place, &setting)?;
    let load = |loops| Load {
        loops,
        connections: 1,
        block,
        pattern: Pattern::Random { read_percent: 0, span: bytes },
        time: Duration::from_secs(args.seconds),
        seed: 1,
        content: Content::Random,
    };
    let alone = server.load(&load(1), |_| {})?.times;
    let (before, cpu) = (server.status()?, server.cpu());
    let outcome = server.load(&load(args.depth), |_| {})?;
    let (after, cpu) = (server.status()?, server.cpu() - cpu);
    let count = |name| (after.counter(name) - before.counter(name)) as f64;
    let written = count("log_bytes") + count("store_bytes");
    // A duplicate has no payload of its own.
    let payloads = count("log_blocks") - count("duplicate_blocks");
    let stored = (payloads + count("stored_blocks")) * 4096.0;
    server.kill();
    Ok(Measured {
        shards,
        size: block,
        grouped: payloads / count("log_records"),
        written: written / stored,
        cpu: cpu.as_secs_f64() * 1e6 / outcome.ops as f64,
        rate: outcome.rate(),
        alone: [alone.p50_ms, alone.p99_ms],
    })
}

fn table(all: &[Measured], depth: usize) -> Table {
    let mut table = Table::new(&[
        &format!("writes at depth {depth}"),
        "shards",
        "payloads a record",
        "bytes a stored byte",
        "CPU µs a write",
        "writes/s",
        "depth 1: 50 %, 99 %, ms",
    ]);
    for one in all {
        table.row([
            format!("{} KiB", one.size >> 10),
            one.shards.to_string(),
            format!("{:.1}", one.grouped),
            format!("{:.3}", one.written),
            format!("{:.1}", one.cpu),
            format!("{:.0}", one.rate),
            format!("{:.3}, {:.3}", one.alone[0], one.alone[1]),
        ]);
    }
    table
}
