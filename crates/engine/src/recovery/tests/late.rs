//! Clients of a shard that has not loaded all of its log.

use std::time::Duration;

use forebay_block::testing::noise;
use forebay_block::{BLOCK_SIZE, ByteRange, ErrorKind, Io, IoBuf, IoOp};

use crate::api::{Mode, ShardConfig, State, Target};
use crate::key::Key;
use crate::shard::Shard;
use crate::testing::{Devices, Harness, SEGMENT, VOLUME, config};

const BLOCK: u64 = BLOCK_SIZE as u64;
const BLOCKS: u64 = 120;
const TICK: Duration = Duration::from_millis(1);

fn range(block: u64) -> ByteRange {
    ByteRange::new(block * BLOCK, BLOCK)
}

fn content(block: u64, version: u64) -> Vec<u8> {
    noise(1000 * version + block, BLOCK_SIZE)
}

fn settings() -> ShardConfig {
    let cache = 24 * u64::from(SEGMENT);
    ShardConfig { ram_bytes: 0, ..config(cache, 4 * BLOCKS * BLOCK) }
}

/// Devices on which a stopped shard has left clean blocks in several segments: each was written
/// twice.
fn stopped() -> Devices {
    stopped_with(settings())
}

fn stopped_with(settings: ShardConfig) -> Devices {
    let devices = Devices::new(settings.area.len, settings.volumes[0].size);
    let mut harness = Harness::start(settings, devices);
    for version in [1, 2] {
        for block in 0..BLOCKS {
            assert!(harness.ask(IoOp::Write, range(block), &content(block, version)).is_some());
        }
        harness.drain();
    }
    harness.stop();
    assert_eq!(harness.engine.state(), &State::Stopped);
    harness.devices
}

/// A start on these devices, up to the moment at which the shard serves.
fn served(devices: Devices, epoch: u32, mode: Mode) -> Harness {
    let mut settings = ShardConfig { epoch, ..settings() };
    settings.volumes[0].mode = mode;
    served_with(devices, settings)
}

/// The same with these settings.
fn served_with(devices: Devices, settings: ShardConfig) -> Harness {
    let mut settings = ShardConfig { fresh: false, ..settings };
    settings.volumes[0].discard = true;
    let mut harness = Harness::start(settings, devices);
    while harness.engine.state() == &State::Recovering {
        let ios = std::mem::take(&mut harness.fx.ios);
        ios.into_iter().for_each(|(target, io)| harness.finish(target, io));
    }
    assert!(harness.stats().unloaded_segments > 3, "{:?}", harness.stats());
    harness
}

/// Loads everything.
fn load(harness: &mut Harness) {
    while harness.engine.cache.contents.is_loading() {
        for (target, io) in harness.poll() {
            harness.finish(target, io);
        }
        harness.wait(TICK);
        harness.engine.check().expect("the contents agree");
    }
    assert_eq!(harness.stats().unloaded_segments, 0);
}

/// Applies the entries of about half of the segments.
fn load_half(harness: &mut Harness) {
    let all = harness.stats().unloaded_segments;
    while harness.stats().unloaded_segments > all / 2 {
        for (target, io) in harness.poll() {
            harness.finish(target, io);
        }
        harness.wait(TICK);
    }
    assert!(harness.engine.cache.contents.is_loading());
}

fn read(harness: &mut Harness, block: u64) -> IoBuf {
    harness.ask(IoOp::Read, range(block), &[]).expect("it can be read")
}

/// Submits a request and carries out the I/O of the turns until it is answered; returns the targets
/// of the writes, in order. In between, nothing else is loaded than these turns allow.
fn writes_of(harness: &mut Harness, op: IoOp, block: u64, bytes: &[u8]) -> Vec<Target> {
    harness.submit(op, range(block), bytes);
    let mut targets = Vec::new();
    while harness.replies.is_empty() {
        for (target, io) in harness.poll() {
            if !matches!(io.op, IoOp::Read | IoOp::Flush) {
                targets.push(target);
            }
            harness.finish(target, io);
        }
    }
    assert!(harness.replies.pop().is_some_and(|reply| reply.result.is_ok()));
    targets
}

