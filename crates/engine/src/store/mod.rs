//! The store: the part of a shard's area that is not its log. Blocks that have left the log lie
//! here for as long as they are worth it, each in the place where it was put.
//!
//! The store is divided into *extents* of a segment's length. A *unit* takes 1 to
//! [`UNIT_PAGES_MAX`] pages of an extent: the payloads of up to [`UNIT_BLOCKS`] neighboring blocks
//! that were moved together. A *run* is as many free pages of an extent as follow each other. A
//! unit goes into a run of its own length if there is one near.
//!
//! The log says where each block of the store is. So a unit's life is an order of writes:
//!
//! 1. The unit is written into free pages, and a flush covers it.
//! 2. Entries of the log name its blocks and places. From then on its blocks are in the store.
//! 3. Later entries of the log say that its blocks are elsewhere, or nowhere.
//! 4. When those are durable, and no read is in flight, the pages are free.
//!
//! Missed blocks that come from RAM are in the index after their write already, and step 1's flush
//! may take its time: after a crash they are not cached. Until the log names them, nothing may rest
//! on them.
//!
//! This room owns steps 1 and 4: units in flight, and where runs are. Which pages are in use is
//! known to [`crate::contents::Pages`], which every change of the contents updates.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use forebay_block::{Instant, VolumeId};
use forebay_format::{EntryKind, Lsn, PAGE};

use crate::contents::{Pages, UNIT_PAGES_MAX};
use crate::key::{Key, KeyMap};
use crate::limits::{UNITS_FLUSHED, step};
use crate::log::builder::Expect;
use crate::slab::{Id, Slab};

/// The blocks of a unit lie within this many consecutive blocks: the largest common database page.
/// It begins anywhere, since file systems do not align files to pages of databases.
pub const UNIT_BLOCKS: u64 = 4;
/// Units of each length for which room is kept free, so that none waits: as many as this part of
/// the store has.
const FREE_ONE_IN: u64 = 64;
/// The same as a number, at least and at most.
const FREE_MIN: u64 = 8;
const FREE_MAX: u64 = 1024;
/// Longer runs that a search passes over, at most, to find one of a unit's length.
const LONGER_MAX: u32 = 3;
/// Extents that it looks at for that, at most: most of a store that is being filled has none.
const LOOKED_AT: usize = step(256);
/// While more than one page in this many is free, what is evicted must lengthen a run enough.
const SCATTERED: u64 = 16;
/// Longest time that a unit that is moved waits for others to share its flush.
const PATIENCE: Duration = Duration::from_millis(5);
/// The same for a unit that is admitted.
const ADMITTED_PATIENCE: Duration = Duration::from_secs(1);
/// Unused extents that units may still need soon: the device is not told of them.
const EXTENTS_READY: usize = 2;
/// Shortest time between two discards of a shard, so that they do not hold up requests.
const DISCARD_PAUSE: Duration = Duration::from_millis(10);
/// Units being written, or waiting for their flush or for room in the log.
const UNITS_MAX: usize = 256;
/// Those of them that may be admitted: the others are for reclaim.
const ADMITTED_MAX: usize = UNITS_MAX / 2;

const _: () = assert!(UNIT_BLOCKS as usize <= UNIT_PAGES_MAX, "raw blocks fit a unit");

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
    /// Whether its blocks were missed, and are nowhere else on the device. Reclaim moves others,
    /// and waits for them.
    pub is_admitted: bool,
}

