//! One thread's requests to a file, each a [`Job`] that goes through steps until it completes.
//!
//! Aligned reads and writes transfer directly between the request's buffer and the file. Others go
//! through a bounce buffer, one window at a time: the window is read from the file, modified, and
//! written back. Two changes of the same logical block never run concurrently if either covers it
//! only partly; the later one waits. This holds within a queue only: threads that share a device
//! must use separate blocks.
//!
//! Short transfers are continued; transfers that fail with EINTR or EAGAIN are retried a limited
//! number of times.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{
    ByteRange, Completion, DeviceInfo, ErrorKind, Instant, Io, IoBuf, IoError, IoOp, IoQueue, Slab,
};
use rustix::io::Errno;

use super::{Shared, probe};
use crate::ring::{Client, Done, Op, Payload, RingFile};

/// Maximum number of requests in one queue.
const QUEUE_MAX: usize = 1024;
/// Length of a bounce window, in bytes.
const WINDOW: u64 = 1 << 20;
/// Maximum number of retries of a transfer that failed with EINTR or EAGAIN.
const RETRIES_MAX: u8 = 100;
/// Delay before such a retry.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// A thread's queue to a file.
pub(super) struct FileQueue {
    shared: Arc<Shared>,
    client: Client,
    file: RingFile,
    jobs: Slab<Job>,
    serial: u64,
    /// Number of jobs that change only a part of a logical block.
    partial: usize,
    /// Jobs that wait for an earlier change of the same block.
    waiting: VecDeque<u32>,
    /// Jobs whose next step did not fit into the ring.
    stalled: VecDeque<u32>,
    retry_at: Instant,
    now: Instant,
    fetched: Vec<Done>,
    finished: Vec<Completion>,
}

struct Job {
    io: Io,
    /// Whether it changes only a part of a logical block.
    partial: bool,
    serial: u64,
    step: Step,
    /// The aligned range being bounced; empty otherwise.
    window: ByteRange,
    bounce: IoBuf,
    /// Bytes of the current transfer that are done.
    moved: usize,
    retries: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Transfer between the request's buffer and the file.
    Move,
    /// Read from the file into the bounce buffer.
    Fill,
    /// Write from the bounce buffer to the file.
    Store,
    /// Discard by a command of the block layer.
    Discard,
    /// Free or zero a range by fallocate.
    Allocate,
    /// Make the data durable.
    Sync,
}

impl IoQueue for FileQueue {
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        if self.jobs.len() + self.finished.len() >= QUEUE_MAX {
            return Err(io);
        }
        self.now = now;
        if let Err(error) = crate::device::check(&self.shared.info, &io) {
            self.finished.push(io.complete(Err(error)));
            return Ok(());
        }
        let index = self.insert(io);
        if self.is_blocked(index) {
            self.waiting.push_back(index);
        } else {
            self.start(index);
        }
        Ok(())
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.now = now;
        let mut fetched = std::mem::take(&mut self.fetched);
        self.client.reap(&mut fetched);
        for end in fetched.drain(..) {
            self.arrived(end);
        }
        self.fetched = fetched;
        for _ in 0..self.stalled.len() {
            let Some(index) = self.stalled.pop_front() else { break };
            self.issue(index);
        }
        done.append(&mut self.finished);
    }

    fn deadline(&self) -> Option<Instant> {
        if !self.finished.is_empty() {
            return Some(Instant(0));
        }
        (!self.stalled.is_empty()).then_some(self.retry_at)
    }
}

impl FileQueue {
    pub(super) fn new(shared: Arc<Shared>, client: Client, file: RingFile) -> Self {
        Self {
            shared,
            client,
            file,
            jobs: Slab::new(QUEUE_MAX as u32),
            serial: 0,
            partial: 0,
            waiting: VecDeque::new(),
            stalled: VecDeque::new(),
            retry_at: Instant::NEVER,
            now: Instant(0),
            fetched: Vec::new(),
            finished: Vec::new(),
        }
    }

    fn insert(&mut self, io: Io) -> u32 {
        self.serial += 1;
        let block = u64::from(self.shared.info.logical_block);
        let partial = io.op.changes_data() && !io.range.is_aligned(block);
        self.partial += usize::from(partial);
        self.jobs.insert(Job {
            io,
            partial,
            serial: self.serial,
            step: Step::Move,
            window: ByteRange::default(),
            bounce: IoBuf::empty(),
            moved: 0,
            retries: 0,
        })
    }

    fn job(&mut self, index: u32) -> &mut Job {
        self.jobs.get_mut(index).expect("a job lives until it is finished")
    }

    /// Required alignment of reads and writes, in bytes.
    fn unit(&self) -> u64 {
        if self.shared.direct { u64::from(self.shared.info.logical_block) } else { 1 }
    }

