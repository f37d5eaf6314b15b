//! One thread's part of a disk that the kernel has made for ublk: some of its queues, with their
//! slots on the thread's ring.
//!
//! The kernel has a slot until it puts a request in; then the channel has it until the request is
//! answered. When the disk is removed, every slot comes back with an error, and the channel is
//! over.
//!
//! When the server stops or dies, the kernel keeps the requests that have not been answered, and
//! hands them to the next server. So a stop leaves new requests in their slots, without an answer.
//! A request may thus be carried out twice, the second time after a restart. That is harmless: the
//! client has no answer yet, so nothing that it did later depends on the first time.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::{BufPool, Completion, Endpoint, ErrorKind, Io, IoBuf, IoOp, IoTag};
use forebay_device::{Client, Done as RingDone, Payload, Ring, UblkQueue, UblkSlot};
use forebay_policy::{RequestRules, RuleSet, Sender};
use forebay_ublk_wire::Request;
use rustix::io::Errno;

use super::{Channel, Submit};
use crate::message::End;

/// A disk to be served.
pub struct Disk {
    /// `/dev/ublkcN`.
    pub device: OwnedFd,
    /// The volume.
    pub endpoint: Endpoint,
    /// Number of queues.
    pub queues: u16,
    /// Slots in each queue.
    pub depth: u16,
    /// Most bytes of data in a request.
    pub request_bytes: usize,
}

impl Disk {
    /// A copy for another thread.
    ///
    /// # Errors
    /// If the descriptor cannot be duplicated.
    pub fn share(&self) -> std::io::Result<Self> {
        Ok(Self { device: self.device.try_clone()?, ..*self })
    }
}

/// A slot, and what is in it.
#[derive(Default)]
struct Place {
    /// `None` while the kernel has it, or when it is gone.
    slot: Option<Box<UblkSlot>>,
    /// The request that the volume has.
    asked: Option<Request>,
}

/// The part of a disk that one thread serves.
pub struct UblkChannel {
    client: Client,
    pool: BufPool,
    endpoint: Endpoint,
    request_bytes: usize,
    places: Vec<Place>,
    /// Slots that the kernel has not taken back for good.
    left: usize,
    /// Slots to hand to the kernel.
    waiting: Vec<u32>,
    in_flight: usize,
    /// Requests for the volume, not submitted yet.
    ready: VecDeque<Io>,
    /// The rules that ask nothing of the sender, whom a disk does not tell.
    rules: RuleSet,
    finished: Vec<RingDone>,
    /// New requests stay in their slots.
    shut: bool,
}

impl UblkChannel {
    /// Starts to serve the queues of a disk that are for thread `thread` of `threads`; `None` if
    /// none is.
    ///
    /// # Errors
    /// If the ring takes no commands, or the kernel does not share a queue's memory.
    pub fn open(
        (thread, threads): (usize, usize),
        ring: &Rc<Ring>,
        pool: BufPool,
        disk: Disk,
    ) -> std::io::Result<Option<Self>> {
        let mut places = Vec::new();
        for number in (0..disk.queues).filter(|queue| usize::from(*queue) % threads == thread) {
            let queue = UblkQueue::open(disk.device.try_clone()?, number, disk.depth)?;
            let slots = (0..disk.depth).map(|tag| UblkSlot::new(&queue, tag));
            places.extend(slots.map(|slot| Place { slot: Some(Box::new(slot)), asked: None }));
        }
        if places.is_empty() {
            return Ok(None);
        }
        if !ring.is_wide() {
            return Err(std::io::Error::other("the ring takes no commands of files"));
        }
        let count = u32::try_from(places.len()).expect("a disk has few slots");
        Ok(Some(Self {
            client: ring.client(),
            pool,
            endpoint: disk.endpoint,
            request_bytes: disk.request_bytes,
            left: places.len(),
            places,
            waiting: (0..count).collect(),
            in_flight: 0,
            ready: VecDeque::new(),
            rules: RuleSet::default(),
            finished: Vec::new(),
            shut: false,
        }))
    }

