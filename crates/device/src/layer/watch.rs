//! Recorded samples of a device, and their protection from the owner's own changes.
//!
//! The record holds the content of some places of a device, so that after a crash the owner can
//! tell whether anybody else has changed the device. Therefore the record must never hold content
//! that the owner itself has changed: a change of a recorded place waits until the place is off the
//! record. The keeper of the record is woken for that. It records the place again when the place
//! has been unchanged for a while and a flush has made the last change durable.
//!
//! | state of a place | a change |
//! |---|---|
//! | known: it is on record | waits; the place becomes asked |
//! | asked | waits |
//! | void: it is not on record | proceeds |
//!
//! A change counts itself in before it checks the state, and the keeper makes a place known before
//! it checks the count: one of them sees the other.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use forebay_block::{ByteRange, Completion, DeviceInfo, Instant, Io, IoOp, IoQueue};

use super::{Layer, Layered, Slots};
use crate::device::BlockDevice;

/// Interval at which a waiting change checks again: about the time that updating the record takes.
const NAP: Duration = Duration::from_millis(1);

const VOID: u8 = 0;
const KNOWN: u8 = 1;
const ASKED: u8 = 2;
/// No checksum is known.
const NO_SUM: u64 = u64::MAX;
/// The last change failed, and may never become durable.
const NEVER: u64 = u64::MAX;

/// The places of a device that can be on record.
#[derive(Debug)]
pub struct Watch {
    /// Ascending and disjoint.
    places: Box<[ByteRange]>,
    marks: Box<[Mark]>,
    /// Number of changes that have ended successfully.
    ended: AtomicU64,
    /// Changes up to this number are durable.
    durable: AtomicU64,
    keeper: OnceLock<Thread>,
}

#[derive(Debug, Default)]
struct Mark {
    state: AtomicU8,
    /// CRC32C of the content while it is on record and durable, or `NO_SUM`.
    sum: AtomicU64,
    in_flight: AtomicU32,
    /// Number of this place's last ended change, in the order of all changes.
    last: AtomicU64,
    /// Number of changes that have begun.
    changes: AtomicU64,
    /// It was discarded, and not all of it was written since: a read may find one thing now and
    /// another later.
    undefined: AtomicBool,
}

/// A place on record.
#[derive(Clone, Copy, Debug)]
pub struct Recorded {
    at: usize,
    /// Its range.
    pub(crate) range: ByteRange,
    /// CRC32C of its content.
    pub(crate) sum: u32,
}

impl Watch {
    /// Watches `places`, which must be ascending and disjoint. `sums` has the CRC32C of each one
    /// that is on record, and durable.
    ///
    /// # Panics
    /// If the places overlap, or `sums` has a different length.
    #[must_use]
    pub fn new(places: Vec<ByteRange>, sums: &[Option<u32>]) -> Self {
        assert!(places.is_sorted_by(|a, b| a.end() <= b.offset) && places.len() == sums.len());
        let mark = |&sum: &Option<u32>| Mark {
            state: AtomicU8::new(if sum.is_some() { KNOWN } else { VOID }),
            sum: AtomicU64::new(sum.map_or(NO_SUM, u64::from)),
            ..Mark::default()
        };
        Self {
            marks: sums.iter().map(mark).collect(),
            places: places.into(),
            ended: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            keeper: OnceLock::new(),
        }
    }

    /// Sets the thread that keeps the record; it is woken when a place is asked for.
    pub fn set_keeper(&self, keeper: Thread) {
        // One watch has one keeper.
        let _ = self.keeper.set(keeper);
    }

    /// Recorded places that a change is waiting for.
    #[must_use]
    pub fn asked(&self) -> Vec<usize> {
        let asked = |&at: &usize| self.marks[at].state.load(SeqCst) == ASKED;
        (0..self.marks.len()).filter(asked).collect()
    }

    /// Allows changes of this place, which is now off the record.
    pub fn release(&self, at: usize) {
        self.marks[at].sum.store(NO_SUM, SeqCst);
        self.marks[at].state.store(VOID, SeqCst);
    }

    /// Notes what a place that is held back was found to contain. What it had before this watch
    /// began may not be durable, so it is not noted unless the place was changed since.
    pub fn note(&self, at: usize, sum: u32) {
        if self.marks[at].last.load(SeqCst) > 0 {
            self.marks[at].sum.store(sum.into(), SeqCst);
        }
    }

