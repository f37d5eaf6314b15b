//! Missed blocks on their way from RAM into the store: when they are in the index, when the log
//! names them, and what must not happen before.

use std::time::Duration;

use forebay_block::BLOCK_SIZE;
use forebay_policy::Standing;

use super::*;
use crate::api::ContentLocality;
use crate::limits::UNITS_FLUSHED;
use crate::slab::Id;

impl Rooms {
    /// Begins to write missed blocks into the store; returns the write.
    fn admits(&mut self, blocks: &[u64]) -> (Target, Io) {
        let Self { cache, fx, .. } = self;
        let contents: Vec<_> = blocks.iter().map(|&block| content(block)).collect();
        let blocks =
            blocks.iter().map(|&block| key(block)).zip(contents.iter().map(|all| &all[..]));
        assert!(cache.admit_to_store(&blocks.collect::<Vec<_>>(), fx), "there is room");
        self.only()
    }

    /// Missed blocks are in the store, and no flush has covered them.
    fn admitted(&mut self, blocks: &[u64]) {
        let unit = self.admits(blocks);
        self.unit_done(unit);
    }

    fn has(&self, block: u64) -> bool {
        self.contents.get(key(block)).is_some()
    }

    fn admit_to_log(&mut self, block: u64) {
        let Self { cache, fx, .. } = self;
        assert!(cache.admit(key(block), &content(block), fx));
    }

    /// Writes a block as a client; returns the kind of its entry.
    fn write(&mut self, block: u64, content: &[u8]) -> EntryKind {
        let Self { cache, fx, .. } = self;
        assert!(cache.push_written(fx, key(block), content));
        cache.log.builder().pending.last().expect("it was just added").kind
    }
}

#[test]
fn a_missed_block_is_found_when_it_is_written_and_named_after_a_flush() {
    let mut rooms = rooms();
    rooms.ram.put(key(4), &content(4), Standing::Alone);
    let unit = rooms.admits(&[4, 5]);
    assert!(!rooms.has(4) && rooms.store.is_entering(key(4)));
    rooms.unit_done(unit);
    let place = rooms.place(4);
    assert!(!place.dirty && rooms.contents.is_in_store(&place) && rooms.has(5));
    assert!(rooms.contents.is_unnamed(key(4)) && !rooms.store.is_entering(key(4)));
    assert_eq!(rooms.ram.recent().oldest_of(Standing::Doubled).map(|(key, _)| key), Some(4));
    rooms.pump();
    assert!(rooms.log.builder().is_empty(), "no flush has covered it");
    rooms.store.begin_flush();
    rooms.store.end_flush();
    rooms.pump();
    let mut said = rooms.said();
    said.sort_unstable_by_key(|entry| entry.0);
    assert_eq!(said, [(4, EntryKind::Raw, true), (5, EntryKind::Raw, true)]);
    assert!(!rooms.contents.is_unnamed(key(4)) && rooms.place(4) == place);
    assert_eq!(rooms.contents.check(), Ok(()));
    let pages = rooms.contents.pages();
    let page = pages.of(&place).start;
    assert_eq!(pages.uses(page), 1, "the index needs it, and nothing else");
}

#[test]
fn a_block_that_changes_while_it_is_written_does_not_enter() {
    let mut rooms = rooms();
    let unit = rooms.admits(&[4, 5, 6]);
    // A write of 5 began, ended, and left nothing behind; 6 has entered by way of the log.
    rooms.store.spoil(key(5));
    rooms.admit_to_log(6);
    rooms.said();
    let logged = rooms.place(6);
    rooms.unit_done(unit);
    assert!(rooms.has(4) && !rooms.has(5) && rooms.place(6) == logged);
    assert_eq!(rooms.contents.pages().freed(), 2);
    let unit = rooms.admits(&[8]);
    rooms.store.spoil_volume(VOLUME);
    rooms.unit_done(unit);
    assert!(!rooms.has(8));
    assert_eq!(rooms.contents.check(), Ok(()));
}

