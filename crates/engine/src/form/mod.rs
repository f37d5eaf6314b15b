//! How a block is stored: whole, compressed, as a delta, against a similar one, or by the payload
//! of an equal one. [`Forms::store_written`], [`Forms::store_admitted`] and [`Forms::store_copy`]
//! decide that for what clients write, what misses bring in, and what reclaim copies. They put the
//! block into the record that is being built, which must have room for it.

pub(crate) mod alike;
mod context;
mod copied;
mod delta;
mod delta_read;
mod dense;
mod duplicates;
mod payload;
mod similar;
mod whole;

use forebay_block::BLOCK_SIZE;
use forebay_codec::Compressor;

pub use context::Context;
pub use copied::{Copied, Like};
pub use delta_read::{Associate, AssociateOwner};
pub use payload::decode;
pub use similar::similar_max;

use crate::pace::Pace;
use crate::slab::Slab;
use crate::tries::Tries;
use dense::Dense;
use duplicates::Duplicates;
use similar::Similar;

/// What is needed for storing blocks, and for reading those that are stored against others.
pub struct Forms {
    duplicates: Duplicates,
    dense: Dense,
    similar: Similar,
    codec: Compressor,
    /// An encoded block.
    encoded: Box<[u8; BLOCK_SIZE]>,
    /// How making deltas went lately.
    delta_tries: Tries,
    associates: Slab<Associate>,
    /// What may be spent on what no client waits for.
    background: Pace,
}

impl Forms {
    /// Nothing is known; `similar` blocks are looked for among `blocks` if that is wanted.
    pub fn new(similar: bool, blocks: u64) -> Self {
        Self {
            duplicates: Duplicates::new(),
            dense: Dense::new(),
            similar: Similar::new(similar, blocks),
            codec: Compressor::new(),
            encoded: Box::new([0; BLOCK_SIZE]),
            delta_tries: Tries::default(),
            associates: Slab::default(),
            background: dense::background(),
        }
    }

    /// The processor time for what no client waits for.
    pub fn background(&self) -> &Pace {
        &self.background
    }

    /// A turn of the event loop begins.
    pub fn begin_turn(&mut self) {
        self.background.begin_turn();
    }
}

#[cfg(test)]
mod tests;
