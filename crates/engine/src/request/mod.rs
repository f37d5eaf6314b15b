//! What clients ask for: reads, writes and flushes, from their arrival to their answer.

pub(crate) mod fetch;
pub(crate) mod flush;
pub(crate) mod merge;
pub(crate) mod op;
mod overflow;
pub(crate) mod read;
pub(crate) mod write;

use crate::key::{Key, KeyMap};
use crate::locks::Locks;
use crate::request::op::Op;
use crate::slab::{Id, Slab};
use fetch::Fetch;
use overflow::Overflow;

/// The requests that are being served.
#[derive(Default)]
pub struct Requests {
    ops: Slab<Op>,
    /// Who may change which block.
    locks: Locks,
    /// Reads of primaries, and the blocks that they bring.
    fetches: Slab<Fetch>,
    fetching: KeyMap<Id>,
    /// Flushes that failed, and whose other parts have not ended.
    answered: usize,
    /// Whether writes go past a log that has no room.
    overflow: Overflow,
}

impl Requests {
    /// A request.
    pub fn get(&self, id: Id) -> &Op {
        self.ops.get(id)
    }

    /// A request, to change.
    pub fn get_mut(&mut self, id: Id) -> &mut Op {
        self.ops.get_mut(id)
    }

    /// The number of requests.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// The number of requests that wait for an answer.
    pub fn unanswered(&self) -> usize {
        self.ops.len() - self.answered
    }

    /// The number of reads of primaries.
    pub fn fetches(&self) -> usize {
        self.fetches.len()
    }

    /// Whether somebody is about to change a block.
    pub fn is_locked(&self, key: Key) -> bool {
        self.locks.is_locked(key)
    }

    /// Who may change which block.
    pub fn locks(&self) -> &Locks {
        &self.locks
    }
}
