//! The store: the part of a shard's area that is not its log. Blocks that have left the log lie
//! here for as long as they are worth it, each in the place where it was put.
//!
//! The store is divided into *extents* of a segment's length, and each extent in use into *slots*
//! of one length, 1 to [`SLOT_PAGES_MAX`] pages: its class. A slot holds a *unit*: the payloads of
//! up to [`UNIT_BLOCKS`] neighboring blocks that were moved together.
//!
//! The log says where each block of the store is. So a unit's life is an order of writes:
//!
//! 1. The unit is written into a free slot, and a flush covers it.
//! 2. Entries of the log name its blocks and places. From then on its blocks are in the store.
//! 3. Later entries of the log say that its blocks are elsewhere, or nowhere.
//! 4. When those are durable, and no read is in flight, the slot is free.
//!
//! This room owns steps 1 and 4: units in flight, and which slots are free. Which pages are in use
//! is known to [`crate::contents::Pages`], which every change of the contents updates.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use forebay_block::Instant;
use forebay_format::{EntryKind, Lsn, PAGE, StoreSlot};

use crate::contents::Pages;
use crate::key::Key;
use crate::limits::UNITS_FLUSHED;
use crate::log::builder::Expect;
use crate::slab::{Id, Slab};

/// Pages in the longest slot.
pub const SLOT_PAGES_MAX: usize = 4;
/// The blocks of a unit lie within this many consecutive blocks: the largest common database page.
/// It begins anywhere, since file systems do not align files to pages of databases.
pub const UNIT_BLOCKS: u64 = 4;
/// One slot in this many of a class is kept free, so that units do not wait.
const SLOTS_FREE: usize = 64;
/// The same as a number, at least and at most.
const SLOTS_FREE_MIN: usize = 8;
const SLOTS_FREE_MAX: usize = 1024;
/// Entries of a list of free slots or pages that one search tries. Those that are not free any more
/// are dropped, so a later search finds what this one does not.
const STALE_MAX: usize = 2048;
/// Longest time that a unit waits for others to share its flush.
const PATIENCE: Duration = Duration::from_millis(5);
/// Unused extents that units may still need soon: the device is not told of them.
const EXTENTS_READY: usize = 2;
/// Shortest time between two discards of a shard, so that they do not hold up requests.
const DISCARD_PAUSE: Duration = Duration::from_millis(10);
/// Units being written, or waiting for their flush or for room in the log.
const UNITS_MAX: usize = 256;

const _: () = assert!(UNIT_BLOCKS as usize <= SLOT_PAGES_MAX, "raw blocks fit a slot");

/// A block of a unit.
#[derive(Clone, Copy, Debug)]
pub struct UnitBlock {
    pub key: Key,
    pub kind: EntryKind,
    /// Start of the payload, in bytes from the start of its extent.
    pub offset: u32,
    pub len: u16,
    pub crc: u32,
    /// The condition under which the block still goes to the store.
    pub expect: Expect,
}

/// A unit on its way to the store.
#[derive(Debug)]
pub struct Unit {
    /// Position of the extent.
    pub segment: u32,
    /// The pages of the unit, numbered through all extents; each is held once for each block.
    pub pages: Range<u32>,
    pub blocks: Vec<UnitBlock>,
}

