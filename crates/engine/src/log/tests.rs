//! The log without an engine: records, segments, durability, footers, freeing.

use forebay_block::testing::noise;
use forebay_block::{BLOCK_SIZE, Instant, VolumeId};
use forebay_format::{EntryKind, PAGE, decode_footer, decode_record};
use forebay_policy::Fifo;

use super::append::{Closed, Closing, Record};
use super::builder::Expect;
use super::read::{Reader, SegmentRead};
use super::*;
use crate::api::ShardConfig;
use crate::api::stats::Stats;
use crate::ram::Ram;
use crate::testing::{SEGMENT, config};

const SEGMENTS: u64 = 8;
/// Bytes of a record of one block.
const RECORD: u32 = 2 * PAGE as u32;
/// Records of one block in a segment: the last two pages are for the footer, and too few.
const IN_SEGMENT: u64 = SEGMENT as u64 / RECORD as u64 - 1;

/// A log with the other rooms that it needs.
struct Bed {
    config: ShardConfig,
    log: Log,
    contents: Contents,
    ram: Ram,
    stats: Stats,
    frees_with_one: bool,
}

impl Bed {
    fn new() -> Self {
        let config = config(SEGMENTS * u64::from(SEGMENT), 1 << 30);
        let builder = Builder::new(config.buffers.clone(), 8);
        Self {
            log: Log::new(SEGMENTS as usize, builder),
            contents: Contents::new(1000, SEGMENTS as usize, 1),
            ram: Ram::new(0, false),
            stats: Stats::default(),
            frees_with_one: false,
            config,
        }
    }

    fn push(&mut self, block: u64, dirty: bool, expect: Expect) {
        let form = self.log.builder().push_raw(&noise(block, BLOCK_SIZE), block as u32);
        self.log.builder().push_form(key(block), form, dirty, expect);
    }

    fn close(&mut self) -> Closed {
        self.log.close(&mut Closing {
            now: Instant(1),
            config: &self.config,
            contents: &mut self.contents,
            ram: &mut self.ram,
            policy: &mut Fifo,
            stats: &mut self.stats,
            frees_with_one: self.frees_with_one,
        })
    }

    fn closed(&mut self) -> Record {
        match self.close() {
            Closed::Record(record) => record,
            Closed::Empty => panic!("the record is empty"),
            Closed::NoRoom => panic!("there is no room"),
        }
    }

    /// A record of one block.
    fn record(&mut self, block: u64) -> Record {
        self.push(block, false, Expect::Always);
        self.closed()
    }

    /// The device does everything: records, flush, footers.
    fn settle(&mut self) {
        let lsns: Vec<Lsn> = self.log.in_flight.iter().map(|record| record.lsn).collect();
        lsns.into_iter().for_each(|lsn| self.log.end_record(lsn));
        while self.log.complete_next().is_some() {}
        if self.log.begin_wanted_flush() {
            let covered = self.log.end_flush();
            assert!(self.log.advance_durable(covered));
        }
        while let Some(footer) = self.log.next_footer(&self.config) {
            self.log.end_footer(footer.seq);
        }
        self.log.finish_freeing();
    }

    /// Fills segments until the last free one is next; some records are there already.
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

fn key(block: u64) -> Key {
    Key::new(VolumeId(0), block)
}

#[test]
fn records_lie_one_behind_the_other_and_each_names_the_one_before() {
    let mut bed = Bed::new();
    let first = bed.record(10);
    bed.push(11, true, Expect::Always);
    bed.push(12, false, Expect::Always);
    let second = bed.closed();
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
        let place = bed.contents.get(key(block)).expect("the index knows it at once");
        let at = record.offset - u64::from(SEGMENT) + (page * PAGE) as u64;
        assert_eq!((place.segment, u64::from(place.offset)), (1, at));
        assert!(!bed.log.is_written(place.segment, place.offset));
    }
    assert_eq!((bed.stats.log_records, bed.stats.log_bytes), (2, 5 * PAGE as u64));
}

