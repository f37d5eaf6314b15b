//! The entries of a record or of a footer, one after another.
//!
//! An entry takes three cells of eight bytes. Mappings that follow each other, of blocks of one
//! unit in ascending order, are one *unit entry* together: two cells for what they have in common,
//! and one for each block. So four blocks of a unit take 48 bytes instead of 96.

use std::ops::Range;

use forebay_block::VolumeId;

use crate::bytes::{Reader, Writer};
use crate::entry::{
    ENTRY_BYTES, EXTENT_BITS, Entry, EntryKind, FLAG_FIRST, PACKED_ALIGN, StoreUnit, put_block,
    take_block,
};
use crate::error::{FormatError, ensure_eq, ensure_max, ensure_min};
use crate::record::RECORD_HEADER_BYTES;
use crate::{FORMAT_VERSION, PAGE, SEGMENT_SIZE_MAX};

/// Length of a cell, in bytes.
pub const CELL_BYTES: usize = 8;
/// Cells of an entry that shares nothing with its neighbors.
pub const ENTRY_CELLS: usize = ENTRY_BYTES / CELL_BYTES;
/// Cells of a unit entry before those of its blocks.
const HEAD_CELLS: usize = ENTRY_CELLS - 1;
/// Maximum number of blocks of a unit entry, which lie within as many consecutive blocks.
const UNIT_BLOCKS_MAX: u64 = 4;
/// Maximum number of pages of a unit.
const UNIT_PAGES_MAX: u32 = 4;
/// Maximum number of pages of an extent.
const PAGES_MAX: u32 = SEGMENT_SIZE_MAX / PAGE as u32;
/// The number of a unit entry where other entries have their kind.
const UNIT: u8 = 10;
/// Offset of that number in an entry.
const KIND_AT: usize = 6;
/// Version of a structure with unit entries; in one of [`FORMAT_VERSION`] each entry is alone.
const VERSION_WITH_UNITS: u16 = 2;

// Of the second half of a block's cell, from the lowest bit on: the payload's offset from the start
// of the unit in units of eight bytes, its length, the kind, the block's distance from the first.
const OFFSET_BITS: u32 = 11;
const LEN_BITS: u32 = 13;
const KIND_BITS: u32 = 2;
const DISTANCE_BITS: u32 = 2;
const LEN_SHIFT: u32 = OFFSET_BITS;
const KIND_SHIFT: u32 = LEN_SHIFT + LEN_BITS;
const DISTANCE_SHIFT: u32 = KIND_SHIFT + KIND_BITS;
const DIRTY_SHIFT: u32 = DISTANCE_SHIFT + DISTANCE_BITS;

/// A mapping, as far as it decides with which others it can be encoded together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapped {
    volume: VolumeId,
    block: u64,
    extent: u32,
    /// First page of the unit in its extent.
    page: u32,
}

impl Mapped {
    /// A mapping of `block` to a payload at `offset` in an extent, which belongs to `unit`; `None`
    /// if there cannot be such a unit.
    #[must_use]
    pub fn new(volume: VolumeId, block: u64, offset: u32, unit: StoreUnit) -> Option<Self> {
        let page = (offset / PAGE as u32 + 1).checked_sub(u32::from(unit.page))?;
        let fits = u32::from(unit.page) <= UNIT_PAGES_MAX && page < PAGES_MAX;
        fits.then_some(Self { volume, block, extent: unit.extent, page })
    }

    fn of(entry: &Entry) -> Option<Self> {
        Self::new(entry.volume, entry.block, entry.offset, entry.stored?)
    }
}

/// Mappings that are encoded together.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: Mapped,
    last: u64,
}

impl Run {
    fn takes(&self, next: &Mapped) -> bool {
        let unit = Mapped { block: self.first.block, ..*next };
        let end = self.first.block + UNIT_BLOCKS_MAX;
        unit == self.first && (self.last + 1..end).contains(&next.block)
    }
}

