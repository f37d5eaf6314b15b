//! Eviction and admission for a cache that can free any of its blocks: of a random sample the least
//! valued goes, and the rule for that is the one that missed least in small shadow caches.
//!
//! The owner tells every request ([`Adaptive::on_read`], [`Adaptive::on_write`]), keeps for each
//! block the stamp of its last request ([`Adaptive::stamp`]), and asks which of a sample goes
//! ([`Adaptive::choose_victim`]). Only reads count as requests and as misses: a write brings its
//! data along, so having had the block saves nothing; and reads that all shadows miss tell nothing
//! about them. A shadow takes over only if it misses fewer by more than chance would explain; else
//! the rule would change with noise, and each change costs misses.

use std::hash::Hasher;

use crate::counts::{Counts, GROUP};
use crate::learned::{LastTouch, Touch};
use crate::recent::KeyHasher;
use crate::rule::{Rule, SAMPLE_MAX, Traits};
use crate::shadow::{Asked, SHADOWS, Shadows};

/// Blocks of the cache for each place of a shadow.
const BLOCKS_PER_PLACE: u64 = 512;
/// Fewest places of a shadow, if the cache has as many, and most.
const PLACES_MIN: u64 = 1024;
const PLACES_MAX: u64 = 16384;
/// Stamps in the time that the cache is filled once.
const STAMPS_PER_FILL: u64 = 16;
/// Requests are stamped in units of which one fill of the cache takes fewer than 2 to this power
/// plus 1. So a stamp of 32 bits wraps around after 128 fills or more.
const FILL_BITS_MAX: u32 = 24;
/// Reads between two comparisons of the shadows, for each of their places.
const COMPARED_AFTER: f32 = 1.0 / 16.0;
/// Share of the misses that is forgotten at a comparison.
const FORGOTTEN: f32 = 0.0019;
/// A shadow takes over if it missed fewer reads than the current one, by more than this multiple of
/// the square root of the current one's misses.
const MARGIN: f32 = 0.15;

/// A cached block, or several that are freed together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreCandidate {
    /// The key of its first block; unique across volumes.
    pub first: u64,
    /// A bit for each of this block and the three after it that is meant.
    pub blocks: u8,
    /// The last request for one of them.
    pub last: LastTouch,
}

/// The policy.
#[derive(Clone, Debug)]
pub struct Adaptive {
    counts: Counts,
    shadows: Shadows,
    /// A block is sampled if its hash is below this.
    sampled_below: u64,
    places: u64,
    /// Recent misses of each shadow.
    missed: [f32; SHADOWS],
    reads: u64,
    current: usize,
    fixed: bool,
    /// The clock: blocks that entered.
    entered: u64,
    /// Bits of the clock that are left out of the times of requests.
    coarse: u32,
    /// Blocks that entered since the last stamp.
    entered_since: u64,
    stamp_after: u64,
    stamp: u8,
}

impl Adaptive {
    /// Most candidates for [`Adaptive::choose_victim`].
    pub const CANDIDATES_MAX: usize = SAMPLE_MAX;

    /// A policy for a cache of `blocks` blocks.
    #[must_use]
    pub fn new(blocks: u64) -> Self {
        let blocks = blocks.max(1);
        let places = (blocks / BLOCKS_PER_PLACE).clamp(PLACES_MIN, PLACES_MAX).min(blocks);
        let share = u128::from(places) << 64;
        let coarse = blocks.ilog2().saturating_sub(FILL_BITS_MAX);
        Self {
            counts: Counts::new(blocks),
            shadows: Shadows::new(
                usize::try_from(places).expect("at most PLACES_MAX"),
                blocks >> coarse,
            ),
            sampled_below: u64::try_from(share / u128::from(blocks)).unwrap_or(u64::MAX),
            places,
            missed: [0.0; SHADOWS],
            reads: 0,
            current: Rule::RECENCY,
            fixed: false,
            entered: 0,
            coarse,
            entered_since: 0,
            stamp_after: blocks.div_ceil(STAMPS_PER_FILL),
            stamp: 0,
        }
    }

    /// The same with one rule for ever: least recently used.
    #[must_use]
    pub fn recency(blocks: u64) -> Self {
        Self { fixed: true, current: Rule::RECENCY, ..Self::new(blocks) }
    }

