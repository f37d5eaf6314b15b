//! The policies of a cache with a store, which can free any of its blocks: by a sample.

use std::ops::Range;

use crate::adaptive::{Adaptive, StoreCandidate};
use crate::eviction::{Candidate, Eviction, EvictionPolicy};
use crate::learned::{LastTouch, Touch};

/// Reads from which a block counts as frequent.
const FREQUENT: u8 = 4;

/// A policy of a cache with a store.
pub struct Stored {
    adaptive: Adaptive,
    /// Whether a block's age is the time since it entered, not since it was hit.
    by_entry: bool,
    /// Whether a block had to leave.
    is_full: bool,
}

impl Stored {
    /// The policy for a cache of about `blocks` blocks.
    pub fn new(kind: Eviction, blocks: u64) -> Self {
        let adaptive = match kind {
            Eviction::Fifo | Eviction::Lru => Adaptive::recency(blocks),
            Eviction::Frequency => Adaptive::new(blocks),
        };
        Self { adaptive, by_entry: kind == Eviction::Fifo, is_full: false }
    }
}

impl EvictionPolicy for Stored {
    fn asked(&mut self, key: u64) {
        self.adaptive.on_read(key);
    }

    fn written(&mut self, key: u64) {
        self.adaptive.on_write(key);
    }

    fn warm(&self, key: u64) {
        self.adaptive.warm(key);
    }

    fn count(&self, key: u64) -> Option<u8> {
        Some(self.adaptive.count(key))
    }

    fn is_frequent(&self, key: u64) -> bool {
        self.adaptive.count(key) >= FREQUENT
    }

    fn admits(&mut self, _keys: Range<u64>) -> bool {
        true
    }

    fn chooses(&self) -> bool {
        self.is_full
    }

    fn prefers(&self, key: u64, other: u64) -> bool {
        self.adaptive.count(key) > self.adaptive.count(other)
    }

    fn inserted(&self, touch: Touch) -> u8 {
        self.touched(touch).meta()
    }

    fn copied(&self, meta: u8) -> u8 {
        self.touched(LastTouch::from_meta(meta, self.stamp()).touch).meta()
    }

    fn sealed(&mut self, _live_segments: u64) {}

    fn entered(&mut self) {
        self.adaptive.on_enter();
    }

    fn stamp(&self) -> u8 {
        self.adaptive.stamp()
    }

    fn touched(&self, touch: Touch) -> LastTouch {
        self.adaptive.touched(touch)
    }

    fn read_again(&self, last: LastTouch) -> LastTouch {
        if self.by_entry { last } else { self.touched(Touch::Read) }
    }

    fn victim(&mut self, candidates: &[StoreCandidate]) -> usize {
        self.is_full = true;
        self.adaptive.choose_victim(candidates)
    }

    fn choose(&mut self, blocks: &mut [Candidate], _copy_bytes: u64) {
        blocks.iter_mut().for_each(|block| block.keep = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_policy_has_its_victim() {
        let victim = |kind: Eviction| {
            let mut policy = Stored::new(kind, 6400);
            let candidate = |first, last| StoreCandidate { first, blocks: 1, last };
            let mut lasts = [policy.touched(Touch::Read); 2];
            (0..1200).for_each(|_| policy.entered());
            lasts[1] = policy.touched(Touch::Read);
            (0..1200).for_each(|_| policy.entered());
            (0..3).for_each(|_| policy.asked(400));
            lasts[0] = policy.read_again(lasts[0]);
            assert!(!policy.chooses());
            let chosen = policy.victim(&[candidate(400, lasts[0]), candidate(800, lasts[1])]);
            assert!(policy.chooses() && policy.prefers(400, 800));
            chosen
        };
        // Only the first ignores that the block that entered first was read since.
        let all = [Eviction::Fifo, Eviction::Lru, Eviction::Frequency];
        assert_eq!(all.map(victim), [0, 1, 1]);
    }

    #[test]
    fn metadata_tell_the_last_request_as_long_as_it_is_recent() {
        let mut policy = Stored::new(Eviction::Lru, 64);
        for touch in Touch::ALL {
            let (last, meta) = (policy.touched(touch), policy.inserted(touch));
            assert!(meta <= crate::eviction::META_MAX);
            assert_eq!(LastTouch::from_meta(meta, policy.stamp()), last);
            (0..4).for_each(|_| policy.entered());
            assert_eq!(policy.stamp(), last.stamp.wrapping_add(1));
            assert_eq!(LastTouch::from_meta(meta, policy.stamp()), last);
            // A copy forward is as if it had been requested now.
            let copy = LastTouch::from_meta(policy.copied(meta), policy.stamp());
            assert_eq!(copy, policy.touched(touch));
        }
    }
}
