//! A walk over all blocks in RAM, a few at a time, while others come and go.

use crate::key::Key;
use crate::ram::Ram;

/// Where a walk continues.
#[derive(Debug, Default)]
pub struct Walk {
    /// Place of the next raw block.
    place: usize,
    /// Number of the next compressed block.
    number: u64,
}

impl Ram {
    /// The next blocks of a walk, bases among them, from `most` places; `None` at its end. Raw
    /// blocks come first, since one that loses its place may be compressed. A block is missed only
    /// if it came after the walk began, or was read after that.
    pub fn walk(&self, walk: &mut Walk, most: usize) -> Option<Vec<Key>> {
        let end = (walk.place + most).min(self.frames());
        if walk.place < end {
            let places = walk.place..end;
            walk.place = end;
            return Some(places.filter_map(|at| self.recent.at(at as u32)).map(Key).collect());
        }
        let (keys, next) = self.packed.keys_from(walk.number, most)?;
        walk.number = next;
        Some(keys)
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::{BLOCK_SIZE, Instant};
    use forebay_policy::Standing;

    use super::*;

    #[test]
    fn all_blocks_are_visited() {
        let mut ram = Ram::new(8 * BLOCK_SIZE as u64, true);
        for n in 0..200 {
            ram.begin_turn(Instant(n * 1_000_000_000));
            ram.put(Key(n), &[n as u8; BLOCK_SIZE], Standing::Alone);
        }
        ram.remove(Key(199));
        let there: Vec<u64> = (0..200).filter(|&n| ram.contains(Key(n))).collect();
        assert!(there.len() > 8, "some are compressed");
        let (mut walk, mut seen) = (Walk::default(), Vec::new());
        while let Some(keys) = ram.walk(&mut walk, 3) {
            seen.extend(keys.into_iter().map(|key| key.0));
        }
        seen.sort_unstable();
        assert_eq!(seen, there);
    }
}
