//! One client connection on a thread's ring: bytes into its session, and bytes out of it.
//!
//! At most one receive and one send are in flight. Reading stops while the session wants no input,
//! and while more than [`OUT_SOFT`] bytes wait for a client that does not read. Large answers stay
//! in the session, which copies them out slice by slice as the client takes them. A connection is
//! over when none of its work is in flight in the ring, the session or the shards.

use std::collections::VecDeque;
use std::mem;
use std::os::fd::OwnedFd;
use std::time::Duration;

use forebay_block::{Endpoint, Instant, Io, Outbox, SLICE, Session, VolumeId};
use forebay_device::{Client, Done, Op, Payload, RingFile, has_hung_up, untaken};
use forebay_policy::{RequestRules, RuleSet, Sender};
use forebay_volume::Done as Finished;
use rustix::net::{Shutdown, shutdown};

use crate::memory::{Grant, Memory, Ticket};
use crate::message::{ClientStats, Served};
use crate::pace::{Allowance, LARGE, WINDOW};
use crate::places::Seat;
use crate::tenure::Tenure;

/// Most bytes in one receive; the buffer is kept for the connection's life.
pub const IN_BYTES: usize = 256 << 10;
/// Bytes waiting to be sent from which no more input is read.
pub const OUT_SOFT: usize = SLICE;
/// A larger send buffer is not kept: its memory would cost a page fault for each page anyway.
const OUT_KEPT: usize = 4 * SLICE;
/// Least free space in the input buffer for which a receive is started.
const SPACE_MIN: usize = 16 << 10;

/// The kind of a connection's ring operation, in the low bits of its token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A receive.
    Receive,
    /// A send.
    Send,
}

/// The state of a connection at the end of a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Waiting for an event.
    Wait,
    /// Must be advanced again in the next turn.
    Again,
    /// As `Again`, and that turn must start at once: there is input that can be used.
    Feed,
    /// Another server can go on with it: [`Connection::left`].
    Leave,
    /// Over: drop it.
    Drop,
}

/// A connection that another server can go on with.
#[derive(Debug)]
pub struct LeftClient {
    /// The socket.
    pub socket: OwnedFd,
    /// Received bytes that nobody has used.
    pub input: Vec<u8>,
    /// What client and server have agreed on: [`Session::agreed`].
    pub agreed: String,
    /// Whether it came over a Unix socket.
    pub unix: bool,
    /// The peer, for the log.
    pub peer: String,
}

/// Time limits for clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// To choose a volume.
    pub handshake: Duration,
    /// To take a byte of an answer, or to send a byte of a write that it began.
    pub stall: Duration,
    /// To send a request; unlimited when `None`.
    pub idle: Option<Duration>,
}

/// The limit that a client exceeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Overdue {
    /// To choose a volume.
    Handshake,
    /// To take its answers.
    Stall,
    /// To send the data of a write.
    Debt,
    /// To move as many bytes as it holds of the shared memory, while others wait for some.
    Tenure,
    /// To send a request.
    Idle,
}

impl Overdue {
    /// The limit as text for the log.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Handshake => "its handshake took too long",
            Self::Stall => "it took no byte of its answers for client_stall_timeout",
            Self::Debt => "it sent no byte of its write for client_stall_timeout",
            Self::Tenure => "it was too slow with memory that others waited for",
            Self::Idle => "it sent no request for longer than idle_timeout",
        }
    }
}

/// A send is looked at this many times in the time in which the client must take a byte of it: the
/// kernel completes it only when most of the bytes before it are taken.
const GLANCES: u32 = 8;

/// Time for a client without a place to read the refusal.
const TOLD_PATIENCE: Duration = Duration::from_secs(2);

