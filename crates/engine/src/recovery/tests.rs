//! Recovery from what an earlier run left on the cache device, without what follows.

use std::ops::Range;

use forebay_block::{BLOCK_SIZE, ErrorKind, IoOp, IoResult};
use forebay_format::Lsn;

use super::*;
use crate::api::{DetachedStripe, LastStop, ShardConfig};
use crate::limits::{RECLAIM_RESERVE, WRITE_TRIES};
use crate::log::SegmentState;
use crate::testing::rooms::{BLOCK, Rooms, content, key};
use crate::testing::{SEGMENT, VOLUME};

mod forged;
mod late;

/// A start after a crash.
struct Bed {
    rooms: Rooms,
    start: Start,
    detach: Detach,
    compare: Compare,
    /// The requests to the cache device that change it, and flushes: where, in bytes.
    changes: Vec<(IoOp, Range<u64>)>,
}

impl Bed {
    /// A start on the devices of an earlier run, which has just crashed.
    fn after(rooms: Rooms) -> Self {
        Self::with(rooms, |_| {})
    }

    fn with(earlier: Rooms, change: impl FnOnce(&mut ShardConfig)) -> Self {
        let Rooms { cache, devices, .. } = earlier;
        let epoch = cache.config.epoch + 1;
        let mut config = ShardConfig { fresh: false, epoch, ..cache.config };
        change(&mut config);
        let mut rooms = Rooms::with(config, devices);
        rooms.standing.state = State::Recovering;
        let (start, detach, compare) = Default::default();
        Self { rooms, start, detach, compare, changes: Vec::new() }
    }

    /// Recovers, while the device does as `answer` says.
    fn run(&mut self, mut answer: impl FnMut(&Io) -> IoResult<()>) -> &State {
        let Self { rooms: Rooms { cache, fx, .. }, start, detach, compare, .. } = self;
        start.begin(cache, detach, compare, fx);
        loop {
            let Some((target, io)) = self.rooms.fx.ios.pop() else {
                let Some(at) = self.start.retry_at() else { break };
                let Rooms { cache, fx, .. } = &mut self.rooms;
                cache.now = at;
                self.start.retry(cache, fx);
                continue;
            };
            assert_eq!((target, self.rooms.state()), (Target::Cache, &State::Recovering));
            if io.op != IoOp::Read {
                self.changes.push((io.op, io.range.offset..io.range.end()));
            }
            let result = answer(&io);
            let (sent, done) = self.rooms.end((target, io), result);
            let Ticket::Recovery(step) = sent.ticket else { panic!("{sent:?}") };
            let Self { rooms: Rooms { cache, fx, .. }, start, detach, compare, .. } = self;
            start.step_done(cache, detach, compare, step, done, fx);
        }
        self.rooms.state()
    }

    /// Recovers and serves; only blocks that may be dirty are loaded for certain.
    fn served(mut self) -> Self {
        assert_eq!(self.run(|_| Ok(())), &State::Serving);
        self.rooms.contents.check().expect("the contents agree");
        self
    }

    /// Recovers, serves and loads everything.
    fn serving(self) -> Self {
        let mut bed = self.served();
        while bed.rooms.contents.is_loading() {
            bed.step(|_| Ok(()));
        }
        bed.rooms.contents.check().expect("the contents agree");
        bed
    }

    /// Runs one step of late loading. `answer` gives the result of each read from the device.
    fn step(&mut self, mut answer: impl FnMut(&Io) -> IoResult<()>) {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        self.start.pump_late(cache, true, fx);
        while let Some((target, io)) = self.rooms.fx.ios.pop() {
            assert_eq!((target, io.op), (Target::Cache, IoOp::Read));
            let result = answer(&io);
            let (sent, done) = self.rooms.end((target, io), result);
            let Ticket::LateFooter(index) = sent.ticket else { panic!("{sent:?}") };
            self.start.late_footer_read(&mut self.rooms.cache, index, done);
        }
        self.rooms.contents.check().expect("the contents agree");
    }

    /// Whether a block is cached, and if so, whether it is dirty.
    fn block(&self, block: u64) -> Option<bool> {
        self.rooms.contents.get(key(block)).map(|place| place.dirty)
    }

    fn bytes(&self, block: u64) -> &[u8] {
        let place = self.rooms.contents.get(key(block)).expect("it is cached");
        let at = self.rooms.segment_offset(place.segment as usize) as usize;
        &self.rooms.devices.cache[at + place.offset as usize..][..BLOCK_SIZE]
    }