#[test]
fn a_record_of_entries_that_do_not_count_any_more_is_not_written() {
    let mut bed = Bed::new();
    bed.record(1);
    let old = bed.contents.get(key(1)).unwrap();
    bed.record(1);
    bed.push(1, false, Expect::At(old));
    bed.push(1, false, Expect::Absent);
    assert!(matches!(bed.close(), Closed::Empty), "the block was written again since");
    assert!(bed.log.builder().is_empty() && bed.log.next_lsn() == Lsn(3));
    bed.push(2, false, Expect::Absent);
    bed.push(1, false, Expect::At(old));
    let entries = decode_record(&bed.closed().buf[..PAGE]).unwrap().entries;
    assert_eq!(entries.iter().map(|entry| entry.block).collect::<Vec<_>>(), [2]);
}

#[test]
fn records_beyond_those_in_flight_wait() {
    let mut bed = Bed::new();
    (0..RECORDS_IN_FLIGHT_MAX as u64).for_each(|block| assert!(bed.has_room(block)));
    assert!(!bed.has_room(99) && bed.log.is_busy());
    bed.log.end_record(Lsn(1));
    assert!(matches!(bed.close(), Closed::NoRoom), "it is written and not counted");
    bed.log.complete_next().expect("the first record has ended");
    assert_eq!(bed.closed().lsn, Lsn(RECORDS_IN_FLIGHT_MAX as u64 + 1));
}

#[test]
fn a_record_that_does_not_fit_seals_the_segment_and_begins_the_next() {
    let mut bed = Bed::new();
    let last = (0..IN_SEGMENT).map(|block| bed.record(block)).last().unwrap();
    let states = |log: &Log| [1, 2].map(|index| log.segment(index).state);
    assert_eq!(states(&bed.log), [SegmentState::Open, SegmentState::Free]);
    assert_eq!(bed.log.free(), SEGMENTS - 1);
    let next = bed.record(100);
    assert_eq!(next.offset, 2 * u64::from(SEGMENT));
    assert_eq!(states(&bed.log), [SegmentState::Sealing, SegmentState::Open]);
    assert_eq!(bed.log.free(), SEGMENTS - 2);
    let segment = bed.log.segment(1);
    assert_eq!((segment.first_lsn, segment.last_lsn), (Lsn(1), Lsn(IN_SEGMENT)));
    assert_eq!((segment.used, segment.entries), (IN_SEGMENT as u32 * RECORD, IN_SEGMENT as u32));
    let [last, next] = [last, next].map(|record| decode_record(&record.buf[..PAGE]).unwrap());
    assert_eq!((next.header.seq, next.header.at), (SegmentSeq(2), 0));
    assert_eq!(next.header.prev_crc, last.crc, "the chain goes on in the next segment");
}

#[test]
fn no_segment_begins_while_two_wait_for_their_footers() {
    let mut bed = Bed::new();
    for block in 0..2 * IN_SEGMENT {
        assert!(bed.has_room(block));
        bed.log.end_record(Lsn(block + 1));
        bed.log.complete_next().expect("each record ends at once");
    }
    assert!(!bed.has_room(100) && bed.log.is_busy());
    bed.settle();
    assert_eq!(bed.closed().offset, 3 * u64::from(SEGMENT));
}

#[test]
fn the_last_free_segment_is_kept_for_a_record_that_frees_one() {
    let mut bed = Bed::new();
    bed.fill_behind(0);
    assert!(!bed.has_room(1000) && bed.log.is_emergency());
    assert!(!bed.log.builder().is_empty(), "the record waits");
    (0..IN_SEGMENT).for_each(|block| bed.contents.forget(key(block), &mut bed.ram));
    bed.log.free_oldest();
    let record = bed.closed();
    assert_eq!(record.offset, 0, "segment 8 lies at position 0");
    assert_eq!(decode_record(&record.buf[..PAGE]).unwrap().header.start, SegmentSeq(2));
    assert_eq!((bed.log.free(), bed.log.freeing()), (0, 1));
}

