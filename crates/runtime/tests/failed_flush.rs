//! A flush of the primary fails while a write that bypasses the cache is half done.
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

use std::io;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_block::{
    Arena, Completion, DeviceInfo, ErrorKind, Instant, Io, IoBuf, IoOp, IoQueue, IoTag,
    STRIPE_SIZE, Session, VolumeId,
};
use forebay_device::{BlockDevice, Ring};
use forebay_runtime::{Access, Address, Listener, MakeShard, Pool, PoolConfig, Uncached};
use forebay_volume::{Registry, Volume};

#[path = "support/session.rs"]
mod session;
use session::Scripted;

const SIZE: u64 = 8 * STRIPE_SIZE;

/// A device that completes writes of the first stripe at once, and others when the test allows.
#[derive(Clone)]
struct Half {
    info: DeviceInfo,
    flush_fails: bool,
    /// Number of writes completed at once.
    written: Arc<AtomicUsize>,
    let_go: Arc<AtomicBool>,
}

struct HalfQueue {
    device: Half,
    now: Instant,
    done: Vec<Completion>,
    held: Vec<Io>,
}

impl BlockDevice for Half {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn open_queue(&self, _ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        let (device, now) = (self.clone(), Instant(0));
        Ok(Box::new(HalfQueue { device, now, done: Vec::new(), held: Vec::new() }))
    }
}

impl IoQueue for HalfQueue {
    fn info(&self) -> &DeviceInfo {
        &self.device.info
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        self.now = now;
        match io.op {
            IoOp::Write if io.range.offset >= STRIPE_SIZE => self.held.push(io),
            IoOp::Flush if self.device.flush_fails => {
                self.done.push(io.complete(Err(ErrorKind::Media.into())));
            }
            _ => self.done.push(io.complete(Ok(()))),
        }
        Ok(())
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.now = now;
        if self.device.let_go.load(Ordering::SeqCst) {
            self.done.extend(self.held.drain(..).map(|io| io.complete(Ok(()))));
        }
        let written = self.done.iter().filter(|done| !done.buf.is_empty()).count();
        done.append(&mut self.done);
        self.device.written.fetch_add(written, Ordering::SeqCst);
    }

    fn deadline(&self) -> Option<Instant> {
        let held = (!self.held.is_empty()).then(|| self.now + Duration::from_millis(1));
        if self.done.is_empty() { held } else { Some(Instant(0)) }
    }
}

fn ask(pool: &Pool, name: &str, io: Io) -> (Receiver<Completion>, UnixStream) {
    let (tell, hear) = channel();
    let path = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
    let address = Address::Unix { path: path.clone(), access: Access::mode(0o600) };
    let io = Mutex::new(Some(io));
    let factory = move || -> Box<dyn Session> {
        let script = io.lock().unwrap().take().into_iter().collect();
        Box::new(Scripted { script, answers: tell.clone(), in_flight: 0 })
    };
    pool.listen(vec![Listener::bind(&address).unwrap()], Arc::new(factory)).unwrap();
    (hear, UnixStream::connect(path).unwrap())
}

/// Sends a flush and a write over two stripes, the flush while the device has completed only the
/// first half of the write. Returns whether each succeeded.
fn flush_in_the_middle(shards: usize, flush_fails: bool) -> (bool, bool) {
    let (written, let_go) = Default::default();
    let device = Half { info: DeviceInfo::plain(SIZE, "half"), flush_fails, written, let_go };
    let volume = Volume::new(VolumeId(0), "v", DeviceInfo::plain(SIZE, "half"));
    let registry = Registry::new(vec![volume]).unwrap();
    let makers = (0..shards).map(|_| -> MakeShard { Box::new(|_| Box::<Uncached>::default()) });
    let (primary, arena) = (Arc::new(device.clone()), Arena::new(8 << 20));
    let config = PoolConfig::new(registry, vec![primary], makers.collect(), arena);
    let pool = Pool::start(config).unwrap();
    let name = |what: &str| format!("{what}-{shards}-{flush_fails}");
    let good = |answer: &Receiver<Completion>| {
        answer.recv_timeout(Duration::from_secs(30)).expect("it is answered").result.is_ok()
    };
    let write = Io::write(IoTag(1), STRIPE_SIZE - 4096, IoBuf::zeroed(8192));
    let (write, _writer) = ask(&pool, &name("half-write"), write);
    while device.written.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    let (flush, _flusher) = ask(&pool, &name("half-flush"), Io::flush(IoTag(2)));
    let flushed = good(&flush);
    assert!(write.try_recv().is_err(), "half of it is under way");
    device.let_go.store(true, Ordering::SeqCst);
    (flushed, good(&write))
}

/// The failed flush may have lost the first half. The next flush would not report that, so the
/// write must fail.
#[test]
fn a_write_of_which_a_failed_flush_had_a_part_fails() {
    for shards in 1..=4 {
        assert_eq!(flush_in_the_middle(shards, false), (true, true), "{shards} shards");
        assert_eq!(flush_in_the_middle(shards, true), (false, false), "{shards} shards");
    }
}