/// Length of entries that are encoded one after another.
#[derive(Clone, Copy, Debug)]
pub struct TableLen {
    unit_entries: bool,
    cells: usize,
    run: Option<Run>,
}

impl TableLen {
    /// The length of no entries, of a structure with or without unit entries.
    #[must_use]
    pub fn new(unit_entries: bool) -> Self {
        Self { unit_entries, cells: 0, run: None }
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        *self = Self::new(self.unit_entries);
    }

    /// Adds an entry of the record, which may be a mapping.
    pub fn push(&mut self, mapped: Option<Mapped>) {
        let mapped = mapped.filter(|_| self.unit_entries);
        match (&mut self.run, mapped) {
            (Some(run), Some(next)) if run.takes(&next) => {
                run.last = next.block;
                self.cells += 1;
            }
            _ => {
                self.run = mapped.map(|first| Run { first, last: first.block });
                self.cells += ENTRY_CELLS;
            }
        }
    }

    pub(crate) fn push_entry(&mut self, entry: &Entry) {
        if entry.first {
            self.run = None;
        }
        self.push(Mapped::of(entry));
    }

    /// The length so far. Without some of the entries it would be no more.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.cells
    }
}

/// Length of the entries of a record or footer, with or without unit entries, in cells.
#[must_use]
pub fn cells_of(entries: &[Entry], unit_entries: bool) -> usize {
    let mut len = TableLen::new(unit_entries);
    entries.iter().for_each(|entry| len.push_entry(entry));
    len.cells()
}

/// The version of a structure with or without unit entries.
pub(crate) fn version_of(unit_entries: bool) -> u16 {
    if unit_entries { VERSION_WITH_UNITS } else { FORMAT_VERSION }
}

/// Encodes the entries, which were checked.
pub(crate) fn put_entries(w: &mut Writer<'_>, entries: &[Entry], unit_entries: bool) {
    let mut rest = entries;
    while let Some(first) = rest.first() {
        let mut len = TableLen::new(unit_entries);
        len.push_entry(first);
        let more = rest.iter().skip(1).take_while(|next| {
            let before = len.cells();
            len.push_entry(next);
            len.cells() == before + 1
        });
        let (run, others) = rest.split_at(1 + more.count());
        match Mapped::of(first) {
            Some(mapped) if run.len() > 1 => put_unit(w, mapped, run),
            _ => first.put(w),
        }
        rest = others;
    }
}

fn put_unit(w: &mut Writer<'_>, unit: Mapped, run: &[Entry]) {
    put_block(w, unit.volume, unit.block);
    w.u8(UNIT);
    w.u8(run.first().map_or(0, |first| u8::from(first.first) * FLAG_FIRST));
    w.u32((run.len() as u32) << EXTENT_BITS | unit.extent);
    w.u32(unit.page);
    for entry in run {
        let offset = (entry.offset - unit.page * PAGE as u32) / PACKED_ALIGN;
        w.u32(entry.crc);
        w.u32(
            offset
                | u32::from(entry.len) << LEN_SHIFT
                | u32::from(entry.kind.whole_number()) << KIND_SHIFT
                | ((entry.block - unit.block) as u32) << DISTANCE_SHIFT
                | u32::from(entry.dirty) << DIRTY_SHIFT,
        );
    }
}

/// The encoded entries of a segment's records, which its footer repeats.
#[derive(Clone, Debug)]
pub struct EntryTable {
    unit_entries: bool,
    bytes: Vec<u8>,
    entries: usize,
    /// Number of entries that begin a record.
    firsts: u64,
    /// Whether the very first one does.
    begins: bool,
}

impl EntryTable {
    /// A table without entries, of records with or without unit entries.
    #[must_use]
    pub fn new(unit_entries: bool) -> Self {
        Self { unit_entries, bytes: Vec::new(), entries: 0, firsts: 0, begins: true }
    }

