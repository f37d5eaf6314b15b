//! What is known of the blocks that only RAM has.

use forebay_block::Instant;

/// What is known of the blocks that only RAM has.
#[derive(Debug, Default)]
pub struct Alone {
    /// Some came in since the last round began.
    waiting: bool,
    round: Option<Round>,
}

/// A look at every place of the RAM tier.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    pub since: Instant,
    pub place: u64,
}

impl Alone {
    /// A block came in that may enter the log later.
    pub fn note(&mut self) {
        self.waiting = true;
    }

    /// Whether there are places to look at.
    pub fn is_due(&self) -> bool {
        self.waiting || self.round.is_some()
    }

    /// The round that goes on, or begins at `now` if a block has come in.
    pub fn round(&mut self, now: Instant) -> Option<Round> {
        if self.round.is_none() && std::mem::take(&mut self.waiting) {
            self.round = Some(Round { since: now, place: 0 });
        }
        self.round
    }

    /// The round goes on at that place, or is over.
    pub fn set_round(&mut self, round: Option<Round>) {
        self.round = round;
    }
}