/// One client.
pub struct Connection {
    session: Box<dyn Session>,
    /// `None` once it is closed.
    file: Option<RingFile>,
    out: Outbox,
    /// Received and unused bytes: `input[start..end]`. Moved out while a receive is in flight.
    input: Vec<u8>,
    start: usize,
    end: usize,
    /// Whether the session has examined all input and needs more bytes.
    hungry: bool,
    receiving: bool,
    sending: bool,
    /// When the receive in flight began.
    asked: Instant,
    /// When the send in flight began, or when the client took a byte since, as far as is known.
    taken: Instant,
    /// When the socket was last looked at, and the bytes that the client had not taken.
    looked: Instant,
    untaken: u64,
    /// Bytes in the send in flight.
    in_send: usize,
    /// Spare buffer for the next send.
    spare: Vec<u8>,
    /// No more input will come.
    ended: bool,
    /// It is left to another server once its requests are answered.
    leaving: bool,
    /// The socket itself; the ring has its own reference.
    socket: Option<OwnedFd>,
    /// Requests that did not fit into the router or into the window of large requests, and when
    /// they arrived.
    parked: VecDeque<(Instant, Endpoint, Io)>,
    /// Bytes of large requests at the shards.
    large: u64,
    /// Bytes of memory granted beyond its own part.
    granted: u64,
    /// How long it may hold them.
    tenure: Tenure,
    /// Up to when the time that the server waited for it is counted.
    counted: Instant,
    /// Its ticket in the line for more memory.
    ticket: Option<Ticket>,
    /// When it was accepted.
    pub accepted: Instant,
    /// When bytes were last received or sent.
    active: Instant,
    /// The place that it takes up.
    pub seat: Seat,
    /// The peer, for the log.
    pub peer: String,
    /// The same, for rules.
    sender: Sender,
    /// The rules that may match its requests, once they are known.
    pub rules: Option<RuleSet>,
    /// Bytes received and sent.
    pub bytes: (u64, u64),
    /// Its answered requests, and the volume of the last one.
    served: Served,
    volume: Option<VolumeId>,
    /// Whether it is already in the list of connections for the end of the turn.
    pub touched: bool,
}

impl Connection {
    /// Creates a connection whose session has sent its greeting, with the bytes that another server
    /// has received and not used.
    #[must_use]
    pub fn new(
        mut session: Box<dyn Session>,
        (file, socket): (RingFile, OwnedFd),
        now: Instant,
        (peer, sender, seat): (String, Sender, Seat),
        received: &[u8],
    ) -> Self {
        let mut out = Outbox::default();
        session.start(&mut out);
        let mut input = vec![0; IN_BYTES.max(received.len())];
        input[..received.len()].copy_from_slice(received);
        Self {
            session,
            file: Some(file),
            out,
            input,
            start: 0,
            end: received.len(),
            hungry: received.is_empty(),
            receiving: false,
            sending: false,
            asked: now,
            taken: now,
            looked: now,
            untaken: u64::MAX,
            in_send: 0,
            spare: Vec::new(),
            ended: false,
            leaving: false,
            socket: Some(socket),
            parked: VecDeque::new(),
            large: 0,
            granted: 0,
            tenure: Tenure::default(),
            counted: now,
            ticket: None,
            accepted: now,
            active: now,
            seat,
            peer,
            sender,
            rules: None,
            bytes: (0, 0),
            served: Served::default(),
            volume: None,
            touched: false,
        }
    }

    /// Processes the completion of a ring operation.
    pub fn finish(&mut self, now: Instant, kind: Kind, done: Done) {
        self.active = now;
        self.count_wait(now);
        let Payload::Bytes(bytes) = done.payload else {
            unreachable!("receive and send hand their bytes back");
        };
        match kind {
            Kind::Receive => {
                self.receiving = false;
                self.input = bytes;
                match done.result {
                    Ok(count) if count > 0 => {
                        self.end += count;
                        self.bytes.0 += count as u64;
                        if self.session.is_owed() {
                            self.tenure.moved(count as u64, self.granted);
                        }
                        self.hungry = false;
                    }
                    // Cancelled, so that the client's next bytes stay where they are.
                    Err(_) if self.leaving && self.file.is_none() => {}
                    _ => self.end_input(),
                }
            }
            Kind::Send => self.sent(bytes, done.result.ok()),
        }
    }

    fn sent(&mut self, mut bytes: Vec<u8>, count: Option<usize>) {
        self.sending = false;
        self.in_send = 0;
        let Some(count) = count.filter(|&count| count > 0) else {
            // The peer is gone: nobody reads the rest.
            self.close();
            return self.end_input();
        };
        self.bytes.1 += count as u64;
        self.tenure.moved(count as u64, self.granted);
        if count < bytes.len() {
            bytes.drain(..count);
            bytes.append(&mut self.out.bytes);
            self.out.bytes = bytes;
        } else if bytes.capacity() <= OUT_KEPT {
            bytes.clear();
            self.spare = bytes;
        }
    }

