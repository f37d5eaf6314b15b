//! What a shard may still do: faults of the cache device, doubts about a primary, the stop.

pub(crate) mod compare;
pub(crate) mod detach;
pub(crate) mod fault;
pub(crate) mod stop;

use forebay_block::Instant;

use crate::api::{Health, State, Trust};
use compare::Compare;
use detach::Detach;
use stop::StopStep;

/// Where a shard is in its life, and what it may still do.
#[derive(Debug)]
pub struct Life {
    state: State,
    health: Health,
    /// What has been recorded outside of the cache, and what ought to be.
    trust: Trust,
    trust_wanted: Trust,
    /// Which stripes a failed cache has left.
    detach: Detach,
    /// Which clean blocks are compared with their primaries.
    compare: Compare,
    /// When the cache device may next be asked whether it can still be written.
    probe_at: Instant,
    stop_step: StopStep,
    stop_since: Instant,
}

impl Life {
    /// Before the start, with a cache device that is trusted so.
    pub fn new(trust: Trust) -> Self {
        Self {
            state: State::Recovering,
            health: Health::Good,
            trust,
            trust_wanted: trust,
            detach: Detach::default(),
            compare: Compare::default(),
            probe_at: Instant::default(),
            stop_step: StopStep::default(),
            stop_since: Instant::default(),
        }
    }

    /// Where it is in its life.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// It goes on to another part of its life.
    pub fn set_state(&mut self, state: State) {
        self.state = state;
    }

    /// How the cache device is doing.
    pub fn health(&self) -> Health {
        self.health
    }

    /// The cache device is used differently from now on; how it was used before.
    pub fn set_health(&mut self, to: Health) -> Health {
        std::mem::replace(&mut self.health, to)
    }

    /// What is recorded outside of the cache of the trust in it.
    pub fn trust(&self) -> Trust {
        self.trust
    }

    /// An orderly stop begins.
    pub fn begin_stop(&mut self, now: Instant) {
        self.stop_since = now;
        self.state = match self.state {
            State::Serving => State::Stopping,
            _ => State::Stopped,
        };
    }
}
