//! `forebay analyze`: predicts how a cache would store the blocks of a device or file. Nothing is
//! written to it.

mod measure;

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use forebay_block::BLOCK_SIZE;
use forebay_control::units::Size;
use indicatif::ProgressBar;
use serde_json::{Value, json};

use crate::output;
use measure::{Counts, DELTA_CLASSES, Measure};

/// Size of a read, in bytes.
const PIECE: u64 = 1 << 20;

/// Arguments of `forebay analyze`.
#[derive(Args, Debug)]
pub struct AnalyzeArgs {
    /// The device or file
    pub path: PathBuf,
    /// An older version of it, for the size of deltas
    #[arg(long, value_name = "PATH")]
    pub older: Option<PathBuf>,
    /// Read at most this much, in pieces of 1 MiB spread evenly; 0 for all of it
    #[arg(long, value_name = "SIZE", default_value = "16GiB")]
    pub limit: Size,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Reads, measures, prints.
pub fn run(args: &AnalyzeArgs) -> anyhow::Result<()> {
    let source = Source::open(&args.path)?;
    let older = args.older.as_deref().map(Source::open).transpose()?;
    if let Some(older) = older.as_ref().filter(|older| older.size < source.size) {
        bail!(
            "{} has {} and {} has {}: an older version has the same size",
            args.path.display(),
            Size(source.size),
            args.older.as_deref().unwrap_or(&args.path).display(),
            Size(older.size)
        );
    }
    let every = pieces_apart(source.size, args.limit.0);
    let mut measure = Measure::new(source.size / BLOCK_SIZE as u64 / every);
    let bar = output::bar(source.size.div_ceil(PIECE).div_ceil(every) * PIECE);
    read(&source, older.as_ref(), every, &mut measure, &bar)?;
    bar.finish_and_clear();
    let found = Found { source, every, counts: measure.counts(), equal: measure.duplicate_share() };
    if args.json {
        output::line(&format!("{:#}", found.json()))?;
    } else {
        output::print(&found.text(&args.path))?;
    }
    Ok(())
}

/// Reads one piece out of this many, so that at most `limit` bytes are read; a limit of 0 is none.
fn pieces_apart(size: u64, limit: u64) -> u64 {
    if limit == 0 { 1 } else { size.div_ceil(PIECE).div_ceil((limit / PIECE).max(1)).max(1) }
}

/// A device or file to read.
struct Source {
    file: File,
    size: u64,
}

impl Source {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let at = || path.display().to_string();
        let mut file = File::open(path).with_context(at)?;
        if file.metadata().with_context(at)?.is_dir() {
            bail!("{} is a directory; name a device or a file", at());
        }
        let size = file.seek(SeekFrom::End(0)).with_context(at)?;
        let size = size / BLOCK_SIZE as u64 * BLOCK_SIZE as u64;
        if size == 0 {
            bail!("{} has less than a block of {BLOCK_SIZE} bytes", at());
        }
        Ok(Self { file, size })
    }
}

impl Source {
    fn block(&self, number: u64) -> anyhow::Result<Vec<u8>> {
        let mut block = vec![0; BLOCK_SIZE];
        let read = self.file.read_exact_at(&mut block, number * BLOCK_SIZE as u64);
        read.with_context(|| format!("reading block {number}"))?;
        Ok(block)
    }
}

/// Measures one piece out of every `every`.
fn read(
    source: &Source,
    older: Option<&Source>,
    every: u64,
    measure: &mut Measure,
    bar: &ProgressBar,
) -> anyhow::Result<()> {
    let (mut new, mut old) = (vec![0; PIECE as usize], vec![0; PIECE as usize]);
    for at in (0..source.size).step_by((PIECE * every) as usize) {
        let len = PIECE.min(source.size - at) as usize;
        let failed = || format!("reading {len} bytes at {at}");
        source.file.read_exact_at(&mut new[..len], at).with_context(failed)?;
        if let Some(older) = older {
            older.file.read_exact_at(&mut old[..len], at).with_context(failed)?;
        }
        let pairs = new[..len].chunks_exact(BLOCK_SIZE).zip(old.chunks_exact(BLOCK_SIZE));
        for (number, (block, before)) in (at / BLOCK_SIZE as u64..).zip(pairs) {
            let older = older.is_some().then_some(before);
            measure.take(number, block, older, |earlier| source.block(earlier))?;
        }
        bar.inc(PIECE);
    }
    Ok(())
}

/// The results.
struct Found {
    source: Source,
    every: u64,
    counts: Counts,
    /// The share of non-zero blocks that equal an earlier one.
    equal: f64,
}

