//! How many distinct blocks a trace touches, for cache sizes that are a share of it.
//!
//! A bit for each block, in pages of those touched: memory grows with the footprint, at worst 64
//! bytes for each block that lies alone, usually a bit.

use forebay_block::{BLOCK_SIZE, BlockRange};
use forebay_policy::KeyHash;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

const WORDS: usize = 8;
const PAGE_BLOCKS: u64 = WORDS as u64 * 64;

/// The blocks seen so far.
#[derive(Default)]
pub struct Footprint {
    pages: HashMap<u64, [u64; WORDS], KeyHash>,
    blocks: u64,
}

impl Footprint {
    /// Nothing seen.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts the blocks of a request.
    pub fn add(&mut self, blocks: BlockRange) {
        for block in blocks.iter() {
            let (page, bit) = (block / PAGE_BLOCKS, block % PAGE_BLOCKS);
            let page = match self.pages.entry(page) {
                Entry::Occupied(page) => page.into_mut(),
                Entry::Vacant(page) => page.insert([0; WORDS]),
            };
            let word = &mut page[(bit / 64) as usize];
            self.blocks += u64::from(*word >> (bit % 64) & 1 == 0);
            *word |= 1 << (bit % 64);
        }
    }

    /// Distinct blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Bytes of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks * BLOCK_SIZE as u64
    }
}
