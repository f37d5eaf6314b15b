//! The RAM tier: recent blocks, the least recently used out first.

use std::hash::{BuildHasherDefault, Hasher};

use hashbrown::HashMap;

/// Scrambles block numbers; the same in every run.
#[derive(Default)]
pub struct KeyHasher(u64);

/// Makes [`KeyHasher`]s.
pub type KeyHash = BuildHasherDefault<KeyHasher>;

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, n: u64) {
        let product = u128::from(self.0 ^ n ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

const NONE: u32 = u32::MAX;

struct Link {
    key: u64,
    newer: u32,
    older: u32,
}

/// Recent blocks.
pub struct Recent {
    map: HashMap<u64, u32, KeyHash>,
    links: Vec<Link>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    capacity: usize,
}

impl Recent {
    /// Room for so many blocks; none is allowed.
    pub fn new(capacity: usize) -> Self {
        assert!(capacity < NONE as usize, "a RAM tier is below 16 TiB");
        Self {
            map: HashMap::default(),
            links: Vec::new(),
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

    /// Whether the block is in it.
    pub fn contains(&self, key: u64) -> bool {
        self.map.contains_key(&key)
    }

    /// Makes a block the most recent, if it is in it; says whether it is.
    pub fn touch(&mut self, key: u64) -> bool {
        let Some(&at) = self.map.get(&key) else { return false };
        self.unlink(at);
        self.link_newest(at);
        true
    }

    /// Brings a block in, or makes it recent.
    pub fn put(&mut self, key: u64) {
        if self.capacity == 0 || self.touch(key) {
            return;
        }
        if self.map.len() == self.capacity {
            let oldest = self.links[self.oldest as usize].key;
            self.forget(oldest);
        }
        let link = Link { key, newer: NONE, older: NONE };
        let at = match self.free.pop() {
            Some(at) => {
                self.links[at as usize] = link;
                at
            }
            None => {
                self.links.push(link);
                self.links.len() as u32 - 1
            }
        };
        self.map.insert(key, at);
        self.link_newest(at);
    }

    /// Takes a block out.
    pub fn forget(&mut self, key: u64) {
        if let Some(at) = self.map.remove(&key) {
            self.unlink(at);
            self.free.push(at);
        }
    }

    /// Takes out all blocks but some.
    pub fn retain(&mut self, keep: impl Fn(u64) -> bool) {
        let gone: Vec<u64> = self.map.keys().copied().filter(|&key| !keep(key)).collect();
        gone.into_iter().for_each(|key| self.forget(key));
    }

    fn link_newest(&mut self, at: u32) {
        let older = std::mem::replace(&mut self.newest, at);
        let link = &mut self.links[at as usize];
        (link.newer, link.older) = (NONE, older);
        match older {
            NONE => self.oldest = at,
            _ => self.links[older as usize].newer = at,
        }
    }

    fn unlink(&mut self, at: u32) {
        let Link { newer, older, .. } = self.links[at as usize];
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
