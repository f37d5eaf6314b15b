//! The load: a number of loops, each of which sends its next request when the last one is answered,
//! spread over connections but all in one thread.

pub mod client;
pub mod content;
pub mod fio;
pub mod pulse;
pub mod runs;
pub mod sample;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use forebay_nbd_wire::Command;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::load::client::Connection;
use crate::load::content::Content;
use crate::load::sample::{Histogram, Latency};
use forebay_block::testing::Numbers;

/// Length of the buffer that writes take their data from, in bytes.
const DATA_BYTES: usize = 8 << 20;
/// One request of a load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// Whether it is a read.
    pub read: bool,
    /// First byte.
    pub offset: u64,
    /// Length, in bytes.
    pub len: u64,
}

/// The sequence of requests of a load.
#[derive(Clone, Debug)]
pub enum Pattern {
    /// Uniformly random positions.
    Random {
        /// Share of reads, in percent.
        read_percent: u64,
        /// Length of the area used, from the start, in bytes.
        span: u64,
    },
    /// vdbench's choice: a share of the reads goes to a small area at the start, everything else to
    /// the rest, uniformly in both. Block 0 is not used.
    Vdbench {
        /// Share of reads, in percent.
        read_percent: u64,
        /// Share of reads that go to the area, in percent.
        hit_percent: u64,
        /// Length of the area, in bytes.
        hit_area: u64,
        /// Length of the area used, from the start, in bytes.
        span: u64,
    },
    /// Every block once, in ascending order.
    Sequential {
        /// Whether they are reads.
        read: bool,
        /// First byte.
        start: u64,
        /// The byte after the last.
        end: u64,
    },
    /// Writes of these blocks, in this order.
    List(std::sync::Arc<Vec<u64>>),
    /// Writes of these pieces (offset and length in bytes), in this order.
    Pieces(std::sync::Arc<Vec<(u64, u64)>>),
}

impl Pattern {
    fn next(&self, count: u64, block: u64, numbers: &mut Numbers) -> Option<Access> {
        let len = block;
        match *self {
            Self::Random { read_percent, span } => {
                let read = numbers.below(100) < read_percent;
                Some(Access { read, offset: numbers.below(span / block) * block, len })
            }
            Self::Vdbench { read_percent, hit_percent, hit_area, span } => {
                let read = numbers.below(100) < read_percent;
                let area = hit_area / block;
                let place = if read && numbers.below(100) < hit_percent {
                    1 + numbers.below(area - 1)
                } else {
                    area + numbers.below(span / block - area)
                };
                Some(Access { read, offset: place * block, len })
            }
            Self::Sequential { read, start, end } => {
                let offset = start + count * block;
                (offset < end).then_some(Access { read, offset, len })
            }
            Self::List(ref blocks) => {
                let offset = *blocks.get(usize::try_from(count).ok()?)? * block;
                Some(Access { read: false, offset, len })
            }
            Self::Pieces(ref pieces) => {
                let &(offset, len) = pieces.get(usize::try_from(count).ok()?)?;
                Some(Access { read: false, offset, len })
            }
        }
    }
}

/// A load.
#[derive(Clone, Debug)]
pub struct Load {
    /// Number of loops, each with one request in flight.
    pub loops: usize,
    /// Number of connections that the loops are spread over.
    pub connections: usize,
    /// Length of each request, in bytes.
    pub block: u64,
    /// The requests.
    pub pattern: Pattern,
    /// Duration, unless the requests end before.
    pub time: Duration,
    /// Seed of the random sequence.
    pub seed: u64,
    /// Content of the writes.
    pub content: Content,
}

/// The result of a load.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Number of requests answered.
    pub ops: u64,
    /// Time from the first request to the last counted answer.
    pub elapsed: Duration,
    /// Sum of the latencies.
    latency: Duration,
    /// Number of requests answered in each second.
    pub per_second: Vec<u64>,
    /// Distribution of the latencies.
    pub times: Latency,
}

impl Outcome {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.ops as f64 / self.elapsed.as_secs_f64()
    }

    /// Mean latency, in milliseconds.
    pub fn latency_ms(&self) -> f64 {
        self.latency.as_secs_f64() * 1e3 / self.ops.max(1) as f64
    }
}

/// Runs a load on a server; calls `progress` after each second.
pub fn run(
    socket: &Path,
    export: &str,
    load: &Load,
    mut progress: impl FnMut(&Outcome),
) -> anyhow::Result<Outcome> {
    let mut runner = Runner::new(socket, export, load)?;
    runner.run(&mut progress)?;
    runner.outcome.times = runner.times.summary();
    Ok(runner.outcome)
}

