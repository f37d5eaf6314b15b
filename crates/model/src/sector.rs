//! The history of one sector: every write whose content a client might still see.
//!
//! Time is a count of events. A write is an interval, from its submission to its end. One write
//! comes *after* another when it was submitted after the other's end; overlapping writes may take
//! effect in any order. A write can never be seen again once a write that certainly took effect
//! comes after it.

use forebay_block::VolumeId;

use crate::Content;

/// End time of a write that is still in flight.
pub const IN_FLIGHT: u64 = u64::MAX;

/// Number of a write of which only the content is known. Two writes with this number may differ.
pub const UNKNOWN: u64 = 0;

/// Whether a write took effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// It did take effect.
    Certain,
    /// It may have taken effect, in each sector independently: it is in flight, failed, is a
    /// discard, or completed without a flush before a crash.
    Possible,
}

/// One write of one sector.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Number of the write.
    pub id: u64,
    /// Its content for this sector.
    pub content: Content,
    /// Time of its submission.
    pub submitted: u64,
    /// Earliest time at which it may have taken effect: its submission, or a later time when a read
    /// showed it as the content.
    pub begin: u64,
    /// Latest time at which it took effect: when it completed, failed, was cut off by a crash, or
    /// was seen by a read.
    pub end: u64,
    /// Whether it took effect.
    pub effect: Effect,
    /// Whether no crash can undo it, independent of flushes.
    pub durable: bool,
    /// The number of crashes before it completed without error.
    pub acked_in: Option<u32>,
    /// The number of crashes before its submission.
    pub session: u32,
    /// Whether it is a discard: its zeros may appear, or never.
    pub discard: bool,
    /// Whether no other write may touch the sector while this one is in flight.
    pub exclusive: bool,
    /// Whether a flush failed after it, so that no later flush makes it durable.
    pub doubtful: bool,
    /// Whether a flush failed while it was in flight.
    pub shaken: bool,
    /// Whether the disk below dropped it after a failed flush but still shows it, with no one left
    /// who knows: it may be seen after a crash and be gone later.
    pub fleeting: bool,
    /// Whether it was done again while in flight, so that it may have taken effect twice.
    pub repeated: bool,
}

/// The possible contents of one sector.
#[derive(Clone, Debug)]
pub struct Sector {
    /// Content before the first write in `entries`; `None` once it can never be seen again.
    pub initial: Option<Content>,
    /// Writes that may still be seen, in order of submission.
    pub entries: Vec<Entry>,
}

/// The content that was recognized.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// The content before all entries.
    Initial,
    /// The content of the entry with this index.
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

    /// The allowed contents that match `bytes`, which start at byte `from`: the latest of them, and
    /// their number.
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

    /// Whether one of the allowed contents that match `bytes` may be lost, although the disk shows
    /// it.
    pub fn is_doubtful(&self, volume: VolumeId, sector: u64, at: u64, bytes: &[u8]) -> bool {
        let mut alike = self.allowed(at).filter(|(_, one)| one.matches(volume, sector, 0, bytes));
        alike.any(|(found, _)| match found {
            Found::Initial => false,
            Found::Entry(place) => self.entries[place].doubtful && !self.entries[place].durable,
        })
    }

    /// Removes contents that no read submitted at `horizon` or later can return, and no crash can
    /// bring back.
    pub fn trim(&mut self, horizon: u64, durable_until: u64) {
        let firm = |e: &&Entry| {
            e.effect == Effect::Certain && e.end < horizon && e.is_durable(durable_until)
        };
        let Some(begin) = self.entries.iter().filter(firm).map(|e| e.begin).max() else { return };
        self.initial = None;
        self.entries.retain(|e| e.end >= begin);
    }

    /// Records a crash at `now`: writes that were neither flushed nor written with force unit
    /// access may or may not survive.
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

    /// Records that a read found `found` while no write was in flight: that is the content from now
    /// on. If it was on the disks when the last crash happened, it is durable at once.
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

    /// Like `observe`, for a volume on which content read after a crash may be gone after the next:
    /// `found` is the content from now on, but only a flush makes it durable. Returns its new
    /// place.
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

    /// Records that several writes left the same bytes: the content is known, but not which write
    /// it is from. `doubtful`: it may be from one that the disk has lost and still shows.
    pub fn forget_origin(&mut self, found: Found, doubtful: bool) {
        if let Found::Entry(place) = found
            && let Some(e) = self.entries.get_mut(place)
        {
            e.id = UNKNOWN;
            e.acked_in = None;
            e.session = u32::MAX;
            e.doubtful |= doubtful && !e.durable;
        }
    }

    /// Whether no write is in flight and none was submitted at `at` or later.
    pub fn quiet(&self, at: u64) -> bool {
        self.entries.iter().all(|e| e.end < at)
    }
}

impl Entry {
    /// Whether no crash can undo it, where `durable_until` is the submission of the last completed
    /// flush.
    pub fn is_durable(&self, durable_until: u64) -> bool {
        self.durable
            || (self.effect == Effect::Certain && !self.doubtful && self.end < durable_until)
    }
}
