//! Blocks on their way into the store and out of it, without requests and reclaim: what the log
//! says when, and when pages are free.

use forebay_block::{BlockRange, ByteRange, Io, IoOp};
use forebay_codec::crc32c;
use forebay_format::{ENTRY_CELLS, EntryKind, Lsn, PAGE, RECORD_CELLS_MAX, decode_record};
use forebay_policy::{LastTouch, Touch};

use crate::api::{Eviction, ShardConfig, Target};
use crate::contents::{Place, Stored};
use crate::form::Copied;
use crate::limits::RECORDS_IN_FLIGHT_MAX;
use crate::log::builder::Expect;
use crate::log::read::{Near, Reader, SegmentRead};
use crate::testing::rooms::{BLOCK, Rooms, content, key};
use crate::testing::{Devices, SEGMENT, VOLUME, config};
use crate::ticket::Ticket;

mod admitted;

/// Segments of the log, and extents of the store.
const LOG: u64 = 8;
const EXTENTS: u64 = 2;

fn rooms() -> Rooms {
    rooms_with(EXTENTS, false)
}

fn rooms_with(extents: u64, discard: bool) -> Rooms {
    rooms_by(Eviction::Fifo, extents, discard)
}

fn rooms_by(eviction: Eviction, extents: u64, discard: bool) -> Rooms {
    let (cache, primary) = ((LOG + extents) * u64::from(SEGMENT), 4000 * BLOCK);
    let log_segments = Some(LOG as u32);
    let config = ShardConfig {
        log_segments,
        discard,
        eviction,
        index_blocks: 1000,
        ..config(cache, primary)
    };
    Rooms::with(config, Devices::new(cache, primary))
}

impl Rooms {
    fn place(&self, block: u64) -> Place {
        self.contents.get(key(block)).expect("it is cached")
    }

    /// The last request for a block.
    fn touch(&mut self, block: u64) -> Touch {
        let place = self.place(block);
        if self.contents.is_in_store(&place) {
            let pages = self.contents.pages();
            return pages.last(pages.of(&place).start).touch;
        }
        LastTouch::from_meta(place.meta, self.policy.stamp()).touch
    }

    /// Writes neighboring blocks to the store; returns the write.
    fn move_out(&mut self, blocks: &[u64]) -> (Target, Io) {
        assert!(self.has_moved(blocks), "there is room");
        self.only()
    }

    /// Writes neighboring blocks to the store if there is room.
    fn has_moved(&mut self, blocks: &[u64]) -> bool {
        let copied = |&block: &u64| {
            let place = self.place(block);
            (Copied::new(key(block), place, content(block).to_vec()), place)
        };
        let copies = blocks.iter().map(copied).collect();
        let Self { cache, fx, .. } = self;
        cache.send_to_store(copies, fx).is_ok()
    }

    /// Ends the write of a unit.
    fn unit_done(&mut self, io: (Target, Io)) {
        let (sent, done) = self.end(io, Ok(()));
        let Ticket::Unit { id, tries } = sent.ticket else { panic!("{:?}", sent.ticket) };
        let Self { cache, fx, .. } = self;
        cache.unit_written(id, tries, done, fx);
    }

    fn flush_units(&mut self) {
        assert!(self.store.wants_flush(self.now));
        self.store.begin_flush();
        self.store.end_flush();
    }

    fn pump(&mut self) {
        let Self { cache, fx, .. } = self;
        cache.pump_store(fx);
    }

    /// Closes the record being built; returns the blocks of its entries and their kinds.
    fn said(&mut self) -> Vec<(u64, EntryKind, bool)> {
        let Self { cache, fx, .. } = self;
        assert!(cache.close_record(fx));
        let is_record = |(_, io): &(Target, Io)| decode_record(&io.buf[..PAGE]).ok();
        let record = self.fx.ios.iter().rev().find_map(is_record);
        let entries = record.map(|record| record.entries).unwrap_or_default();
        self.settle();
        entries.iter().map(|entry| (entry.block, entry.kind, entry.stored.is_some())).collect()
    }

    /// Stores dirty units until there is room for `left` of them; returns the pages in use.
    fn fill_with_dirty(&mut self, left: u64) -> u64 {
        let mut first = 400;
        while self.store.room_for(4) > left {
            let blocks: Vec<u64> = (first..first + 4).collect();
            self.dirty(blocks.clone());
            self.stored(&blocks);
            first += 4;
        }
        self.said();
        self.store.used_pages()
    }

