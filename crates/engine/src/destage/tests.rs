//! Destaging with a cache in which blocks are dirty, and a primary; no requests.

use forebay_block::ErrorKind;

use super::*;
use crate::api::{Mode, Pace, Part};
use crate::cache::IMMOVABLE_PAUSE;
use crate::log::builder::Expect;
use crate::log::read::Reader;
use crate::testing::VOLUME;
use crate::testing::rooms::{BLOCK, PRIMARY, Rooms, content, key};

/// Destaging, as fast as the primary takes it, and the rooms that it works on.
struct Bed {
    rooms: Rooms,
    destaging: Destaging,
}

impl Bed {
    /// Blocks that are dirty and durable. RAM has none of them.
    fn with(blocks: impl IntoIterator<Item = u64>) -> Self {
        let mut rooms = Rooms::new(0);
        rooms.dirty_durable(blocks);
        Self { rooms, destaging: Destaging { draining: true, ..Destaging::default() } }
    }

    fn pump(&mut self) {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        self.destaging.pump(cache, false, fx);
    }

    /// Tells destaging that a request has ended.
    fn end(&mut self, sent: (Target, Io), result: IoResult<()>) {
        let (sent, done) = self.rooms.end(sent, result);
        let Rooms { cache, fx, .. } = &mut self.rooms;
        match sent.ticket {
            Ticket::DestageWrite(id) => self.destaging.written(cache, id, done),
            Ticket::Payloads(read) => {
                cache.end_read(&read);
                match read.reader {
                    Reader::Destage(id) => self.destaging.read_back(cache, id, &read, &done, fx),
                    Reader::Filling(start, since) => {
                        Destaging::checked(cache, start, since, &read, &done, fx);
                    }
                    other => panic!("{other:?}"),
                }
            }
            other => panic!("{other:?}"),
        }
    }

    /// The writes that are sent: what they need of the cache device is read.
    fn writes(&mut self) -> Vec<(Target, Io)> {
        self.pump();
        let (mut reads, mut writes, mut records) = (self.rooms.sent(), Vec::new(), Vec::new());
        while let Some(sent) = reads.pop() {
            match sent.0 {
                Target::Cache if sent.1.op == IoOp::Write => records.push(sent),
                Target::Cache => self.end(sent, Ok(())),
                Target::Primary(_) => writes.push(sent),
            }
            reads.append(&mut self.rooms.fx.ios);
        }
        self.rooms.fx.ios = records;
        writes.sort_by_key(|(_, io)| io.range.offset);
        writes
    }

    /// Sends the write of what is dirty, which is one.
    fn write(&mut self) -> (Target, Io) {
        let mut writes = self.writes();
        assert_eq!(writes.len(), 1, "{writes:?}");
        writes.remove(0)
    }

    /// The primary has flushed what was written.
    fn flushed(&mut self, result: IoResult<()>) {
        for id in std::mem::take(&mut self.rooms.volume_mut(VOLUME).written) {
            self.destaging.flushed(&mut self.rooms.cache, id, &result);
        }
    }

    fn wait(&mut self, time: Duration) {
        self.rooms.now = self.rooms.now + time;
    }

    /// Whether a block is dirty, and on its way to the primary.
    fn state(&self, block: u64) -> (bool, bool) {
        let dirty = self.rooms.contents.dirty();
        (dirty.contains(key(block)), dirty.is_destaging(key(block)))
    }

    fn on_primary(&self, block: u64) -> bool {
        let at = (block * BLOCK) as usize;
        self.rooms.devices.primary[at..at + BLOCK_SIZE] == content(block)
    }

    fn wait_through(&mut self, block: u64, op: u32) {
        self.destaging.wait_through(key(block), Id(op));
    }

    /// Writes that are told of their block, and how it went.
    fn told(&mut self) -> Vec<(u32, Option<ErrorKind>)> {
        let told = |note| match note {
            Note::OnPrimary(op, result) => (op.0, result.err().map(|error| error.kind())),
            other => panic!("{other:?}"),
        };
        self.rooms.notes().into_iter().map(told).collect()
    }
}

fn blocks(sent: &[(Target, Io)]) -> Vec<(u64, u64)> {
    sent.iter().map(|(_, io)| (io.range.offset / BLOCK, io.range.len / BLOCK)).collect()
}

#[test]
fn neighbors_go_to_the_primary_in_one_write_in_the_order_of_their_addresses() {
    let mut bed = Bed::with([7, 5, 9, 6]);
    let writes = bed.writes();
    assert_eq!(blocks(&writes), [(5, 3), (9, 1)]);
    assert!(writes.iter().all(|(target, io)| *target == PRIMARY && io.op == IoOp::Write));
    writes.into_iter().for_each(|write| bed.end(write, Ok(())));
    assert!([5, 6, 7, 9].into_iter().all(|block| bed.on_primary(block)));
}

