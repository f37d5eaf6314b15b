//! A database under load loses its cache device while the server runs: MariaDB on a mounted disk of
//! an ordered volume under TPC-C. The device is a file behind an NBD server with an error switch.
//! From one moment on it fails every request. When the server has brought its last cut to the
//! primary, everything is ended, and MariaDB is started on the primary alone. InnoDB must recover,
//! the consistency conditions must hold, and CHECK TABLE must find nothing, for a number of rounds.
//! Orders may be missing: the primary is of a moment of the past.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::dbms::mariadb::MariaDb;
use crate::dbms::{Dbms as _, MARIADB, TOOLS};
use crate::developer::loaded::{DATABASE, make_primary, plan, setting};
use crate::report::progress;
use crate::rig::cleanup::{self, Held, Process};
use crate::rig::disk::{Disk, Medium};
use crate::rig::place::Place;
use crate::rig::server::Server;
use crate::rig::setup::SetUp;
use crate::rig::{Common, needs, server};
use crate::tpcc::{self, Journal, Scale};

const MODE: &str = "write-back";
/// Size of the disk, in bytes.
const DISK: u64 = 768 << 20;
/// Size of the cache, in bytes.
const CACHE: u64 = 256 << 20;
/// Time without writes after which the primary counts as left alone.
const QUIET: Duration = Duration::from_secs(5);
/// Maximum time until then.
const PATIENCE: Duration = Duration::from_secs(120);

/// Arguments of the command.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Binary and directory.
    #[command(flatten)]
    pub common: Common,
    /// Number of losses
    #[arg(long, default_value_t = 20)]
    pub rounds: u32,
    /// Minimum milliseconds of load before each loss; up to half of it more
    #[arg(long, default_value_t = 12_000)]
    pub millis: u64,
    /// Number of connections
    #[arg(long, default_value_t = 8)]
    pub threads: u32,
    /// Threads of Forebay
    #[arg(long, default_value_t = 2)]
    pub shards: u16,
    /// The memory of the ordered volume; 0 to see what happens without order
    #[arg(long, default_value = "32MiB")]
    pub ordered: String,
    /// Use a small warehouse that loads quickly
    #[arg(long)]
    pub tiny: bool,
    /// The model of the slow disks
    #[arg(long, default_value = "raid10x4")]
    pub model: String,
}

/// A cache device that can be lost.
struct Device {
    _mounted: Held,
    _fuse: Process,
    _nbd: Process,
    switches: [PathBuf; 2],
}

impl Device {
    /// Mounts it as the file `cache` of the place.
    fn mount(place: &Place) -> anyhow::Result<Self> {
        for name in ["cache", "cache.state", "cache-data", "no-reads", "no-writes", "sick.sock"] {
            place.remove(name);
        }
        place.sparse("cache-data", CACHE)?;
        let file = place.sparse("cache", 0)?;
        let (socket, switches) =
            (place.path("sick.sock"), ["no-reads", "no-writes"].map(|name| place.path(name)));
        let mut nbd = Command::new("nbdkit");
        nbd.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
        nbd.args(["--filter=error", "file", &place.text("cache-data")]);
        nbd.args(["error=EIO", "error-pread-rate=100%", "error-pwrite-rate=100%"]);
        nbd.arg(format!("error-pread-file={}", switches[0].display()));
        nbd.arg(format!("error-pwrite-file={}", switches[1].display()));
        let nbd = Process::start(nbd, &place.path("sick.log"), false)?;
        until("nbdkit", || UnixStream::connect(&socket).is_ok())?;
        let mut fuse = Command::new("nbdfuse");
        fuse.arg(&file).arg("--unix").arg(&socket);
        let fuse = Process::start(fuse, &place.path("sick-fuse.log"), false)?;
        until("nbdfuse", || file.metadata().is_ok_and(|file| file.len() == CACHE))?;
        let mounted = cleanup::mounted(&file)?;
        Ok(Self { _mounted: mounted, _fuse: fuse, _nbd: nbd, switches })
    }

    /// Lets every request fail from now on.
    fn lose(&self) -> anyhow::Result<()> {
        self.switches.iter().try_for_each(|switch| Ok(std::fs::write(switch, "")?))
    }
}