/// Free pages, and units in flight.
#[derive(Debug)]
pub struct Store {
    /// Pages in an extent.
    per: u32,
    /// Pages in use or freed, by extent, and in all.
    busy: Vec<u16>,
    used: u64,
    /// Extents without pages in use whose old content the device may still keep. The last one is
    /// used first.
    unused: VecDeque<u32>,
    /// Extents without pages in use that were discarded, or never used. They are used last.
    blank: Vec<u32>,
    /// The extent that is being discarded: nothing may be written to it.
    discarding: Option<u32>,
    /// The earliest time for the next discard.
    discard_at: Instant,
    /// After a start: the free pages of this many extents, the first ones, have not been found.
    unfound: u32,
    /// The lengths of the runs of each extent, as bits of [`bit`]; none for unused extents. When
    /// runs merge, the bits of their old lengths stay set until the extent is searched.
    runs: Vec<u8>,
    /// The number of units of each length for which there is room in these runs.
    fits: [u64; UNIT_PAGES_MAX],
    /// For each length an extent before which there is no run of it. Units go to the front, so that
    /// extents at the end become unused while there is plenty of room.
    firsts: [usize; UNIT_PAGES_MAX],
    /// Freed pages, each with the record that must be durable first.
    freeing: VecDeque<(Lsn, u32)>,
    units: Slab<Unit>,
    /// Number of these that are admitted.
    admitted: usize,
    /// Blocks of admitted units whose write is in flight, each with the newest such unit.
    entering: KeyMap<Id>,
    /// Number of units that are moved and whose write is in flight.
    writing: usize,
    /// Units that are written, which a flush that begins now would cover.
    written: Vec<Id>,
    /// When the first of these was written; and the first that is moved, if one is.
    written_since: Instant,
    moved_since: Option<Instant>,
    /// Whether more units are about to be written.
    expects_more: bool,
    /// Units that the flush in flight covers.
    flushing: Vec<Id>,
    /// Units whose blocks may be named by the log: those that are moved, and those admitted.
    ready: VecDeque<Id>,
    ready_admitted: VecDeque<Id>,
    /// Whether room for units of each length was sought since the last start.
    sought: [bool; UNIT_PAGES_MAX],
    /// Pages of units whose eviction waits in the record being built.
    leaving: u64,
    /// Whether units are being evicted to make room for each length.
    lacks: [bool; UNIT_PAGES_MAX],
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
            busy: vec![0; extents as usize],
            used: 0,
            unused: VecDeque::new(),
            blank: (0..extents).rev().collect(),
            discarding: None,
            discard_at: Instant::default(),
            unfound: 0,
            runs: vec![0; extents as usize],
            fits: [0; UNIT_PAGES_MAX],
            firsts: [0; UNIT_PAGES_MAX],
            freeing: VecDeque::new(),
            units: Slab::default(),
            admitted: 0,
            entering: KeyMap::default(),
            writing: 0,
            written: Vec::new(),
            written_since: Instant::default(),
            moved_since: None,
            expects_more: false,
            flushing: Vec::new(),
            ready: VecDeque::new(),
            ready_admitted: VecDeque::new(),
            sought: [false; UNIT_PAGES_MAX],
            leaving: 0,
            lacks: [false; UNIT_PAGES_MAX],
            is_full: false,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Notes that the device may still keep old content of all extents.
    pub fn set_undiscarded(&mut self) {
        self.unused.extend(self.blank.drain(..));
    }

