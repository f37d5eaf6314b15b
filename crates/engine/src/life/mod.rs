//! What a shard may still do: faults of the cache device, doubts about a primary, the stop.

pub(crate) mod compare;
pub(crate) mod detach;
pub(crate) mod fault;
pub(crate) mod stop;

use forebay_block::Instant;

use crate::api::{State, Trust};
use crate::cache::Cache;
use compare::Compare;
use detach::Detach;
use stop::StopStep;

/// What changes where a shard is in its life, and what it may still do.
#[derive(Debug)]
pub struct Life {
    /// What ought to be recorded outside of the cache of the trust in it.
    trust_wanted: Trust,
    /// Which stripes a failed cache has left.
    detach: Detach,
    /// Which clean blocks are compared with their primaries.
    compare: Compare,
    stop_step: StopStep,
    stop_since: Instant,
}

impl Life {
    /// Before the start, with a cache device that is trusted so.
    pub fn new(trust: Trust) -> Self {
        Self {
            trust_wanted: trust,
            detach: Detach::default(),
            compare: Compare::default(),
            stop_step: StopStep::default(),
            stop_since: Instant::default(),
        }
    }

    /// An orderly stop begins.
    pub fn begin_stop(&mut self, cache: &mut Cache) {
        self.stop_since = cache.now;
        let state = &mut cache.standing.state;
        *state = match state {
            State::Serving => State::Stopping,
            _ => State::Stopped,
        };
    }
}
