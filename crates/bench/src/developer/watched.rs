//! What it costs to be watched: CPU time of the server's own observation under load, and its memory
//! while readers follow the page's stream.
//!
//! Memory is measured without a load: the statistics of the last hours hold more while latencies
//! spread, up to their bound, and this would hide a leak.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::json;

use crate::load::content::Content;
use crate::load::{Load, Outcome, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};

const BLOCK: u64 = 4096;
/// Length of the area that the load uses, in bytes: it fits in RAM.
const AREA: u64 = 16 << 20;
/// Requests a second under which the CPU time is measured, at least.
const RATE: f64 = 50_000.0;
/// Most CPU time of the observation, in percent of one core.
const CPU_TARGET: f64 = 1.0;
/// Most that memory may grow between the parts that are compared, in bytes. By default, 7 bytes in
/// each update would be more.
const GROWTH_TARGET: u64 = 128 << 10;
/// Time between two measurements of memory.
const STEP: Duration = Duration::from_secs(2);
/// Threads of the observation, by name.
const THREADS: [&str; 3] = ["monitor", "web", "events-store"];
/// A stream whose reader has waited for this long has ended.
const SILENCE: Duration = Duration::from_secs(10);

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// Readers of the page's stream
    #[arg(long, default_value_t = 32)]
    readers: u64,
    /// Minutes for which memory is measured
    #[arg(long, default_value_t = 20)]
    minutes: u64,
    /// Seconds for which CPU time is measured
    #[arg(long, default_value_t = 30)]
    seconds: u64,
}

/// Measures both, and prints them.
pub fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.readers > 0 && args.minutes > 0 && args.seconds > 0, "every number is at least 1");
    let place = Place::new(args.common.dir.as_deref())?;
    place.sparse("primary", 2 * AREA)?;
    let socket = place.path("web");
    let setting = Setting {
        primary: place.text("primary"),
        cache: ("cache".to_owned(), 64 << 20),
        mode: "write-back",
        ram: 4 * AREA,
        shards: 1,
        more: vec![format!("--web=unix:{}", socket.display())],
    };
    let server = Server::forebay(&binary(args.common.forebay.as_deref())?, &place, &setting)?;
    let area = Pattern::Sequential { read: false, start: 0, end: AREA };
    server.load(&load(area, Duration::from_secs(600)), |_| {})?;
    server.drain()?;
    let (updates, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let measured = thread::scope(|scope| {
        for _ in 0..args.readers {
            scope.spawn(|| {
                // Once the server is gone this fails, as it should.
                if let Err(error) = follow(&socket, &updates)
                    && !stop.load(Relaxed)
                {
                    eprintln!("a reader of the stream: {error:#}");
                }
            });
        }
        let measured = cpu(args, &server)
            .and_then(|cpu| Ok((cpu, memory(args, &server)?, updates.load(Relaxed))));
        stop.store(true, Relaxed);
        server.stop().and(measured)
    });
    let (cpu, memory, updates) = measured?;
    let wanted = args.readers * (args.minutes * 60 + args.seconds);
    // A second may be left out when the machine is busy.
    ensure!(updates >= wanted / 10 * 9, "{updates} updates came, {wanted} should have");
    present(args, &setting, &cpu, &memory, updates)
}

/// Reads the stream until the server ends, and counts its updates.
fn follow(socket: &Path, updates: &AtomicU64) -> anyhow::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.write_all(b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let mut lines = BufReader::new(stream).lines();
    let status = lines.next().context("no answer")??;
    ensure!(status.contains(" 200 "), "the answer is {status}");
    for line in lines {
        if line? == "event: update" {
            updates.fetch_add(1, Relaxed);
        }
    }
    Ok(())
}