    /// The places whose content is known, and durable.
    #[must_use]
    pub fn recorded(&self) -> Vec<Recorded> {
        let places = self.places.iter().zip(&self.marks).enumerate();
        let recorded = places.filter_map(|(at, (&range, mark))| {
            let sum = u32::try_from(mark.sum.load(SeqCst)).ok()?;
            Some(Recorded { at, range, sum })
        });
        recorded.collect()
    }

    /// Whether a place still is on record, with this content. Then it has not been changed since.
    #[must_use]
    pub fn has(&self, place: &Recorded) -> bool {
        self.marks[place.at].sum.load(SeqCst) == u64::from(place.sum)
    }

    /// Number of changes of this place so far, if it is off the record, no change is in flight, and
    /// its content is defined and durable; otherwise `None`.
    #[must_use]
    pub fn at_rest(&self, at: usize) -> Option<u64> {
        let mark = &self.marks[at];
        let changes = mark.changes.load(SeqCst);
        let rests = mark.state.load(SeqCst) == VOID
            && mark.in_flight.load(SeqCst) == 0
            && !mark.undefined.load(SeqCst);
        (rests && mark.last.load(SeqCst) <= self.durable.load(SeqCst)).then_some(changes)
    }

    /// Holds back changes of a place from now on, so that it can be read and recorded. Returns
    /// false, and holds back nothing, if a change is in flight or not yet durable, or the content
    /// is undefined.
    #[must_use]
    pub fn hold(&self, at: usize) -> bool {
        let mark = &self.marks[at];
        mark.state.store(KNOWN, SeqCst);
        // Changes that ended before this are on the device; later ones wait.
        let still = mark.in_flight.load(SeqCst) == 0 && !mark.undefined.load(SeqCst);
        if !still || mark.last.load(SeqCst) > self.durable.load(SeqCst) {
            self.release(at);
            return false;
        }
        true
    }

    /// The places that overlap a range.
    fn touched(&self, range: ByteRange) -> Range<usize> {
        let first = self.places.partition_point(|place| place.end() <= range.offset);
        let end = self.places.partition_point(|place| place.offset < range.end());
        first..end.max(first)
    }

    /// Begins a change of these places. Returns false if one of them is on record.
    fn begin(&self, places: Range<usize>) -> bool {
        let marks = &self.marks[places];
        for mark in marks {
            mark.changes.fetch_add(1, SeqCst);
            mark.in_flight.fetch_add(1, SeqCst);
        }
        if marks.iter().all(|mark| mark.state.load(SeqCst) == VOID) {
            return true;
        }
        for mark in marks {
            let _ = mark.state.compare_exchange(KNOWN, ASKED, SeqCst, SeqCst);
            mark.in_flight.fetch_sub(1, SeqCst);
        }
        if let Some(keeper) = self.keeper.get() {
            keeper.unpark();
        }
        false
    }

    /// Ends a change of these places.
    fn end(&self, change: Change, ok: bool) {
        let Change { places, range, discards } = change;
        for (place, mark) in self.places[places.clone()].iter().zip(&self.marks[places]) {
            if discards {
                mark.undefined.store(true, SeqCst);
            } else if ok && range.offset <= place.offset && place.end() <= range.end() {
                mark.undefined.store(false, SeqCst);
            }
            let number = if ok { self.ended.fetch_add(1, SeqCst) + 1 } else { NEVER };
            mark.last.fetch_max(number, SeqCst);
            mark.in_flight.fetch_sub(1, SeqCst);
        }
    }
}

/// A device on which changes of recorded places wait.
pub type WatchedDevice = Layered<Watched>;

/// The record that changes wait for.
#[derive(Clone)]
pub struct Watched(Arc<Watch>);

impl WatchedDevice {
    /// Wraps `below`, with its places watched.
    #[must_use]
    pub fn new(below: Arc<dyn BlockDevice>, watch: Arc<Watch>) -> Self {
        Self { below, layer: Watched(watch) }
    }
}

impl Layer for Watched {
    fn queue(&self, below: Box<dyn IoQueue>) -> Box<dyn IoQueue> {
        Box::new(WatchedQueue {
            inner: below,
            watch: Arc::clone(&self.0),
            slots: Slots::default(),
            held: VecDeque::new(),
            again: Instant::default(),
        })
    }
}

