//! Eviction from the store: of a random sample the unit goes that the policy values least.

use std::ops::Range;

use forebay_format::EntryKind;
use forebay_policy::{LastTouch, StoreCandidate};

use crate::api::Effects;
use crate::cache::Cache;
use crate::contents::Place;
use crate::key::Key;
use crate::limits::{EVICT_SAMPLE, EVICTIONS_MAX};
use crate::log::builder::Expect;
use crate::store::{SLOT_PAGES_MAX, UNIT_BLOCKS};

/// One part in this many of the index is kept free, by reclaiming or evicting even when there is
/// room on the device.
const INDEX_MARGIN: u64 = 64;
/// One page of the store in this many is free while there is plenty of room.
const PLENTY: u64 = 32;

/// Blocks of the store, each for its unit, among which one is chosen.
struct Sample {
    candidates: Vec<StoreCandidate>,
    blocks: Vec<(Key, Place)>,
}

impl Sample {
    fn new() -> Self {
        let candidates = Vec::with_capacity(EVICT_SAMPLE + 1);
        Self { candidates, blocks: Vec::with_capacity(EVICT_SAMPLE) }
    }

    fn remove(&mut self, at: usize) {
        self.candidates.swap_remove(at);
        self.blocks.swap_remove(at);
    }
}

impl Cache {
    /// Evicts units of each class of which slots are sought and few are left.
    pub(super) fn evict(&mut self, fx: &mut Effects) {
        let tight = self.index_is_tight();
        let (mut evicted, mut wanted) = (false, false);
        for class in 1..=SLOT_PAGES_MAX {
            let few = self.store.slots_wanted(class);
            let coming = self.store.freeing() / class + self.contents.pages().freed() / class;
            let left = self.store.free_slots(class) + coming + self.store.leaving(class);
            // Many at once, since their records and a flush of the device must follow.
            let lacks = self.store.is_sought(class) && self.store.lacks_slots(class, left, few);
            if !tight && !lacks {
                continue;
            }
            let most = if tight { EVICTIONS_MAX } else { (few - left).min(EVICTIONS_MAX) };
            wanted |= left == 0 || tight;
            for _ in 0..most {
                let Some(unit) = self.victim(class) else { break };
                evicted = true;
                self.stats.evicted_blocks += unit.len() as u64;
                self.store.note_leaving(class);
                for (key, place) in unit {
                    let (kind, expect) = (EntryKind::Invalidate, Expect::At(place));
                    if !self.push_bare(fx, key, 1, kind, false, expect) {
                        return;
                    }
                    self.log.raise_barrier();
                }
            }
        }
        let coming = self.store.freeing() + self.contents.pages().freed() > 0;
        self.store.note_full(wanted && !evicted && !coming);
    }

    /// Whether the index is nearly full and has clean blocks to evict.
    pub(crate) fn index_is_tight(&self) -> bool {
        let index = self.contents.index();
        let margin = index.capacity() / INDEX_MARGIN;
        index.len() + margin >= index.capacity() && index.len() > self.contents.dirty().blocks()
    }

    /// The blocks of the least wanted unit, of some chosen at random, in slots of a class.
    fn victim(&mut self, class: usize) -> Option<Vec<(Key, Place)>> {
        let mut sample = self.sample(Some(class));
        let mut in_ram = None;
        while !sample.blocks.is_empty() {
            let at = self.policy.victim(&sample.candidates);
            let (key, place) = sample.blocks[at];
            sample.remove(at);
            let unit = self.unit_of(key, &place);
            if !self.may_leave(&unit) {
                continue;
            }
            if !unit.iter().any(|(key, _)| self.ram.contains(*key)) {
                return Some(unit);
            }
            // RAM counts as recent, and what it holds would soon be written again.
            self.note_store_hit(&place);
            in_ram.get_or_insert(unit);
        }
        if in_ram.is_some() {
            self.ram.alone().note();
        }
        in_ram
    }

