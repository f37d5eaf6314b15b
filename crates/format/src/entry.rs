//! One entry of a record: a statement about a block, or about a range of blocks.
//!
//! An entry refers to its payload by offset in the segment, so an entry has the same bytes in a
//! footer as in a record: 24, or less in a [unit entry](crate::table). A block that equals one
//! written before has no payload of its own: its entry refers to the older payload, and to the
//! segment of that by its distance in segments. A block stored against another one refers to the
//! other's payload in the same way, in addition to its own. A block in the store has its payload
//! outside of the log: its entry refers to it by the number of its extent.

use forebay_block::{BLOCK_SIZE, STRIPE_BLOCKS, VolumeId};

use crate::PAGE;
use crate::bytes::{Reader, Writer};
use crate::error::{FormatError, ensure_eq, ensure_max, ensure_min};

/// Length of an entry, in bytes.
pub const ENTRY_BYTES: usize = 24;
/// Maximum number of blocks of a volume: a block number has 40 bits.
pub const VOLUME_BLOCKS_MAX: u64 = 1 << 40;
/// Maximum number of blocks that an entry covers: a request lies in one stripe.
pub const ENTRY_BLOCKS_MAX: u64 = STRIPE_BLOCKS;
/// Alignment of compressed payloads, in bytes.
pub(crate) const PACKED_ALIGN: u32 = 8;

const FLAG_DIRTY: u8 = 1;
pub(crate) const FLAG_FIRST: u8 = 2;
const FLAG_SHARED: u8 = 4;
/// Two bits with the kind of a named base, as a number below; zero if there is no base.
const BASE_KIND_SHIFT: u32 = 3;
const BASE_KIND: u8 = 3 << BASE_KIND_SHIFT;
const FLAG_STORED: u8 = 32;
const FLAGS: u8 = FLAG_DIRTY | FLAG_FIRST | FLAG_SHARED | BASE_KIND | FLAG_STORED;
/// Bits of a base's offset, in units of [`PACKED_ALIGN`]; its length has the other 13 of 32 bits.
const BASE_OFFSET_BITS: u32 = 19;
/// Maximum end of a named base, in bytes from the start of its segment.
const BASE_END_MAX: u64 = (PACKED_ALIGN as u64) << BASE_OFFSET_BITS;

/// The kind of an entry. The numbers are part of the format.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum EntryKind {
    /// The payload is the block, page-aligned.
    Raw = 1,
    /// The payload is the block, as an LZ4 block, at a multiple of 8 bytes.
    Lz4 = 2,
    /// The blocks are zero; no payload.
    Zero = 3,
    /// The cache holds nothing for the blocks, from this record on; no payload.
    Invalidate = 4,
    /// No statement about blocks; the entry exists only to carry the record's header. No payload.
    Checkpoint = 5,
    /// The block's newest version was dirty and could not be read back; no payload. Reads of it
    /// fail until it is written again.
    Lost = 6,
    /// The payload is a delta at a multiple of 8 bytes. Its base is the newest version of the block
    /// before it in the log that is stored whole.
    Delta = 7,
    /// The payload is the block, as one zstd frame, at a multiple of 8 bytes.
    Zstd = 8,
    /// The payload, at a multiple of 8 bytes, is compressed against another block's payload, which
    /// the entry names.
    Similar = 9,
}

/// The payload that a block is stored against: that of another block, stored whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NamedBase {
    /// Number of segments from the base's segment to the entry's.
    pub back: u16,
    /// Start of the payload, in bytes from the start of its segment.
    pub offset: u32,
    /// Length of the payload, in bytes.
    pub len: u16,
    /// How the payload is stored.
    pub kind: EntryKind,
}

impl EntryKind {
    /// One more than the greatest kind number.
    pub const NUMBERS: usize = Self::Similar as usize + 1;

