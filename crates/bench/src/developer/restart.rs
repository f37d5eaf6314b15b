//! Time until a killed server with a full cache serves again.

use std::time::Duration;

use anyhow::ensure;
use serde_json::json;

use crate::load::content::Content;
use crate::load::{Load, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};

/// Maximum time until clients can connect, in seconds.
const TARGET: f64 = 1.0;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// MiB of the cache
    #[arg(long, default_value_t = 10240)]
    mib: u64,
    /// Number of kills
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Threads of Forebay
    #[arg(long, default_value_t = 2)]
    shards: u16,
}

/// Runs the measurement and reports.
pub fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let place = Place::new(args.common.dir.as_deref())?;
    let binary = binary(args.common.forebay.as_deref())?;
    let size = args.mib << 20;
    place.sparse("primary", size)?;
    let setting = Setting {
        primary: place.text("primary"),
        cache: ("cache".to_owned(), size),
        mode: "write-back",
        ram: 64 << 20,
        shards: args.shards,
        more: vec!["--sequential-threshold=0".to_owned()],
    };
    let mut server = Server::forebay(&binary, &place, &setting)?;
    let fill = write(64 << 10, Pattern::Sequential { read: false, start: 0, end: size }, 3600);
    server.load(&fill, |outcome| {
        let done = outcome.ops * fill.block * 100 / size;
        progress(&format!("filling the cache: {done} %"));
    })?;
    let mut times = Vec::new();
    let mut cached = 0;
    for round in 0..args.rounds {
        // The server is killed while it writes, which is the realistic case.
        progress(&format!("kill {} of {}", round + 1, args.rounds));
        let pattern = Pattern::Random { read_percent: 0, span: size };
        server.load(&write(4096, pattern, 2), |_| {})?;
        cached = server.status()?.counter("cached_blocks") * 4096;
        server.kill();
        server = Server::forebay(&binary, &place, &setting)?;
        times.push(server.started_in.as_secs_f64());
        // A start begins a new segment in each shard, and evicts as soon as it serves.
        let status = server.status()?;
        let found = (status.counter("cached_blocks") + status.counter("evicted_blocks")) * 4096;
        ensure!(found >= cached / 100 * 99, "{found} of {cached} bytes were found by a start");
    }
    server.stop()?;
    progress("");
    let worst = times.iter().copied().fold(0.0, f64::max);
    let figures = json!({
        "setting": setting.describe(), "cached_bytes": cached, "seconds": times, "worst": worst,
        "target": TARGET,
    });
    println!("{}", setting.describe());
    let mut table = Table::new(&["SIGKILL until ready", "cached", "seconds", "target", ""]);
    for (round, seconds) in times.iter().enumerate() {
        table.row([
            format!("kill {}", round + 1),
            format!("{:.2} GiB", cached as f64 / f64::from(1 << 30)),
            format!("{seconds:.3}"),
            format!("< {TARGET:.1}"),
            verdict(*seconds < TARGET),
        ]);
    }
    table.print();
    let seconds: Vec<String> = times.iter().map(|seconds| format!("{seconds:.3}")).collect();
    let gib = cached as f64 / f64::from(1 << 30);
    let row = Row::new(
        format!("restart after a kill, {gib:.2} GiB cached"),
        format!("{} s", seconds.join(", ")),
    );
    keep("restart", vec![row.with_target(format!("< {TARGET} s"), worst < TARGET)], figures)
}

fn write(block: u64, pattern: Pattern, seconds: u64) -> Load {
    Load {
        loops: 16,
        connections: 1,
        block,
        pattern,
        time: Duration::from_secs(seconds),
        seed: 1,
        content: Content::Random,
    }
}
