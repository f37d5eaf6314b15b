//! The blocks that cannot be read back.

use std::collections::BTreeSet;
use std::ops::Deref;

use forebay_block::VolumeId;

use crate::key::Key;

/// Blocks that cannot be read back, counted by volume.
#[derive(Default, Debug)]
pub struct Fenced {
    keys: BTreeSet<Key>,
    volumes: Vec<u64>,
}

impl Fenced {
    /// Adds a block; returns whether it is new.
    pub fn insert(&mut self, key: Key) -> bool {
        let new = self.keys.insert(key);
        let at = usize::from(key.volume().0);
        self.volumes.resize(self.volumes.len().max(at + 1), 0);
        self.volumes[at] += u64::from(new);
        new
    }

    /// Removes a block; returns whether it was there.
    pub fn remove(&mut self, key: &Key) -> bool {
        let was = self.keys.remove(key);
        if was {
            self.volumes[usize::from(key.volume().0)] -= 1;
        }
        was
    }

    /// The number of fenced blocks of a volume.
    pub fn of_volume(&self, volume: VolumeId) -> u64 {
        self.volumes.get(usize::from(volume.0)).copied().unwrap_or(0)
    }
}

impl Deref for Fenced {
    type Target = BTreeSet<Key>;

    fn deref(&self) -> &BTreeSet<Key> {
        &self.keys
    }
}
