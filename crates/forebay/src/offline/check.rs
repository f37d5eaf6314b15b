//! `forebay check` and `forebay dump`: a cache device that no server is using, verified or listed.
//! Nothing is written to it.

use std::path::Path;

use anyhow::{Context, anyhow, bail};
use forebay_block::BLOCK_SIZE;
use forebay_control::units::Size;
use forebay_device::open_cache_read_only;
use forebay_engine::offline::{BlockInfo, Report, ShardReport, examine};
use forebay_runtime::Blocking;
use serde_json::{Value, json};

use crate::cli::{CheckArgs, DumpArgs};
use crate::offline::salvage;
use crate::server::cache::read_at;
use crate::{busy, output};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Problems that are printed; the rest are counted.
const PROBLEMS_SHOWN: usize = 100;

/// Verifies a cache device; fails if anything is wrong.
pub fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let report = read(&args.cache, !args.fast)?;
    let outcome = if args.fast { None } else { Some(salvageable(&args.cache)?) };
    let lost = outcome.as_ref().is_some_and(|outcome| !outcome.is_whole());
    if args.json {
        let mut value = summary(&report, outcome.as_ref());
        if let Some(outcome) = &outcome {
            (value["lost"], value["lost_records"]) = outcome.losses_json();
        }
        value["good"] = (!lost && report.problems.is_empty()).into();
        output::line(&format!("{value:#}"))?;
    } else {
        let losses = outcome.as_ref().map(salvage::Outcome::losses).unwrap_or_default();
        output::print(&(text(&report, outcome.as_ref()) + &losses))?;
    }
    let count = report.problems.len();
    let dirty = report.problems.iter().filter(|problem| problem.dirty).count();
    match (count, dirty) {
        _ if lost => bail!(
            "{}: a part of the data that only this device holds is lost, listed above; start the \
             server to serve and destage the rest, or write it to a primary with `forebay salvage`",
            args.cache.display()
        ),
        (0, _) => say_good(args, &report),
        (_, 0) => bail!(
            "{}: {count} problems, none of them in dirty data; what they concern is read from the \
             primary again",
            args.cache.display()
        ),
        _ => bail!(
            "{}: {count} problems, {dirty} of them in dirty data that only this device holds; \
             start the server to destage what can be read, and check the volume",
            args.cache.display()
        ),
    }
}

/// A cache in which nothing is wrong.
fn say_good(args: &CheckArgs, report: &Report) -> anyhow::Result<()> {
    if args.json {
        return Ok(());
    }
    let dirty = blocks(report.dirty_blocks(None));
    let what = if args.fast {
        format!("its structures are sound, {dirty} dirty; its data was not read")
    } else {
        format!("sound, {dirty} dirty, all of it readable")
    };
    Ok(output::line(&format!("good: {what}"))?)
}

/// Lists what is in a cache device.
pub fn dump(args: &DumpArgs) -> anyhow::Result<()> {
    let report = read(&args.cache, false)?;
    if args.json {
        let mut value = summary(&report, None);
        if args.blocks {
            let blocks = report.shards.iter().flat_map(|shard| &shard.blocks);
            value["blocks"] = blocks.map(block_json).collect();
        }
        return Ok(output::line(&format!("{value:#}"))?);
    }
    output::print(&text(&report, None))?;
    if args.blocks {
        output::line("volume       block  kind        bytes  state      record      offset")?;
        for block in report.shards.iter().flat_map(|shard| &shard.blocks) {
            output::line(&block_line(block))?;
        }
    }
    Ok(())
}

/// Reads the whole log. The device stays locked meanwhile, so that no server starts on it.
pub fn read(path: &Path, payloads: bool) -> anyhow::Result<Report> {
    let device = busy::open(|| open_cache_read_only(path))?;
    let mut queue = Blocking::open(&*device).with_context(|| path.display().to_string())?;
    let size = queue.info().size;
    let mut read = |offset: u64, bytes: &mut [u8]| read_at(&mut queue, size, offset, bytes);
    examine(&mut read, payloads).map_err(|error| anyhow!("{}: {error}", path.display()))
}

/// What of the dirty blocks can be read, and what is lost.
fn salvageable(path: &Path) -> anyhow::Result<salvage::Outcome> {
    let device = busy::open(|| open_cache_read_only(path))?;
    let mut queue = Blocking::open(&*device).with_context(|| path.display().to_string())?;
    salvage::survey(path, &mut queue)
}

