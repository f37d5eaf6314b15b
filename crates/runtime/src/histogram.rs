//! Latencies in fixed memory: the buckets are a sixteenth of a power of two wide, so that a
//! quantile is exact within 6 %.

use std::time::Duration;

/// log2 of nanoseconds: shorter latencies share the first bucket.
const FLOOR_BITS: u32 = 8;
/// log2 of nanoseconds: latencies from here on (68 s) share the last bucket.
const CEILING_BITS: u32 = 36;
/// log2 of the number of buckets for each power of two.
const FINE_BITS: u32 = 4;
/// Number of buckets.
pub const BUCKETS: usize = (((CEILING_BITS - FLOOR_BITS) << FINE_BITS) + 2) as usize;

/// Numbers of latencies, by bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Histogram {
    counts: Box<[u64; BUCKETS]>,
    sum_nanos: u64,
    max_nanos: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: Box::new([0; BUCKETS]), sum_nanos: 0, max_nanos: 0 }
    }
}

impl Histogram {
    /// Counts one latency.
    pub fn record(&mut self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanos)] += 1;
        self.sum_nanos = self.sum_nanos.saturating_add(nanos);
        self.max_nanos = self.max_nanos.max(nanos);
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts.iter()) {
            *mine += theirs;
        }
        self.sum_nanos = self.sum_nanos.saturating_add(other.sum_nanos);
        self.max_nanos = self.max_nanos.max(other.max_nanos);
    }

    /// Number of latencies recorded.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of all latencies.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_nanos)
    }

    /// The longest latency.
    #[must_use]
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max_nanos)
    }

    /// The latency that a share (0 to 1) of all does not exceed, at most 6 % too high; zero if none
    /// was recorded.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Duration {
        let count = self.count();
        if count == 0 {
            return Duration::ZERO;
        }
        let rank = ((count as f64 * share).ceil() as u64).clamp(1, count);
        let mut seen = 0;
        for (at, &n) in self.counts.iter().enumerate() {
            seen += n;
            if seen >= rank {
                return Duration::from_nanos(upper_bound(at).min(self.max_nanos));
            }
        }
        self.max()
    }

    /// For each non-empty bucket: its upper bound, and the number of latencies up to it. The last
    /// bucket has no bound of its own: it ends at the longest latency.
    pub fn cumulative(&self) -> impl Iterator<Item = (Duration, u64)> {
        let bound = |at| if at == BUCKETS - 1 { self.max_nanos } else { upper_bound(at) };
        let mut seen = 0;
        self.counts.iter().enumerate().filter_map(move |(at, &n)| {
            seen += n;
            (n > 0).then(|| (Duration::from_nanos(bound(at)), seen))
        })
    }
}

fn bucket(nanos: u64) -> usize {
    if nanos < 1 << FLOOR_BITS {
        return 0;
    }
    let power = nanos.ilog2();
    if power >= CEILING_BITS {
        return BUCKETS - 1;
    }
    let fine = (nanos >> (power - FINE_BITS)) & ((1 << FINE_BITS) - 1);
    1 + (((power - FLOOR_BITS) << FINE_BITS) as usize) + fine as usize
}

/// The largest value of a bucket, in nanoseconds.
fn upper_bound(at: usize) -> u64 {
    match at {
        0 => (1 << FLOOR_BITS) - 1,
        _ if at == BUCKETS - 1 => u64::MAX,
        _ => {
            let power = ((at - 1) >> FINE_BITS) as u32 + FLOOR_BITS;
            let fine = (at - 1) as u64 & ((1 << FINE_BITS) - 1);
            (1 << power) + ((fine + 1) << (power - FINE_BITS)) - 1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_tile_the_numbers() {
        for at in 0..BUCKETS - 1 {
            let top = upper_bound(at);
            assert_eq!(bucket(top), at);
            assert_eq!(bucket(top + 1), at + 1);
        }
        assert_eq!(bucket(0), 0);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    /// A percentile of requests that waited for longer than 68 s was shown as 584 years.
    #[test]
    fn the_last_bucket_ends_at_the_longest_latency() {
        let mut all = Histogram::default();
        for seconds in [1, 70, 90] {
            all.record(Duration::from_secs(seconds));
        }
        let found: Vec<_> = all.cumulative().collect();
        assert_eq!(found.last(), Some(&(Duration::from_secs(90), 3)));
        assert!(found.is_sorted());
    }

    #[test]
    fn quantiles_are_near_and_merging_adds() {
        let (mut even, mut odd) = (Histogram::default(), Histogram::default());
        for micros in 1..=1000u64 {
            let half = if micros % 2 == 0 { &mut even } else { &mut odd };
            half.record(Duration::from_micros(micros));
        }
        even.merge(&odd);
        assert_eq!(even.count(), 1000);
        assert_eq!(even.sum(), Duration::from_micros(500_500));
        assert_eq!(even.max(), Duration::from_micros(1000));
        for (share, exact) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0), (0.001, 1.0)] {
            let read = even.quantile(share).as_nanos() as f64 / 1000.0;
            assert!(read >= exact * 0.999 && read <= exact * 1.07, "{share}: {read} for {exact}");
        }
        assert_eq!(even.cumulative().last().map(|(_, n)| n), Some(1000));
        assert_eq!(Histogram::default().quantile(0.5), Duration::ZERO);
    }
}
