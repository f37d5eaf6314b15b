//! The wear of the cache device.

use forebay_engine::Stats;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::statistics::DAY_SECONDS;
use crate::pool::PoolSnapshot;
use crate::statistics::{History, Sample, Window};

/// The bytes written to the cache device, and their budget.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct WearStatus {
    /// The budget, in bytes per day.
    pub budget_bytes_per_day: u64,
    /// Bytes written in the last `seconds`.
    pub written_bytes: u64,
    /// A day and up to an hour more, or the time since the start if that is shorter.
    pub seconds: f64,
    /// Bytes per day at the rate of the last five minutes.
    pub written_bytes_per_day: f64,
    /// How far the budget is used up: the more it is, the more frequent a clean block must be to be
    /// written; at 100 none is.
    pub pressure_percent: u64,
}

impl WearStatus {
    /// Of a pool with a budget, since its start.
    pub(super) fn of(pool: &PoolSnapshot, stats: &Stats) -> Option<Self> {
        let (seconds, written_bytes) = (pool.uptime.as_secs_f64(), stats.written_bytes());
        Some(Self {
            budget_bytes_per_day: pool.wear_budget?,
            written_bytes,
            seconds,
            written_bytes_per_day: written_bytes as f64 * DAY_SECONDS / seconds.max(1.0),
            pressure_percent: stats.wear_pressure_percent,
        })
    }

    /// Takes the figures of the last day and of the last minutes from the snapshots of the past.
    pub(crate) fn look_back(&mut self, history: &History, now: &Sample) {
        let written = |window| {
            let change = history.change(window, now);
            (change.pool.written_bytes(), change.at.as_secs_f64())
        };
        (self.written_bytes, self.seconds) = written(Window::Day);
        let (bytes, seconds) = written(Window::FiveMinutes);
        self.written_bytes_per_day = bytes as f64 * DAY_SECONDS / seconds.max(1.0);
    }
}
