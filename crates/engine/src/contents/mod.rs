//! The contents of the cache: the place of each block and its base, the dirty blocks, the blocks
//! that cannot be read back, and the number of blocks in each segment that are still needed.
//!
//! This is the only place where a block becomes cached, clean, fenced or forgotten. Each method
//! leaves index, bases, dirty set and the counts of segments consistent with each other, as
//! [`Contents::check`] verifies.

mod base;
mod check;
mod dirty;
mod fenced;
mod index;
mod loading;
mod pages;
mod sharing;

use std::collections::BTreeMap;
use std::ops::Range;

use forebay_block::{Instant, STRIPE_BLOCKS, VolumeId};
use forebay_format::{EntryKind, SegmentSeq};

use base::Base;
pub use base::{base_key, block_of};
pub use dirty::{Bits, DIRTY_STRIPE_BYTES, Dirty};
pub use fenced::Fenced;
pub use index::{Index, Place, SEGMENT_BYTES_MAX, SEGMENTS_MAX, blocks_in, bytes_for};
use loading::Loading;
pub use pages::{Pages, UNIT_PAGES_MAX};
use sharing::Sharing;

use crate::key::{Key, KeyMap, LargeMap};
use crate::limits::{FREED_ROOM, step};
use crate::ram::Ram;

/// A version of a block.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// The block.
    pub key: Key,
    /// Place of the version.
    pub place: Place,
}

/// The contents of one shard's cache.
pub struct Contents {
    index: Index,
    /// The bases of blocks that are not stored whole.
    bases: LargeMap<Base>,
    dirty: Dirty,
    /// Blocks that cannot be read back; all of them are dirty.
    fenced: Fenced,
    /// Dirty blocks that go to the primary alone, and when to try those again that could not go.
    immovable: BTreeMap<Key, Option<Instant>>,
    sharing: Sharing,
    /// Indexed by position: the segments of the log, then the extents of the store.
    segments: Vec<Segment>,
    /// The number of segments in the log.
    log_segments: usize,
    pages: Pages,
    /// Pages of an extent.
    extent_pages: usize,
    /// Dirty blocks, and bases of dirty blocks, in the store.
    dirty_in_store: u64,
    /// Blocks that have left the cache, and no entry of the log says so yet.
    unlogged: Vec<Key>,
    /// Clean blocks of the store that no entry of the log names yet.
    unnamed: KeyMap<()>,
    /// Dirty blocks by segment and volume; empty if there is only one volume.
    dirty_of: Vec<u32>,
    volumes: usize,
    /// The number of blocks of each volume.
    held: Vec<u64>,
    /// No segment before this one has a dirty block.
    dirty_floor: SegmentSeq,
    /// Total length of the payloads of newest versions and their bases, in bytes.
    payload_bytes: u64,
    /// The number of these payloads, indexed by kind.
    stored: [u64; EntryKind::NUMBERS],
    /// While a part of the log has not been applied.
    loading: Option<Box<Loading>>,
    /// What [`Contents::give_up`] has left to be freed.
    given_up: Option<Box<GivenUp>>,
}

/// Contents that nothing needs any more. All of a large cache's memory takes long to free.
struct GivenUp {
    index: Index,
    bases: LargeMap<Base>,
    settled: LargeMap<()>,
    /// The number of segments whose sharers are forgotten.
    segments: usize,
}

/// Segments whose sharers are forgotten in one turn.
const GIVEN_UP_SEGMENTS: usize = step(1024);

/// The number of every extent of the store, in place of a segment's number in the log: the blocks
/// of the store are as old as the entries that name them, which move forward in the log.
pub const IN_STORE: SegmentSeq = SegmentSeq(u64::MAX);

/// The part of a segment that is still needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Segment {
    /// Number of the segment in the log.
    seq: SegmentSeq,
    /// Number of blocks whose newest version, or its base, is in the segment.
    live: u32,
    /// Number of these blocks that are dirty.
    dirty: u32,
}

