//! The RAM tier: the newest bytes of recent blocks. Blocks that the cache device has too go much
//! earlier than others ([`Recent`]).
//!
//! The bytes in it are always the newest applied version of a block, dirty or clean, so a reader
//! need not check the index. Its size is fixed; zero is allowed.
//!
//! Its frames of 4 KiB are of two kinds. Most recent blocks are *raw*, one per frame; the frame is
//! their place in [`Recent`]. To make room, the least recent raw block, the *victim*, is
//! compressed, if that is worth it, into the frames of [`Packed`]; a hit brings it back. A block is
//! in at most one of the two, so no older version of it stays behind. [`Split`] decides how many
//! frames each kind gets.
//!
//! Compression has a CPU budget. When it is spent, victims are dropped without compression, and a
//! hit in the compressed part is decoded but left where it is.

use std::ops::Range;
use std::time::Duration;

use forebay_block::{BLOCK_SIZE, Instant, prefetch};
use forebay_codec::Compressor;
use forebay_policy::{Recent, Standing, Window};

use crate::api::stats::Stats;
use crate::key::Key;
use crate::locks::Locks;
use crate::pace::Pace;
use crate::ram::packed::{PACKED_MAX, Packed};
use crate::ram::split::Split;
use crate::tries::Tries;

mod alone;
mod packed;
mod split;
mod walk;

pub use alone::{Alone, Round};
pub use walk::Walk;

/// CPU time for compressing a victim, or for bringing a block back.
const COST: Duration = Duration::from_micros(5);
/// The CPU budget for compression: one part in this many of a CPU.
const SHARE: u32 = 10;
/// Burst allowance of that budget.
const AHEAD: Duration = Duration::from_millis(100);
/// Cap per turn of the event loop, because clients wait for the turn.
const TURN: Duration = Duration::from_micros(160);

/// Bytes of a processor's cache line.
const CACHE_LINE: usize = 64;
/// Length of the part of a block that [`Ram::warm`] prefetches.
const WARM_BYTES: usize = 8 * CACHE_LINE;

/// Recent blocks of one shard.
pub struct Ram {
    recent: Recent,
    /// State of the blocks that are in RAM but not in the log.
    alone: Alone,
    window: Window,
    packed: Packed,
    split: Split,
    /// The frames. A raw block's frame has the number of its place.
    bytes: Vec<u8>,
    now: Instant,
    pace: Pace,
    tries: Tries,
    compressor: Compressor,
    /// Buffers for a victim's payload and for a decoded block.
    payload: Box<[u8; BLOCK_SIZE]>,
    decoded: Box<[u8; BLOCK_SIZE]>,
    /// For the statistics: hits in the compressed part, victims compressed, and victims dropped
    /// because the budget was spent.
    hits: u64,
    tried: u64,
    refused: u64,
}

impl Ram {
    /// State of the blocks that are in RAM but not in the log.
    pub fn alone(&mut self) -> &mut Alone {
        &mut self.alone
    }

    /// Whether a round should look for blocks that are in RAM but not in the log.
    pub fn has_alone(&self) -> bool {
        self.alone.is_due()
    }

    /// Whether the current round should have come further by now.
    pub fn is_round_late(&self) -> bool {
        self.alone.is_late()
    }

    /// Room for `bytes / 4096` blocks, or for more with `compress`.
    pub fn new(bytes: u64, compress: bool) -> Self {
        let frames = usize::try_from(bytes).expect("the RAM tier fits memory") / BLOCK_SIZE;
        Self {
            recent: Recent::new(frames),
            alone: Alone::default(),
            window: Window::default(),
            packed: Packed::default(),
            split: Split::new(frames, compress),
            bytes: vec![0; frames * BLOCK_SIZE],
            now: Instant(0),
            pace: Pace::new(SHARE, AHEAD, TURN),
            tries: Tries::default(),
            compressor: Compressor::new(),
            payload: Box::new([0; BLOCK_SIZE]),
            decoded: Box::new([0; BLOCK_SIZE]),
            hits: 0,
            tried: 0,
            refused: 0,
        }
    }

