//! An engine on devices in memory, for tests and benchmarks: settings of a small shard, devices
//! that carry out every request, and a [`Harness`] that passes requests and completions to the
//! engine.
//!
//! A test that needs to see each step calls [`Harness::poll`] and [`Harness::finish`]. A test that
//! needs only the outcome calls [`Harness::ask`].

#[cfg(test)]
pub(crate) mod rooms;

use std::sync::Arc;
use std::time::Duration;

use forebay_block::{
    BufPool, ByteRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoFlags, IoOp, VolumeId,
};

use crate::{
    CacheShare, ContentLocality, DirtyShare, Effects, Engine, Eviction, LastStop, Mode, Pace, Part,
    Reply, Request, RequestId, Shard, ShardConfig, Stats, Target, Trust, VolumeConfig,
};

/// The only volume of [`config`].
pub const VOLUME: VolumeId = VolumeId(0);
/// Size of a segment in [`config`], in bytes.
pub const SEGMENT: u32 = 64 << 10;
/// Limit on turns: an engine that still has work after this many is stuck.
const TURNS_MAX: usize = 10_000;
/// Time that passes between two checks for an answer.
const TICK: Duration = Duration::from_millis(1);

/// Settings of a fresh shard with one volume; sizes are in bytes. Blocks are stored uncompressed,
/// and nothing is destaged until a test requests it.
#[must_use]
pub fn config(cache: u64, primary: u64) -> ShardConfig {
    ShardConfig {
        shard: 0,
        shards: 1,
        pool: 1,
        area: ByteRange::new(0, cache),
        segment_size: SEGMENT,
        log_segments: None,
        unit_entries: true,
        volumes: vec![VolumeConfig {
            id: VOLUME,
            size: primary,
            mode: Mode::WriteBack,
            discard: false,
            rotational: false,
            foreground: Arc::default(),
            optimal_io: 4096,
            share: DirtyShare::default(),
            cache_share: CacheShare::default(),
            pace: Pace::default(),
            ordered: None,
            suspect: false,
            lost: false,
        }],
        ram_bytes: 256 << 10,
        index_blocks: cache / forebay_block::BLOCK_SIZE as u64 * 3,
        dirty_stripes: u64::MAX,
        eviction: Eviction::default(),
        write_cache_depth: Duration::from_secs(600),
        dirty_limit: Part::Percent(50),
        dirty_target: Part::Percent(50),
        idle_destage: Some(Duration::from_secs(5)),
        fill_rate: None,
        wear_budget: None,
        patience: Duration::from_secs(30),
        destage_depth: 4,
        compress: false,
        compress_ram: false,
        content: ContentLocality::Independent,
        cache_volatile: true,
        discard: false,
        discarded: true,
        buffers: BufPool::default(),
        fresh: true,
        trust: Trust::Full,
        detached: Vec::new(),
        accept_loss: false,
        last_stop: LastStop::default(),
        epoch: 1,
    }
}

/// The content of a cache device and a primary.
#[derive(Clone, Debug)]
pub struct Devices {
    /// The cache device.
    pub cache: Vec<u8>,
    /// The primary of every volume.
    pub primary: Vec<u8>,
}

impl Devices {
    /// Devices of these sizes in bytes, all zeros.
    #[must_use]
    pub fn new(cache: u64, primary: u64) -> Self {
        Self { cache: vec![0; cache as usize], primary: vec![0; primary as usize] }
    }

    /// Carries out a request, which always succeeds.
    pub fn carry_out(&mut self, target: Target, mut io: Io) -> Completion {
        let medium = match target {
            Target::Cache => &mut self.cache,
            Target::Primary(_) => &mut self.primary,
        };
        let range = io.range.offset as usize..io.range.end() as usize;
        match io.op {
            IoOp::Read => io.buf.copy_from_slice(&medium[range]),
            IoOp::Write => medium[range].copy_from_slice(&io.buf),
            IoOp::WriteZeroes => medium[range].fill(0),
            // A device may return anything for discarded blocks.
            IoOp::Discard => medium[range].fill(0xdb),
            IoOp::Flush => {}
            IoOp::Prefetch => return io.complete(Err(ErrorKind::Unsupported.into())),
        }
        io.complete(Ok(()))
    }
}

/// An engine, its devices and its client.
pub struct Harness {
    /// The engine.
    pub engine: Engine,
    /// The time that the engine is told.
    pub now: Instant,
    /// The engine's effects.
    pub fx: Effects,
    /// The devices that carry them out.
    pub devices: Devices,
    /// Answers that the test has not taken, oldest first.
    pub replies: Vec<Reply>,
    /// Whether the primary fails every request.
    pub away: bool,
    /// The position of a sector that the primary cannot read.
    pub unreadable: Option<u64>,
}

