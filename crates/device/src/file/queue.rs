//! One thread's requests to a file, each a [`Job`] that walks through steps until it completes.
//!
//! Aligned reads and writes move straight between the request's buffer and the file. Others go
//! through a bounce buffer, a window at a time: the window is filled from the file, changed, and
//! stored. Two changes that touch one logical block never run at the same time when one of them
//! is such a partial change; the later one waits. That holds within a queue: threads that share
//! a device keep to blocks of their own.
//!
//! Transfers cut short are continued; interrupted ones repeated a limited number of times.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{
    ByteRange, Completion, DeviceInfo, ErrorKind, Instant, Io, IoBuf, IoError, IoOp, IoQueue, Slab,
};
use rustix::io::Errno;

use super::Shared;
use crate::ring::{Client, Done, Op, Payload, RingFile};

/// Most requests that one queue holds.
const QUEUE_MAX: usize = 1024;
/// Bytes of a request that are bounced at a time.
const WINDOW: u64 = 1 << 20;
/// How often a transfer is repeated because the kernel had no room for it.
const RETRIES_MAX: u8 = 100;
/// How long to wait before that.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// A thread's way to a file.
pub(super) struct FileQueue {
    shared: Arc<Shared>,
    client: Client,
    file: RingFile,
    jobs: Slab<Job>,
    serial: u64,
    /// Changes that do not cover whole logical blocks, among the jobs.
    partial: usize,
    /// Jobs behind one that touches the same block.
    waiting: VecDeque<u32>,
    /// Jobs whose next step the ring did not take.
    stalled: VecDeque<u32>,
    retry_at: Instant,
    now: Instant,
    fetched: Vec<Done>,
    finished: Vec<Completion>,
}

struct Job {
    io: Io,
    /// Whether it changes a part of a logical block.
    partial: bool,
    serial: u64,
    step: Step,
    /// The part being bounced, aligned; empty otherwise.
    window: ByteRange,
    bounce: IoBuf,
    /// Bytes of the present transfer that are done.
    moved: usize,
    retries: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Between the request's buffer and the file.
    Move,
    /// From the file into the bounce buffer.
    Fill,
    /// From the bounce buffer to the file.
    Store,
    /// Discarding by the block layer's own command.
    Discard,
    /// Freeing or zeroing by fallocate.
    Allocate,
    /// Making it durable.
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

    /// The unit that reads and writes must be multiples of.
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

    /// Chooses how to carry out a request, and begins.
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
            // A file frees or zeroes any bytes; a block device whole blocks.
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
        }
        self.issue(index);
    }

    /// Begins the window at `offset` of a request that goes through a bounce buffer.
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

    /// Hands the present step of a job to the ring.
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
            _ => self.finish(index, Err(IoError::from_errno(error.raw_os_error()))),
        }
    }

    /// Takes account of a step that succeeded.
    fn progress(&mut self, index: u32, moved: usize) {
        let unit = self.unit() as usize;
        let job = self.job(index);
        match job.step {
            Step::Move | Step::Fill | Step::Store => {
                let whole = job.transfer_len();
                job.moved += moved;
                if job.moved < whole {
                    // Direct I/O goes on where a unit begins.
                    let before = job.moved - moved;
                    job.moved -= job.moved % unit;
                    if job.moved <= before {
                        let cut = io::Error::from(io::ErrorKind::UnexpectedEof);
                        return self
                            .finish(index, Err(IoError::with_source(ErrorKind::Media, cut)));
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

    /// A transfer is complete: of the request, or of a window.
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
    /// The buffer of the present transfer.
    fn transfer_buf(&mut self) -> &mut IoBuf {
        if self.step == Step::Move { &mut self.io.buf } else { &mut self.bounce }
    }

    /// Bytes of the present transfer.
    fn transfer_len(&self) -> usize {
        let range = if self.step == Step::Move { self.io.range } else { self.window };
        range.len as usize
    }

    /// The present step for the ring; a transfer's buffer goes with it.
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

    /// Moves bytes between the window in the bounce buffer and the request; a change goes on to
    /// be stored.
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
            IoOp::Flush | IoOp::Discard => unreachable!("only transfers are bounced"),
        }
        self.step = Step::Store;
        self.moved = 0;
    }
}

/// The smallest range of whole units that holds `range`.
fn outward(range: ByteRange, unit: u64) -> ByteRange {
    let offset = range.offset - range.offset % unit;
    ByteRange { offset, len: range.end().next_multiple_of(unit) - offset }
}

/// The largest range of whole units within `range`; empty when there is none.
fn inward(range: ByteRange, unit: u64) -> ByteRange {
    let offset = range.offset.next_multiple_of(unit);
    let end = range.end() - range.end() % unit;
    ByteRange { offset, len: end.saturating_sub(offset) }
}
