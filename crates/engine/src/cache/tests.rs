//! The ways into the log, without requests: records, who is told of them, who may use the room.

use forebay_block::{ByteRange, ErrorKind, Io, IoOp, IoResult};
use forebay_format::{EntryKind, Lsn, PAGE, SegmentSeq, decode_record};

use super::*;
use crate::api::event::Event;
use crate::api::listing::ListedBlock;
use crate::limits::{RECLAIM_RESERVE, RECORDS_IN_FLIGHT_MAX};
use crate::log::builder::Expect;
use crate::note::Note;
use crate::slab::Id;
use crate::testing::rooms::{BLOCK, FILL, IN_RECORD, PRIMARY, Rooms, content, key};
use crate::testing::{SEGMENT, VOLUME};
use forebay_policy::Standing;

impl Rooms {
    /// Puts a block into the record being built, for a write of which it is the last one or not.
    fn push_for(&mut self, op: u32, block: u64, is_last: bool) -> bool {
        let Self { cache, fx, .. } = self;
        let room = cache.push_written(fx, key(block), &content(block));
        if room {
            cache.log.builder().add_waiter(Id(op));
            cache.log.builder().complete.extend(is_last.then_some(Id(op)));
        }
        room
    }

    fn close_record(&mut self) -> bool {
        self.cache.close_record(&mut self.fx)
    }

    fn placed(&mut self) -> Vec<(Id, Lsn)> {
        let placed = |note| match note {
            Note::Placed(op, lsn) => (op, lsn),
            other => panic!("{other:?}"),
        };
        self.notes().into_iter().map(placed).collect()
    }

    fn events(&mut self) -> Vec<Event> {
        self.cache.out.hand_out(&mut self.fx);
        std::mem::take(&mut self.fx.events)
    }

    /// Tells the cache how an I/O has ended.
    fn ended(&mut self, io: (Target, Io), result: IoResult<()>) {
        let target = io.0;
        let (sent, done) = self.end(io, result);
        self.note_ended(target, &sent, &done);
    }

    fn read_primary(&mut self) -> (Target, Io) {
        let Self { cache, fx, .. } = self;
        let range = ByteRange::new(0, BLOCK);
        let buf = cache.config.buffers.get(BLOCK_SIZE);
        cache.send(fx, PRIMARY, Ticket::Fetch(Id(0)), |tag| Io::read(tag, range, buf));
        self.only()
    }
}

fn entries(io: &Io) -> Vec<u64> {
    let record = decode_record(&io.buf[..PAGE]).expect("it is a record");
    record.entries.iter().map(|entry| entry.block).collect()
}

#[test]
fn a_record_that_is_full_is_sent_before_the_next_block_enters() {
    let mut rooms = Rooms::new(0);
    for block in 0..IN_RECORD {
        assert!(rooms.push_for(1, block, false) && rooms.fx.ios.is_empty());
    }
    assert!(rooms.push_for(1, IN_RECORD, true));
    let (target, io) = rooms.only();
    let range = ByteRange::new(u64::from(SEGMENT), (1 + IN_RECORD) * BLOCK);
    assert_eq!((target, io.op, io.range), (Target::Cache, IoOp::Write, range));
    assert!(entries(&io).into_iter().eq(0..IN_RECORD));
    assert!(rooms.placed().is_empty(), "the write's last block is in the next record");
    assert!(rooms.close_record());
    assert_eq!(entries(&rooms.only().1), [IN_RECORD]);
    assert_eq!(rooms.placed(), [(Id(1), Lsn(2))]);
}

#[test]
fn writers_of_a_turn_share_a_record_and_each_is_told_where_its_blocks_are() {
    let mut rooms = Rooms::new(0);
    (1..=3).for_each(|op| assert!(rooms.push_for(op, u64::from(op), op != 2)));
    assert!(rooms.placed().is_empty(), "not before the record has a place");
    assert!(rooms.close_record());
    assert_eq!(entries(&rooms.only().1), [1, 2, 3]);
    assert_eq!(rooms.placed(), [(Id(1), Lsn(1)), (Id(3), Lsn(1))], "2 is not complete");
    assert!(rooms.close_record() && rooms.fx.ios.is_empty(), "an empty record is not sent");
    rooms.log.end_record(Lsn(1));
    assert_eq!(rooms.log.complete_next(), Some(vec![Id(1), Id(2), Id(3)]), "all wait for it");
}

