//! What an administrator should know of: faults, recoveries, changes of health. The engine says
//! it in [`Effects::events`](crate::Effects::events), once a turn, without a string; whoever drives
//! the engine writes the log, with names and times, and counts repetitions.

use std::time::Duration;

use forebay_block::{BlockRange, ByteRange, ErrorKind, IoOp, VolumeId};

use crate::api::{Effects, Health, Target};

/// Events told in one turn; the rest is counted in [`Event::Omitted`].
pub const EVENTS_PER_TURN_MAX: usize = 64;

/// One thing that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A device failed a request, the engine's or a client's.
    DeviceFailed {
        /// Which device.
        target: Target,
        /// What it was asked to do.
        op: IoOp,
        /// Where, in bytes of the device or of the volume; empty for a flush.
        range: ByteRange,
        /// How it failed.
        kind: ErrorKind,
    },
    /// A primary does not answer any more: the first request failed that way.
    PrimaryAway {
        /// Whose primary.
        volume: VolumeId,
        /// How that request failed.
        kind: ErrorKind,
    },
    /// A device has not answered a request for longer than the configured patience. Told once
    /// until it has answered all of these.
    Unanswered {
        /// Which device.
        target: Target,
        /// What it was asked to do.
        op: IoOp,
        /// Where, in bytes of the device or of the volume; empty for a flush.
        range: ByteRange,
        /// Since it was asked.
        waited: Duration,
    },
    /// A primary that was away has completed a request.
    PrimaryBack {
        /// Whose primary.
        volume: VolumeId,
        /// Since the first failed request.
        away: Duration,
    },
    /// A destage failed; its blocks stay dirty and are destaged again after the pause.
    DestageFailed {
        /// Which volume.
        volume: VolumeId,
        /// Its blocks.
        blocks: BlockRange,
        /// How it failed.
        kind: ErrorKind,
        /// Until the next try.
        pause: Duration,
    },
    /// Clean blocks on the cache device have bad bytes: dropped, and read from the primary.
    CleanCorrupt {
        /// Which volume.
        volume: VolumeId,
        /// Which blocks.
        blocks: BlockRange,
    },
    /// Dirty blocks cannot be read back: lost until they are overwritten. Reads of them fail.
    Fenced {
        /// Which volume.
        volume: VolumeId,
        /// Which blocks.
        blocks: BlockRange,
    },
    /// A primary was changed without the cache: what the cache has of it clean is dropped.
    PrimaryChanged {
        /// Whose primary.
        volume: VolumeId,
        /// Where that was found.
        blocks: BlockRange,
    },
    /// The clean blocks of a volume have been compared with its primary, and are the same.
    Compared {
        /// Which volume.
        volume: VolumeId,
        /// How many.
        blocks: u64,
    },
    /// The cache device is used differently from now on.
    Health {
        /// How it was.
        from: Health,
        /// How it is.
        to: Health,
    },
    /// The log has no room because of primaries that take nothing: writes of the other volumes go
    /// past it from now on, or do so no more.
    Overflow {
        /// Whether they do.
        active: bool,
    },
    /// The log was read back, and the shard serves.
    Recovered(Recovered),
    /// So many more happened in the turn.
    Omitted(u64),
}

/// What recovery found in a shard's log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Recovered {
    /// Segments of the log.
    pub segments: u64,
    /// Of these, how many had no footer and were read record by record: none after an orderly
    /// stop.
    pub unsealed: u64,
    /// Segments erased, since nothing in them had been acknowledged as durable.
    pub erased: u64,
    /// Records in the log.
    pub records: u64,
    /// Blocks in the cache.
    pub blocks: u64,
    /// Of these, how many are dirty.
    pub dirty_blocks: u64,
    /// Of these, how many are lost.
    pub lost_blocks: u64,
}

impl Event {
    /// The volume it is about, if it is about one.
    #[must_use]
    pub fn volume(&self) -> Option<VolumeId> {
        match self {
            Self::DeviceFailed { target: Target::Primary(volume), .. }
            | Self::Unanswered { target: Target::Primary(volume), .. }
            | Self::PrimaryAway { volume, .. }
            | Self::PrimaryBack { volume, .. }
            | Self::DestageFailed { volume, .. }
            | Self::CleanCorrupt { volume, .. }
            | Self::PrimaryChanged { volume, .. }
            | Self::Compared { volume, .. }
            | Self::Fenced { volume, .. } => Some(*volume),
            Self::DeviceFailed { target: Target::Cache, .. }
            | Self::Unanswered { target: Target::Cache, .. }
            | Self::Health { .. }
            | Self::Overflow { .. }
            | Self::Recovered(_)
            | Self::Omitted(_) => None,
        }
    }

    /// Whether it must be told, however many others there are. There are few of these.
    fn is_rare(&self) -> bool {
        matches!(self, Self::Health { .. } | Self::Recovered(_) | Self::Omitted(_))
    }

    /// Takes another event in if both are one: blocks next to each other that share a fate.
    fn absorb(&mut self, other: &Self) -> bool {
        let (mine, theirs) = match (self, other) {
            (Self::Fenced { volume, blocks }, Self::Fenced { volume: other, blocks: theirs })
            | (
                Self::CleanCorrupt { volume, blocks },
                Self::CleanCorrupt { volume: other, blocks: theirs },
            ) if volume == other => (blocks, theirs),
            _ => return false,
        };
        let follows = mine.end() == theirs.first;
        if follows {
            mine.count += theirs.count;
        }
        follows
    }
}

/// What happened in a turn so far.
#[derive(Default, Debug)]
pub(crate) struct Events {
    told: Vec<Event>,
    omitted: u64,
}

impl Events {
    /// Notes an event.
    pub fn tell(&mut self, event: Event) {
        if self.told.last_mut().is_some_and(|last| last.absorb(&event)) {
            return;
        }
        if self.told.len() < EVENTS_PER_TURN_MAX || event.is_rare() {
            self.told.push(event);
        } else {
            self.omitted += 1;
        }
    }

    /// Hands out what happened in this turn.
    pub fn hand_out(&mut self, fx: &mut Effects) {
        if self.told.is_empty() {
            return;
        }
        fx.events.append(&mut self.told);
        let omitted = std::mem::take(&mut self.omitted);
        if omitted > 0 {
            fx.events.push(Event::Omitted(omitted));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fenced(first: u64, count: u64) -> Event {
        Event::Fenced { volume: VolumeId(1), blocks: BlockRange { first, count } }
    }

    #[test]
    fn neighbors_are_one_event() {
        let mut events = Events::default();
        for block in [5, 6, 7, 9] {
            events.tell(fenced(block, 1));
        }
        events.tell(Event::Fenced {
            volume: VolumeId(2),
            blocks: BlockRange { first: 10, count: 1 },
        });
        assert_eq!(events.told[..2], [fenced(5, 3), fenced(9, 1)]);
        assert_eq!(events.told.len(), 3);
    }

    #[test]
    fn a_turn_tells_so_much_and_counts_the_rest_but_for_what_is_rare() {
        let mut events = Events::default();
        for block in 0..100 {
            events.tell(fenced(block * 2, 1));
        }
        events.tell(Event::Health { from: Health::Good, to: Health::Draining });
        assert_eq!(events.told.len(), EVENTS_PER_TURN_MAX + 1);
        assert_eq!(events.omitted, 100 - EVENTS_PER_TURN_MAX as u64);
    }
}
