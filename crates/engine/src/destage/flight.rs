//! The destages in flight, and the one of them that decides about a block: it has the version that
//! set out last.

use std::collections::BTreeSet;

use forebay_block::STRIPE_BLOCKS;

use crate::destage::{Destage, Version};
use crate::key::Key;
use crate::slab::{Id, Slab};

/// Destages by their id, and by stripe those that still decide about a block of it. At most one
/// decides about a block, so that a stripe has no more of these than blocks, whatever else is in
/// flight.
#[derive(Default)]
pub(super) struct Flight {
    destages: Slab<Destage>,
    deciding: BTreeSet<(u64, Id)>,
}

impl Flight {
    /// Adds a destage and returns its id.
    pub fn insert(&mut self, destage: Destage) -> Id {
        let stripe = stripe_of(&destage);
        let id = self.destages.insert(destage);
        self.deciding.insert((stripe, id));
        id
    }

    /// Takes a destage out; its id may be reused.
    pub fn remove(&mut self, id: Id) -> Destage {
        let destage = self.destages.remove(id);
        self.deciding.remove(&(stripe_of(&destage), id));
        destage
    }

    /// The destage with an id.
    pub fn get(&self, id: Id) -> &Destage {
        self.destages.get(id)
    }

    /// The same, for changes.
    pub fn get_mut(&mut self, id: Id) -> &mut Destage {
        self.destages.get_mut(id)
    }

    /// All destages, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = (Id, &Destage)> {
        self.destages.iter()
    }

    /// The number of destages.
    pub fn len(&self) -> usize {
        self.destages.len()
    }

    /// The destage that decides about a block, with the position and the version of the block in
    /// it.
    pub fn deciding(&self, key: Key) -> Option<(Id, usize, &Version)> {
        self.candidates(key).find_map(|(id, destage)| {
            let at = key.block().checked_sub(destage.blocks.first)? as usize;
            let version = destage.versions.get(at).filter(|version| !version.passed)?;
            Some((id, at, version))
        })
    }

    /// The destages that decide about a block of the same stripe.
    pub fn candidates(&self, key: Key) -> impl Iterator<Item = (Id, &Destage)> {
        let stripe = key.0 / STRIPE_BLOCKS;
        let ids = self.deciding.range((stripe, Id(0))..=(stripe, Id(u32::MAX)));
        ids.map(|&(_, id)| (id, self.destages.get(id)))
    }

    /// Notes that a newer destage decides about the block at position `at` of one.
    pub fn pass(&mut self, id: Id, at: usize) {
        let destage = self.destages.get_mut(id);
        destage.versions[at].passed = true;
        if destage.versions.iter().all(|version| version.passed) {
            let stripe = stripe_of(destage);
            self.deciding.remove(&(stripe, id));
        }
    }
}

/// The stripe that has all blocks of a destage.
fn stripe_of(destage: &Destage) -> u64 {
    Key::new(destage.volume, destage.blocks.first).0 / STRIPE_BLOCKS
}
