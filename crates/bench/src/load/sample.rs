//! Statistics of a load: the number of completions in each second, and their latencies. Recorded by
//! many threads without locks, summed up once.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Buckets per doubling: the resolution is a sixteenth.
const FINE: usize = 16;
/// Number of doublings above [`FINE`] microseconds; the last bucket is beyond an hour.
const DOUBLINGS: usize = 29;

/// A histogram of times in microseconds, with logarithmic buckets.
pub struct Histogram {
    buckets: Vec<AtomicU64>,
    sum: AtomicU64,
    max: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        let buckets = (0..FINE * (DOUBLINGS + 1)).map(|_| AtomicU64::new(0)).collect();
        Self { buckets, sum: AtomicU64::new(0), max: AtomicU64::new(0) }
    }
}

fn bucket_of(micros: u64) -> usize {
    let fine = FINE as u64;
    if micros < fine {
        return micros as usize;
    }
    let doubling = (micros / fine).ilog2() as usize;
    let within = (micros >> doubling) as usize - FINE;
    (FINE * (doubling + 1) + within).min(FINE * (DOUBLINGS + 1) - 1)
}

/// The largest time that belongs to a bucket, in microseconds.
fn end_of(bucket: usize) -> u64 {
    if bucket < FINE {
        return bucket as u64;
    }
    let (doubling, within) = (bucket / FINE - 1, bucket % FINE);
    ((FINE + within + 1) as u64) << doubling
}

impl Histogram {
    /// Adds a time.
    pub fn add(&self, time: Duration) {
        self.add_many(time, 1);
    }

    /// Adds a time `count` times.
    pub fn add_many(&self, time: Duration, count: u64) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(micros)].fetch_add(count, Relaxed);
        self.sum.fetch_add(micros.saturating_mul(count), Relaxed);
        self.max.fetch_max(micros, Relaxed);
    }

    /// The statistics of the added times.
    pub fn summary(&self) -> Latency {
        let counts: Vec<u64> = self.buckets.iter().map(|count| count.load(Relaxed)).collect();
        let all: u64 = counts.iter().sum();
        let max = self.max.load(Relaxed);
        let at = |share: f64| {
            let wanted = (all as f64 * share).ceil() as u64;
            let mut seen = 0;
            let found = counts.iter().position(|count| {
                seen += count;
                seen >= wanted
            });
            end_of(found.unwrap_or(0)).min(max) as f64 / 1e3
        };
        if all == 0 {
            return Latency::default();
        }
        Latency {
            count: all,
            mean_ms: self.sum.load(Relaxed) as f64 / all as f64 / 1e3,
            p50_ms: at(0.5),
            p95_ms: at(0.95),
            p99_ms: at(0.99),
            p999_ms: at(0.999),
            max_ms: max as f64 / 1e3,
        }
    }
}

/// Latencies in milliseconds; zeros when nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Number of measurements.
    pub count: u64,
    /// Mean.
    pub mean_ms: f64,
    /// Median.
    pub p50_ms: f64,
    /// 95th percentile.
    pub p95_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// 99.9th percentile.
    pub p999_ms: f64,
    /// Maximum.
    pub max_ms: f64,
}

/// Records the completions of a load's threads. Completions during the ramp-up count in the rate
/// per second only.
pub struct Recorder {
    start: Instant,
    ramp: Duration,
    seconds: Vec<AtomicU64>,
    times: Histogram,
}

impl Recorder {
    /// A recorder for a load that begins now, with a ramp-up followed by the measured time.
    pub fn new(ramp: Duration, measured: Duration) -> Self {
        let seconds = (ramp + measured).as_secs();
        let seconds = (0..seconds).map(|_| AtomicU64::new(0)).collect();
        Self { start: Instant::now(), ramp, seconds, times: Histogram::default() }
    }

    /// Records a completion, now, of an operation that began at `begin`.
    pub fn add(&self, begin: Instant) {
        let now = Instant::now();
        let since = now - self.start;
        if let Some(second) = self.seconds.get(since.as_secs() as usize) {
            second.fetch_add(1, Relaxed);
            if since >= self.ramp {
                self.times.add(now - begin);
            }
        }
    }

    /// Whether the measured time is over.
    pub fn is_over(&self) -> bool {
        self.start.elapsed() >= Duration::from_secs(self.seconds.len() as u64)
    }

    /// Start of the load.
    pub fn start(&self) -> Instant {
        self.start
    }

    /// Completions in each second, ramp-up included.
    pub fn per_second(&self) -> Vec<f64> {
        self.seconds.iter().map(|count| count.load(Relaxed) as f64).collect()
    }

    /// Latencies, without the ramp-up.
    pub fn latency(&self) -> Latency {
        self.times.summary()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_known_to_a_sixteenth() {
        let histogram = Histogram::default();
        (1..=100_000).for_each(|micros| histogram.add(Duration::from_micros(micros)));
        let found = histogram.summary();
        for (found, wanted) in [(found.p50_ms, 50.0), (found.p95_ms, 95.0), (found.p99_ms, 99.0)] {
            assert!((wanted..=wanted * 1.0626).contains(&found), "{found} for {wanted}");
        }
        assert_eq!((found.count, found.max_ms), (100_000, 100.0));
        assert!((found.mean_ms - 50.0).abs() < 0.01);
        assert_eq!(Histogram::default().summary(), Latency::default());
    }

    #[test]
    fn every_time_lies_in_its_bucket() {
        for micros in (0..5_000).chain([u64::from(u32::MAX), u64::MAX / 2]) {
            let bucket = bucket_of(micros);
            assert!(bucket == FINE * (DOUBLINGS + 1) - 1 || end_of(bucket) >= micros, "{micros}");
            assert!(bucket == 0 || end_of(bucket - 1) <= micros, "{micros}");
        }
    }
}
