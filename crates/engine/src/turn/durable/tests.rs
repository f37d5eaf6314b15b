//! Records, flushes and footers that end, well or not, as the whole engine sees it: this is where
//! the rooms meet.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::{ByteRange, ErrorKind, IoOp};
use forebay_format::PAGE;

use super::*;
use crate::api::{ShardConfig, State, Trust};
use crate::shard::Shard;
use crate::testing::rooms::{BLOCK, content};
use crate::testing::{Devices, Harness, SEGMENT, config};

const CACHE: u64 = 8 * SEGMENT as u64;
const SIZE: u64 = 1000 * BLOCK;

/// An engine that serves and rests.
fn serving(change: impl FnOnce(&mut ShardConfig)) -> Harness {
    let mut config = config(CACHE, SIZE);
    change(&mut config);
    let mut harness = Harness::start(config, Devices::new(CACHE, SIZE));
    harness.settle();
    harness
}

fn write(harness: &mut Harness, block: u64) {
    harness.submit(IoOp::Write, ByteRange::new(block * BLOCK, BLOCK), &content(block));
}

fn flush(harness: &mut Harness) {
    harness.submit(IoOp::Flush, ByteRange::default(), &[]);
}

/// The only I/O that is wanted, of the cache device.
fn only(harness: &mut Harness) -> Io {
    let mut ios = harness.poll();
    assert_eq!(ios.len(), 1, "{ios:?}");
    let (target, io) = ios.remove(0);
    assert_eq!(target, Target::Cache);
    io
}

fn fail(harness: &mut Harness, io: Io) {
    harness.complete(Target::Cache, io.complete(Err(ErrorKind::Media.into())));
}

#[test]
fn a_failed_record_is_written_again_in_its_place_and_the_third_failure_is_the_devices() {
    let mut harness = serving(|_| {});
    write(&mut harness, 5);
    let first = only(&mut harness);
    let (range, bytes) = (first.range, first.buf.to_vec());
    fail(&mut harness, first);
    for _ in 1..WRITE_TRIES {
        assert_eq!(harness.engine.health(), Health::Good);
        let again = only(&mut harness);
        assert_eq!(
            (again.op, again.range, again.buf.to_vec()),
            (IoOp::Write, range, bytes.clone())
        );
        fail(&mut harness, again);
    }
    assert_eq!(harness.engine.health(), Health::Draining);
    assert!(harness.replies.is_empty(), "the write waits for its stripe to be detached");
    harness.poll();
    assert_eq!(harness.fx.record_trust, Some(Trust::DirtyOnly));
}

#[test]
fn a_write_is_not_answered_before_the_records_in_front_of_its_own_are_written() {
    let mut harness = serving(|_| {});
    write(&mut harness, 5);
    let first = only(&mut harness);
    write(&mut harness, 6);
    let second = only(&mut harness);
    harness.finish(Target::Cache, second);
    assert!(harness.replies.is_empty(), "after a crash the second one would not be found");
    harness.finish(Target::Cache, first);
    assert_eq!(harness.replies.len(), 2);
}

#[test]
fn a_failed_flush_is_not_tried_again() {
    let mut harness = serving(|_| {});
    write(&mut harness, 5);
    harness.settle();
    harness.replies.clear();
    flush(&mut harness);
    let io = only(&mut harness);
    assert_eq!(io.op, IoOp::Flush);
    fail(&mut harness, io);
    assert_eq!(harness.engine.health(), Health::Draining);
    assert!(harness.poll().is_empty(), "the next one would say yes, and the bytes may be gone");
    assert!(harness.replies.is_empty(), "the flush waits until the primary has the block");
}

#[test]
fn a_flush_covers_only_records_that_were_written_when_it_was_sent() {
    let mut harness = serving(|_| {});
    write(&mut harness, 5);
    harness.settle();
    harness.replies.clear();
    flush(&mut harness);
    let first = only(&mut harness);
    write(&mut harness, 6);
    let record = only(&mut harness);
    harness.finish(Target::Cache, record);
    assert_eq!(harness.replies.len(), 1, "the write");
    flush(&mut harness);
    assert!(harness.poll().is_empty(), "one flush at a time");
    harness.finish(Target::Cache, first);
    assert_eq!(harness.replies.len(), 2, "the first flush");
    let second = only(&mut harness);
    harness.finish(Target::Cache, second);
    assert_eq!(harness.replies.len(), 3);
}

#[test]
fn what_a_device_without_a_volatile_cache_has_written_is_durable() {
    let mut harness = serving(|config| config.cache_volatile = false);
    write(&mut harness, 5);
    harness.settle();
    flush(&mut harness);
    assert_eq!(harness.replies.len(), 2);
    assert!(harness.poll().is_empty());
}

#[test]
fn a_failed_footer_is_written_again_and_the_third_failure_is_the_devices() {
    let mut harness = serving(|_| {});
    let mut footers = 0;
    for block in 0..20 {
        write(&mut harness, block);
        for _ in 0..10 {
            for (target, io) in harness.poll() {
                let is_footer = (io.range.end()).is_multiple_of(u64::from(SEGMENT))
                    && io.range.len == PAGE as u64
                    && target == Target::Cache;
                if is_footer {
                    footers += 1;
                    assert_eq!(harness.engine.health(), Health::Good);
                    fail(&mut harness, io);
                } else {
                    harness.finish(target, io);
                }
            }
        }
    }
    assert_eq!((footers, harness.engine.health()), (WRITE_TRIES, Health::Draining));
}

/// It went on until all of the cache was destaged, however long that took.
#[test]
fn a_stop_of_a_cache_that_is_being_emptied_takes_a_few_seconds() {
    let mut harness = serving(|config| config.ram_bytes = 64 * BLOCK);
    for block in (0..60).map(|n| 2 * n) {
        write(&mut harness, block);
        harness.settle();
    }
    harness.flush_failed(Target::Cache, &ErrorKind::Media.into());
    let Harness { engine, now, fx, .. } = &mut harness;
    engine.trust_recorded(*now, Trust::DirtyOnly, fx);
    engine.stop(*now, fx);
    let mut sent = VecDeque::new();
    for _ in 0..12 {
        sent.extend(harness.poll());
        // The primary takes a block every two seconds.
        let is_read =
            |(target, io): &(Target, Io)| *target == Target::Cache || io.op != IoOp::Write;
        let (reads, writes): (Vec<_>, Vec<_>) = sent.drain(..).partition(is_read);
        reads.into_iter().for_each(|(target, io)| harness.finish(target, io));
        sent.extend(writes);
        if let Some((target, io)) = sent.pop_front() {
            harness.finish(target, io);
        }
        harness.wait(Duration::from_secs(2));
    }
    assert_eq!(harness.engine.state(), &State::Stopped);
    assert!(harness.engine.dirty_blocks() > 0);
}
