//! One cache of one size under one policy, simulated over a trace.
//!
//! [`Simulator`] has a circular log, [`StoreSimulator`] a journal and a store of slots. The former
//! is the engine without bytes, time and errors: the same circular log of segments, reclaimed
//! oldest first, with the same number of free segments and the same share copied forward; the same
//! RAM tier in front of it, the same sequential bypass, and the engine's own policies. Writes go
//! into the log (`write-back`). Differences: blocks are not compressed, records have no overhead,
//! every block is destaged before its segment is reclaimed, and there is no reading around misses.

mod journal;
mod log;
mod slots;
mod store;

use std::ops::Range;

use forebay_block::{BLOCK_SIZE, BlockRange, IoOp};
use forebay_policy::{Eviction, EvictionPolicy, Recent, SequentialDetector, Standing, Window};

use crate::request::TraceRequest;
use log::Log;
pub use store::{StoreConfig, StorePolicy, StoreSimulator};

/// Sequential streams tracked, as in a volume.
const STREAMS_MAX: usize = 64;

/// The cache to simulate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SimulateConfig {
    /// Bytes of the cache device that hold segments.
    pub cache_bytes: u64,
    /// Size of the RAM tier, in bytes.
    pub ram_bytes: u64,
    /// The eviction policy.
    pub eviction: Eviction,
    /// Length in bytes from which a sequential stream bypasses the cache; 0 for never.
    pub sequential_threshold: u64,
}

/// Counters so far. Blocks are of 4 KiB; a partly covered block counts as a block.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Outcome {
    /// Read requests.
    pub read_requests: u64,
    /// Read requests with at least one block that was not cached.
    pub read_requests_missed: u64,
    /// Blocks read, cached or not.
    pub read_blocks: u64,
    /// Blocks read that were not cached.
    pub read_blocks_missed: u64,
    /// Blocks read that were in RAM.
    pub ram_hit_blocks: u64,
    /// Blocks written.
    pub write_blocks: u64,
    /// Blocks written that were not cached.
    pub write_blocks_missed: u64,
    /// Blocks read or written past the cache because they belong to a sequential stream.
    pub bypassed_blocks: u64,
    /// Bytes written to the cache device because a client wrote them.
    pub logged_bytes: u64,
    /// Bytes written to the cache device because a client read them.
    pub admitted_bytes: u64,
    /// Bytes copied forward on the cache device.
    pub copied_bytes: u64,
    /// Bytes written to the store for blocks that the journal held.
    pub moved_bytes: u64,
    /// Bytes written to the journal for entries of the store's blocks.
    pub mapping_bytes: u64,
    /// Share of the cache device that holds newest versions of blocks.
    pub live_share: f64,
    /// Blocks on the cache device.
    pub entries: u64,
}

impl Outcome {
    /// The share of blocks read that were not cached.
    #[must_use]
    pub fn block_miss_ratio(&self) -> f64 {
        ratio(self.read_blocks_missed, self.read_blocks)
    }

    /// The share of read requests with a block that was not cached.
    #[must_use]
    pub fn request_miss_ratio(&self) -> f64 {
        ratio(self.read_requests_missed, self.read_requests)
    }

    /// The share of blocks read or written that were not cached: the figure in papers on policies.
    #[must_use]
    pub fn reference_miss_ratio(&self) -> f64 {
        let missed = self.read_blocks_missed + self.write_blocks_missed;
        ratio(missed, self.read_blocks + self.write_blocks)
    }

