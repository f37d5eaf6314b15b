//! Block keys, and maps indexed by them.

use std::hash::Hasher;

use forebay_block::VolumeId;
use forebay_policy::{KeyHash, KeyHasher};
use hashbrown::HashMap;

/// A block of a volume as one 48-bit number: the volume in the upper 8 bits, the block in the lower
/// 40.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key(pub u64);

impl Key {
    /// Returns the keys of all blocks of a volume.
    #[must_use]
    pub fn range(volume: VolumeId) -> std::ops::Range<Self> {
        Self(u64::from(volume.0) << 40)..Self((u64::from(volume.0) + 1) << 40)
    }

    /// Returns the key of a block.
    pub fn new(volume: VolumeId, block: u64) -> Self {
        assert!(block < 1 << 40, "block {block} fits 40 bits");
        Self(u64::from(volume.0) << 40 | block)
    }

    /// Returns the block's volume.
    pub fn volume(self) -> VolumeId {
        VolumeId((self.0 >> 40) as u8)
    }

    /// Returns the block's number on its volume.
    pub fn block(self) -> u64 {
        self.0 & ((1 << 40) - 1)
    }
}

/// A map indexed by block key, with the same iteration order in every run.
pub type KeyMap<V> = HashMap<Key, V, KeyHash>;

/// Such a map with an entry for as many blocks as a cache may hold. It consists of parts, so that
/// only one of them moves when it grows: all of a large map would take longer than a turn may.
#[derive(Debug)]
pub struct LargeMap<V> {
    /// None until the first entry.
    parts: Vec<KeyMap<V>>,
    len: usize,
}

/// Number of parts of a large map. In a shard of a TiB, a part has some 30,000 entries.
const PARTS: usize = 1024;

impl<V> Default for LargeMap<V> {
    fn default() -> Self {
        Self { parts: Vec::new(), len: 0 }
    }
}

impl<V> LargeMap<V> {
    /// The number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The value of a key.
    pub fn get(&self, key: &Key) -> Option<&V> {
        self.parts.get(part_of(*key))?.get(key)
    }

    /// The value of a key, to be changed.
    pub fn get_mut(&mut self, key: &Key) -> Option<&mut V> {
        self.parts.get_mut(part_of(*key))?.get_mut(key)
    }

    /// Whether a key has a value.
    pub fn contains_key(&self, key: &Key) -> bool {
        self.get(key).is_some()
    }

    /// Gives a key a value; returns the one that it had.
    pub fn insert(&mut self, key: Key, value: V) -> Option<V> {
        if self.parts.is_empty() {
            self.parts.resize_with(PARTS, KeyMap::default);
        }
        let before = self.parts[part_of(key)].insert(key, value);
        self.len += usize::from(before.is_none());
        before
    }

    /// Takes a key's value.
    pub fn remove(&mut self, key: &Key) -> Option<V> {
        let before = self.parts.get_mut(part_of(*key))?.remove(key);
        self.len -= usize::from(before.is_some());
        before
    }

    /// Frees parts of a map that is not used any more until their capacity reaches `room` entries;
    /// returns whether there was one.
    pub fn drop_parts(&mut self, room: usize) -> bool {
        let parts = self.parts.len();
        let mut freed = 0;
        while freed < room
            && let Some(part) = self.parts.pop()
        {
            freed += part.capacity();
        }
        self.parts.len() < parts
    }

    /// Whether [`LargeMap::drop_parts`] has more to free.
    pub fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &V)> {
        self.parts.iter().flatten()
    }

    /// All values.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
}

/// The part of a key, by bits of its hash that tell nothing of its place in there.
fn part_of(key: Key) -> usize {
    let mut hasher = KeyHasher::default();
    hasher.write_u64(key.0);
    (hasher.finish() >> 40) as usize % PARTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_map_is_a_map_whose_parts_are_alike() {
        let (mut map, mut model) = (LargeMap::default(), std::collections::BTreeMap::new());
        for n in 0..200_000u64 {
            let key = Key(n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 100_000);
            match n % 3 {
                0 | 1 => assert_eq!(map.insert(key, n), model.insert(key, n)),
                _ => assert_eq!(map.remove(&key), model.remove(&key)),
            }
            if let Some(value) = map.get_mut(&Key(n % 1000)) {
                *value += 1;
                *model.get_mut(&Key(n % 1000)).expect("both have it") += 1;
            }
            assert_eq!(map.len(), model.len());
        }
        assert!(model.iter().all(|(key, value)| map.get(key) == Some(value)));
        let mut all: Vec<_> = map.iter().map(|(key, value)| (*key, *value)).collect();
        all.sort_unstable();
        assert_eq!(all, model.into_iter().collect::<Vec<_>>());
        let longest = map.parts.iter().map(KeyMap::len).max().expect("there are parts");
        assert!(longest < 2 * map.len() / PARTS, "{longest} of {}", map.len());
        assert!(!map.contains_key(&Key(100_000)));
    }

    #[test]
    fn a_large_map_is_freed_in_steps() {
        const FREED: usize = 10_000;
        let mut map = LargeMap::default();
        assert!(!map.drop_parts(FREED), "an empty map has no parts");
        (0..200_000).for_each(|n| assert_eq!(map.insert(Key(n), ()), None));
        let room = |map: &LargeMap<()>| map.parts.iter().map(KeyMap::capacity).sum::<usize>();
        let longest = map.parts.iter().map(KeyMap::capacity).max().expect("there are parts");
        while let before = room(&map)
            && map.drop_parts(FREED)
        {
            let freed = before - room(&map);
            assert!(freed >= FREED.min(before), "{freed} of {before}");
            assert!(freed < FREED + longest, "{freed} of {before}");
        }
        assert_eq!(room(&map), 0);
    }
}