impl Found {
    /// The ways to store the blocks, with the bytes of payload of each.
    fn ways(&self) -> [(&'static str, u64); 5] {
        let Counts { lz4_bytes, dense_bytes, similar_bytes, .. } = self.counts;
        let raw = self.counts.filled() * BLOCK_SIZE as u64;
        let once = dense_bytes as f64 * (1.0 - self.equal);
        [
            ("raw", raw),
            ("lz4", lz4_bytes),
            ("zstd", dense_bytes),
            ("zstd_equal_once", once as u64),
            ("similar", similar_bytes),
        ]
    }

    fn share(&self, part: u64) -> f64 {
        part as f64 / self.counts.blocks.max(1) as f64
    }

    fn duplicates(&self) -> f64 {
        self.equal * (1.0 - self.share(self.counts.zero))
    }

    fn json(&self) -> Value {
        let c = &self.counts;
        let holds: serde_json::Map<String, Value> = self
            .ways()
            .map(|(way, bytes)| (way.to_owned(), json!(self.counts.holds(bytes))))
            .into_iter()
            .collect();
        let classes: Vec<Value> = DELTA_CLASSES
            .iter()
            .zip(c.delta_classes)
            .map(|(end, count)| json!({ "up_to_bytes": end, "deltas": count }))
            .collect();
        json!({
            "size": self.source.size,
            "blocks_read": c.blocks,
            "one_piece_of": self.every,
            "shares": {
                "zero": self.share(c.zero),
                "duplicate": self.duplicates(),
                "lz4": self.share(c.lz4),
                "zstd_only": self.share(c.dense_only),
                "raw": self.share(c.filled() - c.lz4 - c.dense_only),
                "similar": self.share(c.similar),
            },
            "holds": holds,
            "rewrites": {
                "changed": c.changed,
                "deltas": c.deltas,
                "delta_bytes": c.delta_bytes,
                "classes": classes,
            },
        })
    }

    fn text(&self, path: &Path) -> String {
        let c = &self.counts;
        let percent = |share: f64| format!("{:6.1} %", share * 100.0);
        let read = match self.every {
            1 => "all of it read".to_owned(),
            every => format!("one MiB in {every} read"),
        };
        let mut out = format!("{}: {}, {read}\n\nblocks\n", path.display(), Size(self.source.size));
        let raw = c.filled() - c.lz4 - c.dense_only;
        for (what, part) in [
            ("zero", c.zero),
            ("packed by LZ4", c.lz4),
            ("packed by zstd only", c.dense_only),
            ("not worth packing", raw),
        ] {
            out += &format!("  {what:<32}{}\n", percent(self.share(part)));
        }
        out += &format!("  {:<32}{}\n", "equal to an earlier one", percent(self.duplicates()));
        out +=
            &format!("  {:<32}{}\n", "similar to an earlier one", percent(self.share(c.similar)));
        out += "\nbytes of non-zero blocks held by one byte of the cache device\n";
        let names = [
            "raw",
            "by LZ4, without time for more",
            "by zstd",
            "that, and equal blocks once",
            "that, with content = similar",
        ];
        for (name, (_, bytes)) in names.iter().zip(self.ways()) {
            out += &format!("  {name:<32}{:6.2}\n", self.counts.holds(bytes));
        }
        if c.changed > 0 {
            out += &self.rewrites();
        }
        out
    }

    /// The cost of rewriting the older version with the newer one.
    fn rewrites(&self) -> String {
        let c = &self.counts;
        let share = |count: u64| format!("{:6.1} %", count as f64 * 100.0 / c.changed as f64);
        let mut out = format!("\nrewrites: {} of {} blocks differ\n", c.changed, c.blocks);
        let mut from = 1;
        for (end, count) in DELTA_CLASSES.iter().zip(c.delta_classes) {
            let what = format!("deltas of {from} to {end} bytes");
            out += &format!("  {what:<32}{}\n", share(count));
            from = end + 1;
        }
        out += &format!("  {:<32}{}\n", "stored whole", share(c.changed - c.deltas));
        if c.deltas > 0 {
            let mean = c.delta_bytes as f64 / c.deltas as f64;
            out += &format!("  {:<32}{mean:6.0}\n", "bytes of a delta, mean");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_kept_by_leaving_pieces_out() {
        assert_eq!(pieces_apart(100 * PIECE, 0), 1);
        assert_eq!(pieces_apart(100 * PIECE, 100 * PIECE), 1);
        assert_eq!(pieces_apart(100 * PIECE, 50 * PIECE), 2);
        assert_eq!(pieces_apart(101 * PIECE, 50 * PIECE), 3);
        assert_eq!(pieces_apart(100 * PIECE, 1), 100);
        assert_eq!(pieces_apart(1, 1), 1);
    }
}
