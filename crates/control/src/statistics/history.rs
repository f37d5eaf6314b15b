//! The snapshots of the past: a ring for each window, so that memory is bounded. A snapshot that is
//! in several rings exists once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::{Sample, Window};

/// How much earlier than due a snapshot is taken into a ring: they do not come at exact times.
const SLACK: Duration = Duration::from_millis(100);

/// The snapshots from which windows are computed.
#[derive(Debug)]
pub struct History {
    rings: Vec<Ring>,
}

/// The snapshots of a window.
#[derive(Debug)]
struct Ring {
    window: Window,
    span: Duration,
    step: Duration,
    /// Oldest first. At most the first is older than the span.
    samples: VecDeque<Arc<Sample>>,
}

impl Default for History {
    fn default() -> Self {
        let ring = |window: Window| {
            let (span, step) = window.span()?;
            Some(Ring { window, span, step, samples: VecDeque::new() })
        };
        Self { rings: Window::ALL.into_iter().filter_map(ring).collect() }
    }
}

impl History {
    /// Takes a snapshot into the rings in which one is due. Snapshots come in order of time.
    pub fn note(&mut self, sample: &Arc<Sample>) {
        self.rings.iter_mut().for_each(|ring| ring.note(sample));
    }

    /// What has changed in the window that ends with `now`, and the snapshots inside of it, oldest
    /// first. If the server is younger than the window, it begins at the start.
    #[must_use]
    pub fn change(&self, window: Window, now: &Sample) -> Sample {
        let ring = self.rings.iter().find(|ring| ring.window == window);
        let before = ring.and_then(|ring| ring.before(now.at));
        before.map_or_else(|| now.clone(), |before| now.since(before))
    }

    /// The snapshots in the window that ends now, oldest first; those of the day for the whole time
    /// since the start.
    pub fn samples(&self, window: Window) -> impl Iterator<Item = &Arc<Sample>> {
        let window = if window == Window::Start { Window::Day } else { window };
        self.rings.iter().filter(move |ring| ring.window == window).flat_map(|ring| &ring.samples)
    }
}

impl Ring {
    fn note(&mut self, sample: &Arc<Sample>) {
        let at = sample.at + SLACK;
        let due = self.samples.back().is_none_or(|last| at >= last.at + self.step);
        if !due {
            return;
        }
        self.samples.push_back(Arc::clone(sample));
        // The second one is old enough to begin the window.
        while self.samples.get(1).is_some_and(|second| sample.at >= second.at + self.span) {
            self.samples.pop_front();
        }
    }

    /// The newest snapshot that is as old as the window is long.
    fn before(&self, now: Duration) -> Option<&Sample> {
        let old = self.samples.iter().rev().find(|sample| now >= sample.at + self.span);
        old.map(|sample| &**sample)
    }
}

#[cfg(test)]
mod tests {
    use forebay_engine::Stats;

    use super::*;

    fn at(seconds: u64) -> Arc<Sample> {
        let pool = Stats { hits: 10 * seconds, ..Stats::default() };
        Arc::new(Sample { at: Duration::from_secs(seconds), pool, volumes: Vec::new() })
    }

    fn seconds(window: Window, history: &History, now: u64) -> u64 {
        let change = history.change(window, &at(now));
        assert_eq!(change.pool.hits, 10 * change.at.as_secs(), "counters are of the same time");
        change.at.as_secs()
    }

    #[test]
    fn a_window_is_as_long_as_it_says_or_one_step_longer() {
        let mut history = History::default();
        for second in 0..200_000 {
            history.note(&at(second));
            if second % 997 != 0 {
                continue;
            }
            for window in Window::ALL {
                let long = seconds(window, &history, second);
                let Some((span, step)) = window.span() else {
                    assert_eq!(long, second, "since the start");
                    continue;
                };
                let (least, most) = (span.as_secs(), (span + step).as_secs());
                assert!(
                    long == second && second < most || (least..most).contains(&long),
                    "{window:?} at {second}: {long}"
                );
            }
        }
        let held: usize = history.rings.iter().map(|ring| ring.samples.len()).sum();
        assert!(held <= 3 + 32 + 22 + 26, "{held} snapshots");
    }

    #[test]
    fn a_young_server_has_what_there_is() {
        let mut history = History::default();
        assert_eq!(seconds(Window::Day, &history, 7), 7);
        history.note(&at(7));
        assert_eq!(seconds(Window::FiveMinutes, &history, 40), 40);
        assert_eq!(seconds(Window::Now, &history, 40), 33);
    }
}
