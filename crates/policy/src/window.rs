//! The RAM tier as a window before the log. Missed blocks stay in RAM alone until their place there
//! is needed for another block. Only then does the policy decide whether they enter the log: by
//! then they have been requested again or not, and blocks requested once, in a burst, never take
//! room there (the window of W-TinyLFU, Einziger, Friedman and Manes, ACM TOS 2017).
//!
//! Among the least recent blocks, those in RAM alone are spared once: reading them again takes the
//! primary, reading the others only the cache device. Blocks requested together are decided on
//! together: if only part of a database page is cached, its reads still wait for the primary.

use std::ops::Range;

use crate::recent::Recent;

/// Maximum number of blocks decided on together.
const RUN_MAX: u64 = 16;
/// Maximum number of blocks spared for one that leaves.
const SPARED_MAX: usize = 16;

/// Blocks of a RAM tier that were decided on or spared.
#[derive(Clone, Debug)]
pub struct Window {
    /// Keys of the blocks decided on last, which lose their places next.
    weighed: Range<u64>,
    /// For each place, whether its block was spared. A later block there may inherit the mark.
    spared: Vec<bool>,
}

impl Window {
    /// The window of a RAM tier with `places` places.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self { weighed: 0..0, spared: vec![false; places] }
    }

    /// Chooses the block of a full tier that loses its place next, and makes it the least recent.
    /// Returns the keys to decide on before: that block and the blocks requested together with it
    /// that are in RAM `alone`. Empty if the log has the block or it was already decided on.
    pub fn leaving(&mut self, recent: &mut Recent, alone: impl Fn(u64) -> bool) -> Range<u64> {
        for spared in 0..=SPARED_MAX {
            let Some((key, place)) = recent.oldest() else { break };
            if self.weighed.contains(&key) || !alone(key) {
                break;
            }
            if spared == SPARED_MAX || self.spared[place as usize] {
                self.weighed = Self::around(recent, key, place, alone);
                for place in self.weighed.clone().filter_map(|key| recent.find(key)) {
                    self.spared[place as usize] = false;
                }
                return self.weighed.clone();
            }
            self.spared[place as usize] = true;
            recent.touch(key);
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
        keys.into_iter().for_each(|key| assert!(recent.put(key).is_some()));
        recent
    }

    #[test]
    fn a_page_is_spared_once_then_weighed_once_and_whole() {
        let mut recent = recent([8, 9, 10, 11, 40, 41]);
        let mut window = Window::new(100);
        let log = |key: u64| key >= 40;
        assert!(window.leaving(&mut recent, |key| !log(key)).is_empty());
        for key in [40, 41] {
            assert_eq!(recent.oldest().map(|(oldest, _)| oldest), Some(key), "the log has it");
            recent.forget(key);
        }
        assert_eq!(window.leaving(&mut recent, |_| true), 8..12);
        for key in 8..12 {
            assert!(window.leaving(&mut recent, |_| true).is_empty());
            recent.forget(key);
        }
        assert!(recent.put(8).is_some());
        assert_eq!(window.leaving(&mut recent, |_| true), 0..0, "it was weighed just now");
    }

    #[test]
    fn where_all_is_alone_the_least_recent_leaves_in_the_end() {
        let mut recent = recent((0..60).map(|n| 2 * n));
        let mut window = Window::new(100);
        assert_eq!(window.leaving(&mut recent, |_| true), 32..33);
        recent.forget(32);
        assert_eq!(window.leaving(&mut recent, |_| true), 66..67);
    }

    #[test]
    fn what_the_log_has_is_not_weighed() {
        let mut recent = recent([8, 9, 10, 11]);
        assert!(Window::new(100).leaving(&mut recent, |key| key != 8).is_empty());
        let place = recent.find(11).expect("it is there");
        assert_eq!(Window::around(&recent, 11, place, |key| key != 9), 10..12);
    }

    #[test]
    fn a_long_run_is_weighed_in_parts() {
        let mut long = recent(0..40);
        assert_eq!(Window::new(100).leaving(&mut long, |_| true), 16..16 + RUN_MAX);
        assert!(Window::new(0).leaving(&mut Recent::new(0), |_| true).is_empty());
    }
}
