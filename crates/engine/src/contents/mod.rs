//! What is cached: where each block lies, what it is stored against, which blocks are dirty, which
//! cannot be read back, and how much of each segment is still needed.
//!
//! This is the only place where a block becomes cached, clean, fenced or forgotten: each method
//! leaves index, bases, dirty set and the counts of segments consistent with each other, as
//! [`Contents::check`] verifies.

mod base;
mod check;
mod dirty;
mod fenced;
mod index;
mod sharing;

use std::collections::BTreeMap;
use std::ops::Range;

use forebay_block::{Instant, VolumeId};
use forebay_format::{EntryKind, SegmentSeq};

use base::Base;
pub use base::{base_key, block_of};
pub use dirty::{Bits, Dirty};
pub use fenced::Fenced;
pub use index::{Index, Place, SEGMENT_BYTES_MAX, SEGMENTS_MAX, blocks_in, bytes_for};
use sharing::Sharing;

use crate::key::{Key, KeyMap};
use crate::ram::Ram;

/// A version of a block.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// The block.
    pub key: Key,
    /// Where the version lies.
    pub place: Place,
}

/// What is cached in one shard.
pub struct Contents {
    index: Index,
    /// What the blocks are stored against that are not stored whole.
    bases: KeyMap<Base>,
    dirty: Dirty,
    /// Blocks that cannot be read back: all of them are dirty.
    fenced: Fenced,
    /// Dirty blocks that could not be read back from a failed device, and when to try again.
    unreadable: BTreeMap<Key, Instant>,
    sharing: Sharing,
    /// By position.
    segments: Vec<Segment>,
    /// Dirty blocks by segment and volume, where there are several volumes.
    dirty_of: Vec<u32>,
    volumes: usize,
    /// No segment before this one has a dirty block.
    dirty_floor: SegmentSeq,
    /// Bytes of the payloads that are blocks' newest versions, or bases of those.
    payload_bytes: u64,
    /// The number of these payloads of each kind, by its number.
    stored: [u64; EntryKind::NUMBERS],
}

/// What is needed of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Segment {
    /// Its number in the log.
    seq: SegmentSeq,
    /// Blocks whose newest version, or its base, lies in it.
    live: u32,
    /// Those of them that are dirty.
    dirty: u32,
}

impl Contents {
    /// Nothing is cached; room for `blocks` blocks in `segments` segments, of `volumes` volumes.
    pub fn new(blocks: u64, segments: usize, volumes: usize) -> Self {
        let rows = if volumes > 1 { segments } else { 0 };
        Self {
            index: Index::new(blocks),
            bases: KeyMap::default(),
            dirty: Dirty::default(),
            fenced: Fenced::default(),
            unreadable: BTreeMap::new(),
            sharing: Sharing::new(segments),
            segments: vec![Segment::default(); segments],
            dirty_of: vec![0; rows * volumes],
            volumes,
            dirty_floor: SegmentSeq(1),
            payload_bytes: 0,
            stored: [0; EntryKind::NUMBERS],
        }
    }

    /// The same with nothing cached, and room for `blocks` blocks.
    pub fn clear(&mut self, blocks: u64) {
        let empty = std::mem::replace(self, Self::new(1, self.segments.len(), self.volumes)).index;
        let reusable = empty.len() == 0 && empty.capacity() == blocks;
        self.index = if reusable { empty } else { Index::new(blocks) };
    }

    /// The cache device is out of use: nothing lies there, and no block is dirty.
    pub fn give_up(&mut self) {
        assert_eq!(self.dirty.blocks(), 0, "dirty blocks are on the primary first");
        let dirty = std::mem::take(&mut self.dirty);
        self.clear(1);
        self.dirty = dirty;
    }

    /// Where a block's newest version lies.
    pub fn get(&self, key: Key) -> Option<Place> {
        self.index.get(key)
    }

    /// Where it lies, if that is still this version.
    pub fn same_version(&self, key: Key, place: &Place) -> Option<Place> {
        self.index.get(key).filter(|now| now.is_same_version(place))
    }

    /// The clean blocks.
    pub fn clean(&self) -> Vec<Key> {
        self.index.iter().filter(|(_, place)| !place.dirty).map(|(key, _)| key).collect()
    }

    /// Where every block lies.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Which blocks are dirty.
    pub fn dirty(&self) -> &Dirty {
        &self.dirty
    }

    /// Which blocks cannot be read back.
    pub fn fenced(&self) -> &Fenced {
        &self.fenced
    }

    /// Dirty blocks that destaging can do something about: what cannot be read back any more must
    /// not hold up writes for ever.
    pub fn dirty_level(&self) -> u64 {
        self.dirty.blocks() - self.fenced.len() as u64
    }

    /// The same of one volume.
    pub fn dirty_level_of(&self, volume: VolumeId) -> u64 {
        self.dirty.blocks_of(volume) - self.fenced.of_volume(volume)
    }

    /// Blocks whose newest version, or its base, lies in the segment at a position.
    pub fn live_in(&self, index: usize) -> u32 {
        self.segments[index].live
    }

    /// Those of them that are dirty.
    pub fn dirty_in(&self, index: usize) -> u32 {
        self.segments[index].dirty
    }

    /// The same of one volume.
    pub fn dirty_of(&self, index: usize, volume: VolumeId) -> u32 {
        match self.volumes {
            1 => self.segments[index].dirty,
            volumes => self.dirty_of[index * volumes + usize::from(volume.0)],
        }
    }

    /// Bytes of the payloads that are blocks' newest versions, or bases of those.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The number of these payloads of a kind.
    pub fn stored(&self, kind: EntryKind) -> u64 {
        self.stored[kind as usize]
    }

