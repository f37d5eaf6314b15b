//! The list of the blocks that a shard has cached, a part at a time.

use forebay_block::VolumeId;

/// A cached block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListedBlock {
    /// Its volume.
    pub volume: VolumeId,
    /// Its number on the volume.
    pub block: u64,
    /// Number of recent requests for it, as far as the eviction policy counts them.
    pub requests: u8,
}

/// A part of the list.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Listing {
    /// The blocks of this part, in no particular order. One that is in RAM and on the device may
    /// be there twice, and so may one that moves while the list is read.
    pub blocks: Vec<ListedBlock>,
    /// Where the next part begins; `None` after the last one.
    pub next: Option<u64>,
}
