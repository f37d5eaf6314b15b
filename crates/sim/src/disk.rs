//! A simulated disk: its durable content, the writes that a crash may still undo, and its faults.
//!
//! It assumes of a real disk the following, and no more: a completed flush makes durable everything
//! that completed before its submission; a completed write with force unit access is durable; a
//! read returns the content of completed writes, and for sectors being written either the old or
//! the new content; of overlapping concurrent writes either may win. A crash keeps, drops or tears
//! each write that is not durable, independently of the others; it may leave garbage in the sectors
//! of such a write, and in no others.
//!
//! Faults ([`Fault`]) are behavior that a disk must not show. The atlas decides which of them the
//! cache must survive.

use forebay_block::{ByteRange, Completion, ErrorKind, Io, IoOp, IoTag, SECTOR_SIZE};

use crate::pages::Pages;
use crate::rng::Rng;

const SECTOR: u64 = SECTOR_SIZE as u64;
const PAGE_BYTES: u64 = 4096;
/// Parts of a discarded range that fare differently.
const GARBLED_PARTS: u64 = 4;
/// Longest part of a discarded range that becomes garbage, in bytes: it costs memory.
const GARBAGE_MAX: u64 = 64 << 10;

/// The effect of a discard on a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Discards {
    /// The disk takes none.
    Never,
    /// A part of the range, or none of it, becomes zeros.
    Zeros,
    /// Each part of the range stays, becomes zeros, or becomes garbage.
    Garbage,
}

/// The behavior of a disk without faults.
#[derive(Clone, Debug)]
pub struct DiskProfile {
    /// Size in bytes.
    pub size: u64,
    /// Whether completed writes may be lost by a crash before a flush.
    pub volatile: bool,
    /// Whether a crash may leave garbage in sectors being written.
    pub garbles: bool,
    /// Shortest and longest normal latency of a read or write, in nanoseconds.
    pub latency: (u64, u64),
    /// Shortest and longest normal latency of a flush, in nanoseconds.
    pub flush: (u64, u64),
    /// Percentage of requests that take twenty times as long.
    pub slow_percent: u64,
    /// The effect of a discard.
    pub discards: Discards,
}

/// How much longer a slow request takes.
pub const SLOWER: u64 = 20;

/// A misbehavior of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Requests fail with this error and change nothing.
    Error(ErrorKind),
    /// Writes fail, and reach the disk in part.
    TornError,
    /// The link breaks: requests fail as if the device were absent, and changes are made in whole,
    /// in part, or not at all.
    Gone,
    /// Writes are acknowledged but not stored.
    Lost,
    /// Writes are stored this many bytes too far on.
    Misdirected(u64),
    /// Requests take this many nanoseconds.
    Slow(u64),
}

/// A fault, and the requests that it strikes.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The fault.
    pub fault: Fault,
    /// The operations that it strikes.
    pub ops: &'static [IoOp],
    /// The range that it strikes; flushes match any range.
    pub range: ByteRange,
    /// Number of times that it will still strike.
    pub times: u32,
}

/// The outcome of an unfinished write at a crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// The whole write reaches the disk.
    Keep,
    /// Nothing of it reaches the disk.
    Drop,
    /// Its first sectors reach the disk, this many.
    Prefix(u64),
    /// Each sector reaches the disk or not at random; the number is the seed.
    Scatter(u64),
    /// As `Scatter`, with garbage in some sectors.
    Garble(u64),
}

#[derive(Debug)]
enum Data {
    Bytes(Vec<u8>),
    Zeros,
}

/// A write that a crash may undo.
#[derive(Debug)]
struct Pending {
    range: ByteRange,
    data: Data,
    /// Written with force unit access: kept here only for its order among its neighbors.
    durable: bool,
    /// A failed flush lost it: reads still see it, but it never becomes durable.
    given_up: bool,
}