/// Free slots, and units in flight.
#[derive(Debug)]
pub struct Store {
    /// Pages in an extent.
    per: u32,
    /// Class of each extent, in pages of its slots; 0 if it has none.
    classes: Vec<u8>,
    /// Pages in use or freed, by extent.
    busy: Vec<u16>,
    /// Extents without a class whose old content the device may still keep. The last one is used
    /// first.
    unused: VecDeque<u32>,
    /// Extents without a class that were discarded, or never used. They are used last.
    blank: Vec<u32>,
    /// The extent that is being discarded: nothing may be written to it.
    discarding: Option<u32>,
    /// The earliest time for the next discard.
    discard_at: Instant,
    /// After a start: the free slots of this many extents, the first ones, have not been found.
    unfound: u32,
    /// First pages of slots that were free when they were added, by class. A slot may be listed
    /// twice, or be in use again: [`Store::take_slot`] checks.
    free: [Vec<u32>; SLOT_PAGES_MAX],
    /// Pages that were free in slots that were not.
    holes: Vec<u32>,
    /// Freed pages, each with the record that must be durable first.
    freeing: VecDeque<(Lsn, u32)>,
    units: Slab<Unit>,
    /// Number of units whose write is in flight.
    writing: usize,
    /// Units that are written, which a flush that begins now would cover.
    written: Vec<Id>,
    /// When the first of these was written.
    written_since: Instant,
    /// Whether more units are about to be written.
    expects_more: bool,
    /// Units that the flush in flight covers.
    flushing: Vec<Id>,
    /// Units whose blocks may be named by the log.
    ready: VecDeque<Id>,
    /// Whether slots of each class were sought since the last start.
    sought: [bool; SLOT_PAGES_MAX],
    /// Number of extents of each class.
    extents: [u32; SLOT_PAGES_MAX],
    /// Units of each class whose eviction waits in the record being built.
    leaving: [usize; SLOT_PAGES_MAX],
    /// Whether units of each class are being evicted.
    lacks: [bool; SLOT_PAGES_MAX],
    /// Whether nothing could be evicted for what is sought.
    is_full: bool,
    random: u64,
}

