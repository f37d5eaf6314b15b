//! Reclaim on a log that is nearly full, without the rooms that its copies come from and go to.

use std::time::Duration;

use forebay_block::{ErrorKind, Io, IoResult, VolumeId};
use forebay_codec::crc32c;
use forebay_format::{
    ENTRY_CELLS, EntryKind, FOOTER_TRAILER_BYTES, RECORD_CELLS_MAX, decode_record,
};
use forebay_policy::{Candidate, EvictionPolicy, Touch};

use super::copy::READ_TRIES;
use super::name::NAME_PATIENCE;
use super::*;
use crate::api::{ContentLocality, Health, Part, Target};
use crate::contents::Place;
use crate::key::Key;
use crate::limits::SORTED_ONE_IN;
use crate::log::builder::Expect;
use crate::testing::rooms::{FILL, Rooms, content, key};
use crate::ticket::Ticket;
use forebay_policy::Standing;

/// Keeps every block for which there is room, but none that only fills the log.
#[derive(Clone, Debug)]
struct KeepAll;

impl EvictionPolicy for KeepAll {
    fn inserted(&self, _touch: Touch) -> u8 {
        0
    }

    fn sealed(&mut self, _live_segments: u64) {}

    fn choose(&mut self, blocks: &mut [Candidate], copy_bytes: u64) {
        let mut left = copy_bytes;
        for block in blocks {
            block.keep = block.key < key(FILL).0 && u64::from(block.bytes) <= left;
            left -= if block.keep { u64::from(block.bytes) } else { 0 };
        }
    }
}

/// Reclaim, and the rooms that it works on.
struct Bed {
    rooms: Rooms,
    reclaim: Reclaim,
}

impl Bed {
    /// A log with `free` free segments, and dirty and clean blocks in its oldest one.
    fn with(dirty: &[u64], clean: &[u64], free: u64) -> Self {
        let mut bed = Self::on(Rooms::new(0));
        bed.rooms.dirty(dirty.iter().copied());
        bed.rooms.clean(clean.iter().copied());
        bed.rooms.fill_to(free);
        bed
    }

    fn on(rooms: Rooms) -> Self {
        Self { rooms, reclaim: Reclaim::default() }
    }

    fn keep_all(mut self) -> Self {
        self.rooms.policy = Box::new(KeepAll);
        self
    }

    fn pump(&mut self) {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        self.reclaim.pump(cache, fx);
    }

    /// The read that reclaim has sent, or sends next.
    fn read(&mut self) -> (Target, Io) {
        if self.rooms.fx.ios.is_empty() {
            self.pump();
        }
        self.rooms.only()
    }

    fn end(&mut self, sent: (Target, Io), result: IoResult<()>) {
        let (sent, mut done) = self.rooms.end(sent, result);
        let Ticket::Payloads(read) = sent.ticket else { panic!("{sent:?}") };
        let Rooms { cache, fx, .. } = &mut self.rooms;
        cache.log.end_read(&read);
        match read.reader {
            Reader::Footer => self.reclaim.footer_read(cache, &mut done, fx),
            Reader::Copies => self.reclaim.copies_read(cache, &read, &done, fx),
            Reader::Associate(id, part) => {
                let made = cache.form.associate_read(id, part, &read, &mut done);
                let Some(made) = made else { return };
                let mut room = [0; BLOCK_SIZE];
                let block = made.block(&mut room);
                self.reclaim.put_together(cache, &made.item, block, made.error.as_ref(), fx);
            }
            other => panic!("{other:?}"),
        }
    }

    /// Reads all that reclaim wants to read.
    fn copy(&mut self) {
        self.pump();
        while let Some(read) = self.rooms.fx.ios.pop() {
            self.end(read, Ok(()));
        }
        let Rooms { cache, fx, .. } = &mut self.rooms;
        self.reclaim.pump_copies(cache, fx);
    }

    /// The copies in the record being built: the block, what is said of it, whether it is dirty.
    fn copies(&mut self) -> Vec<(u64, EntryKind, bool)> {
        let pending = &self.rooms.log.builder().pending;
        assert!(pending.iter().all(|item| matches!(item.expect, Expect::At(_))));
        pending.iter().map(|item| (item.key.block(), item.kind, item.dirty)).collect()
    }

    fn has_failed(&mut self) -> bool {
        match &self.rooms.notes()[..] {
            [] => false,
            [Note::CacheFailed] => true,
            other => panic!("{other:?}"),
        }
    }

    fn is_cached(&self, block: u64) -> bool {
        self.rooms.contents.get(key(block)).is_some()
    }

