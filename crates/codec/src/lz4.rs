//! LZ4 for single blocks, optionally against an older version of the block: our own compressor,
//! decoding by `lz4_flex`.
//!
//! The compressor writes the LZ4 block format
//! (<https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md>), which any LZ4 decoder reads. It
//! handles one input size and is tuned for speed: positions fit 16 bits, the table is small, only
//! matches of five bytes or more are searched, steps grow quickly where nothing matches, and it
//! gives up as soon as the payload would be too long. `lz4_flex` with safe code takes 1.1 to 1.9
//! times as long, except for regular database rows (0.9), and its payloads are 1 to 7 % shorter;
//! `examples/cost.rs` measures both.
//!
//! A delta is a block compressed with its base as the dictionary: the base's bytes precede the
//! block, so that a match may lie in them. Most of a rewritten database page stays where it was, so
//! the same position in the base is tried first, then the distance of the last match.

use lz4_flex::block::{decompress_into, decompress_into_with_dict};
use thiserror::Error;

use crate::{BLOCK_BYTES, crc32c};

/// Bytes of the longest payload: compression must save at least an eighth to be worth the time
/// of every later read.
pub const COMPRESSED_MAX: usize = BLOCK_BYTES - BLOCK_BYTES / 8;

/// Bits of a table index.
const TABLE_BITS: u32 = 11;
/// Minimum length of a match that the search finds, in bytes.
const MATCH_FOUND: u32 = 5;
/// Minimum length of a match in the format, in bytes.
const MATCH_MIN: usize = 4;
/// The search step grows by one after every `1 << STEP_SHIFT` tries without a match.
const STEP_SHIFT: u32 = 4;
/// The format ends a block with at least this many literals.
const LAST_LITERALS: usize = 5;
/// The format's last match starts at least this many bytes before the end.
const MATCH_BEFORE_END: usize = 12;
/// Lengths from here on continue in bytes after the token.
const LONG: usize = 15;
/// Literals are copied in chunks of this length where there is room.
const CHUNK: usize = 32;

/// Maximum length of a delta in bytes. A block with a longer one is better stored by itself, as the
/// base of later versions.
pub const DELTA_MAX: usize = 1024;
/// Bytes of the CRC at the start of a delta: that of the decoded block, to detect a wrong base.
const DELTA_CRC: usize = 4;
/// Length of a base followed by a block.
const WINDOW: usize = 2 * BLOCK_BYTES;
/// Distance between the positions of the base that the table indexes; matches at equal offsets need
/// no index.
const BASE_STEP: usize = 8;

type Block = [u8; BLOCK_BYTES];

/// Compresses blocks.
pub struct Compressor {
    /// By hash, the last position of bytes with that hash.
    table: Box<[u16; 1 << TABLE_BITS]>,
    window: Box<[u8; WINDOW]>,
}

impl Default for Compressor {
    fn default() -> Self {
        Self::new()
    }
}

impl Compressor {
    /// A compressor with its own 4 KiB table and a buffer for two blocks.
    #[must_use]
    pub fn new() -> Self {
        Self { table: Box::new([0; 1 << TABLE_BITS]), window: Box::new([0; WINDOW]) }
    }

    /// Compresses a block into the front of `out` and returns the payload's length, or `None` if
    /// that would exceed [`COMPRESSED_MAX`]. The rest of `out` is unspecified.
    ///
    /// # Panics
    /// If `block` is not one block, or `out` is shorter than a block.
    pub fn compress(&mut self, block: &[u8], out: &mut [u8]) -> Option<usize> {
        let block: &Block = block.try_into().expect("only whole blocks are compressed");
        let out = out.first_chunk_mut::<BLOCK_BYTES>().expect("a payload has room for a block");
        self.table.fill(0);
        let mut payload =
            Payload { bytes: block, out, len: 0, max: COMPRESSED_MAX, literals_from: 0 };
        let mut at = 1;
        while let Some((start, candidate)) = self.find(block, at) {
            let (start, candidate) = extend_back(block, start, candidate, payload.literals_from);
            let end = match_end(block, start, candidate);
            payload.put_match(start, end, candidate)?;
            if end > BLOCK_BYTES - MATCH_BEFORE_END {
                break;
            }
            self.table[hash(word(block, end - 2))] = (end - 2) as u16;
            at = end;
        }
        payload.finish()
    }

