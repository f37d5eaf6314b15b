//! The life of a shard: doubts about a primary, detaching a failed cache, and the stop.

pub(crate) mod compare;
pub(crate) mod detach;
mod purge;
pub(crate) mod stop;

use forebay_block::Instant;

use crate::api::{Effects, Health, State, Trust};
use crate::cache::Cache;
use crate::destage::Destaging;
use stop::StopStep;

/// The state of the stop, and the trust that should be recorded.
#[derive(Debug)]
pub struct Life {
    /// The trust in the cache device that should be recorded outside the cache.
    trust_wanted: Trust,
    stop_step: StopStep,
    stop_since: Instant,
}

impl Life {
    /// The state before the start, with the recorded trust in the cache device.
    pub fn new(trust: Trust) -> Self {
        Self { trust_wanted: trust, stop_step: StopStep::default(), stop_since: Instant::default() }
    }

    /// Requests that less trust in the cache device be recorded.
    pub fn want_trust(&mut self, trust: Trust) {
        self.trust_wanted = self.trust_wanted.max(trust);
    }

    /// Requests the record of trust that is due; detaching is recorded when nothing is left to
    /// save.
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

    /// Begins an orderly stop.
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