    fn wait(&mut self, time: Duration) {
        self.rooms.now = self.rooms.now + time;
    }
}

const RAW: EntryKind = EntryKind::Raw;

#[test]
fn nothing_is_reclaimed_while_enough_segments_are_free() {
    let mut bed = Bed::with(&[1], &[2], RECLAIM_RESERVE + 2);
    bed.pump();
    assert!(bed.rooms.fx.ios.is_empty());
    bed.rooms.fill_to(RECLAIM_RESERVE + 1);
    bed.pump();
    assert_eq!(bed.rooms.fx.ios.len(), 1);
}

#[test]
fn dirty_blocks_are_copied_and_clean_ones_leave_the_cache() {
    let mut bed = Bed::with(&[1, 2], &[3, 4], 3);
    bed.copy();
    assert_eq!(bed.copies(), [(1, RAW, true), (2, RAW, true)]);
    assert_eq!([1, 2, 3, 4].map(|block| bed.is_cached(block)), [true, true, false, false]);
    assert!(bed.is_cached(FILL + 7), "it lies in the next segment");
    bed.rooms.log_record();
    for block in [1, 2] {
        let place = bed.rooms.contents.get(key(block)).expect("it is cached");
        assert!(bed.rooms.log.seq_of(&place) > SegmentSeq(1) && place.dirty);
        let at = bed.rooms.segment_offset(place.segment as usize) as usize + place.offset as usize;
        assert_eq!(bed.rooms.devices.cache[at..at + BLOCK_SIZE], content(block));
    }
}

