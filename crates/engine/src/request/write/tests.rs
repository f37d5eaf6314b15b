//! The way of a write, step by step, and those that wait behind it.

use forebay_block::testing::noise;
use forebay_block::{ErrorKind, Io};
use forebay_format::{PAGE, decode_record};

use super::*;
use crate::api::{RequestId, Target};
use crate::request::tests::Bed;
use crate::testing::VOLUME;
use crate::testing::rooms::{BLOCK, PRIMARY, Rooms, content, key};

impl Bed {
    fn set_mode(&mut self, mode: Mode) {
        self.rooms.set_mode(VOLUME, mode);
    }

    /// A block is on its way to the primary.
    fn begin_destaging(&mut self, block: u64) {
        self.rooms.contents.begin_destaging(key(block));
    }

    /// A write of a part of a block.
    fn write_part(&mut self, at: u64, bytes: &[u8]) -> RequestId {
        self.submit(IoOp::Write, ByteRange::new(at, bytes.len() as u64), bytes, false)
    }

    /// At least `blocks` blocks are dirty.
    fn fill(&mut self, blocks: u64) {
        for first in (0..blocks).step_by(4) {
            self.rooms.dirty_durable(first..first + 4);
        }
    }

    /// Releases writes that are held back, where they may go on.
    fn release(&mut self) {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        self.requests.release_delayed(cache, fx);
    }

    /// The same; returns the number of blocks that wait for the log then.
    fn release_to_log(&mut self) -> usize {
        self.release();
        self.rooms.log.queued()
    }

    /// The I/O that was sent: of which device, what, and where, in blocks.
    fn wanted(&self) -> Vec<(Target, IoOp, u64, u64)> {
        let ios = self.rooms.fx.ios.iter();
        ios.map(|(target, io)| (*target, io.op, io.range.offset / BLOCK, io.range.len / BLOCK))
            .collect()
    }
}

fn kinds(record: &Io) -> Vec<(u64, u32, EntryKind)> {
    let record = decode_record(&record.buf[..PAGE]).expect("it is a record");
    record.entries.iter().map(|entry| (entry.block, entry.count, entry.kind)).collect()
}

#[test]
fn a_write_is_answered_when_the_last_record_with_a_part_of_it_is_written() {
    let mut bed = Bed::new();
    let id = bed.write(0, &noise(1, 9 * BLOCK_SIZE));
    bed.log();
    let first = bed.rooms.only();
    let last = bed.close();
    bed.end(last, Ok(()));
    assert!(bed.answered().is_empty(), "the first record is on its way");
    bed.end(first, Ok(()));
    assert_eq!(bed.answered(), [(id, None)]);
    assert_eq!(bed.requests.len(), 0);
}

#[test]
fn a_write_waits_for_the_lock_of_an_earlier_one_and_sees_its_bytes_under_its_own() {
    let mut bed = Bed::new();
    bed.write(5, &content(5));
    let later = bed.write_part(5 * BLOCK + 100, &[7; 50]);
    assert_eq!(bed.rooms.log.queued(), 1, "the later one waits");
    let record = bed.close();
    // The index has the earlier version: the later write goes on, and reads it.
    assert_eq!(bed.rooms.log.queued(), 1);
    bed.end(record, Ok(()));
    bed.answered();
    bed.log_written();
    assert_eq!(bed.answered(), [(later, None)]);
    bed.read(5, 1);
    let mut merged = content(5);
    merged[100..150].fill(7);
    assert_eq!(bed.bytes(), merged);
    bed.rooms.ram.remove(key(5));
    bed.read(5, 1);
    let read = bed.rooms.only();
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), merged, "the log has them too");
}

#[test]
fn writes_of_a_block_go_on_in_the_order_in_which_they_came() {
    let mut bed = Bed::new();
    let ids = [1, 2, 3].map(|n| bed.write(5, &noise(n, BLOCK_SIZE)));
    for id in ids {
        bed.log_written();
        assert_eq!(bed.answered(), [(id, None)]);
    }
    bed.read(5, 1);
    assert_eq!(bed.bytes(), noise(3, BLOCK_SIZE));
}

