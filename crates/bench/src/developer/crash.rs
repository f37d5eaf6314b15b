//! A database under load loses cache and server at once: MariaDB on a mounted disk under TPC-C,
//! SIGKILL of `forebay` and `mariadbd` together, both started again, for a number of rounds. After
//! each kill InnoDB must recover, every order that a client saw committed must be there, the
//! consistency conditions must hold, and CHECK TABLE must find nothing. At the end the cache is
//! drained, and the primary alone must pass the same checks.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::dbms::mariadb::MariaDb;
use crate::dbms::{Dbms as _, MARIADB, Setting, TOOLS};
use crate::developer::loaded::{DATABASE, make_primary, plan, setting};
use crate::report::progress;
use crate::rig::cleanup::{self, Held};
use crate::rig::disk::{Disk, Medium};
use crate::rig::needs;
use crate::rig::place::Place;
use crate::rig::setup::SetUp;
use crate::rig::{Common, server};
use crate::tpcc::{self, Journal, Scale};

const MODE: &str = "write-back";
/// Size of the disk in bytes: its file system requires at least 300 MiB.
const DISK: u64 = 768 << 20;
/// Size of the cache, in bytes.
const CACHE: u64 = 128 << 20;

/// Arguments of the command.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Binary and directory.
    #[command(flatten)]
    pub common: Common,
    /// Number of kills
    #[arg(long, default_value_t = 10)]
    pub rounds: u32,
    /// Minimum milliseconds of load before each kill; up to half of it more
    #[arg(long, default_value_t = 8_000)]
    pub millis: u64,
    /// Number of connections
    #[arg(long, default_value_t = 8)]
    pub threads: u32,
    /// Use a small warehouse that loads quickly
    #[arg(long)]
    pub tiny: bool,
    /// The model of the slow disks
    #[arg(long, default_value = "raid10x4")]
    pub model: String,
}

/// A mounted disk with a database server on it.
struct Stack {
    server: MariaDb,
    mounted: Held,
    disk: Disk,
}

impl Stack {
    fn start(place: &Place, medium: &Medium, setting: &Setting) -> anyhow::Result<Self> {
        let disk = Disk::start(place, SetUp::Mode(MODE), medium).context("the disk")?;
        let mounted = cleanup::mount(disk.device(), &place.path("mnt")).context("the mount")?;
        let server = MariaDb::start(&place.path("mnt/data"), &place.path("run"), setting)?;
        Ok(Self { server, mounted, disk })
    }

    /// Kills the database server, then stops the rest in order.
    fn end(self) -> anyhow::Result<()> {
        self.server.kill();
        drop(self.mounted);
        self.disk.stop()
    }
}

/// Runs all rounds; an error if anything was lost.
pub fn run(args: &Args) -> anyhow::Result<()> {
    needs::tools(&[&MARIADB[..], &TOOLS].concat())?;
    needs::disk_can_be_made(&[SetUp::Mode(MODE)])?;
    let place = Place::new(args.common.dir.as_deref())?;
    needs::space(&place.path(""), 2 * DISK + CACHE)?;
    let scale = if args.tiny { Scale::tiny() } else { Scale::specified(1) };
    let fast = setting(false);
    make_primary(&place, "crash", DISK, scale)?;
    let medium = Medium {
        binary: server::binary(args.common.forebay.as_deref())?,
        primary: "primary".to_owned(),
        model: args.model.clone(),
        cache: CACHE,
        ram: 16 << 20,
        shards: 1,
        more: Vec::new(),
    };
    let mut journal = Journal::default();
    let mut stack = Stack::start(&place, &medium, &setting(true))?;
    for round in 1..=args.rounds {
        let before = journal.len();
        journal.append(kill_under_load(args, scale, round, &stack)?);
        drop(stack.server);
        drop(stack.mounted);
        drop(stack.disk);
        let begin = Instant::now();
        progress(&format!("round {round}: recovering"));
        stack = Stack::start(&place, &medium, &setting(true))
            .with_context(|| format!("round {round}: after the kill"))?;
        let back = begin.elapsed().as_secs_f64();
        check(&stack.server, &journal).with_context(|| format!("round {round}"))?;
        progress("");
        let (new, all) = (journal.len() - before, journal.len());
        println!(
            "round {round}: {new} orders committed before the kill; back in {back:.1} s; all \
             {all} are there, the database is consistent"
        );
    }
    stack.end()?;
    progress("draining");
    medium.drain(&place, MODE)?;
    let (device, _attached) = cleanup::loop_device(&place.path("primary"))?;
    let _mounted = cleanup::mount(&device, &place.path("mnt"))?;
    let server = MariaDb::start(&place.path("mnt/data"), &place.path("run"), &fast)?;
    check(&server, &journal).context("the primary alone, after a drain")?;
    server.stop()?;
    progress("");
    println!("drained: the primary alone has all {} orders and is consistent", journal.len());
    Ok(())
}

/// Runs the load, and kills both during it. Returns the committed orders.
fn kill_under_load(
    args: &Args,
    scale: Scale,
    round: u32,
    stack: &Stack,
) -> anyhow::Result<Journal> {
    let (millis, plan) = plan(round, args.millis, args.threads, scale);
    let outcome = std::thread::scope(|scope| {
        let connect = || stack.server.connect(DATABASE);
        let load = scope.spawn(move || {
            tpcc::run(connect, plan, |second, count| {
                progress(&format!("round {round}: {second} s, {count:.0} new orders/s"));
            })
        });
        std::thread::sleep(Duration::from_millis(millis));
        for (name, process) in stack.disk.processes() {
            if name == "forebay" {
                process.strike()?;
            }
        }
        stack.server.process().strike()?;
        load.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the load panicked")))
    })?;
    ensure!(outcome.broken.is_some(), "the load did not notice the kill");
    ensure!(!outcome.journal.is_empty(), "no order was committed in {millis} ms");
    Ok(outcome.journal)
}

fn check(server: &MariaDb, journal: &Journal) -> anyhow::Result<()> {
    let mut conn = server.connect(DATABASE)?;
    tpcc::check_journal(&mut conn, journal)?;
    tpcc::conditions(&mut conn)
}

/// For tests: one quick round with a tiny warehouse.
pub fn quick(forebay: PathBuf) -> Args {
    Args {
        common: Common { forebay: Some(forebay), dir: None },
        rounds: 1,
        millis: 4_000,
        threads: 4,
        tiny: true,
        model: "raid10x4".to_owned(),
    }
}