    /// Puts a clean block into the store as a unit of its own, as recovery might have found it.
    fn fill_page(&mut self, block: u64) {
        let crate::cache::Cache { store, contents, ram, now, .. } = &mut self.cache;
        let unit = store.take(1, contents.pages()).expect("there is room");
        let (segment, offset) = contents.pages().place(unit.start);
        let (len, crc) = (BLOCK as u16, crc32c(&content(block)));
        let place =
            Place { segment, offset, len, kind: EntryKind::Raw, crc, dirty: false, meta: 0 };
        contents.place(*now, key(block), place, None, false, ram);
    }

    /// A log and a store, both empty.
    pub(crate) fn with_store() -> Self {
        rooms()
    }

    /// The blocks are in the store durably, and the log does not say so yet.
    pub(crate) fn ready(&mut self, blocks: &[u64]) {
        let unit = self.move_out(blocks);
        self.unit_done(unit);
        self.flush_units();
    }

    /// The blocks are in the store, and the log says so durably.
    pub(crate) fn stored(&mut self, blocks: &[u64]) {
        self.ready(blocks);
        self.pump();
        assert_eq!(self.said().len(), blocks.len());
        self.flush_device();
    }
}

#[test]
fn a_block_is_known_by_its_last_request_in_the_log_and_in_the_store() {
    let mut rooms = rooms_by(Eviction::Lru, EXTENTS, false);
    rooms.dirty([4, 6]);
    assert_eq!([4, 6].map(|block| rooms.touch(block)), [Touch::Written; 2]);
    rooms.dirty([4]);
    rooms.clean([5]);
    let read = |rooms: &mut Rooms, block| {
        let place = rooms.place(block);
        rooms.note_device_hit(key(block), &place);
    };
    read(&mut rooms, 6);
    let all = [(4, Touch::Rewritten), (5, Touch::Read), (6, Touch::Read)];
    for (block, touch) in all {
        assert_eq!(rooms.touch(block), touch, "{block} in the log");
        rooms.stored(&[block]);
        assert_eq!(rooms.touch(block), touch, "{block} in the store");
    }
    read(&mut rooms, 4);
    assert_eq!(rooms.touch(4), Touch::Read);
    // A new version in the log.
    rooms.dirty([5]);
    assert_eq!(rooms.touch(5), Touch::Rewritten);
}

#[test]
fn the_log_names_a_unit_when_it_is_durable() {
    let mut rooms = rooms();
    rooms.clean([4, 5, 6, 7]);
    let unit = rooms.move_out(&[4, 5, 6, 7]);
    let at = LOG * u64::from(SEGMENT);
    let range = ByteRange::new(at, 4 * BLOCK);
    assert_eq!((unit.0, unit.1.op, unit.1.range), (Target::Cache, IoOp::Write, range));
    rooms.pump();
    assert!(rooms.said().is_empty(), "it is not written");
    rooms.unit_done(unit);
    rooms.pump();
    assert!(rooms.said().is_empty(), "it is not flushed");
    rooms.flush_units();
    rooms.pump();
    assert!(rooms.place(4).segment < LOG as u32, "the log does not say so yet");
    let mut said = rooms.said();
    said.sort_unstable_by_key(|entry| entry.0);
    assert_eq!(said, [4, 5, 6, 7].map(|block| (block, EntryKind::Raw, true)));
    for (i, block) in (4..8).enumerate() {
        let Place { segment, offset, .. } = rooms.place(block);
        assert_eq!((segment, offset), (LOG as u32, i as u32 * PAGE as u32));
    }
    assert_eq!(rooms.contents.check(), Ok(()));
}

/// A block may be put together from a delta that is not durable: found by reading, 2026-11-23.
#[test]
fn a_dirty_block_is_unsettled_until_the_entry_that_names_it_is_durable() {
    let mut rooms = rooms();
    rooms.dirty([9]);
    let unit = rooms.move_out(&[9]);
    rooms.unit_done(unit);
    rooms.flush_units();
    rooms.pump();
    assert_eq!(rooms.said(), [(9, EntryKind::Raw, true)]);
    assert!(rooms.place(9).dirty);
    let named = rooms.log.completed();
    assert_eq!(rooms.contents.unsettled(key(9)), Some(named));
    rooms.flush_device();
    assert_eq!(rooms.contents.unsettled(key(9)), None);
}

#[test]
fn a_dirty_block_that_cannot_be_read_back_stays_fenced_when_it_is_named_again() {
    let mut rooms = rooms();
    rooms.dirty([4, 5]);
    rooms.stored(&[4, 5]);
    rooms.fence(key(4));
    let place = rooms.place(4);
    let Rooms { cache, fx, .. } = &mut rooms;
    assert!(cache.push_mapping(fx, key(4), place));
    assert_eq!(rooms.said(), [(4, EntryKind::Raw, true)]);
    assert!(rooms.contents.fenced().contains(&key(4)), "its bytes are as bad as before");
    rooms.dirty([4]);
    assert!(rooms.contents.fenced().is_empty(), "it was written");
    assert_eq!(rooms.contents.check(), Ok(()));
}