    /// Begins a turn of the event loop, which has its own cap on CPU time.
    pub fn begin_turn(&mut self, now: Instant) {
        self.now = now;
        self.pace.begin_turn();
    }

    /// Fills in the statistics of the RAM tier.
    pub fn report(&self, stats: &mut Stats) {
        let bytes = |frames: usize| (frames * BLOCK_SIZE) as u64;
        stats.ram_blocks = (self.recent.len() + self.packed.len()) as u64;
        stats.ram_bytes = bytes(self.recent.len() + self.packed.frames());
        stats.ram_compressed_blocks = self.packed.len() as u64;
        stats.ram_compressed_bytes = bytes(self.packed.frames());
        stats.ram_compressed_hit_blocks = self.hits;
        stats.ram_compression_tries = self.tried;
        stats.ram_compression_refusals = self.refused;
    }

    /// The place of a raw block, for [`Ram::warm`].
    pub fn find(&self, key: Key) -> Option<u32> {
        self.recent.find(key.0)
    }

    /// Prefetches the memory that [`Ram::get`] needs for a place: the numbers of its neighbors, and
    /// the start of its bytes, from which the processor prefetches by itself.
    pub fn warm(&self, place: u32) {
        self.recent.warm(place);
        let start = &self.bytes[range(place)][..WARM_BYTES];
        start.iter().step_by(CACHE_LINE).for_each(prefetch);
    }

    /// Prefetches the neighbors of a place, after [`Ram::warm`] of that place.
    pub fn warm_neighbours(&self, place: u32) {
        self.recent.warm_neighbours(place);
    }

    /// Number of frames, used or not.
    pub fn frames(&self) -> usize {
        self.bytes.len() / BLOCK_SIZE
    }

    /// Whether a block can be put into RAM without another one losing its raw place.
    pub fn has_room_for(&self, key: Key) -> bool {
        self.recent.has_room_for(key.0)
    }

    /// The blocks to decide about before a raw block loses its place: see [`Window::leaving`].
    pub fn leaving(&mut self, alone: impl Fn(u64) -> bool) -> Range<u64> {
        self.window.leaving(&mut self.recent, alone)
    }

    /// The raw blocks. They include bases, under keys beyond those of blocks.
    pub fn recent(&self) -> &Recent {
        &self.recent
    }

    /// Whether RAM has a block.
    pub fn contains(&self, key: Key) -> bool {
        self.recent.find(key.0).is_some() || self.packed.contains(key)
    }

    /// The raw block that loses its place next, if it was read since it got its bytes.
    pub fn oldest_read(&self) -> Option<Key> {
        let (key, place) = self.recent.oldest()?;
        self.recent.is_touched(place).then_some(Key(key))
    }

    /// The bytes of a block, which becomes the most recent.
    pub fn get(&mut self, key: Key) -> Option<&[u8]> {
        match self.recent.touch(key.0) {
            Some(place) => Some(&self.bytes[range(place)]),
            None => self.get_packed(key),
        }
    }

    /// The bytes of a compressed block, which becomes a raw one if the budget allows.
    #[inline(never)]
    fn get_packed(&mut self, key: Key) -> Option<&[u8]> {
        let age = self.packed.get(&self.bytes, key, &mut self.decoded)?;
        self.hits += 1;
        self.split.note_hit(age);
        if self.may_compress() {
            self.packed.forget(key);
            self.make_room();
            let place = self.recent.put(key.0, Standing::Doubled);
            let place = place.expect("a tier that compresses has raw places");
            self.bytes[range(place)].copy_from_slice(&self.decoded[..]);
            self.recent.set_touched(place, true);
        }
        Some(&self.decoded[..])
    }

    /// Applies `look` to a block's newest applied bytes, if RAM has them. While the block is
    /// locked, RAM may have a version that is not in the log yet.
    pub fn peek_applied<T>(
        &self,
        locks: &Locks,
        key: Key,
        look: impl FnOnce(&[u8]) -> T,
    ) -> Option<T> {
        if locks.is_locked(key) { None } else { self.peek(key, look) }
    }