    fn take_slot(&mut self, token: u64, slot: Box<UblkSlot>, error: Option<Errno>) {
        if let Some(error) = error {
            self.left -= 1;
            if error != Errno::NODEV {
                tracing::error!(%error, "the kernel no longer takes a slot of a disk");
            }
            return;
        }
        let place = &mut self.places[token as usize];
        let slot = place.slot.insert(slot);
        if self.shut {
            return;
        }
        let begun = begin(slot, self.request_bytes, &self.pool);
        match begun {
            Ok((request, buf)) => {
                let Request { op, range, flags } = request;
                self.ready.push_back(Io { tag: IoTag(token), op, range, flags, buf });
                place.asked = Some(request);
                self.in_flight += 1;
            }
            Err(kind) => {
                slot.answer(-kind.errno());
                self.waiting.push(token as u32);
            }
        }
    }
}

/// The request in a slot, and its buffer with the data of a write.
fn begin(
    slot: &UblkSlot,
    request_bytes: usize,
    pool: &BufPool,
) -> Result<(Request, IoBuf), ErrorKind> {
    let descriptor = slot.descriptor();
    let request = descriptor.request(request_bytes).inspect_err(|kind| {
        tracing::warn!(%kind, ?descriptor, "a request of the kernel cannot be done");
    })?;
    let mut buf = match request.op {
        IoOp::Read | IoOp::Write => pool.get(request.range.len as usize),
        IoOp::Flush | IoOp::Discard | IoOp::WriteZeroes | IoOp::Prefetch => IoBuf::empty(),
    };
    if request.op == IoOp::Write {
        slot.copy_out(&mut buf).map_err(|error| not_copied(error, &request))?;
    }
    Ok((request, buf))
}

fn not_copied(error: Errno, request: &Request) -> ErrorKind {
    tracing::error!(%error, ?request, "the kernel does not copy the data of a request");
    ErrorKind::Media
}

impl Channel for UblkChannel {
    fn reap(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        self.client.reap(&mut finished);
        for done in finished.drain(..) {
            if let Payload::Ublk(slot) = done.payload {
                self.take_slot(done.token, slot, done.result.err());
            }
        }
        self.finished = finished;
    }

    fn feed(&mut self, submit: &mut Submit<'_>) {
        while let Some(io) = self.ready.pop_front() {
            if let Err(io) = submit(self.rules, self.endpoint, io) {
                self.ready.push_front(io);
                return;
            }
        }
    }

    fn set_rules(&mut self, rules: &Arc<RequestRules>) {
        self.rules = rules.of(&Sender::default());
    }

    fn complete(&mut self, done: Completion) {
        let Completion { tag, result, buf } = done;
        let place = &mut self.places[tag.0 as usize];
        let request = place.asked.take().expect("a request is answered once");
        let slot = place.slot.as_mut().expect("a request is in its slot");
        self.in_flight -= 1;
        if self.shut && result.is_err() {
            // It failed because this server ends, perhaps. The next one carries it out again.
            return;
        }
        let result = result.map_err(|error| error.kind()).and_then(|()| match request.op {
            IoOp::Read => slot.copy_in(&buf).map_err(|error| not_copied(error, &request)),
            _ => Ok(()),
        });
        slot.answer(request.result(result));
        self.waiting.push(tag.0 as u32);
    }

    fn advance(&mut self) -> bool {
        while let Some(&at) = self.waiting.last() {
            let slot = self.places[at as usize].slot.take().expect("a waiting slot is here");
            if let Err(slot) = self.client.submit_slot(at.into(), slot) {
                self.places[at as usize].slot = Some(slot);
                return true;
            }
            self.waiting.pop();
        }
        !self.ready.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Leaves new requests to the next server, and those that fail from now on.
    fn shut(&mut self, _end: End) {
        self.shut = true;
    }

    fn is_over(&self) -> bool {
        self.left == 0
    }
}
