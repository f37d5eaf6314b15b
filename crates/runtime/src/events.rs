//! The log of the shards' events: one line each, with the volume's name, the event, its place, and
//! the remedy. Repetitions are counted: the first event is logged at once, the others together at
//! the end of a [`WINDOW`]. The lines are listed in `docs/user/logging.md`.
//!
//! Shards never wait for the log: events that do not fit the queue are counted, and their number is
//! logged.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_block::{IoOp, VolumeId};
use forebay_engine::{Event, Health, Recovered, Target};
use forebay_volume::Registry;

/// How long repetitions are counted before they are logged.
pub const WINDOW: Duration = Duration::from_secs(10);
/// Most events that wait for the log.
const QUEUE: usize = 4096;
/// How often the log checks whether a window is over.
const TICK: Duration = Duration::from_secs(1);

/// A shard's handle for sending events to the log.
#[derive(Clone)]
pub struct EventSink {
    tell: SyncSender<(usize, Event)>,
    lost: Arc<AtomicU64>,
}

impl EventSink {
    /// Sends an event of a shard. Never waits.
    pub fn tell(&self, shard: usize, event: Event) {
        if self.tell.try_send((shard, event)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Starts the log; its thread ends when the last sink is gone and every event is written.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(registry: &Registry) -> io::Result<(EventSink, JoinHandle<()>)> {
    let (tell, hear) = sync_channel(QUEUE);
    let lost = Arc::new(AtomicU64::new(0));
    let sink = EventSink { tell, lost: Arc::clone(&lost) };
    let volumes = registry.volumes().iter();
    let names = volumes.map(|volume| (volume.id, volume.name.clone())).collect();
    let log = EventLog::new(names, Instant::now());
    let builder = std::thread::Builder::new().name("events".into());
    let thread = builder.spawn(move || serve(log, &hear, &lost))?;
    Ok((sink, thread))
}

fn serve(mut log: EventLog, hear: &Receiver<(usize, Event)>, lost: &AtomicU64) {
    loop {
        let heard = hear.recv_timeout(TICK);
        let now = Instant::now();
        match heard {
            Ok((shard, event)) => log.take(now, shard, &event).iter().for_each(Line::write),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                log.close(now, Duration::ZERO).iter().for_each(Line::write);
                return;
            }
        }
        let missed = lost.swap(0, Ordering::Relaxed);
        if missed > 0 {
            log.take(now, 0, &Event::Omitted(missed)).iter().for_each(Line::write);
        }
        log.close(now, WINDOW).iter().for_each(Line::write);
    }
}

/// The level of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Level {
    Error,
    Warn,
    Info,
}

/// One line of the log.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Line {
    level: Level,
    volume: Option<String>,
    text: String,
}

impl Line {
    fn write(&self) {
        let (volume, text) = (self.volume.as_deref(), &self.text);
        match self.level {
            Level::Error => tracing::error!(volume, "{text}"),
            Level::Warn => tracing::warn!(volume, "{text}"),
            Level::Info => tracing::info!(volume, "{text}"),
        }
    }
}

/// The key by which two events count as the same.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Sort {
    what: u8,
    volume: Option<VolumeId>,
    /// The operation, the new health, or the shard.
    detail: usize,
}

impl Sort {
    fn of(shard: usize, event: &Event) -> Self {
        let (what, detail) = match event {
            Event::DeviceFailed { op, .. } => (0, *op as usize),
            Event::PrimaryAway { .. } => (1, 0),
            Event::PrimaryBack { .. } => (2, 0),
            Event::DestageFailed { .. } => (3, 0),
            Event::CleanCorrupt { .. } => (4, 0),
            Event::Fenced { .. } => (5, 0),
            Event::Health { to, .. } => (6, *to as usize),
            Event::Recovered(_) => (7, shard),
            Event::Omitted(_) => (8, 0),
            Event::PrimaryChanged { .. } => (10, shard),
            Event::Compared { .. } => (11, shard),
            Event::Overflow { active } => (12, 2 * shard + usize::from(*active)),
            Event::Loaded { .. } => (13, shard),
            Event::Unanswered { target, .. } => (9, usize::from(*target == Target::Cache)),
        };
        Self { what, volume: event.volume(), detail }
    }
}

/// Repetitions since the last line about the same kind of event.
struct Repeated {
    since: Instant,
    more: u64,
    last: Line,
}

/// Turns events into lines.
struct EventLog {
    names: HashMap<VolumeId, String>,
    begun: Instant,
    repeated: HashMap<Sort, Repeated>,
}

impl EventLog {
    fn new(names: HashMap<VolumeId, String>, begun: Instant) -> Self {
        Self { names, begun, repeated: HashMap::new() }
    }

