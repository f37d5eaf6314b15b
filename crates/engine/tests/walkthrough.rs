//! The life of a write and of a read, step by step, as in `docs/internals/engine.md`: after each
//! call, the tests check the I/O that the engine wants, its answers, and its state.
#![allow(clippy::unwrap_used, reason = "a test ends at the first thing it did not expect")]

use std::time::Duration;

use forebay_block::testing::noise;
use forebay_block::{BLOCK_SIZE, ByteRange, Io, IoBuf, IoOp};
use forebay_engine::testing::{Devices, Harness, SEGMENT, VOLUME, config};
use forebay_engine::{Eviction, Shard, ShardConfig, Target};
use forebay_format::{EntryKind, Lsn, SegmentSeq, decode_record};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Eight segments, the minimum.
const CACHE: u64 = 8 * SEGMENT as u64;
const SIZE: u64 = 4000 * BLOCK;
const PRIMARY: Target = Target::Primary(VOLUME);
/// Offset of the first segment on the cache device. Its number is 1, and so is its position.
const FIRST: u64 = SEGMENT as u64;
/// A flush of the cache device.
const FLUSH: Wanted = cache(IoOp::Flush, ByteRange { offset: 0, len: 0 });

/// An I/O that the engine wants: device, operation and range.
type Wanted = (Target, IoOp, ByteRange);

const fn cache(op: IoOp, range: ByteRange) -> Wanted {
    (Target::Cache, op, range)
}

fn range(block: u64) -> ByteRange {
    ByteRange::new(block * BLOCK, BLOCK)
}

fn content(block: u64) -> Vec<u8> {
    noise(block, BLOCK_SIZE)
}

/// A fresh engine that serves, with four blocks of RAM.
fn start(eviction: Eviction) -> Harness {
    let config = ShardConfig { ram_bytes: 4 * BLOCK, eviction, ..config(CACHE, SIZE) };
    let mut devices = Devices::new(CACHE, SIZE);
    for block in 0..SIZE / BLOCK {
        let at = (block * BLOCK) as usize;
        devices.primary[at..at + BLOCK_SIZE].copy_from_slice(&content(block));
    }
    let mut harness = Harness::start(config, devices);
    // Writes of an earlier run may not be durable on the primary, so its first flush is sent
    // immediately.
    assert_eq!(step(&mut harness), [(PRIMARY, IoOp::Flush, ByteRange::default())]);
    harness
}

/// Runs one turn and carries out the I/O that the engine wants; returns that I/O.
fn step(harness: &mut Harness) -> Vec<Wanted> {
    let ios = harness.poll();
    let wanted = ios.iter().map(|(target, io)| (*target, io.op, io.range)).collect();
    ios.into_iter().for_each(|(target, io)| harness.finish(target, io));
    wanted
}

/// Returns the only I/O that the engine wants now.
fn only(harness: &mut Harness) -> (Target, Io) {
    let mut ios = harness.poll();
    assert_eq!(ios.len(), 1, "{ios:?}");
    ios.pop().unwrap()
}

/// Takes the only answer, which must be a success.
fn answer(harness: &mut Harness) -> IoBuf {
    assert_eq!(harness.replies.len(), 1);
    let reply = harness.replies.pop().unwrap();
    assert!(reply.result.is_ok(), "{:?}", reply.result);
    reply.buf
}

#[test]
fn a_write_is_logged_answered_durable_destaged_clean_and_its_segment_reclaimed() {
    let mut harness = start(Eviction::Fifo);
    let new = noise(99, BLOCK_SIZE);
    write_to_clean(&mut harness, &new);
    clean_to_reclaimed(&mut harness);

    // The block is no longer cached. Its primary has the bytes of the write.
    harness.submit(IoOp::Read, range(5), &[]);
    let (target, read) = only(&mut harness);
    assert_eq!((target, read.op, read.range), (PRIMARY, IoOp::Read, range(5)));
    harness.finish(target, read);
    assert_eq!(answer(&mut harness)[..], new);
}

