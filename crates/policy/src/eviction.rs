//! Which blocks enter the cache device, and which clean ones stay when their segment is reclaimed.
//!
//! The log is reclaimed oldest segment first, so the order of eviction is fixed. A policy decides
//! which missed blocks are admitted, and which clean blocks of the oldest segment are copied
//! forward. It has three bits of metadata per cached block, kept by the index: set when the block
//! is inserted, replaced at every hit and when the block is copied forward, read at reclaim. Dirty
//! blocks are always written and always copied: a policy never sees them.
//!
//! The engine and the trace simulator use the same policies, and the log rules defined here.

use std::ops::Range;

use crate::adaptive::StoreCandidate;
use crate::frequency::Frequency;
use crate::learned::{LastTouch, Touch};
use crate::stored::Stored;

/// Maximum share of a reclaimed segment's payload that is copied forward for the policy. Other
/// blocks that it would keep are dropped, so that reclaim always gains space.
pub const COPY_SHARE_MAX_PERCENT: u64 = 75;
/// Largest value of a block's metadata.
pub const META_MAX: u8 = 7;
/// Share of the segments, in percent, kept free for the next writes.
const FREE_PERCENT: u64 = 3;

/// Number of segments of a log to keep free: reclaim begins when no more are free. `reserve` of
/// them are for reclaim itself.
#[must_use]
pub fn free_segments_wanted(segments: u64, reserve: u64) -> u64 {
    (segments * FREE_PERCENT / 100).max(reserve + 1)
}

/// Maximum number of bytes of a reclaimed segment to copy forward for the policy.
#[must_use]
pub fn copy_bytes_max(segment_bytes: u64) -> u64 {
    segment_bytes * COPY_SHARE_MAX_PERCENT / 100
}

/// The policies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Eviction {
    /// First in, first out.
    Fifo,
    /// Least recently used; approximated in the log to a sixth of its length.
    Lru,
    /// Least frequently requested, recently; also keeps out missed blocks that are requested no
    /// more often.
    #[default]
    Frequency,
}

impl Eviction {
    /// Every policy with its name in commands, configuration and metrics.
    pub const NAMES: [(&'static str, Self); 3] =
        [("fifo", Self::Fifo), ("lru", Self::Lru), ("frequency", Self::Frequency)];

    /// The policy's name in commands, configuration and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    /// The policy with that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, policy)| policy)
    }

    /// The policy for a log that holds about `blocks` blocks.
    #[must_use]
    pub fn policy(self, blocks: u64) -> Box<dyn EvictionPolicy + Send> {
        match self {
            Self::Fifo => Box::new(Fifo),
            Self::Lru => Box::new(Lru::new()),
            Self::Frequency => Box::new(Frequency::new(blocks)),
        }
    }

    /// The policy for a cache with a store, of about `blocks` blocks in all. There `frequency` is
    /// the best of several rules between it and `lru`: see [`crate::Adaptive`].
    #[must_use]
    pub fn store_policy(self, blocks: u64) -> Box<dyn EvictionPolicy + Send> {
        Box::new(Stored::new(self, blocks))
    }
}

/// A clean block of the segment being reclaimed, for [`EvictionPolicy::choose`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// The block's key, unique across volumes.
    pub key: u64,
    /// The block's metadata, from the index.
    pub meta: u8,
    /// Length of the block's payload, in bytes.
    pub bytes: u32,
    /// Output: whether the block is copied forward.
    pub keep: bool,
}

/// Decides which blocks enter the cache device and which stay there. Metadata, in and out, is at
/// most [`META_MAX`]. A policy may be replaced at any time, so it must tolerate metadata of another
/// one.
pub trait EvictionPolicy {
    /// Called when a client requests a block, cached or not.
    fn asked(&mut self, _key: u64) {}

    /// Called when a client writes a block.
    fn written(&mut self, _key: u64) {}

    /// Prefetches the memory that [`EvictionPolicy::asked`] will access for a block.
    fn warm(&self, _key: u64) {}

    /// The number of recent requests for a block; `None` if the policy does not count them.
    fn count(&self, _key: u64) -> Option<u8> {
        None
    }

    /// Whether a block was requested several times recently.
    fn is_frequent(&self, _key: u64) -> bool {
        false
    }

    /// Whether missed blocks, which were requested together, enter the cache device.
    fn admits(&mut self, _keys: Range<u64>) -> bool {
        true
    }

    /// Whether admission is selective, so that it pays to postpone it until more is known.
    fn chooses(&self) -> bool {
        false
    }

