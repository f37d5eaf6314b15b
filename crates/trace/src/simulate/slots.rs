//! The store: units of blocks that moved there together, each in a slot of one to four pages.
//!
//! Any unit can be freed. A block that is rewritten or dropped leaves a hole in its unit. Where
//! each block has a page of its own, a hole is a free page; compressed blocks share pages, so their
//! slot is free when all of them are holes. That a slot needs consecutive pages is left out.

use hashbrown::HashMap;

use forebay_policy::KeyHash;

/// Blocks of a group: those of a unit lie in one.
pub const GROUP: u64 = 4;

/// Blocks of one group that moved together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unit {
    /// The first block of the group.
    pub group: u64,
    /// A bit for each block of the group that the unit holds.
    pub blocks: u8,
    /// Size of the slot.
    pub pages: u8,
}

impl Unit {
    /// The keys of its blocks.
    pub fn keys(self) -> impl Iterator<Item = u64> {
        (0..GROUP).filter(move |at| self.blocks >> at & 1 == 1).map(move |at| self.group + at)
    }
}

/// The units of a store.
pub struct Slots {
    units: Vec<Unit>,
    /// The position of each block's unit.
    at: HashMap<u64, u32, KeyHash>,
    free_pages: u64,
    /// Whether blocks are compressed, and share pages.
    packed: bool,
}

impl Slots {
    /// An empty store, of compressed blocks or of others.
    pub fn new(pages: u64, packed: bool) -> Self {
        Self { units: Vec::new(), at: HashMap::default(), free_pages: pages, packed }
    }

    /// Number of blocks.
    pub fn len(&self) -> u64 {
        self.at.len() as u64
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// The unit at a position.
    pub fn unit(&self, at: usize) -> Unit {
        self.units[at]
    }

    /// Whether the store has a block.
    pub fn contains(&self, key: u64) -> bool {
        self.at.contains_key(&key)
    }

    /// Whether a unit fits without freeing another.
    pub fn has_room(&self, pages: u8) -> bool {
        self.free_pages >= u64::from(pages)
    }

    /// Adds a unit, for which there is room, of blocks that the store does not have.
    pub fn insert(&mut self, unit: Unit) {
        self.free_pages -= u64::from(unit.pages);
        let at = self.units.len() as u32;
        self.units.push(unit);
        for key in unit.keys() {
            let old = self.at.insert(key, at);
            debug_assert!(old.is_none(), "block {key} is in two units");
        }
    }

    /// Frees a unit with all its blocks.
    pub fn free(&mut self, at: usize) -> Unit {
        let unit = self.units.swap_remove(at);
        for key in unit.keys() {
            self.at.remove(&key);
        }
        self.free_pages += u64::from(unit.pages);
        if let Some(moved) = self.units.get(at) {
            for key in moved.keys() {
                self.at.insert(key, at as u32);
            }
        }
        unit
    }

    /// Removes a block, if it is there.
    pub fn forget(&mut self, key: u64) {
        let Some(&at) = self.at.get(&key) else { return };
        let unit = &mut self.units[at as usize];
        let bit = 1 << (key - unit.group);
        if unit.blocks == bit {
            self.free(at as usize);
        } else {
            unit.blocks &= !bit;
            if !self.packed {
                unit.pages -= 1;
                self.free_pages += 1;
            }
            self.at.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_keep_a_packed_slot_until_the_last_block_goes() {
        let mut slots = Slots::new(6, true);
        slots.insert(Unit { group: 8, blocks: 0b1011, pages: 3 });
        slots.insert(Unit { group: 20, blocks: 0b0100, pages: 1 });
        assert_eq!((slots.len(), slots.units()), (4, 2));
        assert!(slots.has_room(2) && !slots.has_room(3));
        slots.forget(8);
        slots.forget(9);
        assert!(!slots.contains(9) && slots.contains(11) && !slots.has_room(3));
        slots.forget(11);
        assert!(slots.has_room(5) && slots.contains(22));
        // The last unit took the place of the first.
        assert_eq!(slots.free(0), Unit { group: 20, blocks: 0b0100, pages: 1 });
        assert_eq!((slots.len(), slots.units()), (0, 0));
        slots.forget(22);
        assert!(slots.has_room(6) && !slots.has_room(7));
    }

    #[test]
    fn a_hole_among_raw_blocks_is_a_free_page() {
        let mut slots = Slots::new(6, false);
        slots.insert(Unit { group: 8, blocks: 0b1011, pages: 3 });
        slots.forget(9);
        assert!(slots.has_room(4) && !slots.has_room(5));
        assert_eq!(slots.free(0), Unit { group: 8, blocks: 0b1001, pages: 2 });
        assert!(slots.has_room(6) && !slots.has_room(7));
    }
}
