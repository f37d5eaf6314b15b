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
        if self.life.state != State::Stopping {
            return;
        }
        while let Some(op) = self.pop_delayed() {
            self.end_write(op, Err(ErrorKind::ShuttingDown.into()), fx);
        }
        // Nothing is destaged any more.
        self.give_up_leftover(fx);
        let busy = self.requests.len() + self.destaging.len() + self.requests.fetches() > 0
            || self.volumes.iter().flatten().any(|v| v.flushing || v.direct > v.direct_durable);
        if busy {
            return;
        }
        if self.life.health != Health::Good {
            // What failed to reach the log is in memory only: the primary gets it now, if it can.
            // Then the next start must know that the log is behind.
            let lost = !self.contents.fenced().is_empty()
                || self.volumes.iter().flatten().any(|volume| volume.failures > 0);
            let is_known = self.life.trust >= self.life.trust_wanted;
            let is_late = self.now.since(self.life.stop_since) >= PATIENCE;
            let ends = self.life.health == Health::Detached || lost && is_known || is_late;
            if self.out.len() == 0 && ends {
                self.life.state = State::Stopped;
            }
            return;
        }
        match self.life.stop_step {
            StopStep::Settling => {
                let key = Key(0);
                let said = self.push_bare(fx, key, 1, EntryKind::Checkpoint, false, Expect::Always)
                    && self.close_record(fx);
                // Without room the log ends as it is.
                if said || self.log.free() <= 1 && self.log.is_idle() {
                    self.log.builder().clear();
                    self.life.stop_step = StopStep::LastRecord;
                    // The last free one stays open: the next start goes on in it.
                    if self.log.free() > 0 {
                        self.seal_open_segment();
                    }
                }
            }
            StopStep::LastRecord if !self.log.is_sealing() => {
                self.life.stop_step = StopStep::LastFooters;
                self.pump_stop(fx);
            }
            StopStep::LastFooters if self.out.len() == 0 => {
                self.life.stop_step = StopStep::LastFlush;
                self.send(fx, Target::Cache, Ticket::StopFlush, Io::flush);
            }
            _ => {}
        }
    }

    /// The last flush ended.
    pub(crate) fn stop_flushed(&mut self, done: Completion, fx: &mut Effects) {
        match done.result {
            Ok(()) => self.life.state = State::Stopped,
            Err(_) => self.fail_cache(fx),
        }
    }
}
