//! Reference model: the contents of a volume that a client may see, before and after a crash.
//!
//! For each sector the model keeps the writes that may still be seen ([`sector`]). Its rules:
//!
//! - A read returns, for each sector, a write that was in flight at some time during the read, or
//!   the last one completed before it. Of writes that overlap in time, any may be the last.
//! - A failed write may or may not have taken effect, in each sector independently. A discard
//!   leaves zeros, or any earlier content of the sector; a write in flight at the same time may
//!   precede it.
//! - A crash may undo every write that had not completed before the submission of a flush that
//!   completed, unless the write completed with force unit access. The outcome is unknown until the
//!   sector is read; the content then read stays.
//!
//! The model knows nothing of caches. On request it checks that a block is not mixed from two
//! states.

mod content;
mod history;
mod sector;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use forebay_block::{BLOCK_SIZE, ByteRange, SECTOR_SIZE, VolumeId};

pub use content::{ALIKE_EVERY, Content, describe};
pub use history::{FlushMark, History, Moments};
use sector::{Effect, Entry, Found, IN_FLIGHT, Sector, UNKNOWN};

const SECTOR: u64 = SECTOR_SIZE as u64;
const BLOCK_SECTORS: usize = BLOCK_SIZE / SECTOR_SIZE;

/// The effect of a request on the sectors that it covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Each sector gets the stamp with this request's number.
    Stamp,
    /// Each sector gets the content that write `of` put into the sector at distance `ahead`.
    Copy {
        /// Number of that write, which has ended.
        of: u64,
        /// Distance in sectors from the target to the source.
        ahead: i64,
    },
    /// Each sector becomes zeros.
    Zero,
    /// Each sector becomes zeros, or keeps any older content.
    Discard,
}

/// Identifies a read or a flush in flight.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Token(u64);

/// The kind of a violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrong {
    /// No known write put this content there.
    Foreign,
    /// The content was there once, but must have been overwritten.
    Stale,
    /// Like `Stale`, and the newer content was durable before the last crash.
    Lost,
    /// The sectors of a block are from different states.
    Mixed,
}

/// A client saw, or would see, forbidden content.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The kind of violation.
    pub wrong: Wrong,
    /// The volume.
    pub volume: VolumeId,
    /// First wrong sector.
    pub sector: u64,
    /// The content found, and the contents allowed.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, sector {}: {}", self.volume, self.sector, self.what)
    }
}

/// A planned sector write: sector, content, and whether no other write may touch the sector in the
/// meantime.
type Planned = (usize, Content, bool);

/// One volume, as its clients may see it.
#[derive(Clone, Debug)]
pub struct Model {
    volume: VolumeId,
    sectors: Vec<Sector>,
    /// Sectors that were once partly written, or copies of others.
    patched: BTreeSet<usize>,
    /// Writes in flight by number: first sector, and sector after the last.
    writes: BTreeMap<u64, (u64, u64)>,
    /// Reads in flight.
    reads: Vec<Token>,
    /// Number of events so far.
    now: u64,
    /// Submission time of the last completed flush.
    durable_until: u64,
    crashed_at: u64,
    session: u32,
    /// Whether content read after a crash survives the next crash.
    settles: bool,
}

impl Model {
    /// A volume of `size` bytes whose primary holds `initial(sector)`.
    #[must_use]
    pub fn new(volume: VolumeId, size: u64, initial: impl Fn(u64) -> Content) -> Self {
        let sector = |n| Sector { initial: Some(initial(n)), entries: Vec::new() };
        Self {
            volume,
            sectors: (0..size / SECTOR).map(sector).collect(),
            patched: BTreeSet::new(),
            writes: BTreeMap::new(),
            reads: Vec::new(),
            now: 0,
            durable_until: 0,
            crashed_at: 0,
            session: 0,
            settles: true,
        }
    }

