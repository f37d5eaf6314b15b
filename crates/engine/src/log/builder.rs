//! The record being put together: blocks of many clients, copies and admissions share it.
//!
//! Whole blocks go straight to their page of the final buffer; compressed ones are collected and
//! put behind the entries, or behind the last whole block if there is one and they do not fit the
//! header's page.

use forebay_block::{BufPool, IoBuf};
use forebay_codec::crc32c;
use forebay_format::{
    ENTRY_BYTES, EntryKind, PAGE, RECORD_ENTRIES_MAX, RECORD_HEADER_BYTES, SegmentSeq, footer_bytes,
};

use crate::contents::Place;
use crate::key::Key;
use crate::slab::Id;

/// Under which condition an entry still counts when its record is closed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Expect {
    /// Always: a client's write.
    Always,
    /// The block is not in the index: an admission.
    Absent,
    /// The block still lies there: a copy forward.
    At(Place),
    /// Always: a client's write, as a delta against the version there.
    Over(Place),
}

impl Expect {
    /// Whether the entry is sure to be in the record.
    pub fn is_certain(self) -> bool {
        matches!(self, Self::Always | Self::Over(_))
    }
}

/// Where an entry's payload is in the builder.
#[derive(Clone, Copy, Debug)]
pub enum Payload {
    /// There is none.
    None,
    /// That page of the record.
    Page(usize),
    /// So far into the packed part.
    Packed(usize),
    /// Elsewhere in the log: that of a block with the same bytes.
    Shared(Shared),
}

/// A payload that is in the log already.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// The segment it lies in, by number.
    pub seq: SegmentSeq,
    /// The same by position.
    pub segment: u32,
    /// Bytes from the segment's start.
    pub offset: u32,
}

/// An entry to be.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    /// The first block.
    pub key: Key,
    /// How many blocks.
    pub count: u32,
    /// What it says of them.
    pub kind: EntryKind,
    /// The primary does not have it.
    pub dirty: bool,
    /// Where the bytes are.
    pub payload: Payload,
    /// Length of the payload, in bytes.
    pub len: u16,
    /// CRC32C of the payload.
    pub crc: u32,
    /// The condition under which the entry still counts when the record is closed.
    pub expect: Expect,
    /// What a similar block is stored against.
    pub against: Option<Against>,
}

/// How one block is stored.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// How its payload is to be read.
    pub kind: EntryKind,
    /// Where the bytes are.
    pub payload: Payload,
    /// Length of the payload, in bytes.
    pub len: u16,
    /// CRC32C of the payload.
    pub crc: u32,
    /// What a similar block is stored against.
    pub against: Option<Against>,
}

/// A payload in the log that a block is stored against.
#[derive(Clone, Copy, Debug)]
pub struct Against {
    /// The segment it lies in, by number.
    pub seq: SegmentSeq,
    /// Where it lies.
    pub place: Place,
}

/// What is left of the open segment: a record that would not fit is closed before it gets too long,
/// so that no segment ends half empty.
#[derive(Clone, Copy, Debug)]
struct Rest {
    /// For the record and the footer.
    bytes: usize,
    /// Entries that the footer has already.
    listed: usize,
}

impl Rest {
    const ENDLESS: Self = Self { bytes: usize::MAX, listed: 0 };

    fn fits(&self, pages: usize, entries: usize) -> bool {
        pages * PAGE + footer_bytes(self.listed + entries) <= self.bytes
    }
}

/// A record being put together.
#[derive(Debug)]
pub struct Builder {
    buffers: BufPool,
    pages_max: usize,
    rest: Rest,
    buf: IoBuf,
    whole: usize,
    packed: Vec<u8>,
    /// Entries so far.
    pub pending: Vec<Pending>,
    /// Operations that wait for the record.
    pub waiters: Vec<Id>,
    /// Operations whose last block is in it.
    pub complete: Vec<Id>,
}

