//! The record being built: blocks of many clients, copies and admissions share it.
//!
//! Whole blocks go directly to their page of the final buffer. Compressed blocks are collected and
//! put after the entries or, if there are whole blocks and the compressed ones do not fit in the
//! header's page, after the last whole block.

use forebay_block::{BufPool, IoBuf};
use forebay_codec::crc32c;
use forebay_format::{
    CELL_BYTES, ENTRY_CELLS, EntryKind, Mapped, PAGE, RECORD_CELLS_MAX, RECORD_HEADER_BYTES,
    SegmentSeq, StoreUnit, TableLen, footer_bytes,
};

use crate::contents::Place;
use crate::key::Key;
use crate::slab::Id;

/// The condition under which an entry still counts when its record is closed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Expect {
    /// Always: a client's write.
    Always,
    /// The block must not be in the index: an admission.
    Absent,
    /// The block must still have this place: a copy forward.
    At(Place),
    /// The block must still have this place. It is dirty from then on, since its primary may lose
    /// it.
    Dirties(Place),
    /// Always: a client's write, stored as a delta against the version at this place.
    Over(Place),
}

impl Expect {
    /// Whether the entry is certain to be in the record.
    pub fn is_certain(self) -> bool {
        matches!(self, Self::Always | Self::Over(_))
    }

    /// Whether the entry says again what the cache has already.
    pub fn is_again(self) -> bool {
        matches!(self, Self::At(_) | Self::Dirties(_))
    }
}

/// The location of an entry's payload.
#[derive(Clone, Copy, Debug)]
pub enum Payload {
    /// The entry has no payload.
    None,
    /// This page of the record.
    Page(usize),
    /// This offset in the packed part, in bytes.
    Packed(usize),
    /// Elsewhere in the log: the payload of a block with the same bytes.
    Shared(Shared),
    /// In the store.
    Stored(Stored),
}

/// A payload in the store.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// Position of its extent.
    pub segment: u32,
    /// Bytes from the start of the extent.
    pub offset: u32,
    /// Its unit, as the entry names it.
    pub unit: StoreUnit,
    /// Whether it is new: its pages are held once until the entry is in a record.
    pub is_new: bool,
}

/// A payload that is already in the log.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// Number of its segment.
    pub seq: SegmentSeq,
    /// Position of its segment.
    pub segment: u32,
    /// Bytes from the start of the segment.
    pub offset: u32,
}

/// An entry of the record being built.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    /// The first block.
    pub key: Key,
    /// Number of blocks.
    pub count: u32,
    /// The kind of the entry.
    pub kind: EntryKind,
    /// Whether the blocks are newer than the primary.
    pub dirty: bool,
    /// Location of the payload.
    pub payload: Payload,
    /// Length of the payload, in bytes.
    pub len: u16,
    /// CRC32C of the payload.
    pub crc: u32,
    /// The condition under which the entry still counts when the record is closed.
    pub expect: Expect,
    /// The base of a similar block.
    pub against: Option<Against>,
}

/// The form of one block.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// The kind of the form.
    pub kind: EntryKind,
    /// Location of the payload.
    pub payload: Payload,
    /// Length of the payload, in bytes.
    pub len: u16,
    /// CRC32C of the payload.
    pub crc: u32,
    /// The base of a similar block.
    pub against: Option<Against>,
}

/// A payload in the log that a block is stored against.
#[derive(Clone, Copy, Debug)]
pub struct Against {
    /// Number of its segment.
    pub seq: SegmentSeq,
    /// Its place.
    pub place: Place,
}

/// The remaining room in the open segment. A record is closed before it outgrows that room, so that
/// no segment ends half empty.
#[derive(Clone, Copy, Debug)]
struct Rest {
    /// Bytes for the record and the footer.
    bytes: usize,
    /// Cells that the entries of the footer take already.
    listed: usize,
}

impl Rest {
    const ENDLESS: Self = Self { bytes: usize::MAX, listed: 0 };

    fn fits(&self, pages: usize, cells: usize) -> bool {
        pages * PAGE + footer_bytes(self.listed + cells) <= self.bytes
    }
}

/// A record being built.
#[derive(Debug)]
pub struct Builder {
    buffers: BufPool,
    pages_max: usize,
    rest: Rest,
    buf: IoBuf,
    whole: usize,
    packed: Vec<u8>,
    /// The entries so far, and their length in the record if all still count when it is closed.
    pub pending: Vec<Pending>,
    len: TableLen,
    /// Operations that wait for the record.
    pub waiters: Vec<Id>,
    /// Operations whose last block is in the record.
    pub complete: Vec<Id>,
}

