//! fsx on XFS and on ext4, each on an attached disk of its own server, over kills and upgrades. fsx
//! compares every read; afterwards the file system's own check must find nothing, and the kernel's
//! log must have no error.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use crate::developer::survive::events::{Event, Events, Kind, Programs};
use crate::developer::survive::pauses::{self, Pauses};
use crate::developer::survive::probe;
use crate::load::pulse::Pulse;
use crate::report::kept::{Row, keep};
use crate::report::table::Table;
use crate::rig::cleanup::{self, Process, finish, tool};
use crate::rig::kept::Kept;
use crate::rig::kernel_log::KernelLog;
use crate::rig::place::Place;
use crate::rig::server::{Setting, binary};
use crate::rig::setup::SetUp;
use crate::rig::{Common, needs};
use forebay_block::testing::Numbers;

/// Size of each disk, in bytes.
const DISK: u64 = 1 << 30;
/// Size of each cache, in bytes: smaller than what is written, so that it destages and reclaims.
const CACHE: u64 = 64 << 20;
/// Time limit of a whole run on one file system.
const LIMIT: Duration = Duration::from_secs(2 * 3600);
/// Time limit of one round of fsx.
const ROUND: Duration = Duration::from_secs(3600);

/// The file systems: name, and the commands that make and check one.
const KINDS: [(&str, &[&str], &[&str]); 2] = [
    ("xfs", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n"]),
    ("ext4", &["mkfs.ext4", "-q", "-F"], &["e2fsck", "-f", "-n"]),
];

/// The mix of operations. fsx itself fails at a `posix_fallocate` of no bytes, which it sometimes
/// chooses, so that has no weight.
const MIX: &str = "flen = 8388608\n[opsize]\nmax = 65536\n[weights]\nread = 10\nwrite = 10\n\
    mapread = 4\nmapwrite = 2\ntruncate = 1\nclose_open = 1\ninvalidate = 1\nfsync = 0.3\n\
    fdatasync = 0.3\npunch_hole = 1\nposix_fallocate = 0\ncopy_file_range = 1\nsendfile = 1\n\
    posix_fadvise = 3\n";

/// Arguments of the command.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Binary and directory.
    #[command(flatten)]
    pub common: Common,
    /// Operations of fsx, half of them on each file system
    #[arg(long, default_value_t = 5_000_000)]
    pub operations: u64,
    /// Operations of one round of fsx, with a seed of its own
    #[arg(long, default_value_t = 10_000)]
    pub round: u64,
    /// Number of fsx at the same time
    #[arg(long, default_value_t = 4)]
    pub jobs: u64,
    /// Minimum milliseconds between two events; up to half of it more
    #[arg(long, default_value_t = 3_000)]
    pub millis: u64,
    /// The program to upgrade to, of another version [default: a copy of the same one]
    #[arg(long, value_name = "PATH")]
    pub next: Option<PathBuf>,
    /// Seed of the operations and of the events
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// What happened on one file system.
struct Seen {
    name: &'static str,
    operations: u64,
    events: Vec<Event>,
    disk: Pulse,
}

impl Seen {
    fn count(&self, kind: Kind) -> usize {
        self.events.iter().filter(|event| event.kind == kind).count()
    }
}

/// Runs the part; an error at the first wrong byte or error.
pub fn run(args: &Args) -> anyhow::Result<()> {
    needs::tools(&[("mkfs.xfs", "xfsprogs"), ("mkfs.ext4", "e2fsprogs"), ("losetup", "mount")])?;
    needs::disk_can_be_made(&[SetUp::Mode("write-back")])?;
    let program = program()?;
    let mut all = Vec::new();
    for kind in KINDS {
        let seen = on(args, &program, kind).with_context(|| format!("fsx on {}", kind.0))?;
        println!("{}: {} operations, no wrong byte, no error", seen.name, seen.operations);
        all.push(seen);
    }
    present(&all)
}

/// fsx, where cargo installs programs or in the path.
fn program() -> anyhow::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo = cargo.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&paths).chain(cargo.map(|cargo| cargo.join("bin")));
    let found = places.map(|place| place.join("fsx")).find(|path| path.is_file());
    found.context("fsx is not installed; run make setup, or cargo install --locked fsx")
}

