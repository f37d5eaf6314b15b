//! Free pages: where a unit goes, and how a restart finds them.

mod moves;
mod pages;

use forebay_policy::{LastTouch, Touch};

use super::*;
use crate::contents::Place;

const PER: usize = 16;

fn store(extents: usize) -> (Store, Pages) {
    (Store::new(extents, PER), Pages::new(8, extents, PER))
}

/// Takes pages for a unit and puts them to use.
fn take(store: &mut Store, pages: &mut Pages, len: usize) -> Option<Range<u32>> {
    let unit = store.take(len, pages)?;
    pages.hold(unit.clone());
    Some(unit)
}

/// Takes pages for units of this length until there are no more.
fn take_all(store: &mut Store, pages: &mut Pages, len: usize) -> Vec<Range<u32>> {
    std::iter::from_fn(|| take(store, pages, len)).collect()
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
fn units_do_not_overlap_and_fill_an_extent() {
    for len in 1..=UNIT_PAGES_MAX {
        let (mut store, mut pages) = store(2);
        let units = take_all(&mut store, &mut pages, len);
        assert!(units.iter().flat_map(Clone::clone).all(|page| pages.uses(page) == 1));
        assert!(units.iter().all(|unit| pages.unit(unit.end - 1) == *unit));
        assert_eq!(units.len(), 2 * (PER / len), "{len} pages");
        assert_eq!(store.used_pages(), (units.len() * len) as u64);
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
        assert!(pages.end_freed(3) && pages.uses(3) == 0);
    }
}

#[test]
fn a_unit_takes_a_run_of_its_length_and_a_longer_one_when_there_is_none() {
    let (mut store, mut pages) = store(2);
    let units = take_all(&mut store, &mut pages, 4);
    // One of three pages, then one of four, and one of two in the next extent.
    free(&mut store, &mut pages, units[0].start + 1..units[0].end);
    free(&mut store, &mut pages, units[2].clone());
    free(&mut store, &mut pages, units[6].start..units[6].start + 2);
    let two: Vec<u32> = take_all(&mut store, &mut pages, 2).iter().map(|unit| unit.start).collect();
    let [longest, three, exact] = [units[2].start, units[0].start + 1, units[6].start];
    assert_eq!(two, [exact, three, longest, longest + 2]);
    assert_eq!((1..=4).map(|len| store.room_for(len)).collect::<Vec<_>>(), [1, 0, 0, 0]);
}

#[test]
fn a_search_for_a_run_of_a_units_length_ends_after_some_extents() {
    let (mut store, mut pages) = store(LOOKED_AT + 2);
    let units = take_all(&mut store, &mut pages, 4);
    let (longer, exact) = (&units[0], &units[units.len() - 1]);
    free(&mut store, &mut pages, longer.start..longer.start + 3);
    free(&mut store, &mut pages, exact.start..exact.start + 2);
    let two: Vec<u32> = take_all(&mut store, &mut pages, 2).iter().map(|unit| unit.start).collect();
    assert_eq!(two, [longer.start, exact.start]);
}

#[test]
fn a_page_is_free_when_its_record_is_durable_and_no_read_is_in_flight() {
    let (mut store, mut pages) = store(1);
    let unit = take(&mut store, &mut pages, 4).expect("it is empty");
    pages.hold(unit.clone()); // a read
    pages.release(unit.clone());
    assert_eq!(pages.freed(), 0, "the read needs it");
    free(&mut store, &mut pages, unit.clone());
    assert_eq!(pages.free_with(&unit), 0..PER as u32);
    assert_eq!(store.used_pages(), 0);
}

#[test]
fn units_that_end_side_by_side_leave_one_run() {
    let (mut store, mut pages) = store(1);
    let units = take_all(&mut store, &mut pages, 3);
    assert!(take(&mut store, &mut pages, 4).is_none());
    free(&mut store, &mut pages, units[1].clone());
    assert!(take(&mut store, &mut pages, 4).is_none(), "three pages and, far away, one");
    free(&mut store, &mut pages, units[2].clone());
    assert_eq!(take(&mut store, &mut pages, 4), Some(3..7));
    assert_eq!(store.room_for(2), 1);
}

#[test]
fn the_rest_of_a_unit_is_a_unit() {
    let (mut store, mut pages) = store(1);
    let last = LastTouch { stamp: 9, touch: Touch::Rewritten };
    let units = take_all(&mut store, &mut pages, 4);
    pages.set_last(units[1].start, last);
    free(&mut store, &mut pages, 5..6);
    assert_eq!((pages.unit(4), pages.unit(7)), (4..5, 6..8));
    assert_eq!(take(&mut store, &mut pages, 1), Some(5..6));
    assert_eq!([4, 5, 6, 7, 8].map(|page| pages.unit(page)), [4..5, 5..6, 6..8, 6..8, 8..12]);
    assert_eq!((pages.last(4), pages.last(6)), (last, last));
    assert_ne!(pages.last(5), last);
}

/// The room that a search of all pages finds.
fn room(store: &Store, pages: &Pages) -> Vec<u64> {
    let run_fits = |run: Range<u32>, len: usize| (run.len() / len) as u64;
    let fits = |len| {
        let runs = (0..store.extents()).flat_map(|extent| pages.free_runs(extent));
        runs.map(|run| run_fits(run, len)).sum()
    };
    (1..=UNIT_PAGES_MAX).map(fits).collect()
}

#[test]
fn room_is_counted_and_found_and_units_are_told_apart_whatever_came_before() {
    let (mut store, mut pages) = store(7);
    let mut units: Vec<Range<u32>> = Vec::new();
    for turn in 0..20_000 {
        let random = store.random();
        let len = random as usize % UNIT_PAGES_MAX + 1;
        if (random >> 8) % 100 < if turn / 2000 % 2 == 0 { 60 } else { 40 } {
            let room = store.room_for(len);
            match take(&mut store, &mut pages, len) {
                Some(unit) => units.push(unit),
                None => assert_eq!(room, 0, "{len} pages"),
            }
        } else if !units.is_empty() {
            // All of a unit ends, or a page of it.
            let unit = units.swap_remove((random >> 32) as usize % units.len());
            let page = unit.start + (random >> 16) as u32 % unit.len() as u32;
            let ends = if random >> 63 == 0 { unit.clone() } else { page..page + 1 };
            units.extend(
                [unit.start..ends.start, ends.end..unit.end].into_iter().filter(|u| !u.is_empty()),
            );
            free(&mut store, &mut pages, ends);
        }
        let counted: Vec<u64> = (1..=UNIT_PAGES_MAX).map(|len| store.room_for(len)).collect();
        assert_eq!(counted, room(&store, &pages), "turn {turn}");
        let free = (0..7).flat_map(|extent| pages.free_runs(extent)).flatten();
        assert!(free.eq((0..pages.len()).filter(|&page| pages.uses(page) == 0)), "turn {turn}");
        assert_eq!(store.used_pages(), units.iter().map(|unit| unit.len() as u64).sum());
        for unit in &units {
            unit.clone().for_each(|page| assert_eq!(pages.unit(page), *unit, "turn {turn}"));
        }
    }
}

#[test]
fn a_restart_finds_the_same_room_and_the_same_units() {
    let (mut store, mut pages) = store(3);
    let lens = [4, 4, 2, 3, 1, 4, 2, 1, 1];
    let mut units: Vec<_> =
        lens.iter().map(|&len| take(&mut store, &mut pages, len).expect("there is room")).collect();
    free(&mut store, &mut pages, units.remove(1));
    let used = || units.iter().flat_map(Clone::clone);
    let mut copy = Pages::new(8, 3, PER);
    used().for_each(|page| copy.hold(page..page + 1));
    // What the log says of each payload, in any order.
    for page in used().collect::<Vec<_>>().into_iter().rev() {
        copy.recover_unit(page, page - pages.unit(page).start);
    }
    let mut again = Store::new(3, PER);
    again.begin_rebuild();
    assert_eq!([0; 3].map(|_| again.rebuild(&mut copy, 1)), [false, false, true]);
    assert_eq!(again.used_pages(), store.used_pages());
    for len in 1..=UNIT_PAGES_MAX {
        assert_eq!(again.room_for(len), store.room_for(len), "{len} pages");
    }
    used().for_each(|page| assert_eq!(copy.unit(page), pages.unit(page)));
    assert_eq!(take_all(&mut again, &mut copy, 1).len() as u64, room(&store, &pages)[0]);
}

#[test]
fn a_restart_makes_units_of_pages_of_which_the_log_says_nonsense() {
    let mut pages = Pages::new(8, 2, PER);
    pages.hold(0..14);
    pages.hold(16..17);
    pages.recover_unit(2, 254);
    pages.recover_unit(16, 3);
    pages.recover_unit(15, 1);
    let mut store = Store::new(2, PER);
    store.begin_rebuild();
    assert!(store.rebuild(&mut pages, u32::MAX));
    assert_eq!([0, 4, 8, 12, 16].map(|page| pages.unit(page)), [0..4, 4..8, 8..12, 12..14, 16..17]);
    assert_eq!((store.used_pages(), store.room_for(1), store.room_for(4)), (15, 17, 3));
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
    assert!(pages.end_freed(3) && pages.uses(3) == 0);
}

#[test]
fn a_page_that_is_used_while_it_is_freed_is_freed_once_more() {
    let mut pages = Pages::new(8, 1, PER);
    let place = |at: u32| Place {
        segment: 8,
        offset: at * PAGE as u32,
        len: PAGE as u16,
        kind: EntryKind::Raw,
        crc: 0,
        dirty: false,
        meta: 0,
    };
    pages.set_loading(true);
    // A block that a client has changed was in each page; a later entry has another block there.
    for at in [3, 4] {
        pages.free_later(&place(at));
        pages.hold_place(&place(at));
    }
    // That one leaves by a later entry of the same log, or by a record that is not durable.
    pages.end_place(&place(3));
    pages.set_loading(false);
    assert_eq!(pages.take_freed(), [3, 4]);
    pages.leave_place(&place(4));
    assert_eq!(pages.take_freed(), [4]);
    assert!(pages.end_freed(3) && !pages.end_freed(4));
    assert_eq!((pages.uses(3), pages.uses(4)), (0, 1));
    assert!(pages.end_freed(4));
    // From then on it is as any other.
    pages.hold(4..5);
    pages.hold(4..5);
    pages.release(4..5);
    assert_eq!((pages.uses(4), pages.freed()), (1, 0));
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
    assert!(store.take(1, &mut pages).is_none());
    units.into_iter().flatten().for_each(|unit| free(&mut store, &mut pages, unit));
    let now = Instant::default();
    assert_eq!(store.begin_discard(now), Some(0), "the last one to be used");
    assert_eq!((store.begin_discard(now), store.next_discard()), (None, None), "one at a time");
    for extent in [3, 2, 1] {
        let units = take_extent(&mut store, &mut pages);
        assert_eq!(units[0].start / per, extent);
    }
    assert!(store.take(1, &mut pages).is_none(), "not before its discard has ended");
    store.end_discard(now);
    assert_eq!(take_extent(&mut store, &mut pages)[0].start / per, 0);
}

#[test]
fn a_fresh_store_that_was_not_discarded_is_discarded_little_by_little() {
    let (mut store, mut pages) = store(4);
    store.set_undiscarded();
    let mut now = Instant::default();
    for extent in [3, 2] {
        assert_eq!(store.begin_discard(now), Some(extent), "the last one to be used");
        store.end_discard(now);
        now = now + DISCARD_PAUSE;
    }
    assert_eq!(store.begin_discard(now), None, "two stay ready");
    for extent in [0, 1, 2, 3] {
        let units = take_extent(&mut store, &mut pages);
        assert_eq!(units[0].start / PER as u32, extent);
    }
    assert!(store.take(1, &mut pages).is_none());
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
