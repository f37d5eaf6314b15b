//! An engine on devices in memory, for tests and benchmarks: settings of a small shard, devices
//! that carry out every request, and a [`Harness`] that hands requests and completions to the
//! engine.
//!
//! A test that wants to see each step calls [`Harness::poll`] and [`Harness::finish`]; a test that
//! wants only the outcome calls [`Harness::ask`].

#[cfg(test)]
pub(crate) mod rooms;

use std::time::Duration;

use forebay_block::{
    BufPool, ByteRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoFlags, IoOp, VolumeId,
};

use crate::{
    ContentLocality, DirtyShare, Effects, Engine, Eviction, Mode, Reply, Request, RequestId, Shard,
    ShardConfig, Stats, Target, Trust, VolumeConfig,
};

/// The only volume of [`config`].
pub const VOLUME: VolumeId = VolumeId(0);
/// Bytes of a segment in [`config`].
pub const SEGMENT: u32 = 64 << 10;
/// Turns after which an engine that still wants something is stuck.
const TURNS_MAX: usize = 10_000;
/// Time that passes while a request waits for it.
const TICK: Duration = Duration::from_millis(1);

/// Settings of a fresh shard with one volume, sizes in bytes. Blocks are stored as they are, and
/// nothing is destaged before it is asked for.
#[must_use]
pub fn config(cache: u64, primary: u64) -> ShardConfig {
    ShardConfig {
        shard: 0,
        pool: 1,
        area: ByteRange::new(0, cache),
        segment_size: SEGMENT,
        volumes: vec![VolumeConfig {
            id: VOLUME,
            size: primary,
            mode: Mode::WriteBack,
            discard: false,
            rotational: false,
            share: DirtyShare::default(),
            suspect: false,
        }],
        ram_bytes: 256 << 10,
        index_blocks: cache / forebay_block::BLOCK_SIZE as u64 * 3,
        eviction: Eviction::default(),
        write_cache_depth: Duration::from_secs(600),
        dirty_limit_percent: 50,
        patience: Duration::from_secs(30),
        destage_depth: 4,
        compress: false,
        compress_ram: false,
        content: ContentLocality::Independent,
        cache_volatile: true,
        buffers: BufPool::default(),
        fresh: true,
        trust: Trust::Full,
        detached: Vec::new(),
        accept_loss: false,
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

    /// Does what a request wants, which always succeeds.
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
            IoOp::Flush | IoOp::Discard => {}
        }
        io.complete(Ok(()))
    }
}

/// An engine, its devices and its client.
pub struct Harness {
    /// The engine.
    pub engine: Engine,
    /// The time that it is told.
    pub now: Instant,
    /// What it wants done.
    pub fx: Effects,
    /// Where that is done.
    pub devices: Devices,
    /// Answers that nobody has taken, oldest first.
    pub replies: Vec<Reply>,
    /// The primary fails every request.
    pub away: bool,
}

impl Harness {
    /// An engine that has just been told to start.
    #[must_use]
    pub fn start(config: ShardConfig, devices: Devices) -> Self {
        let now = Instant(1_000_000_000 * u64::from(config.epoch));
        let (engine, fx, replies) = (Engine::new(config, now), Effects::default(), Vec::new());
        let mut harness = Self { engine, now, fx, devices, replies, away: false };
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

    /// Submits a request, of `bytes` if it is a write.
    pub fn submit(&mut self, op: IoOp, range: ByteRange, bytes: &[u8]) {
        let buf = match op {
            IoOp::Read => IoBuf::zeroed(range.len as usize),
            IoOp::Write => IoBuf::copy_of(bytes),
            IoOp::Flush | IoOp::Discard | IoOp::WriteZeroes => IoBuf::empty(),
        };
        let (id, flags) = (RequestId(1), IoFlags::default());
        self.send(Request { id, volume: VOLUME, op, range, flags, buf, bypass: None });
    }

    /// Submits a request.
    pub fn send(&mut self, request: Request) {
        self.engine.submit(self.now, request, &mut self.fx);
        self.replies.append(&mut self.fx.replies);
    }

    /// Ends a turn: the I/O that the engine wants.
    pub fn poll(&mut self) -> Vec<(Target, Io)> {
        self.engine.poll(self.now, &mut self.fx);
        self.replies.append(&mut self.fx.replies);
        std::mem::take(&mut self.fx.ios)
    }

    /// Carries out an I/O and tells the engine.
    pub fn finish(&mut self, target: Target, io: Io) {
        let done = match target {
            Target::Primary(_) if self.away => io.complete(Err(ErrorKind::DeviceGone.into())),
            _ => self.devices.carry_out(target, io),
        };
        self.complete(target, done);
    }

    /// Tells the engine that an I/O has ended.
    pub fn complete(&mut self, target: Target, done: Completion) {
        self.engine.complete(self.now, target, done, &mut self.fx);
        self.replies.append(&mut self.fx.replies);
    }

    /// Carries out all that the engine wants, until it wants nothing now.
    ///
    /// # Panics
    /// If there is no end to it.
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

    /// Submits a request, of `bytes` if it is a write, and waits for the answer: the request's
    /// buffer unless it failed.
    ///
    /// # Panics
    /// If it is not answered.
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

    /// Stops in order, as far as the engine wants something now.
    pub fn stop(&mut self) {
        self.engine.stop(self.now, &mut self.fx);
        self.settle();
    }

    /// Destages until nothing is dirty but lost blocks.
    ///
    /// # Panics
    /// If that does not come.
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