/// A report for people.
fn text(report: &Report, outcome: Option<&salvage::Outcome>) -> String {
    let superblock = &report.superblock;
    let state =
        if superblock.clean { "stopped in order" } else { "in use, or not stopped in order" };
    let mut out = format!(
        "pool {:032x}: start {}, {state}; {} in segments of {}\n",
        u128::from_be_bytes(superblock.uuid),
        superblock.epoch,
        Size(superblock.device_size),
        Size(u64::from(superblock.segment_size)),
    );
    for volume in &superblock.volumes {
        let lost = outcome.map_or(0, |outcome| outcome.lost_bytes(volume.id));
        let lost = match lost {
            0 => String::new(),
            lost => format!(", {} of it lost (unreadable blocks: {})", Size(lost), lost / BLOCK),
        };
        out += &format!(
            "volume {} {}: {} on {}, {} dirty{lost}\n",
            volume.id.0,
            volume.name,
            Size(volume.size),
            volume.identity,
            blocks(report.dirty_blocks(Some(volume.id))),
        );
    }
    for (number, shard) in report.shards.iter().enumerate() {
        let segments = shard.segments.map_or("no segment".to_owned(), |(first, last)| {
            format!("segments {} to {}, {} of them unsealed", first.0, last.0, shard.unsealed)
        });
        out += &format!(
            "shard {number}: {segments}; last record {}; {} cached, {} dirty\n",
            shard.last_lsn.0,
            blocks(shard.blocks.len() as u64),
            blocks(dirty(shard)),
        );
    }
    for problem in report.problems.iter().take(PROBLEMS_SHOWN) {
        let risk = if problem.dirty { " (dirty data)" } else { "" };
        out += &format!("problem: {}: {}{risk}\n", problem.place, problem.what);
    }
    if report.problems.len() > PROBLEMS_SHOWN {
        out += &format!("problem: {} more\n", report.problems.len() - PROBLEMS_SHOWN);
    }
    out
}

fn dirty(shard: &ShardReport) -> u64 {
    shard.blocks.iter().filter(|block| block.dirty).count() as u64
}

fn blocks(count: u64) -> Size {
    Size(count * BLOCK_SIZE as u64)
}

/// A report for machines, without its blocks.
fn summary(report: &Report, outcome: Option<&salvage::Outcome>) -> Value {
    let superblock = &report.superblock;
    let volumes = superblock.volumes.iter().map(|volume| {
        json!({
            "id": volume.id.0,
            "name": volume.name,
            "size": volume.size,
            "primary": volume.identity,
            "dirty_bytes": blocks(report.dirty_blocks(Some(volume.id))).0,
            "lost_bytes": outcome.map(|outcome| outcome.lost_bytes(volume.id)),
        })
    });
    let shards = report.shards.iter().map(|shard| {
        json!({
            "first_segment": shard.segments.map(|(first, _)| first.0),
            "last_segment": shard.segments.map(|(_, last)| last.0),
            "unsealed_segments": shard.unsealed,
            "last_record": shard.last_lsn.0,
            "cached_bytes": blocks(shard.blocks.len() as u64).0,
            "dirty_bytes": blocks(dirty(shard)).0,
        })
    });
    let problems = report.problems.iter().map(
        |problem| json!({"place": problem.place, "what": problem.what, "dirty": problem.dirty}),
    );
    json!({
        "uuid": format!("{:032x}", u128::from_be_bytes(superblock.uuid)),
        "epoch": superblock.epoch,
        "clean_stop": superblock.clean,
        "device_size": superblock.device_size,
        "segment_size": superblock.segment_size,
        "volumes": volumes.collect::<Vec<_>>(),
        "shards": shards.collect::<Vec<_>>(),
        "problems": problems.collect::<Vec<_>>(),
    })
}

fn block_json(block: &BlockInfo) -> Value {
    json!({
        "volume": block.volume.0,
        "block": block.block,
        "kind": format!("{:?}", block.kind).to_lowercase(),
        "bytes": block.len,
        "dirty": block.dirty,
        "record": block.lsn.0,
        "offset": block.offset,
    })
}

fn block_line(block: &BlockInfo) -> String {
    let kind = format!("{:?}", block.kind).to_lowercase();
    let state = if block.dirty { "dirty" } else { "clean" };
    format!(
        "{:6}  {:10}  {kind:10}  {:5}  {state:5}  {:10}  {:10}",
        block.volume.0, block.block, block.len, block.lsn.0, block.offset
    )
}
