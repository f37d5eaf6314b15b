//! Least recently used: the block that was referenced longest ago leaves (Mattson, Gecsei, Slutz
//! and Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970).

use super::Cache;
use super::list::{Links, List};

/// A cache that evicts the least recently used block.
pub struct Lru {
    links: Links,
    list: List,
    cached: Vec<bool>,
    places: u32,
}

impl Lru {
    /// An empty cache with `places` places, for blocks with numbers below `blocks`.
    pub fn new(blocks: u32, places: u32) -> Self {
        let cached = vec![false; blocks as usize];
        Self { links: Links::new(blocks), list: List::EMPTY, cached, places }
    }
}

impl Cache for Lru {
    fn reference(&mut self, block: u32) -> bool {
        let hit = std::mem::replace(&mut self.cached[block as usize], true);
        if hit {
            self.links.remove(&mut self.list, block);
        } else if self.list.len() == self.places
            && let Some(oldest) = self.links.pop(&mut self.list)
        {
            self.cached[oldest as usize] = false;
        }
        self.links.push(&mut self.list, block);
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_least_recent_leaves() {
        let mut lru = Lru::new(4, 2);
        let hits = [0, 1, 0, 2, 0, 1].map(|block| lru.reference(block));
        assert_eq!(hits, [false, false, true, false, true, false]);
    }

    proptest! {
        /// A reference hits if fewer than `places` other blocks were referenced since the last one.
        #[test]
        fn a_hit_is_a_short_distance(
            blocks in prop::collection::vec(0u32..12, 0..200),
            places in 1u32..14,
        ) {
            let mut lru = Lru::new(12, places);
            for at in 0..blocks.len() {
                let before = blocks[..at].iter().rposition(|&block| block == blocks[at]);
                let hit = before.is_some_and(|before| {
                    let mut between = blocks[before + 1..at].to_vec();
                    between.sort_unstable();
                    between.dedup();
                    between.len() < places as usize
                });
                prop_assert_eq!(lru.reference(blocks[at]), hit, "at {}", at);
            }
        }
    }
}
