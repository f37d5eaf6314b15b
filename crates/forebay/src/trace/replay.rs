//! `forebay trace replay`: sends a trace's requests to a volume, at their times or faster, and
//! measures.
//!
//! The trace is read twice: first to check that every request can be sent, so that a refused replay
//! changes nothing.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use forebay_block::{ByteRange, Completion, Instant, Io, IoBuf, IoOp, IoQueue, IoTag, REQUEST_MAX};
use forebay_control::units::Size;
use forebay_device::{BlockDevice, Clock, FileDevice, OpenMode, Ring, open_primary};
use forebay_runtime::{Histogram, OPERATIONS, clock};
use forebay_trace::TraceRequest;
use serde::Serialize;

use super::args::{PastEnd, ReplayArgs, Speed};
use super::input::{self, Reader, in_trace};
use crate::output;

/// Submissions that the ring accepts at once.
const RING_ENTRIES: u32 = 1024;
/// How long to wait for the last answers.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of noise from which written data is cut.
const NOISE: usize = 1 << 20;

/// A summary of a trace's requests.
#[derive(Default)]
struct Survey {
    requests: u64,
    changes: u64,
    /// The highest end of a request.
    end: u64,
    longest: u64,
    nanos: u64,
}

/// Latencies of one operation, in microseconds.
#[derive(Serialize)]
struct Latencies {
    operation: &'static str,
    requests: u64,
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

/// The result of a replay.
#[derive(Serialize)]
struct Report {
    trace: String,
    volume: String,
    requests: u64,
    /// Requests left out: writes in a replay of reads only, or requests past the end.
    skipped: u64,
    errors: u64,
    first_error: Option<String>,
    seconds: f64,
    /// Duration of the recording, at the speed of the replay.
    planned_seconds: Option<f64>,
    read_bytes: u64,
    write_bytes: u64,
    latencies_micros: Vec<Latencies>,
    /// Delay of requests against the trace, in microseconds.
    lateness_micros: Option<Latencies>,
}

/// Replays a trace, and prints the measurements.
pub fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let survey = survey(args)?;
    let device = open(args, &survey)?;
    check(args, &survey, &*device)?;
    let (mut reader, bar) = input::open(&args.input, "replaying ")?;
    let mut replay = Replay::new(args, &*device)?;
    let result = replay.all(&mut reader);
    bar.finish_and_clear();
    result.with_context(|| in_trace(&args.input))?;
    let report = replay.report(args, &survey);
    match args.json {
        true => output::line(&serde_json::to_string_pretty(&report)?)?,
        false => output::print(&text(&report))?,
    }
    match &report.first_error {
        Some(error) => bail!("{} requests failed, the first with: {error}", report.errors),
        None => Ok(()),
    }
}

fn survey(args: &ReplayArgs) -> anyhow::Result<Survey> {
    let (mut reader, bar) = input::open(&args.input, "reading   ")?;
    let mut survey = Survey::default();
    while let Some(request) = reader.next_request().with_context(|| in_trace(&args.input))? {
        survey.requests += 1;
        survey.changes += u64::from(request.op.changes_data());
        survey.nanos = request.nanos;
        if !(args.reads_only && request.op.changes_data()) {
            survey.end = survey.end.max(request.range.end());
            survey.longest = survey.longest.max(request.range.len);
        }
    }
    bar.finish_and_clear();
    ensure!(survey.requests > 0, "{} has no request", in_trace(&args.input));
    if survey.changes > 0 && !args.write && !args.reads_only {
        let changes = survey.changes;
        let what = format!(
            "{changes} requests of the trace overwrite or discard data of {}; \
             use --write to destroy it, or --reads-only to leave them out",
            args.volume
        );
        return Err(crate::WrongUsage(what).into());
    }
    Ok(survey)
}

fn open(args: &ReplayArgs, survey: &Survey) -> anyhow::Result<Arc<dyn BlockDevice>> {
    let changes = survey.changes > 0 && !args.reads_only;
    let path = std::path::Path::new(&args.volume);
    if !changes && path.exists() {
        // Other processes may continue to read it, and it may be read-only.
        let mode = OpenMode { read_only: true, ..OpenMode::default() };
        return Ok(Arc::new(FileDevice::open(path, mode)?));
    }
    Ok(open_primary(&args.volume)?)
}

