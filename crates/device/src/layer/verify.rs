//! A device that is not believed: the checksum of each sector written is remembered, and each
//! read compared with it. A difference fails the read with `Corrupt` and is counted.
//!
//! What is not known is not judged: sectors never written through this layer, discarded ones,
//! those touched by a failed change, by two changes at once, or by a change while being read.

use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_block::{
    ByteRange, Completion, DeviceInfo, ErrorKind, Instant, Io, IoError, IoOp, IoQueue, SECTOR_SIZE,
};
use forebay_codec::crc32c;

use super::Slots;
use crate::device::BlockDevice;
use crate::ring::Ring;

const SECTOR: u64 = SECTOR_SIZE as u64;

/// A device whose reads are checked against what was written.
#[derive(Clone)]
pub struct VerifyDevice {
    inner: Arc<dyn BlockDevice>,
    memory: Arc<Mutex<Memory>>,
}

#[derive(Default)]
struct Memory {
    /// Sectors that something is known of; all others are unknown.
    sectors: HashMap<u64, Sector>,
    /// Beginnings and ends of changes so far.
    events: u64,
    mismatches: u64,
}

#[derive(Clone, Copy)]
struct Sector {
    /// The newest beginning or end of a change.
    event: u64,
    /// Changes that have not completed.
    changing: u32,
    /// Whether there were two of them at once.
    mixed: bool,
    /// What it holds, while nothing changes it.
    crc: Option<u32>,
}

impl VerifyDevice {
    /// Checks what `inner` returns. Takes some 24 bytes of RAM for each sector written.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockDevice>) -> Self {
        Self { inner, memory: Arc::default() }
    }

    /// Sectors that did not hold what was written to them, each time they were read.
    #[must_use]
    pub fn mismatches(&self) -> u64 {
        locked(&self.memory).mismatches
    }
}

/// What is remembered is whole between calls, whatever happened to a thread.
fn locked(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BlockDevice for VerifyDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn prepare(&self, queues: usize) -> io::Result<()> {
        self.inner.prepare(queues)
    }

    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        Ok(Box::new(VerifyQueue {
            inner: self.inner.open_queue(ring)?,
            memory: Arc::clone(&self.memory),
            slots: Slots::default(),
            below: Vec::new(),
        }))
    }
}

/// What must be remembered of a request.
enum Noted {
    /// A flush, or a request that is not on the device.
    Nothing,
    /// A read, with the number of the last event before it.
    Read { range: ByteRange, event: u64 },
    /// A change, with the checksum of each sector, none if not known.
    Change { range: ByteRange, crcs: Vec<Option<u32>> },
}

struct VerifyQueue {
    inner: Box<dyn IoQueue>,
    memory: Arc<Mutex<Memory>>,
    slots: Slots<Noted>,
    /// Empty between uses.
    below: Vec<Completion>,
}

impl IoQueue for VerifyQueue {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&mut self, now: Instant, mut io: Io) -> Result<(), Io> {
        let tag = io.tag;
        let noted = match crate::device::check(self.inner.info(), &io) {
            Ok(()) => locked(&self.memory).begin(&io),
            Err(_) => Noted::Nothing,
        };
        io.tag = self.slots.put(tag, noted);
        self.inner.submit(now, io).map_err(|mut io| {
            let (_, noted) = self.slots.take(io.tag);
            locked(&self.memory).forget(noted);
            io.tag = tag;
            io
        })
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.inner.poll(now, &mut self.below);
        if self.below.is_empty() {
            return;
        }
        let mut memory = locked(&self.memory);
        for mut end in self.below.drain(..) {
            let (tag, noted) = self.slots.take(end.tag);
            end.tag = tag;
            memory.finish(noted, &mut end);
            done.push(end);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }
}

/// The sectors that a range touches, and whether it covers each.
fn sectors(range: ByteRange) -> impl Iterator<Item = (u64, bool)> {
    (range.offset / SECTOR..range.end().div_ceil(SECTOR)).map(move |sector| {
        let whole = ByteRange::new(sector * SECTOR, SECTOR);
        (sector, range.intersection(&whole) == whole)
    })
}

/// The bytes of a sector in the buffer of a request for `range`.
fn bytes_of(range: ByteRange, sector: u64, buf: &[u8]) -> &[u8] {
    let at = (sector * SECTOR - range.offset) as usize;
    &buf[at..at + SECTOR_SIZE]
}

impl Memory {
    fn begin(&mut self, io: &Io) -> Noted {
        let range = io.range;
        match io.op {
            IoOp::Flush => return Noted::Nothing,
            IoOp::Read => return Noted::Read { range, event: self.events },
            IoOp::Write | IoOp::Discard | IoOp::WriteZeroes => {}
        }
        self.events += 1;
        let event = self.events;
        let zero = crc32c(&[0; SECTOR_SIZE]);
        let mut crcs = Vec::new();
        for (sector, whole) in sectors(range) {
            crcs.push(match io.op {
                IoOp::Write if whole => Some(crc32c(bytes_of(range, sector, &io.buf))),
                IoOp::WriteZeroes if whole => Some(zero),
                _ => None,
            });
            let unknown = Sector { event, changing: 0, mixed: false, crc: None };
            let state = self.sectors.entry(sector).or_insert(unknown);
            state.event = event;
            state.mixed |= state.changing > 0;
            state.changing += 1;
            state.crc = None;
        }
        Noted::Change { range, crcs }
    }

