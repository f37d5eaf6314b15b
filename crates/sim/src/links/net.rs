//! A network with an NBD server at its end: connections that break, requests that land late, and a
//! server with a volatile cache that loses power.
//!
//! It assumes of a real network the following, and no more: the bytes of a connection arrive in
//! order or not at all. An answer may arrive long after its server is gone. A server carries out
//! the requests that it has received on a connection before it hangs up. If the client does not see
//! it hang up, old requests land within [`LATE_MAX`] of the break; if a router resets the
//! connection, within [`RESET_LATE_MAX`], since nobody can wait for an end that is invisible. Those
//! of a client that is killed land within [`LATE_MAX`] of that. A flush that lands late does
//! nothing: if it failed then, it would take the server's error with it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use forebay_block::{ByteRange, Completion, ErrorKind, Io, IoBuf, IoOp, IoTag, SECTOR_SIZE};
use forebay_nbd_wire::{Command, NbdError, Request, SimpleReply};

use crate::disk::{Discards, DiskProfile, Fate, Fault, Rule, SimDisk, Slot};
use crate::pages::Pages;
use crate::rng::Rng;

/// A millisecond, in nanoseconds.
pub const MS: u64 = 1_000_000;
/// Time from a break to the last request that lands, if the server's end is not seen.
const LATE_MAX: u64 = 4_500 * MS;
/// Time from a break to the last request that lands, if the connection was reset.
const RESET_LATE_MAX: u64 = 800 * MS;
/// Longest time until the client notices that a server is gone.
const NOTICE_MAX: u64 = 3_000 * MS;
/// Longest time that a server is off.
const OFF_MAX: u64 = 1_000 * MS;

/// A future event.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Event {
    /// A shard's turn, caused by an event.
    Turn(usize),
    /// A shard's turn, caused by a client.
    Tick(usize),
    /// A power failure, a broken link or a failed flush.
    Trouble,
    /// The server's disk completes a request: slot, connection, cookie, life of the server.
    Disk(Slot, usize, u64, u32),
    /// Bytes arrive at the server.
    ToServer(usize, Vec<u8>),
    /// Bytes arrive at the client.
    ToClient(usize, Vec<u8>),
    /// The client sees the end of a connection.
    End(usize),
}

/// A connection.
#[derive(Default)]
struct Link {
    shard: usize,
    /// Bytes that the client can receive.
    arrived: Vec<u8>,
    /// Whether the client sees that it has ended.
    ended: bool,
    /// Bytes of a request that the server has received in part.
    partial: Vec<u8>,
    /// Whether the server's end is gone.
    dead: bool,
    /// Whether the client has closed it for sending.
    closing: bool,
    /// Since when nothing more gets through; bytes already on their way arrive at this time.
    cut: Option<u64>,
    /// Whether the server does not see the client close the connection.
    deaf: bool,
    /// Number of requests that the server's disk has.
    busy: u32,
    /// Arrival of the last bytes at the server and at the client.
    last: (u64, u64),
}

/// The network and the server.
pub struct Net {
    /// Virtual time, in nanoseconds.
    pub now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    number: u64,
    links: Vec<Link>,
    /// The server's disk.
    pub disk: SimDisk,
    life: u32,
    on_at: u64,
    /// The source of randomness.
    pub rng: Rng,
    /// Number of power failures, broken links, and failed flushes on the server, and of clients
    /// that were killed.
    pub troubles: [u64; 4],
}

impl Net {
    /// Creates a server with a disk of `size` zero bytes.
    pub fn new(size: u64, mut rng: Rng) -> Self {
        let profile = DiskProfile {
            size,
            volatile: true,
            garbles: false,
            latency: (MS / 20, 5 * MS),
            flush: (MS / 10, 10 * MS),
            slow_percent: 2,
            discards: Discards::Zeros,
        };
        let disk = SimDisk::new(profile, Pages::new(size), rng.fork());
        let (events, links) = (BinaryHeap::new(), Vec::new());
        Self { now: 0, events, number: 0, links, disk, life: 0, on_at: 0, rng, troubles: [0; 4] }
    }

