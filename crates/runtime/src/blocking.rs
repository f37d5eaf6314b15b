//! A device used by one caller at a time, which waits for each answer: for superblocks,
//! fingerprints and offline commands, before the shard threads start and after they stop.
//!
//! It uses the same clock as the shard threads: a device may remember when it was last used.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Duration;

use forebay_block::{
    ByteRange, Completion, DeviceInfo, ErrorKind, Io, IoBuf, IoError, IoOp, IoQueue, IoResult,
    IoTag,
};
use forebay_device::{BlockDevice, Clock, Ring};

/// Longest single discard, in bytes.
const DISCARD_PIECE: u64 = 16 << 30;
/// Most requests in flight.
const DEPTH: usize = 32;
const RING_ENTRIES: u32 = 64;
/// The tag of a request until [`Blocking::run`] numbers it.
const NO_TAG: IoTag = IoTag(0);

/// The clock of the process. A device may outlive a pool, and be used through [`Blocking`] before
/// and after it. With two clocks, a disk model would stay busy until a time on the clock of its
/// last user.
#[must_use]
pub fn clock() -> Clock {
    static CLOCK: OnceLock<Clock> = OnceLock::new();
    *CLOCK.get_or_init(Clock::start)
}

/// A queue to a device, and the ring that serves it.
pub struct Blocking {
    ring: Rc<Ring>,
    clock: Clock,
    queue: Box<dyn IoQueue>,
    patience: Duration,
    /// The tag of the next request. A completion below the tags of the current call answers a
    /// request of an earlier one, which timed out.
    next: u64,
    done: Vec<Completion>,
}

impl Blocking {
    /// How long a device may take to answer, unless a caller has less time.
    pub const PATIENCE: Duration = Duration::from_secs(60);

    /// Opens a queue.
    ///
    /// # Errors
    /// If no ring can be created, or the device refuses.
    pub fn open(device: &dyn BlockDevice) -> io::Result<Self> {
        Self::open_within(device, Self::PATIENCE)
    }

    /// The same. A request fails if the device has answered none for as long as `patience`.
    ///
    /// # Errors
    /// As for [`Blocking::open`].
    pub fn open_within(device: &dyn BlockDevice, patience: Duration) -> io::Result<Self> {
        let ring = Ring::new(RING_ENTRIES, None)?;
        let queue = device.open_queue(&ring)?;
        Ok(Self { ring, clock: clock(), queue, patience, next: 0, done: Vec::new() })
    }

    /// The device's size and capabilities.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.queue.info()
    }

    /// Reads a range.
    ///
    /// # Errors
    /// The device's error, or `Timeout`.
    pub fn read(&mut self, range: ByteRange) -> IoResult<IoBuf> {
        self.run_one(read_of(range))
    }

    /// Reads several ranges concurrently; the buffers are in the order of the ranges. `None` for a
    /// range that the device fails to read.
    ///
    /// # Errors
    /// `Media` if it fails to read any of them; the first other error of the device, or `Timeout`.
    pub fn read_many(&mut self, ranges: &[ByteRange]) -> IoResult<Vec<Option<IoBuf>>> {
        let found = self.run(ranges.iter().copied().map(read_of).collect())?;
        match found.iter().all(Result::is_err) {
            true => found.into_iter().map(|one| one.map(Some)).collect(),
            false => Ok(found.into_iter().map(Result::ok).collect()),
        }
    }

    /// Writes all of `buf` at `offset`.
    ///
    /// # Errors
    /// The device's error, or `Timeout`.
    pub fn write(&mut self, offset: u64, buf: IoBuf) -> IoResult<()> {
        self.run_one(Io::write(NO_TAG, offset, buf)).map(drop)
    }

    /// Makes completed writes durable.
    ///
    /// # Errors
    /// The device's error, or `Timeout`.
    pub fn flush(&mut self) -> IoResult<()> {
        self.run_one(Io::flush(NO_TAG)).map(drop)
    }

    /// Discards a range, piece by piece: a device may take long for all of it.
    ///
    /// # Errors
    /// The device's error, or `Timeout`; then a discard may still be in progress.
    pub fn discard(&mut self, range: ByteRange) -> IoResult<()> {
        let mut at = range.offset;
        while at < range.end() {
            let piece = ByteRange::new(at, DISCARD_PIECE.min(range.end() - at));
            self.run_one(Io::bare(NO_TAG, IoOp::Discard, piece))?;
            at = piece.end();
        }
        Ok(())
    }

    fn run_one(&mut self, io: Io) -> IoResult<IoBuf> {
        self.run([io].into())?.pop().expect("one result a request")
    }

    /// Carries out requests; their buffers are returned in that order, or `Media` for those that
    /// the device fails. Any other error ends all. A request that timed out may end during a later
    /// call, which drops its completion.
    fn run(&mut self, mut requests: VecDeque<Io>) -> IoResult<Vec<IoResult<IoBuf>>> {
        let first = self.next;
        for io in &mut requests {
            io.tag = IoTag(self.next);
            self.next += 1;
        }
        let mut ends: Vec<_> = requests.iter().map(|_| Ok(IoBuf::empty())).collect();
        let mut result = Ok(());
        let mut in_flight = 0;
        let mut patience = self.clock.now() + self.patience;
        while in_flight > 0 || !requests.is_empty() {
            let now = self.clock.now();
            while in_flight < DEPTH
                && let Some(io) = requests.pop_front()
            {
                if let Err(io) = self.queue.submit(now, io) {
                    requests.push_front(io);
                    break;
                }
                in_flight += 1;
            }
            self.queue.poll(now, &mut self.done);
            let is_idle = self.done.is_empty();
            for done in self.done.drain(..) {
                patience = now + self.patience;
                let Some(at) = done.tag.0.checked_sub(first) else { continue };
                in_flight -= 1;
                match done.result {
                    Err(error) if error.kind() != ErrorKind::Media => {
                        requests.clear();
                        result = result.and(Err(error));
                    }
                    ended => ends[at as usize] = ended.map(|()| done.buf),
                }
            }
            if now >= patience {
                return Err(ErrorKind::Timeout.into());
            }
            if is_idle {
                let until = self.queue.deadline().map_or(patience, |at| at.min(patience));
                let waited = self.ring.wait(&self.clock, Some(until));
                waited.map_err(|e| IoError::with_source(ErrorKind::DeviceGone, e))?;
            }
        }
        result.map(|()| ends)
    }
}

