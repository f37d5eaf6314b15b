//! An engine on devices in memory ([`forebay_engine::testing`]): all I/O that it starts in a turn
//! is done before the next turn. Its clock is simulated. The CPU time is real, and counts only the
//! engine; therefore this module has its own loop of turns.

use std::time::Duration;

use anyhow::{bail, ensure};
use forebay_block::testing::Numbers;
use forebay_block::{
    Arena, BufPool, ByteRange, Completion, ErrorKind, Instant, IoBuf, IoError, IoFlags, IoOp,
    STRIPE_BLOCKS, STRIPE_SIZE,
};
use forebay_engine::testing::{Devices, VOLUME, config as small_config};
use forebay_engine::{
    ContentLocality, DetachedStripe, Effects, Engine, Health, Mode, Request, RequestId, Setting,
    Shard, ShardConfig, State, Stats, Target, Trust,
};
use forebay_volume::pool::{Division, SPARE_PERCENT, area_of, geometry};
use rustix::time::{ClockId, clock_gettime};

use crate::load::content::Content;

/// Length of a block, in bytes.
pub const BLOCK: usize = 4096;
/// Requests submitted per turn.
pub const BATCH: usize = 32;
/// Simulated time per turn.
const TURN: Duration = Duration::from_micros(100);
/// Share of the cache that is its log, in percent: the default.
const LOG_PERCENT: u8 = 8;
/// Turns before the measurements: a simulated second.
const SETTLING_TURNS: usize = 10_000;
/// Number of turns without completion after which the engine counts as stuck.
const TURNS_MAX: usize = 10_000_000;

/// Configuration of the engine and its data.
#[derive(Clone, Copy)]
pub struct Layout {
    /// Number of blocks of the volume.
    pub blocks: u64,
    cache_bytes: u64,
    ram_bytes: u64,
    content: Content,
    /// Whether a block is always written with nearly the same bytes.
    rewrites: bool,
}

impl Layout {
    /// 64 MiB of data that fits the RAM tier.
    pub fn ram() -> Self {
        let (blocks, content) = (64 << 20 >> 12, Content::Random);
        Self { blocks, cache_bytes: 256 << 20, ram_bytes: 96 << 20, content, rewrites: false }
    }

    /// 64 MiB of pages that nearly fit, in compressed form, a RAM tier of three quarters of that
    /// size.
    pub fn compressed_ram() -> Self {
        Self { ram_bytes: 48 << 20, content: Content::Pages, ..Self::ram() }
    }

    /// 64 MiB of database rows that are rewritten with small changes; `ram_bytes` of RAM.
    pub fn rewrites(ram_bytes: u64) -> Self {
        let (blocks, content) = (64 << 20 >> 12, Content::Database);
        Self { blocks, cache_bytes: 1024 << 20, ram_bytes, content, rewrites: true }
    }

    /// 512 MiB of data that fits the cache device, with 8 MiB of RAM in front of it.
    pub fn ssd(content: Content) -> Self {
        let blocks = 512 << 20 >> 12;
        Self { blocks, cache_bytes: 1536 << 20, ram_bytes: 8 << 20, content, rewrites: false }
    }

    /// Twice as much data as a cache device of `cache_bytes` bytes.
    pub fn large(cache_bytes: u64, content: Content) -> Self {
        let blocks = (2 * cache_bytes) >> 12;
        Self { blocks, cache_bytes, ram_bytes: 64 << 20, content, rewrites: false }
    }
}

/// The calls of the engine, in the order of [`Harness::longest`].
pub const CALLS: [&str; 4] = ["submit", "complete", "poll", "others"];

/// The CPU time of the longest of each of [`CALLS`], if it is to be measured.
#[derive(Default)]
struct Longest(Option<[Duration; CALLS.len()]>);

impl Longest {
    fn call(&mut self, call: usize, work: impl FnOnce()) {
        match &mut self.0 {
            Some(longest) => longest[call] = longest[call].max(timed(work)),
            None => work(),
        }
    }
}

/// An engine, its devices and its client.
pub struct Harness {
    engine: Engine,
    layout: Layout,
    fx: Effects,
    now: Instant,
    devices: Devices,
    /// The data of writes, in blocks.
    data: Vec<u8>,
    /// The blocks of the last batch of writes, and whether the next batch repeats them elsewhere.
    written: Vec<Vec<u8>>,
    repeat: bool,
    bufs: Vec<IoBuf>,
    due: Vec<(Target, Completion)>,
    /// Flushes of the primary that have ended, if they are held back.
    held: Option<Vec<Completion>>,
    /// What the engine wanted recorded, which is told in the next turn.
    recorded: (Option<Trust>, Vec<DetachedStripe>),
    numbers: Numbers,
    spent: Duration,
    longest: Longest,
    answered: u64,
}

