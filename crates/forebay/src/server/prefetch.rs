//! The prefetch of a volume as the control API sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_block::{ByteRange, Endpoint, ErrorKind};
use forebay_control::{PrefetchSnapshot, PrefetchTarget};
use forebay_runtime::{Pool, PrefetchProgress};

/// A prefetch, running or ended.
pub struct Prefetch {
    progress: Arc<PrefetchProgress>,
    total: u64,
    began: Instant,
    cancelled: AtomicBool,
    /// Its duration, once that is known.
    took: std::sync::OnceLock<Duration>,
}

impl Prefetch {
    /// Begins to bring ranges into the cache.
    pub fn start(pool: &Pool, endpoint: Endpoint, target: &PrefetchTarget) -> Self {
        let ranges = target.ranges.iter();
        let ranges: Vec<ByteRange> =
            ranges.map(|range| ByteRange::new(range.start, range.end - range.start)).collect();
        Self {
            total: ranges.iter().map(|range| range.len).sum(),
            progress: pool.prefetch(endpoint, ranges, target.rate),
            began: Instant::now(),
            cancelled: AtomicBool::new(false),
            took: std::sync::OnceLock::new(),
        }
    }

    /// Whether it goes on.
    pub fn is_running(&self) -> bool {
        !self.progress.has_ended()
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
        let running = self.is_running();
        let (bytes, error) = (self.progress.bytes(), self.progress.error());
        let time = self.began.elapsed();
        let error = error.map(|error| match error.kind() {
            ErrorKind::Unsupported => "the volume's mode, or the state of the cache, does not let \
                                       blocks into the cache"
                .to_owned(),
            ErrorKind::NoSpace => {
                "the cache had no room: see dirty data in the status, cache_limit, \
                                   fill_rate and wear_budget"
                    .to_owned()
            }
            _ => format!("the volume could not be read: {error}"),
        });
        PrefetchSnapshot {
            running,
            cancelled: self.cancelled.load(Ordering::Relaxed),
            bytes,
            total: self.total,
            time: if running { time } else { *self.took.get_or_init(|| time) },
            error,
        }
    }
}