    /// Takes back what was noted of a request that the device did not take.
    fn forget(&mut self, noted: Noted) {
        if let Noted::Change { range, crcs } = noted {
            self.changed(range, &vec![None; crcs.len()]);
        }
    }

    fn finish(&mut self, noted: Noted, end: &mut Completion) {
        match noted {
            Noted::Nothing => {}
            Noted::Read { range, event } if end.result.is_ok() => {
                let wrong = self.compare(range, event, &end.buf);
                if let Some(sector) = wrong {
                    let text = format!("sector {sector} is not what was written to it");
                    let error = io::Error::other(text);
                    end.result = Err(IoError::with_source(ErrorKind::Corrupt, error));
                }
            }
            Noted::Read { .. } => {}
            Noted::Change { range, mut crcs } => {
                if end.result.is_err() {
                    crcs.fill(None);
                }
                self.changed(range, &crcs);
            }
        }
    }

    fn changed(&mut self, range: ByteRange, crcs: &[Option<u32>]) {
        self.events += 1;
        for ((sector, _), crc) in sectors(range).zip(crcs) {
            let Some(state) = self.sectors.get_mut(&sector) else { continue };
            state.event = self.events;
            state.changing -= 1;
            if state.changing == 0 {
                state.crc = if state.mixed { None } else { *crc };
                state.mixed = false;
            }
        }
    }

    /// The first sector of a read that is not what was written; counts them all.
    fn compare(&mut self, range: ByteRange, before: u64, buf: &[u8]) -> Option<u64> {
        let mut first = None;
        for (sector, whole) in sectors(range) {
            let Some(state) = self.sectors.get(&sector) else { continue };
            let Some(crc) = state.crc else { continue };
            if whole && state.event <= before && crc != crc32c(bytes_of(range, sector, buf)) {
                self.mismatches += 1;
                first.get_or_insert(sector);
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::fault::{Fault, FaultDevice, Harm, Often};
    use crate::testing::{Bench, exercise, exercise_in_units};
    use crate::{FileDevice, MemoryDevice, OpenMode};

    #[test]
    fn honest_devices_pass() {
        let device = VerifyDevice::new(Arc::new(MemoryDevice::new(1 << 20)));
        exercise(&device, 61);
        exercise_in_units(&device, 62, 1);
        assert_eq!(device.mismatches(), 0);
        let path = crate::testing::TempPath::new();
        let mode = OpenMode { create_size: Some(8 << 20), ..OpenMode::default() };
        let device = VerifyDevice::new(Arc::new(FileDevice::open(&path.0, mode).unwrap()));
        exercise(&device, 63);
        assert_eq!(device.mismatches(), 0);
    }

    #[test]
    fn lies_are_found() {
        for (harm, op) in [
            (Harm::Corrupt, IoOp::Read),
            (Harm::Lose, IoOp::Write),
            (Harm::Misdirect(4096), IoOp::Write),
            (Harm::Misdirect(512), IoOp::Read),
        ] {
            let faulty = FaultDevice::new(Arc::new(MemoryDevice::new(1 << 20)), 1);
            let device = VerifyDevice::new(Arc::new(faulty.clone()));
            let mut bench = Bench::new(&device);
            bench.write(0, &[1; 4096]).unwrap();
            bench.write(512, &[9; 512]).unwrap();
            bench.read(0, 4096).unwrap();
            faulty.add(Fault::anywhere(harm, op, Often::Times(1)));
            bench.write(0, &[2; 4096]).unwrap();
            let read = bench.read(0, 4096);
            assert_eq!(read.unwrap_err().kind(), ErrorKind::Corrupt, "{harm:?}");
            assert!(device.mismatches() > 0);
        }
    }

    #[test]
    fn changes_at_once_are_not_judged() {
        let device = VerifyDevice::new(Arc::new(MemoryDevice::new(1 << 20)));
        let mut bench = Bench::new(&device);
        let ios = vec![bench.write_io(0, &[1; 1024]), bench.write_io(512, &[2; 1024])];
        bench.run(ios);
        bench.read(0, 2048).unwrap();
        let ios = vec![
            bench.write_io(0, &[4; 4096]),
            bench.read_io(0, 4096),
            bench.write_io(0, &[3; 4096]),
        ];
        assert!(bench.run(ios).iter().all(|end| end.result.is_ok()));
        assert_eq!(bench.read(0, 4096).unwrap(), [3; 4096]);
    }
}
