//! A failed cache device is left stripe by stripe, and a shard stops in order. The engine, which
//! passes on what the rooms have for each other, is played by the test.

use forebay_block::{ByteRange, ErrorKind, Io, IoBuf, IoFlags, IoOp, IoResult};
use forebay_format::{EntryKind, PAGE, decode_footer, decode_record};
use forebay_policy::Standing;

use super::detach::Detach;
use super::*;
use crate::api::{DestageReason, DetachedStripe, Request, RequestId, Target};
use crate::log::read::Reader;
use crate::note::Note;
use crate::request::Requests;
use crate::testing::rooms::{PRIMARY, Rooms, content, key};
use crate::testing::{SEGMENT, VOLUME};
use crate::ticket::Ticket;

/// The rooms of a shard's life, and those that they work on.
struct Bed {
    rooms: Rooms,
    requests: Requests,
    destaging: Destaging,
    detach: Detach,
    life: Life,
    next: u64,
}

impl Bed {
    fn new(rooms: Rooms) -> Self {
        let (requests, destaging, detach) = Default::default();
        Self { rooms, requests, destaging, detach, life: Life::new(Trust::Full), next: 1 }
    }

    /// The device has failed, which is recorded.
    fn failed(rooms: Rooms) -> Self {
        let mut bed = Self::new(rooms);
        bed.rooms.set_health(Health::Draining);
        bed.rooms.standing.trust = Trust::DirtyOnly;
        bed.detach.note_undurable(&mut bed.rooms.cache);
        bed
    }

    fn submit(&mut self, op: IoOp, block: u64, bytes: &[u8]) -> RequestId {
        let range = ByteRange::new(block << 12, bytes.len() as u64);
        let (id, flags) = (RequestId(self.next), IoFlags::default());
        self.next += 1;
        let buf = IoBuf::copy_of(bytes);
        let request = Request { id, volume: VOLUME, op, range, flags, buf, bypass: None };
        let Rooms { cache, fx, .. } = &mut self.rooms;
        match op {
            IoOp::Flush => self.requests.submit_flush(cache, request, fx),
            _ => self.requests.submit_write(cache, request, fx),
        }
        self.deliver();
        id
    }

    fn write(&mut self, block: u64) -> RequestId {
        self.submit(IoOp::Write, block, &content(1000 + block))
    }

    fn flush(&mut self) -> RequestId {
        self.submit(IoOp::Flush, 0, &[])
    }

    fn deliver(&mut self) {
        for note in self.rooms.notes() {
            let Rooms { cache, fx, .. } = &mut self.rooms;
            match note {
                Note::WaitDetached(key, op) => self.detach.add_write(cache, key, op),
                Note::FlushDetached(volume, op) => {
                    self.detach.add_flush(cache, &mut self.requests, op, volume, fx);
                }
                Note::Restore(op) => self.detach.restore(cache, &self.requests, op, fx),
                other => panic!("{other:?}"),
            }
        }
    }

    fn pump(&mut self) {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        self.detach.pump(cache, &mut self.requests, &mut self.destaging, fx);
        self.deliver();
    }

    /// The number of destages that the usual round begins.
    fn destaged(&mut self) -> usize {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        self.destaging.pump(cache, false, fx);
        self.rooms.sent().len()
    }

    fn end(&mut self, io: (Target, Io), result: IoResult<()>) {
        let (sent, done) = self.rooms.end(io, result);
        let Rooms { cache, fx, .. } = &mut self.rooms;
        match sent.ticket {
            Ticket::DestageWrite(id) => self.destaging.written(cache, id, done),
            Ticket::Direct(op) => self.requests.direct_done(cache, op, sent.at, done, fx),
            Ticket::Payloads(read) => {
                cache.log.end_read(&read);
                let Reader::Destage(id) = read.reader else { panic!("{:?}", read.reader) };
                self.destaging.read_back(cache, id, &read, &done, fx);
            }
            other => panic!("{other:?}"),
        }
        self.deliver();
    }

