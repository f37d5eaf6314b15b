//! Every bound of the engine, with what it protects.

use forebay_block::STRIPE_BLOCKS;
use forebay_format::{PAGE, RECORD_ENTRIES_MAX};

/// Pages in the longest record: bounds what a group commit waits for.
pub const RECORD_PAGES_MAX: usize = 128;
/// Records in flight above which a record waits until it is full: makes groups larger when the
/// device is busy.
pub const RECORDS_IN_FLIGHT: usize = 4;
/// Records in flight above which nothing is written: bounds memory, and what a failed device
/// leaves to be kept in RAM.
pub const RECORDS_IN_FLIGHT_MAX: usize = 8;
/// Segments that may wait for their footer: bounds what recovery has to scan.
pub const SEALING_MAX: usize = 2;
/// Free segments that only reclaim may use, so that it can always copy forward.
pub const RECLAIM_RESERVE: u64 = 2;
/// Segments a shard needs at least: the reserve, those open and sealing, and some to cache in.
pub const SEGMENTS_MIN: u64 = 8;
/// How often a failed write of the cache device is tried again in its place.
pub const WRITE_TRIES: u32 = 3;
/// Reads of primaries in flight above which only what was asked for is read: bounds memory, of
/// which a read around a miss takes 64 KiB.
pub const READS_AROUND_MAX: usize = 64;
/// Copied payloads read and waiting for room in the log, in bytes.
pub const COPY_BYTES_MAX: usize = 1 << 20;
/// Bytes of the longest single read of a segment during copying and recovery.
pub const SEGMENT_READ_MAX: usize = 256 << 10;
/// Segments whose footers are read at once during recovery.
pub const RECOVERY_READS: usize = 32;
/// Whole blocks from which a write of zeros goes to the primary instead of the log.
pub const ZEROES_DIRECT_BLOCKS: u64 = 64;
/// One part in this many of the index may be stored as deltas, which bounds the memory that their
/// bases take, and one part of the log, the oldest, is not used for bases.
pub const BASES_SHARE: u64 = 8;
/// One part in this many of the index may be stored against similar blocks, or share payloads: 40
/// bytes of memory each.
pub const SIMILAR_SHARE: u64 = 2;
/// Deltas, or dense forms, in a row that are too long before fewer are tried: one in this many.
pub const TRIES_REFUSED_MAX: u32 = 64;
/// See [`TRIES_REFUSED_MAX`].
pub const TRY_ONE_IN: u32 = 16;
/// Blocks that reclaim puts together at once, and copies for which it reads a similar block.
pub const REBASES_MAX: usize = 32;
/// Destage writes of one volume that may wait for the primary's flush.
pub const DESTAGED_UNFLUSHED_MAX: usize = 4096;

const _: () = assert!(RECORD_PAGES_MAX < RECORD_ENTRIES_MAX, "a full record's entries fit");
const _: () = assert!(RECORDS_IN_FLIGHT <= RECORDS_IN_FLIGHT_MAX);
const _: () = assert!(SEGMENTS_MIN > RECLAIM_RESERVE + SEALING_MAX as u64 + 1);
const _: () = assert!(SEGMENT_READ_MAX >= RECORD_PAGES_MAX * PAGE / 2);
const _: () = assert!(ZEROES_DIRECT_BLOCKS <= STRIPE_BLOCKS);