#[test]
fn both_edges_of_a_write_are_read_and_merged() {
    let mut bed = Bed::new();
    bed.rooms.devices.primary[..3 * BLOCK_SIZE].copy_from_slice(&noise(9, 3 * BLOCK_SIZE));
    bed.write_part(1000, &vec![7; 2 * BLOCK_SIZE]);
    for read in bed.rooms.sent() {
        assert_eq!(bed.rooms.log.queued(), 0, "both are needed");
        bed.end(read, Ok(()));
    }
    bed.log_written();
    bed.answered();
    bed.read(0, 3);
    let mut merged = noise(9, 3 * BLOCK_SIZE);
    merged[1000..1000 + 2 * BLOCK_SIZE].fill(7);
    assert_eq!(bed.bytes(), merged);
}

/// They counted as blocks that clients had read, and the write as served by the cache device.
#[test]
fn a_write_that_waits_for_an_edge_on_the_primary_says_so() {
    let mut bed = Bed::new();
    bed.write_part(1000, &[7; 100]);
    let read = bed.rooms.only();
    assert_eq!(read.0, PRIMARY);
    bed.end(read, Ok(()));
    // Its second one is in RAM.
    bed.log_written();
    bed.write_part(2000, &[7; 100]);
    bed.log_written();
    let tiers: Vec<_> = bed.rooms.fx.replies.drain(..).map(|reply| reply.tier).collect();
    assert_eq!(tiers, [Some(Tier::Primary), Some(Tier::Cache)]);
    let stats = bed.rooms.stats_of(VOLUME);
    assert_eq!((stats.merge_read_blocks, stats.writes), (2, 2));
    assert_eq!((stats.ram_hit_blocks, stats.ssd_hit_blocks, stats.primary_read_blocks), (0, 0, 0));
}

#[test]
fn only_what_a_mode_does_not_cache_counts_as_bypassed_by_it() {
    let mut bed = Bed::new();
    let long = ByteRange::new(0, ZEROES_DIRECT_BLOCKS * BLOCK);
    bed.submit(IoOp::WriteZeroes, long, &[], false);
    assert_eq!(bed.wanted(), [(PRIMARY, IoOp::WriteZeroes, 0, ZEROES_DIRECT_BLOCKS)]);
    let bypassed = |bed: &mut Bed| bed.rooms.stats_of(VOLUME).bypassed_by;
    assert_eq!(bypassed(&mut bed), [0; 4]);
    bed.set_mode(Mode::WriteAround);
    bed.write(500, &content(5));
    assert_eq!(bypassed(&mut bed)[Bypass::Mode as usize], 1);
}

#[test]
fn a_write_whose_edge_cannot_be_read_fails_and_lets_the_next_one_go_on() {
    let mut bed = Bed::new();
    let part = bed.write_part(5 * BLOCK + 100, &[7; 50]);
    let whole = bed.write(5, &content(5));
    let read = bed.rooms.only();
    bed.end(read, Err(ErrorKind::Media.into()));
    assert_eq!(bed.answered(), [(part, Some(ErrorKind::Media))]);
    bed.log_written();
    assert_eq!(bed.answered(), [(whole, None)]);
}

#[test]
fn a_write_with_fua_waits_until_the_cache_device_has_flushed() {
    let mut bed = Bed::new();
    let plain = bed.write(5, &content(5));
    let fua = bed.write_fua(6, &content(6));
    bed.log_written();
    assert_eq!(bed.answered(), [(plain, None)]);
    bed.device_flushed();
    assert_eq!(bed.answered(), [(fua, None)]);
}

#[test]
fn a_write_through_is_durable_in_the_log_before_its_blocks_go_to_the_primary() {
    let mut bed = Bed::new();
    bed.set_mode(Mode::WriteThrough);
    let id = bed.write(5, &noise(1, 2 * BLOCK_SIZE));
    bed.log_written();
    assert!(bed.notes.is_empty() && bed.answered().is_empty());
    bed.device_flushed();
    let Some([Note::WaitPrimary(a, op), Note::WaitPrimary(b, _)]) = bed.notes.get(..) else {
        panic!("{:?}", bed.notes);
    };
    assert_eq!((*a, *b), (key(5), key(6)));
    let op = *op;
    for _ in 0..2 {
        assert!(bed.answered().is_empty());
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        bed.requests.through_part_done(cache, op, &Ok(()), fx);
    }
    assert_eq!(bed.answered(), [(id, None)]);
}

