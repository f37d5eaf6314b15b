//! An orderly stop: what was taken is answered, then the log ends with a record that says how
//! clean everything is, and with a footer, all durable.

use std::time::Duration;

use forebay_block::{Completion, ErrorKind, Io};
use forebay_format::EntryKind;

use crate::Engine;
use crate::api::{Effects, Health, State, Target};
use crate::key::Key;
use crate::log::builder::Expect;
use crate::ticket::Ticket;

/// How long a stop waits for what a failed cache device has left over.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// How far the stop has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum StopStep {
    /// Waiting for what is in flight.
    #[default]
    Settling,
    /// The last record is on its way.
    LastRecord,
    /// The last footers are on their way.
    LastFooters,
    /// The last flush is on its way.
    LastFlush,
}

impl Engine {
    /// Goes on with an orderly stop.
    pub(crate) fn pump_stop(&mut self, fx: &mut Effects) {
        if *self.cache.state() != State::Stopping {
            return;
        }
        while let Some(op) = self.requests.pop_delayed(&mut self.cache) {
            self.requests.end_write(&mut self.cache, op, Err(ErrorKind::ShuttingDown.into()), fx);
        }
        // Nothing is destaged any more.
        self.requests.give_up_leftover(&mut self.cache, fx);
        let busy = self.requests.len() + self.destaging.len() + self.requests.fetches() > 0
            || self
                .cache
                .volumes
                .iter()
                .flatten()
                .any(|v| v.flushing || v.direct > v.direct_durable);
        if busy {
            return;
        }
        if self.cache.health() != Health::Good {
            // What failed to reach the log is in memory only: the primary gets it now, if it can.
            // Then the next start must know that the log is behind.
            let lost = !self.cache.contents.fenced().is_empty()
                || self.cache.volumes.iter().flatten().any(|volume| volume.failures > 0);
            let is_known = self.cache.standing.trust >= self.life.trust_wanted;
            let is_late = self.cache.now.since(self.life.stop_since) >= PATIENCE;
            let ends = self.cache.health() == Health::Detached || lost && is_known || is_late;
            if self.cache.out.len() == 0 && ends {
                self.cache.standing.state = State::Stopped;
            }
            return;
        }
        match self.life.stop_step {
            StopStep::Settling => {
                let key = Key(0);
                let said =
                    self.cache.push_bare(fx, key, 1, EntryKind::Checkpoint, false, Expect::Always)
                        && self.cache.close_record(fx);
                // Without room the log ends as it is.
                if said || self.cache.log.free() <= 1 && self.cache.log.is_idle() {
                    self.cache.log.builder().clear();
                    self.life.stop_step = StopStep::LastRecord;
                    // The last free one stays open: the next start goes on in it.
                    if self.cache.log.free() > 0 {
                        self.cache.seal_open_segment();
                    }
                }
            }
            StopStep::LastRecord if !self.cache.log.is_sealing() => {
                self.life.stop_step = StopStep::LastFooters;
                self.pump_stop(fx);
            }
            StopStep::LastFooters if self.cache.out.len() == 0 => {
                self.life.stop_step = StopStep::LastFlush;
                self.cache.send(fx, Target::Cache, Ticket::StopFlush, Io::flush);
            }
            _ => {}
        }
    }

    /// The last flush ended.
    pub(crate) fn stop_flushed(&mut self, done: Completion, fx: &mut Effects) {
        match done.result {
            Ok(()) => self.cache.standing.state = State::Stopped,
            Err(_) => self.fail_cache(fx),
        }
    }
}
