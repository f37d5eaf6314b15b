//! The standing of a shard: facts that a few rooms decide and all others read.

use forebay_block::Instant;

use crate::api::{Health, State, Trust};

/// The standing of a shard.
#[derive(Debug)]
pub(crate) struct Standing {
    /// The stage of the shard's life.
    pub state: State,
    /// The health of the cache device.
    pub health: Health,
    /// The trust in the cache device, as recorded outside the cache.
    pub trust: Trust,
    /// The cache device has failed, and it is still being found out which blocks were not durable
    /// by then. No dirty block sets out before that is known.
    pub in_doubt: bool,
    /// Whether writes bypass the log because it has no room for them.
    pub overflows: bool,
    /// When a client was last active.
    pub last_foreground: Instant,
    /// The earliest time for the next probe of the cache device.
    pub probe_at: Instant,
}

impl Standing {
    /// The standing before the start, with the recorded trust in the cache device.
    pub fn new(trust: Trust, now: Instant) -> Self {
        Self {
            state: State::Recovering,
            health: Health::Good,
            trust,
            in_doubt: false,
            overflows: false,
            last_foreground: now,
            probe_at: Instant::default(),
        }
    }
}