impl Contents {
    /// Returns empty contents with room for `blocks` blocks, in `segments` segments, of `volumes`
    /// volumes.
    pub fn new(blocks: u64, segments: usize, volumes: usize) -> Self {
        let rows = if volumes > 1 { segments } else { 0 };
        Self {
            index: Index::new(blocks),
            bases: LargeMap::default(),
            dirty: Dirty::default(),
            fenced: Fenced::default(),
            immovable: BTreeMap::new(),
            sharing: Sharing::new(segments),
            segments: vec![Segment::default(); segments],
            log_segments: segments,
            pages: Pages::default(),
            extent_pages: 0,
            dirty_in_store: 0,
            unlogged: Vec::new(),
            unnamed: KeyMap::default(),
            dirty_of: vec![0; rows * volumes],
            volumes,
            held: vec![0; volumes],
            dirty_floor: SegmentSeq(1),
            payload_bytes: 0,
            stored: [0; EntryKind::NUMBERS],
            loading: None,
            given_up: None,
        }
    }

    /// Adds a store of `extents` extents, of `pages` pages each, to empty contents.
    pub fn add_store(&mut self, extents: usize, pages: usize) {
        self.pages = Pages::new(self.log_segments, extents, pages);
        self.extent_pages = pages;
        let extent = Segment { seq: IN_STORE, ..Segment::default() };
        self.segments.resize(self.log_segments + extents, extent);
        self.sharing = Sharing::new(self.segments.len());
        let rows = if self.volumes > 1 { self.segments.len() } else { 0 };
        self.dirty_of = vec![0; rows * self.volumes];
    }

    /// Prepares empty contents for about `blocks` blocks.
    pub fn reserve(&mut self, blocks: u64) {
        self.index.reserve(blocks);
    }

    /// Empties the contents and makes room for `blocks` blocks. The units of volumes stay.
    pub fn clear(&mut self, blocks: u64) {
        let mut fresh = Self::new(1, self.log_segments, self.volumes);
        let extents = self.segments.len() - self.log_segments;
        fresh.add_store(extents, self.extent_pages);
        fresh.dirty = self.dirty.emptied();
        let empty = std::mem::replace(self, fresh).index;
        let reusable = empty.len() == 0 && empty.capacity() == blocks;
        self.index = if reusable { empty } else { Index::new(blocks) };
    }

    /// Drops everything: the cache device is out of use, and no block is dirty. The memory is freed
    /// over many turns, by [`Contents::drop_given_up`]. The pages stay: reads in flight hold some.
    pub fn give_up(&mut self) {
        assert_eq!(self.dirty.blocks(), 0, "dirty blocks are on the primary first");
        let index = std::mem::replace(&mut self.index, Index::new(1));
        let bases = std::mem::take(&mut self.bases);
        let settled = self.loading.take().map(|loading| loading.settled).unwrap_or_default();
        self.given_up = Some(Box::new(GivenUp { index, bases, settled, segments: 0 }));
        // The counts of dirty blocks are zero, and those by volume are many.
        self.segments.iter_mut().for_each(|segment| segment.live = 0);
        self.held.fill(0);
        self.fenced = Fenced::default();
        self.immovable.clear();
        self.sharing.forget_unsettled();
        self.unlogged.clear();
        self.unnamed.clear();
        (self.payload_bytes, self.stored) = (0, [0; EntryKind::NUMBERS]);
        (self.dirty_in_store, self.dirty_floor) = (0, SegmentSeq(1));
    }

    /// Frees some more of what was given up.
    pub fn drop_given_up(&mut self) {
        let Some(given_up) = &mut self.given_up else { return };
        let GivenUp { index, bases, settled, .. } = &mut **given_up;
        if !index.drop_piece() && !bases.drop_parts(FREED_ROOM) && !settled.drop_parts(FREED_ROOM) {
            let first = given_up.segments;
            given_up.segments = self.segments.len().min(first + GIVEN_UP_SEGMENTS);
            let segments = first..given_up.segments;
            if segments.end == self.segments.len() {
                self.given_up = None;
            }
            segments.for_each(|index| self.drop_sharers(index));
        }
    }

    /// Whether there is more of it.
    pub fn has_given_up(&self) -> bool {
        self.given_up.is_some()
    }

    /// The place of a block's newest version, if it is cached and settled.
    pub fn get(&self, key: Key) -> Option<Place> {
        self.index.get(key).filter(|_| self.is_visible(key))
    }

    /// The place of a block's newest version, if that is still the same version as `place`.
    pub fn same_version(&self, key: Key, place: &Place) -> Option<Place> {
        self.get(key).filter(|now| now.is_same_version(place))
    }

