//! Zero detection, LZ4, zstd, deltas, similarity and checksums for 4 KiB blocks.
//!
//! A payload decodes to exactly one block; one that yields fewer or more bytes is rejected.
//! Decoding does not verify that the payload is the one written: the caller checks its checksum
//! before decoding.

#![forbid(unsafe_code)]

mod dense;
mod lz4;
mod similar;
mod zero;

pub use dense::{DenseCompressor, decompress_dense, dense_max};
pub use lz4::{COMPRESSED_MAX, Compressor, DELTA_MAX, DecodeError, apply_delta, decompress};
pub use similar::{FEATURES, NO_FEATURE, SimilarCompressor, apply_similar, features};
pub use zero::is_zero;

/// Bytes of a block, the unit of everything in this crate.
pub const BLOCK_BYTES: usize = 4096;

/// CRC32C (Castagnoli) of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_gives_the_published_check_values() {
        // RFC 3720, appendix B.4, and the check value of the CRC catalogue.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b""), 0);
    }
}
