//! `forebay dump`: lists the content of a cache device that no server uses.

use std::path::PathBuf;

use clap::Args;
use forebay_volume::offline::BlockInfo;
use serde_json::{Value, json};

use crate::offline::report::{read, summary, text};
use crate::output;

/// Arguments of `forebay dump`.
#[derive(Args, Debug)]
pub struct DumpArgs {
    /// The cache device
    pub cache: PathBuf,
    /// List every block
    #[arg(long)]
    pub blocks: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Lists the content of a cache device.
pub fn run(args: &DumpArgs) -> anyhow::Result<()> {
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
