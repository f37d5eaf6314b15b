//! Block keys, and maps indexed by them.

use forebay_block::VolumeId;
use forebay_policy::KeyHash;
use hashbrown::HashMap;

/// A block of a volume as one 48-bit number: the volume in the upper 8 bits, the block in the lower
/// 40.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key(pub u64);

impl Key {
    /// Returns the keys of all blocks of a volume.
    #[must_use]
    pub fn range(volume: VolumeId) -> std::ops::Range<Self> {
        Self(u64::from(volume.0) << 40)..Self((u64::from(volume.0) + 1) << 40)
    }

    /// Returns the key of a block.
    pub fn new(volume: VolumeId, block: u64) -> Self {
        assert!(block < 1 << 40, "block {block} fits 40 bits");
        Self(u64::from(volume.0) << 40 | block)
    }

    /// Returns the block's volume.
    pub fn volume(self) -> VolumeId {
        VolumeId((self.0 >> 40) as u8)
    }

    /// Returns the block's number on its volume.
    pub fn block(self) -> u64 {
        self.0 & ((1 << 40) - 1)
    }
}

/// A map indexed by block key, with the same iteration order in every run.
pub type KeyMap<V> = HashMap<Key, V, KeyHash>;
