//! What leaves the engine: requests to devices, of which those in flight are known, and events.

use std::time::Duration;

use forebay_block::{Instant, Io, IoTag};

use crate::Engine;
use crate::api::{Effects, Target};
use crate::event::{Event, Events};
use crate::op::{InFlight, Ticket};
use crate::slab::{Id, Slab};

/// Requests to devices in flight, and the events of this turn.
/// How often unanswered requests are looked for.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Out {
    ios: Slab<InFlight>,
    events: Events,
    /// When unanswered requests are next looked for.
    look_at: Instant,
    /// Requests that the cache device has not answered for long.
    slow_cache_ios: u64,
}

impl Out {
    /// Nothing has been sent.
    pub fn new(now: Instant) -> Self {
        Self { ios: Slab::default(), events: Events::default(), look_at: now, slow_cache_ios: 0 }
    }

    /// The number of requests in flight.
    pub fn len(&self) -> usize {
        self.ios.len()
    }

    /// A request has ended.
    pub fn take(&mut self, id: Id) -> InFlight {
        self.ios.remove(id)
    }

    /// Requests that the cache device has not answered for long.
    pub fn slow_cache_ios(&self) -> u64 {
        self.slow_cache_ios
    }

    /// Notes an event; it goes out at the end of the turn.
    pub fn tell(&mut self, event: Event) {
        self.events.tell(event);
    }

    /// Hands out the events of this turn.
    pub fn hand_out(&mut self, fx: &mut Effects) {
        self.events.hand_out(fx);
    }
}

impl Engine {
    /// Sends an I/O and remembers what it belongs to.
    pub(crate) fn send(
        &mut self,
        fx: &mut Effects,
        target: Target,
        ticket: Ticket,
        io: impl FnOnce(IoTag) -> Io,
    ) {
        let io = io(IoTag(u64::from(self.out.ios.next_id().0)));
        debug_assert!(!io.flags.fua, "durability is asked for by a flush");
        let (op, range) = (io.op, io.range);
        self.out.ios.insert(InFlight { ticket, at: self.now, op, range, target });
        fx.ios.push((target, io));
    }

    /// Looks, once in a while, for requests that a device has not answered for long.
    pub(crate) fn pump_unanswered(&mut self) {
        if self.now < self.out.look_at {
            return;
        }
        self.out.look_at = self.now + LOOK;
        let known = self.out.slow_cache_ios > 0;
        self.out.slow_cache_ios = 0;
        for volume in self.volumes.iter_mut().flatten() {
            volume.flow.begin_look();
        }
        let mut news = Vec::new();
        for (_, io) in self.out.ios.iter() {
            let waited = self.now.since(io.at);
            let slow = waited >= self.config.patience;
            let is_news = match io.target {
                Target::Cache => {
                    self.out.slow_cache_ios += u64::from(slow);
                    slow && self.out.slow_cache_ios == 1 && !known
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
        news.into_iter().for_each(|event| self.tell(event));
    }

    /// When [`Engine::pump_unanswered`] has something to look at.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        (self.out.len() > 0).then_some(self.out.look_at)
    }
}