/// A bound of 40 blocks a second over four shards is 10 for one.
#[test]
fn destages_keep_to_their_rate_unless_something_in_the_cache_waits_for_them() {
    let mut bed = Bed::with((0..24).map(|at| at * 2));
    bed.rooms.cache.config.shards = 4;
    bed.rooms.cache.set_pace(VOLUME, Pace { rate: Some(40 * BLOCK), ..Pace::default() });
    let mut written = 0;
    for _ in 0..100 {
        bed.wait(Duration::from_millis(10));
        let writes = bed.writes();
        written += writes.len();
        writes.into_iter().for_each(|write| bed.end(write, Ok(())));
    }
    assert!((9..=12).contains(&written), "{written} in a second");
    bed.rooms.cache.set_mode(VOLUME, Mode::PassThrough);
    bed.wait(Duration::from_millis(10));
    let writes = bed.writes().len();
    assert!(writes > 1, "{writes}: a mode that uses the primary waits for them");
}

#[test]
fn a_drain_goes_on_while_the_shard_stops_until_the_log_has_ended() {
    let mut bed = Bed::with([1]);
    bed.rooms.standing.state = State::Stopping;
    assert_eq!(bed.writes().len(), 1);
    let mut bed = Bed::with([1]);
    bed.rooms.standing.state = State::Stopping;
    bed.rooms.log.end();
    assert!(bed.writes().is_empty(), "its end would come after that of the shard");
}

#[test]
fn the_dirty_target_says_from_where_on_blocks_are_destaged() {
    let mut bed = Bed::with(0..10);
    bed.destaging.draining = false;
    let limit = bed.rooms.limit_of(VOLUME);
    assert!(limit > 20, "{limit} blocks may be dirty");
    for (target, destages) in [
        (Part::Percent(90), false),
        (Part::Bytes(12 * BLOCK), false),
        (Part::Bytes(8 * BLOCK), true),
        (Part::Percent(0), true),
    ] {
        bed.rooms.cache.config.dirty_target = target;
        let writes = bed.writes();
        assert_eq!(!writes.is_empty(), destages, "{target:?}");
        writes.into_iter().for_each(|write| bed.end(write, Err(ErrorKind::Media.into())));
        bed.wait(Duration::from_secs(1));
    }
}

#[test]
fn the_dirty_limit_is_percent_or_bytes_and_leaves_a_tenth_of_the_cache() {
    let mut bed = Bed::with([]);
    let cache = &mut bed.rooms.cache;
    cache.config.shards = 2;
    cache.set_dirty_limit(Part::Percent(100));
    let most = cache.dirty_limit();
    cache.set_dirty_limit(Part::Percent(45));
    assert_eq!(cache.dirty_limit(), most / 2);
    cache.set_dirty_limit(Part::Bytes(40 * BLOCK));
    assert_eq!((cache.dirty_limit(), cache.limit_of(VOLUME)), (20, 20));
    cache.set_dirty_limit(Part::Bytes(u64::MAX));
    assert_eq!(cache.dirty_limit(), most);
    cache.set_dirty_limit(Part::Bytes(0));
    assert_eq!(cache.dirty_limit(), 1);
}

#[test]
fn a_write_ends_where_its_stripe_does() {
    let mut bed = Bed::with(STRIPE_BLOCKS - 2..STRIPE_BLOCKS + 1);
    assert_eq!(blocks(&bed.writes()), [(STRIPE_BLOCKS - 2, 2), (STRIPE_BLOCKS, 1)]);
}

#[test]
fn the_short_last_block_of_a_volume_is_written_as_far_as_it_goes() {
    let mut bed = Bed::with([10]);
    bed.rooms.volume_mut(VOLUME).config.size = 10 * BLOCK + 512;
    let (_, io) = bed.write();
    assert_eq!((io.range.offset, io.range.len, io.buf.len()), (10 * BLOCK, 512, 512));
}

#[test]
fn zeros_are_written_without_bytes_and_keep_their_room_on_the_primary() {
    let mut bed = Bed::with([]);
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    (3..5).for_each(|block| assert!(cache.push_written(fx, key(block), &[0; BLOCK_SIZE])));
    bed.rooms.log_record();
    bed.rooms.flush_device();
    let (_, io) = bed.write();
    assert_eq!((io.op, io.range.len, io.buf.len()), (IoOp::WriteZeroes, 2 * BLOCK, 0));
    assert!(io.flags.no_hole);
}

#[test]
fn a_block_that_was_rewritten_is_spared_until_destaging_comes_by_again() {
    // More than half of what may be dirty, so that one goes at a time.
    let mut bed = Bed::with((0..18).map(|n| 2 * n));
    bed.destaging.drain(false);
    bed.rooms.dirty_durable([0]);
    let write = bed.write();
    assert_eq!(write.1.range.offset, 2 * BLOCK);
    bed.end(write, Ok(()));
    bed.rooms.volume_mut(VOLUME).flow.cursor = key(0);
    assert_eq!(bed.write().1.range.offset, 0);
}

#[test]
fn a_block_that_was_rewritten_is_not_spared_on_disks() {
    let mut bed = Bed::with((0..18).map(|n| 2 * n));
    bed.rooms.volume_mut(VOLUME).config.rotational = true;
    bed.destaging.drain(false);
    bed.rooms.dirty_durable([0]);
    assert_eq!(bed.write().1.range.offset, 0);
}

#[test]
fn a_block_that_was_rewritten_is_not_spared_by_a_drain() {
    let mut bed = Bed::with((0..18).map(|n| 2 * n));
    bed.rooms.dirty_durable([0]);
    assert_eq!(blocks(&bed.writes())[0], (0, 1));
}