    /// The kind with this number, if this version of the format has it.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Raw),
            2 => Some(Self::Lz4),
            3 => Some(Self::Zero),
            4 => Some(Self::Invalidate),
            5 => Some(Self::Checkpoint),
            6 => Some(Self::Lost),
            7 => Some(Self::Delta),
            8 => Some(Self::Zstd),
            9 => Some(Self::Similar),
            _ => None,
        }
    }

    /// Whether the entry's payload alone yields the block.
    #[must_use]
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Raw | Self::Lz4 | Self::Zstd)
    }

    /// The number of a kind whose payload alone yields the block, where two bits are left for it.
    pub(crate) fn whole_number(self) -> u8 {
        match self {
            Self::Raw => 1,
            Self::Lz4 => 2,
            Self::Zstd => 3,
            other => unreachable!("{other:?} was checked to be a whole block"),
        }
    }

    /// The kind with this number among these.
    pub(crate) fn from_whole_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Raw),
            2 => Some(Self::Lz4),
            3 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Whether entries of this kind have a payload.
    #[must_use]
    pub fn has_payload(self) -> bool {
        matches!(self, Self::Raw | Self::Lz4 | Self::Delta | Self::Zstd | Self::Similar)
    }

    /// Whether the block is decoded from the entry's payload together with another one.
    #[must_use]
    pub fn is_associate(self) -> bool {
        matches!(self, Self::Delta | Self::Similar)
    }
}

/// A record's statement about a block, or about `count` blocks starting with it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Entry {
    /// The volume of the block.
    pub volume: VolumeId,
    /// Number of the block in the volume, less than 2^40.
    pub block: u64,
    /// The kind of statement.
    pub kind: EntryKind,
    /// Whether the block is newer than on the primary.
    pub dirty: bool,
    /// Whether it is the first entry of its record. [`crate::encode_record`] sets it by position;
    /// in a footer it marks the start of the next record, and so of the next LSN.
    pub first: bool,
    /// Start of the payload, in bytes from the start of the segment; 0 without a payload.
    pub offset: u32,
    /// Length of the payload, in bytes; 0 without a payload.
    pub len: u16,
    /// Number of blocks covered: 1, or more for `Zero` and `Invalidate`.
    pub count: u32,
    /// CRC32C of the payload; 0 without a payload.
    pub crc: u32,
    /// Set if the payload is that of an older entry: its distance in segments from this entry.
    pub shared: Option<u16>,
    /// The base of a block of the kind `Similar`; `None` for other kinds.
    pub base: Option<NamedBase>,
    /// Set if the payload is in the store; `offset` then counts from the start of its extent.
    pub stored: Option<StoreUnit>,
}

/// The unit of the store that holds a payload.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct StoreUnit {
    /// Number of the extent, from the first after the log; less than 2^24.
    pub extent: u32,
    /// The page of the unit in which the payload begins, from 1: so recovery learns where units
    /// begin.
    pub page: u8,
}

impl Entry {
    /// Whether the entry's payload is in its own record.
    #[must_use]
    pub fn has_own_payload(&self) -> bool {
        self.kind.has_payload() && self.shared.is_none() && self.stored.is_none()
    }

    pub(crate) fn put(&self, w: &mut Writer<'_>) {
        put_block(w, self.volume, self.block);
        w.u8(self.kind as u8);
        w.u8((u8::from(self.dirty) * FLAG_DIRTY)
            | (u8::from(self.first) * FLAG_FIRST)
            | (u8::from(self.shared.is_some()) * FLAG_SHARED)
            | (self.base.map_or(0, NamedBase::kind_number) << BASE_KIND_SHIFT)
            | (u8::from(self.stored.is_some()) * FLAG_STORED));
        w.u32(self.offset);
        w.u16(self.len);
        let stored = self.stored.map(StoreUnit::number);
        w.u32(self.base.map(NamedBase::extent).or(stored).unwrap_or(self.count));
        w.u32(self.crc);
        w.u16(self.base.map(|base| base.back).or(self.shared).unwrap_or(0));
    }

