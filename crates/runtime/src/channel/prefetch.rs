//! A prefetch by the server itself, as a channel: ranges of a volume come into the cache, a few
//! requests at a time and no faster than a bound.

use std::collections::VecDeque;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{self, Duration};

use forebay_block::{
    BLOCK_SIZE, ByteRange, Completion, Endpoint, ErrorKind, Instant, Io, IoError, IoOp, IoTag,
};
use forebay_device::Clock;
use forebay_policy::{RateBound, RuleSet};

use super::{Channel, Submit};
use crate::message::End;

/// Most bytes of one request.
const REQUEST_BYTES: u64 = 256 << 10;
/// Requests in flight.
const DEPTH: usize = 4;
/// Pause after the bound of the rate was met, or the cache had no room.
const PAUSE: Duration = Duration::from_millis(10);
/// How long no request may find room.
const VAIN_MAX: Duration = Duration::from_secs(60);

/// How far a prefetch is, for those who started it.
#[derive(Debug, Default)]
pub struct PrefetchProgress {
    /// Bytes that are done.
    bytes: AtomicU64,
    cancelled: AtomicBool,
    ended: OnceLock<time::Instant>,
    error: Mutex<Option<IoError>>,
}

impl PrefetchProgress {
    /// Bytes that are done: brought in, or found in the cache.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// When it ended; `None` while it goes on.
    #[must_use]
    pub fn ended(&self) -> Option<time::Instant> {
        self.ended.get().copied()
    }

    /// Why it ended early.
    #[must_use]
    pub fn error(&self) -> Option<IoError> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it after the requests in flight.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// Ranges of a volume, in the order in which they come into the cache.
pub type Ranges = Box<dyn Iterator<Item = ByteRange> + Send>;

/// The ranges that are left, and the requests in flight.
pub struct Prefetch {
    endpoint: Endpoint,
    clock: Clock,
    /// The next ranges; empty only if none is left.
    next: VecDeque<ByteRange>,
    /// Those after them.
    rest: Ranges,
    bound: RateBound,
    /// The requests in flight; a request's tag is its place.
    in_flight: [Option<ByteRange>; DEPTH],
    progress: Arc<PrefetchProgress>,
    /// A request that the router had no room for.
    parked: Option<Io>,
    /// Nothing is asked for before this: the cache had no room.
    rests_until: Instant,
    /// When a request found no room for the first time since one did.
    in_vain_since: Option<Instant>,
    /// No further request begins.
    over: bool,
}

impl Prefetch {
    /// Brings ranges of a volume into the cache, at most `rate` bytes per second if given.
    #[must_use]
    pub fn new(
        endpoint: Endpoint,
        clock: Clock,
        mut ranges: Ranges,
        rate: Option<u64>,
        progress: Arc<PrefetchProgress>,
    ) -> Self {
        Self {
            endpoint,
            clock,
            next: ranges.next().into_iter().collect(),
            rest: ranges,
            bound: RateBound::new(rate.map(|bytes| bytes.max(1) as f64 / BLOCK_SIZE as f64)),
            in_flight: [None; DEPTH],
            progress,
            parked: None,
            rests_until: Instant::default(),
            in_vain_since: None,
            over: false,
        }
    }

    /// The next request; `None` if there is none, or it must wait.
    fn next(&mut self, now: Instant) -> Option<Io> {
        if let Some(io) = self.parked.take() {
            return Some(io);
        }
        let place = self.in_flight.iter().position(Option::is_none)?;
        if now < self.rests_until || !self.bound.allows(now) {
            return None;
        }
        let range = self.next.front_mut()?;
        // No request crosses a stripe, so that each is one at its shard.
        let end = (range.offset / REQUEST_BYTES + 1) * REQUEST_BYTES;
        let part = ByteRange::new(range.offset, end.min(range.end()) - range.offset);
        *range = ByteRange { offset: part.end(), len: range.len - part.len };
        if range.is_empty() {
            self.next.pop_front();
            if self.next.is_empty() {
                self.next.extend(self.rest.next());
            }
        }
        self.bound.take(part.len.div_ceil(BLOCK_SIZE as u64));
        self.in_flight[place] = Some(part);
        Some(Io::bare(IoTag(place as u64), IoOp::Prefetch, part))
    }

    /// Notes that the cache had no room for a range now.
    fn again(&mut self, range: ByteRange, error: IoError) {
        let now = self.clock.now();
        let since = *self.in_vain_since.get_or_insert(now);
        if now.since(since) > VAIN_MAX {
            return self.fail(error);
        }
        if !self.over {
            self.next.push_front(range);
        }
        self.rests_until = now + PAUSE;
    }

    fn fail(&mut self, error: IoError) {
        self.end();
        let mut first = self.progress.error.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(error);
    }

    /// Begins no further request.
    fn end(&mut self) {
        self.over = true;
        self.next.clear();
        self.rest = Box::new(iter::empty());
    }

    fn is_done(&self) -> bool {
        self.next.is_empty() && self.in_flight() == 0
    }
}

impl Channel for Prefetch {
    fn reap(&mut self) {
        if self.progress.cancelled.load(Ordering::Relaxed) {
            self.end();
        }
    }

    fn feed(&mut self, submit: &mut Submit<'_>) {
        let now = self.clock.now();
        while let Some(io) = self.next(now) {
            if let Err(io) = submit(RuleSet::default(), self.endpoint, io) {
                self.parked = Some(io);
                return;
            }
        }
    }

    fn complete(&mut self, done: Completion) {
        let place = usize::try_from(done.tag.0).expect("a place");
        let range = self.in_flight[place].take().expect("it was in flight");
        match done.result {
            Ok(()) => {
                self.in_vain_since = None;
                self.progress.bytes.fetch_add(range.len, Ordering::Relaxed);
            }
            Err(error) if error.kind() == ErrorKind::NoSpace => self.again(range, error),
            Err(error) => self.fail(error),
        }
    }

    fn advance(&mut self) -> bool {
        if self.is_done() {
            self.progress.ended.get_or_init(time::Instant::now);
        }
        self.parked.is_some()
    }

    fn deadline(&self) -> Option<Instant> {
        let waits = !self.next.is_empty() && self.in_flight() < DEPTH;
        waits.then(|| self.clock.now() + PAUSE)
    }

    fn in_flight(&self) -> usize {
        self.in_flight.iter().flatten().count()
    }

    fn shut(&mut self, _end: End) {
        self.end();
    }

    fn is_over(&self) -> bool {
        self.is_done()
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.progress.ended.get_or_init(time::Instant::now);
    }
}
