//! Faults on demand: a device that fails, lies or forgets, by a list that can change while it is
//! in use. What chance decides comes from a seed.

use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_block::{
    ByteRange, Completion, DeviceInfo, ErrorKind, Instant, Io, IoError, IoOp, IoQueue, SECTOR_SIZE,
};

use super::Slots;
use crate::device::BlockDevice;
use crate::random::Numbers;
use crate::ring::Ring;

/// What a faulty device does with a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Harm {
    /// Fail it; nothing is done.
    Fail(ErrorKind),
    /// Say that it was done, and do nothing: a lost write, a flush that lies.
    Lose,
    /// Do it, and change a bit of what a read returns. Other requests are left alone.
    Corrupt,
    /// Do it so many bytes further on, or at the start if that is past the end.
    Misdirect(u64),
}

/// How often a fault strikes the requests that match it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Often {
    /// Each of them, until the fault is removed.
    Always,
    /// The next so many.
    Times(u32),
    /// Each with this chance in a million.
    PerMillion(u32),
}

/// One fault: what it does, to which requests, how often.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// What is done.
    pub harm: Harm,
    /// To which operation.
    pub op: IoOp,
    /// To requests that touch this range; a flush is touched by any.
    pub range: ByteRange,
    /// How often.
    pub often: Often,
}

/// A device with faults.
#[derive(Clone)]
pub struct FaultDevice {
    inner: Arc<dyn BlockDevice>,
    plan: Arc<Mutex<Plan>>,
}

struct Plan {
    faults: Vec<Fault>,
    numbers: Numbers,
    struck: u64,
}

impl FaultDevice {
    /// A device without faults yet.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockDevice>, seed: u64) -> Self {
        let plan = Plan { faults: Vec::new(), numbers: Numbers::new(seed), struck: 0 };
        Self { inner, plan: Arc::new(Mutex::new(plan)) }
    }

    /// Adds a fault. The first that strikes a request decides what happens to it.
    pub fn add(&self, fault: Fault) {
        locked(&self.plan).faults.push(fault);
    }

    /// Fails everything from now on, as a device that was pulled out does.
    pub fn vanish(&self) {
        let gone = Harm::Fail(ErrorKind::DeviceGone);
        for op in [IoOp::Read, IoOp::Write, IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes] {
            self.add(Fault::anywhere(gone, op, Often::Always));
        }
    }

    /// Removes every fault.
    pub fn heal(&self) {
        locked(&self.plan).faults.clear();
    }

    /// Requests that a fault struck.
    #[must_use]
    pub fn struck(&self) -> u64 {
        locked(&self.plan).struck
    }
}

/// A plan is whole between calls, whatever happened to a thread.
fn locked(plan: &Mutex<Plan>) -> MutexGuard<'_, Plan> {
    plan.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BlockDevice for FaultDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn prepare(&self, queues: usize) -> io::Result<()> {
        self.inner.prepare(queues)
    }

    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        Ok(Box::new(FaultQueue {
            inner: self.inner.open_queue(ring)?,
            plan: Arc::clone(&self.plan),
            slots: Slots::default(),
            finished: Vec::new(),
            below: Vec::new(),
        }))
    }
}

impl Plan {
    /// What happens to a request.
    fn strike(&mut self, op: IoOp, range: ByteRange) -> Option<Harm> {
        let numbers = &mut self.numbers;
        let mut strikes = |fault: &mut Fault| match &mut fault.often {
            Often::Always => true,
            Often::Times(left) => {
                let strikes = *left > 0;
                *left = left.saturating_sub(1);
                strikes
            }
            Often::PerMillion(chance) => numbers.below(1_000_000) < u64::from(*chance),
        };
        let touched = |fault: &&mut Fault| {
            fault.op == op && (op == IoOp::Flush || fault.range.overlaps(&range))
        };
        let mut matching = self.faults.iter_mut().filter(touched);
        let harm = matching.find_map(|fault| strikes(fault).then_some(fault.harm))?;
        self.struck += 1;
        Some(harm)
    }
}

struct FaultQueue {
    inner: Box<dyn IoQueue>,
    plan: Arc<Mutex<Plan>>,
    /// Where a bit of the data changes, if it does.
    slots: Slots<Option<u64>>,
    finished: Vec<Completion>,
    /// Empty between uses.
    below: Vec<Completion>,
}

impl IoQueue for FaultQueue {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&mut self, now: Instant, mut io: Io) -> Result<(), Io> {
        let mut plan = locked(&self.plan);
        let harm = plan.strike(io.op, io.range);
        let (tag, offset) = (io.tag, io.range.offset);
        let mut flip = None;
        match harm {
            Some(Harm::Fail(kind)) => {
                let error = IoError::with_source(kind, io::Error::other("a fault put in"));
                self.finished.push(io.complete(Err(error)));
                return Ok(());
            }
            Some(Harm::Lose) => {
                self.finished.push(io.complete(Ok(())));
                return Ok(());
            }
            Some(Harm::Corrupt) if io.op == IoOp::Read && !io.buf.is_empty() => {
                flip = Some(plan.numbers.below(io.buf.len() as u64 * 8));
            }
            Some(Harm::Misdirect(by)) => {
                let last = self.inner.info().size.saturating_sub(io.range.len);
                let there = offset.saturating_add(by);
                io.range.offset = if there <= last { there } else { 0 };
            }
            Some(Harm::Corrupt) | None => {}
        }
        drop(plan);
        io.tag = self.slots.put(tag, flip);
        self.inner.submit(now, io).map_err(|mut io| {
            self.slots.take(io.tag);
            (io.tag, io.range.offset) = (tag, offset);
            io
        })
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.inner.poll(now, &mut self.below);
        for mut end in self.below.drain(..) {
            let (tag, flip) = self.slots.take(end.tag);
            end.tag = tag;
            if let Some(bit) = flip {
                end.buf[bit as usize / 8] ^= 1 << (bit % 8);
            }
            done.push(end);
        }
        done.append(&mut self.finished);
    }

    fn deadline(&self) -> Option<Instant> {
        if !self.finished.is_empty() {
            return Some(Instant(0));
        }
        self.inner.deadline()
    }
}