fn on(
    args: &Args,
    fsx: &Path,
    (name, make, check): (&'static str, &[&str], &[&str]),
) -> anyhow::Result<Seen> {
    let place = Place::new(args.common.dir.as_deref())?;
    let binary = binary(args.common.forebay.as_deref())?;
    let programs = Programs::new(&binary, args.next.as_deref(), &place)?;
    place.sparse("primary", DISK)?;
    fs::write(place.path("fsx.toml"), MIX)?;
    let setting = Setting {
        primary: place.text("primary"),
        cache: ("cache".to_owned(), CACHE),
        mode: "write-back",
        ram: 8 << 20,
        shards: 2,
        more: Vec::new(),
    };
    let mut kept = Kept::start(&binary, &place, &setting)?;
    let device = kept.attach()?;
    let mut kernel = KernelLog::from_now()?;
    finish(tool(make[0]).args(&make[1..]).arg(&device))?;
    let mounted = cleanup::mount_with(&device, &place.path("mnt"), "noatime")?;
    let (operations, events, disk) = exercise(args, fsx, &place, &kept, &programs)?;
    let before = contents(&place)?;
    drop(mounted);
    finish(tool(check[0]).args(&check[1..]).arg(&device))?;
    let mounted = cleanup::mount_with(&device, &place.path("mnt"), "ro")?;
    let after = contents(&place)?;
    let other = before.iter().find(|&(path, bytes)| after.get(path) != Some(bytes));
    if let Some((path, _)) = other {
        bail!("{} was changed by unmounting and mounting", path.display());
    }
    drop(mounted);
    let trouble = kernel.about(&device)?;
    let trouble: Vec<_> = trouble.iter().filter(|text| !is_known(text)).collect();
    ensure!(trouble.is_empty(), "the kernel's log: {trouble:?}");
    kept.stop()?;
    Ok(Seen { name, operations, events, disk })
}

/// Messages of ext4 that do not concern the disk. In kernels with its debugging: it had to split an
/// extent at the end of a write. In kernels that test at unmounting whether a file has dirty pages:
/// with this mix of operations they also find some on a loop device without a server, and the file
/// is as it was.
fn is_known(text: &str) -> bool {
    text.contains("ext4_convert_unwritten_extents_endio")
        || text.contains("finished: extent logical")
        || text.contains("data will be lost")
}

/// The files of the jobs, by name, with their bytes.
fn contents(place: &Place) -> anyhow::Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(place.path("mnt"))? {
        let path = entry?.path();
        if path.is_file() {
            let bytes = fs::read(&path);
            let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
            all.insert(path, bytes);
        }
    }
    Ok(all)
}

