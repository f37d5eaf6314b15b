//! One thread's part of a FUSE mount: requests from the kernel in, answers out.
//!
//! Over io_uring, the thread serves some of the kernel's queues, with slots on its own ring: the
//! kernel has a slot until it puts a request in, then the channel has it until the request is
//! answered. Without io_uring, messages are read from the device when the ring reports some, and
//! answers are written at once. The device is always watched: messages without an answer come
//! there. The channel is over when the kernel has unmounted; it never ends by itself.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use forebay_block::{
    Answer, Body, BufPool, Completion, Endpoint, Io, IoBuf, IoOp, IoTag, Parts, Responder, Slab,
    Step, Ticket,
};
use forebay_device::{
    Client, Clock, Done as RingDone, FuseSlot, Op, Payload, Returned, Ring, RingFile,
};
use forebay_fuse_wire::{Header, Message, split};
use forebay_policy::{RequestRules, RuleSet};
use rustix::io::Errno;

use super::{Channel, Submit};
use crate::message::End;
use crate::pace::{Allowance, LARGE};
use crate::sender::Processes;

/// Requests from the device in flight in one thread; the kernel keeps the others.
const DEVICE_REQUESTS_MAX: u32 = 256;
/// Messages read from the device in one turn.
const DEVICE_BATCH: usize = 64;
/// Bytes for a message's header and arguments, in addition to its data.
const DEVICE_HEAD: usize = 4096;

/// Marks the key of a request that came from the device.
const DEVICE: u64 = 1 << 62;
/// The token of the wait for messages from the device.
const WATCH: u64 = u64::MAX;

/// How a mount is served.
pub struct Mount {
    /// `/dev/fuse`, mounted and initialized; non-blocking.
    pub device: OwnedFd,
    /// The file system.
    pub responder: Arc<dyn Responder>,
    /// Most bytes of data in one request or answer.
    pub request_bytes: usize,
    /// Over io_uring: the number of the kernel's queues, and of slots in each.
    pub rings: Option<(u16, usize)>,
}

impl Mount {
    /// A copy for another thread.
    ///
    /// # Errors
    /// If the descriptor cannot be duplicated.
    pub fn share(&self) -> std::io::Result<Self> {
        let device = self.device.try_clone()?;
        let responder = Arc::clone(&self.responder);
        Ok(Self { device, responder, ..*self })
    }
}

/// A request for a text, sent to a thread that may block.
#[derive(Debug)]
pub struct Ask {
    /// The thread that needs the text.
    pub thread: usize,
    /// The channel's place in the thread.
    pub place: usize,
    /// The request that needs it.
    pub key: u64,
    /// The text's topic.
    pub topic: u64,
}

/// The part of a mount that one thread serves.
pub struct FuseChannel {
    thread: usize,
    place: usize,
    config: Mount,
    client: Client,
    file: RingFile,
    pool: BufPool,
    asks: Sender<Ask>,
    /// Slots that the channel has; `None` while the kernel has the slot, or when it is gone.
    slots: Vec<Option<Box<FuseSlot>>>,
    /// For each slot, the request in flight.
    tickets: Vec<Option<Ticket>>,
    /// Slots that the ring had no room to hand to the kernel yet.
    waiting: Vec<u32>,
    /// Requests from the device in flight.
    device_tickets: Slab<Ticket>,
    in_flight: usize,
    /// Requests for the volumes, not submitted yet.
    ready: VecDeque<(RuleSet, Endpoint, Io)>,
    clock: Clock,
    processes: Processes,
    finished: Vec<RingDone>,
    message: Vec<u8>,
    watching: bool,
    /// The kernel has unmounted.
    over: bool,
    /// New requests are refused.
    shut: bool,
    /// The next server gets every request without an answer from the kernel.
    left: bool,
}

