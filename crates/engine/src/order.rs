//! The order in which the blocks of a volume are destaged: this shard's part in the cuts of an
//! ordered volume ([`crate::api::cut`]).

use forebay_block::Instant;

use crate::slab::Id;

/// The order of one volume.
#[derive(Debug)]
pub(crate) struct Order {
    /// The most dirty blocks of an ordered volume; `None` if the volume is not ordered.
    pub blocks_max: Option<u64>,
    /// More blocks were dirty at the start than a cut may have. They are destaged in any order
    /// first.
    pub is_behind: bool,
    /// A cut was requested, and none has been ordered since.
    pub asked: bool,
    /// The cut that was ordered and not taken yet.
    pub due: Option<u64>,
    /// The last cut that was taken, if answers are withheld since then.
    pub withholds: Option<u64>,
    /// Flushes and writes with FUA whose answers are withheld.
    pub withheld: Vec<Id>,
    /// The cache device has failed, and the last cut is staged in all shards: stripes may leave it.
    pub may_leave: bool,
    /// Blocks of the cut that is being destaged.
    pub cut_blocks: u64,
    /// When the last cut that the primary has was taken; before the first, the start.
    pub primary_since: Instant,
}

impl Order {
    /// The order of a volume at the start, `now`; `blocks_max` as in [`Order::blocks_max`].
    pub fn new(blocks_max: Option<u64>, now: Instant) -> Self {
        Self {
            blocks_max,
            is_behind: false,
            asked: false,
            due: None,
            withholds: None,
            withheld: Vec::new(),
            may_leave: blocks_max.is_none(),
            cut_blocks: 0,
            primary_since: now,
        }
    }

    /// Takes the operations whose answers are due, now that cut `number` needs them no longer
    /// withheld.
    pub fn release(&mut self, number: u64) -> Vec<Id> {
        if self.withholds != Some(number) {
            return Vec::new();
        }
        self.withholds = None;
        std::mem::take(&mut self.withheld)
    }
}
