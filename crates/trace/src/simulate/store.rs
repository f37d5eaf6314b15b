//! A journal for writes and a store of slots, simulated over a trace.
//!
//! A write of a client goes into the journal, in a share of the cache device. A read that misses
//! goes into RAM, and into the store when it leaves RAM; every fourth group of blocks goes into the
//! journal instead. When the oldest segment of the journal is freed, the blocks whose newest
//! version it holds are offered to the store: every block counts as destaged by then. If the store
//! is full, a random sample of its units is compared with what asks to enter it, or the journal
//! from RAM, and the least valued goes. Each unit in the store has an entry in the journal, which
//! is logged again once in a lap. RAM holds missed blocks, written ones, and some that were read
//! from the device, as the engine's does; nothing in it is compressed, and no base of a delta is
//! kept there.

use forebay_block::{BLOCK_SIZE, BlockRange};
use forebay_policy::{
    Adaptive, KeyHash, LastTouch, Recent, SequentialDetector, Standing, StoreCandidate, Touch,
};
use hashbrown::HashMap;

use super::journal::Journal;
use super::slots::{GROUP, Slots, Unit};
use super::{Outcome, Requests, STREAMS_MAX, Simulate, dispatch};
use crate::request::TraceRequest;

/// Bytes of the journal for the entry of a unit, in a record and its footer, and more for each of
/// its blocks.
const UNIT_ENTRY_BYTES: u64 = 33;
const BLOCK_ENTRY_BYTES: u64 = 16;
/// Units compared with the one that asks to enter.
const SAMPLE: usize = 24;
/// Of this many groups of missed blocks, one goes through the journal.
const THROUGH_JOURNAL_ONE_IN: u64 = 4;
const PAGE: u64 = BLOCK_SIZE as u64;

/// Where the newest version of a block is in the journal.
type Place = (u64, u32);

/// The policies of the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StorePolicy {
    /// The rule that misses least in shadow caches.
    #[default]
    Adaptive,
    /// Least recently used of a sample.
    Lru,
    /// Least frequently read of a sample.
    Frequency,
}

impl StorePolicy {
    /// Every policy with its name.
    pub const NAMES: [(&'static str, Self); 3] =
        [("adaptive", Self::Adaptive), ("lru", Self::Lru), ("frequency", Self::Frequency)];

    /// The policy's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    fn policy(self, blocks: u64) -> Adaptive {
        match self {
            Self::Adaptive => Adaptive::new(blocks),
            Self::Lru => Adaptive::recency(blocks),
            Self::Frequency => Adaptive::frequency(blocks),
        }
    }
}

/// The cache to simulate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StoreConfig {
    /// Bytes of the cache device for the journal and the store.
    pub cache_bytes: u64,
    /// Size of the RAM tier, in bytes.
    pub ram_bytes: u64,
    /// The policy.
    pub policy: StorePolicy,
    /// Length in bytes from which a sequential stream bypasses the cache; 0 for never.
    pub sequential_threshold: u64,
    /// Share of the cache device for the journal, in percent.
    pub journal_percent: f64,
    /// How many times smaller blocks become by compression; at least 1.
    pub compress: f64,
}

impl StoreConfig {
    /// The smallest journal, in percent of the cache device, for blocks that become `compress`
    /// times smaller: in a smaller one the store's entries would take more than half.
    #[must_use]
    pub fn journal_percent_min(compress: f64) -> f64 {
        let most = UNIT_ENTRY_BYTES + BLOCK_ENTRY_BYTES;
        100.0 * 2.0 * most as f64 / PAGE as f64 * compress
    }
}

/// A cache of this layout.
pub struct StoreSimulator {
    journal: Journal,
    /// Blocks whose newest version is in the journal.
    fresh: HashMap<u64, Place, KeyHash>,
    store: Slots,
    /// The last request for each cached block.
    touched: HashMap<u64, LastTouch, KeyHash>,
    ram: Recent,
    policy: Adaptive,
    detector: SequentialDetector,
    outcome: Outcome,
    compress: f64,
    device_blocks: u64,
    /// Groups of missed blocks that left RAM so far.
    left_ram: u64,
    random: u64,
}