/// The failed flush's destages end in pieces, so a block that it lost may still be on its way.
#[test]
fn a_write_through_with_fua_waits_again_for_what_a_failed_flush_lost() {
    let mut bed = Bed::new();
    bed.set_mode(Mode::WriteThrough);
    let id = bed.write_fua(5, &noise(1, 2 * BLOCK_SIZE));
    bed.log_written();
    bed.device_flushed();
    let Note::WaitPrimary(_, op) = bed.notes[0] else { panic!("{:?}", bed.notes) };
    [5, 6].into_iter().for_each(|block| bed.begin_destaging(block));
    let part_done = |bed: &mut Bed| {
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        bed.requests.through_part_done(cache, op, &Ok(()), fx);
        bed.deliver();
    };
    part_done(&mut bed);
    bed.rooms.volume_mut(VOLUME).failed_flushes += 1;
    bed.notes.clear();
    part_done(&mut bed);
    assert!(bed.rooms.volume(VOLUME).fua_waiters.is_empty());
    assert!(matches!(bed.notes[..], [Note::WaitPrimary(..), Note::WaitPrimary(..)]));
    [0; 2].into_iter().for_each(|_| part_done(&mut bed));
    assert_eq!(bed.rooms.volume(VOLUME).fua_waiters, [op]);
    bed.primary_flushed(&Ok(()));
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_write_through_fails_with_the_first_error_of_its_blocks() {
    let mut bed = Bed::new();
    bed.set_mode(Mode::WriteThrough);
    let id = bed.write(5, &noise(1, 2 * BLOCK_SIZE));
    bed.log_written();
    bed.device_flushed();
    let Note::WaitPrimary(_, op) = bed.notes[0] else { panic!("{:?}", bed.notes) };
    for result in [Err(ErrorKind::Media.into()), Ok(())] {
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        bed.requests.through_part_done(cache, op, &result, fx);
    }
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::Media))]);
}

#[test]
fn a_write_on_its_way_when_the_mode_changes_waits_for_the_primary_as_well() {
    let mut bed = Bed::new();
    bed.write(5, &content(5));
    let record = bed.close();
    bed.set_mode(Mode::WriteThrough);
    bed.end(record, Ok(()));
    assert!(bed.answered().is_empty());
}

#[test]
fn a_write_around_waits_until_the_log_says_durably_that_its_blocks_are_gone() {
    let mut bed = Bed::new();
    bed.rooms.clean([5]);
    bed.set_mode(Mode::WriteAround);
    let id = bed.write(5, &noise(1, BLOCK_SIZE));
    let record = bed.close();
    assert_eq!(kinds(&record.1), [(5, 1, EntryKind::Invalidate)]);
    bed.end(record, Ok(()));
    assert!(bed.wanted().is_empty(), "it may be lost in a crash");
    bed.device_flushed();
    assert_eq!(bed.wanted(), [(PRIMARY, IoOp::Write, 5, 1)]);
    let write = bed.rooms.only();
    bed.end(write, Ok(()));
    assert_eq!(bed.answered(), [(id, None)]);
    assert_eq!(bed.rooms.contents.get(key(5)), None);
}

