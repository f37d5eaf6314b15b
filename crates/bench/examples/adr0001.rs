//! The experiment behind ADR 0001: what an engine without I/O costs, on one thread with one ring.
//!
//! The same 4 KiB random reads of one file, 32 in flight, registered file and buffers, four ways: a
//! bare ring loop; the bare loop with an index lookup and a CRC32C, the work that any cache does;
//! the same work in a state machine that gets requests and completions and emits effects, over the
//! bare ring; and that machine over the ring and the queue of crate `device`. The difference
//! between the second and the others is the cost of that structure.
//!
//! `cargo run --release -p forebay-bench --example adr0001 -- [FILE [SECONDS]]`

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::fs::File;
use std::hash::{BuildHasherDefault, Hasher};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use forebay_block::{
    Arena, BufPool, ByteRange, Completion, DeviceInfo, Io, IoBuf, IoError, IoQueue, IoTag,
};
use forebay_device::{Client, Clock, Done, Op, Payload, Ring, RingFile};
use io_uring::{IoUring, opcode, types};

const FILE_SIZE: u64 = 1 << 30;
const BLOCK: usize = 4096;
const BLOCKS: u64 = FILE_SIZE / BLOCK as u64;
const DEPTH: usize = 32;
const ROUNDS: usize = 5;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let mut args = std::env::args_os().skip(1);
    let given = args.next().map(PathBuf::from);
    let seconds = args.next().and_then(|s| s.to_str()?.parse().ok()).unwrap_or(2.0);
    let path = given.clone().unwrap_or_else(|| std::env::temp_dir().join("forebay-adr0001"));
    let sums = prepare(&path)?;
    let time = Duration::from_secs_f64(seconds);
    println!("{:<22} {:>8} {:>12} {:>10} {:>10}", "way", "file", "reads/s", "CPU ns", "spread");
    for direct in [true, false] {
        let file = open(&path, direct)?;
        let mut ways: Vec<Way> = vec![
            ("bare", Box::new(|| bare(&file, None, time))),
            ("bare, lookup and CRC", Box::new(|| bare(&file, Some(&sums), time))),
            ("machine", Box::new(|| machine(&file, &sums, time))),
            ("machine over device", Box::new(|| layered(&file, &sums, time))),
        ];
        report(&mut ways, if direct { "direct" } else { "cached" })?;
    }
    if given.is_none() {
        std::fs::remove_file(&path)?;
    }
    Ok(())
}

type Way<'a> = (&'static str, Box<dyn FnMut() -> Outcome<Measured> + 'a>);

/// Runs the ways in turn for several rounds, and prints the median of each, so that other activity
/// of the machine affects all of them.
fn report(ways: &mut [Way<'_>], kind: &str) -> Outcome<()> {
    let mut results: Vec<Vec<Measured>> = ways.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        for (way, results) in ways.iter_mut().zip(&mut results) {
            results.push(way.1()?);
        }
    }
    for ((name, _), mut results) in ways.iter().zip(results) {
        results.sort_by(|a, b| a.cpu_ns.total_cmp(&b.cpu_ns));
        let (low, middle) = (&results[0], &results[ROUNDS / 2]);
        let high = &results[ROUNDS - 1];
        println!(
            "{name:<22} {kind:>8} {:>12.0} {:>10.0} {:>4.0}-{:.0}",
            middle.rate, middle.cpu_ns, low.cpu_ns, high.cpu_ns
        );
    }
    Ok(())
}

struct Measured {
    rate: f64,
    cpu_ns: f64,
}

/// Counts operations over a period, by wall clock and by this thread's CPU time.
struct Meter {
    started: Instant,
    cpu: Duration,
    time: Duration,
    reads: u64,
}

impl Meter {
    fn start(time: Duration) -> Self {
        Self { started: Instant::now(), cpu: thread_cpu(), time, reads: 0 }
    }

    fn running(&self) -> bool {
        self.started.elapsed() < self.time
    }

