//! Blocks around a miss are read with it from a slow primary, and do no harm.
#![allow(clippy::unwrap_used, reason = "a test ends at the first thing it did not expect")]

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, BlockRange, ByteRange, ErrorKind, Io, IoBuf, IoError, IoOp};
use forebay_engine::testing::{Devices, Harness, config};
use forebay_engine::{Eviction, ShardConfig, Stats, Target};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// The last block is short.
const SIZE: u64 = 4000 * BLOCK + 512;
const AREA: u64 = 8 << 20;
const SEGMENT: u32 = 256 << 10;

/// A harness whose reads of the primary take `latency`; all other I/O takes no time.
struct World {
    harness: Harness,
    latency: Duration,
    /// A block of the primary that cannot be read.
    bad: Option<u64>,
    /// The blocks of each read of the primary.
    reads: Vec<(u64, u64)>,
}

impl World {
    fn new(latency: Duration, eviction: Eviction, index_blocks: u64) -> Self {
        let segment_size = SEGMENT;
        let ram_bytes = 128 << 10;
        let config = config(AREA, SIZE);
        let config = ShardConfig { segment_size, ram_bytes, eviction, index_blocks, ..config };
        Self::with(latency, config)
    }

    fn with(latency: Duration, config: ShardConfig) -> Self {
        let mut devices = Devices::new(config.area.len, 0);
        devices.primary = (0..SIZE).map(|at| pattern(at / BLOCK)).collect();
        let harness = Harness::start(config, devices);
        Self { harness, latency, bad: None, reads: Vec::new() }
    }

    /// A world that has seen some misses, far from the blocks that the tests use.
    fn after_misses(latency: Duration) -> Self {
        let mut world = Self::new(latency, Eviction::default(), AREA / BLOCK);
        (0..4).for_each(|n| drop(world.read(3900 + 16 * n, 1)));
        world.reads.clear();
        world
    }

    fn submit(&mut self, op: IoOp, first: u64, count: u64) {
        let blocks = BlockRange { first, count };
        let range = blocks.bytes().intersection(&ByteRange::new(0, SIZE));
        self.harness.submit(op, range, &vec![0xee; range.len as usize]);
    }

    fn answer(&mut self) -> Result<IoBuf, IoError> {
        let reply = self.harness.replies.pop().unwrap();
        reply.result.map(|()| reply.buf)
    }

    /// Reads blocks, and compares them with the content before any write.
    fn read(&mut self, first: u64, count: u64) -> Result<(), IoError> {
        self.submit(IoOp::Read, first, count);
        self.settle();
        let buf = self.answer()?;
        let at = first * BLOCK;
        assert!((at..).zip(&*buf).all(|(at, &byte)| byte == pattern(at / BLOCK)));
        Ok(())
    }

    /// Carries out all I/O that the engine wants, until it wants none.
    fn settle(&mut self) {
        for _ in 0..100 {
            let ios = self.harness.poll();
            if ios.is_empty() {
                return;
            }
            for (target, io) in ios {
                self.carry_out(target, io);
            }
        }
        panic!("the engine does not come to rest");
    }

    fn carry_out(&mut self, target: Target, io: Io) {
        if target == Target::Cache || io.op != IoOp::Read {
            return self.harness.finish(target, io);
        }
        let blocks = io.range.blocks();
        self.reads.push((blocks.first, blocks.count));
        self.harness.wait(self.latency);
        if self.bad.is_some_and(|bad| blocks.contains(bad)) {
            return self.harness.complete(target, io.complete(Err(ErrorKind::Media.into())));
        }
        self.harness.finish(target, io);
    }

    fn stats(&self) -> Stats {
        self.harness.stats()
    }
}

fn pattern(block: u64) -> u8 {
    (block * 7 % 251) as u8
}

const DISK: Duration = Duration::from_millis(5);
const SSD: Duration = Duration::from_micros(100);

