//! Similar blocks: features that find them, and compression of a block against a similar one.
//!
//! Features are the smallest sampled hashes over windows of 32 bytes (a "bottom-k" sketch: Broder,
//! "On the resemblance and containment of documents", 1997), by a rolling Gear hash (Xia et al.,
//! "Ddelta", 2014; sampled as Odess does, Zou et al., 2021). Two blocks with a common feature share
//! stretches of equal bytes, at any offsets.
//!
//! A payload begins with the CRC32C of the decoded block, which detects a wrong base. A zstd frame
//! follows, with the base as its dictionary.

use std::cell::RefCell;

use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::ResetDirective;

use crate::dense::{LEVEL, compressor};
use crate::{BLOCK_BYTES, crc32c};

/// Maximum number of features of a block.
pub const FEATURES: usize = 4;
/// Fills the unused places of a block with fewer features.
pub const NO_FEATURE: u32 = u32::MAX;
/// Each byte moves the hash this far, so that it depends on the last 32.
const GEAR_SHIFT: u32 = 2;
/// A position is sampled if this many upper bits of the hash are zero: one in 64.
const SAMPLE_BITS: u32 = 6;
/// Bytes of the CRC at the start of a payload.
const CRC: usize = 4;

/// A random number for each byte, by SplitMix64.
static GEAR: [u64; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut z = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        table[i] = z ^ z >> 31;
        i += 1;
    }
    table
};

/// The features of a block in ascending order, padded with [`NO_FEATURE`].
#[must_use]
pub fn features(block: &[u8]) -> [u32; FEATURES] {
    let mut least = [NO_FEATURE; FEATURES];
    let mut hash = 0u64;
    for &byte in block {
        hash = (hash << GEAR_SHIFT).wrapping_add(GEAR[usize::from(byte)]);
        if hash >> (64 - SAMPLE_BITS) == 0 {
            note(&mut least, (hash.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32) as u32);
        }
    }
    least
}

/// Keeps a value if it is among the smallest.
fn note(least: &mut [u32; FEATURES], value: u32) {
    if value >= least[FEATURES - 1] || least.contains(&value) {
        return;
    }
    let at = least.iter().position(|&known| value < known).expect("it is less than the last");
    least[at..].rotate_right(1);
    least[at] = value;
}

/// Compresses blocks against similar ones.
pub struct SimilarCompressor(Compressor<'static>);

impl Default for SimilarCompressor {
    fn default() -> Self {
        Self::new()
    }
}

impl SimilarCompressor {
    /// A compressor with its own tables, about 100 KiB.
    ///
    /// # Panics
    /// If there is not enough memory for the tables.
    #[must_use]
    pub fn new() -> Self {
        Self(compressor())
    }

    /// Compresses `block` against `base` into the front of `out` and returns the payload's length,
    /// or `None` if that would exceed `most`. The rest of `out` is unspecified.
    ///
    /// # Panics
    /// If `base` or `block` is not one block, or `out` is shorter than `most`.
    pub fn compress(
        &mut self,
        base: &[u8],
        block: &[u8],
        most: usize,
        out: &mut [u8],
    ) -> Option<usize> {
        assert_eq!((base.len(), block.len()), (BLOCK_BYTES, BLOCK_BYTES), "blocks are whole");
        let frame = out[..most].get_mut(CRC..)?;
        // A frame that was too long is still open.
        self.0.context_mut().reset(ResetDirective::SessionOnly).ok()?;
        self.0.set_dictionary(LEVEL, base).ok()?;
        let len = self.0.compress_to_buffer(block, frame).ok()?;
        out[..CRC].copy_from_slice(&crc32c(block).to_le_bytes());
        Some(CRC + len)
    }
}

thread_local! {
    /// One per thread, since creating one takes longer than using it.
    static DECOMPRESSOR: RefCell<Decompressor<'static>> =
        RefCell::new(Decompressor::new().expect("there is memory for the tables"));
}

/// Decodes a payload of [`SimilarCompressor::compress`] into `out`, given its base. Returns false
/// if the payload is malformed or the base is a different one; `out` is then unspecified.
///
/// # Panics
/// If `out` is not one block.
#[must_use]
pub fn apply_similar(base: &[u8], payload: &[u8], out: &mut [u8]) -> bool {
    assert_eq!(out.len(), BLOCK_BYTES, "payloads hold one block");
    let Some((crc, frame)) = payload.split_first_chunk::<CRC>() else { return false };
    let len = DECOMPRESSOR.with_borrow_mut(|decompressor| {
        decompressor.set_dictionary(base)?;
        decompressor.decompress_to_buffer(frame, out)
    });
    len.is_ok_and(|len| len == BLOCK_BYTES) && crc32c(out) == u32::from_le_bytes(*crc)
}
