//! The set of blocks in a RAM tier: a fixed number of places. The content of a place is the owner's
//! business.
//!
//! The blocks are in two orders, each least recently used first: those that are in RAM *alone*, and
//! those that the cache device has too. To lose one of the former costs a read of the primary, one
//! of the latter only a read of the cache device, so the oldest of the former goes only when it is
//! [`WORTH`] times as old as the oldest of the latter. How many places each order has follows from
//! that. (Costs decide in a similar way in GreedyDual: Young, The k-server dual and loose
//! competitiveness for paging, Algorithmica 1994.)

use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::ops::Range;

use forebay_block::prefetch;
use hashbrown::HashTable;

const NONE: u32 = u32::MAX;

/// How many times the age of a block that the cache device has too is that of one in RAM alone.
const WORTH: u64 = 64;

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

/// Whether the bytes of a block are elsewhere in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// In RAM alone.
    Alone,
    /// On the cache device too.
    Doubled,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    key: u64,
    newer: u32,
    older: u32,
    /// The time of the last use, counted in uses of the set.
    at: u32,
    standing: Standing,
    /// Whether it was touched since it entered, or as [`Recent::set_touched`] said since.
    touched: bool,
}

/// The ends of an order.
#[derive(Clone, Copy, Debug)]
struct Ends {
    newest: u32,
    oldest: u32,
}

/// The places of blocks by key. It consists of parts, so that only one of them moves when it grows
/// or is cleared of what erasures leave behind: all of a large table would take longer than a turn
/// of a shard may.
#[derive(Clone, Debug)]
struct Places {
    parts: Box<[HashTable<(u64, u32)>]>,
    len: usize,
}

/// The mean number of blocks in a part, at most.
const PART_BLOCKS: usize = 2048;

impl Places {
    fn new(capacity: usize) -> Self {
        let parts = capacity.div_ceil(PART_BLOCKS).next_power_of_two();
        Self { parts: (0..parts).map(|_| HashTable::new()).collect(), len: 0 }
    }

    #[inline]
    fn hash_of(key: u64) -> u64 {
        KeyHash::default().hash_one(key)
    }

    /// The part of a hash. Tables use its lowest and its highest bits.
    #[inline]
    fn part_of(&self, hash: u64) -> usize {
        (hash >> 32) as usize & (self.parts.len() - 1)
    }

    #[inline]
    fn get(&self, key: u64) -> Option<u32> {
        let hash = Self::hash_of(key);
        let found = self.parts[self.part_of(hash)].find(hash, |&(other, _)| other == key);
        found.map(|&(_, place)| place)
    }

    /// Adds a block that has no place.
    fn insert(&mut self, key: u64, place: u32) {
        let hash = Self::hash_of(key);
        let part = self.part_of(hash);
        self.parts[part].insert_unique(hash, (key, place), |&(key, _)| Self::hash_of(key));
        self.len += 1;
    }

    fn remove(&mut self, key: u64) -> Option<u32> {
        let hash = Self::hash_of(key);
        let part = self.part_of(hash);
        let found = self.parts[part].find_entry(hash, |&(other, _)| other == key).ok()?;
        let ((_, place), _) = found.remove();
        self.len -= 1;
        Some(place)
    }

    fn keys(&self) -> impl Iterator<Item = u64> {
        self.parts.iter().flat_map(HashTable::iter).map(|&(key, _)| key)
    }
}

