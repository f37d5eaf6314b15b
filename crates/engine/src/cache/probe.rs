//! Probing whether the cache device can still be written.

use std::time::Duration;

use forebay_block::Io;
use forebay_format::EntryKind;

use crate::api::{Effects, Health, Target};
use crate::cache::Cache;
use crate::key::Key;
use crate::log::builder::Expect;
use crate::ticket::Ticket;

/// Shortest time between two probes.
const PROBE_PAUSE: Duration = Duration::from_secs(1);

impl Cache {
    /// Probes the device after a failed read by writing an empty record. Without this, a device
    /// could vanish while nothing is being written, because everything waits for dirty blocks that
    /// only it has, and would never count as failed.
    pub(crate) fn probe_cache(&mut self, fx: &mut Effects) {
        if self.health() != Health::Good || self.now < self.standing.probe_at {
            return;
        }
        self.standing.probe_at = self.now + PROBE_PAUSE;
        if self.log.builder().is_empty() {
            self.push_bare(fx, Key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
        }
        if !self.close_record(fx) && self.log.is_idle() && self.log.begin_flush() {
            // There is no room for a record; a flush probes the device too.
            self.send(fx, Target::Cache, Ticket::CacheFlush, Io::flush);
        }
    }
}
