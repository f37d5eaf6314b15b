//! A shard without a cache: only the path to the primaries.

use forebay_block::{
    Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoOp, IoResult, IoTag, Slab, VOLUMES_MAX,
    VolumeId,
};
use forebay_engine::{
    Effects, Health, Known, Losses, Reply, Request, RequestId, Setting, Shard, State, Stats,
    Target, Tier, Trust,
};

/// Most requests in flight in a shard without a cache.
const REQUESTS_MAX: u32 = 1 << 20;

/// A shard without a cache: every request goes to its primary unchanged. For comparison.
pub struct Uncached {
    state: State,
    in_flight: Slab<Asked>,
    /// By volume id: failed flushes that it was told of.
    failures: Vec<u64>,
    /// By volume id: losses that failed flushes of its own writes may have caused for other
    /// clients.
    losses: Vec<Losses>,
    stats: Stats,
}

/// A request in flight.
struct Asked {
    id: RequestId,
    op: IoOp,
    fua: bool,
    /// Losses of the volume when the request arrived.
    known: Known,
    /// The buffer of a completed change, while its flush is in flight.
    done: Option<IoBuf>,
}

impl Default for Uncached {
    fn default() -> Self {
        let in_flight = Slab::new(REQUESTS_MAX);
        let (failures, losses) = (vec![0; VOLUMES_MAX], vec![Losses::default(); VOLUMES_MAX]);
        Self { state: State::Recovering, in_flight, failures, losses, stats: Stats::default() }
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
            IoOp::Prefetch => {}
        }
    }

    /// The result of a request that ends. If it is a write whose flush failed, other clients'
    /// writes may be lost: flushes in flight and the next one fail as well.
    fn tell(&mut self, volume: VolumeId, asked: &Asked, result: IoResult<()>) -> IoResult<()> {
        let losses = &mut self.losses[usize::from(volume.0)];
        if asked.op == IoOp::Flush {
            return result.and(losses.tell(asked.known).map_or(Ok(()), Err));
        }
        if let (Some(_), Err(error)) = (&asked.done, &result) {
            losses.note(error.clone());
        }
        result
    }
}

impl Shard for Uncached {
    fn start(&mut self, _now: Instant, _fx: &mut Effects) {
        self.state = State::Serving;
    }

    fn submit(&mut self, _now: Instant, request: Request, fx: &mut Effects) {
        self.count(&request);
        let Request { id, volume, op, range, mut flags, buf, .. } = request;
        if op == IoOp::Prefetch {
            let result = Err(ErrorKind::Unsupported.into());
            return fx.replies.push(Reply { id, result, buf, direct: None, tier: None });
        }
        // A flush hidden in a write would bypass the gate, which reports a failure to every shard.
        let fua = std::mem::take(&mut flags.fua) && op.changes_data();
        let known = self.losses[usize::from(volume.0)].known();
        let tag = IoTag(u64::from(self.in_flight.insert(Asked { id, op, fua, known, done: None })));
        fx.ios.push((Target::Primary(volume), Io { tag, op, range, flags, buf }));
    }

    fn complete(&mut self, _now: Instant, target: Target, done: Completion, fx: &mut Effects) {
        let at = u32::try_from(done.tag.0).expect("tags are those of the slab");
        let asked = self.in_flight.get_mut(at).expect("a completion is of a request in flight");
        if std::mem::take(&mut asked.fua) && done.result.is_ok() {
            asked.done = Some(done.buf);
            return fx.ios.push((target, Io::flush(done.tag)));
        }
        let asked = self.in_flight.remove(at).expect("it is there");
        let Target::Primary(volume) = target else {
            unreachable!("it asks nothing of a cache device");
        };
        let failures = self.failures[usize::from(volume.0)];
        let direct = matches!(asked.op, IoOp::Write | IoOp::WriteZeroes) && asked.done.is_none();
        let result = self.tell(volume, &asked, done.result);
        let (id, buf) = (asked.id, asked.done.unwrap_or(done.buf));
        let tier = matches!(asked.op, IoOp::Read | IoOp::Write).then_some(Tier::Primary);
        fx.replies.push(Reply { id, result, buf, direct: direct.then_some(failures), tier });
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

    fn set(&mut self, _: Setting) {}

    fn trust_recorded(&mut self, _now: Instant, _trust: Trust, _fx: &mut Effects) {}

    fn flush_failed(&mut self, _: Instant, target: Target, _: &IoError, _: &mut Effects) {
        if let Target::Primary(volume) = target {
            self.failures[usize::from(volume.0)] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::{ByteRange, ErrorKind, IoFlags};

    use super::*;

    /// Sends a flush, or a write with force unit access; returns the requests sent, and the answer.
    fn ask(shard: &mut Uncached, op: IoOp, results: &[IoResult<()>]) -> (Vec<IoOp>, IoResult<()>) {
        let mut fx = Effects::default();
        let flags = IoFlags { fua: op == IoOp::Write, ..IoFlags::default() };
        let len = if op == IoOp::Write { 512 } else { 0 };
        let (id, volume, range) = (RequestId(3), VolumeId(0), ByteRange::new(0, len));
        let buf = IoBuf::zeroed(len as usize);
        let request = Request { id, volume, op, range, flags, buf, bypass: None };
        shard.submit(Instant(0), request, &mut fx);
        let mut asked = Vec::new();
        for result in results {
            let Some((target, io)) = fx.ios.pop() else { break };
            assert!(!io.flags.fua, "a flush that hides in a request");
            asked.push(io.op);
            shard.complete(Instant(0), target, io.complete(result.clone()), &mut fx);
        }
        let reply = fx.replies.pop().expect("it is answered");
        assert_eq!((reply.id, reply.buf.len() as u64), (id, len), "with its buffer");
        (asked, reply.result)
    }

    #[test]
    fn a_flush_follows_a_write_with_fua() {
        let mut shard = Uncached::default();
        let mut write = |results: [IoResult<()>; 2]| ask(&mut shard, IoOp::Write, &results);
        let failed = || Err(ErrorKind::Media.into());
        let (asked, result) = write([Ok(()), Ok(())]);
        assert!(asked == [IoOp::Write, IoOp::Flush] && result.is_ok());
        let (asked, result) = write([Ok(()), failed()]);
        assert!(asked == [IoOp::Write, IoOp::Flush] && result.is_err());
        let (asked, result) = write([failed(), Ok(())]);
        assert!(asked == [IoOp::Write] && result.is_err());
    }

    #[test]
    fn the_failed_flush_of_a_write_fails_the_next_flush() {
        let mut shard = Uncached::default();
        let (_, result) = ask(&mut shard, IoOp::Write, &[Ok(()), Err(ErrorKind::Media.into())]);
        assert!(result.is_err());
        let mut flush = || ask(&mut shard, IoOp::Flush, &[Ok(())]).1;
        assert!(flush().is_err(), "what others wrote may be gone");
        assert!(flush().is_ok(), "it is told once");
    }
}
