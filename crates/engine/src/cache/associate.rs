//! Blocks that are stored against others: their parts are read, and who wanted them gets them.

use crate::api::Effects;
use crate::cache::Cache;
use crate::contents::{Place, Stored};
use crate::form::AssociateOwner;
use crate::key::Key;
use crate::note::Note;

impl Cache {
    /// What `look` makes of a block's newest applied bytes, if RAM has them.
    pub(crate) fn peek_applied<T>(&self, key: Key, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        self.ram.peek_applied(&self.locks, key, look)
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
            self.out.note(Note::Made(Box::new(made)));
        }
    }
}