/// A change in flight.
struct Change {
    /// The places that it touches.
    places: Range<usize>,
    range: ByteRange,
    discards: bool,
}

/// Data kept for a request at the device below.
enum Noted {
    Change(Change),
    /// A flush, with the number of changes that had ended before it.
    Flush(u64),
    Other,
}

impl Change {
    fn of(io: &Io, places: Range<usize>) -> Self {
        Self { places, range: io.range, discards: io.op == IoOp::Discard }
    }
}

struct WatchedQueue {
    inner: Box<dyn IoQueue>,
    watch: Arc<Watch>,
    slots: Slots<Noted>,
    /// Changes that wait for the record; bounded by the requests that the queue's owner has in
    /// flight.
    held: VecDeque<Io>,
    /// When to check again whether they may proceed.
    again: Instant,
}

impl WatchedQueue {
    /// Passes a request on; returns it if the device below has no room.
    fn pass(&mut self, now: Instant, io: Io, noted: Noted) -> Result<(), Io> {
        self.slots.pass(&mut *self.inner, now, io, noted).map_err(|(io, noted)| {
            if let Noted::Change(change) = noted {
                // The request was not accepted, so it changed nothing.
                for mark in &self.watch.marks[change.places] {
                    mark.in_flight.fetch_sub(1, SeqCst);
                }
            }
            io
        })
    }

    /// Resumes changes that have waited long enough.
    fn take_up(&mut self, now: Instant) {
        for _ in 0..self.held.len() {
            let Some(io) = self.held.pop_front() else { return };
            let places = self.watch.touched(io.range);
            if !self.watch.begin(places.clone()) {
                self.held.push_back(io);
                continue;
            }
            let change = Noted::Change(Change::of(&io, places));
            if let Err(io) = self.pass(now, io, change) {
                self.held.push_back(io);
                return;
            }
        }
    }
}

