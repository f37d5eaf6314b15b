//! Cuts of an ordered volume, with a whole engine; the gate of the volume is played by the test.

use std::time::Duration;

use forebay_block::{ByteRange, ErrorKind, Io, IoFlags, IoOp, STRIPE_SIZE};

use crate::api::cut::{CutNews, CutOrder};
use crate::testing::{Devices, Harness, VOLUME, config};
use crate::{Health, Mode, Request, RequestId, Setting, Shard, Target, Trust};

const BLOCK: u64 = 4096;

/// An engine with an ordered volume.
struct Bed(Harness);

impl Bed {
    fn new() -> Self {
        let mut config = config(2 << 20, 1 << 20);
        config.volumes[0].ordered = Some(64);
        Self(Harness::start(config, Devices::new(2 << 20, 1 << 20)))
    }

    /// An engine with an ordered volume of which four stripes should be destaged, filled with 1.
    fn large() -> Self {
        let mut config = config(16 << 20, 8 << 20);
        config.volumes[0].ordered = Some(2048);
        let mut bed = Self(Harness::start(config, Devices::new(16 << 20, 8 << 20)));
        for stripe in 0..4 {
            let range = ByteRange::new(stripe * STRIPE_SIZE, STRIPE_SIZE);
            assert!(bed.0.ask(IoOp::Write, range, &[1; STRIPE_SIZE as usize]).is_some());
        }
        bed.0.wait(Duration::from_secs(299));
        assert_eq!(bed.news(), [CutNews::Wanted]);
        bed
    }

    /// Takes a turn, and ends what it sends. Returns the blocks of the cut, and whether the next
    /// turn is to come at once.
    fn turn(&mut self) -> (u64, bool) {
        self.0.poll().into_iter().for_each(|(target, io)| self.0.finish(target, io));
        let goes_on = self.0.fx.deadline.is_some_and(|at| at <= self.0.now);
        (self.0.stats().cut_blocks, goes_on)
    }

    fn write(&mut self, block: u64, byte: u8) {
        let range = ByteRange::new(block * BLOCK, BLOCK);
        assert!(self.0.ask(IoOp::Write, range, &[byte; BLOCK as usize]).is_some());
    }

    /// Blocks that should be destaged: written long enough ago.
    fn write_old(&mut self, blocks: &[(u64, u8)]) {
        blocks.iter().for_each(|&(block, byte)| self.write(block, byte));
        self.0.wait(Duration::from_secs(299));
    }

    /// The reports of the shard since the last call, once it has nothing to do.
    fn news(&mut self) -> Vec<CutNews> {
        self.0.settle();
        while self.turn().1 {
            self.0.settle();
        }
        std::mem::take(&mut self.0.fx.cuts).into_iter().map(|report| report.news).collect()
    }

    fn order(&mut self, order: CutOrder) {
        self.0.engine.cut(self.0.now, VOLUME, order, &mut self.0.fx);
        self.0.replies.append(&mut self.0.fx.replies);
    }

    /// The first byte of a block on the primary.
    fn primary(&self, block: u64) -> u8 {
        self.0.devices.primary[(block * BLOCK) as usize]
    }

    fn flush(&mut self) {
        self.0.submit(IoOp::Flush, ByteRange::default(), &[]);
    }

    /// The device fails, and that is recorded outside of it.
    fn fail_cache(&mut self) {
        let error = ErrorKind::Media.into();
        self.0.flush_failed(Target::Cache, &error);
        self.0.engine.trust_recorded(self.0.now, Trust::DirtyOnly, &mut self.0.fx);
        assert_eq!(self.0.engine.health(), Health::Draining);
    }
}

const TAKEN: CutNews = CutNews::Taken { number: 1, last: false, whole: true };
const WRITE: CutOrder = CutOrder::Write { number: 1, last: false };

#[test]
fn a_cut_is_written_as_it_was_taken() {
    let mut bed = Bed::new();
    bed.write_old(&[(1, 11), (2, 12), (9, 19)]);
    assert_eq!(bed.news(), [CutNews::Wanted]);
    assert_eq!(bed.news(), [], "it is wanted once");
    bed.order(CutOrder::Take(1));
    assert_eq!(bed.news(), [TAKEN, CutNews::Staged(1)]);
    bed.write(2, 22);
    bed.write(3, 23);
    assert_eq!([1, 2, 9].map(|block| bed.primary(block)), [0; 3], "other shards have yet to stage");
    bed.order(WRITE);
    assert_eq!(bed.news(), [CutNews::Written(1)]);
    assert_eq!([1, 2, 3, 9].map(|block| bed.primary(block)), [11, 12, 0, 19]);
    assert_eq!(bed.0.engine.dirty_blocks(), 2, "what was written since");
}