    /// Reads an entry, and checks everything that does not depend on the position of its record.
    pub(crate) fn take(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        let at = r.at();
        let (volume, block) = take_block(r)?;
        let number = r.u8()?;
        ensure_kind(number, at)?;
        let kind = EntryKind::from_number(number).expect("the number was checked");
        let flags = r.u8()?;
        ensure_eq("unknown entry flags", at + 7, u64::from(flags & !FLAGS), 0)?;
        let (dirty, first) = (flags & FLAG_DIRTY != 0, flags & FLAG_FIRST != 0);
        let (offset, len, count, crc) = (r.u32()?, r.u16()?, r.u32()?, r.u32()?);
        let base_kind = (flags & BASE_KIND) >> BASE_KIND_SHIFT;
        let is_shared = flags & FLAG_SHARED != 0;
        let back = match is_shared || base_kind != 0 {
            true => r.u16()?,
            false => r.reserved(2).map(|()| 0)?,
        };
        let shared = is_shared.then_some(back);
        let base = NamedBase::from_extent(base_kind, count, back);
        let stored = (flags & FLAG_STORED != 0 && base.is_none()).then_some(count);
        let stored = stored.map(StoreUnit::from_number);
        let named = u64::from(flags & FLAG_STORED != 0 && base.is_some());
        ensure_eq("base of a block in the store", at + 7, named, 0)?;
        let count = if base.is_some() || stored.is_some() { 1 } else { count };
        let entry = Self {
            volume,
            block,
            kind,
            dirty,
            first,
            offset,
            len,
            count,
            crc,
            shared,
            base,
            stored,
        };
        entry.check(at)?;
        Ok(entry)
    }

    /// End of the payload, in bytes from the start of the segment.
    #[must_use]
    pub fn payload_end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.len)
    }

    /// Checks the fields against each other; `at` is the entry's offset in its structure.
    pub(crate) fn check(&self, at: usize) -> Result<(), FormatError> {
        let (offset, len, count) =
            (u64::from(self.offset), u64::from(self.len), u64::from(self.count));
        let end = self.block.saturating_add(count);
        ensure_max("end of the blocks", at + 1, end, VOLUME_BLOCKS_MAX)?;
        ensure_min("blocks covered", at + 14, count, 1)?;
        let block = BLOCK_SIZE as u64;
        match self.kind {
            EntryKind::Raw => {
                ensure_eq("length of a raw payload", at + 12, len, block)?;
                let misaligned = offset % PAGE as u64;
                ensure_eq("raw payload's offset within a page", at + 8, misaligned, 0)?;
            }
            EntryKind::Lz4 | EntryKind::Delta | EntryKind::Zstd | EntryKind::Similar => {
                ensure_min("length of a compressed payload", at + 12, len, 1)?;
                ensure_max("length of a compressed payload", at + 12, len, block - 1)?;
                let misaligned = offset % u64::from(PACKED_ALIGN);
                ensure_eq("compressed payload's offset within 8 bytes", at + 8, misaligned, 0)?;
            }
            EntryKind::Zero | EntryKind::Invalidate | EntryKind::Checkpoint | EntryKind::Lost => {
                ensure_eq("offset without a payload", at + 8, offset, 0)?;
                ensure_eq("length without a payload", at + 12, len, 0)?;
                ensure_eq("CRC without a payload", at + 18, u64::from(self.crc), 0)?;
            }
        }
        let sharing = u64::from(self.shared.is_some() && !self.kind.is_whole());
        ensure_eq("shared payload that is no block", at + 7, sharing, 0)?;
        let stored = self.stored.is_some();
        let misplaced = u64::from(stored && (!self.kind.is_whole() || self.shared.is_some()));
        ensure_eq("payload in the store that is no block of its own", at + 7, misplaced, 0)?;
        self.stored.map_or(Ok(()), |slot| slot.check(at))?;
        let needs_base = u64::from(self.kind == EntryKind::Similar);
        ensure_eq("base of a similar block", at + 7, u64::from(self.base.is_some()), needs_base)?;
        self.base.map_or(Ok(()), |base| base.check(at))?;
        let most = match self.kind {
            EntryKind::Zero | EntryKind::Invalidate => ENTRY_BLOCKS_MAX,
            _ => 1,
        };
        ensure_max("blocks covered", at + 14, count, most)
    }
}