impl Harness {
    /// A fresh engine in service.
    pub fn start(layout: Layout) -> anyhow::Result<Self> {
        let now = Instant(1);
        let engine = Engine::new(config(&layout)?, now);
        let mut harness = Self {
            engine,
            fx: Effects::default(),
            now,
            devices: Devices::new(layout.cache_bytes, layout.blocks * BLOCK as u64),
            data: layout.content.bytes(4 << 20),
            written: vec![vec![0; BLOCK]; BATCH],
            repeat: false,
            bufs: (0..BATCH).map(|_| IoBuf::zeroed(BLOCK)).collect(),
            due: Vec::new(),
            held: None,
            recorded: Default::default(),
            numbers: Numbers::new(5),
            spent: Duration::ZERO,
            longest: Longest::default(),
            answered: 0,
            layout,
        };
        harness.engine.start(now, &mut harness.fx);
        for _ in 0..TURNS_MAX {
            if *harness.engine.state() == State::Serving {
                // Nothing is admitted before the primary has been flushed once.
                (0..SETTLING_TURNS).try_for_each(|_| harness.turn())?;
                return Ok(harness);
            }
            ensure!(*harness.engine.state() == State::Recovering, "{:?}", harness.engine.state());
            harness.turn()?;
        }
        bail!("the engine does not start");
    }

    /// Its configuration.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The engine's counters.
    pub fn stats(&self) -> Stats {
        self.engine.stats(self.now)
    }

    /// CPU time spent in the engine so far.
    pub fn cpu(&self) -> Duration {
        self.spent
    }

    /// The CPU time of the longest of each of [`CALLS`] since the last time this was asked for;
    /// before the first time none is measured, which would make calls dearer.
    pub fn longest(&mut self) -> [Duration; CALLS.len()] {
        self.longest.0.replace([Duration::ZERO; CALLS.len()]).unwrap_or_default()
    }

    /// Size of the index in bytes per block that is cached.
    pub fn index_bytes_per_block(&self) -> f64 {
        let stats = self.stats();
        stats.index_bytes as f64 / stats.cached_blocks as f64
    }

    /// Writes every block of the volume once, and destages all.
    pub fn fill(&mut self) -> anyhow::Result<()> {
        let mut block = 0;
        while block < self.layout.blocks {
            let first = block;
            self.batch(IoOp::Write, BATCH as u64, |i, _| first + i)?;
            block += BATCH as u64;
            // Drain regularly, so that the dirty limit is never near.
            if block.is_multiple_of(1 << 14) {
                self.drain()?;
            }
        }
        self.drain()
    }

    /// Reads `ops` random blocks. Returns CPU microseconds per read.
    pub fn reads(&mut self, ops: u64) -> anyhow::Result<f64> {
        let bound = self.layout.blocks;
        self.measure(IoOp::Read, ops, move |_, numbers| numbers.below(bound))
    }

    /// Reads `ops` blocks in ascending order, with gaps of a page so that they are not a stream.
    pub fn reads_in_turn(&mut self, first: u64, ops: u64) -> anyhow::Result<f64> {
        self.measure(IoOp::Read, ops, move |i, _| first + (i * 4099) % ops)
    }

    /// Writes every block twice in a row, and destages all.
    pub fn fill_twice(&mut self) -> anyhow::Result<()> {
        for first in (0..self.layout.blocks).step_by(BATCH) {
            for _ in 0..2 {
                self.batch(IoOp::Write, BATCH as u64, |i, _| first + i)?;
            }
        }
        self.drain()
    }

    /// Writes `ops` random blocks. Returns CPU microseconds per write, up to the acknowledgment.
    pub fn writes(&mut self, ops: u64) -> anyhow::Result<f64> {
        let bound = self.layout.blocks;
        self.measure(IoOp::Write, ops, move |_, numbers| numbers.below(bound))
    }

    /// Writes random blocks, and after each batch the same bytes to other blocks. Returns CPU
    /// microseconds per write of the latter.
    pub fn repeated_writes(&mut self, ops: u64) -> anyhow::Result<f64> {
        let bound = self.layout.blocks;
        let mut spent = Duration::ZERO;
        let mut done = 0;
        while done < ops {
            self.batch(IoOp::Write, BATCH as u64, |_, numbers| numbers.below(bound))?;
            let before = self.spent;
            self.repeat = true;
            self.batch(IoOp::Write, BATCH as u64, |_, numbers| numbers.below(bound))?;
            self.repeat = false;
            spent += self.spent - before;
            done += BATCH as u64;
        }
        Ok(spent.as_nanos() as f64 / 1e3 / done as f64)
    }

