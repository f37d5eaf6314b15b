//! A shard without a cache: nothing but the way to the primaries.

use forebay_block::{Completion, Instant, Io, IoError, IoOp, IoTag, VolumeId};
use forebay_engine::{
    Effects, Health, Mode, Reply, Request, RequestId, Shard, State, Stats, Target, Trust,
};
use forebay_volume::Slab;

/// Most requests in flight in a shard without a cache.
const REQUESTS_MAX: u32 = 1 << 20;

/// A shard without a cache: every request goes to its primary as it is. For comparison.
pub struct Uncached {
    state: State,
    in_flight: Slab<RequestId>,
    stats: Stats,
}

impl Default for Uncached {
    fn default() -> Self {
        let in_flight = Slab::new(REQUESTS_MAX);
        Self { state: State::Recovering, in_flight, stats: Stats::default() }
    }
}

impl Uncached {
    fn count(&mut self, request: &Request) {
        let stats = &mut self.stats;
        match request.op {
            IoOp::Read => {
                stats.lookups += 1;
                stats.bypasses += 1;
                stats.reads += 1;
                stats.read_bytes += request.range.len;
            }
            IoOp::Write => {
                stats.writes += 1;
                stats.write_bytes += request.range.len;
            }
            IoOp::Flush => stats.flushes += 1,
            IoOp::Discard | IoOp::WriteZeroes => stats.discards += 1,
        }
    }
}

impl Shard for Uncached {
    fn start(&mut self, _now: Instant, _fx: &mut Effects) {
        self.state = State::Serving;
    }

    fn submit(&mut self, _now: Instant, request: Request, fx: &mut Effects) {
        let tag = IoTag(u64::from(self.in_flight.insert(request.id)));
        self.count(&request);
        let Request { volume, op, range, flags, buf, .. } = request;
        fx.ios.push((Target::Primary(volume), Io { tag, op, range, flags, client: None, buf }));
    }

    fn complete(&mut self, _now: Instant, _target: Target, done: Completion, fx: &mut Effects) {
        let id = u32::try_from(done.tag.0).ok().and_then(|at| self.in_flight.remove(at));
        let id = id.expect("a completion is of a request in flight");
        fx.replies.push(Reply { id, result: done.result, buf: done.buf });
    }

    fn poll(&mut self, _now: Instant, _fx: &mut Effects) {
        if self.state == State::Stopping && self.in_flight.is_empty() {
            self.state = State::Stopped;
        }
    }

    fn stop(&mut self, _now: Instant, _fx: &mut Effects) {
        self.state = State::Stopping;
    }

    fn state(&self) -> &State {
        &self.state
    }

    fn health(&self) -> Health {
        Health::Detached
    }

    fn stats(&self, _now: Instant) -> Stats {
        Stats { requests_in_flight: self.in_flight.len() as u64, ..self.stats.clone() }
    }

    fn set_drain(&mut self, _on: bool) {}

    fn dirty_blocks(&self) -> u64 {
        0
    }

    fn set_mode(&mut self, _volume: VolumeId, _mode: Mode) {}

    fn trust_recorded(&mut self, _now: Instant, _trust: Trust, _fx: &mut Effects) {}

    fn flush_failed(&mut self, _: Instant, _: Target, _: &IoError, _: &mut Effects) {}
}
