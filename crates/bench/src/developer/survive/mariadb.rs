//! MariaDB under TPC-C on an attached disk with XFS, over kills and upgrades of the server. There
//! may be no error: none in the kernel's log, none of MariaDB, none of its clients. Every order
//! whose commit a client saw must be there, and the consistency conditions must hold: while the
//! server runs, after the disk was mounted again, and on the primary alone after a drain.
//!
//! A probe on the same file system shows how long the disk did not answer; transactions show more,
//! since MariaDB has pauses of its own.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::dbms::mariadb::MariaDb;
use crate::dbms::{Dbms as _, MARIADB, TOOLS};
use crate::developer::loaded::{self, DATABASE};
use crate::developer::survive::events::{Event, Events, Kind, Programs};
use crate::developer::survive::pauses::{self, Pauses};
use crate::developer::survive::probe;
use crate::load::pulse::Pulse;
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::cleanup::{self, finish, tool};
use crate::rig::kept::Kept;
use crate::rig::kernel_log::KernelLog;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};
use crate::rig::setup::SetUp;
use crate::rig::{Common, needs};
use crate::tpcc::{self, Journal, Plan, Scale, Watch};
use forebay_block::testing::Numbers;

/// What the image is made of.
pub(super) const IMAGE: &str = "survive";
/// Size of the disk, in bytes.
pub(super) const DISK: u64 = 2 << 30;
/// Size of the cache, in bytes.
const CACHE: u64 = 512 << 20;
/// Maximum time before the first event.
const RAMP: Duration = Duration::from_secs(10);
/// Most time that one event takes, in the schedule's estimate.
const EVENT: Duration = Duration::from_secs(20);
/// Wanted share of events after which the rate is back within five seconds.
const BACK: f64 = 0.9;

/// Arguments of the command.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Binary and directory.
    #[command(flatten)]
    pub common: Common,
    /// Number of kills of the server
    #[arg(long, default_value_t = 100)]
    pub kills: usize,
    /// Number of upgrades
    #[arg(long, default_value_t = 100)]
    pub upgrades: usize,
    /// Number of upgrades with a kill in the middle
    #[arg(long, default_value_t = 20)]
    pub interrupted: usize,
    /// Minimum milliseconds between two of them; up to half of it more
    #[arg(long, default_value_t = 8_000)]
    pub millis: u64,
    /// The program to upgrade to, of another version [default: a copy of the same one]
    #[arg(long, value_name = "PATH")]
    pub next: Option<PathBuf>,
    /// Number of connections
    #[arg(long, default_value_t = 8)]
    pub threads: u32,
    /// Threads of Forebay
    #[arg(long, default_value_t = 2)]
    pub shards: u16,
    /// Use a small warehouse that loads quickly
    #[arg(long)]
    pub tiny: bool,
    /// Seed of the order and the times of events
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The model of the slow disks
    #[arg(long, default_value = "raid10x4")]
    pub model: String,
    /// Seconds that the longest pause of the disk must be below
    #[arg(long, default_value_t = 2.0)]
    pub longest: f64,
    /// Seconds that the median of the pauses must be below
    #[arg(long, default_value_t = 1.0)]
    pub median: f64,
}

impl Args {
    fn kinds(&self) -> Vec<Kind> {
        let of = |kind, count| vec![kind; count];
        let all = [
            of(Kind::Kill, self.kills),
            of(Kind::Upgrade, self.upgrades),
            of(Kind::Interrupted, self.interrupted),
        ];
        all.concat()
    }

    fn is_short(&self, pauses: &Pauses) -> bool {
        pauses.longest() < self.longest && pauses.median() < self.median
    }

    /// More time than all events take.
    fn limit(&self) -> Duration {
        let each = Duration::from_millis(self.millis * 3 / 2) + EVENT;
        2 * RAMP + each * u32::try_from(self.kinds().len() + 1).unwrap_or(u32::MAX)
    }
}