    /// Whether block `_key` deserves a place in RAM more than block `_other`.
    fn prefers(&self, _key: u64, _other: u64) -> bool {
        true
    }

    /// Metadata of a block that is inserted now because of a request of this kind.
    fn inserted(&self, touch: Touch) -> u8;

    /// Metadata of a block with `_meta` that is copied forward now.
    fn copied(&self, _meta: u8) -> u8 {
        self.inserted(Touch::Read)
    }

    /// Whether a hit changes metadata. If not, the caller skips the index lookup, a random memory
    /// access for every block read from RAM.
    fn notes_hits(&self) -> bool {
        false
    }

    /// New metadata of a block with `meta` that is hit now.
    fn hit(&self, meta: u8) -> u8 {
        meta
    }

    /// Called when a segment has been filled; the log now has `live_segments`. This is the policy's
    /// clock.
    fn sealed(&mut self, live_segments: u64);

    /// Called when a block that was not cached, or a new version of one, enters the cache: the
    /// clock of [`EvictionPolicy::stamp`].
    fn entered(&mut self) {}

    /// The current stamp. Stamps wrap around.
    fn stamp(&self) -> u8 {
        0
    }

    /// A request that happens now. With a store a block's metadata are those of its last request:
    /// [`LastTouch::meta`].
    fn touched(&self, touch: Touch) -> LastTouch {
        LastTouch { stamp: 0, touch }
    }

    /// What counts as the last request for a block of the store that is read now; `last` did until
    /// now.
    fn read_again(&self, last: LastTouch) -> LastTouch {
        last
    }

    /// The position of the block that leaves the cache, other than with the oldest segment. A block
    /// that asks to enter may be the last candidate; if it is chosen, it does not enter. There is
    /// at least one candidate.
    fn victim(&mut self, candidates: &[StoreCandidate]) -> usize {
        candidates.len() - 1
    }

    /// Chooses the clean blocks of the oldest segment to copy forward, at most `copy_bytes` in
    /// total.
    fn choose(&mut self, blocks: &mut [Candidate], copy_bytes: u64);
}

/// First in, first out: keeps no block, and so writes none twice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fifo;

impl EvictionPolicy for Fifo {
    fn inserted(&self, _touch: Touch) -> u8 {
        0
    }

    fn sealed(&mut self, _live_segments: u64) {}

    fn choose(&mut self, blocks: &mut [Candidate], _copy_bytes: u64) {
        blocks.iter_mut().for_each(|block| block.keep = false);
    }
}

/// Least recently used, as closely as three bits and a log allow.
///
/// Time is counted in epochs of a sixth of the log's length. Metadata is 0 for a block not hit
/// since it was inserted or copied, else 1 + (epoch of its last hit mod 7). A block is reclaimed
/// within seven epochs of that, so seven values tell them apart. A block is kept if it was hit in
/// the epoch of the reclaim or one of the three before: always when the last hit was within half a
/// log of writes, never when it was more than two thirds ago, and never without a hit. While the
/// log first grows, epochs are shorter, and an old hit may be mistaken for a newer one.
#[derive(Clone, Debug, Default)]
pub struct Lru {
    epoch: u8,
    sealed_in_epoch: u64,
}

impl Lru {
    /// Epochs in the time that the log takes to be written once.
    const EPOCHS_PER_LOG: u64 = 6;
    /// Number of distinct epoch values; the eighth metadata value is "not hit".
    const EPOCHS: u8 = META_MAX;
    /// Epochs before the current one in which a hit is still recent.
    const KEEP_AGE: u8 = 3;

    /// A policy at the start of its first epoch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a block with `meta` was hit recently.
    fn keep(&self, meta: u8) -> bool {
        let Some(hit) = meta.checked_sub(1) else {
            return false;
        };
        (self.epoch + Self::EPOCHS - hit % Self::EPOCHS) % Self::EPOCHS <= Self::KEEP_AGE
    }
}

impl EvictionPolicy for Lru {
    fn inserted(&self, _touch: Touch) -> u8 {
        0
    }

    fn notes_hits(&self) -> bool {
        true
    }

    fn hit(&self, _meta: u8) -> u8 {
        1 + self.epoch
    }

    fn sealed(&mut self, live_segments: u64) {
        self.sealed_in_epoch += 1;
        if self.sealed_in_epoch >= live_segments.div_ceil(Self::EPOCHS_PER_LOG) {
            self.sealed_in_epoch = 0;
            self.epoch = (self.epoch + 1) % Self::EPOCHS;
        }
    }

