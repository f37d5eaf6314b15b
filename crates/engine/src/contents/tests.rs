//! A random walk of [`Contents`] next to a plain map, and the faults that [`Contents::check`]
//! reports.

use std::collections::{BTreeMap, BTreeSet};

use forebay_block::testing::Numbers;

use super::*;

const SEGMENTS: u64 = 8;
const VOLUMES: u64 = 2;
/// Number of blocks of each volume: few, so that each is rewritten often.
const BLOCKS: u64 = 40;

/// The plain map's state of a block.
#[derive(Clone, Copy, Debug)]
struct Known {
    place: Place,
    /// The base, and whether it is another block's payload.
    base: Option<(Place, bool)>,
}

/// Contents, next to a plain map that must agree with them.
struct Walk {
    contents: Contents,
    ram: Ram,
    numbers: Numbers,
    map: BTreeMap<Key, Known>,
    fenced: BTreeSet<Key>,
    sharers: [Vec<Key>; SEGMENTS as usize],
    /// The segment that is being written.
    head: SegmentSeq,
    /// Offset of the next payload in that segment.
    offset: u32,
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut walk = Self {
            contents: Contents::new(VOLUMES * BLOCKS, SEGMENTS as usize, VOLUMES as usize),
            ram: Ram::new(0, false),
            numbers: Numbers::new(seed),
            map: BTreeMap::new(),
            fenced: BTreeSet::new(),
            sharers: Default::default(),
            head: SegmentSeq(0),
            offset: 0,
        };
        walk.begin_segment();
        walk
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.numbers.below(n) == 0
    }

    fn any_key(&mut self) -> Key {
        let volume = VolumeId(self.numbers.below(VOLUMES) as u8);
        Key::new(volume, self.numbers.below(BLOCKS))
    }

    /// A random block of the map that `fits`.
    fn pick(&mut self, fits: impl Fn(&Known) -> bool) -> Option<(Key, Known)> {
        let from = self.any_key();
        let (before, after) = (self.map.range(..from), self.map.range(from..));
        after.chain(before).find(|(_, known)| fits(known)).map(|(&key, &known)| (key, known))
    }

    /// A new place in the open segment.
    fn new_place(&mut self, kind: EntryKind, dirty: bool) -> Place {
        self.offset += 8;
        let len = if kind.has_payload() { 1 + self.numbers.below(4096) as u16 } else { 0 };
        let segment = (self.head.0 % SEGMENTS) as u32;
        Place { segment, offset: self.offset, len, kind, crc: 0, dirty, meta: 0 }
    }

    /// Removes the oldest segment with the blocks that lie in it or have their base there, and
    /// begins the next segment in its place.
    fn begin_segment(&mut self) {
        self.head = self.head.next();
        self.offset = 0;
        let at = (self.head.0 % SEGMENTS) as usize;
        let is_there = |place: &Place| place.segment as usize == at;
        let leaving = self.map.iter().filter(|(_, known)| places(known).iter().any(is_there));
        let leaving: Vec<Key> = leaving.map(|(&key, _)| key).collect();
        leaving.into_iter().for_each(|key| self.forget(key));
        self.contents.drop_sharers(at);
        self.sharers[at].clear();
        self.contents.begin_segment(at, self.head);
    }

    fn forget(&mut self, key: Key) {
        self.contents.forget(key, &mut self.ram);
        self.map.remove(&key);
        self.fenced.remove(&key);
    }

    /// Gives a block a new version, in a form that its current state allows.
    fn place(&mut self) {
        let key = self.any_key();
        let was = self.map.get(&key).copied();
        let dirty = self.one_in(2);
        let form = self.numbers.below(8);
        let (place, base) = match form {
            0 => (self.new_place(EntryKind::Zero, dirty), None),
            1 => (self.new_place(EntryKind::Lost, true), None),
            2..4 => match was {
                Some(Known { place: old, .. }) if old.kind.is_whole() => {
                    (self.new_place(EntryKind::Delta, dirty), Some((old, false)))
                }
                Some(Known { place: old, base }) if old.kind == EntryKind::Delta => {
                    (self.new_place(EntryKind::Delta, dirty), base)
                }
                _ => (self.new_place(EntryKind::Raw, dirty), None),
            },
            4 | 5 => match self.pick(|other| other.place.kind.is_whole()) {
                Some((other, Known { place: old, .. })) if other != key => {
                    self.note_sharer(key, &old);
                    match form {
                        4 => (self.new_place(EntryKind::Similar, dirty), Some((old, true))),
                        _ => (Place { dirty, ..old }, None),
                    }
                }
                _ => (self.new_place(EntryKind::Lz4, dirty), None),
            },
            _ => (self.new_place(EntryKind::Zstd, dirty), None),
        };
        let against = base.filter(|&(_, of_another)| of_another).map(|(base, _)| base);
        let by_client = self.one_in(2);
        self.contents.place(Instant(1), key, place, against, by_client, &mut self.ram);
        let base = base.map(|(base, of_another)| (Place { dirty, ..base }, of_another));
        self.map.insert(key, Known { place, base });
        let same = was.is_some_and(|was| was.place.is_same_version(&place));
        match form {
            1 => self.fenced.insert(key),
            // Named again, not written.
            _ if same && !by_client && dirty => false,
            _ => self.fenced.remove(&key),
        };
    }

    fn note_sharer(&mut self, key: Key, old: &Place) {
        let at = old.segment as usize;
        let seq = self.contents.segments[at].seq;
        self.contents.note_sharer(key, at, seq, self.head);
        if seq != self.head {
            self.sharers[at].push(key);
        }
    }

    fn mark_clean(&mut self) {
        let Some((key, known)) = self.pick(|known| known.place.dirty) else { return };
        self.contents.mark_clean(key, &mut self.ram);
        self.fenced.remove(&key);
        if known.place.kind == EntryKind::Lost {
            self.map.remove(&key);
            assert_eq!(self.contents.take_unlogged(), Some(key));
            return;
        }
        let clean = |place| Place { dirty: false, ..place };
        let base = known.base.map(|(base, of_another)| (clean(base), of_another));
        self.map.insert(key, Known { place: clean(known.place), base });
    }

    fn fence(&mut self) {
        let Some((key, _)) = self.pick(|known| known.place.dirty) else { return };
        assert_eq!(self.contents.fence(key), self.fenced.insert(key), "{key:?} is fenced once");
    }

    fn step(&mut self) {
        match self.numbers.below(20) {
            0..10 => self.place(),
            10 | 11 => {
                let key = self.any_key();
                self.forget(key);
            }
            12..17 => self.mark_clean(),
            17 | 18 => self.fence(),
            _ => self.begin_segment(),
        }
    }

    /// Compares everything that the contents report with the map.
    fn compare(&mut self) {
        self.contents.check().unwrap();
        for volume in 0..VOLUMES {
            for block in 0..BLOCKS {
                let key = Key::new(VolumeId(volume as u8), block);
                let known = self.map.get(&key);
                assert_eq!(self.contents.get(key), known.map(|known| known.place), "{key:?}");
                let base = known.and_then(|known| known.base).map(|(base, _)| base);
                assert_eq!(self.contents.bases.get(&key).map(|base| base.place), base, "{key:?}");
            }
        }
        let at = |at: u64, place: &Place| u64::from(place.segment) == at;
        for index in 0..SEGMENTS {
            let dirty_of = |volume: VolumeId| {
                let of = self.map.iter().filter(|(key, _)| key.volume() == volume);
                let there = |place: &Place| u32::from(at(index, place) && place.dirty);
                of.map(|(_, known)| places(known).iter().map(there).sum::<u32>()).sum::<u32>()
            };
            let live = self.map.values().flat_map(places).filter(|place| at(index, place)).count();
            let [first, second] = [0, 1].map(|volume| dirty_of(VolumeId(volume)));
            let i = index as usize;
            assert_eq!(self.contents.live_in(i), live as u32);
            assert_eq!(self.contents.dirty_in(i), first + second);
            assert_eq!(self.contents.dirty_of(i, VolumeId(0)), first);
            assert_eq!(self.contents.dirty_of(i, VolumeId(1)), second);
            assert_eq!(self.contents.sharers_in(i), self.sharers[i]);
        }
        let oldest = (self.head.0.saturating_sub(SEGMENTS - 1)..=self.head.0).find(|seq| {
            let dirty = |place: &Place| at(seq % SEGMENTS, place) && place.dirty;
            self.map.values().flat_map(places).any(|place| dirty(&place))
        });
        assert_eq!(self.contents.oldest_dirty(self.head.next()), oldest.map(SegmentSeq));
        assert!(self.contents.fenced().iter().eq(&self.fenced));
        let shared: usize = self.sharers.iter().map(Vec::len).sum();
        assert_eq!(self.contents.sharers(), shared as u64);
    }
}