/// What clients saw during events.
pub(super) struct Seen<T = Event> {
    pub events: Vec<T>,
    /// The answers of the disk to the probe, and the probe's rounds.
    pub disk: Pulse,
    pub rounds: u64,
    pub transactions: Watch,
    pub journal: Journal,
}

/// Runs the part; an error if anything was lost or noticed, or a pause was too long.
pub fn run(args: &Args) -> anyhow::Result<()> {
    needs::tools(&[&MARIADB[..], &TOOLS, &[("xfs_repair", "xfsprogs")]].concat())?;
    needs::disk_can_be_made(&[SetUp::Mode("write-back")])?;
    ensure!(!args.kinds().is_empty(), "no events: give --kills or --upgrades");
    let place = Place::new(args.common.dir.as_deref())?;
    needs::space(&place.path(""), 2 * DISK + CACHE)?;
    let binary = binary(args.common.forebay.as_deref())?;
    let programs = Programs::new(&binary, args.next.as_deref(), &place)?;
    let scale = if args.tiny { Scale::tiny() } else { Scale::specified(1) };
    loaded::make_primary(&place, IMAGE, DISK, scale)?;
    let setting = Setting {
        primary: format!("{}?emulate={}", place.text("primary"), args.model),
        cache: ("cache".to_owned(), CACHE),
        mode: "write-back",
        ram: 32 << 20,
        shards: args.shards,
        more: Vec::new(),
    };
    println!("{}", setting.describe());
    let mut kept = Kept::start(&binary, &place, &setting)?;
    let device = kept.attach()?;
    let mut kernel = KernelLog::from_now()?;
    let mounted = cleanup::mount(&device, &place.path("mnt"))?;
    let server =
        MariaDb::start(&place.path("mnt/data"), &place.path("run"), &loaded::setting(true))?;
    let seen = watch(args, scale, &place, &kept, &programs, &server)?;
    progress("checking");
    check(&server, &seen.journal).context("while the server runs")?;
    server.stop()?;
    no_errors_in_log(&place)?;
    drop(mounted);
    let mounted = cleanup::mount(&device, &place.path("mnt")).context("mounting it again")?;
    let server =
        MariaDb::start(&place.path("mnt/data"), &place.path("run"), &loaded::setting(false))?;
    check(&server, &seen.journal).context("after the disk was mounted again")?;
    server.stop()?;
    drop(mounted);
    finish(tool("xfs_repair").arg("-n").arg(&device))?;
    let trouble = kernel.about(&device)?;
    ensure!(trouble.is_empty(), "the kernel's log has {}: {}", trouble.len(), trouble.join("; "));
    kept.stop()?;
    check_alone(&place, &binary, &setting, &seen.journal)?;
    progress("");
    present(args, &setting, &seen)
}

/// Runs transactions and the probe during all events.
fn watch(
    args: &Args,
    scale: Scale,
    place: &Place,
    kept: &Kept,
    programs: &Programs,
    server: &MariaDb,
) -> anyhow::Result<Seen> {
    let plan = Plan {
        scale,
        terminals: args.threads,
        ramp: Duration::ZERO,
        measured: args.limit(),
        seed: args.seed * 1000,
    };
    let seen = under_load(place, server, plan, |watch, disk| {
        let ramp = RAMP.min(Duration::from_millis(args.millis));
        std::thread::sleep(ramp);
        let numbers = Numbers::new(args.seed);
        let interval = Duration::from_millis(args.millis);
        let stop = &watch.stop;
        let mut events = Events { kept, programs, interval, numbers, stop };
        let events = events.all(args.kinds(), |done| tell(args, done, disk));
        std::thread::sleep(ramp);
        events
    })?;
    let count = seen.events.len();
    ensure!(count == args.kinds().len(), "only {count} events happened");
    Ok(seen)
}

