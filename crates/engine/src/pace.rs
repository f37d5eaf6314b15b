//! A CPU-time budget for optional work: an average rate, a burst allowance for uneven load, and a
//! cap per turn of the event loop, because clients wait for the turn. Costs are measured constants,
//! since the engine has no clock of its own.

use std::time::Duration;

use forebay_block::Instant;

/// The budget and the amount spent from it.
#[derive(Debug)]
pub struct Pace {
    /// The average rate is one part in this many of a CPU.
    share: u32,
    /// Burst allowance: how far spending may run ahead of the average rate.
    ahead: Duration,
    /// Cap per turn; work that has begun is finished even beyond it.
    turn: Duration,
    /// When the average rate will have paid for all work done so far.
    paid_at: Instant,
    /// Time spent in this turn.
    in_turn: Duration,
}

impl Pace {
    /// Returns a budget from which nothing has been spent.
    pub fn new(share: u32, ahead: Duration, turn: Duration) -> Self {
        Self { share, ahead, turn, paid_at: Instant(0), in_turn: Duration::ZERO }
    }

    /// Begins a turn of the event loop.
    pub fn begin_turn(&mut self) {
        self.in_turn = Duration::ZERO;
    }

    /// Returns the time spent in this turn.
    pub fn in_turn(&self) -> Duration {
        self.in_turn
    }

    /// Returns whether the cap per turn has been reached.
    pub fn turn_is_over(&self) -> bool {
        self.in_turn >= self.turn
    }

    /// Returns whether the average rate and burst allowance leave time; ignores the cap per turn.
    pub fn is_due(&self, now: Instant) -> bool {
        self.paid_at <= now + self.ahead
    }

    /// Returns when [`Pace::is_due`] will be true.
    pub fn due_at(&self) -> Instant {
        self.paid_at - self.ahead
    }

    /// Charges `cost` if there is time left; returns whether there was.
    pub fn take(&mut self, now: Instant, cost: Duration) -> bool {
        let due = self.is_due(now);
        if due {
            self.charge(now, cost);
        }
        due
    }

    /// Charges `cost` for work that is done in any case.
    pub fn charge(&mut self, now: Instant, cost: Duration) {
        self.paid_at = self.paid_at.max(now) + cost * self.share;
        self.in_turn += cost;
    }

    /// Adds to the budget, at most up to the burst allowance: one part in `share` of the time that
    /// the thread has rested.
    pub fn add(&mut self, rest: Duration, share: u32) {
        let paid = rest.saturating_mul(self.share) / share;
        let nanos = u64::try_from(paid.as_nanos()).unwrap_or(u64::MAX);
        self.paid_at = Instant(self.paid_at.0.saturating_sub(nanos));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_spread_over_turns_and_paid_for() {
        let (share, ahead, turn) = (10, Duration::from_millis(100), Duration::from_micros(100));
        let cost = Duration::from_micros(14);
        let mut pace = Pace::new(share, ahead, turn);
        let start = Instant(1_000_000_000);
        let mut done = Duration::ZERO;
        for _ in 0..1000 {
            pace.begin_turn();
            while !pace.turn_is_over() && pace.take(start, cost) {
                done += cost;
            }
            assert!(pace.in_turn < turn + cost);
        }
        let burst = ahead / share;
        assert!((burst..burst + 2 * cost).contains(&done), "{done:?} at one time");
        pace.begin_turn();
        assert!(pace.take(start + cost * share * 2, cost) && !pace.take(start, cost));
    }

    #[test]
    fn rest_adds_to_the_budget_but_no_more_than_a_burst() {
        let (ahead, cost) = (Duration::from_millis(100), Duration::from_millis(1));
        let mut pace = Pace::new(10, ahead, Duration::from_secs(1));
        let mut now = Instant(1_000_000_000);
        let spend = |pace: &mut Pace, now| (0..).take_while(|_| pace.take(now, cost)).count();
        assert_eq!(spend(&mut pace, now), 11, "the burst");
        // A tenth of what has passed, and a quarter of the rest.
        now = now + Duration::from_millis(40);
        pace.add(Duration::from_millis(16), 4);
        assert_eq!(spend(&mut pace, now), 4 + 4);
        now = now + Duration::from_millis(40);
        assert_eq!(spend(&mut pace, now), 4, "without rest");
        pace.add(Duration::from_secs(3600), 4);
        assert_eq!(spend(&mut pace, now), 11);
    }
}
