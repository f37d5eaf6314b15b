//! A record of every request, in the form that trace replay reads: one line each,
//! `t_us,rwbs,sector,nsect`, with blktrace's letters.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_block::{Completion, DeviceInfo, Instant, Io, IoOp, IoQueue, SECTOR_SIZE};

use crate::device::BlockDevice;
use crate::ring::Ring;

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceRecord {
    /// When it came, in microseconds of the clock that the queue's owner uses.
    pub micros: u64,
    /// What it asks for.
    pub op: IoOp,
    /// Whether with force unit access.
    pub fua: bool,
    /// First sector of 512 bytes.
    pub sector: u64,
    /// Number of sectors, partial ones counted; zero for a flush.
    pub count: u64,
}

impl TraceRecord {
    /// The head of a file of records.
    pub const HEADER: &'static str = "t_us,rwbs,sector,nsect";

    fn of(now: Instant, io: &Io) -> Self {
        let sector = SECTOR_SIZE as u64;
        let first = io.range.offset / sector;
        let end = io.range.offset.saturating_add(io.range.len).div_ceil(sector);
        Self {
            micros: now.0 / 1000,
            op: io.op,
            fua: io.flags.fua,
            sector: first,
            count: if io.range.is_empty() { 0 } else { end - first },
        }
    }
}

impl fmt::Display for TraceRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = match self.op {
            IoOp::Read => "R",
            IoOp::Write => "W",
            IoOp::Flush => "F",
            IoOp::Discard => "D",
            IoOp::WriteZeroes => "WZ",
        };
        let fua = if self.fua && self.op.changes_data() { "F" } else { "" };
        write!(f, "{},{letters}{fua},{},{}", self.micros, self.sector, self.count)
    }
}

/// The newest records of a device.
#[derive(Debug, Default)]
struct Log {
    records: VecDeque<TraceRecord>,
    dropped: u64,
}

/// A device that remembers its newest requests.
#[derive(Clone)]
pub struct TraceDevice {
    inner: Arc<dyn BlockDevice>,
    log: Arc<Mutex<Log>>,
    limit: usize,
}

impl TraceDevice {
    /// Remembers the newest `limit` requests of `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockDevice>, limit: usize) -> Self {
        Self { inner, log: Arc::default(), limit: limit.max(1) }
    }

    /// Takes the records out, oldest first, with the number of older ones that had no room.
    #[must_use]
    pub fn take(&self) -> (Vec<TraceRecord>, u64) {
        let log = std::mem::take(&mut *self.log.lock().unwrap_or_else(PoisonError::into_inner));
        (log.records.into(), log.dropped)
    }
}

impl BlockDevice for TraceDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn prepare(&self, queues: usize) -> io::Result<()> {
        self.inner.prepare(queues)
    }

    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        let (log, limit) = (Arc::clone(&self.log), self.limit);
        Ok(Box::new(TraceQueue { inner: self.inner.open_queue(ring)?, log, limit }))
    }
}

struct TraceQueue {
    inner: Box<dyn IoQueue>,
    log: Arc<Mutex<Log>>,
    limit: usize,
}

impl IoQueue for TraceQueue {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        let record = TraceRecord::of(now, &io);
        self.inner.submit(now, io)?;
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.records.len() == self.limit {
            log.records.pop_front();
            log.dropped += 1;
        }
        log.records.push_back(record);
        Ok(())
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.inner.poll(now, done);
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::ByteRange;

    use super::*;
    use crate::MemoryDevice;
    use crate::testing::{Bench, exercise};

    #[test]
    fn requests_are_recorded_as_replay_reads_them() {
        let device = TraceDevice::new(Arc::new(MemoryDevice::new(1 << 20)), 10);
        let mut bench = Bench::new(&device);
        bench.write(4096, &[1; 1024]).unwrap();
        let io = bench.write_io(512, &[1; 512]).with_fua(true);
        bench.one(io).result.unwrap();
        bench.read(100, 512).unwrap();
        bench.bare(IoOp::Flush, ByteRange::default()).unwrap();
        bench.bare(IoOp::Discard, ByteRange::new(0, 4096)).unwrap();
        bench.bare(IoOp::WriteZeroes, ByteRange::new(0, 512)).unwrap();
        let (records, dropped) = device.take();
        let lines: Vec<String> =
            records.iter().map(|record| TraceRecord { micros: 7, ..*record }.to_string()).collect();
        let expected = ["7,W,8,2", "7,WF,1,1", "7,R,0,2", "7,F,0,0", "7,D,0,8", "7,WZ,0,1"];
        assert_eq!(lines, expected);
        assert!(records.is_sorted_by_key(|record| record.micros));
        assert_eq!(dropped, 0);
    }

    #[test]
    fn the_record_is_bounded_and_says_what_it_lost() {
        let device = TraceDevice::new(Arc::new(MemoryDevice::new(1 << 20)), 10);
        exercise(&device, 51);
        let (records, dropped) = device.take();
        assert_eq!(records.len(), 10);
        assert!(dropped > 100);
        assert_eq!(device.take(), (Vec::new(), 0));
    }
}
