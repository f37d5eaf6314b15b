//! What leaves the engine: requests to devices, of which those in flight are known, and events.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::{Instant, Io, IoTag};

use crate::api::Effects;
use crate::api::event::{Event, Events};
use crate::note::Note;
use crate::slab::{Id, Slab};
use crate::ticket::InFlight;

/// How often unanswered requests are looked for.
const LOOK: Duration = Duration::from_secs(1);

/// Requests to devices in flight, and the events of this turn.
#[derive(Debug)]
pub struct Out {
    ios: Slab<InFlight>,
    events: Events,
    notes: VecDeque<Note>,
    /// When unanswered requests are next looked for.
    look_at: Instant,
    /// Requests that the cache device has not answered for long.
    slow_cache_ios: u64,
}

impl Out {
    /// Nothing has been sent.
    pub fn new(now: Instant) -> Self {
        Self {
            ios: Slab::default(),
            events: Events::default(),
            notes: VecDeque::new(),
            look_at: now,
            slow_cache_ios: 0,
        }
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

    /// Leaves a note for a higher room.
    pub fn note(&mut self, note: Note) {
        self.notes.push_back(note);
    }

    /// The next note to deliver.
    pub fn next_note(&mut self) -> Option<Note> {
        self.notes.pop_front()
    }

    /// Hands out the events of this turn.
    pub fn hand_out(&mut self, fx: &mut Effects) {
        self.events.hand_out(fx);
    }

    /// A request to be sent: its tag says what it belongs to.
    pub fn begin(&mut self, request: impl FnOnce(IoTag) -> (InFlight, Io)) -> Io {
        let (in_flight, io) = request(IoTag(u64::from(self.ios.next_id().0)));
        self.ios.insert(in_flight);
        io
    }

    /// Requests that are not answered, if it is time to look for them.
    pub fn look(&mut self, now: Instant) -> bool {
        let due = now >= self.look_at;
        if due {
            self.look_at = now + LOOK;
        }
        due
    }

    /// The requests in flight.
    pub fn in_flight(&self) -> impl Iterator<Item = &InFlight> {
        self.ios.iter().map(|(_, io)| io)
    }

    /// Notes the requests that the cache device has not answered for long.
    pub fn set_slow_cache_ios(&mut self, count: u64) {
        self.slow_cache_ios = count;
    }

    /// When unanswered requests are next looked for.
    pub fn next_look(&self) -> Option<Instant> {
        (self.ios.len() > 0).then_some(self.look_at)
    }
}
