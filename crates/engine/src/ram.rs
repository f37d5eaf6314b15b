//! The RAM tier: the newest bytes of recent blocks, least recently used out first.
//!
//! What it holds is always the newest applied version of a block, dirty or clean, so a reader
//! need not ask the index. It is fixed in size; a size of zero is allowed.

use std::hash::{BuildHasherDefault, Hasher};
use std::hint::black_box;

use forebay_block::BLOCK_SIZE;
use hashbrown::HashMap;

use crate::index::Key;

const NONE: u32 = u32::MAX;

/// Scrambles block keys; the same in every run, so that runs can be repeated.
#[derive(Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, n: u64) {
        let product = u128::from(self.0 ^ n ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

/// A map from block keys with the same order in every run.
pub type KeyMap<V> = HashMap<Key, V, BuildHasherDefault<KeyHasher>>;

struct Link {
    key: Key,
    newer: u32,
    older: u32,
}

/// Recent blocks of one shard.
pub struct Ram {
    map: KeyMap<u32>,
    links: Vec<Link>,
    bytes: Vec<u8>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    capacity: usize,
}

impl Ram {
    /// Room for `bytes / 4096` blocks.
    pub fn new(bytes: u64) -> Self {
        let capacity = usize::try_from(bytes).expect("the RAM tier fits memory") / BLOCK_SIZE;
        assert!(capacity < NONE as usize, "the RAM tier of a shard is below 16 TiB");
        Self {
            map: KeyMap::default(),
            links: Vec::new(),
            bytes: vec![0; capacity * BLOCK_SIZE],
            free: Vec::new(),
            newest: NONE,
            oldest: NONE,
            capacity,
        }
    }

    /// Blocks in it.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// The place of a block, for [`Ram::warm`].
    pub fn find(&self, key: Key) -> Option<u32> {
        self.map.get(&key).copied()
    }

    /// Looks at what [`Ram::get`] will need of a place: its neighbours' numbers, and where its
    /// bytes begin, from where on the processor fetches by itself.
    pub fn warm(&self, slot: u32) {
        let link = &self.links[slot as usize];
        let start = slot as usize * BLOCK_SIZE;
        black_box(link.newer ^ u32::from(self.bytes[start]));
    }

    /// Looks at the neighbours of a place that was looked at before.
    pub fn warm_neighbours(&self, slot: u32) {
        let link = &self.links[slot as usize];
        for near in [link.newer, link.older] {
            black_box(self.links.get(near as usize).map(|link| link.newer));
        }
    }

    /// The block's bytes, which become the most recent.
    pub fn get(&mut self, key: Key) -> Option<&[u8]> {
        let slot = *self.map.get(&key)?;
        if self.newest != slot {
            self.unlink(slot);
            self.link_newest(slot);
        }
        let start = slot as usize * BLOCK_SIZE;
        Some(&self.bytes[start..start + BLOCK_SIZE])
    }

    /// The block's bytes, without making them recent.
    pub fn peek(&self, key: Key) -> Option<&[u8]> {
        let start = *self.map.get(&key)? as usize * BLOCK_SIZE;
        Some(&self.bytes[start..start + BLOCK_SIZE])
    }

    /// Stores the newest bytes of a block, in place of the least recent one if it is full.
    pub fn put(&mut self, key: Key, block: &[u8]) {
        assert_eq!(block.len(), BLOCK_SIZE, "the RAM tier holds whole blocks");
        if self.capacity == 0 {
            return;
        }
        let slot = match self.map.get(&key) {
            Some(&slot) => {
                self.unlink(slot);
                slot
            }
            None => self.slot_for(key),
        };
        self.link_newest(slot);
        let start = slot as usize * BLOCK_SIZE;
        self.bytes[start..start + BLOCK_SIZE].copy_from_slice(block);
    }

    /// Moves a block's bytes to another key, in place of what it had.
    pub fn rename(&mut self, from: Key, to: Key) {
        self.remove(to);
        if let Some(slot) = self.map.remove(&from) {
            self.links[slot as usize].key = to;
            self.map.insert(to, slot);
        }
    }

    /// Forgets a block.
    pub fn remove(&mut self, key: Key) {
        if let Some(slot) = self.map.remove(&key) {
            self.unlink(slot);
            self.free.push(slot);
        }
    }

    fn slot_for(&mut self, key: Key) -> u32 {
        let slot = if let Some(slot) = self.free.pop() {
            self.links[slot as usize].key = key;
            slot
        } else if self.links.len() < self.capacity {
            self.links.push(Link { key, newer: NONE, older: NONE });
            self.links.len() as u32 - 1
        } else {
            let slot = self.oldest;
            self.unlink(slot);
            let link = &mut self.links[slot as usize];
            self.map.remove(&link.key);
            link.key = key;
            slot
        };
        self.map.insert(key, slot);
        slot
    }

    fn link_newest(&mut self, slot: u32) {
        let older = std::mem::replace(&mut self.newest, slot);
        let link = &mut self.links[slot as usize];
        link.newer = NONE;
        link.older = older;
        match older {
            NONE => self.oldest = slot,
            _ => self.links[older as usize].newer = slot,
        }
    }

    fn unlink(&mut self, slot: u32) {
        let Link { newer, older, .. } = self.links[slot as usize];
        match newer {
            NONE => self.newest = older,
            _ => self.links[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.links[older as usize].newer = newer,
        }
    }
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