    /// The primary flushes all that was written.
    fn primary_flushed(&mut self) {
        let volume = self.rooms.volume_mut(VOLUME);
        volume.direct_durable = volume.direct;
        let destages = std::mem::take(&mut volume.written);
        let writes = std::mem::take(&mut volume.fua_waiters);
        let Rooms { cache, fx, .. } = &mut self.rooms;
        for id in destages {
            self.destaging.flushed(cache, id, &Ok(()));
        }
        for op in writes {
            self.requests.write_flushed(cache, op, Ok(()), fx);
        }
        self.deliver();
    }

    /// Does what is wanted of the devices until dirty blocks are on the primary and flushed there.
    fn empty(&mut self) {
        self.pump();
        while let Some(io) = self.rooms.fx.ios.pop() {
            self.end(io, Ok(()));
        }
        self.primary_flushed();
        self.pump();
    }

    /// The records that are asked for: each stripe, and the first word of its kept blocks.
    fn asked(&mut self) -> Vec<(u64, u64)> {
        let asked = std::mem::take(&mut self.rooms.fx.detach);
        asked.into_iter().map(|record| (record.stripe, record.kept[0])).collect()
    }

    fn detached(&mut self, stripe: u64, kept: u64) {
        let record = DetachedStripe { volume: VOLUME, stripe, kept: [kept, 0, 0, 0] };
        self.detach.detached(&[record]);
        self.pump();
    }

    fn answered(&mut self) -> Vec<(RequestId, Option<ErrorKind>)> {
        let answers = self.rooms.answers().into_iter();
        answers.map(|reply| (reply.id, reply.result.err().map(|error| error.kind()))).collect()
    }

    fn wait(&mut self, time: std::time::Duration) {
        self.rooms.now = self.rooms.now + time;
    }

    fn pump_stop(&mut self) -> &State {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        self.life.pump_stop(cache, &mut self.requests, &mut self.destaging, fx);
        self.rooms.state()
    }

    fn begin_stop(&mut self) {
        self.life.begin_stop(&mut self.rooms.cache);
    }
}

/// Rooms in which blocks are dirty and durable.
fn dirty(blocks: impl IntoIterator<Item = u64>) -> Rooms {
    let mut rooms = Rooms::new(0);
    rooms.dirty_durable(blocks);
    rooms
}

/// The same of zeros, which take little room; nothing proves that they are durable.
fn dirty_zeros(blocks: impl IntoIterator<Item = u64>) -> Rooms {
    let mut rooms = Rooms::new(0);
    for block in blocks {
        let Rooms { cache, fx, .. } = &mut rooms;
        assert!(cache.push_written(fx, key(block), &[0; PAGE]), "zeros take little room");
    }
    rooms.log_record();
    rooms
}