#[test]
fn copies_that_fit_and_lost_blocks_may_take_the_last_free_segment_too() {
    let mut bed = Bed::new();
    bed.fill_behind(0);
    bed.frees_with_one = true;
    assert!(bed.has_room(1000), "the copies of reclaim free the oldest segment");
    let mut bed = Bed::new();
    bed.push(500, true, Expect::Always);
    bed.closed();
    bed.fill_behind(1);
    assert!(!bed.has_room(1000));
    assert!(bed.contents.fence(key(500)));
    assert!(matches!(bed.close(), Closed::Record(_)), "a lost block is logged");
}

#[test]
fn records_complete_in_any_order_and_count_in_theirs() {
    let mut bed = Bed::new();
    for op in 1..=3 {
        assert!(bed.log.builder().add_waiter(Id(op)) && !bed.log.builder().add_waiter(Id(op)));
        bed.record(u64::from(op));
    }
    bed.log.end_record(Lsn(3));
    assert_eq!((bed.log.complete_next(), bed.log.completed()), (None, Lsn(0)));
    bed.log.end_record(Lsn(1));
    assert_eq!((bed.log.complete_next(), bed.log.completed()), (Some(vec![Id(1)]), Lsn(1)));
    assert_eq!(bed.log.complete_next(), None, "2 is on its way");
    bed.log.end_record(Lsn(2));
    assert_eq!((bed.log.complete_next(), bed.log.completed()), (Some(vec![Id(2)]), Lsn(2)));
    assert_eq!((bed.log.complete_next(), bed.log.completed()), (Some(vec![Id(3)]), Lsn(3)));
    assert!(bed.log.is_idle());
}

#[test]
fn a_flush_covers_what_had_completed_when_it_was_sent() {
    let mut bed = Bed::new();
    let places = [1, 2, 3].map(|block| {
        bed.record(block);
        bed.contents.get(key(block)).unwrap()
    });
    let end = |log: &mut Log, lsn| {
        log.end_record(Lsn(lsn));
        log.complete_next().expect("it is the next");
    };
    end(&mut bed.log, 1);
    assert!(!bed.log.begin_wanted_flush(), "nobody wants it");
    bed.log.want_durable(Lsn(2));
    assert!(!bed.log.begin_wanted_flush(), "2 is on its way");
    end(&mut bed.log, 2);
    assert!(bed.log.begin_wanted_flush() && !bed.log.begin_wanted_flush(), "one at a time");
    end(&mut bed.log, 3);
    let durable = |log: &Log| places.map(|place| log.is_durable(place.segment, place.offset));
    assert_eq!(durable(&bed.log), [false; 3]);
    let covered = bed.log.end_flush();
    assert_eq!(covered, Lsn(2));
    assert!(bed.log.advance_durable(covered) && !bed.log.advance_durable(Lsn(1)));
    assert_eq!(durable(&bed.log), [true, true, false]);
    assert!(!bed.log.begin_wanted_flush(), "nobody wants 3");
}

#[test]
fn who_waits_for_durability_goes_on_by_record_and_then_in_order() {
    let mut bed = Bed::new();
    (1..=3).for_each(|block| drop(bed.record(block)));
    for (op, lsn) in [(7, 2), (8, 1), (9, 2), (6, 3)] {
        assert!(!bed.log.wait_durable(Id(op), Lsn(lsn)));
    }
    assert_eq!(bed.log.pop_waiter(false), None);
    assert!(bed.log.advance_durable(Lsn(2)));
    assert_eq!(
        [(); 4].map(|()| bed.log.pop_waiter(false)),
        [Some(Id(8)), Some(Id(7)), Some(Id(9)), None]
    );
    assert!(bed.log.wait_durable(Id(5), Lsn(2)), "it is durable already");
    assert_eq!(bed.log.pop_waiter(true), Some(Id(6)), "a failed device lets all go");
}