impl StoreSimulator {
    /// An empty cache.
    ///
    /// # Panics
    /// If the journal is smaller than [`StoreConfig::journal_percent_min`], or blocks would grow.
    #[must_use]
    pub fn new(config: &StoreConfig) -> Self {
        let least = StoreConfig::journal_percent_min(config.compress);
        assert!(config.compress >= 1.0, "a ratio of {}", config.compress);
        assert!(config.journal_percent >= least, "a journal of {} %", config.journal_percent);
        let device_blocks = config.cache_bytes / PAGE;
        let wanted = (config.cache_bytes as f64 * config.journal_percent / 100.0) as u64;
        let journal = Journal::new(wanted);
        let pages = device_blocks.saturating_sub(journal.bytes().div_ceil(PAGE)).max(1);
        let ram = usize::try_from(config.ram_bytes / PAGE).expect("the RAM tier fits memory");
        let held = (device_blocks as f64 * config.compress) as u64;
        Self {
            journal,
            fresh: HashMap::default(),
            store: Slots::new(pages, config.compress > 1.0),
            touched: HashMap::default(),
            ram: Recent::new(ram),
            policy: config.policy.policy(held + ram as u64),
            detector: SequentialDetector::new(config.sequential_threshold, STREAMS_MAX),
            outcome: Outcome::default(),
            compress: config.compress,
            device_blocks,
            left_ram: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    fn is_cached(&self, key: u64) -> bool {
        self.touched.contains_key(&key)
    }

    /// Brings a missed block into RAM.
    fn enter_ram(&mut self, key: u64) {
        self.policy.on_enter();
        self.touched.insert(key, self.policy.touched(Touch::Read));
        match self.ram.is_empty() && self.ram.is_full() {
            true => self.admit(&[key]),
            false => self.put_in_ram(key, Standing::Alone),
        }
    }

    /// Puts a block into RAM; those that leave RAM for it, and are not on the device, go into the
    /// journal if they deserve it.
    fn put_in_ram(&mut self, key: u64, standing: Standing) {
        while !self.ram.has_room_for(key) {
            let Some((oldest, place)) = self.ram.oldest() else { return };
            if self.is_on_device(oldest) {
                self.ram.forget(oldest);
                continue;
            }
            if self.ram.standing_at(place) == Some(Standing::Doubled) {
                self.ram.stand(oldest, Standing::Alone);
                continue;
            }
            let group = oldest / GROUP * GROUP;
            let together = self.ram.together(place, GROUP);
            let together = together.start.max(group)..together.end.min(group + GROUP);
            let leaving: Vec<u64> = together.filter(|&key| !self.is_on_device(key)).collect();
            leaving.iter().for_each(|&key| self.ram.forget(key));
            self.admit(&leaving);
        }
        self.ram.put(key, standing);
    }

    fn is_on_device(&self, key: u64) -> bool {
        self.fresh.contains_key(&key) || self.store.contains(key)
    }

    /// Brings a block that was read from the device into RAM, if it was requested more often than
    /// the one that it displaces.
    fn promote(&mut self, key: u64) {
        let oldest = self.ram.oldest_of(Standing::Doubled);
        let count = |key| self.policy.count(key);
        if self.ram.has_room_for(key) || oldest.is_none_or(|(oldest, _)| count(key) > count(oldest))
        {
            self.put_in_ram(key, Standing::Doubled);
        }
    }

    /// Puts blocks of one group, which are nowhere else now, into the store, or into the journal
    /// unless the store would have no room for them.
    fn admit(&mut self, keys: &[u64]) {
        self.left_ram += 1;
        if !self.left_ram.is_multiple_of(THROUGH_JOURNAL_ONE_IN) {
            let pages = self.offer(keys);
            self.outcome.admitted_bytes += pages * PAGE;
            return;
        }
        let unit = self.unit(keys);
        if !self.store.has_room(unit.pages) && self.victim(unit).is_none() {
            self.leave(keys.iter().copied());
            return;
        }
        for &key in keys {
            let bytes = self.append(key);
            self.outcome.admitted_bytes += bytes;
        }
    }

    /// Appends a block to the journal; returns its bytes there.
    fn append(&mut self, key: u64) -> u64 {
        let bytes = (PAGE as f64 / self.compress) as u64;
        let place = self.journal.append(key, bytes);
        self.fresh.insert(key, place);
        bytes
    }

    /// Blocks of one group as a unit.
    fn unit(&self, keys: &[u64]) -> Unit {
        let group = keys[0] / GROUP * GROUP;
        let blocks = keys.iter().fold(0, |bits, key| bits | 1 << (key - group));
        let bytes = keys.len() as f64 * PAGE as f64 / self.compress;
        Unit { group, blocks, pages: (bytes / PAGE as f64).ceil().max(1.0) as u8 }
    }

    /// Offers blocks of one group, which are nowhere else now, to the store. Returns the pages
    /// written: none if they did not enter.
    fn offer(&mut self, keys: &[u64]) -> u64 {
        let unit = self.unit(keys);
        while !self.store.has_room(unit.pages) {
            let Some(victim) = self.victim(unit) else {
                self.leave(keys.iter().copied());
                return 0;
            };
            let freed = self.store.free(victim);
            self.leave(freed.keys());
        }
        self.store.insert(unit);
        self.log_entries(UNIT_ENTRY_BYTES + keys.len() as u64 * BLOCK_ENTRY_BYTES);
        u64::from(unit.pages)
    }

    /// Forgets the requests for blocks that have left the device, unless they are in RAM.
    fn leave(&mut self, keys: impl Iterator<Item = u64>) {
        for key in keys {
            if self.ram.find(key).is_none() {
                self.touched.remove(&key);
            }
        }
    }

    /// The position of the unit that goes; `None` if it is the one that asks to enter.
    fn victim(&mut self, unit: Unit) -> Option<usize> {
        let units = self.store.units();
        if units == 0 {
            return None;
        }
        let mut candidates = [self.candidate(unit); SAMPLE + 1];
        let mut at = [0; SAMPLE + 1];
        for (candidate, at) in candidates.iter_mut().zip(&mut at).skip(1) {
            *at = self.below(units);
            *candidate = self.candidate(self.store.unit(*at));
        }
        match self.policy.choose_victim(&candidates) {
            0 => None,
            chosen => Some(at[chosen]),
        }
    }

    fn candidate(&self, unit: Unit) -> StoreCandidate {
        let now = self.policy.stamp();
        let known = unit.keys().filter_map(|key| self.touched.get(&key).copied());
        let newest = known.min_by_key(|last| now.wrapping_sub(last.stamp));
        let last = newest.unwrap_or(self.policy.touched(Touch::Read));
        StoreCandidate { first: unit.group, blocks: unit.blocks, last }
    }

    /// A number below `end`, of a fixed sequence.
    fn below(&mut self, end: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((u128::from(self.random) * end as u128) >> 64) as usize
    }

    /// Logs entries of units of the store.
    fn log_entries(&mut self, bytes: u64) {
        self.outcome.mapping_bytes += bytes;
        self.journal.fill(bytes);
    }

    /// Frees segments of the journal until few enough are used, and logs again the share of the
    /// store's entries that were in them.
    fn free_segments(&mut self) {
        while let Some((number, keys)) = self.journal.free_oldest() {
            let units = self.store.units() as u64 * UNIT_ENTRY_BYTES;
            self.log_entries((units + self.store.len() * BLOCK_ENTRY_BYTES) / self.journal.lap());
            let newest = |(at, key): (usize, u64)| {
                let place = (number, u32::try_from(at).expect("a segment has few blocks"));
                (self.fresh.get(&key) == Some(&place)).then_some(key)
            };
            let mut keys: Vec<u64> = keys.into_iter().enumerate().filter_map(newest).collect();
            keys.sort_unstable();
            for key in &keys {
                self.fresh.remove(key);
            }
            for keys in keys.chunk_by(|a, b| a / GROUP == b / GROUP) {
                let pages = self.offer(keys);
                self.outcome.moved_bytes += pages * PAGE;
            }
        }
    }

    fn forget(&mut self, key: u64) {
        if self.touched.remove(&key).is_some() {
            self.ram.forget(key);
            self.fresh.remove(&key);
            self.store.forget(key);
        }
    }
}

impl Requests for StoreSimulator {
    fn streams(&mut self) -> (&mut SequentialDetector, &mut Outcome) {
        (&mut self.detector, &mut self.outcome)
    }

    fn read(&mut self, blocks: BlockRange, bypass: bool) {
        let missed_before = self.outcome.read_blocks_missed;
        for key in blocks.iter() {
            if !bypass {
                self.policy.on_read(key);
            }
            let now = self.policy.touched(Touch::Read);
            if let Some(last) = self.touched.get_mut(&key) {
                *last = now;
                match self.ram.touch(key) {
                    Some(_) => self.outcome.ram_hit_blocks += 1,
                    None if !bypass => self.promote(key),
                    None => {}
                }
                continue;
            }
            self.outcome.read_blocks_missed += 1;
            if !bypass {
                self.enter_ram(key);
            }
        }
        self.outcome.read_blocks += blocks.count;
        self.outcome.read_requests += 1;
        let missed = self.outcome.read_blocks_missed > missed_before;
        self.outcome.read_requests_missed += u64::from(missed);
    }

    fn write(&mut self, blocks: BlockRange, bypass: bool) {
        for key in blocks.iter() {
            let touch = Touch::of(true, self.is_cached(key));
            self.outcome.write_blocks_missed += u64::from(touch == Touch::Written);
            self.forget(key);
            if bypass {
                continue;
            }
            self.policy.on_write(key);
            self.policy.on_enter();
            self.touched.insert(key, self.policy.touched(touch));
            let bytes = self.append(key);
            self.outcome.logged_bytes += bytes;
            self.put_in_ram(key, Standing::Doubled);
            self.free_segments();
        }
        self.outcome.write_blocks += blocks.count;
    }

    fn drop_blocks(&mut self, blocks: BlockRange) {
        if blocks.count > self.touched.len() as u64 {
            let cached = self.touched.keys().copied();
            let keys: Vec<u64> = cached.filter(|&key| blocks.contains(key)).collect();
            keys.into_iter().for_each(|key| self.forget(key));
        } else {
            blocks.iter().for_each(|key| self.forget(key));
        }
    }
}

impl Simulate for StoreSimulator {
    fn take(&mut self, request: &TraceRequest) {
        dispatch(self, request);
        self.free_segments();
    }

    fn outcome(&self) -> Outcome {
        let entries = self.store.len() + self.fresh.len() as u64;
        let live = entries as f64 / self.compress / self.device_blocks as f64;
        Outcome { entries, live_share: live, ..self.outcome }
    }
}
