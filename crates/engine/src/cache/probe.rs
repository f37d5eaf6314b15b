//! Whether the cache device can still be written.

use std::time::Duration;

use forebay_block::Io;
use forebay_format::EntryKind;

use crate::api::{Effects, Health, Target};
use crate::cache::Cache;
use crate::key::Key;
use crate::log::builder::Expect;
use crate::ticket::Ticket;

/// Shortest time between two records that only show whether the device can be written.
const PROBE_PAUSE: Duration = Duration::from_secs(1);

impl Cache {
    /// A read of the cache device failed: an empty record tells whether it can still be written.
    /// Else a device that vanished when nothing was to be written, since everything waits for
    /// dirty blocks that only it has, would never count as failed.
    pub(crate) fn probe_cache(&mut self, fx: &mut Effects) {
        if self.health() != Health::Good || self.now < self.standing.probe_at {
            return;
        }
        self.standing.probe_at = self.now + PROBE_PAUSE;
        if self.log.builder().is_empty() {
            self.push_bare(fx, Key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
        }
        if !self.close_record(fx) && self.log.is_idle() && self.log.begin_flush() {
            // There is no room for it.
            self.stats.cache_flushes += 1;
            self.send(fx, Target::Cache, Ticket::CacheFlush, Io::flush);
        }
    }
}