    /// The clean blocks.
    pub fn clean(&self) -> Vec<Key> {
        self.index.iter().filter(|(_, place)| !place.dirty).map(|(key, _)| key).collect()
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The dirty blocks.
    pub fn dirty(&self) -> &Dirty {
        &self.dirty
    }

    /// The blocks that cannot be read back.
    pub fn fenced(&self) -> &Fenced {
        &self.fenced
    }

    /// Number of blocks of a volume, clean and dirty.
    pub fn held_by(&self, volume: VolumeId) -> u64 {
        self.held[usize::from(volume.0)]
    }

    /// Whether a stripe has a dirty block that can be read back.
    pub fn is_any_readable(&self, stripe: u64) -> bool {
        let (dirty, _) = self.dirty.in_stripe(stripe);
        let mut blocks = (0..STRIPE_BLOCKS).filter(|&at| dirty.get(at));
        blocks.any(|at| !self.fenced.contains(&Key(stripe * STRIPE_BLOCKS + at)))
    }

    /// Number of dirty blocks that can be destaged. Blocks that cannot be read back must not hold
    /// up writes forever.
    pub fn dirty_level(&self) -> u64 {
        self.dirty.blocks() - self.fenced.len() as u64
    }

    /// Number of dirty blocks of a volume that can be destaged.
    pub fn dirty_level_of(&self, volume: VolumeId) -> u64 {
        self.dirty.blocks_of(volume) - self.fenced.of_volume(volume)
    }

    /// The fewest stripes of a volume that have these blocks.
    pub fn dirty_stripes_of(&self, volume: VolumeId) -> u64 {
        self.dirty.stripes_of(volume).saturating_sub(self.fenced.of_volume(volume))
    }

    /// Number of blocks whose newest version, or its base, is in the segment at a position.
    pub fn live_in(&self, index: usize) -> u32 {
        self.segments[index].live
    }

    /// Number of these blocks that are dirty.
    pub fn dirty_in(&self, index: usize) -> u32 {
        self.segments[index].dirty
    }

    /// Number of these blocks that are dirty and belong to a volume.
    pub fn dirty_of(&self, index: usize, volume: VolumeId) -> u32 {
        match self.volumes {
            1 => self.segments[index].dirty,
            volumes => self.dirty_of[index * volumes + usize::from(volume.0)],
        }
    }

    /// Total length of the payloads of newest versions and their bases, in bytes.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The number of these payloads of one kind.
    pub fn stored(&self, kind: EntryKind) -> u64 {
        self.stored[kind as usize]
    }

    /// Begins an empty segment at a position.
    pub fn begin_segment(&mut self, index: usize, seq: SegmentSeq) {
        assert!(self.sharers_in(index).is_empty(), "a free segment");
        let segment = &mut self.segments[index];
        assert_eq!((segment.live, segment.dirty), (0, 0), "a free segment");
        segment.seq = seq;
    }

    /// Sets the segment before which no segment has a dirty block.
    pub fn set_dirty_floor(&mut self, seq: SegmentSeq) {
        self.dirty_floor = seq;
    }

    /// The oldest segment before `end` with a dirty block, or a base of one.
    pub fn oldest_dirty(&mut self, end: SegmentSeq) -> Option<SegmentSeq> {
        while self.dirty_floor < end {
            let at = (self.dirty_floor.0 % self.log_segments as u64) as usize;
            let segment = &self.segments[at];
            if segment.seq == self.dirty_floor && segment.dirty > 0 {
                return Some(segment.seq);
            }
            self.dirty_floor = self.dirty_floor.next();
        }
        None
    }
}

/// Changes; each leaves all parts consistent.
impl Contents {
    /// Makes `place` the newest version of a block at `now`, written by a client or copied.
    /// `against` is the base of a similar block. A base that is no longer needed leaves RAM.
    pub fn place(
        &mut self,
        now: Instant,
        key: Key,
        place: Place,
        against: Option<Place>,
        by_client: bool,
        ram: &mut Ram,
    ) {
        self.note_named(key);
        let was = self.index.insert(key, place);
        self.count_in(key, &place);
        match was {
            Some(was) if place.kind == EntryKind::Delta && was.kind.is_whole() => {
                self.bases.insert(key, Base { place: was, of_another: false });
            }
            Some(was) => self.count_out(key, &was),
            None => self.held[usize::from(key.volume().0)] += 1,
        }
        if place.kind != EntryKind::Delta {
            self.release_base(key, ram);
        }
        if let Some(base) = against {
            self.segments[base.segment as usize].live += 1;
            let place = Place { dirty: false, ..base };
            self.bases.insert(key, Base { place, of_another: true });
        }
        self.set_base_dirty(key, place.dirty);
        self.forget_immovable(key);
        if place.dirty {
            // A copy forward keeps its age; a rewrite gets the age of its stripe.
            self.dirty.insert(now, key, by_client);
        } else if was.is_some_and(|was| was.dirty) {
            self.dirty.remove(key);
        }
        if place.kind == EntryKind::Lost && place.dirty {
            self.fenced.insert(key);
        } else if !self.fenced.is_empty() {
            // A block of the store that is named again still cannot be read back.
            let same = was.is_some_and(|was| was.is_same_version(&place));
            if by_client || !place.dirty || !same {
                self.fenced.remove(&key);
            }
        }
    }

