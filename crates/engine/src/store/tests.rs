//! Slots: which are free, and how a restart finds them.

mod moves;
mod pages;

use forebay_policy::{LastTouch, Touch};

use super::*;

const PER: usize = 16;

fn store(extents: usize) -> (Store, Pages) {
    (Store::new(extents, PER), Pages::new(8, extents, PER))
}

/// Takes a slot and puts its pages to use.
fn take(store: &mut Store, pages: &mut Pages, class: usize) -> Option<Range<u32>> {
    let slot = store.take_slot(class, pages)?;
    let unit = slot.start..slot.start + class as u32;
    store.note_busy(&unit);
    pages.hold(unit.clone());
    Some(unit)
}

/// Ends the use of pages, durably.
fn free(store: &mut Store, pages: &mut Pages, unit: Range<u32>) {
    pages.release(unit);
    let freed = pages.take_freed();
    store.note_freed(Lsn(7), freed);
    assert_eq!(store.next_free(Lsn(6)), None, "the record is not durable");
    while let Some(page) = store.next_free(Lsn(7)) {
        assert!(pages.end_freed(page));
        store.note_free(page, pages);
    }
}

#[test]
fn slots_do_not_overlap_and_fill_an_extent() {
    for class in 1..=SLOT_PAGES_MAX {
        let (mut store, mut pages) = store(2);
        let mut taken = Vec::new();
        while let Some(unit) = take(&mut store, &mut pages, class) {
            assert!(unit.clone().all(|page| pages.uses(page) == 1), "{unit:?} overlaps");
            assert_eq!(store.slot_of(unit.start), Some(unit.clone()));
            taken.push(unit);
        }
        assert_eq!(taken.len(), 2 * (PER / class), "class {class}");
        assert_eq!(store.used_pages(), (taken.len() * class) as u64);
    }
}

#[test]
fn the_last_request_is_kept_beside_any_number_of_uses() {
    let (_, mut pages) = store(1);
    for (stamp, touch) in (250..=255).zip(Touch::ALL.into_iter().cycle()) {
        let last = LastTouch { stamp, touch };
        pages.set_last(3, last);
        for uses in 1..=200 {
            pages.hold(3..4);
            assert_eq!((pages.uses(3), pages.last(3)), (uses, last));
        }
        for uses in (1..200).rev() {
            pages.release(3..4);
            assert_eq!((pages.uses(3), pages.last(3)), (uses, last));
        }
        pages.release(3..4);
        assert_eq!((pages.take_freed(), pages.last(3)), (vec![3], last));
        assert!(pages.end_freed(3) && pages.are_free(3..4));
    }
}

#[test]
fn a_unit_takes_a_longer_slot_when_its_own_are_gone() {
    let (mut store, mut pages) = store(1);
    assert_eq!(take(&mut store, &mut pages, 4), Some(0..4));
    let two = take(&mut store, &mut pages, 2).expect("slots of four pages are left");
    assert_eq!(store.slot_of(two.start).map(|slot| slot.len()), Some(4));
    // No slot of two pages can ever come, so eviction looks for one of four.
    assert!(store.is_sought(4) && !store.is_sought(2));
}

#[test]
fn a_page_is_free_when_its_record_is_durable_and_no_read_is_in_flight() {
    let (mut store, mut pages) = store(1);
    let unit = take(&mut store, &mut pages, 4).expect("it is empty");
    pages.hold(unit.clone()); // a read
    pages.release(unit.clone());
    assert_eq!(pages.freed(), 0, "the read needs it");
    free(&mut store, &mut pages, unit.clone());
    assert!(pages.are_free(unit));
    assert_eq!(store.used_pages(), 0);
}

#[test]
fn an_extent_of_free_pages_changes_its_class() {
    let (mut store, mut pages) = store(1);
    let mut units = Vec::new();
    while let Some(unit) = take(&mut store, &mut pages, 4) {
        units.push(unit);
    }
    assert!(store.take_slot(3, &pages).is_none());
    for unit in units {
        free(&mut store, &mut pages, unit);
    }
    let unit = take(&mut store, &mut pages, 3).expect("the extent has no class");
    assert_eq!(store.slot_of(unit.start), Some(unit));
    assert_eq!((store.slots(3), store.slots(4)), (PER / 3, 0));
}

#[test]
fn a_page_goes_into_a_hole_of_a_slot_in_use() {
    let (mut store, mut pages) = store(1);
    let mut units = Vec::new();
    while let Some(unit) = take(&mut store, &mut pages, 4) {
        units.push(unit);
    }
    let hole = units[1].start + 2;
    free(&mut store, &mut pages, hole..hole + 1);
    assert!(store.take_slot(2, &pages).is_none());
    assert_eq!(take(&mut store, &mut pages, 1), Some(hole..hole + 1));
    assert!(store.take_slot(1, &pages).is_none());
}

