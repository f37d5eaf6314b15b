//! Blocks that are stored against others: their parts are read, and who wanted them gets them.

use forebay_block::{BLOCK_SIZE, Completion};

use crate::Engine;
use crate::api::Effects;
use crate::contents::{Place, Stored};
use crate::form::{Associate, AssociateOwner};
use crate::key::Key;
use crate::log::read::SegmentRead;
use crate::slab::Id;

impl Engine {
    /// What `look` makes of a block's newest applied bytes, if RAM has them.
    pub(crate) fn peek_applied<T>(&self, key: Key, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        self.ram.peek_applied(self.requests.locks(), key, look)
    }

    /// Whether a delta and its base have been written.
    pub(crate) fn is_associate_written(&self, base: &Place, place: &Place) -> bool {
        [base, place].iter().all(|place| self.log.is_written(place.segment, place.offset))
    }

    /// Reads a block's base and delta, both of which have been written.
    pub(crate) fn read_associate(
        &mut self,
        owner: AssociateOwner,
        item: Stored,
        base: Place,
        fx: &mut Effects,
    ) {
        let (reads, made) = self.form.begin_associate(&self.log, owner, item, base);
        for read in reads {
            self.read_payloads(read, fx);
        }
        if let Some(made) = made {
            self.associate_made(&made, fx);
        }
    }

    /// Base or delta have been read.
    pub(crate) fn associate_read(
        &mut self,
        id: Id,
        part: usize,
        read: &SegmentRead,
        done: &Completion,
        fx: &mut Effects,
    ) {
        if let Some(made) = self.form.associate_read(id, part, read, done) {
            self.associate_made(&made, fx);
        }
    }

    fn associate_made(&mut self, made: &Associate, fx: &mut Effects) {
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