fn check(args: &ReplayArgs, survey: &Survey, device: &dyn BlockDevice) -> anyhow::Result<()> {
    let size = device.info().size;
    if survey.end > size && args.past_end == PastEnd::Refuse {
        let what = format!(
            "the trace extends to byte {}, but {} has {size}; \
             use --past-end wrap, --past-end skip, or a larger volume",
            survey.end, args.volume
        );
        return Err(crate::WrongUsage(what).into());
    }
    let longest = survey.longest.min(size);
    ensure!(longest <= REQUEST_MAX, "a request has {longest} bytes; {REQUEST_MAX} at most");
    Ok(())
}

/// A replay in progress.
struct Replay<'a> {
    args: &'a ReplayArgs,
    ring: Rc<Ring>,
    clock: Clock,
    queue: Box<dyn IoQueue>,
    noise: Vec<u8>,
    /// Requests in flight, by tag: operation, and time of sending.
    sent: Vec<Option<(IoOp, Instant)>>,
    free: Vec<usize>,
    done: Vec<Completion>,
    start: Instant,
    end: Instant,
    requests: u64,
    skipped: u64,
    errors: u64,
    first_error: Option<String>,
    read_bytes: u64,
    write_bytes: u64,
    latencies: Vec<Histogram>,
    lateness: Histogram,
}

impl<'a> Replay<'a> {
    fn new(args: &'a ReplayArgs, device: &dyn BlockDevice) -> anyhow::Result<Self> {
        let ring = Ring::new(RING_ENTRIES, None)?;
        let queue = device.open_queue(&ring)?;
        let clock = clock();
        let depth = usize::from(args.depth);
        let now = clock.now();
        Ok(Self {
            args,
            ring,
            clock,
            queue,
            noise: noise(),
            sent: vec![None; depth],
            free: (0..depth).collect(),
            done: Vec::new(),
            start: now,
            end: now,
            requests: 0,
            skipped: 0,
            errors: 0,
            first_error: None,
            read_bytes: 0,
            write_bytes: 0,
            latencies: OPERATIONS.iter().map(|_| Histogram::default()).collect(),
            lateness: Histogram::default(),
        })
    }

    /// Sends everything and waits for the last answer.
    fn all(&mut self, reader: &mut Reader) -> anyhow::Result<()> {
        self.start = self.clock.now();
        while let Some(request) = reader.next_request()? {
            let Some(io) = self.request(&request) else {
                self.skipped += 1;
                continue;
            };
            let due = match self.args.speed {
                Speed::Max => None,
                Speed::Times(times) => {
                    let nanos = (request.nanos as f64 / times) as u64;
                    Some(self.start + Duration::from_nanos(nanos))
                }
            };
            self.send(io, due)?;
        }
        while self.free.len() < self.sent.len() {
            self.wait(None)?;
        }
        self.end = self.clock.now();
        Ok(())
    }

    /// The request to send; `None` if it is left out.
    fn request(&self, request: &TraceRequest) -> Option<Io> {
        let TraceRequest { op, fua, range, .. } = *request;
        if op == IoOp::Flush {
            return Some(Io::flush(IoTag(0)));
        }
        let info = self.queue.info();
        if op.changes_data() && self.args.reads_only || range.is_empty() {
            return None;
        }
        // The trace may be of a device with smaller blocks.
        let unit = u64::from(info.logical_block);
        let from = range.offset / unit * unit;
        let len = (range.end().next_multiple_of(unit) - from).min(info.size);
        let range = if from + len <= info.size {
            ByteRange::new(from, len)
        } else if self.args.past_end == PastEnd::Wrap {
            let room = (info.size - len) / unit + 1;
            ByteRange::new(from / unit % room * unit, len)
        } else {
            return None;
        };
        if !matches!(op, IoOp::Read | IoOp::Write) {
            return Some(Io::bare(IoTag(0), op, range));
        }
        let mut buf = IoBuf::zeroed(usize::try_from(len).expect("checked against the limit"));
        if op == IoOp::Read {
            return Some(Io::read(IoTag(0), range, buf));
        }
        let mut at = (self.requests as usize * 4099) % NOISE;
        for part in buf.chunks_mut(4096) {
            let end = NOISE - part.len();
            at = if at > end { at - end } else { at };
            part.copy_from_slice(&self.noise[at..at + part.len()]);
            at += part.len();
        }
        Some(Io::write(IoTag(0), range.offset, buf).with_fua(fua))
    }