#[test]
fn a_segment_is_free_only_when_the_record_with_the_new_start_is_durable() {
    let mut bed = Bed::with(&[1], &[], 3);
    let state = |bed: &Bed| bed.rooms.log.segment(1).state;
    bed.copy();
    bed.pump();
    assert_eq!(state(&bed), SegmentState::Sealed, "its block is not in a record yet");
    bed.rooms.log_record();
    bed.rooms.flush_device();
    assert_eq!(state(&bed), SegmentState::Sealed);
    bed.pump();
    assert_eq!((state(&bed), bed.rooms.log.freeing()), (SegmentState::Freeing, 1));
    assert!(bed.rooms.log.needs_checkpoint(u64::MAX));
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    cache.push_bare(fx, Key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
    assert!(cache.close_record(fx));
    let header = decode_record(&fx.ios[0].1.buf[..PAGE]).expect("it is a record").header;
    assert_eq!(header.start, SegmentSeq(2));
    bed.rooms.log.finish_freeing(u64::MAX);
    assert_eq!(state(&bed), SegmentState::Freeing, "a crash may lose the record");
    bed.rooms.settle();
    bed.rooms.flush_device();
    assert_eq!(state(&bed), SegmentState::Free);
}

#[test]
fn a_segment_without_blocks_is_freed_without_being_read() {
    let mut bed = Bed::with(&[1], &[], 3);
    [1].into_iter().chain(FILL..FILL + 13).for_each(|block| bed.rooms.forget(block));
    assert_eq!(bed.rooms.contents.live_in(1), 0);
    bed.pump();
    assert!(bed.rooms.fx.ios.is_empty());
    assert_eq!(bed.rooms.log.segment(1).state, SegmentState::Freeing);
}

#[test]
fn clean_blocks_that_the_policy_keeps_are_copied_clean() {
    let mut bed = Bed::with(&[1], &[2, 3], 3).keep_all();
    bed.copy();
    assert_eq!(bed.copies()[..3], [(1, RAW, true), (2, RAW, false), (3, RAW, false)]);
}

#[test]
fn nothing_clean_is_copied_when_copies_would_take_the_last_segment() {
    let mut bed = Bed::with(&[], &[2, 3], 1).keep_all();
    bed.copy();
    assert!(!bed.is_cached(2) && !bed.is_cached(3));
    assert!(bed.copies().is_empty());
}

#[test]
fn before_the_primary_is_written_directly_it_is_durable_which_blocks_have_left() {
    let mut bed = Bed::with(&[1], &[2], 3);
    assert!(!bed.rooms.log.has_evicted());
    bed.copy();
    assert!(bed.rooms.log.has_evicted());
    let next = bed.rooms.log.next_lsn();
    assert_eq!(bed.rooms.log.barrier(), next);
}

#[test]
fn a_block_that_is_rewritten_while_it_is_read_is_not_copied() {
    let mut bed = Bed::with(&[1, 2], &[], 3);
    let footer = bed.read();
    bed.end(footer, Ok(()));
    let copies = bed.rooms.only();
    bed.rooms.spoil(1);
    bed.rooms.dirty([1]);
    bed.end(copies, Ok(()));
    assert_eq!(bed.copies(), [(2, RAW, true)]);
    assert!(bed.rooms.contents.fenced().is_empty(), "the older version is not needed");
}

#[test]
fn a_block_that_becomes_clean_while_it_is_read_is_copied_clean() {
    let mut bed = Bed::with(&[1], &[], 3);
    let footer = bed.read();
    bed.end(footer, Ok(()));
    let copies = bed.rooms.only();
    bed.rooms.mark_clean(1);
    bed.end(copies, Ok(()));
    assert_eq!(bed.copies(), [(1, RAW, false)]);
}

#[test]
fn zeros_are_copied_without_being_read() {
    let mut bed = Bed::on(Rooms::new(0));
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    assert!(cache.push_written(fx, key(1), &[0; BLOCK_SIZE]));
    bed.rooms.log_record();
    bed.rooms.fill_to(3);
    let footer = bed.read();
    bed.end(footer, Ok(()));
    assert!(bed.rooms.fx.ios.is_empty());
    bed.copy();
    assert_eq!(bed.copies(), [(1, EntryKind::Zero, true)]);
}

/// To queue 100,000 at once took 10 ms.
#[test]
fn blocks_that_need_not_be_read_are_queued_in_steps() {
    let mut bed = Bed::with(&[1], &[], 3);
    let mut job = Job::new(SegmentSeq(1));
    let place = Place { kind: EntryKind::Zero, ..bed.rooms.contents.get(key(1)).expect("cached") };
    job.to_read = (0..5000).map(|block| Stored { key: key(100 + block), place }).collect();
    bed.reclaim.state = State::Copying(job);
    let queued = |bed: &Bed| bed.reclaim.job().expect("it goes on").to_copy.len();
    for expected in [COPIES_MAX, COPIES_MAX, 5000 - 2 * COPIES_MAX] {
        bed.pump();
        bed.pump();
        assert_eq!(queued(&bed), expected);
        assert!(!bed.reclaim.is_cut_short(&bed.rooms), "it waits for the log");
        let is_last = expected < COPIES_MAX;
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        bed.reclaim.pump_copies(cache, fx);
        assert_eq!(queued(&bed), 0, "they have left the cache");
        assert_eq!(bed.reclaim.is_cut_short(&bed.rooms), !is_last, "no I/O wakes the thread");
    }
}

/// For 25,000 to leave at once took 8 ms.
#[test]
fn without_a_store_clean_blocks_leave_in_steps() {
    let mut rooms = Rooms::new(0);
    for block in 0..200 {
        let Rooms { cache, fx, .. } = &mut rooms;
        assert!(cache.push_admitted(fx, key(block), &[0; BLOCK_SIZE]), "there is room");
    }
    rooms.log_record();
    rooms.fill_to(3);
    let most = u64::from(rooms.config.segment_size / SORTED_ONE_IN);
    let mut bed = Bed::on(rooms);
    let mut evicted = Vec::new();
    let footer = bed.read();
    bed.end(footer, Ok(()));
    while bed.reclaim.is_cut_short(&bed.rooms) {
        let before = bed.rooms.stats.evicted_blocks;
        bed.pump();
        evicted.push(bed.rooms.stats.evicted_blocks - before);
    }
    assert!((0..200).all(|block| !bed.is_cached(block)));
    assert!(evicted.iter().all(|&blocks| blocks <= most), "{evicted:?} of {most}");
}

#[test]
fn a_read_error_is_retried_with_growing_pauses_and_then_the_device_has_failed() {
    for fails_copies in [false, true] {
        let mut bed = Bed::with(&[1], &[], 3);
        if fails_copies {
            let footer = bed.read();
            bed.end(footer, Ok(()));
        }
        for tries in 1..=8 {
            let read = bed.read();
            bed.end(read, Err(ErrorKind::Media.into()));
            assert!(!bed.has_failed());
            bed.wait(READ_PAUSE * (1 << tries) - Duration::from_nanos(1));
            bed.pump();
            assert!(bed.rooms.fx.ios.is_empty(), "try {tries}");
            bed.wait(Duration::from_nanos(1));
        }
        let read = bed.read();
        bed.end(read, Err(ErrorKind::Media.into()));
        assert!(bed.has_failed());
    }
}

#[test]
fn a_read_that_works_makes_the_next_pause_short_again() {
    let mut bed = Bed::with(&[1], &[], 3);
    for _ in 0..3 {
        let footer = bed.read();
        bed.end(footer, Err(ErrorKind::Media.into()));
        bed.wait(Duration::from_secs(1));
    }
    let footer = bed.read();
    bed.end(footer, Ok(()));
    let copies = bed.rooms.only();
    bed.end(copies, Err(ErrorKind::Media.into()));
    assert_eq!(bed.reclaim.retry_at(), bed.rooms.now + READ_PAUSE * 2);
}

#[test]
fn copies_that_can_be_read_make_the_next_pause_short_again() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([1]);
    rooms.clean(10..15);
    rooms.dirty([2]);
    rooms.fill_to(3);
    let mut bed = Bed::on(rooms);
    let footer = bed.read();
    bed.end(footer, Ok(()));
    for _ in 0..3 {
        let first = bed.read();
        bed.end(first, Err(ErrorKind::Media.into()));
        bed.wait(Duration::from_secs(1));
    }
    let first = bed.read();
    bed.end(first, Ok(()));
    let second = bed.read();
    bed.end(second, Err(ErrorKind::Media.into()));
    assert_eq!(bed.reclaim.retry_at(), bed.rooms.now + READ_PAUSE * 2);
}

