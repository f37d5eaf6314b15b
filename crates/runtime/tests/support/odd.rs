//! Shards with unusual behavior.

#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

use std::sync::{Arc, Mutex};

use forebay_block::{Completion, Instant, IoError};
use forebay_engine::{Effects, Health, Request, Setting, State, Stats, Target, Trust};
use forebay_runtime::Shard;

/// A shard that reads its cache and then refuses it.
pub struct Refusing {
    state: State,
}

impl Default for Refusing {
    fn default() -> Self {
        Self { state: State::Recovering }
    }
}

impl Shard for Refusing {
    fn start(&mut self, now: Instant, fx: &mut Effects) {
        fx.deadline = Some(now);
    }
    fn submit(&mut self, _: Instant, _: Request, _: &mut Effects) {
        unreachable!("it never serves");
    }
    fn complete(&mut self, _: Instant, _: Target, _: Completion, _: &mut Effects) {}
    fn poll(&mut self, now: Instant, fx: &mut Effects) {
        if self.state == State::Recovering {
            self.state = State::Refused("it is someone else's".into());
            fx.deadline = Some(now);
        }
    }
    fn stop(&mut self, _: Instant, _: &mut Effects) {
        self.state = State::Stopped;
    }
    fn state(&self) -> &State {
        &self.state
    }
    fn health(&self) -> Health {
        Health::Good
    }
    fn stats(&self, _: Instant) -> Stats {
        Stats::default()
    }
    fn set_drain(&mut self, _: bool) {}
    fn dirty_blocks(&self) -> u64 {
        0
    }
    fn set(&mut self, _: Setting) {}
    fn trust_recorded(&mut self, _: Instant, _: Trust, _: &mut Effects) {}
    fn flush_failed(&mut self, _: Instant, _: Target, _: &IoError, _: &mut Effects) {}
}

/// A shard whose cache device fails at once; once that is recorded, it has nothing to save.
pub struct Failing {
    state: State,
    trust: Trust,
    told: Arc<Mutex<Vec<Trust>>>,
}

impl Failing {
    pub fn new(told: Arc<Mutex<Vec<Trust>>>) -> Self {
        Self { state: State::Serving, trust: Trust::Full, told }
    }
}

impl Shard for Failing {
    fn start(&mut self, _: Instant, _: &mut Effects) {}
    fn submit(&mut self, _: Instant, _: Request, _: &mut Effects) {
        unreachable!("nobody connects");
    }
    fn complete(&mut self, _: Instant, _: Target, _: Completion, _: &mut Effects) {}
    fn poll(&mut self, _: Instant, fx: &mut Effects) {
        fx.record_trust = match self.trust {
            Trust::Full => Some(Trust::DirtyOnly),
            Trust::DirtyOnly => Some(Trust::Nothing),
            Trust::Nothing => None,
        };
    }
    fn stop(&mut self, _: Instant, _: &mut Effects) {
        self.state = State::Stopped;
    }
    fn state(&self) -> &State {
        &self.state
    }
    fn health(&self) -> Health {
        Health::Draining
    }
    fn stats(&self, _: Instant) -> Stats {
        Stats::default()
    }
    fn set_drain(&mut self, _: bool) {}
    fn dirty_blocks(&self) -> u64 {
        0
    }
    fn set(&mut self, _: Setting) {}
    fn flush_failed(&mut self, _: Instant, _: Target, _: &IoError, _: &mut Effects) {}
    fn trust_recorded(&mut self, _: Instant, trust: Trust, _: &mut Effects) {
        self.trust = self.trust.max(trust);
        self.told.lock().unwrap().push(trust);
    }
}