    /// A segment begins at a position: nothing is there yet.
    pub fn begin_segment(&mut self, index: usize, seq: SegmentSeq) {
        assert!(self.sharers_in(index).is_empty(), "a free segment");
        let segment = &mut self.segments[index];
        assert_eq!((segment.live, segment.dirty), (0, 0), "a free segment");
        segment.seq = seq;
    }

    /// No segment before this one has a dirty block.
    pub fn set_dirty_floor(&mut self, seq: SegmentSeq) {
        self.dirty_floor = seq;
    }

    /// The oldest segment before `end` with a dirty block, or a base of one.
    pub fn oldest_dirty(&mut self, end: SegmentSeq) -> Option<SegmentSeq> {
        while self.dirty_floor < end {
            let at = (self.dirty_floor.0 % self.segments.len() as u64) as usize;
            let segment = &self.segments[at];
            if segment.seq == self.dirty_floor && segment.dirty > 0 {
                return Some(segment.seq);
            }
            self.dirty_floor = self.dirty_floor.next();
        }
        None
    }
}

/// What changes.
impl Contents {
    /// Makes `place` the newest version of a block, at `now`: a client's, or a copy; `against` is
    /// what a similar block is stored against. A base that is needed no more leaves RAM.
    pub fn place(
        &mut self,
        now: Instant,
        key: Key,
        place: Place,
        against: Option<Place>,
        by_client: bool,
        ram: &mut Ram,
    ) {
        let was = self.index.insert(key, place);
        self.count_in(key, &place);
        match was {
            Some(was) if place.kind == EntryKind::Delta && was.kind.is_whole() => {
                self.bases.insert(key, Base { place: was, of_another: false });
            }
            Some(was) => self.count_out(key, &was),
            None => {}
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
        if place.dirty {
            // A copy forward keeps its age; a rewrite is as old as its stripe says.
            self.dirty.insert(now, key, by_client);
        } else {
            self.dirty.remove(key);
        }
        if place.kind == EntryKind::Lost && place.dirty {
            self.fenced.insert(key);
        } else if !self.fenced.is_empty() {
            self.fenced.remove(&key);
        }
    }

    /// Takes a block out of the cache.
    pub fn forget(&mut self, key: Key, ram: &mut Ram) {
        if let Some(was) = self.index.remove(key) {
            self.count_out(key, &was);
            if was.dirty {
                self.dirty.remove(key);
            }
            self.release_base(key, ram);
        }
        self.fenced.remove(&key);
        self.forget_unreadable(key);
    }

    /// Notes that the primary has a block's newest version, which lies at `place`.
    pub fn mark_clean(&mut self, key: Key, place: &Place) {
        self.count_dirty(place.segment, key.volume(), true, false);
        self.index.update(key, |place| place.dirty = false);
        self.set_base_dirty(key, false);
        self.dirty.remove(key);
        // A reader may have found its copy here bad meanwhile: the primary has it now.
        self.fenced.remove(&key);
        self.forget_unreadable(key);
    }

    /// Notes that a dirty block cannot be read back; whether that is news.
    pub fn fence(&mut self, key: Key) -> bool {
        self.fenced.insert(key)
    }

    /// Changes what the eviction policy remembers of a block.
    pub fn update_meta(&mut self, key: Key, change: impl FnOnce(u8) -> u8) {
        self.index.update(key, |place| place.meta = change(place.meta));
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

    /// A dirty block is on its way to the primary.
    pub fn begin_destaging(&mut self, key: Key) {
        self.dirty.begin_destaging(key);
    }

    /// It is no more: see [`Dirty::end_destaging`].
    pub fn end_destaging(&mut self, key: Key, started: Option<Instant>) {
        self.dirty.end_destaging(key, started);
    }

    /// A failed device could not read a dirty block back: it is left alone until then.
    pub fn note_unreadable(&mut self, key: Key, until: Instant) {
        self.unreadable.insert(key, until);
    }

    /// Until when a block is left alone that could not be read back.
    pub fn unreadable_until(&self, key: Key) -> Option<Instant> {
        self.unreadable.get(&key).copied()
    }

    fn forget_unreadable(&mut self, key: Key) {
        if !self.unreadable.is_empty() {
            self.unreadable.remove(&key);
        }
    }

    fn count_in(&mut self, key: Key, place: &Place) {
        self.segments[place.segment as usize].live += 1;
        self.count_dirty(place.segment, key.volume(), false, place.dirty);
        self.stored[place.kind as usize] += 1;
        self.payload_bytes += u64::from(place.len);
    }

    fn count_out(&mut self, key: Key, place: &Place) {
        self.segments[place.segment as usize].live -= 1;
        self.count_dirty(place.segment, key.volume(), place.dirty, false);
        self.stored[place.kind as usize] -= 1;
        self.payload_bytes -= u64::from(place.len);
    }

    /// Counts a block of a volume in a segment that was dirty, or is now, or both.
    fn count_dirty(&mut self, index: u32, volume: VolumeId, was: bool, is: bool) {
        let index = index as usize;
        let segment = &mut self.segments[index];
        if is {
            self.dirty_floor = self.dirty_floor.min(segment.seq);
        }
        segment.dirty = segment.dirty + u32::from(is) - u32::from(was);
        if self.volumes > 1 {
            let own = &mut self.dirty_of[index * self.volumes + usize::from(volume.0)];
            *own = *own + u32::from(is) - u32::from(was);
        }
    }
}

#[cfg(test)]
mod tests;
