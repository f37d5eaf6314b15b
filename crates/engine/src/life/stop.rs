//! An orderly stop: accepted requests are answered, then the log ends with a record that says how
//! much of it is clean, and with a footer, all durable.

use std::time::Duration;

use forebay_block::{Completion, ErrorKind, Io};
use forebay_format::EntryKind;

use crate::api::{Effects, Health, State, Target};
use crate::cache::Cache;
use crate::destage::Destaging;
use crate::key::Key;
use crate::life::Life;
use crate::log::builder::Expect;
use crate::note::Note;
use crate::request::Requests;
use crate::ticket::Ticket;

/// How long a stop waits for blocks that a failed cache device has left over, and for the cut of an
/// ordered volume.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// The step that the stop has reached.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum StopStep {
    /// Waiting for everything in flight.
    #[default]
    Settling,
    /// The last record is being written.
    LastRecord,
    /// The last footers are being written.
    LastFooters,
    /// The last flush is in flight.
    LastFlush,
}

impl Life {
    /// Continues an orderly stop.
    pub fn pump_stop(
        &mut self,
        cache: &mut Cache,
        requests: &mut Requests,
        destaging: &mut Destaging,
        fx: &mut Effects,
    ) {
        if *cache.state() != State::Stopping {
            return;
        }
        while let Some(op) = cache.pop_held() {
            requests.end_write(cache, op, Err(ErrorKind::ShuttingDown.into()), fx);
        }
        // Nothing is destaged any more.
        requests.give_up_leftover(cache, fx);
        // A shard that has stopped already takes part in none.
        let is_late = cache.now.since(self.stop_since) >= PATIENCE;
        if is_late {
            destaging.give_up_cuts();
        }
        if is_late && cache.health() != Health::Good {
            destaging.end();
        }
        let busy = requests.len() + destaging.len() + requests.fetches() > 0
            || cache.volumes.iter().flatten().any(|v| v.flushing || v.has_unflushed());
        if busy {
            return;
        }
        if cache.health() != Health::Good {
            // Blocks that did not reach the log are only in memory: the primary gets them now, if
            // it can. The next start must then know that the log is behind.
            let lost = !cache.contents.fenced().is_empty()
                || cache.volumes.iter().flatten().any(|volume| volume.failures > 0);
            let is_known = cache.standing.trust >= self.trust_wanted;
            let ends = cache.health() == Health::Detached || lost && is_known || is_late;
            if cache.out.len() == 0 && ends {
                cache.standing.state = State::Stopped;
            }
            return;
        }
        match self.stop_step {
            StopStep::Settling => {
                let key = Key(0);
                let said =
                    cache.push_bare(fx, key, 1, EntryKind::Checkpoint, false, Expect::Always)
                        && cache.close_record(fx);
                // Without room for the record, the log ends as it is.
                if said || cache.log.free() <= 1 && cache.log.is_idle() {
                    cache.log.end();
                    self.stop_step = StopStep::LastRecord;
                    // The last free segment stays open: the next start continues in it.
                    if cache.log.free() > 0 {
                        cache.seal_open_segment();
                    }
                }
            }
            StopStep::LastRecord if !cache.log.is_sealing() => {
                self.stop_step = StopStep::LastFooters;
                self.pump_stop(cache, requests, destaging, fx);
            }
            StopStep::LastFooters if cache.out.len() == 0 => {
                self.stop_step = StopStep::LastFlush;
                cache.send(fx, Target::Cache, Ticket::StopFlush, Io::flush);
            }
            _ => {}
        }
    }

    /// Handles the end of the last flush.
    pub fn stop_flushed(cache: &mut Cache, done: &Completion) {
        match &done.result {
            Ok(()) => cache.standing.state = State::Stopped,
            Err(_) => cache.out.note(Note::CacheFailed),
        }
    }
}