    fn segment(&self, index: usize) -> SegmentState {
        self.rooms.log.segment(index).state
    }
}

impl Rooms {
    /// Puts blocks into a record of which only the first bytes reach the device.
    fn torn(&mut self, blocks: Range<u64>, len: usize) {
        for block in blocks {
            let Self { cache, fx, .. } = self;
            assert!(cache.push_written(fx, key(block), &content(block)));
        }
        let Self { cache, fx, .. } = self;
        assert!(cache.close_record(fx));
        let (_, io) = self.only();
        let at = io.range.offset as usize;
        self.devices.cache[at..at + len].copy_from_slice(&io.buf[..len]);
    }
}

/// Bytes of a segment on the cache device.
fn segment(index: u64) -> Range<u64> {
    index * u64::from(SEGMENT)..(index + 1) * u64::from(SEGMENT)
}

#[test]
fn a_device_without_a_log_is_an_empty_cache() {
    let bed = Bed::after(Rooms::new(0)).serving();
    assert_eq!((bed.rooms.contents.index().len(), bed.rooms.log.next_lsn()), (0, Lsn(1)));
}

#[test]
fn every_block_is_found_where_it_was_and_dirty_if_it_was() {
    let mut rooms = Rooms::new(0);
    rooms.dirty(0..7);
    rooms.clean(10..16);
    rooms.dirty(20..27);
    assert!(rooms.log.segment(1).state != SegmentState::Open, "of two segments, one has a footer");
    let next = rooms.log.next_lsn();
    let bed = Bed::after(rooms).serving();
    assert_eq!([0, 6, 10, 15, 20, 26].map(|block| bed.block(block)), {
        let (dirty, clean) = (Some(true), Some(false));
        [dirty, dirty, clean, clean, dirty, dirty]
    });
    assert_eq!((bed.block(7), bed.rooms.contents.index().len()), (None, 20));
    assert!((20..27).all(|block| bed.bytes(block) == content(block)));
    assert_eq!(bed.rooms.log.next_lsn(), next);
}

#[test]
fn what_was_clean_when_the_last_record_was_written_is_clean() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([1]);
    rooms.mark_clean(1);
    let bed = Bed::after(rooms).serving();
    assert_eq!(bed.block(1), Some(true), "no record says that it is clean");

    let mut rooms = Rooms::new(0);
    rooms.dirty([1]);
    rooms.mark_clean(1);
    rooms.clean([2]);
    let bed = Bed::after(rooms).serving();
    assert_eq!((bed.block(1), bed.block(2)), (Some(false), Some(false)));
}

#[test]
fn the_last_entry_of_a_block_counts() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([1, 2]);
    rooms.clean([3]);
    rooms.dirty([3]);
    let Rooms { cache, fx, .. } = &mut rooms;
    cache.push_bare(fx, key(1), 1, EntryKind::Invalidate, false, Expect::Always);
    rooms.log_record();
    let bed = Bed::after(rooms).serving();
    assert_eq!([1, 2, 3].map(|block| bed.block(block)), [None, Some(true), Some(true)]);
}

#[test]
fn a_record_that_was_torn_is_as_if_it_had_never_been() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([1]);
    let place = rooms.contents.get(key(1));
    // Header and entries are good, the last payload is missing.
    rooms.torn(1..3, 2 * BLOCK_SIZE);
    let bed = Bed::after(rooms).serving();
    let found = bed.rooms.contents.get(key(1)).zip(place).expect("it is cached");
    assert!(found.0.is_same_version(&found.1));
    assert_eq!((bed.block(2), bed.rooms.log.next_lsn()), (None, Lsn(2)));
}

#[test]
fn a_segment_that_never_became_part_of_the_log_is_erased_durably_before_footers_are_written() {
    let mut rooms = Rooms::new(0);
    rooms.dirty(0..7);
    rooms.torn(10..16, 0);
    rooms.torn(20..27, 8 * BLOCK_SIZE);
    let first = segment(2).start as usize;
    assert_ne!(rooms.devices.cache[first..first + PAGE], [0; PAGE]);
    let bed = Bed::after(rooms).serving();
    assert_eq!((bed.block(6), bed.block(10), bed.block(20)), (Some(true), None, None));
    assert_eq!(bed.rooms.devices.cache[first..first + PAGE], [0; PAGE]);
    let erased = (IoOp::Write, segment(2).start..segment(2).start + PAGE as u64);
    let footer = (IoOp::Write, segment(1).end - PAGE as u64..segment(1).end);
    let flush = (IoOp::Flush, 0..0);
    assert_eq!(bed.changes, [erased, flush.clone(), footer, flush]);
}

