//! Addresses and lengths. Bytes on a device are a [`ByteRange`]; blocks of 4 KiB, the unit of
//! caching, are a [`BlockRange`]. Arithmetic is checked: an overflow is a programmer error.

use std::fmt;

/// Bytes in a block, the unit of caching.
pub const BLOCK_SIZE: usize = 4096;
/// Bytes in a sector, the smallest unit a device reads or writes.
pub const SECTOR_SIZE: usize = 512;
/// Bytes in a stripe: consecutive stripes of a volume belong to different shards.
pub const STRIPE_SIZE: u64 = 1 << 20;
/// Blocks in a stripe.
pub const STRIPE_BLOCKS: u64 = STRIPE_SIZE / BLOCK_SIZE as u64;
/// Bytes in the longest request that a frontend may submit.
pub const REQUEST_MAX: u64 = 32 << 20;

const _: () = assert!(STRIPE_SIZE.is_multiple_of(BLOCK_SIZE as u64));
const _: () = assert!(BLOCK_SIZE.is_multiple_of(SECTOR_SIZE));

/// One of the volumes that share a cache: its index in the superblock's volume table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct VolumeId(pub u8);

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volume {}", self.0)
    }
}

/// `len` bytes from `offset`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl ByteRange {
    /// The range of `len` bytes from `offset`.
    ///
    /// # Panics
    /// If the end does not fit 64 bits: check input from outside with [`ByteRange::checked`].
    #[must_use]
    pub fn new(offset: u64, len: u64) -> Self {
        Self::checked(offset, len).expect("the end of a range fits 64 bits")
    }

    /// The range of `len` bytes from `offset`, or `None` if its end does not fit 64 bits.
    #[must_use]
    pub fn checked(offset: u64, len: u64) -> Option<Self> {
        offset.checked_add(len).map(|_| Self { offset, len })
    }

    /// First byte after the range.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }

    /// Whether the range is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether both ends are multiples of `unit` bytes.
    #[must_use]
    pub fn is_aligned(&self, unit: u64) -> bool {
        self.offset.is_multiple_of(unit) && self.len.is_multiple_of(unit)
    }

    /// Whether the two ranges have a byte in common.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }

    /// The bytes common to both; an empty range (at the later start) if they do not overlap.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let offset = self.offset.max(other.offset);
        let end = self.end().min(other.end());
        Self { offset, len: end.saturating_sub(offset) }
    }

    /// Number of the stripe of its first byte.
    #[must_use]
    pub fn stripe(&self) -> u64 {
        self.offset / STRIPE_SIZE
    }

    /// What of it is in the stripe of its first byte, and what is behind that.
    #[must_use]
    pub fn split_at_stripe(&self) -> (Self, Self) {
        let stripe_end = (self.stripe() + 1).saturating_mul(STRIPE_SIZE);
        let middle = self.end().min(stripe_end);
        let first = Self { offset: self.offset, len: middle - self.offset };
        (first, Self { offset: middle, len: self.end() - middle })
    }

    /// Whether no byte is in another stripe than the first.
    #[must_use]
    pub fn is_in_one_stripe(&self) -> bool {
        self.split_at_stripe().1.is_empty()
    }

    /// Its parts, each in one stripe, in order; none if it is empty.
    pub fn stripes(&self) -> impl Iterator<Item = Self> + Clone + use<> {
        let mut rest = *self;
        std::iter::from_fn(move || {
            let first;
            (first, rest) = rest.split_at_stripe();
            (!first.is_empty()).then_some(first)
        })
    }

    /// The smallest range of whole blocks that covers these bytes.
    #[must_use]
    pub fn blocks(&self) -> BlockRange {
        let block = BLOCK_SIZE as u64;
        if self.is_empty() {
            return BlockRange { first: self.offset / block, count: 0 };
        }
        let first = self.offset / block;
        BlockRange { first, count: self.end().div_ceil(block) - first }
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {}", self.len, self.offset)
    }
}

/// `count` blocks from block `first` of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct BlockRange {
    /// First block.
    pub first: u64,
    /// Number of blocks.
    pub count: u64,
}

impl BlockRange {
    /// First block after the range.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first + self.count
    }

    /// Whether the range includes `block`.
    #[must_use]
    pub fn contains(&self, block: u64) -> bool {
        (self.first..self.end()).contains(&block)
    }

    /// The bytes of these blocks.
    #[must_use]
    pub fn bytes(&self) -> ByteRange {
        let block = BLOCK_SIZE as u64;
        ByteRange { offset: self.first * block, len: self.count * block }
    }

    /// Every block number of the range, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + Clone + use<> {
        self.first..self.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_every_byte_and_no_more() {
        for offset in [0u64, 1, 511, 4095, 4096, 8191] {
            for len in [0u64, 1, 4095, 4096, 4097, 8192] {
                let range = ByteRange::new(offset, len);
                let blocks = range.blocks();
                if len == 0 {
                    assert_eq!(blocks.count, 0);
                    continue;
                }
                let bytes = blocks.bytes();
                assert_eq!(bytes.intersection(&range), range);
                assert!(range.offset - bytes.offset < 4096 && bytes.end() - range.end() < 4096);
            }
        }
    }

    #[test]
    fn stripes_tile_the_range_and_are_as_few_as_possible() {
        let edges = [0, 1, 511, 512, 4096, STRIPE_SIZE - 1, STRIPE_SIZE, STRIPE_SIZE + 1];
        let lengths = (0..3).flat_map(|whole| edges.map(|tail| whole * STRIPE_SIZE + tail));
        for len in lengths {
            for offset in edges {
                let range = ByteRange::new(offset, len);
                let mut at = offset;
                for part in range.stripes() {
                    assert_eq!(part.offset, at);
                    assert!(!part.is_empty() && part.is_in_one_stripe());
                    assert_eq!(part.stripe(), (part.end() - 1) / STRIPE_SIZE, "{part}");
                    at = part.end();
                }
                assert_eq!(at, range.end());
                let last = range.end().saturating_sub(1) / STRIPE_SIZE;
                let least = if len == 0 { 0 } else { last - range.stripe() + 1 };
                assert_eq!(range.stripes().count() as u64, least);
                assert_eq!(range.is_in_one_stripe(), least <= 1);
            }
        }
        assert_eq!(ByteRange::new(u64::MAX - 1, 1).stripes().count(), 1);
    }

    #[test]
    fn intersection_agrees_with_overlap() {
        for a in 0..6u64 {
            for b in 0..6u64 {
                let (x, y) = (ByteRange::new(a, 3), ByteRange::new(b, 2));
                assert_eq!(x.overlaps(&y), !x.intersection(&y).is_empty());
            }
        }
        assert_eq!(ByteRange::checked(u64::MAX, 1), None);
    }
}