impl Pending {
    fn new(range: ByteRange, data: Data, durable: bool) -> Self {
        Self { range, data, durable, given_up: false }
    }
}

#[derive(Debug)]
struct Flight {
    io: Io,
    /// Number of writes completed when a flush was submitted.
    completed: u64,
    fault: Option<Fault>,
}

/// A request in flight, by its index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Slot(pub usize);

/// One disk.
#[derive(Debug)]
pub struct SimDisk {
    profile: DiskProfile,
    durable: Pages,
    view: Pages,
    pending: Vec<Pending>,
    /// Number of writes that have left `pending` at its front.
    settled: u64,
    /// Ranges that failed flushes lost but reads still see.
    lost: Vec<ByteRange>,
    /// A power failure took content that failed flushes had lost and reads had still seen.
    took_back: bool,
    flights: Vec<Option<Flight>>,
    rules: Vec<Rule>,
    /// A fault that begins at the request with this number.
    planned: Option<(usize, Rule)>,
    /// The operations of all requests so far, if they are recorded.
    asked: Option<Vec<IoOp>>,
    gone: bool,
    rng: Rng,
    /// Number of requests that a fault struck.
    pub struck: u64,
}

impl SimDisk {
    /// Creates a disk that holds `image`.
    #[must_use]
    pub fn new(profile: DiskProfile, image: Pages, rng: Rng) -> Self {
        Self {
            profile,
            view: image.clone(),
            durable: image,
            pending: Vec::new(),
            settled: 0,
            lost: Vec::new(),
            took_back: false,
            flights: Vec::new(),
            rules: Vec::new(),
            planned: None,
            asked: None,
            gone: false,
            rng,
            struck: 0,
        }
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.profile.size
    }

