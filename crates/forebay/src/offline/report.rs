//! The report about a cache device that no server uses, for people and for machines: `check` and
//! `dump` print it.

use std::path::Path;

use anyhow::{Context, anyhow};
use forebay_block::BLOCK_SIZE;
use forebay_control::units::Size;
use forebay_device::open_cache_read_only;
use forebay_runtime::Blocking;
use forebay_volume::offline::{Report, ShardReport, examine};
use serde_json::{Value, json};

use crate::busy;
use crate::offline::salvage;
use crate::server::cache::read_at;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Most problems that are printed; the others are counted.
const PROBLEMS_SHOWN: usize = 100;

/// Reads the whole log. The device stays locked meanwhile, so that no server starts on it.
pub fn read(path: &Path, payloads: bool) -> anyhow::Result<Report> {
    let device = busy::open(|| open_cache_read_only(path))?;
    let mut queue = Blocking::open(&*device).with_context(|| path.display().to_string())?;
    let size = queue.info().size;
    let mut read = |offset: u64, bytes: &mut [u8]| read_at(&mut queue, size, offset, bytes);
    examine(&mut read, payloads).map_err(|error| anyhow!("{}: {error}", path.display()))
}

/// A report for people.
pub fn text(report: &Report, outcome: Option<&salvage::Outcome>) -> String {
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

pub fn blocks(count: u64) -> Size {
    Size(count * BLOCK_SIZE as u64)
}

/// A report for machines, without its blocks.
pub fn summary(report: &Report, outcome: Option<&salvage::Outcome>) -> Value {
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
