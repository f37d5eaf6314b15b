//! The longest calls of the engine: a shard's thread serves nobody else during a call.
//!
//! The engine, its devices and its clock are those of the measurement of CPU time. A cache is
//! filled, then read and written at random by far more than it holds, and drained, so that every
//! kind of work in the background takes place: growing, reclaim, moving to the store, eviction,
//! destaging. Then come the rare cases that concern many blocks at once: the mode of a volume with
//! many dirty blocks changes, a flush of the primary fails that covers many of them, similar blocks
//! are looked for and no longer, long ranges are discarded, and the cache device fails while many
//! blocks are dirty.
//!
//! Memory is committed 2 MiB at a time, when it is used first. In a virtual machine whose host has
//! to find this memory, that alone takes several milliseconds.

use std::time::Duration;

use forebay_device::populate;
use serde_json::json;

use super::harness::{CALLS, Harness, Layout};
use crate::load::content::Content;
use crate::report::kept::{Row, keep};
use crate::report::table::{Table, verdict};

/// The longest that a call should take.
const TARGET: Duration = Duration::from_millis(2);

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    /// MiB of the cache device, which is in memory, as is a primary of twice the size
    #[arg(long, default_value_t = 2048)]
    mib: u64,
    /// Commit the reserved memory before each phase: its first use is not counted then
    #[arg(long)]
    populate: bool,
}

type Phase = fn(&mut Harness, u64) -> anyhow::Result<()>;

/// The work, in order. Each takes the number of the volume's blocks.
const PHASES: [(&str, Phase); 10] = [
    ("fill", |harness, _| harness.fill()),
    ("reads", |harness, blocks| harness.reads(blocks).map(drop)),
    ("writes", |harness, blocks| harness.writes(blocks / 2).map(drop)),
    ("drain", |harness, _| harness.drain()),
    ("dirty", |harness, blocks| harness.dirty(blocks / DIRTY_ONE_IN)),
    ("mode", |harness, _| harness.switch()),
    ("failed flush", |harness, blocks| {
        harness.dirty(blocks / DIRTY_ONE_IN)?;
        harness.longest();
        harness.fail_flush()
    }),
    ("similar", |harness, blocks| harness.similar(blocks / 8)),
    ("discards", |harness, blocks| harness.discards(blocks / 2)),
    ("lost device", |harness, blocks| {
        harness.dirty(blocks / DIRTY_ONE_IN)?;
        harness.longest();
        harness.lose(blocks / 64)
    }),
];
/// One block in this many of the volume, which is twice as large as the cache, is made dirty.
const DIRTY_ONE_IN: u64 = 5;

/// Runs the measurement and reports.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut table = Table::new(&[
        "content",
        "phase",
        "submit, ms",
        "complete, ms",
        "poll, ms",
        "others, ms",
        "",
    ]);
    let (mut all, mut worst) = (Vec::new(), Duration::ZERO);
    for (name, content) in [("random", Content::Random), ("database", Content::Database)] {
        let layout = Layout::large(args.mib << 20, content);
        let mut harness = Harness::start(layout)?;
        harness.longest();
        for (phase, work) in PHASES {
            if args.populate {
                populate()?;
            }
            work(&mut harness, layout.blocks)?;
            let longest = harness.longest();
            let most = longest.into_iter().max().unwrap_or_default();
            worst = worst.max(most);
            let calls = longest.map(|one| format!("{:.2}", millis(one)));
            let names = [name.to_owned(), phase.to_owned()];
            table.row(names.into_iter().chain(calls).chain([verdict(most <= TARGET)]));
            all.push(json!({
                "content": name, "phase": phase, "calls": CALLS, "millis": longest.map(millis),
            }));
        }
        let stats = harness.stats();
        println!(
            "{name}: {} blocks cached, {} written to the store, {} evicted, {} segments reclaimed",
            stats.cached_blocks,
            stats.stored_blocks,
            stats.evicted_blocks,
            stats.segments_reclaimed
        );
    }
    table.print();
    let memory = if args.populate { ", memory populated" } else { "" };
    let row = Row::new(
        format!("longest call of the engine, cache of {} MiB{memory}", args.mib),
        format!("{:.2} ms", millis(worst)),
    );
    let row = row.with_target(format!("<= {} ms", TARGET.as_millis()), worst <= TARGET);
    keep("steps", vec![row], json!({ "mib": args.mib, "populate": args.populate, "phases": all }))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
