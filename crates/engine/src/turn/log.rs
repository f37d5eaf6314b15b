//! Moves waiting writes and copies into the log.

use forebay_format::EntryKind;

use crate::Engine;
use crate::api::{Effects, Health};
use crate::key::Key;
use crate::limits::RECORDS_IN_FLIGHT;
use crate::log::builder::Expect;

impl Engine {
    /// Moves waiting copies and writes into the log, as far as there is room.
    pub(crate) fn pump_log(&mut self, fx: &mut Effects) {
        if self.cache.health() != Health::Good {
            return;
        }
        self.reclaim.pump_copies(&mut self.cache, fx);
        self.requests.pump_overflow(&mut self.cache, fx);
        self.deliver(fx);
        while let Some(&op) = self.cache.log.queue().front() {
            let has_room = self.requests.has_room(&self.cache, op);
            let is_logged = has_room && self.requests.log_op(&mut self.cache, op, fx);
            if is_logged {
                self.cache.log.queue().pop_front();
            }
            // Writes that waited for the blocks just placed may enter the queue.
            self.deliver(fx);
            if !is_logged {
                break;
            }
        }
        if self.cache.log.needs_checkpoint(self.cache.patient_from()) {
            self.cache.push_bare(fx, Key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
        }
        // Entries that nothing waits for yet share the record with those of the next turn.
        let goes_on =
            self.cache.form.background().turn_is_over() || self.reclaim.fills_last(&mut self.cache);
        let grows = goes_on && self.cache.log.builder().complete.is_empty();
        if self.cache.log.in_flight() < RECORDS_IN_FLIGHT && !grows && !self.cache.holds_record() {
            self.reclaim.fill_record(&mut self.cache, fx);
            self.cache.close_record(fx);
        }
    }
}
