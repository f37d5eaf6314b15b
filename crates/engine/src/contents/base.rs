//! Bases: a base is the stored block that a delta or a similar block is encoded against: the older
//! version for a delta, another block's payload for a similar block.
//!
//! A base counts as living in its segment, and as dirty while the block is. When its segment is
//! reclaimed, the block is written whole again or leaves the cache, so it never outlives its base.

use forebay_format::EntryKind;

use crate::contents::{Contents, Place};
use crate::key::Key;
use crate::ram::Ram;

/// The payload that a block is stored against.
#[derive(Clone, Copy, Debug)]
pub struct Base {
    /// Place of the base. Its `dirty` is that of the block stored against it.
    pub place: Place,
    /// Whether the base was written as another block's content, so that the payload is counted
    /// there.
    pub of_another: bool,
}

/// The key under which the RAM tier keeps a block's base. Keys of blocks have 48 bits, so the two
/// never collide.
pub fn base_key(key: Key) -> Key {
    Key(key.0 | BASE)
}

/// The block whose base, or whose own bytes, the RAM tier keeps under this key.
pub fn block_of(key: Key) -> Key {
    Key(key.0 & !BASE)
}

const BASE: u64 = 1 << 63;

impl Contents {
    /// The base that a delta of the block has, or would have.
    pub fn base_of(&self, key: Key) -> Option<Place> {
        let now = self.get(key)?;
        match now.kind {
            EntryKind::Delta => self.bases.get(&key).map(|base| base.place),
            kind => kind.is_whole().then_some(now),
        }
    }

    /// The base of a block that is stored as a delta or against a similar block. Reading the block
    /// needs both.
    pub fn base_of_associate(&self, key: Key) -> Place {
        self.bases.get(&key).expect("a block stored against a base has one").place
    }

    /// Whether a block is stored against a base.
    pub fn has_base(&self, key: Key) -> bool {
        self.bases.contains_key(&key)
    }

    /// The number of blocks that are stored against a base.
    pub fn bases(&self) -> u64 {
        self.bases.len() as u64
    }

    /// The key under which the RAM tier keeps a block's base, if it has it.
    pub fn base_in_ram(&self, key: Key) -> Key {
        if self.has_base(key) { base_key(key) } else { key }
    }

    /// Makes a base count as dirty while its delta is dirty, so that its segment is not considered
    /// dispensable.
    pub(super) fn set_base_dirty(&mut self, key: Key, dirty: bool) {
        let Some(Base { place: base, .. }) = self.bases.get_mut(&key) else { return };
        let was = std::mem::replace(&mut base.dirty, dirty);
        let segment = base.segment;
        self.count_dirty(segment, key.volume(), was, dirty);
    }

    pub(super) fn release_base(&mut self, key: Key, ram: &mut Ram) {
        let Some(Base { place, of_another }) = self.bases.remove(&key) else { return };
        if of_another {
            self.segments[place.segment as usize].live -= 1;
            self.count_dirty(place.segment, key.volume(), place.dirty, false);
        } else {
            self.count_out(key, &place);
            ram.remove(base_key(key));
        }
    }
}