    /// A table of these entries.
    ///
    /// # Panics
    /// If an entry would not decode.
    #[must_use]
    pub fn of(unit_entries: bool, entries: &[Entry]) -> Self {
        let mut len = TableLen::new(unit_entries);
        for entry in entries {
            let at = len.cells() * CELL_BYTES;
            len.push_entry(entry);
            entry.check(at).unwrap_or_else(|error| panic!("an entry cannot be encoded: {error}"));
        }
        let mut bytes = vec![0; len.cells() * CELL_BYTES];
        put_entries(&mut Writer::new(&mut bytes), entries, unit_entries);
        let (firsts, begins) = firsts_of(entries);
        Self { unit_entries, bytes, entries: entries.len(), firsts, begins }
    }

    /// Adds the entries of a record, which [`crate::encode_record`] has put into its first page.
    ///
    /// # Panics
    /// If the page is shorter than they are.
    pub fn push_record(&mut self, page: &[u8], entries: &[Entry]) {
        let end = RECORD_HEADER_BYTES + cells_of(entries, self.unit_entries) * CELL_BYTES;
        let encoded = page.get(RECORD_HEADER_BYTES..end).expect("the record was encoded");
        self.bytes.extend_from_slice(encoded);
        self.entries += entries.len();
        self.firsts += 1;
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries
    }

    /// Whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// Length of the entries, in cells.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.bytes.len() / CELL_BYTES
    }

    /// The entries.
    pub fn iter(&self) -> impl Iterator<Item = Entry> {
        let entries = Entries::new(&self.bytes, 0..self.bytes.len(), self.unit_entries);
        entries.map(|entry| entry.expect("it was encoded here"))
    }

    pub(crate) fn unit_entries(&self) -> bool {
        self.unit_entries
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// As [`firsts_of`] all entries.
    pub(crate) fn firsts(&self) -> (u64, bool) {
        (self.firsts, self.begins)
    }
}

/// Number of entries that begin a record, and whether the very first one does.
pub(crate) fn firsts_of(entries: &[Entry]) -> (u64, bool) {
    let firsts = entries.iter().filter(|entry| entry.first).count() as u64;
    (firsts, entries.first().is_none_or(|entry| entry.first))
}

/// Where to go on with the entries of a record or footer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TablePosition {
    /// Number of entries before it.
    entries: u32,
    /// Bytes before the next entry, or before the unit entry that has it.
    bytes: usize,
    /// Entries of this unit entry before it.
    nth: usize,
}

impl TablePosition {
    /// The number of entries before it.
    #[must_use]
    pub fn entries(self) -> u32 {
        self.entries
    }
}

/// Decodes the entries of a record or footer, one by one. An error is the last item.
#[derive(Clone, Debug)]
pub struct Entries<'a> {
    /// The structure up to the end of its entries, so that errors name offsets in it.
    bytes: &'a [u8],
    /// Offset of the first entry.
    start: usize,
    unit_entries: bool,
    next: TablePosition,
    /// The blocks of the unit entry at `next`, if it has been decoded.
    unit: Vec<Entry>,
    /// The mappings just before `next`.
    run: Option<Run>,
}

impl<'a> Entries<'a> {
    /// The entries in `table`, a range of a structure with or without unit entries.
    pub(crate) fn new(bytes: &'a [u8], table: Range<usize>, unit_entries: bool) -> Self {
        Self {
            bytes: bytes.get(..table.end).unwrap_or(bytes),
            start: table.start,
            unit_entries,
            next: TablePosition::default(),
            unit: Vec::new(),
            run: None,
        }
    }

    /// The entries from a position on, which another decoder of the same bytes has reached.
    #[must_use]
    pub fn from(mut self, position: TablePosition) -> Self {
        self.next = position;
        self
    }

    /// The position of the next entry.
    #[must_use]
    pub fn position(&self) -> TablePosition {
        self.next
    }

    /// Offset of the next entry, or of the unit entry that has it.
    fn offset(&self) -> usize {
        self.start + self.next.bytes
    }