    /// Takes an event; returns its line unless the event is a repetition.
    fn take(&mut self, now: Instant, shard: usize, event: &Event) -> Option<Line> {
        let (level, text) = describe(shard, event, now.duration_since(self.begun));
        let volume = event.volume().and_then(|id| self.names.get(&id)).cloned();
        let line = Line { level, volume, text };
        let sort = Sort::of(shard, event);
        if let Some(repeated) = self.repeated.get_mut(&sort) {
            repeated.more += 1;
            repeated.last = line;
            return None;
        }
        self.repeated.insert(sort, Repeated { since: now, more: 0, last: line.clone() });
        Some(line)
    }

    /// The lines about repetitions that have been counted for `window`.
    fn close(&mut self, now: Instant, window: Duration) -> Vec<Line> {
        let mut lines = Vec::new();
        self.repeated.retain(|_, repeated| {
            let open = now.duration_since(repeated.since);
            if open < window {
                return true;
            }
            if repeated.more == 0 {
                return false;
            }
            let Line { level, volume, text } = repeated.last.clone();
            let more = repeated.more;
            let text = format!(
                "and {more} more in the last {:.0} s; the last: {text}",
                open.as_secs_f64()
            );
            lines.push(Line { level, volume, text });
            (repeated.since, repeated.more) = (now, 0);
            true
        });
        lines
    }
}

fn describe(shard: usize, event: &Event, uptime: Duration) -> (Level, String) {
    match event {
        Event::DeviceFailed { target: Target::Cache, op, range, kind } => {
            let what = doing(*op);
            let place = if *op == IoOp::Flush { String::new() } else { format!(" {range}") };
            let text = format!(
                "{what}{place} of the cache device failed: {kind}; check the device (dmesg, SMART)"
            );
            (Level::Warn, text)
        }
        Event::DeviceFailed { target: Target::Primary(_), op, range, kind } => {
            (Level::Warn, primary_failed(*op, *range, &kind.to_string()))
        }
        Event::Unanswered { target, op, range, waited } => {
            let what = doing(*op);
            let device = if *target == Target::Cache { "cache device" } else { "primary" };
            let place = if *op == IoOp::Flush { String::new() } else { format!(" {range}") };
            let text = format!(
                "{what}{place} of the {device} has had no answer for {:.0} s; check the device or \
                 its server",
                waited.as_secs_f64()
            );
            (Level::Error, text)
        }
        Event::PrimaryAway { kind, .. } => (
            Level::Error,
            format!(
                "the primary does not answer: {kind}; reads that the cache cannot serve fail, \
                 dirty blocks stay in the cache; bring the device or its server back"
            ),
        ),
        Event::PrimaryBack { away, .. } => {
            (Level::Info, format!("the primary answers again, after {:.1} s", away.as_secs_f64()))
        }
        Event::DestageFailed { blocks, kind, pause, .. } => (
            Level::Warn,
            format!(
                "destaging {} failed: {kind}; they stay dirty in the cache and are tried again {}",
                blocks.bytes(),
                match pause.is_zero() {
                    true => "one by one".to_owned(),
                    false => format!("after {} ms", pause.as_millis()),
                }
            ),
        ),
        Event::CleanCorrupt { blocks, .. } => (
            Level::Warn,
            format!(
                "the cache device did not give back {} as they were written, by an error or with \
                 wrong bytes; they were clean: nothing is lost, they are read from the primary; \
                 if this goes on, replace the device",
                blocks.bytes()
            ),
        ),
        Event::Fenced { blocks, .. } => (
            Level::Error,
            format!(
                "LOST: {} of the volume were only in the cache, and it cannot give them back; \
                 reads of them fail until they are written again; restore them from a copy",
                blocks.bytes()
            ),
        ),
        Event::PrimaryChanged { blocks, .. } => (
            Level::Error,
            format!(
                "the primary was changed without the cache: {} of it differ from what the cache \
                 read or wrote there; the volume's clean blocks are dropped, its dirty ones \
                 stay; find out who writes to it, and check its content",
                blocks.bytes()
            ),
        ),
        Event::Compared { blocks, .. } => (
            Level::Info,
            format!("shard {shard}: {blocks} cached blocks are the same on the primary"),
        ),
        Event::Overflow { active: true } => (
            Level::Error,
            format!(
                "shard {shard}: the cache is full of blocks of a primary that takes none; writes \
                 of the other volumes go to their primaries; bring that primary back"
            ),
        ),
        Event::Overflow { active: false } => {
            (Level::Info, format!("shard {shard}: the cache has room for writes again"))
        }
        Event::Health { to, .. } => health(*to),
        Event::Recovered(found) => (Level::Info, recovered(shard, found, uptime)),
        Event::Loaded { blocks } => (
            Level::Info,
            format!(
                "shard {shard}: clean blocks are loaded {:.1} s after the start: {blocks} blocks \
                 are cached",
                uptime.as_secs_f64()
            ),
        ),
        Event::Omitted(count) => {
            (Level::Warn, format!("{count} more events came too fast to be logged one by one"))
        }
    }
}

