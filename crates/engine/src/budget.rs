//! Time for what no client waits for: making dense forms, and looking for similar blocks.

use std::time::Duration;

use forebay_block::Instant;

/// Time between two blocks, on average: with 13 to 25 microseconds for each, 6 to 10 % of a
/// processor. Beyond that blocks are copied as they are.
const PACE: Duration = Duration::from_micros(250);
/// How far ahead of that it may be: reclaim copies in bursts.
const AHEAD: Duration = Duration::from_millis(100);
/// Blocks in a turn of the event loop: a tenth of a millisecond, for which clients wait.
const TURN_MAX: u32 = 8;

/// What may be spent, in blocks.
#[derive(Debug, Default)]
pub struct Budget {
    /// When the blocks so far are paid for.
    paid_at: Instant,
    /// Blocks in this turn.
    in_turn: u32,
}

impl Budget {
    /// A turn of the event loop begins.
    pub fn begin_turn(&mut self) {
        self.in_turn = 0;
    }

    /// Whether the rest has to wait for the next turn.
    pub fn turn_is_over(&self) -> bool {
        self.in_turn >= TURN_MAX
    }

    /// Takes the time for one block, if there is some left.
    pub fn take(&mut self, now: Instant) -> bool {
        let from = self.paid_at.max(now);
        let due = from <= now + AHEAD;
        if due {
            self.paid_at = from + PACE;
            self.in_turn += 1;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_spread_over_turns_and_paid_for() {
        let mut budget = Budget::default();
        let start = Instant(1_000_000_000);
        let mut made = 0;
        for _ in 0..1000 {
            budget.begin_turn();
            while !budget.turn_is_over() && budget.take(start) {
                made += 1;
            }
            assert!(budget.in_turn <= TURN_MAX);
        }
        let burst = AHEAD.as_nanos() / PACE.as_nanos();
        assert!((burst..burst + 2).contains(&made), "{made} at one time");
        budget.begin_turn();
        assert!(budget.take(start + PACE * 2) && !budget.take(start));
    }
}