#[test]
fn a_stripe_is_detached_in_the_order_primary_flush_record_and_then_its_writes_go_on() {
    let mut bed = Bed::failed(dirty([5, 7]));
    let id = bed.write(5);
    bed.pump();
    while let Some(io) = bed.rooms.fx.ios.pop() {
        assert_eq!(bed.asked(), [], "the primary does not have it");
        bed.end(io, Ok(()));
        bed.pump();
    }
    assert_eq!(bed.asked(), [], "the primary has not flushed");
    bed.primary_flushed();
    bed.pump();
    assert_eq!(bed.asked(), [(0, 0)]);
    bed.pump();
    assert_eq!(bed.asked(), [], "once is enough");
    assert!(bed.rooms.fx.ios.is_empty(), "the record is not durable");
    bed.detached(0, 0);
    assert_eq!(bed.rooms.contents.get(key(7)), None);
    let (target, io) = bed.rooms.only();
    assert_eq!((target, io.op, io.range.offset), (PRIMARY, IoOp::Write, 5 << 12));
    bed.end((target, io), Ok(()));
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_stripe_is_not_detached_while_a_version_that_is_not_needed_any_more_is_on_its_way() {
    let mut bed = Bed::failed(dirty([5]));
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    bed.destaging.start(cache, key(5), DestageReason::Fault, fx).expect("it may go");
    bed.rooms.forget(5);
    bed.write(9);
    bed.pump();
    assert_eq!(bed.asked(), [], "it would come after the writes that go on");
    bed.empty();
    assert_eq!(bed.asked(), [(0, 0)]);
}

#[test]
fn no_record_is_asked_for_before_it_is_recorded_that_the_device_has_failed() {
    let mut bed = Bed::failed(Rooms::new(0));
    bed.rooms.standing.trust = Trust::Full;
    bed.write(5);
    bed.pump();
    assert_eq!(bed.asked(), []);
    bed.rooms.standing.trust = Trust::DirtyOnly;
    bed.pump();
    assert_eq!(bed.asked(), [(0, 0)]);
}

#[test]
fn blocks_that_cannot_be_read_back_are_kept_when_their_stripe_is_detached() {
    let mut rooms = dirty([5, 6]);
    assert!(rooms.contents.fence(key(6)));
    let mut bed = Bed::failed(rooms);
    bed.write(9);
    bed.empty();
    assert_eq!(bed.asked(), [(0, 1 << 6)]);
    bed.detached(0, 1 << 6);
    assert_eq!(bed.rooms.contents.get(key(5)), None);
    assert!(bed.rooms.contents.dirty().contains(key(6)), "reads of it fail");
}

#[test]
fn a_write_over_a_kept_block_is_answered_when_a_record_says_that_it_is_kept_no_more() {
    let mut rooms = dirty([6]);
    assert!(rooms.contents.fence(key(6)));
    let mut bed = Bed::failed(rooms);
    bed.write(9);
    bed.empty();
    bed.asked();
    bed.detached(0, 1 << 6);
    let other = bed.rooms.only();
    bed.end(other, Ok(()));
    bed.answered();

    let id = bed.write(6);
    let write = bed.rooms.only();
    bed.end(write, Ok(()));
    assert_eq!((bed.asked(), bed.answered()), (vec![], vec![]), "the primary has not flushed");
    bed.primary_flushed();
    assert_eq!((bed.asked(), bed.answered()), (vec![(0, 0)], vec![]));
    bed.detached(0, 1 << 6);
    assert_eq!(bed.answered(), [], "an older record keeps it");
    bed.detached(0, 0);
    assert_eq!(bed.answered(), [(id, None)]);
    assert!(bed.rooms.contents.fenced().is_empty());
}

/// Regression: its old version was read after it had been written again, past the cache (seed
/// 80809920 of the simulator).
#[test]
fn a_kept_block_that_is_on_the_primary_after_all_is_dropped_when_a_record_keeps_it_no_more() {
    let mut rooms = dirty([6, 7]);
    assert!(rooms.contents.fence(key(6)) && rooms.contents.fence(key(7)));
    let mut bed = Bed::failed(rooms);
    bed.write(9);
    bed.empty();
    bed.asked();
    bed.detached(0, 3 << 6);
    let other = bed.rooms.only();
    bed.end(other, Ok(()));
    bed.answered();

    // The device gives 6 back after all, and the primary has it. Then 7 is written.
    bed.rooms.mark_clean(6);
    bed.rooms.ram.put(key(6), &content(6), Standing::Doubled);
    bed.write(7);
    let write = bed.rooms.only();
    bed.end(write, Ok(()));
    bed.primary_flushed();
    assert_eq!(bed.asked(), [(0, 0)]);
    bed.detached(0, 0);
    assert_eq!(bed.rooms.contents.get(key(6)), None);
    assert!(!bed.rooms.ram.contains(key(6)), "a direct write would leave it as it is");
}

#[test]
fn a_flush_waits_for_the_stripes_with_blocks_that_were_not_durable() {
    let mut bed = Bed::failed(dirty([5]));
    let id = bed.flush();
    assert_eq!(bed.answered(), [(id, None)], "the log has it durably");

    let mut rooms = Rooms::new(0);
    rooms.dirty([5]);
    let mut bed = Bed::failed(rooms);
    let id = bed.flush();
    bed.empty();
    assert_eq!((bed.asked(), bed.answered()), (vec![(0, 0)], vec![]));
    bed.detached(0, 0);
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_flush_is_told_of_a_block_that_was_not_durable_and_is_lost() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([5]);
    assert!(rooms.contents.fence(key(5)));
    let mut bed = Bed::failed(rooms);
    let id = bed.flush();
    bed.pump();
    assert_eq!(bed.asked(), [(0, 1 << 5)]);
    bed.detached(0, 1 << 5);
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::Corrupt))]);
    let [next, last] = [bed.flush(), bed.flush()];
    assert_eq!(bed.answered(), [(next, Some(ErrorKind::Corrupt)), (last, None)]);
}