    fn stop(self) -> Measured {
        let reads = self.reads as f64;
        let cpu = thread_cpu() - self.cpu;
        Measured {
            rate: reads / self.started.elapsed().as_secs_f64(),
            cpu_ns: cpu.as_nanos() as f64 / reads,
        }
    }
}

fn thread_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// A sequence of block numbers, the same in every run.
struct Blocks(u64);

impl Blocks {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % BLOCKS
    }
}

fn crc(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Writes the file, every block different, and returns each block's position and checksum.
fn prepare(path: &Path) -> Outcome<Index> {
    let mut file = File::create(path)?;
    let mut index = Index::default();
    let mut chunk = vec![0u8; 256 * BLOCK];
    let mut words = Blocks(0x9E37_79B9_7F4A_7C15);
    for first in (0..BLOCKS).step_by(256) {
        for word in chunk.chunks_exact_mut(8) {
            words.next();
            word.copy_from_slice(&words.0.to_le_bytes());
        }
        for (i, block) in chunk.chunks_exact(BLOCK).enumerate() {
            let number = first + i as u64;
            index.insert(number, (number * BLOCK as u64, crc(block)));
        }
        file.write_all(&chunk)?;
    }
    file.sync_all()?;
    Ok(index)
}

/// Maps a block to its position and checksum, as a cache's index does.
type Index = HashMap<u64, (u64, u32), BuildHasherDefault<Mix>>;

/// One multiplication spreads block numbers well enough.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("the keys are block numbers");
    }

    fn write_u64(&mut self, key: u64) {
        let wide = u128::from(key ^ 0x5851_F42D_4C95_7F2D) * 0x9E37_79B9_7F4A_7C15;
        self.0 = wide as u64 ^ (wide >> 64) as u64;
    }
}

fn open(path: &Path, direct: bool) -> Outcome<File> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let mut file = File::options().read(true).custom_flags(flags).open(path)?;
    if !direct {
        std::io::copy(&mut file, &mut std::io::sink())?;
    }
    Ok(file)
}

fn uring() -> Outcome<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_defer_taskrun();
    Ok(builder.build(DEPTH as u32 * 2)?)
}

/// A bare ring with a registered file and one registered buffer for each read in flight.
struct Bare {
    uring: IoUring,
    memory: IoBuf,
}

impl Bare {
    fn new(file: &File) -> Outcome<Self> {
        let mut bare = Self { uring: uring()?, memory: IoBuf::zeroed(DEPTH * BLOCK) };
        let base = bare.memory.as_mut_ptr().cast();
        let vector = [libc::iovec { iov_base: base, iov_len: DEPTH * BLOCK }];
        // SAFETY: `memory` lives in the same struct as the ring and is not moved or shrunk.
        unsafe { bare.uring.submitter().register_buffers(&vector)? };
        bare.uring.submitter().register_files(&[file.as_raw_fd()])?;
        Ok(bare)
    }

    fn read(&mut self, slot: usize, offset: u64) {
        let part = &mut self.memory[slot * BLOCK..(slot + 1) * BLOCK];
        let read = opcode::ReadFixed::new(types::Fixed(0), part.as_mut_ptr(), BLOCK as u32, 0);
        let entry = read.offset(offset).build().user_data(slot as u64);
        // SAFETY: each slot has one read in flight, and `memory` outlives the ring's use: every
        // way drains the ring before it returns.
        unsafe { self.uring.submission().push(&entry) }.expect("the queue has twice the depth");
    }

    fn slot(&self, slot: usize) -> &[u8] {
        &self.memory[slot * BLOCK..(slot + 1) * BLOCK]
    }

    /// Submits, waits for one completion, and collects the slots of the completed reads.
    fn turn(&mut self, done: &mut Vec<usize>) -> Outcome<()> {
        self.uring.submit_and_wait(1)?;
        for entry in self.uring.completion() {
            assert_eq!(entry.result(), BLOCK as i32, "a read is whole");
            done.push(entry.user_data() as usize);
        }
        Ok(())
    }
}