#[test]
fn a_write_around_of_blocks_that_are_not_cached_goes_to_the_primary_at_once() {
    let mut bed = Bed::new();
    bed.set_mode(Mode::WriteAround);
    let id = bed.write_fua(5, &content(5));
    let write = bed.rooms.only();
    assert!(write.0 == PRIMARY && !write.1.flags.fua, "a flush would hide in it");
    bed.end(write, Ok(()));
    assert!(bed.answered().is_empty(), "FUA waits for a flush of the primary");
    bed.primary_flushed(&Ok(()));
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_write_past_the_log_waits_for_the_record_that_says_that_blocks_were_evicted() {
    let mut bed = Bed::new();
    bed.rooms.dirty([90]);
    bed.set_mode(Mode::WriteAround);
    bed.rooms.log.note_evicted(forebay_format::SegmentSeq(1));
    bed.write(5, &content(5));
    assert!(bed.wanted().is_empty(), "an older version may be in the log that nothing outdates");
    bed.log_written();
    bed.device_flushed();
    assert_eq!(bed.wanted(), [(PRIMARY, IoOp::Write, 5, 1)]);
}

#[test]
fn an_admission_in_the_record_being_built_does_not_outlive_a_write_past_the_log() {
    let mut bed = Bed::new();
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    cache.admit(key(5), &content(5), fx);
    bed.set_mode(Mode::WriteAround);
    bed.write(5, &noise(1, BLOCK_SIZE));
    let record = bed.close();
    let raw = (5, 1, EntryKind::Raw);
    assert_eq!(kinds(&record.1), [raw, (5, 1, EntryKind::Invalidate)]);
    assert_eq!(bed.rooms.contents.get(key(5)), None);
}

#[test]
fn a_dirty_block_is_written_to_the_log_whatever_the_mode() {
    let mut bed = Bed::new();
    bed.rooms.dirty_durable([5]);
    bed.set_mode(Mode::PassThrough);
    bed.write(5, &noise(1, BLOCK_SIZE));
    assert!(bed.wanted().is_empty());
    assert_eq!(kinds(&bed.close().1), [(5, 1, EntryKind::Raw)]);
}

#[test]
fn a_discard_is_sent_for_whole_blocks_only_when_the_log_says_that_they_are_gone() {
    let mut bed = Bed::new();
    bed.rooms.volume_mut(VOLUME).config.discard = true;
    bed.rooms.dirty_durable([5, 6, 7]);
    let range = ByteRange::new(5 * BLOCK + 1, 2 * BLOCK + 1);
    let id = bed.submit(IoOp::Discard, range, &[], false);
    let record = bed.close();
    assert_eq!(kinds(&record.1), [(6, 1, EntryKind::Invalidate)]);
    bed.end(record, Ok(()));
    assert!(bed.wanted().is_empty(), "the log does not say so durably");
    bed.device_flushed();
    assert_eq!(bed.wanted(), [(PRIMARY, IoOp::Discard, 6, 1)]);
    let discard = bed.rooms.only();
    bed.end(discard, Ok(()));
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_discard_of_a_block_on_its_way_to_the_primary_keeps_it() {
    let mut bed = Bed::new();
    bed.rooms.volume_mut(VOLUME).config.discard = true;
    bed.rooms.dirty_durable([5]);
    bed.begin_destaging(5);
    let id = bed.discard(5, 1);
    assert_eq!(bed.answered(), [(id, None)]);
    assert!(bed.wanted().is_empty() && bed.rooms.log.queued() == 0);
}

/// Before, each of them went on within the end of the one before: the stack overflowed.
#[test]
fn any_number_of_requests_may_wait_for_one_block() {
    let mut bed = Bed::new();
    bed.rooms.volume_mut(VOLUME).config.discard = true;
    bed.rooms.dirty_durable([5]);
    bed.begin_destaging(5);
    bed.write(5, &content(5));
    let mut wait: Vec<RequestId> = (0..200_000).map(|_| bed.discard(5, 1)).collect();
    assert!(bed.answered().is_empty(), "they wait for the write");
    bed.close();
    while !wait.is_empty() {
        let ended = bed.answered();
        assert!(ended.len() <= FOLLOWERS_MAX, "{} at once", ended.len());
        assert!(wait.drain(..ended.len()).eq(ended.iter().map(|&(id, _)| id)));
        assert!(bed.requests.has_unlocked() || wait.is_empty());
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        bed.requests.follow_unlocked(cache, fx);
    }
    assert!(!bed.rooms.locks.is_locked(key(5)));
}

#[test]
fn a_discard_of_a_block_that_set_out_meanwhile_is_not_sent() {
    let mut bed = Bed::new();
    bed.rooms.volume_mut(VOLUME).config.discard = true;
    bed.rooms.dirty_durable([5, 9]);
    let [first, second] = [5, 9].map(|block| bed.discard(block, 1));
    bed.begin_destaging(5);
    bed.log_written();
    bed.device_flushed();
    assert_eq!(bed.wanted(), [(PRIMARY, IoOp::Discard, 9, 1)]);
    assert_eq!(bed.answered(), [(first, None)]);
    let discard = bed.rooms.only();
    bed.end(discard, Err(ErrorKind::Unsupported.into()));
    assert_eq!(bed.answered(), [(second, None)], "a primary need not discard");
}

#[test]
fn a_failed_write_past_the_log_is_answered_with_its_error_and_the_lock_goes_on() {
    let mut bed = Bed::new();
    bed.set_mode(Mode::WriteAround);
    let ids = [1, 2].map(|n| bed.write(5, &noise(n, BLOCK_SIZE)));
    let write = bed.rooms.only();
    bed.end(write, Err(ErrorKind::NoSpace.into()));
    assert_eq!(bed.answered(), [(ids[0], Some(ErrorKind::NoSpace))]);
    assert_eq!(bed.wanted(), [(PRIMARY, IoOp::Write, 5, 1)]);
}

#[test]
fn a_write_that_is_not_in_the_log_of_a_failed_device_starts_over_when_its_stripe_is_detached() {
    let mut bed = Bed::new();
    let id = bed.write(5, &content(5));
    let op = bed.rooms.log.queue().pop_front().expect("it waits for the log");
    bed.rooms.set_health(Health::Draining);
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    bed.requests.wait_detached(cache, op, fx);
    bed.deliver();
    assert!(matches!(bed.notes[..], [Note::WaitDetached(k, _)] if k == key(5)));
    assert!(!bed.rooms.locks.is_locked(key(5)) && bed.answered().is_empty());
    bed.rooms.left.add(0, crate::contents::Bits::default());
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    bed.requests.lock_blocks(cache, op, fx);
    assert_eq!(bed.wanted(), [(PRIMARY, IoOp::Write, 5, 1)]);
    let write = bed.rooms.only();
    bed.end(write, Ok(()));
    assert_eq!(bed.answered(), [(id, None)]);
}

#[test]
fn a_write_near_the_dirty_limit_is_held_back_and_a_rewrite_is_not() {
    let mut bed = Bed::new();
    let limit = bed.rooms.limit_of(VOLUME);
    bed.fill(limit);
    let id = bed.write(500, &content(500));
    let held = |bed: &mut Bed| bed.rooms.volume(VOLUME).flow.held_writes();
    assert_eq!((bed.rooms.log.queued(), held(&mut bed)), (0, 1), "although it is the only one");
    bed.write(0, &noise(1, BLOCK_SIZE));
    assert_eq!(bed.rooms.log.queued(), 1, "a rewrite makes nothing dirty");
    bed.log_written();
    bed.answered();
    bed.rooms.now = bed.rooms.now + Duration::from_secs(2);
    assert_eq!(bed.release_to_log(), 0, "at the limit it waits for room");
    [3, 4].into_iter().for_each(|block| bed.rooms.forget(block));
    assert_eq!(bed.release_to_log(), 1);
    bed.log_written();
    assert_eq!(bed.answered(), [(id, None)]);
}

/// Room for one block let all writes go on whose time had come.
#[test]
fn no_more_writes_go_on_than_there_is_room_for() {
    let mut bed = Bed::new();
    let limit = bed.rooms.limit_of(VOLUME);
    bed.fill(limit);
    (500..510).for_each(|block| _ = bed.write(block, &content(block)));
    bed.rooms.now = bed.rooms.now + Duration::from_secs(60);
    assert_eq!(bed.release_to_log(), 0);
    [3, 4].into_iter().for_each(|block| bed.rooms.forget(block));
    assert_eq!(bed.release_to_log(), 2);
}

/// A stream that the primary did not take filled the log, whatever the limit of its volume.
#[test]
fn a_stream_that_ends_in_the_cache_is_held_back_at_the_limit() {
    let mut bed = Bed::new();
    let limit = bed.rooms.limit_of(VOLUME);
    bed.fill(limit);
    bed.rooms.volume_mut(VOLUME).failures = 1;
    bed.stream(500);
    let flow = &bed.rooms.volume(VOLUME).flow;
    assert_eq!((flow.held_writes(), bed.wanted().len()), (1, 0));
    assert_eq!(bed.rooms.log.queued(), 0);
    [3, 4].into_iter().for_each(|block| bed.rooms.forget(block));
    assert_eq!(bed.release_to_log(), 1);
}

#[test]
fn a_write_that_is_held_back_goes_on_as_soon_as_few_blocks_are_dirty() {
    let mut bed = Bed::new();
    let limit = bed.rooms.limit_of(VOLUME);
    bed.fill(limit / 10 * 7);
    bed.write(500, &content(500));
    let held = [501, 502].map(|block| bed.write(block, &content(block)));
    bed.log_written();
    bed.answered();
    bed.rooms.now = bed.rooms.now + Duration::from_millis(20);
    assert_eq!(bed.release_to_log(), 0, "their time has not come");
    (0..limit / 2).for_each(|block| bed.rooms.forget(block));
    assert_eq!(bed.release_to_log(), 2, "the primary has caught up");
    bed.log_written();
    assert_eq!(bed.answered(), held.map(|id| (id, None)));
    assert_eq!(bed.rooms.counters().throttled_nanos, 2 * 20_000_000);
}

#[test]
fn a_write_at_the_limit_of_a_primary_that_is_away_fails_after_the_patience() {
    let mut bed = Bed::new();
    let limit = bed.rooms.limit_of(VOLUME);
    bed.fill(limit);
    let id = bed.write(500, &content(500));
    bed.rooms.volume_mut(VOLUME).failures = 1;
    let patience = bed.rooms.config.patience;
    bed.rooms.now = bed.rooms.now + (patience - Duration::from_millis(1));
    bed.release();
    assert_eq!(bed.answered(), []);
    bed.rooms.now = bed.rooms.now + Duration::from_secs(1);
    bed.release();
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::DeviceGone))]);
}

