//! Recording of the client requests of a volume. Each thread's router notes the requests; the
//! thread passes them on in batches without waiting; a separate thread sorts and writes them. If
//! the writer falls behind, requests are left out and counted.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_block::{Instant, VolumeId};
use forebay_device::Clock;
use forebay_trace::{TraceRequest, TraceWriter};
use forebay_volume::Router;

/// Most batches that wait for the writer.
const BATCHES_MAX: usize = 64;
/// Number of requests from which a batch is passed on.
const BATCH: usize = 1024;
/// Longest time that a request waits for its batch.
const BATCH_AGE: Duration = Duration::from_millis(100);
/// Time that requests wait for earlier ones of other threads before they are written.
const HOLD: Duration = Duration::from_millis(500);
/// Most requests that wait for earlier ones.
const HELD_MAX: usize = 1 << 18;
/// Interval at which the writer checks whether requests are due.
const TICK: Duration = Duration::from_millis(50);

type Batch = Vec<TraceRequest>;

/// The state that a recording's threads share.
#[derive(Debug, Default)]
struct Shared {
    requests: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
    stop: AtomicBool,
    ended: AtomicBool,
    error: Mutex<Option<String>>,
}

/// A thread's handle for sending requests to a recording.
#[derive(Clone, Debug)]
pub struct Sink {
    batches: SyncSender<Batch>,
    shared: Arc<Shared>,
}

/// All recordings, as seen by one thread.
#[derive(Default)]
pub struct Taps {
    taps: Vec<Tap>,
}

struct Tap {
    volume: VolumeId,
    sink: Sink,
    /// Arrival of the oldest request in the router.
    since: Option<Instant>,
}

impl Taps {
    /// Begins or ends the recording of a volume.
    pub fn set(&mut self, router: &mut Router, volume: VolumeId, sink: Option<Sink>) {
        if let Some(at) = self.taps.iter().position(|tap| tap.volume == volume) {
            self.taps.swap_remove(at).send(router);
        }
        router.record(volume, sink.is_some());
        self.taps.extend(sink.map(|sink| Tap { volume, sink, since: None }));
    }

    /// Passes on requests that fill a batch or have waited long enough.
    pub fn pump(&mut self, now: Instant, router: &mut Router) {
        self.taps.retain_mut(|tap| {
            let waiting = router.recorded(tap.volume).map_or(0, |r| r.requests.len());
            if waiting == 0 {
                return true;
            }
            let since = *tap.since.get_or_insert(now);
            let due = waiting >= BATCH || now >= since + BATCH_AGE;
            if !due || tap.send(router) {
                return true;
            }
            router.record(tap.volume, false);
            false
        });
    }

    /// When [`Taps::pump`] must be called even if nothing happens before.
    pub fn deadline(&self) -> Option<Instant> {
        self.taps.iter().filter_map(|tap| tap.since).min().map(|since| since + BATCH_AGE)
    }
}

impl Tap {
    /// Passes on all requests noted; returns false if the recording has ended.
    fn send(&mut self, router: &mut Router) -> bool {
        let Some(recorded) = router.recorded(self.volume) else { return true };
        let taken = recorded.take();
        self.since = None;
        let dropped = &self.sink.shared.dropped;
        dropped.fetch_add(taken.dropped, Ordering::Relaxed);
        match self.sink.batches.try_send(taken.requests) {
            Ok(()) => true,
            Err(TrySendError::Full(lost)) => {
                dropped.fetch_add(lost.len() as u64, Ordering::Relaxed);
                true
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }
}

/// The state of a recording.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordingStatus {
    /// Requests written.
    pub requests: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Requests left out because the writer fell behind.
    pub dropped: u64,
    /// Whether it is still running.
    pub running: bool,
    /// Why it ended early.
    pub error: Option<String>,
}

/// A recording in progress. Dropping it ends it.
#[derive(Debug)]
pub struct Recording {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

/// The parameters of a recording.
pub struct RecordingPlan {
    /// The volume's name and size, for the head of the trace.
    pub name: String,
    /// Size of the volume in bytes, for the head of the trace.
    pub size: u64,
    /// Start time, in seconds since 1970.
    pub seconds: u64,
    /// Longest duration.
    pub limit: Option<Duration>,
    /// The clock of the pool.
    pub clock: Clock,
}

impl Recording {
    /// Starts the writer, which writes the trace to `out`; requests must be sent to the sink.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(plan: RecordingPlan, out: Box<dyn Write + Send>) -> std::io::Result<(Self, Sink)> {
        let (batches, incoming) = sync_channel(BATCHES_MAX);
        let shared = Arc::new(Shared::default());
        let sink = Sink { batches, shared: Arc::clone(&shared) };
        let own = Arc::clone(&shared);
        let body = move || {
            if let Err(error) = write(&plan, out, &incoming, &own) {
                *own.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
            }
            own.ended.store(true, Ordering::Release);
        };
        let writer = std::thread::Builder::new().name("record".into()).spawn(body)?;
        Ok((Self { shared, writer: Some(writer) }, sink))
    }

