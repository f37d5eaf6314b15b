//! fio over NBD, which verifies all that it reads. In an upgrade its connections are handed over:
//! it cannot connect again, so the first one that breaks is an error. Kills break connections, so a
//! client that connects again is in between there: QEMU's, with `reconnect-delay`.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::developer::survive::events::{Event, Events, Kind, Programs};
use crate::report::kept::{Row, keep};
use crate::report::table::Table;
use crate::rig::cleanup::{Process, finish};
use crate::rig::kept::Kept;
use crate::rig::place::Place;
use crate::rig::server::{Setting, binary};
use crate::rig::{Common, needs};
use forebay_block::testing::Numbers;

/// Size of the volume, and of the part that fio uses, in bytes.
const SIZE: u64 = 512 << 20;
const USED: u64 = 256 << 20;
/// Seconds that QEMU's client waits for the server.
const DELAY: u32 = 60;
/// Time limit for a program to start.
const PATIENCE: Duration = Duration::from_secs(20);

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// Number of upgrades under fio's own client
    #[arg(long, default_value_t = 50)]
    upgrades: usize,
    /// Number of kills under QEMU's client
    #[arg(long, default_value_t = 50)]
    kills: usize,
    /// Minimum milliseconds between two events; up to half of it more
    #[arg(long, default_value_t = 2_000)]
    millis: u64,
    /// Seconds of one round of fio
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// The program to upgrade to, of another version [default: a copy of the same one]
    #[arg(long, value_name = "PATH")]
    next: Option<PathBuf>,
    /// Seed of the times of events
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What fio did in all its rounds.
#[derive(Default)]
struct Work {
    rounds: AtomicU64,
    requests: AtomicU64,
    /// The longest time of a request, in nanoseconds.
    longest: AtomicU64,
}

/// Runs both; an error at the first wrong byte or error.
pub fn run(args: &Args) -> anyhow::Result<()> {
    needs::tools(&[("fio", "fio"), ("qemu-storage-daemon", "qemu-system-common")])?;
    let place = Place::new(args.common.dir.as_deref())?;
    let binary = binary(args.common.forebay.as_deref())?;
    let programs = Programs::new(&binary, args.next.as_deref(), &place)?;
    place.sparse("primary", SIZE)?;
    let setting = Setting {
        primary: place.text("primary"),
        cache: ("cache".to_owned(), 256 << 20),
        mode: "write-back",
        ram: 16 << 20,
        shards: 2,
        more: Vec::new(),
    };
    println!("{}", setting.describe());
    let kept = Kept::start(&binary, &place, &setting)?;
    let mut table = Table::new(&["client", "events", "requests", "longest request, s", "errors"]);
    let (mut rows, mut figures) = (Vec::new(), Vec::new());
    let cases = [
        ("fio's own client", Kind::Upgrade, args.upgrades),
        ("QEMU's client, reconnect-delay", Kind::Kill, args.kills),
    ];
    for (client, kind, count) in cases {
        if count == 0 {
            continue;
        }
        let between = (kind == Kind::Kill).then(|| Between::start(&place, &kept)).transpose()?;
        let uri = between.as_ref().map_or_else(|| kept.server().uri(), Between::uri);
        let (events, work) = exercise(args, &kept, &programs, &uri, vec![kind; count])?;
        let longest = work.longest.into_inner() as f64 / 1e9;
        let requests = work.requests.into_inner();
        let what = format!("{} times {}", events.len(), kind.name());
        let cells = [what, requests.to_string(), format!("{longest:.2}"), "0".to_owned()];
        table.row([client.to_owned()].into_iter().chain(cells));
        rows.push(
            Row::new(
                format!("fio with verification over NBD, {client}, {count} times {}", kind.name()),
                format!("no error in {requests} requests, the longest {longest:.2} s"),
            )
            .with_target("no error", true),
        );
        figures.push(json!({
            "client": client, "event": kind.name(), "count": events.len(), "requests": requests,
            "longest_seconds": longest, "rounds": work.rounds.into_inner(),
        }));
    }
    kept.stop()?;
    table.print();
    keep("survive-nbd", rows, Value::from(figures))
}