    /// Whether the shard has a store.
    pub fn exists(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Prepares to find the free pages after a start.
    pub fn begin_rebuild(&mut self) {
        self.blank.clear();
        self.unfound = self.extents();
    }

    /// Finds the free pages of the next `most` extents: `pages` are the uses that recovery found.
    /// Returns whether no extent is left.
    pub fn rebuild(&mut self, pages: &mut Pages, most: u32) -> bool {
        let from = self.unfound.saturating_sub(most);
        for extent in (from..self.unfound).rev() {
            pages.recover_units(extent);
            let free: usize = pages.free_runs(extent).map(|run| run.len()).sum();
            let used = self.per - free as u32;
            (self.busy[extent as usize], self.used) = (used as u16, self.used + u64::from(used));
            match used {
                0 => self.unused.push_back(extent),
                _ => pages.free_runs(extent).for_each(|run| self.add_run(&run)),
            }
        }
        self.unfound = from;
        from == 0
    }

    /// Verifies, for the simulator, that each extent has as many pages in use as are counted.
    ///
    /// # Errors
    /// Names the first extent that has not.
    pub fn check(&self, pages: &Pages) -> Result<(), String> {
        let found = self.unfound..self.extents();
        let free = |extent| pages.free_runs(extent).map(|run| run.len()).sum::<usize>();
        let wrong = found.map(|extent| (extent, self.per as usize - free(extent)));
        let mut wrong =
            wrong.filter(|&(extent, used)| usize::from(self.busy[extent as usize]) != used);
        let Some((extent, used)) = wrong.next() else { return Ok(()) };
        let counted = self.busy[extent as usize];
        Err(format!("extent {extent} has {used} pages in use, {counted} are counted"))
    }

    /// Counts the room of a run, and notes its length.
    fn add_run(&mut self, run: &Range<u32>) {
        let extent = (run.start / self.per) as usize;
        self.runs[extent] |= bit(run.len());
        let lens = (1..).zip(&mut self.fits).zip(&mut self.firsts);
        for ((len, fits), first) in lens.take_while(|((len, _), _)| *len <= run.len()) {
            *fits += (run.len() / len) as u64;
            *first = extent.min(*first);
        }
    }

    /// Counts the room of a run no longer.
    fn end_run(&mut self, run: &Range<u32>) {
        (1..).zip(&mut self.fits).for_each(|(len, fits)| *fits -= (run.len() / len) as u64);
    }

    /// Takes free pages for a unit of `len` pages, which are not held yet.
    pub fn take(&mut self, len: usize, pages: &mut Pages) -> Option<Range<u32>> {
        self.sought[len - 1] = true;
        let run = self.find(len, pages).or_else(|| self.open_extent())?;
        let unit = run.start..run.start + len as u32;
        let extent = unit.start / self.per;
        self.end_run(&run);
        let others = pages.free_runs(extent).filter(|other| *other != run);
        self.runs[extent as usize] = others.fold(0, |bits, run| bits | bit(run.len()));
        if unit.end < run.end {
            self.add_run(&(unit.end..run.end));
        }
        self.busy[extent as usize] += len as u16;
        self.used += len as u64;
        pages.begin_unit(unit.start);
        Some(unit)
    }

    /// Finds a run of at least `len` pages, and mostly of no more, in one of the first extents.
    fn find(&mut self, len: usize, pages: &Pages) -> Option<Range<u32>> {
        if self.fits[len - 1] == 0 {
            return None;
        }
        let (exact, enough) = (bit(len), !(bit(len) - 1));
        let (mut found, mut longer, mut looked) = (None, 0, 0);
        for extent in self.firsts[len - 1]..self.runs.len() {
            let wanted = if found.is_none() { enough } else { exact };
            if self.runs[extent] & wanted > 0 {
                let (mut bits, mut best) = (0, None::<Range<u32>>);
                for run in pages.free_runs(extent as u32) {
                    bits |= bit(run.len());
                    if run.len() >= len && best.as_ref().is_none_or(|best| run.len() < best.len()) {
                        best = Some(run);
                    }
                }
                self.runs[extent] = bits;
                if found.is_none() {
                    self.firsts[len - 1] = extent;
                }
                if best.as_ref().is_some_and(|run| run.len() == len) {
                    return best;
                }
                found = found.or(best);
            }
            longer += u32::from(self.runs[extent] & enough > 0);
            looked += usize::from(found.is_some());
            if longer > LONGER_MAX || looked >= LOOKED_AT {
                break;
            }
        }
        found
    }

    /// Puts an unused extent to use: all of it is one run.
    fn open_extent(&mut self) -> Option<Range<u32>> {
        let extent = self.unused.pop_back().or_else(|| self.blank.pop())?;
        let run = extent * self.per..(extent + 1) * self.per;
        self.add_run(&run);
        Some(run)
    }

    /// The number of unused extents that may be used.
    fn unused(&self) -> u64 {
        (self.unused.len() + self.blank.len()) as u64
    }

    /// Notes that a page is free, which it is already for `pages`.
    pub fn note_free(&mut self, page: u32, pages: &Pages) {
        let extent = page / self.per;
        let busy = &mut self.busy[extent as usize];
        (*busy, self.used) = (*busy - 1, self.used - 1);
        let is_unused = *busy == 0;
        let run = pages.free_with(&(page..page + 1));
        self.end_run(&(run.start..page));
        self.end_run(&(page + 1..run.end));
        match is_unused {
            true => {
                self.runs[extent as usize] = 0;
                self.unused.push_back(extent);
            }
            false => self.add_run(&run),
        }
    }

    /// Notes pages whose last use ended in the record `lsn`, or before it.
    pub fn note_freed(&mut self, lsn: Lsn, pages: Vec<u32>) {
        self.leaving = 0;
        self.freeing.extend(pages.into_iter().map(|page| (lsn, page)));
    }

    /// Takes a freed page whose record is durable.
    pub fn next_free(&mut self, durable: Lsn) -> Option<u32> {
        self.freeing.pop_front_if(|(lsn, _)| *lsn <= durable).map(|(_, page)| page)
    }

    /// Whether [`Store::next_free`] has a page.
    pub fn has_next_free(&self, durable: Lsn) -> bool {
        self.freeing.front().is_some_and(|&(lsn, _)| lsn <= durable)
    }

    /// The record that must be durable before all freed pages are free.
    pub fn freed_by(&self) -> Option<Lsn> {
        self.freeing.back().map(|&(lsn, _)| lsn)
    }

    /// The number of pages that will become free: of those freed, and of those of units whose
    /// eviction is in the record being built.
    pub fn coming(&self) -> u64 {
        self.freeing.len() as u64 + self.leaving
    }

    /// Number of free pages.
    pub fn free_pages(&self) -> u64 {
        u64::from(self.pages()) - self.used
    }

    /// Pages in use, or not free yet.
    pub fn used_pages(&self) -> u64 {
        self.used
    }

    /// The number of units of `len` pages for which there is room.
    pub fn room_for(&self, len: usize) -> u64 {
        self.fits[len - 1] + self.unused() * u64::from(self.per / len as u32)
    }

    /// Whether nothing can be evicted for what was sought last.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Notes whether a unit could be evicted for what is sought.
    pub fn note_full(&mut self, is_full: bool) {
        self.is_full = is_full;
    }

    /// Whether room for units of `len` pages has been sought.
    pub fn is_sought(&self, len: usize) -> bool {
        self.sought[len - 1]
    }

    /// Number of extents.
    pub fn extents(&self) -> u32 {
        self.busy.len() as u32
    }

    /// Number of pages.
    pub fn pages(&self) -> u32 {
        self.per * self.extents()
    }

    /// The number of units of `len` pages for which eviction aims to have room.
    pub fn room_wanted(&self, len: usize) -> u64 {
        let units = u64::from(self.pages()) / len as u64;
        (units / FREE_ONE_IN).max((units / 8).min(32)).clamp(FREE_MIN, FREE_MAX)
    }

    /// Whether there is so little room for units of any length that is sought that eviction must
    /// not wait.
    pub fn is_short(&self) -> bool {
        self.any_sought(|len| self.room_for(len) < self.room_wanted(len) / 4)
    }

    /// Whether there is more room than eviction makes, for every length that is sought.
    pub fn has_plenty(&self) -> bool {
        !self.any_sought(|len| self.room_for(len) < self.room_wanted(len) * 2)
    }

    fn any_sought(&self, is_so: impl Fn(usize) -> bool) -> bool {
        (1..=UNIT_PAGES_MAX).any(|len| self.is_sought(len) && is_so(len))
    }

    /// Whether units whose eviction frees just any pages would leave runs too short: many pages are
    /// free as it is.
    pub fn is_scattered(&self) -> bool {
        self.free_pages() + self.coming() > u64::from(self.pages()) / SCATTERED
    }

    /// Notes that the eviction of a unit of `len` pages is in the record being built.
    pub fn note_leaving(&mut self, len: u64) {
        self.leaving += len;
    }

    /// Whether eviction goes on until there is room for `few` units of `len` pages; there is for
    /// `left`. It begins when there is for half of them.
    pub fn lacks_room(&mut self, len: usize, left: u64, few: u64) -> bool {
        let lacks = &mut self.lacks[len - 1];
        *lacks = left < few && (*lacks || left < few.div_ceil(2));
        *lacks
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
    /// Whether another unit may be moved now.
    pub fn takes_units(&self) -> bool {
        self.units.len() < UNITS_MAX
    }

    /// Whether another unit may be admitted now.
    pub fn takes_admitted(&self) -> bool {
        self.admitted < ADMITTED_MAX && self.takes_units()
    }

    /// Whether a unit that is moved is on its way.
    pub fn is_moving(&self) -> bool {
        self.units.len() > self.admitted
    }

    /// Whether such a unit is being written or waits for a flush. The others wait for room in the
    /// log.
    pub fn waits_for_device(&self) -> bool {
        self.units.len() - self.admitted > self.ready.len()
    }

    /// Whether a block comes with a unit that is admitted and being written.
    pub fn is_entering(&self, key: Key) -> bool {
        self.entering.contains_key(&key)
    }

    /// Notes that a block is about to change: as it is being written, it must not enter.
    pub fn spoil(&mut self, key: Key) {
        if !self.entering.is_empty() {
            self.entering.remove(&key);
        }
    }

    /// Notes the same of all blocks of a volume.
    pub fn spoil_volume(&mut self, volume: VolumeId) {
        self.entering.retain(|key, _| key.volume() != volume);
    }

    /// Ends the entering of a block with a unit; returns whether it still may be put into the
    /// index.
    pub fn end_entering(&mut self, key: Key, unit: Id) -> bool {
        let enters = self.entering.get(&key) == Some(&unit);
        if enters {
            self.entering.remove(&key);
        }
        enters
    }

    /// Notes that a unit is being written.
    pub fn begin(&mut self, unit: Unit) -> Id {
        let is_admitted = unit.is_admitted;
        let id = self.units.insert(unit);
        if is_admitted {
            self.admitted += 1;
            self.entering.extend(self.units.get(id).blocks.iter().map(|block| (block.key, id)));
        } else {
            self.writing += 1;
        }
        id
    }

    /// The unit with an ID.
    pub fn unit(&self, id: Id) -> &Unit {
        self.units.get(id)
    }

    /// The blocks of a unit that are not named yet.
    pub fn blocks_of(&mut self, id: Id) -> &mut Vec<UnitBlock> {
        &mut self.units.get_mut(id).blocks
    }

    /// Notes that a unit has been written.
    pub fn end_write(&mut self, now: Instant, id: Id, is_durable: bool) {
        let is_admitted = self.unit(id).is_admitted;
        self.writing -= usize::from(!is_admitted);
        if is_durable {
            return self.note_ready(id);
        }
        if self.written.is_empty() {
            self.written_since = now;
        }
        if !is_admitted {
            self.moved_since.get_or_insert(now);
        }
        self.written.push(id);
    }

    fn note_ready(&mut self, id: Id) {
        // The last one is named first, and entries in ascending order are shorter.
        self.blocks_of(id).sort_unstable_by_key(|block| Reverse(block.key));
        match self.unit(id).is_admitted {
            true => self.ready_admitted.push_back(id),
            false => self.ready.push_back(id),
        }
    }

    /// Notes whether more units are about to be moved.
    pub fn expect_more(&mut self, on: bool) {
        self.expects_more = on;
    }

    /// Whether enough units wait for a flush of the device, or none is coming that it could cover
    /// as well.
    pub fn wants_flush(&self, now: Instant) -> bool {
        let more = self.writing > 0 || self.expects_more;
        let many = self.written.len() >= UNITS_FLUSHED;
        let is_over = match self.moved_since {
            Some(since) => !more || now.since(since) >= PATIENCE,
            None => self.flush_at().is_some_and(|at| at <= now),
        };
        many || is_over
    }

    /// When units that are admitted need a flush, if none that is moved does before.
    pub fn flush_at(&self) -> Option<Instant> {
        let waits = !self.written.is_empty() && self.moved_since.is_none();
        waits.then(|| self.written_since + ADMITTED_PATIENCE)
    }

    /// Notes that a flush begins.
    pub fn begin_flush(&mut self) {
        self.flushing.append(&mut self.written);
        self.moved_since = None;
    }

    /// Notes that the flush has succeeded.
    pub fn end_flush(&mut self) {
        for id in std::mem::take(&mut self.flushing) {
            self.note_ready(id);
        }
    }

    /// The first unit whose blocks may be named by the log; admitted ones only if `all`.
    pub fn first_ready(&self, all: bool) -> Option<Id> {
        let admitted = self.ready_admitted.front().filter(|_| all);
        self.ready.front().or(admitted).copied()
    }

    /// Forgets a unit that [`Store::first_ready`] has returned: its blocks are named.
    pub fn end_ready(&mut self, id: Id) {
        if self.units.remove(id).is_admitted {
            self.admitted -= 1;
            self.ready_admitted.pop_front();
        } else {
            self.ready.pop_front();
        }
    }

    /// Forgets the units in flight: the device failed.
    pub fn give_up(&mut self) {
        self.units = Slab::default();
        (self.admitted, self.writing, self.moved_since) = (0, 0, None);
        self.entering.clear();
        (self.written, self.flushing) = Default::default();
        (self.ready, self.ready_admitted) = Default::default();
    }
}

/// The bit for runs of a length, in pages. From the length of the longest unit on, they share one.
fn bit(len: usize) -> u8 {
    1 << (len.min(UNIT_PAGES_MAX) - 1)
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