/// The places of a block and of its base.
fn places(known: &Known) -> Vec<Place> {
    [Some(known.place), known.base.map(|(base, _)| base)].into_iter().flatten().collect()
}

#[test]
fn whatever_is_done_contents_agree_with_a_plain_map() {
    let (mut bases, mut fenced, mut shared) = (0, 0, 0);
    for seed in 0..5 {
        let mut walk = Walk::new(seed);
        for _ in 0..1500 {
            walk.step();
            walk.compare();
            bases = bases.max(walk.contents.bases());
            fenced = fenced.max(walk.contents.fenced().len());
            shared = shared.max(walk.contents.sharers());
        }
    }
    assert!(bases > 5 && fenced > 2 && shared > 5, "{bases}, {fenced}, {shared}");
}

const DIRTY: Key = Key(1);
const CLEAN: Key = Key(2);
const DELTA: Key = Key(3);

/// Contents with a dirty block, a clean one, and a dirty one stored as a delta.
fn sound() -> Contents {
    let (mut contents, mut ram) = (Contents::new(100, 8, 2), Ram::new(0, false));
    contents.begin_segment(1, SegmentSeq(1));
    let mut offset = 0;
    let mut place = |key, kind, dirty| {
        offset += 8;
        let place = Place { segment: 1, offset, len: 100, kind, crc: 0, dirty, meta: 0 };
        contents.place(Instant(1), key, place, None, true, &mut ram);
    };
    place(DIRTY, EntryKind::Raw, true);
    place(CLEAN, EntryKind::Lz4, false);
    place(DELTA, EntryKind::Raw, true);
    place(DELTA, EntryKind::Delta, true);
    contents
}