#[test]
fn a_restart_finds_the_same_free_slots() {
    let (mut store, mut pages) = store(3);
    let mut units = Vec::new();
    for class in [4, 4, 2, 3, 1, 4, 2] {
        units.push(take(&mut store, &mut pages, class).expect("there is room"));
    }
    free(&mut store, &mut pages, units[1].clone());
    let mut again = Store::new(3, PER);
    for extent in 0..3 {
        again.recover_class(extent, store.slot(extent).pages);
    }
    again.begin_rebuild();
    assert!(again.rebuild(&pages, u32::MAX));
    assert_eq!(again.used_pages(), store.used_pages());
    for class in 1..=SLOT_PAGES_MAX {
        assert_eq!(again.slots(class), store.slots(class), "class {class}");
        let count = |store: &mut Store, pages: &mut Pages| {
            std::iter::from_fn(|| take(store, pages, class)).count()
        };
        let mut copy = Pages::new(8, 3, PER);
        (0..pages.len()).filter(|&page| pages.uses(page) > 0).for_each(|page| {
            copy.hold(page..page + 1);
        });
        let mut same = Pages::new(8, 3, PER);
        (0..pages.len()).filter(|&page| pages.uses(page) > 0).for_each(|page| {
            same.hold(page..page + 1);
        });
        let (mut one, mut other) = (Store::new(3, PER), Store::new(3, PER));
        for extent in 0..3 {
            one.recover_class(extent, store.slot(extent).pages);
            other.recover_class(extent, again.slot(extent).pages);
        }
        one.begin_rebuild();
        other.begin_rebuild();
        assert!(one.rebuild(&copy, 3));
        assert_eq!([0; 3].map(|_| other.rebuild(&same, 1)), [false, false, true]);
        assert_eq!(count(&mut one, &mut copy), count(&mut other, &mut same));
    }
}

#[test]
fn uses_beyond_a_byte_are_counted() {
    let mut pages = Pages::new(8, 1, PER);
    for _ in 0..1000 {
        pages.hold(3..4);
    }
    assert_eq!(pages.uses(3), 1000);
    for left in (1..1000).rev() {
        pages.release(3..4);
        assert_eq!((pages.uses(3), pages.freed()), (left, 0));
    }
    pages.release(3..4);
    assert_eq!(pages.take_freed(), [3]);
    assert!(pages.end_freed(3) && pages.are_free(3..4));
}

#[test]
fn a_unit_takes_a_page_for_each_raw_block_and_packs_the_others() {
    assert_eq!(unit_pages([PAGE; 4].into_iter()), 4);
    assert_eq!(unit_pages([2000, 2000, 90].into_iter()), 1);
    assert_eq!(unit_pages([2000, 2000, 97].into_iter()), 2);
    assert_eq!(unit_pages([PAGE, 1, 1].into_iter()), 2);
}

#[test]
fn the_extents_used_last_are_discarded_one_by_one_with_pauses_and_then_used() {
    let (mut store, mut pages) = store(4);
    let per = PER as u32;
    assert_eq!(store.next_discard(), None, "nothing was written yet");
    let units: Vec<_> = (0..4).map(|_| take_extent(&mut store, &mut pages)).collect();
    assert!(store.take_slot(1, &pages).is_none());
    units.into_iter().flatten().for_each(|unit| free(&mut store, &mut pages, unit));
    let now = Instant::default();
    assert_eq!(store.begin_discard(now), Some(0), "the last one to be used");
    assert_eq!((store.begin_discard(now), store.next_discard()), (None, None), "one at a time");
    for extent in [3, 2, 1] {
        let units = take_extent(&mut store, &mut pages);
        assert_eq!(units[0].start / per, extent);
    }
    assert!(store.take_slot(1, &pages).is_none(), "not before its discard has ended");
    store.end_discard(now);
    assert_eq!(take_extent(&mut store, &mut pages)[0].start / per, 0);
}

#[test]
fn two_extents_stay_ready_and_discards_pause() {
    let (mut store, mut pages) = store(4);
    let units: Vec<_> = (0..4).map(|_| take_extent(&mut store, &mut pages)).collect();
    units.into_iter().flatten().for_each(|unit| free(&mut store, &mut pages, unit));
    let mut now = Instant::default();
    for extent in [0, 1] {
        assert_eq!(store.begin_discard(now), Some(extent));
        store.end_discard(now);
        assert_eq!(store.begin_discard(now), None, "a pause");
        now = now + DISCARD_PAUSE;
    }
    assert_eq!(store.begin_discard(now), None);
}

/// Fills an extent with units of four pages.
fn take_extent(store: &mut Store, pages: &mut Pages) -> Vec<Range<u32>> {
    let units = (0..PER / 4).map(|_| take(store, pages, 4).expect("a free extent"));
    units.collect()
}