impl Builder {
    /// A builder of records of at most `pages_max` pages.
    pub fn new(buffers: BufPool, pages_max: usize) -> Self {
        assert!(pages_max >= PAGES_MIN, "a record holds a whole block");
        Self {
            buffers,
            pages_max,
            rest: Rest::ENDLESS,
            buf: IoBuf::empty(),
            whole: 0,
            packed: Vec::new(),
            pending: Vec::new(),
            waiters: Vec::new(),
            complete: Vec::new(),
        }
    }

    /// Pages of the longest record.
    pub fn pages_max(&self) -> usize {
        self.pages_max
    }

    /// Whether it has more than copies and checkpoints.
    pub fn has_news(&self) -> bool {
        let is_news = |item: &Pending| {
            item.kind != EntryKind::Checkpoint && !matches!(item.expect, Expect::At(_))
        };
        self.pending.iter().any(is_news)
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// The open segment has `bytes` left for records and its footer, which has `listed` entries.
    /// Where not even one block fits, the next record begins a segment.
    pub fn set_rest(&mut self, bytes: usize, listed: usize) {
        let rest = Rest { bytes, listed };
        self.rest = if rest.fits(PAGES_MIN, 1) { rest } else { Rest::ENDLESS };
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

    fn fits(&self, pages: usize) -> bool {
        let entries = self.pending.len() + 1;
        entries <= RECORD_ENTRIES_MAX && pages <= self.pages_max && self.rest.fits(pages, entries)
    }

    /// Pages of the record as it stands.
    pub fn pages(&self) -> usize {
        self.pages_with(self.whole, self.packed.len(), 0)
    }

    fn pages_with(&self, whole: usize, packed: usize, more_entries: usize) -> usize {
        let front = front_bytes(self.pending.len() + more_entries) + packed;
        match is_behind_entries(whole, front) {
            true => whole + front.div_ceil(PAGE),
            false => 1 + whole + packed.div_ceil(PAGE),
        }
    }

    /// Adds a block as it is, with its checksum, without an entry.
    pub fn push_raw(&mut self, block: &[u8], crc: u32) -> Form {
        let (kind, payload) = (EntryKind::Raw, self.push_whole(block));
        Form { kind, payload, len: block.len() as u16, crc, against: None }
    }

    /// Adds a whole block; returns its payload.
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
        self.pending.push(Pending { key, count, kind, dirty, payload, len, crc, expect, against });
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
        self.pending.push(Pending { key, count, kind, dirty, payload, len, crc, expect, against });
    }

    /// Adds a payload, encoded so, without an entry.
    pub fn pack(&mut self, kind: EntryKind, bytes: &[u8]) -> Form {
        let (payload, len, crc) = (self.push_packed(bytes), bytes.len() as u16, crc32c(bytes));
        Form { kind, payload, len, crc, against: None }
    }

    /// Adds an encoded payload; returns it.
    fn push_packed(&mut self, bytes: &[u8]) -> Payload {
        let at = self.packed.len();
        self.packed.extend_from_slice(bytes);
        self.packed.resize(self.packed.len().next_multiple_of(8), 0);
        Payload::Packed(at)
    }

    /// Whether an admission of one of the blocks is in it.
    pub fn admits(&self, first: Key, count: u64) -> bool {
        let range = first.0..first.0 + count;
        self.pending.iter().any(|item| item.expect == Expect::Absent && range.contains(&item.key.0))
    }

    /// Whether an entry that may not count says something of the block.
    pub fn may_change(&self, key: Key) -> bool {
        let of = |item: &Pending| (item.key.0..item.key.0 + u64::from(item.count)).contains(&key.0);
        self.pending.iter().any(|item| !item.expect.is_certain() && of(item))
    }

    /// Whether an entry in it rests on a payload in the segment at that position: that of a delta's
    /// base, or one that is shared.
    pub fn rests_on(&self, segment: u32) -> bool {
        self.pending.iter().any(|item| {
            matches!(item.expect, Expect::Over(base) if base.segment == segment)
                || item.against.is_some_and(|base| base.place.segment == segment)
                || matches!(item.payload, Payload::Shared(old) if old.segment == segment)
        })
    }

    /// Notes that `op` waits for the record; says whether it did not yet.
    pub fn add_waiter(&mut self, op: Id) -> bool {
        let new = !self.waiters.contains(&op);
        if new {
            self.waiters.push(op);
        }
        new
    }

    /// Where packed payloads start in the finished record.
    pub fn packed_at(&self) -> usize {
        let front = front_bytes(self.pending.len());
        let behind = is_behind_entries(self.whole, front + self.packed.len());
        if behind { front } else { (1 + self.whole) * PAGE }
    }

    /// The finished record's buffer, without header and entries, and an empty builder. Bytes that
    /// no payload covers are zero.
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

    /// Throws away what was collected.
    pub fn clear(&mut self) {
        self.whole = 0;
        self.packed.clear();
        self.pending.clear();
        self.waiters.clear();
        self.complete.clear();
    }
}

/// Pages of a record of one block that does not compress.
const PAGES_MIN: usize = 2;

fn front_bytes(entries: usize) -> usize {
    (RECORD_HEADER_BYTES + entries * ENTRY_BYTES).next_multiple_of(8)
}

/// Whether packed payloads lie right behind the entries, with which they take `front` bytes.
fn is_behind_entries(whole: usize, front: usize) -> bool {
    whole == 0 || front <= PAGE
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_block::{Arena, VolumeId};

    const LEN: usize = 1500;

    /// A builder with a block for each number: one as it is for 0, else a payload of [`LEN`] bytes.
    fn with(blocks: &[u8]) -> Builder {
        let mut builder = Builder::new(BufPool::new(Arena::new(1 << 20)), 64);
        for (at, &n) in blocks.iter().enumerate() {
            let form = match n {
                0 => builder.push_raw(&[9; PAGE], 0),
                n => builder.pack(EntryKind::Zstd, &[n; LEN]),
            };
            builder.push_form(Key::new(VolumeId(0), at as u64), form, true, Expect::Always);
        }
        builder
    }

    /// The pages of the finished record, and where its bytes other than zero are.
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
        let front = front_bytes(4);
        let step = LEN.next_multiple_of(8);
        let expected = (0..4).map(|i| front + i * step..front + i * step + LEN);
        assert_eq!(finished(&[1, 2, 3, 4]), (2, expected.collect()));
        assert_eq!(finished(&[1, 2]).0, 1);
    }

