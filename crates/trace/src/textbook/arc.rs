//! The adaptive replacement cache: a list of blocks referenced once, one of blocks referenced
//! again, and a ghost list of each, whose hits move the boundary between the first two (Megiddo and
//! Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003, figure 4).

use super::Cache;
use super::list::{Links, List};

/// The lists, in the order of `Arc::lists`; the paper's T1, T2, B1 and B2.
const ONCE: usize = 0;
const AGAIN: usize = 1;
const ONCE_GHOSTS: usize = 2;
const AGAIN_GHOSTS: usize = 3;
const NOWHERE: u8 = 4;

/// A cache of two lists and their ghosts.
pub struct Arc {
    links: Links,
    lists: [List; 4],
    /// The list that a block is in.
    list_of: Vec<u8>,
    places: u32,
    /// Places wanted for blocks referenced once; the paper's p.
    wanted: f64,
}

impl Arc {
    /// An empty cache with `places` places, for blocks with numbers below `blocks`.
    pub fn new(blocks: u32, places: u32) -> Self {
        let list_of = vec![NOWHERE; blocks as usize];
        Self { links: Links::new(blocks), lists: [List::EMPTY; 4], list_of, places, wanted: 0.0 }
    }

    fn len(&self, list: usize) -> u32 {
        self.lists[list].len()
    }

    /// Moves a block, which may be in a list, to the front of another.
    fn enter(&mut self, block: u32, list: usize) {
        self.leave(block);
        self.links.push(&mut self.lists[list], block);
        self.list_of[block as usize] = list as u8;
    }

    fn leave(&mut self, block: u32) {
        if let Some(list) = self.lists.get_mut(self.list_of[block as usize] as usize) {
            self.links.remove(list, block);
            self.list_of[block as usize] = NOWHERE;
        }
    }

    fn drop_oldest(&mut self, list: usize) {
        if let Some(block) = self.lists[list].oldest() {
            self.leave(block);
        }
    }

    /// The paper's REPLACE: the oldest block of one of the lists becomes a ghost.
    fn replace(&mut self, again_ghost: bool) {
        let once = f64::from(self.len(ONCE));
        let from_once = self.len(ONCE) > 0
            && (once > self.wanted || again_ghost && once == self.wanted.floor());
        let (list, ghosts) = match from_once || self.len(AGAIN) == 0 {
            true => (ONCE, ONCE_GHOSTS),
            false => (AGAIN, AGAIN_GHOSTS),
        };
        if let Some(block) = self.lists[list].oldest() {
            self.enter(block, ghosts);
        }
    }

    /// A miss of a block that is no ghost either.
    fn bring(&mut self, block: u32) {
        let once = self.len(ONCE) + self.len(ONCE_GHOSTS);
        let all = once + self.len(AGAIN) + self.len(AGAIN_GHOSTS);
        if once == self.places {
            if self.len(ONCE) < self.places {
                self.drop_oldest(ONCE_GHOSTS);
                self.replace(false);
            } else {
                self.drop_oldest(ONCE);
            }
        } else if all >= self.places {
            if all == 2 * self.places {
                self.drop_oldest(AGAIN_GHOSTS);
            }
            self.replace(false);
        }
        self.enter(block, ONCE);
    }
}

impl Cache for Arc {
    fn reference(&mut self, block: u32) -> bool {
        let ghosts = [ONCE_GHOSTS, AGAIN_GHOSTS].map(|list| f64::from(self.len(list)));
        let list = usize::from(self.list_of[block as usize]);
        match list {
            ONCE | AGAIN => self.enter(block, AGAIN),
            ONCE_GHOSTS => {
                let step = (ghosts[1] / ghosts[0]).max(1.0);
                self.wanted = (self.wanted + step).min(f64::from(self.places));
                self.replace(false);
                self.enter(block, AGAIN);
            }
            AGAIN_GHOSTS => {
                let step = (ghosts[0] / ghosts[1]).max(1.0);
                self.wanted = (self.wanted - step).max(0.0);
                self.replace(true);
                self.enter(block, AGAIN);
            }
            _ => self.bring(block),
        }
        list == ONCE || list == AGAIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lens(arc: &Arc) -> [u32; 4] {
        [ONCE, AGAIN, ONCE_GHOSTS, AGAIN_GHOSTS].map(|list| arc.len(list))
    }

    #[test]
    fn ghosts_move_the_boundary() {
        let mut arc = Arc::new(20, 4);
        assert_eq!([0, 0, 1, 1, 2, 3].map(|b| arc.reference(b)).map(u8::from), [0, 1, 0, 1, 0, 0]);
        assert_eq!(lens(&arc), [2, 2, 0, 0]);
        // Full: block 2, the oldest referenced once, becomes a ghost.
        assert!(!arc.reference(4));
        assert_eq!(lens(&arc), [2, 2, 1, 0]);
        // It returns: one place more is wanted for such blocks, and block 3 becomes the ghost.
        assert!(!arc.reference(2));
        assert_eq!((lens(&arc), arc.wanted), ([1, 3, 1, 0], 1.0));
        // Now block 0 leaves, the oldest of those referenced again; its return moves it back.
        assert!(!arc.reference(5));
        assert_eq!((lens(&arc), arc.list_of[0]), ([2, 2, 1, 1], AGAIN_GHOSTS as u8));
        assert!(!arc.reference(0));
        assert_eq!((lens(&arc), arc.wanted), ([1, 3, 2, 0], 0.0));
    }

    #[test]
    fn a_scan_passes_by() {
        let mut arc = Arc::new(1000, 10);
        assert_eq!((0..50).filter(|at| arc.reference(at % 5)).count(), 45);
        assert!((100..900).all(|block| !arc.reference(block)));
        assert!((0..5).all(|block| arc.reference(block)));
    }

    proptest! {
        /// The invariants of the paper, A.1 to A.5.
        #[test]
        fn lists_keep_their_lengths(
            blocks in prop::collection::vec(0u32..30, 0..300),
            places in 1u32..12,
        ) {
            let mut arc = Arc::new(30, places);
            for block in blocks {
                arc.reference(block);
                let [once, again, once_ghosts, again_ghosts] = lens(&arc);
                prop_assert!(once + again <= places && once + once_ghosts <= places);
                prop_assert!(once + again + once_ghosts + again_ghosts <= 2 * places);
                prop_assert!((once_ghosts + again_ghosts == 0) || once + again == places);
                prop_assert!(arc.wanted >= 0.0 && arc.wanted <= f64::from(places));
            }
        }
    }
}