#[test]
fn a_block_is_clean_only_when_the_primary_has_written_and_flushed_it() {
    let mut bed = Bed::with([5]);
    let write = bed.write();
    assert_eq!(bed.state(5), (true, true));
    bed.end(write, Ok(()));
    assert_eq!((bed.state(5), bed.on_primary(5)), ((true, true), true));
    assert_eq!(bed.rooms.volume(VOLUME).flow.unflushed_blocks, 1);
    bed.flushed(Ok(()));
    assert_eq!((bed.state(5), bed.destaging.len()), ((false, false), 0));
    assert!(!bed.rooms.contents.get(key(5)).expect("it is still cached").dirty);
    assert_eq!(bed.rooms.volume(VOLUME).flow.unflushed_blocks, 0);
}

#[test]
fn a_block_that_is_rewritten_on_its_way_stays_dirty() {
    let mut bed = Bed::with([5, 6]);
    let write = bed.write();
    bed.rooms.dirty_durable([5]);
    bed.end(write, Ok(()));
    bed.flushed(Ok(()));
    assert_eq!((bed.state(5), bed.state(6)), ((true, false), (false, false)));
    assert_eq!(blocks(&bed.writes()), [(5, 1)]);
}

#[test]
fn a_newer_version_does_not_overtake_an_older_one_on_its_way_to_the_primary() {
    let mut bed = Bed::with([5]);
    let older = bed.write();
    bed.rooms.dirty_durable([5]);
    bed.wait_through(5, 1);
    assert!(bed.writes().is_empty(), "not even if a write waits for it");
    bed.end(older, Ok(()));
    assert!(bed.told().is_empty(), "the primary has the older version");
    // The older one is written: where a write waits, the newer one need not wait for the flush.
    let newer = bed.write();
    bed.end(newer, Ok(()));
    assert_eq!(bed.told(), [(1, None)]);
    bed.flushed(Ok(()));
    assert_eq!((bed.state(5), bed.destaging.len()), ((false, false), 0));
}

/// A search of all destages took 65,536 steps next to an ordered volume.
#[test]
fn the_destage_that_decides_about_a_block_is_found_among_few() {
    let mut bed = Bed::with((1..=4).map(|stripe| stripe * STRIPE_BLOCKS));
    bed.writes();
    for op in 1..=40 {
        bed.rooms.dirty_durable([5]);
        bed.wait_through(5, op);
        let rewritten = bed.write();
        bed.end(rewritten, Ok(()));
        assert_eq!(bed.told(), [(op, None)]);
    }
    assert_eq!(bed.destaging.len(), 4 + 40, "none was flushed");
    let candidates = |block| bed.destaging.destages.candidates(key(block)).count();
    assert_eq!((candidates(5), candidates(6), candidates(STRIPE_BLOCKS)), (1, 1, 1));
    bed.flushed(Ok(()));
    assert_eq!((bed.state(5), bed.destaging.len()), ((false, false), 4));
    assert_eq!(bed.destaging.destages.candidates(key(5)).count(), 0);
}

#[test]
fn a_neighbor_on_its_way_is_not_taken_along_in_its_newer_version() {
    let mut bed = Bed::with([6]);
    let older = bed.write();
    bed.rooms.dirty_durable([5, 6, 7]);
    assert_eq!(blocks(&bed.writes()), [(5, 1), (7, 1)]);
    bed.end(older, Ok(()));
}

#[test]
fn a_newer_version_is_on_its_way_although_the_older_one_that_it_passed_is_flushed() {
    let mut bed = Bed::with([5]);
    let older = bed.write();
    bed.rooms.dirty_durable([5]);
    bed.end(older, Ok(()));
    bed.wait_through(5, 1);
    let newer = bed.write();
    bed.flushed(Ok(()));
    assert_eq!(bed.state(5), (true, true));
    bed.end(newer, Ok(()));
    bed.flushed(Ok(()));
    assert_eq!(bed.state(5), (false, false));
}

#[test]
fn a_newer_version_for_which_nobody_waits_sets_out_after_the_flush_of_the_older_one() {
    let mut bed = Bed::with([5]);
    let older = bed.write();
    bed.rooms.dirty_durable([5]);
    bed.end(older, Ok(()));
    assert!(bed.writes().is_empty());
    bed.flushed(Ok(()));
    assert_eq!(blocks(&bed.writes()), [(5, 1)]);
}

#[test]
fn a_block_that_is_not_durable_waits_for_a_flush_of_the_cache_device() {
    let mut bed = Bed::with([]);
    bed.rooms.dirty([5]);
    assert!(bed.writes().is_empty());
    assert!(bed.rooms.log.begin_wanted_flush(), "destaging asks for it");
    let covered = bed.rooms.log.end_flush();
    bed.rooms.log.advance_durable(covered);
    assert_eq!(blocks(&bed.writes()), [(5, 1)]);
}

#[test]
fn a_failed_write_leaves_its_blocks_dirty_and_is_repeated_after_growing_pauses() {
    let mut bed = Bed::with([5]);
    let pauses = [100, 200, 400, 800, 1600, 1600].map(Duration::from_millis);
    for pause in pauses {
        let write = bed.write();
        bed.end(write, Err(ErrorKind::Timeout.into()));
        assert_eq!(bed.state(5), (true, false));
        bed.wait(pause - Duration::from_nanos(1));
        assert!(bed.writes().is_empty(), "{pause:?}");
        bed.wait(Duration::from_nanos(1));
    }
    let write = bed.write();
    bed.end(write, Ok(()));
    assert_eq!(bed.rooms.volume(VOLUME).failures, 0, "the next pause is short again");
}

