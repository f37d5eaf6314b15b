//! Eviction and admission by frequency: blocks requested more often than the leaving ones stay, or
//! enter.
//!
//! The log is reclaimed in order, so a policy cannot choose which segment goes. Of the clean blocks
//! of the oldest segment, those requested more often than their mean are copied forward, the most
//! frequent first; if most of the segment is garbage, which leaves more room, the threshold is
//! lower. Missed blocks are admitted if they were requested more often than a bar: halfway between
//! that mean and the mean of the blocks that had to leave; also lower with garbage. The next
//! segment is assumed to be similar. Until a segment has been reclaimed there is room, and
//! everything enters. Counts fade, and the bar with them, so that an old bar does not keep
//! everything out. Blocks requested together stay, or enter, together. For the reasons see ADR 6,
//! 8, 12 and 13 in `docs/adr`.

use std::iter::repeat_n;
use std::ops::Range;

use crate::adaptive::StoreCandidate;
use crate::eviction::{COPY_SHARE_MAX_PERCENT, Candidate, EvictionPolicy, take};
use crate::learned::Touch;
use crate::sketch::Sketch;

/// Counters of the sketch for each cached block; they take four bytes.
const COUNTERS: u64 = 8;
/// Requests per cached block after which counts are halved.
const PERIOD: u64 = 10;
/// Minimum bar, compared with the mean count of blocks requested together. It is above 1, so that
/// blocks requested once do not pass because a few share counters with others.
const ONCE: f32 = 1.5;
/// Blocks of the largest common database page: neighbors within one are requested together.
const GROUP: u64 = 4;
/// Count from which a block is frequent.
const FREQUENT: u8 = 4;

/// Eviction and admission by frequency.
#[derive(Clone, Debug)]
pub struct Frequency {
    sketch: Sketch,
    /// The count that a missed block must exceed: computed at the last reclaim, halved with the
    /// counts.
    bar: Option<f32>,
}

impl Frequency {
    /// A policy for a log that holds about `blocks` blocks.
    #[must_use]
    pub fn new(blocks: u64) -> Self {
        Self { sketch: Sketch::new(blocks, COUNTERS, PERIOD), bar: None }
    }

    /// Mean request count of the blocks.
    fn mean(&self, keys: Range<u64>) -> f32 {
        let blocks = (keys.end - keys.start) as f32;
        keys.map(|key| f32::from(self.sketch.estimate(key))).sum::<f32>() / blocks
    }

    /// Request count of each block. Neighbors that are adjacent in the log were requested together
    /// and all get their mean: a partly kept page helps nobody.
    fn counts(&self, blocks: &[Candidate]) -> Vec<f32> {
        let together =
            |a: &Candidate, b: &Candidate| b.key == a.key + 1 && b.key / GROUP == a.key / GROUP;
        let runs = blocks.chunk_by(together);
        let means =
            runs.map(|run| (run.len(), self.mean(run[0].key..run[0].key + run.len() as u64)));
        means.flat_map(|(len, mean)| repeat_n(mean, len)).collect()
    }
}

impl EvictionPolicy for Frequency {
    fn asked(&mut self, key: u64) {
        if self.sketch.count(key) {
            self.bar = self.bar.map(|bar| bar / 2.0);
        }
    }

    fn written(&mut self, key: u64) {
        // Keeping blocks that are only ever written, such as a database's log, saves no reads.
        if self.sketch.estimate(key) > 0 {
            self.asked(key);
        }
    }

    fn warm(&self, key: u64) {
        self.sketch.warm(key);
    }

    fn count(&self, key: u64) -> Option<u8> {
        Some(self.sketch.estimate(key))
    }

    fn is_frequent(&self, key: u64) -> bool {
        self.sketch.estimate(key) >= FREQUENT
    }

    fn admits(&mut self, keys: Range<u64>) -> bool {
        self.bar.is_none_or(|bar| self.mean(keys) > bar.max(ONCE))
    }

    fn chooses(&self) -> bool {
        self.bar.is_some()
    }

    fn prefers(&self, key: u64, other: u64) -> bool {
        self.sketch.estimate(key) > self.sketch.estimate(other)
    }

    fn inserted(&self, _touch: Touch) -> u8 {
        0
    }

    fn sealed(&mut self, _live_segments: u64) {}