impl FuseChannel {
    /// Starts to serve a mount on thread `thread` of `threads`, as its channel `place`.
    ///
    /// # Errors
    /// If the ring has no room for the device, or cannot serve slots.
    pub fn open(
        (thread, threads): (usize, usize),
        place: usize,
        (ring, clock): (&Rc<Ring>, Clock),
        pool: BufPool,
        config: Mount,
        asks: Sender<Ask>,
    ) -> std::io::Result<Self> {
        let file = ring.register(config.device.as_fd())?;
        let mut slots = Vec::new();
        if let Some((queues, depth)) = config.rings {
            if !ring.is_wide() {
                return Err(std::io::Error::other("the ring takes no commands of files"));
            }
            let mine = (0..queues).filter(|queue| usize::from(*queue) % threads == thread);
            for queue in mine {
                let slot = || Some(Box::new(FuseSlot::new(queue, config.request_bytes)));
                slots.extend((0..depth).map(|_| slot()));
            }
        }
        let count = u32::try_from(slots.len()).expect("a processor has few slots");
        Ok(Self {
            thread,
            place,
            client: ring.client(),
            file,
            pool,
            asks,
            tickets: vec![None; slots.len()],
            slots,
            waiting: (0..count).collect(),
            device_tickets: Slab::new(DEVICE_REQUESTS_MAX),
            in_flight: 0,
            ready: VecDeque::new(),
            clock,
            processes: Processes::default(),
            finished: Vec::new(),
            message: vec![0; config.request_bytes + DEVICE_HEAD],
            watching: false,
            over: false,
            shut: false,
            left: false,
            config,
        })
    }

    fn take_slot(&mut self, token: u64, slot: Box<FuseSlot>, error: Option<Errno>) {
        if let Some(error) = error {
            // The slot goes with its request, if it had one: nobody waits for that any more.
            if !self.over && !matches!(error, Errno::NOTCONN | Errno::CANCELED) {
                tracing::error!(%error, "the kernel no longer takes a FUSE slot");
            }
            self.over |= error == Errno::NOTCONN;
            return;
        }
        let Message { header, argument, data } = slot.message();
        let rules = self.rules_of(header);
        let step = self.step(Parts { header, argument, data });
        self.slots[token as usize] = Some(slot);
        self.in_flight += 1;
        self.carry_out(token, rules, step, IoBuf::empty());
    }

    /// The rules for the process that has sent the message with this header.
    fn rules_of(&mut self, header: &[u8]) -> RuleSet {
        let Ok(header) = Header::decode(header) else { return RuleSet::default() };
        self.processes.rules_of(self.clock.now(), header.pid, header.uid)
    }

    fn step(&self, parts: Parts<'_>) -> Step {
        if self.shut {
            return self.config.responder.refuse(parts);
        }
        self.config.responder.request(parts, &self.pool)
    }

    /// Reads pending messages, up to a limit, and as far as the turn has time to copy large ones.
    /// The next turn's watch finds the others.
    fn read_device(&mut self) {
        let mut allowance = Allowance::FULL;
        for _ in 0..DEVICE_BATCH {
            if self.device_tickets.is_full() || self.over || !allowance.is_left() {
                return;
            }
            let mut message = std::mem::take(&mut self.message);
            let found = rustix::io::read(&self.config.device, &mut message);
            let go_on = match found {
                Ok(bytes) => {
                    if bytes > LARGE {
                        allowance.spend(bytes);
                    }
                    self.take_message(&message[..bytes]);
                    true
                }
                // The kernel withdrew the request while it was being read.
                Err(Errno::NOENT | Errno::INTR) => true,
                Err(Errno::AGAIN) => false,
                Err(error) => {
                    if error != Errno::NODEV {
                        tracing::error!(%error, "the FUSE device cannot be read");
                    }
                    self.over = true;
                    false
                }
            };
            self.message = message;
            if !go_on {
                return;
            }
        }
    }