    /// The current state.
    #[must_use]
    pub fn status(&self) -> RecordingStatus {
        let Shared { requests, bytes, dropped, ended, error, .. } = &*self.shared;
        let running = !ended.load(Ordering::Acquire);
        RecordingStatus {
            requests: requests.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
            dropped: dropped.load(Ordering::Relaxed),
            running,
            error: error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// Waits until all requests sent by the threads are written. The threads must have been told to
    /// stop sending.
    pub fn finish(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Writes the trace until there are no more senders, or the time is over.
fn write(
    plan: &RecordingPlan,
    mut out: Box<dyn Write + Send>,
    incoming: &Receiver<Batch>,
    shared: &Shared,
) -> std::io::Result<()> {
    let start = plan.clock.now();
    let end = plan.limit.map(|limit| start + limit);
    let mut bytes = Vec::new();
    let mut writer = TraceWriter::new(&plan.name, plan.size, plan.seconds, &mut bytes);
    let mut held: Vec<TraceRequest> = Vec::new();
    loop {
        let batch = incoming.recv_timeout(TICK);
        let now = plan.clock.now();
        let over = end.is_some_and(|end| now >= end) || shared.stop.load(Ordering::Relaxed);
        let gone = matches!(batch, Err(RecvTimeoutError::Disconnected));
        held.extend(batch.unwrap_or_default());
        if over {
            // Requests still on their way were made before the end.
            incoming.try_iter().for_each(|batch| held.extend(batch));
            held.retain(|request| end.is_none_or(|end| request.nanos < end.0));
        }
        let last = gone || over;
        let until = if last { u64::MAX } else { now.0.saturating_sub(HOLD.as_nanos() as u64) };
        let count = settled(&mut held, until);
        for mut request in held.drain(..count) {
            request.nanos = request.nanos.saturating_sub(start.0);
            writer.push(request, &mut bytes);
        }
        writer.set_dropped(shared.dropped.load(Ordering::Relaxed));
        out.write_all(&bytes)?;
        shared.requests.fetch_add(count as u64, Ordering::Relaxed);
        shared.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        bytes.clear();
        if last {
            break;
        }
    }
    writer.finish(&mut bytes);
    out.write_all(&bytes)?;
    out.flush()?;
    shared.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(())
}

/// Sorts the held requests; returns how many of the first may be written.
fn settled(held: &mut [TraceRequest], until: u64) -> usize {
    held.sort_by_key(|request| request.nanos);
    let count = held.partition_point(|request| request.nanos <= until);
    count.max(held.len().saturating_sub(HELD_MAX))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// The trace as a test reads it.
    #[derive(Clone, Default)]
    struct Out(Arc<Mutex<Vec<u8>>>);

    impl Write for Out {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn plan(limit: Option<Duration>) -> RecordingPlan {
        let clock = Clock::start();
        RecordingPlan { name: "v".to_owned(), size: 1 << 20, seconds: 1, limit, clock }
    }

    #[test]
    fn batches_of_several_threads_are_put_in_order() {
        let out = Out::default();
        let plan = plan(None);
        let clock = plan.clock;
        let (mut recording, sink) = Recording::start(plan, Box::new(out.clone())).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let now = clock.now().0;
        let batch = |nanos: [u64; 2]| nanos.map(|n| TraceRequest::flush(now + n)).to_vec();
        sink.batches.send(batch([3, 5])).unwrap();
        sink.batches.send(batch([1, 4])).unwrap();
        drop(sink);
        recording.finish();
        let status = recording.status();
        assert_eq!((status.requests, status.dropped, status.running), (4, 0, false));
        let bytes = out.0.lock().unwrap().clone();
        assert_eq!(status.bytes, bytes.len() as u64);
        let read = forebay_trace::TraceReader::new(&bytes[..], None).unwrap();
        let times: Vec<u64> = read.map(|request| request.unwrap().nanos).collect();
        assert_eq!(times.iter().map(|t| t - times[0]).collect::<Vec<_>>(), [0, 2, 3, 4]);
    }

    #[test]
    fn it_ends_by_itself_and_says_why_it_could_not_go_on() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
                Err(io::Error::from_raw_os_error(28))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let limit = Some(Duration::from_millis(100));
        let (timed, _kept) = Recording::start(plan(limit), Box::new(Out::default())).unwrap();
        let (failed, _kept_too) = Recording::start(plan(None), Box::new(Full)).unwrap();
        let patience = std::time::Instant::now() + Duration::from_secs(10);
        while timed.status().running || failed.status().running {
            assert!(std::time::Instant::now() < patience, "both end");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(timed.status().error, None);
        let error = failed.status().error.unwrap();
        assert!(error.contains("No space"), "{error}");
    }
}