#[test]
fn a_second_crash_finds_the_same() {
    let mut rooms = Rooms::new(0);
    rooms.dirty(0..7);
    rooms.dirty(10..17);
    rooms.torn(20..23, 2 * BLOCK_SIZE);
    let first = Bed::after(rooms).serving();
    let places = |bed: &Bed| {
        let blocks = 0..30;
        blocks.map(|block| bed.rooms.contents.get(key(block))).collect::<Vec<_>>()
    };
    let (found, head) = (places(&first), first.rooms.log.next_lsn());
    let second = Bed::after(first.rooms).serving();
    assert_eq!((places(&second), second.rooms.log.next_lsn()), (found, head));
    let flush = (IoOp::Flush, 0..0);
    assert_eq!(second.changes, [flush.clone(), flush], "all has its footer");
}

/// A log of three records, the first two durable, of which the second is damaged.
fn damaged() -> Rooms {
    let mut rooms = Rooms::new(0);
    rooms.dirty_durable([1]);
    rooms.dirty_durable([2]);
    rooms.dirty([3]);
    let at = segment(1).start as usize + 2 * BLOCK_SIZE;
    rooms.devices.cache[at + 50] ^= 1;
    rooms
}

#[test]
fn a_log_of_which_a_durable_record_is_gone_is_refused_and_stays_as_it_is() {
    let mut bed = Bed::after(damaged());
    let state = bed.run(|_| Ok(())).clone();
    let State::Refused(why) = &state else { panic!("{state:?}") };
    assert!(why.starts_with("1 record of the log is lost"), "{why}");
    assert!(bed.changes.is_empty());
    assert_eq!(bed.start.lost_records().len(), 1);
}

#[test]
fn if_the_loss_is_accepted_all_that_can_be_read_is_served() {
    let bed = Bed::with(damaged(), |config| config.accept_loss = true).serving();
    let found = [1, 2, 3].map(|block| bed.block(block));
    assert_eq!(found, [Some(true), None, Some(true)]);
    assert_eq!(bed.start.lost_records().len(), 1);
}

#[test]
fn clean_blocks_from_before_a_loss_are_not_used() {
    let mut rooms = Rooms::new(0);
    rooms.clean([1]);
    rooms.dirty_durable([2]);
    rooms.dirty_durable([3]);
    rooms.dirty([4]);
    let at = segment(1).start as usize + 4 * BLOCK_SIZE;
    rooms.devices.cache[at + 50] ^= 1;
    let bed = Bed::with(rooms, |config| config.accept_loss = true).serving();
    let found = [1, 2, 3, 4].map(|block| bed.block(block));
    assert_eq!(found, [None, Some(true), None, Some(true)], "1 may have been written since");
}

/// Records 1 to 4: a clean block, and three dirty ones in records of their own.
fn four() -> Rooms {
    let mut rooms = Rooms::new(0);
    rooms.clean([1]);
    for block in 2..5 {
        rooms.dirty_durable([block]);
    }
    rooms
}

fn stopped_at(end: u64, clean: &[(VolumeId, Lsn)]) -> LastStop {
    LastStop { end: Lsn(end), clean: clean.to_vec() }
}

#[test]
fn a_log_that_ends_before_the_last_stop_is_refused() {
    let start = |end| Bed::with(four(), |config| config.last_stop = stopped_at(end, &[]));
    assert_eq!(start(4).serving().rooms.contents.dirty().blocks(), 3);
    let mut bed = start(6);
    let state = bed.run(|_| Ok(())).clone();
    let State::Refused(why) = &state else { panic!("{state:?}") };
    assert!(why.starts_with("the log ends 2 records before the end that the last stop"), "{why}");
    assert!(bed.changes.is_empty());
    assert_eq!(bed.start.lost_records().len(), 1);
    // Nothing at all is left.
    let mut bed = Bed::with(Rooms::new(0), |config| config.last_stop = stopped_at(6, &[]));
    assert!(matches!(bed.run(|_| Ok(())), State::Refused(_)));
}

