//! A device in RAM, for tests, demonstrations and upper bounds in measurements. It reports a
//! volatile cache, so that code tested on it flushes as on a disk.
//!
//! Memory is allocated a chunk at a time, when a chunk is first written, and freed when all of it
//! is discarded or zeroed.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_block::{
    ByteRange, Completion, DeviceInfo, ErrorKind, Instant, Io, IoError, IoOp, IoQueue,
};

use crate::device::BlockDevice;
use crate::ring::Ring;

/// Unit of allocation, in bytes.
const CHUNK: u64 = 256 << 10;
/// Maximum number of requests in one queue.
const QUEUE_MAX: usize = 1024;

/// A device in RAM; its content is lost with its last queue and handle.
#[derive(Clone)]
pub struct MemoryDevice {
    shared: Arc<Shared>,
}

struct Shared {
    info: DeviceInfo,
    /// Content by chunk; `None` reads as zeros.
    chunks: Vec<Mutex<Option<Box<[u8]>>>>,
}

impl MemoryDevice {
    /// A device of `size` zero bytes.
    ///
    /// # Panics
    /// If the size is not a multiple of 512.
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self::with_info(DeviceInfo::plain(size, "memory"))
    }

    /// A device with the properties `info`.
    ///
    /// # Panics
    /// If the size is not a multiple of 512.
    #[must_use]
    pub fn with_info(info: DeviceInfo) -> Self {
        assert!(info.size.is_multiple_of(512), "a device has whole sectors");
        let chunks = (0..info.size.div_ceil(CHUNK)).map(|_| Mutex::new(None)).collect();
        Self { shared: Arc::new(Shared { info, chunks }) }
    }

    /// Bytes of RAM that its content occupies.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        let chunks = &self.shared.chunks;
        chunks.iter().filter(|chunk| locked(chunk).is_some()).count() as u64 * CHUNK
    }
}

impl BlockDevice for MemoryDevice {
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn open_queue(&self, _ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        let done = VecDeque::new();
        Ok(Box::new(MemoryQueue { shared: Arc::clone(&self.shared), done }))
    }
}

struct MemoryQueue {
    shared: Arc<Shared>,
    done: VecDeque<Completion>,
}

impl IoQueue for MemoryQueue {
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn submit(&mut self, _now: Instant, mut io: Io) -> Result<(), Io> {
        if self.done.len() >= QUEUE_MAX {
            return Err(io);
        }
        let result = self.shared.carry_out(&mut io);
        self.done.push_back(io.complete(result));
        Ok(())
    }

    fn poll(&mut self, _now: Instant, done: &mut Vec<Completion>) {
        done.extend(self.done.drain(..));
    }

    fn deadline(&self) -> Option<Instant> {
        (!self.done.is_empty()).then_some(Instant(0))
    }
}

/// Poisoning is ignored: a chunk is plain bytes, so a panic elsewhere leaves no broken invariant.
fn locked(chunk: &Mutex<Option<Box<[u8]>>>) -> MutexGuard<'_, Option<Box<[u8]>>> {
    chunk.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn carry_out(&self, io: &mut Io) -> Result<(), IoError> {
        crate::device::check(&self.info, io)?;
        if io.flags.fast_only && io.op == IoOp::WriteZeroes && !self.info.fast_zero {
            return Err(ErrorKind::Unsupported.into());
        }
        match io.op {
            IoOp::Read => self.read(io.range.offset, &mut io.buf),
            IoOp::Write => self.write(io.range.offset, &io.buf),
            IoOp::Discard | IoOp::WriteZeroes => self.zero(io.range),
            IoOp::Flush => {}
            IoOp::Prefetch => unreachable!("no device supports it"),
        }
        Ok(())
    }

    fn read(&self, offset: u64, buf: &mut [u8]) {
        for (chunk, within, part) in pieces(ByteRange::new(offset, buf.len() as u64)) {
            match &*locked(&self.chunks[chunk]) {
                Some(bytes) => buf[part].copy_from_slice(&bytes[within]),
                None => buf[part].fill(0),
            }
        }
    }

    fn write(&self, offset: u64, buf: &[u8]) {
        for (chunk, within, part) in pieces(ByteRange::new(offset, buf.len() as u64)) {
            let mut bytes = locked(&self.chunks[chunk]);
            let bytes = bytes.get_or_insert_with(|| vec![0; CHUNK as usize].into_boxed_slice());
            bytes[within].copy_from_slice(&buf[part]);
        }
    }

    fn zero(&self, range: ByteRange) {
        for (chunk, within, _) in pieces(range) {
            let mut bytes = locked(&self.chunks[chunk]);
            if within.len() as u64 == CHUNK {
                *bytes = None;
            } else if let Some(bytes) = bytes.as_mut() {
                bytes[within].fill(0);
            }
        }
    }
}

/// The chunks of a range: index, part of the chunk, and part of the request's buffer.
fn pieces(range: ByteRange) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let mut at = range.offset;
    std::iter::from_fn(move || {
        let len = (range.end() - at).min(CHUNK - at % CHUNK) as usize;
        if len == 0 {
            return None;
        }
        let (within, done) = ((at % CHUNK) as usize, (at - range.offset) as usize);
        let piece = ((at / CHUNK) as usize, within..within + len, done..done + len);
        at += len as u64;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn behaves_as_a_device_does() {
        let device = MemoryDevice::new((1 << 20) + 512);
        crate::testing::exercise(&device, 42);
    }

    #[test]
    fn takes_space_when_written_and_gives_it_back() {
        let device = MemoryDevice::new(1 << 30);
        let mut bench = Bench::new(&device);
        assert_eq!(device.allocated(), 0);
        bench.write(CHUNK - 512, &[1; 1024]).unwrap();
        assert_eq!(device.allocated(), 2 * CHUNK);
        bench.bare(IoOp::Discard, ByteRange::new(0, CHUNK)).unwrap();
        assert_eq!(device.allocated(), CHUNK);
        assert_eq!(bench.read(CHUNK - 512, 1024).unwrap(), [[0; 512], [1; 512]].concat());
    }
}