impl Builder {
    /// Returns a builder of records of at most `pages_max` pages, with or without unit entries.
    pub fn new(buffers: BufPool, pages_max: usize, unit_entries: bool) -> Self {
        assert!(pages_max >= PAGES_MIN, "a record holds a whole block");
        Self {
            buffers,
            pages_max,
            rest: Rest::ENDLESS,
            buf: IoBuf::empty(),
            whole: 0,
            packed: Vec::new(),
            pending: Vec::new(),
            len: TableLen::new(unit_entries),
            waiters: Vec::new(),
            complete: Vec::new(),
        }
    }

    /// Length of the longest record, in pages.
    pub fn pages_max(&self) -> usize {
        self.pages_max
    }

    /// Whether the record holds more than copies and checkpoints.
    pub fn has_news(&self) -> bool {
        let is_copy = |item: &Pending| matches!(item.expect, Expect::At(_));
        let is_news = |item: &Pending| item.kind != EntryKind::Checkpoint && !is_copy(item);
        self.pending.iter().any(is_news)
    }

    /// Whether the record is empty.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Sets the room that the open segment has left: `bytes` for records and the footer, whose
    /// entries take `listed` cells so far. If not even one block fits, the next record begins a new
    /// segment.
    pub fn set_rest(&mut self, bytes: usize, listed: usize) {
        let rest = Rest { bytes, listed };
        self.rest = if rest.fits(PAGES_MIN, ENTRY_CELLS) { rest } else { Rest::ENDLESS };
    }

    /// Whether another entry with a payload of up to a whole block fits.
    pub fn fits_block(&self) -> bool {
        let whole = self.pages_with(self.whole + 1, self.packed.len(), 1);
        self.fits(whole.max(self.pages_with(self.whole, self.packed.len() + PAGE, 1)))
    }

    /// Whether another entry without payload fits.
    pub fn fits_bare(&self) -> bool {
        self.fits(self.pages_with(self.whole, self.packed.len(), 1))
    }

    /// Whether another entry without payload fits without making the record longer.
    pub fn has_room_in_page(&self) -> bool {
        self.fits_bare() && self.pages_with(self.whole, self.packed.len(), 1) == self.pages()
    }

    fn fits(&self, pages: usize) -> bool {
        let cells = self.cells() + ENTRY_CELLS;
        cells <= RECORD_CELLS_MAX && pages <= self.pages_max && self.rest.fits(pages, cells)
    }

    /// Length of the entries so far, in cells, if all of them still count when the record is
    /// closed.
    pub fn cells(&self) -> usize {
        self.len.cells()
    }

    /// Number of blocks that the entries so far name.
    pub fn blocks(&self) -> u64 {
        self.pending.iter().map(|item| u64::from(item.count)).sum()
    }

    /// Length of the record so far, in pages.
    pub fn pages(&self) -> usize {
        self.pages_with(self.whole, self.packed.len(), 0)
    }

    fn pages_with(&self, whole: usize, packed: usize, more_entries: usize) -> usize {
        let front = front_bytes(self.cells() + more_entries * ENTRY_CELLS) + packed;
        match is_behind_entries(whole, front) {
            true => whole + front.div_ceil(PAGE),
            false => 1 + whole + packed.div_ceil(PAGE),
        }
    }

    /// Adds an uncompressed block with its checksum; the caller adds the entry.
    pub fn push_raw(&mut self, block: &[u8], crc: u32) -> Form {
        let (kind, payload) = (EntryKind::Raw, self.push_whole(block));
        Form { kind, payload, len: block.len() as u16, crc, against: None }
    }

    /// Adds a whole block; returns its location.
    fn push_whole(&mut self, block: &[u8]) -> Payload {
        let page = 1 + self.whole;
        let end = (page + 1) * PAGE;
        if self.buf.len() < end {
            self.grow(end);
        }
        self.buf[page * PAGE..end].copy_from_slice(block);
        self.whole += 1;
        Payload::Page(page)
    }

    fn grow(&mut self, need: usize) {
        let size = if need <= 16 * PAGE { 16 * PAGE } else { (self.pages_max + 1) * PAGE };
        let mut larger = self.buffers.get(size.max(need));
        let used = self.buf.len().min(larger.len());
        larger[..used].copy_from_slice(&self.buf);
        self.buf = larger;
    }