fn doing(op: IoOp) -> &'static str {
    match op {
        IoOp::Read => "reading",
        IoOp::Write => "writing",
        IoOp::Flush => "a flush",
        IoOp::Discard => "discarding",
        IoOp::WriteZeroes => "zeroing",
        IoOp::Prefetch => "prefetch",
    }
}

fn primary_failed(op: IoOp, range: forebay_block::ByteRange, kind: &str) -> String {
    match op {
        IoOp::Flush => format!(
            "a flush of the primary failed: {kind}; writes that it should have covered count as \
             not written: dirty blocks are written again, clients that flush get an error; check \
             the device"
        ),
        IoOp::Read => format!(
            "reading {range} of the primary failed: {kind}; the client got an error; check the \
             device"
        ),
        _ => format!(
            "{} {range} of the primary failed: {kind}; cached blocks stay in the cache, a client \
             that waited for the primary got an error; check the device",
            doing(op)
        ),
    }
}

fn health(to: Health) -> (Level, String) {
    match to {
        Health::Good => (Level::Info, "the cache device is good".into()),
        Health::Draining => (
            Level::Error,
            "the cache device failed or was retired: nothing more is written to it, and its dirty \
             blocks are written to the primaries; let the server run until none is left (forebay \
             status), then replace the device"
                .into(),
        ),
        Health::Detached => (
            Level::Error,
            "the cache is out of use: all requests go to the primaries; replace the device and \
             start again"
                .into(),
        ),
    }
}

fn recovered(shard: usize, found: &Recovered, took: Duration) -> String {
    let Recovered { segments, unsealed, erased, records, blocks, dirty_blocks, .. } = *found;
    let Recovered { is_loading, lost_blocks, .. } = *found;
    let rest = if is_loading { "; the other clean blocks follow" } else { "" };
    let order = match unsealed + erased {
        0 => "ended in order",
        _ => "not ended in order",
    };
    format!(
        "shard {shard}: log of the cache read back in {:.1} s, {order}: {segments} segments, \
         {records} records, {blocks} blocks, {dirty_blocks} dirty, {lost_blocks} lost{rest}",
        took.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use forebay_block::{BlockRange, ByteRange, ErrorKind};

    use super::*;

    fn log(now: Instant) -> EventLog {
        EventLog::new(HashMap::from([(VolumeId(3), "db".to_string())]), now)
    }

    fn failed(volume: u8, offset: u64) -> Event {
        let (target, op) = (Target::Primary(VolumeId(volume)), IoOp::Read);
        Event::DeviceFailed {
            target,
            op,
            range: ByteRange::new(offset, 4096),
            kind: ErrorKind::Media,
        }
    }

    #[test]
    fn a_line_names_the_volume_and_says_what_where_and_why() {
        let now = Instant::now();
        let line = log(now).take(now, 0, &failed(3, 8192)).unwrap();
        assert_eq!(line.volume.as_deref(), Some("db"));
        assert!(line.text.starts_with("reading 4096 bytes at 8192 of the primary failed: "));
        assert!(line.text.contains("the device failed the request"), "{}", line.text);
        let blocks = BlockRange { first: 2, count: 3 };
        let line = log(now).take(now, 0, &Event::Fenced { volume: VolumeId(3), blocks }).unwrap();
        assert_eq!(line.level, Level::Error);
        assert!(line.text.starts_with("LOST: 12288 bytes at 8192 "), "{}", line.text);
    }

    #[test]
    fn what_repeats_is_counted() {
        let begun = Instant::now();
        let mut log = log(begun);
        assert!(log.take(begun, 0, &failed(3, 0)).is_some());
        assert!(log.take(begun, 1, &failed(3, 4096)).is_none(), "the same again");
        assert!(log.take(begun, 1, &failed(4, 0)).is_some(), "another volume");
        assert!(log.take(begun, 0, &failed(3, 12288)).is_none());
        assert_eq!(log.close(begun, WINDOW), []);
        let later = begun + WINDOW;
        let lines = log.close(later, WINDOW);
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert!(
            line.text
                .starts_with("and 2 more in the last 10 s; the last: reading 4096 bytes at 12288"),
            "{}",
            line.text
        );
        assert!(log.take(later, 0, &failed(3, 0)).is_none(), "it goes on");
        assert!(log.take(later, 0, &failed(4, 0)).is_some(), "it was over");
        assert_eq!(log.close(later + WINDOW, WINDOW).len(), 1);
        assert_eq!(log.close(later + 2 * WINDOW, WINDOW).len(), 0);
        assert!(log.take(later, 0, &failed(3, 0)).is_some(), "it was over");
    }
}