#[test]
fn what_was_not_durable_is_found_out_in_pieces_and_nothing_sets_out_before() {
    let mut bed = Bed::failed(dirty_zeros((0..200).map(|i| i * 20)));
    let id = bed.flush();
    for turn in 1..4 {
        bed.pump();
        assert!(bed.rooms.standing.in_doubt, "64 blocks a turn: {turn}");
        assert!(bed.rooms.fx.ios.is_empty() && bed.asked().is_empty());
        assert_eq!(bed.answered(), []);
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        let start = bed.destaging.start(cache, key(0), DestageReason::Fault, fx);
        assert!(start.is_err(), "the flush would not wait for its stripe");
    }
    while bed.rooms.contents.dirty().blocks() > 0 {
        assert_eq!(bed.answered(), []);
        bed.empty();
    }
    assert!(!bed.rooms.standing.in_doubt);
    let asked = bed.asked();
    assert_eq!(asked.len(), 16, "all stripes have such blocks");
    for (stripe, kept) in asked {
        assert_eq!(bed.answered(), []);
        bed.detached(stripe, kept);
    }
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn blocks_of_a_stripe_or_two_set_out_in_one_turn() {
    let mut rooms = dirty_zeros((0..3 * 256).filter(|block| block % 256 > 0));
    rooms.flush_device();
    let mut bed = Bed::failed(rooms);
    (0..3).for_each(|stripe| _ = bed.write(stripe * 256));
    for (sent, goes_on) in [(2, true), (1, false)] {
        bed.pump();
        assert_eq!(bed.rooms.sent().len(), sent, "a stripe has 255 dirty blocks");
        assert_eq!(bed.detach.goes_on(&bed.rooms.cache), goes_on);
    }
}

#[test]
fn stripes_are_left_a_few_in_a_turn() {
    let mut bed = Bed::failed(dirty([]));
    (0..10).for_each(|stripe| _ = bed.write(stripe * 256));
    bed.pump();
    let records: Vec<DetachedStripe> = std::mem::take(&mut bed.rooms.fx.detach);
    bed.detach.detached(&records);
    for left in [4, 4, 2] {
        assert!(bed.detach.goes_on(&bed.rooms.cache));
        bed.pump();
        assert_eq!(bed.rooms.sent().len(), left);
    }
    assert!(!bed.detach.goes_on(&bed.rooms.cache));
}

#[test]
fn nobody_waits_longer_than_the_patience_for_a_primary_that_is_away() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([5]);
    let mut bed = Bed::failed(rooms);
    bed.rooms.volume_mut(VOLUME).retry_at = Instant::NEVER;
    let ids = [bed.write(5), bed.flush()];
    let patience = bed.rooms.config.patience;
    bed.wait(patience - std::time::Duration::from_nanos(1));
    bed.pump();
    assert_eq!(bed.answered(), []);
    bed.wait(std::time::Duration::from_nanos(1));
    bed.pump();
    assert_eq!(bed.answered(), ids.map(|id| (id, Some(ErrorKind::DeviceGone))));
    assert!(bed.detach.is_detaching(), "the stripe is still to be detached");
}

