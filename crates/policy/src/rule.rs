//! Which of a few cached blocks goes, by how recently and how often each was asked for.
//!
//! Most rules spare the most recent of the sample and take the least asked for of the others. With
//! none spared that is the least frequently used, with all but one the least recently used; between
//! them are the windows of W-TinyLFU (Einziger, Friedman and Manes, ACM TOS 2017). Sampling instead
//! of queues is the way of hyperbolic caching (Blankstein, Sen and Freedman, USENIX ATC 2017). One
//! rule takes the block that is worth least by what was [learned](Learned).

use crate::learned::{Learned, Touch};

/// Most blocks that a rule compares.
pub const SAMPLE_MAX: usize = 32;

/// What a rule knows of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traits {
    /// How long ago it was asked for, in any unit.
    pub age: u32,
    /// The same by the clock of [`Learned`].
    pub time: u32,
    /// How often it was read.
    pub count: u8,
    /// The last request for it.
    pub touch: Touch,
}

/// A rule of eviction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// The least read of the blocks that are not spared because they are recent.
    LeastRead {
        /// Share of the sample that is spared, in percent.
        spared: u8,
        /// Among blocks read equally often the most recent goes, not the least recent one. It makes
        /// a loop that is longer than the cache hit for a part.
        newest: bool,
    },
    /// The one that is worth least by what was learned.
    LeastWorth,
}

impl Rule {
    /// The rules that compete.
    pub const ALL: [Self; 7] = [
        Self::LeastRead { spared: 100, newest: false },
        Self::LeastRead { spared: 60, newest: false },
        Self::LeastRead { spared: 30, newest: false },
        Self::LeastRead { spared: 30, newest: true },
        Self::LeastRead { spared: 10, newest: true },
        Self::LeastRead { spared: 0, newest: true },
        Self::LeastWorth,
    ];
    /// Least recently used.
    pub const RECENCY: usize = 0;
    /// Least frequently used.
    pub const FREQUENCY: usize = 5;
    /// By what was learned.
    pub const WORTH: usize = 6;

    /// The position of the block that goes.
    ///
    /// # Panics
    /// If there is no block, or more than [`SAMPLE_MAX`].
    pub fn victim(self, sample: &[Traits], learned: &Learned) -> usize {
        assert!((1..=SAMPLE_MAX).contains(&sample.len()), "a sample of {}", sample.len());
        match self {
            Self::LeastRead { spared, newest } => least_read(sample, spared, newest),
            Self::LeastWorth => least_worth(sample, learned),
        }
    }
}

fn least_read(sample: &[Traits], spared: u8, newest: bool) -> usize {
    let spared = sample.len() * usize::from(spared) / 100;
    let spared = spared.min(sample.len() - 1);
    let mut ages = [0; SAMPLE_MAX];
    let ages = &mut ages[..sample.len()];
    ages.iter_mut().zip(sample).for_each(|(age, block)| *age = block.age);
    ages.sort_unstable();
    let youngest = ages[spared];
    let rest = sample.iter().enumerate().filter(|(_, block)| block.age >= youngest);
    let rank = |&(_, block): &(usize, &Traits)| {
        (block.count, if newest { block.age } else { u32::MAX - block.age })
    };
    rest.min_by_key(rank).map_or(0, |(at, _)| at)
}

/// Of equal ones the oldest.
fn least_worth(sample: &[Traits], learned: &Learned) -> usize {
    let worth = |block: &Traits| learned.value(block.count, block.touch, block.time);
    let worths = sample.iter().map(|block| (worth(block), u32::MAX - block.age));
    let least = worths.enumerate().min_by(|(_, a), (_, b)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    least.map_or(0, |(at, _)| at)
}

const _: () = assert!(matches!(Rule::ALL[Rule::RECENCY], Rule::LeastRead { spared: 100, .. }));
const _: () = assert!(matches!(Rule::ALL[Rule::FREQUENCY], Rule::LeastRead { spared: 0, .. }));
const _: () = assert!(matches!(Rule::ALL[Rule::WORTH], Rule::LeastWorth));

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(blocks: &[(u32, u8)]) -> Vec<Traits> {
        let traits = |&(age, count)| Traits { age, time: age, count, touch: Touch::Read };
        blocks.iter().map(traits).collect()
    }

    #[test]
    fn each_rule_has_its_victim() {
        let blocks = sample(&[(1, 1), (10, 9), (5, 2), (7, 2), (3, 3)]);
        let victims = Rule::ALL.map(|rule| rule.victim(&blocks, &Learned::new(1, 1)));
        // The oldest; of the two oldest the one asked for less; 2 and 3 are asked for equally. As
        // long as nothing is known, the oldest is worth least.
        assert_eq!(victims, [1, 3, 3, 2, 0, 0, 1]);
    }

    #[test]
    fn a_block_alone_goes() {
        let learned = Learned::new(1, 1);
        assert_eq!(Rule::ALL.map(|rule| rule.victim(&sample(&[(7, 7)]), &learned)), [0; 7]);
    }

    proptest! {
        #[test]
        fn the_extremes_are_known_policies(
            blocks in prop::collection::vec((0u32..100, 0u8..16), 1..=SAMPLE_MAX),
        ) {
            let (blocks, learned) = (sample(&blocks), Learned::new(1, 1));
            let oldest = blocks[Rule::ALL[Rule::RECENCY].victim(&blocks, &learned)].age;
            prop_assert_eq!(Some(oldest), blocks.iter().map(|block| block.age).max());
            let least = blocks[Rule::ALL[Rule::FREQUENCY].victim(&blocks, &learned)].count;
            prop_assert_eq!(Some(least), blocks.iter().map(|block| block.count).min());
        }
    }
}
