//! The only way to read the log while serving: reads payloads of a segment, neighbors with one
//! read. A segment is not reused before its reads have ended.

use std::ops::Range;

use forebay_block::{Completion, Instant};
use smallvec::{SmallVec, smallvec};

use crate::contents::{Place, Stored};
use crate::key::Key;
use crate::log::Log;
use crate::slab::Id;

/// The recipient of payloads that are read.
#[derive(Clone, Copy, Debug)]
pub enum Reader {
    /// A client's read or a merge.
    Read(Id),
    /// A block stored against a base; part 0 is the base.
    Associate(Id, usize),
    /// A destage.
    Destage(Id),
    /// A stripe of the primary that is being filled, by its first block, since this time.
    Filling(Key, Instant),
    /// The comparison with a primary; the number is the block's index in the round.
    Compare(usize),
    /// A copy that may be stored against a similar block.
    Similar(Id),
    /// Reclaim: the footer of its segment.
    Footer,
    /// Reclaim: payloads to copy.
    Copies,
}

/// A read of a segment.
#[derive(Debug)]
pub struct SegmentRead {
    pub reader: Reader,
    /// Position of the segment.
    index: usize,
    /// The range to read, in bytes from the start of the segment.
    range: Range<u32>,
    /// The payloads in the range.
    pub items: SmallVec<[Stored; 1]>,
}

/// The rule for reading payloads together.
#[derive(Clone, Copy, Debug)]
pub enum Near {
    /// Payloads with fewer bytes than this between them.
    Bytes(u32),
    /// Payloads with at most this many bytes between their pages, up to this many bytes in total.
    Pages(u32, u32),
}

impl Near {
    fn joins(self, last: &Place, range: &Range<u32>, next: &Place) -> bool {
        match self {
            Self::Bytes(gap) => next.offset < last.offset + u32::from(last.len) + gap,
            Self::Pages(gap, most) => {
                next.offset <= range.end + gap && next.pages().end - range.start <= most
            }
        }
    }
}

impl SegmentRead {
    /// A read of the pages of one payload.
    pub fn one(reader: Reader, item: Stored) -> Self {
        let index = item.place.segment as usize;
        Self { reader, index, range: item.place.pages(), items: smallvec![item] }
    }

    /// A read of a part of a segment.
    pub fn part(reader: Reader, index: usize, range: Range<u32>) -> Self {
        Self { reader, index, range, items: SmallVec::new() }
    }

    /// A read of the next payloads, in order of their places, as long as they are near each other.
    /// `next` takes the next payload if the condition passed to it holds.
    pub fn next(
        reader: Reader,
        near: Near,
        mut next: impl FnMut(&dyn Fn(&Stored) -> bool) -> Option<Stored>,
    ) -> Option<Self> {
        let mut read = Self::one(reader, next(&|_| true)?);
        while let Some(item) = next(&|item| read.joins(near, item)) {
            read.range.end = read.range.end.max(item.place.pages().end);
            read.items.push(item);
        }
        Some(read)
    }

    fn joins(&self, near: Near, item: &Stored) -> bool {
        let last = self.items.last().expect("it has one");
        let same = item.place.segment as usize == self.index;
        same && near.joins(&last.place, &self.range, &item.place)
    }

    /// Reads of all these payloads, in the order of their places.
    pub fn all(
        reader: Reader,
        near: Near,
        mut items: Vec<Stored>,
    ) -> impl Iterator<Item = Self> + use<> {
        items.sort_unstable_by_key(|item| (item.place.segment, item.place.offset));
        let mut rest = items.into_iter().peekable();
        std::iter::from_fn(move || Self::next(reader, near, |good| rest.next_if(|item| good(item))))
    }

    /// Position of the segment, and the range in bytes from its start.
    pub fn place(&self) -> (usize, Range<u32>) {
        (self.index, self.range.clone())
    }

    /// The payload of an item, if the read succeeded.
    pub fn payload<'a>(&self, done: &'a Completion, item: &Stored) -> Option<&'a [u8]> {
        self.payload_range(done, item).map(|at| &done.buf[at])
    }

    /// The range of the payload of an item in the buffer, if the read succeeded.
    pub fn payload_range(&self, done: &Completion, item: &Stored) -> Option<Range<usize>> {
        let start = (item.place.offset - self.range.start) as usize;
        let at = start..start + usize::from(item.place.len);
        (done.result.is_ok() && at.end <= done.buf.len()).then_some(at)
    }
}

impl Log {
    /// Notes that a read of a segment has been sent. Reads of the store hold their pages instead.
    pub fn begin_read(&mut self, read: &SegmentRead) {
        if let Some(segment) = self.segments.get_mut(read.index) {
            segment.readers += 1;
        }
    }

    /// Keeps a segment's bytes, as a read in flight does.
    pub fn pin(&mut self, index: u32) {
        self.segments[index as usize].readers += 1;
    }