    /// Hands the input to the session, which puts requests into the outbox as far as there is
    /// memory. The client is at index `at` of thread `thread`.
    pub fn feed(&mut self, memory: &Memory, (thread, at): (usize, u32)) {
        loop {
            let allowed = (memory.own() + self.granted).saturating_sub(self.unsent());
            self.session.allow_memory(allowed, &mut self.out);
            self.feed_input();
            if !self.take_memory(memory, (thread, at)) {
                return;
            }
        }
    }

    /// Bytes not sent to the client yet.
    fn unsent(&self) -> u64 {
        (self.out.bytes.len() + self.in_send) as u64
    }

    /// Takes the memory that the session waits for. Returns true if the session has it now.
    fn take_memory(&mut self, memory: &Memory, (thread, at): (usize, u32)) -> bool {
        let Some(wanted) = self.session.wants_memory().filter(|_| !self.ended) else {
            self.leave_line(memory);
            return false;
        };
        let beyond = (wanted + self.unsent()).saturating_sub(memory.own());
        if beyond <= self.granted {
            self.leave_line(memory);
            return true;
        }
        if self.ticket.is_some() {
            return false;
        }
        // A waiting client keeps no memory that it does not need: others may be waiting for it.
        self.give_back(memory);
        let more = beyond - self.granted;
        match memory.take(thread, at, more) {
            Ok(()) => self.add_memory(more),
            Err(ticket) => self.ticket = Some(ticket),
        }
        self.ticket.is_none()
    }

    /// Takes memory that it waited for. Returns false if it no longer waits, or if the client has
    /// left meanwhile, which nobody has noticed: a client that waits is not received from.
    pub fn grant(&mut self, grant: Grant) -> bool {
        if self.ticket != Some(grant.ticket) {
            return false;
        }
        self.ticket = None;
        if self.socket.as_ref().is_some_and(has_hung_up) {
            self.close();
            self.end_input();
            return false;
        }
        self.add_memory(grant.bytes);
        true
    }

    fn add_memory(&mut self, bytes: u64) {
        if self.granted == 0 {
            self.tenure = Tenure::of(bytes);
        }
        self.granted += bytes;
    }

    /// Whether a send waits for the client.
    fn offers(&self) -> bool {
        self.sending && self.file.is_some()
    }

    /// Whether the data of a write is waited for.
    fn is_owed(&self) -> bool {
        self.receiving && !self.ended && self.session.is_owed()
    }

    /// Counts the time up to now, if the server waited for the client while that held memory.
    fn count_wait(&mut self, now: Instant) {
        if self.granted > 0 && (self.offers() || self.is_owed()) {
            self.tenure.wait(now.since(self.counted));
        }
        self.counted = now;
    }

    /// Gives back memory that it no longer needs.
    pub fn give_back(&mut self, memory: &Memory) {
        if self.granted > 0 {
            let beyond = (self.session.memory() + self.unsent()).saturating_sub(memory.own());
            let excess = self.granted.saturating_sub(beyond);
            if excess > 0 {
                self.granted -= excess;
                memory.give_back(excess);
            }
        }
    }

    /// Gives all memory back and leaves the line: the connection is over.
    pub fn leave(&mut self, memory: &Memory) {
        self.leave_line(memory);
        memory.give_back(mem::take(&mut self.granted));
    }

    /// Leaves the line. A grant already on its way finds no taker, and is given back.
    fn leave_line(&mut self, memory: &Memory) {
        if let Some(ticket) = self.ticket.take() {
            memory.leave(ticket);
        }
    }

    fn feed_input(&mut self) {
        while !self.ended && self.has_room() && self.start < self.end {
            let used = self.session.receive(&self.input[self.start..self.end], &mut self.out);
            self.start += used;
            // A session without room for a request has left it in the input: more input would not
            // help.
            let stalled = !self.session.wants_input() || self.session.wants_memory().is_some();
            self.hungry = self.start == self.end || used == 0 && !stalled;
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            if used == 0 {
                return;
            }
        }
    }

