//! Discards of free extents: the cache device is told what it need not keep.
//!
//! An extent is discarded only when each of its pages is free: the record that ended the page's
//! last use is durable, and no read or destage needs it. It is used again only when the discard has
//! ended, since a device may carry out requests in any order. The device may keep the old content
//! of a discarded extent, return anything else, or both in turn.

use forebay_block::{ByteRange, Instant, Io, IoOp};

use crate::api::{Effects, Target};
use crate::cache::Cache;
use crate::ticket::Ticket;

impl Cache {
    /// When an extent may be discarded, if there is one.
    pub(crate) fn next_discard(&self) -> Option<Instant> {
        let may = self.config.discard && !self.contents.is_loading();
        self.store.next_discard().filter(|_| may)
    }

    /// Discards an extent, if one may be now.
    pub(super) fn discard_extent(&mut self, fx: &mut Effects) {
        if !self.config.discard {
            return;
        }
        let Some(extent) = self.store.begin_discard(self.now) else { return };
        let at = self.segment_offset(self.log.len() as usize + extent as usize);
        let range = ByteRange::new(at, u64::from(self.config.segment_size));
        let io = |tag| Io::bare(tag, IoOp::Discard, range);
        self.send(fx, Target::Cache, Ticket::Discard, io);
    }

    /// Handles the end of a discard. A device that fails one gets no more of them.
    pub(crate) fn extent_discarded(&mut self, is_done: bool) {
        self.store.end_discard(self.now);
        self.config.discard &= is_done;
        if is_done {
            self.stats.discarded_bytes += u64::from(self.config.segment_size);
        }
    }
}