/// The first part: a client writes block 5, and its primary gets it.
fn write_to_clean(harness: &mut Harness, new: &[u8]) {
    // Submitted: the write waits for the end of the turn, so that others can share its record.
    harness.submit(IoOp::Write, range(5), new);
    assert!(harness.fx.ios.is_empty() && harness.replies.is_empty());
    assert_eq!(harness.engine.dirty_blocks(), 0);

    // Logged: the turn ends with one record, at the start of the first segment. From now on the
    // index says that the block is there. The client waits.
    let (target, record) = only(harness);
    assert_eq!((target, record.op), (Target::Cache, IoOp::Write));
    assert_eq!(record.range, ByteRange::new(FIRST, 2 * BLOCK), "a header's page and the block's");
    let header = decode_record(&record.buf[..BLOCK_SIZE]).unwrap();
    assert_eq!((header.header.seq, header.header.lsn), (SegmentSeq(1), Lsn(1)));
    let entry = header.entries[0];
    assert_eq!((entry.block, entry.kind, entry.dirty), (5, EntryKind::Raw, true));
    assert_eq!(&record.buf[BLOCK_SIZE..], new);
    assert_eq!((harness.engine.dirty_blocks(), harness.replies.len()), (1, 0));

    // Answered: as soon as the device has the record.
    harness.finish(target, record);
    assert_eq!(&answer(harness)[..], new, "the request's buffer comes back");
    assert_eq!(step(harness), [], "nobody has asked for more");

    // Durable: a client's flush causes one flush of the cache device. The primary has nothing to
    // flush.
    harness.submit(IoOp::Flush, ByteRange::default(), &[]);
    assert!(harness.replies.is_empty());
    assert_eq!(step(harness), [FLUSH]);
    answer(harness);

    // Destaged: when the block is old enough, it goes to the primary, from RAM.
    harness.wait(Duration::from_secs(600));
    let (target, write) = only(harness);
    assert_eq!((target, write.op, write.range), (PRIMARY, IoOp::Write, range(5)));
    assert_eq!(&write.buf[..], new);
    harness.finish(target, write);
    assert_eq!(harness.engine.dirty_blocks(), 1, "the primary may still lose it");

    // Clean: when the primary has flushed it.
    assert_eq!(step(harness), [], "more may come for the same flush");
    harness.wait(Duration::from_millis(100));
    assert_eq!(step(harness), [(PRIMARY, IoOp::Flush, ByteRange::default())]);
    assert_eq!(harness.engine.dirty_blocks(), 0);
}

/// The second part: the log continues until the segment of block 5 is free again.
fn clean_to_reclaimed(harness: &mut Harness) {
    // Sealed: six more records fill the segment. The next one begins another segment. A flush of
    // the device precedes the footer of the first one, since a footer names only durable payloads.
    for block in 100..106 {
        harness.submit(IoOp::Write, range(block), &content(block));
        let at = ByteRange::new(FIRST + (block - 99) * 2 * BLOCK, 2 * BLOCK);
        assert_eq!(until_rest(harness), [cache(IoOp::Write, at)]);
        answer(harness);
    }
    harness.submit(IoOp::Write, range(106), &content(106));
    let second = ByteRange::new(2 * FIRST, 2 * BLOCK);
    let footer = ByteRange::new(2 * FIRST - BLOCK, BLOCK);
    let expected = [cache(IoOp::Write, second), FLUSH, cache(IoOp::Write, footer)];
    assert_eq!(until_rest(harness), expected);
    answer(harness);

    // Reclaimed: when few segments are free, the footer is read and the clean blocks of the segment
    // leave the cache. Nothing is copied.
    harness.drain();
    let segment = ByteRange::new(FIRST, u64::from(SEGMENT));
    let (all, mut ios) = fill_log(harness);
    let in_first = all.into_iter().filter(|&(target, _, range)| {
        target == Target::Cache && !range.intersection(&segment).is_empty()
    });
    assert_eq!(in_first.collect::<Vec<_>>(), [cache(IoOp::Read, footer)]);
    let stats = harness.stats();
    assert_eq!((stats.segments_reclaimed, stats.evicted_blocks, stats.copied_blocks), (1, 7, 0));

    // Free: when a record is durable that says that the log begins with the second segment. Nothing
    // else needs to be written, so the record holds only a checkpoint.
    let (target, record) = ios.remove(0);
    let checkpoint = decode_record(&record.buf[..BLOCK_SIZE]).unwrap();
    assert_eq!(checkpoint.header.start, SegmentSeq(2));
    assert!(checkpoint.entries.iter().all(|entry| entry.kind == EntryKind::Checkpoint));
    harness.finish(target, record);
    // A flush sent before the record was written does not cover it.
    let (target, earlier) = ios.pop().unwrap();
    assert_eq!((target, earlier.op), (Target::Cache, IoOp::Flush));
    harness.finish(target, earlier);
    let free = harness.stats().segments_free;
    assert!(step(harness).contains(&FLUSH));
    assert_eq!(harness.stats().segments_free, free + 1);
    until_rest(harness);
}