/// Flushes an export.
pub fn flush(socket: &Path, export: &str) -> anyhow::Result<()> {
    let mut connection = Connection::open(socket, export, 1)?;
    connection.push(0, Command::FLUSH, 0, 0, &[]);
    let mut answered = false;
    while !answered {
        connection.send()?;
        if !connection.receive(|_| answered = true)? {
            let flags = PollFlags::IN;
            match poll(&mut [PollFd::new(&connection, flags)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

struct Runner<'a> {
    load: &'a Load,
    connections: Vec<Connection>,
    /// For each connection, the time when the request of each of its loops was sent.
    started: Vec<Vec<Instant>>,
    data: Vec<u8>,
    numbers: Numbers,
    issued: u64,
    in_flight: u64,
    outcome: Outcome,
    times: Histogram,
}

impl<'a> Runner<'a> {
    fn new(socket: &Path, export: &str, load: &'a Load) -> anyhow::Result<Self> {
        ensure!(load.connections > 0 && load.loops >= load.connections, "a loop a connection");
        let mut connections = Vec::new();
        let mut started = Vec::new();
        for i in 0..load.connections {
            let loops = (load.loops + i) / load.connections;
            connections.push(Connection::open(socket, export, loops)?);
            started.push(vec![Instant::now(); loops]);
        }
        let span = match load.pattern {
            Pattern::Random { span, .. } | Pattern::Vdbench { span, .. } => span,
            Pattern::Sequential { end, .. } => end,
            Pattern::List(_) | Pattern::Pieces(_) => 0,
        };
        let size = connections[0].size;
        ensure!(span <= size, "the load spans {span} bytes, the export has {size}");
        let data = load.content.bytes(DATA_BYTES);
        let numbers = Numbers::new(load.seed);
        let outcome = Outcome::default();
        let times = Histogram::default();
        let (issued, in_flight) = (0, 0);
        Ok(Self { load, connections, started, data, numbers, issued, in_flight, outcome, times })
    }

    fn run(&mut self, progress: &mut impl FnMut(&Outcome)) -> anyhow::Result<()> {
        let start = Instant::now();
        for connection in 0..self.connections.len() {
            for cookie in 0..self.started[connection].len() {
                self.issue(connection, cookie, start);
            }
        }
        let mut second = 0;
        let mut counted = 0;
        let mut answers = Vec::new();
        while self.in_flight > 0 {
            let mut idle = true;
            for i in 0..self.connections.len() {
                self.connections[i].send()?;
                let came = self.connections[i].receive(|cookie| answers.push(cookie))?;
                idle &= !came;
                let now = Instant::now();
                let elapsed = now - start;
                while elapsed >= Duration::from_secs(second + 1) && second < self.seconds() {
                    second += 1;
                    self.outcome.elapsed = Duration::from_secs(second);
                    self.outcome.per_second.push(self.outcome.ops - counted);
                    counted = self.outcome.ops;
                    progress(&self.outcome);
                }
                for cookie in answers.drain(..) {
                    self.in_flight -= 1;
                    // Answers after the end are awaited but not counted.
                    if elapsed < self.load.time {
                        self.outcome.ops += 1;
                        self.outcome.elapsed = elapsed;
                        let time = now - self.started[i][cookie];
                        self.outcome.latency += time;
                        self.times.add(time);
                        self.issue(i, cookie, now);
                    }
                }
                self.connections[i].send()?;
            }
            if idle && self.in_flight > 0 {
                self.wait()?;
            }
        }
        if start.elapsed() >= self.load.time {
            self.outcome.elapsed = self.load.time;
        }
        Ok(())
    }

    fn seconds(&self) -> u64 {
        self.load.time.as_secs()
    }

    fn issue(&mut self, connection: usize, cookie: usize, now: Instant) {
        let block = self.load.block;
        let Some(access) = self.load.pattern.next(self.issued, block, &mut self.numbers) else {
            return;
        };
        let block = access.len;
        self.issued += 1;
        self.in_flight += 1;
        self.started[connection][cookie] = now;
        let len = u32::try_from(block).expect("requests are below 4 GiB");
        let (command, data) = if access.read {
            (Command::READ, &[][..])
        } else {
            let sectors = (DATA_BYTES as u64 - block) / 512;
            let from = self.numbers.below(sectors) as usize * 512;
            (Command::WRITE, &self.data[from..from + block as usize])
        };
        self.connections[connection].push(cookie, command, access.offset, len, data);
    }

    /// Waits until a socket is readable, or writable if output is pending.
    fn wait(&self) -> anyhow::Result<()> {
        let flags = |c: &Connection| match c.wants_to_send() {
            true => PollFlags::IN | PollFlags::OUT,
            false => PollFlags::IN,
        };
        let mut fds: Vec<PollFd<'_>> =
            self.connections.iter().map(|c| PollFd::new(c, flags(c))).collect();
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vdbench_shares_come_out_as_asked_and_writes_stay_out_of_the_area() {
        let (hit_area, span, block) = (1 << 20, 1 << 30, 16 << 10);
        let pattern = Pattern::Vdbench { read_percent: 80, hit_percent: 90, hit_area, span };
        let mut numbers = Numbers::new(3);
        let (mut reads, mut hits) = (0, 0);
        let all = 100_000;
        for count in 0..all {
            let access = pattern.next(count, block, &mut numbers).expect("it has no end");
            assert!(access.offset >= block && access.offset + block <= span);
            reads += u64::from(access.read);
            hits += u64::from(access.read && access.offset < hit_area);
            assert!(access.read || access.offset >= hit_area);
        }
        assert!(reads.abs_diff(all * 80 / 100) < all / 100, "{reads}");
        assert!(hits.abs_diff(reads * 90 / 100) < all / 100, "{hits} of {reads}");
    }

    #[test]
    fn a_list_and_a_sequence_come_to_an_end() {
        let mut numbers = Numbers::new(1);
        let list = Pattern::List(std::sync::Arc::new(vec![5, 2]));
        let offsets: Vec<_> =
            (0..3).map(|i| list.next(i, 4096, &mut numbers).map(|access| access.offset)).collect();
        assert_eq!(offsets, [Some(5 * 4096), Some(2 * 4096), None]);
        let sequence = Pattern::Sequential { read: true, start: 0, end: 8192 };
        assert!(sequence.next(1, 4096, &mut numbers).is_some());
        assert!(sequence.next(2, 4096, &mut numbers).is_none());
    }
}
