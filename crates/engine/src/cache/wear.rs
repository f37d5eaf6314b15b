//! The budget of wear: clean blocks are written to the cache device only if they are frequent
//! enough for what is left of it.
//!
//! All that the log and the store write counts: clients' writes, admissions, moves, copies,
//! invalidations, headers and footers, and each repetition of a write that failed. Superblocks do
//! not.

use std::ops::Range;

use crate::api::ShardConfig;
use crate::cache::Cache;

/// The budget of a shard, an equal part of that of the pool, in bytes per day.
pub(super) fn wear_budget(config: &ShardConfig) -> Option<f64> {
    config.wear_budget.map(|bytes| bytes as f64 / f64::from(config.shards.max(1)))
}

impl Cache {
    /// Changes the budget.
    pub(crate) fn set_wear_budget(&mut self, bytes_per_day: Option<u64>) {
        self.config.wear_budget = bytes_per_day;
        let written = self.stats.written_bytes();
        self.wear.set(wear_budget(&self.config), self.now, written);
    }

    /// Notes what has been written; called once per turn.
    pub(crate) fn note_wear(&mut self) {
        if self.config.wear_budget.is_some() {
            let written = self.stats.written_bytes();
            self.wear.note(self.now, written);
        }
    }

    /// How far the budget is used up, from 0 to 1.
    pub(crate) fn wear_pressure(&self) -> f64 {
        self.wear.pressure()
    }

    /// Whether clean blocks that were requested together are frequent enough to be written.
    pub(crate) fn is_worth_wear(&self, keys: Range<u64>) -> bool {
        if self.wear_pressure() <= 0.0 {
            return true;
        }
        let first = keys.start;
        let count = keys.filter_map(|key| self.policy.count(key)).max();
        self.wear.allows(count, first)
    }
}