impl IoQueue for WatchedQueue {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        if io.op == IoOp::Flush {
            let ended = self.watch.ended.load(SeqCst);
            return self.pass(now, io, Noted::Flush(ended));
        }
        let places = if io.op.changes_data() { self.watch.touched(io.range) } else { 0..0 };
        if places.is_empty() {
            return self.pass(now, io, Noted::Other);
        }
        if !self.watch.begin(places.clone()) {
            self.held.push_back(io);
            self.again = now + NAP;
            return Ok(());
        }
        let change = Noted::Change(Change::of(&io, places));
        self.pass(now, io, change)
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        let from = done.len();
        self.inner.poll(now, done);
        for end in &mut done[from..] {
            let (tag, noted) = self.slots.take(end.tag);
            end.tag = tag;
            match noted {
                Noted::Change(change) => self.watch.end(change, end.result.is_ok()),
                Noted::Flush(ended) if end.result.is_ok() => {
                    self.watch.durable.fetch_max(ended, SeqCst);
                }
                Noted::Flush(_) | Noted::Other => {}
            }
        }
        if !self.held.is_empty() {
            self.take_up(now);
            self.again = now + NAP;
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let again = (!self.held.is_empty()).then_some(self.again);
        self.inner.deadline().into_iter().chain(again).min()
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::{IoBuf, IoTag};

    use super::*;
    use crate::MemoryDevice;
    use crate::testing::{Bench, exercise};

    fn watched(known: [bool; 2]) -> (Arc<Watch>, WatchedDevice) {
        let places = vec![ByteRange::new(4096, 4096), ByteRange::new(16384, 8192)];
        let watch = Arc::new(Watch::new(places, &known.map(|known| known.then_some(7))));
        (Arc::clone(&watch), WatchedDevice::new(Arc::new(MemoryDevice::new(1 << 20)), watch))
    }

    #[test]
    fn what_is_not_on_record_is_as_without_the_layer() {
        exercise(&watched([false; 2]).1, 61);
    }

    #[test]
    fn a_change_of_a_place_on_record_waits_until_the_record_is_void() {
        let (watch, device) = watched([true; 2]);
        let mut bench = Bench::new(&device);
        bench.write(8192, &[1; 4096]).unwrap();
        bench.write(0, &[1; 4096]).unwrap();
        assert_eq!(watch.asked(), []);
        let now = bench.clock.now();
        let changes = [
            Io::write(IoTag(7), 7680, IoBuf::copy_of(&[2; 1024])),
            Io::bare(IoTag(8), IoOp::Discard, ByteRange::new(0, 1 << 20)),
        ];
        let mut done = Vec::new();
        for change in changes {
            assert!(bench.queue.submit(now, change).is_ok());
            bench.queue.poll(now, &mut done);
            assert!(done.is_empty() && bench.queue.deadline() <= Some(now + NAP));
        }
        assert_eq!(watch.asked(), [0, 1]);
        // Other requests do not wait for the change.
        bench.queue.submit(now, Io::flush(IoTag(9))).unwrap();
        bench.queue.poll(now, &mut done);
        assert_eq!(done.drain(..).map(|end| end.tag).collect::<Vec<_>>(), [IoTag(9)]);
        watch.release(0);
        bench.queue.poll(now, &mut done);
        bench.queue.poll(now, &mut done);
        assert_eq!(done.drain(..).map(|end| end.tag).collect::<Vec<_>>(), [IoTag(7)]);
        watch.release(1);
        bench.queue.poll(now, &mut done);
        bench.queue.poll(now, &mut done);
        assert_eq!(done.drain(..).map(|end| end.tag).collect::<Vec<_>>(), [IoTag(8)]);
        assert_eq!(bench.queue.deadline(), None);
    }

    #[test]
    fn a_place_goes_on_record_again_when_what_it_holds_is_durable_and_at_rest() {
        let (watch, device) = watched([false; 2]);
        let mut bench = Bench::new(&device);
        let before = watch.at_rest(0).expect("nothing was changed");
        bench.write(4096, &[1; 512]).unwrap();
        assert!(watch.at_rest(0).is_none() && !watch.hold(0), "not durable");
        assert!(watch.at_rest(1).is_some(), "another place");
        watch.note(1, 8);
        assert!(watch.recorded().is_empty(), "nothing shows that it is durable");
        bench.bare(IoOp::Flush, ByteRange::default()).unwrap();
        assert!(watch.at_rest(0).is_some_and(|changes| changes > before));
        assert!(watch.hold(0));
        assert_eq!(watch.at_rest(0), None, "it is on record");
        watch.note(0, 9);
        let recorded = watch.recorded();
        assert_eq!((recorded.len(), recorded[0].range.offset, recorded[0].sum), (1, 4096, 9));
        assert!(watch.has(&recorded[0]));
        let change = Io::write(IoTag(1), 4096, IoBuf::copy_of(&[2; 512]));
        bench.queue.submit(bench.clock.now(), change).unwrap();
        assert_eq!(watch.asked(), [0]);
        watch.release(0);
        assert!(!watch.has(&recorded[0]) && watch.recorded().is_empty(), "it may be changed");
    }

    #[test]
    fn what_a_discard_has_left_is_not_recorded_until_it_is_written() {
        let (watch, device) = watched([false; 2]);
        let mut bench = Bench::new(&device);
        let mut change = |op: IoOp, offset: u64, len: u64| {
            match op {
                IoOp::Write => bench.write(offset, &vec![1; len as usize]).unwrap(),
                _ => bench.bare(op, ByteRange::new(offset, len)).unwrap(),
            }
            bench.bare(IoOp::Flush, ByteRange::default()).unwrap();
            watch.at_rest(0).is_some() && watch.hold(0) && {
                watch.release(0);
                true
            }
        };
        assert!(change(IoOp::Write, 4096, 512));
        assert!(!change(IoOp::Discard, 7680, 512));
        assert!(!change(IoOp::Write, 4096, 3584), "the rest is still undefined");
        assert!(change(IoOp::Write, 0, 16384));
        assert!(!change(IoOp::Discard, 0, 16384));
        assert!(change(IoOp::WriteZeroes, 4096, 4096), "zeros are defined");
    }

    #[test]
    fn places_are_found_by_range() {
        let (watch, _) = watched([true; 2]);
        let touched = |offset, len| watch.touched(ByteRange::new(offset, len));
        assert!(touched(0, 4096).is_empty() && touched(8192, 8192).is_empty());
        assert!(touched(24576, 1 << 20).is_empty());
        assert_eq!(touched(4095, 2), 0..1);
        assert_eq!(touched(8191, 1), 0..1);
        assert_eq!(touched(8191, 8194), 0..2);
        assert_eq!(touched(24575, 1), 1..2);
    }
}