    fn take(&mut self) -> Result<Entry, FormatError> {
        let at = self.offset();
        let mut r = Reader::new(self.bytes);
        r.take(at)?;
        let is_unit = self.unit_entries && self.bytes.get(at + KIND_AT) == Some(&UNIT);
        if is_unit && self.unit.is_empty() {
            take_unit(&mut r, &mut self.unit)?;
        }
        let entry = match self.unit.get(self.next.nth) {
            Some(entry) => *entry,
            None => Entry::take(&mut r)?,
        };
        let run = self.run.filter(|_| self.next.nth == 0 && !entry.first);
        let is_apart = Mapped::of(&entry).zip(run).is_some_and(|(next, run)| run.takes(&next));
        let wrong = u64::from(self.unit_entries && is_apart);
        ensure_eq("entry of a unit apart from the one before it", at, wrong, 0)?;
        self.next.entries += 1;
        self.next.nth += 1;
        if self.next.nth >= self.unit.len() {
            let cells = if is_unit { HEAD_CELLS + self.unit.len() } else { ENTRY_CELLS };
            let first = self.unit.first().unwrap_or(&entry);
            self.run = Mapped::of(first).map(|first| Run { first, last: entry.block });
            self.next.bytes += cells * CELL_BYTES;
            self.next.nth = 0;
            self.unit.clear();
        }
        Ok(entry)
    }
}

impl Iterator for Entries<'_> {
    type Item = Result<Entry, FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.offset() >= self.bytes.len() {
            return None;
        }
        let taken = self.take();
        if taken.is_err() {
            self.next.bytes = self.bytes.len();
        }
        Some(taken)
    }
}

/// Decodes a unit entry.
fn take_unit(r: &mut Reader<'_>, unit: &mut Vec<Entry>) -> Result<(), FormatError> {
    let at = r.at();
    let (volume, first_block) = take_block(r)?;
    let (_unit, flags) = (r.u8()?, r.u8()?);
    ensure_eq("unknown flags of a unit entry", at + 7, u64::from(flags & !FLAG_FIRST), 0)?;
    let (number, page) = (r.u32()?, r.u32()?);
    let (extent, count) = (number & ((1 << EXTENT_BITS) - 1), number >> EXTENT_BITS);
    ensure_min("blocks of a unit entry", at + 11, u64::from(count), 2)?;
    ensure_max("blocks of a unit entry", at + 11, u64::from(count), UNIT_BLOCKS_MAX)?;
    ensure_max("page of a unit entry", at + 12, u64::from(page), u64::from(PAGES_MAX) - 1)?;
    for nth in 0..count {
        let at = r.at();
        let (crc, bits) = (r.u32()?, r.u32()?);
        let part = |shift: u32, width: u32| bits >> shift & ((1 << width) - 1);
        ensure_eq("reserved bits of a block", at + 4, u64::from(bits >> DIRTY_SHIFT >> 1), 0)?;
        let number = part(KIND_SHIFT, KIND_BITS);
        ensure_min("kind of a block", at + 4, u64::from(number), 1)?;
        let kind = EntryKind::from_whole_number(number as u8).expect("two bits, not zero");
        let block = first_block + u64::from(part(DISTANCE_SHIFT, DISTANCE_BITS));
        let least = unit.last().map_or(first_block, |before| before.block + 1);
        ensure_min("block of a unit entry", at + 4, block, least)?;
        let most = if nth == 0 { first_block } else { u64::MAX };
        ensure_max("first block of a unit entry", at + 4, block, most)?;
        let offset = part(0, OFFSET_BITS) * PACKED_ALIGN;
        let entry = Entry {
            volume,
            block,
            kind,
            dirty: part(DIRTY_SHIFT, 1) > 0,
            first: nth == 0 && flags & FLAG_FIRST > 0,
            offset: page * PAGE as u32 + offset,
            len: part(LEN_SHIFT, LEN_BITS) as u16,
            count: 1,
            crc,
            shared: None,
            base: None,
            stored: Some(StoreUnit { extent, page: (offset / PAGE as u32) as u8 + 1 }),
        };
        entry.check(at)?;
        unit.push(entry);
    }
    Ok(())
}