    /// The same with one rule for ever: least frequently used.
    #[must_use]
    pub fn frequency(blocks: u64) -> Self {
        Self { fixed: true, current: Rule::FREQUENCY, ..Self::new(blocks) }
    }

    /// A client reads a block, cached or not.
    pub fn on_read(&mut self, key: u64) {
        if self.fixed || !self.is_sampled(key) {
            self.counts.count(key);
            return;
        }
        let asked = Asked { key, is_write: false, at: self.clock() };
        self.shadows.learn(asked, |key| self.counts.of(key));
        self.counts.count(key);
        let held = self.shadows.ask(asked, |key| self.counts.of(key));
        // A read that all miss tells nothing about them, and most reads may be first ones.
        if held.contains(&true) {
            for (missed, held) in self.missed.iter_mut().zip(held) {
                *missed += f32::from(u8::from(!held));
            }
        }
        self.reads += 1;
        if self.reads as f32 >= COMPARED_AFTER * self.places as f32 {
            self.reads = 0;
            self.compare();
        }
    }

    /// A client writes a block.
    pub fn on_write(&mut self, key: u64) {
        if !self.fixed && self.is_sampled(key) {
            let asked = Asked { key, is_write: true, at: self.clock() };
            self.shadows.learn(asked, |key| self.counts.of(key));
            self.shadows.ask(asked, |key| self.counts.of(key));
        }
    }

    /// Prefetches the memory that a request for a block will access.
    pub fn warm(&self, key: u64) {
        self.counts.warm(key);
    }

    /// How often a block was read recently.
    #[must_use]
    pub fn count(&self, key: u64) -> u8 {
        self.counts.of(key)
    }

    /// A request of this kind that happens now.
    #[must_use]
    pub fn touched(&self, touch: Touch) -> LastTouch {
        LastTouch { stamp: self.stamp, touch }
    }

    /// The stamp for a block that is requested now. Stamps wrap around.
    #[must_use]
    pub fn stamp(&self) -> u8 {
        self.stamp
    }

    /// A block entered the cache: the policy's clock.
    pub fn on_enter(&mut self) {
        self.entered = self.entered.wrapping_add(1);
        self.entered_since += 1;
        if self.entered_since >= self.stamp_after {
            self.entered_since = 0;
            self.stamp = self.stamp.wrapping_add(1);
        }
    }

    /// Which of the blocks goes. A block that asks to enter is a candidate like the others: if it
    /// is chosen, it does not enter.
    ///
    /// # Panics
    /// If there is none, or more than [`Adaptive::CANDIDATES_MAX`].
    #[must_use]
    pub fn choose_victim(&self, candidates: &[StoreCandidate]) -> usize {
        let mut sample = [Traits::default(); SAMPLE_MAX];
        for (traits, candidate) in sample.iter_mut().zip(candidates) {
            *traits = self.traits(candidate);
        }
        let sample = &sample[..candidates.len()];
        Rule::ALL[self.current].victim(sample, self.shadows.learned())
    }

    fn traits(&self, candidate: &StoreCandidate) -> Traits {
        let blocks = (0..GROUP).filter(|at| candidate.blocks >> at & 1 == 1);
        let counts = blocks.map(|at| u32::from(self.counts.of(candidate.first + at)));
        let (sum, blocks) = counts.fold((0, 0), |(sum, blocks), count| (sum + count, blocks + 1));
        let age = self.stamp.wrapping_sub(candidate.last.stamp);
        // Requests have a stamp's time to happen in, or what has passed of it.
        let span = if age == 0 { self.entered_since } else { self.stamp_after };
        let time = u64::from(age) * self.stamp_after + self.entered_since - span / 2;
        Traits {
            age: u32::from(age),
            time: u32::try_from(time >> self.coarse).unwrap_or(u32::MAX),
            count: sum.div_ceil(blocks.max(1)) as u8,
            touch: candidate.last.touch,
        }
    }

    /// The time of a request that happens now. Wraps around, after more fills of the cache than
    /// ages are told apart.
    fn clock(&self) -> u32 {
        (self.entered >> self.coarse) as u32
    }

