//! The RAM tier as a window before the log. Missed blocks stay in RAM alone until their place there
//! is needed for another block. Only then does the policy decide whether they enter the log: by
//! then they have been requested again or not, and blocks requested once, in a burst, never take
//! room there (the window of W-TinyLFU, Einziger, Friedman and Manes, ACM TOS 2017).
//!
//! Blocks requested together are decided on together: if only part of a database page is cached,
//! its reads still wait for the primary.

use std::ops::Range;

use crate::recent::{Recent, Standing};

/// Maximum number of blocks decided on together.
const RUN_MAX: u64 = 16;
/// Maximum number of blocks whose standing is corrected for one that leaves.
const CORRECTED_MAX: usize = 16;

/// Blocks of a RAM tier that were decided on.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Keys of the blocks decided on last, which lose their places next.
    weighed: Range<u64>,
}

impl Window {
    /// Finds the block of a full tier that loses its place next. Returns the keys to decide on
    /// before: that block and the blocks requested together with it that are in RAM `alone`. Empty
    /// if the log has the block or it was already decided on.
    ///
    /// The tier learns late that the log no longer has a block: such a block is one of those in RAM
    /// alone from then on, as if it had just been used.
    pub fn leaving(&mut self, recent: &mut Recent, alone: impl Fn(u64) -> bool) -> Range<u64> {
        for _ in 0..CORRECTED_MAX {
            let Some((key, place)) = recent.oldest() else { break };
            if self.weighed.contains(&key) || !alone(key) {
                break;
            }
            if recent.standing_at(place) == Some(Standing::Alone) {
                self.weighed = Self::around(recent, key, place, alone);
                return self.weighed.clone();
            }
            recent.stand(key, Standing::Alone);
        }
        0..0
    }

    /// The keys to decide on together with the block `key` at `place`: blocks requested together
    /// with it that are in RAM `alone`.
    pub fn around(
        recent: &Recent,
        key: u64,
        place: u32,
        alone: impl Fn(u64) -> bool,
    ) -> Range<u64> {
        let together = recent.together(place, RUN_MAX);
        let start = (together.start..key).rev().take_while(|&key| alone(key)).last();
        let end = (key + 1..together.end).take_while(|&key| alone(key)).last();
        start.unwrap_or(key)..end.unwrap_or(key) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recent(keys: impl IntoIterator<Item = u64>) -> Recent {
        let mut recent = Recent::new(100);
        keys.into_iter().for_each(|key| assert!(recent.put(key, Standing::Alone).is_some()));
        recent
    }

    #[test]
    fn a_page_is_weighed_once_and_whole() {
        let mut recent = recent([8, 9, 10, 11]);
        let mut window = Window::default();
        assert_eq!(window.leaving(&mut recent, |_| true), 8..12);
        for key in 8..12 {
            assert!(window.leaving(&mut recent, |_| true).is_empty());
            assert_eq!(recent.oldest().map(|(oldest, _)| oldest), Some(key));
            recent.forget(key);
        }
        assert!(recent.put(8, Standing::Alone).is_some());
        assert_eq!(window.leaving(&mut recent, |_| true), 0..0, "it was weighed just now");
    }

    #[test]
    fn what_the_log_has_is_not_weighed() {
        let mut recent = recent([8, 9, 10, 11]);
        assert!(Window::default().leaving(&mut recent, |key| key != 8).is_empty());
        let place = recent.find(11).expect("it is there");
        assert_eq!(Window::around(&recent, 11, place, |key| key != 9), 10..12);
    }

    #[test]
    fn what_the_log_has_lost_stays_as_what_ram_has_alone() {
        let mut recent = recent([8]);
        for key in [20, 30, 40] {
            recent.put(key, Standing::Doubled);
        }
        let mut window = Window::default();
        assert!(window.leaving(&mut recent, |key| key != 30).is_empty());
        let oldest = recent.oldest().map(|(key, _)| key);
        assert_eq!(oldest, Some(30), "8 is worth more, and 20 is alone now, too");
        let place = recent.find(20).expect("it is there");
        assert_eq!(recent.standing_at(place), Some(Standing::Alone));
    }

    #[test]
    fn a_long_run_is_weighed_in_parts() {
        let mut long = recent(0..40);
        assert_eq!(Window::default().leaving(&mut long, |_| true), 0..RUN_MAX);
        assert!(Window::default().leaving(&mut Recent::new(0), |_| true).is_empty());
    }
}
