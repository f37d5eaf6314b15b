//! How a shard stands: facts that the rooms of its life decide and all others ask for.

use forebay_block::Instant;

use crate::api::{Health, State, Trust};

/// How a shard stands.
#[derive(Debug)]
pub(crate) struct Standing {
    /// Where it is in its life.
    pub state: State,
    /// How its cache device is doing.
    pub health: Health,
    /// What is recorded outside of the cache of the trust in it.
    pub trust: Trust,
    /// Writes go past the log, since it has no room for them.
    pub overflows: bool,
    /// When a client last asked for something.
    pub last_foreground: Instant,
    /// When the cache device may next be asked whether it can still be written.
    pub probe_at: Instant,
}

impl Standing {
    /// Before the start, with a cache device that is trusted so.
    pub fn new(trust: Trust, now: Instant) -> Self {
        Self {
            state: State::Recovering,
            health: Health::Good,
            trust,
            overflows: false,
            last_foreground: now,
            probe_at: Instant::default(),
        }
    }
}