#[test]
fn a_block_has_its_place_and_is_dirty_when_its_record_is_closed() {
    let mut rooms = Rooms::new(0);
    rooms.push_for(1, 5, true);
    assert_eq!(rooms.contents.get(key(5)), None);
    rooms.close_record();
    let place = rooms.contents.get(key(5)).expect("it has a place");
    assert!(place.dirty && rooms.contents.dirty().contains(key(5)));
    assert!(!rooms.log.is_written(place.segment, place.offset), "it is on its way");
    rooms.settle();
    assert!(rooms.log.is_written(place.segment, place.offset));
    assert!(!rooms.log.is_durable(place.segment, place.offset), "nobody asked for a flush");
    rooms.flush_device();
    assert!(rooms.log.is_durable(place.segment, place.offset));
}

#[test]
fn a_record_without_room_stays_and_is_sent_when_there_is_some() {
    let mut rooms = Rooms::new(0);
    for block in 0..RECORDS_IN_FLIGHT_MAX as u64 {
        assert!(rooms.push_for(1, block, false) && rooms.close_record());
    }
    (10..10 + IN_RECORD).for_each(|block| assert!(rooms.push_for(2, block, false)));
    assert!(!rooms.push_for(2, 99, true), "the record is full, and cannot be sent");
    assert!(!rooms.close_record());
    assert_eq!(rooms.fx.ios.len(), RECORDS_IN_FLIGHT_MAX);
    rooms.settle();
    assert!(rooms.push_for(2, 99, true));
    assert!(entries(&rooms.only().1).into_iter().eq(10..10 + IN_RECORD));
}

#[test]
fn nothing_is_sent_to_a_failed_device() {
    let mut rooms = Rooms::new(0);
    rooms.push_for(1, 5, true);
    rooms.set_health(Health::Draining);
    assert!(!rooms.close_record() && rooms.fx.ios.is_empty() && rooms.placed().is_empty());
    let health = Event::Health { from: Health::Good, to: Health::Draining };
    assert_eq!(rooms.events(), [health]);
}

#[test]
fn clients_leave_the_last_segments_to_reclaim() {
    let mut rooms = Rooms::new(0);
    rooms.fill_to(RECLAIM_RESERVE + 1);
    assert!(rooms.has_client_space());
    rooms.fill_to(RECLAIM_RESERVE);
    assert!(!rooms.has_client_space());
}

#[test]
fn copies_are_promised_the_last_segment_only_if_the_record_being_built_fits_too() {
    let mut rooms = Rooms::new(0);
    rooms.fill_to(1);
    assert!(rooms.push_for(1, 900, true));
    assert!(!rooms.close_record(), "nothing is reclaimed");
    // Header and block take two pages; a segment has sixteen, of which two have to be left.
    let pages = |pages: u64| Some(pages * PAGE as u64);
    rooms.log.set_leaving(Some(SegmentSeq(1)), pages(13));
    assert!(!rooms.close_record() && rooms.fx.ios.is_empty());
    rooms.log.set_leaving(Some(SegmentSeq(1)), pages(12));
    assert!(rooms.close_record(), "it fits with the copies");
    assert_eq!((entries(&rooms.only().1), rooms.log.free()), (vec![900], 0));
}

#[test]
fn copies_alone_leave_a_quarter_of_the_last_segment() {
    let mut rooms = Rooms::new(0);
    rooms.fill_to(1);
    let place = rooms.contents.get(key(FILL)).expect("it is cached");
    let Rooms { cache, fx, .. } = &mut rooms;
    assert!(cache.push_bare(fx, key(FILL), 1, EntryKind::Zero, false, Expect::At(place)));
    rooms.log.set_leaving(Some(SegmentSeq(1)), Some(13 * PAGE as u64));
    assert!(!rooms.close_record());
    rooms.log.set_leaving(Some(SegmentSeq(1)), Some(12 * PAGE as u64));
    assert!(rooms.close_record() && rooms.log.free() == 0);
}

