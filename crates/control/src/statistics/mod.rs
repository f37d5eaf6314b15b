//! Statistics over the last minutes, hours, and the day: the difference between the counters now
//! and in an earlier snapshot. The shards only count; snapshots are kept here.

mod history;
mod sample;
mod spread;

use std::time::Duration;

pub use history::History;
pub use sample::{Sample, VolumeSample};
pub use spread::Spread;

/// A stretch of time that ends now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Window {
    /// The last second or two.
    Now,
    /// Five minutes.
    #[default]
    FiveMinutes,
    /// An hour.
    Hour,
    /// A day.
    Day,
    /// Since the server started.
    Start,
}

const MINUTE: u64 = 60;
const HOUR: u64 = 3600;

impl Window {
    /// Every window, shortest first.
    pub const ALL: [Self; 5] = [Self::Now, Self::FiveMinutes, Self::Hour, Self::Day, Self::Start];

    /// Its name in requests and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Now => "now",
            Self::FiveMinutes => "5m",
            Self::Hour => "1h",
            Self::Day => "1d",
            Self::Start => "start",
        }
    }

    /// The window of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|window| window.name() == name)
    }

    /// Its length, and the time between two of its snapshots: it may be longer by that. `None` if
    /// it begins at the start.
    #[must_use]
    pub fn span(self) -> Option<(Duration, Duration)> {
        let seconds = match self {
            Self::Now => (1, 1),
            Self::FiveMinutes => (5 * MINUTE, 10),
            Self::Hour => (HOUR, 3 * MINUTE),
            Self::Day => (24 * HOUR, HOUR),
            Self::Start => return None,
        };
        Some((Duration::from_secs(seconds.0), Duration::from_secs(seconds.1)))
    }
}
