//! The log without an engine: records, segments, durability, footers, freeing.

use forebay_block::BLOCK_SIZE;
use forebay_block::testing::noise;
use forebay_format::{EntryKind, PAGE, decode_footer, decode_record};

use super::append::{Closed, Record};
use super::builder::Expect;
use super::read::{Reader, SegmentRead};
use super::*;
use crate::testing::SEGMENT;
use crate::testing::rooms::{Rooms, SEGMENTS, key};

/// Length of a record of one block, in bytes.
const RECORD: u32 = 2 * PAGE as u32;
/// Number of one-block records in a segment: the last two pages are too few, since the footer takes
/// one.
const IN_SEGMENT: u64 = SEGMENT as u64 / RECORD as u64 - 1;

impl Rooms {
    fn push(&mut self, block: u64, dirty: bool, expect: Expect) {
        let form = self.log.builder().push_raw(&noise(block, BLOCK_SIZE), block as u32);
        self.log.builder().push_form(key(block), form, dirty, expect);
    }

    /// Closes a record of one block.
    fn record(&mut self, block: u64) -> Record {
        self.push(block, false, Expect::Always);
        self.closed()
    }

    /// Fills segments until only the last one is free; `records` records are already in the log.
    fn fill_behind(&mut self, records: u64) {
        for block in 0..(SEGMENTS - 1) * IN_SEGMENT - records {
            self.record(block);
            self.settle();
        }
        assert_eq!(self.log.free(), 1);
    }

    fn has_room(&mut self, block: u64) -> bool {
        self.push(block, false, Expect::Always);
        matches!(self.close(), Closed::Record(_))
    }
}

#[test]
fn records_lie_one_behind_the_other_and_each_names_the_one_before() {
    let mut rooms = Rooms::new(0);
    let first = rooms.record(10);
    rooms.push(11, true, Expect::Always);
    rooms.push(12, false, Expect::Always);
    let second = rooms.closed();
    assert_eq!((first.lsn, first.offset), (Lsn(1), u64::from(SEGMENT)), "segment 1 is the first");
    assert_eq!((second.lsn, second.offset), (Lsn(2), u64::from(SEGMENT + RECORD)));
    assert_eq!((first.buf.len(), second.buf.len()), (2 * PAGE, 3 * PAGE));
    let [one, two] = [&first, &second].map(|record| decode_record(&record.buf[..PAGE]).unwrap());
    assert_eq!((two.header.at, two.header.prev_crc), (RECORD, one.crc));
    let named = |record: &forebay_format::Record| {
        record.entries.iter().map(|e| (e.block, e.offset, e.dirty)).collect::<Vec<_>>()
    };
    assert_eq!(named(&one), [(10, PAGE as u32, false)]);
    let behind = RECORD + PAGE as u32;
    assert_eq!(named(&two), [(11, behind, true), (12, behind + PAGE as u32, false)]);
    for (block, record, page) in [(10, &first, 1), (11, &second, 1), (12, &second, 2)] {
        assert_eq!(record.buf[page * PAGE..(page + 1) * PAGE], noise(block, BLOCK_SIZE));
        let place = rooms.contents.get(key(block)).expect("the index knows it at once");
        let at = record.offset - u64::from(SEGMENT) + (page * PAGE) as u64;
        assert_eq!((place.segment, u64::from(place.offset)), (1, at));
        assert!(!rooms.log.is_written(place.segment, place.offset));
    }
    assert_eq!(rooms.stats.log_records, 2);
}

#[test]
fn a_record_of_entries_that_do_not_count_any_more_is_not_written() {
    let mut rooms = Rooms::new(0);
    rooms.record(1);
    let old = rooms.contents.get(key(1)).unwrap();
    rooms.record(1);
    rooms.push(1, false, Expect::At(old));
    rooms.push(1, false, Expect::Absent);
    assert!(matches!(rooms.close(), Closed::Empty), "the block was written again since");
    assert!(rooms.log.builder().is_empty() && rooms.log.next_lsn() == Lsn(3));
    rooms.push(2, false, Expect::Absent);
    rooms.push(1, false, Expect::At(old));
    let entries = decode_record(&rooms.closed().buf[..PAGE]).unwrap().entries;
    assert_eq!(entries.iter().map(|entry| entry.block).collect::<Vec<_>>(), [2]);
}

