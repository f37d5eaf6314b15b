//! MariaDB under TPC-C on an attached disk with XFS, while an administrator changes the server:
//! memory, other volumes, the size of the cache, the cache device. There may be no error, and every
//! order whose commit a client saw must be there. A probe on the same file system shows how long
//! the disk did not answer; the rate of transactions is shown second by second.

use std::fs;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::json;

use crate::dbms::mariadb::MariaDb;
use crate::dbms::{Dbms as _, MARIADB, TOOLS};
use crate::developer::loaded;
use crate::developer::survive::mariadb::{
    DISK, IMAGE, Seen, check, check_primary, no_errors_in_log, under_load,
};
use crate::developer::survive::pauses::Pauses;
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::Table;
use crate::rig::cleanup::{self, finish, tool};
use crate::rig::kept::Kept;
use crate::rig::kernel_log::KernelLog;
use crate::rig::place::Place;
use crate::rig::server::binary;
use crate::rig::setup::SetUp;
use crate::rig::{Common, needs};
use crate::tpcc::{Plan, Scale, Watch};

const MIB: u64 = 1 << 20;
/// Time without a change whose rate the others are compared with.
const LEVEL: Duration = Duration::from_secs(10);
/// More than a change takes, with its drain.
const CHANGE: Duration = Duration::from_secs(90);
/// Seconds that the median of the disk's pauses must be below.
const MEDIAN: f64 = 1.0;

/// Arguments of the command.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Binary and directory.
    #[command(flatten)]
    common: Common,
    /// Seconds between two changes
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Number of connections
    #[arg(long, default_value_t = 8)]
    threads: u32,
    /// The model of the slow disks
    #[arg(long, default_value = "raid10x4")]
    model: String,
}

/// The configuration at one moment.
#[derive(Clone)]
struct Wanted {
    cache: &'static str,
    cache_mib: u64,
    ram_mib: u64,
    /// Another volume, by name.
    other: Option<&'static str>,
    /// Size of its primary.
    other_mib: u64,
}

impl Wanted {
    fn write(&self, place: &Place, model: &str) -> anyhow::Result<String> {
        let Self { cache, cache_mib, ram_mib, other, other_mib } = self;
        let mut text = format!(
            "[cache]\npath = {:?}\nsize = \"{cache_mib}MiB\"\nstate_dir = {:?}\n\
             [memory]\nram = \"{ram_mib}MiB\"\n[control]\nsocket = {:?}\n\
             [server]\nshards = 2\nnbd = [\"unix:{}\"]\nfuse = {:?}\n\
             [[volume]]\nname = \"disk\"\nprimary = \"{}?emulate={model}\"\n",
            place.text(cache),
            place.text("cache.state"),
            place.text("cache.control"),
            place.text("cache.nbd"),
            place.text("volumes"),
            place.text("primary"),
        );
        if let Some(name) = other {
            let path = place.path("other");
            let file = fs::File::options().write(true).create(true).truncate(false).open(&path)?;
            file.set_len(other_mib * MIB)?;
            text += &format!("[[volume]]\nname = {name:?}\nprimary = {:?}\n", place.text("other"));
        }
        let path = place.text("forebay.toml");
        fs::write(&path, text)?;
        Ok(path)
    }
}

