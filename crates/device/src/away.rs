//! A stand-in for a device that is not there: it has the size and the identity that are on record
//! of it, and fails every request until the device has come. From then on its queues pass requests
//! to the device; a request that failed before stays failed.
//!
//! Whether what has come is the right device is for the caller to find out before it hands it over.

use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use forebay_block::{Completion, DeviceInfo, ErrorKind, Instant, Io, IoQueue};

use crate::device::BlockDevice;
use crate::ring::{Ring, Waker};

/// How long a queue waits after the device that has come refused it.
const REFUSED_PAUSE: Duration = Duration::from_secs(5);

/// A device that is not there, or was not when this was made.
pub struct AwayDevice {
    shared: Arc<Shared>,
    why: String,
}

/// What its queues need to know.
struct Shared {
    info: DeviceInfo,
    real: OnceLock<Arc<dyn BlockDevice>>,
    /// Of the rings of its queues, to be told when the device has come.
    wakers: Mutex<Vec<Waker>>,
}

impl AwayDevice {
    /// In the place of the device `identity` of `size` bytes, which could not be opened for `why`.
    #[must_use]
    pub fn new(size: u64, identity: &str, name: &str, why: String) -> Self {
        let plain = DeviceInfo::plain(size, identity);
        // Nothing is known of what will come: a flush for each queue is right for any device.
        let info = DeviceInfo { name: name.to_owned(), flush_by_queue: true, ..plain };
        let shared = Shared { info, real: OnceLock::new(), wakers: Mutex::default() };
        Self { shared: Arc::new(shared), why }
    }

    /// The device has come: requests go to it from now on. It must be the one that this stands in
    /// for, with at least as many bytes, and able to open a queue for each of this one's at once
    /// ([`BlockDevice::prepare`]). A second one is ignored.
    pub fn come(&self, real: Arc<dyn BlockDevice>) {
        if self.shared.real.set(real).is_ok() {
            let wakers = self.shared.wakers.lock().unwrap_or_else(PoisonError::into_inner);
            wakers.iter().for_each(Waker::wake);
        }
    }

    /// The device, once it has come.
    #[must_use]
    pub fn real(&self) -> Option<&Arc<dyn BlockDevice>> {
        self.shared.real.get()
    }
}

impl BlockDevice for AwayDevice {
    /// What was known of the device when it was away, also once it has come.
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn remark(&self) -> Option<&str> {
        self.real().is_none().then_some(&self.why)
    }

    fn is_away(&self) -> bool {
        self.real().is_none()
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
    /// Requests to be failed at the next poll.
    failed: Vec<Io>,
    /// When to ask the device for a queue again, which it has refused.
    retry_at: Option<Instant>,
}

impl AwayQueue {
    /// The queue of the device, if it has come and gives one.
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
        // Opens the queue as soon as the device has come, before anybody asks for anything.
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
    fn a_device_that_has_come_behaves_as_without_a_stand_in() {
        let device = away();
        device.come(Arc::new(MemoryDevice::new(1 << 20)));
        exercise(&device, 71);
    }
}