    /// Writes the first `ops` blocks of the volume in turn. They stay dirty, as far as the cache
    /// allows.
    pub fn dirty(&mut self, ops: u64) -> anyhow::Result<()> {
        for first in (0..ops).step_by(BATCH) {
            self.batch(IoOp::Write, BATCH as u64, |i, _| first + i)?;
        }
        Ok(())
    }

    /// Switches the volume to write-through and back.
    pub fn switch(&mut self) -> anyhow::Result<()> {
        for mode in [Mode::WriteThrough, Mode::WriteBack] {
            self.call(|engine, _, _| engine.set(Setting::Mode(VOLUME, mode)));
            (0..SETTLING_TURNS / 100).try_for_each(|_| self.turn())?;
        }
        Ok(())
    }

    /// Looks for similar blocks during `ops` random reads, and no longer.
    pub fn similar(&mut self, ops: u64) -> anyhow::Result<()> {
        let set = |harness: &mut Self, content| {
            harness.call(|engine, _, _| engine.set(Setting::Content(content)));
        };
        set(self, ContentLocality::Similar);
        self.reads(ops)?;
        set(self, ContentLocality::Rewrite);
        (0..SETTLING_TURNS).try_for_each(|_| self.turn())
    }

    /// Destages while the primary takes long for its flush, which fails at last.
    pub fn fail_flush(&mut self) -> anyhow::Result<()> {
        self.engine.set_drain(true);
        self.held = Some(Vec::new());
        (0..SETTLING_TURNS).try_for_each(|_| self.turn())?;
        self.engine.set_drain(false);
        for mut done in self.held.take().unwrap_or_default() {
            done.result = Err(ErrorKind::Media.into());
            self.due.push((Target::Primary(VOLUME), done));
        }
        (0..SETTLING_TURNS).try_for_each(|_| self.turn())
    }

    /// Loses the cache device: its dirty blocks go to the primary. Meanwhile `ops` random blocks
    /// are written.
    pub fn lose(&mut self, ops: u64) -> anyhow::Result<()> {
        let error = IoError::from(ErrorKind::Media);
        self.call(|engine, now, fx| engine.flush_failed(now, Target::Cache, &error, fx));
        self.writes(ops)?;
        for _ in 0..TURNS_MAX {
            self.turn()?;
            if self.engine.health() == Health::Detached {
                return (0..SETTLING_TURNS).try_for_each(|_| self.turn());
            }
        }
        bail!("the cache device is not left");
    }

    /// Discards the first `blocks` blocks of the volume, 32 MiB at a time.
    pub fn discards(&mut self, blocks: u64) -> anyhow::Result<()> {
        let stripes = blocks / STRIPE_BLOCKS;
        for first in (0..stripes).step_by(BATCH) {
            let batch = first..stripes.min(first + BATCH as u64);
            let wanted = self.answered + (batch.end - batch.start);
            for stripe in batch {
                let request = Request {
                    id: RequestId(stripe),
                    volume: VOLUME,
                    op: IoOp::Discard,
                    range: ByteRange::new(stripe * STRIPE_SIZE, STRIPE_SIZE),
                    flags: IoFlags::default(),
                    buf: IoBuf::empty(),
                    bypass: None,
                };
                let Self { engine, fx, now, longest, .. } = self;
                self.spent += timed(|| longest.call(0, || engine.submit(*now, request, fx)));
            }
            while self.answered < wanted {
                self.turn()?;
            }
        }
        Ok(())
    }

    /// A call that is none of the usual ones.
    fn call(&mut self, work: impl FnOnce(&mut Engine, Instant, &mut Effects)) {
        let Self { engine, fx, now, longest, .. } = self;
        self.spent += timed(|| longest.call(3, || work(engine, *now, fx)));
    }

    fn measure(
        &mut self,
        op: IoOp,
        ops: u64,
        block: impl Fn(u64, &mut Numbers) -> u64,
    ) -> anyhow::Result<f64> {
        let before = self.spent;
        let mut done = 0;
        while done < ops {
            let count = (ops - done).min(BATCH as u64);
            self.batch(op, count, |i, numbers| block(done + i, numbers))?;
            done += count;
        }
        Ok((self.spent - before).as_nanos() as f64 / 1e3 / ops as f64)
    }

