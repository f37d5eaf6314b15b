//! The set of blocks in a RAM tier: a fixed number of places, evicted least recently used first.
//! The content of a place is the owner's business.

use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use hashbrown::HashMap;

const NONE: u32 = u32::MAX;

/// Scrambles block keys, the same way in every run, so that runs can be repeated.
#[derive(Clone, Copy, Default, Debug)]
pub struct KeyHasher(u64);

/// Makes [`KeyHasher`]s.
pub type KeyHash = BuildHasherDefault<KeyHasher>;

impl Hasher for KeyHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    #[inline]
    fn write_u64(&mut self, n: u64) {
        let product = u128::from(self.0 ^ n ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

#[derive(Clone, Copy, Debug)]
struct Link {
    key: u64,
    newer: u32,
    older: u32,
}

/// Recent blocks by key. Each has a place: a number below the capacity.
#[derive(Clone, Debug)]
pub struct Recent {
    map: HashMap<u64, u32, KeyHash>,
    links: Vec<Link>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    capacity: usize,
}

impl Recent {
    /// A set with places for `capacity` blocks; 0 is allowed.
    ///
    /// # Panics
    /// If the place numbers would not fit 32 bits.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        assert!(capacity < NONE as usize, "a RAM tier is below 16 TiB");
        Self {
            map: HashMap::default(),
            links: Vec::new(),
            free: Vec::new(),
            newest: NONE,
            oldest: NONE,
            capacity,
        }
    }

    /// Number of blocks in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The block's place; `None` if it is not in the set.
    #[must_use]
    #[inline]
    pub fn find(&self, key: u64) -> Option<u32> {
        self.map.get(&key).copied()
    }

    /// Makes a block the most recent and returns its place; `None` if it is not in the set.
    #[inline]
    pub fn touch(&mut self, key: u64) -> Option<u32> {
        let place = self.find(key)?;
        if self.newest != place {
            self.unlink(place);
            self.link_newest(place);
        }
        Some(place)
    }

    /// Inserts a block, or makes it the most recent. Returns its place, which may have been another
    /// block's; `None` if the set has no places.
    pub fn put(&mut self, key: u64) -> Option<u32> {
        if let Some(place) = self.touch(key) {
            return Some(place);
        }
        let place = self.free_place().or_else(|| {
            let (oldest, _) = self.oldest()?;
            self.forget(oldest);
            self.free.pop()
        })?;
        self.links[place as usize] = Link { key, newer: NONE, older: NONE };
        self.map.insert(key, place);
        self.link_newest(place);
        Some(place)
    }

    /// The least recent block, and its place.
    #[must_use]
    pub fn oldest(&self) -> Option<(u64, u32)> {
        self.links.get(self.oldest as usize).map(|link| (link.key, self.oldest))
    }

    /// The keys around the block at `place` that became recent consecutively and in ascending
    /// order: blocks requested together with it. At most `most` keys.
    #[must_use]
    pub fn together(&self, place: u32, most: u64) -> Range<u64> {
        let link = |place: u32| self.links.get(place as usize);
        let Some(middle) = link(place) else { return 0..0 };
        let (mut first, mut last) = (middle, middle);
        while last.key - first.key + 1 < most
            && let Some(older) = link(first.older).filter(|older| older.key + 1 == first.key)
        {
            first = older;
        }
        while last.key - first.key + 1 < most
            && let Some(newer) = link(last.newer).filter(|newer| last.key + 1 == newer.key)
        {
            last = newer;
        }
        first.key..last.key + 1
    }

    /// The key of the block at a place; `None` if the place is empty.
    #[must_use]
    pub fn at(&self, place: u32) -> Option<u64> {
        let key = self.links.get(place as usize)?.key;
        (self.find(key) == Some(place)).then_some(key)
    }

    /// Whether the next block to enter displaces another one.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.links.len() == self.capacity
    }

    /// Whether a block is in the set or can enter without displacing another one.
    #[must_use]
    pub fn has_room_for(&self, key: u64) -> bool {
        !self.is_full() || self.find(key).is_some()
    }

    /// Takes a free place, if there is one, out of use for the owner's own purposes: no block gets
    /// it until [`Recent::take_back`].
    pub fn lend(&mut self) -> Option<u32> {
        self.free_place()
    }

    /// Returns a lent place to the free ones.
    pub fn take_back(&mut self, place: u32) {
        self.free.push(place);
    }

    fn free_place(&mut self) -> Option<u32> {
        if self.free.is_empty() && self.links.len() < self.capacity {
            self.links.push(Link { key: 0, newer: NONE, older: NONE });
            return Some(self.links.len() as u32 - 1);
        }
        self.free.pop()
    }

    /// Gives the place of block `from` to block `to`, which loses its own.
    pub fn rename(&mut self, from: u64, to: u64) {
        self.forget(to);
        if let Some(place) = self.map.remove(&from) {
            self.links[place as usize].key = to;
            self.map.insert(to, place);
        }
    }

    /// Removes a block.
    pub fn forget(&mut self, key: u64) {
        if let Some(place) = self.map.remove(&key) {
            self.unlink(place);
            self.free.push(place);
        }
    }

    /// Removes all blocks whose key `keep` rejects.
    pub fn retain(&mut self, keep: impl Fn(u64) -> bool) {
        let gone: Vec<u64> = self.map.keys().copied().filter(|&key| !keep(key)).collect();
        gone.into_iter().for_each(|key| self.forget(key));
    }

    /// Prefetches the memory that [`Recent::touch`] will access for a place; changes nothing.
    /// Prefetching for many blocks at once overlaps their cache misses.
    #[inline]
    pub fn warm(&self, place: u32) {
        std::hint::black_box(self.links[place as usize].newer);
    }

    /// Prefetches the memory of a place's neighbors in the list.
    #[inline]
    pub fn warm_neighbours(&self, place: u32) {
        let link = &self.links[place as usize];
        for near in [link.newer, link.older] {
            std::hint::black_box(self.links.get(near as usize).map(|link| link.newer));
        }
    }

    fn link_newest(&mut self, place: u32) {
        let older = std::mem::replace(&mut self.newest, place);
        let link = &mut self.links[place as usize];
        (link.newer, link.older) = (NONE, older);
        match older {
            NONE => self.oldest = place,
            _ => self.links[older as usize].newer = place,
        }
    }

    fn unlink(&mut self, place: u32) {
        let Link { newer, older, .. } = self.links[place as usize];
        match newer {
            NONE => self.newest = older,
            _ => self.links[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.links[older as usize].newer = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_block_keeps_its_place_and_its_age() {
        let mut recent = Recent::new(3);
        let places: Vec<_> = (0..3).map(|key| recent.put(key)).collect();
        recent.rename(0, 9);
        assert_eq!((recent.find(0), recent.find(9)), (None, places[0]));
        assert_eq!(recent.put(5), places[0], "it was the least recent");
        recent.rename(1, 2);
        assert_eq!((recent.len(), recent.find(2)), (2, places[1]));
        recent.rename(77, 2);
        assert_eq!((recent.len(), recent.find(2)), (1, None));
    }

    #[test]
    fn a_lent_place_is_no_block_s() {
        let mut recent = Recent::new(2);
        let lent = recent.lend().expect("both are free");
        let other = recent.put(1).expect("one is");
        assert!(recent.is_full() && lent != other);
        assert_eq!((recent.put(2), recent.oldest()), (Some(other), Some((2, other))));
        recent.take_back(lent);
        assert!(!recent.is_full());
        assert_eq!((recent.put(3), recent.oldest()), (Some(lent), Some((2, other))));
        assert_eq!(Recent::new(0).put(1), None);
    }

    #[test]
    fn what_became_recent_together_is_told() {
        let mut recent = Recent::new(8);
        let places: Vec<_> =
            [9, 4, 5, 6, 7, 6 + 10].map(|key| recent.put(key).expect("there is room")).into();
        assert_eq!(recent.together(places[2], 16), 4..8);
        assert_eq!(recent.together(places[2], 3), 4..7, "at most three, the older ones first");
        assert_eq!(recent.together(places[0], 16), 9..10);
        recent.touch(5);
        assert_eq!(recent.together(places[1], 16), 4..5, "5 was asked for alone since");
        assert_eq!((recent.at(places[1]), recent.at(7)), (Some(4), None));
        recent.forget(4);
        assert_eq!(recent.at(places[1]), None);
    }

    #[test]
    fn what_is_kept_stays_in_order() {
        let mut recent = Recent::new(4);
        (0..4).for_each(|key| assert!(recent.put(key).is_some()));
        recent.retain(|key| key % 2 == 1);
        recent.touch(1);
        (10..13).for_each(|key| assert!(recent.put(key).is_some()));
        assert!(recent.find(3).is_none() && recent.find(1).is_some());
    }
}