    /// The same volume with weaker guarantees: content read after a crash may be gone after the
    /// next, unless flushed. For a part of the system, such as a primary without its cache.
    #[must_use]
    pub fn by_flushes_alone(mut self) -> Self {
        self.settles = false;
        self
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Whether a write may touch `range` now: no sector of it is being partly written by another
    /// request.
    #[must_use]
    pub fn is_free(&self, range: ByteRange) -> bool {
        covered(range).all(|n| !self.sectors[n].entries.iter().any(|e| e.exclusive))
    }

    /// Records the submission of request `id`, a change of `range`; returns the data to write, if
    /// it has any. Returns `None` if an edge of the range lies within a sector of uncertain
    /// content, since the result would be unpredictable.
    pub fn begin_write(&mut self, id: u64, range: ByteRange, change: Change) -> Option<Vec<u8>> {
        assert!(self.is_free(range), "the caller asks is_free first");
        let mut data = Vec::with_capacity(range.len as usize);
        let mut plan = Vec::new();
        for n in covered(range) {
            let part = part_of(range, n);
            let whole = part.len() == SECTOR_SIZE;
            let content = match change {
                Change::Stamp => Content::Stamp(id),
                Change::Copy { of, ahead } => {
                    assert!(whole, "whole blocks are copied");
                    self.patched.insert(n);
                    let sector = (n as u64).checked_add_signed(ahead);
                    Content::Copy { of, sector: sector.expect("a sector of the volume") }
                }
                Change::Zero => Content::Zero,
                Change::Discard => {
                    Content::Discarded { before: id, patched: !whole || self.patched.contains(&n) }
                }
            };
            if whole || change == Change::Discard {
                extend(&mut data, |out| content.fill(self.volume, n as u64, out));
                plan.push((n, content, false));
                continue;
            }
            let mut sector = [0; SECTOR_SIZE];
            self.settled(n)?.fill(self.volume, n as u64, &mut sector);
            let mut fresh = [0; SECTOR_SIZE];
            if change == Change::Stamp {
                Content::Stamp(id).fill(self.volume, n as u64, &mut fresh);
            }
            sector[part.clone()].copy_from_slice(&fresh[part.clone()]);
            data.extend_from_slice(&fresh[part]);
            plan.push((n, Content::Bytes(sector.into()), true));
        }
        self.enter(id, range, change, plan);
        Some(data)
    }

    /// Records the same submission as `other` just did, with the content that `other` assigned to
    /// each sector. For a part of the system with less known contents, such as a primary without
    /// its cache.
    pub fn begin_as(&mut self, other: &Self, id: u64, range: ByteRange, change: Change) {
        let entered = |n: usize| {
            let entry = other.sectors[n].entries.iter().rev().find(|e| e.id == id);
            entry.map(|e| (n, e.content.clone(), e.exclusive))
        };
        let plan = covered(range).filter_map(entered).collect();
        self.enter(id, range, change, plan);
    }

    fn enter(&mut self, id: u64, range: ByteRange, change: Change, plan: Vec<Planned>) {
        let submitted = self.tick();
        let horizon = self.reads.iter().map(|t| t.0).min().unwrap_or(self.now);
        for (n, content, exclusive) in plan {
            if exclusive {
                self.patched.insert(n);
            }
            let sector = &mut self.sectors[n];
            sector.trim(horizon, self.durable_until);
            // It may precede a discard in flight, which may then leave it.
            let patched_now = self.patched.contains(&n);
            for entry in sector.entries.iter_mut().filter(|entry| entry.end == IN_FLIGHT) {
                if let Content::Discarded { before, patched } = &mut entry.content {
                    *before = id + 1;
                    *patched |= patched_now;
                }
            }
            sector.entries.push(Entry {
                id,
                content,
                submitted,
                begin: submitted,
                end: IN_FLIGHT,
                effect: Effect::Possible,
                durable: false,
                acked_in: None,
                session: self.session,
                discard: change == Change::Discard,
                exclusive,
                doubtful: false,
                shaken: false,
                fleeting: false,
                repeated: false,
            });
        }
        let span = covered(range);
        self.writes.insert(id, (span.start as u64, span.end as u64));
    }

    /// Records that request `id`, which is in flight, is done again: it may take effect twice.
    pub fn send_again(&mut self, id: u64) {
        let Some(&(from, to)) = self.writes.get(&id) else { return };
        let entries = self.sectors[from as usize..to as usize].iter_mut();
        for e in entries.flat_map(|sector| &mut sector.entries).filter(|e| e.id == id) {
            e.repeated = true;
        }
    }

    /// The content of a sector, if only one is possible and no write is in flight.
    fn settled(&self, n: usize) -> Option<&Content> {
        let sector = &self.sectors[n];
        let mut allowed = sector.allowed(self.now + 1);
        let (_, content) = allowed.next()?;
        (allowed.next().is_none() && sector.quiet(self.now + 1)).then_some(content)
    }

    /// Records the end of request `id`: success or failure, and whether it had force unit access.
    pub fn end_write(&mut self, id: u64, ok: bool, fua: bool) {
        let now = self.tick();
        let (from, to) = self.writes.remove(&id).expect("each write ends once");
        for sector in &mut self.sectors[from as usize..to as usize] {
            let Some(e) = sector.entries.iter_mut().rev().find(|e| e.id == id) else { continue };
            e.end = now;
            e.exclusive = false;
            // A client told of the write's failure was told of the failed flush as well.
            e.doubtful |= e.shaken && !ok;
            if ok {
                e.acked_in = Some(self.session);
            }
            if ok && !e.discard {
                e.effect = Effect::Certain;
                e.durable = fua;
            }
        }
    }

    /// Records the submission of a flush.
    pub fn begin_flush(&mut self) -> Token {
        Token(self.tick())
    }

    /// Records the success of a flush. A failed flush guarantees nothing.
    pub fn end_flush(&mut self, flush: Token) {
        self.tick();
        self.durable_until = self.durable_until.max(flush.0);
    }

    /// Records the failure of a flush. The device may have dropped unflushed writes, so no later
    /// flush makes the writes so far durable.
    pub fn fail_flush(&mut self) {
        self.tick();
        for e in self.sectors.iter_mut().flat_map(|sector| &mut sector.entries) {
            e.durable = e.is_durable(self.durable_until);
            // A failed write may have been dropped as well, and still be visible.
            e.doubtful |= e.end != IN_FLIGHT && !e.durable;
            e.shaken |= e.end == IN_FLIGHT;
        }
    }

    /// The disk below has dropped writes to `range` that it still shows, and the new server of the
    /// volume does not know: no later flush makes them durable, and seeing them after a crash does
    /// not mean that they stay. Whoever was told of the failure must handle both.
    pub fn forget_failure(&mut self, range: ByteRange) {
        self.tick();
        for e in self.sectors[covered(range)].iter_mut().flat_map(|sector| &mut sector.entries) {
            e.durable = e.is_durable(self.durable_until);
            e.doubtful |= !e.durable;
            e.fleeting |= !e.durable;
        }
    }

    /// The new server of the volume does not know which writes to `range` are durable, and the disk
    /// below shows all of them: content seen now may be gone after the next crash.
    pub fn may_go(&mut self, range: ByteRange) {
        for e in self.sectors[covered(range)].iter_mut().flat_map(|sector| &mut sector.entries) {
            e.fleeting |= !e.is_durable(self.durable_until);
        }
    }

    /// Records the submission of a read.
    pub fn begin_read(&mut self) -> Token {
        let token = Token(self.tick());
        self.reads.push(token);
        token
    }

    /// Records the end of a read of `range`: the data returned, or `None` if it failed.
    ///
    /// # Errors
    /// The first sector with forbidden content.
    pub fn end_read(
        &mut self,
        read: Token,
        range: ByteRange,
        data: Option<&[u8]>,
    ) -> Result<(), Violation> {
        let now = self.tick();
        self.reads.retain(|&t| t != read);
        let Some(data) = data else { return Ok(()) };
        for n in covered(range) {
            let part = part_of(range, n);
            let at = n as u64 * SECTOR + part.start as u64 - range.offset;
            let bytes = &data[at as usize..at as usize + part.len()];
            let (found, alike) = self.recognise(n, read.0, (part.start, bytes))?;
            let sector = &mut self.sectors[n];
            let whole = part.len() == SECTOR_SIZE;
            if whole && sector.quiet(read.0) && sector.allowed(now).nth(1).is_some() {
                // A cache may have a copy of fleeting content although the disk shows older
                // content: until it is loaded, a read after a start sees the disk.
                let may_go = |e: &Entry| {
                    e.fleeting || e.discard && e.content.matches(self.volume, n as u64, 0, bytes)
                };
                if !sector.entries.iter().any(may_go) {
                    let doubtful =
                        alike > 1 && sector.is_doubtful(self.volume, n as u64, read.0, bytes);
                    let now_from = if self.settles {
                        sector.observe(found, now, self.crashed_at, self.durable_until);
                        found
                    } else {
                        sector.observe_for_now(found, now)
                    };
                    if alike > 1 {
                        sector.forget_origin(now_from, doubtful);
                    }
                }
            }
        }
        Ok(())
    }

    fn recognise(
        &self,
        n: usize,
        at: u64,
        (from, bytes): (usize, &[u8]),
    ) -> Result<(Found, usize), Violation> {
        let sector = &self.sectors[n];
        sector.recognise(self.volume, n as u64, at, (from, bytes)).ok_or_else(|| {
            let allowed: Vec<String> = sector.allowed(at).map(|(_, c)| c.to_string()).collect();
            let what = format!("found {}; allowed: {}", describe(bytes), allowed.join(", "));
            let wrong = self.wrong(n, at, (from, bytes));
            Violation { wrong, volume: self.volume, sector: n as u64, what }
        })
    }

    /// The kind of violation of `bytes`, which a read submitted at `at` must not return.
    fn wrong(&self, n: usize, at: u64, (from, bytes): (usize, &[u8])) -> Wrong {
        let sector = &self.sectors[n];
        let kept = |e: &Entry| e.content.matches(self.volume, n as u64, from, bytes);
        let part = bytes.len() < SECTOR_SIZE;
        let once = sector.entries.iter().any(kept)
            || (!part && content::is_of(self.volume, n as u64, bytes));
        let firm = |e: &Entry| {
            e.effect == Effect::Certain && e.durable && e.end <= self.crashed_at && e.end < at
        };
        match once {
            false => Wrong::Foreign,
            true if sector.entries.iter().any(firm) => Wrong::Lost,
            true => Wrong::Stale,
        }
    }

    /// Records a power failure or the death of the process: requests in flight never end, and
    /// writes that were not durable may or may not survive.
    pub fn crash(&mut self) {
        let now = self.tick();
        self.writes.clear();
        self.reads.clear();
        for sector in &mut self.sectors {
            if !sector.entries.is_empty() {
                sector.crash(now, self.durable_until);
            }
        }
        self.crashed_at = now;
        self.session += 1;
    }

    /// Checks sectors read at rest, starting at sector `first`, without updating the model.
    ///
    /// # Errors
    /// The first sector with forbidden content.
    pub fn check(&self, first: u64, data: &[u8]) -> Result<(), Violation> {
        for (i, bytes) in data.chunks(SECTOR_SIZE).enumerate() {
            self.recognise(first as usize + i, self.now + 1, (0, bytes))?;
        }
        Ok(())
    }

    /// Checks that sectors read at rest, starting at sector `first`, hold zeros or content that was
    /// written there at some time.
    ///
    /// # Errors
    /// The first sector with other content.
    pub fn check_origin(&self, first: u64, data: &[u8]) -> Result<(), Violation> {
        for (i, bytes) in data.chunks(SECTOR_SIZE).enumerate() {
            let sector = first + i as u64;
            if !content::is_of(self.volume, sector, bytes) {
                let what = format!("found {}, never written here", describe(bytes));
                let wrong = Wrong::Foreign;
                return Err(Violation { wrong, volume: self.volume, sector, what });
            }
        }
        Ok(())
    }

    /// Checks that `data`, the first read of the block after a crash, is a state that the block had
    /// at one time: if a write is present in one sector, every write that it builds upon is present
    /// in the others.
    ///
    /// # Errors
    /// A sector older than another sector of the block allows.
    pub fn check_unmixed(&self, block: u64, data: &[u8]) -> Result<(), Violation> {
        let first = block as usize * BLOCK_SECTORS;
        let found: Vec<Option<Found>> = (data.chunks(SECTOR_SIZE).enumerate())
            .map(|(i, bytes)| match self.recognise(first + i, self.now + 1, (0, bytes)) {
                Ok((found, 1)) => Some(found),
                _ => None,
            })
            .collect();
        let seen = |i: usize| match found[i] {
            Some(Found::Entry(place)) => Some(&self.sectors[first + i].entries[place]),
            _ => None,
        };
        for (old, what) in found.iter().enumerate() {
            let Some(what) = what else { continue };
            let old_end = match what {
                Found::Initial => 0,
                Found::Entry(place) => self.sectors[first + old].entries[*place].end,
            };
            let missing = self.sectors[first + old].entries.iter();
            for missed in missing.filter(|e| e.begin > old_end && !e.discard) {
                // What is seen of a repeated write may be from the first time, before `old`.
                let once = !missed.repeated || missed.submitted > old_end;
                let newer = (0..found.len()).filter_map(seen).find(|e| {
                    (e.id == missed.id && missed.id != UNKNOWN && once)
                        || (missed.acked_in == Some(e.session) && e.submitted > missed.end)
                });
                if let Some(newer) = newer {
                    let what = format!(
                        "block {block} is mixed: write {} is missing here, write {} is in it",
                        missed.id, newer.id
                    );
                    let sector = (first + old) as u64;
                    let wrong = Wrong::Mixed;
                    return Err(Violation { wrong, volume: self.volume, sector, what });
                }
            }
        }
        Ok(())
    }

    /// Number of sectors of the volume.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.sectors.len() as u64
    }
}

fn extend(data: &mut Vec<u8>, fill: impl FnOnce(&mut [u8])) {
    let from = data.len();
    data.resize(from + SECTOR_SIZE, 0);
    fill(&mut data[from..]);
}

/// The sectors that overlap `range`.
fn covered(range: ByteRange) -> std::ops::Range<usize> {
    (range.offset / SECTOR) as usize..range.end().div_ceil(SECTOR) as usize
}

/// The bytes of sector `n` that are in `range`.
fn part_of(range: ByteRange, n: usize) -> std::ops::Range<usize> {
    let start = n as u64 * SECTOR;
    let part = ByteRange::new(start, SECTOR).intersection(&range);
    (part.offset - start) as usize..(part.end() - start) as usize
}

#[cfg(test)]
mod tests;