#[test]
fn an_old_version_is_never_read_and_at_the_end_all_blocks_are_cached() {
    let mut harness = served(stopped(), 2, Mode::WriteBack);
    let before = harness.stats().ssd_hit_blocks;
    load_half(&mut harness);
    for block in 0..BLOCKS / 2 {
        harness.submit(IoOp::Read, range(block), &[]);
        let ios = harness.poll();
        ios.into_iter().for_each(|(target, io)| harness.finish(target, io));
        let reply = harness.replies.pop().expect("the primary has answered");
        assert_eq!(reply.buf[..], content(block, 2)[..], "block {block}");
    }
    load(&mut harness);
    assert_eq!((harness.stats().cached_blocks, harness.stats().ssd_hit_blocks), (BLOCKS, before));
    harness.away = true;
    for block in 0..BLOCKS {
        assert_eq!(read(&mut harness, block)[..], content(block, 2)[..], "block {block}");
    }
}

#[test]
fn a_block_written_meanwhile_is_not_overwritten() {
    let mut harness = served(stopped(), 2, Mode::WriteBack);
    load_half(&mut harness);
    let late = [0, 1, BLOCKS / 2, BLOCKS - 1];
    for block in late {
        writes_of(&mut harness, IoOp::Write, block, &content(block, 3));
    }
    load(&mut harness);
    for block in late {
        assert_eq!(read(&mut harness, block)[..], content(block, 3)[..], "block {block}");
    }
    assert_eq!(harness.engine.dirty_blocks(), late.len() as u64);
    // A crash.
    let mut harness = served(harness.devices, 3, Mode::WriteBack);
    for block in late {
        assert_eq!(read(&mut harness, block)[..], content(block, 3)[..], "block {block}");
    }
}

/// After a crash the log may name the page of the older version again, so another block must not
/// get it: found by the simulator, seed 80026187.
#[test]
fn the_page_of_a_block_written_meanwhile_is_free_when_that_is_durable() {
    let settings = |epoch| ShardConfig { log_segments: Some(12), epoch, ..settings() };
    let devices = stopped_with(settings(1));
    let mut whole = served_with(devices.clone(), settings(2));
    load(&mut whole);
    let contents = &mut whole.engine.cache.contents;
    let in_store = |block: &u64| {
        let place = contents.get(Key::new(VOLUME, *block)).expect("all blocks are cached");
        contents.is_in_store(&place)
    };
    let block = (0..BLOCKS).find(in_store).expect("some are in the store");
    let place = contents.get(Key::new(VOLUME, block)).expect("it is cached");
    let page = contents.pages().of(&place).start;

    let mut harness = served_with(devices, settings(2));
    harness.submit(IoOp::Write, range(block), &content(block, 3));
    let mut flushes = Vec::new();
    while harness.engine.cache.contents.is_loading() {
        for (target, io) in harness.poll() {
            match (target, io.op) {
                (Target::Cache, IoOp::Flush) => flushes.push(io),
                _ => harness.finish(target, io),
            }
        }
        harness.wait(TICK);
    }
    let uses = |harness: &mut Harness| harness.engine.cache.contents.pages().uses(page);
    assert!(uses(&mut harness) > 0);
    flushes.into_iter().for_each(|io| harness.finish(Target::Cache, io));
    // The next record tells when that is.
    assert!(harness.ask(IoOp::Write, range(BLOCKS), &content(BLOCKS, 1)).is_some());
    assert!(harness.ask(IoOp::Flush, ByteRange::new(0, 0), &[]).is_some());
    harness.settle();
    assert_eq!(uses(&mut harness), 0);
    assert_eq!(read(&mut harness, block)[..], content(block, 3)[..]);
}

