//! The only way to read the log while serving: payloads of a segment, neighbors in one go. A
//! segment is not used again before its reads have ended.

use std::ops::Range;

use forebay_block::Completion;

use crate::contents::Place;
use crate::contents::Stored;
use crate::log::Log;
use crate::slab::Id;

/// For whom payloads are read.
#[derive(Clone, Copy, Debug)]
pub enum Reader {
    /// A read.
    Read(Id),
    /// A block stored against a base; part 0 is the base.
    Associate(Id, usize),
    /// A destage.
    Destage(Id),
    /// The comparison with a primary, by the block's number in the round.
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
    /// The segment's position.
    index: usize,
    /// In bytes from the segment's start.
    range: Range<u32>,
    /// The payloads in it.
    pub items: Vec<Stored>,
}

/// Which payloads are read together.
#[derive(Clone, Copy, Debug)]
pub enum Near {
    /// Those with fewer bytes than this between them.
    Bytes(u32),
    /// Those with at most this many bytes between their pages, up to this many in all.
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
        Self { reader, index, range: item.place.pages(), items: vec![item] }
    }

    /// A read of a part of a segment.
    pub fn part(reader: Reader, index: usize, range: Range<u32>) -> Self {
        Self { reader, index, range, items: Vec::new() }
    }

    /// A read of the next payloads, in the order of their places, as far as they are near each
    /// other; `next` takes the following one if it has a payload and its place is good.
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

    /// The segment's position, and the bytes from its start.
    pub fn place(&self) -> (usize, Range<u32>) {
        (self.index, self.range.clone())
    }

    /// The payload of an item, if the read was good.
    pub fn payload<'a>(&self, done: &'a Completion, item: &Stored) -> Option<&'a [u8]> {
        let start = (item.place.offset - self.range.start) as usize;
        let payload = done.buf.get(start..start + usize::from(item.place.len));
        payload.filter(|_| done.result.is_ok())
    }
}

impl Log {
    /// A read of a segment is on its way.
    pub fn begin_read(&mut self, read: &SegmentRead) {
        self.segments[read.index].readers += 1;
    }

    /// It has ended.
    pub fn end_read(&mut self, read: &SegmentRead) {
        self.segments[read.index].readers -= 1;
    }
}
