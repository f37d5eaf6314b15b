//! The RAM tier: the newest bytes of recent blocks, least recently used out first.
//!
//! What it holds is always the newest applied version of a block, dirty or clean, so a reader
//! need not ask the index. It is fixed in size; a size of zero is allowed.

use std::hint::black_box;

use forebay_block::BLOCK_SIZE;
use forebay_policy::{KeyHash, Recent};
use hashbrown::HashMap;

use crate::index::Key;

/// A map from block keys with the same order in every run.
pub type KeyMap<V> = HashMap<Key, V, KeyHash>;

/// Recent blocks of one shard.
pub struct Ram {
    recent: Recent,
    bytes: Vec<u8>,
}

impl Ram {
    /// Room for `bytes / 4096` blocks.
    pub fn new(bytes: u64) -> Self {
        let capacity = usize::try_from(bytes).expect("the RAM tier fits memory") / BLOCK_SIZE;
        Self { recent: Recent::new(capacity), bytes: vec![0; capacity * BLOCK_SIZE] }
    }

    /// Blocks in it.
    pub fn len(&self) -> usize {
        self.recent.len()
    }

    /// The place of a block, for [`Ram::warm`].
    pub fn find(&self, key: Key) -> Option<u32> {
        self.recent.find(key.0)
    }

    /// Looks at what [`Ram::get`] will need of a place: its neighbours' numbers, and where its
    /// bytes begin, from where on the processor fetches by itself.
    pub fn warm(&self, place: u32) {
        self.recent.warm(place);
        black_box(self.bytes[place as usize * BLOCK_SIZE]);
    }

    /// Looks at the neighbours of a place that was looked at before.
    pub fn warm_neighbours(&self, place: u32) {
        self.recent.warm_neighbours(place);
    }

    /// The block's bytes, which become the most recent.
    pub fn get(&mut self, key: Key) -> Option<&[u8]> {
        let place = self.recent.touch(key.0)?;
        Some(&self.bytes[range(place)])
    }

    /// The block's bytes, without making them recent.
    pub fn peek(&self, key: Key) -> Option<&[u8]> {
        let place = self.recent.find(key.0)?;
        Some(&self.bytes[range(place)])
    }

    /// Stores the newest bytes of a block, in place of the least recent one if it is full.
    pub fn put(&mut self, key: Key, block: &[u8]) {
        assert_eq!(block.len(), BLOCK_SIZE, "the RAM tier holds whole blocks");
        if let Some(place) = self.recent.put(key.0) {
            self.bytes[range(place)].copy_from_slice(block);
        }
    }

    /// Moves a block's bytes to another key, in place of what it had.
    pub fn rename(&mut self, from: Key, to: Key) {
        self.recent.rename(from.0, to.0);
    }

    /// Forgets a block.
    pub fn remove(&mut self, key: Key) {
        self.recent.forget(key.0);
    }
}

fn range(place: u32) -> std::ops::Range<usize> {
    let start = place as usize * BLOCK_SIZE;
    start..start + BLOCK_SIZE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(n: u8) -> Vec<u8> {
        vec![n; BLOCK_SIZE]
    }

    #[test]
    fn the_least_recent_goes_first() {
        let mut ram = Ram::new(3 * BLOCK_SIZE as u64);
        for n in 0..3 {
            ram.put(Key(n), &block(n as u8));
        }
        assert_eq!(ram.get(Key(0)), Some(&block(0)[..]));
        ram.put(Key(3), &block(3));
        assert_eq!(ram.peek(Key(1)), None);
        ram.put(Key(2), &block(9));
        ram.remove(Key(3));
        ram.put(Key(4), &block(4));
        ram.put(Key(5), &block(5));
        assert_eq!(ram.peek(Key(0)), None);
        assert_eq!(ram.peek(Key(2)), Some(&block(9)[..]));
        assert_eq!(ram.len(), 3);
    }

    #[test]
    fn looking_ahead_makes_nothing_recent() {
        let mut ram = Ram::new(2 * BLOCK_SIZE as u64);
        ram.put(Key(0), &block(0));
        ram.put(Key(1), &block(1));
        let slots = [0, 1].map(|n| ram.find(Key(n)).unwrap());
        slots.iter().rev().for_each(|&slot| ram.warm(slot));
        slots.iter().rev().for_each(|&slot| ram.warm_neighbours(slot));
        ram.put(Key(2), &block(2));
        assert_eq!((ram.find(Key(0)), ram.find(Key(1))), (None, Some(slots[1])));
    }

    #[test]
    fn no_room_is_no_error() {
        let mut ram = Ram::new(100);
        ram.put(Key(1), &block(1));
        assert_eq!(ram.get(Key(1)), None);
        assert_eq!(ram.len(), 0);
    }
}