    /// Whether an earlier change of the same logical block must finish first.
    fn is_blocked(&self, index: u32) -> bool {
        let Some(mine) = self.jobs.get(index) else { return false };
        if self.partial == 0 || !mine.io.op.changes_data() {
            return false;
        }
        let unit = u64::from(self.shared.info.logical_block);
        let (extent, partial) = (outward(mine.io.range, unit), mine.partial);
        self.jobs.iter().any(|(_, other)| {
            other.serial < mine.serial
                && other.io.op.changes_data()
                && (partial || other.partial)
                && outward(other.io.range, unit).overlaps(&extent)
        })
    }

    /// Chooses the first step of a request, and starts it.
    fn start(&mut self, index: u32) {
        let (unit, is_block) = (self.unit(), self.shared.is_block);
        let block = u64::from(self.shared.info.logical_block);
        let job = self.job(index);
        let range = job.io.range;
        match job.io.op {
            IoOp::Flush => job.step = Step::Sync,
            _ if range.is_empty() => return self.finish(index, Ok(())),
            IoOp::Read | IoOp::Write if range.is_aligned(unit) => job.step = Step::Move,
            IoOp::Read | IoOp::Write => return self.bounce(index, range.offset),
            // A file frees or zeroes any byte range; a block device only whole blocks.
            IoOp::WriteZeroes if !is_block || range.is_aligned(block) => job.step = Step::Allocate,
            IoOp::WriteZeroes => return self.zero_by_writing(index),
            IoOp::Discard if is_block => {
                let inner = inward(range, block);
                if inner.is_empty() {
                    return self.finish(index, Ok(()));
                }
                job.io.range = inner;
                job.step = Step::Discard;
            }
            IoOp::Discard => job.step = Step::Allocate,
            IoOp::Prefetch => unreachable!("no device supports it"),
        }
        self.issue(index);
    }

    /// Starts the bounce window at `offset`.
    fn bounce(&mut self, index: u32, offset: u64) {
        let unit = self.unit();
        let job = self.job(index);
        let end = job.io.range.end().min((offset / WINDOW + 1) * WINDOW);
        let part = ByteRange { offset, len: end - offset };
        job.window = outward(part, unit);
        job.moved = 0;
        let len = job.window.len as usize;
        if job.bounce.capacity() < len {
            job.bounce = IoBuf::zeroed(len);
        }
        job.bounce.set_len(len);
        job.step = Step::Fill;
        if part == job.window && job.io.op.changes_data() {
            job.patch();
        }
        self.issue(index);
    }

    fn zero_by_writing(&mut self, index: u32) {
        let job = self.job(index);
        if job.io.flags.fast_only {
            return self.finish(index, Err(ErrorKind::Unsupported.into()));
        }
        let offset = job.io.range.offset;
        self.bounce(index, offset);
    }

    /// Submits the current step of a job to the ring.
    fn issue(&mut self, index: u32) {
        let op = self.job(index).operation();
        if let Err(op) = self.client.submit(&self.file, index.into(), op) {
            self.job(index).take_back(op);
            self.stalled.push_back(index);
            self.retry_at = self.now + RETRY_AFTER;
        }
    }

    fn arrived(&mut self, end: Done) {
        let index = u32::try_from(end.token).expect("the token is a job's number");
        let job = self.job(index);
        if let Payload::Buf(buf) = end.payload {
            *job.transfer_buf() = buf;
        }
        match end.result {
            Ok(moved) => self.progress(index, moved),
            Err(Errno::INTR | Errno::AGAIN) if job.retries < RETRIES_MAX => {
                job.retries += 1;
                self.stalled.push_back(index);
                self.retry_at = self.now + RETRY_AFTER;
            }
            Err(error) => self.failed(index, error),
        }
    }

    fn failed(&mut self, index: u32, error: Errno) {
        let job = self.job(index);
        let unknown = matches!(error, Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL);
        match (job.step, job.io.op) {
            (Step::Discard, _) if unknown => {
                job.step = Step::Allocate;
                self.issue(index);
            }
            (Step::Allocate, IoOp::WriteZeroes) if unknown => self.zero_by_writing(index),
            _ => {
                let may_be_gone = matches!(error, Errno::NOSPC | Errno::IO);
                let removed = if may_be_gone { self.removed() } else { None };
                let error = removed.unwrap_or_else(|| IoError::from_errno(error.raw_os_error()));
                self.finish(index, Err(error));
            }
        }
    }

    /// The error of a disk that was removed: the kernel sets its size to 0, so that reads meet its
    /// end and writes lack space. Requests to a partition of it, or to LVM or md over it, fail as
    /// if the medium were bad.
    fn removed(&self) -> Option<IoError> {
        let is_gone = self.shared.is_block
            && (probe::size(&self.shared.file).is_ok_and(|size| size == 0)
                || self.shared.node.as_deref().is_some_and(probe::is_removed));
        is_gone.then(|| IoError::from_errno(Errno::NODEV.raw_os_error()))
    }