/// Runs rounds of fio until all events have happened.
fn exercise(
    args: &Args,
    kept: &Kept,
    programs: &Programs,
    uri: &str,
    kinds: Vec<Kind>,
) -> anyhow::Result<(Vec<Event>, Work)> {
    let (over, failed, work) = (AtomicBool::new(false), AtomicBool::new(false), Work::default());
    let count = kinds.len();
    let (events, done) = std::thread::scope(|scope| {
        let rounds = scope.spawn(|| {
            let mut outcome = Ok(());
            while outcome.is_ok() && !over.load(Relaxed) {
                outcome = fio(args, uri, &work);
            }
            failed.store(outcome.is_err(), Relaxed);
            outcome
        });
        let interval = Duration::from_millis(args.millis);
        let numbers = Numbers::new(args.seed);
        let mut events = Events { kept, programs, interval, numbers, stop: &failed };
        let events = events.all(kinds, |_| {});
        over.store(true, Relaxed);
        (events, rounds.join().unwrap_or_else(|_| Err(anyhow::anyhow!("fio's thread panicked"))))
    });
    done?;
    let events = events?;
    ensure!(events.len() == count, "only {} of {count} events happened", events.len());
    Ok((events, work))
}

/// One round of fio, which must verify everything.
fn fio(args: &Args, uri: &str, work: &Work) -> anyhow::Result<()> {
    let round = work.rounds.fetch_add(1, Relaxed);
    let said = finish(
        Command::new("fio")
            .args(["--name=verified", "--rw=randrw", "--bsrange=512-128k", "--ioengine=nbd"])
            .args(["--iodepth=16", "--verify=crc32c", "--verify_backlog=64", "--verify_fatal=1"])
            .args(["--fsync=50", "--time_based", "--output-format=json"])
            .arg(format!("--size={USED}"))
            .arg(format!("--runtime={}", args.seconds))
            .arg(format!("--randseed={}", args.seed * 1000 + round))
            .arg(format!("--uri={uri}")),
    )?;
    let start = said.find('{').context("fio printed no JSON")?;
    let report: Value = serde_json::from_str(&said[start..])?;
    let job = &report["jobs"][0];
    ensure!(job["error"] == 0, "fio: error {}", job["error"]);
    for way in ["read", "write", "sync"] {
        work.requests.fetch_add(job[way]["total_ios"].as_u64().unwrap_or(0), Relaxed);
        let longest = job[way]["lat_ns"]["max"].as_u64().unwrap_or(0);
        work.longest.fetch_max(longest, Relaxed);
    }
    ensure!(work.requests.load(Relaxed) > 0, "fio did nothing");
    Ok(())
}

/// qemu-storage-daemon: a client that connects again, and an NBD server for fio.
struct Between {
    _process: Process,
    socket: PathBuf,
}

impl Between {
    fn start(place: &Place, kept: &Kept) -> anyhow::Result<Self> {
        let socket = place.path("between.nbd");
        let path = |path: &Path| path.display().to_string();
        let mut command = Command::new("qemu-storage-daemon");
        command
            .arg("--blockdev")
            .arg(format!(
                "driver=nbd,node-name=disk,server.type=unix,server.path={},export={},\
                 reconnect-delay={DELAY}",
                path(&kept.server().socket),
                kept.server().export
            ))
            .args(["--nbd-server", &format!("addr.type=unix,addr.path={}", path(&socket))])
            .args(["--export", "type=nbd,id=export,node-name=disk,name=disk,writable=on"]);
        let process = Process::start(command, &place.path("between.log"), false)?;
        let limit = Instant::now() + PATIENCE;
        while UnixStream::connect(&socket).is_err() {
            let ended = process.ended()?.is_some();
            ensure!(!ended && Instant::now() < limit, "qemu-storage-daemon: {}", process.said());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Self { _process: process, socket })
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket.display())
    }
}