/// Copies and mappings of reclaim may come after the last record of a stop. They would be written
/// after the last flush: found by the simulator, seeds 100100098 and 20021205.
#[test]
fn nothing_is_placed_after_the_end() {
    let mut rooms = Rooms::new(0);
    rooms.record(1);
    let old = rooms.contents.get(key(1)).unwrap();
    rooms.push(1, false, Expect::At(old));
    rooms.log.end();
    rooms.push(1, false, Expect::At(old));
    assert!(matches!(rooms.close(), Closed::Empty));
    assert!(rooms.log.builder().is_empty() && rooms.log.next_lsn() == Lsn(2));
    assert_eq!(rooms.contents.get(key(1)), Some(old));
}

#[test]
fn records_beyond_those_in_flight_wait() {
    let mut rooms = Rooms::new(0);
    (0..RECORDS_IN_FLIGHT_MAX as u64).for_each(|block| assert!(rooms.has_room(block)));
    assert!(!rooms.has_room(99) && rooms.log.is_busy());
    rooms.log.end_record(Lsn(1));
    assert!(matches!(rooms.close(), Closed::NoRoom), "it is written and not counted");
    rooms.log.complete_next().expect("the first record has ended");
    assert_eq!(rooms.closed().lsn, Lsn(RECORDS_IN_FLIGHT_MAX as u64 + 1));
}

#[test]
fn a_record_that_does_not_fit_seals_the_segment_and_begins_the_next() {
    let mut rooms = Rooms::new(0);
    let last = (0..IN_SEGMENT).map(|block| rooms.record(block)).last().unwrap();
    let states = |log: &Log| [1, 2].map(|index| log.segment(index).state);
    assert_eq!(states(&rooms.log), [SegmentState::Open, SegmentState::Free]);
    assert_eq!(rooms.log.free(), SEGMENTS - 1);
    let next = rooms.record(100);
    assert_eq!(next.offset, 2 * u64::from(SEGMENT));
    assert_eq!(states(&rooms.log), [SegmentState::Sealing, SegmentState::Open]);
    assert_eq!(rooms.log.free(), SEGMENTS - 2);
    let segment = rooms.log.segment(1);
    assert_eq!((segment.first_lsn, segment.last_lsn), (Lsn(1), Lsn(IN_SEGMENT)));
    assert_eq!((segment.used, segment.entries), (IN_SEGMENT as u32 * RECORD, IN_SEGMENT as u32));
    let [last, next] = [last, next].map(|record| decode_record(&record.buf[..PAGE]).unwrap());
    assert_eq!((next.header.seq, next.header.at), (SegmentSeq(2), 0));
    assert_eq!(next.header.prev_crc, last.crc, "the chain goes on in the next segment");
}

#[test]
fn no_segment_begins_while_two_wait_for_their_footers() {
    let mut rooms = Rooms::new(0);
    for block in 0..2 * IN_SEGMENT {
        assert!(rooms.has_room(block));
        rooms.log.end_record(Lsn(block + 1));
        rooms.log.complete_next().expect("each record ends at once");
    }
    assert!(!rooms.has_room(100) && rooms.log.is_busy());
    rooms.settle();
    assert_eq!(rooms.closed().offset, 3 * u64::from(SEGMENT));
}

#[test]
fn the_last_free_segment_is_kept_for_a_record_that_frees_one() {
    let mut rooms = Rooms::new(0);
    rooms.fill_behind(0);
    assert!(!rooms.has_room(1000) && rooms.log.is_emergency());
    assert!(!rooms.log.builder().is_empty(), "the record waits");
    (0..IN_SEGMENT).for_each(|block| rooms.forget(block));
    rooms.log.free_oldest();
    let record = rooms.closed();
    assert_eq!(record.offset, 0, "segment 8 lies at position 0");
    assert_eq!(decode_record(&record.buf[..PAGE]).unwrap().header.start, SegmentSeq(2));
    assert_eq!((rooms.log.free(), rooms.log.freeing()), (0, 1));
}