impl Fault {
    /// A fault that strikes `op` anywhere on a device.
    #[must_use]
    pub fn anywhere(harm: Harm, op: IoOp, often: Often) -> Self {
        Self { harm, op, range: ByteRange::new(0, u64::MAX), often }
    }

    /// A fault that strikes `op` at the sector that holds byte `offset`.
    #[must_use]
    pub fn at(harm: Harm, op: IoOp, offset: u64, often: Often) -> Self {
        let sector = SECTOR_SIZE as u64;
        let range = ByteRange::new(offset - offset % sector, sector);
        Self { harm, op, range, often }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDevice;
    use crate::testing::{Bench, exercise};

    fn faulty() -> FaultDevice {
        FaultDevice::new(Arc::new(MemoryDevice::new(1 << 20)), 1)
    }

    #[test]
    fn without_faults_it_is_the_device_below() {
        exercise(&faulty(), 31);
    }

    #[test]
    fn errors_strike_once_or_always_where_they_are_put() {
        let device = faulty();
        let mut bench = Bench::new(&device);
        let media = Harm::Fail(ErrorKind::Media);
        device.add(Fault::at(media, IoOp::Read, 4096 + 100, Often::Times(1)));
        assert!(bench.read(0, 4096).is_ok());
        assert!(bench.write(4096, &[1; 512]).is_ok());
        assert_eq!(bench.read(0, 8192).unwrap_err().kind(), ErrorKind::Media);
        assert!(bench.read(0, 8192).is_ok());
        device.add(Fault::anywhere(media, IoOp::Write, Often::Always));
        assert!(bench.write(0, &[1; 512]).is_err() && bench.write(8192, &[1; 512]).is_err());
        device.heal();
        assert!(bench.write(0, &[1; 512]).is_ok());
        assert_eq!(device.struck(), 3);
    }

    #[test]
    fn writes_are_lost_misdirected_and_reads_corrupted() {
        let device = faulty();
        let mut bench = Bench::new(&device);
        bench.write(0, &[1; 512]).unwrap();
        device.add(Fault::anywhere(Harm::Lose, IoOp::Write, Often::Times(1)));
        bench.write(0, &[2; 512]).unwrap();
        assert_eq!(bench.read(0, 512).unwrap(), [1; 512]);
        device.heal();
        device.add(Fault::anywhere(Harm::Misdirect(1024), IoOp::Write, Often::Times(1)));
        bench.write(0, &[3; 512]).unwrap();
        assert_eq!(bench.read(0, 512).unwrap(), [1; 512]);
        assert_eq!(bench.read(1024, 512).unwrap(), [3; 512]);
        device.heal();
        device.add(Fault::anywhere(Harm::Corrupt, IoOp::Read, Often::Times(1)));
        let read = bench.read(0, 512).unwrap();
        let changed: u32 = read.iter().map(|byte| (byte ^ 1).count_ones()).sum();
        assert_eq!(changed, 1);
        assert_eq!(bench.read(0, 512).unwrap(), [1; 512]);
    }

    #[test]
    fn a_vanished_device_does_nothing_until_it_is_back() {
        let device = faulty();
        let mut bench = Bench::new(&device);
        bench.write(0, &[1; 512]).unwrap();
        device.vanish();
        for op in [IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes] {
            let range = if op == IoOp::Flush { (0, 0) } else { (0, 512) };
            let result = bench.bare(op, ByteRange::new(range.0, range.1));
            assert_eq!(result.unwrap_err().kind(), ErrorKind::DeviceGone, "{op:?}");
        }
        assert!(bench.write(0, &[2; 512]).is_err() && bench.read(0, 512).is_err());
        device.heal();
        assert_eq!(bench.read(0, 512).unwrap(), [1; 512]);
    }

    #[test]
    fn chance_is_the_seed_s() {
        let outcomes = |seed| {
            let device = FaultDevice::new(Arc::new(MemoryDevice::new(1 << 20)), seed);
            let often = Often::PerMillion(300_000);
            device.add(Fault::anywhere(Harm::Fail(ErrorKind::Media), IoOp::Read, often));
            let mut bench = Bench::new(&device);
            (0..300).map(|_| bench.read(0, 512).is_ok()).collect::<Vec<bool>>()
        };
        let first = outcomes(1);
        assert_eq!(first, outcomes(1));
        assert_ne!(first, outcomes(2));
        assert!((60..120).contains(&first.iter().filter(|ok| !**ok).count()));
    }
}
