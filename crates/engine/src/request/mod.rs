//! Client requests: reads, writes and flushes, from arrival to answer.

pub(crate) mod fetch;
pub(crate) mod flush;
mod held;
pub(crate) mod merge;
pub(crate) mod op;
mod overflow;
mod past;
mod prefetch;
pub(crate) mod read;
pub(crate) mod write;

use std::collections::VecDeque;

use forebay_block::{BlockRange, Instant, IoBuf, IoError, VolumeId};

use crate::api::{Effects, Reply, RequestId, Tier};
use crate::key::KeyMap;
use crate::limits::step;
use crate::request::op::Op;
use crate::slab::{Id, Slab};
use fetch::Fetch;

/// The requests that are being served.
#[derive(Default)]
pub struct Requests {
    ops: Slab<Op>,
    /// Reads of primaries in flight, and the fetch that reads each block.
    fetches: Slab<Fetch>,
    fetching: KeyMap<Id>,
    /// Parts of reads that the primary failed, and that wait until all of the log is loaded.
    parked: Vec<(Id, VolumeId, BlockRange)>,
    /// Number of flushes that have failed and been answered, but whose other parts have not ended.
    answered: usize,
    /// Since when writes have found no room in the log.
    no_room_since: Option<Instant>,
    /// Writes that have got a lock they waited for, and have not gone on.
    unlocked: VecDeque<Id>,
    /// Whether one of them is going on.
    follows: bool,
    /// Blocks that writes have put into records in this turn.
    logged: u64,
}

/// Limit on the blocks that writes put into records in one turn: to compress and to copy them may
/// take 6 us each.
const LOGGED_MAX: u64 = step(256) as u64;

impl Requests {
    /// The operation with this ID.
    pub fn get(&self, id: Id) -> &Op {
        self.ops.get(id)
    }

    /// The operation with this ID, for changes.
    pub fn get_mut(&mut self, id: Id) -> &mut Op {
        self.ops.get_mut(id)
    }

    /// The number of operations.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// The number of operations that the client still waits for.
    pub fn unanswered(&self) -> usize {
        self.ops.len() - self.answered
    }

    /// Begins a turn of the event loop.
    pub fn begin_turn(&mut self) {
        self.logged = 0;
    }

    /// Whether writes have put as many blocks into records in this turn as they may.
    pub fn has_logged_enough(&self) -> bool {
        self.logged >= LOGGED_MAX
    }

    /// The number of reads of primaries in flight.
    pub fn fetches(&self) -> usize {
        self.fetches.len()
    }
}

/// Answers a request other than a write.
fn reply(
    fx: &mut Effects,
    id: RequestId,
    result: Result<(), IoError>,
    buf: IoBuf,
    tier: Option<Tier>,
) {
    fx.replies.push(Reply { id, result, buf, direct: None, tier });
}

#[cfg(test)]
mod tests;
