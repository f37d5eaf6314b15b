//! The stripes that a failed cache has left: a record outside the cache says that the log no longer
//! counts for them.

use std::collections::BTreeMap;
use std::ops::Range;

use forebay_block::{STRIPE_BLOCKS, VolumeId};

use crate::contents::Bits;
use crate::key::Key;

/// The stripes left, by the number that [`stripe_of`] returns, each with its kept blocks.
#[derive(Debug, Default)]
pub struct Left(BTreeMap<u64, Bits>);

impl Left {
    /// Notes that the cache has left a stripe, except for the blocks in `kept`.
    pub fn add(&mut self, stripe: u64, kept: Bits) {
        self.0.insert(stripe, kept);
    }

    /// Returns whether the cache has left a block's stripe.
    pub fn has(&self, key: Key) -> bool {
        self.0.contains_key(&stripe_of(key))
    }

    /// Returns the kept blocks of a stripe.
    pub fn kept(&self, stripe: u64) -> Bits {
        self.0.get(&stripe).copied().unwrap_or_default()
    }

    /// Returns whether a block is one of the kept blocks of a stripe that was left.
    pub fn keeps(&self, key: Key) -> bool {
        self.kept(stripe_of(key)).get(key.0 % STRIPE_BLOCKS)
    }
}

/// Returns the volume of a stripe.
pub fn volume_of(stripe: u64) -> VolumeId {
    Key(stripe * STRIPE_BLOCKS).volume()
}

/// Returns the number of a block's stripe, unique over all volumes.
pub fn stripe_of(key: Key) -> u64 {
    key.0 / STRIPE_BLOCKS
}

/// Returns the stripes of a volume.
pub fn stripes_of(volume: VolumeId) -> Range<u64> {
    let keys = Key::range(volume);
    keys.start.0 / STRIPE_BLOCKS..keys.end.0 / STRIPE_BLOCKS
}

/// Returns the blocks of a stripe.
pub fn keys_of(stripe: u64) -> impl Iterator<Item = Key> {
    (stripe * STRIPE_BLOCKS..(stripe + 1) * STRIPE_BLOCKS).map(Key)
}