    /// Continues a job after a successful step.
    fn progress(&mut self, index: u32, moved: usize) {
        let unit = self.unit() as usize;
        let job = self.job(index);
        match job.step {
            Step::Move | Step::Fill | Step::Store => {
                let whole = job.transfer_len();
                job.moved += moved;
                if job.moved < whole {
                    // Direct I/O must continue at a unit's boundary.
                    let before = job.moved - moved;
                    job.moved -= job.moved % unit;
                    if job.moved <= before {
                        let cut = io::Error::from(io::ErrorKind::UnexpectedEof);
                        let cut = IoError::with_source(ErrorKind::Media, cut);
                        return self.finish(index, Err(self.removed().unwrap_or(cut)));
                    }
                    return self.issue(index);
                }
                self.transferred(index);
            }
            Step::Discard | Step::Allocate if job.io.flags.fua => {
                job.step = Step::Sync;
                self.issue(index);
            }
            Step::Discard | Step::Allocate | Step::Sync => self.finish(index, Ok(())),
        }
    }

    /// Continues after a complete transfer of the request or of a window.
    fn transferred(&mut self, index: u32) {
        let job = self.job(index);
        if job.step == Step::Move {
            return self.finish(index, Ok(()));
        }
        if job.step == Step::Fill {
            job.patch();
            if job.step == Step::Store {
                return self.issue(index);
            }
        }
        let (at, end) = (job.window.end(), job.io.range.end());
        if at >= end {
            return self.finish(index, Ok(()));
        }
        self.bounce(index, at);
    }

    fn finish(&mut self, index: u32, result: Result<(), IoError>) {
        let job = self.jobs.remove(index).expect("a job is finished once");
        let changed = job.io.op.changes_data();
        self.partial -= usize::from(job.partial);
        self.finished.push(job.io.complete(result));
        if changed && !self.waiting.is_empty() {
            self.release_waiting();
        }
    }

    fn release_waiting(&mut self) {
        let mut free = Vec::new();
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|&index| {
            let blocked = self.is_blocked(index);
            if !blocked {
                free.push(index);
            }
            blocked
        });
        self.waiting = waiting;
        for index in free {
            self.start(index);
        }
    }
}

impl Job {
    /// The buffer of the current transfer.
    fn transfer_buf(&mut self) -> &mut IoBuf {
        if self.step == Step::Move { &mut self.io.buf } else { &mut self.bounce }
    }

    /// Length of the current transfer, in bytes.
    fn transfer_len(&self) -> usize {
        let range = if self.step == Step::Move { self.io.range } else { self.window };
        range.len as usize
    }

    /// The current step as a ring operation; the transfer's buffer moves into it.
    fn operation(&mut self) -> Op {
        let ByteRange { offset, len } = self.io.range;
        match self.step {
            Step::Discard => return Op::Discard { offset, len },
            Step::Allocate => return Op::Allocate { mode: self.allocate_mode(), offset, len },
            Step::Sync => return Op::Sync,
            Step::Move | Step::Fill | Step::Store => {}
        }
        let start = if self.step == Step::Move { offset } else { self.window.offset };
        let (offset, span) = (start + self.moved as u64, self.moved..self.transfer_len());
        let reads = self.step == Step::Fill || self.io.op == IoOp::Read;
        let durable = self.io.flags.fua;
        let buf = std::mem::take(self.transfer_buf());
        if reads {
            Op::Read { offset, buf, span }
        } else {
            Op::Write { offset, buf, span, durable }
        }
    }

    fn allocate_mode(&self) -> i32 {
        let keep_blocks = self.io.op == IoOp::WriteZeroes && self.io.flags.no_hole;
        let how = if keep_blocks { libc::FALLOC_FL_ZERO_RANGE } else { libc::FALLOC_FL_PUNCH_HOLE };
        how | libc::FALLOC_FL_KEEP_SIZE
    }

    fn take_back(&mut self, op: Op) {
        if let Op::Read { buf, .. } | Op::Write { buf, .. } = op {
            *self.transfer_buf() = buf;
        }
    }

    /// Copies bytes between the bounce window and the request; a write then stores the window.
    fn patch(&mut self) {
        let part = self.io.range.intersection(&self.window);
        let at = (part.offset - self.window.offset) as usize;
        let window = &mut self.bounce[at..at + part.len as usize];
        let done = (part.offset - self.io.range.offset) as usize;
        match self.io.op {
            IoOp::Read => {
                self.io.buf[done..done + window.len()].copy_from_slice(window);
                return;
            }
            IoOp::Write => window.copy_from_slice(&self.io.buf[done..done + window.len()]),
            IoOp::WriteZeroes => window.fill(0),
            IoOp::Flush | IoOp::Discard | IoOp::Prefetch => {
                unreachable!("only transfers are bounced")
            }
        }
        self.step = Step::Store;
        self.moved = 0;
    }
}

/// The smallest range of whole units that contains `range`.
fn outward(range: ByteRange, unit: u64) -> ByteRange {
    let offset = range.offset - range.offset % unit;
    ByteRange { offset, len: range.end().next_multiple_of(unit) - offset }
}

/// The largest range of whole units within `range`; empty if there is none.
fn inward(range: ByteRange, unit: u64) -> ByteRange {
    let offset = range.offset.next_multiple_of(unit);
    let end = range.end() - range.end() % unit;
    ByteRange { offset, len: end.saturating_sub(offset) }
}
