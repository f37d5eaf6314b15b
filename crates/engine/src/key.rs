//! How the engine names a block, and maps from blocks.

use forebay_block::VolumeId;
use forebay_policy::KeyHash;
use hashbrown::HashMap;

/// A block of a volume as one number: volume in the upper 8 of 48 bits, block in the lower 40.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key(pub u64);

impl Key {
    /// All blocks of a volume.
    #[must_use]
    pub fn range(volume: VolumeId) -> std::ops::Range<Self> {
        Self(u64::from(volume.0) << 40)..Self((u64::from(volume.0) + 1) << 40)
    }

    /// The key of a block.
    pub fn new(volume: VolumeId, block: u64) -> Self {
        assert!(block < 1 << 40, "block {block} fits 40 bits");
        Self(u64::from(volume.0) << 40 | block)
    }

    /// The block's volume.
    pub fn volume(self) -> VolumeId {
        VolumeId((self.0 >> 40) as u8)
    }

    /// The block's number on its volume.
    pub fn block(self) -> u64 {
        self.0 & ((1 << 40) - 1)
    }
}

/// A map from block keys with the same order in every run.
pub type KeyMap<V> = HashMap<Key, V, KeyHash>;
