//! Zstandard (RFC 8878) for single blocks, at level 1: denser than LZ4, since it also entropy-codes
//! literals, and several times slower both ways. For background writes.
//!
//! A payload is one frame without checksum or content size.

use std::cell::RefCell;

use zstd::bulk::{Compressor, Decompressor};

use crate::BLOCK_BYTES;

pub(crate) const LEVEL: i32 = 1;
/// A dense form must be smaller than the form it replaces by at least one part in this many.
const SAVES: usize = 8;

/// Maximum length in bytes of a dense form that is worth replacing a payload of `len` bytes.
#[must_use]
pub fn dense_max(len: usize) -> usize {
    len - len.div_ceil(SAVES)
}

/// A compressor whose frames omit all optional fields.
pub(crate) fn compressor() -> Compressor<'static> {
    let mut compressor = Compressor::new(LEVEL).expect("there is memory for the tables");
    compressor.include_contentsize(false).expect("a frame may be without its size");
    compressor.include_checksum(false).expect("a frame may be without a checksum");
    compressor.include_dictid(false).expect("a frame may be without its dictionary's number");
    compressor
}

/// Compresses blocks.
pub struct DenseCompressor(Compressor<'static>);

impl Default for DenseCompressor {
    fn default() -> Self {
        Self::new()
    }
}

impl DenseCompressor {
    /// A compressor with its own tables, about 100 KiB.
    ///
    /// # Panics
    /// If there is not enough memory for the tables.
    #[must_use]
    pub fn new() -> Self {
        Self(compressor())
    }

    /// Compresses a block into the front of `out` and returns the payload's length, or `None` if
    /// that would exceed `most`. The rest of `out` is unspecified.
    ///
    /// # Panics
    /// If `block` is not one block, or `out` is shorter than `most`.
    pub fn compress(&mut self, block: &[u8], most: usize, out: &mut [u8]) -> Option<usize> {
        assert_eq!(block.len(), BLOCK_BYTES, "only whole blocks are compressed");
        self.0.compress_to_buffer(block, &mut out[..most]).ok()
    }
}

thread_local! {
    /// One per thread, since creating one takes longer than using it.
    static DECOMPRESSOR: RefCell<Decompressor<'static>> =
        RefCell::new(Decompressor::new().expect("there is memory for the tables"));
}

/// Decodes a payload of [`DenseCompressor::compress`] into `out`, one block. Returns false if the
/// payload is malformed or does not yield exactly one block; `out` is then unspecified.
///
/// # Panics
/// If `out` is not one block.
#[must_use]
pub fn decompress_dense(payload: &[u8], out: &mut [u8]) -> bool {
    assert_eq!(out.len(), BLOCK_BYTES, "payloads hold one block");
    DECOMPRESSOR.with_borrow_mut(|decompressor| {
        decompressor.decompress_to_buffer(payload, out).is_ok_and(|len| len == BLOCK_BYTES)
    })
}
