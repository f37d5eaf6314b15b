//! Every limit of the engine, with the resource it protects.

use forebay_block::STRIPE_BLOCKS;
use forebay_format::{PAGE, RECORD_ENTRIES_MAX};

/// A limit of the work in one step. With the feature `short-steps` each step is as short as it can
/// be, so that the simulator comes to all of them.
#[must_use]
pub const fn step(limit: usize) -> usize {
    if cfg!(feature = "short-steps") { 1 } else { limit }
}

/// Pages in the longest record: bounds how long a group commit waits.
pub const RECORD_PAGES_MAX: usize = 128;
/// Records in flight at which a new record waits until it is full: makes groups larger when the
/// device is busy.
pub const RECORDS_IN_FLIGHT: usize = 4;
/// Records in flight at which nothing more is written: bounds memory, and the data that must stay
/// in RAM when the device fails.
pub const RECORDS_IN_FLIGHT_MAX: usize = 8;
/// Segments that may wait for their footer: bounds how much recovery has to scan.
pub const SEALING_MAX: usize = 2;
/// Free segments that only reclaim may use, so that it can always copy forward.
pub const RECLAIM_RESERVE: u64 = 2;
/// Minimum number of segments of a shard: the reserve, the open and sealing ones, and some to cache
/// in.
pub const SEGMENTS_MIN: u64 = 8;
/// Minimum size of a segment, in bytes.
pub const SEGMENT_BYTES_MIN: u64 = 64 << 10;
/// Attempts for a write of the cache device, in the same place, before the device counts as failed.
pub const WRITE_TRIES: u32 = 3;
/// Blocks that reads of primaries in flight bring, above which only the requested blocks are read:
/// bounds memory to 8 MiB.
pub const BLOCKS_AROUND_MAX: u64 = 2048;
/// Bytes of payloads that were read for copying and wait for room in the log.
pub const COPY_BYTES_MAX: usize = 1 << 20;
/// Blocks without payload that are queued for copying: more than one turn can put into the log, so
/// that its records become full.
pub const COPIES_MAX: usize = 2048;
/// Bytes of the longest single read of a segment during copying and recovery.
pub const SEGMENT_READ_MAX: usize = 256 << 10;
/// Segments whose footers are read at the same time during recovery.
pub const RECOVERY_READS: usize = 32;
/// Footers that late loading holds in memory.
pub const LATE_FOOTERS: usize = 2;
/// For each block that late loading applies in one turn, the segment has this many bytes.
pub const LOADED_ONE_IN: u32 = 8192;
/// Limit on the blocks that late loading applies in one turn.
pub const LOADED_MAX: u32 = step(1024) as u32;
/// How many times as much late loading does in one turn while writes wait for room in the log.
pub const LOADED_HURRY: u32 = 4;
/// Extents of the store whose free slots are found in one turn after late loading.
pub const EXTENTS_FOUND: u32 = step(64) as u32;
/// Capacity, in entries, of the parts of a large map that are freed in one turn.
pub const FREED_ROOM: usize = step(16 << 10);
/// Retries of a failed read of a footer during late loading.
pub const LOAD_READS_MAX: u32 = 8;
/// Length, in whole blocks, from which a write of zeros goes to the primary instead of the log.
pub const ZEROES_DIRECT_BLOCKS: u64 = 64;
/// Blocks of a record to which no entry is added that removes several blocks from the cache.
pub const INVALIDATED_MAX: u64 = 512;
/// One block in this many of the index may be stored as a delta, which bounds the memory that bases
/// take. The same fraction of the log, its oldest part, is not used for bases.
pub const BASES_SHARE: u64 = 8;
/// For each block to which later segments may give a payload in a segment, it has this many bytes.
pub const SHARERS_ONE_IN: u32 = 1024;
/// One block in this many of the index may be stored against a similar block, or share a payload;
/// each takes 40 bytes of memory.
pub const SIMILAR_SHARE: u64 = 2;
/// Deltas, or dense forms, that turned out too long in a row before only one in [`TRY_ONE_IN`] is
/// tried.
pub const TRIES_REFUSED_MAX: u32 = 64;
/// After [`TRIES_REFUSED_MAX`] refusals, one in this many is tried.
pub const TRY_ONE_IN: u32 = 16;
/// Limit on the blocks whose memory is prefetched at a time, so that it fits the L1 cache.
pub const WARM_BLOCKS: usize = 64;
/// For each entry of a segment that reclaim looks up in one turn, and each clean block that it
/// decides about without a store, the segment has this many bytes.
pub const SORTED_ONE_IN: u32 = 2048;
/// For each group of clean blocks of a segment that is compared with blocks of the store in one
/// turn, the segment has this many bytes.
pub const COMPARED_ONE_IN: u32 = 32 << 10;
/// For each group of copies for which reclaim looks for neighbors in the store in one turn, the
/// segment has this many bytes.
pub const JOINED_ONE_IN: u32 = 16 << 10;
/// Limit on the blocks that reclaim decodes at the same time, and on the copies for which it reads
/// a similar block.
pub const REBASES_MAX: usize = step(32);
/// Units of the store among which the least wanted is evicted.
pub const EVICT_SAMPLE: usize = 24;
/// Blocks that are scanned for [`EVICT_SAMPLE`] of one volume.
pub const OWN_SCANNED_MAX: u64 = 4096;
/// Units evicted in one turn, by length of their slots, and of each volume above its limit.
pub const EVICTIONS_MAX: usize = step(32);
/// Pages of the store that become free in one turn.
pub const PAGES_FREED_MAX: usize = step(1024);
/// Units that one flush makes durable, if more are coming.
pub const UNITS_FLUSHED: usize = 64;
/// Entries and pages of a record that waits for a client's write to share it, if nothing waits for
/// the record.
pub const ENTRIES_HELD: usize = 128;
/// See [`ENTRIES_HELD`].
pub const PAGES_HELD: usize = 16;
/// Destage writes of one volume that may wait for the primary's flush.
pub const DESTAGED_UNFLUSHED_MAX: usize = 4096;

const _: () = assert!(RECORD_PAGES_MAX < RECORD_ENTRIES_MAX, "a full record's entries fit");
const _: () = assert!(RECORDS_IN_FLIGHT <= RECORDS_IN_FLIGHT_MAX);
const _: () = assert!(COPIES_MAX > RECORDS_IN_FLIGHT_MAX * RECORD_ENTRIES_MAX);
const _: () = assert!(SEGMENTS_MIN > RECLAIM_RESERVE + SEALING_MAX as u64 + 1);
const _: () = assert!(SEGMENT_BYTES_MIN >= COMPARED_ONE_IN as u64, "reclaim advances");
const _: () = assert!(SEGMENT_BYTES_MIN >= JOINED_ONE_IN as u64, "reclaim advances");
const _: () = assert!(SEGMENT_READ_MAX >= RECORD_PAGES_MAX * PAGE / 2);
const _: () = assert!(ZEROES_DIRECT_BLOCKS <= STRIPE_BLOCKS);
const _: () = assert!(INVALIDATED_MAX >= STRIPE_BLOCKS, "a request of a stripe fits");
