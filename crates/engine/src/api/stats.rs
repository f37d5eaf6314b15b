//! Counters of one shard. They only grow, unless they are named as levels.
//!
//! Conservation: `lookups = hits + partial_hits + misses + bypasses`, counted per read request
//! at a shard.

use crate::api::Bypass;

/// Counters and levels; merged over shards by addition.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are the documentation; the table is in docs/user/statistics.md
pub struct Stats {
    pub lookups: u64,
    pub hits: u64,
    pub partial_hits: u64,
    pub misses: u64,
    pub bypasses: u64,
    /// Bypassed reads and writes by reason.
    pub bypassed_by: [u64; Bypass::COUNT],
    /// Blocks read from RAM, from the cache device, from a primary.
    pub ram_hit_blocks: u64,
    pub ssd_hit_blocks: u64,
    pub primary_read_blocks: u64,
    /// Blocks found compressed in RAM, for reads and as bases of deltas.
    pub ram_compressed_hit_blocks: u64,
    /// Blocks compressed when their place in RAM was needed, and those dropped instead since the
    /// budget for it was spent.
    pub ram_compression_tries: u64,
    pub ram_compression_refusals: u64,
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub flushes: u64,
    pub discards: u64,
    pub admitted_blocks: u64,
    /// Blocks read from a primary together with missed ones that lie around them.
    pub read_around_blocks: u64,
    /// Blocks that the eviction policy kept out after a miss.
    pub unadmitted_blocks: u64,
    /// Fills dropped because a write came between.
    pub stale_fills: u64,
    pub log_records: u64,
    /// Bytes written to the cache device: records, footers, copies.
    pub log_bytes: u64,
    /// Blocks put into the log: by clients, after misses, by reclaim; zero blocks are not counted.
    pub log_blocks: u64,
    pub copied_blocks: u64,
    /// Blocks written as deltas, the bytes of those, and blocks written whole again since their
    /// base was reclaimed.
    pub delta_blocks: u64,
    pub delta_bytes: u64,
    /// Deltas written by their size: up to each of [`DELTA_SIZES`].
    pub deltas_by_size: [u64; DELTA_SIZES.len()],
    /// Blocks that were encoded to see whether a delta, or a dense form, is worth storing.
    pub delta_tries: u64,
    pub dense_tries: u64,
    /// Blocks written that share the payload of another.
    pub duplicate_blocks: u64,
    pub rebased_blocks: u64,
    /// Blocks for which a similar one was looked for, encoded against one, written so, and the
    /// bytes of those.
    pub similar_searches: u64,
    pub similar_tries: u64,
    pub similar_written: u64,
    pub similar_bytes: u64,
    /// Blocks copied forward in a denser form.
    pub dense_blocks: u64,
    pub evicted_blocks: u64,
    pub segments_reclaimed: u64,
    pub destaged_blocks: u64,
    pub destage_writes: u64,
    pub cache_flushes: u64,
    pub primary_flushes: u64,
    /// Checksum failures of clean and of dirty blocks.
    pub corrupt_clean: u64,
    pub corrupt_dirty: u64,
    pub cache_errors: u64,
    pub primary_errors: u64,
    /// Nanoseconds that writes were held back on the way to the dirty limit.
    pub throttled_nanos: u64,
    // Levels.
    pub cached_blocks: u64,
    pub dirty_blocks: u64,
    pub dirty_limit_blocks: u64,
    /// Dirty blocks that cannot be read back any more.
    pub fenced_blocks: u64,
    pub ram_blocks: u64,
    /// Bytes of RAM that those take, and of these what the compressed ones take.
    pub ram_bytes: u64,
    pub ram_compressed_blocks: u64,
    pub ram_compressed_bytes: u64,
    /// Blocks stored as deltas, or against similar ones.
    pub associate_blocks: u64,
    /// Blocks stored against similar ones.
    pub similar_blocks: u64,
    /// Blocks, and the bases of deltas, by how they are stored. With the lost and the similar ones
    /// they are as many as blocks are cached.
    pub raw_blocks: u64,
    pub lz4_blocks: u64,
    pub zstd_blocks: u64,
    pub zero_blocks: u64,
    /// Bytes on the cache device of the blocks in it, and of the bases of deltas.
    pub payload_bytes: u64,
    /// Bytes of the segments that hold anything: payloads, headers, garbage.
    pub log_used_bytes: u64,
    pub index_bytes: u64,
    pub index_capacity: u64,
    pub segments: u64,
    pub segments_free: u64,
    pub requests_in_flight: u64,
    /// Age of the oldest dirty block in nanoseconds; merged by maximum.
    pub oldest_dirty_nanos: u64,
    /// Writes that got an error since the primary had been away for too long.
    pub given_up_writes: u64,
    /// Requests that the cache device has not answered for long.
    pub slow_cache_ios: u64,
    /// CPU time of the shard's thread: the runtime's to fill in.
    pub cpu_nanos: u64,
}

/// Bounds of the sizes by which deltas are counted, in bytes: the last is the largest there is.
pub const DELTA_SIZES: [usize; 5] = [64, 128, 256, 512, forebay_codec::DELTA_MAX];

impl Stats {
    /// Adds the counters and levels of another shard.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.bypassed_by.iter_mut().zip(other.bypassed_by) {
            *mine += theirs;
        }
        for (mine, theirs) in self.deltas_by_size.iter_mut().zip(other.deltas_by_size) {
            *mine += theirs;
        }
        self.oldest_dirty_nanos = self.oldest_dirty_nanos.max(other.oldest_dirty_nanos);
        for (mine, theirs) in self.sums().into_iter().zip(other.clone().sums()) {
            *mine += *theirs;
        }
    }
}

/// Gives [`Stats`] a list of every number that adds up. The pattern names all fields, so that none
/// is forgotten.
macro_rules! sums {
    ($($name:ident),* $(,)?) => {
        impl Stats {
            fn sums(&mut self) -> Vec<&mut u64> {
                let Self {
                    bypassed_by: _, deltas_by_size: _, oldest_dirty_nanos: _, $($name),*
                } = self;
                vec![$($name),*]
            }
        }
    };
}

sums! {
    lookups, hits, partial_hits, misses, bypasses, ram_hit_blocks, ssd_hit_blocks,
    primary_read_blocks, reads, read_bytes, writes, write_bytes, flushes, discards, admitted_blocks,
    read_around_blocks, unadmitted_blocks, stale_fills, log_records, log_bytes, log_blocks,
    copied_blocks, delta_blocks, delta_bytes, delta_tries, duplicate_blocks, dense_blocks,
    dense_tries, rebased_blocks, associate_blocks, raw_blocks, lz4_blocks, zstd_blocks,
    similar_searches, similar_tries, similar_written, similar_bytes, similar_blocks, zero_blocks,
    payload_bytes, log_used_bytes, cpu_nanos, evicted_blocks, segments_reclaimed, destaged_blocks,
    destage_writes, cache_flushes, primary_flushes, corrupt_clean, corrupt_dirty, cache_errors,
    primary_errors, throttled_nanos, cached_blocks, dirty_blocks, dirty_limit_blocks, fenced_blocks,
    ram_blocks, ram_bytes, ram_compressed_blocks, ram_compressed_bytes, ram_compressed_hit_blocks,
    ram_compression_tries, ram_compression_refusals, index_bytes, index_capacity, segments,
    segments_free, requests_in_flight, given_up_writes, slow_cache_ios,
}
