//! The history of one sector: every write whose content a client might still see.
//!
//! Time is a count of events. A write is an interval, from its submission to its end. One write
//! comes *after* another when it was submitted after the other's end; overlapping writes may take
//! effect in any order. A write is gone for good once a write that certainly took effect comes
//! after it.

use forebay_block::VolumeId;

use crate::Content;

/// The end of a write that is still in flight.
pub const IN_FLIGHT: u64 = u64::MAX;

/// Number of a write of which only the content is known. Two of them need not be the same.
pub const UNKNOWN: u64 = 0;

/// Whether a write took effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// It did.
    Certain,
    /// It may have, in each sector on its own: in flight, failed, a discard, or completed and
    /// then a crash came before a flush.
    Possible,
}

/// One write of one sector.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Number of the write.
    pub id: u64,
    /// What it puts here.
    pub content: Content,
    /// When it was submitted.
    pub submitted: u64,
    /// When it may have taken effect at the earliest: its submission, or a later time at which it
    /// was seen to be the content.
    pub begin: u64,
    /// When it took effect at the latest: it completed, failed, was cut off by a crash, or was
    /// seen to be the content.
    pub end: u64,
    /// Whether it took effect.
    pub effect: Effect,
    /// Whether a crash cannot undo it, whatever was flushed.
    pub durable: bool,
    /// It completed without error between these two crashes.
    pub acked_in: Option<u32>,
    /// Between which crashes it was submitted.
    pub session: u32,
    /// A discard: its zeros may come, or never.
    pub discard: bool,
    /// No other write may touch the sector while this one is in flight.
    pub exclusive: bool,
    /// A flush failed after it: no later flush makes it durable.
    pub doubtful: bool,
    /// A flush failed while it was in flight.
    pub shaken: bool,
    /// The disk below gave it up and went on showing it, and nobody who knows is left: after a
    /// crash it may be seen and be gone later.
    pub fleeting: bool,
}

/// What is known of one sector.
#[derive(Clone, Debug)]
pub struct Sector {
    /// Content before the first write in `entries`; `None` once that is gone for good.
    pub initial: Option<Content>,
    /// Writes that may still be seen, in the order of submission.
    pub entries: Vec<Entry>,
}

/// Which content was recognised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// The one before every entry.
    Initial,
    /// That of the entry at this place.
    Entry(usize),
}

impl Sector {
    /// The contents that a read submitted at `at` may return.
    pub fn allowed(&self, at: u64) -> impl Iterator<Item = (Found, &Content)> {
        let initial = self.initial.as_ref().filter(|_| !self.superseded(0, at));
        let entries = self.entries.iter().enumerate();
        let entries = entries.filter(move |(_, e)| !self.superseded(e.end, at));
        initial
            .map(|content| (Found::Initial, content))
            .into_iter()
            .chain(entries.map(|(i, e)| (Found::Entry(i), &e.content)))
    }

    fn superseded(&self, end: u64, at: u64) -> bool {
        let gone = |e: &Entry| e.effect == Effect::Certain && e.begin > end && e.end < at;
        self.entries.iter().any(gone)
    }

    /// The allowed contents that `bytes`, found from byte `from`, may be: the latest of them, and
    /// how many there are.
    pub fn recognise(
        &self,
        volume: VolumeId,
        sector: u64,
        at: u64,
        (from, bytes): (usize, &[u8]),
    ) -> Option<(Found, usize)> {
        let mut last = None;
        let mut count = 0;
        for (found, content) in self.allowed(at) {
            if content.matches(volume, sector, from, bytes) {
                last = Some(found);
                count += 1;
            }
        }
        last.map(|found| (found, count))
    }

    /// Forgets what no read submitted at `horizon` or later, and no crash, can bring back.
    pub fn trim(&mut self, horizon: u64, durable_until: u64) {
        let firm = |e: &&Entry| {
            e.effect == Effect::Certain && e.end < horizon && e.is_durable(durable_until)
        };
        let Some(begin) = self.entries.iter().filter(firm).map(|e| e.begin).max() else { return };
        self.initial = None;
        self.entries.retain(|e| e.end >= begin);
    }

    /// A crash at `now`: what was neither flushed nor written with force unit access may be
    /// there or not.
    pub fn crash(&mut self, now: u64, durable_until: u64) {
        for e in &mut self.entries {
            e.durable = e.is_durable(durable_until);
            e.end = e.end.min(now);
            e.exclusive = false;
            if !e.durable {
                e.effect = Effect::Possible;
            }
        }
        self.trim(u64::MAX, 0);
    }

    /// A read found `found` while nothing was in flight here: from now on that is the content.
    /// What was on the disks when the last crash came stays there, so it is durable at once.
    pub fn observe(&mut self, found: Found, now: u64, crashed_at: u64, durable_until: u64) {
        match found {
            Found::Initial => {
                if self.entries.iter().all(|e| e.end <= crashed_at && !e.discard) {
                    self.entries.clear();
                }
            }
            Found::Entry(place) => {
                let e = &mut self.entries[place];
                e.durable = match e.effect {
                    Effect::Certain => e.is_durable(durable_until),
                    Effect::Possible => e.end <= crashed_at,
                };
                e.effect = Effect::Certain;
                e.doubtful = !e.durable && e.doubtful;
                e.begin = now;
                e.end = now;
            }
        }
    }

    /// The same, where what was read after a crash may be gone after the next: from now on that is
    /// the content, but only a flush makes it stay. Returns where that is noted.
    pub fn observe_for_now(&mut self, found: Found, now: u64) -> Found {
        let Found::Entry(place) = found else { return found };
        let e = Entry {
            begin: now,
            end: now,
            effect: Effect::Certain,
            durable: false,
            ..self.entries[place].clone()
        };
        self.entries.push(e);
        Found::Entry(self.entries.len() - 1)
    }

    /// Several writes left the same bytes: the content is known, which write it is from is not.
    pub fn forget_origin(&mut self, found: Found) {
        if let Found::Entry(place) = found
            && let Some(e) = self.entries.get_mut(place)
        {
            e.id = UNKNOWN;
            e.acked_in = None;
            e.session = u32::MAX;
        }
    }

    /// Whether nothing is in flight and nothing was submitted at `at` or later.
    pub fn quiet(&self, at: u64) -> bool {
        self.entries.iter().all(|e| e.end < at)
    }
}

impl Entry {
    /// Whether a crash cannot undo it, `durable_until` being the submission of the last flush
    /// that completed.
    pub fn is_durable(&self, durable_until: u64) -> bool {
        self.durable
            || (self.effect == Effect::Certain && !self.doubtful && self.end < durable_until)
    }
}