/// Encodes a block's volume and number, in six bytes.
pub(crate) fn put_block(w: &mut Writer<'_>, volume: VolumeId, block: u64) {
    let low = block & u64::from(u32::MAX);
    w.u8(volume.0);
    w.u32(u32::try_from(low).expect("32 bits are left"));
    w.u8(u8::try_from(block >> 32).expect("a block number has 40 bits"));
}

/// Decodes a block's volume and number.
pub(crate) fn take_block(r: &mut Reader<'_>) -> Result<(VolumeId, u64), FormatError> {
    let volume = VolumeId(r.u8()?);
    Ok((volume, u64::from(r.u32()?) | (u64::from(r.u8()?) << 32)))
}

impl NamedBase {
    /// End of the payload, in bytes from the start of its segment.
    #[must_use]
    pub fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.len)
    }

    fn kind_number(self) -> u8 {
        self.kind.whole_number()
    }

    /// Offset and length as one number, with the length in the upper 13 bits.
    fn extent(self) -> u32 {
        (u32::from(self.len) << BASE_OFFSET_BITS) | (self.offset / PACKED_ALIGN)
    }

    fn from_extent(kind: u8, extent: u32, back: u16) -> Option<Self> {
        let kind = EntryKind::from_whole_number(kind)?;
        let offset = (extent & ((1 << BASE_OFFSET_BITS) - 1)) * PACKED_ALIGN;
        Some(Self { back, offset, len: (extent >> BASE_OFFSET_BITS) as u16, kind })
    }

    fn check(&self, at: usize) -> Result<(), FormatError> {
        let (offset, len) = (u64::from(self.offset), u64::from(self.len));
        let block = BLOCK_SIZE as u64;
        ensure_eq("base that is no block", at + 7, u64::from(self.kind.is_whole()), 1)?;
        let (least, most, align) = match self.kind {
            EntryKind::Raw => (block, block, PAGE as u64),
            _ => (1, block - 1, u64::from(PACKED_ALIGN)),
        };
        ensure_min("length of a base", at + 14, len, least)?;
        ensure_max("length of a base", at + 14, len, most)?;
        ensure_eq("base's offset within a page or 8 bytes", at + 14, offset % align, 0)?;
        ensure_max("end of a base", at + 14, self.end(), BASE_END_MAX)
    }
}

/// Bits of an extent's number; the page of the unit, or in a unit entry the number of blocks, has
/// the other 8 of 32 bits.
pub(crate) const EXTENT_BITS: u32 = 24;

impl StoreUnit {
    fn number(self) -> u32 {
        (u32::from(self.page) << EXTENT_BITS) | self.extent
    }

    fn from_number(number: u32) -> Self {
        let page = (number >> EXTENT_BITS) as u8;
        Self { extent: number & ((1 << EXTENT_BITS) - 1), page }
    }

    fn check(self, at: usize) -> Result<(), FormatError> {
        let (extent, most) = (u64::from(self.extent), (1 << EXTENT_BITS) - 1);
        ensure_max("extent of the store", at + 14, extent, most)?;
        ensure_min("page of a unit", at + 17, u64::from(self.page), 1)
    }
}

/// An error unless this version of the format has an entry kind with this number.
fn ensure_kind(number: u8, at: usize) -> Result<(), FormatError> {
    ensure_min("entry kind", at + 6, u64::from(number), EntryKind::Raw as u64)?;
    ensure_max("entry kind", at + 6, u64::from(number), EntryKind::Similar as u64)
}
