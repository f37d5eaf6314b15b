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
            AssociateOwner::Read(op) => {
                self.requests.block_read(&mut self.cache, op, item, block, error.as_ref(), fx)
            }
            AssociateOwner::Destage(destage, at) => {
                let error = error.clone();
                self.destaging.put_together(&mut self.cache, destage, at, block, error, fx);
            }
            AssociateOwner::Compare(at) => {
                self.compare.put_together(&mut self.cache, at, block, fx)
            }
            AssociateOwner::Rebase => {
                self.reclaim.put_together(&mut self.cache, item, block, error.as_ref(), fx);
            }
        }
    }
}
