//! Parts of something that is counted in blocks and divided among shards.

use forebay_block::BLOCK_SIZE;

/// A part of a whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Part {
    /// In percent, 0 to 100.
    Percent(u8),
    /// In bytes of all shards together.
    Bytes(u64),
}

/// One shard's share of a whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Whole {
    /// The blocks of this shard.
    pub blocks: u64,
    /// The number of shards that have as many.
    pub shards: u16,
}

impl Whole {
    /// The number of this shard's blocks that a part is, rounded down: all of them at most.
    #[must_use]
    pub fn part(&self, part: Part) -> u64 {
        match part {
            Part::Percent(percent) => {
                (u128::from(self.blocks) * u128::from(percent.min(100)) / 100) as u64
            }
            Part::Bytes(bytes) => {
                let blocks = bytes / BLOCK_SIZE as u64 / u64::from(self.shards.max(1));
                blocks.min(self.blocks)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_percent_of_a_shard_or_bytes_of_all() {
        let whole = Whole { blocks: 1000, shards: 4 };
        assert_eq!(whole.part(Part::Percent(0)), 0);
        assert_eq!(whole.part(Part::Percent(33)), 330);
        assert_eq!(whole.part(Part::Percent(100)), 1000);
        assert_eq!(whole.part(Part::Bytes(0)), 0);
        assert_eq!(whole.part(Part::Bytes(4 << 20)), 256);
        assert_eq!(whole.part(Part::Bytes(u64::MAX)), 1000);
        let all = Whole { blocks: u64::MAX, shards: 1 };
        assert_eq!(all.part(Part::Percent(100)), u64::MAX);
    }
}
