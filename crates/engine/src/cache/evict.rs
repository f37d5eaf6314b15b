//! Eviction, other than with the oldest segment: of a random sample the unit goes that the policy
//! values least.

use std::ops::Range;

use forebay_block::VolumeId;
use forebay_format::EntryKind;
use forebay_policy::{LastTouch, StoreCandidate};

use crate::api::Effects;
use crate::cache::Cache;
use crate::contents::{Place, UNIT_PAGES_MAX};
use crate::key::Key;
use crate::limits::{EVICT_SAMPLE, EVICTIONS_MAX};
use crate::log::builder::Expect;
use crate::store::UNIT_BLOCKS;

/// One part in this many of the index is kept free, by reclaiming or evicting even when there is
/// room on the device.
const INDEX_MARGIN: u64 = 64;

/// Blocks in the cache that one sample scans.
pub(super) const SCANNED: usize = EVICT_SAMPLE * 4;
/// Samples without a block that no guarantee protects, before one leaves that is protected.
const SPARE_TRIES: usize = 8;

/// Blocks of the cache, each for its unit if it is in the store, among which one is chosen.
pub(super) struct Sample {
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
    /// Evicts units while the index is nearly full, or while there is little room for units of a
    /// length that is sought.
    pub(super) fn evict(&mut self, fx: &mut Effects) {
        let tight = self.index_is_tight();
        let (mut evicted, mut short) = (false, false);
        // Room for a long unit is room for short ones.
        for len in (1..=UNIT_PAGES_MAX).rev() {
            let few = self.store.room_wanted(len);
            let left = self.room_left(len);
            // Many at once, since their records and a flush of the device must follow.
            let lacks = self.store.is_sought(len) && self.store.lacks_room(len, left, few);
            // Room in the store is no use to an index without room.
            let is_for_index = tight && len == 1;
            short |= lacks && left == 0;
            for _ in 0..EVICTIONS_MAX {
                let goes_on = is_for_index || lacks && self.room_left(len) < few;
                let Some(unit) = goes_on.then(|| self.victim(len)).flatten() else { break };
                evicted = true;
                let leaving = self.contents.pages().unit_of(&unit[0].1);
                if !self.push_eviction(unit, fx) {
                    return;
                }
                self.store.note_leaving(leaving.len() as u64);
            }
        }
        // What was freed since the last record waits for the next one, and there may be none.
        let freed = self.contents.pages().freed() > 0 && !self.log.builder_ref().is_empty();
        let coming = self.store.coming() > 0 || freed;
        // Pages on their way are no use to the index; only entries not yet logged are.
        let stuck = tight && self.log.builder_ref().is_empty();
        self.store.note_full(!evicted && (stuck || short && !coming));
    }

    /// The number of units of `len` pages for which there is room, or will be.
    fn room_left(&mut self, len: usize) -> u64 {
        let coming = self.store.coming() + self.contents.pages().freed() as u64;
        self.store.room_for(len) + coming / len as u64
    }

    /// Says in the log that blocks leave the cache. Returns false if there is no room now.
    pub(super) fn push_eviction(&mut self, unit: Vec<(Key, Place)>, fx: &mut Effects) -> bool {
        for (key, place) in unit {
            let (kind, expect) = (EntryKind::Invalidate, Expect::At(place));
            if !self.push_bare(fx, key, 1, kind, false, expect) {
                return false;
            }
            self.stats.evicted_blocks += 1;
            self.log.raise_barrier();
            self.shares.note_leaving(key.volume());
        }
        true
    }

    /// Whether the index is nearly full and has clean blocks to evict.
    pub(crate) fn index_is_tight(&self) -> bool {
        let index = self.contents.index();
        index.len() + self.index_margin() >= index.capacity()
            && index.len() > self.contents.dirty().blocks()
    }

    /// Number of blocks for which the index should have room.
    pub(crate) fn index_margin(&self) -> u64 {
        self.contents.index().capacity() / INDEX_MARGIN
    }

    /// The least wanted unit of some chosen at random, to make room for one of `len` pages. While
    /// many pages are free, but in runs that are too short, it is one that leaves a run long
    /// enough, or nearly so. If it can, it is one that no guarantee protects.
    fn victim(&mut self, len: usize) -> Option<Vec<(Key, Place)>> {
        let most = if self.store.is_scattered() { len } else { 1 };
        let spared = self.has_guarantee().then_some((true, SPARE_TRIES));
        for (spares, tries) in spared.into_iter().chain([(false, 1)]) {
            for least in (1..=most).rev() {
                let is_meant = |cache: &Self, volume, unit: Option<&Range<u32>>| {
                    unit.is_some_and(|unit| cache.leaves_run(unit, least))
                        && !(spares && cache.guards(volume, 1))
                };
                for _ in 0..tries {
                    let sample = self.sample(SCANNED, is_meant);
                    if let Some(unit) = self.least_wanted(sample, spares) {
                        return Some(unit);
                    }
                }
            }
        }
        None
    }

    /// Whether the pages of a unit will be part of a run of at least `len` pages.
    fn leaves_run(&self, unit: &Range<u32>, len: usize) -> bool {
        let pages = self.contents.pages_and_index().0;
        unit.len() >= len || pages.free_with(unit).len() >= len
    }