#[test]
fn a_read_misses_is_fetched_hits_ram_leaves_for_the_log_and_hits_the_ssd() {
    let mut harness = start(Eviction::Frequency);
    // A cache that has been full once is selective: it delays the admission of blocks it reads.
    let (_, ios) = fill_log(&mut harness);
    ios.into_iter().for_each(|(target, io)| harness.finish(target, io));
    harness.settle();
    let old = content(5);

    // A miss: one read of the primary.
    harness.submit(IoOp::Read, range(5), &[]);
    let (target, read) = only(&mut harness);
    assert_eq!((target, read.op, read.range), (PRIMARY, IoOp::Read, range(5)));
    assert!(harness.replies.is_empty());

    // Fetched: the client is answered; the block enters RAM and nothing else.
    harness.finish(target, read);
    assert_eq!(answer(&mut harness)[..], old);
    assert_eq!(step(&mut harness), []);

    // A RAM hit is answered immediately, without I/O.
    for _ in 0..3 {
        harness.submit(IoOp::Read, range(5), &[]);
        assert_eq!(answer(&mut harness)[..], old);
        assert_eq!(step(&mut harness), []);
    }

    // Other reads take its place in RAM. It was requested often, so it enters the log first, as a
    // clean block. The others were requested once, and leave no trace.
    let mut logged = Vec::new();
    for block in 1000..1020 {
        harness.submit(IoOp::Read, range(block), &[]);
        let (target, read) = only(&mut harness);
        harness.finish(target, read);
        answer(&mut harness);
        for (target, io) in harness.poll() {
            assert_eq!((target, io.op), (Target::Cache, IoOp::Write));
            logged.extend(decode_record(&io.buf[..BLOCK_SIZE]).unwrap().entries);
            harness.finish(target, io);
        }
    }
    assert_eq!(logged.len(), 1, "{logged:?}");
    assert_eq!((logged[0].block, logged[0].kind, logged[0].dirty), (5, EntryKind::Raw, false));
    assert_eq!(harness.stats().admitted_blocks, 1);

    // An SSD hit: one read of the page that holds the payload.
    harness.submit(IoOp::Read, range(5), &[]);
    let (target, read) = only(&mut harness);
    assert_eq!((target, read.op, read.range.len), (Target::Cache, IoOp::Read, BLOCK));
    harness.finish(target, read);
    assert_eq!(answer(&mut harness)[..], old);

    // The hit brought the block back into RAM, in place of a block that is requested less often.
    harness.submit(IoOp::Read, range(5), &[]);
    assert_eq!(answer(&mut harness)[..], old);
}

/// Writes and destages blocks until a segment has been reclaimed. Returns the I/O so far, and the
/// I/O that the engine wants next.
fn fill_log(harness: &mut Harness) -> (Vec<Wanted>, Vec<(Target, Io)>) {
    let mut all = Vec::new();
    harness.engine.set_drain(true);
    for block in 2000..2100 {
        harness.submit(IoOp::Write, range(block), &content(block));
        for _ in 0..100 {
            let ios = harness.poll();
            if harness.stats().segments_reclaimed > 0 {
                harness.engine.set_drain(false);
                harness.replies.clear();
                return (all, ios);
            }
            all.extend(ios.iter().map(|(target, io)| (*target, io.op, io.range)));
            ios.into_iter().for_each(|(target, io)| harness.finish(target, io));
            harness.wait(Duration::from_millis(1));
        }
        assert_eq!(harness.engine.dirty_blocks(), 0);
    }
    panic!("nothing is reclaimed: {:?}", harness.stats());
}

/// Runs turns until the engine wants nothing; returns all the I/O that it wanted.
fn until_rest(harness: &mut Harness) -> Vec<Wanted> {
    let mut all = Vec::new();
    loop {
        let wanted = step(harness);
        if wanted.is_empty() {
            return all;
        }
        all.extend(wanted);
    }
}

/// Else its last blocks could wait for a segment, and reclaim for their record: found by the
/// simulator, seed 20063812.
#[test]
fn a_write_longer_than_the_free_log_leaves_the_reserve_of_reclaim() {
    let mut harness = start(Eviction::Fifo);
    let long = ByteRange::new(0, 120 * BLOCK);
    harness.submit(IoOp::Write, long, &noise(1, 120 * BLOCK as usize));
    let mut fewest = u64::MAX;
    for _ in 0..50 {
        for (target, io) in harness.poll() {
            // The primary takes its time.
            if target == Target::Cache {
                harness.finish(target, io);
            }
        }
        fewest = fewest.min(harness.stats().segments_free);
    }
    assert!(harness.replies.is_empty(), "the write waits for room");
    assert_eq!(fewest, 2);
}
