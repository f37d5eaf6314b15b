//! The way out of the engine: device requests in flight, events, and notes for other rooms.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::{Instant, Io, IoTag};

use crate::api::Effects;
use crate::api::event::{Event, Events};
use crate::note::Note;
use crate::slab::{Id, Slab};
use crate::ticket::InFlight;

/// Interval between checks for unanswered requests.
const LOOK: Duration = Duration::from_secs(1);
/// A check that is later than this is left out: the process was stopped, or its machine, and has
/// not seen the answers that came meanwhile.
const LATE: Duration = Duration::from_secs(5);

/// Device requests in flight, the events of this turn, and undelivered notes.
#[derive(Debug)]
pub struct Out {
    ios: Slab<InFlight>,
    events: Events,
    notes: VecDeque<Note>,
    /// When to check for unanswered requests again.
    look_at: Instant,
    /// Requests that the cache device has not answered for longer than the configured patience.
    slow_cache_ios: u64,
}

impl Out {
    /// Starts with no request in flight.
    pub fn new(now: Instant) -> Self {
        Self {
            ios: Slab::default(),
            events: Events::default(),
            notes: VecDeque::new(),
            look_at: now,
            slow_cache_ios: 0,
        }
    }

    /// Returns the number of requests in flight.
    pub fn len(&self) -> usize {
        self.ios.len()
    }

    /// Removes a request that has ended.
    pub fn take(&mut self, id: Id) -> InFlight {
        self.ios.remove(id)
    }

    /// Returns the number of requests that the cache device has not answered for longer than the
    /// configured patience.
    pub fn slow_cache_ios(&self) -> u64 {
        self.slow_cache_ios
    }

    /// Queues an event; it is handed out at the end of the turn.
    pub fn tell(&mut self, event: Event) {
        self.events.tell(event);
    }

    /// Leaves a note for a higher room.
    pub fn note(&mut self, note: Note) {
        self.notes.push_back(note);
    }

    /// Takes the next note to deliver.
    pub fn next_note(&mut self) -> Option<Note> {
        self.notes.pop_front()
    }

    /// Hands out the events of this turn.
    pub fn hand_out(&mut self, fx: &mut Effects) {
        self.events.hand_out(fx);
    }

    /// Registers a request before it is sent; its tag identifies it on completion.
    pub fn begin(&mut self, request: impl FnOnce(IoTag) -> (InFlight, Io)) -> Io {
        let (in_flight, io) = request(IoTag(u64::from(self.ios.next_id().0)));
        self.ios.insert(in_flight);
        io
    }

    /// Returns whether a check for unanswered requests is due now, and schedules the next one.
    pub fn look(&mut self, now: Instant) -> bool {
        let due = now >= self.look_at;
        let late = now.since(self.look_at) > LATE;
        if due {
            self.look_at = now + LOOK;
        }
        due && !late
    }

    /// Returns the requests in flight.
    pub fn in_flight(&self) -> impl Iterator<Item = &InFlight> {
        self.ios.iter().map(|(_, io)| io)
    }

    /// Sets the number of requests that the cache device has not answered for longer than the
    /// configured patience.
    pub fn set_slow_cache_ios(&mut self, count: u64) {
        self.slow_cache_ios = count;
    }

    /// Returns when to check for unanswered requests again, if any request is in flight.
    pub fn next_look(&self) -> Option<Instant> {
        (self.ios.len() > 0).then_some(self.look_at)
    }
}
