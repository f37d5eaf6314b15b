//! What lies around a miss is read with it from a slow primary, and does no harm.
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

use std::time::Duration;

use forebay_block::{
    Arena, BLOCK_SIZE, BlockRange, BufPool, ByteRange, ErrorKind, Instant, Io, IoBuf, IoError,
    IoFlags, IoOp, VolumeId,
};
use forebay_engine::{
    ContentLocality, Effects, Engine, Eviction, Mode, Request, RequestId, ShardConfig, Stats,
    Target, Trust, VolumeConfig,
};

const BLOCK: u64 = BLOCK_SIZE as u64;
const VOLUME: VolumeId = VolumeId(0);
/// The last block is short.
const SIZE: u64 = 4000 * BLOCK + 512;
const AREA: u64 = 8 << 20;
const SEGMENT: u32 = 256 << 10;

/// An engine with its devices in memory. A read of the primary takes `latency`, the rest nothing.
struct World {
    engine: Engine,
    now: Instant,
    fx: Effects,
    buffers: BufPool,
    cache: Vec<u8>,
    primary: Vec<u8>,
    latency: Duration,
    /// A block of the primary that cannot be read.
    bad: Option<u64>,
    /// Blocks of each read of the primary.
    reads: Vec<(u64, u64)>,
    answers: Vec<Result<IoBuf, IoError>>,
}

impl World {
    fn new(latency: Duration, eviction: Eviction, index_blocks: u64) -> Self {
        let buffers = BufPool::new(Arena::new(8 << 20));
        let config = ShardConfig {
            shard: 0,
            pool: 1,
            area: ByteRange::new(0, AREA),
            segment_size: SEGMENT,
            volumes: vec![VolumeConfig {
                id: VOLUME,
                size: SIZE,
                mode: Mode::WriteBack,
                discard: false,
                rotational: false,
                share: forebay_engine::DirtyShare::default(),
                suspect: false,
            }],
            ram_bytes: 128 << 10,
            index_blocks,
            eviction,
            write_cache_depth: Duration::from_secs(600),
            dirty_limit_percent: 50,
            patience: Duration::from_secs(30),
            destage_depth: 4,
            compress: false,
            compress_ram: false,
            content: ContentLocality::Independent,
            cache_volatile: true,
            buffers: buffers.clone(),
            fresh: true,
            trust: Trust::Full,
            detached: Vec::new(),
            accept_loss: false,
            epoch: 1,
        };
        let now = Instant(1_000_000_000);
        let mut world = Self {
            engine: Engine::new(config, now),
            now,
            fx: Effects::default(),
            buffers,
            cache: vec![0; AREA as usize],
            primary: (0..SIZE).map(|at| pattern(at / BLOCK)).collect(),
            latency,
            bad: None,
            reads: Vec::new(),
            answers: Vec::new(),
        };
        world.engine.start(now, &mut world.fx);
        world
    }

    /// One that has seen some misses, far from the blocks that tests look at.
    fn after_misses(latency: Duration) -> Self {
        let mut world = Self::new(latency, Eviction::default(), AREA / BLOCK);
        (0..4).for_each(|n| drop(world.read(3900 + 16 * n, 1)));
        world.reads.clear();
        world
    }

    fn submit(&mut self, op: IoOp, first: u64, count: u64) {
        let blocks = BlockRange { first, count };
        let range = blocks.bytes().intersection(&ByteRange::new(0, SIZE));
        let mut buf = self.buffers.get(range.len as usize);
        if op == IoOp::Write {
            buf.fill(0xee);
        }
        let flags = IoFlags::default();
        let id = RequestId(1);
        let request = Request { id, volume: VOLUME, op, range, flags, buf, bypass: None };
        self.engine.submit(self.now, request, &mut self.fx);
    }

    /// Reads blocks, and checks what comes against what was there before any write.
    fn read(&mut self, first: u64, count: u64) -> Result<(), IoError> {
        self.submit(IoOp::Read, first, count);
        self.settle();
        let buf = self.answers.pop().unwrap()?;
        let at = first * BLOCK;
        assert!((at..).zip(&*buf).all(|(at, &byte)| byte == pattern(at / BLOCK)));
        Ok(())
    }

    /// Carries out all that the engine wants, until it wants nothing.
    fn settle(&mut self) {
        for _ in 0..100 {
            self.engine.poll(self.now, &mut self.fx);
            let ios = std::mem::take(&mut self.fx.ios);
            self.answers.extend(self.fx.replies.drain(..).map(|reply| {
                let buf = reply.buf;
                reply.result.map(|()| buf)
            }));
            if ios.is_empty() {
                return;
            }
            for (target, io) in ios {
                self.carry_out(target, io);
            }
        }
        panic!("the engine does not come to rest");
    }

    fn carry_out(&mut self, target: Target, mut io: Io) {
        let medium = match target {
            Target::Cache => &mut self.cache,
            Target::Primary(_) => &mut self.primary,
        };
        let bytes = io.range.offset as usize..io.range.end() as usize;
        let mut result = Ok(());
        match io.op {
            IoOp::Read => io.buf.copy_from_slice(&medium[bytes]),
            IoOp::Write => medium[bytes].copy_from_slice(&io.buf),
            IoOp::Discard | IoOp::WriteZeroes => medium[bytes].fill(0),
            IoOp::Flush => {}
        }
        if target != Target::Cache && io.op == IoOp::Read {
            let blocks = io.range.blocks();
            self.reads.push((blocks.first, blocks.count));
            self.now = self.now + self.latency;
            if self.bad.is_some_and(|bad| blocks.iter().any(|block| block == bad)) {
                result = Err(ErrorKind::Media.into());
            }
        }
        self.engine.complete(self.now, target, io.complete(result), &mut self.fx);
    }

    fn stats(&self) -> Stats {
        self.engine.stats(self.now)
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
fn what_is_cached_or_written_meanwhile_is_left_alone() {
    let mut world = World::after_misses(DISK);
    world.submit(IoOp::Write, 98, 1);
    world.settle();
    world.read(100, 1).unwrap();
    assert_eq!(world.reads, [(99, 13)], "up to what is cached");
    world.reads.clear();
    // A write of a neighbour while the read is under way.
    world.submit(IoOp::Read, 200, 1);
    world.submit(IoOp::Write, 201, 1);
    world.settle();
    assert_eq!(world.reads, [(192, 16)]);
    for written in [98, 201] {
        world.submit(IoOp::Read, written, 1);
        world.settle();
        assert!(world.answers.pop().unwrap().unwrap().iter().all(|&byte| byte == 0xee));
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
        let mut world = World::new(DISK, eviction, index);
        (0..200).for_each(|n| world.read(n * 16, 1).unwrap());
        let wide = world.reads.iter().skip_while(|&&(_, count)| count == 1);
        let wide = wide.take_while(|&&(_, count)| count == 16).count();
        let full = index.min(log) as usize / 16;
        assert!(
            (full / 2..full).contains(&wide),
            "{wide} reads of 16 blocks, {full} fill the cache"
        );
        assert!(world.reads[wide + 5..].iter().all(|&(_, count)| count == 1));
    }
}