    /// The least frequent one; of several, the last, so that a new block must be more frequent.
    fn victim(&mut self, candidates: &[StoreCandidate]) -> usize {
        let count = |candidate: &StoreCandidate| {
            let blocks = u64::from(candidate.blocks.count_ones());
            self.mean(candidate.first..candidate.first + blocks)
        };
        let counts = candidates.iter().map(count).enumerate().rev();
        counts.min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(at, _)| at)
    }

    fn choose(&mut self, blocks: &mut [Candidate], copy_bytes: u64) {
        if blocks.is_empty() {
            return;
        }
        let counts = self.counts(blocks);
        let mean = counts.iter().sum::<f32>() / blocks.len() as f32;
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        order.sort_by(|&a, &b| counts[b].total_cmp(&counts[a]));
        let bytes: u64 = blocks.iter().map(|block| u64::from(block.bytes)).sum();
        let share = COPY_SHARE_MAX_PERCENT as f32 / 100.0;
        let full = (bytes as f32 / copy_bytes.max(1) as f32 * share).min(1.0);
        let keep = (mean * full * full).max(ONCE);
        let mut left = copy_bytes;
        for at in order {
            let worth = counts[at] > keep;
            blocks[at].keep = worth && take(&mut left, blocks[at].bytes);
        }
        let gone = || blocks.iter().zip(&counts).filter(|(block, _)| !block.keep);
        let sum: f32 = gone().map(|(_, &count)| count).sum();
        let victims = sum / gone().count().max(1) as f32;
        self.bar = Some(victims + (mean - victims) / 2.0 * full * full);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(key: u64) -> Candidate {
        Candidate { key, meta: 0, bytes: 4096, keep: false }
    }

    fn asked(policy: &mut Frequency, key: u64, times: usize) {
        (0..times).for_each(|_| policy.asked(key));
    }

    #[test]
    fn everything_enters_until_something_has_to_leave() {
        let mut policy = Frequency::new(1000);
        assert!(policy.admits(1..2));
        asked(&mut policy, 2, 3);
        policy.choose(&mut [block(2)], 0);
        assert!(!policy.admits(1..2), "nobody asked for it");
        asked(&mut policy, 1, 3);
        assert!(!policy.admits(1..2), "as often as what leaves");
        policy.asked(1);
        assert!(policy.admits(1..2));
    }

    #[test]
    fn what_was_asked_for_several_times_is_told() {
        let mut policy = Frequency::new(1000);
        asked(&mut policy, 1, 3);
        assert!(!policy.is_frequent(1));
        asked(&mut policy, 1, 1);
        assert!(policy.is_frequent(1) && !policy.is_frequent(2));
    }

    #[test]
    fn a_write_counts_for_what_was_read() {
        let mut policy = Frequency::new(1000);
        (0..5).for_each(|_| policy.written(1));
        asked(&mut policy, 2, 1);
        (0..4).for_each(|_| policy.written(2));
        assert!(!policy.prefers(1, 9) && policy.prefers(2, 1) && policy.is_frequent(2));
    }

    #[test]
    fn pages_count_as_a_whole() {
        let mut policy = Frequency::new(1000);
        for (key, times) in [(8, 9), (9, 1), (10, 1), (11, 1), (12, 4)] {
            asked(&mut policy, key, times);
        }
        // The bar is the mean of all, since none is kept.
        policy.choose(&mut [8, 9, 10, 11].map(block), 0);
        assert!(!policy.admits(8..12) && policy.admits(8..9) && policy.admits(12..13));
        let mut blocks = [8, 9, 10, 11, 12].map(block);
        policy.choose(&mut blocks, 2 * 4096);
        assert_eq!(blocks.map(|block| block.keep), [false, false, false, false, true]);
    }

    #[test]
    fn what_stays_is_no_bar_alone() {
        let mut policy = Frequency::new(1000);
        asked(&mut policy, 1, 8);
        asked(&mut policy, 2, 5);
        asked(&mut policy, 3, 3);
        policy.choose(&mut [block(1), block(3)], 1 << 20);
        assert!(policy.admits(2..3), "nothing had to leave");
        policy.choose(&mut [block(1), block(3)], 0);
        assert!(!policy.admits(2..3), "the mean of what left is higher");
    }

    #[test]
    fn a_block_asked_for_once_never_enters_a_full_cache() {
        let mut policy = Frequency::new(1000);
        policy.choose(&mut [block(5)], 1 << 20);
        policy.asked(1);
        assert!(!policy.admits(1..2));
    }

    #[test]
    fn the_most_frequent_are_kept_as_far_as_they_may() {
        let mut policy = Frequency::new(1000);
        for (key, times) in [(10, 1), (20, 9), (30, 5), (40, 6), (50, 2)] {
            asked(&mut policy, key, times);
        }
        let mut blocks = [10, 20, 30, 40, 50].map(block);
        policy.choose(&mut blocks, 2 * 4096 + 100);
        // The mean is 4.6; the counts above it are 20, 30 and 40.
        assert_eq!(blocks.map(|block| block.keep), [false, true, false, true, false]);
        let segment = 5 * 4096;
        policy.choose(&mut blocks, segment * 3 / 4);
        assert_eq!(blocks.map(|block| block.keep), [false, true, true, true, false]);
        // The same blocks, but most of the segment is garbage: every block requested twice stays.
        policy.choose(&mut blocks, 2 * segment * 3 / 4);
        assert_eq!(blocks.map(|block| block.keep), [false, true, true, true, true]);
    }

    #[test]
    fn of_a_sample_the_least_frequent_leaves_and_a_new_block_must_be_more_frequent() {
        let mut policy = Frequency::new(1000);
        for (key, times) in [(10, 3), (20, 2), (30, 3), (40, 2), (41, 5)] {
            asked(&mut policy, key, times);
        }
        let last = policy.touched(Touch::Read);
        let block = |first, blocks| StoreCandidate { first, blocks, last };
        let mut victim = |sample: &[StoreCandidate]| policy.victim(sample);
        assert_eq!(victim(&[block(10, 1), block(20, 1), block(30, 1)]), 1);
        assert_eq!(victim(&[block(20, 1), block(40, 1)]), 1, "it is no more frequent");
        assert_eq!(victim(&[block(20, 1), block(40, 3)]), 0, "the mean counts");
    }

    #[test]
    fn an_old_mean_fades() {
        let mut policy = Frequency::new(128);
        asked(&mut policy, 7, 15);
        policy.choose(&mut [block(7)], 1 << 20);
        // Requests of two periods, for blocks that are seldom requested.
        for key in 0..2 * 128 * PERIOD {
            policy.asked(1000 + key % 100);
        }
        assert!((1000..1100).any(|key| policy.admits(key..key + 1)));
    }
}
