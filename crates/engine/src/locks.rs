//! Block locks: one operation at a time may change a block, in the order of arrival.
//!
//! An operation locks the blocks of its range in ascending order, and holds the earlier ones while
//! it waits for the next. So there is no deadlock.

use std::collections::VecDeque;

use crate::key::Key;
use crate::key::KeyMap;
use crate::slab::Id;

#[derive(Debug)]
struct Lock {
    holder: Id,
    waiters: VecDeque<Id>,
}

/// The locked blocks of one shard.
#[derive(Default, Debug)]
pub struct Locks {
    held: KeyMap<Lock>,
}

impl Locks {
    /// Locks the block for `op` and returns true, or queues `op` for it and returns false.
    pub fn acquire(&mut self, key: Key, op: Id) -> bool {
        if let Some(lock) = self.held.get_mut(&key) {
            lock.waiters.push_back(op);
            return false;
        }
        self.held.insert(key, Lock { holder: op, waiters: VecDeque::new() });
        true
    }

    /// Releases the block; returns the next operation in line, which now holds it.
    pub fn release(&mut self, key: Key, op: Id) -> Option<Id> {
        let lock = self.held.get_mut(&key).expect("a lock is released by its holder");
        assert_eq!(lock.holder, op, "a lock is released by its holder");
        match lock.waiters.pop_front() {
            Some(next) => {
                lock.holder = next;
                Some(next)
            }
            None => {
                self.held.remove(&key);
                None
            }
        }
    }

    /// Returns whether an operation holds the block.
    pub fn is_locked(&self, key: Key) -> bool {
        !self.held.is_empty() && self.held.contains_key(&key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_are_served_in_order() {
        let mut locks = Locks::default();
        assert!(locks.acquire(Key(1), Id(1)));
        assert!(!locks.acquire(Key(1), Id(2)));
        assert!(!locks.acquire(Key(1), Id(3)));
        assert!(locks.is_locked(Key(1)));
        assert_eq!(locks.release(Key(1), Id(1)), Some(Id(2)));
        assert_eq!(locks.release(Key(1), Id(2)), Some(Id(3)));
        assert_eq!(locks.release(Key(1), Id(3)), None);
        assert!(!locks.is_locked(Key(1)));
    }
}