    /// Whether the session may be given input.
    fn has_room(&self) -> bool {
        !self.receiving
            && !self.out.close
            && self.session.wants_input()
            && self.out.bytes.len() < OUT_SOFT
            && self.parked.is_empty()
    }

    /// The rules that may match its requests. A client that has not chosen a volume yet has none.
    pub fn rules(&mut self, rules: &RequestRules) -> RuleSet {
        if let Some(known) = self.rules {
            return known;
        }
        if rules.rules().is_empty() || self.session.is_negotiating() {
            return RuleSet::default();
        }
        self.sender.certificate = self.session.certificate_names();
        *self.rules.insert(rules.of(&self.sender))
    }

    /// Hands parked requests to `submit`, until it returns one.
    pub fn unpark(&mut self, mut submit: impl FnMut(Instant, Endpoint, Io) -> Result<(), Io>) {
        while let Some((arrived, endpoint, io)) = self.parked.pop_front() {
            if let Err(io) = self.submit_one((arrived, endpoint), io, &mut submit) {
                return self.parked.push_front((arrived, endpoint, io));
            }
        }
    }

    /// Hands the session's requests, which have just arrived, to `submit`, in order.
    pub fn submit(
        &mut self,
        now: Instant,
        mut submit: impl FnMut(Instant, Endpoint, Io) -> Result<(), Io>,
    ) {
        let mut requests = mem::take(&mut self.out.ios);
        for (endpoint, io) in requests.drain(..) {
            let full = if self.parked.is_empty() {
                self.submit_one((now, endpoint), io, &mut submit).err()
            } else {
                Some(io)
            };
            self.parked.extend(full.map(|io| (now, endpoint, io)));
        }
        self.out.ios = requests;
    }

    fn submit_one(
        &mut self,
        (arrived, endpoint): (Instant, Endpoint),
        io: Io,
        submit: &mut impl FnMut(Instant, Endpoint, Io) -> Result<(), Io>,
    ) -> Result<(), Io> {
        let bytes = io.buf.len();
        if bytes <= LARGE {
            return submit(arrived, endpoint, io);
        }
        if self.large > 0 && self.large + bytes as u64 > WINDOW {
            return Err(io);
        }
        submit(arrived, endpoint, io)?;
        self.large += bytes as u64;
        Ok(())
    }

    /// Whether requests are parked.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Hands the session the completion of a request that took this long.
    pub fn complete(&mut self, done: Finished, took: Duration) {
        let Finished { volume, op, bytes, completion, .. } = done;
        if bytes > LARGE {
            self.large -= bytes as u64;
        }
        self.volume = Some(volume);
        self.served.count(op, took, bytes, completion.result.is_err());
        self.session.complete(completion, &mut self.out);
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self, now: Instant) -> ClientStats {
        ClientStats {
            peer: self.peer.clone(),
            volume: self.volume,
            connected: now.since(self.accepted),
            silent: now.since(self.active),
            in_flight: self.session.in_flight(),
            memory: self.session.memory() + self.unsent(),
            served: self.served,
        }
    }

    /// Takes no more input; requests in flight are still answered.
    pub fn end_input(&mut self) {
        if !self.ended {
            self.ended = true;
            self.session.shutdown(&mut self.out);
        }
    }

    /// Takes no more requests; once those in flight are answered, another server can go on with the
    /// connection. If that is impossible, takes no more input.
    pub fn hold(&mut self) {
        self.leaving = !self.ended && self.session.hold();
        if !self.leaving {
            self.end_input();
        }
    }

    /// What another server needs in order to go on.
    #[must_use]
    pub fn left(self) -> Option<LeftClient> {
        Some(LeftClient {
            agreed: self.session.agreed()?,
            socket: self.socket?,
            input: self.input[self.start..self.end].to_vec(),
            unix: self.seat == Seat::Unix,
            peer: self.peer,
        })
    }

    /// Drops the connection, even with replies unsent.
    pub fn close(&mut self) {
        if let Some(socket) = &self.socket {
            // The ring's table may keep the socket for longer than this (Linux before 6.13).
            let _ = shutdown(socket, Shutdown::Both);
        }
        self.file = None;
        self.socket = None;
        self.out.bytes.clear();
    }

