//! A bound on a rate.

use std::time::Duration;

use forebay_block::Instant;

/// Burst that is allowed after a pause, as time at the full rate.
const BURST: Duration = Duration::from_millis(100);

/// Bounds the blocks per second: a token bucket whose level may become negative, so that what is
/// taken at once may be of any size.
#[derive(Clone, Copy, Debug)]
pub struct RateBound {
    /// Blocks per second; unlimited when `None`.
    rate: Option<f64>,
    /// Blocks that may be taken; below zero after a large one.
    level: f64,
    at: Instant,
}

impl RateBound {
    /// A bound of this many blocks per second, or none.
    ///
    /// # Panics
    /// If the rate is not positive.
    #[must_use]
    pub fn new(rate: Option<f64>) -> Self {
        assert!(rate.is_none_or(|rate| rate > 0.0), "a rate is positive");
        Self { rate, level: 0.0, at: Instant::default() }
    }

    /// Whether something may be taken now.
    pub fn allows(&mut self, now: Instant) -> bool {
        let Some(rate) = self.rate else { return true };
        let most = (rate * BURST.as_secs_f64()).max(1.0);
        let grown = rate * now.since(self.at).as_secs_f64();
        (self.level, self.at) = ((self.level + grown).min(most), now);
        self.level > 0.0
    }

    /// Records that blocks were taken.
    pub fn take(&mut self, blocks: u64) {
        if self.rate.is_some() {
            self.level -= blocks as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(rate: Option<f64>, each: u64, seconds: u64, idle: u64) -> u64 {
        let mut bound = RateBound::new(rate);
        let mut taken = 0;
        for ms in idle * 1000..(idle + seconds) * 1000 {
            let now = Instant(ms * 1_000_000);
            for _ in 0..10 {
                if bound.allows(now) {
                    bound.take(each);
                    taken += each;
                }
            }
        }
        taken
    }

    #[test]
    fn the_rate_is_kept_whatever_is_taken_at_once() {
        for rate in [10, 100, 1000, 5000] {
            for each in [1, 16, 300] {
                let got = taken(Some(rate as f64), each, 20, 0);
                let (least, most) = (rate * 20 * 9 / 10, rate * 20 + rate / 10 + each);
                assert!((least.min(most - each)..=most).contains(&got), "{rate} {each}: {got}");
            }
        }
        assert_eq!(taken(None, 3, 1, 0), 30_000);
    }

    #[test]
    fn a_pause_allows_no_more_than_a_short_burst() {
        assert!(taken(Some(1000.0), 1, 1, 3600) <= 1000 + 100);
    }
}