/// Runs transactions and the probe while `act` is at work; an error of any of them is one.
pub(super) fn under_load<T>(
    place: &Place,
    server: &MariaDb,
    plan: Plan,
    act: impl FnOnce(&Watch, &Pulse) -> anyhow::Result<Vec<T>>,
) -> anyhow::Result<Seen<T>> {
    let (watch, disk) = (Watch::new(plan.measured), Pulse::new(plan.measured));
    let stop_probe = AtomicBool::new(false);
    let file = place.path("mnt/probe");
    let connect = || server.connect(DATABASE);
    let (events, load, probed) = std::thread::scope(|scope| {
        let load = scope.spawn(|| tpcc::run_watched(connect, plan, &watch, |_, _| {}));
        let probe = scope.spawn(|| {
            let done = probe::run(&file, &disk, &stop_probe);
            // Without the probe there is nothing to go on for.
            watch.stop.store(true, Relaxed);
            done
        });
        let events = act(&watch, &disk);
        watch.stop.store(true, Relaxed);
        stop_probe.store(true, Relaxed);
        let panicked = |_| Err(anyhow::anyhow!("a client panicked"));
        let load = load.join().unwrap_or_else(panicked);
        (events, load, probe.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the probe panicked"))))
    });
    let rounds = probed.context("the probe on the disk")?;
    let load = load?;
    ensure!(load.broken.is_none(), "a transaction failed: {}", load.broken.unwrap_or_default());
    let events = events?;
    ensure!(!load.journal.is_empty(), "no order was committed");
    Ok(Seen { events, disk, rounds, transactions: watch, journal: load.journal })
}

fn tell(args: &Args, done: &[Event], disk: &Pulse) {
    let Some(last) = done.last() else { return };
    println!(
        "{} of {}: {}, version {} serves after {:.2} s; the disk paused for {:.2} s",
        done.len(),
        args.kinds().len(),
        last.kind.name(),
        last.version,
        (last.end - last.begin).as_secs_f64(),
        disk.longest_gap(last.begin, last.end).as_secs_f64()
    );
}

pub(super) fn check(server: &MariaDb, journal: &Journal) -> anyhow::Result<()> {
    let mut conn = server.connect(DATABASE)?;
    tpcc::check_journal(&mut conn, journal)?;
    tpcc::conditions(&mut conn)
}

/// MariaDB's own log must have no error since the start of the server.
pub(super) fn no_errors_in_log(place: &Place) -> anyhow::Result<()> {
    let log = std::fs::read(place.path("run/mariadb.log"))?;
    let log = String::from_utf8_lossy(&log);
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("[ERROR]")).collect();
    ensure!(errors.is_empty(), "MariaDB's log: {}", errors.join("; "));
    Ok(())
}

/// Drains the cache, and checks the database on the primary without Forebay.
fn check_alone(
    place: &Place,
    binary: &std::path::Path,
    setting: &Setting,
    journal: &Journal,
) -> anyhow::Result<()> {
    progress("draining");
    let setting = Setting { primary: place.text("primary"), ..setting.clone() };
    let drained = Server::forebay(binary, place, &setting)?;
    drained.drain()?;
    drained.stop()?;
    check_primary(place, journal)
}

/// Checks the database on a primary that has everything, without Forebay.
pub(super) fn check_primary(place: &Place, journal: &Journal) -> anyhow::Result<()> {
    let (device, _attached) = cleanup::loop_device(&place.path("primary"))?;
    let _mounted = cleanup::mount(&device, &place.path("mnt"))?;
    let server =
        MariaDb::start(&place.path("mnt/data"), &place.path("run"), &loaded::setting(false))?;
    check(&server, journal).context("the primary alone, after a drain")?;
    server.stop()
}