#[test]
fn a_footer_with_bad_bytes_shows_that_the_device_has_failed() {
    let mut bed = Bed::with(&[1], &[], 3);
    let end = bed.rooms.segment_offset(2) as usize;
    bed.rooms.devices.cache[end - 1] ^= 1;
    let footer = bed.read();
    bed.end(footer, Ok(()));
    assert!(bed.has_failed());
}

#[test]
fn a_footer_with_another_number_of_entries_shows_that_the_device_has_failed() {
    for change in [-1, 1] {
        let mut bed = Bed::with(&[1], &[], 3);
        let end = bed.rooms.segment_offset(2) as usize;
        let trailer = &mut bed.rooms.devices.cache[end - FOOTER_TRAILER_BYTES..end];
        // Its 5th field, as docs/internals/format.md has it; the second is the CRC.
        let entries = u32::from_le_bytes(trailer[16..20].try_into().expect("four bytes"));
        trailer[16..20].copy_from_slice(&entries.wrapping_add_signed(change).to_le_bytes());
        let crc = crc32c(&trailer[12..]);
        trailer[8..12].copy_from_slice(&crc.to_le_bytes());
        let footer = bed.read();
        bed.end(footer, Ok(()));
        let mut has_failed = bed.has_failed();
        while bed.reclaim.is_cut_short(&bed.rooms) && !has_failed {
            bed.pump();
            has_failed = bed.has_failed();
        }
        assert!(has_failed, "{change}");
    }
}

#[test]
fn a_dirty_block_with_bad_bytes_is_written_from_ram_or_else_said_to_be_lost() {
    let mut bed = Bed::with(&[1, 2], &[], 3);
    [1, 2].into_iter().for_each(|block| bed.rooms.spoil(block));
    bed.rooms.cache.ram = crate::ram::Ram::new(4 << 12, false);
    bed.rooms.ram.put(key(1), &content(1), Standing::Doubled);
    bed.copy();
    assert_eq!(bed.copies(), [(1, RAW, true), (2, EntryKind::Lost, true)]);
    assert!(bed.rooms.contents.fenced().iter().eq([&key(2)]));
}

#[test]
fn a_clean_block_with_bad_bytes_leaves_the_cache() {
    let mut bed = Bed::with(&[], &[1, 2], 3).keep_all();
    bed.rooms.spoil(1);
    bed.copy();
    assert_eq!(bed.copies()[0], (2, RAW, false));
    assert!(!bed.is_cached(1) && bed.rooms.counters().corrupt_clean == 1);
}

#[test]
fn a_block_whose_base_lies_in_the_segment_is_written_whole() {
    let mut rooms = Rooms::new(4);
    rooms.config.content = ContentLocality::Rewrite;
    let mut newer = content(1);
    for bytes in [content(1), {
        newer[100] ^= 1;
        newer.clone()
    }] {
        let Rooms { cache, fx, .. } = &mut rooms;
        assert!(cache.push_written(fx, key(1), &bytes));
        cache.ram.put(key(1), &bytes, Standing::Doubled);
        rooms.log_record();
    }
    assert_eq!(rooms.contents.get(key(1)).map(|place| place.kind), Some(EntryKind::Delta));
    // RAM has lost both versions.
    rooms.cache.ram = crate::ram::Ram::new(0, false);
    rooms.fill_to(3);
    let mut bed = Bed::on(rooms);
    bed.copy();
    assert_eq!(bed.copies(), [(1, RAW, true)]);
    bed.rooms.log_record();
    let place = bed.rooms.contents.get(key(1)).expect("it is cached");
    let at = bed.rooms.segment_offset(place.segment as usize) as usize + place.offset as usize;
    assert_eq!(bed.rooms.devices.cache[at..at + BLOCK_SIZE], newer);
    bed.pump();
    assert_eq!(bed.rooms.log.segment(1).state, SegmentState::Freeing);
}