    /// Adds the entry of a block.
    pub fn push_form(&mut self, key: Key, form: Form, dirty: bool, expect: Expect) {
        let Form { kind, payload, len, crc, against } = form;
        let count = 1;
        self.push(Pending { key, count, kind, dirty, payload, len, crc, expect, against });
    }

    fn push(&mut self, item: Pending) {
        let mapped = match item.payload {
            Payload::Stored(at) => {
                Mapped::new(item.key.volume(), item.key.block(), at.offset, at.unit)
            }
            _ => None,
        };
        self.len.push(mapped);
        self.pending.push(item);
    }

    /// Adds an entry without payload.
    pub fn push_bare(
        &mut self,
        key: Key,
        count: u32,
        kind: EntryKind,
        dirty: bool,
        expect: Expect,
    ) {
        let payload = Payload::None;
        let (len, crc, against) = (0, 0, None);
        self.push(Pending { key, count, kind, dirty, payload, len, crc, expect, against });
    }

    /// Adds the entry of a block in the store: its form is given by kind, length and checksum.
    pub fn push_stored(
        &mut self,
        key: Key,
        (kind, len, crc): (EntryKind, u16, u32),
        expect: Expect,
        at: Stored,
    ) {
        let (count, dirty, payload, against) = (1, false, Payload::Stored(at), None);
        self.push(Pending { key, count, kind, dirty, payload, len, crc, expect, against });
    }

    /// Adds an encoded payload of this kind; the caller adds the entry.
    pub fn pack(&mut self, kind: EntryKind, bytes: &[u8]) -> Form {
        let (payload, len, crc) = (self.push_packed(bytes), bytes.len() as u16, crc32c(bytes));
        Form { kind, payload, len, crc, against: None }
    }

    /// Adds an encoded payload; returns its location.
    fn push_packed(&mut self, bytes: &[u8]) -> Payload {
        let at = self.packed.len();
        self.packed.extend_from_slice(bytes);
        self.packed.resize(self.packed.len().next_multiple_of(8), 0);
        Payload::Packed(at)
    }

    /// Whether the record has an admission of one of these blocks.
    pub fn admits(&self, first: Key, count: u64) -> bool {
        let range = first.0..first.0 + count;
        self.pending.iter().any(|item| item.expect == Expect::Absent && range.contains(&item.key.0))
    }

    /// Whether an entry of the record rests on a payload in the segment at position `segment`: the
    /// payload of a base, or a shared one.
    pub fn rests_on(&self, segment: u32) -> bool {
        self.pending.iter().any(|item| {
            matches!(item.expect, Expect::Over(base) if base.segment == segment)
                || item.against.is_some_and(|base| base.place.segment == segment)
                || matches!(item.payload, Payload::Shared(old) if old.segment == segment)
        })
    }

    /// Whether the record has an entry of the block.
    pub fn has_entry_of(&self, key: Key) -> bool {
        let of = |item: &Pending| (item.key.0..item.key.0 + u64::from(item.count)).contains(&key.0);
        self.pending.iter().any(of)
    }

    /// Whether an entry of the record is a delta against a payload in the store, whose extents
    /// begin at position `first`.
    pub fn rests_on_store(&self, first: u32) -> bool {
        let on_store =
            |item: &Pending| matches!(item.expect, Expect::Over(base) if base.segment >= first);
        self.pending.iter().any(on_store)
    }

    /// Notes that `op` waits for the record; returns whether that is new.
    pub fn add_waiter(&mut self, op: Id) -> bool {
        let new = !self.waiters.contains(&op);
        if new {
            self.waiters.push(op);
        }
        new
    }

    /// Offset of the packed payloads in the finished record, in bytes.
    pub fn packed_at(&self) -> usize {
        let front = front_bytes(self.cells());
        let behind = is_behind_entries(self.whole, front + self.packed.len());
        if behind { front } else { (1 + self.whole) * PAGE }
    }

    /// Takes the finished record's buffer, without header and entries, and empties the builder's
    /// payloads. Bytes that no payload covers are zero.
    pub fn take(&mut self, pages: usize, packed_at: usize) -> IoBuf {
        let len = pages * PAGE;
        if self.buf.len() < len {
            self.grow(len);
        }
        let mut buf = std::mem::take(&mut self.buf);
        buf.set_len(len);
        buf[..PAGE].fill(0);
        buf[(1 + self.whole) * PAGE..].fill(0);
        buf[packed_at..packed_at + self.packed.len()].copy_from_slice(&self.packed);
        self.whole = 0;
        self.packed.clear();
        buf
    }