    /// Compresses a block against an older version of it into the front of `out` and returns the
    /// delta's length, or `None` if that would exceed [`DELTA_MAX`]. The rest of `out` is
    /// unspecified.
    ///
    /// # Panics
    /// If `base` or `block` is not one block, or `out` is shorter than a block.
    pub fn compress_delta(&mut self, base: &[u8], block: &[u8], out: &mut [u8]) -> Option<usize> {
        let out = out.first_chunk_mut::<BLOCK_BYTES>().expect("a payload has room for a block");
        self.window[..BLOCK_BYTES].copy_from_slice(base);
        self.window[BLOCK_BYTES..].copy_from_slice(block);
        let window = &*self.window;
        self.table.fill(0);
        for at in (0..BLOCK_BYTES).step_by(BASE_STEP) {
            self.table[hash(word(window, at))] = at as u16;
        }
        out[..DELTA_CRC].copy_from_slice(&crc32c(block).to_le_bytes());
        let (len, literals_from) = (DELTA_CRC, BLOCK_BYTES);
        let mut payload = Payload { bytes: window, out, len, max: DELTA_MAX, literals_from };
        let (mut at, mut distance) = (BLOCK_BYTES, BLOCK_BYTES);
        while let Some((start, candidate)) = find_near(window, &mut self.table, at, distance) {
            let (start, candidate) = extend_back(window, start, candidate, payload.literals_from);
            let end = match_end(window, start, candidate);
            payload.put_match(start, end, candidate)?;
            if end > WINDOW - MATCH_BEFORE_END {
                break;
            }
            (at, distance) = (end, start - candidate);
        }
        payload.finish()
    }

    /// The next match from `at` on: its start, and the earlier position of the same bytes.
    #[inline]
    fn find(&mut self, block: &Block, mut at: usize) -> Option<(usize, usize)> {
        let mut tries = 1 << STEP_SHIFT;
        while at <= BLOCK_BYTES - MATCH_BEFORE_END {
            let bytes = word(block, at);
            let seen = &mut self.table[hash(bytes)];
            let candidate = usize::from(*seen);
            *seen = at as u16;
            let differs = (word(block, candidate) ^ bytes) << (64 - 8 * MATCH_FOUND);
            if differs == 0 && candidate < at {
                return Some((at, candidate));
            }
            at += tries >> STEP_SHIFT;
            tries += 1;
        }
        None
    }
}

/// The next match from `at` on, with the block in the second half of `window`: tried at the same
/// position of the base, at the distance of the last match, then by hash.
#[inline]
fn find_near(
    window: &[u8; WINDOW],
    table: &mut [u16; 1 << TABLE_BITS],
    mut at: usize,
    distance: usize,
) -> Option<(usize, usize)> {
    let mut tries = 1 << STEP_SHIFT;
    while at <= WINDOW - MATCH_BEFORE_END {
        let bytes = word(window, at);
        let seen = &mut table[hash(bytes)];
        let candidates = [at - BLOCK_BYTES, at - distance, usize::from(*seen)];
        *seen = at as u16;
        for candidate in candidates {
            let differs = (word(window, candidate) ^ bytes) << (64 - 8 * MATCH_FOUND);
            if differs == 0 && candidate < at {
                return Some((at, candidate));
            }
        }
        at += tries >> STEP_SHIFT;
        tries += 1;
    }
    None
}

/// The eight bytes at `at`.
#[inline]
fn word<const N: usize>(block: &[u8; N], at: usize) -> u64 {
    let bytes = block[at..].first_chunk().expect("a match is sought and found before the end");
    u64::from_le_bytes(*bytes)
}

/// The sixteen bytes at `at`.
#[inline]
fn wide<const N: usize>(block: &[u8; N], at: usize) -> u128 {
    let bytes = block[at..].first_chunk().expect("the caller left room before the end");
    u128::from_le_bytes(*bytes)
}

/// Table index of the first [`MATCH_FOUND`] bytes of a word.
#[inline]
fn hash(word: u64) -> usize {
    // 2^64 divided by the golden ratio, odd: Knuth's multiplicative hashing.
    let product = (word << (64 - 8 * MATCH_FOUND)).wrapping_mul(0x9e37_79b1_85eb_ca87);
    (product >> (64 - TABLE_BITS)) as usize
}

/// Extends a match backward over up to eight equal bytes, but not before `from`.
#[inline]
fn extend_back<const N: usize>(
    block: &[u8; N],
    start: usize,
    candidate: usize,
    from: usize,
) -> (usize, usize) {
    if candidate < 8 {
        return (start, candidate);
    }
    let differs = word(block, start - 8) ^ word(block, candidate - 8);
    let equal = (differs.leading_zeros() / 8) as usize;
    let back = equal.min(start - from);
    (start - back, candidate - back)
}

/// First byte after a match.
#[inline]
fn match_end<const N: usize>(block: &[u8; N], start: usize, candidate: usize) -> usize {
    let (mut end, distance) = (start + MATCH_MIN, start - candidate);
    let limit = N - LAST_LITERALS;
    while end + 16 <= limit {
        let differs = wide(block, end) ^ wide(block, end - distance);
        if differs != 0 {
            return end + (differs.trailing_zeros() / 8) as usize;
        }
        end += 16;
    }
    while end < limit && block[end] == block[end - distance] {
        end += 1;
    }
    end
}

/// A payload under construction.
struct Payload<'a, const N: usize> {
    /// The block, preceded by its base if there is one.
    bytes: &'a [u8; N],
    out: &'a mut Block,
    len: usize,
    /// Maximum length of the payload.
    max: usize,
    /// Position in `bytes` up to which everything is in the payload already.
    literals_from: usize,
}

