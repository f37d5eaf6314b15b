//! The stripes that the cache has left: those of a failed cache device for which a record outside
//! of the cache says that the log does not count.

use std::collections::BTreeMap;
use std::ops::Range;

use forebay_block::{STRIPE_BLOCKS, VolumeId};

use crate::contents::Bits;
use crate::key::Key;

/// The stripes left, by the number that [`stripe_of`] gives, with the blocks that were kept.
#[derive(Debug, Default)]
pub struct Left(BTreeMap<u64, Bits>);

impl Left {
    /// The cache has left a stripe, but for the blocks `kept`.
    pub fn add(&mut self, stripe: u64, kept: Bits) {
        self.0.insert(stripe, kept);
    }

    /// Whether the log has nothing to say of a block's stripe.
    pub fn has(&self, key: Key) -> bool {
        self.0.contains_key(&stripe_of(key))
    }

    /// The blocks of a stripe that were kept.
    pub fn kept(&self, stripe: u64) -> Bits {
        self.0.get(&stripe).copied().unwrap_or_default()
    }

    /// Whether a block was kept, of a stripe that was left.
    pub fn keeps(&self, key: Key) -> bool {
        self.kept(stripe_of(key)).get(key.0 % STRIPE_BLOCKS)
    }
}

/// The number of a block's stripe among those of all volumes.
pub fn stripe_of(key: Key) -> u64 {
    key.0 / STRIPE_BLOCKS
}

/// The stripes of a volume.
pub fn stripes_of(volume: VolumeId) -> Range<u64> {
    let keys = Key::range(volume);
    keys.start.0 / STRIPE_BLOCKS..keys.end.0 / STRIPE_BLOCKS
}

/// The blocks of a stripe.
pub fn keys_of(stripe: u64) -> impl Iterator<Item = Key> {
    (stripe * STRIPE_BLOCKS..(stripe + 1) * STRIPE_BLOCKS).map(Key)
}
