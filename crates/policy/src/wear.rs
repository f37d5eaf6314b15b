//! A budget for the wear of an SSD: how strictly clean blocks are chosen for the cache device while
//! everything together writes more than its bytes per day.
//!
//! A bucket fills at the budget's rate, and every byte that is written takes one out, whatever it
//! is for. Only clean blocks are refused, since a client's write must be kept. The less is left,
//! the more often a clean block must have been requested to be written. So the level comes to rest
//! where admissions are what the writes of clients leave of the budget.

use std::hash::Hasher;
use std::time::Duration;

use forebay_block::Instant;

use crate::counts::GROUP;
use crate::recent::KeyHasher;
use crate::sketch::COUNT_MAX;

/// The most that is saved for later, and the most that is owed, as time at the budget's rate. A
/// restart begins with all of it.
pub const WEAR_BANK: Duration = Duration::from_secs(6 * 3600);

const DAY_SECONDS: f64 = 86_400.0;

/// The budget of a cache device, or of a part of one.
#[derive(Clone, Copy, Debug)]
pub struct WearBudget {
    /// Bytes per second; no budget when `None`.
    rate: Option<f64>,
    /// Bytes left, at most the bank; below zero, bytes owed.
    level: f64,
    at: Instant,
    /// Bytes that had been written when the level was computed.
    written: u64,
}

impl WearBudget {
    /// A budget in bytes per day, or none, with a full bank. Nothing has been written.
    #[must_use]
    pub fn new(per_day: Option<f64>, now: Instant) -> Self {
        let rate = per_day.map(|bytes| bytes / DAY_SECONDS);
        Self { rate, level: bank(rate), at: now, written: 0 }
    }

    /// Changes the budget; the same share of the bank is left as before.
    pub fn set(&mut self, per_day: Option<f64>, now: Instant, written: u64) {
        self.note(now, written);
        let before = bank(self.rate);
        self.rate = per_day.map(|bytes| bytes / DAY_SECONDS);
        let share = if before > 0.0 { self.level / before } else { 1.0 };
        self.level = bank(self.rate) * share;
    }

    /// Notes how many bytes have been written in all, since the beginning.
    pub fn note(&mut self, now: Instant, written: u64) {
        let bank = bank(self.rate);
        let gained = self.rate.unwrap_or(0.0) * now.since(self.at).as_secs_f64();
        let spent = written.saturating_sub(self.written) as f64;
        self.level = (self.level + gained - spent).clamp(-bank, bank);
        (self.at, self.written) = (now, written);
    }

