//! The byte formats on the cache device: superblock, record, footer. Encoding and decoding only.
//!
//! Every structure starts or ends with a magic number and carries a CRC32C over the rest of it.
//! Numbers are little-endian. Decoders require reserved bytes to be zero, so that a later version
//! may give them a meaning. Decoders are total: whatever the bytes, they return a value or a
//! [`FormatError`], never panic, and never allocate more than the bytes can describe. Encoders
//! assert what decoders check, since a structure that cannot be read back is a programmer error.
//! The engine decides where structures lie and in which order they are written;
//! `docs/internals/format.md` draws them.

#![forbid(unsafe_code)]
#![deny(clippy::indexing_slicing)]

mod bytes;
mod entry;
mod error;
mod footer;
mod record;
mod superblock;
mod table;

use std::fmt;

pub use entry::{
    ENTRY_BLOCKS_MAX, ENTRY_BYTES, Entry, EntryKind, NamedBase, StoreUnit, VOLUME_BLOCKS_MAX,
};
pub use error::{FormatError, Rule};
pub use footer::{
    FOOTER_TRAILER_BYTES, Footer, FooterTrailer, decode_footer, decode_footer_trailer,
    encode_footer, footer_bytes, footer_entries,
};
pub use record::{
    RECORD_CELLS_MAX, RECORD_ENTRIES_MAX, RECORD_HEADER_BYTES, Record, RecordHeader, decode_record,
    encode_record,
};
pub use superblock::{
    ANNOUNCEMENT_OFFSET, AREA_OFFSET, IDENTITY_BYTES_MAX, SHARD_AREAS, SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS, ShardArea, Superblock, VolumeRecord, newest,
};

pub use table::{
    CELL_BYTES, ENTRY_CELLS, Entries, EntryTable, Mapped, TableLen, TablePosition, cells_of,
};

/// Length of a page of the log in bytes, the unit of its reads and writes. Page writes are not
/// assumed to be atomic: the CRCs detect torn ones.
pub const PAGE: usize = 4096;
/// First version of all structures. What a later one added raised the version of a structure that
/// has it; a structure of an unknown version is rejected.
pub const FORMAT_VERSION: u16 = 1;
/// Minimum length of a segment in bytes: a record of two pages, a footer of one, and one to spare.
pub const SEGMENT_SIZE_MIN: u32 = 4 * PAGE as u32;
/// Maximum length of a segment, in bytes.
pub const SEGMENT_SIZE_MAX: u32 = 64 << 20;

/// Maximum number of a record or segment. No log becomes that long; a larger number was forged.
pub const NUMBER_MAX: u64 = 1 << 62;

/// Number of a record in its shard's log: consecutive from 1; 0 is before all records.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Lsn(pub u64);

impl Lsn {
    /// The LSN after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "record {}", self.0)
    }
}

/// Number of a segment in its shard's log, never reused; its position is this number modulo the
/// number of segments.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SegmentSeq(pub u64);

impl SegmentSeq {
    /// The number after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for SegmentSeq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {}", self.0)
    }
}
