//! Which of a few cached blocks goes, by how recently and how often each was asked for.
//!
//! A rule spares the most recent of the sample and takes the least asked for of the others. With
//! none spared that is the least frequently used, with all but one the least recently used; between
//! them are the windows of W-TinyLFU (Einziger, Friedman and Manes, ACM TOS 2017). Sampling instead
//! of queues is the way of hyperbolic caching (Blankstein, Sen and Freedman, USENIX ATC 2017).

/// Most blocks that a rule compares.
pub const SAMPLE_MAX: usize = 32;

/// What a rule knows of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traits {
    /// How long ago it was asked for, in any unit.
    pub age: u32,
    /// How often it was asked for.
    pub count: u8,
}

/// A rule of eviction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// Share of the sample that is spared because it is recent, in percent.
    spared: u8,
    /// Among blocks asked for equally often the most recent goes, not the least recent one. It
    /// makes a loop that is longer than the cache hit for a part.
    newest: bool,
}

impl Rule {
    /// The rules that compete.
    pub const ALL: [Self; 6] = [
        Self { spared: 100, newest: false },
        Self { spared: 60, newest: false },
        Self { spared: 30, newest: false },
        Self { spared: 30, newest: true },
        Self { spared: 10, newest: true },
        Self { spared: 0, newest: true },
    ];
    /// Least recently used.
    pub const RECENCY: usize = 0;
    /// Least frequently used.
    pub const FREQUENCY: usize = 5;

    /// The position of the block that goes.
    ///
    /// # Panics
    /// If there is no block, or more than [`SAMPLE_MAX`].
    pub fn victim(self, sample: &[Traits]) -> usize {
        assert!((1..=SAMPLE_MAX).contains(&sample.len()), "a sample of {}", sample.len());
        let spared = sample.len() * usize::from(self.spared) / 100;
        let spared = spared.min(sample.len() - 1);
        let mut ages = [0; SAMPLE_MAX];
        let ages = &mut ages[..sample.len()];
        ages.iter_mut().zip(sample).for_each(|(age, block)| *age = block.age);
        ages.sort_unstable();
        let youngest = ages[spared];
        let rest = sample.iter().enumerate().filter(|(_, block)| block.age >= youngest);
        let rank = |&(_, block): &(usize, &Traits)| {
            (block.count, if self.newest { block.age } else { u32::MAX - block.age })
        };
        rest.min_by_key(rank).map_or(0, |(at, _)| at)
    }
}

const _: () = assert!(Rule::ALL[Rule::RECENCY].spared == 100);
const _: () = assert!(Rule::ALL[Rule::FREQUENCY].spared == 0);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(blocks: &[(u32, u8)]) -> Vec<Traits> {
        blocks.iter().map(|&(age, count)| Traits { age, count }).collect()
    }

    #[test]
    fn each_rule_has_its_victim() {
        let blocks = sample(&[(1, 1), (10, 9), (5, 2), (7, 2), (3, 3)]);
        let victims = Rule::ALL.map(|rule| rule.victim(&blocks));
        // The oldest; of the two oldest the one asked for less; 2 and 3 are asked for equally.
        assert_eq!(victims, [1, 3, 3, 2, 0, 0]);
    }

    #[test]
    fn a_block_alone_goes() {
        assert_eq!(Rule::ALL.map(|rule| rule.victim(&sample(&[(7, 7)]))), [0; 6]);
    }

    proptest! {
        #[test]
        fn the_extremes_are_known_policies(
            blocks in prop::collection::vec((0u32..100, 0u8..16), 1..=SAMPLE_MAX),
        ) {
            let blocks = sample(&blocks);
            let oldest = blocks[Rule::ALL[Rule::RECENCY].victim(&blocks)].age;
            prop_assert_eq!(Some(oldest), blocks.iter().map(|block| block.age).max());
            let least = blocks[Rule::ALL[Rule::FREQUENCY].victim(&blocks)].count;
            prop_assert_eq!(Some(least), blocks.iter().map(|block| block.count).min());
        }
    }
}
