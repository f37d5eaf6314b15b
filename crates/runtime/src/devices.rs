//! A thread's queues to the devices of its shard, with the requests that a full queue could not
//! take yet.
//!
//! Flushes pass a gate that all threads share (`FlushGate`): each device has one round at a time,
//! and threads send each other messages about when to flush and how a flush ended. A round waits
//! for threads with unread flushes of clients (`Coming`).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};

use forebay_block::sync::{Mutex, MutexGuard};
use forebay_block::{
    Completion, DeviceInfo, ErrorKind, Instant, Io, IoBuf, IoOp, IoQueue, IoResult, IoTag,
    VOLUMES_MAX, VolumeId,
};
use forebay_device::{BlockDevice, Ring};
use forebay_engine::Target;
use forebay_volume::{Ask, Asked, Coming, CutGate, FailedFlushes, FlushGate};

use crate::message::{Latencies, Message, count_latency};
use crate::pace::{Allowance, LARGE};

/// The tag of the gate's own flush; shards use 32-bit tags.
const GATE_TAG: IoTag = IoTag(u64::MAX);

/// The state of flushes that all threads share.
#[derive(Clone)]
pub struct Gates {
    /// The gate of each device; the cache device's comes first, if there is one.
    pub each: Arc<[Mutex<FlushGate>]>,
    /// The clients' flushes on their way to other threads.
    pub coming: Coming,
    /// For each volume ID, the gate of its cuts.
    pub cuts: Arc<[Mutex<CutGate>]>,
}

/// Creates the gates for these devices and this many threads.
pub fn gates<'a>(devices: impl Iterator<Item = &'a DeviceInfo>, threads: usize) -> Gates {
    let coming = Coming::new(threads);
    let gate = |info: &DeviceInfo| FlushGate::new(threads, info.flush_by_queue, coming.clone());
    let each = devices.map(|info| Mutex::new(gate(info))).collect();
    let cuts = (0..VOLUMES_MAX).map(|_| Mutex::new(CutGate::new(threads))).collect();
    Gates { each, coming, cuts }
}

/// Locks a gate. Its lists are replaced whole, so a panic elsewhere leaves it consistent.
pub fn locked<G>(gate: &Mutex<G>) -> MutexGuard<'_, G> {
    gate.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The queues of one shard.
pub struct Devices {
    own: usize,
    gates: Gates,
    /// Flushes that failed before they were sent.
    unsent: Vec<(Target, Completion)>,
    /// The cache device's lane first, if there is one, then those of the primaries.
    lanes: Vec<Lane>,
    /// For each volume id, the lane of its primary.
    primaries: Vec<Option<usize>>,
    completions: Vec<Completion>,
    /// Large reads that have completed but have not been handed to the shard.
    large: VecDeque<(Target, Completion)>,
}

struct Lane {
    target: Target,
    queue: Box<dyn IoQueue>,
    /// Requests waiting for room; bounded by the shard's limit of requests in flight.
    waiting: VecDeque<Io>,
    /// Requests in flight, including completed ones not handed to the shard yet.
    in_flight: usize,
    /// Large writes in flight: on completion the shard copies nothing.
    large_writes: Vec<IoTag>,
    /// Number of flushes sent to the device.
    flushes: u64,
    /// Only for a primary: its latencies.
    timed: Option<Timed>,
}

/// The latencies of a primary, waiting for room in its queue included.
#[derive(Default)]
struct Timed {
    latencies: Latencies,
    /// Requests in flight.
    since: HashMap<IoTag, (Instant, IoOp)>,
}

impl Devices {
    /// Opens a queue to every device.
    ///
    /// # Errors
    /// The error of the first device that cannot be opened.
    pub fn open(
        ring: &Rc<Ring>,
        cache: Option<&dyn BlockDevice>,
        primaries: &[(VolumeId, &dyn BlockDevice)],
        (own, gates): (usize, Gates),
    ) -> io::Result<Self> {
        let mut queues = Vec::new();
        if let Some(cache) = cache {
            queues.push((Target::Cache, cache.open_queue(ring)?));
        }
        for &(volume, device) in primaries {
            queues.push((Target::Primary(volume), device.open_queue(ring)?));
        }
        Ok(Self::over(queues, (own, gates)))
    }

    /// Creates it over open queues; the cache device's comes first, if there is one.
    ///
    /// # Panics
    /// If there is not one gate for each device.
    #[must_use]
    pub fn over(queues: Vec<(Target, Box<dyn IoQueue>)>, (own, gates): (usize, Gates)) -> Self {
        assert_eq!(queues.len(), gates.each.len(), "a gate for each device");
        let mut by_volume = Vec::new();
        for (lane, (target, _)) in queues.iter().enumerate() {
            let Target::Primary(volume) = target else { continue };
            let at = usize::from(volume.0);
            by_volume.resize(by_volume.len().max(at + 1), None);
            by_volume[at] = Some(lane);
        }
        let lanes = queues.into_iter().map(|(target, queue)| Lane::new(target, queue)).collect();
        let (completions, unsent, large) = (Vec::new(), Vec::new(), VecDeque::new());
        Self { own, gates, unsent, lanes, primaries: by_volume, completions, large }
    }