/// Thousands of stripes may have to be left first.
#[test]
fn nobody_is_given_up_while_the_primary_takes_blocks_of_the_volume() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([5]);
    let mut bed = Bed::failed(rooms);
    bed.rooms.volume_mut(VOLUME).retry_at = Instant::NEVER;
    let ids = [bed.write(5), bed.flush()];
    let patience = bed.rooms.config.patience;
    for _ in 0..3 {
        bed.wait(patience - std::time::Duration::from_nanos(1));
        bed.rooms.cache.volume_mut(VOLUME).progress = bed.rooms.now;
        bed.pump();
        assert_eq!(bed.answered(), []);
    }
    bed.wait(patience);
    bed.pump();
    assert_eq!(bed.answered(), ids.map(|id| (id, Some(ErrorKind::DeviceGone))));
}

/// The primary has one destage after another; undurable stripes have as many blocks as it takes.
#[test]
fn stripes_that_writes_wait_for_are_left_first() {
    let mut bed = Bed::failed(dirty_zeros((0..16).map(|stripe| stripe * 256)));
    bed.write(15 * 256);
    bed.pump();
    let (_, awaited) = bed.rooms.only();
    assert_eq!(awaited.range.offset, 15 * 256 * PAGE as u64);
    bed.flush();
    bed.pump();
    assert_eq!(bed.rooms.sent().len(), 0, "an eighth of the depth, but one, is in flight");
}

/// A disk that chooses the nearest of its requests would serve the awaited ones last.
#[test]
fn no_other_block_sets_out_while_a_request_waits_for_one() {
    let mut rooms = dirty_zeros((0..16).map(|stripe| stripe * 256));
    rooms.flush_device();
    let mut bed = Bed::failed(rooms);
    bed.pump();
    bed.write(15 * 256);
    bed.pump();
    let awaited = bed.rooms.only();
    assert_eq!(bed.destaged(), 0, "others");
    bed.end(awaited, Ok(()));
    assert!(bed.destaging.flush_is_due(&bed.rooms.cache, 0), "nothing waits for more");
    bed.pump();
    assert_eq!(bed.destaged(), 0);
    bed.primary_flushed();
    bed.pump();
    assert_eq!(bed.asked(), [(15, 0)]);
    assert_eq!(bed.destaged(), 1, "an eighth of the depth, but one");
}

#[test]
fn all_writes_go_on_when_the_whole_cache_is_detached() {
    let mut bed = Bed::failed(Rooms::new(0));
    bed.write(5);
    bed.write(300);
    bed.rooms.set_health(Health::Detached);
    bed.pump();
    assert_eq!(bed.rooms.sent().len(), 2);
    assert!(!bed.detach.is_detaching());
}

#[test]
fn the_cache_is_asked_to_be_detached_when_nothing_is_dirty_or_on_its_way() {
    let mut bed = Bed::failed(dirty([5]));
    bed.life.want_trust(Trust::DirtyOnly);
    let wanted = |bed: &mut Bed| {
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        bed.life.pump(cache, &bed.destaging, fx);
        fx.record_trust.take()
    };
    assert_eq!(wanted(&mut bed), None, "that is recorded");
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    bed.destaging.start(cache, key(5), DestageReason::Fault, fx).expect("it may go");
    bed.rooms.forget(5);
    assert_eq!(wanted(&mut bed), None, "a version of the block is on its way");
    while let Some(io) = bed.rooms.fx.ios.pop() {
        bed.end(io, Ok(()));
    }
    bed.primary_flushed();
    assert_eq!(wanted(&mut bed), Some(Trust::Nothing));
}

