//! Writes that only a defect would delay: to a volume next to one whose primary is dead, and to one
//! block over and over in write-through.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use crate::load::content::Content;
use crate::load::sample::Latency;
use crate::load::{self, Load, Outcome, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::san::San;
use crate::rig::server::{Server, Setting, binary};
use forebay_block::testing::Numbers;

const BLOCK: u64 = 4096;
/// Bytes of a primary.
const SIZE: u64 = 64 << 20;
/// Maximum ratio of the median and the p99 next to a dead volume to those alone.
const BESIDE_MAX: f64 = 2.0;
/// Minimum ratio of the rate of rewrites to that of distinct blocks.
const REWRITES_MIN: f64 = 0.8;

/// Arguments of the commands.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

fn writes(args: &Args, seed: u64) -> Load {
    Load {
        loops: 4,
        connections: 1,
        block: BLOCK,
        // So few blocks that the dirty limit is not reached.
        pattern: Pattern::Random { read_percent: 0, span: 4 << 20 },
        time: Duration::from_secs(args.seconds),
        seed,
        content: Content::Random,
    }
}

/// Write latency of a volume alone, and next to one whose primary went away during writes.
///
/// # Errors
/// When the measurement is not possible here.
pub fn away(args: &Args) -> anyhow::Result<()> {
    let place = Place::new(args.common.dir.as_deref())?;
    place.sparse("primary", SIZE)?;
    let socket = place.path("san.sock");
    let san = San::start(&socket, SIZE as usize);
    let config = place.path("forebay.toml");
    let text = format!(
        "[cache]\npath = \"{}\"\nsize = \"64MiB\"\nstate_dir = \"{}\"\n\
         [memory]\nram = \"16MiB\"\n[control]\nsocket = \"{}\"\n\
         [server]\nshards = 2\nnbd = [\"unix:{}\"]\n\
         [[volume]]\nname = \"disk\"\nprimary = \"{}\"\n\
         [[volume]]\nname = \"other\"\nprimary = \"nbd+unix:///?socket={}\"\n",
        place.text("cache"),
        place.text("cache.state"),
        place.text("cache.control"),
        place.text("cache.nbd"),
        place.text("primary"),
        socket.display(),
    );
    fs::write(&config, text)?;
    let server = Server::configured(&binary(args.common.forebay.as_deref())?, &place, &config)?;
    server.load(&writes(args, 1), |_| {})?;
    progress("alone");
    let alone = server.load(&writes(args, 2), |_| {})?.times;
    san.set_off(true);
    san.cut_links();
    progress("filling the dead volume");
    // Until its writes are delayed; the load does not wait for them.
    let fill = Load { pattern: Pattern::Random { read_percent: 0, span: SIZE }, ..writes(args, 3) };
    let other = server.socket.clone();
    std::thread::spawn(move || load::run(&other, "other", &fill, |_| {}));
    std::thread::sleep(Duration::from_secs(args.seconds / 2));
    progress("beside it");
    let beside = server.load(&writes(args, 4), |_| {})?.times;
    progress("");
    let figures = json!({ "alone": alone, "beside": beside });
    let mut table = Table::new(&["4 KiB writes", "p50 ms", "p99 ms", "max ms", "target", ""]);
    let row = |name: &str, latency: &Latency, target: String, verdict: String| {
        [
            name.to_owned(),
            format!("{:.3}", latency.p50_ms),
            format!("{:.3}", latency.p99_ms),
            format!("{:.1}", latency.max_ms),
            target,
            verdict,
        ]
    };
    table.row(row("alone", &alone, String::new(), String::new()));
    let ratio = (beside.p50_ms / alone.p50_ms).max(beside.p99_ms / alone.p99_ms);
    let target = format!("{ratio:.2} times, at most {BESIDE_MAX}");
    table.row(row("beside", &beside, target, verdict(ratio <= BESIDE_MAX).to_string()));
    table.print();
    let result = format!(
        "p50 {:.2}, p99 {:.2} ms (alone {:.2}, {:.2}): {ratio:.2} times",
        beside.p50_ms, beside.p99_ms, alone.p50_ms, alone.p99_ms
    );
    let row = Row::new("writes of a volume next to one whose primary is dead", result);
    let row = row.with_target(format!("<= {BESIDE_MAX} times"), ratio <= BESIDE_MAX);
    keep("away", vec![row], figures)
}

/// The rate of writes of one block in write-through, compared with distinct blocks.
///
/// # Errors
/// When the measurement is not possible here.
pub fn rewrite(args: &Args) -> anyhow::Result<()> {
    let place = Place::new(args.common.dir.as_deref())?;
    place.sparse("primary", SIZE)?;
    let setting = Setting {
        primary: format!("{}?emulate=hdd", place.text("primary")),
        cache: ("cache".to_owned(), 64 << 20),
        mode: "write-through",
        ram: 16 << 20,
        shards: 1,
        more: Vec::new(),
    };
    let server = Server::forebay(&binary(args.common.forebay.as_deref())?, &place, &setting)?;
    let mut numbers = Numbers::new(7);
    let distinct: Vec<u64> = (0..1 << 20).map(|_| numbers.below(SIZE / BLOCK)).collect();
    let rate = |name: &str, blocks: Vec<u64>| -> anyhow::Result<Outcome> {
        progress(name);
        let pattern = Pattern::List(Arc::new(blocks));
        server.load(&Load { loops: 1, pattern, ..writes(args, 1) }, |_| {})
    };
    let distinct = rate("distinct blocks", distinct)?.rate();
    let same = rate("one block", vec![5; 1 << 20])?.rate();
    progress("");
    let ratio = same / distinct;
    let figures = json!({ "setting": setting.describe(), "distinct": distinct, "same": same });
    println!("{}", setting.describe());
    println!(
        "write-through on a disk, writes a second: distinct blocks {distinct:.0}, one block \
         {same:.0}; {ratio:.2} times (at least {REWRITES_MIN}): {}",
        verdict(ratio >= REWRITES_MIN)
    );
    let result = format!("{same:.0} a second, distinct blocks {distinct:.0}: {ratio:.2} times");
    let row = Row::new("one block rewritten in write-through on a disk", result);
    let row = row.with_target(format!(">= {REWRITES_MIN}"), ratio >= REWRITES_MIN);
    keep("rewrite", vec![row], figures)
}
