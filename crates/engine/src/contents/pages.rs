//! The pages of the store: how many payloads, reads and destages need each of them.
//!
//! A page that nothing needs any more is not free at once: the record that ended its last use must
//! be durable before the page is written again. Otherwise a crash could bring back a block whose
//! payload has been overwritten. Until then the page is *freed*, which counts as a use.
//!
//! While old entries of the log are loaded, a page is freed by each block that leaves it, although
//! another one is there. That one may leave earlier, as a durable entry says, or by a later record,
//! which frees the page once more.

use std::collections::BTreeMap;
use std::ops::Range;

use forebay_block::prefetch;
use forebay_format::PAGE;
use forebay_policy::{LastTouch, Touch};

use crate::contents::Place;

/// Pages of the longest unit.
pub const UNIT_PAGES_MAX: usize = 4;

/// Uses of a page from which the exact number is in a table of its own.
const MANY: u8 = 31;
/// The bit of [`OfPage::uses`] for a page in which a unit begins.
const BEGINS: u8 = MANY + 1;
/// The bits of [`OfPage::uses`] for the kind of a request.
const TOUCH_SHIFT: u32 = 6;

/// What is known of a page. Whoever needs one part mostly needs the other, so they are together.
#[derive(Clone, Copy, Debug, Default)]
struct OfPage {
    /// The number of uses, [`MANY`] if it is in `many`; above it whether a unit [`BEGINS`] here,
    /// and the kind of the last request for it.
    uses: u8,
    /// The policy's stamp of that request.
    stamp: u8,
}

impl OfPage {
    fn uses(self) -> u8 {
        self.uses & MANY
    }

    fn set_uses(&mut self, uses: u8) {
        self.uses = self.uses & !MANY | uses;
    }

    fn is_free(self) -> bool {
        self.uses() == 0
    }

    fn begins(self) -> bool {
        self.uses & BEGINS > 0
    }
}

/// Bits of a word of [`Pages::free`].
const WORD: u32 = u64::BITS;

const _: () = assert!(BEGINS & MANY == 0 && BEGINS < 1 << TOUCH_SHIFT);

/// The uses of each page of the store.
#[derive(Debug, Default)]
pub struct Pages {
    /// Position of the first extent; the segments of the log come before it.
    first: u32,
    /// Pages in an extent.
    per: u32,
    of_page: Vec<OfPage>,
    /// A bit for each page that nothing needs, so that runs of them are found quickly.
    free: Vec<u64>,
    many: BTreeMap<u32, u32>,
    /// Pages whose last use ended in the record being built, or earlier in a way that no record
    /// says.
    freed: Vec<u32>,
    /// Whether pages that are freed may be in use.
    is_loading: bool,
    /// How many times pages were freed since that began, and are not free yet.
    freed_in_use: BTreeMap<u32, u32>,
}

impl Pages {
    /// Unused pages of `extents` extents of `per` pages each; the first is at position `first`.
    pub fn new(first: usize, extents: usize, per: usize) -> Self {
        let to_u32 = |n: usize| u32::try_from(n).expect("positions have 20 bits, offsets 22");
        Self {
            first: to_u32(first),
            per: to_u32(per),
            of_page: vec![OfPage::default(); extents * per],
            free: vec![u64::MAX; (extents * per).div_ceil(WORD as usize)],
            many: BTreeMap::new(),
            freed: Vec::new(),
            is_loading: false,
            freed_in_use: BTreeMap::new(),
        }
    }

    /// The number of pages.
    pub fn len(&self) -> u32 {
        self.of_page.len() as u32
    }

    /// Whether a place is in the store.
    pub fn has(&self, place: &Place) -> bool {
        place.segment >= self.first && !self.of_page.is_empty()
    }

    /// The pages that a range of bytes of an extent covers, numbered through all extents.
    pub fn covered(&self, segment: u32, bytes: Range<u32>) -> Range<u32> {
        let page = PAGE as u32;
        let from = (segment - self.first) * self.per;
        from + bytes.start / page..from + bytes.end.div_ceil(page)
    }

    /// The pages of a payload in the store.
    pub fn of(&self, place: &Place) -> Range<u32> {
        self.covered(place.segment, place.offset..place.offset + u32::from(place.len))
    }

    /// Position of the extent of a page, and the page's offset in it, in bytes.
    pub fn place(&self, page: u32) -> (u32, u32) {
        (self.first + page / self.per, page % self.per * PAGE as u32)
    }