    fn choose(&mut self, blocks: &mut [Candidate], copy_bytes: u64) {
        let mut left = copy_bytes;
        for block in blocks {
            block.keep = self.keep(block.meta) && take(&mut left, block.bytes);
        }
    }
}

/// Subtracts `bytes` from `left` and returns true, if there are that many left.
pub(crate) fn take(left: &mut u64, bytes: u32) -> bool {
    let rest = left.checked_sub(u64::from(bytes));
    *left = rest.unwrap_or(*left);
    rest.is_some()
}

const _: () = assert!(Lru::EPOCHS_PER_LOG < Lru::EPOCHS as u64, "a lap's epochs must differ");
const _: () = assert!(COPY_SHARE_MAX_PERCENT < 100, "reclaim must gain space");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block(key: u64, meta: u8) -> Candidate {
        Candidate { key, meta, bytes: 100, keep: true }
    }

    #[test]
    fn fifo_keeps_nothing() {
        let mut fifo = Fifo;
        let mut blocks: Vec<_> = (0..=META_MAX).map(|meta| block(1, fifo.hit(meta))).collect();
        fifo.choose(&mut blocks, 1 << 20);
        assert!(blocks.iter().all(|block| !block.keep));
    }

    #[test]
    fn who_notes_no_hits_leaves_metadata_as_it_is() {
        for (name, eviction) in Eviction::NAMES {
            let mut policy = eviction.policy(1000);
            for _ in 0..100 {
                policy.sealed(12);
                let same = (0..=META_MAX).all(|meta| policy.hit(meta) == meta);
                assert!(policy.notes_hits() || same, "{name}");
            }
        }
    }

    #[test]
    fn lru_keeps_the_recent_up_to_the_share() {
        let mut lru = Lru::new();
        let recent = lru.hit(0);
        let mut blocks: Vec<_> = [0, recent, 0, recent, recent].map(|meta| block(1, meta)).to_vec();
        lru.choose(&mut blocks, 250);
        assert_eq!(
            blocks.iter().map(|b| b.keep).collect::<Vec<_>>(),
            [false, true, false, true, false]
        );
    }

    #[test]
    fn names_are_those_of_the_policies() {
        for (name, policy) in Eviction::NAMES {
            assert_eq!((policy.name(), Eviction::from_name(name)), (name, Some(policy)));
        }
        assert_eq!(Eviction::from_name("arc"), None);
    }

    #[test]
    fn reclaim_begins_before_the_reserve() {
        assert_eq!((free_segments_wanted(8, 2), free_segments_wanted(1000, 2)), (3, 30));
    }

    #[test]
    fn lru_drops_what_was_never_hit() {
        let mut lru = Lru::new();
        let meta = lru.inserted(Touch::Read);
        for _ in 0..1000 {
            assert!(!lru.keep(meta));
            lru.sealed(100);
        }
    }

    proptest! {
        /// A block inserted at segment 0 of a full log of `live` segments, hit after `at` more
        /// segments, and reclaimed after all the others.
        #[test]
        fn lru_keeps_the_recent_half_and_drops_the_old_third(
            live in 12u64..500,
            phase in 0u64..5000,
            hit_share in 0.0f64..1.0,
        ) {
            let mut lru = Lru::new();
            for _ in 0..phase {
                lru.sealed(live);
            }
            let hit_at = (live as f64 * hit_share) as u64;
            let mut meta = lru.inserted(Touch::Read);
            for filled in 0..live {
                if filled == hit_at {
                    meta = lru.hit(meta);
                    prop_assert!(meta <= META_MAX);
                }
                lru.sealed(live);
            }
            let since = live - hit_at;
            let epoch = live.div_ceil(Lru::EPOCHS_PER_LOG);
            if since <= 3 * epoch {
                prop_assert!(lru.keep(meta), "hit {since} of {live} segments ago");
            }
            if since >= 4 * epoch && live > 36 {
                prop_assert!(!lru.keep(meta), "hit {since} of {live} segments ago");
            }
        }

        #[test]
        fn any_metadata_is_answered(meta in 0u8..=255, live in 0u64..10, steps in 0usize..20) {
            let mut lru = Lru::new();
            for _ in 0..steps {
                lru.sealed(live);
            }
            let _ = lru.keep(meta);
            prop_assert!(lru.hit(meta) <= META_MAX && lru.keep(lru.hit(meta)));
        }
    }
}