    /// Checks that the disk can take a request.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn would_take(&self, io: &Io) -> Result<(), String> {
        if !io.range.is_aligned(SECTOR) {
            return Err(format!("{} are not whole sectors", io.range));
        }
        if io.range.end() > self.profile.size {
            return Err(format!("{} are not on the disk", io.range));
        }
        if io.op == IoOp::Discard && self.profile.discards == Discards::Never {
            return Err("the disk does not take discards".into());
        }
        if io.range.is_empty() != (io.op == IoOp::Flush) {
            return Err("a range is empty for a flush, and only then".into());
        }
        Ok(())
    }

    /// Takes a request; returns its slot and the nanoseconds that it takes.
    ///
    /// # Panics
    /// If [`SimDisk::would_take`] rejects the request.
    pub fn submit(&mut self, io: Io) -> (Slot, u64) {
        if let Err(why) = self.would_take(&io) {
            panic!("{why}");
        }
        let fault = self.strike(&io);
        let (low, high) =
            if io.op == IoOp::Flush { self.profile.flush } else { self.profile.latency };
        let mut took = self.rng.within(low, high);
        if self.rng.percent(self.profile.slow_percent) {
            took *= SLOWER;
        }
        if let Some(Fault::Slow(nanos)) = fault {
            took = nanos;
        }
        let completed = self.settled + self.pending.len() as u64;
        let flight = Flight { io, completed, fault };
        let free = self.flights.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        self.flights[place] = Some(flight);
        (Slot(place), took)
    }

    fn strike(&mut self, io: &Io) -> Option<Fault> {
        if let Some(asked) = &mut self.asked {
            if self.planned.as_ref().is_some_and(|(nth, _)| *nth == asked.len()) {
                self.rules.extend(self.planned.take().map(|(_, rule)| rule));
            }
            asked.push(io.op);
        }
        if self.gone {
            self.struck += 1;
            return Some(Fault::Error(ErrorKind::DeviceGone));
        }
        let hit = |rule: &&mut Rule| {
            let here = io.op == IoOp::Flush || rule.range.overlaps(&io.range);
            rule.times > 0 && here && rule.ops.contains(&io.op)
        };
        let rule = self.rules.iter_mut().find(hit)?;
        rule.times -= 1;
        self.struck += 1;
        Some(rule.fault)
    }

    /// The request in flight at `slot`.
    #[must_use]
    pub fn request(&self, slot: Slot) -> Option<&Io> {
        self.flights.get(slot.0)?.as_ref().map(|flight| &flight.io)
    }

    /// Completes a request.
    ///
    /// # Panics
    /// If nothing is in flight there.
    pub fn finish(&mut self, slot: Slot) -> Completion {
        let Flight { mut io, completed, fault } =
            self.flights[slot.0].take().expect("a request ends once");
        if self.gone {
            return io.complete(Err(ErrorKind::DeviceGone.into()));
        }
        match fault {
            Some(Fault::Error(kind)) => {
                if io.op == IoOp::Flush {
                    self.give_up(completed);
                }
                return io.complete(Err(kind.into()));
            }
            Some(Fault::TornError) if io.op == IoOp::Write => {
                let half = (io.range.len / SECTOR).div_ceil(2) * SECTOR;
                let range = ByteRange::new(io.range.offset, half);
                let data = Data::Bytes(io.buf[..half as usize].to_vec());
                self.take(Pending::new(range, data, false));
                return io.complete(Err(ErrorKind::Media.into()));
            }
            Some(Fault::TornError) => return io.complete(Err(ErrorKind::Media.into())),
            Some(Fault::Gone) => {
                let all = io.range.len / SECTOR;
                let done = [0, all / 2, all][self.rng.below(3) as usize] * SECTOR;
                let range = ByteRange::new(io.range.offset, done);
                match io.op {
                    IoOp::Write if done > 0 => {
                        let data = Data::Bytes(io.buf[..done as usize].to_vec());
                        self.take(Pending::new(range, data, false));
                    }
                    IoOp::WriteZeroes if done > 0 => {
                        self.take(Pending::new(range, Data::Zeros, false));
                    }
                    IoOp::Discard => self.discard(range),
                    _ => {}
                }
                return io.complete(Err(ErrorKind::DeviceGone.into()));
            }
            Some(Fault::Lost) => return io.complete(Ok(())),
            Some(Fault::Misdirected(by)) => {
                io.range.offset = (io.range.offset + by) % (self.profile.size - io.range.len + 1);
                io.range.offset -= io.range.offset % SECTOR;
            }
            Some(Fault::Slow(_)) | None => {}
        }
        match io.op {
            IoOp::Read => self.read(&mut io),
            IoOp::Flush => self.flush(completed),
            IoOp::Write => {
                let data = Data::Bytes(io.buf.to_vec());
                self.take(Pending::new(io.range, data, io.flags.fua));
            }
            IoOp::WriteZeroes => {
                let data = Data::Zeros;
                self.take(Pending::new(io.range, data, io.flags.fua));
            }
            IoOp::Discard => self.discard(io.range),
            IoOp::Prefetch => unreachable!("no device supports it"),
        }
        io.complete(Ok(()))
    }

    /// A read sees completed writes; sectors being written may show the newer content already.
    fn read(&mut self, io: &mut Io) {
        self.view.read(io.range.offset, &mut io.buf);
        let garbage = self.profile.discards == Discards::Garbage;
        let writes = self.flights.iter().flatten().filter(|f| {
            let changes = match f.io.op {
                IoOp::Discard => garbage,
                op => op.changes_data(),
            };
            changes && f.io.range.overlaps(&io.range)
        });
        for write in writes {
            let both = write.io.range.intersection(&io.range);
            for sector in 0..both.len / SECTOR {
                if !self.rng.percent(50) {
                    continue;
                }
                let at = both.offset + sector * SECTOR;
                let to = (at - io.range.offset) as usize;
                let from = (at - write.io.range.offset) as usize;
                let out = &mut io.buf[to..to + SECTOR_SIZE];
                match write.io.op {
                    IoOp::Write => out.copy_from_slice(&write.io.buf[from..from + SECTOR_SIZE]),
                    _ => out.fill(0),
                }
            }
        }
    }

    fn discard(&mut self, range: ByteRange) {
        if self.profile.discards == Discards::Garbage {
            return self.garble(range);
        }
        let stays = self.rng.below(3);
        let part = match stays {
            0 => return,
            1 => ByteRange::new(range.offset, range.len / 2 / SECTOR * SECTOR),
            _ => range,
        };
        self.take(Pending::new(part, Data::Zeros, false));
    }

    /// Discards a range whose content may become anything.
    fn garble(&mut self, range: ByteRange) {
        let part = (range.len / GARBLED_PARTS).next_multiple_of(PAGE_BYTES);
        let mut at = range.offset;
        while at < range.end() {
            let range = ByteRange::new(at, part.min(range.end() - at));
            at = range.end();
            let data = match self.rng.below(3) {
                0 => continue,
                1 if range.len <= GARBAGE_MAX => {
                    let mut bytes = vec![0; range.len as usize];
                    bytes.chunks_mut(8).for_each(|word| {
                        word.copy_from_slice(&self.rng.number().to_le_bytes()[..word.len()]);
                    });
                    Data::Bytes(bytes)
                }
                _ => Data::Zeros,
            };
            self.take(Pending::new(range, data, false));
        }
    }

    fn take(&mut self, mut write: Pending) {
        write.durable |= !self.profile.volatile;
        apply(&mut self.view, &write);
        if write.durable && self.pending.is_empty() {
            apply(&mut self.durable, &write);
            self.settled += 1;
        } else {
            self.pending.push(write);
        }
    }

    fn flush(&mut self, completed: u64) {
        let count = (completed.saturating_sub(self.settled) as usize).min(self.pending.len());
        for write in self.pending.drain(..count).filter(|write| !write.given_up) {
            apply(&mut self.durable, &write);
        }
        self.settled += count as u64;
    }

    /// Flushes in no time; returns whether it succeeded.
    pub fn flush_at_once(&mut self) -> bool {
        match self.strike(&Io::flush(IoTag(0))) {
            None | Some(Fault::Slow(_)) => self.flush(u64::MAX),
            Some(Fault::Gone) => return false,
            Some(_) if self.gone => return false,
            Some(_) => {
                self.give_up(u64::MAX);
                return false;
            }
        }
        true
    }

    /// A failed flush loses some of the writes that it should have made durable.
    fn give_up(&mut self, completed: u64) {
        let count = (completed.saturating_sub(self.settled) as usize).min(self.pending.len());
        for write in &mut self.pending[..count] {
            if !write.durable && self.rng.percent(50) {
                write.given_up = true;
                self.lost.push(write.range);
            }
        }
    }

    /// Ranges of completed writes that no flush has covered.
    pub fn unflushed(&self) -> impl Iterator<Item = ByteRange> {
        self.pending.iter().filter(|write| !write.durable).map(|write| write.range)
    }

    /// Whether nothing is pending: all completed writes are stored, or given up.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether a power failure took content that failed flushes had lost and reads had still seen:
    /// the disk has changed without a write.
    #[must_use]
    pub fn took_back(&self) -> bool {
        self.took_back
    }

    /// The sectors whose content was lost although reads still see it.
    pub fn lost(&self) -> impl Iterator<Item = ByteRange> {
        let sectors = |range: &ByteRange| {
            (range.offset..range.end()).step_by(SECTOR_SIZE).map(|at| ByteRange::new(at, SECTOR))
        };
        let image = self.image();
        let differs = move |sector: &ByteRange| {
            let (mut shown, mut stored) = ([0; SECTOR_SIZE], [0; SECTOR_SIZE]);
            self.view.read(sector.offset, &mut shown);
            image.read(sector.offset, &mut stored);
            shown != stored
        };
        self.lost.iter().flat_map(sectors).filter(differs)
    }

    /// Number of writes whose outcome is uncertain if a crash comes now; `crash` needs as many
    /// fates.
    #[must_use]
    pub fn uncertain(&self) -> usize {
        let flights = self.flights.iter().flatten().filter(|f| f.io.op.changes_data());
        self.pending.iter().filter(|w| !w.durable).count() + flights.count()
    }

    /// Power fails. `fates` is called for each uncertain write, in the order in which the writes
    /// completed, those in flight last, with the number of its sectors.
    pub fn crash(&mut self, fates: &mut dyn FnMut(u64) -> Fate) {
        let takes_back = self.lost().next().is_some();
        self.took_back |= takes_back;
        for write in std::mem::take(&mut self.pending) {
            let fate = if write.durable { Fate::Keep } else { fates(write.range.len / SECTOR) };
            if !write.given_up {
                self.settle(write, fate);
            }
        }
        for flight in std::mem::take(&mut self.flights).into_iter().flatten() {
            if !flight.io.op.changes_data() {
                continue;
            }
            let fate = fates(flight.io.range.len / SECTOR);
            if let Some(write) = self.unfinished(flight) {
                self.settle(write, fate);
            }
        }
        self.settled = 0;
        self.lost.clear();
        self.view = self.durable.clone();
    }

    fn settle(&mut self, write: Pending, fate: Fate) {
        self.outcome(write, fate).iter().for_each(|part| apply(&mut self.durable, part));
    }

    /// The parts of an unfinished write that reach the disk.
    fn outcome(&self, write: Pending, fate: Fate) -> Vec<Pending> {
        if fate == Fate::Keep {
            return vec![write];
        }
        let sectors = write.range.len / SECTOR;
        // Zeros contain no data that could be garbled.
        let garbles = self.profile.garbles
            && matches!((&write.data, fate), (Data::Bytes(_), Fate::Garble(_)));
        let (first, mut chance) = match fate {
            Fate::Prefix(count) => (count, None),
            Fate::Scatter(seed) | Fate::Garble(seed) => (0, Some(Rng::new(seed))),
            Fate::Keep | Fate::Drop => (0, None),
        };
        let part = |sector: u64| {
            let from = (sector * SECTOR) as usize;
            let data = match &write.data {
                Data::Bytes(bytes) => Data::Bytes(bytes[from..from + SECTOR_SIZE].to_vec()),
                Data::Zeros => Data::Zeros,
            };
            (ByteRange::new(write.range.offset + sector * SECTOR, SECTOR), data)
        };
        let mut parts = Vec::new();
        for sector in 0..sectors {
            let (range, data) = part(sector);
            if chance.as_mut().map_or(sector < first, |chance| chance.percent(50)) {
                parts.push(Pending::new(range, data, false));
            } else if let Some(chance) = chance.as_mut().filter(|_| garbles)
                && chance.percent(50)
            {
                let garbage = (0..SECTOR).map(|_| chance.number() as u8).collect();
                parts.push(Pending::new(range, Data::Bytes(garbage), false));
            }
        }
        parts
    }

    /// The process dies, the machine keeps running, and its power never fails: completed writes
    /// stay, and those in flight end in some way.
    pub fn abandon(&mut self, fates: &mut dyn FnMut(u64) -> Fate) {
        self.pending.clear();
        self.durable = self.view.clone();
        self.crash(fates);
    }

    /// The process dies and the machine keeps running, but its power may fail later: completed
    /// writes stay until then, and those in flight end in some way.
    pub fn outlive(&mut self, fates: &mut dyn FnMut(u64) -> Fate) {
        for flight in std::mem::take(&mut self.flights).into_iter().flatten() {
            if !flight.io.op.changes_data() {
                continue;
            }
            let fate = fates(flight.io.range.len / SECTOR);
            if let Some(write) = self.unfinished(flight) {
                self.outcome(write, fate).into_iter().for_each(|part| self.take(part));
            }
        }
    }

    /// The write of a request in flight, unless a fault keeps it from the disk.
    fn unfinished(&self, Flight { io, fault, .. }: Flight) -> Option<Pending> {
        let reaches = matches!(fault, None | Some(Fault::Slow(_) | Fault::TornError));
        let data = match io.op {
            IoOp::Write => Data::Bytes(io.buf.to_vec()),
            _ => Data::Zeros,
        };
        (reaches && !self.gone).then(|| Pending::new(io.range, data, false))
    }

    /// Adds a fault.
    pub fn add_rule(&mut self, rule: Rule) {
        self.rules.push(rule);
    }

    /// Records the operations of requests, and starts a fault at the request with the given number.
    pub fn record(&mut self, planned: Option<(usize, Rule)>) {
        self.asked = Some(Vec::new());
        self.planned = planned;
    }

    /// The operations of all requests, if they were recorded.
    #[must_use]
    pub fn asked(&self) -> &[IoOp] {
        self.asked.as_deref().unwrap_or_default()
    }

    /// Ends every fault; a disk that was gone answers again, with its old content.
    pub fn heal(&mut self) {
        self.rules.clear();
        self.gone = false;
    }

    /// Whether it has stopped answering.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Whether a fault is in force.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.gone || !self.rules.is_empty()
    }

    /// Whether a request that changes data is in flight.
    #[must_use]
    pub fn changes(&self) -> bool {
        self.flights.iter().flatten().any(|flight| flight.io.op.changes_data())
    }

    /// Drops the requests in flight, which must not change data.
    ///
    /// # Panics If one does: a server that stopped in order leaves none in flight.
    pub fn forget_reads(&mut self) {
        let mut left = self.flights.iter().flatten();
        assert!(left.all(|f| !f.io.op.changes_data()), "a write is in flight after the stop");
        self.flights.clear();
    }

    /// The disk stops answering.
    pub fn vanish(&mut self) {
        self.gone = true;
    }

    /// Inverts a stored bit.
    pub fn rot(&mut self, offset: u64, bit: u32) {
        self.struck += 1;
        self.durable.flip(offset, bit);
        self.view.flip(offset, bit);
    }

    /// Overwrites stored bytes: a fault.
    pub fn spoil(&mut self, offset: u64, bytes: &[u8]) {
        self.struck += 1;
        self.put(offset, bytes);
    }

    /// Writes durably what somebody else writes while nothing is pending.
    pub fn put(&mut self, offset: u64, bytes: &[u8]) {
        self.durable.write(offset, bytes);
        self.view.write(offset, bytes);
    }

    /// Its durable content, including writes with force unit access that are still queued behind
    /// others.
    #[must_use]
    pub fn image(&self) -> Pages {
        let mut image = self.durable.clone();
        self.pending
            .iter()
            .filter(|write| write.durable)
            .for_each(|write| apply(&mut image, write));
        image
    }

    /// The content that a read returns now.
    #[must_use]
    pub fn view(&self) -> &Pages {
        &self.view
    }

    /// Another disk, of `size` bytes, takes its place.
    pub fn exchange(&mut self, size: u64, image: Pages) {
        self.profile.size = size;
        self.replace(image);
    }

    /// Replaces the content: the disk was swapped, or set back to an older state.
    pub fn replace(&mut self, image: Pages) {
        self.pending.clear();
        self.lost.clear();
        self.flights.clear();
        self.settled = 0;
        self.view = image.clone();
        self.durable = image;
    }
}

fn apply(pages: &mut Pages, write: &Pending) {
    match &write.data {
        Data::Bytes(bytes) => pages.write(write.range.offset, bytes),
        Data::Zeros => pages.zero(write.range.offset, write.range.len),
    }
}

#[cfg(test)]
mod tests;