#[test]
fn a_block_of_a_primary_that_has_not_flushed_is_not_admitted() {
    let mut rooms = Rooms::new(0);
    let admitted = |rooms: &mut Rooms| {
        let Rooms { cache, fx, .. } = rooms;
        cache.admit(key(5), &content(5), fx);
        let news = cache.log.builder().has_news();
        cache.log.builder().clear();
        news
    };
    assert!(admitted(&mut rooms));
    rooms.volume_mut(VOLUME).direct += 1;
    assert!(!admitted(&mut rooms), "a crash of the primary may lose what was read");
    rooms.volume_mut(VOLUME).direct_durable += 1;
    rooms.volume_mut(VOLUME).flush_failed = true;
    assert!(!admitted(&mut rooms), "it may be lost already");
    rooms.volume_mut(VOLUME).flush_failed = false;
    rooms.log.queue().extend([Id(1), Id(2)]);
    assert!(!admitted(&mut rooms), "writes wait for room");
    rooms.log.queue().clear();
    assert!(admitted(&mut rooms));
    assert_eq!(rooms.counters().admitted_blocks, 2);
}

#[test]
fn a_block_that_ram_alone_has_enters_the_log_when_its_place_is_wanted() {
    let mut rooms = Rooms::new(4);
    let Rooms { cache, fx, .. } = &mut rooms;
    [10, 20, 30, 40]
        .iter()
        .for_each(|&block| cache.ram.put(key(block), &content(block), Standing::Doubled));
    cache.make_way(key(10), fx);
    assert!(cache.log.builder().is_empty(), "it has a place already");
    cache.make_way(key(50), fx);
    rooms.close_record();
    assert_eq!(entries(&rooms.only().1), [10], "the least recent one");
    assert!(!rooms.contents.get(key(10)).expect("it is cached").dirty);
}

#[test]
fn a_block_that_is_being_written_does_not_enter_the_log_from_ram() {
    let mut rooms = Rooms::new(4);
    let Rooms { cache, fx, .. } = &mut rooms;
    [10, 20, 30, 40]
        .iter()
        .for_each(|&block| cache.ram.put(key(block), &content(block), Standing::Doubled));
    assert!(cache.locks.acquire(key(10), Id(1)));
    cache.make_way(key(50), fx);
    assert!(cache.log.builder().is_empty());
}

#[test]
fn after_a_failed_read_one_record_a_second_shows_whether_the_device_can_be_written() {
    let mut rooms = Rooms::new(0);
    let probed = |rooms: &mut Rooms| {
        let Rooms { cache, fx, .. } = rooms;
        cache.probe_cache(fx);
        rooms.sent().len()
    };
    assert_eq!([probed(&mut rooms), probed(&mut rooms)], [1, 0]);
    rooms.now = rooms.now + Duration::from_millis(999);
    assert_eq!(probed(&mut rooms), 0);
    rooms.now = rooms.now + Duration::from_millis(1);
    assert_eq!(probed(&mut rooms), 1);
    rooms.now = rooms.now + Duration::from_secs(1);
    rooms.set_health(Health::Draining);
    assert_eq!(probed(&mut rooms), 0, "it is known");
}

#[test]
fn a_primary_is_away_from_its_first_missing_answer_to_its_next_success() {
    let mut rooms = Rooms::new(0);
    let mut ended = |after: u64, result: IoResult<()>| {
        let io = rooms.read_primary();
        rooms.now = rooms.now + Duration::from_secs(after);
        rooms.ended(io, result);
        let mut events = rooms.events();
        events.retain(|event| !matches!(event, Event::DeviceFailed { .. }));
        events
    };
    let (volume, kind) = (VOLUME, ErrorKind::DeviceGone);
    assert_eq!(ended(0, Err(ErrorKind::Media.into())), [], "that is an answer");
    assert_eq!(ended(0, Err(kind.into())), [Event::PrimaryAway { volume, kind }]);
    assert_eq!(ended(2, Err(kind.into())), [], "it is known");
    let away = Duration::from_secs(5);
    assert_eq!(ended(3, Ok(())), [Event::PrimaryBack { volume, away }]);
    assert_eq!(ended(1, Ok(())), []);
}