/// The error of `check` after `spoil` has changed sound contents.
fn objection(spoil: impl FnOnce(&mut Contents)) -> String {
    let mut contents = sound();
    assert_eq!(contents.check(), Ok(()));
    spoil(&mut contents);
    contents.check().expect_err("the spoiled part is found")
}

#[test]
fn check_objects_to_a_wrong_count() {
    let found = objection(|contents| contents.segments[1].live += 1);
    assert!(found.starts_with("segment 1 is"), "{found}");
    let found = objection(|contents| contents.segments[1].dirty -= 1);
    assert!(found.starts_with("segment 1 is"), "{found}");
    let found = objection(|contents| contents.dirty_of[3] += 1);
    assert!(found.starts_with("the dirty blocks of a volume"), "{found}");
    let found = objection(|contents| contents.payload_bytes += 8);
    assert!(found.contains("400 bytes are stored") && found.contains("not 408"), "{found}");
    let found = objection(|contents| contents.stored[EntryKind::Lz4 as usize] += 1);
    assert!(found.contains("400 bytes are stored") && found.contains("not 400"), "{found}");
    let found = objection(|contents| contents.held[1] += 1);
    assert_eq!(found, "the volumes hold [3, 0] blocks, not [3, 1]");
}

#[test]
fn check_objects_to_a_wrong_dirty_bit() {
    let found = objection(|contents| contents.index.update(DIRTY, |place| place.dirty = false));
    assert!(found.starts_with("segment 1 is"), "{found}");
    let found = objection(|contents| contents.dirty.remove(DIRTY));
    assert!(found.ends_with("is dirty in the index or in the set, not in both"), "{found}");
    let found = objection(|contents| contents.dirty.insert(Instant(1), CLEAN, true));
    assert!(found.ends_with("is dirty in the index or in the set, not in both"), "{found}");
    let found = objection(|contents| contents.dirty.insert(Instant(1), Key(99), true));
    assert_eq!(found, "2 blocks are dirty, not 3", "a block that is not cached");
}

