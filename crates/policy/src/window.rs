//! The RAM tier as a window before the log: what a miss brings in lies in RAM alone until its place
//! there is wanted for another block. Only then is it weighed whether it enters the log: by then
//! it has been asked for again or not, and what is asked for once in a burst never takes room
//! there (the window of W-TinyLFU, Einziger, Friedman and Manes, ACM TOS 2017).
//!
//! Of what is least recent, RAM spares once what it has alone: to read that again takes the
//! primary, to read the rest the cache device. Blocks that were asked for together are weighed
//! together: where a page of a database is cached in part, its reads wait for the primary all the
//! same.

use std::ops::Range;

use crate::recent::Recent;

/// Blocks that are weighed together at most.
const RUN_MAX: u64 = 16;
/// Blocks that are spared for one that leaves.
const SPARED_MAX: usize = 16;

/// What has been weighed, and spared, of a RAM tier.
#[derive(Clone, Debug)]
pub struct Window {
    /// Keys of the blocks weighed last, which are the next to lose their places.
    weighed: Range<u64>,
    /// By place: the block there was spared. The next one there may suffer for it.
    spared: Vec<bool>,
}

impl Window {
    /// The window of a RAM tier with this many places.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self { weighed: 0..0, spared: vec![false; places] }
    }

    /// Settles which block of a full tier, the least recent one then, loses its place next; says
    /// what has to be weighed before: the keys of that block and of those asked for together with
    /// it that RAM has `alone`. None where the log has it, or it was weighed with another.
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

    /// What has to be weighed with a block, whose `place` is given: the keys of those that RAM has
    /// `alone` of what was asked for together.
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
