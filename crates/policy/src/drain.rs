//! When to give up a drain although blocks are left.

use std::time::Duration;

/// A drain without progress for this long is given up: the primary is away, or clients write blocks
/// as fast as it takes them.
pub const DRAIN_PATIENCE: Duration = Duration::from_secs(30);

/// The progress of a drain.
#[derive(Clone, Debug, Default)]
pub struct DrainProgress {
    /// The smallest number of blocks left so far, and when it was first seen.
    least: Option<(u64, Duration)>,
}

impl DrainProgress {
    /// Whether to give up, with `left` blocks to go after `time`.
    pub fn is_stalled(&mut self, time: Duration, left: u64) -> bool {
        match self.least {
            Some((least, since)) if left >= least => time.saturating_sub(since) >= DRAIN_PATIENCE,
            _ => {
                self.least = Some((left, time));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fewer_blocks_than_ever_are_progress() {
        let at = Duration::from_secs;
        let mut drain = DrainProgress::default();
        assert!(!drain.is_stalled(at(0), 100));
        assert!(!drain.is_stalled(at(29), 100));
        assert!(!drain.is_stalled(at(29), 99));
        assert!(!drain.is_stalled(at(40), 150));
        assert!(!drain.is_stalled(at(58), 99));
        assert!(drain.is_stalled(at(59), 99));
        assert!(!drain.is_stalled(at(60), 0));
    }
}
