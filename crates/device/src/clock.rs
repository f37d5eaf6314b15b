//! The production clock: monotonic, never set back, counted from its own start.

use std::time;

use forebay_block::Instant;

/// A monotonic clock. Copies show the same time, so threads share one by value.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: time::Instant,
}

impl Clock {
    /// A clock that starts now.
    #[must_use]
    pub fn start() -> Self {
        Self { start: time::Instant::now() }
    }

    /// The time since the start.
    #[must_use]
    pub fn now(&self) -> Instant {
        Instant(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_tell_the_same_time_and_never_run_back() {
        let clock = Clock::start();
        let copy = clock;
        let first = clock.now();
        let second = copy.now();
        let third = clock.now();
        assert!(first <= second && second <= third);
    }
}