    /// How much of the budget is used up: 0 while half of the bank is left, 1 when nothing is, and
    /// 0 without a budget.
    #[must_use]
    pub fn pressure(&self) -> f64 {
        let half = bank(self.rate) / 2.0;
        if half > 0.0 { (1.0 - self.level / half).clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Whether clean blocks may be written, which were requested `count` times recently. A policy
    /// that does not count passes `None`: then the pressure is the part of all blocks that may not,
    /// always the same ones. `key` is that of the first block.
    #[must_use]
    pub fn allows(&self, count: Option<u8>, key: u64) -> bool {
        let pressure = self.pressure();
        match count {
            _ if pressure <= 0.0 => true,
            _ if pressure >= 1.0 => false,
            Some(count) => f64::from(count) >= pressure * f64::from(COUNT_MAX),
            None => {
                let mut hasher = KeyHasher::default();
                hasher.write_u64(key / GROUP);
                hasher.finish() as f64 >= pressure * u64::MAX as f64
            }
        }
    }
}

/// The most bytes that are saved at a rate, or owed.
fn bank(rate: Option<f64>) -> f64 {
    rate.unwrap_or(0.0) * WEAR_BANK.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DAY: u64 = 86_400;
    const MIB: f64 = (1 << 20) as f64;

    fn at(second: u64) -> Instant {
        Instant(second * 1_000_000_000)
    }

    /// Bytes written in each of some days: by clients, and by admissions of blocks with these
    /// counts wherever they are allowed.
    fn days(per_day: f64, clients: f64, asked: f64, count: fn(u64) -> Option<u8>) -> Vec<f64> {
        let mut budget = WearBudget::new(Some(per_day), at(0));
        let (mut written, mut key, mut all) = (0.0, 0, Vec::new());
        for second in 0..6 * DAY {
            budget.note(at(second), written as u64);
            written += clients / DAY as f64;
            for _ in 0..4 {
                key += GROUP;
                if budget.allows(count(key), key) {
                    written += asked / DAY as f64 / 4.0;
                }
            }
            if (second + 1).is_multiple_of(DAY) {
                all.push(written - all.iter().sum::<f64>());
            }
        }
        all
    }

    #[test]
    fn admissions_take_what_clients_leave_of_the_budget() {
        let counts: [fn(u64) -> Option<u8>; 2] = [|key| Some((key / GROUP % 16) as u8), |_| None];
        for count in counts {
            let days = days(100.0 * MIB, 30.0 * MIB, 500.0 * MIB, count);
            // The bank is spent on the first day.
            assert!(days[0] < 126.0 * MIB, "{days:?}");
            for day in &days[1..] {
                assert!((99.0 * MIB..101.0 * MIB).contains(day), "{days:?}");
            }
        }
    }

    #[test]
    fn below_the_budget_nothing_is_refused() {
        let days = days(100.0 * MIB, 30.0 * MIB, 60.0 * MIB, |_| Some(0));
        assert!(days.iter().all(|day| (89.0 * MIB..91.0 * MIB).contains(day)), "{days:?}");
    }

    #[test]
    fn clients_alone_may_exceed_it_and_no_clean_block_enters_then() {
        let days = days(100.0 * MIB, 300.0 * MIB, 500.0 * MIB, |_| Some(15));
        for day in &days[1..] {
            assert!((299.0 * MIB..301.0 * MIB).contains(day), "{days:?}");
        }
    }

    #[test]
    fn without_a_budget_there_is_no_pressure() {
        let mut budget = WearBudget::new(None, at(0));
        budget.note(at(1), 1 << 60);
        assert!(budget.pressure() == 0.0 && budget.allows(Some(0), 1) && budget.allows(None, 1));
        // With one the bank is full, whatever was written before.
        budget.set(Some(DAY as f64), at(2), 1 << 61);
        assert_eq!(budget.pressure(), 0.0);
        budget.set(None, at(3), 1 << 62);
        assert_eq!(budget.pressure(), 0.0);
    }

    #[test]
    fn the_more_is_used_up_the_more_frequent_a_block_must_be() {
        let allowed = |spent: f64| {
            let mut budget = WearBudget::new(Some(4.0 * MIB), at(0));
            budget.note(at(0), (spent * MIB) as u64);
            (0..=15).find(|&count| budget.allows(Some(count), 0))
        };
        // The bank has 1 MiB.
        let least = [0.0, 0.5, 0.51, 0.75, 0.99, 1.0, 9.0].map(allowed);
        assert_eq!(least, [Some(0), Some(0), Some(1), Some(8), Some(15), None, None]);
    }

    #[test]
    fn another_budget_keeps_the_share_that_is_left() {
        let mut budget = WearBudget::new(Some(4.0 * MIB), at(0));
        budget.note(at(0), MIB as u64 * 3 / 4);
        assert_eq!(budget.pressure(), 0.5);
        budget.set(Some(400.0 * MIB), at(0), MIB as u64 * 3 / 4);
        assert_eq!(budget.pressure(), 0.5);
    }

    proptest! {
        /// Whatever is written when, pressure is a share, more writing never lowers it, and a block
        /// that is allowed stays so if it is more frequent.
        #[test]
        fn pressure_grows_with_what_is_written(
            per_day in 1.0f64..1e15,
            steps in prop::collection::vec((0u64..100_000, 0u64..1 << 40), 1..50),
            more in 0u64..1 << 40,
            count in 0u8..15,
            key in any::<u64>(),
        ) {
            let mut budget = WearBudget::new(Some(per_day), at(0));
            let (mut second, mut written) = (0, 0);
            for (after, bytes) in steps {
                (second, written) = (second + after, written + bytes);
                budget.note(at(second), written);
                prop_assert!((0.0..=1.0).contains(&budget.pressure()));
            }
            if budget.allows(Some(count), key) {
                prop_assert!(budget.allows(Some(count + 1), key));
            }
            let before = budget.pressure();
            budget.note(at(second), written + more);
            prop_assert!(budget.pressure() >= before);
            prop_assert!(budget.pressure() < 1.0 || !budget.allows(Some(15), key));
        }

        /// A pause of twice the bank takes all pressure away.
        #[test]
        fn a_debt_is_paid_in_a_bounded_time(per_day in 1.0f64..1e15, bytes in any::<u64>()) {
            let mut budget = WearBudget::new(Some(per_day), at(0));
            budget.note(at(1), bytes);
            budget.note(at(1) + 2 * WEAR_BANK, bytes);
            prop_assert_eq!(budget.pressure(), 0.0);
        }
    }
}