    /// Puts a missed block into the store, at `place`, before an entry of the log names it.
    pub fn place_unnamed(&mut self, now: Instant, key: Key, place: Place, ram: &mut Ram) {
        assert!(!place.dirty && self.pages.has(&place), "a missed block of the store");
        self.place(now, key, place, None, false, ram);
        self.unnamed.insert(key, ());
    }

    /// Whether a block of the store is not named by the log yet: nothing may rest on it.
    pub fn is_unnamed(&self, key: Key) -> bool {
        self.unnamed.contains_key(&key)
    }

    /// Notes that an entry names a block's place in the store, and changes nothing.
    pub fn note_named(&mut self, key: Key) {
        self.settle_block(key);
        if !self.unnamed.is_empty() {
            self.unnamed.remove(&key);
        }
    }

    /// Removes a block from the cache.
    pub fn forget(&mut self, key: Key, ram: &mut Ram) {
        self.note_named(key);
        if let Some(was) = self.index.remove(key) {
            self.held[usize::from(key.volume().0)] -= 1;
            self.count_out(key, &was);
            if was.dirty {
                self.dirty.remove(key);
            }
            self.release_base(key, ram);
        }
        self.fenced.remove(&key);
        self.forget_immovable(key);
    }

    /// Notes that the primary has the newest version of a dirty block. If the cache has lost it
    /// meanwhile, it leaves the cache, and an entry of the log must say so:
    /// [`Contents::take_unlogged`].
    pub fn mark_clean(&mut self, key: Key, ram: &mut Ram) {
        let place = self.index.get(key).expect("a dirty block is cached");
        if place.kind == EntryKind::Lost {
            self.forget(key, ram);
            self.unlogged.push(key);
            return;
        }
        self.count_dirty(place.segment, key.volume(), true, false);
        self.index.update(key, |place| place.dirty = false);
        self.set_base_dirty(key, false);
        self.dirty.remove(key);
        // A reader may have found the cached copy corrupt in the meantime; the primary has it now.
        self.fenced.remove(&key);
        self.forget_immovable(key);
    }

    /// Notes that a dirty block cannot be read back; returns whether that is new.
    pub fn fence(&mut self, key: Key) -> bool {
        self.fenced.insert(key)
    }

    /// Changes the eviction policy's bits of a block.
    pub fn update_meta(&mut self, key: Key, change: impl FnOnce(u8) -> u8) {
        self.index.update(key, |place| place.meta = change(place.meta));
    }

    /// Sets the number of blocks of a full stripe of a primary: see [`Dirty::set_unit`].
    pub fn set_unit(&mut self, volume: VolumeId, unit: u64) {
        self.dirty.set_unit(volume, unit);
    }

    /// The next dirty block to destage: see [`Dirty::next_from`].
    pub fn next_dirty(
        &mut self,
        range: Range<Key>,
        stripes_max: usize,
        spare_after: Instant,
    ) -> Result<Key, Option<Key>> {
        self.dirty.next_from(range, stripes_max, spare_after)
    }

    /// Notes that a dirty block is on its way to the primary.
    pub fn begin_destaging(&mut self, key: Key) {
        self.dirty.begin_destaging(key);
    }

    /// Notes that a block is no longer on its way to the primary: see [`Dirty::end_destaging`].
    pub fn end_destaging(&mut self, key: Key, started: Option<Instant>) {
        self.dirty.end_destaging(key, started);
    }