#[test]
fn check_objects_to_a_wrong_base() {
    let found = objection(|contents| {
        contents.bases.remove(&DELTA);
    });
    assert!(found.starts_with("segment 1 is"), "its segment counts it: {found}");
    // The counts agree; the block and its base do not.
    let found = objection(|contents| {
        let base = contents.bases.remove(&DELTA).expect("a delta has a base");
        contents.bases.insert(CLEAN, base);
    });
    assert!(found.contains("its base is"), "{found}");
    let found = objection(|contents| {
        contents.bases.get_mut(&DELTA).expect("a delta has a base").place.dirty = false;
        contents.segments[1].dirty -= 1;
    });
    assert!(found.ends_with("is not as dirty as the block"), "{found}");
}

#[test]
fn check_objects_to_a_fence_around_a_clean_block() {
    for key in [CLEAN, Key(99)] {
        let found = objection(|contents| {
            contents.fenced.insert(key);
        });
        assert_eq!(found, format!("{key:?} is fenced and not dirty"));
    }
    let mut contents = sound();
    assert!(contents.fence(DIRTY));
    assert_eq!(contents.check(), Ok(()), "a dirty block may be fenced");
}

/// Recovery empties the contents after the settings of volumes are known: found by reading,
/// 2026-11-27.
#[test]
fn the_units_of_volumes_outlast_what_is_cached() {
    let mut contents = Contents::new(100, 8, 2);
    contents.set_unit(VolumeId(1), 64);
    contents.clear(100);
    assert_eq!([0, 1].map(|id| contents.dirty().unit_of(VolumeId(id))), [1, 64]);
    assert_eq!(contents.check(), Ok(()));
}

/// With 64 volumes in a TiB, there are 64 MB of them.
#[test]
fn giving_up_does_not_walk_the_counts_of_dirty_blocks_by_volume() {
    let mut walk = Walk::new(1);
    (0..2000).for_each(|_| walk.place());
    let is_dirty = |(key, place): (Key, Place)| place.dirty.then_some(key);
    let dirty: Vec<Key> = walk.contents.index().iter().filter_map(is_dirty).collect();
    dirty.into_iter().for_each(|key| walk.contents.mark_clean(key, &mut walk.ram));
    let contents = &mut walk.contents;
    assert!(contents.dirty_of.len() > 1 && contents.index().len() > 1);
    // Not a count that may be, but one that is noticed if all are set.
    contents.dirty_of[1] += 7;
    contents.give_up();
    assert_eq!(contents.dirty_of[1], 7);
    contents.dirty_of[1] = 0;
    while contents.has_given_up() {
        contents.drop_given_up();
    }
    assert_eq!(contents.check(), Ok(()));
}

/// A crash before the rewrite is durable brings the older version back, so another block must not
/// get its page: found by reading, 2026-11-30.
#[test]
fn the_page_of_two_blocks_is_free_when_the_record_that_moves_the_first_is_durable() {
    let (mut contents, mut ram) = (Contents::new(100, 8, 1), Ram::new(0, false));
    contents.add_store(1, 16);
    contents.begin_segment(1, SegmentSeq(1));
    let place = |segment, offset| {
        let kind = EntryKind::Zstd;
        Place { segment, offset, len: 1000, kind, crc: 0, dirty: false, meta: 0 }
    };
    let mut put = |contents: &mut Contents, key, place| {
        contents.place(Instant(1), key, place, None, false, &mut ram);
    };
    contents.begin_loading(LargeMap::default());
    contents.set_applying(true);
    put(&mut contents, Key(1), place(8, 0));
    put(&mut contents, Key(2), place(8, 1000));
    contents.set_applying(false);
    put(&mut contents, Key(1), place(1, 0));
    contents.set_applying(true);
    put(&mut contents, Key(2), place(1, 1000));
    contents.set_applying(false);
    contents.end_loading();
    assert_eq!((contents.pages().uses(0), contents.pages().take_freed()), (1, vec![0]));
    assert!(contents.pages().end_freed(0), "the record is durable");
    // From then on the page is as any other.
    contents.pages().hold(0..1);
    put(&mut contents, Key(3), place(8, 0));
    put(&mut contents, Key(3), place(1, 2000));
    assert_eq!((contents.pages().uses(0), contents.pages().freed()), (1, 0));
}

/// A read during loading frees nothing that no record has freed: nothing might end that.
#[test]
fn a_read_does_not_free_the_page_of_a_block() {
    let mut pages = Pages::new(8, 1, 16);
    pages.set_loading(true);
    pages.hold(0..2);
    pages.hold(0..1);
    pages.release(0..1);
    assert_eq!((pages.uses(0), pages.freed()), (1, 0));
}