#[test]
fn the_primary_ages_while_it_lacks_something() {
    let mut bed = Bed::new();
    let age = |bed: &Bed| Duration::from_nanos(bed.0.stats().primary_age_nanos);
    let day = Duration::from_secs(86_400);
    bed.0.wait(day);
    assert_eq!(age(&bed), Duration::ZERO, "nothing was written");
    bed.write_old(&[(1, 11)]);
    assert!(age(&bed) >= Duration::from_secs(299), "{:?}", age(&bed));
    assert_eq!(bed.news(), [CutNews::Wanted]);
    bed.order(CutOrder::Take(1));
    bed.news();
    bed.0.wait(Duration::from_secs(2));
    bed.write(2, 12);
    bed.order(WRITE);
    assert_eq!(bed.news(), [CutNews::Written(1)]);
    bed.0.wait(Duration::from_secs(5));
    let since_the_cut = Duration::from_secs(7);
    assert!((since_the_cut - Duration::from_secs(2)..=since_the_cut).contains(&age(&bed)));
    bed.0.wait(Duration::from_secs(299));
    assert_eq!(bed.news(), [CutNews::Wanted]);
    bed.order(CutOrder::Take(2));
    bed.news();
    bed.order(CutOrder::Write { number: 2, last: false });
    assert_eq!(bed.news(), [CutNews::Written(2)]);
    bed.0.wait(day);
    assert_eq!(age(&bed), Duration::ZERO, "the primary has everything");
}

/// A block may be written again before the bytes of the cut are in memory.
#[test]
fn a_version_that_was_overwritten_is_staged_from_the_log() {
    let mut bed = Bed::new();
    bed.write_old(&[(1, 11)]);
    assert_eq!(bed.news(), [CutNews::Wanted]);
    let range = ByteRange::new(BLOCK, BLOCK);
    // A record that is not durable, so that staging waits.
    bed.0.submit(IoOp::Write, range, &[12; BLOCK as usize]);
    let record = bed.0.poll();
    bed.order(CutOrder::Take(1));
    assert!(bed.0.poll().is_empty());
    bed.0.submit(IoOp::Write, range, &[13; BLOCK as usize]);
    let newer = bed.0.poll();
    record.into_iter().chain(newer).for_each(|(target, io)| bed.0.finish(target, io));
    assert_eq!(bed.news(), [TAKEN, CutNews::Staged(1)]);
    bed.order(WRITE);
    assert_eq!(bed.news(), [CutNews::Written(1)]);
    assert_eq!(bed.primary(1), 12);
}

#[test]
fn answers_are_withheld_until_every_shard_has_taken_its_part() {
    let mut bed = Bed::new();
    bed.write_old(&[(1, 11)]);
    bed.order(CutOrder::Take(1));
    assert!(bed.news().contains(&TAKEN));
    bed.flush();
    let (id, flags) = (RequestId(7), IoFlags { fua: true, ..IoFlags::default() });
    let range = ByteRange::new(5 * BLOCK, BLOCK);
    let buf = forebay_block::IoBuf::zeroed(BLOCK as usize);
    bed.0.send(Request { id, volume: VOLUME, op: IoOp::Write, range, flags, buf, bypass: None });
    bed.0.settle();
    assert!(bed.0.replies.is_empty());
    bed.order(CutOrder::Release(0));
    assert!(bed.0.replies.is_empty(), "an order that is late");
    bed.order(CutOrder::Release(1));
    bed.0.settle();
    assert_eq!(bed.0.replies.len(), 2);
}

#[test]
fn a_staged_cut_needs_no_cache_device() {
    let mut bed = Bed::new();
    bed.write_old(&[(1, 11), (2, 12)]);
    bed.order(CutOrder::Take(1));
    assert!(bed.news().contains(&CutNews::Staged(1)));
    bed.0.devices.cache.fill(0xee);
    bed.fail_cache();
    bed.order(WRITE);
    assert!(bed.news().contains(&CutNews::Written(1)));
    assert_eq!([1, 2].map(|block| bed.primary(block)), [11, 12]);
}

#[test]
fn what_the_primary_fails_is_written_again() {
    let mut bed = Bed::new();
    bed.write_old(&[(1, 11)]);
    bed.order(CutOrder::Take(1));
    bed.news();
    bed.0.away = true;
    bed.order(WRITE);
    assert_eq!(bed.news(), []);
    bed.write(1, 21);
    bed.0.away = false;
    bed.0.wait(Duration::from_secs(2));
    assert_eq!(bed.news(), [CutNews::Written(1)]);
    assert_eq!(bed.primary(1), 11, "the version of the cut");
}

#[test]
fn a_stop_ends_a_cut_that_is_written_and_forgets_one_that_is_not() {
    let mut bed = Bed::new();
    bed.write_old(&[(1, 11)]);
    bed.order(CutOrder::Take(1));
    bed.news();
    bed.0.stop();
    assert_eq!(bed.news(), [CutNews::Abandoned(1)]);
    bed.order(CutOrder::Abandon(1));
    bed.news();
    assert_eq!((bed.primary(1), bed.0.engine.state()), (0, &crate::State::Stopped));

    let mut bed = Bed::new();
    bed.write_old(&[(1, 11)]);
    bed.order(CutOrder::Take(1));
    bed.news();
    bed.order(WRITE);
    bed.0.stop();
    bed.news();
    assert_eq!((bed.primary(1), bed.0.engine.state()), (11, &crate::State::Stopped));
}

