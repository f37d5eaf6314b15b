//! A shard that does as one without a cache does, but for what a test wants.

use forebay_block::{Completion, Instant, IoError};
use forebay_engine::{Effects, Event, Health, Request, Setting, State, Stats, Target, Trust};
use forebay_runtime::{Shard, Uncached};

/// It passes everything on.
#[derive(Default)]
pub struct Passing {
    pub inner: Uncached,
    /// Dirty blocks that it says it has, and never gets rid of.
    pub dirty: u64,
    /// It tells of something when it is stopped.
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
