//! A trace in memory, as numbers of blocks: what policies that know the future need.
//!
//! Blocks are numbered in the order of their first reference, so that a policy can keep what it
//! knows of them in arrays. It takes four bytes for each reference and about 30 for each block.

use std::error::Error;
use std::fmt;

use forebay_policy::KeyHash;
use hashbrown::HashMap;

/// References of blocks, in order.
#[derive(Default)]
pub struct References {
    /// The number of the block, and whether it was written in the lowest bit.
    references: Vec<u32>,
    numbers: HashMap<u64, u32, KeyHash>,
    reads: u64,
}

/// A trace has more references than are held in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooManyReferences;

impl fmt::Display for TooManyReferences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the trace reads and writes more than {} blocks", References::MAX)
    }
}

impl Error for TooManyReferences {}

impl References {
    /// Most references: a gibibyte of them, and as much again for the optimum.
    pub const MAX: usize = 1 << 28;

    /// A trace without references.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a reference of a block.
    ///
    /// # Errors
    /// If there are [`References::MAX`] already.
    pub fn push(&mut self, key: u64, write: bool) -> Result<(), TooManyReferences> {
        if self.references.len() == Self::MAX {
            return Err(TooManyReferences);
        }
        let next = self.blocks();
        let number = *self.numbers.entry(key).or_insert(next);
        self.references.push(number << 1 | u32::from(write));
        self.reads += u64::from(!write);
        Ok(())
    }

    /// Number of distinct blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.numbers.len()).expect("there are no more blocks than references")
    }

    /// Number of references.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.references.len() as u64
    }

    /// Whether there is no reference.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.references.is_empty()
    }

    /// Number of references that are reads.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads
    }

    /// The number of each referenced block, and whether it was written.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (u32, bool)> + ExactSizeIterator {
        self.references.iter().map(|&reference| (reference >> 1, reference & 1 == 1))
    }
}

const _: () = assert!(References::MAX < u32::MAX as usize / 2, "a number and a bit fit 32 bits");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_numbered_as_they_come() {
        let mut trace = References::new();
        for (key, write) in [(1 << 60, false), (7, true), (1 << 60, true), (8, false)] {
            trace.push(key, write).expect("it is short");
        }
        let numbers: Vec<_> = trace.iter().collect();
        assert_eq!(numbers, [(0, false), (1, true), (0, true), (2, false)]);
        assert_eq!((trace.blocks(), trace.len(), trace.reads()), (3, 4, 2));
        assert!(!trace.is_empty());
    }
}