/// Closing a record that invalidates many thousand blocks would be one long step.
#[test]
fn a_record_invalidates_no_more_blocks_than_fit_a_turn() {
    let mut bed = Bed::new();
    bed.rooms.clean((0..5).map(|stripe| stripe * 256));
    for stripe in 0..5 {
        let range = ByteRange::new(stripe * 256 * BLOCK, 256 * BLOCK);
        bed.submit(IoOp::WriteZeroes, range, &[], false);
    }
    assert_eq!(bed.rooms.log.queued(), 5);
    let mut blocks = Vec::new();
    while bed.rooms.log.queued() > 0 {
        // What `Engine::pump_log` does.
        while let Some(&op) = bed.rooms.log.queue().front() {
            let Rooms { cache, fx, .. } = &mut bed.rooms;
            if !bed.requests.log_op(cache, op, fx) {
                break;
            }
            bed.rooms.log.queue().pop_front();
        }
        let Rooms { cache, fx, .. } = &mut bed.rooms;
        assert!(cache.close_record(fx), "there is room");
        bed.deliver();
        let record = bed.rooms.only();
        blocks.push(kinds(&record.1).iter().map(|(_, count, _)| count).sum::<u32>());
        bed.end(record, Ok(()));
    }
    assert_eq!(blocks, [512, 512, 256]);
}

