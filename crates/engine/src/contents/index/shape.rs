//! Where the buckets of the partitions are, while the table grows and shrinks at its end.
//!
//! This is linear hashing with partial expansions (Larson, VLDB 1980). Each partition has `base`
//! buckets, and the first `swept` of them have a step more, of a quarter to an eighth. To grow,
//! the next partition gets its step; after the last one, `base` includes it. So the table grows by
//! one partition's step at a time, and everything outside of this partition stays where it is.
//!
//! The table is one sequence of buckets in stripes. A stripe holds the same step of all partitions:
//!
//! ```text
//!   buckets 0      1           7         8 and 9           10 and 11
//! | p0 p1 .. | p0 p1 .. | .. | p0 .. | p0 p0 p1 p1 .. | p0 p0 p1 p1 | not yet
//!                                                                   ^ total
//! ```

/// A step is this fraction of the smallest power of two of buckets that has such steps.
const STEPS_LOG: u32 = 2;

/// Number of partitions, and number of buckets in each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    bits: u32,
    base: u64,
    swept: u64,
}

impl Shape {
    /// `1 << bits` partitions without buckets.
    pub fn new(bits: u32) -> Self {
        Self { bits, base: 0, swept: 0 }
    }

    /// The logarithm of the number of partitions.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Whether there are no buckets.
    pub fn is_empty(&self) -> bool {
        self.base == 0
    }

    /// Number of buckets in all partitions.
    pub fn total(&self) -> u64 {
        (self.base << self.bits) + (self.swept << width(self.base))
    }

    /// Number of buckets of a partition.
    pub fn buckets(&self, partition: u64) -> u64 {
        self.base + (u64::from(partition < self.swept) << width(self.base))
    }

    /// The position of a partition's bucket in the table. It never changes.
    pub fn address(&self, partition: u64, bucket: u64) -> u64 {
        let width = width(bucket);
        let within = bucket & ((1 << width) - 1);
        ((bucket - within) << self.bits) + (partition << width) + within
    }

    /// The partition that has the bucket at a position.
    pub fn partition(&self, address: u64) -> u64 {
        let bucket = address >> self.bits;
        let width = width(bucket);
        (address - (bucket >> width << width << self.bits)) >> width
    }

    /// The next larger shape, and the partition that differs. The first buckets come to all
    /// partitions at the same time.
    pub fn grown(&self) -> (Self, u64) {
        if self.is_empty() {
            return (Self { base: 1, ..*self }, 0);
        }
        let swept = self.swept + 1;
        let base = self.base + (1 << width(self.base));
        let whole = Self { base, swept: 0, ..*self };
        (if swept >> self.bits == 1 { whole } else { Self { swept, ..*self } }, self.swept)
    }

    /// The next smaller shape in which each partition has a bucket, and the partition that differs.
    pub fn shrunk(&self) -> Option<(Self, u64)> {
        let shape = match self.swept {
            0 if self.base <= 1 => return None,
            0 => {
                let base = self.base - (1 << width(self.base - 1));
                Self { base, swept: (1 << self.bits) - 1, ..*self }
            }
            swept => Self { swept: swept - 1, ..*self },
        };
        Some((shape, shape.swept))
    }
}

/// The logarithm of the step that a bucket belongs to.
fn width(bucket: u64) -> u32 {
    (bucket | 1 << STEPS_LOG).ilog2() - STEPS_LOG
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_fill_the_table_without_gaps_and_stay_in_place() {
        let mut shape = Shape::new(2);
        let mut known = Vec::new();
        while shape.base < 70 {
            let (grown, partition) = shape.grown();
            let fresh: Vec<u64> = (0..4)
                .flat_map(|p| (shape.buckets(p)..grown.buckets(p)).map(move |b| (p, b)))
                .inspect(|&(p, _)| assert!(shape.is_empty() || p == partition))
                .map(|(p, b)| {
                    assert_eq!(shape.partition(shape.address(p, b)), p);
                    shape.address(p, b)
                })
                .collect();
            assert!(fresh.iter().copied().eq(shape.total()..grown.total()), "{shape:?}: {fresh:?}");
            if !shape.is_empty() {
                assert_eq!(grown.shrunk(), Some((shape, partition)));
                let step = grown.buckets(partition) - shape.buckets(partition);
                assert!(step == 1 || (step * 4..=step * 8).contains(&shape.base), "{shape:?}");
            }
            known.extend(fresh);
            shape = grown;
        }
        assert_eq!(known.len() as u64, shape.total());
        assert_eq!(Shape { base: 1, ..Shape::new(2) }.shrunk(), None);
    }
}
