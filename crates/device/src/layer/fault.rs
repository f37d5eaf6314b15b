//! A device that fails a share of its requests: `?fault=OP:SHARE` in a primary's URI. A seed
//! determines the requests that fail, so a single client meets the same faults in every run.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_block::{Completion, DeviceInfo, ErrorKind, Instant, Io, IoError, IoOp, IoQueue};

use super::{Layer, Layered, Slots};
use crate::device::BlockDevice;
use crate::random::Numbers;

/// Shares are in millionths; this is all requests.
const WHOLE: u32 = 1_000_000;

/// For each operation, the share of requests that fail, in millionths.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Faults {
    read: u32,
    write: u32,
    flush: u32,
}

impl Faults {
    /// Parses `OP:SHARE[,OP:SHARE]...`, with OP one of read, write and flush, and SHARE from 0 to
    /// 1.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for one in text.split(',') {
            let (op, share) = one
                .split_once(':')
                .ok_or_else(|| format!("fault {one:?} is not OP:SHARE, as read:0.01"))?;
            let place = match op {
                "read" => &mut faults.read,
                "write" => &mut faults.write,
                "flush" => &mut faults.flush,
                _ => return Err(format!("fault of {op:?}; known are read, write, flush")),
            };
            *place = millionths(share)
                .ok_or_else(|| format!("share {share:?} is not from 0 to 1, as 0.01 or 1"))?;
        }
        Ok(faults)
    }

    /// The share for an operation. Discards and write-zeroes count as writes.
    fn of(self, op: IoOp) -> u32 {
        match op {
            IoOp::Read | IoOp::Prefetch => self.read,
            IoOp::Flush => self.flush,
            IoOp::Write | IoOp::Discard | IoOp::WriteZeroes => self.write,
        }
    }
}

/// Parses a share from 0 to 1 into millionths.
fn millionths(text: &str) -> Option<u32> {
    let share: f64 = text.parse().ok()?;
    (0.0..=1.0).contains(&share).then(|| (share * f64::from(WHOLE)).round() as u32)
}

/// A device with faults.
pub(crate) type FaultDevice = Layered<Faulty>;

/// Which requests fail.
pub(crate) struct Faulty {
    faults: Faults,
    /// Shared by all queues.
    numbers: Arc<Mutex<Numbers>>,
}

impl FaultDevice {
    /// Fails requests of `below`; `seed` determines which.
    pub(crate) fn new(below: Arc<dyn BlockDevice>, faults: Faults, seed: u64) -> Self {
        let layer = Faulty { faults, numbers: Arc::new(Mutex::new(Numbers::new(seed))) };
        Self { below, layer }
    }
}

impl Layer for Faulty {
    fn queue(&self, below: Box<dyn IoQueue>) -> Box<dyn IoQueue> {
        Box::new(FaultQueue {
            inner: below,
            faults: self.faults,
            numbers: Arc::clone(&self.numbers),
            slots: Slots::default(),
            failed: Vec::new(),
            below: Vec::new(),
        })
    }
}

struct FaultQueue {
    inner: Box<dyn IoQueue>,
    faults: Faults,
    numbers: Arc<Mutex<Numbers>>,
    /// Requests at the device below.
    slots: Slots<()>,
    failed: Vec<Completion>,
    /// Scratch space; empty between uses.
    below: Vec<Completion>,
}

impl FaultQueue {
    fn strikes(&self, op: IoOp) -> bool {
        let share = self.faults.of(op);
        // Poisoning is ignored: the numbers are valid between calls, even after a panic.
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.below(WHOLE.into()) < share.into()
    }
}

impl IoQueue for FaultQueue {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        if self.strikes(io.op) {
            let source = io::Error::other("a fault from the URI of the device");
            let error = IoError::with_source(ErrorKind::Media, source);
            self.failed.push(io.complete(Err(error)));
            return Ok(());
        }
        self.slots.pass(&mut *self.inner, now, io, ()).map_err(|(io, ())| io)
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.inner.poll(now, &mut self.below);
        for mut end in self.below.drain(..) {
            end.tag = self.slots.take(end.tag).0;
            done.push(end);
        }
        done.append(&mut self.failed);
    }

    fn deadline(&self) -> Option<Instant> {
        if !self.failed.is_empty() {
            return Some(Instant(0));
        }
        self.inner.deadline()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDevice;
    use crate::testing::{Bench, exercise};

    fn faulty(faults: &str) -> FaultDevice {
        let faults = Faults::parse(faults).expect("it is understood");
        FaultDevice::new(Arc::new(MemoryDevice::new(1 << 20)), faults, 7)
    }

    #[test]
    fn shares_are_understood_or_refused() {
        let found = Faults::parse("read:0.001,flush:1");
        assert_eq!(found, Ok(Faults { read: 1000, write: 0, flush: WHOLE }));
        for (text, word) in [
            ("read", "read:0.01"),
            ("trim:1", "read, write, flush"),
            ("read:1%", "from 0 to 1"),
            ("write:1.01", "from 0 to 1"),
        ] {
            let refusal = Faults::parse(text).expect_err(text);
            assert!(refusal.contains(word), "{text}: {refusal}");
        }
    }

    #[test]
    fn without_faults_it_is_the_device_below() {
        exercise(&faulty("read:0"), 43);
    }

    #[test]
    fn about_the_share_of_the_operation_fails_and_nothing_else() {
        let device = faulty("read:0.1");
        let mut bench = Bench::new(&device);
        let reads = (0..1000).map(|i| bench.read_io(i * 512, 512)).collect();
        let failed = bench.run(reads).iter().filter(|end| end.result.is_err()).count();
        assert!((50..150).contains(&failed), "{failed} of 1,000 at 10 %");
        let writes = (0..100).map(|i| bench.write_io(i * 512, &[1; 512])).collect();
        assert!(bench.run(writes).iter().all(|end| end.result.is_ok()));
    }
}