    /// Bytes written to the cache device.
    #[must_use]
    pub fn ssd_bytes(&self) -> u64 {
        let new = self.logged_bytes + self.admitted_bytes;
        new + self.copied_bytes + self.moved_bytes + self.mapping_bytes
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// A simulated cache.
pub trait Simulate {
    /// Processes the next request of the trace.
    fn take(&mut self, request: &TraceRequest);

    /// The counters so far.
    fn outcome(&self) -> Outcome;
}

/// A cache to which the requests of a trace are dispatched.
trait Requests {
    /// The detector of sequential streams, and the counters.
    fn streams(&mut self) -> (&mut SequentialDetector, &mut Outcome);

    /// A client reads blocks.
    fn read(&mut self, blocks: BlockRange, bypass: bool);

    /// A client writes blocks.
    fn write(&mut self, blocks: BlockRange, bypass: bool);

    /// Blocks leave the cache.
    fn drop_blocks(&mut self, blocks: BlockRange);
}

/// Hands a request to a cache, past it if the request belongs to a long sequential stream.
fn dispatch(cache: &mut impl Requests, request: &TraceRequest) {
    let blocks = request.range.blocks();
    let (detector, outcome) = cache.streams();
    let mut observe = |is_write| {
        let bypass = detector.observe(request.range, is_write);
        outcome.bypassed_blocks += u64::from(bypass) * blocks.count;
        bypass
    };
    match request.op {
        IoOp::Read => {
            let bypass = observe(false);
            cache.read(blocks, bypass);
        }
        IoOp::Write => {
            let bypass = observe(true);
            cache.write(blocks, bypass);
        }
        IoOp::WriteZeroes => cache.write(blocks, false),
        IoOp::Discard => cache.drop_blocks(blocks),
        IoOp::Flush | IoOp::Prefetch => {}
    }
}

/// A cache with a circular log.
pub struct Simulator {
    log: Log,
    ram: Recent,
    window: Window,
    policy: Box<dyn EvictionPolicy + Send>,
    detector: SequentialDetector,
    outcome: Outcome,
    blocks: u64,
}

impl Simulator {
    /// The smallest cache, in bytes: a log needs some segments.
    pub const CACHE_BYTES_MIN: u64 = (log::SEGMENTS_MIN * BLOCK_SIZE) as u64;

    /// An empty cache.
    ///
    /// # Panics
    /// If it is smaller than [`Simulator::CACHE_BYTES_MIN`].
    #[must_use]
    pub fn new(config: &SimulateConfig) -> Self {
        Self::with_policy(config, config.eviction.policy(config.cache_bytes / BLOCK_SIZE as u64))
    }

    /// An empty cache under any policy, even one that is no [`Eviction`].
    ///
    /// # Panics
    /// As [`Simulator::new`].
    #[must_use]
    pub fn with_policy(config: &SimulateConfig, policy: Box<dyn EvictionPolicy + Send>) -> Self {
        assert!(config.cache_bytes >= Self::CACHE_BYTES_MIN, "{} bytes", config.cache_bytes);
        let blocks = config.cache_bytes / BLOCK_SIZE as u64;
        let ram = usize::try_from(config.ram_bytes / BLOCK_SIZE as u64);
        let ram = ram.expect("the RAM tier fits memory");
        Self {
            log: Log::new(blocks),
            ram: Recent::new(ram),
            window: Window::default(),
            policy,
            detector: SequentialDetector::new(config.sequential_threshold, STREAMS_MAX),
            outcome: Outcome::default(),
            blocks,
        }
    }

    /// Brings a block of this standing into RAM; blocks evicted for it may enter the log.
    fn remember(&mut self, key: u64, standing: Standing) {
        if !self.ram.has_room_for(key) {
            let log = &self.log;
            let leaving = self.window.leaving(&mut self.ram, |key| !log.contains(key));
            self.offer(leaving, false);
        }
        self.ram.put(key, standing);
    }

    /// Offers missed blocks to the log; if `waits`, their admission is left to the RAM tier.
    fn offer(&mut self, keys: Range<u64>, waits: bool) {
        if !waits && !keys.is_empty() && self.policy.admits(keys.clone()) {
            for key in keys {
                self.log.append(key, &mut *self.policy);
                self.outcome.admitted_bytes += BLOCK_SIZE as u64;
            }
        }
    }
}

impl Requests for Simulator {
    fn streams(&mut self) -> (&mut SequentialDetector, &mut Outcome) {
        (&mut self.detector, &mut self.outcome)
    }

    fn read(&mut self, blocks: BlockRange, bypass: bool) {
        let missed_before = self.outcome.read_blocks_missed;
        let waits = self.policy.chooses() && !self.ram.is_empty();
        let mut missed = 0..0;
        for key in blocks.iter() {
            if !bypass {
                self.policy.asked(key);
            }
            let cached = self.log.hit(key, &*self.policy);
            if self.ram.touch(key).is_some() {
                self.outcome.ram_hit_blocks += 1;
            } else if cached {
                let oldest = self.ram.oldest_of(Standing::Doubled);
                let oldest = oldest.filter(|_| self.ram.is_full());
                if oldest.is_none_or(|(oldest, _)| self.policy.prefers(key, oldest)) {
                    self.remember(key, Standing::Doubled);
                }
            } else {
                self.outcome.read_blocks_missed += 1;
                if !bypass {
                    self.remember(key, if waits { Standing::Alone } else { Standing::Doubled });
                    if missed.end != key {
                        self.offer(missed, waits);
                        missed = key..key;
                    }
                    missed.end = key + 1;
                }
            }
        }
        self.offer(missed, waits);
        self.outcome.read_blocks += blocks.count;
        self.outcome.read_requests += 1;
        let missed = self.outcome.read_blocks_missed > missed_before;
        self.outcome.read_requests_missed += u64::from(missed);
    }

    fn write(&mut self, blocks: BlockRange, bypass: bool) {
        for key in blocks.iter() {
            let cached = self.ram.find(key).is_some() || self.log.contains(key);
            self.outcome.write_blocks_missed += u64::from(!cached);
            if bypass {
                continue;
            }
            self.policy.written(key);
            self.log.append(key, &mut *self.policy);
            self.outcome.logged_bytes += BLOCK_SIZE as u64;
            self.remember(key, Standing::Doubled);
        }
        self.outcome.write_blocks += blocks.count;
        if bypass {
            self.drop_blocks(blocks);
        }
    }

    fn drop_blocks(&mut self, blocks: BlockRange) {
        let cached = self.log.len() + self.ram.len() as u64;
        if blocks.count > cached {
            // A discard may cover a whole volume: check the cached blocks, not the range.
            self.log.retain(|key| !blocks.contains(key));
            self.ram.retain(|key| !blocks.contains(key));
            return;
        }
        for key in blocks.iter() {
            self.log.forget(key);
            self.ram.forget(key);
        }
    }
}

impl Simulate for Simulator {
    fn take(&mut self, request: &TraceRequest) {
        dispatch(self, request);
    }

    fn outcome(&self) -> Outcome {
        Outcome {
            copied_bytes: self.log.copied * BLOCK_SIZE as u64,
            live_share: self.log.len() as f64 / self.blocks as f64,
            entries: self.log.len(),
            ..self.outcome
        }
    }
}
