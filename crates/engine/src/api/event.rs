//! Events that an administrator should know about: faults, recoveries, changes of health. The
//! engine hands them out in [`Effects::events`](crate::Effects::events), once per turn and without
//! strings. The caller writes the log, with names and times, and counts repetitions.

use std::time::Duration;

use forebay_block::{BlockRange, ByteRange, ErrorKind, IoOp, VolumeId};

use crate::api::{Effects, Health, Target};

/// Limit on the events of one turn; the rest are counted in [`Event::Omitted`].
pub const EVENTS_PER_TURN_MAX: usize = 64;

/// A single event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A device failed a request of the engine or of a client.
    DeviceFailed {
        /// The device.
        target: Target,
        /// The requested operation.
        op: IoOp,
        /// The byte range on the device or volume; empty for a flush.
        range: ByteRange,
        /// The kind of the error.
        kind: ErrorKind,
    },
    /// A primary no longer answers: the first request failed that way.
    PrimaryAway {
        /// Volume of the primary.
        volume: VolumeId,
        /// The kind of error with which that request failed.
        kind: ErrorKind,
    },
    /// A device has not answered a request for longer than the configured patience. Reported once;
    /// again only after the device has answered all overdue requests.
    Unanswered {
        /// The device.
        target: Target,
        /// The requested operation.
        op: IoOp,
        /// The byte range on the device or volume; empty for a flush.
        range: ByteRange,
        /// Time since the request was sent.
        waited: Duration,
    },
    /// A primary that was away has completed a request.
    PrimaryBack {
        /// Volume of the primary.
        volume: VolumeId,
        /// Time since the first failed request.
        away: Duration,
    },
    /// A destage failed; its blocks stay dirty and are destaged again after the pause.
    DestageFailed {
        /// The volume.
        volume: VolumeId,
        /// The blocks of the destage.
        blocks: BlockRange,
        /// The kind of the error.
        kind: ErrorKind,
        /// Time until the next attempt; none for blocks that are then tried one by one.
        pause: Duration,
    },
    /// Clean blocks on the cache device are corrupt: they are dropped, and read from the primary.
    CleanCorrupt {
        /// The volume.
        volume: VolumeId,
        /// The corrupt blocks.
        blocks: BlockRange,
    },
    /// Dirty blocks cannot be read back: lost until they are overwritten. Reads of them fail.
    Fenced {
        /// The volume.
        volume: VolumeId,
        /// The lost blocks.
        blocks: BlockRange,
    },
    /// A primary was changed without the cache: the clean blocks of the volume are dropped.
    PrimaryChanged {
        /// Volume of the primary.
        volume: VolumeId,
        /// Blocks in which the change was found.
        blocks: BlockRange,
    },
    /// The clean blocks of a volume have been compared with its primary, and are the same.
    Compared {
        /// The volume.
        volume: VolumeId,
        /// Number of blocks compared.
        blocks: u64,
    },
    /// The health of the cache device changed.
    Health {
        /// The old health.
        from: Health,
        /// The new health.
        to: Health,
    },
    /// The log is full because a primary takes no blocks: writes of the other volumes bypass the
    /// log from now on, or stop bypassing it.
    Overflow {
        /// Whether writes bypass the log now.
        active: bool,
    },
    /// Recovery has read the log, and the shard is serving.
    Recovered(Recovered),
    /// All clean blocks are loaded, which were left out before the shard served.
    Loaded {
        /// Blocks in the cache.
        blocks: u64,
    },
    /// This many more events happened in the turn.
    Omitted(u64),
}

/// What recovery found in a shard's log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Recovered {
    /// Segments of the log.
    pub segments: u64,
    /// Number of these segments that had no footer and were read record by record: zero after an
    /// orderly stop.
    pub unsealed: u64,
    /// Segments erased because nothing in them had been acknowledged as durable.
    pub erased: u64,
    /// Records in the log.
    pub records: u64,
    /// Blocks in the cache that are loaded: all of them, unless the clean ones follow
    /// ([`Event::Loaded`]).
    pub blocks: u64,
    /// Whether clean blocks are still to be loaded.
    pub is_loading: bool,
    /// Number of these blocks that are dirty.
    pub dirty_blocks: u64,
    /// Number of these blocks that are lost.
    pub lost_blocks: u64,
}

impl Event {
    /// The volume that the event is about, if any.
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
            | Self::Loaded { .. }
            | Self::Omitted(_) => None,
        }
    }

    /// Whether the event must be reported even beyond the limit. Such events are rare.
    fn is_rare(&self) -> bool {
        matches!(
            self,
            Self::Health { .. } | Self::Recovered(_) | Self::Loaded { .. } | Self::Omitted(_)
        )
    }

    /// Merges another event into this one if they report the same about adjacent blocks; returns
    /// whether they do.
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

/// The events of a turn so far.
#[derive(Default, Debug)]
pub(crate) struct Events {
    told: Vec<Event>,
    omitted: u64,
}

impl Events {
    /// Adds an event.
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

    /// Hands out the events of this turn.
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
