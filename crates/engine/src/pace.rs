//! A budget of processor time for what may as well not be done: so much on average, some of it
//! ahead of time since there is more to do at one time than at another, and little in one turn of
//! the event loop, for which clients wait.

use std::time::Duration;

use forebay_block::Instant;

/// How far the budget has been spent.
#[derive(Debug)]
pub struct Pace {
    /// Time from one piece of work to the next, on average.
    each: Duration,
    /// How far ahead of that it may be.
    ahead: Duration,
    /// Pieces in a turn.
    turn_max: u32,
    /// When all that was done is paid for.
    paid_at: Instant,
    /// Pieces done in this turn.
    in_turn: u32,
}

impl Pace {
    /// Nothing has been spent.
    pub fn new(each: Duration, ahead: Duration, turn_max: u32) -> Self {
        Self { each, ahead, turn_max, paid_at: Instant(0), in_turn: 0 }
    }

    /// A turn of the event loop begins.
    pub fn begin_turn(&mut self) {
        self.in_turn = 0;
    }

    /// Whether nothing more is to be done in this turn.
    pub fn turn_is_over(&self) -> bool {
        self.in_turn >= self.turn_max
    }

    /// Whether a piece of work may be done now.
    pub fn is_due(&self, now: Instant) -> bool {
        !self.turn_is_over() && self.paid_at <= now + self.ahead
    }

    /// One is done.
    pub fn pay(&mut self, now: Instant) {
        self.paid_at = self.paid_at.max(now) + self.each;
        self.in_turn += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_spread_over_turns_and_paid_for() {
        let (each, ahead) = (Duration::from_micros(250), Duration::from_millis(100));
        let mut pace = Pace::new(each, ahead, 8);
        let start = Instant(1_000_000_000);
        let mut done = 0;
        for _ in 0..1000 {
            pace.begin_turn();
            while pace.is_due(start) {
                pace.pay(start);
                done += 1;
            }
            assert!(pace.in_turn <= 8);
        }
        let burst = ahead.as_nanos() / each.as_nanos();
        assert!((burst..burst + 2).contains(&done), "{done} at one time");
        pace.begin_turn();
        assert!(pace.is_due(start + each * 2));
        pace.pay(start + each * 2);
        assert!(!pace.is_due(start));
    }
}
