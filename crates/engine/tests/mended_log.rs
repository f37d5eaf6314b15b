//! A log that was damaged at rest: what is served of it is the newest version or an error; where
//! that cannot be told the start is refused, and with the word given nothing but older versions of
//! the same block comes back. What was found stays so over restarts and reclaim.
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, BufPool, ByteRange, Instant, IoBuf, IoFlags, IoOp, VolumeId};
use forebay_engine::{
    ContentLocality, Effects, Engine, Eviction, Mode, Request, RequestId, ShardConfig, State,
    Target, Trust, VolumeConfig,
};
use forebay_format::decode_record;

const BLOCK: u64 = BLOCK_SIZE as u64;
const BLOCKS: u64 = 400;
const SIZE: u64 = 4000 * BLOCK;
const AREA: u64 = 6 << 20;
const SEGMENT: u32 = 64 << 10;

/// A generator of numbers that follow from its seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// What version `version` of a block holds: most of it as the version before.
fn content(block: u64, version: u64) -> Vec<u8> {
    let mut draw = Draw(block + 1);
    let mut bytes: Vec<u8> = (0..BLOCK).map(|_| draw.below(256) as u8).collect();
    bytes[..8].copy_from_slice(&block.to_le_bytes());
    bytes[8..16].copy_from_slice(&version.to_le_bytes());
    if version == 0 {
        bytes.fill(0);
    }
    bytes
}

#[derive(Clone)]
struct Devices {
    cache: Vec<u8>,
    primary: Vec<u8>,
}

struct World {
    engine: Engine,
    now: Instant,
    fx: Effects,
    devices: Devices,
    answers: Vec<Option<IoBuf>>,
}

impl World {
    fn start(devices: Devices, fresh: bool, trust: Trust, accept_loss: bool, epoch: u32) -> Self {
        let volume = VolumeConfig {
            id: VolumeId(0),
            size: SIZE,
            mode: Mode::WriteBack,
            discard: false,
            rotational: false,
            share: forebay_engine::DirtyShare::default(),
            suspect: false,
        };
        let config = ShardConfig {
            shard: 0,
            pool: 1,
            area: ByteRange::new(0, AREA),
            segment_size: SEGMENT,
            volumes: vec![volume],
            ram_bytes: 256 << 10,
            index_blocks: AREA / BLOCK * 3,
            eviction: Eviction::default(),
            write_cache_depth: Duration::from_secs(600),
            patience: Duration::from_secs(30),
            dirty_limit_percent: 50,
            destage_depth: 4,
            compress: true,
            compress_ram: false,
            content: ContentLocality::Rewrite,
            cache_volatile: true,
            buffers: BufPool::default(),
            fresh,
            trust,
            detached: Vec::new(),
            accept_loss,
            epoch,
        };
        let now = Instant(1_000_000_000 * u64::from(epoch));
        let (fx, answers) = (Effects::default(), Vec::new());
        let engine = Engine::new(config, now);
        let mut world = Self { engine, now, fx, devices, answers };
        world.engine.start(now, &mut world.fx);
        world.settle();
        world
    }

    fn settle(&mut self) {
        for _ in 0..10_000 {
            self.engine.poll(self.now, &mut self.fx);
            let ios = std::mem::take(&mut self.fx.ios);
            let replies = self.fx.replies.drain(..);
            self.answers.extend(replies.map(|reply| reply.result.is_ok().then_some(reply.buf)));
            if ios.is_empty() {
                return;
            }
            for (target, mut io) in ios {
                let medium = match target {
                    Target::Cache => &mut self.devices.cache,
                    Target::Primary(_) => &mut self.devices.primary,
                };
                let range = io.range.offset as usize..io.range.end() as usize;
                match io.op {
                    IoOp::Read => io.buf.copy_from_slice(&medium[range]),
                    IoOp::Write => medium[range].copy_from_slice(&io.buf),
                    IoOp::WriteZeroes => medium[range].fill(0),
                    IoOp::Flush | IoOp::Discard => {}
                }
                self.engine.complete(self.now, target, io.complete(Ok(())), &mut self.fx);
            }
        }
        panic!("the engine does not come to rest");
    }

    fn ask(&mut self, op: IoOp, range: ByteRange, bytes: &[u8]) -> Option<IoBuf> {
        let len = if op == IoOp::Flush { 0 } else { range.len as usize };
        let mut buf = IoBuf::zeroed(len);
        buf[..bytes.len()].copy_from_slice(bytes);
        let (id, volume, flags) = (RequestId(1), VolumeId(0), IoFlags::default());
        let request = Request { id, volume, op, range, flags, buf, bypass: None };
        self.engine.submit(self.now, request, &mut self.fx);
        for _ in 0..1000 {
            self.settle();
            if let Some(answer) = self.answers.pop() {
                return answer;
            }
            self.now = Instant(self.now.0 + 1_000_000);
        }
        panic!("{op:?} is not answered");
    }

    fn write(&mut self, block: u64, version: u64) {
        let range = ByteRange::new(block * BLOCK, BLOCK);
        assert!(self.ask(IoOp::Write, range, &content(block, version)).is_some());
    }

    fn flush(&mut self) {
        assert!(self.ask(IoOp::Flush, ByteRange::default(), &[]).is_some());
    }

    /// The version of a block that a read shows; nothing where it is an error.
    fn version(&mut self, block: u64) -> Option<u64> {
        let range = ByteRange::new(block * BLOCK, BLOCK);
        let buf = self.ask(IoOp::Read, range, &[])?;
        let version = u64::from_le_bytes(buf[8..16].try_into().unwrap());
        assert!(*buf == *content(block, version), "block {block} shows no version of it");
        Some(version)
    }

    fn versions(&mut self) -> Vec<Option<u64>> {
        (0..BLOCKS).map(|block| self.version(block)).collect()
    }

