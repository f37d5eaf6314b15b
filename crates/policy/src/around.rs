//! Read-around: whether the neighbors of a missed block are read together with it.
//!
//! A disk takes hardly longer for 64 KiB than for 4 KiB, and cloud volumes bill and limit requests,
//! not bytes. While the cache has room for all of it, reading around warms the cache many times
//! sooner. A primary that answers requests quickly, as an SSD does, would only be kept busy by it.
//!
//! The primary's time per request is derived from its rate of completions while it is busy (the
//! utilization law: busy time divided by completions), so that a deep queue does not make an SSD
//! look slow, nor a shallow one a disk fast.

use std::time::Duration;

use forebay_block::{BlockRange, Instant};

use crate::chunk::Chunk;

/// Time per request from which a primary counts as slow. For comparison: 64 KiB more take a disk
/// 0.4 ms, a 10 Gbit/s network 0.05 ms.
const SLOW: Duration = Duration::from_micros(250);
/// The cache has room if more than one part in this many of its store is free, or of its segments
/// if it has no store, and of its index. Less is kept free, except in logs of less than 24
/// segments.
const ROOM_SHARE: u64 = 8;
/// Number of recent requests that the average covers.
const MEMORY: u32 = 16;

/// A primary's recent read times.
#[derive(Clone, Debug, Default)]
pub struct ReadAround {
    in_flight: u32,
    /// When the last read ended, or when the primary last went from idle to busy, if later.
    since: Instant,
    /// Average recent time per read.
    cost: Duration,
    chunk: Chunk,
}

impl ReadAround {
    /// Records that a read is sent to the primary; `extended` by neighbors or not.
    pub fn begin(&mut self, now: Instant, extended: bool) {
        if self.in_flight == 0 {
            self.since = now;
        }
        self.in_flight += 1;
        if extended {
            self.chunk.extend();
        }
    }

    /// Records that a read of the primary ended.
    pub fn end(&mut self, now: Instant) {
        let took = now.since(self.since);
        self.cost = self.cost * (MEMORY - 1) / MEMORY + took / MEMORY;
        self.in_flight -= 1;
        self.since = now;
        self.chunk.end(took, self.in_flight);
    }

    /// Blocks of an aligned chunk, the unit of read-around.
    #[must_use]
    pub fn chunk(&self) -> u64 {
        self.chunk.blocks()
    }

    /// Whether the primary counts as slow, so that a longer request hardly costs more.
    #[must_use]
    pub fn pays(&self) -> bool {
        self.cost >= SLOW
    }

    /// Whether `free` of `places` pages, segments or index places are enough to admit everything:
    /// nothing had to leave so far.
    #[must_use]
    pub fn has_room(places: u64, free: u64) -> bool {
        free * ROOM_SHARE > places
    }

    /// The blocks to read for `missed` blocks of a volume of `volume_blocks`: the missed ones, and
    /// neighbors in the same chunk as far as all blocks up to them are wanted.
    #[must_use]
    pub fn around(
        &self,
        missed: BlockRange,
        volume_blocks: u64,
        is_wanted: impl Fn(u64) -> bool,
    ) -> BlockRange {
        let chunk = self.chunk();
        let start = missed.first / chunk * chunk;
        let end = missed.end().next_multiple_of(chunk).min(volume_blocks);
        let is_wanted = |block: &u64| is_wanted(*block);
        let before = (start..missed.first).rev().take_while(is_wanted).count() as u64;
        let after = (missed.end()..end).take_while(is_wanted).count() as u64;
        BlockRange { first: missed.first - before, count: before + missed.count + after }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A primary with a service time of `service` per read, one at a time, with `depth` in flight.
    fn after(reads: u32, service: Duration, depth: u32) -> ReadAround {
        let mut around = ReadAround::default();
        let mut now = Instant(1_000_000_000);
        (0..depth).for_each(|_| around.begin(now, false));
        for _ in 0..reads {
            now = now + service;
            around.end(now);
            around.begin(now, false);
        }
        around
    }

    #[test]
    fn slow_primaries_are_read_around_at_any_depth() {
        let pays = |micros, depth| after(100, Duration::from_micros(micros), depth).pays();
        for depth in [1, 32, 256] {
            assert!(pays(8000, depth) && pays(333, depth), "a disk, 3,000 requests a second");
            assert!(!pays(100, depth) && !pays(12, depth), "an SSD");
        }
        assert!(!ReadAround::default().pays(), "nothing is known");
    }

    #[test]
    fn bursts_and_silence_do_not_make_a_primary_slow() {
        let mut around = ReadAround::default();
        for second in 1..20 {
            let start = Instant(second * 1_000_000_000);
            (0..256).for_each(|_| around.begin(start, true));
            (1..=256).for_each(|n| around.end(start + Duration::from_micros(12) * n));
        }
        assert!(!around.pays());
    }

    #[test]
    fn a_chunk_is_read_up_to_what_is_not_wanted() {
        let reads = ReadAround::default();
        let around = |first, count, volume| {
            let range =
                reads.around(BlockRange { first, count }, volume, |block| block % 100 != 42);
            range.first..range.end()
        };
        assert_eq!(around(100, 1, 1000), 96..112);
        assert_eq!(around(100, 20, 1000), 96..128);
        assert_eq!(around(100, 1, 105), 96..105, "the volume ends there");
        assert_eq!((around(96, 16, 1000), around(96, 9, 105)), (96..112, 96..105), "all is missed");
        assert_eq!((around(35, 1, 1000), around(45, 1, 1000)), (32..42, 43..48));
    }
}