#[test]
fn a_miss_brings_its_neighbours_from_a_slow_primary() {
    let mut world = World::after_misses(DISK);
    world.read(100, 2).unwrap();
    assert_eq!(world.reads, [(96, 16)]);
    (96..112).for_each(|block| world.read(block, 1).unwrap());
    world.read(3998, 3).unwrap();
    assert_eq!(world.reads, [(96, 16), (3984, 17)], "the volume ends with a short block");
    world.read(4000, 1).unwrap();
    assert_eq!(world.reads.len(), 2);
    let mut world = World::after_misses(SSD);
    world.read(100, 2).unwrap();
    assert_eq!(world.reads, [(100, 2)]);
}

#[test]
fn a_primary_that_takes_the_same_time_for_more_is_asked_for_more() {
    let mut world = World::with(DISK, config(64 << 20, SIZE));
    for block in (0..4000).step_by(16) {
        world.read(block, 1).unwrap();
    }
    let of = |count| move |&&(_, found): &&(u64, u64)| found == count;
    let mut reads = world.reads.iter().skip_while(of(1));
    let usual = reads.by_ref().take_while(of(16)).count();
    assert!((75..85).contains(&usual), "a turn of 0.4 s: {usual}");
    assert!(reads.count() > 10 && world.reads.iter().rev().take(10).all(|read| of(32)(&read)));
}

#[test]
fn what_is_cached_or_written_meanwhile_is_left_alone() {
    let mut world = World::after_misses(DISK);
    world.submit(IoOp::Write, 98, 1);
    world.settle();
    world.read(100, 1).unwrap();
    assert_eq!(world.reads, [(99, 13)], "up to what is cached");
    world.reads.clear();
    // Write a neighbor while the read is in flight.
    world.submit(IoOp::Read, 200, 1);
    world.submit(IoOp::Write, 201, 1);
    world.settle();
    assert_eq!(world.reads, [(192, 16)]);
    for written in [98, 201] {
        world.submit(IoOp::Read, written, 1);
        world.settle();
        assert!(world.answer().unwrap().iter().all(|&byte| byte == 0xee));
    }
    assert_eq!((world.reads.len(), world.stats().stale_fills), (1, 1));
}

#[test]
fn a_neighbour_that_cannot_be_read_fails_nobody() {
    let mut world = World::after_misses(DISK);
    world.bad = Some(105);
    world.read(100, 2).unwrap();
    assert_eq!(world.reads, [(96, 16), (100, 2)]);
    let error = world.read(104, 3).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Media);
    assert_eq!(world.reads[2..], [(96, 16), (104, 3)]);
    world.bad = None;
    world.read(104, 3).unwrap();
}

#[test]
fn a_cache_that_was_full_takes_only_what_was_asked_for() {
    let log = AREA / BLOCK;
    for (eviction, index) in
        [(Eviction::Frequency, log), (Eviction::Lru, log), (Eviction::Lru, 800)]
    {
        let world = World::new(DISK, eviction, index);
        assert_wide_until_full(world, index.min(log));
    }
}

#[test]
fn a_log_before_a_store_is_not_the_cache() {
    let (segment_size, ram_bytes, log_segments) = (SEGMENT, 128 << 10, Some(8));
    let config = config(AREA, SIZE);
    let config = ShardConfig { segment_size, ram_bytes, log_segments, ..config };
    let world = World::with(DISK, config);
    assert_wide_until_full(world, (AREA - 8 * u64::from(SEGMENT)) / BLOCK);
}

/// Misses bring their neighbors until most of `blocks` blocks are cached, and never after.
fn assert_wide_until_full(mut world: World, blocks: u64) {
    (0..200).for_each(|n| world.read(n * 16, 1).unwrap());
    let is_wide = |&&(_, count): &&(u64, u64)| count > 1;
    let first = world.reads.iter().position(|read| is_wide(&read)).unwrap();
    assert!(first <= 5, "{first} reads before the first wide one");
    let mut reads = world.reads[first..].iter();
    let brought: u64 = reads.by_ref().map_while(|read| is_wide(&read).then_some(read.1)).sum();
    assert!((blocks / 2..blocks).contains(&brought), "{brought} blocks, {blocks} fill the cache");
    assert!(reads.len() > 10 && reads.all(|read| !is_wide(&read)), "then single blocks");
}