/// All of a run failed again and again for one bad sector.
#[test]
fn a_block_that_the_primary_refuses_holds_up_no_other() {
    let mut bed = Bed::with([5, 6, 7, 9]);
    bed.rooms.set_mode(VOLUME, Mode::WriteThrough);
    bed.wait_through(6, 1);
    bed.wait_through(7, 2);
    let mut refused = 0;
    for _ in 0..3 {
        for write in bed.writes() {
            let has_bad = (write.1.range.offset..write.1.range.end()).contains(&(6 * BLOCK));
            refused += u32::from(has_bad);
            bed.end(write, if has_bad { Err(ErrorKind::Media.into()) } else { Ok(()) });
        }
    }
    assert_eq!(refused, 2, "with its neighbors, and alone");
    assert_eq!(bed.told(), [(1, Some(ErrorKind::Media)), (2, None)]);
    bed.flushed(Ok(()));
    assert_eq!([5, 6, 7, 9].map(|block| bed.state(block).0), [false, true, false, false]);
    bed.wait(IMMOVABLE_PAUSE);
    assert_eq!(blocks(&bed.writes()), [(6, 1)]);
}

/// After each pause destaging began at the lowest block of the volume again.
#[test]
fn blocks_behind_others_that_the_primary_refuses_have_their_turn() {
    let many: Vec<u64> = (0..14).map(|n| 2 * n).collect();
    let mut bed = Bed::with(many.iter().copied());
    for _ in 0..40 {
        for write in bed.writes() {
            let is_good = write.1.range.offset >= 22 * BLOCK;
            bed.end(write, if is_good { Ok(()) } else { Err(ErrorKind::NoSpace.into()) });
        }
        bed.wait(Duration::from_millis(1700));
    }
    bed.flushed(Ok(()));
    let dirty = many.iter().filter(|&&block| bed.state(block).0);
    assert_eq!(dirty.count(), 11);
}

#[test]
fn blocks_of_which_the_flush_failed_are_written_again() {
    let mut bed = Bed::with([5]);
    let write = bed.write();
    bed.end(write, Ok(()));
    bed.flushed(Err(ErrorKind::Media.into()));
    assert_eq!(bed.state(5), (true, false));
    bed.wait(RETRY_FIRST);
    assert_eq!(blocks(&bed.writes()), [(5, 1)]);
}

#[test]
fn a_block_with_bad_bytes_is_fenced_and_its_neighbors_go_without_it() {
    let mut bed = Bed::with([5, 6, 7]);
    bed.rooms.spoil(6);
    bed.wait_through(6, 1);
    assert_eq!(blocks(&bed.writes()), [(5, 1)], "6 and 7 are read together");
    assert!(bed.rooms.contents.fenced().contains(&key(6)));
    assert_eq!(bed.told(), [(1, Some(ErrorKind::Corrupt))]);
    assert_eq!(blocks(&bed.writes()), [(7, 1)]);
    assert_eq!(bed.state(6), (true, false));
}

#[test]
fn a_read_error_of_the_cache_device_fences_nothing_and_leads_to_a_probe() {
    let mut bed = Bed::with([5]);
    bed.pump();
    let read = bed.rooms.only();
    bed.end(read, Err(ErrorKind::Media.into()));
    assert!(bed.rooms.contents.fenced().is_empty());
    let (target, probe) = bed.rooms.only();
    assert_eq!((target, probe.op), (Target::Cache, IoOp::Write));
    assert!(bed.writes().is_empty());
    bed.wait(IMMOVABLE_PAUSE);
    assert_eq!(blocks(&bed.writes()), [(5, 1)]);
}

/// One bad place of the device held up the destages of a whole volume.
#[test]
fn a_block_that_cannot_be_read_holds_up_no_other() {
    let mut bed = Bed::with([5, 6, 7]);
    bed.rooms.dirty_durable([20]);
    bed.pump();
    let fails = |bed: &mut Bed, block: u64| {
        let (mut writes, mut sent) = (Vec::new(), bed.rooms.sent());
        while let Some((target, io)) = sent.pop() {
            match (target, io.op) {
                (Target::Primary(_), _) => writes.push((target, io)),
                (Target::Cache, IoOp::Read) => {
                    let place = bed.rooms.contents.get(key(block)).expect("it is cached");
                    let at = bed.rooms.segment_offset(place.segment as usize);
                    let bad = at + u64::from(place.offset);
                    let hit = (io.range.offset..io.range.end()).contains(&bad);
                    let result = if hit { Err(ErrorKind::Media.into()) } else { Ok(()) };
                    bed.end((target, io), result);
                }
                _ => {}
            }
            sent.append(&mut bed.rooms.fx.ios);
        }
        writes.sort_by_key(|(_, io)| io.range.offset);
        blocks(&writes)
    };
    assert_eq!(fails(&mut bed, 6), [(20, 1)], "5, 6 and 7 are read together");
    bed.pump();
    assert_eq!(fails(&mut bed, 6), [], "they rest");
    bed.wait(IMMOVABLE_PAUSE);
    bed.pump();
    assert_eq!(fails(&mut bed, 6), [(5, 1), (7, 1)], "each by itself");
    assert!(bed.rooms.contents.fenced().is_empty());
}

