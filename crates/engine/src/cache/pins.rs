//! Blocks that an administrator wants to stay: they enter the cache device whenever they are read,
//! and do not make way for others.
//!
//! Not a promise: where a log without store has no room for what must stay, and where nothing but
//! pinned blocks could make room, they leave too.

use std::ops::Range;

use forebay_block::{BlockRange, VolumeId};

use crate::cache::Cache;
use crate::contents::block_of;
use crate::key::Key;

/// The pinned blocks of all volumes.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// Ranges of keys, in order, which neither overlap nor touch.
    ranges: Vec<Range<u64>>,
}

impl Pins {
    /// Replaces the pinned blocks of a volume. The ranges may overlap.
    fn set(&mut self, volume: VolumeId, blocks: &[BlockRange]) {
        let of_volume = Key::range(volume);
        self.ranges.retain(|range| !(of_volume.start.0..of_volume.end.0).contains(&range.start));
        let keys = |blocks: &BlockRange| {
            Key::new(volume, blocks.first).0..Key::new(volume, blocks.first).0 + blocks.count
        };
        self.ranges.extend(blocks.iter().filter(|blocks| blocks.count > 0).map(keys));
        self.ranges.sort_unstable_by_key(|range| range.start);
        self.ranges.dedup_by(|next, range| {
            let touches = next.start <= range.end;
            if touches {
                range.end = range.end.max(next.end);
            }
            touches
        });
    }

    /// Whether nothing is pinned.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether any of these blocks is pinned.
    pub fn has_any(&self, keys: Range<u64>) -> bool {
        if self.is_empty() {
            return false;
        }
        let next = self.ranges.partition_point(|range| range.end <= keys.start);
        self.ranges.get(next).is_some_and(|range| range.start < keys.end)
    }

    /// Whether a block, or the block of a base, is pinned.
    pub fn has(&self, key: Key) -> bool {
        let key = block_of(key).0;
        self.has_any(key..key + 1)
    }
}

impl Cache {
    /// Replaces the pinned blocks of a volume; those of other shards do not matter.
    pub fn set_pins(&mut self, volume: VolumeId, blocks: &[BlockRange]) {
        if self.known_volume(volume).is_some() {
            self.pins.set(volume, blocks);
        }
    }

    /// Whether any of these blocks of a volume is pinned.
    pub(crate) fn has_pinned(&self, volume: VolumeId, blocks: BlockRange) -> bool {
        let first = Key::new(volume, blocks.first).0;
        self.pins.has_any(first..first + blocks.count)
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::testing::Numbers;

    use super::*;

    fn blocks(first: u64, count: u64) -> BlockRange {
        BlockRange { first, count }
    }

    #[test]
    fn each_volume_has_its_own() {
        let mut pins = Pins::default();
        pins.set(VolumeId(1), &[blocks(8, 4), blocks(10, 4), blocks(14, 1), blocks(20, 0)]);
        pins.set(VolumeId(0), &[blocks(0, 1)]);
        assert_eq!(pins.ranges.len(), 2, "those that overlap or touch are one");
        let has = |volume, block| pins.has(Key::new(VolumeId(volume), block));
        assert!(has(0, 0) && has(1, 8) && has(1, 14));
        assert!(!has(0, 8) && !has(1, 7) && !has(1, 15) && !has(1, 0) && !has(1, 20));
        pins.set(VolumeId(1), &[]);
        assert_eq!((pins.ranges.len(), pins.ranges.first()), (1, Some(&(0..1))));
    }

    #[test]
    fn they_are_the_blocks_of_the_ranges() {
        for seed in 0..500 {
            let mut numbers = Numbers::new(seed);
            let count = numbers.below(12);
            let range = |_| blocks(numbers.below(60), numbers.below(9));
            let ranges: Vec<_> = (0..count).map(range).collect();
            let mut pins = Pins::default();
            pins.set(VolumeId(0), &ranges);
            let pinned = |block| ranges.iter().any(|range| range.contains(block));
            for from in 0..70 {
                assert_eq!(pins.has(Key(from)), pinned(from), "{ranges:?} {from}");
                assert_eq!(pins.has_any(from..from + 3), (from..from + 3).any(pinned));
            }
        }
    }
}