impl Store {
    /// An empty store of `extents` extents of `per` pages each.
    pub fn new(extents: usize, per: usize) -> Self {
        let extents = u32::try_from(extents).expect("positions have 20 bits");
        Self {
            per: u32::try_from(per).expect("an extent has at most 1024 pages"),
            classes: vec![0; extents as usize],
            busy: vec![0; extents as usize],
            unused: VecDeque::new(),
            blank: (0..extents).rev().collect(),
            discarding: None,
            discard_at: Instant::default(),
            unfound: 0,
            free: Default::default(),
            holes: Vec::new(),
            freeing: VecDeque::new(),
            units: Slab::default(),
            writing: 0,
            written: Vec::new(),
            written_since: Instant::default(),
            expects_more: false,
            flushing: Vec::new(),
            ready: VecDeque::new(),
            sought: [false; SLOT_PAGES_MAX],
            extents: [0; SLOT_PAGES_MAX],
            leaving: [0; SLOT_PAGES_MAX],
            lacks: [false; SLOT_PAGES_MAX],
            is_full: false,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Whether the shard has a store.
    pub fn exists(&self) -> bool {
        !self.classes.is_empty()
    }

    /// Notes the length of an extent's slots, as the log says.
    pub fn recover_class(&mut self, extent: u32, pages: u8) {
        self.classes[extent as usize] = pages.clamp(1, SLOT_PAGES_MAX as u8);
    }

    /// Prepares to find the free slots after a start.
    pub fn begin_rebuild(&mut self) {
        self.blank.clear();
        self.unfound = self.extents();
    }

    /// Finds the free slots of the next `most` extents: `pages` are the uses that recovery found.
    /// Returns whether no extent is left.
    pub fn rebuild(&mut self, pages: &Pages, most: u32) -> bool {
        let from = self.unfound.saturating_sub(most);
        for extent in (from..self.unfound).rev() {
            let class = std::mem::take(&mut self.classes[extent as usize]);
            let all = extent * self.per..(extent + 1) * self.per;
            let used = all.filter(|&page| !pages.are_free(page..page + 1)).count();
            self.busy[extent as usize] = used as u16;
            if used == 0 {
                self.unused.push_back(extent);
            } else {
                self.assign(extent, usize::from(class.max(1)), pages);
            }
        }
        self.unfound = from;
        from == 0
    }

    /// Gives an extent a class, and lists its free slots.
    fn assign(&mut self, extent: u32, class: usize, pages: &Pages) {
        self.classes[extent as usize] = class as u8;
        self.extents[class - 1] += 1;
        let first = extent * self.per;
        let slots = self.per / class as u32;
        let starts = (0..slots).rev().map(|slot| first + slot * class as u32);
        let free = starts.filter(|&at| pages.are_free(at..at + class as u32));
        self.free[class - 1].extend(free);
    }

    /// Number of an extent at a position after `first`, and the length of its slots.
    pub fn slot(&self, extent: u32) -> StoreSlot {
        StoreSlot { extent, pages: self.classes[extent as usize] }
    }

    /// The slot of a page: its pages, numbered through all extents. `None` for the pages at the end
    /// of an extent that are too few for a slot.
    pub fn slot_of(&self, page: u32) -> Option<Range<u32>> {
        let (extent, at) = (page / self.per, page % self.per);
        let class = u32::from(self.classes[extent as usize]);
        let start = at.checked_div(class)? * class;
        let first = extent * self.per + start;
        (start + class <= self.per).then_some(first..first + class)
    }

    /// Takes a free slot of at least `class` pages, the shortest there is. Its pages are not held
    /// yet.
    pub fn take_slot(&mut self, class: usize, pages: &Pages) -> Option<Range<u32>> {
        let class_sought = self.serving(class)?;
        self.sought[class_sought - 1] = true;
        let exact = self.pop_free(class, pages);
        if let Some(slot) = exact {
            return Some(slot);
        }
        if class == 1
            && let Some(page) = self.pop_hole(pages)
        {
            return Some(page);
        }
        if let Some(extent) = self.unused.pop_back().or_else(|| self.blank.pop()) {
            self.assign(extent, class, pages);
            return self.pop_free(class, pages);
        }
        (class + 1..=SLOT_PAGES_MAX).find_map(|longer| self.pop_free(longer, pages))
    }

    /// The class of the slots that units of `class` pages take: their own if there are any or can
    /// be, otherwise the next longer one.
    fn serving(&self, class: usize) -> Option<usize> {
        let is_there = |&longer: &usize| self.extents[longer - 1] > 0;
        match self.unused() {
            0 => (class..=SLOT_PAGES_MAX).find(is_there),
            _ => Some(class),
        }
    }

    /// The number of extents without a class that may be used.
    fn unused(&self) -> usize {
        self.unused.len() + self.blank.len()
    }

    /// Whether a unit of `class` pages can never have a slot as things are: all extents have
    /// shorter ones.
    pub fn is_too_long(&self, class: usize) -> bool {
        self.serving(class).is_none()
    }

    fn pop_free(&mut self, class: usize, pages: &Pages) -> Option<Range<u32>> {
        for _ in 0..STALE_MAX {
            let at = self.free[class - 1].pop()?;
            let slot = at..at + class as u32;
            let is_slot = self.slot_of(at) == Some(slot.clone());
            if is_slot && pages.are_free(slot.clone()) {
                return Some(slot);
            }
        }
        None
    }

    /// Takes a free page of a slot of which another page is in use.
    fn pop_hole(&mut self, pages: &Pages) -> Option<Range<u32>> {
        for _ in 0..STALE_MAX {
            let page = self.holes.pop()?;
            let in_use = self.slot_of(page).is_some_and(|slot| !pages.are_free(slot));
            if in_use && pages.are_free(page..page + 1) {
                return Some(page..page + 1);
            }
        }
        None
    }

    /// Notes that pages that were free are in use now.
    pub fn note_busy(&mut self, pages: &Range<u32>) {
        self.busy[(pages.start / self.per) as usize] += (pages.end - pages.start) as u16;
    }

    /// Notes that a page is free. An extent of free pages loses its class.
    pub fn note_free(&mut self, page: u32, pages: &Pages) {
        let extent = page / self.per;
        let busy = &mut self.busy[extent as usize];
        *busy -= 1;
        if *busy == 0 {
            let class = std::mem::take(&mut self.classes[extent as usize]);
            self.extents[usize::from(class) - 1] -= 1;
            self.unused.push_back(extent);
        } else if let Some(slot) = self.slot_of(page) {
            match pages.are_free(slot.clone()) {
                true => self.free[(slot.end - slot.start) as usize - 1].push(slot.start),
                false => self.holes.push(page),
            }
        }
    }

    /// Notes pages whose last use ended in the record `lsn`, or before it.
    pub fn note_freed(&mut self, lsn: Lsn, pages: Vec<u32>) {
        self.leaving = [0; SLOT_PAGES_MAX];
        self.freeing.extend(pages.into_iter().map(|page| (lsn, page)));
    }

    /// Takes a freed page whose record is durable.
    pub fn next_free(&mut self, durable: Lsn) -> Option<u32> {
        self.freeing.pop_front_if(|(lsn, _)| *lsn <= durable).map(|(_, page)| page)
    }

    /// The record that must be durable before all freed pages are free.
    pub fn freed_by(&self) -> Option<Lsn> {
        self.freeing.back().map(|&(lsn, _)| lsn)
    }

    /// The number of pages that will become free.
    pub fn freeing(&self) -> usize {
        self.freeing.len()
    }

    /// Pages in slots listed as free, and in unused extents: an upper limit of the free pages.
    pub fn free_pages(&self) -> u64 {
        let slots = self.free.iter().enumerate().map(|(i, list)| list.len() * (i + 1));
        let listed = self.holes.len() + slots.sum::<usize>();
        listed as u64 + self.unused() as u64 * u64::from(self.per)
    }

    /// Pages in use, or not free yet.
    pub fn used_pages(&self) -> u64 {
        self.busy.iter().map(|&busy| u64::from(busy)).sum()
    }

    /// Free slots of a class.
    pub fn free_slots(&self, class: usize) -> usize {
        self.free[class - 1].len() + self.unused() * self.per as usize / class
    }

    /// Whether nothing can be evicted for what was sought last.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Notes whether a unit could be evicted for what is sought.
    pub fn note_full(&mut self, is_full: bool) {
        self.is_full = is_full;
    }

    /// Whether slots of a class have been sought.
    pub fn is_sought(&self, class: usize) -> bool {
        self.sought[class - 1] && self.serving(class) == Some(class)
    }

    /// Number of slots of a class.
    pub fn slots(&self, class: usize) -> usize {
        self.extents[class - 1] as usize * (self.per as usize / class)
    }

    /// Number of extents.
    pub fn extents(&self) -> u32 {
        self.classes.len() as u32
    }

    /// Number of pages.
    pub fn pages(&self) -> u32 {
        self.per * self.classes.len() as u32
    }

    /// The number of slots of a class that eviction aims to have free.
    pub fn slots_wanted(&self, class: usize) -> usize {
        let slots = self.slots(class);
        let few = (slots / SLOTS_FREE).max((slots / 8).min(32));
        few.clamp(SLOTS_FREE_MIN, SLOTS_FREE_MAX)
    }

    /// Whether slots of any class that is sought are so few that eviction must not wait.
    pub fn is_short(&self) -> bool {
        let few = |class| self.slots_wanted(class) / 4;
        (1..=SLOT_PAGES_MAX)
            .any(|class| self.is_sought(class) && self.free_slots(class) < few(class))
    }

    /// Notes that the eviction of a unit of this class is in the record being built.
    pub fn note_leaving(&mut self, class: usize) {
        self.leaving[class - 1] += 1;
    }

    /// Whether eviction goes on until `few` slots of a class are free, of which `left` are left. It
    /// begins when half of them are.
    pub fn lacks_slots(&mut self, class: usize, left: usize, few: usize) -> bool {
        let lacks = &mut self.lacks[class - 1];
        *lacks = left < few && (*lacks || left < few.div_ceil(2));
        *lacks
    }

    /// Units of this class whose eviction is in the record being built.
    pub fn leaving(&self, class: usize) -> usize {
        self.leaving[class - 1]
    }

    /// A pseudo-random number.
    pub fn random(&mut self) -> u64 {
        // Xorshift (Marsaglia, Journal of Statistical Software, 2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

/// Discards of extents of which every page is free.
impl Store {
    /// The time from which an extent may be discarded. `None` if none may, or if one is being
    /// discarded.
    pub fn next_discard(&self) -> Option<Instant> {
        let may = self.discarding.is_none() && self.unused.len() > EXTENTS_READY;
        may.then_some(self.discard_at)
    }

    /// Takes the extent that would be used last, if one may be discarded now.
    pub fn begin_discard(&mut self, now: Instant) -> Option<u32> {
        self.next_discard().filter(|&at| at <= now)?;
        self.discarding = self.unused.pop_front();
        self.discarding
    }

    /// Notes that the discard has ended: the extent may be used again.
    pub fn end_discard(&mut self, now: Instant) {
        let extent = self.discarding.take().expect("one discard is in flight");
        self.discard_at = now + DISCARD_PAUSE;
        self.blank.push(extent);
    }
}

/// Units in flight.
impl Store {
    /// Whether another unit may be written now.
    pub fn takes_units(&self) -> bool {
        self.units.len() < UNITS_MAX
    }

    /// Whether a unit is on its way.
    pub fn is_moving(&self) -> bool {
        self.units.len() > 0
    }

    /// Whether a unit is being written or waits for a flush. The others wait for room in the log.
    pub fn waits_for_device(&self) -> bool {
        self.units.len() > self.ready.len()
    }

    /// Notes that a unit is being written.
    pub fn begin(&mut self, unit: Unit) -> Id {
        self.writing += 1;
        self.units.insert(unit)
    }

    /// The unit with an ID.
    pub fn unit(&self, id: Id) -> &Unit {
        self.units.get(id)
    }

    /// Notes that a unit has been written.
    pub fn end_write(&mut self, now: Instant, id: Id, is_durable: bool) {
        self.writing -= 1;
        if is_durable {
            self.ready.push_back(id);
        } else {
            if self.written.is_empty() {
                self.written_since = now;
            }
            self.written.push(id);
        }
    }

    /// Notes whether more units are about to be written.
    pub fn expect_more(&mut self, on: bool) {
        self.expects_more = on;
    }

    /// Whether enough units wait for a flush of the device, or none is coming that it could cover
    /// as well.
    pub fn wants_flush(&self, now: Instant) -> bool {
        let more = self.writing > 0 || self.expects_more;
        let few = self.written.len() < UNITS_FLUSHED;
        let patient = few && now.since(self.written_since) < PATIENCE;
        !(self.written.is_empty() || more && patient)
    }

    /// Notes that a flush begins.
    pub fn begin_flush(&mut self) {
        self.flushing.append(&mut self.written);
    }

    /// Notes that the flush has succeeded.
    pub fn end_flush(&mut self) {
        self.ready.extend(self.flushing.drain(..));
    }

    /// The first unit whose blocks may be named by the log.
    pub fn first_ready(&self) -> Option<Id> {
        self.ready.front().copied()
    }

    /// Takes the next block of a unit.
    pub fn next_block(&mut self, id: Id) -> Option<UnitBlock> {
        self.units.get_mut(id).blocks.pop()
    }

    /// Takes the first of these units.
    pub fn take_ready(&mut self) -> Option<Unit> {
        self.ready.pop_front().map(|id| self.units.remove(id))
    }

    /// Forgets the units in flight: the device failed.
    pub fn give_up(&mut self) {
        self.units = Slab::default();
        self.writing = 0;
        (self.written, self.flushing, self.ready) = Default::default();
    }
}

/// The number of pages of payloads of these lengths in one unit: uncompressed ones first, each on a
/// page of its own.
pub fn unit_pages(lens: impl Iterator<Item = usize>) -> usize {
    let (mut whole, mut packed) = (0, 0);
    for len in lens {
        match len {
            PAGE => whole += 1,
            len => packed += len.next_multiple_of(8),
        }
    }
    whole + packed.div_ceil(PAGE)
}

#[cfg(test)]
mod tests;