    /// Applies `look` to a block's bytes; the block does not become more recent.
    pub fn peek<T>(&self, key: Key, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        if let Some(place) = self.recent.find(key.0) {
            return Some(look(&self.bytes[range(place)]));
        }
        if !self.packed.contains(key) {
            return None;
        }
        let mut room = [0; BLOCK_SIZE];
        self.packed.get(&self.bytes, key, &mut room).map(|_| look(&room))
    }

    /// Stores the newest bytes of a block of this standing; if RAM is full, evicts another one.
    pub fn put(&mut self, key: Key, block: &[u8], standing: Standing) {
        assert_eq!(block.len(), BLOCK_SIZE, "the RAM tier holds whole blocks");
        let place = self.recent.stand(key.0, standing).or_else(|| {
            self.packed.forget(key);
            self.make_room();
            self.recent.put(key.0, standing)
        });
        if let Some(place) = place {
            self.recent.set_touched(place, false);
            self.bytes[range(place)].copy_from_slice(block);
        }
    }

    /// Notes that the cache device has a block, too.
    pub fn note_doubled(&mut self, key: Key) {
        self.recent.stand(key.0, Standing::Doubled);
    }

    /// Moves a block's bytes to another key, replacing the bytes of that key.
    pub fn rename(&mut self, from: Key, to: Key) {
        self.packed.forget(to);
        self.recent.rename(from.0, to.0);
        self.packed.rename(from, to);
    }

    /// Removes a block.
    pub fn remove(&mut self, key: Key) {
        self.recent.forget(key.0);
        self.packed.forget(key);
    }

    /// Frees a place for a raw block: by taking a frame from the compressed part if that has more
    /// than its share, else by evicting victims. At most one frame changes parts.
    fn make_room(&mut self) {
        if !self.recent.is_full() {
            return;
        }
        if self.packed.frames() > self.split.share()
            && let Some(frame) = self.packed.drop_frame()
        {
            return self.recent.take_back(frame);
        }
        let mut grows = self.packed.frames() < self.split.share();
        while self.recent.is_full()
            && let Some((victim, place)) = self.recent.oldest()
        {
            let len = self.compress(place);
            self.recent.forget(victim);
            let kept = len.is_some_and(|len| self.keep(Key(victim), len, &mut grows));
            self.split.note_victim(kept, self.packed.len(), self.packed.frames());
        }
    }

    fn may_compress(&self) -> bool {
        !self.pace.turn_is_over() && self.pace.is_due(self.now)
    }

    /// Compresses a victim into `payload`, if that is worth it; returns the length.
    fn compress(&mut self, place: u32) -> Option<usize> {
        if !self.split.wants_next() {
            return None;
        }
        if !self.may_compress() {
            self.refused += 1;
            return None;
        }
        if !self.tries.is_due() {
            return None;
        }
        self.pace.charge(self.now, COST);
        self.tried += 1;
        self.split.note_try();
        let len = self.compressor.compress(&self.bytes[range(place)], &mut self.payload[..]);
        let len = len.filter(|&len| len <= PACKED_MAX);
        self.tries.note(len.is_some());
        len
    }

    /// Puts a victim's payload of `len` bytes into the compressed part. If it does not fit, the
    /// part gets one free frame if it `grows`, else reuses its oldest frame. Returns false if there
    /// is no frame to spare.
    fn keep(&mut self, victim: Key, len: usize, grows: &mut bool) -> bool {
        while !self.packed.fits(len) {
            let frame = match std::mem::take(grows) {
                true => self.recent.lend(),
                false => self.packed.drop_frame(),
            };
            let Some(frame) = frame else { return false };
            self.packed.add_frame(frame);
        }
        self.packed.append(&mut self.bytes, victim, &self.payload[..len]);
        true
    }
}