/// Runs rounds of fsx until all operations are done, while the server is killed and upgraded.
fn exercise(
    args: &Args,
    fsx: &Path,
    place: &Place,
    kept: &Kept,
    programs: &Programs,
) -> anyhow::Result<(u64, Vec<Event>, Pulse)> {
    let rounds = (args.operations / 2).div_ceil(args.round);
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let (stop, disk) = (AtomicBool::new(false), Pulse::new(LIMIT));
    let (failed, events, probed) = std::thread::scope(|scope| {
        let probe = scope.spawn(|| probe::run(&place.path("mnt/probe"), &disk, &stop));
        let job = |job: u64| {
            let (next, done, stop) = (&next, &done, &stop);
            scope.spawn(move || {
                loop {
                    let round = next.fetch_add(1, Relaxed);
                    if round >= rounds || stop.load(Relaxed) {
                        return Ok(());
                    }
                    one(args, fsx, place, job, round).inspect_err(|_| stop.store(true, Relaxed))?;
                    done.fetch_add(args.round, Relaxed);
                }
            })
        };
        let jobs: Vec<_> = (0..args.jobs.max(1)).map(job).collect();
        let over = AtomicBool::new(false);
        let events = std::thread::scope(|scope| {
            let director = scope.spawn(|| happen(args, kept, programs, &over));
            let limit = Instant::now() + LIMIT;
            while jobs.iter().any(|job| !job.is_finished()) && !director.is_finished() {
                if Instant::now() > limit {
                    stop.store(true, Relaxed);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            over.store(true, Relaxed);
            director.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the events panicked")))
        });
        let failed: anyhow::Result<()> = jobs.into_iter().try_for_each(|job| {
            job.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a job panicked")))
        });
        stop.store(true, Relaxed);
        let probed = probe.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the probe panicked")));
        (failed, events, probed)
    });
    failed?;
    probed.context("the probe on the disk")?;
    let (events, done) = (events?, done.into_inner());
    ensure!(done >= args.operations / 2, "only {done} operations in {LIMIT:?}");
    ensure!(!events.is_empty(), "no kill and no upgrade during {done} operations");
    Ok((done, events, disk))
}

/// Kills and upgrades in turns until `over`.
fn happen(
    args: &Args,
    kept: &Kept,
    programs: &Programs,
    over: &AtomicBool,
) -> anyhow::Result<Vec<Event>> {
    let interval = Duration::from_millis(args.millis);
    let numbers = Numbers::new(args.seed);
    let mut events = Events { kept, programs, interval, numbers, stop: over };
    let mut all = Vec::new();
    let turns = [Kind::Kill, Kind::Upgrade, Kind::Kill, Kind::Interrupted];
    for kind in turns.into_iter().cycle() {
        all.extend(events.all(vec![kind], |_| {})?);
        if over.load(Relaxed) {
            break;
        }
    }
    Ok(all)
}

/// One round of fsx on a file of its own.
fn one(args: &Args, fsx: &Path, place: &Place, job: u64, round: u64) -> anyhow::Result<()> {
    let seed = args.seed * 1_000_000 + round;
    let mut command = Command::new(fsx);
    command.args(["-q", "-S", &seed.to_string(), "-N", &args.round.to_string(), "-f"]);
    command.arg(place.path("fsx.toml")).arg(place.path(&format!("mnt/file-{job}")));
    let process = Process::start(command, &place.path(&format!("fsx-{job}.log")), false)?;
    let status = process.wait(ROUND)?;
    if !status.success() {
        bail!("fsx with seed {seed} ended with {status}: {}", process.said());
    }
    Ok(())
}

fn present(all: &[Seen]) -> anyhow::Result<()> {
    let columns = [
        "file system",
        "operations",
        "kills",
        "upgrades",
        "with a kill",
        "pause: median / longest",
    ];
    let mut table = Table::new(&columns);
    let mut figures = Vec::new();
    let sum = |kind| all.iter().map(|seen| seen.count(kind)).sum::<usize>();
    for seen in all {
        let pauses = Pauses::of(&seen.events, &seen.disk, |_| true);
        let counts = [Kind::Kill, Kind::Upgrade, Kind::Interrupted].map(|kind| seen.count(kind));
        let [kills, upgrades, interrupted] = counts.map(|count| count.to_string());
        let operations = seen.operations.to_string();
        table.row([seen.name.to_owned(), operations, kills, upgrades, interrupted, pauses.show()]);
        figures.push(json!({
            "file_system": seen.name, "operations": seen.operations, "kills": counts[0],
            "upgrades": counts[1], "interrupted": counts[2], "disk": pauses.json(),
            "gaps": pauses::gaps(&seen.events, &seen.disk),
        }));
    }
    table.print();
    let operations: u64 = all.iter().map(|seen| seen.operations).sum();
    let [kills, upgrades, interrupted] = [Kind::Kill, Kind::Upgrade, Kind::Interrupted].map(sum);
    let row = Row::new(
        format!(
            "fsx on XFS and ext4, {operations} operations over {kills} kills, {upgrades} upgrades, \
             {interrupted} upgrades with a kill: wrong bytes, errors"
        ),
        "0, 0",
    );
    keep("survive-fsx", vec![row.with_target("0, 0", true)], Value::from(figures))
}

/// For tests: a few thousand operations.
pub fn quick(forebay: PathBuf) -> Args {
    Args {
        common: Common { forebay: Some(forebay), dir: None },
        operations: 16_000,
        round: 2_000,
        jobs: 2,
        millis: 1_100,
        next: None,
        seed: 1,
    }
}