/// In write-through such blocks stayed dirty, and counted as lost with the cache device.
#[test]
fn a_block_that_moves_to_the_store_on_its_way_is_clean_in_the_end() {
    let mut rooms = Rooms::with_store();
    rooms.dirty_durable([4]);
    let destaging = Destaging { draining: true, ..Destaging::default() };
    let mut bed = Bed { rooms, destaging };
    let write = bed.write();
    bed.end(write, Ok(()));
    let before = bed.rooms.contents.get(key(4));
    bed.rooms.stored(&[4]);
    assert_ne!(bed.rooms.contents.get(key(4)), before);
    bed.flushed(Ok(()));
    assert_eq!(bed.state(4), (false, false));
    assert_eq!(bed.rooms.contents.check(), Ok(()));
}

/// Reclaim logged its loss while the primary wrote it: it stayed cached, clean and unreadable.
#[test]
fn a_block_that_is_lost_on_its_way_leaves_the_cache_in_the_end() {
    let mut bed = Bed::with([4]);
    let write = bed.write();
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    cache.fence(key(4));
    let now = cache.contents.get(key(4)).expect("it is cached");
    assert!(cache.push_bare(fx, key(4), 1, EntryKind::Lost, true, Expect::At(now)));
    bed.rooms.log_record();
    bed.end(write, Ok(()));
    bed.flushed(Ok(()));
    assert_eq!((bed.state(4), bed.rooms.contents.get(key(4))), ((false, false), None));
    assert!(bed.rooms.contents.fenced().is_empty());
    assert_eq!(bed.rooms.contents.check(), Ok(()));
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    cache.pump_store(fx);
    assert!(cache.log.builder().has_entry_of(key(4)), "or it would be lost after a crash");
}

#[test]
fn a_write_that_waits_is_told_when_its_block_is_written_or_failed_or_gone() {
    let mut bed = Bed::with([5, 9]);
    bed.destaging.drain(false);
    [(5, 1), (5, 2), (9, 3), (20, 4)].iter().for_each(|&(block, op)| bed.wait_through(block, op));
    let mut writes = bed.writes();
    assert_eq!(bed.told(), [(4, None)], "block 20 is not dirty");
    assert_eq!(blocks(&writes), [(5, 1), (9, 1)], "whatever the pace");
    bed.end(writes.remove(0), Ok(()));
    assert_eq!(bed.told(), [(1, None), (2, None)]);
    bed.end(writes.remove(0), Err(ErrorKind::DeviceGone.into()));
    assert_eq!(bed.told(), [(3, Some(ErrorKind::DeviceGone))]);
}

#[test]
fn where_the_primary_has_to_be_complete_a_failed_destage_fails_the_flushes_that_wait_for_it() {
    let mut bed = Bed::with([5]);
    bed.rooms.set_mode(VOLUME, Mode::WriteThrough);
    bed.rooms.volume_mut(VOLUME).leftover = None;
    bed.rooms.volume_mut(VOLUME).leftover_waiters.push(Id(3));
    let write = bed.write();
    bed.end(write, Err(ErrorKind::Media.into()));
    let notes = bed.rooms.notes();
    assert!(matches!(&notes[..], [Note::FlushPart(Id(3), Err(_))]), "{notes:?}");
    assert!(bed.rooms.has_leftover(VOLUME), "the next flush waits for the block");
    bed.wait(IMMOVABLE_PAUSE);
    let write = bed.write();
    bed.end(write, Ok(()));
    assert!(bed.rooms.has_leftover(VOLUME));
    bed.flushed(Ok(()));
    assert!(!bed.rooms.has_leftover(VOLUME));
}

#[test]
fn where_the_primary_has_to_be_complete_a_failed_flush_makes_the_next_one_wait_for_the_blocks() {
    let mut bed = Bed::with([5]);
    bed.rooms.set_mode(VOLUME, Mode::WriteThrough);
    let write = bed.write();
    bed.rooms.volume_mut(VOLUME).leftover = None;
    bed.end(write, Ok(()));
    bed.flushed(Err(ErrorKind::Media.into()));
    assert!(bed.rooms.has_leftover(VOLUME));
}

#[test]
fn after_a_failed_flush_as_many_destages_end_in_a_turn_as_after_another_one() {
    for result in [Ok(()), Err(ErrorKind::Media.into())] {
        let mut rooms = Rooms::new(0);
        for block in 0..900 {
            let Rooms { cache, fx, .. } = &mut rooms;
            assert!(cache.push_written(fx, key(block), &[0; BLOCK_SIZE]), "there is room");
        }
        rooms.log_record();
        rooms.flush_device();
        let destaging = Destaging { draining: true, ..Destaging::default() };
        let mut bed = Bed { rooms, destaging };
        let stripes = 4;
        for _ in 0..stripes {
            let write = bed.write();
            bed.end(write, Ok(()));
        }
        bed.flushed(result.clone());
        assert!(bed.rooms.is_stuck(VOLUME) == result.is_err(), "nothing sets out meanwhile");
        for left in [3, 2, 1, 0] {
            assert_eq!(bed.destaging.len(), left);
            assert!(bed.destaging.goes_on(), "reclaim, whose turn was before, waits for them too");
            bed.wait_through(899, 1);
            bed.pump();
            assert_eq!(bed.told().len(), usize::from(result.is_ok()), "only when it is written");
        }
        assert!(!bed.destaging.goes_on());
        let dirty = bed.rooms.contents.dirty().blocks();
        assert_eq!(dirty, if result.is_ok() { 0 } else { 900 });
        assert_eq!(bed.rooms.volume(VOLUME).flow.unflushed_blocks, 0);
    }
}