/// A change, and what it makes of the configuration.
type Step = (&'static str, fn(&mut Wanted));

/// The changes, in this order.
const STEPS: [Step; 9] = [
    ("RAM from 32 to 64 MiB", |wanted| wanted.ram_mib = 64),
    ("a volume is added", |wanted| wanted.other = Some("other")),
    ("it gets another name", |wanted| wanted.other = Some("moved")),
    ("it grows", |wanted| wanted.other_mib = 128),
    ("it is removed", |wanted| wanted.other = None),
    ("cache from 1 to 4 GiB", |wanted| wanted.cache_mib = 4096),
    ("cache from 4 to 2 GiB", |wanted| wanted.cache_mib = 2048),
    ("another cache device", |wanted| wanted.cache = "second"),
    ("the device is retired, then another one", |wanted| wanted.cache = "third"),
];

/// A change that was made.
struct Made {
    name: &'static str,
    begin: Instant,
    end: Instant,
    /// Seconds that clients waited, as the server says.
    pause: f64,
}

/// Runs the part; an error if anything was lost or noticed.
///
/// # Errors
/// The same, or if it is not possible here.
pub fn run(args: &Args) -> anyhow::Result<()> {
    needs::tools(&[&MARIADB[..], &TOOLS, &[("xfs_repair", "xfsprogs")]].concat())?;
    needs::disk_can_be_made(&[SetUp::Mode("write-back")])?;
    let place = Place::new(args.common.dir.as_deref())?;
    needs::space(&place.path(""), 2 * DISK + 9000 * MIB)?;
    let binary = binary(args.common.forebay.as_deref())?;
    let scale = Scale::specified(1);
    loaded::make_primary(&place, IMAGE, DISK, scale)?;
    let wanted =
        Wanted { cache: "cache", cache_mib: 1024, ram_mib: 32, other: None, other_mib: 64 };
    let config = wanted.write(&place, &args.model)?;
    let mut kept = Kept::configured(&binary, &place, config.as_ref())?;
    let device = kept.attach()?;
    let mut kernel = KernelLog::from_now()?;
    let mounted = cleanup::mount(&device, &place.path("mnt"))?;
    let server =
        MariaDb::start(&place.path("mnt/data"), &place.path("run"), &loaded::setting(true))?;

    let limit = (CHANGE + Duration::from_secs(args.seconds)) * (STEPS.len() as u32 + 2);
    let (ramp, measured) = (Duration::ZERO, limit);
    let plan = Plan { scale, terminals: args.threads, ramp, measured, seed: 1 };
    let begin = Instant::now();
    let seen =
        under_load(&place, &server, plan, |watch, _| all(args, &place, &kept, wanted, watch))?;
    let end = Instant::now();
    progress("checking");
    check(&server, &seen.journal).context("while the server runs")?;
    server.stop()?;
    no_errors_in_log(&place)?;
    drop(mounted);
    finish(tool("xfs_repair").arg("-n").arg(&device))?;
    let trouble = kernel.about(&device)?;
    ensure!(trouble.is_empty(), "the kernel's log has {}: {}", trouble.len(), trouble.join("; "));
    kept.server().ask(&["drain"])?;
    kept.stop()?;
    check_primary(&place, &seen.journal)?;
    progress("");
    present(args, &seen, (begin, end))
}

/// Makes all changes, with pauses.
fn all(
    args: &Args,
    place: &Place,
    kept: &Kept,
    mut wanted: Wanted,
    watch: &Watch,
) -> anyhow::Result<Vec<Made>> {
    let pause = || {
        let until = Instant::now() + Duration::from_secs(args.seconds);
        while Instant::now() < until {
            ensure!(!watch.stop.load(Relaxed), "a client has stopped");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    };
    let mut made = Vec::new();
    pause()?;
    for (name, change) in STEPS {
        progress(name);
        let begin = Instant::now();
        change(&mut wanted);
        if name.contains("retired") {
            kept.server().ask(&["retire"])?;
        }
        let config = wanted.write(place, &args.model)?;
        let said = kept.server().ask(&["apply", &config, "--json"])?;
        let said: serde_json::Value = serde_json::from_str(&said).context("it prints JSON")?;
        ensure!(said["applied"] == true, "{name}: it is not applied: {said}");
        let pause_of = said["hand_over"]["pause_seconds"].as_f64().unwrap_or_default();
        made.push(Made { name, begin, end: Instant::now(), pause: pause_of });
        pause()?;
    }
    Ok(made)
}

fn present(args: &Args, seen: &Seen<Made>, (begin, end): (Instant, Instant)) -> anyhow::Result<()> {
    let Seen { events: made, disk, rounds, .. } = seen;
    let (transactions, orders) = (&seen.transactions.pulse, seen.journal.len());
    let columns = ["change", "took", "hand-over", "disk paused", "before", "during", "after"];
    let mut table = Table::new(&columns);
    let seconds = |time: Duration| time.as_secs_f64();
    let mut gaps = Vec::new();
    for one in made {
        let gap = seconds(disk.longest_gap(one.begin, one.end + Duration::from_secs(1)));
        gaps.push(gap);
        let rate = |from: Instant, to: Instant| format!("{:.0}/s", transactions.rate(from, to));
        table.row([
            one.name.to_owned(),
            format!("{:.2} s", seconds(one.end - one.begin)),
            format!("{:.2} s", one.pause),
            format!("{gap:.2} s"),
            rate(one.begin - LEVEL, one.begin),
            rate(one.begin, one.end),
            rate(one.end, one.end + LEVEL),
        ]);
    }
    table.print();
    println!("transactions by the second; * a change begins");
    let each = Duration::from_secs(1);
    let mut by_second = Vec::new();
    let mut line = String::new();
    let mut at = begin;
    while at + each <= end {
        let rate = transactions.rate(at, at + each);
        let mark =
            if made.iter().any(|one| (at..at + each).contains(&one.begin)) { "*" } else { "" };
        line += &format!(" {mark}{rate:.0}");
        by_second.push(rate);
        at += each;
        if by_second.len() % 20 == 0 || at + each > end {
            println!("{:4} s:{line}", by_second.len().next_multiple_of(20) - 20);
            line.clear();
        }
    }
    let pauses = Pauses::from(gaps);
    println!("all {orders} orders are there; no error; {rounds} rounds of the probe");
    let changes = made.iter().map(|one| {
        json!({
            "name": one.name,
            "at_second": seconds(one.begin - begin),
            "took_seconds": seconds(one.end - one.begin),
            "pause_seconds": one.pause,
        })
    });
    let changes: Vec<_> = changes.collect();
    let figures = json!({
        "connections": args.threads, "model": args.model, "changes": changes, "orders": orders,
        "disk": pauses.json(), "transactions_by_second": by_second,
    });
    let met = pauses.median() < MEDIAN;
    let name = format!("TPC-C during {} changes of volumes, sizes and devices", made.len());
    let rows = vec![
        Row::new(format!("{name}: lost orders, errors"), format!("0 of {orders}, 0"))
            .with_target("0, 0", true),
        Row::new("the same: pause of the disk, median / longest", pauses.show())
            .with_target(format!("median < {MEDIAN:.0} s"), met),
    ];
    keep("survive-reconfigure", rows, figures)
}