#[test]
fn a_write_past_the_log_is_preceded_by_an_invalidation() {
    let mut harness = served(stopped(), 2, Mode::WriteAround);
    let primary = Target::Primary(VOLUME);
    let targets = writes_of(&mut harness, IoOp::Write, 7, &content(7, 3));
    assert_eq!(targets, [Target::Cache, primary]);
    let targets = writes_of(&mut harness, IoOp::Discard, 8, &[]);
    assert_eq!(targets, [Target::Cache, primary]);
    assert!(harness.engine.cache.contents.is_loading());
    let mut devices = harness.devices.clone();
    load(&mut harness);
    assert_eq!(harness.stats().cached_blocks, BLOCKS - 2);
    assert_eq!(read(&mut harness, 7)[..], content(7, 3)[..]);
    // A crash before anything else was loaded. The discarded block may have any content.
    let at = 8 * BLOCK as usize;
    devices.primary[at..at + BLOCK_SIZE].fill(9);
    let mut harness = served(devices, 3, Mode::WriteBack);
    load(&mut harness);
    assert_eq!(read(&mut harness, 7)[..], content(7, 3)[..]);
    assert_eq!(read(&mut harness, 8)[..], [9; BLOCK_SIZE]);
}

#[test]
fn a_stop_in_the_middle_loses_nothing() {
    let mut harness = served(stopped(), 2, Mode::WriteBack);
    load_half(&mut harness);
    writes_of(&mut harness, IoOp::Write, 5, &content(5, 3));
    harness.stop();
    assert_eq!(harness.engine.state(), &State::Stopped);
    let mut harness = served(harness.devices, 3, Mode::WriteBack);
    load(&mut harness);
    assert_eq!(harness.stats().cached_blocks, BLOCKS);
    assert_eq!(read(&mut harness, 5)[..], content(5, 3)[..]);
    assert_eq!(read(&mut harness, 6)[..], content(6, 2)[..]);
}

#[test]
fn a_read_that_the_primary_fails_waits_until_the_block_is_loaded() {
    let mut harness = served(stopped(), 2, Mode::WriteBack);
    harness.away = true;
    harness.submit(IoOp::Read, range(9), &[]);
    load(&mut harness);
    harness.settle();
    let reply = harness.replies.pop().expect("it is answered");
    assert!(reply.result.is_ok());
    assert_eq!(reply.buf[..], content(9, 2)[..]);
    assert!(harness.ask(IoOp::Read, range(BLOCKS + 1), &[]).is_none(), "it is not cached");
}

#[test]
fn a_read_that_the_primary_fails_once_the_block_is_loaded_finds_it() {
    let mut harness = served(stopped(), 2, Mode::WriteBack);
    harness.away = true;
    harness.submit(IoOp::Read, range(9), &[]);
    let is_primary = |(target, _): &(Target, Io)| matches!(target, Target::Primary(_));
    let (slow, others): (Vec<_>, Vec<_>) = harness.poll().into_iter().partition(is_primary);
    others.into_iter().for_each(|(target, io)| harness.finish(target, io));
    load(&mut harness);
    slow.into_iter().for_each(|(target, io)| harness.finish(target, io));
    harness.settle();
    let reply = harness.replies.pop().expect("it is answered");
    assert!(reply.result.is_ok(), "{:?}", reply.result);
    assert_eq!(reply.buf[..], content(9, 2)[..]);
}

#[test]
fn a_prefetch_reads_nothing_until_all_of_the_log_is_loaded() {
    let settings = ShardConfig { ram_bytes: 64 * BLOCK, epoch: 2, ..settings() };
    let mut harness = served_with(stopped(), settings);
    let range = ByteRange::new(9 * BLOCK, 3 * BLOCK);
    let prefetch = |harness: &mut Harness, expected: Result<(), ErrorKind>| {
        harness.submit(IoOp::Prefetch, range, &[]);
        harness.settle();
        let reply = harness.replies.pop().expect("it is answered");
        assert_eq!(reply.result.map_err(|error| error.kind()), expected);
    };
    harness.away = true;
    prefetch(&mut harness, Err(ErrorKind::NoSpace));
    writes_of(&mut harness, IoOp::Write, 10, &content(10, 3));
    load(&mut harness);
    prefetch(&mut harness, Ok(()));
    assert_eq!(read(&mut harness, 9)[..], content(9, 2)[..]);
    assert_eq!(read(&mut harness, 10)[..], content(10, 3)[..]);
}
