//! Latency of one client with hits in RAM, alone and together with many clients that read 32 MiB at
//! a time. The large reads bypass the cache.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};

use crate::load::content::Content;
use crate::load::sample::Latency;
use crate::load::{Load, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};

const BLOCK: u64 = 4096;
/// Length of the area that the client with the hits reads, in bytes.
const HOT: u64 = 4 << 20;
/// Length of a large read in bytes: the maximum of the protocol.
const LARGE: u64 = 32 << 20;
/// Length of the area of the large reads, in bytes.
const SPAN: u64 = 512 << 20;
/// Maximum p99 of the hits during the large reads, in milliseconds.
const TARGET_MS: f64 = 20.0;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// Clients with large reads
    #[arg(long, default_value_t = 25)]
    clients: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Threads of Forebay
    #[arg(long, default_value_t = 2)]
    shards: u16,
}

/// Measures both cases, and prints them.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let place = Place::new(args.common.dir.as_deref())?;
    place.sparse("primary", SPAN)?;
    let setting = Setting {
        primary: place.text("primary"),
        cache: ("cache".to_owned(), 256 << 20),
        mode: "write-back",
        ram: 64 << 20,
        shards: args.shards,
        more: Vec::new(),
    };
    let server = Server::forebay(&binary(args.common.forebay.as_deref())?, &place, &setting)?;
    server.load(&fill(), |_| {})?;
    server.drain()?;
    progress("alone");
    let alone = hits(args, &server)?;
    progress(&format!("beside {} clients", args.clients));
    let (beside, others) = beside(args, &server)?;
    progress("");
    let figures = json!({
        "setting": setting.describe(), "clients": args.clients,
        "alone": alone, "beside": beside, "large_reads_mib_s": others,
    });
    present(&figures, &alone, &beside)
}

/// Latency of the hits during the large reads, and the rate of those in MiB per second.
fn beside(args: &Args, server: &Server) -> anyhow::Result<(Latency, f64)> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let others = scope.spawn(|| {
            let mut rate = 0.0;
            let mut seed = 1;
            while !over.load(Relaxed) {
                seed += 1;
                let outcome = server.load(&large(args, seed), |_| {})?;
                rate = outcome.rate() * (LARGE >> 20) as f64;
            }
            anyhow::Ok(rate)
        });
        let measured = hits(args, server);
        over.store(true, Relaxed);
        let rate = others.join().expect("it does not panic")?;
        Ok((measured?, rate))
    })
}

fn hits(args: &Args, server: &Server) -> anyhow::Result<Latency> {
    let load = Load {
        loops: 1,
        connections: 1,
        block: BLOCK,
        pattern: Pattern::Random { read_percent: 100, span: HOT },
        time: Duration::from_secs(args.seconds),
        seed: 1,
        content: Content::Random,
    };
    let before = server.status()?;
    let outcome = server.load(&load, |_| {})?;
    let after = server.status()?;
    let hit = after.counter("ram_hit_blocks") - before.counter("ram_hit_blocks");
    // The large reads take places in RAM too; the few resulting misses are included in the figures.
    ensure!(hit >= outcome.ops / 10 * 9, "of {} reads only {hit} hit RAM", outcome.ops);
    Ok(outcome.times)
}

/// The load of large reads, with one in flight for each client.
fn large(args: &Args, seed: u64) -> Load {
    Load {
        loops: args.clients,
        connections: args.clients,
        block: LARGE,
        pattern: Pattern::Random { read_percent: 100, span: SPAN },
        time: Duration::from_secs(args.seconds + 5),
        seed,
        content: Content::Random,
    }
}

/// Writes the data of the hits, incompressible.
fn fill() -> Load {
    Load {
        loops: 4,
        connections: 1,
        block: 64 << 10,
        pattern: Pattern::Sequential { read: false, start: 0, end: HOT },
        time: Duration::from_secs(3600),
        seed: 1,
        content: Content::Random,
    }
}

fn present(figures: &Value, alone: &Latency, beside: &Latency) -> anyhow::Result<()> {
    let mut table = Table::new(&["4 KiB hits in RAM", "p50 ms", "p99 ms", "max ms", "target", ""]);
    for (name, latency, target) in [("alone", alone, None), ("beside", beside, Some(TARGET_MS))] {
        table.row([
            name.to_owned(),
            format!("{:.3}", latency.p50_ms),
            format!("{:.3}", latency.p99_ms),
            format!("{:.1}", latency.max_ms),
            target.map_or(String::new(), |target| format!("p99 <= {target:.0}")),
            target.map_or(String::new(), |target| verdict(latency.p99_ms <= target).to_string()),
        ]);
    }
    println!("{}", figures["setting"].as_str().unwrap_or_default());
    table.print();
    println!("large reads: {:.0} MiB/s", figures["large_reads_mib_s"].as_f64().unwrap_or(0.0));
    let result = format!("p99 {:.2} ms (alone {:.2})", beside.p99_ms, alone.p99_ms);
    let row = Row::new("RAM hits during 32 MiB reads of other clients", result);
    let row = row.with_target(format!("p99 <= {TARGET_MS:.0} ms"), beside.p99_ms <= TARGET_MS);
    keep("fairness", vec![row], figures.clone())
}
