//! The possible contents of a sector, and the derivation of a write's bytes from its number.
//!
//! Every written sector contains the volume, its own position, the number of the write, and a
//! filler derived from these. So any 512 bytes found on a disk tell which write they came from, or
//! that they came from none.

use std::fmt;
use std::rc::Rc;

use forebay_block::{SECTOR_SIZE, VolumeId};

/// One write in this many has content similar to others.
pub const ALIKE_EVERY: u64 = 8;
const ALIKE: u64 = ALIKE_EVERY - 1;
const MAGIC: u32 = 0x6d61_7277;
const STAMP_BYTES: usize = 24;
/// Masks for eight letters at a time: five bits each, and the bits that turn those into a letter.
const LETTERS: u64 = 0x1f1f_1f1f_1f1f_1f1f;
const LETTER_A: u64 = 0x6060_6060_6060_6060;

/// The content of one sector.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// Zeros: written, discarded, or never written.
    Zero,
    /// The content of the write with this number; number 0 is the primary's initial content.
    Stamp(u64),
    /// The content of another sector, from an earlier write.
    Copy {
        /// Number of that write.
        of: u64,
        /// Index of the other sector.
        sector: u64,
    },
    /// The content of a sector that was partly written: older and newer bytes together.
    Bytes(Rc<[u8; SECTOR_SIZE]>),
    /// The content after a discard: zeros, or any earlier content of the sector, since the newer
    /// version may have vanished with the cache's copy.
    Discarded {
        /// Writes with a lower number may have preceded the discard.
        before: u64,
        /// Whether the sector was once partly written or a copy, so that its older contents are
        /// unknown.
        patched: bool,
    },
}

impl Content {
    /// Writes the content of `sector` of `volume` to `out`.
    ///
    /// # Panics
    /// If `out` is not one sector long.
    pub fn fill(&self, volume: VolumeId, sector: u64, out: &mut [u8]) {
        assert_eq!(out.len(), SECTOR_SIZE, "a sector has 512 bytes");
        match self {
            Self::Zero | Self::Discarded { .. } => out.fill(0),
            Self::Stamp(id) => stamp(volume, sector, *id, out),
            Self::Copy { of, sector } => stamp(volume, *sector, *of, out),
            Self::Bytes(bytes) => out.copy_from_slice(&bytes[..]),
        }
    }

    /// Whether `bytes`, which start at byte `from` of the sector, match this content.
    #[must_use]
    pub fn matches(&self, volume: VolumeId, sector: u64, from: usize, bytes: &[u8]) -> bool {
        match self {
            Self::Zero => bytes.iter().all(|&b| b == 0),
            Self::Stamp(_) | Self::Copy { .. } => {
                let mut whole = [0; SECTOR_SIZE];
                self.fill(volume, sector, &mut whole);
                whole[from..from + bytes.len()] == *bytes
            }
            Self::Bytes(whole) => whole[from..from + bytes.len()] == *bytes,
            Self::Discarded { before, patched } => {
                let part = bytes.len() < SECTOR_SIZE;
                *patched
                    || Self::Zero.matches(volume, sector, from, bytes)
                    || (!part && word(bytes, 16) < *before && is_of(volume, sector, bytes))
                    || (part
                        && (0..*before)
                            .any(|id| Self::Stamp(id).matches(volume, sector, from, bytes)))
            }
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("zeros"),
            Self::Stamp(id) => write!(f, "write {id}"),
            Self::Copy { of, sector } => write!(f, "what write {of} put into sector {sector}"),
            Self::Bytes(_) => f.write_str("a part-written sector"),
            Self::Discarded { before, .. } => write!(f, "zeros or any write before {before}"),
        }
    }
}

/// The bytes of write `id` in one sector. There are four kinds of filler, by number: random,
/// text-like, nearly empty, and letters without repetition; half of the last kind have the same
/// filler in every block. So some blocks compress, some only by the frequency of their bytes, some
/// not at all, and some are similar.
fn stamp(volume: VolumeId, sector: u64, id: u64, out: &mut [u8]) {
    out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4..8].copy_from_slice(&u32::from(volume.0).to_le_bytes());
    out[8..16].copy_from_slice(&sector.to_le_bytes());
    out[16..STAMP_BYTES].copy_from_slice(&id.to_le_bytes());
    let rest = &mut out[STAMP_BYTES..];
    match id % 4 {
        kind @ (0 | 3) => {
            // Half of the writes of letters have the same filler in every block.
            let seed = match id % ALIKE_EVERY {
                ALIKE => sector % 8,
                _ => (id << 24) ^ (sector << 8) ^ u64::from(volume.0),
            };
            let mut word = seed ^ 0x9e37_79b9_7f4a_7c15;
            for chunk in rest.chunks_exact_mut(8) {
                word ^= word << 13;
                word ^= word >> 7;
                word ^= word << 17;
                let bytes = if kind == 0 { word } else { word & LETTERS | LETTER_A };
                chunk.copy_from_slice(&bytes.to_le_bytes());
            }
        }
        1 => {
            let line = (id.wrapping_mul(0x0101) ^ 0x2073_6177_2065_7274).to_le_bytes();
            rest.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&line));
        }
        _ => rest.fill(0),
    }
}

/// Whether a sector's bytes are zeros, or were made for this position by any write.
pub(crate) fn is_of(volume: VolumeId, sector: u64, bytes: &[u8]) -> bool {
    let id = word(bytes, 16);
    Content::Zero.matches(volume, sector, 0, bytes)
        || Content::Stamp(id).matches(volume, sector, 0, bytes)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte))
}

/// Describes the origin of a sector's bytes.
#[must_use]
pub fn describe(bytes: &[u8]) -> String {
    if bytes.iter().all(|&b| b == 0) {
        return "zeros".into();
    }
    if bytes.len() < SECTOR_SIZE {
        return format!("{} bytes, a part of a sector", bytes.len());
    }
    let (head, sector, id) = (word(bytes, 0), word(bytes, 8), word(bytes, 16));
    if head as u32 != MAGIC {
        return format!("bytes that no write made ({head:016x}...)");
    }
    let volume = VolumeId((head >> 32) as u8);
    let whole = Content::Stamp(id).matches(volume, sector, 0, bytes);
    let state = if whole { "" } else { ", damaged" };
    format!("write {id} of sector {sector} of {volume}{state}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_names_volume_sector_and_write() {
        for id in 0..9 {
            let mut bytes = [0; SECTOR_SIZE];
            Content::Stamp(id).fill(VolumeId(1), 7, &mut bytes);
            assert!(Content::Stamp(id).matches(VolumeId(1), 7, 0, &bytes));
            assert!(Content::Stamp(id).matches(VolumeId(1), 7, 100, &bytes[100..200]));
            for (volume, sector, other) in [(0, 7, id), (1, 8, id), (1, 7, id + 3)] {
                assert!(!Content::Stamp(other).matches(VolumeId(volume), sector, 0, &bytes));
            }
            assert_eq!(describe(&bytes), format!("write {id} of sector 7 of volume 1"));
            bytes[511] ^= 1;
            assert!(!Content::Stamp(id).matches(VolumeId(1), 7, 0, &bytes));
            assert!(describe(&bytes).ends_with("damaged"));
        }
    }
}