    /// Prefetches the uses of a place's first page, and the stamp there, if it is in the store.
    pub fn warm(&self, place: &Place) {
        if self.has(place) {
            prefetch(&self.of_page[self.of(place).start as usize]);
        }
    }

    /// The extent of a page: its pages.
    fn extent_of(&self, page: u32) -> Range<u32> {
        let first = page / self.per * self.per;
        first..first + self.per
    }

    fn is_free(&self, page: u32) -> bool {
        self.free[(page / WORD) as usize] >> (page % WORD) & 1 > 0
    }

    /// The first page from `pages.start` on that is free, or is in use; `pages.end` if none is.
    fn next(&self, pages: Range<u32>, is_free: bool) -> u32 {
        let mut at = pages.start;
        while at < pages.end {
            let free = self.free[(at / WORD) as usize];
            let wanted = if is_free { free } else { !free } >> (at % WORD);
            if wanted > 0 {
                return pages.end.min(at + wanted.trailing_zeros());
            }
            at = (at / WORD + 1) * WORD;
        }
        pages.end
    }

    /// The pages that would be free together if these pages of one extent were.
    pub fn free_with(&self, pages: &Range<u32>) -> Range<u32> {
        let extent = self.extent_of(pages.start);
        let before = (extent.start..pages.start).rev().take_while(|&page| self.is_free(page));
        let start = pages.start - before.count() as u32;
        start..self.next(pages.end..extent.end, false)
    }

    /// The longest ranges of free pages of an extent.
    pub fn free_runs(&self, extent: u32) -> impl Iterator<Item = Range<u32>> {
        let (mut at, end) = (extent * self.per, (extent + 1) * self.per);
        std::iter::from_fn(move || {
            let start = self.next(at..end, true);
            at = self.next(start..end, false);
            (start < end).then_some(start..at)
        })
    }

    /// Notes that a unit begins at a page.
    pub fn begin_unit(&mut self, page: u32) {
        self.of_page[page as usize].uses |= BEGINS;
    }

    /// The pages of the unit of a page in use.
    pub fn unit(&self, page: u32) -> Range<u32> {
        let extent = self.extent_of(page);
        let of_page = |page: u32| self.of_page[page as usize];
        let longest = UNIT_PAGES_MAX as u32;
        let from = extent.start.max((page + 1).saturating_sub(longest));
        let mut used = (from..=page).rev().take_while(|&page| !of_page(page).is_free());
        let start = used.find(|&page| of_page(page).begins()).unwrap_or(page);
        let most = extent.end.min(start + longest);
        let is_other = |&page: &u32| of_page(page).is_free() || of_page(page).begins();
        start..(page + 1..most).find(is_other).unwrap_or(most)
    }

    /// The pages of the unit of a place in the store.
    pub fn unit_of(&self, place: &Place) -> Range<u32> {
        self.unit(self.of(place).start)
    }

    /// Notes for recovery that the unit of a page has `before` pages before it.
    pub fn recover_unit(&mut self, page: u32, before: u32) {
        let most = (page % self.per).min(UNIT_PAGES_MAX as u32 - 1);
        let start = page - before.min(most);
        (start..=page).for_each(|page| self.of_page[page as usize].uses &= !BEGINS);
        self.begin_unit(start);
    }

    /// Completes for recovery the knowledge where the units of an extent begin.
    pub fn recover_units(&mut self, extent: u32) {
        let all = extent * self.per..(extent + 1) * self.per;
        let mut len = 0;
        for of_page in &mut self.of_page[all.start as usize..all.end as usize] {
            if of_page.is_free() {
                (*of_page, len) = (OfPage::default(), 0);
                continue;
            }
            if of_page.begins() || len == UNIT_PAGES_MAX {
                len = 0;
            }
            if len == 0 {
                of_page.uses |= BEGINS;
            }
            len += 1;
        }
    }

    /// Counts a use of each page.
    pub fn hold(&mut self, pages: Range<u32>) {
        for page in pages {
            let of_page = &mut self.of_page[page as usize];
            match of_page.uses() {
                MANY => *self.many.get_mut(&page).expect("it has many uses") += 1,
                most if most == MANY - 1 => {
                    of_page.set_uses(MANY);
                    self.many.insert(page, u32::from(MANY));
                }
                uses => {
                    of_page.set_uses(uses + 1);
                    if uses == 0 {
                        self.free[(page / WORD) as usize] &= !(1 << (page % WORD));
                    }
                }
            }
        }
    }

