//! A single read by the server itself, as a channel: from a volume, as its clients see it.

use std::sync::mpsc::Sender;

use forebay_block::{ByteRange, Completion, Endpoint, Io, IoBuf, IoResult, IoTag};
use forebay_policy::RuleSet;

use super::{Channel, Submit};
use crate::message::End;

/// A read to be done, and then its answer.
pub struct Caller {
    ready: Option<(Endpoint, Io)>,
    in_flight: usize,
    answer: Sender<IoResult<IoBuf>>,
}

impl Caller {
    /// Reads `range` of a volume; the answer goes to `answer`.
    #[must_use]
    pub fn new(endpoint: Endpoint, range: ByteRange, answer: Sender<IoResult<IoBuf>>) -> Self {
        let io = Io::read(IoTag(0), range, IoBuf::zeroed(range.len as usize));
        Self { ready: Some((endpoint, io)), in_flight: 1, answer }
    }
}

impl Channel for Caller {
    fn reap(&mut self) {}

    fn feed(&mut self, submit: &mut Submit<'_>) {
        if let Some((endpoint, io)) = self.ready.take()
            && let Err(io) = submit(RuleSet::default(), endpoint, io)
        {
            self.ready = Some((endpoint, io));
        }
    }

    fn complete(&mut self, done: Completion) {
        self.in_flight = 0;
        let _ = self.answer.send(done.result.map(|()| done.buf));
    }

    fn advance(&mut self) -> bool {
        self.ready.is_some()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn shut(&mut self, _end: End) {}

    fn is_over(&self) -> bool {
        true
    }
}
