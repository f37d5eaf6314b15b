//! Removal of a distrusted volume's clean blocks from RAM. The index does not tell of all of them:
//! a block that was read from the cache device may stay in RAM after it has left the device.

use forebay_block::VolumeId;

use crate::cache::Cache;
use crate::contents::block_of;
use crate::key::Key;
use crate::limits::step;
use crate::ram::Walk;

/// Limit on the places in RAM visited in one turn of the event loop.
const PLACES_MAX: usize = step(1024);

/// The progress for one volume.
#[derive(Debug)]
pub(super) struct Purge {
    volume: VolumeId,
    walk: Walk,
    /// Blocks to visit again, because they were being written: the write may fail, and leave the
    /// block as it was.
    again: Vec<Key>,
}

impl Purge {
    pub fn new(volume: VolumeId) -> Self {
        Self { volume, walk: Walk::default(), again: Vec::new() }
    }

    /// Removes more blocks; returns whether none are left.
    pub fn step(&mut self, cache: &mut Cache) -> bool {
        let next = cache.ram.walk(&mut self.walk, PLACES_MAX);
        let is_over = next.is_none();
        let mut keys = std::mem::take(&mut self.again);
        keys.extend(next.unwrap_or_default());
        keys.retain(|&key| block_of(key) == key && key.volume() == self.volume);
        for key in keys {
            if !cache.is_distrusted(key) {
                continue;
            }
            match cache.locks.is_locked(key) {
                true => self.again.push(key),
                false => cache.ram.remove(key),
            }
        }
        is_over && self.again.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use forebay_policy::Standing;

    use crate::life::compare::Compare;
    use crate::slab::Id;
    use crate::testing::VOLUME;
    use crate::testing::rooms::{Rooms, content, key};

    fn pump(compare: &mut Compare, rooms: &mut Rooms) {
        for _ in 0..4 {
            let Rooms { cache, fx, .. } = rooms;
            compare.pump(cache, fx);
            rooms.log_record();
        }
    }

    #[test]
    fn what_the_index_does_not_have_leaves_ram_too() {
        let mut rooms = Rooms::new(8);
        rooms.clean([5]);
        rooms.dirty([6]);
        for block in [5, 6, 7, 8] {
            rooms.cache.ram.put(key(block), &content(block), Standing::Doubled);
        }
        assert!(rooms.cache.locks.acquire(key(8), Id(1)));
        // The next one is in the record being built.
        let Rooms { cache, fx, .. } = &mut rooms;
        assert!(cache.admit(key(9), &content(9), fx));
        let mut compare = Compare::default();
        compare.distrust(&mut rooms.cache, VOLUME);
        pump(&mut compare, &mut rooms);
        let left = |rooms: &Rooms| {
            let cache = &rooms.cache;
            let in_ram = (5..9).filter(|&block| cache.ram.contains(key(block)));
            let on_device = (5..10).filter(|&block| cache.contents.get(key(block)).is_some());
            (in_ram.collect::<Vec<_>>(), on_device.collect::<Vec<_>>())
        };
        assert_eq!(left(&rooms), (vec![6, 8], vec![6]));
        assert!(rooms.volume(VOLUME).distrusted, "what is being written may stay as it was");
        assert_eq!(rooms.cache.locks.release(key(8), Id(1)), None);
        pump(&mut compare, &mut rooms);
        assert_eq!(left(&rooms), (vec![6], vec![6]));
        assert!(!rooms.volume(VOLUME).distrusted);
    }
}