fn bare(file: &File, index: Option<&Index>, time: Duration) -> Outcome<Measured> {
    let mut ring = Bare::new(file)?;
    let mut blocks = Blocks(1);
    let mut expected = [0u32; DEPTH];
    let mut start = |ring: &mut Bare, expected: &mut [u32; DEPTH], slot: usize| {
        let block = blocks.next();
        let (offset, sum) = match index {
            Some(index) => index[&block],
            None => (block * BLOCK as u64, 0),
        };
        expected[slot] = sum;
        ring.read(slot, offset);
    };
    for slot in 0..DEPTH {
        start(&mut ring, &mut expected, slot);
    }
    let mut meter = Meter::start(time);
    let (mut done, mut in_flight) = (Vec::with_capacity(DEPTH), DEPTH);
    while in_flight > 0 {
        ring.turn(&mut done)?;
        let running = meter.running();
        for slot in done.drain(..) {
            if index.is_some() {
                assert_eq!(crc(ring.slot(slot)), expected[slot]);
            }
            meter.reads += 1;
            in_flight -= 1;
            if running {
                start(&mut ring, &mut expected, slot);
                in_flight += 1;
            }
        }
    }
    Ok(meter.stop())
}

/// The effects that the machine emits.
#[derive(Default)]
struct Effects {
    ios: Vec<Io>,
    replies: Vec<(u64, Result<(), IoError>, IoBuf)>,
}

/// A cache's read path as a state machine: no I/O, no clock.
struct Machine<'a> {
    index: &'a Index,
    reads: Vec<Option<(u64, u32)>>,
    free: Vec<usize>,
}

impl<'a> Machine<'a> {
    fn new(index: &'a Index) -> Self {
        Self { index, reads: Vec::new(), free: Vec::new() }
    }

    fn submit(&mut self, id: u64, block: u64, buf: IoBuf, effects: &mut Effects) {
        let (offset, sum) = self.index[&block];
        let slot = self.free.pop().unwrap_or_else(|| {
            self.reads.push(None);
            self.reads.len() - 1
        });
        self.reads[slot] = Some((id, sum));
        let range = ByteRange::new(offset, buf.len() as u64);
        effects.ios.push(Io::read(IoTag(slot as u64), range, buf));
    }

    fn complete(&mut self, done: Completion, effects: &mut Effects) {
        let slot = done.tag.0 as usize;
        let (id, sum) = self.reads[slot].take().expect("a completion is of a read in flight");
        self.free.push(slot);
        assert_eq!(crc(&done.buf), sum);
        effects.replies.push((id, done.result, done.buf));
    }
}

/// Drives a machine over any queue until the time is over; `wait` submits and waits.
fn drive(
    queue: &mut dyn IoQueue,
    wait: &mut dyn FnMut() -> Outcome<()>,
    pool: &BufPool,
    index: &Index,
    time: Duration,
) -> Outcome<Measured> {
    let mut machine = Machine::new(index);
    let mut effects = Effects::default();
    let mut blocks = Blocks(1);
    let clock = Clock::start();
    for id in 0..DEPTH as u64 {
        machine.submit(id, blocks.next(), pool.get(BLOCK), &mut effects);
    }
    let mut meter = Meter::start(time);
    let mut done = Vec::with_capacity(DEPTH);
    let mut in_flight = DEPTH;
    while in_flight > 0 {
        let now = clock.now();
        for io in effects.ios.drain(..) {
            queue.submit(now, io).expect("the queue is as deep as the test");
        }
        wait()?;
        queue.poll(now, &mut done);
        for completion in done.drain(..) {
            machine.complete(completion, &mut effects);
        }
        let running = meter.running();
        for (id, result, buf) in std::mem::take(&mut effects.replies) {
            result?;
            meter.reads += 1;
            in_flight -= 1;
            if running {
                machine.submit(id, blocks.next(), buf, &mut effects);
                in_flight += 1;
            }
        }
    }
    Ok(meter.stop())
}

