//! A slower device: completions held for a time by operation, and a limit on bytes and
//! operations a second. The setting can change while the device is in use.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_block::{Completion, DeviceInfo, Instant, Io, IoOp, IoQueue};

use super::Slots;
use crate::device::BlockDevice;
use crate::ring::Ring;

const NANOS: u128 = 1_000_000_000;

/// How slow. The default is not slower at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Delays {
    /// Added to each read.
    pub read: Duration,
    /// Added to each write, discard and write-zeroes.
    pub write: Duration,
    /// Added to each flush.
    pub flush: Duration,
    /// Bytes read and written a second, all queues together.
    pub bytes_per_second: Option<u64>,
    /// Requests a second, all queues together.
    pub requests_per_second: Option<u64>,
}

/// A slower device.
#[derive(Clone)]
pub struct DelayDevice {
    inner: Arc<dyn BlockDevice>,
    pace: Arc<Mutex<Pace>>,
}

/// The setting, and when the limits let the next request begin.
struct Pace {
    delays: Delays,
    next: Instant,
}

impl DelayDevice {
    /// Slows `inner` down.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockDevice>, delays: Delays) -> Self {
        let pace = Pace { delays, next: Instant(0) };
        Self { inner, pace: Arc::new(Mutex::new(pace)) }
    }

    /// Changes the setting, for requests that come from now on.
    pub fn set(&self, delays: Delays) {
        *locked(&self.pace) = Pace { delays, next: Instant(0) };
    }
}

/// A pace is whole between calls, whatever happened to a thread.
fn locked(pace: &Mutex<Pace>) -> MutexGuard<'_, Pace> {
    pace.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pace {
    /// When a request that comes now may complete.
    fn due(&mut self, now: Instant, io: &Io) -> Instant {
        let Delays { read, write, flush, bytes_per_second, requests_per_second } = self.delays;
        let start = now.max(self.next);
        let moved = u128::from(io.buf.len() as u64) * NANOS;
        let for_bytes = bytes_per_second.map_or(0, |rate| moved / u128::from(rate.max(1)));
        let for_one = requests_per_second.map_or(0, |rate| NANOS / u128::from(rate.max(1)));
        let busy = u64::try_from(for_bytes.max(for_one)).unwrap_or(u64::MAX);
        self.next = Instant(start.0.saturating_add(busy));
        let added = match io.op {
            IoOp::Read => read,
            IoOp::Flush => flush,
            IoOp::Write | IoOp::Discard | IoOp::WriteZeroes => write,
        };
        self.next + added
    }
}

impl BlockDevice for DelayDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn prepare(&self, queues: usize) -> io::Result<()> {
        self.inner.prepare(queues)
    }

    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        Ok(Box::new(DelayQueue {
            inner: self.inner.open_queue(ring)?,
            pace: Arc::clone(&self.pace),
            slots: Slots::default(),
            held: Slots::default(),
            dues: BinaryHeap::new(),
            below: Vec::new(),
        }))
    }
}

struct DelayQueue {
    inner: Box<dyn IoQueue>,
    pace: Arc<Mutex<Pace>>,
    /// Requests below, with the time of each.
    slots: Slots<Instant>,
    /// Completions whose time has not come.
    held: Slots<Completion>,
    /// The times of those, with the place of each.
    dues: BinaryHeap<Reverse<(Instant, u64)>>,
    /// Empty between uses.
    below: Vec<Completion>,
}

impl IoQueue for DelayQueue {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&mut self, now: Instant, mut io: Io) -> Result<(), Io> {
        let tag = io.tag;
        io.tag = self.slots.put(tag, Instant(0));
        let place = io.tag;
        let due = locked(&self.pace).due(now, &io);
        self.inner.submit(now, io).map_err(|mut io| {
            self.slots.take(place);
            io.tag = tag;
            io
        })?;
        self.slots.set(place, due);
        Ok(())
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.inner.poll(now, &mut self.below);
        for mut end in self.below.drain(..) {
            let (tag, due) = self.slots.take(end.tag);
            end.tag = tag;
            if due <= now {
                done.push(end);
            } else {
                let place = self.held.put(tag, end);
                self.dues.push(Reverse((due, place.0)));
            }
        }
        while let Some(&Reverse((due, place))) = self.dues.peek() {
            if due > now {
                break;
            }
            self.dues.pop();
            done.push(self.held.take(forebay_block::IoTag(place)).1);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let held = self.dues.peek().map(|&Reverse((due, _))| due);
        self.inner.deadline().into_iter().chain(held).min()
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::ByteRange;

    use super::*;
    use crate::MemoryDevice;
    use crate::testing::{Bench, exercise};

    fn slow(delays: Delays) -> DelayDevice {
        DelayDevice::new(Arc::new(MemoryDevice::new(1 << 20)), delays)
    }

    fn took(bench: &mut Bench, ios: Vec<Io>) -> Duration {
        let started = bench.clock.now();
        assert!(bench.run(ios).iter().all(|end| end.result.is_ok()));
        bench.clock.now().since(started)
    }

    #[test]
    fn it_is_the_device_below_with_and_without_delay() {
        exercise(&slow(Delays::default()), 41);
        let read = Duration::from_micros(200);
        exercise(&slow(Delays { read, ..Delays::default() }), 42);
    }

    #[test]
    fn each_operation_has_its_delay_and_they_overlap() {
        let ms = Duration::from_millis;
        let device = slow(Delays { read: ms(100), flush: ms(150), ..Delays::default() });
        let mut bench = Bench::new(&device);
        let reads = (0..10).map(|i| bench.read_io(i * 512, 512)).collect();
        let time = took(&mut bench, reads);
        assert!(time >= ms(100) && time < ms(700), "ten reads of 100 ms took {time:?}");
        let write = bench.write_io(0, &[1; 512]);
        assert!(took(&mut bench, vec![write]) < ms(100));
        let started = bench.clock.now();
        bench.bare(IoOp::Flush, ByteRange::default()).unwrap();
        assert!(bench.clock.now().since(started) >= ms(150));
        device.set(Delays::default());
        let read = bench.read_io(0, 512);
        assert!(took(&mut bench, vec![read]) < ms(100));
    }

    #[test]
    fn rates_are_kept() {
        let ms = Duration::from_millis;
        let device = slow(Delays { bytes_per_second: Some(10_000_000), ..Delays::default() });
        let mut bench = Bench::new(&device);
        let writes = (0..10).map(|_| bench.write_io(0, &[1; 100 * 512])).collect();
        let time = took(&mut bench, writes);
        assert!(time >= ms(51) && time < ms(500), "512,000 bytes at 10 MB/s took {time:?}");
        device.set(Delays { requests_per_second: Some(1000), ..Delays::default() });
        let reads = (0..50).map(|i| bench.read_io(i * 512, 512)).collect();
        let time = took(&mut bench, reads);
        assert!(time >= ms(50) && time < ms(500), "50 requests at 1,000 a second took {time:?}");
    }
}
