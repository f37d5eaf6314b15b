//! When a server that died is started again, and when no more.

use std::time::{Duration, Instant};

/// Starts in a row that may fail.
const ATTEMPTS: u32 = 30;
/// The pause before the second start in a row; it doubles each time.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// A server that served for this long has got further than the one before it.
const STEADY: Duration = Duration::from_secs(1);

/// The starts since the last server that served for a while.
#[derive(Debug, Default)]
pub struct Attempts {
    count: u32,
    serving_since: Option<Instant>,
}

impl Attempts {
    /// Notes that a server serves.
    pub fn serves(&mut self) {
        self.serving_since = Some(Instant::now());
    }

    /// The number of starts since the last server that served for a while.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The pause before the next start; `None` if there shall be none.
    pub fn next(&mut self) -> Option<Duration> {
        let served = self.serving_since.take().map(|since| since.elapsed());
        self.after(served)
    }

    fn after(&mut self, served: Option<Duration>) -> Option<Duration> {
        if served.is_some_and(|time| time >= STEADY) {
            self.count = 0;
        }
        let before = self.count;
        if before == ATTEMPTS {
            return None;
        }
        self.count += 1;
        // A first death is answered at once.
        let doubled = |before: u32| FIRST * 2u32.saturating_pow(before - 1);
        Some(if before == 0 { Duration::ZERO } else { doubled(before).min(LONGEST) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_end() {
        let mut attempts = Attempts::default();
        let pauses: Vec<_> = std::iter::from_fn(|| attempts.after(None)).collect();
        assert_eq!(pauses.len(), ATTEMPTS as usize);
        assert_eq!(pauses[..4], [0, 100, 200, 400].map(Duration::from_millis));
        assert_eq!(pauses[29], LONGEST);
    }

    #[test]
    fn only_a_server_that_served_for_a_while_starts_the_count_again() {
        let mut attempts = Attempts::default();
        for _ in 0..ATTEMPTS {
            attempts.after(Some(Duration::from_millis(900))).expect("a start is left");
        }
        assert_eq!(attempts.after(Some(STEADY)), Some(Duration::ZERO));
        assert_eq!(attempts.count(), 1);
    }
}