#[test]
fn a_block_is_named_as_it_is_when_the_record_closes() {
    let mut rooms = rooms();
    rooms.clean([4, 5]);
    rooms.stored(&[4, 5]);
    let (four, five) = (rooms.place(4), rooms.place(5));
    rooms.dirty([5]);
    // The first has left and come back to its place with other bytes; the second was written.
    let before = Place { crc: !four.crc, ..four };
    let Rooms { cache, fx, .. } = &mut rooms;
    assert!(cache.push_mapping(fx, key(4), before) && cache.push_mapping(fx, key(5), five));
    assert_eq!(rooms.said(), [(4, EntryKind::Raw, true)]);
    assert_eq!(rooms.place(4), four);
    assert_eq!(rooms.contents.check(), Ok(()));
}

#[test]
fn a_block_that_was_written_meanwhile_does_not_enter_the_store() {
    let mut rooms = rooms();
    rooms.dirty([9]);
    let unit = rooms.move_out(&[9]);
    rooms.dirty([9]);
    rooms.unit_done(unit);
    rooms.flush_units();
    rooms.pump();
    assert!(rooms.said().is_empty());
    assert!(rooms.place(9).segment < LOG as u32);
    // Its page is free after the next record.
    rooms.dirty([10]);
    rooms.flush_device();
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), 0);
    assert_eq!(rooms.contents.check(), Ok(()));
}

/// Nothing holds the old page while a unit is written and flushed: found by reading, 2026-11-30.
#[test]
fn a_block_that_came_to_its_place_again_meanwhile_does_not_enter_the_store() {
    let mut rooms = rooms();
    rooms.clean([9]);
    rooms.stored(&[9]);
    let unit = rooms.move_out(&[9]);
    let place = rooms.place(9);
    rooms.forget(9);
    let newer = Place { crc: !place.crc, ..place };
    let Rooms { cache, .. } = &mut rooms;
    cache.contents.place_unnamed(cache.now, key(9), newer, &mut cache.ram);
    rooms.unit_done(unit);
    rooms.flush_units();
    rooms.pump();
    assert!(rooms.said().is_empty());
    assert_eq!(rooms.place(9), newer);
    assert_eq!(rooms.contents.check(), Ok(()));
}

#[test]
fn a_slot_is_free_when_the_record_that_frees_it_is_durable() {
    let mut rooms = rooms();
    rooms.clean([4, 5]);
    rooms.stored(&[4, 5]);
    assert_eq!(rooms.store.used_pages(), 2);
    rooms.dirty([4, 5]);
    assert!(rooms.place(4).segment < LOG as u32, "the new version is in the log");
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), 2, "a crash may bring the old version back");
    rooms.flush_device();
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), 0);
}

#[test]
fn what_leaves_the_store_without_an_entry_gets_one_before_its_page_is_free() {
    let mut rooms = rooms();
    rooms.clean([4]);
    rooms.stored(&[4]);
    let before = rooms.log.next_lsn();
    let crate::cache::Cache { contents, ram, .. } = &mut rooms.cache;
    contents.drop(key(4), ram);
    // A record that does not say so frees nothing.
    rooms.dirty([20]);
    rooms.flush_device();
    assert!(rooms.contents.has_unlogged());
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), 1);
    assert_eq!(rooms.log.barrier(), Lsn(before.0 + 1), "direct writes wait for the entry");
    assert_eq!(rooms.said(), [(4, EntryKind::Invalidate, false)]);
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), 1, "the entry is not durable");
    rooms.flush_device();
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), 0);
}

#[test]
fn a_store_with_few_free_slots_evicts_a_clean_unit_and_says_so_first() {
    let mut rooms = rooms();
    let dirty = rooms.fill_with_dirty(4);
    // A page of a database that does not begin at a multiple of its length.
    rooms.clean([5, 6, 7, 8]);
    rooms.stored(&[5, 6, 7, 8]);
    rooms.dirty([12, 13, 14, 15]);
    let next = rooms.log.next_lsn();
    // A sample of an index that is nearly empty often finds nothing.
    while rooms.log.barrier() != next {
        rooms.pump();
    }
    assert_eq!(rooms.said(), [5, 6, 7, 8].map(|block| (block, EntryKind::Invalidate, false)));
    assert!(rooms.contents.get(key(5)).is_none());
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), dirty + 4, "no slot is free before that is durable");
    rooms.flush_device();
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), dirty);
    assert_eq!(rooms.contents.check(), Ok(()));
}