    /// Ends [`Log::pin`].
    pub fn unpin(&mut self, index: u32) {
        self.segments[index as usize].readers -= 1;
    }

    /// Notes that a read of a segment has ended.
    pub fn end_read(&mut self, read: &SegmentRead) {
        if let Some(segment) = self.segments.get_mut(read.index) {
            segment.readers -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::{ErrorKind, Io, IoBuf, IoTag};
    use forebay_format::{EntryKind, PAGE};

    use super::*;

    const PAGE_BYTES: u32 = PAGE as u32;

    fn item(segment: u32, offset: u32, len: u16) -> Stored {
        let (kind, crc, dirty, meta) = (EntryKind::Lz4, 0, false, 0);
        let place = Place { segment, offset, len, kind, crc, dirty, meta };
        Stored { key: Key(u64::from(offset)), place }
    }

    /// The reads of some payloads: segment, pages, and the offset of each payload.
    fn grouped(near: Near, items: &[Stored]) -> Vec<(usize, Range<u32>, Vec<u32>)> {
        let reads = SegmentRead::all(Reader::Copies, near, items.to_vec());
        let offsets =
            |read: &SegmentRead| read.items.iter().map(|item| item.place.offset).collect();
        reads.map(|read| (read.place().0, read.place().1, offsets(&read))).collect()
    }

    #[test]
    fn payloads_with_few_bytes_between_them_are_read_together() {
        let items = [item(1, 300, 100), item(1, 96, 100), item(1, 200, 96), item(2, 400, 8)];
        let pages = 0..PAGE_BYTES;
        let together = vec![96, 200, 300];
        let expected = [(1, pages.clone(), together), (2, pages.clone(), vec![400])];
        assert_eq!(grouped(Near::Bytes(8), &items), expected);
        let apart = [(1, pages.clone(), vec![96]), (1, pages.clone(), vec![200, 304])];
        let items = [item(1, 96, 96), item(1, 200, 100), item(1, 304, 8)];
        assert_eq!(grouped(Near::Bytes(8), &items), apart, "8 bytes are too many");
    }

    #[test]
    fn a_payload_that_reaches_over_a_page_is_read_with_both() {
        let at = PAGE_BYTES - 96;
        let items = [item(3, at, 200), item(3, at + 200, 50)];
        let expected = [(3, 0..2 * PAGE_BYTES, vec![at, at + 200])];
        assert_eq!(grouped(Near::Bytes(8), &items), expected);
    }

    #[test]
    fn pages_are_read_together_up_to_a_gap_and_a_length() {
        let page = |n: u32| item(1, n * PAGE_BYTES, PAGE as u16);
        let items = [page(1), page(2), page(4), page(7)];
        let near = |gap: u32, most: u32| Near::Pages(gap * PAGE_BYTES, most * PAGE_BYTES);
        let pages = |near| {
            let reads = grouped(near, &items).into_iter();
            reads.map(|(_, r, _)| (r.start / PAGE_BYTES, r.end / PAGE_BYTES)).collect::<Vec<_>>()
        };
        assert_eq!(pages(near(0, 64)), [(1, 3), (4, 5), (7, 8)]);
        assert_eq!(pages(near(1, 64)), [(1, 5), (7, 8)]);
        assert_eq!(pages(near(2, 64)), [(1, 8)]);
        assert_eq!(pages(near(2, 4)), [(1, 5), (7, 8)], "four pages at most");
        assert_eq!(pages(near(2, 1)), [(1, 2), (2, 3), (4, 5), (7, 8)]);
    }

    #[test]
    fn the_payload_of_an_item_is_cut_out_of_a_good_read_only() {
        let items = vec![item(1, PAGE_BYTES + 8, 4), item(1, PAGE_BYTES + 16, 3)];
        let mut reads = SegmentRead::all(Reader::Copies, Near::Bytes(8), items);
        let read = reads.next().expect("they are near");
        let bytes: Vec<u8> = (0..PAGE).map(|at| at as u8).collect();
        let done = |result, len: usize| {
            Io::write(IoTag(0), 0, IoBuf::copy_of(&bytes[..len])).complete(result)
        };
        let payloads = |done: &Completion| {
            let payload = |item| read.payload(done, item).map(<[u8]>::to_vec);
            read.items.iter().map(payload).collect::<Vec<_>>()
        };
        assert_eq!(
            payloads(&done(Ok(()), PAGE)),
            [Some(vec![8, 9, 10, 11]), Some(vec![16, 17, 18])]
        );
        assert_eq!(payloads(&done(Err(ErrorKind::Media.into()), PAGE)), [None, None]);
        assert_eq!(payloads(&done(Ok(()), 16)), [Some(vec![8, 9, 10, 11]), None], "too short");
    }
}