    #[test]
    fn whole_blocks_lie_on_pages_and_longer_packed_payloads_behind_them() {
        let (pages, runs) = finished(&[0, 1, 2]);
        let front = front_bytes(3);
        assert_eq!((pages, runs[0].start, runs.last().unwrap()), (2, front, &(PAGE..2 * PAGE)));
        let (pages, runs) = finished(&[0, 1, 2, 3]);
        assert_eq!((pages, &runs[0]), (4, &(PAGE..2 * PAGE)));
        assert_eq!(runs[1], 2 * PAGE..2 * PAGE + LEN);
    }

    #[test]
    fn a_record_ends_where_its_segment_does() {
        let mut builder = with(&[]);
        // Header, two blocks, and a page of footer.
        builder.set_rest(4 * PAGE, 3);
        let mut fitting = 0;
        while builder.fits_block() {
            let form = builder.push_raw(&[7; PAGE], 0);
            builder.push_form(Key(fitting), form, true, Expect::Always);
            fitting += 1;
        }
        assert_eq!((fitting, builder.pages()), (2, 3));
        // Not even one fits: the record begins the next segment, and is as long as any.
        let mut builder = with(&[]);
        builder.set_rest(2 * PAGE, 3);
        assert!(builder.fits_block());
        builder.set_rest(4 * PAGE, 4 * PAGE / ENTRY_BYTES);
        assert!(builder.fits_block(), "the footer takes the rest");
    }
}