impl Harness {
    /// Returns an engine that has just been started.
    #[must_use]
    pub fn start(config: ShardConfig, devices: Devices) -> Self {
        let now = Instant(1_000_000_000 * u64::from(config.epoch));
        let (engine, fx, replies) = (Engine::new(config, now), Effects::default(), Vec::new());
        let (away, unreadable) = (false, None);
        let mut harness = Self { engine, now, fx, devices, replies, away, unreadable };
        harness.engine.start(now, &mut harness.fx);
        harness
    }

    /// Counters and levels.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.engine.stats(self.now)
    }

    /// Lets time pass; the engine is not called.
    pub fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    /// Submits a request; `bytes` is the data of a write.
    pub fn submit(&mut self, op: IoOp, range: ByteRange, bytes: &[u8]) {
        let buf = match op {
            IoOp::Read => IoBuf::zeroed(range.len as usize),
            IoOp::Write => IoBuf::copy_of(bytes),
            _ => IoBuf::empty(),
        };
        let (id, flags) = (RequestId(1), IoFlags::default());
        self.send(Request { id, volume: VOLUME, op, range, flags, buf, bypass: None });
    }

    /// Submits a request.
    pub fn send(&mut self, request: Request) {
        self.engine.submit(self.now, request, &mut self.fx);
        self.replies.append(&mut self.fx.replies);
    }

    /// Ends a turn; returns the I/O that the engine wants.
    pub fn poll(&mut self) -> Vec<(Target, Io)> {
        self.engine.poll(self.now, &mut self.fx);
        self.replies.append(&mut self.fx.replies);
        std::mem::take(&mut self.fx.ios)
    }

    /// Carries out an I/O and passes the completion to the engine.
    pub fn finish(&mut self, target: Target, io: Io) {
        let hits_bad = io.op == IoOp::Read
            && self.unreadable.is_some_and(|at| (io.range.offset..io.range.end()).contains(&at));
        let done = match target {
            Target::Primary(_) if self.away => io.complete(Err(ErrorKind::DeviceGone.into())),
            Target::Primary(_) if hits_bad => io.complete(Err(ErrorKind::Media.into())),
            _ => self.devices.carry_out(target, io),
        };
        self.complete(target, done);
    }

    /// Passes a completion to the engine.
    pub fn complete(&mut self, target: Target, done: Completion) {
        self.engine.complete(self.now, target, done, &mut self.fx);
        self.replies.append(&mut self.fx.replies);
    }

    /// Carries out all I/O that the engine wants, until it wants none.
    ///
    /// # Panics
    /// If that never happens.
    pub fn settle(&mut self) {
        for _ in 0..TURNS_MAX {
            let ios = self.poll();
            if ios.is_empty() {
                return;
            }
            ios.into_iter().for_each(|(target, io)| self.finish(target, io));
        }
        panic!("the engine does not come to rest");
    }

    /// Submits a request and waits for the answer; `bytes` is the data of a write. Returns the
    /// request's buffer, or `None` if the request failed.
    ///
    /// # Panics
    /// If the request is not answered.
    pub fn ask(&mut self, op: IoOp, range: ByteRange, bytes: &[u8]) -> Option<IoBuf> {
        self.submit(op, range, bytes);
        for _ in 0..TURNS_MAX {
            self.settle();
            if let Some(reply) = self.replies.pop() {
                return reply.result.is_ok().then_some(reply.buf);
            }
            self.wait(TICK);
        }
        panic!("{op:?} of {range:?} is not answered");
    }

    /// Tells the engine that another shard's flush of a device has failed.
    pub fn flush_failed(&mut self, target: Target, error: &IoError) {
        self.engine.flush_failed(self.now, target, error, &mut self.fx);
    }

    /// Stops the engine in order, as far as that needs no time to pass.
    pub fn stop(&mut self) {
        self.engine.stop(self.now, &mut self.fx);
        self.settle();
    }

    /// Destages until only lost blocks are dirty.
    ///
    /// # Panics
    /// If that never happens.
    pub fn drain(&mut self) {
        self.engine.set_drain(true);
        for _ in 0..TURNS_MAX {
            self.settle();
            if self.engine.dirty_blocks() == self.stats().fenced_blocks {
                return self.engine.set_drain(false);
            }
            self.wait(TICK * 10);
        }
        panic!("{} blocks stay dirty", self.engine.dirty_blocks());
    }
}
