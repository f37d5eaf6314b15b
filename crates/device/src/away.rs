//! A stand-in for an absent device: it has the recorded size and identity of the device, and fails
//! every request until the device appears. From then on its queues pass requests to the device; a
//! request that failed before stays failed.
//!
//! The caller must check that the device that appeared is the right one before handing it over.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use forebay_block::{Completion, DeviceInfo, ErrorKind, Instant, Io, IoQueue};

use crate::device::BlockDevice;
use crate::ring::{Ring, Waker};

/// Delay before a queue asks the device again for a queue that it refused.
const REFUSED_PAUSE: Duration = Duration::from_secs(5);

/// A device that is absent, or was when this was created.
pub struct AwayDevice {
    shared: Arc<Shared>,
    why: String,
}

/// State shared by its queues.
struct Shared {
    info: DeviceInfo,
    real: OnceLock<Arc<dyn BlockDevice>>,
    /// Wakers of its queues' rings, used when the device appears.
    wakers: Mutex<Vec<Waker>>,
    /// Whether the device is to await stragglers when it appears.
    awaits: AtomicBool,
}

impl AwayDevice {
    /// Stands in for the device `identity` of `size` bytes, which could not be opened because of
    /// `why`.
    #[must_use]
    pub fn new(size: u64, identity: &str, name: &str, why: String) -> Self {
        let plain = DeviceInfo::plain(size, identity);
        // Nothing is known about the device to come: a flush for each queue is correct for any
        // device.
        let info = DeviceInfo { name: name.to_owned(), flush_by_queue: true, ..plain };
        let awaits = AtomicBool::new(false);
        let shared = Shared { info, real: OnceLock::new(), wakers: Mutex::default(), awaits };
        Self { shared: Arc::new(shared), why }
    }

    /// Hands over the device: requests go to it from now on. It must be the device that this stands
    /// in for, with at least as many bytes, and be able to open a queue for each current queue of
    /// this one at once ([`BlockDevice::prepare`]). A second call has no effect.
    pub fn come(&self, real: Arc<dyn BlockDevice>) {
        if self.shared.awaits.load(Ordering::Relaxed) {
            real.await_stragglers();
        }
        if self.shared.real.set(real).is_ok() {
            let wakers = self.shared.wakers.lock().unwrap_or_else(PoisonError::into_inner);
            wakers.iter().for_each(Waker::wake);
        }
    }

    /// The device, once it has appeared.
    #[must_use]
    pub fn real(&self) -> Option<&Arc<dyn BlockDevice>> {
        self.shared.real.get()
    }
}

impl BlockDevice for AwayDevice {
    /// The properties assumed while the device was absent, even after it appeared.
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn remark(&self) -> Option<&str> {
        self.real().is_none().then_some(&self.why)
    }

    fn is_away(&self) -> bool {
        self.real().is_none()
    }

    fn await_stragglers(&self) {
        self.shared.awaits.store(true, Ordering::Relaxed);
    }

    /// Those of an absent device may arrive when it is back.
    fn has_stragglers(&self) -> bool {
        let awaits = self.shared.awaits.load(Ordering::Relaxed);
        self.real().map_or(awaits, |real| real.has_stragglers())
    }

    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        self.shared.wakers.lock().unwrap_or_else(PoisonError::into_inner).push(ring.waker());
        Ok(Box::new(AwayQueue {
            shared: Arc::clone(&self.shared),
            ring: Rc::clone(ring),
            real: None,
            failed: Vec::new(),
            retry_at: None,
        }))
    }
}

struct AwayQueue {
    shared: Arc<Shared>,
    ring: Rc<Ring>,
    real: Option<Box<dyn IoQueue>>,
    /// Requests to fail at the next poll.
    failed: Vec<Io>,
    /// When to ask the device again for a queue that it refused.
    retry_at: Option<Instant>,
}

impl AwayQueue {
    /// The device's queue, if the device has appeared and provides one.
    fn real(&mut self, now: Instant) -> Option<&mut Box<dyn IoQueue>> {
        if self.real.is_none() && self.retry_at.is_none_or(|at| now >= at) {
            let device = self.shared.real.get()?;
            let opened = device.open_queue(&self.ring);
            self.retry_at = opened.is_err().then(|| now + REFUSED_PAUSE);
            self.real = opened.ok();
        }
        self.real.as_mut()
    }
}

impl IoQueue for AwayQueue {
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        if let Some(real) = self.real(now) {
            return real.submit(now, io);
        }
        self.failed.push(io);
        Ok(())
    }

    fn poll(&mut self, now: Instant, completions: &mut Vec<Completion>) {
        let failed = self.failed.drain(..);
        completions.extend(failed.map(|io| io.complete(Err(ErrorKind::DeviceGone.into()))));
        // Opens the queue as soon as the device appears, before any request needs it.
        if let Some(real) = self.real(now) {
            real.poll(now, completions);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let at_once = (!self.failed.is_empty()).then_some(Instant::default());
        let real = self.real.as_ref().and_then(|real| real.deadline());
        [at_once, real, self.retry_at].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::{ByteRange, IoOp};

    use super::*;
    use crate::MemoryDevice;
    use crate::testing::{Bench, exercise};

    fn away() -> AwayDevice {
        AwayDevice::new(1 << 20, "memory", "memory", "it is not plugged in".to_owned())
    }

    #[test]
    fn requests_fail_until_the_device_has_come_and_go_to_it_then() {
        let device = away();
        let mut bench = Bench::new(&device);
        assert!(bench.write(0, &[1; 4096]).is_err());
        assert!(bench.bare(IoOp::Flush, ByteRange::default()).is_err());
        assert!(device.is_away() && device.remark().is_some());
        device.come(Arc::new(MemoryDevice::new(1 << 20)));
        assert!(!device.is_away() && device.remark().is_none());
        bench.write(0, &[2; 4096]).unwrap();
        bench.bare(IoOp::Flush, ByteRange::default()).unwrap();
        let mut other = Bench::new(&device);
        assert_eq!(other.read(0, 4096).unwrap(), [2; 4096]);
    }

    #[test]
    fn stragglers_of_an_absent_device_are_awaited_until_it_has_come() {
        let device = away();
        assert!(!device.has_stragglers());
        device.await_stragglers();
        assert!(device.has_stragglers());
        // Memory has none.
        device.come(Arc::new(MemoryDevice::new(1 << 20)));
        assert!(!device.has_stragglers());
    }

    #[test]
    fn a_device_that_has_come_behaves_as_without_a_stand_in() {
        let device = away();
        device.come(Arc::new(MemoryDevice::new(1 << 20)));
        exercise(&device, 71);
    }
}