#[test]
fn copies_that_fit_and_lost_blocks_may_take_the_last_free_segment_too() {
    let mut rooms = Rooms::new(0);
    rooms.fill_behind(0);
    rooms.frees_with_one = true;
    assert!(rooms.has_room(1000), "the copies of reclaim free the oldest segment");
    let mut rooms = Rooms::new(0);
    rooms.push(500, true, Expect::Always);
    rooms.closed();
    rooms.fill_behind(1);
    assert!(!rooms.has_room(1000));
    assert!(rooms.contents.fence(key(500)));
    assert!(matches!(rooms.close(), Closed::Record(_)), "a lost block is logged");
}

#[test]
fn records_complete_in_any_order_and_count_in_theirs() {
    let mut rooms = Rooms::new(0);
    for op in 1..=3 {
        assert!(rooms.log.builder().add_waiter(Id(op)) && !rooms.log.builder().add_waiter(Id(op)));
        rooms.record(u64::from(op));
    }
    rooms.log.end_record(Lsn(3));
    assert_eq!((rooms.log.complete_next(), rooms.log.completed()), (None, Lsn(0)));
    rooms.log.end_record(Lsn(1));
    assert_eq!((rooms.log.complete_next(), rooms.log.completed()), (Some(vec![Id(1)]), Lsn(1)));
    assert_eq!(rooms.log.complete_next(), None, "2 is on its way");
    rooms.log.end_record(Lsn(2));
    assert_eq!((rooms.log.complete_next(), rooms.log.completed()), (Some(vec![Id(2)]), Lsn(2)));
    assert_eq!((rooms.log.complete_next(), rooms.log.completed()), (Some(vec![Id(3)]), Lsn(3)));
    assert!(rooms.log.is_idle());
}

#[test]
fn a_flush_covers_what_had_completed_when_it_was_sent() {
    let mut rooms = Rooms::new(0);
    let places = [1, 2, 3].map(|block| {
        rooms.record(block);
        rooms.contents.get(key(block)).unwrap()
    });
    let end = |log: &mut Log, lsn| {
        log.end_record(Lsn(lsn));
        log.complete_next().expect("it is the next");
    };
    end(&mut rooms.log, 1);
    assert!(!rooms.log.begin_wanted_flush(), "nobody wants it");
    rooms.log.want_durable(Lsn(2));
    assert!(!rooms.log.begin_wanted_flush(), "2 is on its way");
    end(&mut rooms.log, 2);
    assert!(rooms.log.begin_wanted_flush() && !rooms.log.begin_wanted_flush(), "one at a time");
    end(&mut rooms.log, 3);
    let durable = |log: &Log| places.map(|place| log.is_durable(place.segment, place.offset));
    assert_eq!(durable(&rooms.log), [false; 3]);
    let covered = rooms.log.end_flush();
    assert_eq!(covered, Lsn(2));
    assert!(rooms.log.advance_durable(covered) && !rooms.log.advance_durable(Lsn(1)));
    assert_eq!(durable(&rooms.log), [true, true, false]);
    assert!(!rooms.log.begin_wanted_flush(), "nobody wants 3");
}

#[test]
fn who_waits_for_durability_goes_on_by_record_and_then_in_order() {
    let mut rooms = Rooms::new(0);
    (1..=3).for_each(|block| drop(rooms.record(block)));
    for (op, lsn) in [(7, 2), (8, 1), (9, 2), (6, 3)] {
        assert!(!rooms.log.wait_durable(Id(op), Lsn(lsn)));
    }
    assert_eq!(rooms.log.pop_waiter(false), None);
    assert!(rooms.log.advance_durable(Lsn(2)));
    assert_eq!(
        [(); 4].map(|()| rooms.log.pop_waiter(false)),
        [Some(Id(8)), Some(Id(7)), Some(Id(9)), None]
    );
    assert!(rooms.log.wait_durable(Id(5), Lsn(2)), "it is durable already");
    assert_eq!(rooms.log.pop_waiter(true), Some(Id(6)), "a failed device lets all go");
}