#[test]
fn what_finds_no_room_in_the_log_does_not_count_as_evicted() {
    let mut rooms = rooms();
    rooms.fill_with_dirty(4);
    rooms.clean([5, 6, 7, 8]);
    rooms.stored(&[5, 6, 7, 8]);
    let bare = |rooms: &mut Rooms| {
        let Rooms { cache, fx, .. } = rooms;
        cache.push_bare(fx, key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
    };
    for _ in 0..RECORDS_IN_FLIGHT_MAX {
        bare(&mut rooms);
        let Rooms { cache, fx, .. } = &mut rooms;
        assert!(cache.close_record(fx), "there is room");
    }
    // Of the entries of this record, three more fit.
    while rooms.log.builder().cells() + 4 * ENTRY_CELLS <= RECORD_CELLS_MAX {
        bare(&mut rooms);
    }
    let next = rooms.log.next_lsn();
    while rooms.log.barrier() != next {
        rooms.pump();
    }
    assert_eq!((rooms.counters().evicted_blocks, rooms.store.coming()), (3, 0));
}

#[test]
fn a_unit_gets_room_among_shorter_ones_and_most_of_them_stay() {
    let mut rooms = rooms_with(32, false);
    let pages = 32 * u64::from(SEGMENT) / BLOCK;
    // No two blocks are neighbors, so that each is a unit.
    (0..pages).for_each(|i| rooms.fill_page(1000 + 2 * i));
    let four = [4, 5, 6, 7];
    rooms.clean(four);
    assert!(!rooms.has_moved(&four));
    for _ in 0..1000 {
        rooms.pump();
        rooms.said();
        rooms.flush_device();
    }
    assert!(rooms.has_moved(&four));
    let used = rooms.store.used_pages();
    assert!(used > pages / 10 * 7, "{used} of {pages}");
    assert_eq!(rooms.contents.check(), Ok(()));
}

#[test]
fn a_dirty_unit_is_not_evicted() {
    let mut rooms = rooms();
    rooms.dirty([4, 5, 6, 7]);
    rooms.stored(&[4, 5, 6, 7]);
    rooms.fill_with_dirty(3);
    assert_eq!(rooms.said(), []);
    (0..1000).for_each(|_| rooms.pump());
    assert!(rooms.said().is_empty());
    assert!(rooms.place(4).segment >= LOG as u32);
}

#[test]
fn a_pinned_unit_is_not_evicted_and_always_deserves_its_place() {
    let mut rooms = rooms();
    rooms.clean([4, 5, 6, 7]);
    rooms.stored(&[4, 5, 6, 7]);
    // One block of the unit is enough.
    rooms.set_pins(VOLUME, &[BlockRange { first: 6, count: 1 }]);
    rooms.fill_with_dirty(3);
    (0..1000).for_each(|_| rooms.pump());
    assert!(rooms.said().is_empty());
    assert!(rooms.place(4).segment >= LOG as u32);
    let old = LastTouch { stamp: 0, touch: Touch::Read };
    assert!(rooms.deserve_store(key(6).0..key(7).0, old));
    rooms.set_pins(VOLUME, &[]);
    let next = rooms.log.next_lsn();
    while rooms.log.barrier() != next {
        rooms.pump();
    }
    assert_eq!(rooms.said(), [4, 5, 6, 7].map(|block| (block, EntryKind::Invalidate, false)));
}

#[test]
fn a_read_keeps_its_pages() {
    let mut rooms = rooms();
    rooms.clean([4]);
    rooms.stored(&[4]);
    let item = crate::contents::Stored { key: key(4), place: rooms.place(4) };
    let read = crate::log::read::SegmentRead::one(crate::log::read::Reader::Copies, item);
    let Rooms { cache, fx, .. } = &mut rooms;
    cache.read_payloads(read, fx);
    let io = rooms.only();
    rooms.dirty([4]);
    rooms.flush_device();
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), 1, "the read is in flight");
    let (sent, done) = rooms.end(io, Ok(()));
    let Ticket::Payloads(read) = sent.ticket else { panic!("{:?}", sent.ticket) };
    assert_eq!(read.payload(&done, &item), Some(&content(4)[..]));
    rooms.end_read(&read);
    rooms.dirty([20]);
    rooms.flush_device();
    rooms.pump();
    assert_eq!(rooms.store.used_pages(), 0);
}