#[test]
fn a_stop_ends_the_log_with_a_record_a_footer_and_a_flush_in_this_order() {
    let mut rooms = dirty([5]);
    rooms.mark_clean(5);
    let mut bed = Bed::new(rooms);
    bed.begin_stop();
    assert_eq!(bed.pump_stop(), &State::Stopping);
    let record = decode_record(&bed.rooms.fx.ios[0].1.buf[..PAGE]).expect("it is a record");
    assert_eq!(record.entries[0].kind, EntryKind::Checkpoint);
    assert_eq!(record.header.clean, record.header.lsn, "all is clean");
    let sent = bed.rooms.only();
    bed.rooms.end(sent, Ok(()));
    bed.rooms.log.end_record(record.header.lsn);
    assert!(bed.rooms.log.complete_next().is_some());
    bed.pump_stop();
    assert!(bed.rooms.fx.ios.is_empty(), "the footer is not written");
    bed.rooms.settle();
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    cache.read_segment(fx, 1, 0, PAGE, Ticket::ComparePrimary);
    let read = bed.rooms.only();
    bed.pump_stop();
    assert!(bed.rooms.fx.ios.is_empty(), "a request is under way");
    bed.rooms.end(read, Ok(()));
    assert_eq!(bed.pump_stop(), &State::Stopping);
    let (target, flush) = bed.rooms.only();
    assert_eq!((target, flush.op), (Target::Cache, IoOp::Flush));
    let end = 2 * SEGMENT as usize;
    let (footer, _) = decode_footer(&bed.rooms.devices.cache[end - PAGE..end]).expect("written");
    assert_eq!(footer.last_lsn, record.header.lsn);
    let (_, done) = bed.rooms.end((target, flush), Ok(()));
    Life::stop_flushed(&mut bed.rooms.cache, &done);
    assert_eq!(bed.rooms.state(), &State::Stopped);
}

#[test]
fn a_stop_whose_last_flush_fails_does_not_count_as_one() {
    let mut bed = Bed::new(dirty([5]));
    bed.begin_stop();
    bed.pump_stop();
    bed.rooms.settle();
    bed.pump_stop();
    let flush = bed.rooms.only();
    let (_, done) = bed.rooms.end(flush, Err(ErrorKind::Media.into()));
    Life::stop_flushed(&mut bed.rooms.cache, &done);
    assert_eq!(bed.rooms.state(), &State::Stopping);
    assert!(matches!(bed.rooms.notes()[..], [Note::CacheFailed]));
}

#[test]
fn a_stop_waits_for_requests_under_way() {
    let mut bed = Bed::new(Rooms::new(0));
    bed.rooms.set_mode(VOLUME, crate::api::Mode::WriteAround);
    let id = bed.write(5);
    bed.begin_stop();
    bed.pump_stop();
    let write = bed.rooms.only();
    assert_eq!(write.0, PRIMARY, "nothing else is sent");
    bed.end(write, Ok(()));
    assert_eq!(bed.answered(), [(id, None)]);
    bed.pump_stop();
    assert!(bed.rooms.fx.ios.is_empty(), "the primary has not flushed the write");
    bed.primary_flushed();
    bed.pump_stop();
    assert_eq!(bed.rooms.only().0, Target::Cache);
}

#[test]
fn a_stop_ends_writes_that_are_held_back() {
    let mut bed = Bed::new(Rooms::new(0));
    for first in (0..32).step_by(4) {
        bed.rooms.dirty_durable(first..first + 4);
    }
    let id = bed.write(500);
    assert_eq!(bed.rooms.volume(VOLUME).flow.held_writes(), 1);
    bed.begin_stop();
    bed.pump_stop();
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::ShuttingDown))]);
}

#[test]
fn a_stop_with_a_failed_device_waits_some_seconds_for_what_only_the_cache_has() {
    let mut bed = Bed::failed(dirty([5]));
    bed.begin_stop();
    bed.wait(stop::PATIENCE - std::time::Duration::from_nanos(1));
    assert_eq!(bed.pump_stop(), &State::Stopping);
    bed.wait(std::time::Duration::from_nanos(1));
    assert_eq!(bed.pump_stop(), &State::Stopped);
    assert!(bed.rooms.fx.ios.is_empty(), "nothing is written to it");
}

#[test]
fn a_stop_before_the_shard_serves_is_over_at_once() {
    let mut bed = Bed::new(Rooms::new(0));
    bed.rooms.standing.state = State::Recovering;
    bed.begin_stop();
    assert_eq!(bed.rooms.state(), &State::Stopped);
}