    fn lane(&self, target: Target) -> usize {
        let lane = match target {
            Target::Cache => Some(0),
            Target::Primary(volume) => self.primaries.get(usize::from(volume.0)).copied().flatten(),
        };
        let lane = lane.filter(|&at| self.lanes.get(at).is_some_and(|lane| lane.target == target));
        lane.expect("the device is open")
    }

    fn gate(&self, lane: usize) -> MutexGuard<'_, FlushGate> {
        locked(&self.gates.each[lane])
    }

    /// Sends a request to its device, now or as soon as there is room.
    ///
    /// # Panics
    /// If there is no such device, or the request has FUA: a flush hidden in it would bypass the
    /// gate.
    pub fn submit(&mut self, now: Instant, target: Target, io: Io) {
        assert!(!io.flags.fua, "durability is asked for by a flush");
        let at = self.lane(target);
        self.lanes[at].in_flight += 1;
        if io.op != IoOp::Flush {
            if io.op == IoOp::Write && io.buf.len() > LARGE {
                self.lanes[at].large_writes.push(io.tag);
            }
            return self.lanes[at].send(now, io);
        }
        let asked = Asked { shard: self.own, tag: io.tag };
        let ask = self.gate(at).ask(asked);
        match ask {
            Ask::Send => self.lanes[at].send_flush(now),
            Ask::Wait => {}
            Ask::Fail(error) => self.unsent.push((target, io.complete(Err(error)))),
        }
    }

    /// Hands completions to `take`, large reads only as far as the turn has time to copy them, and
    /// sends waiting requests. Messages for other threads go to `outgoing`, indexed by thread.
    pub fn poll(
        &mut self,
        now: Instant,
        outgoing: &mut [Vec<Message>],
        mut take: impl FnMut(Target, Completion),
    ) {
        for (target, done) in std::mem::take(&mut self.unsent) {
            let at = self.lane(target);
            self.lanes[at].in_flight -= 1;
            take(target, done);
        }
        let mut completions = std::mem::take(&mut self.completions);
        for at in 0..self.lanes.len() {
            let lane = &mut self.lanes[at];
            lane.queue.poll(now, &mut completions);
            let target = lane.target;
            for done in completions.drain(..) {
                let lane = &mut self.lanes[at];
                lane.note_time(now, &done);
                if done.buf.len() > LARGE && !lane.was_large_write(done.tag) {
                    self.large.push_back((target, done));
                    continue;
                }
                lane.in_flight -= 1;
                if done.tag == GATE_TAG {
                    self.flush_ended(now, at, &done.result, outgoing, &mut take);
                } else {
                    take(target, done);
                }
            }
            self.lanes[at].push(now);
        }
        self.completions = completions;
        self.hand_over_large(&mut take);
    }

    fn hand_over_large(&mut self, take: &mut impl FnMut(Target, Completion)) {
        let mut allowance = Allowance::FULL;
        while allowance.is_left()
            && let Some((target, done)) = self.large.pop_front()
        {
            let at = self.lane(target);
            self.lanes[at].in_flight -= 1;
            allowance.spend(done.buf.len());
            take(target, done);
        }
    }

    /// Handles the end of the gate's flush.
    fn flush_ended(
        &mut self,
        now: Instant,
        at: usize,
        result: &IoResult<()>,
        outgoing: &mut [Vec<Message>],
        take: &mut impl FnMut(Target, Completion),
    ) {
        let target = self.lanes[at].target;
        let ended = self.gate(at).ended(self.own, result);
        for Asked { shard, tag } in ended.answered {
            if shard == self.own {
                let done = self.flushed(target, tag, ended.result.clone());
                take(target, done);
            } else {
                outgoing[shard].push(Message::Flushed(target, tag, ended.result.clone()));
            }
        }
        if let Err(error) = &ended.result {
            for messages in outgoing.iter_mut() {
                messages.push(Message::FlushFailed(target, error.clone()));
            }
        }
        self.send_flushes(now, at, ended.send, outgoing);
    }

    fn send_flushes(
        &mut self,
        now: Instant,
        at: usize,
        send: Vec<usize>,
        outgoing: &mut [Vec<Message>],
    ) {
        for shard in send {
            if shard == self.own {
                self.lanes[at].send_flush(now);
            } else {
                outgoing[shard].push(Message::SendFlush(self.lanes[at].target));
            }
        }
    }

    /// Notes that this thread's shard has seen `count` flushes of clients of other threads, and has
    /// requested all that they need: rounds that waited for it may begin.
    pub fn seen(&mut self, now: Instant, count: u64, outgoing: &mut [Vec<Message>]) {
        self.gates.coming.see(self.own, count);
        for at in 0..self.lanes.len() {
            let send = self.gate(at).seen(self.own);
            self.send_flushes(now, at, send, outgoing);
        }
    }

    /// Sends a flush to this thread's queue on behalf of the gate.
    pub fn send_flush(&mut self, now: Instant, target: Target) {
        let at = self.lane(target);
        self.lanes[at].send_flush(now);
    }

    /// Takes the end of a flush that this thread's shard requested.
    pub fn flushed(&mut self, target: Target, tag: IoTag, result: IoResult<()>) -> Completion {
        let at = self.lane(target);
        self.lanes[at].in_flight -= 1;
        Completion { tag, result, buf: IoBuf::empty() }
    }

    /// Confirms that this thread's shard knows of a failed flush.
    pub fn told(&mut self, target: Target) {
        let at = self.lane(target);
        self.gate(at).told(self.own);
    }

    /// The counter of failed flushes of a primary.
    ///
    /// # Panics
    /// If there is no such device.
    #[must_use]
    pub fn failed_flushes(&self, volume: VolumeId) -> FailedFlushes {
        self.gate(self.lane(Target::Primary(volume))).failed()
    }

    /// The latencies of each primary, as far as this thread has asked it.
    pub fn primary_latencies(&self) -> impl Iterator<Item = (VolumeId, &Latencies)> {
        self.lanes.iter().filter_map(|lane| match (lane.target, &lane.timed) {
            (Target::Primary(volume), Some(timed)) => Some((volume, &timed.latencies)),
            _ => None,
        })
    }

    /// Number of flushes that this thread has sent to a device; 0 if there is no such device. One
    /// serves all shards that wait for it, of all threads.
    #[must_use]
    pub fn flushes(&self, target: Target) -> u64 {
        self.lanes.iter().find(|lane| lane.target == target).map_or(0, |lane| lane.flushes)
    }

    /// When [`Devices::poll`] must be called even if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        // Flushes that failed unsent, and completed large reads, are delivered in the next turn.
        let some = !self.unsent.is_empty() || !self.large.is_empty();
        let at_once = some.then_some(Instant::default());
        self.lanes.iter().filter_map(|lane| lane.queue.deadline()).chain(at_once).min()
    }

    /// Number of requests that have not completed.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.lanes.iter().map(|lane| lane.in_flight).sum()
    }
}