#[test]
fn a_destage_that_began_before_a_change_of_mode_settles_nothing_after_it() {
    let mut bed = Bed::with([5]);
    let write = bed.write();
    bed.rooms.dirty([5]);
    bed.rooms.set_mode(VOLUME, Mode::WriteThrough);
    bed.wait(RETRY_FIRST);
    bed.end(write, Ok(()));
    bed.flushed(Ok(()));
    assert!(bed.rooms.has_leftover(VOLUME), "it was an older version");
    bed.rooms.flush_device();
    let write = bed.write();
    bed.rooms.dirty([5]);
    bed.end(write, Ok(()));
    bed.flushed(Ok(()));
    assert!(bed.rooms.contents.dirty().contains(key(5)));
    assert!(!bed.rooms.has_leftover(VOLUME), "what is newer waits for the primary itself");
}

#[test]
fn a_flush_of_the_primary_is_due_after_a_while_or_when_somebody_is_impatient() {
    let mut bed = Bed::with([5, 9]);
    let is_due = |bed: &Bed| bed.destaging.flush_is_due(&bed.rooms.cache, 0);
    let mut writes = bed.writes();
    bed.end(writes.remove(0), Ok(()));
    assert!(!is_due(&bed), "a drain waits for the writes under way");
    bed.end(writes.remove(0), Ok(()));
    assert!(is_due(&bed));
    bed.destaging.drain(false);
    assert!(!is_due(&bed));
    bed.wait(FLUSH_AFTER);
    assert!(is_due(&bed));
    bed.flushed(Ok(()));
    assert!(!is_due(&bed), "nothing is written");
}

#[test]
fn a_failed_cache_device_is_emptied_once_it_is_recorded_that_it_has_failed() {
    let mut bed = Bed::with([5]);
    bed.rooms.set_health(Health::Draining);
    assert!(bed.writes().is_empty(), "the next start would trust the log more than the primary");
    bed.rooms.standing.trust = Trust::DirtyOnly;
    assert_eq!(blocks(&bed.writes()), [(5, 1)]);
}

#[test]
fn a_segment_knows_how_many_of_its_blocks_are_on_their_way() {
    let mut bed = Bed::with([5, 6]);
    let destaging = |bed: &Bed| bed.rooms.log.segment(1).destaging;
    let write = bed.write();
    assert_eq!(destaging(&bed), 2);
    bed.end(write, Ok(()));
    assert_eq!(destaging(&bed), 2);
    bed.flushed(Ok(()));
    assert_eq!(destaging(&bed), 0);
}

#[test]
fn what_fills_a_stripe_of_the_primary_goes_first() {
    let mut bed = Bed::with([0, 2, 4, 5, 6, 7]);
    bed.destaging.draining = false;
    bed.rooms.cache.config.dirty_target = Part::Percent(0);
    bed.rooms.cache.config.destage_depth = 1;
    let pace = Pace { stripe: Some(4 * BLOCK), ..Pace::default() };
    bed.rooms.cache.set_pace(VOLUME, pace);
    let mut order = Vec::new();
    for _ in 0..3 {
        let write = bed.write();
        order.extend(blocks(std::slice::from_ref(&write)));
        bed.end(write, Ok(()));
        bed.flushed(Ok(()));
        bed.wait(Duration::from_millis(1));
    }
    assert_eq!(order, [(4, 4), (0, 1), (2, 1)]);
}

#[test]
fn a_size_that_is_no_full_stripe_counts_as_none() {
    let unit = |stripe: Option<u64>, optimal_io| {
        let mut bed = Bed::with([]);
        bed.rooms.volume_mut(VOLUME).config.optimal_io = optimal_io;
        bed.rooms.cache.set_pace(VOLUME, Pace { stripe, ..Pace::default() });
        bed.rooms.contents.dirty().unit_of(VOLUME)
    };
    let given = [512, 4096, 8192, 192 << 10, 256 << 10, 1 << 20, 3 << 20, 33_553_920];
    assert_eq!(given.map(|bytes| unit(None, bytes)), [1, 1, 2, 1, 64, 256, 256, 1]);
    assert_eq!((unit(Some(0), 1 << 20), unit(Some(64 << 10), 4096)), (1, 16));
}

/// A bed whose primary is an array of disks with full stripes of four blocks. `stored` blocks are
/// clean in the store, and `dirty` ones are durable in the log.
fn striped(stored: &[u64], dirty: &[u64], rotational: bool) -> Bed {
    let mut rooms = Rooms::with_store();
    let config = &mut rooms.volume_mut(VOLUME).config;
    (config.optimal_io, config.rotational) = (4 * BLOCK as u32, rotational);
    rooms.cache.set_pace(VOLUME, Pace::default());
    rooms.clean(stored.iter().copied());
    stored.iter().for_each(|&block| rooms.stored(&[block]));
    rooms.dirty_durable(dirty.iter().copied());
    Bed { rooms, destaging: Destaging { draining: true, ..Destaging::default() } }
}