    /// Sends a request when it is due and there is room for it.
    fn send(&mut self, mut io: Io, due: Option<Instant>) -> anyhow::Result<()> {
        self.reap();
        while due.is_some_and(|due| self.clock.now() < due) {
            self.wait(due)?;
        }
        loop {
            if let Some(tag) = self.free.pop() {
                let now = self.clock.now();
                let (op, len) = (io.op, io.range.len);
                io.tag = IoTag(tag as u64);
                self.sent[tag] = Some((op, now));
                match self.queue.submit(now, io) {
                    Ok(()) => {
                        self.count(op, len, now, due);
                        return Ok(());
                    }
                    Err(back) => {
                        self.sent[tag] = None;
                        self.free.push(tag);
                        io = back;
                    }
                }
            }
            self.wait(None)?;
        }
    }

    fn count(&mut self, op: IoOp, len: u64, now: Instant, due: Option<Instant>) {
        self.requests += 1;
        match op {
            IoOp::Read => self.read_bytes += len,
            IoOp::Write => self.write_bytes += len,
            _ => {}
        }
        if let Some(due) = due {
            self.lateness.record(now.since(due));
        }
    }

    /// Waits for an answer, or until a deadline.
    fn wait(&mut self, until: Option<Instant>) -> anyhow::Result<()> {
        let now = self.clock.now();
        let oldest = self.sent.iter().flatten().map(|&(_, at)| at).min();
        if let Some(oldest) = oldest {
            ensure!(now < oldest + PATIENCE, "no answer within {PATIENCE:?}; is the volume alive?");
        }
        let limits = [until, self.queue.deadline(), oldest.map(|at| at + PATIENCE)];
        self.ring.wait(&self.clock, limits.into_iter().flatten().min())?;
        self.reap();
        Ok(())
    }

    fn reap(&mut self) {
        let now = self.clock.now();
        self.queue.poll(now, &mut self.done);
        for done in self.done.drain(..) {
            let tag = usize::try_from(done.tag.0).expect("tags are those given");
            let (op, at) = self.sent[tag].take().expect("a request is answered once");
            self.free.push(tag);
            let kind = OPERATIONS.iter().position(|(known, _)| *known == op);
            self.latencies[kind.expect("every operation is listed")].record(now.since(at));
            if let Err(error) = done.result {
                self.errors += 1;
                self.first_error.get_or_insert_with(|| error.to_string());
            }
        }
    }

    fn report(&self, args: &ReplayArgs, survey: &Survey) -> Report {
        let all = OPERATIONS.iter().zip(&self.latencies);
        let planned = match args.speed {
            Speed::Max => None,
            Speed::Times(times) => Some(survey.nanos as f64 / 1e9 / times),
        };
        Report {
            trace: in_trace(&args.input),
            volume: args.volume.clone(),
            requests: self.requests,
            skipped: self.skipped,
            errors: self.errors,
            first_error: self.first_error.clone(),
            seconds: self.end.since(self.start).as_secs_f64(),
            planned_seconds: planned,
            read_bytes: self.read_bytes,
            write_bytes: self.write_bytes,
            latencies_micros: all
                .filter(|(_, histogram)| histogram.count() > 0)
                .map(|(&(_, name), histogram)| percentiles(name, histogram))
                .collect(),
            lateness_micros: planned.map(|_| percentiles("lateness", &self.lateness)),
        }
    }
}

fn percentiles(operation: &'static str, histogram: &Histogram) -> Latencies {
    let micros = |time: Duration| time.as_nanos() as f64 / 1000.0;
    let at = |share| micros(histogram.quantile(share));
    Latencies {
        operation,
        requests: histogram.count(),
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p999: at(0.999),
        max: micros(histogram.max()),
    }
}

/// Incompressible bytes, the same in every run.
fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut words = VecDeque::with_capacity(NOISE);
    while words.len() < NOISE {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        words.extend(state.to_le_bytes());
    }
    words.into()
}

fn text(report: &Report) -> String {
    let Report { requests, skipped, seconds, .. } = report;
    let rate = *requests as f64 / seconds.max(1e-9);
    let mut text = format!("{requests} requests in {seconds:.2} s, {rate:.0} a second");
    if let Some(planned) = report.planned_seconds {
        text += &format!(" (planned: {planned:.2} s)");
    }
    let (read, written) = (Size(report.read_bytes), Size(report.write_bytes));
    text += &format!("; {read} read, {written} written\n");
    if *skipped > 0 {
        text += &format!("{skipped} requests were left out\n");
    }
    text += "microseconds     requests        p50        p90        p99      p99.9        max\n";
    for row in report.latencies_micros.iter().chain(&report.lateness_micros) {
        text += &format!(
            "{:<14} {:>10} {:>10.0} {:>10.0} {:>10.0} {:>10.0} {:>10.0}\n",
            row.operation, row.requests, row.p50, row.p90, row.p99, row.p999, row.max
        );
    }
    text
}
