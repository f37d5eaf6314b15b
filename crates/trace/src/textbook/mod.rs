//! Eviction policies as their papers have them, to compare Forebay with.
//!
//! They see a trace as block numbers in memory, and hold blocks of 4 KiB in one set of places: no
//! log, no RAM tier beside it, no bypass. A write is a reference like a read and leaves the block
//! in the cache. Whether a write found its block makes no difference to a write-back cache, so
//! misses of reads are counted apart.

mod arc;
mod lirs;
mod list;
mod lru;
mod optimum;
mod references;
mod s3_fifo;

use arc::Arc;
use lirs::Lirs;
use lru::Lru;
pub use references::{References, TooManyReferences};
use s3_fifo::S3Fifo;

/// A policy of the literature.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Textbook {
    /// Least recently used.
    Lru,
    /// Three first-in first-out queues.
    S3Fifo,
    /// The adaptive replacement cache.
    Arc,
    /// Low inter-reference recency set.
    Lirs,
    /// The fewest misses that are possible, which needs the future.
    Optimum,
}

/// Misses of a textbook policy, in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Misses {
    /// Blocks read that were not cached.
    pub reads: u64,
    /// Blocks read or written that were not cached. The optimum counts them in a run of its own.
    pub references: u64,
}

/// A cache that holds blocks by number.
trait Cache {
    /// References a block, which is cached afterward. Returns whether it was before.
    fn reference(&mut self, block: u32) -> bool;
}

impl Textbook {
    /// Every policy with its name.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("LRU", Self::Lru),
        ("S3-FIFO", Self::S3Fifo),
        ("ARC", Self::Arc),
        ("LIRS", Self::Lirs),
        ("optimum", Self::Optimum),
    ];

    /// The policy's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    /// Misses of a cache with `places` places, from empty.
    ///
    /// # Panics
    /// If there is no place.
    #[must_use]
    pub fn misses(self, trace: &References, places: u32) -> Misses {
        assert!(places > 0, "a cache has a place");
        // A cache larger than the footprint is as good as one of that size.
        let places = places.min(trace.blocks().max(1));
        match self {
            Self::Lru => run(trace, Lru::new(trace.blocks(), places)),
            Self::S3Fifo => run(trace, S3Fifo::new(trace.blocks(), places)),
            Self::Arc => run(trace, Arc::new(trace.blocks(), places)),
            Self::Lirs => run(trace, Lirs::new(trace.blocks(), places)),
            Self::Optimum => optimum::misses(trace, places),
        }
    }
}

fn run(trace: &References, mut cache: impl Cache) -> Misses {
    let mut misses = Misses::default();
    for (block, write) in trace.iter() {
        let missed = !cache.reference(block);
        misses.references += u64::from(missed);
        misses.reads += u64::from(missed && !write);
    }
    misses
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn trace(refs: &[(u64, bool)]) -> References {
        let mut trace = References::new();
        refs.iter().for_each(|&(key, write)| trace.push(key, write).expect("it is short"));
        trace
    }

    #[test]
    fn names_are_those_of_the_policies() {
        for (name, policy) in Textbook::NAMES {
            assert_eq!(policy.name(), name);
        }
    }

    #[test]
    fn misses_of_reads_are_apart() {
        let trace = trace(&[(1, true), (1, false), (2, false), (3, true), (1, false)]);
        let misses = Textbook::Lru.misses(&trace, 2);
        assert_eq!(misses, Misses { reads: 2, references: 4 });
    }

    #[test]
    fn a_loop_one_longer_than_the_cache_shows_who_resists() {
        let refs: Vec<_> = (0..1000).map(|at| (at % 11, false)).collect();
        let trace = trace(&refs);
        let reads = |policy: Textbook| policy.misses(&trace, 10).reads;
        assert_eq!(reads(Textbook::Lru), 1000, "each block leaves just before it returns");
        assert_eq!(reads(Textbook::Optimum), 100, "ten stay, and one of each round misses");
        assert!(reads(Textbook::Lirs) < 300, "{}", reads(Textbook::Lirs));
    }

    proptest! {
        /// Whatever the policy: no hit at a first touch, none beyond the optimum, all hits where
        /// there is a place for each block.
        #[test]
        fn misses_are_between_first_touches_and_all(
            refs in prop::collection::vec((0u64..20, any::<bool>()), 1..400),
            places in 1u32..25,
        ) {
            let trace = trace(&refs);
            let optimum = Textbook::Optimum.misses(&trace, places);
            for (name, policy) in Textbook::NAMES {
                let misses = policy.misses(&trace, places);
                prop_assert!(misses.reads >= optimum.reads, "{name}");
                prop_assert!(misses.references >= optimum.references, "{name}");
                prop_assert!(misses.references >= u64::from(trace.blocks()), "{name}");
                prop_assert!(misses.references <= refs.len() as u64, "{name}");
                // These two keep some places for new blocks even then.
                let partial = matches!(policy, Textbook::Lirs | Textbook::S3Fifo);
                if places >= trace.blocks() && !partial {
                    prop_assert_eq!(misses.references, u64::from(trace.blocks()), "{}", name);
                }
            }
        }
    }
}
