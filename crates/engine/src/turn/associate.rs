//! Blocks that are stored against others: who wanted them gets them.

use forebay_block::BLOCK_SIZE;

use crate::Engine;
use crate::api::Effects;
use crate::form::{Associate, AssociateOwner};

impl Engine {
    pub(crate) fn associate_made(&mut self, made: &Associate, fx: &mut Effects) {
        let mut room = [0; BLOCK_SIZE];
        let block = made.block(&mut room);
        let Associate { item, error, .. } = made;
        match made.owner {
            AssociateOwner::Read(op) => self.block_read(op, item, block, error.as_ref(), fx),
            AssociateOwner::Destage(destage, at) => {
                self.destage_block_read(destage, at, block, error.clone(), fx);
            }
            AssociateOwner::Compare(at) => self.compare_block(at, block, fx),
            AssociateOwner::Rebase => self.rebase_read(item, block, error.as_ref(), fx),
        }
    }
}
