//! Blocks that are in RAM but not in the log: admission is decided later, by rounds over the RAM
//! tier.

use forebay_block::Instant;

/// Whether there may be blocks that are in RAM but not in the log, and the current round.
#[derive(Debug, Default)]
pub struct Alone {
    /// Whether a block has come in since the last round began.
    waiting: bool,
    round: Option<Round>,
}

/// A pass over every place of the RAM tier.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    pub since: Instant,
    pub place: u64,
    /// Whether it should have come further by now.
    pub is_late: bool,
}

impl Alone {
    /// Notes that a block came in that may enter the log later.
    pub fn note(&mut self) {
        self.waiting = true;
    }

    /// Whether there are places to visit.
    pub fn is_due(&self) -> bool {
        self.waiting || self.round.is_some()
    }

    /// Whether the current round should have come further by now.
    pub fn is_late(&self) -> bool {
        self.round.is_some_and(|round| round.is_late)
    }

    /// The current round; begins one at `now` if a block has come in since the last.
    pub fn round(&mut self, now: Instant) -> Option<Round> {
        if self.round.is_none() && std::mem::take(&mut self.waiting) {
            self.round = Some(Round { since: now, place: 0, is_late: false });
        }
        self.round
    }

    /// Sets the place at which the round continues, or ends the round.
    pub fn set_round(&mut self, round: Option<Round>) {
        self.round = round;
    }
}
