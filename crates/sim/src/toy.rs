//! A plain engine without a cache, to test the world: each request goes to the primary, widened to
//! whole sectors where needed, one at a time.

use std::collections::VecDeque;

use forebay_block::{
    ByteRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoOp, IoTag, VolumeId,
};
use forebay_engine::{
    Effects, Health, Reply, Request, Setting, ShardConfig, State, Stats, Target, Trust,
};

use crate::shard::Shard;

/// The toy's flaw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flaw {
    None,
    /// Flushes are answered at once.
    NoFlush,
    /// Repeated reads of a range are answered from memory.
    StaleReads,
    /// The tenth request is never answered.
    Forgets,
}

pub(crate) struct Toy {
    flaw: Flaw,
    state: State,
    queue: VecDeque<Request>,
    busy: bool,
    taken: u64,
    remembered: Vec<(VolumeId, ByteRange, Vec<u8>)>,
    sizes: Vec<u64>,
}

pub(crate) fn sound(config: ShardConfig, _: Instant) -> Box<dyn Shard> {
    toy(&config, Flaw::None)
}

pub(crate) fn no_flush(config: ShardConfig, _: Instant) -> Box<dyn Shard> {
    toy(&config, Flaw::NoFlush)
}

pub(crate) fn stale_reads(config: ShardConfig, _: Instant) -> Box<dyn Shard> {
    toy(&config, Flaw::StaleReads)
}

pub(crate) fn forgets(config: ShardConfig, _: Instant) -> Box<dyn Shard> {
    toy(&config, Flaw::Forgets)
}

fn toy(config: &ShardConfig, flaw: Flaw) -> Box<dyn Shard> {
    Box::new(Toy {
        flaw,
        state: State::Recovering,
        queue: VecDeque::new(),
        busy: false,
        taken: 0,
        remembered: Vec::new(),
        sizes: config.volumes.iter().map(|v| v.size).collect(),
    })
}

fn whole(range: ByteRange) -> ByteRange {
    let start = range.offset / 512 * 512;
    ByteRange::new(start, range.end().next_multiple_of(512) - start)
}

impl Toy {
    fn next(&mut self, fx: &mut Effects) {
        while !self.busy && !self.queue.is_empty() {
            let request = &mut self.queue[0];
            let target = Target::Primary(request.volume);
            let known = self
                .remembered
                .iter()
                .find(|(volume, range, _)| (*volume, *range) == (request.volume, request.range));
            if let (IoOp::Read, Some((_, _, data))) = (request.op, known) {
                request.buf.copy_from_slice(data);
                self.answer(fx);
                continue;
            }
            self.busy = true;
            let range = whole(request.range);
            let tag = IoTag(0);
            let io = match request.op {
                IoOp::Flush => Io::flush(tag),
                IoOp::Write if range == request.range => {
                    Io::write(tag, range.offset, IoBuf::copy_of(&request.buf))
                        .with_fua(request.flags.fua)
                }
                _ if range != request.range || request.op == IoOp::Read => {
                    Io::read(tag, range, IoBuf::zeroed(range.len as usize))
                }
                op => Io::bare(tag, op, range).with_fua(request.flags.fua),
            };
            if io.op == IoOp::Flush && self.flaw == Flaw::NoFlush {
                self.busy = false;
                self.answer(fx);
                continue;
            }
            assert!(range.end() <= self.sizes[usize::from(request.volume.0)]);
            fx.ios.push((target, io));
        }
    }

    fn answer(&mut self, fx: &mut Effects) {
        let request = self.queue.pop_front().expect("a request is being served");
        self.taken += 1;
        if self.flaw == Flaw::Forgets && self.taken == 10 {
            return;
        }
        let Request { id, buf, .. } = request;
        fx.replies.push(Reply { id, result: Ok(()), buf, direct: None, tier: None });
    }
}

impl Shard for Toy {
    fn start(&mut self, _: Instant, _: &mut Effects) {
        self.state = State::Serving;
    }

    fn submit(&mut self, _: Instant, request: Request, fx: &mut Effects) {
        if request.op == IoOp::Prefetch {
            let Request { id, buf, .. } = request;
            let result = Err(ErrorKind::Unsupported.into());
            return fx.replies.push(Reply { id, result, buf, direct: None, tier: None });
        }
        self.queue.push_back(request);
        self.next(fx);
    }

    fn complete(&mut self, _: Instant, target: Target, done: Completion, fx: &mut Effects) {
        self.busy = false;
        done.result.expect("the disks of this test work");
        let request = &mut self.queue[0];
        let range = whole(request.range);
        let from = (request.range.offset - range.offset) as usize;
        let part = from..from + request.range.len as usize;
        let was_read = done.buf.len() as u64 == range.len && done.tag == IoTag(0);
        match request.op {
            IoOp::Read => {
                request.buf.copy_from_slice(&done.buf[part]);
                if self.flaw == Flaw::StaleReads {
                    let data = request.buf.to_vec();
                    self.remembered.push((request.volume, request.range, data));
                }
                self.answer(fx);
            }
            IoOp::Write | IoOp::WriteZeroes | IoOp::Discard
                if range != request.range && was_read =>
            {
                let mut buf = done.buf;
                match request.op {
                    IoOp::Write => buf[part].copy_from_slice(&request.buf),
                    _ => buf[part].fill(0),
                }
                self.busy = true;
                let io = Io::write(IoTag(1), range.offset, buf).with_fua(request.flags.fua);
                fx.ios.push((target, io));
            }
            _ => self.answer(fx),
        }
        self.next(fx);
    }

    fn poll(&mut self, _: Instant, _: &mut Effects) {}

    fn stop(&mut self, _: Instant, _: &mut Effects) {
        self.state = State::Stopped;
    }

    fn trust_recorded(&mut self, _: Instant, _: Trust, _: &mut Effects) {}

    fn set_drain(&mut self, _: bool) {}

    fn set(&mut self, _: Setting) {}

    fn state(&self) -> &State {
        &self.state
    }

    fn flush_failed(&mut self, _: Instant, _: Target, _: &IoError, _: &mut Effects) {}

    fn health(&self) -> Health {
        Health::Good
    }

    fn stats(&self, _: Instant) -> Stats {
        Stats::default()
    }

    fn dirty_blocks(&self) -> u64 {
        0
    }
}
