//! Who may change a block: one operation at a time, in the order they asked.
//!
//! An operation takes the blocks of its range from the lowest up and waits for each while it
//! holds those before, so there is no deadlock.

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
    /// Takes the block for `op`, or queues `op` for it.
    pub fn acquire(&mut self, key: Key, op: Id) -> bool {
        if let Some(lock) = self.held.get_mut(&key) {
            lock.waiters.push_back(op);
            return false;
        }
        self.held.insert(key, Lock { holder: op, waiters: VecDeque::new() });
        true
    }

    /// Gives the block to the next in line, who is returned.
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

    /// Whether somebody is about to change the block.
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