/// What is sent to the primary, after what must be in the log first is durable.
fn sent_in_stripes(bed: &mut Bed) -> Vec<(Target, Io)> {
    // Parts of a stripe are left once.
    for _ in 0..2 {
        let writes = bed.writes();
        if !writes.is_empty() {
            return writes;
        }
        bed.rooms.settle();
        bed.rooms.flush_device();
    }
    bed.writes()
}

#[test]
fn a_stripe_of_the_primary_is_filled_if_the_cache_has_all_of_it() {
    for (stored, dirty, rotational, expected) in [
        (&[1, 2][..], &[0, 3][..], true, &[(0, 4)][..]),
        // Half of it is enough for any primary; dirty in one place is not for a disk.
        (&[1, 2], &[0, 3], false, &[(0, 4)]),
        (&[0, 2, 3], &[1], true, &[(1, 1)]),
        (&[0, 2, 3], &[1], false, &[(1, 1)]),
        (&[3], &[0, 1, 2], false, &[(0, 4)]),
        // A block is missing.
        (&[2], &[0, 3], true, &[(0, 1), (3, 1)]),
        (&[1, 6], &[0, 2, 3, 4, 5, 7], true, &[(0, 8)]),
    ] {
        let mut bed = striped(stored, dirty, rotational);
        let writes = sent_in_stripes(&mut bed);
        let found = blocks(&writes);
        assert_eq!(found, expected, "{stored:?} {dirty:?} {rotational}");
        writes.into_iter().for_each(|write| bed.end(write, Ok(())));
        bed.flushed(Ok(()));
        assert!((0..9).all(|block| bed.state(block) == (false, false)));
        let sent: u64 = found.iter().map(|&(_, count)| count).sum();
        let stats = &bed.rooms.volume_mut(VOLUME).stats;
        assert_eq!(stats.stripe_filled_blocks, sent - dirty.len() as u64);
        assert!(found.iter().all(|&(at, count)| (at..at + count).all(|at| bed.on_primary(at))));
    }
}

/// A power failure may leave anything where the primary was written, so the cache must know.
#[test]
fn blocks_that_fill_a_stripe_are_dirty_in_the_log_before_it_is_written() {
    let mut bed = striped(&[1, 2], &[0, 3], true);
    bed.rooms.log.take_client_bytes();
    assert!(bed.writes().is_empty());
    assert_eq!((bed.state(1), bed.state(2)), ((true, false), (true, false)));
    assert!(bed.rooms.log.take_client_bytes() > 0, "more than reclaim's copies fills the log");
    let named = bed.rooms.contents.unsettled(key(1));
    assert!(named.is_some_and(|lsn| lsn > bed.rooms.log.durable()));
    assert!(bed.writes().is_empty(), "the record is on its way");
    bed.rooms.settle();
    bed.rooms.flush_device();
    assert_eq!(blocks(&bed.writes()), [(0, 4)]);
}

#[test]
fn a_block_that_was_made_dirty_does_not_leave_by_an_entry_for_a_clean_one() {
    let mut bed = striped(&[1], &[], true);
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    let place = cache.contents.get(key(1)).expect("it is cached");
    assert!(cache.push_dirtied(fx, key(1), place));
    let (kind, expect) = (EntryKind::Invalidate, crate::log::builder::Expect::At(place));
    assert!(cache.push_bare(fx, key(1), 1, kind, false, expect));
    assert!(cache.close_record(fx));
    assert_eq!(bed.state(1), (true, false));
    assert_eq!(bed.rooms.contents.check(), Ok(()));
}

/// A write past the log found the block clean; its bytes were overwritten by the stripe's.
#[test]
fn a_block_that_a_write_has_locked_is_not_made_dirty() {
    let mut bed = striped(&[1], &[], true);
    let Rooms { cache, fx, .. } = &mut bed.rooms;
    let place = cache.contents.get(key(1)).expect("it is cached");
    assert!(cache.push_dirtied(fx, key(1), place));
    assert!(cache.locks.acquire(key(1), Id(77)));
    assert!(cache.close_record(fx));
    assert_eq!(bed.state(1), (false, false));
    assert_eq!(bed.rooms.contents.check(), Ok(()));
}

#[test]
fn a_stripe_is_not_filled_where_something_is_in_doubt() {
    let runs = [(0, 1), (3, 1)];
    let mut bed = striped(&[1, 2], &[0, 3], true);
    assert!(bed.rooms.cache.locks.acquire(key(2), Id(77)));
    assert_eq!(blocks(&sent_in_stripes(&mut bed)), runs, "a write has locked a block");

    let mut bed = striped(&[1, 2], &[0, 3], true);
    bed.rooms.volume_mut(VOLUME).config.suspect = true;
    assert_eq!(blocks(&sent_in_stripes(&mut bed)), runs, "the primary may have been changed");

    let mut bed = striped(&[1, 2], &[0, 3], true);
    bed.rooms.volume_mut(VOLUME).distrusted = true;
    assert_eq!(blocks(&sent_in_stripes(&mut bed)), runs, "the primary was changed");

    let mut bed = striped(&[1, 2], &[0, 3], true);
    bed.rooms.cache.set_mode(VOLUME, Mode::PassThrough);
    assert_eq!(blocks(&sent_in_stripes(&mut bed)), runs, "requests go past the cache");

    let mut bed = striped(&[1, 2], &[0, 3], true);
    bed.rooms.cache.set_dirty_limit(Part::Bytes(4 * BLOCK));
    assert_eq!(blocks(&sent_in_stripes(&mut bed)), runs, "no more may be dirty");

    let mut bed = striped(&[1], &[0, 3], true);
    bed.rooms.clean([2]);
    assert_eq!(blocks(&sent_in_stripes(&mut bed)), runs, "a block is in the log");
}