impl<const N: usize> Payload<'_, N> {
    /// Appends the literals up to `start` and the match from there to `end`; `None` if they do not
    /// fit.
    #[inline]
    fn put_match(&mut self, start: usize, end: usize, candidate: usize) -> Option<()> {
        let (literals, matched) = (start - self.literals_from, end - start - MATCH_MIN);
        // A token, a distance, and at most one byte of length for each 128, rounded up.
        let most = 1 + literals + 2 + (literals >> 7) + 1 + (matched >> 7) + 1;
        if self.len + most > self.max {
            return None;
        }
        let token = self.len;
        self.len += 1;
        self.put_literals(literals);
        let distance = (start - candidate) as u16;
        self.out[self.len..self.len + 2].copy_from_slice(&distance.to_le_bytes());
        self.len += 2;
        self.put_length(matched);
        self.out[token] = (literals.min(LONG) << 4 | matched.min(LONG)) as u8;
        self.literals_from = end;
        Some(())
    }

    /// Appends the remaining literals and returns the length; `None` if they do not fit.
    fn finish(mut self) -> Option<usize> {
        let literals = N - self.literals_from;
        if self.len + 1 + literals + (literals >> 7) + 1 > self.max {
            return None;
        }
        self.out[self.len] = (literals.min(LONG) << 4) as u8;
        self.len += 1;
        self.put_literals(literals);
        Some(self.len)
    }

    /// Appends the rest of the literals' length, and the literals.
    #[inline]
    fn put_literals(&mut self, count: usize) {
        self.put_length(count);
        let from = &self.bytes[self.literals_from..];
        let to = &mut self.out[self.len..];
        match (from.first_chunk::<CHUNK>(), to.first_chunk_mut::<CHUNK>()) {
            // Most runs are short, and a copy of fixed length is faster than one of the exact
            // length.
            (Some(from), Some(to)) if count <= CHUNK => *to = *from,
            _ => to[..count].copy_from_slice(&from[..count]),
        }
        self.len += count;
    }

    /// Appends the part of a length that does not fit the token. Branches only if the length is
    /// very long: whether it fits is a toss-up, and a misprediction costs more than a wasted byte.
    #[inline]
    fn put_length(&mut self, length: usize) {
        let mut rest = length.wrapping_sub(LONG);
        if length >= LONG + 255 {
            while rest >= 255 {
                self.out[self.len] = 255;
                self.len += 1;
                rest -= 255;
            }
        }
        self.out[self.len] = rest as u8;
        self.len += usize::from(length >= LONG);
    }
}

/// Why a payload cannot be decoded.
#[derive(Debug, Error)]
pub enum DecodeError {
    /// The bytes are not LZ4, or decode to more than a block.
    #[error("the payload is not an LZ4 block of {BLOCK_BYTES} bytes: {0}")]
    Malformed(#[from] lz4_flex::block::DecompressError),
    /// The payload is well-formed but decodes to less than a block.
    #[error("the payload decodes to {0} bytes instead of {BLOCK_BYTES}")]
    Short(usize),
    /// The decoded bytes do not match the delta's CRC: the base is not the original one.
    #[error("the delta does not fit its base")]
    OtherBase,
}

/// Decodes a payload into a block. On an error the block's content is unspecified.
///
/// # Errors
/// If the payload does not decode to exactly one block.
///
/// # Panics
/// If `block` is not one block.
pub fn decompress(payload: &[u8], block: &mut [u8]) -> Result<(), DecodeError> {
    assert!(block.len() == BLOCK_BYTES, "a block of {} bytes", block.len());
    match decompress_into(payload, block)? {
        BLOCK_BYTES => Ok(()),
        len => Err(DecodeError::Short(len)),
    }
}

/// Decodes a delta into a block, given its base. On an error the block's content is unspecified.
///
/// # Errors
/// If the delta does not decode to the original block.
///
/// # Panics
/// If `base` or `block` is not one block.
pub fn apply_delta(base: &[u8], delta: &[u8], block: &mut [u8]) -> Result<(), DecodeError> {
    assert!(block.len() == BLOCK_BYTES, "a block of {} bytes", block.len());
    assert!(base.len() == BLOCK_BYTES, "a base of {} bytes", base.len());
    let (crc, delta) = delta.split_first_chunk().ok_or(DecodeError::Short(0))?;
    match decompress_into_with_dict(delta, block, base)? {
        BLOCK_BYTES if crc32c(block) == u32::from_le_bytes(*crc) => Ok(()),
        BLOCK_BYTES => Err(DecodeError::OtherBase),
        len => Err(DecodeError::Short(len)),
    }
}

const _: () = assert!(WINDOW <= u16::MAX as usize && DELTA_MAX <= COMPRESSED_MAX);
const _: () = assert!(BLOCK_BYTES <= u16::MAX as usize, "positions fit the table");
const _: () = assert!(COMPRESSED_MAX + CHUNK <= BLOCK_BYTES, "a payload's end has room to copy");
const _: () = assert!(MATCH_FOUND as usize >= MATCH_MIN && MATCH_FOUND <= 8);