    fn take_message(&mut self, bytes: &[u8]) {
        let mut rules = RuleSet::default();
        let step = match split(bytes) {
            Ok(Message { header, argument, data }) => {
                rules = self.rules_of(header);
                self.step(Parts { header, argument, data })
            }
            Err(error) => {
                tracing::warn!(%error, "a message of the kernel cannot be read");
                let header = &bytes[..bytes.len().min(Header::BYTES)];
                self.config.responder.refuse(Parts { header, argument: &[], data: &[] })
            }
        };
        let at = self.device_tickets.insert(Ticket::default());
        self.in_flight += 1;
        self.carry_out(DEVICE | u64::from(at), rules, step, IoBuf::empty());
    }

    /// Carries out a step of a request; `filled` is the data that a read from a volume returned.
    fn carry_out(&mut self, key: u64, rules: RuleSet, step: Step, filled: IoBuf) {
        match step {
            Step::Silent => self.end(key, None, &[]),
            Step::Answer(answer) => self.end(key, Some(answer), &filled),
            Step::Pass(ticket, endpoint, mut io) => {
                self.keep(key, ticket);
                io.tag = IoTag(key);
                if io.op == IoOp::Read {
                    io.buf = self.buffer(key, io.range.len as usize);
                }
                self.ready.push_back((rules, endpoint, io));
            }
            Step::Ask(ticket, topic) => {
                self.keep(key, ticket);
                // If the receiver is gone, the request ends with the mount.
                let _ = self.asks.send(Ask { thread: self.thread, place: self.place, key, topic });
            }
        }
    }

    /// A buffer for a read: the payload of the request's slot, which will hold the answer.
    fn buffer(&mut self, key: u64, length: usize) -> IoBuf {
        if key & DEVICE != 0 {
            return self.pool.get(length);
        }
        self.slot(key).lend(length)
    }

    /// The slot of a request in flight.
    fn slot(&mut self, key: u64) -> &mut FuseSlot {
        self.slots[key as u32 as usize].as_mut().expect("a request is in its slot")
    }

    fn keep(&mut self, key: u64, ticket: Ticket) {
        let at = key as u32;
        if key & DEVICE == 0 {
            self.tickets[at as usize] = Some(ticket);
        } else {
            *self.device_tickets.get_mut(at).expect("a request is in flight") = ticket;
        }
    }

    fn ticket(&mut self, key: u64) -> Ticket {
        let at = key as u32;
        if key & DEVICE == 0 {
            return self.tickets[at as usize].take().expect("a request that was passed on");
        }
        *self.device_tickets.get(at).expect("a request that was passed on")
    }

    /// Ends a request, with its answer if it has one.
    fn end(&mut self, key: u64, answer: Option<Answer>, filled: &[u8]) {
        self.in_flight -= 1;
        let at = key as u32;
        if key & DEVICE == 0 {
            if let Some(Answer { header, body }) = &answer {
                let returned = match body {
                    Body::Filled(length) => Returned::InPlace(*length),
                    body => Returned::Bytes(body.bytes(&[])),
                };
                self.slot(key).answer(header, returned);
            }
            self.waiting.push(at);
            return;
        }
        self.device_tickets.remove(at);
        let Some(Answer { header, body }) = answer else { return };
        let parts = [IoSlice::new(&header), IoSlice::new(body.bytes(filled))];
        match rustix::io::writev(&self.config.device, &parts) {
            // The process that sent the request is gone.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(error) => tracing::warn!(%error, "the kernel did not take an answer"),
        }
    }
}

impl Channel for FuseChannel {
    fn reap(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        self.client.reap(&mut finished);
        for done in finished.drain(..) {
            match done.payload {
                Payload::Fuse(slot) => self.take_slot(done.token, slot, done.result.err()),
                _ => {
                    self.watching = false;
                    self.read_device();
                }
            }
        }
        self.finished = finished;
    }

    fn feed(&mut self, submit: &mut Submit<'_>) {
        while let Some((rules, endpoint, io)) = self.ready.pop_front() {
            if let Err(io) = submit(rules, endpoint, io) {
                self.ready.push_front((rules, endpoint, io));
                return;
            }
        }
    }