#[test]
fn a_block_enters_with_the_last_unit_that_brings_it() {
    let mut rooms = rooms();
    let old = rooms.admits(&[4]);
    // A write of 4 began, ended, and was destaged; then 4 was missed again.
    rooms.store.spoil(key(4));
    let new = rooms.admits(&[4]);
    rooms.unit_done(old);
    assert!(!rooms.has(4));
    let offset = new.1.range.offset;
    rooms.unit_done(new);
    let Place { segment, offset: at, .. } = rooms.place(4);
    assert_eq!(rooms.segment_offset(segment as usize) + u64::from(at), offset);
}

#[test]
fn a_block_that_has_changed_is_not_named() {
    let mut rooms = rooms();
    rooms.admitted(&[4, 5]);
    rooms.forget(4);
    rooms.dirty([5]);
    rooms.said();
    let place = rooms.place(5);
    rooms.store.begin_flush();
    rooms.store.end_flush();
    rooms.pump();
    assert_eq!(rooms.said(), []);
    assert!(!rooms.has(4) && rooms.place(5) == place && !rooms.store.is_moving());
    assert_eq!(rooms.contents.check(), Ok(()));
}

#[test]
fn nothing_is_a_delta_against_a_block_that_is_not_named() {
    let mut changed = content(4);
    changed[100] ^= 1;
    for (is_named, kind) in [(false, EntryKind::Raw), (true, EntryKind::Delta)] {
        let mut rooms = rooms();
        rooms.config.content = ContentLocality::Rewrite;
        rooms.ram.put(key(4), &content(4), Standing::Alone);
        rooms.admitted(&[4]);
        if is_named {
            rooms.store.begin_flush();
            rooms.store.end_flush();
            rooms.pump();
            rooms.said();
        }
        assert_eq!(rooms.write(4, &changed), kind);
    }
}

#[test]
fn admitted_units_wait_for_a_flush_and_reclaim_does_not_wait_for_them() {
    let mut rooms = rooms();
    rooms.admitted(&[4]);
    assert!(!rooms.store.is_moving() && !rooms.store.waits_for_device());
    assert!(!rooms.store.wants_flush(rooms.now));
    let at = rooms.store.flush_at().expect("it waits for one");
    assert_eq!(at, rooms.now + Duration::from_secs(1));
    assert!(rooms.store.wants_flush(at));
    // A unit that reclaim moves does not wait, and its flush covers both.
    rooms.dirty([400]);
    let unit = rooms.move_out(&[400]);
    assert!(rooms.store.is_moving() && rooms.store.waits_for_device());
    assert!(!rooms.store.wants_flush(rooms.now));
    rooms.unit_done(unit);
    assert_eq!(rooms.store.flush_at(), None);
    rooms.flush_units();
    assert!(rooms.store.is_moving() && !rooms.store.waits_for_device());
    rooms.pump();
    let said = rooms.said();
    assert_eq!(said.iter().map(|entry| entry.0).collect::<Vec<_>>(), [400, 4]);
    rooms.pump();
    assert!(!rooms.store.is_moving() && !rooms.store.wants_flush(rooms.now));
}

#[test]
fn admitted_units_share_a_flush() {
    let mut rooms = rooms_with(8, false);
    for block in 0..UNITS_FLUSHED as u64 {
        assert!(!rooms.store.wants_flush(rooms.now), "{block} units");
        rooms.admitted(&[block * 8]);
    }
    assert!(rooms.store.wants_flush(rooms.now));
}

#[test]
fn reclaim_always_has_units_left() {
    let mut rooms = rooms_with(16, false);
    let mut admitted = 0;
    while rooms.store.takes_admitted() {
        rooms.admitted(&[admitted * 8]);
        admitted += 1;
    }
    assert!(admitted > 100 && rooms.store.takes_units());
    let Rooms { cache, fx, .. } = &mut rooms;
    assert!(!cache.admit_to_store(&[(key(3000), &content(3000))], fx));
    rooms.dirty([400]);
    rooms.ready(&[400]);
    rooms.pump();
    assert!(rooms.said().iter().any(|entry| entry.0 == 400));
}

#[test]
fn the_last_segments_are_not_for_names_of_missed_blocks() {
    let mut rooms = rooms();
    rooms.admitted(&[4]);
    rooms.store.begin_flush();
    rooms.store.end_flush();
    rooms.fill_to(2);
    assert!(!rooms.has_client_space());
    rooms.pump();
    assert!(rooms.log.builder().is_empty() && rooms.has(4));
}

