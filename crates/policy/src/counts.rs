//! Recent request counts of blocks, by block and by aligned group of four.
//!
//! A database asks for the four blocks of a page together, so counters of groups have four times
//! fewer keys and as many times fewer that share a counter. A block cannot have been asked for more
//! often than its group, so the lower of the two counts is the better one.

use crate::sketch::Sketch;

/// Blocks of a group.
pub const GROUP: u64 = 4;
/// Counters of half a byte for each cached block: for blocks, and for groups.
const BLOCK_COUNTERS: u64 = 8;
const GROUP_COUNTERS: u64 = 2;
/// Requests per cached block in which each counter is halved once.
const PERIOD: u64 = 15;
/// Fewest blocks for which requests are counted, so that counts in a tiny cache last a while.
const BLOCKS_MIN: u64 = 256;

/// Request counts.
#[derive(Clone, Debug)]
pub struct Counts {
    blocks: Sketch,
    groups: Sketch,
    /// The block counted last.
    last: Option<u64>,
}

impl Counts {
    /// Counts for a cache of `blocks` blocks.
    pub fn new(blocks: u64) -> Self {
        let blocks = blocks.max(BLOCKS_MIN);
        Self {
            blocks: Sketch::new(blocks, BLOCK_COUNTERS, PERIOD),
            groups: Sketch::new(blocks, GROUP_COUNTERS, PERIOD),
            last: None,
        }
    }

    /// Counts a request for a block. Blocks of a group that are asked for one after the other, in
    /// ascending order, are one request for the group.
    pub fn count(&mut self, key: u64) {
        self.blocks.add(key);
        let joined = self.last.is_some_and(|last| last + 1 == key && !key.is_multiple_of(GROUP));
        if !joined {
            // Both are halved at the same time, or they could not be compared.
            self.groups.add(key / GROUP);
            self.groups.pass();
            self.blocks.pass();
        }
        self.last = Some(key);
    }

    /// Prefetches the counters of a block.
    pub fn warm(&self, key: u64) {
        self.blocks.warm(key);
        self.groups.warm(key / GROUP);
    }

    /// Recent requests for a block.
    pub fn of(&self, key: u64) -> u8 {
        self.blocks.estimate(key).min(self.groups.estimate(key / GROUP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_one_request_for_its_group() {
        let mut counts = Counts::new(1000);
        for _ in 0..3 {
            (8..12).for_each(|key| counts.count(key));
        }
        counts.count(10);
        assert_eq!([8, 9, 10, 11, 12].map(|key| counts.of(key)), [3, 3, 4, 3, 0]);
        assert_eq!(counts.groups.estimate(2), 4);
    }

    #[test]
    fn both_counts_fade_together() {
        let mut counts = Counts::new(BLOCKS_MIN);
        (0..12).for_each(|_| counts.count(8));
        assert_eq!(counts.of(8), 12);
        (12..BLOCKS_MIN * PERIOD - 1).for_each(|_| counts.count(400_000));
        assert_eq!(counts.of(8), 12);
        counts.count(400_000);
        assert_eq!((counts.of(8), counts.groups.estimate(2)), (6, 6));
    }
}