#[test]
fn nothing_of_an_ordered_volume_goes_past_the_log() {
    let mut bed = Bed::new();
    let range = ByteRange::new(0, 128 * BLOCK);
    let seen = |bed: &mut Bed| {
        let ios: Vec<(Target, Io)> = bed.0.poll();
        let past = ios.iter().any(|(target, _)| *target != Target::Cache);
        ios.into_iter().for_each(|(target, io)| bed.0.finish(target, io));
        past
    };
    for op in [IoOp::WriteZeroes, IoOp::Discard] {
        // Until it is flushed once, a primary may hold changes from before the start.
        bed.0.settle();
        bed.0.submit(op, range, &[]);
        assert!(!(0..4).any(|_| seen(&mut bed)), "{op:?}");
    }
}

#[test]
fn a_part_is_taken_in_steps_while_clients_write() {
    let mut bed = Bed::large();
    bed.order(CutOrder::Take(1));
    assert_eq!(bed.turn(), (256, true));
    for block in [1, 900] {
        bed.0.submit(IoOp::Write, ByteRange::new(block * BLOCK, BLOCK), &[2; BLOCK as usize]);
    }
    assert_eq!(bed.turn(), (512, true));
    assert_eq!(bed.0.replies.len(), 2);
    bed.0.replies.clear();
    bed.flush();
    assert_eq!(bed.turn(), (768, true));
    assert!(bed.0.fx.cuts.is_empty(), "the part is not taken yet");
    assert_eq!(bed.turn().0, 1024);
    assert_eq!(bed.news(), [TAKEN, CutNews::Staged(1)]);
    assert!(bed.0.replies.is_empty(), "the flush covers a write that the part lacks");
    bed.order(CutOrder::Release(1));
    assert_eq!(bed.0.replies.len(), 1);
    bed.order(WRITE);
    assert_eq!(bed.news(), [CutNews::Written(1)]);
    assert_eq!([0, 1, 2, 899, 900, 901].map(|block| bed.primary(block)), [1, 1, 1, 1, 2, 1]);
}

#[test]
fn a_part_is_given_up_in_steps() {
    let mut bed = Bed::large();
    bed.order(CutOrder::Take(1));
    (0..4).for_each(|_| _ = bed.turn());
    assert_eq!(bed.news(), [TAKEN, CutNews::Staged(1)]);
    bed.order(CutOrder::Abandon(1));
    for left in [768, 512, 256, 0] {
        assert_eq!(bed.turn(), (left, true));
    }
    assert_eq!(bed.turn(), (0, false));
    bed.0.wait(Duration::from_secs(1));
    assert_eq!(bed.news(), [CutNews::Wanted]);
}

#[test]
fn a_part_may_be_given_up_while_it_is_taken() {
    let mut bed = Bed::large();
    bed.order(CutOrder::Take(1));
    (0..3).for_each(|_| _ = bed.turn());
    bed.order(CutOrder::Abandon(1));
    bed.order(CutOrder::Take(2));
    for left in [512, 256] {
        assert_eq!(bed.turn(), (left, true));
    }
    (0..5).for_each(|_| _ = bed.turn());
    let taken = CutNews::Taken { number: 2, last: false, whole: true };
    assert_eq!(bed.news(), [taken, CutNews::Staged(2)]);
    bed.order(CutOrder::Write { number: 2, last: false });
    bed.0.wait(Duration::from_secs(1));
    assert_eq!(bed.news(), [CutNews::Written(2)]);
    assert_eq!([0, 300, 1023].map(|block| bed.primary(block)), [1; 3]);
}

#[test]
fn a_stop_ends_a_part_that_is_being_taken() {
    let mut bed = Bed::large();
    bed.order(CutOrder::Take(1));
    bed.turn();
    bed.0.stop();
    assert_eq!(bed.news(), [CutNews::Abandoned(1)]);
    bed.order(CutOrder::Abandon(1));
    (0..8).for_each(|_| _ = bed.turn());
    assert_eq!((bed.primary(1), bed.0.engine.state()), (0, &crate::State::Stopped));
}

#[test]
fn a_part_that_a_change_of_mode_interrupts_is_not_whole() {
    let mut bed = Bed::large();
    bed.order(CutOrder::Take(1));
    bed.turn();
    bed.0.engine.set(Setting::Mode(VOLUME, Mode::WriteThrough));
    bed.turn();
    let taken = CutNews::Taken { number: 1, last: false, whole: false };
    assert_eq!(bed.0.fx.cuts.first().map(|report| report.news), Some(taken));
}

/// What was written to blocks that the part had already is still dirty then.
#[test]
fn a_part_in_which_the_device_fails_is_not_the_last() {
    let mut bed = Bed::large();
    bed.order(CutOrder::Take(1));
    bed.turn();
    bed.fail_cache();
    (0..4).for_each(|_| _ = bed.turn());
    assert!(bed.news().contains(&TAKEN));
}
