//! The damage that a backup does to the hits of others: a process reads all of a volume while
//! clients read what they usually do. Without a rule, with a rule that sends it past the cache; and
//! a pinned area, which has to stay either way.
//!
//! The filter of sequential streams is off, so that nothing but the rule keeps the backup out.

use std::process::Command;
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

/// The program that reads everything, and its name in rules.
const BACKUP: &str = "nbdcopy";
/// Most points of the hit ratio that the backup may cost.
const POINTS_TARGET: f64 = 1.0;
/// Length of the clients' reads, in bytes.
const BLOCK: u64 = 16 << 10;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// MiB of the primary, all of which the backup reads
    #[arg(long, default_value_t = 10240)]
    mib: u64,
    /// MiB of the cache; clients mostly read an area of three quarters of it
    #[arg(long, default_value_t = 1024)]
    cache_mib: u64,
    /// Seconds of each look at the clients' hits
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

/// Lookups of clients, and those that were found entirely in the cache.
#[derive(Clone, Copy)]
struct Hits {
    hits: u64,
    all: u64,
}

impl Hits {
    fn now(server: &Server) -> anyhow::Result<Self> {
        let status = server.status()?;
        let all = ["hits", "partial_hits", "misses"].map(|name| status.counter(name));
        Ok(Self { hits: all[0], all: all.iter().sum() })
    }

    /// Hits per hundred lookups since then.
    fn percent_since(self, before: Self) -> f64 {
        (self.hits - before.hits) as f64 * 100.0 / (self.all - before.all).max(1) as f64
    }
}

/// Runs the measurement and reports.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let place = Place::new(args.common.dir.as_deref())?;
    let binary = binary(args.common.forebay.as_deref())?;
    progress("making the primary");
    place.full("primary", args.mib << 20)?;
    let setting = Setting {
        primary: place.text("primary"),
        cache: ("cache".to_owned(), args.cache_mib << 20),
        mode: "write-back",
        ram: 64 << 20,
        shards: 1,
        more: vec!["--sequential-threshold=0".to_owned()],
    };
    let mut table = Table::new(&["clients' hits", "before", "after", "points lost", "target", ""]);
    let (mut kept, mut figures) = (Vec::new(), Vec::new());
    for ruled in [false, true] {
        let server = Server::forebay(&binary, &place, &setting)?;
        let [before, after, pinned] = around_backup(args, &server, ruled)?;
        server.stop()?;
        place.remove("cache");
        let name = if ruled { "a rule for the backup" } else { "no rule" };
        let lost = before - after;
        let met = lost <= POINTS_TARGET;
        let target = if ruled { format!("<= {POINTS_TARGET}") } else { String::new() };
        let mut row = Row::new(name, format!("{before:.1} / {after:.1}, {lost:.1} lost"));
        if ruled {
            row = row.with_target(target.clone(), met);
        }
        kept.push(row);
        let cells = [before, after, lost].map(|number| format!("{number:.1}"));
        let [before_text, after_text, lost_text] = cells;
        let verdict = if ruled { verdict(met) } else { String::new() };
        table.row([name.to_owned(), before_text, after_text, lost_text, target, verdict]);
        let row = format!("pinned blocks read again from the primary, {name}");
        kept.push(Row::new(row, format!("{pinned}")).with_target("0".to_owned(), pinned == 0.0));
        figures.push(json!({
            "rule": ruled, "before_percent": before, "after_percent": after,
            "pinned_blocks_missed": pinned,
        }));
        println!("{name}: {pinned} blocks of the pinned area had to be read again");
    }
    progress("");
    println!("{}, a backup of {} MiB", setting.describe(), args.mib);
    table.print();
    keep("backup", kept, json!({ "setting": setting.describe(), "runs": figures }))
}

/// The clients' hit ratio in percent before and after a backup, and the blocks of the pinned area
/// that had left the cache.
fn around_backup(args: &Args, server: &Server, ruled: bool) -> anyhow::Result<[f64; 3]> {
    let end = args.mib << 20;
    let pinned = (end - (args.cache_mib << 16), end);
    let range = format!("--range={}..{}", pinned.0, pinned.1);
    server.ask(&["pin", server.export, &range, "--prefetch"])?;
    if ruled {
        server.ask(&["set", &format!("rules=bypass process={BACKUP}")])?;
    }
    let clients = Load {
        loops: 8,
        connections: 1,
        block: BLOCK,
        pattern: Pattern::Vdbench {
            read_percent: 100,
            hit_percent: 95,
            hit_area: (args.cache_mib * 3) << 18,
            span: pinned.0,
        },
        time: Duration::from_secs(args.seconds),
        seed: 1,
        content: Content::Random,
    };
    progress("warming up");
    server
        .load(&Load { time: Duration::from_secs(3 * args.seconds), ..clients.clone() }, |_| {})?;
    let look = |seed| -> anyhow::Result<f64> {
        let before = Hits::now(server)?;
        server.load(&Load { seed, ..clients.clone() }, |_| {})?;
        Ok(Hits::now(server)?.percent_since(before))
    };
    progress("clients before the backup");
    let before = look(2)?;
    progress("the backup, and clients");
    let mut backup = Command::new(BACKUP).args([&server.uri(), "null:"]).spawn()?;
    server.load(&Load { seed: 3, ..clients.clone() }, |_| {})?;
    ensure!(backup.wait()?.success(), "{BACKUP} failed");
    progress("clients after the backup");
    let after = look(4)?;
    progress("the pinned area");
    let from_primary = server.status()?.counter("primary_read_blocks");
    let (start, end) = pinned;
    let pattern = Pattern::Sequential { read: true, start, end };
    server.load(&Load { pattern, time: Duration::from_secs(600), ..clients }, |_| {})?;
    let missed = server.status()?.counter("primary_read_blocks") - from_primary;
    Ok([before, after, missed as f64])
}
