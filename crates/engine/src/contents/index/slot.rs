//! A slot of the index: the rest of a block's key, and the block's place, in 16 bytes.
//!
//! `rest 36 | segment 20 | kind 3 | meta 3 | dirty 1 | second 1` and
//! `offset/8 19 | length 13 | crc 32`. A kind of zero marks a free slot.

use forebay_block::BLOCK_SIZE;
use forebay_format::{EntryKind, PAGE};

/// Slots of a bucket.
pub const SLOTS: usize = 8;
/// Bytes of a bucket.
pub const BUCKET_BYTES: u64 = size_of::<Bucket>() as u64;
/// Bits of the key that a slot has room for.
pub const REST_BITS: u32 = 36;
/// The largest number of segments in a shard's area.
pub const SEGMENTS_MAX: u64 = 1 << 20;
/// The size of the largest segment, in bytes.
pub const SEGMENT_BYTES_MAX: u64 = 8 << 19;

const _: () = assert!(BLOCK_SIZE < 1 << 13, "a length fits its 13 bits");
const _: () = assert!(BUCKET_BYTES == 16 * SLOTS as u64, "a bucket is two cache lines");

/// The place of a block's newest version, with the eviction policy's bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Position of the segment in the shard's area.
    pub segment: u32,
    /// Bytes from the start of the segment, a multiple of 8; for a block without payload, a number
    /// that is unique within the record. Together with `kind` it never repeats for two versions of
    /// a block in one life of the segment. A slot of the store may be used for the same block
    /// again, but not while its pages are held.
    pub offset: u32,
    /// Length of the payload, in bytes.
    pub len: u16,
    /// The form of the payload.
    pub kind: EntryKind,
    /// CRC32C of the payload.
    pub crc: u32,
    /// Whether the block is newer than the primary.
    pub dirty: bool,
    /// Three bits of the eviction policy.
    pub meta: u8,
}

impl Place {
    /// Whether both places are the same version of the block.
    pub fn is_same_version(&self, other: &Self) -> bool {
        self.segment == other.segment && self.offset == other.offset && self.kind == other.kind
    }

    /// The range of pages that the payload covers, in bytes from the start of the segment.
    pub fn pages(&self) -> std::ops::Range<u32> {
        let page = PAGE as u32;
        let end = self.offset + u32::from(self.len);
        self.offset / page * page..end.next_multiple_of(page)
    }
}

/// A place in a bucket: free, or a block with its place.
#[derive(Clone, Copy, Default)]
pub struct Slot(u64, u64);

impl Slot {
    /// The same block in its other bucket.
    pub fn moved(self) -> Self {
        Self(self.0 ^ 1, self.1)
    }

    /// The slot of a block whose key has this rest, in its second bucket or its first.
    pub fn pack(rest: u64, second: bool, place: &Place) -> Self {
        debug_assert!(rest < 1 << REST_BITS && place.meta < 8);
        assert!(u64::from(place.segment) < SEGMENTS_MAX && place.offset.is_multiple_of(8));
        let high = rest << 28
            | u64::from(place.segment) << 8
            | u64::from(kind_bits(place.kind)) << 5
            | u64::from(place.meta) << 2
            | u64::from(place.dirty) << 1
            | u64::from(second);
        let low =
            u64::from(place.offset / 8) << 45 | u64::from(place.len) << 32 | u64::from(place.crc);
        Self(high, low)
    }

    /// Whether no block is here.
    pub fn is_free(self) -> bool {
        self.0 >> 5 & 7 == 0
    }

    /// The rest of the block's key.
    pub fn rest(self) -> u64 {
        self.0 >> 28
    }

    /// Whether this is the block's second bucket.
    pub fn second(self) -> bool {
        self.0 & 1 == 1
    }

    /// Whether the block with this rest is here.
    pub fn holds(self, rest: u64, second: bool) -> bool {
        self.rest() == rest && self.second() == second && !self.is_free()
    }

    /// The block's place.
    pub fn place(self) -> Place {
        let kind = match self.0 >> 5 & 7 {
            1 => EntryKind::Raw,
            2 => EntryKind::Lz4,
            3 => EntryKind::Zero,
            4 => EntryKind::Lost,
            5 => EntryKind::Delta,
            6 => EntryKind::Zstd,
            7 => EntryKind::Similar,
            other => unreachable!("kind {other} is never put into the index"),
        };
        Place {
            segment: (self.0 >> 8 & (SEGMENTS_MAX - 1)) as u32,
            kind,
            meta: (self.0 >> 2 & 7) as u8,
            dirty: self.0 >> 1 & 1 == 1,
            offset: (self.1 >> 45) as u32 * 8,
            len: (self.1 >> 32 & 0x1fff) as u16,
            crc: self.1 as u32,
        }
    }
}

/// The stored number of a kind that may be in the index; zero marks a free slot.
fn kind_bits(kind: EntryKind) -> u8 {
    match kind {
        EntryKind::Raw => 1,
        EntryKind::Lz4 => 2,
        EntryKind::Zero => 3,
        EntryKind::Lost => 4,
        EntryKind::Delta => 5,
        EntryKind::Zstd => 6,
        EntryKind::Similar => 7,
        other => unreachable!("{other:?} is never put into the index"),
    }
}

/// The slots that a block may be in, in whole cache lines.
#[derive(Clone, Copy, Default)]
#[repr(align(128))]
pub struct Bucket(pub [Slot; SLOTS]);

impl Bucket {
    /// Puts a slot into the bucket; returns whether there was room.
    pub fn put(&mut self, slot: Slot) -> bool {
        let free = self.0.iter_mut().find(|slot| slot.is_free());
        free.map(|free| *free = slot).is_some()
    }
}