    /// Whether the client has not chosen a volume yet.
    #[must_use]
    pub fn is_negotiating(&self) -> bool {
        !self.ended && self.session.is_negotiating()
    }

    /// The mistake for which its session closes it.
    #[must_use]
    pub fn why(&self) -> Option<&str> {
        self.out.why.as_deref()
    }

    /// When [`Connection::overdue`] must be asked, unless bytes are received or sent before.
    #[must_use]
    pub fn due(&self, patience: &Patience) -> Option<Instant> {
        let glance = self.offers().then(|| self.looked + patience.stall / GLANCES);
        self.limits(patience).map(|(at, _)| at).chain(glance).min()
    }

    /// The limit that the client has exceeded, if any.
    pub fn overdue(
        &mut self,
        now: Instant,
        patience: &Patience,
        memory: &Memory,
    ) -> Option<Overdue> {
        if self.offers() {
            self.glance(now);
        }
        let over = self.tenure.left(patience.stall) <= now.since(self.counted);
        if over && !memory.is_waited_for(self.ticket) {
            self.tenure = Tenure::of(self.granted);
            self.counted = now;
        }
        self.limits(patience).find(|&(at, _)| at <= now).map(|(_, why)| why)
    }

    /// Looks whether the client has taken a byte of the send in flight.
    fn glance(&mut self, now: Instant) {
        let untaken = self.socket.as_ref().and_then(|socket| untaken(socket).ok());
        let untaken = untaken.unwrap_or(u64::MAX);
        if untaken < self.untaken {
            self.taken = now;
        }
        (self.looked, self.untaken) = (now, untaken);
    }

    /// The limits that apply now, and when they are exceeded.
    fn limits(&self, patience: &Patience) -> impl Iterator<Item = (Instant, Overdue)> {
        let told = self.seat == Seat::Told;
        let handshake = patience.handshake.min(if told { TOLD_PATIENCE } else { Duration::MAX });
        let chooses = self.is_negotiating();
        let (offers, owed) = (!chooses && self.offers(), !chooses && self.is_owed());
        let holds = self.granted > 0 && (offers || owed);
        let idle = patience.idle.filter(|_| !chooses && self.is_idle());
        [
            chooses.then(|| (self.accepted + handshake, Overdue::Handshake)),
            offers.then(|| (self.taken + patience.stall, Overdue::Stall)),
            (owed && !offers).then(|| (self.asked + patience.stall, Overdue::Debt)),
            holds.then(|| (self.counted + self.tenure.left(patience.stall), Overdue::Tenure)),
            idle.map(|idle| (self.active + idle, Overdue::Idle)),
        ]
        .into_iter()
        .flatten()
    }

    /// Whether no request is in flight or waits for memory, and no answer is unsent.
    fn is_idle(&self) -> bool {
        let waits = self.ticket.is_some() || !self.parked.is_empty();
        !self.ended && !self.sending && self.session.in_flight() == 0 && !waits
    }

    /// Starts the next receive and send if they are due; closes the connection when everything is
    /// sent. The bytes of large answers are charged to `allowance`.
    pub fn advance(
        &mut self,
        now: Instant,
        ring: &Client,
        token: impl Fn(Kind) -> u64,
        allowance: &mut Allowance,
    ) -> Next {
        self.count_wait(now);
        let paused = self.session.next_turn();
        let spoke = self.speak(allowance);
        // After its goodbye a client sends nothing, so the last answer ends the connection.
        if self.out.close {
            self.end_input();
        }
        let started = self.start_send(now, ring, token(Kind::Send))
            && self.start_receive(now, ring, token(Kind::Receive));
        let quiet = self.session.in_flight() == 0 && self.parked.is_empty() && !self.sending;
        let said = self.out.bytes.is_empty() && !self.session.has_more_to_say();
        if self.ended && quiet && (said || self.file.is_none()) {
            self.close();
            return if self.receiving { Next::Wait } else { Next::Drop };
        }
        if self.leaving && !self.ended && quiet && said && self.session.agreed().is_some() {
            // This cancels a receive.
            self.file = None;
            return if self.receiving { Next::Wait } else { Next::Leave };
        }
        if !spoke || paused || !self.out.ios.is_empty() || self.can_feed() {
            return Next::Feed;
        }
        // Work that did not fit into the router or the ring is tried again in the next turn.
        if started && self.parked.is_empty() { Next::Wait } else { Next::Again }
    }