fn read_of(range: ByteRange) -> Io {
    let len = usize::try_from(range.len).expect("a buffer fits memory");
    Io::read(NO_TAG, range, IoBuf::zeroed(len))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use forebay_block::Instant;
    use forebay_device::MemoryDevice;

    use super::*;

    /// A device that answers nothing while the flag is set, and everything afterward.
    struct Hanging(MemoryDevice, Arc<AtomicBool>);

    struct HangingQueue(Box<dyn IoQueue>, Arc<AtomicBool>);

    impl BlockDevice for Hanging {
        fn info(&self) -> &DeviceInfo {
            self.0.info()
        }

        fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
            Ok(Box::new(HangingQueue(self.0.open_queue(ring)?, Arc::clone(&self.1))))
        }
    }

    impl IoQueue for HangingQueue {
        fn info(&self) -> &DeviceInfo {
            self.0.info()
        }

        fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
            self.0.submit(now, io)
        }

        fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
            if !self.1.load(Ordering::Relaxed) {
                self.0.poll(now, done);
            }
        }
    }

    /// Regression: after a timeout, each request got the answer of the one before, so a salvage
    /// declared readable bytes lost.
    #[test]
    fn an_answer_after_a_timeout_is_not_taken_for_that_of_a_later_request() {
        let hangs = Arc::new(AtomicBool::new(false));
        let device = Hanging(MemoryDevice::new(1 << 20), Arc::clone(&hangs));
        let mut disk = Blocking::open(&device).unwrap();
        disk.write(0, IoBuf::copy_of(&[1; 4096])).unwrap();
        disk.write(4096, IoBuf::copy_of(&[2; 8192])).unwrap();
        disk.patience = Duration::from_millis(20);
        hangs.store(true, Ordering::Relaxed);
        let late = [ByteRange::new(0, 4096), ByteRange::new(0, 512)];
        assert_eq!(disk.read_many(&late).unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!(disk.flush().unwrap_err().kind(), ErrorKind::Timeout);
        hangs.store(false, Ordering::Relaxed);
        disk.patience = Blocking::PATIENCE;
        let found = disk.read(ByteRange::new(4096, 8192)).unwrap();
        assert_eq!(&found[..], &[2; 8192]);
        let found = disk.read(ByteRange::new(0, 4096)).unwrap();
        assert_eq!(&found[..], &[1; 4096]);
    }

    /// Regression: a stop took as long as the server had run. The spindles of an emulated disk were
    /// busy until a time on the pool's clock, but the fingerprints were read by another clock.
    #[test]
    fn every_user_of_a_device_tells_the_same_time() {
        let first = clock().now();
        std::thread::sleep(Duration::from_millis(20));
        let device = MemoryDevice::new(1 << 20);
        let disk = Blocking::open(&device).unwrap();
        assert!(disk.clock.now() >= first + Duration::from_millis(20));
    }

    #[test]
    fn what_was_written_is_read_and_errors_come_back() {
        let device = MemoryDevice::new(1 << 20);
        let mut disk = Blocking::open(&device).unwrap();
        for i in 0..100u64 {
            let mut buf = IoBuf::zeroed(512);
            buf.fill(i as u8);
            disk.write(i * 512, buf).unwrap();
        }
        disk.flush().unwrap();
        let ranges: Vec<_> = (0..100).rev().map(|i| ByteRange::new(i * 512, 512)).collect();
        let all = disk.read_many(&ranges).unwrap();
        assert!(
            all.iter().flatten().zip((0..100u8).rev()).all(|(buf, i)| buf.iter().all(|&b| b == i))
        );
        let error = disk.read(ByteRange::new(1 << 20, 512)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfRange);
        assert!(disk.read(ByteRange::new(0, 512)).is_ok(), "usable after an error");
    }
}
