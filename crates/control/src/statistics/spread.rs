//! The latencies of an operation, as numbers of requests by duration.

use crate::pool::Latency;

/// Number of requests by duration. Sparse: a bucket that nothing fell into is left out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Spread {
    /// Sum of all durations, in nanoseconds.
    pub sum_nanos: u64,
    /// Upper bounds in nanoseconds, ascending, each with the number of requests that took at most
    /// that long.
    buckets: Box<[(u64, u64)]>,
}

impl Spread {
    /// The latencies of a snapshot.
    #[must_use]
    pub fn of(latency: &Latency) -> Self {
        Self { sum_nanos: latency.sum_nanos, buckets: latency.fine.clone().into() }
    }

    /// Number of requests.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.last().map_or(0, |&(_, count)| count)
    }

    /// The requests since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut earlier = before.buckets.iter().peekable();
        let (mut below, mut last) = (0, 0);
        let mut buckets = Vec::new();
        for &(bound, count) in &self.buckets {
            while let Some(&(_, counted)) = earlier.next_if(|&&(at, _)| at <= bound) {
                below = counted;
            }
            let count = count.saturating_sub(below);
            if count > last {
                buckets.push((bound, count));
                last = count;
            }
        }
        let sum_nanos = self.sum_nanos.saturating_sub(before.sum_nanos);
        Self { sum_nanos, buckets: buckets.into() }
    }

    /// The mean duration in microseconds; `None` without a request.
    #[must_use]
    pub fn mean_micros(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum_nanos as f64 / count as f64 / 1e3)
    }

    /// The duration in microseconds that a share (0 to 1) of the requests did not exceed: the upper
    /// bound of its bucket, at most 6 % too high. `None` without a request.
    #[must_use]
    pub fn quantile_micros(&self, share: f64) -> Option<f64> {
        let count = self.count();
        let rank = ((count as f64 * share).ceil() as u64).clamp(1, count.max(1));
        let bucket = self.buckets.iter().find(|&&(_, up_to)| up_to >= rank)?;
        Some(bucket.0 as f64 / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(buckets: &[(u64, u64)]) -> Spread {
        Spread { sum_nanos: 10 * buckets.len() as u64, buckets: buckets.into() }
    }

    #[test]
    fn a_difference_has_the_requests_in_between() {
        let before = spread(&[(1_000, 3), (4_000, 5)]);
        let now = spread(&[(1_000, 3), (2_000, 5), (4_000, 9), (9_000, 10)]);
        let change = now.since(&before);
        assert_eq!(&*change.buckets, [(2_000, 2), (4_000, 4), (9_000, 5)]);
        assert_eq!((change.count(), change.sum_nanos), (5, 20));
        assert_eq!(change.quantile_micros(0.4), Some(2.0));
        assert_eq!(change.quantile_micros(0.5), Some(4.0));
        assert_eq!(change.quantile_micros(0.99), Some(9.0));
        assert_eq!(now.since(&now).count(), 0);
        assert_eq!(now.since(&Spread::default()), now);
    }

    #[test]
    fn nothing_has_no_quantile() {
        assert_eq!(Spread::default().quantile_micros(0.5), None);
        assert_eq!(Spread::default().mean_micros(), None);
    }
}