#[test]
fn an_older_version_that_left_without_an_entry_still_gets_one() {
    let mut rooms = rooms();
    rooms.clean([4]);
    rooms.stored(&[4]);
    rooms.said();
    let Rooms { cache, .. } = &mut rooms;
    cache.contents.drop(key(4), &mut cache.ram);
    rooms.admitted(&[4]);
    rooms.pump();
    assert_eq!(rooms.said(), [(4, EntryKind::Invalidate, false)]);
    assert!(!rooms.has(4), "the log may not say that it is gone while it is there");
    rooms.store.begin_flush();
    rooms.store.end_flush();
    rooms.pump();
    assert_eq!(rooms.said(), []);
    assert_eq!(rooms.contents.check(), Ok(()));
}

#[test]
fn a_device_that_is_given_up_leaves_nothing_to_be_named() {
    let mut rooms = rooms();
    rooms.admitted(&[4]);
    let unit = rooms.admits(&[8]);
    rooms.contents.give_up();
    rooms.store.give_up();
    assert_eq!(rooms.contents.check(), Ok(()));
    assert!(!rooms.contents.is_unnamed(key(4)) && !rooms.store.is_entering(key(8)));
    assert!(rooms.store.flush_at().is_none() && !rooms.store.wants_flush(rooms.now));
    drop(unit);
}

#[test]
fn a_round_weighs_few_blocks_in_a_turn_and_goes_on_soon() {
    let mut rooms = rooms_with(16, false);
    let blocks: Vec<u64> = (0..40).map(|n| n * 8).collect();
    for &block in &blocks {
        rooms.ram.put(key(block), &content(block), Standing::Alone);
    }
    rooms.ram.alone().note();
    let Rooms { cache, fx, .. } = &mut rooms;
    cache.pump_alone(fx);
    assert_eq!(cache.next_visit(), Some(cache.now + Duration::from_millis(100)), "it begins");
    rooms.cache.now = rooms.now + Duration::from_secs(60);
    let mut turns = Vec::new();
    while rooms.ram.has_alone() {
        let before = rooms.counters().admitted_blocks;
        let Rooms { cache, fx, .. } = &mut rooms;
        cache.pump_alone(fx);
        let soon = cache.next_visit() == Some(cache.now + Duration::from_millis(1));
        turns.push((rooms.counters().admitted_blocks - before, soon));
    }
    assert_eq!(turns, [(16, true), (16, true), (8, false)]);
}

#[test]
fn missed_blocks_go_past_the_log_except_for_a_few() {
    let mut rooms = rooms_by(Eviction::Fifo, EXTENTS, false);
    let mut ways = Vec::new();
    for block in (0..8).map(|n| n * 8) {
        rooms.ram.put(key(block), &content(block), Standing::Alone);
        let Rooms { cache, fx, .. } = &mut rooms;
        let group = block..block + 1;
        assert!(cache.weigh(group, fx).is_ok());
        let logged = rooms.log.builder().admits(key(block), 1);
        ways.push(logged);
        match logged {
            true => assert!(rooms.sent().is_empty()),
            false => {
                let unit = rooms.only();
                rooms.unit_done(unit);
            }
        }
    }
    assert_eq!(ways, [false, false, false, true, false, false, false, true]);
    assert_eq!(rooms.counters().admitted_blocks, 8);
    // Zeros have no payload, so the log has them.
    let Rooms { cache, fx, .. } = &mut rooms;
    assert!(!cache.admit_to_store(&[(key(900), &[0; BLOCK_SIZE])], fx));
    // What is locked, or on its way, is not admitted again.
    for block in [1000, 1008] {
        rooms.ram.put(key(block), &content(block), Standing::Alone);
    }
    assert!(rooms.locks.acquire(key(1000), Id(1)));
    rooms.admits(&[1008]);
    for block in [1000, 1008] {
        let Rooms { cache, fx, .. } = &mut rooms;
        assert!(cache.weigh(block..block + 1, fx).is_ok());
        assert!(rooms.sent().is_empty() && !rooms.log.builder().admits(key(block), 1));
    }
}
