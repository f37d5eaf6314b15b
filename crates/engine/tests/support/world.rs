//! An engine on devices in memory, whose requests are carried out at once.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test uses a part; it ends at what it did not expect"
)]

use std::time::Duration;

use forebay_block::{
    BLOCK_SIZE, BufPool, ByteRange, ErrorKind, Instant, IoBuf, IoFlags, IoOp, VolumeId,
};
use forebay_engine::{
    ContentLocality, Effects, Engine, Eviction, Mode, Request, RequestId, ShardConfig, Target,
    Trust, VolumeConfig,
};

pub const BLOCK: u64 = BLOCK_SIZE as u64;
pub const BLOCKS: u64 = 400;
pub const SIZE: u64 = 4000 * BLOCK;
pub const AREA: u64 = 6 << 20;
pub const SEGMENT: u32 = 64 << 10;

/// A generator of numbers that follow from its seed.
pub struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// What version `version` of a block holds: most of it as the version before.
pub fn content(block: u64, version: u64) -> Vec<u8> {
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
pub struct Devices {
    pub cache: Vec<u8>,
    pub primary: Vec<u8>,
}

pub struct World {
    pub engine: Engine,
    pub now: Instant,
    pub fx: Effects,
    pub devices: Devices,
    pub answers: Vec<Option<IoBuf>>,
    /// The primary fails every request.
    pub away: bool,
}

impl World {
    pub fn start(
        devices: Devices,
        fresh: bool,
        trust: Trust,
        accept_loss: bool,
        epoch: u32,
    ) -> Self {
        Self::start_as(devices, (fresh, false), trust, accept_loss, epoch)
    }

    /// A start at which nothing proves that the primary was not changed.
    pub fn start_suspect(devices: Devices, epoch: u32) -> Self {
        Self::start_as(devices, (false, true), Trust::Full, false, epoch)
    }

    fn start_as(
        devices: Devices,
        (fresh, suspect): (bool, bool),
        trust: Trust,
        accept_loss: bool,
        epoch: u32,
    ) -> Self {
        let volume = VolumeConfig {
            id: VolumeId(0),
            size: SIZE,
            mode: Mode::WriteBack,
            discard: false,
            rotational: false,
            share: forebay_engine::DirtyShare::default(),
            suspect,
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
        let mut world = Self { engine, now, fx, devices, answers, away: false };
        world.engine.start(now, &mut world.fx);
        world.settle();
        world
    }

    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            self.engine.poll(self.now, &mut self.fx);
            let ios = std::mem::take(&mut self.fx.ios);
            let replies = self.fx.replies.drain(..);
            self.answers.extend(replies.map(|reply| reply.result.is_ok().then_some(reply.buf)));
            if ios.is_empty() {
                return;
            }
            for (target, mut io) in ios {
                if self.away && target != Target::Cache {
                    let gone = Err(ErrorKind::DeviceGone.into());
                    self.engine.complete(self.now, target, io.complete(gone), &mut self.fx);
                    continue;
                }
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

    pub fn ask(&mut self, op: IoOp, range: ByteRange, bytes: &[u8]) -> Option<IoBuf> {
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

    pub fn write(&mut self, block: u64, version: u64) {
        let range = ByteRange::new(block * BLOCK, BLOCK);
        assert!(self.ask(IoOp::Write, range, &content(block, version)).is_some());
    }

    pub fn flush(&mut self) {
        assert!(self.ask(IoOp::Flush, ByteRange::default(), &[]).is_some());
    }

    /// The version of a block that a read shows; nothing where it is an error.
    pub fn version(&mut self, block: u64) -> Option<u64> {
        let range = ByteRange::new(block * BLOCK, BLOCK);
        let buf = self.ask(IoOp::Read, range, &[])?;
        let version = u64::from_le_bytes(buf[8..16].try_into().unwrap());
        assert!(*buf == *content(block, version), "block {block} shows no version of it");
        Some(version)
    }

    pub fn versions(&mut self) -> Vec<Option<u64>> {
        (0..BLOCKS).map(|block| self.version(block)).collect()
    }

    /// Until nothing is dirty but what is lost.
    pub fn drain(&mut self) {
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
