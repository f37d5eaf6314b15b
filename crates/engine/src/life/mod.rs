//! What a shard may still do: faults of the cache device, doubts about a primary, the stop.

pub(crate) mod compare;
pub(crate) mod detach;
pub(crate) mod stop;

use forebay_block::Instant;

use crate::api::{Effects, Health, State, Trust};
use crate::cache::Cache;
use crate::destage::Destaging;
use stop::StopStep;

/// What changes where a shard is in its life, and what it may still do.
#[derive(Debug)]
pub struct Life {
    /// What ought to be recorded outside of the cache of the trust in it.
    trust_wanted: Trust,
    stop_step: StopStep,
    stop_since: Instant,
}

impl Life {
    /// Before the start, with a cache device that is trusted so.
    pub fn new(trust: Trust) -> Self {
        Self { trust_wanted: trust, stop_step: StopStep::default(), stop_since: Instant::default() }
    }

    /// Asks for less trust in the cache device to be recorded.
    pub fn want_trust(&mut self, trust: Trust) {
        self.trust_wanted = self.trust_wanted.max(trust);
    }

    /// Asks for what has to be recorded, and detaches when nothing is left to save.
    pub fn pump(&mut self, cache: &Cache, destaging: &Destaging, fx: &mut Effects) {
        if cache.health() == Health::Draining
            && cache.contents.dirty().blocks() == 0
            && destaging.len() == 0
        {
            self.want_trust(Trust::Nothing);
        }
        if self.trust_wanted > cache.standing.trust {
            fx.record_trust = Some(self.trust_wanted);
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

#[cfg(test)]
mod tests;
