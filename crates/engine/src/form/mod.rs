//! The form in which a block is stored: whole, compressed, as a delta, against a similar block, or
//! by sharing the payload of an equal one. [`Forms::store_written`], [`Forms::store_admitted`] and
//! [`Forms::store_copy`] choose the form for client writes, for misses, and for reclaim's copies.
//! They put the block into the record being built, which must have room for it.

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

use std::time::Duration;

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

/// State for storing blocks, and for reading blocks that are stored against others.
pub struct Forms {
    duplicates: Duplicates,
    dense: Dense,
    similar: Similar,
    codec: Compressor,
    /// Buffer for an encoded block.
    encoded: Box<[u8; BLOCK_SIZE]>,
    /// Whether recent tries to make a delta succeeded.
    delta_tries: Tries,
    associates: Slab<Associate>,
    /// The CPU budget for work that no client waits for.
    background: Pace,
}

impl Forms {
    /// Starts with nothing known. If `similar`, similar blocks are searched among `blocks` blocks.
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

    /// The CPU budget for work that no client waits for.
    pub fn background(&self) -> &Pace {
        &self.background
    }

    /// Notes for how long the thread has rested.
    pub fn rested(&mut self, rest: Duration) {
        self.background.add(rest, dense::REST_SHARE);
    }

    /// Begins a turn of the event loop.
    pub fn begin_turn(&mut self) {
        self.background.begin_turn();
        self.similar.drop_piece();
    }

    /// Whether there is memory to be freed, which the next turns do.
    pub fn has_given_up(&self) -> bool {
        self.similar.has_given_up()
    }
}

#[cfg(test)]
mod tests;
