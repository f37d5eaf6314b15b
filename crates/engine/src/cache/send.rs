//! Requests to devices: sending them, accounting for their end, and noticing overdue ones.

use forebay_block::{Completion, Instant, Io, IoOp, IoTag};

use crate::api::event::Event;
use crate::api::primary::is_away;
use crate::api::{Effects, Target};
use crate::cache::Cache;
use crate::cache::probe::PROBE_PAUSE;
use crate::ticket::{InFlight, Ticket};

impl Cache {
    /// Sends an I/O and remembers its ticket.
    pub(crate) fn send(
        &mut self,
        fx: &mut Effects,
        target: Target,
        ticket: Ticket,
        io: impl FnOnce(IoTag) -> Io,
    ) {
        let at = self.now;
        let is_unit = matches!(ticket, Ticket::Unit { .. });
        let io = self.out.begin(|tag| {
            let io = io(tag);
            debug_assert!(!io.flags.fua, "durability is asked for by a flush");
            let (op, range) = (io.op, io.range);
            (InFlight { ticket, at, op, range, target }, io)
        });
        if target == Target::Cache && io.op == IoOp::Write {
            // Here, so that what is written again counts again: it wears out the device.
            match is_unit {
                true => self.stats.store_bytes += io.range.len,
                false => self.stats.log_bytes += io.range.len,
            }
        }
        fx.ios.push((target, io));
    }

    /// Checks periodically for requests that a device has not answered within the patience.
    pub(crate) fn pump_unanswered(&mut self) {
        if !self.out.look(self.now) {
            return;
        }
        for volume in self.volumes.iter_mut().flatten() {
            volume.flow.begin_look();
        }
        let known = self.out.slow_cache_ios() > 0;
        let mut slow_cache_ios = 0;
        let mut news = Vec::new();
        for io in self.out.in_flight() {
            let waited = self.now.since(io.at);
            let slow = waited >= self.config.patience;
            let is_news = match io.target {
                Target::Cache => {
                    slow_cache_ios += u64::from(slow);
                    slow && slow_cache_ios == 1 && !known
                }
                Target::Primary(volume) => {
                    let volume = self.volumes[usize::from(volume.0)].as_mut();
                    let flow = &mut volume.expect("it was sent to a primary").flow;
                    flow.note_unanswered(io.at, slow)
                }
            };
            if is_news {
                let InFlight { target, op, range, .. } = *io;
                news.push(Event::Unanswered { target, op, range, waited });
            }
        }
        self.out.set_slow_cache_ios(slow_cache_ios);
        news.into_iter().for_each(|event| self.tell(event));
    }

    /// Counts the end of a device request, and reports failures and changes.
    pub(crate) fn note_ended(&mut self, target: Target, sent: &InFlight, done: &Completion) {
        let Target::Primary(volume) = target else {
            // A refused discard loses nothing; it only ends discards.
            if let Err(error) = &done.result
                && sent.op != IoOp::Discard
            {
                self.stats.cache_errors += 1;
                let (op, range, kind) = (sent.op, sent.range, error.kind());
                self.tell(Event::DeviceFailed { target, op, range, kind });
            }
            return;
        };
        let (now, is_probe) = (self.now, matches!(sent.ticket, Ticket::PrimaryProbe));
        let state = self.volume_mut(volume);
        if is_probe || state.probe_at != Instant::NEVER {
            state.probe_at = now + PROBE_PAUSE;
        }
        let primary = &mut state.primary;
        // A probe that fails tells nothing that is not known, and no client misses it.
        let failed = done.result.as_ref().err().filter(|error| !is_probe || is_away(error.kind()));
        let Some(error) = failed else {
            primary.last_success = Some(now);
            if let Some(since) = primary.away_since.take() {
                self.tell(Event::PrimaryBack { volume, away: now.since(since) });
            }
            return;
        };
        let (op, range, kind) = (sent.op, sent.range, error.kind());
        primary.last_error = Some((now, kind));
        if is_probe {
            return;
        }
        primary.errors.count(op);
        let is_news = is_away(kind) && primary.away_since.is_none();
        if is_news {
            primary.away_since = Some(now);
        }
        self.stats.primary_errors += 1;
        if is_news {
            self.tell(Event::PrimaryAway { volume, kind });
        }
        self.tell(Event::DeviceFailed { target, op, range, kind });
    }
}