    fn is_sampled(&self, key: u64) -> bool {
        let mut hasher = KeyHasher::default();
        hasher.write_u64(key / GROUP);
        hasher.finish() <= self.sampled_below
    }

    /// Lets the rule that missed least take over.
    fn compare(&mut self) {
        let missed = |&shadow: &usize| self.missed[shadow];
        let best = (0..SHADOWS).min_by(|a, b| missed(a).total_cmp(&missed(b)));
        let best = best.unwrap_or(Rule::RECENCY);
        let current = self.missed[self.current];
        if current - self.missed[best] > MARGIN * current.sqrt() {
            self.current = best;
        }
        self.missed.iter_mut().for_each(|missed| *missed *= 1.0 - FORGOTTEN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: u64 = 600;

    /// A cache of single blocks that frees one of a sample.
    struct Cache {
        policy: Adaptive,
        blocks: Vec<StoreCandidate>,
        random: u64,
    }

    impl Cache {
        fn new(policy: Adaptive) -> Self {
            Self { policy, blocks: Vec::new(), random: 1 }
        }

        fn read(&mut self, key: u64) -> bool {
            self.policy.on_read(key);
            self.request(key, false)
        }

        fn write(&mut self, key: u64) {
            self.policy.on_write(key);
            self.request(key, true);
        }

        fn request(&mut self, key: u64, is_write: bool) -> bool {
            let known = self.blocks.iter().any(|known| known.first == key / GROUP * GROUP);
            let last = self.policy.touched(Touch::of(is_write, known));
            // One block of each group, so that a group is known by its block.
            let new =
                StoreCandidate { first: key / GROUP * GROUP, blocks: 1 << (key % GROUP), last };
            let same = |known: &&mut StoreCandidate| known.first == new.first;
            if let Some(known) = self.blocks.iter_mut().find(same) {
                known.last = last;
                return true;
            }
            self.policy.on_enter();
            let mut sample = vec![new];
            let mut at = vec![self.blocks.len()];
            while self.blocks.len() as u64 == BLOCKS && sample.len() < 20 {
                self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let next = (self.random >> 33) as usize % self.blocks.len();
                sample.push(self.blocks[next]);
                at.push(next);
            }
            if sample.len() == 1 {
                self.blocks.push(new);
            } else if let Some(freed) = self.blocks.get_mut(at[self.policy.choose_victim(&sample)])
            {
                *freed = new;
            }
            false
        }

        fn hits(&mut self, keys: impl Iterator<Item = u64>) -> usize {
            keys.filter(|&key| self.read(key * GROUP)).count()
        }
    }

    #[test]
    fn it_becomes_what_the_load_wants() {
        let looped = || (0..12_000).map(|at| at % 900);
        let shifting = || (0..24_000).map(|at| 10_000 + at / 2400 * 500 + at % 500);
        let both = |policy| {
            let mut cache = Cache::new(policy);
            (cache.hits(looped()), cache.hits(shifting()))
        };
        let recency = both(Adaptive::recency(BLOCKS));
        let frequency = both(Adaptive::frequency(BLOCKS));
        let adaptive = both(Adaptive::new(BLOCKS));
        assert!(recency.0 < 1500 && frequency.0 > 5000, "{recency:?} {frequency:?}");
        assert!(recency.1 > 18_000 && frequency.1 < 14_000, "{recency:?} {frequency:?}");
        assert!(adaptive.0 > 4500 && adaptive.1 > 15_000, "{adaptive:?}");
    }

    #[test]
    fn first_reads_do_not_hide_the_better_rule() {
        // One read in 300 is of one of 8 blocks, the others are of blocks that never come again.
        let keys = || (0..90_000).map(|at| if at % 300 == 0 { at / 300 % 8 } else { 100 + at });
        let hits = |policy| Cache::new(policy).hits(keys());
        let (recency, adaptive) = (hits(Adaptive::recency(BLOCKS)), hits(Adaptive::new(BLOCKS)));
        assert!(recency == 0 && adaptive > 200, "{recency} {adaptive}");
    }

    #[test]
    fn it_learns_what_is_written_and_never_read() {
        let requests = || {
            let page = |at: u64| 4 * (at / 4 % 1000);
            // Three of four requests write a journal.
            (0..60_000)
                .map(move |at| (at % 4 > 0, if at % 4 > 0 { 1 << 20 | at } else { page(at) }))
        };
        let hits = |policy| {
            let mut cache = Cache::new(policy);
            let hit = |&(is_write, key): &(bool, u64)| match is_write {
                true => {
                    cache.write(key * GROUP);
                    false
                }
                false => cache.read(key * GROUP),
            };
            requests().filter(hit).count()
        };
        let (recency, adaptive) = (hits(Adaptive::recency(BLOCKS)), hits(Adaptive::new(BLOCKS)));
        assert!(recency < 100 && adaptive > 5000, "{recency} {adaptive}");
    }

    #[test]
    fn a_block_that_asks_to_enter_may_be_refused() {
        let mut policy = Adaptive::frequency(BLOCKS);
        (0..3).for_each(|_| policy.on_read(8));
        policy.on_read(100);
        let last = policy.touched(Touch::Read);
        let block = |first, blocks| StoreCandidate { first, blocks, last };
        assert_eq!(policy.choose_victim(&[block(100, 1), block(8, 1)]), 0);
        assert_eq!(policy.choose_victim(&[block(8, 1), block(100, 1)]), 1);
        // The mean of a unit counts, rounded up: its other blocks were never read.
        assert_eq!(policy.traits(&block(8, 0b1111)).count, 1);
        assert_eq!(policy.traits(&block(8, 0b0011)).count, 2);
    }

    #[test]
    fn writes_are_no_requests_and_stamps_follow_what_enters() {
        let mut policy = Adaptive::recency(6400);
        (0..10).for_each(|_| policy.on_write(8));
        let old = StoreCandidate { first: 8, blocks: 1, last: policy.touched(Touch::Read) };
        assert_eq!(policy.traits(&old), Traits::default());
        (0..250 * 400).for_each(|_| policy.on_enter());
        assert_eq!(policy.traits(&old).age, 250);
        let new = StoreCandidate { last: policy.touched(Touch::Read), ..old };
        assert_eq!(policy.choose_victim(&[new, old, new]), 1);
    }

    /// Shards of 4 GiB to 16 TiB. The clock of one of 4 TiB wrapped around after 4 fills.
    #[test]
    fn a_block_grows_old_in_a_cache_of_any_size() {
        let reference = Shadows::new(1, 1 << 20);
        for bits in [20, 24, 25, 30, 32] {
            let blocks = 1u64 << bits;
            let small = Adaptive::new(1024);
            let coarse = (bits as u32).saturating_sub(FILL_BITS_MAX);
            let shadows = Shadows::new(1024, blocks >> coarse);
            let stamp_after = blocks / STAMPS_PER_FILL;
            let mut policy = Adaptive { coarse, shadows, stamp_after, ..small };
            let last = policy.touched(Touch::Read);
            let old = StoreCandidate { first: 8, blocks: 1, last };
            let began = policy.clock();
            for fills in [1, 3, 8, 15, 60, 127] {
                policy.entered = fills * blocks;
                let passed = policy.clock().wrapping_sub(began);
                let age = |time| policy.shadows.learned().age(time);
                let expected = reference.learned().age((fills << 20) as u32);
                assert_eq!(age(passed), expected, "{fills} fills of {bits} bits");
                if fills < 16 {
                    policy.stamp = (fills * STAMPS_PER_FILL) as u8;
                    let half = (stamp_after / 2) >> coarse;
                    let time = u64::from(policy.traits(&old).time) + half;
                    assert_eq!(time, u64::from(passed), "{fills} fills of {bits} bits");
                }
            }
        }
        assert_eq!(Adaptive::new(1 << 20).coarse, 0);
        assert_eq!(Adaptive::new(1 << 25).coarse, 1);
    }

    #[test]
    fn about_the_wanted_share_is_sampled() {
        let policy = Adaptive::new(1 << 20);
        let sampled = (0..1u64 << 20).filter(|&key| policy.is_sampled(key)).count() as u64;
        assert!(sampled.abs_diff(policy.places) < policy.places / 4, "{sampled}");
        assert!((0..100).all(|key| Adaptive::new(64).is_sampled(key)));
    }
}
