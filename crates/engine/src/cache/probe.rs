//! Probing whether the cache device can still be written, and whether a primary answers again.

use std::time::Duration;

use forebay_block::{BlockRange, Instant, Io};
use forebay_format::EntryKind;

use crate::api::{Effects, Health, State, Target};
use crate::cache::Cache;
use crate::key::Key;
use crate::log::builder::Expect;
use crate::ticket::Ticket;
use crate::volume::Volume;

/// Shortest time between two probes; and between the last answer or error of a primary and a probe.
pub(crate) const PROBE_PAUSE: Duration = Duration::from_secs(1);

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

    /// Reads a block of each primary that is away and has got no request for a while. Without this,
    /// one that is back would count as away until a client or a dirty block needs it.
    pub(crate) fn probe_primaries(&mut self, fx: &mut Effects) {
        let now = self.now;
        if self.next_probe().is_none_or(|at| at > now) {
            return;
        }
        let is_due = |volume: &Volume| volume.is_probed() && volume.probe_at <= now;
        for id in self.volume_ids() {
            if !self.known_volume(id).is_some_and(is_due) {
                continue;
            }
            // Until it ends.
            self.volume_mut(id).probe_at = Instant::NEVER;
            let range = self.bytes_on_volume(id, BlockRange { first: 0, count: 1 });
            let buf = self.config.buffers.get(range.len as usize);
            let target = Target::Primary(id);
            self.send(fx, target, Ticket::PrimaryProbe, |tag| Io::read(tag, range, buf));
        }
    }

    /// When the next primary that is away is probed.
    pub(crate) fn next_probe(&self) -> Option<Instant> {
        let probed = self.volumes.iter().flatten().filter(|volume| volume.is_probed());
        let is_serving = *self.state() == State::Serving;
        probed.map(|volume| volume.probe_at).min().filter(|_| is_serving)
    }
}