#[test]
fn a_footer_is_written_when_all_that_it_names_is_durable() {
    let mut bed = Bed::new();
    (0..=IN_SEGMENT).for_each(|block| drop(bed.record(block)));
    assert!(bed.log.next_footer(&bed.config).is_none());
    bed.log.advance_durable(Lsn(IN_SEGMENT - 1));
    assert!(bed.log.next_footer(&bed.config).is_none(), "the last record is not durable");
    bed.log.advance_durable(Lsn(IN_SEGMENT));
    let written = bed.log.next_footer(&bed.config).expect("all are durable");
    let (seq, bytes) = (SegmentSeq(1), PAGE as u64);
    assert_eq!((written.seq, written.offset), (seq, 2 * u64::from(SEGMENT) - bytes));
    let (footer, entries) = decode_footer(&written.buf).unwrap();
    assert_eq!((footer.seq, footer.first_lsn, footer.last_lsn), (seq, Lsn(1), Lsn(IN_SEGMENT)));
    assert!(entries.iter().map(|entry| entry.block).eq(0..IN_SEGMENT));
    assert!(entries.iter().all(|entry| entry.kind == EntryKind::Raw));
    assert!(bed.log.next_footer(&bed.config).is_none(), "it is on its way");
    let again = bed.log.footer_again(seq, &bed.config).expect("it has not been written");
    assert_eq!((again.offset, &again.buf[..]), (written.offset, &written.buf[..]));
    bed.log.end_footer(seq);
    assert!(!bed.log.awaits_footer(seq) && !bed.log.is_sealing());
    assert_eq!(bed.log.segment(1).state, SegmentState::Sealed);
}

#[test]
fn a_segment_is_free_when_its_end_is_durable_and_nobody_reads_it() {
    let mut bed = Bed::new();
    (0..=IN_SEGMENT).for_each(|block| drop(bed.record(block)));
    bed.settle();
    let free = bed.log.free();
    let read = SegmentRead::part(Reader::Footer, 1, 0..PAGE as u32);
    bed.log.begin_read(&read);
    (0..IN_SEGMENT).for_each(|block| bed.contents.forget(key(block), &mut bed.ram));
    bed.log.free_oldest();
    assert!(bed.log.needs_checkpoint(), "no record says so yet");
    let says = bed.record(100).lsn;
    assert_eq!(bed.log.barrier(), says);
    bed.log.end_record(says);
    assert!(bed.log.complete_next().is_some());
    bed.log.finish_freeing();
    let state = |log: &Log| (log.segment(1).state, log.free(), log.freeing());
    assert_eq!(state(&bed.log), (SegmentState::Freeing, free, 1), "the record is not durable");
    assert!(bed.log.begin_wanted_flush(), "freeing wants it to be");
    let covered = bed.log.end_flush();
    bed.log.advance_durable(covered);
    bed.log.finish_freeing();
    assert_eq!(state(&bed.log), (SegmentState::Freeing, free, 1), "it is being read");
    bed.log.end_read(&read);
    bed.log.finish_freeing();
    assert_eq!(state(&bed.log), (SegmentState::Free, free + 1, 0));
}

#[test]
fn a_record_that_could_not_be_written_can_be_read() {
    let mut bed = Bed::new();
    bed.record(1);
    let record = bed.record(2);
    let place = bed.contents.get(key(2)).unwrap();
    bed.log.fail_record(record.lsn, record.buf);
    let payload = bed.log.failed_payload(place.segment, place.offset, place.len);
    assert_eq!(payload, Some(&noise(2, BLOCK_SIZE)[..]));
    let other = bed.contents.get(key(1)).unwrap();
    assert_eq!(bed.log.failed_payload(other.segment, other.offset, other.len), None);
    bed.log.drop_ended();
    assert_eq!(bed.log.in_flight(), 1, "the first is on its way");
}
