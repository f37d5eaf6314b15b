//! Cuts of ordered volumes: the messages between the shards and the owner of them all.
//!
//! A *cut* is a version of every dirty block of a volume, in all shards: what a disk could have had
//! at one moment. An ordered volume is destaged cut by cut. Each shard first *stages* its part, so
//! that it can write it without the cache device. When all shards have staged their parts, all
//! write them. The next cut is taken when the primary has flushed the whole one.
//!
//! The shards do not take their parts at the same instant, nor any of them its own at once. A
//! client that sees a flush answered may send a write that depends on the flushed ones. So from the
//! beginning of its part on, a shard withholds the answers to flushes, and to writes with FUA,
//! until every shard has taken its part. Then no part holds a write that depends on one that
//! another part lacks.

use forebay_block::VolumeId;

/// The progress of a shard with its part of a cut. The owner passes it to the gate of the volume
/// (`CutGate` in crate `volume`), and the gate's orders to all shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CutReport {
    /// The volume.
    pub volume: VolumeId,
    /// The progress.
    pub news: CutNews,
}

/// What a shard reports of a cut. Numbers are those of the orders.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CutNews {
    /// Blocks should be destaged: a cut is wanted.
    Wanted,
    /// The part is taken.
    Taken {
        /// Number of the cut.
        number: u64,
        /// No block becomes dirty any more in this shard: the cache device has failed.
        last: bool,
        /// The part has all dirty blocks.
        whole: bool,
    },
    /// The part is durable in the log, and in memory.
    Staged(u64),
    /// The primary has the part durably.
    Written(u64),
    /// The part cannot be staged, or the shard stops.
    Abandoned(u64),
}

/// What the gate of a volume orders every shard to do. A shard ignores orders for other cuts than
/// its current one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CutOrder {
    /// Take a part, and withhold answers from its beginning on.
    Take(u64),
    /// Give the answers: every shard has taken its part.
    Release(u64),
    /// Write the part: every shard has staged its own.
    Write {
        /// Number of the cut.
        number: u64,
        /// Nothing becomes dirty any more in any shard.
        last: bool,
    },
    /// Forget the part; nothing of the cut was written.
    Abandon(u64),
}
