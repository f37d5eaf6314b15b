//! The prefetch of a volume as the control API sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use forebay_block::{ByteRange, Endpoint, ErrorKind};
use forebay_control::{PrefetchSnapshot, PrefetchTarget};
use forebay_runtime::{Pool, PrefetchProgress, Ranges};

/// A prefetch, running or ended.
pub struct Prefetch {
    progress: Arc<PrefetchProgress>,
    total: u64,
    began: Instant,
    cancelled: AtomicBool,
}

impl Prefetch {
    /// Begins to bring ranges into the cache that an operator asks for.
    pub fn asked(pool: &Pool, endpoint: Endpoint, target: &PrefetchTarget) -> Self {
        let ranges = target.ranges.iter();
        let ranges: Vec<ByteRange> =
            ranges.map(|range| ByteRange::new(range.start, range.end - range.start)).collect();
        let total = ranges.iter().map(|range| range.len).sum();
        Self::start(pool, endpoint, (total, Box::new(ranges.into_iter())), target.rate)
    }

    /// Begins to bring ranges, of `total` bytes together, into the cache.
    pub fn start(
        pool: &Pool,
        endpoint: Endpoint,
        (total, ranges): (u64, Ranges),
        rate: Option<u64>,
    ) -> Self {
        Self {
            total,
            progress: pool.prefetch(endpoint, ranges, rate),
            began: Instant::now(),
            cancelled: AtomicBool::new(false),
        }
    }

    /// Whether it goes on.
    pub fn is_running(&self) -> bool {
        self.progress.ended().is_none()
    }

    /// Ends it.
    pub fn cancel(&self) {
        if self.is_running() {
            self.cancelled.store(true, Ordering::Relaxed);
            self.progress.cancel();
        }
    }

    /// How far it is.
    pub fn snapshot(&self) -> PrefetchSnapshot {
        let ended = self.progress.ended();
        let (bytes, error) = (self.progress.bytes(), self.progress.error());
        let error = error.map(|error| match error.kind() {
            ErrorKind::Unsupported => "the volume's mode, or the state of the cache, does not let \
                                       blocks into the cache"
                .to_owned(),
            ErrorKind::NoSpace => {
                "the cache had no room for a minute: see dirty data in the status, cache_limit, \
                 fill_rate and wear_budget; after a start it takes no blocks until all of the log \
                 is loaded"
                    .to_owned()
            }
            _ => format!("the volume could not be read: {error}"),
        });
        PrefetchSnapshot {
            running: ended.is_none(),
            cancelled: self.cancelled.load(Ordering::Relaxed),
            bytes,
            total: self.total,
            time: ended.unwrap_or_else(Instant::now).saturating_duration_since(self.began),
            error,
        }
    }
}