/// Found by reading, 2026-11-30: the device was given up before any read had been tried again.
#[test]
fn reads_of_bases_that_fail_together_are_one_failed_try() {
    let mut rooms = Rooms::new(32);
    rooms.config.content = ContentLocality::Rewrite;
    let blocks = 1..=u64::from(READ_TRIES) + 1;
    for changed in [0, 1] {
        for block in blocks.clone() {
            let Rooms { cache, fx, .. } = &mut rooms;
            let mut bytes = content(block);
            bytes[100] ^= changed;
            assert!(cache.push_written(fx, key(block), &bytes));
            cache.ram.put(key(block), &bytes, Standing::Doubled);
        }
        rooms.log_record();
    }
    rooms.cache.ram = crate::ram::Ram::new(0, false);
    rooms.fill_to(3);
    let mut bed = Bed::on(rooms);
    let footer = bed.read();
    bed.end(footer, Ok(()));
    bed.pump();
    let reads = bed.rooms.sent();
    assert_eq!(reads.len() as u64, 2 * blocks.end(), "of bases and deltas");
    reads.into_iter().for_each(|read| bed.end(read, Err(ErrorKind::Media.into())));
    assert!(!bed.has_failed());
    assert_eq!(bed.reclaim.retry_at(), bed.rooms.now + READ_PAUSE * 2);
    bed.wait(READ_PAUSE * 2);
    bed.pump();
    assert_eq!(bed.rooms.sent().len() as u64, 2 * blocks.end(), "all are tried again");
}

#[test]
fn a_segment_that_is_mostly_dirty_waits_for_destaging_while_much_is_dirty() {
    let dirty: Vec<u64> = (0..13).collect();
    let mut bed = Bed::on(Rooms::new(0));
    bed.rooms.dirty(dirty.iter().copied());
    bed.rooms.dirty(100..113);
    bed.rooms.fill_to(3);
    bed.pump();
    assert!(bed.rooms.log.is_pressed() && bed.rooms.fx.ios.is_empty());
    // Less than half of what it has.
    dirty[..8].iter().for_each(|&block| bed.rooms.forget(block));
    bed.pump();
    assert!(!bed.rooms.log.is_pressed());
    assert_eq!(bed.rooms.fx.ios.len(), 1);
}

/// Destaging went on at full depth until clients had filled enough segments again.
#[test]
fn what_is_dirty_no_longer_presses_when_enough_segments_are_free() {
    let mut bed = Bed::on(Rooms::new(0));
    bed.rooms.dirty(0..13);
    bed.rooms.fill_to(6);
    bed.rooms.log.press(true);
    bed.pump();
    assert!(!bed.rooms.log.is_pressed() && bed.rooms.fx.ios.is_empty());
}

#[test]
fn a_segment_that_is_mostly_dirty_moves_to_a_store_that_has_room() {
    for is_full in [false, true] {
        let mut bed = Bed::on(Rooms::with_store());
        bed.rooms.dirty(0..13);
        bed.rooms.dirty(100..113);
        bed.rooms.fill_to(3);
        bed.rooms.cache.set_dirty_limit(Part::Bytes(28 * BLOCK_SIZE as u64));
        bed.rooms.store.note_full(is_full);
        bed.rooms.fx.ios.clear();
        bed.pump();
        assert_eq!(bed.rooms.log.is_pressed(), is_full);
        assert_eq!(bed.rooms.fx.ios.len(), usize::from(!is_full));
    }
}

#[test]
fn what_belongs_to_a_primary_that_takes_nothing_is_copied_and_not_waited_for() {
    let mut bed = Bed::on(Rooms::new(0));
    bed.rooms.dirty(0..13);
    bed.rooms.dirty(100..113);
    bed.rooms.fill_to(3);
    bed.rooms.volume_mut(VolumeId(0)).failures = 1;
    bed.pump();
    assert!(!bed.rooms.log.is_pressed());
    assert_eq!(bed.rooms.fx.ios.len(), 1);
}

#[test]
fn reads_that_end_after_the_device_has_failed_change_nothing() {
    let mut bed = Bed::with(&[1], &[2], 3);
    let footer = bed.read();
    bed.reclaim.give_up(&mut bed.rooms.cache.log);
    bed.rooms.set_health(Health::Draining);
    bed.end(footer, Ok(()));
    bed.pump();
    assert!(bed.is_cached(2) && bed.copies().is_empty() && bed.rooms.fx.ios.is_empty());
    assert_eq!(bed.rooms.log.leaving(), None);
}