    /// Submits a batch, and takes turns until all of it is answered.
    fn batch(
        &mut self,
        op: IoOp,
        count: u64,
        block: impl Fn(u64, &mut Numbers) -> u64,
    ) -> anyhow::Result<()> {
        let mut requests = Vec::with_capacity(BATCH);
        for i in 0..count {
            let block = block(i, &mut self.numbers);
            let Some(mut buf) = self.bufs.pop() else { bail!("a reply kept its buffer") };
            if op == IoOp::Write {
                let pool = (self.data.len() / BLOCK) as u64;
                let random = self.numbers.below(pool);
                let from = if self.layout.rewrites { block % pool } else { random };
                let from = from as usize * BLOCK;
                buf.copy_from_slice(&self.data[from..from + BLOCK]);
                // No two writes are equal: the header differs, and so does the place of a changed
                // row.
                buf[..8].copy_from_slice(&self.numbers.next().to_le_bytes());
                if self.layout.rewrites {
                    let row = 64 + self.numbers.below(BLOCK as u64 - 128) as usize;
                    buf[row..row + 24].copy_from_slice(&[self.numbers.next() as u8; 24]);
                }
                let written = &mut self.written[i as usize];
                if self.repeat {
                    buf.copy_from_slice(written);
                } else {
                    written.copy_from_slice(&buf);
                }
            }
            requests.push(Request {
                id: RequestId(i),
                volume: VOLUME,
                op,
                range: ByteRange::new(block * BLOCK as u64, BLOCK as u64),
                flags: IoFlags::default(),
                buf,
                bypass: None,
            });
        }
        let wanted = self.answered + count;
        let (engine, fx, now) = (&mut self.engine, &mut self.fx, self.now);
        let longest = &mut self.longest;
        self.spent += timed(|| {
            engine.warm(&requests);
            for request in requests.drain(..) {
                longest.call(0, || engine.submit(now, request, fx));
            }
        });
        for _ in 0..TURNS_MAX {
            self.turn()?;
            if self.answered == wanted {
                return Ok(());
            }
        }
        bail!("requests stay without an answer");
    }

    /// Destages everything, and waits for reclaim to come to rest.
    pub fn drain(&mut self) -> anyhow::Result<()> {
        self.engine.set_drain(true);
        for _ in 0..TURNS_MAX {
            self.turn()?;
            if self.engine.dirty_blocks() == 0 && self.due.is_empty() && self.fx.ios.is_empty() {
                self.engine.set_drain(false);
                return Ok(());
            }
        }
        bail!("the drain does not end");
    }

    /// One turn of an event loop: completions, `poll`, then all I/O is done.
    fn turn(&mut self) -> anyhow::Result<()> {
        self.now = self.now + TURN;
        let (trust, stripes) = std::mem::take(&mut self.recorded);
        if let Some(trust) = trust {
            self.call(|engine, now, fx| engine.trust_recorded(now, trust, fx));
        }
        if !stripes.is_empty() {
            self.call(|engine, now, fx| engine.detached(now, &stripes, fx));
        }
        let Self { engine, fx, due, now, longest, .. } = self;
        self.spent += timed(|| {
            for (target, done) in due.drain(..) {
                longest.call(1, || engine.complete(*now, target, done, fx));
            }
            longest.call(2, || engine.poll(*now, fx));
        });
        for (target, io) in self.fx.ios.drain(..) {
            let is_flush = io.op == IoOp::Flush && target != Target::Cache;
            let done = self.devices.carry_out(target, io);
            match self.held.as_mut().filter(|_| is_flush) {
                Some(held) => held.push(done),
                None => self.due.push((target, done)),
            }
        }
        self.recorded = (self.fx.record_trust.take(), std::mem::take(&mut self.fx.detach));
        for reply in self.fx.replies.drain(..) {
            if let Err(error) = reply.result {
                bail!("request {:?}: {error}", reply.id);
            }
            self.answered += 1;
            self.bufs.extend(Some(reply.buf).filter(|buf| !buf.is_empty()));
        }
        Ok(())
    }
}

fn config(layout: &Layout) -> anyhow::Result<ShardConfig> {
    let division = Division { shards: 1, spare_percent: SPARE_PERCENT, log_percent: LOG_PERCENT };
    let geometry = geometry(layout.cache_bytes, division)?;
    let mut config = ShardConfig {
        area: area_of(geometry.shards[0]),
        segment_size: geometry.segment_size,
        log_segments: geometry.log_segments,
        unit_entries: geometry.log_segments.is_some(),
        ram_bytes: layout.ram_bytes,
        index_blocks: layout.cache_bytes / BLOCK as u64,
        dirty_stripes: u64::MAX,
        write_cache_depth: Duration::from_secs(3600),
        destage_depth: 32,
        compress: true,
        compress_ram: true,
        content: ContentLocality::Rewrite,
        buffers: BufPool::new(Arena::new(48 << 20)),
        ..small_config(layout.cache_bytes, layout.blocks * BLOCK as u64)
    };
    config.volumes[0].discard = true;
    Ok(config)
}

/// CPU time of this thread for `work`.
fn timed(work: impl FnOnce()) -> Duration {
    let before = clock_gettime(ClockId::ThreadCPUTime);
    work();
    let after = clock_gettime(ClockId::ThreadCPUTime);
    let nanos = |time: rustix::time::Timespec| time.tv_sec * 1_000_000_000 + time.tv_nsec;
    Duration::from_nanos((nanos(after) - nanos(before)) as u64)
}