/// CPU time of the observation under load.
struct Cpu {
    /// Requests a second.
    rate: f64,
    /// Percent of one core, by thread.
    threads: Vec<(&'static str, f64)>,
}

impl Cpu {
    fn sum(&self) -> f64 {
        self.threads.iter().map(|(_, percent)| percent).sum()
    }
}

fn cpu(args: &Args, server: &Server) -> anyhow::Result<Cpu> {
    progress("under load");
    let pid = server.process().pid();
    let before = THREADS.map(|name| thread_time(pid, name));
    let reads = Pattern::Random { read_percent: 90, span: AREA };
    let begin = Instant::now();
    let outcome: Outcome = server.load(&load(reads, Duration::from_secs(args.seconds)), |_| {})?;
    let elapsed = begin.elapsed();
    let mut threads = Vec::new();
    for (name, before) in THREADS.into_iter().zip(before) {
        let used = thread_time(pid, name)?.saturating_sub(before?);
        threads.push((name, 100.0 * used.as_secs_f64() / elapsed.as_secs_f64()));
    }
    Ok(Cpu { rate: outcome.rate(), threads })
}

/// CPU time used so far by the thread of this name (`/proc/PID/task/TID/schedstat`).
fn thread_time(pid: u32, name: &str) -> anyhow::Result<Duration> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))?.trim_end() == name {
            let text = fs::read_to_string(task.join("schedstat"))?;
            let nanos = text.split_whitespace().next().context("schedstat is empty")?;
            return Ok(Duration::from_nanos(nanos.parse()?));
        }
    }
    anyhow::bail!("the server has no thread {name}")
}

/// Median memory of the server in two parts of the time, in bytes.
struct Memory {
    /// In the second quarter: the statistics of the last five minutes have filled by then.
    early: u64,
    /// In the last quarter.
    late: u64,
}

fn memory(args: &Args, server: &Server) -> anyhow::Result<Memory> {
    let mut all = Vec::new();
    let begin = Instant::now();
    let end = begin + Duration::from_secs(60 * args.minutes);
    while Instant::now() < end {
        progress(&format!("{} of {} minutes", begin.elapsed().as_secs() / 60, args.minutes));
        all.push(server.process().anonymous_memory()?);
        thread::sleep(STEP);
    }
    let median = |part: &[u64]| {
        let mut part = part.to_vec();
        part.sort_unstable();
        part[part.len() / 2]
    };
    let quarter = all.len() / 4;
    ensure!(quarter > 0, "there were too few measurements");
    let (early, late) = (&all[quarter..2 * quarter], &all[all.len() - quarter..]);
    Ok(Memory { early: median(early), late: median(late) })
}

fn load(pattern: Pattern, time: Duration) -> Load {
    Load {
        loops: 8,
        connections: 1,
        block: BLOCK,
        pattern,
        time,
        seed: 1,
        content: Content::Random,
    }
}

fn present(
    args: &Args,
    setting: &Setting,
    cpu: &Cpu,
    memory: &Memory,
    updates: u64,
) -> anyhow::Result<()> {
    let growth = memory.late.saturating_sub(memory.early);
    let (light, steady) = (cpu.sum() < CPU_TARGET, growth <= GROWTH_TARGET);
    println!("{}, {} readers, {updates} updates", setting.describe(), args.readers);
    let mut table = Table::new(&["cost of being watched", "result", "target", ""]);
    for (name, percent) in &cpu.threads {
        let name = format!("CPU of the thread {name}");
        table.row([name, format!("{percent:.2} %"), String::new(), String::new()]);
    }
    table.row([
        format!("CPU of all, at {:.0} requests/s", cpu.rate),
        format!("{:.2} %", cpu.sum()),
        format!("< {CPU_TARGET} %"),
        verdict(light),
    ]);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    table.row([
        format!("memory in {} minutes", args.minutes),
        format!("{:.2} to {:.2} MiB", mib(memory.early), mib(memory.late)),
        format!("+ {:.2} MiB", mib(GROWTH_TARGET)),
        verdict(steady),
    ]);
    table.print();
    let figures = json!({
        "setting": setting.describe(), "readers": args.readers, "updates": updates,
        "requests_per_second": cpu.rate, "cpu_percent": cpu.threads,
        "early_bytes": memory.early, "late_bytes": memory.late,
    });
    let rows = vec![
        Row::new(
            format!(
                "CPU of statistics, web listener and events at {:.0} requests/s, {} readers of \
                 the stream",
                cpu.rate, args.readers
            ),
            format!("{:.2} % of a core", cpu.sum()),
        )
        .with_target(format!("< {CPU_TARGET} %"), light),
        Row::new(
            format!("memory of the server during {updates} updates of the stream"),
            format!("{:.2} to {:.2} MiB", mib(memory.early), mib(memory.late)),
        )
        .with_target(format!("+ {:.2} MiB", mib(GROWTH_TARGET)), steady),
    ];
    keep("watched", rows, figures)?;
    ensure!(
        cpu.rate >= RATE,
        "only {:.0} requests a second were made, and {RATE} are wanted",
        cpu.rate
    );
    ensure!(light, "the observation took {:.2} % of a core", cpu.sum());
    ensure!(steady, "memory grew by {growth} bytes");
    Ok(())
}