    /// Clean blocks of the store chosen at random, in slots of a class or of any.
    fn sample(&mut self, class: Option<usize>) -> Sample {
        let random = self.store.random();
        let mut sample = Sample::new();
        let (pages, index) = self.contents.pages_and_index();
        for (key, place) in index.sample(random, EVICT_SAMPLE * 4) {
            if place.dirty || !pages.has(&place) {
                continue;
            }
            let Some(slot) = self.store.slot_of(pages.of(&place).start) else { continue };
            if self.pins.has(key) {
                continue;
            }
            if class.is_some_and(|class| slot.len() != class) {
                continue;
            }
            let last = pages.last(slot.start);
            sample.candidates.push(candidate(key.0..key.0 + 1, last));
            sample.blocks.push((key, place));
            if sample.blocks.len() == EVICT_SAMPLE {
                break;
            }
        }
        sample
    }

    /// Whether the blocks of a unit are clean and not pinned, and nothing but its blocks needs it.
    fn may_leave(&self, unit: &[(Key, Place)]) -> bool {
        let free = |(key, place): &(Key, Place)| {
            !place.dirty && !self.pins.has(*key) && !self.log.builder_ref().has_entry_of(*key)
        };
        unit.iter().all(free)
    }

    /// The neighbors of a block in the same slot, and itself.
    fn unit_of(&self, key: Key, place: &Place) -> Vec<(Key, Place)> {
        let (pages, index) = self.contents.pages_and_index();
        let slot = self.store.slot_of(pages.of(place).start);
        let near = key.0.saturating_sub(UNIT_BLOCKS - 1)..key.0 + UNIT_BLOCKS;
        let found = near.map(Key).filter_map(|key| index.get(key).map(|place| (key, place)));
        found
            .filter(|(_, other)| {
                pages.has(other) && self.store.slot_of(pages.of(other).start) == slot
            })
            .collect()
    }

    /// Whether clean blocks, which are not in the store, are worth a place there. The first few of
    /// `keys` count.
    pub(crate) fn deserve_store(&mut self, keys: Range<u64>, last: LastTouch) -> bool {
        let plenty = self.pins.has_any(keys.clone())
            || self.store.free_pages() > u64::from(self.store.pages()) / PLENTY;
        if plenty {
            return true;
        }
        let mut sample = self.sample(None);
        sample.candidates.push(candidate(keys, last));
        let newest = sample.candidates.len() - 1;
        newest == 0 || self.policy.victim(&sample.candidates) != newest
    }

    /// The last request for any of some blocks of the log, with these metadata.
    pub(crate) fn last_of(&self, metas: impl Iterator<Item = u8>) -> Option<LastTouch> {
        let now = self.policy.stamp();
        let lasts = metas.map(|meta| LastTouch::from_meta(meta, now));
        lasts.min_by_key(|last| now.wrapping_sub(last.stamp))
    }

    /// Notes a hit of a block, in RAM or in a log without store.
    pub(crate) fn note_hit(&mut self, key: Key) {
        let policy = &self.policy;
        if policy.notes_hits() {
            self.contents.update_meta(key, |meta| policy.hit(meta));
        }
    }

    /// Notes a hit of a block on the cache device.
    pub(crate) fn note_device_hit(&mut self, key: Key, place: &Place) {
        if !self.store.exists() {
            self.note_hit(key);
        } else if self.contents.is_in_store(place) {
            self.note_store_hit(place);
        } else {
            let last = LastTouch::from_meta(place.meta, self.policy.stamp());
            let meta = self.policy.read_again(last).meta();
            self.contents.update_meta(key, |_| meta);
        }
    }

    /// Notes that a block loses its place in RAM, where it was read: these hits were noted there
    /// only.
    pub(super) fn note_left_ram(&mut self, key: Key) {
        if self.store.exists()
            && let Some(place) = self.contents.get(key)
        {
            self.note_device_hit(key, &place);
        }
    }

    /// Notes a hit of the unit of a place.
    fn note_store_hit(&mut self, place: &Place) {
        let pages = self.contents.pages();
        if let Some(slot) = self.store.slot_of(pages.of(place).start) {
            let last = self.policy.read_again(pages.last(slot.start));
            pages.set_last(slot.start, last);
        }
    }
}

/// The first few of some blocks, as the policy sees them.
fn candidate(keys: Range<u64>, last: LastTouch) -> StoreCandidate {
    let count = (keys.end - keys.start).min(UNIT_BLOCKS);
    StoreCandidate { first: keys.start, blocks: (1 << count) - 1, last }
}
