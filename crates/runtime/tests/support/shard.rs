//! A shard that behaves like one without a cache, except as a test configures.

use forebay_block::{Completion, Instant, IoError};
use forebay_engine::{Effects, Event, Health, Request, Setting, State, Stats, Target, Trust};
use forebay_runtime::{Shard, Uncached};

/// It passes every request on.
#[derive(Default)]
pub struct Passing {
    pub inner: Uncached,
    /// Number of dirty blocks that it claims to have, and never destages.
    pub dirty: u64,
    /// Number of further blocks that become dirty when it is stopped.
    pub dirty_at_stop: u64,
    /// Whether it reports an event when it is stopped.
    pub tells: bool,
}

impl Shard for Passing {
    fn start(&mut self, now: Instant, fx: &mut Effects) {
        self.inner.start(now, fx);
    }
    fn submit(&mut self, now: Instant, request: Request, fx: &mut Effects) {
        self.inner.submit(now, request, fx);
    }
    fn complete(&mut self, now: Instant, target: Target, done: Completion, fx: &mut Effects) {
        self.inner.complete(now, target, done, fx);
    }
    fn poll(&mut self, now: Instant, fx: &mut Effects) {
        self.inner.poll(now, fx);
    }
    fn stop(&mut self, now: Instant, fx: &mut Effects) {
        fx.events.extend(self.tells.then_some(Event::Omitted(7)));
        self.dirty += self.dirty_at_stop;
        self.inner.stop(now, fx);
    }
    fn state(&self) -> &State {
        self.inner.state()
    }
    fn health(&self) -> Health {
        Health::Good
    }
    fn stats(&self, now: Instant) -> Stats {
        self.inner.stats(now)
    }
    fn set_drain(&mut self, _: bool) {}
    fn dirty_blocks(&self) -> u64 {
        self.dirty
    }
    fn set(&mut self, _: Setting) {}
    fn trust_recorded(&mut self, _: Instant, _: Trust, _: &mut Effects) {}
    fn flush_failed(&mut self, _: Instant, _: Target, _: &IoError, _: &mut Effects) {}
}
