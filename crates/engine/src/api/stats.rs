//! Counters of one shard. They only grow, except those that are marked as levels.
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
    /// Blocks compressed when their place in RAM was needed, and blocks dropped instead because the
    /// CPU budget was spent.
    pub ram_compression_tries: u64,
    pub ram_compression_refusals: u64,
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub flushes: u64,
    pub discards: u64,
    pub admitted_blocks: u64,
    /// Blocks that were not requested but read from a primary together with missed neighbors.
    pub read_around_blocks: u64,
    /// Blocks that the eviction policy kept out after a miss.
    pub unadmitted_blocks: u64,
    /// Blocks read from the primary but not cached because a write intervened.
    pub stale_fills: u64,
    pub log_records: u64,
    /// Bytes written to the cache device: records, footers, copies.
    pub log_bytes: u64,
    /// Blocks put into the log by client writes, after misses, and by reclaim; blocks of zeros are
    /// not counted.
    pub log_blocks: u64,
    pub copied_blocks: u64,
    /// Blocks written as deltas, and the bytes of these deltas.
    pub delta_blocks: u64,
    pub delta_bytes: u64,
    /// Deltas written, by size: each counter holds those up to the bound in [`DELTA_SIZES`].
    pub deltas_by_size: [u64; DELTA_SIZES.len()],
    /// Blocks encoded to see whether a delta, or a dense form, is worth storing.
    pub delta_tries: u64,
    pub dense_tries: u64,
    /// Blocks written that share the payload of another block; blocks written whole again because
    /// their base was reclaimed.
    pub duplicate_blocks: u64,
    pub rebased_blocks: u64,
    /// Blocks for which a similar block was searched, blocks encoded against one, blocks stored
    /// that way, and the bytes of those.
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
    /// Bytes of RAM that these blocks take; number and bytes of the compressed ones among them.
    pub ram_bytes: u64,
    pub ram_compressed_blocks: u64,
    pub ram_compressed_bytes: u64,
    /// Blocks stored as deltas, or against similar ones.
    pub associate_blocks: u64,
    /// Blocks stored against similar ones.
    pub similar_blocks: u64,
    /// Blocks, and bases of deltas, by form. Together with the lost and the similar blocks they add
    /// up to the cached blocks.
    pub raw_blocks: u64,
    pub lz4_blocks: u64,
    pub zstd_blocks: u64,
    pub zero_blocks: u64,
    /// Bytes on the cache device that the payloads of cached blocks and of delta bases take.
    pub payload_bytes: u64,
    /// Bytes of the segments in use: payloads, headers, garbage.
    pub log_used_bytes: u64,
    pub index_bytes: u64,
    pub index_capacity: u64,
    pub segments: u64,
    pub segments_free: u64,
    pub requests_in_flight: u64,
    /// Age of the oldest dirty block in nanoseconds; merged by maximum.
    pub oldest_dirty_nanos: u64,
    /// Writes that failed because the primary had been away for too long.
    pub given_up_writes: u64,
    /// Requests that the cache device has not answered for longer than the configured patience.
    pub slow_cache_ios: u64,
    /// CPU time of the shard's thread, filled in by the runtime.
    pub cpu_nanos: u64,
}

/// Upper bounds of the size classes of deltas, in bytes; the last is the largest possible size.
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

/// Gives [`Stats`] a list of every number that is merged by addition. The pattern names all fields,
/// so none can be forgotten.
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