fn range(place: u32) -> std::ops::Range<usize> {
    let start = place as usize * BLOCK_SIZE;
    start..start + BLOCK_SIZE
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_block::testing::Numbers;

    fn block(n: u8) -> Vec<u8> {
        vec![n; BLOCK_SIZE]
    }

    #[test]
    fn the_least_recent_goes_first() {
        let mut ram = Ram::new(3 * BLOCK_SIZE as u64, true);
        for n in 0..3 {
            ram.put(Key(n), &block(n as u8), Standing::Alone);
        }
        assert_eq!(ram.get(Key(0)), Some(&block(0)[..]));
        ram.put(Key(3), &block(3), Standing::Alone);
        assert!(!ram.contains(Key(1)));
        ram.put(Key(2), &block(9), Standing::Alone);
        ram.remove(Key(3));
        ram.put(Key(4), &block(4), Standing::Alone);
        ram.put(Key(5), &block(5), Standing::Alone);
        assert!(!ram.contains(Key(0)));
        assert_eq!(ram.peek(Key(2), <[u8]>::to_vec), Some(block(9)));
        assert_eq!(ram.recent.len(), 3);
    }

    #[test]
    fn the_oldest_counts_as_read_since_its_bytes_came() {
        let mut ram = Ram::new(2 * BLOCK_SIZE as u64, false);
        ram.put(Key(0), &block(0), Standing::Alone);
        ram.put(Key(1), &block(1), Standing::Alone);
        assert_eq!(ram.oldest_read(), None);
        // It is read, then the other one is: the first is the oldest again.
        assert!(ram.get(Key(0)).is_some() && ram.get(Key(1)).is_some());
        assert_eq!(ram.oldest_read(), Some(Key(0)));
        // New bytes, or another block in its place.
        ram.put(Key(0), &block(2), Standing::Alone);
        ram.put(Key(1), &block(3), Standing::Alone);
        assert_eq!(ram.oldest_read(), None);
        assert!(ram.get(Key(0)).is_some());
        ram.put(Key(2), &block(4), Standing::Alone);
        assert_eq!(ram.oldest_read(), Some(Key(0)), "the block 1 has left");
        ram.put(Key(3), &block(5), Standing::Alone);
        assert_eq!(ram.oldest_read(), None);
    }

    #[test]
    fn looking_ahead_makes_nothing_recent() {
        let mut ram = Ram::new(2 * BLOCK_SIZE as u64, true);
        ram.put(Key(0), &block(0), Standing::Alone);
        ram.put(Key(1), &block(1), Standing::Alone);
        let slots = [0, 1].map(|n| ram.find(Key(n)).unwrap());
        slots.iter().rev().for_each(|&slot| ram.warm(slot));
        slots.iter().rev().for_each(|&slot| ram.warm_neighbours(slot));
        ram.put(Key(2), &block(2), Standing::Alone);
        assert_eq!((ram.find(Key(0)), ram.find(Key(1))), (None, Some(slots[1])));
    }

    #[test]
    fn no_room_is_no_error() {
        let mut ram = Ram::new(100, true);
        ram.put(Key(1), &block(1), Standing::Alone);
        assert_eq!(ram.get(Key(1)), None);
        assert!(!ram.contains(Key(1)));
    }

    const FRAME: u64 = BLOCK_SIZE as u64;

    /// A number below `bound`, lower ones more often.
    fn skewed(numbers: &mut Numbers, bound: u64) -> u64 {
        let rank = (0..3).fold(bound, |rank, _| numbers.below(rank + 1));
        rank.min(bound - 1)
    }

    /// A version of a block whose first `random` bytes are incompressible.
    fn version(key: u64, version: u64, random: usize) -> Vec<u8> {
        let mut numbers = Numbers::new(key << 32 | version);
        let mut bytes: Vec<u8> = (0..random).map(|_| numbers.below(256) as u8).collect();
        bytes.resize(BLOCK_SIZE - 16, version as u8);
        bytes.extend(key.to_le_bytes().into_iter().chain(version.to_le_bytes()));
        bytes
    }

    /// A RAM tier next to a plain map of the newest versions, and the order in which blocks were
    /// used.
    struct Beside {
        ram: Ram,
        newest: std::collections::BTreeMap<u64, Vec<u8>>,
        recent: Vec<u64>,
        versions: u64,
        turns: u64,
        /// Whether some blocks are in RAM alone.
        mixed: bool,
    }

    impl Beside {
        fn used(&mut self, key: u64) {
            self.recent.retain(|&other| other != key);
            self.recent.insert(0, key);
        }

        fn step(&mut self, numbers: &mut Numbers, keys: u64) {
            let key = skewed(numbers, keys);
            match numbers.below(20) {
                0..6 => self.put(key, numbers),
                6 => {
                    self.ram.remove(Key(key));
                    self.newest.remove(&key);
                    self.recent.retain(|&other| other != key);
                }
                7 => self.rename(key, [key | 1 << 63, key / 2][key as usize % 2]),
                8 => {
                    let found = self.ram.peek(Key(key), <[u8]>::to_vec);
                    assert!(found.is_none() || found.as_ref() == self.newest.get(&key));
                }
                _ => {
                    let found = self.ram.get(Key(key)).map(<[u8]>::to_vec);
                    match found {
                        Some(bytes) => assert_eq!(Some(&bytes), self.newest.get(&key)),
                        None => self.put(key, numbers),
                    }
                    self.used(key);
                }
            }
            self.turns += 1;
            self.ram.begin_turn(Instant(self.turns * 100_000));
        }

        fn put(&mut self, key: u64, numbers: &mut Numbers) {
            self.versions += 1;
            // A third each: hardly any payload, payloads that fit two or three to a frame,
            // incompressible.
            let random = [10, 1000 + numbers.below(2000) as usize, 4000][key as usize % 3];
            let bytes = version(key, self.versions, random);
            let alone = self.mixed && numbers.below(2) == 0;
            let standing = if alone { Standing::Alone } else { Standing::Doubled };
            self.ram.put(Key(key), &bytes, standing);
            self.newest.insert(key, bytes);
            self.used(key);
        }

        fn rename(&mut self, from: u64, to: u64) {
            if from == to || !self.ram.contains(Key(from)) {
                return;
            }
            self.ram.rename(Key(from), Key(to));
            let bytes = self.newest.remove(&from).expect("what is in the tier was put");
            self.newest.insert(to, bytes);
            self.recent.retain(|&other| other != to);
            let at = self.recent.iter().position(|&other| other == from);
            self.recent[at.expect("what is in the tier was used")] = to;
        }

        /// Checks that every block in RAM is the newest version, in one part only, and that the
        /// most recent quarter is there unless blocks of one standing had to go for others.
        fn check(&self, frames: usize) {
            let mut held = 0;
            for (&key, bytes) in &self.newest {
                let found = self.ram.peek(Key(key), |found| found == bytes);
                assert!(found != Some(false), "block {key} is not the newest");
                let both =
                    self.ram.recent.find(key).is_some() && self.ram.packed.contains(Key(key));
                assert!(!both, "block {key} is in both parts");
                held += usize::from(found.is_some());
            }
            assert_eq!(held, self.ram.recent.len() + self.ram.packed.len(), "and nothing else");
            assert!(self.ram.recent.len() + self.ram.packed.frames() <= frames);
            let recent = if self.mixed { 0 } else { frames / 4 };
            for &key in self.recent.iter().take(recent) {
                assert!(self.ram.contains(Key(key)), "block {key} was used just now");
            }
        }
    }

    #[test]
    fn whatever_is_done_it_holds_the_newest_versions() {
        let mixed = [(8, 40, 1), (17, 60, 3), (64, 300, 4)].map(|setup| (setup, true));
        let setups =
            [(8, 40, 1), (9, 30, 2), (17, 60, 3), (64, 300, 4)].map(|setup| (setup, false));
        for ((frames, keys, seed), mixed) in setups.into_iter().chain(mixed) {
            let mut numbers = Numbers::new(seed);
            let ram = Ram::new(frames as u64 * FRAME, true);
            let newest = Default::default();
            let (recent, versions, turns) = (Vec::new(), 0, 0);
            let mut beside = Beside { ram, newest, recent, versions, turns, mixed };
            let mut shares = std::collections::BTreeSet::new();
            for step in 0..30_000 {
                // In turns, many more blocks are requested than fit, and then fewer.
                let keys = if step / 5000 % 2 == 0 { keys } else { frames as u64 * 6 / 5 };
                beside.step(&mut numbers, keys);
                shares.insert(beside.ram.split.share());
                if step % 16 == 0 {
                    beside.check(frames);
                }
            }
            let ram = &beside.ram;
            assert!(ram.hits > 200, "{frames} frames: {} hits", ram.hits);
            assert!(shares.len() > 1, "{frames} frames: always {shares:?}");
        }
    }

    #[test]
    fn when_time_is_spent_blocks_stay_where_they_are() {
        let mut ram = Ram::new(256 * FRAME, true);
        let put = |ram: &mut Ram, key| ram.put(Key(key), &version(key, 1, 500), Standing::Alone);
        (0..300).for_each(|key| put(&mut ram, key));
        let (tried, refused) = (ram.tried, ram.refused);
        assert!(tried == (TURN.as_nanos() / COST.as_nanos()) as u64 && refused > 0);
        let packed = (0..300).find(|&key| ram.packed.contains(Key(key))).expect("some are");
        for _ in 0..3 {
            assert_eq!(ram.get(Key(packed)), Some(&version(packed, 1, 500)[..]));
            assert!(ram.packed.contains(Key(packed)));
        }
        put(&mut ram, 300);
        assert_eq!((ram.tried, ram.refused), (tried, refused + 1));
        ram.begin_turn(Instant(1));
        assert_eq!(ram.get(Key(packed)), Some(&version(packed, 1, 500)[..]));
        assert!(!ram.packed.contains(Key(packed)) && ram.contains(Key(packed)));
    }

    /// Hits per hundred lookups of a skewed load at 32,000 lookups per second, over eight times as
    /// many blocks as there are frames. `compressible` percent of the blocks compress to a third.
    fn hit_percent(compress: bool, compressible: u64) -> f64 {
        const FRAMES: u64 = 1024;
        let mut ram = Ram::new(FRAMES * FRAME, compress);
        let mut numbers = Numbers::new(7);
        let (warm, all) = (60_000, 120_000);
        let mut hits = 0;
        for i in 0..all {
            let key = skewed(&mut numbers, 8 * FRAMES);
            let found = ram.get(Key(key)).is_some();
            hits += u64::from(found && i >= warm);
            if !found {
                let random = if key * 37 % 100 < compressible { 1300 } else { 4000 };
                ram.put(Key(key), &version(key, 1, random), Standing::Alone);
            }
            if i % 32 == 0 {
                ram.begin_turn(Instant(i * 31_250));
            }
        }
        let percent = hits as f64 * 100.0 / (all - warm) as f64;
        let held = (ram.recent.len() + ram.packed.len()) as f64 / FRAMES as f64;
        println!(
            "compress {compress}, {compressible} % compressible: {percent:.1} % hits, {held:.2} \
             blocks a frame, {} of {FRAMES} frames compressed, {} hits there, {} tries, {} \
             refused",
            ram.packed.frames(),
            ram.hits,
            ram.tried,
            ram.refused
        );
        percent
    }

    #[test]
    fn what_compresses_is_hit_more_often_and_nothing_much_less() {
        for compressible in [100, 50, 10, 0] {
            let (without, with) =
                (hit_percent(false, compressible), hit_percent(true, compressible));
            let gain = [(100, 5.0), (50, 1.0)].iter().find(|&&(share, _)| share == compressible);
            assert!(with - without > gain.map_or(-1.0, |&(_, gain)| gain), "{without} and {with}");
        }
    }
}
