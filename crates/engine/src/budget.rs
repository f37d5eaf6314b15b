//! Time for what no client waits for: making dense forms, and looking for similar blocks. Costs are
//! what was measured, since the engine has no clock of its own.

use std::time::Duration;

use forebay_block::Instant;

/// Taking the features of a block and looking them up.
pub const SEARCH: Duration = Duration::from_micros(5);
/// Encoding a block against another.
pub const AGAINST: Duration = Duration::from_micros(18);
/// Encoding a block by zstd.
pub const DENSE: Duration = Duration::from_micros(14);

/// One part in so many of a processor, on average. Beyond that blocks are stored as they are.
const SHARE: u32 = 12;
/// How far ahead of that it may be: reclaim copies in bursts of a segment.
const AHEAD: Duration = Duration::from_millis(1000);
/// Time in a turn of the event loop, for which clients wait; what is begun is ended.
const TURN: Duration = Duration::from_micros(100);

/// What may be spent.
#[derive(Debug, Default)]
pub struct Budget {
    /// When what was spent is paid for.
    paid_at: Instant,
    /// Spent in this turn.
    in_turn: Duration,
}

impl Budget {
    /// A turn of the event loop begins.
    pub fn begin_turn(&mut self) {
        self.in_turn = Duration::ZERO;
    }

    /// Whether the rest has to wait for the next turn.
    pub fn turn_is_over(&self) -> bool {
        self.in_turn >= TURN
    }

    /// Takes the time for something that costs so much, if there is some left.
    pub fn take(&mut self, now: Instant, cost: Duration) -> bool {
        let due = self.paid_at <= now + AHEAD;
        if due {
            self.charge(now, cost);
        }
        due
    }

    /// Takes the time for what was begun.
    pub fn charge(&mut self, now: Instant, cost: Duration) {
        self.paid_at = self.paid_at.max(now) + cost * SHARE;
        self.in_turn += cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_spread_over_turns_and_paid_for() {
        let mut budget = Budget::default();
        let start = Instant(1_000_000_000);
        let mut made = Duration::ZERO;
        for _ in 0..10_000 {
            budget.begin_turn();
            while !budget.turn_is_over() && budget.take(start, DENSE) {
                made += DENSE;
            }
            assert!(budget.in_turn < TURN + DENSE);
        }
        let burst = AHEAD / SHARE;
        assert!((burst..burst + 2 * DENSE).contains(&made), "{made:?} at one time");
        budget.begin_turn();
        let later = start + DENSE * SHARE * 2;
        assert!(budget.take(later, DENSE) && !budget.take(start, DENSE));
    }
}
