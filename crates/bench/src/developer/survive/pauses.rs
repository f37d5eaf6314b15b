//! The figures of events: the longest gap in a client's answers around each, and how soon the rate
//! is back at its level before.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::developer::survive::events::{Event, Kind};
use crate::load::pulse::Pulse;

/// Time before an event that its level is the mean of, and time after it in which the rate must be
/// back.
const LEVEL: Duration = Duration::from_secs(5);
/// The rate is back if it reaches this share of the level, as the mean of [`WINDOW`].
const SHARE: f64 = 0.9;
const WINDOW: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(100);

/// Pauses in seconds, shortest first.
#[derive(Clone, Debug, Default)]
pub struct Pauses(Vec<f64>);

impl Pauses {
    /// The pauses of a client around the events that `of` selects: for each the longest gap from
    /// its begin to that of the next event, at most [`LEVEL`].
    pub fn of(events: &[Event], pulse: &Pulse, of: impl Fn(Kind) -> bool) -> Self {
        let pauses = gaps(events, pulse).into_iter();
        Self::from(pauses.zip(events).filter(|(_, event)| of(event.kind)).map(|(gap, _)| gap))
    }

    /// From seconds in any order.
    pub fn from(seconds: impl IntoIterator<Item = f64>) -> Self {
        let mut all: Vec<f64> = seconds.into_iter().collect();
        all.sort_by(f64::total_cmp);
        Self(all)
    }

    /// Number of pauses.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The median; of an even number, the upper of the two in the middle. Zero if there are none.
    pub fn median(&self) -> f64 {
        self.0.get(self.0.len() / 2).copied().unwrap_or_default()
    }

    /// The longest, or zero.
    pub fn longest(&self) -> f64 {
        self.0.last().copied().unwrap_or_default()
    }

    /// Median and longest, for people.
    pub fn show(&self) -> String {
        format!("{:.2} / {:.2} s", self.median(), self.longest())
    }

    /// Both for programs.
    pub fn json(&self) -> Value {
        json!({ "count": self.count(), "median": self.median(), "longest": self.longest() })
    }
}

/// The longest gap around each event, in seconds.
pub fn gaps(events: &[Event], pulse: &Pulse) -> Vec<f64> {
    let until = |i: usize| {
        let limit = events[i].end + LEVEL;
        events.get(i + 1).map_or(limit, |next| next.begin.min(limit))
    };
    let gap = |i: usize| pulse.longest_gap(events[i].begin, until(i)).as_secs_f64();
    (0..events.len()).map(gap).collect()
}

/// For each event that has [`LEVEL`] before and after it without another one, the time from its
/// begin to the end of the first window with [`SHARE`] of the rate before, in seconds; `None` if
/// that comes later than [`LEVEL`].
pub fn back(events: &[Event], pulse: &Pulse) -> Vec<Option<f64>> {
    let alone = |i: &usize| {
        let before = i.checked_sub(1).is_none_or(|i| events[i].end + LEVEL <= events[i + 1].begin);
        let next = events.get(i + 1);
        before && next.is_none_or(|next| events[*i].begin + LEVEL <= next.begin)
    };
    let alone = (0..events.len()).filter(alone);
    alone.map(|i| back_after(events[i].begin, pulse)).collect()
}

/// The same for moments in the middle between such events, at which nothing happened.
pub fn back_without(events: &[Event], pulse: &Pulse) -> Vec<Option<f64>> {
    let quiet = |two: &&[Event]| two[1].begin - two[0].end >= 2 * LEVEL;
    let middle = |two: &[Event]| two[0].end + (two[1].begin - two[0].end) / 2;
    events.windows(2).filter(quiet).map(|two| back_after(middle(two), pulse)).collect()
}

fn back_after(begin: Instant, pulse: &Pulse) -> Option<f64> {
    let level = pulse.rate(begin.checked_sub(LEVEL).unwrap_or(begin), begin);
    let mut end = WINDOW;
    while end <= LEVEL {
        if pulse.rate(begin + end - WINDOW, begin + end) >= SHARE * level {
            return Some(end.as_secs_f64());
        }
        end += STEP;
    }
    None
}

/// The share of events after which the rate is back, and their number.
pub fn share(back: &[Option<f64>]) -> f64 {
    back.iter().flatten().count() as f64 / back.len().max(1) as f64
}
