//! Client requests of a volume, noted during a recording until they are taken away.
//!
//! The list is bounded: requests that do not fit are counted and left out, so that no client waits
//! for a recording.

use std::mem;

use forebay_block::{Instant, Io};
use forebay_trace::TraceRequest;

/// Requests noted at most before they are taken away.
pub const RECORDED_MAX: usize = 4096;

/// The requests of one volume, as one router took them.
#[derive(Debug, Default)]
pub struct Recorded {
    /// The requests; their times are those of the caller's clock.
    pub requests: Vec<TraceRequest>,
    /// Number of requests left out.
    pub dropped: u64,
}

impl Recorded {
    /// Notes a request, or counts it as left out.
    pub(crate) fn note(&mut self, now: Instant, io: &Io) {
        if self.requests.len() == RECORDED_MAX {
            self.dropped += 1;
            return;
        }
        let (op, fua, range) = (io.op, io.flags.fua, io.range);
        self.requests.push(TraceRequest { nanos: now.0, op, fua, range });
    }

    /// Takes away everything noted so far.
    pub fn take(&mut self) -> Self {
        let requests = mem::replace(&mut self.requests, Vec::with_capacity(RECORDED_MAX));
        Self { requests, dropped: mem::take(&mut self.dropped) }
    }
}