    /// Whether there is input that the session would examine.
    fn can_feed(&self) -> bool {
        !self.ended && !self.hungry && self.has_room()
    }

    /// Lets the session continue a large answer. Returns false if the turn has no time left for it.
    fn speak(&mut self, allowance: &mut Allowance) -> bool {
        if self.sending || self.file.is_none() || !self.session.has_more_to_say() {
            return true;
        }
        if !allowance.is_left() {
            return false;
        }
        let before = self.out.bytes.len();
        self.session.speak(&mut self.out);
        allowance.spend(self.out.bytes.len() - before);
        true
    }

    /// Returns false if the ring had no room.
    fn start_send(&mut self, now: Instant, ring: &Client, token: u64) -> bool {
        let Some(file) = self.file.as_ref() else {
            self.out.bytes.clear();
            return true;
        };
        if self.sending || self.out.bytes.is_empty() {
            return true;
        }
        let bytes = mem::replace(&mut self.out.bytes, mem::take(&mut self.spare));
        let (span, count) = (0..bytes.len(), bytes.len());
        match ring.submit(file, token, Op::Send { bytes, span }) {
            Ok(()) => {
                (self.sending, self.in_send) = (true, count);
                // The first look counts as a byte taken, and is the measure for the next.
                (self.taken, self.looked, self.untaken) = (now, now, u64::MAX);
            }
            Err(Op::Send { bytes, .. }) => self.out.bytes = bytes,
            Err(_) => unreachable!("the ring gives back what it was given"),
        }
        self.sending
    }

    /// Returns false if the ring had no room.
    fn start_receive(&mut self, now: Instant, ring: &Client, token: u64) -> bool {
        let Some(file) = self.file.as_ref() else { return true };
        if self.ended || !self.hungry || !self.has_room() {
            return true;
        }
        if self.input.len() - self.end < SPACE_MIN {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let span = self.end..self.input.len();
        if span.is_empty() {
            return true;
        }
        let bytes = mem::take(&mut self.input);
        match ring.submit(file, token, Op::Receive { bytes, span }) {
            Ok(()) => (self.receiving, self.asked) = (true, now),
            Err(Op::Receive { bytes, .. }) => self.input = bytes,
            Err(_) => unreachable!("the ring gives back what it was given"),
        }
        self.receiving
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::os::fd::AsFd;

    use forebay_block::{ByteRange, Completion, IoBuf, IoTag};
    use forebay_device::Ring;

    use super::*;

    /// A session that says nothing.
    struct Mute;

    impl Session for Mute {
        fn receive(&mut self, bytes: &[u8], _out: &mut Outbox) -> usize {
            bytes.len()
        }

        fn complete(&mut self, _done: Completion, _out: &mut Outbox) {}

        fn wants_input(&self) -> bool {
            true
        }

        fn in_flight(&self) -> usize {
            0
        }

        fn shutdown(&mut self, _out: &mut Outbox) {}
    }

    /// Regression: the latency of a request above the window began when it left its line.
    #[test]
    fn a_parked_request_arrived_when_it_was_read() {
        let ring = Ring::new(8, None).unwrap();
        let socket = OwnedFd::from(std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let file = ring.register(socket.as_fd()).unwrap();
        let names = (String::new(), Sender::default(), Seat::Told);
        let mut connection =
            Connection::new(Box::new(Mute), (file, socket), Instant(1), names, &[]);
        let read = |tag| {
            let range = ByteRange::new(0, WINDOW);
            (Endpoint(0), Io::read(IoTag(tag), range, IoBuf::zeroed(WINDOW as usize)))
        };
        connection.out.ios = vec![read(1), read(2)];
        let mut taken = Vec::new();
        connection.submit(Instant(5), |arrived, _, io| {
            taken.push((arrived, io.tag));
            Ok(())
        });
        assert!(connection.is_parked());
        connection.large = 0;
        connection.unpark(|arrived, _, io| {
            taken.push((arrived, io.tag));
            Ok(())
        });
        assert_eq!(taken, [(Instant(5), IoTag(1)), (Instant(5), IoTag(2))]);
    }
}