    /// Forgets the entries, which have been taken into a record.
    pub fn clear_entries(&mut self) {
        self.pending.clear();
        self.len.clear();
    }

    /// Discards the record.
    pub fn clear(&mut self) {
        self.whole = 0;
        self.packed.clear();
        self.clear_entries();
        self.waiters.clear();
        self.complete.clear();
    }
}

/// Length of a record of one incompressible block, in pages.
const PAGES_MIN: usize = 2;

/// Length of a record's header and of entries that take this many cells.
fn front_bytes(cells: usize) -> usize {
    RECORD_HEADER_BYTES + cells * CELL_BYTES
}

/// Whether packed payloads directly follow the entries; `front` is the length of header, entries
/// and packed payloads, in bytes.
fn is_behind_entries(whole: usize, front: usize) -> bool {
    whole == 0 || front <= PAGE
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_block::{Arena, VolumeId};

    const LEN: usize = 1500;

    /// A builder with a block for each number: an uncompressed one for 0, else a payload of [`LEN`]
    /// bytes.
    fn with(blocks: &[u8]) -> Builder {
        let mut builder = Builder::new(BufPool::new(Arena::new(1 << 20)), 64, true);
        for (at, &n) in blocks.iter().enumerate() {
            let form = match n {
                0 => builder.push_raw(&[9; PAGE], 0),
                n => builder.pack(EntryKind::Zstd, &[n; LEN]),
            };
            builder.push_form(Key::new(VolumeId(0), at as u64), form, true, Expect::Always);
        }
        builder
    }

    /// The number of pages of the finished record, and the ranges of its nonzero bytes.
    fn finished(blocks: &[u8]) -> (usize, Vec<std::ops::Range<usize>>) {
        let mut builder = with(blocks);
        let (pages, packed_at) = (builder.pages(), builder.packed_at());
        let buf = builder.take(pages, packed_at);
        assert_eq!(buf.len(), pages * PAGE);
        let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
        for at in (0..buf.len()).filter(|&at| buf[at] != 0) {
            match runs.last_mut() {
                Some(run) if run.end == at && buf[at - 1] == buf[at] => run.end = at + 1,
                _ => runs.push(at..at + 1),
            }
        }
        (pages, runs)
    }

    #[test]
    fn packed_payloads_begin_behind_the_entries() {
        let front = front_bytes(4 * ENTRY_CELLS);
        let step = LEN.next_multiple_of(8);
        let expected = (0..4).map(|i| front + i * step..front + i * step + LEN);
        assert_eq!(finished(&[1, 2, 3, 4]), (2, expected.collect()));
        assert_eq!(finished(&[1, 2]).0, 1);
    }

    #[test]
    fn whole_blocks_lie_on_pages_and_longer_packed_payloads_behind_them() {
        let (pages, runs) = finished(&[0, 1, 2]);
        let front = front_bytes(3 * ENTRY_CELLS);
        assert_eq!((pages, runs[0].start, runs.last().unwrap()), (2, front, &(PAGE..2 * PAGE)));
        let (pages, runs) = finished(&[0, 1, 2, 3]);
        assert_eq!((pages, &runs[0]), (4, &(PAGE..2 * PAGE)));
        assert_eq!(runs[1], 2 * PAGE..2 * PAGE + LEN);
    }

    #[test]
    fn a_record_ends_where_its_segment_does() {
        let mut builder = with(&[]);
        // Header, two blocks, and one page of footer.
        builder.set_rest(4 * PAGE, 3);
        let mut fitting = 0;
        while builder.fits_block() {
            let form = builder.push_raw(&[7; PAGE], 0);
            builder.push_form(Key(fitting), form, true, Expect::Always);
            fitting += 1;
        }
        assert_eq!((fitting, builder.pages()), (2, 3));
        // Not even one block fits: the record begins the next segment, and may be as long as any
        // other.
        let mut builder = with(&[]);
        builder.set_rest(2 * PAGE, 3);
        assert!(builder.fits_block());
        builder.set_rest(4 * PAGE, 4 * PAGE / CELL_BYTES);
        assert!(builder.fits_block(), "the footer takes the rest");
    }
}
