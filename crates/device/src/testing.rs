//! Helpers for this crate's tests.

use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_block::{
    Arena, BufPool, ByteRange, Completion, ErrorKind, Io, IoBuf, IoError, IoOp, IoQueue, IoTag,
};

use crate::random::Numbers;
use crate::{BlockDevice, Clock, Ring};

/// A path under the temporary directory that no other test uses; its file is removed on drop.
pub(crate) struct TempPath(pub(crate) PathBuf);

impl TempPath {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("forebay-device-{}-{serial}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for TempPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// An unnamed file of `size` zero bytes.
pub(crate) fn temp_file(size: u64) -> File {
    let path = TempPath::new();
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(true).open(&path.0).unwrap();
    file.set_len(size).unwrap();
    file
}

/// A device with a queue on its own ring, driven one request at a time or many.
pub(crate) struct Bench {
    pub(crate) ring: Rc<Ring>,
    pub(crate) clock: Clock,
    pub(crate) queue: Box<dyn IoQueue>,
    pub(crate) pool: BufPool,
    next: u64,
}

/// Time limit of any operation before a test fails.
const PATIENCE: Duration = Duration::from_secs(20);

impl Bench {
    pub(crate) fn new(device: &dyn BlockDevice) -> Self {
        let arena = Arena::new(12 << 20);
        let ring = Ring::new(64, Some(Arc::clone(&arena))).unwrap();
        let queue = device.open_queue(&ring).unwrap();
        Self { ring, clock: Clock::start(), queue, pool: BufPool::new(arena), next: 0 }
    }

    /// Submits all requests, waits for them, and returns the completions in the order of the
    /// requests.
    pub(crate) fn run(&mut self, ios: Vec<Io>) -> Vec<Completion> {
        let order: Vec<IoTag> = ios.iter().map(|io| io.tag).collect();
        let mut waiting: VecDeque<Io> = ios.into();
        let mut done: Vec<Completion> = Vec::new();
        let deadline = self.clock.now() + PATIENCE;
        while done.len() < order.len() {
            assert!(self.clock.now() < deadline, "a request did not complete");
            while let Some(io) = waiting.pop_front() {
                if let Err(io) = self.queue.submit(self.clock.now(), io) {
                    waiting.push_front(io);
                    break;
                }
            }
            let until = self.queue.deadline().unwrap_or(deadline).min(deadline);
            self.ring.wait(&self.clock, Some(until)).unwrap();
            self.queue.poll(self.clock.now(), &mut done);
        }
        assert_eq!(done.len(), order.len(), "each request completes once");
        done.sort_by_key(|end| order.iter().position(|tag| *tag == end.tag));
        done
    }

    /// As `run`, if `extra` requests were submitted before, whose completions are returned too.
    pub(crate) fn run_with_extra(&mut self, ios: Vec<Io>, extra: usize) -> Vec<Completion> {
        let count = ios.len() + extra;
        for io in ios {
            assert!(self.queue.submit(self.clock.now(), io).is_ok(), "the queue has room");
        }
        let mut done: Vec<Completion> = Vec::new();
        let deadline = self.clock.now() + PATIENCE;
        while done.len() < count {
            assert!(self.clock.now() < deadline, "a request did not complete");
            let until = self.queue.deadline().unwrap_or(deadline).min(deadline);
            self.ring.wait(&self.clock, Some(until)).unwrap();
            self.queue.poll(self.clock.now(), &mut done);
        }
        done
    }

    pub(crate) fn tag(&mut self) -> IoTag {
        self.next += 1;
        IoTag(self.next)
    }

    pub(crate) fn read_io(&mut self, offset: u64, len: usize) -> Io {
        let buf = if self.next.is_multiple_of(2) { self.pool.get(len) } else { IoBuf::zeroed(len) };
        Io::read(self.tag(), ByteRange::new(offset, len as u64), buf)
    }

    pub(crate) fn write_io(&mut self, offset: u64, data: &[u8]) -> Io {
        let mut buf = self.pool.get(data.len());
        buf.copy_from_slice(data);
        Io::write(self.tag(), offset, buf)
    }

    pub(crate) fn one(&mut self, io: Io) -> Completion {
        self.run(vec![io]).remove(0)
    }

    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
        let io = self.read_io(offset, len);
        let end = self.one(io);
        end.result.map(|()| end.buf.to_vec())
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let io = self.write_io(offset, data);
        self.one(io).result
    }

    pub(crate) fn bare(&mut self, op: IoOp, range: ByteRange) -> Result<(), IoError> {
        let tag = self.tag();
        self.one(Io::bare(tag, op, range)).result
    }
}

/// Requirements for any writable device: random requests at any sector, in batches that do not
/// overlap, compared with a copy in memory; and rejected requests.
pub(crate) fn exercise(device: &dyn BlockDevice, seed: u64) {
    exercise_in_units(device, seed, 512);
}

/// As `exercise`, with requests that are multiples of `unit` bytes.
pub(crate) fn exercise_in_units(device: &dyn BlockDevice, seed: u64, unit: u64) {
    let size = device.info().size;
    let mut bench = Bench::new(device);
    let mut numbers = Numbers::new(seed);
    let mut model = vec![0u8; size as usize];
    bench.bare(IoOp::WriteZeroes, ByteRange::new(0, size)).unwrap();
    for round in 0..60u8 {
        let mut batch: Vec<Io> = Vec::new();
        let mut taken: Vec<ByteRange> = Vec::new();
        for slot in 0..16u8 {
            let len = (1 + numbers.below((32 << 10) / unit)) * unit;
            let range = ByteRange::new(numbers.below((size - len) / unit + 1) * unit, len);
            if taken.iter().any(|other| other.overlaps(&range)) {
                continue;
            }
            taken.push(range);
            batch.push(one_of_many(&mut bench, &mut numbers, range, round ^ slot));
        }
        let plan: Vec<(IoOp, ByteRange, Vec<u8>)> =
            batch.iter().map(|io| (io.op, io.range, io.buf.to_vec())).collect();
        for (end, (op, range, data)) in bench.run(batch).into_iter().zip(plan) {
            end.result.unwrap();
            let part = &mut model[range.offset as usize..range.end() as usize];
            match op {
                IoOp::Read => assert_eq!(&end.buf[..], part, "{range}"),
                IoOp::Write => part.copy_from_slice(&data),
                IoOp::WriteZeroes => part.fill(0),
                IoOp::Flush | IoOp::Discard | IoOp::Prefetch => {}
            }
        }
    }
    let mut offset = 0;
    while offset < size {
        let len = (size - offset).min(100 << 10) as usize;
        let at = offset as usize;
        assert_eq!(bench.read(offset, len).unwrap(), &model[at..at + len], "at {offset}");
        offset += len as u64;
    }
    refusals(&mut bench, size, unit);
}

fn one_of_many(bench: &mut Bench, numbers: &mut Numbers, range: ByteRange, fill: u8) -> Io {
    match numbers.below(8) {
        0..=3 => {
            let data: Vec<u8> = (0..range.len).map(|i| fill ^ (i / 512) as u8).collect();
            let fua = numbers.below(4) == 0;
            bench.write_io(range.offset, &data).with_fua(fua)
        }
        4..=5 => bench.read_io(range.offset, range.len as usize),
        6 => {
            let tag = bench.tag();
            let mut io = Io::bare(tag, IoOp::WriteZeroes, range).with_fua(numbers.below(2) == 0);
            io.flags.no_hole = numbers.below(2) == 0;
            io
        }
        _ => Io::flush(bench.tag()),
    }
}

fn refusals(bench: &mut Bench, size: u64, unit: u64) {
    let refused = bench.read(size, unit as usize).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfRange);
    let refused = bench.write(size - unit, &vec![1; 2 * unit as usize]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfRange);
    let far = ByteRange::new(u64::MAX - unit, unit);
    let refused = bench.bare(IoOp::WriteZeroes, far).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfRange);
}