/// The primary has its bytes, and must not be thought to lack them.
#[test]
fn a_clean_block_that_has_become_corrupt_fills_no_stripe() {
    let mut bed = striped(&[1, 2], &[0, 3], true);
    bed.rooms.spoil(2);
    assert_eq!(blocks(&sent_in_stripes(&mut bed)), [(0, 1), (3, 1)]);
    assert!(bed.rooms.contents.get(key(2)).is_none() && bed.rooms.contents.fenced().is_empty());
    assert_eq!((bed.state(1), bed.rooms.contents.check()), ((false, false), Ok(())));
    let stats = &bed.rooms.volume_mut(VOLUME).stats;
    assert_eq!((stats.corrupt_clean, stats.stripe_filled_blocks), (1, 0));
    assert_eq!(bed.rooms.volume(VOLUME).flow.filled_blocks, 0);
}

/// The clean block beside it was made dirty and written several times a second, forever.
#[test]
fn a_stripe_with_a_block_that_cannot_be_read_back_is_filled_once() {
    for corrupt in [true, false] {
        let mut bed = striped(&[0], &[1], true);
        bed.rooms.cache.set_pace(VOLUME, Pace { stripe: Some(2 * BLOCK), ..Pace::default() });
        let place = bed.rooms.contents.get(key(1)).expect("it is cached");
        let bad = bed.rooms.segment_offset(place.segment as usize) + u64::from(place.offset);
        if corrupt {
            bed.rooms.spoil(1);
        }
        for _ in 0..9 {
            bed.pump();
            let mut sent = std::mem::take(&mut bed.rooms.fx.ios);
            let records =
                |(target, io): &(Target, Io)| *target == Target::Cache && io.op == IoOp::Write;
            while let Some((target, io)) = sent.pop() {
                let hit = (io.range.offset..io.range.end()).contains(&bad);
                let fails = !corrupt && target == Target::Cache && hit;
                bed.end((target, io), if fails { Err(ErrorKind::Media.into()) } else { Ok(()) });
                let (records, rest): (Vec<_>, _) = bed.rooms.fx.ios.drain(..).partition(records);
                sent.extend(rest);
                bed.rooms.fx.ios.extend(records);
            }
            bed.rooms.settle();
            bed.rooms.flush_device();
            bed.flushed(Ok(()));
            bed.wait(IMMOVABLE_PAUSE);
        }
        assert_eq!(bed.state(1), (true, false));
        assert_eq!(bed.rooms.contents.fenced().contains(&key(1)), corrupt);
        assert_eq!(bed.rooms.volume(VOLUME).stats.stripe_filled_blocks, 1, "{corrupt}");
    }
}

/// A bed in which a stripe is being filled, with the reads that check its clean blocks.
fn checking() -> (Bed, Vec<(Target, Io)>) {
    let mut bed = striped(&[1, 2], &[0, 3], true);
    // Parts of a stripe are left once.
    bed.pump();
    bed.pump();
    let reads = bed.rooms.sent();
    assert!(!reads.is_empty() && reads.iter().all(|(target, _)| *target == Target::Cache));
    (bed, reads)
}

#[test]
fn a_block_that_changes_or_cannot_be_read_fills_no_stripe() {
    let (mut bed, reads) = checking();
    reads.into_iter().for_each(|read| bed.end(read, Err(ErrorKind::Media.into())));
    assert_eq!((bed.state(1), bed.state(2)), ((false, false), (false, false)));
    assert!([1, 2].iter().all(|&block| bed.rooms.contents.get(key(block)).is_none()));
    assert_eq!(blocks(&bed.writes()), [(0, 1), (3, 1)], "now, and not after more such reads");

    let (mut bed, reads) = checking();
    bed.rooms.dirty_durable([2]);
    reads.into_iter().for_each(|read| bed.end(read, Ok(())));
    assert_eq!((bed.state(1), bed.state(2)), ((false, false), (true, false)));

    let (mut bed, reads) = checking();
    bed.wait(Duration::from_millis(300));
    assert_eq!(blocks(&bed.writes()), [(0, 1), (3, 1)], "the device is slow");
    reads.into_iter().for_each(|read| bed.end(read, Ok(())));
    assert_eq!((bed.state(1), bed.state(2)), ((false, false), (false, false)));
    assert_eq!(bed.rooms.contents.check(), Ok(()));
}

#[test]
fn a_stripe_that_cannot_be_filled_is_written_in_parts_after_a_while() {
    let mut bed = striped(&[1, 2], &[0, 3], true);
    assert!(bed.writes().is_empty());
    // The cache device takes no flush.
    bed.wait(Duration::from_millis(300));
    assert_eq!(blocks(&bed.writes()), [(0, 1), (3, 1)]);
}