    /// Notes that a dirty block could not go to the primary, by its own fault: it goes alone from
    /// now on, and not before `until`.
    pub fn note_immovable(&mut self, key: Key, until: Instant) {
        self.immovable.insert(key, Some(until));
    }

    /// Notes that a dirty block was among those of which one could not go to the primary: it goes
    /// alone from now on.
    pub fn isolate(&mut self, key: Key) {
        self.immovable.entry(key).or_default();
    }

    /// Whether a dirty block goes to the primary without its neighbors.
    pub fn goes_alone(&self, key: Key) -> bool {
        !self.immovable.is_empty() && self.immovable.contains_key(&key)
    }

    /// The time before which a block is not retried that could not go to the primary.
    pub fn immovable_until(&self, key: Key) -> Option<Instant> {
        self.immovable.get(&key).copied().flatten()
    }

    /// Whether a dirty block could not go to the primary, by its own fault, when that was last
    /// tried.
    pub fn has_failed(&self, key: Key) -> bool {
        self.fenced.contains(&key) || self.immovable_until(key).is_some()
    }

    /// Forgets which blocks could not go to the primary.
    pub fn forget_all_immovable(&mut self) {
        self.immovable.clear();
    }

    fn forget_immovable(&mut self, key: Key) {
        if !self.immovable.is_empty() {
            self.immovable.remove(&key);
        }
    }

    /// Removes a block from the cache, although no entry of the log says so. If it was in the
    /// store, such an entry must follow: [`Contents::take_unlogged`].
    pub fn drop(&mut self, key: Key, ram: &mut Ram) {
        let roots = [self.get(key), self.bases.get(&key).map(|base| base.place)];
        let in_store = roots.iter().flatten().any(|place| self.pages.has(place));
        self.forget(key, ram);
        if in_store {
            self.unlogged.push(key);
        }
    }

    /// Takes a block that has left the cache, as an entry of the log must say.
    pub fn take_unlogged(&mut self) -> Option<Key> {
        self.unlogged.pop()
    }

    /// Whether there is such a block.
    pub fn has_unlogged(&self) -> bool {
        !self.unlogged.is_empty()
    }

    /// Whether a place is in the store.
    pub fn is_in_store(&self, place: &Place) -> bool {
        self.pages.has(place)
    }

    /// Whether a block in the store, or a base there, is dirty.
    pub fn has_dirty_in_store(&self) -> bool {
        self.dirty_in_store > 0
    }

    /// The pages of the store.
    pub fn pages(&mut self) -> &mut Pages {
        &mut self.pages
    }

    /// The pages of the store, with the index.
    pub fn pages_and_index(&self) -> (&Pages, &Index) {
        (&self.pages, &self.index)
    }

    fn count_in(&mut self, key: Key, place: &Place) {
        self.pages.hold_place(place);
        self.segments[place.segment as usize].live += 1;
        self.count_dirty(place.segment, key.volume(), false, place.dirty);
        self.stored[place.kind as usize] += 1;
        self.payload_bytes += u64::from(place.len);
    }

    fn count_out(&mut self, key: Key, place: &Place) {
        match self.is_applying() {
            true => self.pages.end_place(place),
            false => self.pages.leave_place(place),
        }
        self.segments[place.segment as usize].live -= 1;
        self.count_dirty(place.segment, key.volume(), place.dirty, false);
        self.stored[place.kind as usize] -= 1;
        self.payload_bytes -= u64::from(place.len);
    }

    /// Updates the dirty counts of a segment and a volume for a block that was or is dirty.
    fn count_dirty(&mut self, index: u32, volume: VolumeId, was: bool, is: bool) {
        let index = index as usize;
        let segment = &mut self.segments[index];
        if is {
            self.dirty_floor = self.dirty_floor.min(segment.seq);
        }
        segment.dirty = segment.dirty + u32::from(is) - u32::from(was);
        if index >= self.log_segments {
            self.dirty_in_store = self.dirty_in_store + u64::from(is) - u64::from(was);
        }
        if self.volumes > 1 {
            let own = &mut self.dirty_of[index * self.volumes + usize::from(volume.0)];
            *own = *own + u32::from(is) - u32::from(was);
        }
    }
}

#[cfg(test)]
mod tests;
