//! The neighbors in the store of blocks that are copied there.
//!
//! A database writes a page of 16 KiB again, and half of its blocks are as they were. These stay
//! in their unit, of which the others leave holes that fit no unit of four blocks. So the rest of
//! such a unit is read and moved along, if all of it together takes fewer pages. It cannot when no
//! copy is compressed: each takes a page of its own.

use std::collections::VecDeque;

use forebay_block::BLOCK_SIZE;

use crate::cache::Cache;
use crate::contents::{Place, Stored};
use crate::key::Key;
use crate::store::{UNIT_BLOCKS, unit_pages};

use super::Job;

/// The search for them, over several turns.
#[derive(Debug)]
pub(super) struct Joining {
    /// The blocks that are copied, in order, with their lengths; 0 if not known yet.
    copies: VecDeque<(Key, usize)>,
    /// The block after the last one that is copied or moved along.
    past: Key,
}

impl Joining {
    pub fn new(job: &Job) -> Self {
        let read = job.to_read.iter().filter(|item| item.place.kind.has_payload());
        let read = read.map(|item| (item.key, usize::from(item.place.len)));
        let whole = job.to_rebase.iter().map(|item| (item.key, 0));
        let mut copies: Vec<(Key, usize)> = read.chain(whole).collect();
        copies.sort_unstable();
        copies.dedup_by_key(|(key, _)| *key);
        Self { copies: copies.into(), past: Key(0) }
    }

    /// Adds the neighbors of the next groups of copies, `most` at a time, to those that are read;
    /// returns whether there are no more.
    pub fn join(&mut self, cache: &Cache, most: usize, to_read: &mut VecDeque<Stored>) -> bool {
        for _ in 0..most {
            let Some(group) = self.next_group() else { return true };
            let is_raw = group.iter().all(|&(_, len)| len == BLOCK_SIZE);
            let beside = if is_raw { Vec::new() } else { self.beside(cache, &group) };
            let last = group.iter().map(|(key, _)| *key).chain(beside.iter().map(|item| item.key));
            self.past = last.max().map_or(self.past, |key| Key(key.0 + 1));
            to_read.extend(beside);
        }
        self.copies.is_empty()
    }

    /// The next copies that one unit can have.
    fn next_group(&mut self) -> Option<Vec<(Key, usize)>> {
        let first = self.copies.pop_front()?;
        let mut group = vec![first];
        while let Some(next) = self.copies.pop_front_if(|(key, _)| key.0 - first.0.0 < UNIT_BLOCKS)
        {
            group.push(next);
        }
        Some(group)
    }

    /// The blocks of units of the store that one unit can have together with a group, and that take
    /// more pages without it.
    fn beside(&self, cache: &Cache, group: &[(Key, usize)]) -> Vec<Stored> {
        let mut beside: Vec<Stored> = Vec::new();
        let (mut first, mut last) = (group[0].0.0, group[group.len() - 1].0.0);
        // From there on, blocks are copied with the next group.
        let next = self.copies.front().map_or(Key(u64::MAX), |(key, _)| *key);
        let from = self.past.0.max(last.saturating_sub(UNIT_BLOCKS - 1));
        let window = from..next.0.min(first + UNIT_BLOCKS);
        let reach = 2 * (UNIT_BLOCKS - 1);
        let near = cache.blocks_in_store(last.saturating_sub(reach)..first + reach + 1);
        for &(key, place) in near.iter().filter(|(key, _)| window.contains(&key.0)) {
            let is_taken = group.iter().any(|(copy, _)| *copy == key)
                || beside.iter().any(|item| item.key == key);
            if is_taken {
                continue;
            }
            let unit = cache.unit_among(&near, key, &place);
            let keys = || unit.iter().map(|(key, _)| key.0);
            let low = keys().fold(first, u64::min);
            let high = keys().fold(last, u64::max);
            let is_free = low >= self.past.0 && high < next.0;
            // What is not named yet has just been written.
            let is_new = unit.iter().any(|(key, _)| cache.contents.is_unnamed(*key));
            if high - low >= UNIT_BLOCKS || !is_free || is_new {
                continue;
            }
            let lens = || unit.iter().map(|(_, place)| usize::from(place.len));
            let mean = lens().sum::<usize>() / unit.len();
            let copies = group.iter().map(|&(_, len)| if len == 0 { mean } else { len });
            let so_far = beside.iter().map(|item| usize::from(item.place.len));
            let own: Vec<usize> = copies.chain(so_far).collect();
            let apart = unit_pages(own.iter().copied()) + pages_in_use(cache, &unit);
            if unit_pages(own.into_iter().chain(lens())) < apart {
                (first, last) = (low, high);
                beside.extend(unit.into_iter().map(|(key, place)| Stored { key, place }));
            }
        }
        beside
    }
}