fn until(what: &str, happened: impl Fn() -> bool) -> anyhow::Result<()> {
    let limit = Instant::now() + Duration::from_secs(20);
    while !happened() {
        ensure!(Instant::now() < limit, "{what} did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Runs all rounds; an error if a primary alone is not consistent.
pub fn run(args: &Args) -> anyhow::Result<()> {
    needs::tools(
        &[&MARIADB[..], &TOOLS, &[("nbdfuse", "nbdfuse"), ("nbdkit", "nbdkit")]].concat(),
    )?;
    needs::disk_can_be_made(&[SetUp::Mode(MODE)])?;
    let place = Place::new(args.common.dir.as_deref())?;
    needs::space(&place.path(""), 2 * DISK + CACHE)?;
    let scale = if args.tiny { Scale::tiny() } else { Scale::specified(1) };
    make_primary(&place, "lost", DISK, scale)?;
    let medium = Medium {
        binary: server::binary(args.common.forebay.as_deref())?,
        primary: "primary".to_owned(),
        model: args.model.clone(),
        cache: CACHE,
        ram: 16 << 20,
        shards: args.shards,
        more: vec![format!("--ordered={}", args.ordered)],
    };
    for round in 1..=args.rounds {
        let lost = lose_under_load(args, scale, round, &place, &medium)
            .with_context(|| format!("round {round}"))?;
        progress(&format!("round {round}: recovering from the primary alone"));
        let begin = Instant::now();
        check_alone(&place).with_context(|| format!("round {round}: the primary alone"))?;
        let back = begin.elapsed().as_secs_f64();
        progress("");
        println!("round {round}: {lost}; the primary alone is consistent, found in {back:.1} s");
    }
    Ok(())
}

/// Runs the load, loses the cache device during it, and ends everything. Returns what was seen.
fn lose_under_load(
    args: &Args,
    scale: Scale,
    round: u32,
    place: &Place,
    medium: &Medium,
) -> anyhow::Result<String> {
    let device = Device::mount(place)?;
    let disk = Disk::start(place, SetUp::Mode(MODE), medium).context("the disk")?;
    let mounted = cleanup::mount(disk.device(), &place.path("mnt")).context("the mount")?;
    let database = MariaDb::start(&place.path("mnt/data"), &place.path("run"), &setting(true))?;
    let (millis, plan) = plan(round, args.millis, args.threads, scale);
    let (status, outcome) = std::thread::scope(|scope| {
        let connect = || database.connect(DATABASE);
        let load = scope.spawn(move || {
            tpcc::run(connect, plan, |second, count| {
                progress(&format!("round {round}: {second} s, {count:.0} new orders/s"));
            })
        });
        std::thread::sleep(Duration::from_millis(millis));
        let cache = disk.cache().context("the disk has a cache")?;
        let status = cache.status()?;
        device.lose()?;
        let left = wait_until_left(cache);
        database.process().strike()?;
        let outcome = load.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the load panicked")))?;
        left?;
        anyhow::Ok((status, outcome))
    })?;
    drop(database);
    for (_, process) in disk.processes() {
        process.strike()?;
    }
    drop(mounted);
    drop(disk);
    drop(device);
    ensure!(!outcome.journal.is_empty(), "no order was committed in {millis} ms");
    let (dirty, in_cut) = (status.counter("dirty_blocks"), status.counter("cut_blocks"));
    let age = Duration::from_nanos(status.counter("primary_age_nanos")).as_secs_f64();
    Ok(format!(
        "{} orders committed; at the loss {dirty} blocks were dirty, {in_cut} of a cut were not \
         written, and the primary was {age:.1} s behind",
        outcome.journal.len()
    ))
}

/// Waits until the server writes nothing more to the primary.
fn wait_until_left(cache: &Server) -> anyhow::Result<()> {
    let limit = Instant::now() + PATIENCE;
    let (mut writes, mut since) = (0, Instant::now());
    while since.elapsed() < QUIET {
        let now = cache.status()?.counter("destage_writes");
        if now != writes {
            (writes, since) = (now, Instant::now());
        }
        ensure!(Instant::now() < limit, "the primary is still written");
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Starts the database on the primary, without cache and server, and checks it.
fn check_alone(place: &Place) -> anyhow::Result<()> {
    let (device, _attached) = cleanup::loop_device(&place.path("primary"))?;
    let _mounted = cleanup::mount(&device, &place.path("mnt"))?;
    let database = MariaDb::start(&place.path("mnt/data"), &place.path("run"), &setting(false))?;
    let mut conn = database.connect(DATABASE)?;
    // Of no order: orders may be missing. The tables are checked.
    tpcc::check_journal(&mut conn, &Journal::default())?;
    tpcc::conditions(&mut conn)?;
    drop(conn);
    database.stop()
}
