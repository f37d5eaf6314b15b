//! S3-FIFO: a small queue for new blocks, a main one for those referenced again in it, and a queue
//! of ghosts, the numbers of blocks that left the small one (Yang, Zhang, Qiu, Yue and Rashmi,
//! "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1).

use super::Cache;
use super::list::{Links, List};

/// Highest count of references.
const COUNT_MAX: u8 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Small,
    Main,
    Ghost,
}

/// A cache of three queues.
pub struct S3Fifo {
    links: Links,
    small: List,
    main: List,
    ghosts: List,
    place: Vec<Place>,
    /// References of each cached block since it entered its queue.
    count: Vec<u8>,
    places: u32,
    /// Places of the small queue; the others are those of the main one.
    small_places: u32,
}

impl S3Fifo {
    /// An empty cache with `places` places, for blocks with numbers below `blocks`.
    pub fn new(blocks: u32, places: u32) -> Self {
        Self {
            links: Links::new(blocks),
            small: List::EMPTY,
            main: List::EMPTY,
            ghosts: List::EMPTY,
            place: vec![Place::Nowhere; blocks as usize],
            count: vec![0; blocks as usize],
            places,
            small_places: (places / 10).max(1),
        }
    }

    fn main_places(&self) -> u32 {
        self.places - self.small_places
    }

    /// Frees at least one place.
    fn evict(&mut self) {
        if self.small.len() >= self.small_places || self.main.len() == 0 {
            self.evict_small();
        } else {
            self.evict_main();
        }
    }

    /// Moves the oldest blocks of the small queue to the main one, up to one that leaves.
    fn evict_small(&mut self) {
        while let Some(block) = self.links.pop(&mut self.small) {
            if self.count[block as usize] > 1 && self.main_places() > 0 {
                while self.main.len() >= self.main_places() {
                    self.evict_main();
                }
                self.enter_main(block);
                continue;
            }
            self.place[block as usize] = Place::Ghost;
            self.links.push(&mut self.ghosts, block);
            if self.ghosts.len() > self.main_places()
                && let Some(ghost) = self.links.pop(&mut self.ghosts)
            {
                self.place[ghost as usize] = Place::Nowhere;
            }
            return;
        }
    }

    /// Removes a block of the main queue; those referenced again go around once more.
    fn evict_main(&mut self) {
        while let Some(block) = self.links.pop(&mut self.main) {
            let count = &mut self.count[block as usize];
            if *count == 0 {
                self.place[block as usize] = Place::Nowhere;
                return;
            }
            *count -= 1;
            self.links.push(&mut self.main, block);
        }
    }

    fn enter_main(&mut self, block: u32) {
        self.count[block as usize] = 0;
        self.place[block as usize] = Place::Main;
        self.links.push(&mut self.main, block);
    }
}

impl Cache for S3Fifo {
    fn reference(&mut self, block: u32) -> bool {
        let at = block as usize;
        if matches!(self.place[at], Place::Small | Place::Main) {
            self.count[at] = (self.count[at] + 1).min(COUNT_MAX);
            return true;
        }
        let ghost = self.place[at] == Place::Ghost;
        if ghost {
            self.links.remove(&mut self.ghosts, block);
            self.place[at] = Place::Nowhere;
        }
        while self.small.len() + self.main.len() >= self.places {
            self.evict();
        }
        if ghost && self.main_places() > 0 {
            while self.main.len() >= self.main_places() {
                self.evict_main();
            }
            self.enter_main(block);
        } else {
            self.count[at] = 0;
            self.place[at] = Place::Small;
            self.links.push(&mut self.small, block);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_blocks_pass_and_ghosts_enter_the_main_queue() {
        // One place of ten for new blocks once the cache is full.
        let mut cache = S3Fifo::new(100, 10);
        assert!((0..10).all(|block| !cache.reference(block)));
        // Blocks 0 and 1 are referenced twice more: they move on. Block 2 leaves for block 10.
        assert!([0, 0, 1, 1].into_iter().all(|block| cache.reference(block)));
        assert!(!cache.reference(10));
        assert_eq!((cache.small.len(), cache.main.len(), cache.ghosts.len()), (8, 2, 1));
        assert!(cache.reference(0) && cache.reference(1));
        // A ghost that returns goes to the main queue; block 3 leaves for it.
        assert!(!cache.reference(2));
        assert!(cache.place[2] == Place::Main && cache.place[3] == Place::Ghost);
        // A scan passes through the small queue; what is in the main queue stays.
        assert!((20..60).all(|block| !cache.reference(block)));
        assert!([0, 1, 2].into_iter().all(|block| cache.reference(block)));
    }

    #[test]
    fn main_blocks_go_around_as_often_as_they_were_referenced() {
        let mut cache = S3Fifo::new(10, 4);
        cache.enter_main(5);
        cache.enter_main(6);
        assert!((0..9).all(|_| cache.reference(5)), "the count is at most 3");
        assert!(cache.reference(6));
        cache.evict_main();
        assert!(cache.place[6] == Place::Nowhere, "6 went around once, 5 twice");
        assert!(cache.place[5] == Place::Main);
        assert_eq!(cache.count[5], COUNT_MAX - 2);
    }

    #[test]
    fn a_single_place_holds_the_last_block() {
        let mut cache = S3Fifo::new(3, 1);
        let hits = [0, 0, 0, 1, 1, 0].map(|block| cache.reference(block));
        assert_eq!(hits, [false, true, true, false, true, false]);
    }
}
