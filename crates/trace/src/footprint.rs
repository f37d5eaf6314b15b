//! Number of distinct blocks that a trace touches, for cache sizes given as a share of it.
//!
//! One bit per block, in pages allocated when first touched: memory grows with the footprint. It
//! takes usually about one bit per block, and 64 bytes for a block without neighbors at worst.

use forebay_block::{BLOCK_SIZE, BlockRange};
use forebay_policy::KeyHash;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

const WORDS: usize = 8;
const PAGE_BLOCKS: u64 = WORDS as u64 * 64;

/// The set of blocks seen so far.
#[derive(Default)]
pub struct Footprint {
    pages: HashMap<u64, [u64; WORDS], KeyHash>,
    blocks: u64,
}

impl Footprint {
    /// Creates an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the blocks of a request.
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

    /// Number of distinct blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Size of the distinct blocks, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks * BLOCK_SIZE as u64
    }
}
