//! Time until a killed server with a full cache serves again, and until it has loaded all of it.
//!
//! With `--synthetic` the cache is filled without writing its blocks ([`full_cache`]): a start does
//! not read them. So a cache of 100 GiB takes a minute.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::json;

use crate::load::content::Content;
use crate::load::{Load, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::Common;
use crate::rig::full_cache;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};

/// Maximum time until clients can connect, in seconds.
const TARGET: f64 = 1.0;

/// Time limit for loading the rest.
const PATIENCE: Duration = Duration::from_secs(300);

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
    /// Fill the cache with entries only, and kill the server while it is idle
    #[arg(long)]
    synthetic: bool,
    /// Additional flags of the server
    #[arg(long, value_name = "FLAG")]
    serve: Vec<String>,
}

/// A start: seconds since it began, CPU seconds, and the most memory in bytes.
struct Measured {
    ready: f64,
    answer: f64,
    loaded: f64,
    cpu_ready: f64,
    cpu_loaded: f64,
    memory: u64,
    blocks: u64,
}

/// Starts a server, and waits until it has loaded everything.
fn start(binary: &Path, place: &Place, setting: &Setting) -> anyhow::Result<(Server, Measured)> {
    let begin = Instant::now();
    let server = Server::forebay(binary, place, setting)?;
    let cpu_ready = server.cpu().as_secs_f64();
    server.flush()?;
    let answer = begin.elapsed().as_secs_f64();
    while server.status()?.counter("unloaded_segments") > 0 {
        ensure!(begin.elapsed() < PATIENCE, "the cache is not loaded after {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let measured = Measured {
        ready: server.started_in.as_secs_f64(),
        answer,
        loaded: begin.elapsed().as_secs_f64(),
        cpu_ready,
        cpu_loaded: server.cpu().as_secs_f64(),
        memory: server.process().peak_memory()?,
        blocks: server.status()?.counter("cached_blocks"),
    };
    Ok((server, measured))
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
        more: [vec!["--sequential-threshold=0".to_owned()], args.serve.clone()].concat(),
    };
    if args.synthetic {
        return synthetic(args, &binary, &place, &setting);
    }
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
        let (next, measured) = start(&binary, &place, &setting)?;
        server = next;
        times.push(measured.ready);
        // A start begins a new segment in each shard, and evicts as soon as all is loaded.
        let found = (measured.blocks + server.status()?.counter("evicted_blocks")) * 4096;
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

/// Measures starts of a cache that was filled with entries only.
fn synthetic(args: &Args, binary: &Path, place: &Place, setting: &Setting) -> anyhow::Result<()> {
    progress("making the cache");
    // The server would allocate all of an empty file.
    place.sparse(&setting.cache.0, setting.cache.1)?;
    Server::forebay(binary, place, setting)?.stop()?;
    let blocks = full_cache::fill(&place.path(&setting.cache.0))?;
    println!("{}", setting.describe());
    let columns = ["start", "ready", "answer", "loaded", "CPU ready", "CPU loaded", "memory", ""];
    let mut table = Table::new(&columns);
    let (mut all, mut worst) = (Vec::new(), 0.0f64);
    for round in 0..args.rounds {
        progress(&format!("start {} of {}", round + 1, args.rounds));
        let (server, measured) = start(binary, place, setting)?;
        server.kill();
        let Measured { ready, answer, loaded, cpu_ready, cpu_loaded, memory, .. } = measured;
        ensure!(measured.blocks == blocks, "{} of {blocks} blocks are cached", measured.blocks);
        worst = worst.max(answer);
        let seconds = [ready, answer, loaded, cpu_ready, cpu_loaded].map(|s| format!("{s:.2} s"));
        let [ready, answer, loaded, cpu_ready, cpu_loaded] = seconds.clone();
        let (memory, met) = (format!("{} MiB", memory >> 20), verdict(worst < TARGET));
        let start = format!("{}", round + 1);
        table.row([start, ready, answer, loaded, cpu_ready, cpu_loaded, memory.clone(), met]);
        all.push(json!({ "seconds": seconds, "memory": memory }));
    }
    progress("");
    table.print();
    let gib = blocks as f64 * 4096.0 / f64::from(1 << 30);
    let row = Row::new(
        format!("start of a full cache, {gib:.1} GiB, until the first answer"),
        format!("{worst:.2} s"),
    );
    let figures = json!({ "setting": setting.describe(), "blocks": blocks, "starts": all });
    keep(
        "restart-synthetic",
        vec![row.with_target(format!("< {TARGET} s"), worst < TARGET)],
        figures,
    )
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