/// The records that are gone may have held newer versions, and their numbers are used again.
#[test]
fn if_a_cut_off_end_is_accepted_only_dirty_blocks_are_used_and_no_stop_counts() {
    let stop = stopped_at(6, &[(VOLUME, Lsn(6))]);
    let bed = Bed::with(four(), |config| {
        (config.accept_loss, config.last_stop) = (true, stop);
    });
    let bed = bed.serving();
    let found = [1, 2, 3, 4].map(|block| bed.block(block));
    assert_eq!(found, [None, Some(true), Some(true), Some(true)]);
    assert_eq!(bed.rooms.log.next_lsn(), Lsn(5));
}

/// The log alone names them dirty, as an older block of another volume is.
#[test]
fn what_was_clean_at_the_last_stop_is_clean() {
    let stop = stopped_at(4, &[(VolumeId(7), Lsn(4)), (VOLUME, Lsn(3))]);
    let bed = Bed::with(four(), |config| config.last_stop = stop).serving();
    let found = [1, 2, 3, 4].map(|block| bed.block(block));
    assert_eq!(found, [Some(false), Some(false), Some(false), Some(true)]);
    // A footer tells which blocks may be dirty.
    let mut rooms = Rooms::new(0);
    rooms.dirty(0..7);
    rooms.dirty(10..16);
    rooms.dirty(20..27);
    let last = rooms.log.next_lsn().0 - 1;
    let stop = stopped_at(last, &[(VOLUME, Lsn(last - 1))]);
    let bed = Bed::with(rooms, |config| config.last_stop = stop).serving();
    assert_eq!((bed.block(0), bed.block(26)), (Some(false), Some(true)));
    assert!(bed.rooms.contents.dirty().blocks() <= 7);
}

/// The primary has what was written over it.
#[test]
fn a_lost_block_that_is_clean_is_not_cached() {
    for (clean, found) in [(0, Some(true)), (1, None)] {
        let mut rooms = Rooms::new(0);
        let Rooms { cache, fx, .. } = &mut rooms;
        cache.push_bare(fx, key(1), 1, EntryKind::Lost, true, Expect::Always);
        rooms.log_record();
        rooms.clean([2]);
        let stop = stopped_at(2, &[(VOLUME, Lsn(clean))]);
        let bed = Bed::with(rooms, |config| config.last_stop = stop).serving();
        assert_eq!((bed.block(1), bed.block(2)), (found, Some(false)));
        assert_eq!(bed.rooms.contents.fenced().len(), usize::from(found.is_some()));
    }
}

#[test]
fn a_segment_whose_footer_has_bad_entries_is_read_record_by_record() {
    let mut rooms = Rooms::new(0);
    rooms.dirty(0..7);
    rooms.dirty(10..16);
    rooms.dirty(20..27);
    rooms.flush_device();
    rooms.devices.cache[segment(1).end as usize - PAGE] ^= 1;
    let bed = Bed::after(rooms).serving();
    assert_eq!(bed.rooms.contents.dirty().blocks(), 20);
}

#[test]
fn where_many_segments_are_free_the_log_goes_on_in_a_new_one() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([1]);
    let bed = Bed::after(rooms).serving();
    assert_eq!(bed.segment(1), SegmentState::Sealed);
}

#[test]
fn where_few_segments_are_free_the_log_goes_on_behind_its_last_record() {
    let mut rooms = Rooms::new(0);
    rooms.fill_to(RECLAIM_RESERVE + 1);
    rooms.dirty([1]);
    rooms.torn(2..4, 2 * BLOCK_SIZE);
    assert_eq!(rooms.log.free(), RECLAIM_RESERVE);
    let last = rooms.contents.get(key(1)).expect("it is cached").segment;
    let mut bed = Bed::after(rooms).serving();
    assert_eq!((bed.segment(last as usize), bed.rooms.log.free()), {
        (SegmentState::Open, RECLAIM_RESERVE)
    });
    let behind = segment(u64::from(last)).start + 2 * BLOCK..segment(u64::from(last)).end;
    assert_eq!(bed.changes[0], (IoOp::Write, behind.clone()), "nothing is left of the torn one");
    bed.rooms.dirty([5]);
    let place = bed.rooms.contents.get(key(5)).expect("it is cached");
    assert_eq!((place.segment, place.offset), (last, 3 * BLOCK as u32));
    let bed = Bed::after(bed.rooms).serving();
    assert_eq!([1, 2, 5].map(|block| bed.block(block)), [Some(true), None, Some(true)]);
}

