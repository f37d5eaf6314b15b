//! Properties of blocks, measured one after another: all zeros, equal to an earlier block,
//! compressed size (alone and against a similar block), and size of a delta against an older
//! version.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use forebay_block::{BLOCK_SIZE, VolumeId};
use forebay_codec::{
    Compressor, DELTA_MAX, DenseCompressor, SimilarCompressor, dense_max, is_zero,
};
use forebay_engine::{Alike, Key, Sketch, similar_max};
use forebay_format::{ENTRY_BYTES, PAGE};

/// Most hashes kept, about 100 MiB. Of larger volumes a sample of hashes is kept.
const HASHES_MAX: usize = 1 << 22;
/// Alignment of payloads, in bytes.
const ALIGN: usize = 8;
/// Upper bounds of the size classes of deltas, in bytes.
pub const DELTA_CLASSES: [usize; 4] = [128, 256, 512, DELTA_MAX];

/// The results of a measurement.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Number of blocks measured.
    pub blocks: u64,
    /// Of these: all zeros.
    pub zero: u64,
    /// Compressed by LZ4.
    pub lz4: u64,
    /// Compressed by zstd but not by LZ4.
    pub dense_only: u64,
    /// Bytes of payload on the cache device with LZ4.
    pub lz4_bytes: u64,
    /// Bytes of payload with zstd.
    pub dense_bytes: u64,
    /// Bytes of payload with `content = similar`.
    pub similar_bytes: u64,
    /// Blocks stored against similar ones with `content = similar`.
    pub similar: u64,
    /// Blocks that differ from their older version.
    pub changed: u64,
    /// Of the changed blocks: stored as deltas.
    pub deltas: u64,
    /// Bytes of these deltas.
    pub delta_bytes: u64,
    /// Number of deltas in each of [`DELTA_CLASSES`].
    pub delta_classes: [u64; DELTA_CLASSES.len()],
}

impl Counts {
    /// Blocks that are not all zeros. Zero blocks are mostly space that was never used, which no
    /// cache sees.
    pub fn filled(&self) -> u64 {
        self.blocks - self.zero
    }

    /// Bytes of filled blocks stored per byte of the cache device, if their payloads take
    /// `payloads` bytes; accounts for entries in records and footers and for the records' header
    /// pages.
    pub fn holds(&self, payloads: u64) -> f64 {
        let bytes = payloads + self.filled() * 2 * ENTRY_BYTES as u64;
        (self.filled() * BLOCK_SIZE as u64) as f64 / (bytes + bytes / HEADER_SHARE).max(1) as f64
    }
}

/// One page of a log in this many is a record's header page: records have 128 pages, and some are
/// shorter.
const HEADER_SHARE: u64 = 100;

/// Measures blocks.
pub struct Measure {
    lz4: Compressor,
    dense: DenseCompressor,
    alike: Alike,
    against: SimilarCompressor,
    out: Box<[u8; BLOCK_SIZE]>,
    /// Number of blocks seen for each hash whose last `skip` bits are zero.
    seen: HashMap<u64, u32>,
    skip: u32,
    counts: Counts,
}

impl Measure {
    /// Starts a measurement of `blocks` blocks.
    pub fn new(blocks: u64) -> Self {
        Self {
            lz4: Compressor::new(),
            dense: DenseCompressor::new(),
            alike: Alike::new(blocks),
            against: SimilarCompressor::new(),
            out: Box::new([0; BLOCK_SIZE]),
            seen: HashMap::new(),
            skip: 0,
            counts: Counts::default(),
        }
    }

    /// Measures a block, and compares it with its older version if there is one; `read` returns an
    /// earlier block by its number.
    ///
    /// # Errors
    /// The error of `read`.
    pub fn take(
        &mut self,
        number: u64,
        block: &[u8],
        older: Option<&[u8]>,
        read: impl FnOnce(u64) -> anyhow::Result<Vec<u8>>,
    ) -> anyhow::Result<()> {
        self.counts.blocks += 1;
        if let Some(older) = older.filter(|older| *older != block) {
            self.delta(block, older);
        }
        if is_zero(block) {
            self.counts.zero += 1;
            return Ok(());
        }
        self.remember(block);
        let packed = self.lz4.compress(block, &mut self.out[..]);
        let lz4 = packed.unwrap_or(BLOCK_SIZE);
        let dense = self.dense.compress(block, dense_max(lz4), &mut self.out[..]);
        self.counts.lz4 += u64::from(packed.is_some());
        self.counts.dense_only += u64::from(packed.is_none() && dense.is_some());
        self.counts.lz4_bytes += lz4.next_multiple_of(ALIGN) as u64;
        let dense = dense.unwrap_or(lz4).next_multiple_of(ALIGN) as u64;
        self.counts.dense_bytes += dense;
        let similar = self.similar(number, block, similar_max(lz4), read)?;
        self.counts.similar_bytes += similar.unwrap_or(dense);
        Ok(())
    }

