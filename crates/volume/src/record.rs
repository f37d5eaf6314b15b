//! What clients asked of a volume since its recording began, until somebody takes it away.
//!
//! Bounded: what does not fit is counted and left out, so that nobody waits for a recording.

use std::mem;

use forebay_block::{Instant, Io};
use forebay_trace::TraceRequest;

/// Requests that wait to be taken away.
pub const RECORDED_MAX: usize = 4096;

/// The requests of one volume, as one router took them.
#[derive(Debug, Default)]
pub struct Recorded {
    /// Their times are those of the caller's clock.
    pub requests: Vec<TraceRequest>,
    /// How many did not fit.
    pub dropped: u64,
}

impl Recorded {
    /// Notes a request.
    pub(crate) fn note(&mut self, now: Instant, io: &Io) {
        if self.requests.len() == RECORDED_MAX {
            self.dropped += 1;
            return;
        }
        let (op, fua, range) = (io.op, io.flags.fua, io.range);
        self.requests.push(TraceRequest { nanos: now.0, op, fua, range });
    }

    /// Takes away what there is.
    pub fn take(&mut self) -> Self {
        let requests = mem::replace(&mut self.requests, Vec::with_capacity(RECORDED_MAX));
        Self { requests, dropped: mem::take(&mut self.dropped) }
    }
}