    /// The blocks of the least wanted unit of a sample; if `spares`, not one that the guarantee of
    /// its volume protects.
    pub(super) fn least_wanted(
        &mut self,
        mut sample: Sample,
        spares: bool,
    ) -> Option<Vec<(Key, Place)>> {
        let mut in_ram = None;
        while !sample.blocks.is_empty() {
            let at = self.policy.victim(&sample.candidates);
            let (key, place) = sample.blocks[at];
            sample.remove(at);
            let unit = self.unit_of(key, &place);
            let is_spare = !spares || !self.guards(key.volume(), unit.len() as u64);
            if !is_spare || !self.may_leave(&unit) {
                continue;
            }
            if !unit.iter().any(|(key, _)| self.ram.contains(*key)) {
                return Some(unit);
            }
            // RAM counts as recent, and what it holds would soon be written again.
            self.note_device_hit(key, &place);
            in_ram.get_or_insert(unit);
        }
        // This asks for no round over RAM, which would bring the unit back. If RAM has all that the
        // device has, blocks would displace each other forever.
        in_ram
    }

    /// Clean blocks that are not pinned, chosen at random, of `scanned` blocks in the cache: of
    /// those that `is_meant` accepts, by volume and, in the store, the pages of the unit.
    pub(super) fn sample(
        &mut self,
        scanned: usize,
        is_meant: impl Fn(&Self, VolumeId, Option<&Range<u32>>) -> bool,
    ) -> Sample {
        let random = self.store.random();
        let mut sample = Sample::new();
        let (pages, index) = self.contents.pages_and_index();
        for (key, place) in index.sample(random, scanned) {
            let in_store = pages.has(&place);
            let unit = in_store.then(|| pages.unit_of(&place));
            if place.dirty || self.pins.has(key) || !is_meant(self, key.volume(), unit.as_ref()) {
                continue;
            }
            let in_log = || LastTouch::from_meta(place.meta, self.policy.stamp());
            let last = unit.map_or_else(in_log, |unit| pages.last(unit.start));
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

    /// The blocks of the unit of a block. In the log it is alone.
    pub(crate) fn unit_of(&self, key: Key, place: &Place) -> Vec<(Key, Place)> {
        if !self.contents.is_in_store(place) {
            return vec![(key, *place)];
        }
        let near = key.0.saturating_sub(UNIT_BLOCKS - 1)..key.0 + UNIT_BLOCKS;
        self.unit_among(&self.blocks_in_store(near), key, place)
    }

    /// Those of some blocks in the store that are in the unit of one of them. Equal blocks further
    /// away may share a payload of the unit, but do not belong to it.
    pub(crate) fn unit_among(
        &self,
        blocks: &[(Key, Place)],
        key: Key,
        place: &Place,
    ) -> Vec<(Key, Place)> {
        let pages = self.contents.pages_and_index().0;
        let unit = pages.unit_of(place);
        let is_in_unit = |(other, place): &&(Key, Place)| {
            other.0.abs_diff(key.0) < UNIT_BLOCKS && unit.contains(&pages.of(place).start)
        };
        blocks.iter().filter(is_in_unit).copied().collect()
    }

    /// The blocks of a short range of keys that are in the store.
    pub(crate) fn blocks_in_store(&self, keys: Range<u64>) -> Vec<(Key, Place)> {
        self.warm_index(keys.clone().map(Key));
        let found = keys.map(Key).filter_map(|key| Some((key, self.contents.get(key)?)));
        found.filter(|(_, place)| self.contents.is_in_store(place)).collect()
    }

    /// Whether clean blocks, which are not in the store, are worth a place there. The first few of
    /// `keys` count.
    pub(crate) fn deserve_store(&mut self, keys: Range<u64>, last: LastTouch) -> bool {
        if self.store.has_plenty() || self.pins.has_any(keys.clone()) {
            return true;
        }
        let own = Key(keys.start).volume();
        // A volume may displace its own blocks below its guarantee.
        let is_rival = |cache: &Self, volume, unit: Option<&_>| {
            unit.is_some() && (volume == own || !cache.guards(volume, 1))
        };
        let sample = self.sample(SCANNED, is_rival);
        self.displace(sample, keys, last) != Some(false)
    }

    /// Whether blocks that ask to enter are worth more than the least wanted block of a sample;
    /// `None` if the sample is empty.
    pub(super) fn displace(
        &mut self,
        mut sample: Sample,
        keys: Range<u64>,
        last: LastTouch,
    ) -> Option<bool> {
        let newest = sample.candidates.len();
        sample.candidates.push(candidate(keys, last));
        (newest > 0).then(|| self.policy.victim(&sample.candidates) != newest)
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
        let start = pages.unit_of(place).start;
        let last = self.policy.read_again(pages.last(start));
        pages.set_last(start, last);
    }
}

/// The first few of some blocks, as the policy sees them.
fn candidate(keys: Range<u64>, last: LastTouch) -> StoreCandidate {
    let count = (keys.end - keys.start).min(UNIT_BLOCKS);
    StoreCandidate { first: keys.start, blocks: (1 << count) - 1, last }
}