    /// Ends a use of each page.
    pub fn release(&mut self, pages: Range<u32>) {
        for page in pages {
            match self.of_page[page as usize].uses() {
                1 => self.set_freed(page),
                _ => _ = self.end_use(page),
            }
        }
    }

    /// Lets a use count as freed.
    fn set_freed(&mut self, page: u32) {
        self.freed.push(page);
        if self.is_loading {
            *self.freed_in_use.entry(page).or_default() += 1;
        } else if let Some(times) = self.freed_in_use.get_mut(&page) {
            *times += 1;
        }
    }

    /// Notes whether old entries of the log are being loaded, so that pages that are freed may be
    /// in use.
    pub fn set_loading(&mut self, on: bool) {
        self.is_loading = on;
    }

    /// Counts a use of each page of a payload, if it is in the store.
    pub fn hold_place(&mut self, place: &Place) {
        if self.has(place) {
            self.hold(self.of(place));
        }
    }

    /// Ends [`Pages::hold_place`].
    pub fn release_place(&mut self, place: &Place) {
        if self.has(place) {
            self.release(self.of(place));
        }
    }

    /// Ends [`Pages::hold_place`] of a block that the record being built takes from there. As long
    /// as other uses may end before that record is durable, the page counts as freed although this
    /// use was not the last.
    pub fn leave_place(&mut self, place: &Place) {
        if !self.has(place) {
            return;
        }
        for page in self.of(place) {
            match self.is_loading || self.freed_in_use.contains_key(&page) {
                true => self.set_freed(page),
                false => self.release(page..page + 1),
            }
        }
    }

    /// Ends [`Pages::hold_place`] where a durable record says so.
    pub fn end_place(&mut self, place: &Place) {
        if self.has(place) {
            self.of(place).for_each(|page| _ = self.end_use(page));
        }
    }

    /// Lets the pages of a place that was found in the log count as freed: the record that ended
    /// the use may not be durable.
    pub fn free_later(&mut self, place: &Place) {
        if self.has(place) {
            self.hold(self.of(place));
            self.of(place).for_each(|page| self.set_freed(page));
        }
    }

    /// Ends a use of a page; returns whether it was the last.
    fn end_use(&mut self, page: u32) -> bool {
        let of_page = &mut self.of_page[page as usize];
        let uses = of_page.uses();
        if uses == MANY {
            let exact = self.many.get_mut(&page).expect("it has many uses");
            *exact -= 1;
            if *exact < u32::from(MANY) {
                of_page.set_uses(MANY - 1);
                self.many.remove(&page);
            }
            return false;
        }
        of_page.set_uses(uses - 1);
        if uses == 1 {
            self.free[(page / WORD) as usize] |= 1 << (page % WORD);
        }
        uses == 1
    }

    /// The last request for the blocks of the unit that begins at a page.
    pub fn last(&self, page: u32) -> LastTouch {
        let OfPage { uses, stamp } = self.of_page[page as usize];
        LastTouch { stamp, touch: Touch::from_bits(uses >> TOUCH_SHIFT) }
    }

    /// Sets the last request for the blocks of the unit that begins at a page.
    pub fn set_last(&mut self, page: u32, last: LastTouch) {
        let of_page = &mut self.of_page[page as usize];
        of_page.stamp = last.stamp;
        of_page.uses = of_page.uses & (MANY | BEGINS) | (last.touch as u8) << TOUCH_SHIFT;
    }

    /// Takes the pages freed since the last call.
    pub fn take_freed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.freed)
    }

    /// The number of pages freed since the last [`Pages::take_freed`].
    pub fn freed(&self) -> usize {
        self.freed.len()
    }

    /// Makes a freed page free, as the record that ended its last use is durable; returns false if
    /// it has been put to use again.
    pub fn end_freed(&mut self, page: u32) -> bool {
        if let Some(times) = self.freed_in_use.get_mut(&page) {
            *times -= 1;
            if *times == 0 {
                self.freed_in_use.remove(&page);
            }
        }
        let unit = self.unit(page);
        let is_free = self.end_use(page);
        if is_free {
            if page + 1 < unit.end {
                // The rest is a unit of its own now.
                self.begin_unit(page + 1);
                self.set_last(page + 1, self.last(unit.start));
            }
            self.of_page[page as usize] = OfPage::default();
        }
        is_free
    }

    /// The number of uses of a page.
    pub fn uses(&self, page: u32) -> u32 {
        match self.of_page[page as usize].uses() {
            MANY => self.many[&page],
            uses => u32::from(uses),
        }
    }
}