/// Long zeroes of a part of two blocks, which the primary does not answer; and a write of the first
/// of these blocks, if any, which waits for them.
fn zeroes_that_turn_to_the_cache(bed: &mut Bed, later: Option<&[u8]>) {
    let len = (ZEROES_DIRECT_BLOCKS + 2) * BLOCK;
    bed.rooms.devices.primary[..len as usize].copy_from_slice(&noise(9, len as usize));
    bed.submit(IoOp::WriteZeroes, ByteRange::new(100, len - 200), &[], false);
    for read in bed.rooms.sent() {
        bed.end(read, Ok(()));
    }
    later.map(|bytes| bed.write(0, bytes));
    let direct = bed.rooms.only();
    let whole = ByteRange::new(0, len);
    assert_eq!((direct.0, direct.1.op, direct.1.range), (PRIMARY, IoOp::Write, whole));
    bed.rooms.volume_mut(VOLUME).failures = 1;
    bed.end(direct, Err(ErrorKind::DeviceGone.into()));
    bed.log_written();
    if later.is_some() {
        bed.log_written();
    }
    assert!(bed.answered().iter().all(|(_, error)| error.is_none()));
    assert_eq!(bed.requests.len(), 0);
}

/// The bytes beside them became zeros.
#[test]
fn zeroes_that_turn_to_the_cache_leave_the_bytes_beside_them() {
    let mut bed = Bed::new();
    zeroes_that_turn_to_the_cache(&mut bed, None);
    let len = (ZEROES_DIRECT_BLOCKS + 2) * BLOCK;
    let mut expected = noise(9, len as usize);
    expected[100..len as usize - 100].fill(0);
    bed.read(0, ZEROES_DIRECT_BLOCKS + 2);
    for io in bed.rooms.sent() {
        bed.end(io, Ok(()));
    }
    assert!(bed.bytes() == expected);
}

/// The edge's old content came after it.
#[test]
fn a_write_that_waits_for_one_that_turns_to_the_cache_is_not_undone() {
    let mut bed = Bed::new();
    let later = noise(3, BLOCK_SIZE);
    zeroes_that_turn_to_the_cache(&mut bed, Some(&later));
    bed.read(0, 1);
    assert!(bed.bytes() == later);
}