    /// Schedules an event.
    pub fn at(&mut self, at: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at, self.number, event)));
    }

    /// Returns the next event for a shard; events of the network itself are handled on the way.
    pub fn next(&mut self) -> Option<Event> {
        let Reverse((at, _, event)) = self.events.pop()?;
        self.now = at;
        match event.clone() {
            Event::Turn(_) | Event::Tick(_) | Event::Trouble => {}
            Event::Disk(slot, link, cookie, life) if life == self.life => {
                self.done(slot, link, cookie);
            }
            Event::Disk(..) => {}
            Event::ToServer(link, bytes) => self.hear(link, bytes),
            Event::ToClient(link, bytes) => {
                self.links[link].arrived.extend(bytes);
                self.wake(link);
            }
            Event::End(link) => {
                self.links[link].ended = true;
                self.wake(link);
            }
        }
        Some(event)
    }

    /// Schedules a turn for the shard of a connection, sometimes with a long delay.
    fn wake(&mut self, link: usize) {
        let held = if self.rng.percent(2) { 1_500 * MS } else { MS / 10 };
        let (at, shard) = (self.now + self.rng.below(held), self.links[link].shard);
        self.at(at, Event::Turn(shard));
    }

    /// Opens a connection for a shard, if the server is on.
    pub fn connect(&mut self, shard: usize) -> Option<usize> {
        if self.now < self.on_at {
            return None;
        }
        self.links.push(Link { shard, ..Link::default() });
        Some(self.links.len() - 1)
    }

    /// Takes the bytes that have arrived at the client, and whether the connection has ended.
    pub fn receive(&mut self, link: usize) -> (Vec<u8>, bool) {
        let link = &mut self.links[link];
        (std::mem::take(&mut link.arrived), link.ended)
    }

    /// Sends bytes from the client.
    pub fn send(&mut self, link: usize, bytes: Vec<u8>) {
        let took = self.rng.below(MS) + if self.rng.percent(2) { 200 * MS } else { 0 };
        let state = &mut self.links[link];
        if state.cut.is_some() || state.dead {
            return;
        }
        let at = state.last.0.max(self.now + took);
        state.last.0 = at;
        self.at(at, Event::ToServer(link, bytes));
    }

    /// Closes the client's end for sending.
    pub fn part(&mut self, link: usize) {
        self.links[link].closing = true;
        self.leave(link);
    }

    /// Lets the server hang up if the client did and no request is left.
    fn leave(&mut self, link: usize) {
        let took = self.rng.below(MS);
        let state = &mut self.links[link];
        let coming = state.last.0.max(state.cut.unwrap_or(0)) >= self.now;
        if !state.closing || state.dead || state.busy > 0 || coming || state.deaf {
            return;
        }
        state.dead = true;
        let at = state.last.1.max(self.now + took);
        self.at(at, Event::End(link));
    }

    fn hear(&mut self, link: usize, bytes: Vec<u8>) {
        let state = &mut self.links[link];
        if state.dead {
            return;
        }
        if let Some(at) = state.cut.filter(|&at| at > self.now) {
            // In order: deferred bytes arrive one after another.
            return self.at(at, Event::ToServer(link, bytes));
        }
        let mut all = std::mem::take(&mut state.partial);
        all.extend(bytes);
        let mut used = 0;
        while let Some(head) = all[used..].first_chunk() {
            let request = Request::decode(head).expect("the client keeps to the protocol");
            let len = if request.command == Command::WRITE { request.len as usize } else { 0 };
            let Some(data) = all[used..].get(Request::BYTES..Request::BYTES + len) else { break };
            self.serve(link, request, data);
            used += Request::BYTES + len;
        }
        all.drain(..used);
        self.links[link].partial = all;
    }

    fn serve(&mut self, link: usize, request: Request, data: &[u8]) {
        if request.command == Command::FLUSH && self.links[link].cut.is_some() {
            return;
        }
        let (tag, range) = (IoTag(0), ByteRange::new(request.offset, request.len.into()));
        let io = match request.command {
            Command::WRITE => Io::write(tag, request.offset, IoBuf::copy_of(data)),
            Command::READ => Io::read(tag, range, IoBuf::zeroed(request.len as usize)),
            Command::FLUSH => Io::flush(tag),
            other => panic!("{other} is not asked for here"),
        };
        self.links[link].busy += 1;
        let (slot, took) = self.disk.submit(io);
        self.at(self.now + took, Event::Disk(slot, link, request.cookie, self.life));
    }

    fn done(&mut self, slot: Slot, link: usize, cookie: u64) {
        let reads = self.disk.request(slot).is_some_and(|io| io.op == IoOp::Read);
        let Completion { result, buf, .. } = self.disk.finish(slot);
        let error = if result.is_ok() { NbdError::OK } else { NbdError::EIO };
        let mut bytes = SimpleReply { error, cookie }.encode().to_vec();
        if reads {
            bytes.extend_from_slice(&buf);
        }
        let took = self.rng.below(MS) + if self.rng.percent(5) { NOTICE_MAX / 2 } else { 0 };
        let state = &mut self.links[link];
        state.busy -= 1;
        if state.cut.is_none() {
            let at = state.last.1.max(self.now + took);
            state.last.1 = at;
            self.at(at, Event::ToClient(link, bytes));
        }
        self.leave(link);
    }

    /// Causes a power failure, a broken link, or a failed flush.
    pub fn trouble(&mut self, ranges: Range<u64>) {
        match self.rng.below(10) {
            0..=3 => self.cut_power(),
            4..=7 => self.break_link(),
            _ => {
                self.troubles[2] += 1;
                let range = ByteRange::new(ranges.start, ranges.end - ranges.start);
                let fault = Fault::Error(ErrorKind::Media);
                self.disk.add_rule(Rule { fault, ops: &[IoOp::Flush], range, times: 1 });
            }
        }
    }

    /// Cuts the server's power. Each connection ends when its client notices.
    pub fn cut_power(&mut self) {
        self.troubles[0] += 1;
        self.life += 1;
        self.on_at = self.now + self.rng.below(OFF_MAX);
        let mut rng = self.rng.fork();
        let keeps = rng.below(100);
        let mut fate = |_| if rng.percent(keeps) { Fate::Keep } else { Fate::Drop };
        self.disk.crash(&mut fate);
        for link in 0..self.links.len() {
            let took = if self.rng.percent(50) { self.rng.below(NOTICE_MAX) } else { 0 };
            let state = &mut self.links[link];
            if !std::mem::replace(&mut state.dead, true) {
                let at = state.last.1.max(self.now + took);
                self.at(at, Event::End(link));
            }
        }
    }

    /// Ends every connection on the client's side, as its process is killed. The server carries out
    /// what it has received, and some of what is on its way.
    pub fn kill_client(&mut self) {
        self.troubles[3] += 1;
        for link in 0..self.links.len() {
            let late = self.rng.below(LATE_MAX);
            let state = &mut self.links[link];
            if !state.dead && state.cut.is_none() && !state.closing {
                state.cut = Some(self.now + late);
                (state.deaf, state.ended) = (true, true);
            }
        }
    }

    /// Breaks a connection without telling the server.
    fn break_link(&mut self) {
        let live = |link: &Link| !link.dead && link.cut.is_none() && !link.closing;
        let live: Vec<usize> = (0..self.links.len()).filter(|&l| live(&self.links[l])).collect();
        if live.is_empty() {
            return;
        }
        self.troubles[1] += 1;
        let link = self.rng.pick(&live);
        let reset = self.rng.percent(50);
        let late = self.rng.below(if reset { RESET_LATE_MAX } else { LATE_MAX });
        let took = self.rng.below(NOTICE_MAX);
        let state = &mut self.links[link];
        state.cut = Some(self.now + late);
        state.deaf = true;
        if reset {
            let at = state.last.1.max(self.now + took);
            self.at(at, Event::End(link));
        }
    }

    /// Ends the troubles: bytes on their way arrive, and broken links are noticed.
    pub fn heal(&mut self) {
        self.disk.heal();
        for link in 0..self.links.len() {
            if self.links[link].deaf && !self.links[link].ended {
                let at = self.links[link].last.1.max(self.now + LATE_MAX);
                self.at(at, Event::End(link));
            }
        }
    }

    /// The number stored in a sector of the server's disk, as a read returns it.
    pub fn stamp(&self, sector: u64) -> u64 {
        let mut bytes = [0; 8];
        self.disk.view().read(sector * SECTOR_SIZE as u64, &mut bytes);
        u64::from_le_bytes(bytes)
    }
}