    fn complete(&mut self, done: Completion) {
        let key = done.tag.0;
        let ticket = self.ticket(key);
        let Completion { result, mut buf, .. } = done;
        if key & DEVICE == 0 && buf.capacity() > 0 && self.slot(key).is_lent() {
            self.slot(key).give_back(std::mem::take(&mut buf));
        }
        if self.left && result.is_err() {
            // It failed because this server leaves, perhaps. The next one carries it out again.
            return self.end(key, None, &[]);
        }
        let step = self.config.responder.finish(ticket, result);
        // Only reads and writes are subject to rules, and each of them is one step.
        self.carry_out(key, RuleSet::default(), step, buf);
    }

    fn set_rules(&mut self, rules: &Arc<RequestRules>) {
        self.processes.set_rules(rules);
    }

    fn told(&mut self, key: u64, text: Vec<u8>) {
        let ticket = self.ticket(key);
        let answer = self.config.responder.told(ticket, text);
        self.end(key, Some(answer), &[]);
    }

    /// Hands answered slots to the kernel, and watches the device.
    fn advance(&mut self) -> bool {
        if self.over {
            self.waiting.clear();
            return false;
        }
        while let Some(&at) = self.waiting.last() {
            let slot = self.slots[at as usize].take().expect("a waiting slot is here");
            if let Err(op) = self.client.submit(&self.file, at.into(), Op::Fuse(slot)) {
                let Op::Fuse(slot) = op else { unreachable!("the ring gives back its own") };
                self.slots[at as usize] = Some(slot);
                return true;
            }
            self.waiting.pop();
        }
        if !self.watching && !self.device_tickets.is_full() {
            let op = Op::Poll { events: libc_pollin() };
            self.watching = self.client.submit(&self.file, WATCH, op).is_ok();
        }
        !self.ready.is_empty() || (!self.watching && !self.device_tickets.is_full())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Refuses requests from now on, or leaves them with the kernel for the next server.
    fn shut(&mut self, end: End) {
        match end {
            End::Stop => self.shut = true,
            End::HandOver => (self.over, self.left) = (true, true),
        }
    }
}

/// `POLLIN`.
fn libc_pollin() -> u32 {
    u32::from(rustix::event::PollFlags::IN.bits())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Seek;
    use std::sync::mpsc::channel;

    use forebay_block::IoResult;

    use super::*;
    use crate::pace::TURN;
    use crate::testing::TempDir;

    /// A file system that answers nothing.
    struct Mute;

    impl Responder for Mute {
        fn request(&self, _parts: Parts<'_>, _pool: &BufPool) -> Step {
            Step::Silent
        }

        fn finish(&self, _ticket: Ticket, _result: IoResult<()>) -> Step {
            Step::Silent
        }

        fn told(&self, _ticket: Ticket, _text: Vec<u8>) -> Answer {
            unreachable!("no text is asked for")
        }

        fn refuse(&self, _parts: Parts<'_>) -> Step {
            Step::Silent
        }
    }

    /// Regression: one turn copied 64 messages of 256 KiB. The device is a file here, every read of
    /// which is a message.
    #[test]
    fn a_turn_reads_no_more_large_messages_than_it_has_time_for() {
        let dir = TempDir::new();
        let path = dir.path("device");
        File::create(&path).unwrap().set_len(64 << 20).unwrap();
        let read_in_a_turn = |request_bytes: usize| {
            let mut device = File::open(&path).unwrap();
            let mount = Mount {
                device: device.try_clone().unwrap().into(),
                responder: Arc::new(Mute),
                request_bytes,
                rings: None,
            };
            let (ring, asks) = (Ring::new(8, None).unwrap(), channel().0);
            let ring = (&ring, Clock::start());
            let opened = FuseChannel::open((0, 1), 0, ring, BufPool::default(), mount, asks);
            opened.unwrap().read_device();
            device.stream_position().unwrap() as usize
        };
        let message = (256 << 10) + DEVICE_HEAD;
        assert_eq!(read_in_a_turn(256 << 10), TURN.div_ceil(message) * message);
        assert_eq!(read_in_a_turn(0), DEVICE_BATCH * DEVICE_HEAD);
    }
}