impl Lane {
    fn new(target: Target, queue: Box<dyn IoQueue>) -> Self {
        let (waiting, large_writes) = (VecDeque::new(), Vec::new());
        let timed = matches!(target, Target::Primary(_)).then(Timed::default);
        Self { target, queue, waiting, in_flight: 0, large_writes, flushes: 0, timed }
    }

    /// Counts the latency of a primary's completed request, if the primary answered it.
    fn note_time(&mut self, now: Instant, done: &Completion) {
        let is_answered =
            !matches!(&done.result, Err(error) if error.kind() == ErrorKind::DeviceGone);
        if let Some(timed) = &mut self.timed
            && let Some((since, op)) = timed.since.remove(&done.tag)
            && is_answered
        {
            count_latency(&mut timed.latencies, op, now.since(since));
        }
    }

    /// Whether a completed large request was a write; removes it from the list.
    fn was_large_write(&mut self, tag: IoTag) -> bool {
        let at = self.large_writes.iter().position(|&other| other == tag);
        at.map(|at| self.large_writes.swap_remove(at)).is_some()
    }

    fn send(&mut self, now: Instant, io: Io) {
        if let Some(timed) = &mut self.timed {
            timed.since.insert(io.tag, (now, io.op));
        }
        self.waiting.push_back(io);
        self.push(now);
    }

    fn send_flush(&mut self, now: Instant) {
        self.in_flight += 1;
        self.flushes += 1;
        self.send(now, Io::flush(GATE_TAG));
    }

    fn push(&mut self, now: Instant) {
        while let Some(io) = self.waiting.pop_front() {
            if let Err(io) = self.queue.submit(now, io) {
                self.waiting.push_front(io);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::ByteRange;
    use forebay_device::{AwayDevice, MemoryDevice};

    use super::*;

    #[test]
    fn a_request_that_no_primary_answered_has_no_latency() {
        let ring = Ring::new(8, None).unwrap();
        let read_at = |device: &dyn BlockDevice| {
            let gates = gates([device.info()].into_iter(), 1);
            let primaries = [(VolumeId(0), device)];
            let mut devices = Devices::open(&ring, None, &primaries, (0, gates)).unwrap();
            let read = Io::read(IoTag(7), ByteRange::new(0, 512), IoBuf::zeroed(512));
            devices.submit(Instant(0), Target::Primary(VolumeId(0)), read);
            let mut results = Vec::new();
            devices.poll(Instant(1), &mut [], |_, done| results.push(done.result.is_ok()));
            let (_, latencies) = devices.primary_latencies().next().unwrap();
            (results, latencies.iter().map(|latency| latency.count()).sum::<u64>())
        };
        assert_eq!(read_at(&MemoryDevice::new(1 << 20)), (vec![true], 1));
        let away = AwayDevice::new(1 << 20, "nbd://test", "nbd://test", String::new());
        assert_eq!(read_at(&away), (vec![false], 0));
    }
}