/// Rooms of which three extents were used and are free, durably, but for the last pump.
fn with_free_extents(discard: bool) -> Rooms {
    let mut rooms = rooms_with(4, discard);
    let blocks: Vec<u64> = (100..148).collect();
    for unit in blocks.chunks(4) {
        rooms.clean(unit.iter().copied());
        rooms.stored(unit);
    }
    assert_eq!(rooms.store.used_pages(), 48);
    for block in blocks {
        let crate::cache::Cache { contents, ram, .. } = &mut rooms.cache;
        contents.drop(key(block), ram);
    }
    rooms.pump();
    assert_eq!(rooms.said().len(), 48);
    rooms.pump();
    assert!(rooms.sent().is_empty(), "a crash may bring the blocks back");
    rooms.flush_device();
    rooms
}

#[test]
fn an_extent_is_discarded_when_the_record_that_frees_it_is_durable() {
    let mut rooms = with_free_extents(true);
    rooms.pump();
    let (target, io) = rooms.only();
    let range = ByteRange::new(LOG * u64::from(SEGMENT), u64::from(SEGMENT));
    assert_eq!((target, io.op, io.range), (Target::Cache, IoOp::Discard, range));
    rooms.cache.now = rooms.cache.now + std::time::Duration::from_secs(1);
    rooms.pump();
    assert!(rooms.sent().is_empty(), "one at a time, and two extents stay ready");
    let (sent, done) = rooms.end((target, io), Ok(()));
    assert!(matches!(sent.ticket, Ticket::Discard));
    rooms.extent_discarded(done.result.is_ok());
    assert_eq!(rooms.stats.discarded_bytes, u64::from(SEGMENT));
}

#[test]
fn a_device_that_fails_a_discard_gets_no_more_and_does_not_count_as_failed() {
    let mut rooms = with_free_extents(true);
    rooms.pump();
    let io = rooms.only();
    let (sent, done) = rooms.end(io, Err(forebay_block::ErrorKind::Media.into()));
    rooms.note_ended(Target::Cache, &sent, &done);
    rooms.extent_discarded(done.result.is_ok());
    assert_eq!((rooms.stats.cache_errors, rooms.stats.discarded_bytes), (0, 0));
    assert_eq!((rooms.next_discard(), rooms.store.used_pages()), (None, 0));
}

#[test]
fn a_device_that_takes_no_discards_gets_none() {
    let mut rooms = with_free_extents(false);
    rooms.pump();
    assert!(rooms.sent().is_empty());
    assert_eq!(rooms.next_discard(), None);
}

/// Only the oldest segment can help. Found by the simulator, seed 100064764.
#[test]
fn pages_on_their_way_are_no_room_for_an_index_full_of_blocks_of_the_log() {
    let mut rooms = rooms();
    let Rooms { cache, fx, .. } = &mut rooms;
    let zeros = [0; BLOCK as usize];
    (100..1095).for_each(|block| assert!(cache.push_admitted(fx, key(block), &zeros)));
    rooms.said();
    rooms.clean([1]);
    rooms.stored(&[1]);
    rooms.dirty([1]);
    rooms.pump();
    assert!(rooms.index_is_tight());
    assert!(rooms.store.coming() > 0, "the page is free when the new version is durable");
    assert!(rooms.store.is_full());
}

/// A hold on a free page would free it once more: found by the simulator, seed 80083445.
#[test]
fn a_read_holds_no_free_page_between_its_payloads() {
    let mut rooms = rooms();
    rooms.clean([1, 2, 3]);
    [1, 2, 3].into_iter().for_each(|block| rooms.stored(&[block]));
    rooms.dirty_durable([2]);
    rooms.pump();
    let items: Vec<Stored> =
        [1, 3].map(|block| Stored { key: key(block), place: rooms.place(block) }).into();
    let near = Near::Pages(PAGE as u32, SEGMENT);
    let read = SegmentRead::all(Reader::Copies, near, items).next().expect("there are payloads");
    assert_eq!(read.items.len(), 2, "it is one read");
    let uses = |rooms: &mut Rooms| [0, 1, 2].map(|page| rooms.contents.pages().uses(page));
    assert_eq!(uses(&mut rooms), [1, 0, 1]);
    let Rooms { cache, fx, .. } = &mut rooms;
    cache.read_payloads(read, fx);
    assert_eq!(uses(&mut rooms), [2, 0, 2]);
    let sent = rooms.only();
    let (sent, _) = rooms.end(sent, Ok(()));
    let Ticket::Payloads(read) = sent.ticket else { panic!("{:?}", sent.ticket) };
    rooms.end_read(&read);
    assert_eq!((uses(&mut rooms), rooms.contents.pages().freed()), ([1, 0, 1], 0));
}