    /// Until nothing is dirty but what is lost.
    fn drain(&mut self) {
        self.engine.set_drain(true);
        for _ in 0..10_000 {
            self.settle();
            if self.engine.dirty_blocks() == self.engine.stats(self.now).fenced_blocks {
                return self.engine.set_drain(false);
            }
            self.now = Instant(self.now.0 + 10_000_000);
        }
        panic!("{} blocks stay dirty", self.engine.dirty_blocks());
    }
}

/// A log with clean and dirty blocks, and the newest version of each block.
fn filled(seed: u64) -> (Devices, Vec<u64>) {
    let devices = Devices { cache: vec![0; AREA as usize], primary: vec![0; SIZE as usize] };
    let mut world = World::start(devices, true, Trust::Full, false, 1);
    let (mut draw, mut newest) = (Draw(seed), vec![0; BLOCKS as usize]);
    for n in 0..1200 {
        let block = draw.below(BLOCKS);
        newest[block as usize] += 1;
        world.write(block, newest[block as usize]);
        if n == 500 {
            world.drain();
        }
        if draw.below(20) == 0 || n > 1190 {
            world.flush();
        }
    }
    world.flush();
    (world.devices, newest)
}

/// Damages places of segments that are followed by others.
fn damage(cache: &mut [u8], seed: u64) {
    let mut draw = Draw(seed ^ 0xdada);
    let segments = AREA / u64::from(SEGMENT);
    let seq = |i: &u64| {
        let at = (*i * u64::from(SEGMENT)) as usize;
        decode_record(&cache[at..at + BLOCK_SIZE]).map_or(0, |record| record.header.seq.0)
    };
    let newest = (0..segments).max_by_key(seq).unwrap();
    for _ in 0..1 + draw.below(4) {
        let segment = draw.below(segments);
        if segment == newest {
            continue;
        }
        let start = segment * u64::from(SEGMENT);
        let last = u64::from(SEGMENT) - BLOCK;
        let (at, len) = match draw.below(5) {
            0 => (0, u64::from(SEGMENT)),
            1 => (last, BLOCK),
            2 => (draw.below(16) * BLOCK, 64),
            3 => (draw.below(u64::from(SEGMENT)), 1),
            _ => (draw.below(8) * BLOCK, 8 * BLOCK),
        };
        for at in start + at..start + at + len {
            cache[at as usize] ^= 0xff;
        }
    }
}

/// What is served after the damage stays the same over a restart, a drain and reclaim.
fn stays(mut world: World, seed: u64) {
    let served = world.versions();
    world.flush();
    let mut world = World::start(world.devices, false, Trust::Full, false, 3);
    assert_eq!(*world.engine.state(), State::Serving, "seed {seed}: after the restart");
    assert_eq!(world.versions(), served, "seed {seed}: after the restart");
    world.drain();
    for block in (0..BLOCKS).filter(|&block| served[block as usize].is_some()) {
        let at = (block * BLOCK) as usize;
        let expected = content(block, served[block as usize].unwrap());
        assert!(world.devices.primary[at..at + BLOCK_SIZE] == expected, "seed {seed}: {block}");
    }
    // Twice around the log.
    for n in 0..3000 {
        world.write(1000 + n % 2900, n + 1);
        if n % 100 == 0 {
            world.flush();
            world.drain();
        }
    }
    world.flush();
    assert_eq!(world.versions(), served, "seed {seed}: after reclaim");
    let mut world = World::start(world.devices, false, Trust::Full, false, 4);
    assert_eq!(world.versions(), served, "seed {seed}: after reclaim and a restart");
    for block in (0..BLOCKS).filter(|&block| served[block as usize].is_none()) {
        world.write(block, 1);
        assert_eq!(world.version(block), Some(1), "seed {seed}: it can be written again");
    }
}

#[test]
fn damage_at_rest_is_an_error_or_a_refusal_and_never_silently_old() {
    let (mut refused, mut fenced, mut whole) = (0, 0, 0);
    for seed in 0..60 {
        let (mut devices, newest) = filled(seed / 10);
        damage(&mut devices.cache, seed);
        let mut world = World::start(devices.clone(), false, Trust::Full, false, 2);
        let accepted = matches!(world.engine.state(), State::Refused(_));
        if accepted {
            refused += 1;
            assert!(world.devices.cache == devices.cache, "seed {seed}: a refusal writes nothing");
            world = World::start(devices.clone(), false, Trust::Full, true, 2);
            assert!(!world.engine.lost_records().is_empty(), "seed {seed}: what is it for");
        }
        assert_eq!(*world.engine.state(), State::Serving, "seed {seed}");
        let served = world.versions();
        for (block, (found, newest)) in served.iter().zip(&newest).enumerate() {
            let old = found.is_some_and(|found| found < *newest);
            assert!(!old || accepted, "seed {seed}: block {block}: {found:?} for {newest}");
        }
        fenced += served.iter().filter(|found| found.is_none()).count();
        whole += u64::from(!accepted && served.iter().all(Option::is_some));
        let lost: u64 = world.engine.lost_ranges(1 << 20).iter().map(|lost| lost.range.len).sum();
        let errors = served.iter().filter(|found| found.is_none()).count() as u64;
        assert_eq!(lost, errors * BLOCK, "seed {seed}: the list is what cannot be read");
        stays(world, seed);
        // As `forebay salvage` does it: nothing is written to the cache.
        let mut world = World::start(devices.clone(), false, Trust::DirtyOnly, true, 2);
        world.drain();
        assert!(world.devices.cache == devices.cache, "seed {seed}: a salvage writes nothing");
    }
    assert!(refused > 3 && fenced > 10 && whole > 3, "{refused}, {fenced}, {whole}");
}
