//! `bench tpcc`: TPC-C on MariaDB, on each set-up in turn. After each, the primary alone must hold
//! a consistent database with every order that a client saw committed.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;

use crate::dbms::mariadb::MariaDb;
use crate::dbms::{MARIADB, TOOLS};
use crate::report::progress;
use crate::report::{Group, Report};
use crate::rig::needs;
use crate::rig::setup::SetUp;
use crate::tpcc::{self, Journal, Outcome, Plan, Scale};
use crate::user::database::{self, Args as Database, Loaded};

/// The published gains to reach: HyperCache on a PCIe SSD; FlashCache in write-through.
const GAINS: [(&str, f64); 2] = [("write-back", 8.02), ("write-through", 2.0)];
/// Disk space per warehouse in bytes, with room for an hour of new orders.
const WAREHOUSE: u64 = 190 << 20;
/// Fixed part of a disk's size, in bytes.
const BASE: u64 = 1200 << 20;
/// Name of the database.
const DATABASE: &str = "tpcc";
const NOTE: &str = "New orders that are rolled back as specified count, as in tpmC. Without keying \
    and think times the figure must not be published as tpmC. After each set-up the database was \
    killed, the cache drained, and the primary alone passed consistency conditions 1 to 10 and 12, \
    CHECK TABLE, and the search for every order that a client saw committed.";
/// Factor from counts per second to the benchmark's unit.
const PER_MINUTE: f64 = 60.0;

/// Arguments of the command.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(flatten)]
    pub database: Database,
    /// Warehouses, about 100 MiB each
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub warehouses: u32,
}

/// Runs the benchmark and reports; returns the path of the page.
pub fn run(args: &Args) -> anyhow::Result<PathBuf> {
    let Args { database, warehouses } = args;
    let shared = &database.shared;
    needs::tools(&[&MARIADB[..], &TOOLS].concat())?;
    needs::disk_can_be_made(&shared.setups)?;
    shared.binary()?;
    let earlier = shared.earlier("tpcc")?;
    let scale = Scale::specified(*warehouses);
    let size = BASE + (database.redo_log_mib << 20) + u64::from(*warehouses) * WAREHOUSE;
    // The image, its copy, and a cache need space.
    needs::space(&shared.directory()?, size * 2)?;
    let made_of = format!("TPC-C, {warehouses} warehouses, form 2");
    let name = format!("tpcc-{warehouses}");
    let image =
        database::prepare(database, &name, &made_of, size, |server: &MariaDb| fill(server, scale))?;
    let title = format!("TPC-C, {warehouses} warehouses on MariaDB, no keying and think times");
    let mut report = Report::new("tpcc", &title, "new orders/min");
    database.describe::<MariaDb>(&mut report, &image);
    report.set("warehouses", warehouses);
    let mut group = Group { name: "TPC-C".to_owned(), ..Group::default() };
    for &setup in &shared.setups {
        let load = |server: &MariaDb| {
            let outcome = drive(args, server, setup)?;
            let journal = outcome.journal.clone();
            Ok((loaded(outcome), journal))
        };
        let check = |server: &MariaDb, journal: Journal| {
            let mut conn = server.connect(DATABASE)?;
            tpcc::conditions(&mut conn)?;
            tpcc::check_journal(&mut conn, &journal)
        };
        group.results.push(database.measure(&image, setup, load, check)?);
    }
    progress("");
    report.groups.push(group);
    database::targets(&mut report, GAINS);
    report.notes.push(NOTE.to_owned());
    report.finish(&shared.out, earlier.as_ref())
}

/// Loads the database of an image, and checks it.
fn fill(server: &MariaDb, scale: Scale) -> anyhow::Result<()> {
    server.create(DATABASE)?;
    let all = scale.warehouses;
    let shown = |done: u32| progress(&format!("loading: {done} of {all} warehouses"));
    shown(0);
    tpcc::load(|| server.connect(DATABASE), scale, shown)?;
    progress("checking what was loaded");
    tpcc::conditions_after_load(&mut server.connect(DATABASE)?, scale)
}

/// Runs the load on one set-up.
fn drive(args: &Args, server: &MariaDb, setup: SetUp) -> anyhow::Result<Outcome> {
    let database = &args.database;
    let plan = Plan {
        scale: Scale::specified(args.warehouses),
        terminals: database.threads,
        ramp: Duration::from_secs(database.ramp),
        measured: Duration::from_secs(database.seconds),
        seed: 1,
    };
    let (name, all) = (setup.name(), database.ramp + database.seconds);
    let shown = |second: usize, count: f64| {
        let ramp = if second as u64 <= database.ramp { ", ramp-up" } else { "" };
        progress(&format!("{name}: {second}/{all} s, {count:.0} new orders/s{ramp}"));
    };
    let outcome = tpcc::run(|| server.connect(DATABASE), plan, shown)?;
    if let Some(why) = &outcome.broken {
        bail!("the load broke off: {why}");
    }
    Ok(outcome)
}

fn loaded(outcome: Outcome) -> Loaded {
    let counts = outcome.counts;
    let figures = [
        ("new orders", counts.new_order),
        ("rolled back", counts.rolled_back),
        ("payments", counts.payment),
        ("order status", counts.order_status),
        ("deliveries", counts.delivery),
        ("stock level", counts.stock_level),
        ("run again", counts.again),
    ];
    Loaded {
        per_second: outcome.per_second.iter().map(|count| count * PER_MINUTE).collect(),
        latency: outcome.latency,
        figures: figures.map(|(name, count)| (name.to_owned(), count as f64)).into(),
    }
}