    /// Bytes of the block's payload against a similar block; `None` if there is none.
    fn similar(
        &mut self,
        number: u64,
        block: &[u8],
        most: usize,
        read: impl FnOnce(u64) -> anyhow::Result<Vec<u8>>,
    ) -> anyhow::Result<Option<u64>> {
        let (sketch, key) = (Sketch::of(block), Key::new(VolumeId(0), number));
        if let Some(other) = self.alike.find(&sketch, key) {
            let base = read(other.block())?;
            if base == block {
                return Ok(Some(0));
            }
            if let Some(len) = self.against.compress(&base, block, most, &mut self.out[..]) {
                self.counts.similar += 1;
                return Ok(Some(len.next_multiple_of(ALIGN) as u64));
            }
        }
        self.alike.note(&sketch, key);
        Ok(None)
    }

    fn delta(&mut self, block: &[u8], older: &[u8]) {
        self.counts.changed += 1;
        let Some(len) = self.lz4.compress_delta(older, block, &mut self.out[..]) else { return };
        self.counts.deltas += 1;
        self.counts.delta_bytes += len as u64;
        if let Some(class) = DELTA_CLASSES.iter().position(|&end| len <= end) {
            self.counts.delta_classes[class] += 1;
        }
    }

    fn remember(&mut self, block: &[u8]) {
        let mut hasher = DefaultHasher::new();
        block.hash(&mut hasher);
        let hash = hasher.finish();
        if hash.trailing_zeros() < self.skip {
            return;
        }
        *self.seen.entry(hash).or_default() += 1;
        while self.seen.len() > HASHES_MAX {
            self.skip += 1;
            let skip = self.skip;
            self.seen.retain(|hash, _| hash.trailing_zeros() >= skip);
        }
    }

    /// The results so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The share of non-zero blocks that equal an earlier one.
    pub fn duplicate_share(&self) -> f64 {
        let all: u64 = self.seen.values().map(|&times| u64::from(times)).sum();
        if all == 0 { 0.0 } else { (all - self.seen.len() as u64) as f64 / all as f64 }
    }
}

const _: () = assert!(BLOCK_SIZE == PAGE, "a raw block takes a page");

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64, letters: u8) -> Vec<u8> {
        let bytes = forebay_block::testing::noise(seed, BLOCK_SIZE).into_iter();
        bytes.map(|byte| if letters == 0 { byte } else { b'a' + byte % letters }).collect()
    }

    /// Measures blocks in their order.
    fn measured(blocks: &[Vec<u8>], older: Option<&[u8]>) -> Measure {
        let mut measure = Measure::new(1000);
        for (number, block) in blocks.iter().enumerate() {
            let earlier = |n: u64| Ok(blocks[n as usize].clone());
            measure.take(number as u64, block, older, earlier).expect("reading does not fail");
        }
        measure
    }

    #[test]
    fn every_kind_is_told() {
        let mut blocks = vec![vec![0; BLOCK_SIZE], vec![7; BLOCK_SIZE]];
        blocks.extend([1, 2, 1].map(|seed| noise(seed, 0)));
        blocks.push(noise(3, 20));
        let measure = measured(&blocks, None);
        let counts = measure.counts();
        assert_eq!((counts.blocks, counts.zero, counts.lz4, counts.dense_only), (6, 1, 1, 1));
        assert!((measure.duplicate_share() - 1.0 / 5.0).abs() < 1e-9);
        let raw = 3 * BLOCK_SIZE as u64;
        assert!(counts.lz4_bytes > raw + 4096 && counts.dense_bytes < raw + 3000, "{counts:?}");
    }

    #[test]
    fn a_changed_block_is_a_delta_if_little_changed() {
        let old = noise(5, 0);
        let mut new = old.clone();
        new[1000..1020].fill(0xaa);
        let counts = measured(&[old.clone(), new, noise(6, 0)], Some(&old)).counts();
        assert_eq!((counts.changed, counts.deltas, counts.delta_classes), (2, 1, [1, 0, 0, 0]));
        assert!(counts.delta_bytes < 100, "{counts:?}");
    }

    #[test]
    fn what_is_like_an_earlier_block_is_told() {
        let old = noise(5, 0);
        let mut moved = old.clone();
        moved.rotate_right(100);
        let counts = measured(&[old.clone(), moved, noise(6, 0), old], None).counts();
        assert_eq!((counts.similar, counts.blocks), (1, 4));
        let two = 2 * BLOCK_SIZE as u64;
        assert!((two..two + 300).contains(&counts.similar_bytes), "{counts:?}");
    }
}