#[test]
fn a_primary_that_is_away_is_read_once_a_second_until_it_answers() {
    let mut rooms = Rooms::new(0);
    rooms.standing.state = State::Serving;
    let probed = |rooms: &mut Rooms, after: u64| {
        rooms.now = rooms.now + Duration::from_millis(after);
        let Rooms { cache, fx, .. } = rooms;
        cache.probe_primaries(fx);
        rooms.sent()
    };
    let gone = || Err(ErrorKind::DeviceGone.into());
    let io = rooms.read_primary();
    rooms.ended(io, Ok(()));
    assert!(probed(&mut rooms, 60_000).is_empty(), "it answers");
    let io = rooms.read_primary();
    rooms.ended(io, gone());
    let before = rooms.events().len();
    assert!(probed(&mut rooms, 999).is_empty());
    let probe = probed(&mut rooms, 1).pop().expect("a second is over");
    assert_eq!((probe.0, probe.1.op), (PRIMARY, IoOp::Read));
    assert!(probed(&mut rooms, 60_000).is_empty(), "one is in flight");
    let io = rooms.read_primary();
    rooms.ended(io, gone());
    assert!(probed(&mut rooms, 60_000).is_empty(), "it still is");
    assert_eq!((before, rooms.events().len()), (2, 1));
    rooms.ended(probe, gone());
    assert!(rooms.events().is_empty(), "that tells nothing new");
    assert!(probed(&mut rooms, 999).is_empty());
    let probe = probed(&mut rooms, 1).pop().expect("a second is over");
    let errors = rooms.volume(VOLUME).primary.errors;
    // An error of the medium is an answer.
    rooms.ended(probe, Err(ErrorKind::Media.into()));
    assert!(matches!(rooms.events()[..], [Event::PrimaryBack { .. }]));
    assert!(probed(&mut rooms, 60_000).is_empty());
    assert_eq!((errors.reads, rooms.volume(VOLUME).primary.errors.reads), (2, 2));
}

#[test]
fn the_list_of_the_cached_blocks_has_those_of_the_device_and_of_ram() {
    let mut rooms = Rooms::new(600);
    rooms.clean(0..20);
    rooms.dirty(900..903);
    let Rooms { cache, .. } = &mut rooms;
    (40..540).for_each(|i| cache.ram.put(key(i), &content(i), Standing::Alone));
    cache.ram.put(key(7), &content(7), Standing::Doubled);
    let (mut from, mut found, mut parts) = (Some(0), Vec::new(), 0);
    while let Some(at) = from {
        let part = cache.list(at);
        from = part.next;
        parts += 1;
        found.extend(part.blocks);
    }
    let is_as_counted = |block: &ListedBlock| {
        let counted = rooms.policy.count(key(block.block).0).unwrap_or_default();
        block.volume == VOLUME && block.requests == counted
    };
    assert!(found.iter().all(is_as_counted));
    let mut blocks: Vec<u64> = found.iter().map(|block| block.block).collect();
    blocks.sort_unstable();
    blocks.dedup();
    assert!(blocks.into_iter().eq((0..20).chain(40..540).chain(900..903)));
    assert!(parts >= 4, "{parts}");
}

#[test]
fn a_request_that_is_not_answered_for_longer_than_the_patience_is_told_once() {
    let mut rooms = Rooms::new(0);
    let looked = |rooms: &mut Rooms, after: Duration| {
        rooms.now = rooms.now + after;
        rooms.pump_unanswered();
        (rooms.events().len(), rooms.volume(VOLUME).flow.slow_ios)
    };
    let first = rooms.read_primary();
    rooms.read_primary();
    let Rooms { cache, fx, .. } = &mut rooms;
    (1..3).for_each(|i| cache.read_segment(fx, i, 0, PAGE, Ticket::StopFlush));
    let patience = rooms.config.patience;
    for _ in 1..patience.as_secs() {
        assert_eq!(looked(&mut rooms, Duration::from_secs(1)), (0, 0));
    }
    assert_eq!(looked(&mut rooms, Duration::from_secs(1)), (2, 2), "once for each device");
    assert_eq!(rooms.out.slow_cache_ios(), 2);
    assert_eq!(looked(&mut rooms, Duration::from_secs(1)), (0, 2));
    rooms.ended(first, Ok(()));
    assert_eq!(looked(&mut rooms, Duration::from_secs(1)), (0, 1), "one is left");
}

#[test]
fn answers_that_came_while_the_process_was_stopped_are_not_missed() {
    let mut rooms = Rooms::new(0);
    let looked = |rooms: &mut Rooms, after: u64| {
        rooms.now = rooms.now + Duration::from_secs(after);
        rooms.pump_unanswered();
        rooms.events().len()
    };
    let answered = rooms.read_primary();
    assert_eq!(looked(&mut rooms, 1), 0);
    assert_eq!(looked(&mut rooms, 75), 0, "the answer is there, and not seen yet");
    rooms.ended(answered, Ok(()));
    assert_eq!(looked(&mut rooms, 1), 0);
    rooms.read_primary();
    assert_eq!(looked(&mut rooms, 75), 0);
    assert_eq!(looked(&mut rooms, 1), 1, "no answer came");
}