#[test]
fn a_read_that_fails_is_tried_again_in_its_place() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([1, 2]);
    let mut bed = Bed::after(rooms);
    let mut tries = std::collections::BTreeMap::new();
    let state = bed.run(|io| {
        let tried = tries.entry((io.range.offset, io.range.len)).or_insert(0);
        *tried += 1;
        let fails = io.op == IoOp::Read && *tried < WRITE_TRIES;
        if fails { Err(ErrorKind::Media.into()) } else { Ok(()) }
    });
    assert_eq!(state, &State::Serving);
    assert_eq!(bed.block(1), Some(true));
}

#[test]
fn a_start_waits_some_seconds_for_a_device_that_fails_everything() {
    for (time, serves) in [(2900, true), (3200, false)] {
        let mut rooms = Rooms::new(0);
        rooms.dirty([1, 2]);
        let mut bed = Bed::after(rooms);
        // The device does not see the time, but each request comes once in each pause.
        let (mut tries, begins) = (std::collections::BTreeMap::new(), time / 50);
        let state = bed.run(|io| {
            let tried = tries.entry((io.op == IoOp::Flush, io.range.offset)).or_insert(0);
            *tried += 1;
            let fails = io.op == IoOp::Read && *tried <= begins;
            if fails { Err(ErrorKind::Media.into()) } else { Ok(()) }
        });
        assert_eq!(*state == State::Serving, serves, "{time} ms: {state:?}");
        assert_eq!(bed.block(1), serves.then_some(true));
    }
}

#[test]
fn a_place_that_cannot_be_read_and_may_hold_the_next_records_is_a_loss() {
    let mut rooms = Rooms::new(0);
    rooms.dirty_durable(0..7);
    rooms.dirty_durable(10..16);
    rooms.dirty_durable(20..27);
    let unreadable = segment(2);
    let mut bed = Bed::after(rooms);
    let state = bed.run(|io| match unreadable.contains(&io.range.offset) {
        true => Err(ErrorKind::Media.into()),
        false => Ok(()),
    });
    assert!(matches!(state, State::Refused(_)), "{state:?}");
    assert!(bed.changes.is_empty());
}

#[test]
fn a_log_is_refused_if_its_device_cannot_be_written() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([1]);
    let mut bed = Bed::after(rooms);
    let state = bed.run(|io| match io.op {
        IoOp::Write => Err(ErrorKind::ReadOnly.into()),
        _ => Ok(()),
    });
    let State::Refused(why) = state else { panic!("{state:?}") };
    assert!(why.starts_with("the cache device cannot be written"), "{why}");
    let writes = bed.changes.iter().filter(|(op, _)| *op == IoOp::Write).count();
    assert_eq!(writes, 60 + WRITE_TRIES as usize, "for three seconds, and then at once");
}

#[test]
fn of_a_device_that_had_failed_only_dirty_blocks_are_used_and_it_is_not_written() {
    let mut rooms = Rooms::new(0);
    rooms.dirty([1, 300]);
    rooms.clean([2]);
    let detached = DetachedStripe { volume: VOLUME, stripe: 1, kept: [0; 4] };
    let bed = Bed::with(rooms, |config| {
        config.trust = Trust::DirtyOnly;
        config.detached.push(detached);
    });
    let bed = bed.serving();
    assert_eq!([1, 2].map(|block| bed.block(block)), [Some(true), None]);
    assert_eq!(bed.block(300), None, "the cache has left its stripe");
    assert!(bed.changes.is_empty());
    assert_eq!(bed.rooms.health(), Health::Draining);
    assert!(bed.detach.is_detaching(), "nothing shows that block 1 is durable");
}

#[test]
fn the_log_is_told_of_blocks_that_were_found_lost_and_not_written_since() {
    let mut rooms = Rooms::new(0);
    for block in [1, 2] {
        let Rooms { cache, fx, .. } = &mut rooms;
        cache.push_bare(fx, key(block), 1, EntryKind::Lost, true, Expect::Always);
    }
    rooms.log_record();
    rooms.dirty([2]);
    let mut start = Start { to_fence: [key(1), key(2)].into(), ..Start::default() };
    let Rooms { cache, fx, .. } = &mut rooms;
    start.pump_fences(cache, fx);
    let pending = &rooms.log.builder().pending;
    let said: Vec<_> = pending.iter().map(|item| (item.key, item.kind, item.dirty)).collect();
    assert_eq!(said, [(key(1), EntryKind::Lost, true)]);
    assert!(start.to_fence.is_empty());
}