#[test]
fn the_log_knows_which_segment_leaves_and_what_its_copies_need() {
    let mut bed = Bed::with(&[1, 2], &[], 3);
    let footer = bed.read();
    let segment = bed.rooms.config.segment_size;
    assert_eq!(bed.rooms.log.leaving(), Some(SegmentSeq(1)));
    assert!(!bed.rooms.log.copies_fit(segment), "it is not known yet");
    bed.end(footer, Ok(()));
    assert!(bed.rooms.log.copies_fit(segment));
    assert!(!bed.rooms.log.copies_fit(segment / 4), "two blocks, entries and headers");
}

/// To start over means to name the blocks of the store again, which fills the log: found by a run
/// of sysbench that hung, 2026-11-24.
#[test]
fn copies_wait_for_records_in_flight_when_one_segment_is_free() {
    let mut bed = Bed::with(&[1], &[], 2);
    let footer = bed.read();
    bed.end(footer, Ok(()));
    let read = bed.read();
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    while !cache.log.is_busy() {
        cache.push_bare(fx, Key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
        assert!(cache.close_record(fx), "there is room");
    }
    for block in 10.. {
        if !cache.log.builder().fits_block() {
            break;
        }
        assert!(cache.push_written(fx, key(block), &content(block)), "there is room");
    }
    assert!(cache.log.is_emergency());
    bed.end(read, Ok(()));
    assert!(bed.reclaim.goes_on(), "the copy waits");
    assert_eq!(bed.reclaim.retry_at(), Instant::default());
}

/// A log whose oldest segment names blocks 4 and 5 in the store.
fn named() -> Bed {
    named_with(3)
}

/// The same with this many free segments.
fn named_with(free: u64) -> Bed {
    let mut rooms = Rooms::with_store();
    rooms.clean([4, 5]);
    rooms.stored(&[4, 5]);
    rooms.fill_to(free);
    let mut bed = Bed::on(rooms);
    bed.rooms.fx.ios.clear();
    bed
}

/// Decides about the blocks of the oldest segment.
fn decide(bed: &mut Bed) {
    let footer = bed.read();
    bed.end(footer, Ok(()));
    while bed.reclaim.is_cut_short(&bed.rooms) {
        bed.pump();
    }
}

/// Decides about the blocks of the oldest segment, and names those that have waited long enough.
fn sort(bed: &mut Bed) {
    decide(bed);
    bed.rooms.cache.now = bed.rooms.cache.now + NAME_PATIENCE;
    bed.pump();
}

#[test]
fn entries_wait_for_room_in_the_last_page_of_a_clients_record() {
    let named = |bed: &mut Bed| {
        let pending = &bed.rooms.log.builder().pending;
        pending.iter().filter(|item| matches!(item.expect, Expect::At(_))).count()
    };
    let fill = |bed: &mut Bed| {
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        bed.reclaim.fill_record(cache, fx);
    };
    let mut bed = named_with(4);
    decide(&mut bed);
    bed.pump();
    fill(&mut bed);
    assert_eq!(named(&mut bed), 0, "there is time");
    let builder = bed.rooms.log.builder();
    // Of the entries of this record one more fits the page.
    while builder.cells() + 2 * ENTRY_CELLS <= RECORD_CELLS_MAX {
        builder.push_bare(key(90), 1, EntryKind::Zero, true, Expect::Always);
    }
    fill(&mut bed);
    assert_eq!((named(&mut bed), bed.rooms.log.builder().pages()), (1, 1));
    bed.rooms.log_record();
    bed.pump();
    assert_eq!(named(&mut bed), 0);
    bed.rooms.log.builder().push_bare(key(90), 1, EntryKind::Zero, true, Expect::Always);
    fill(&mut bed);
    assert_eq!(named(&mut bed), 1);
    bed.pump();
    assert!(bed.reclaim.job().is_none_or(|job| job.to_name.is_empty()));
}

#[test]
fn entries_do_not_wait_when_few_segments_are_free() {
    let mut bed = named_with(2);
    decide(&mut bed);
    bed.pump();
    assert_eq!(bed.copies().len(), 2);
}

#[test]
fn to_start_over_names_no_block_of_the_store_twice() {
    let mut bed = named();
    sort(&mut bed);
    let mut copies = bed.copies();
    copies.sort_unstable_by_key(|&(block, ..)| block);
    assert_eq!(copies, [(4, RAW, false), (5, RAW, false)]);
    bed.rooms.log_record();
    bed.rooms.fx.ios.clear();
    let Bed { rooms, reclaim } = &mut bed;
    reclaim.begin_again(&mut rooms.log, Instant::default());
    sort(&mut bed);
    assert_eq!(bed.copies(), [], "the record before names them");
    assert!(bed.rooms.log.is_named_leaving(key(4)), "nothing new may rest on the old entry");
}

/// A block of the store that is to be moved along with copies: the job that does so, and the block.
fn moved_along(bed: &Bed) -> (Job, Stored) {
    let place = bed.rooms.contents.get(key(4)).expect("it is cached");
    assert!(bed.rooms.contents.is_in_store(&place));
    (Job::new(SegmentSeq(1)), Stored { key: key(4), place })
}

#[test]
fn what_should_move_along_and_cannot_be_read_stays_in_its_place() {
    for is_corrupt in [false, true] {
        let mut bed = named();
        let (mut job, item) = moved_along(&bed);
        job.to_read.push_back(item);
        let Bed { rooms, reclaim } = &mut bed;
        reclaim.enter(&mut rooms.log, State::Copying(job));
        let Rooms { cache, fx, .. } = rooms;
        reclaim.read_copies(cache, fx);
        let at = cache.segment_offset(item.place.segment as usize) as usize;
        let at = at + item.place.offset as usize;
        bed.rooms.devices.cache[at] ^= u8::from(is_corrupt);
        let read = bed.read();
        bed.end(read, if is_corrupt { Ok(()) } else { Err(ErrorKind::Media.into()) });
        assert!(!bed.has_failed() && bed.reclaim.retry_at() == Instant::default());
        assert!(bed.reclaim.job().is_some_and(|job| !job.goes_on()), "nothing is left to do");
        assert_eq!(bed.rooms.contents.get(key(4)), Some(item.place));
        assert_eq!(bed.rooms.counters().corrupt_clean, 0);
    }
}

/// Found by the simulator, 2026-11-29 (seed 20813551): its page was free, and counted as used.
#[test]
fn what_should_move_along_and_has_left_the_store_is_not_read() {
    let mut bed = named();
    let (mut job, item) = moved_along(&bed);
    job.to_read.push_back(item);
    bed.rooms.forget(4);
    let Bed { rooms, reclaim } = &mut bed;
    reclaim.enter(&mut rooms.log, State::Copying(job));
    let Rooms { cache, fx, .. } = rooms;
    reclaim.read_copies(cache, fx);
    assert!(bed.rooms.fx.ios.is_empty() && bed.reclaim.job().is_some_and(|job| !job.goes_on()));
}

#[test]
fn what_should_move_along_stays_in_its_place_if_the_store_is_full() {
    let mut bed = named();
    let (mut job, item) = moved_along(&bed);
    job.take(Copied::new(item.key, item.place, content(4)));
    let Bed { rooms, reclaim } = &mut bed;
    let Rooms { cache, fx, .. } = rooms;
    while let Some(unit) = cache.store.take(1, cache.contents.pages()) {
        cache.contents.pages().hold(unit);
    }
    cache.store.note_full(true);
    reclaim.enter(&mut cache.log, State::Copying(job));
    reclaim.pump_copies(cache, fx);
    assert!(reclaim.job().is_some_and(|job| job.bytes == 0 && job.to_copy.is_empty()));
    assert_eq!(cache.contents.get(key(4)), Some(item.place));
    assert_eq!(cache.stats.evicted_blocks, 0);
}

/// The copy waits for room without holding its page, and another version may get the same one:
/// found by reading, 2026-11-30.
#[test]
fn what_should_move_along_and_came_to_its_place_again_is_not_moved() {
    for (kind, len, crc) in [(RAW, BLOCK_SIZE as u16, 7), (EntryKind::Zstd, 1000, 7)] {
        let mut bed = named();
        let (mut job, item) = moved_along(&bed);
        job.take(Copied::new(item.key, item.place, content(4)));
        bed.rooms.forget(4);
        let newer = Place { kind, len, crc, ..item.place };
        let Bed { rooms, reclaim } = &mut bed;
        let Rooms { cache, fx, .. } = rooms;
        cache.contents.place_unnamed(cache.now, key(4), newer, &mut cache.ram);
        reclaim.enter(&mut cache.log, State::Copying(job));
        reclaim.pump_copies(cache, fx);
        assert!(fx.ios.is_empty() && reclaim.job().is_some_and(|job| job.bytes == 0), "{kind:?}");
        assert_eq!(cache.contents.get(key(4)), Some(newer));
    }
}

#[test]
fn an_old_entry_names_no_block_that_came_to_its_place_again() {
    let mut bed = named();
    let place = bed.rooms.contents.get(key(4)).expect("it is cached");
    bed.rooms.forget(4);
    let Rooms { cache, .. } = &mut bed.rooms;
    cache.contents.place_unnamed(cache.now, key(4), place, &mut cache.ram);
    sort(&mut bed);
    assert_eq!(bed.copies(), [(5, RAW, false)], "no flush has covered the other");
    assert!(bed.is_cached(4));
}

/// Found by the operator on a busy machine, 2026-11-25: the log waited for room for good.
#[test]
fn a_unit_that_waits_for_room_does_not_keep_reclaim_from_starting_over() {
    let mut rooms = Rooms::with_store();
    rooms.clean([4, 5]);
    rooms.stored(&[4, 5]);
    rooms.fill_to(1);
    let mut bed = Bed::on(rooms);
    bed.rooms.fx.ios.clear();
    bed.rooms.ready(&[FILL]);
    let place = bed.rooms.contents.get(key(4)).expect("it is cached");
    let mut job = Job::new(SegmentSeq(1));
    job.to_name.push_back(Stored { key: key(4), place });
    // Writes of clients took what was free when this was calculated.
    job.needs = u64::from(bed.rooms.config.segment_size);
    let Bed { rooms, reclaim } = &mut bed;
    reclaim.enter(&mut rooms.log, State::Copying(job));
    bed.pump();
    assert!(bed.rooms.store.is_moving() && bed.reclaim.is_idle());
    // Now the clean blocks leave, and what the log has to say fits.
    bed.wait(READ_PAUSE);
    let footer = bed.read();
    bed.end(footer, Ok(()));
    while bed.reclaim.is_cut_short(&bed.rooms) {
        bed.pump();
    }
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    cache.pump_store(fx);
    assert!(cache.close_record(fx) && !cache.store.is_moving());
}

#[test]
fn clean_blocks_of_the_store_leave_with_the_segment_that_names_them() {
    let mut bed = named();
    let used = bed.rooms.store.used_pages();
    let place = bed.rooms.contents.get(key(4)).expect("it is cached");
    let mut job = Job::new(SegmentSeq(1));
    job.to_name.push_back(Stored { key: key(4), place });
    job.to_name.push_back(Stored { key: key(5), place: Place { dirty: true, ..place } });
    job.leave_named(0);
    assert_eq!((job.to_name.len(), job.to_leave.len()), (2, 0));
    job.leave_named(u64::MAX);
    assert_eq!(job.to_name.iter().map(|item| item.key).collect::<Vec<_>>(), [key(5)]);
    job.to_name.clear();
    assert!(!job.goes_on(), "they take no room in the log");
    let Bed { rooms, reclaim } = &mut bed;
    for block in FILL..FILL + 20 {
        rooms.forget(block);
    }
    reclaim.enter(&mut rooms.log, State::Copying(job));
    reclaim.finish(&mut rooms.cache);
    assert!(!bed.is_cached(4) && bed.is_cached(5));
    assert_eq!(bed.rooms.store.used_pages(), used, "a crash may bring it back");
    // Reclaim may have named it again before a crash, in a segment that stays.
    bed.rooms.dirty([9]);
    bed.rooms.flush_device();
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    cache.pump_store(fx);
    assert_eq!(cache.store.used_pages(), used, "a later entry may still name it");
    assert!(cache.log.builder().has_entry_of(key(4)), "the log says that it is gone");
    bed.rooms.log_record();
    bed.rooms.flush_device();
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    cache.pump_store(fx);
    assert_eq!(bed.rooms.store.used_pages(), used - 1, "durably");
}

#[test]
fn a_block_of_the_store_that_became_dirty_does_not_leave() {
    let mut bed = named();
    let place = bed.rooms.contents.get(key(4)).expect("it is cached");
    let mut job = Job::new(SegmentSeq(1));
    job.to_name.push_back(Stored { key: key(4), place });
    job.leave_named(u64::MAX);
    let Bed { rooms, reclaim } = &mut bed;
    for block in FILL..FILL + 20 {
        rooms.forget(block);
    }
    let Rooms { cache, fx, .. } = rooms;
    assert!(cache.push_dirtied(fx, key(4), place));
    rooms.log_record();
    reclaim.enter(&mut rooms.log, State::Copying(job));
    reclaim.finish(&mut rooms.cache);
    assert!(rooms.contents.get(key(4)).is_some_and(|place| place.dirty));
}