#[test]
fn a_footer_is_written_when_all_that_it_names_is_durable() {
    let mut rooms = Rooms::new(0);
    (0..=IN_SEGMENT).for_each(|block| drop(rooms.record(block)));
    let Rooms { cache: rooms, .. } = &mut rooms;
    assert!(rooms.log.next_footer(&rooms.config).is_none());
    rooms.log.advance_durable(Lsn(IN_SEGMENT - 1));
    assert!(rooms.log.next_footer(&rooms.config).is_none(), "the last record is not durable");
    rooms.log.advance_durable(Lsn(IN_SEGMENT));
    let written = rooms.log.next_footer(&rooms.config).expect("all are durable");
    let (seq, bytes) = (SegmentSeq(1), PAGE as u64);
    assert_eq!((written.seq, written.offset), (seq, 2 * u64::from(SEGMENT) - bytes));
    let (footer, entries) = decode_footer(&written.buf).unwrap();
    assert_eq!((footer.seq, footer.first_lsn, footer.last_lsn), (seq, Lsn(1), Lsn(IN_SEGMENT)));
    assert!(entries.iter().map(|entry| entry.block).eq(0..IN_SEGMENT));
    assert!(entries.iter().all(|entry| entry.kind == EntryKind::Raw));
    assert!(rooms.log.next_footer(&rooms.config).is_none(), "it is on its way");
    let again = rooms.log.footer_again(seq, &rooms.config).expect("it has not been written");
    assert_eq!((again.offset, &again.buf[..]), (written.offset, &written.buf[..]));
    rooms.log.end_footer(seq);
    assert!(!rooms.log.awaits_footer(seq) && !rooms.log.is_sealing());
    assert_eq!(rooms.log.segment(1).state, SegmentState::Sealed);
}

#[test]
fn a_segment_is_free_when_its_end_is_durable_and_nobody_reads_it() {
    let mut rooms = Rooms::new(0);
    (0..=IN_SEGMENT).for_each(|block| drop(rooms.record(block)));
    rooms.settle();
    let free = rooms.log.free();
    let read = SegmentRead::part(Reader::Footer, 1, 0..PAGE as u32);
    rooms.log.begin_read(&read);
    (0..IN_SEGMENT).for_each(|block| rooms.forget(block));
    rooms.log.free_oldest();
    assert!(rooms.log.needs_checkpoint(u64::MAX), "no record says so yet");
    let says = rooms.record(100).lsn;
    assert_eq!(rooms.log.barrier(), says);
    rooms.log.end_record(says);
    assert!(rooms.log.complete_next().is_some());
    rooms.log.finish_freeing(u64::MAX);
    let state = |log: &Log| (log.segment(1).state, log.free(), log.freeing());
    assert_eq!(state(&rooms.log), (SegmentState::Freeing, free, 1), "the record is not durable");
    assert!(rooms.log.begin_wanted_flush(), "freeing wants it to be");
    let covered = rooms.log.end_flush();
    rooms.log.advance_durable(covered);
    rooms.log.finish_freeing(u64::MAX);
    assert_eq!(state(&rooms.log), (SegmentState::Freeing, free, 1), "it is being read");
    rooms.log.end_read(&read);
    rooms.log.finish_freeing(u64::MAX);
    assert_eq!(state(&rooms.log), (SegmentState::Free, free + 1, 0));
}

#[test]
fn a_record_that_could_not_be_written_can_be_read() {
    let mut rooms = Rooms::new(0);
    rooms.record(1);
    let record = rooms.record(2);
    let place = rooms.contents.get(key(2)).unwrap();
    rooms.log.fail_record(record.lsn, record.buf);
    let payload = rooms.log.failed_payload(place.segment, place.offset, place.len);
    assert_eq!(payload, Some(&noise(2, BLOCK_SIZE)[..]));
    let other = rooms.contents.get(key(1)).unwrap();
    assert_eq!(rooms.log.failed_payload(other.segment, other.offset, other.len), None);
    rooms.log.drop_ended();
    assert_eq!(rooms.log.in_flight(), 1, "the first is on its way");
}