fn present(args: &Args, setting: &Setting, seen: &Seen) -> anyhow::Result<()> {
    let Seen { events, disk, transactions, .. } = seen;
    let all = Pauses::of(events, disk, |_| true);
    let mut table = Table::new(&["event", "number", "disk: median / longest", "transactions", ""]);
    let mut kinds = Vec::new();
    for kind in [Kind::Kill, Kind::Upgrade, Kind::Interrupted] {
        let of = Pauses::of(events, disk, |one| one == kind);
        let theirs = Pauses::of(events, &transactions.pulse, |one| one == kind);
        if of.count() == 0 {
            continue;
        }
        let name = kind.name().to_owned();
        let met = args.is_short(&of);
        table.row([name, of.count().to_string(), of.show(), theirs.show(), verdict(met)]);
        kinds
            .push(json!({ "kind": kind.name(), "disk": of.json(), "transactions": theirs.json() }));
    }
    table.print();
    let back = pauses::back(events, &transactions.pulse);
    let quiet = pauses::back_without(events, &transactions.pulse);
    let (share, without) = (pauses::share(&back), pauses::share(&quiet));
    println!(
        "all {} orders are there; the database is consistent; no error; {} rounds of the probe",
        seen.journal.len(),
        seen.rounds
    );
    println!(
        "0.9 of the transactions of the 5 s before, as the mean of a second, within 5 s: after \
         {:.0} % of {} events; at {:.0} % of {} moments without an event",
        share * 100.0,
        back.len(),
        without * 100.0,
        quiet.len()
    );
    let met = args.is_short(&all);
    let count = |kind| events.iter().filter(|event| event.kind == kind).count();
    let counts = [Kind::Kill, Kind::Upgrade, Kind::Interrupted].map(count);
    let name = format!(
        "MariaDB under TPC-C, {} kills, {} upgrades, {} upgrades with a kill",
        counts[0], counts[1], counts[2]
    );
    let rows = vec![
        Row::new(format!("{name}: lost orders, errors"), format!("0 of {}, 0", seen.journal.len()))
            .with_target("0, 0", true),
        Row::new("the same: pause of the disk, median / longest", all.show())
            .with_target(format!("< {:.0} s / < {:.0} s", args.median, args.longest), met),
        Row::new(
            "the same: rate back at 0.9 within 5 s",
            format!(
                "after {:.0} % of {} events; without an event {:.0} %",
                share * 100.0,
                back.len(),
                without * 100.0
            ),
        )
        .with_target(format!(">= {:.0} %", BACK * 100.0), share >= BACK),
    ];
    keep("survive-mariadb", rows, figures(args, setting, seen, (&back, &quiet), kinds))?;
    ensure!(met, "the disk paused for {}", all.show());
    Ok(())
}

fn figures(
    args: &Args,
    setting: &Setting,
    seen: &Seen,
    (back, quiet): (&[Option<f64>], &[Option<f64>]),
    kinds: Vec<Value>,
) -> Value {
    let gaps = pauses::gaps(&seen.events, &seen.disk);
    let events = seen.events.iter().zip(gaps).map(|(event, gap)| {
        json!({
            "kind": event.kind.name(), "version": event.version, "disk_pause": gap,
            "serves_after": (event.end - event.begin).as_secs_f64(),
        })
    });
    json!({
        "setting": setting.describe(), "seed": args.seed, "kinds": kinds,
        "events": events.collect::<Vec<_>>(), "orders": seen.journal.len(),
        "transactions": seen.transactions.pulse.count(), "probe_rounds": seen.rounds,
        "back_seconds": back, "back_seconds_without": quiet,
    })
}

/// For tests: a few events with a tiny warehouse.
pub fn quick(forebay: PathBuf) -> Args {
    Args {
        common: Common { forebay: Some(forebay), dir: None },
        kills: 4,
        upgrades: 3,
        interrupted: 1,
        millis: 1_000,
        next: None,
        threads: 4,
        shards: 2,
        tiny: true,
        seed: 1,
        model: "raid10x4".to_owned(),
        // Of a debug build, with other tests at the same time.
        longest: 20.0,
        median: 10.0,
    }
}