/// The number of pages of the store that these blocks of one unit use.
fn pages_in_use(cache: &Cache, unit: &[(Key, Place)]) -> usize {
    let pages = cache.contents.pages_and_index().0;
    let mut used: Vec<u32> = unit.iter().flat_map(|(_, place)| pages.of(place)).collect();
    used.sort_unstable();
    used.dedup();
    used.len()
}

#[cfg(test)]
mod tests {
    use forebay_format::EntryKind;

    use super::*;
    use crate::testing::rooms::{Rooms, key};

    /// Puts a unit into the store: blocks and the lengths of their payloads.
    fn put_unit(rooms: &mut Rooms, blocks: &[(u64, u16)]) {
        let Rooms { cache, .. } = rooms;
        let len = unit_pages(blocks.iter().map(|&(_, len)| usize::from(len)));
        let unit = cache.store.take(len, cache.contents.pages()).expect("there is room");
        let (segment, mut offset) = cache.contents.pages().place(unit.start);
        for &(block, len) in blocks {
            let kind = EntryKind::Zstd;
            let place = Place { segment, offset, len, kind, crc: 0, dirty: false, meta: 0 };
            cache.contents.pages().hold_place(&place);
            cache.contents.place_unnamed(cache.now, key(block), place, &mut cache.ram);
            cache.contents.note_named(key(block));
            offset += u32::from(len).next_multiple_of(8);
        }
    }

    /// The blocks that move along with these copies, `most` groups at a time.
    fn joined(rooms: &Rooms, copies: &[(u64, usize)], most: usize) -> Vec<u64> {
        let copies = copies.iter().map(|&(block, len)| (key(block), len)).collect();
        let mut joining = Joining { copies, past: Key(0) };
        let mut to_read = VecDeque::new();
        while !joining.join(rooms, most, &mut to_read) {}
        to_read.iter().map(|item| item.key.block()).collect()
    }

    #[test]
    fn the_rest_of_a_unit_moves_along_if_all_takes_fewer_pages() {
        type Case = (&'static [&'static [(u64, u16)]], &'static [(u64, usize)], &'static [u64]);
        let cases: [Case; 10] = [
            // One page instead of two, two instead of three, three instead of three.
            (&[&[(4, 1000), (5, 1000)]], &[(6, 1000), (7, 1000)], &[4, 5]),
            (&[&[(4, 1000), (5, 1000)]], &[(6, 3000), (7, 3000)], &[4, 5]),
            (&[&[(4, 1000), (5, 1000)]], &[(6, 4096), (7, 4096)], &[]),
            // A block that will be written whole is expected to become as short as the others.
            (&[&[(4, 1000), (5, 1000)]], &[(6, 0), (7, 0)], &[4, 5]),
            (&[&[(4, 3000), (5, 3000)]], &[(6, 0), (7, 0)], &[4, 5]),
            // On both sides; what is too far away; what does not all fit a unit.
            (&[&[(4, 1000)], &[(7, 1000)]], &[(5, 1000), (6, 1000)], &[4, 7]),
            (&[&[(4, 1000)], &[(9, 1000)]], &[(5, 1000), (8, 1000)], &[]),
            (&[&[(3, 1000), (4, 1000)]], &[(5, 1000), (7, 1000)], &[]),
            // Between two copies it goes with the first.
            (&[&[(3, 1000), (4, 1000)]], &[(1, 1000), (5, 1000)], &[3, 4]),
            (&[], &[(4, 1000)], &[]),
        ];
        for (units, copies, expected) in cases {
            let mut rooms = Rooms::with_store();
            units.iter().for_each(|unit| put_unit(&mut rooms, unit));
            for most in [1, 100] {
                assert_eq!(joined(&rooms, copies, most), expected, "{units:?} {copies:?}");
            }
        }
    }

    #[test]
    fn what_has_just_been_written_does_not_move_along() {
        let mut rooms = Rooms::with_store();
        put_unit(&mut rooms, &[(4, 1000), (5, 1000)]);
        let Rooms { cache, .. } = &mut rooms;
        let place = cache.contents.get(key(5)).expect("it is cached");
        cache.contents.pages().hold_place(&place);
        cache.contents.forget(key(5), &mut cache.ram);
        cache.contents.place_unnamed(cache.now, key(5), place, &mut cache.ram);
        assert_eq!(joined(&rooms, &[(6, 1000)], 1), []);
    }
}