/// Recent blocks by key. Each has a place: a number below the capacity.
#[derive(Clone, Debug)]
pub struct Recent {
    map: Places,
    links: Vec<Link>,
    free: Vec<u32>,
    /// The orders, by standing.
    ends: [Ends; 2],
    /// Number of uses so far. It wraps around.
    uses: u32,
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
            map: Places::new(capacity),
            links: Vec::with_capacity(capacity),
            free: Vec::new(),
            ends: [Ends { newest: NONE, oldest: NONE }; 2],
            uses: 0,
            capacity,
        }
    }

    /// Number of blocks in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block's place; `None` if it is not in the set.
    #[must_use]
    #[inline]
    pub fn find(&self, key: u64) -> Option<u32> {
        self.map.get(key)
    }

    /// Makes a block the most recent of its order and returns its place; `None` if it is not in the
    /// set.
    #[inline]
    pub fn touch(&mut self, key: u64) -> Option<u32> {
        let place = self.find(key)?;
        self.renew(place, self.links[place as usize].standing);
        self.links[place as usize].touched = true;
        Some(place)
    }

    /// Makes a block the most recent of the order of this standing and returns its place; `None` if
    /// it is not in the set.
    pub fn stand(&mut self, key: u64, standing: Standing) -> Option<u32> {
        let place = self.find(key)?;
        self.renew(place, standing);
        Some(place)
    }

    /// Inserts a block, or makes it the most recent of the order of this standing. Returns its
    /// place, which may have been another block's; `None` if the set has no places.
    pub fn put(&mut self, key: u64, standing: Standing) -> Option<u32> {
        if let Some(place) = self.stand(key, standing) {
            return Some(place);
        }
        let place = self.free_place().or_else(|| {
            let (oldest, _) = self.oldest()?;
            self.forget(oldest);
            self.free.pop()
        })?;
        let at = self.next_use();
        let (newer, older, touched) = (NONE, NONE, false);
        self.links[place as usize] = Link { key, newer, older, at, standing, touched };
        self.map.insert(key, place);
        self.link_newest(place, standing);
        Some(place)
    }

    /// The block that goes next, and its place.
    #[must_use]
    pub fn oldest(&self) -> Option<(u64, u32)> {
        let [alone, doubled] = [Standing::Alone, Standing::Doubled].map(|one| self.oldest_of(one));
        let age = |(_, place): (u64, u32)| {
            u64::from(self.uses.wrapping_sub(self.links[place as usize].at))
        };
        match (alone, doubled) {
            (Some(one), Some(other)) if age(one) <= WORTH * age(other) => Some(other),
            _ => alone.or(doubled),
        }
    }

    /// The least recent block of an order, and its place.
    #[must_use]
    pub fn oldest_of(&self, standing: Standing) -> Option<(u64, u32)> {
        let oldest = self.ends[standing as usize].oldest;
        self.links.get(oldest as usize).map(|link| (link.key, oldest))
    }

    /// The standing that a block has in the set.
    #[must_use]
    pub fn standing_at(&self, place: u32) -> Option<Standing> {
        self.links.get(place as usize).map(|link| link.standing)
    }

    /// Whether the block at a place was touched since it entered the set, or as
    /// [`Recent::set_touched`] said since.
    #[must_use]
    pub fn is_touched(&self, place: u32) -> bool {
        self.links[place as usize].touched
    }

    /// Says whether the block at a place counts as touched.
    pub fn set_touched(&mut self, place: u32, touched: bool) {
        self.links[place as usize].touched = touched;
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
            let (newer, older, standing) = (NONE, NONE, Standing::Alone);
            self.links.push(Link { key: 0, newer, older, at: 0, standing, touched: false });
            return Some(self.links.len() as u32 - 1);
        }
        self.free.pop()
    }

    /// Gives the place of block `from` to block `to`, which loses its own.
    pub fn rename(&mut self, from: u64, to: u64) {
        self.forget(to);
        if let Some(place) = self.map.remove(from) {
            self.links[place as usize].key = to;
            self.map.insert(to, place);
        }
    }

    /// Removes a block.
    pub fn forget(&mut self, key: u64) {
        if let Some(place) = self.map.remove(key) {
            self.unlink(place);
            self.free.push(place);
        }
    }

    /// Removes all blocks whose key `keep` rejects.
    pub fn retain(&mut self, keep: impl Fn(u64) -> bool) {
        let gone: Vec<u64> = self.map.keys().filter(|&key| !keep(key)).collect();
        gone.into_iter().for_each(|key| self.forget(key));
    }

    /// Prefetches the memory that [`Recent::touch`] will access for a place; changes nothing.
    /// Prefetching for many blocks at once overlaps their cache misses.
    #[inline]
    pub fn warm(&self, place: u32) {
        prefetch(&self.links[place as usize]);
    }

    /// Prefetches the memory of a place's neighbors in the list.
    #[inline]
    pub fn warm_neighbours(&self, place: u32) {
        let link = &self.links[place as usize];
        for near in [link.newer, link.older] {
            self.links.get(near as usize).inspect(|link| prefetch(*link));
        }
    }

    /// The time of a use that happens now.
    fn next_use(&mut self) -> u32 {
        self.uses = self.uses.wrapping_add(1);
        self.uses
    }

    /// Makes the block at a place the most recent of an order.
    #[inline]
    fn renew(&mut self, place: u32, standing: Standing) {
        self.links[place as usize].at = self.next_use();
        if self.ends[standing as usize].newest != place {
            self.unlink(place);
            self.link_newest(place, standing);
        }
    }

    fn link_newest(&mut self, place: u32, standing: Standing) {
        let ends = &mut self.ends[standing as usize];
        let older = std::mem::replace(&mut ends.newest, place);
        if older == NONE {
            ends.oldest = place;
        } else {
            self.links[older as usize].newer = place;
        }
        let link = &mut self.links[place as usize];
        (link.newer, link.older, link.standing) = (NONE, older, standing);
    }

    fn unlink(&mut self, place: u32) {
        let Link { newer, older, standing, .. } = self.links[place as usize];
        let ends = &mut self.ends[standing as usize];
        match newer {
            NONE => ends.newest = older,
            _ => self.links[newer as usize].older = older,
        }
        match older {
            NONE => ends.oldest = newer,
            _ => self.links[older as usize].newer = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One table of 32,768 buckets was moved to one of twice as many here, at once.
    #[test]
    fn parts_stay_small_however_long_blocks_come_and_go() {
        let capacity = 27_000;
        let mut recent = Recent::new(capacity);
        for key in 0..10 * capacity as u64 {
            recent.put(key * 7, Standing::Alone);
        }
        let parts = &recent.map.parts;
        assert_eq!((recent.len(), parts.len()), (capacity, 16));
        assert_eq!(parts.iter().map(HashTable::len).sum::<usize>(), capacity);
        assert!(parts.iter().all(|part| part.capacity() <= 2 * PART_BLOCKS));
        (0..capacity as u64).for_each(|i| recent.forget((9 * capacity as u64 + i) * 7));
        assert!(recent.is_empty() && recent.map.keys().next().is_none());
    }

    #[test]
    fn a_renamed_block_keeps_its_place_and_its_age() {
        let mut recent = Recent::new(3);
        let places: Vec<_> = (0..3).map(|key| recent.put(key, Standing::Alone)).collect();
        recent.rename(0, 9);
        assert_eq!((recent.find(0), recent.find(9)), (None, places[0]));
        assert_eq!(recent.put(5, Standing::Alone), places[0], "it was the least recent");
        recent.rename(1, 2);
        assert_eq!((recent.len(), recent.find(2)), (2, places[1]));
        recent.rename(77, 2);
        assert_eq!((recent.len(), recent.find(2)), (1, None));
    }

    #[test]
    fn a_lent_place_is_no_block_s() {
        let mut recent = Recent::new(2);
        let lent = recent.lend().expect("both are free");
        let other = recent.put(1, Standing::Alone).expect("one is");
        assert!(recent.is_full() && lent != other);
        assert_eq!(
            (recent.put(2, Standing::Alone), recent.oldest()),
            (Some(other), Some((2, other)))
        );
        recent.take_back(lent);
        assert!(!recent.is_full());
        assert_eq!(
            (recent.put(3, Standing::Alone), recent.oldest()),
            (Some(lent), Some((2, other)))
        );
        assert_eq!(Recent::new(0).put(1, Standing::Alone), None);
    }

    #[test]
    fn what_became_recent_together_is_told() {
        let mut recent = Recent::new(8);
        let places: Vec<_> = [9, 4, 5, 6, 7, 6 + 10]
            .map(|key| recent.put(key, Standing::Alone).expect("there is room"))
            .into();
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
        (0..4).for_each(|key| assert!(recent.put(key, Standing::Alone).is_some()));
        recent.retain(|key| key % 2 == 1);
        recent.touch(1);
        (10..13).for_each(|key| assert!(recent.put(key, Standing::Alone).is_some()));
        assert!(recent.find(3).is_none() && recent.find(1).is_some());
    }

    #[test]
    fn a_block_in_ram_alone_goes_when_it_is_much_older() {
        let mut recent = Recent::new(64);
        let oldest = |recent: &Recent| recent.oldest().map(|(key, _)| key);
        assert!(
            recent.put(1, Standing::Alone).is_some() && recent.put(2, Standing::Alone).is_some()
        );
        assert_eq!(oldest(&recent), Some(1));
        recent.put(7, Standing::Doubled);
        // Its age is 0, that of the others 1 and 2.
        assert_eq!(oldest(&recent), Some(1), "what came just now stays");
        recent.touch(2);
        assert_eq!(oldest(&recent), Some(7), "of ages 3 and 1");
        for _ in 0..4 * WORTH {
            recent.touch(2);
            recent.put(7, Standing::Doubled);
        }
        recent.touch(2);
        assert_eq!(oldest(&recent), Some(1), "of ages of more than a hundred and 1");
        recent.stand(1, Standing::Doubled);
        assert_eq!(recent.oldest_of(Standing::Alone).map(|(key, _)| key), Some(2));
        assert_eq!(recent.oldest_of(Standing::Doubled).map(|(key, _)| key), Some(7));
        recent.forget(7);
        recent.forget(1);
        assert_eq!((recent.oldest_of(Standing::Doubled), oldest(&recent)), (None, Some(2)));
    }
}