/// The thinnest queue: a bare ring, reads only, buffers from a registered arena.
struct BareQueue {
    uring: Rc<std::cell::RefCell<IoUring>>,
    info: DeviceInfo,
    arena: *mut u8,
    slots: Vec<Option<Io>>,
    free: VecDeque<usize>,
}

impl IoQueue for BareQueue {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, _now: forebay_block::Instant, mut io: Io) -> Result<(), Io> {
        let Some(slot) = self.free.pop_front() else { return Err(io) };
        debug_assert!(io.buf.as_ptr() as usize >= self.arena as usize);
        let read =
            opcode::ReadFixed::new(types::Fixed(0), io.buf.as_mut_ptr(), io.buf.len() as u32, 0);
        let entry = read.offset(io.range.offset).build().user_data(slot as u64);
        self.slots[slot] = Some(io);
        // SAFETY: the buffer stays in `slots` until its completion, and `drive` awaits all of them.
        let pushed = unsafe { self.uring.borrow_mut().submission().push(&entry) };
        pushed.expect("the queue has twice the depth");
        Ok(())
    }

    fn poll(&mut self, _now: forebay_block::Instant, done: &mut Vec<Completion>) {
        for entry in self.uring.borrow_mut().completion() {
            assert_eq!(entry.result(), BLOCK as i32, "a read is whole");
            let slot = entry.user_data() as usize;
            self.free.push_back(slot);
            let io = self.slots[slot].take().expect("a completion is of a read in flight");
            done.push(io.complete(Ok(())));
        }
    }
}

fn machine(file: &File, index: &Index, time: Duration) -> Outcome<Measured> {
    let arena = Arena::new(3 << 20);
    let uring = uring()?;
    let (base, len) = arena.region();
    let vector = [libc::iovec { iov_base: base.cast(), iov_len: len }];
    // SAFETY: the arena outlives the ring, both being locals of this function.
    unsafe { uring.submitter().register_buffers(&vector)? };
    uring.submitter().register_files(&[file.as_raw_fd()])?;
    let uring = Rc::new(std::cell::RefCell::new(uring));
    let mut queue = BareQueue {
        uring: Rc::clone(&uring),
        info: DeviceInfo::plain(FILE_SIZE, "bare"),
        arena: base,
        slots: (0..DEPTH).map(|_| None).collect(),
        free: (0..DEPTH).collect(),
    };
    let mut wait = || Ok(uring.borrow_mut().submit_and_wait(1).map(drop)?);
    drive(&mut queue, &mut wait, &BufPool::new(arena), index, time)
}

/// A queue on the ring of crate `device`, reads only.
struct RingQueue {
    client: Client,
    file: RingFile,
    info: DeviceInfo,
    done: Vec<Done>,
}

impl IoQueue for RingQueue {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, _now: forebay_block::Instant, io: Io) -> Result<(), Io> {
        let span = 0..io.buf.len();
        let op = Op::Read { offset: io.range.offset, buf: io.buf, span };
        self.client.submit(&self.file, io.tag.0, op).expect("the ring is deeper than the test");
        Ok(())
    }

    fn poll(&mut self, _now: forebay_block::Instant, done: &mut Vec<Completion>) {
        self.client.reap(&mut self.done);
        for end in self.done.drain(..) {
            assert_eq!(end.result, Ok(BLOCK), "a read is whole");
            let Payload::Buf(buf) = end.payload else { panic!("a read hands its buffer back") };
            done.push(Completion { tag: IoTag(end.token), result: Ok(()), buf });
        }
    }
}

fn layered(file: &File, index: &Index, time: Duration) -> Outcome<Measured> {
    let arena = Arena::new(3 << 20);
    let ring = Ring::new(DEPTH as u32 * 2, Some(std::sync::Arc::clone(&arena)))?;
    let mut queue = RingQueue {
        client: ring.client(),
        file: ring.register(file)?,
        info: DeviceInfo::plain(FILE_SIZE, "ring"),
        done: Vec::new(),
    };
    let clock = Clock::start();
    let mut wait = || Ok(ring.wait(&clock, None)?);
    drive(&mut queue, &mut wait, &BufPool::new(arena), index, time)
}
