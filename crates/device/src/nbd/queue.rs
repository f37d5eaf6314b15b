//! One thread's connection to an export: moves bytes between the session and the ring, and gets
//! another connection when this one breaks.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{
    Completion, DeviceInfo, ErrorKind, Instant, Io, IoError, IoFlags, IoOp, IoQueue, IoTag,
};
use forebay_nbd_wire::{Command, CommandFlags, Request};
use rustix::net::SendFlags;

use super::Seat;
use super::handshake::Connection;
use super::reconnect::Reconnect;
use super::session::Session;
use crate::ring::{Client, Done, Op, Payload, Ring, RingFile};

/// Most requests that one queue holds.
const QUEUE_MAX: usize = 256;
/// Bytes received at a time.
const RECEIVE_BYTES: usize = 256 << 10;
/// How long a server may say nothing while it has requests.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long to wait when no thread can be made.
const CUT_PAUSE: Duration = Duration::from_secs(1);
/// How long to wait when the ring is full.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// A thread's way to an export.
pub(super) struct NbdQueue {
    seat: Seat,
    ring: Rc<Ring>,
    link: Link,
    debts: Debts,
    finished: Vec<Completion>,
    /// The connection broke since the last poll ended.
    broke: bool,
    retry_at: Option<Instant>,
}

enum Link {
    Up(Box<Wire>),
    Down(Reconnect),
    /// Not even a thread could be made to connect again; tried at the next poll.
    Cut,
}

/// A connection on the ring. Dropping it cancels what it waits for.
struct Wire {
    socket: OwnedFd,
    file: RingFile,
    client: Client,
    session: Session,
    /// What is to be sent after what is being sent.
    out: Vec<u8>,
    /// What was sent in part, and how much of it.
    unsent: Option<(Vec<u8>, usize)>,
    /// While something is being sent: where in it that began.
    sending: Option<usize>,
    /// Room to receive into, when nothing is being received, with `kept` bytes not yet used.
    room: Option<Vec<u8>>,
    kept: usize,
    fetched: Vec<Done>,
    heard: Instant,
}

const SEND: u64 = 0;
const RECEIVE: u64 = 1;

/// Completed changes that no flush has covered, in numbers of changes.
#[derive(Default)]
struct Debts {
    changed: u64,
    flushed: u64,
    /// The server may have lost such changes, and no flush has said so yet.
    lost: bool,
    /// Requests in flight whose completion matters here.
    watched: Vec<(IoTag, Watched)>,
}

#[derive(Clone, Copy)]
enum Watched {
    Change,
    /// A flush, and the changes completed before it was submitted.
    Flush(u64),
    /// A flush that fails to say that changes may be lost.
    Notice,
}

impl IoQueue for NbdQueue {
    fn info(&self) -> &DeviceInfo {
        &self.seat.0.info
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        if self.finished.len() >= QUEUE_MAX {
            return Err(io);
        }
        if let Err(error) = crate::device::check(&self.seat.0.info, &io) {
            self.finished.push(io.complete(Err(error)));
            return Ok(());
        }
        let lost = io.op == IoOp::Flush && self.debts.lost;
        let Link::Up(wire) = &mut self.link else {
            self.finished.push(io.complete(Err(ErrorKind::DeviceGone.into())));
            return Ok(());
        };
        if lost {
            self.debts.watched.push((io.tag, Watched::Notice));
            let error = io::Error::other("the server was gone since writes were completed");
            let error = IoError::with_source(ErrorKind::DeviceGone, error);
            self.finished.push(io.complete(Err(error)));
            return Ok(());
        }
        if wire.session.in_flight() >= QUEUE_MAX {
            return Err(io);
        }
        if wire.session.in_flight() == 0 {
            wire.heard = now;
        }
        self.debts.submitted(io.tag, io.op, io.flags);
        wire.session.submit(io, &mut self.finished);
        self.pump(now);
        Ok(())
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.retry_at = None;
        match &self.link {
            Link::Up(_) => self.hear(now),
            Link::Down(reconnect) => {
                if let Some(connection) = reconnect.take() {
                    self.connected(now, connection);
                }
            }
            Link::Cut => self.reconnect(now),
        }
        for end in &self.finished {
            self.debts.completed(end);
        }
        if std::mem::take(&mut self.broke) {
            self.debts.lost |= self.debts.changed > self.debts.flushed;
        }
        done.append(&mut self.finished);
    }

    fn deadline(&self) -> Option<Instant> {
        if !self.finished.is_empty() {
            return Some(Instant(0));
        }
        let silence = match &self.link {
            Link::Up(wire) if wire.session.in_flight() > 0 => Some(wire.heard + SILENCE_MAX),
            _ => None,
        };
        self.retry_at.into_iter().chain(silence).min()
    }
}

impl NbdQueue {
    pub(super) fn new(seat: Seat, ring: &Rc<Ring>, connection: Connection) -> io::Result<Self> {
        let wire = Wire::new(ring, connection, Instant(0))?;
        Ok(Self {
            seat,
            ring: Rc::clone(ring),
            link: Link::Up(Box::new(wire)),
            debts: Debts::default(),
            finished: Vec::new(),
            broke: false,
            retry_at: None,
        })
    }

    /// Takes what the ring has for the connection.
    fn hear(&mut self, now: Instant) {
        let Link::Up(wire) = &mut self.link else { return };
        let heard = wire.hear(now, &mut self.finished);
        let silent = wire.session.in_flight() > 0 && now >= wire.heard + SILENCE_MAX;
        match heard {
            Err(error) => self.broken(now, &error),
            Ok(()) if silent => {
                let error = io::Error::from(io::ErrorKind::TimedOut);
                self.broken(now, &IoError::with_source(ErrorKind::DeviceGone, error));
            }
            Ok(()) => self.pump(now),
        }
    }

    fn pump(&mut self, now: Instant) {
        let Link::Up(wire) = &mut self.link else { return };
        if !wire.pump() {
            self.retry_at = Some(now + RETRY_AFTER);
        }
    }

    /// The connection is of no use any more.
    fn broken(&mut self, now: Instant, error: &IoError) {
        if let Link::Up(wire) = &mut self.link {
            wire.session.fail_all(error, &mut self.finished);
        }
        self.broke = true;
        self.reconnect(now);
    }

    fn reconnect(&mut self, now: Instant) {
        let started = Reconnect::start(Arc::clone(&self.seat.0), self.ring.waker());
        self.link = started.map_or(Link::Cut, Link::Down);
        if matches!(self.link, Link::Cut) {
            self.retry_at = Some(now + CUT_PAUSE);
        }
    }

    fn connected(&mut self, now: Instant, connection: Connection) {
        match Wire::new(&self.ring, connection, now) {
            Ok(wire) => {
                self.link = Link::Up(Box::new(wire));
                self.pump(now);
            }
            // The ring has no place for another file now; try again from the start.
            Err(_) => self.reconnect(now),
        }
    }
}

impl Wire {
    fn new(ring: &Rc<Ring>, connection: Connection, now: Instant) -> io::Result<Self> {
        Ok(Self {
            file: ring.register(&connection.socket)?,
            socket: connection.socket,
            client: ring.client(),
            session: Session::new(connection.terms),
            out: Vec::new(),
            unsent: None,
            sending: None,
            room: Some(vec![0; RECEIVE_BYTES]),
            kept: 0,
            fetched: Vec::new(),
            heard: now,
        })
    }

    fn hear(&mut self, now: Instant, done: &mut Vec<Completion>) -> Result<(), IoError> {
        let mut fetched = std::mem::take(&mut self.fetched);
        self.client.reap(&mut fetched);
        for end in fetched.drain(..) {
            let moved = end.result.map_err(|error| {
                IoError::with_source(ErrorKind::DeviceGone, io::Error::from(error))
            })?;
            let Payload::Bytes(bytes) = end.payload else { continue };
            if end.token == SEND {
                self.sent(bytes, moved);
            } else {
                self.heard = now;
                self.received(bytes, moved, done)?;
            }
        }
        self.fetched = fetched;
        Ok(())
    }

    fn sent(&mut self, mut bytes: Vec<u8>, moved: usize) {
        let at = self.sending.take().unwrap_or(0) + moved;
        if at < bytes.len() {
            self.unsent = Some((bytes, at));
        } else if self.out.is_empty() {
            // Its memory serves again.
            bytes.clear();
            self.out = bytes;
        }
    }

    fn received(
        &mut self,
        mut bytes: Vec<u8>,
        moved: usize,
        done: &mut Vec<Completion>,
    ) -> Result<(), IoError> {
        if moved == 0 {
            let error = io::Error::other("the server hung up");
            return Err(IoError::with_source(ErrorKind::DeviceGone, error));
        }
        let end = self.kept + moved;
        let used = self.session.receive(&bytes[..end], done);
        let used = used.map_err(|broken| IoError::with_source(ErrorKind::DeviceGone, broken))?;
        bytes.copy_within(used..end, 0);
        self.kept = end - used;
        self.room = Some(bytes);
        Ok(())
    }

    /// Sends and receives if that is not under way; false when the ring was full.
    fn pump(&mut self) -> bool {
        self.session.send(&mut self.out);
        if self.sending.is_none() && !self.send_more() {
            return false;
        }
        if let Some(bytes) = self.room.take() {
            let span = self.kept..bytes.len();
            match self.client.submit(&self.file, RECEIVE, Op::Receive { bytes, span }) {
                Ok(()) => {}
                Err(Op::Receive { bytes, .. }) => {
                    self.room = Some(bytes);
                    return false;
                }
                Err(_) => unreachable!("the ring gives back what it was given"),
            }
        }
        true
    }

    /// Sends what is to be sent; false when the ring was full.
    fn send_more(&mut self) -> bool {
        let next = self.unsent.take().unwrap_or_else(|| (std::mem::take(&mut self.out), 0));
        let (bytes, at) = next;
        if bytes.is_empty() {
            self.out = bytes;
            return true;
        }
        let span = at..bytes.len();
        match self.client.submit(&self.file, SEND, Op::Send { bytes, span }) {
            Ok(()) => self.sending = Some(at),
            Err(Op::Send { bytes, .. }) => {
                self.unsent = Some((bytes, at));
                return false;
            }
            Err(_) => unreachable!("the ring gives back what it was given"),
        }
        true
    }
}

impl Drop for Wire {
    /// Takes leave as the protocol wants it, if that can be done without waiting.
    fn drop(&mut self) {
        if self.sending.is_some() || self.unsent.is_some() || !self.out.is_empty() {
            return;
        }
        let (flags, command) = (CommandFlags::NONE, Command::DISC);
        let farewell = Request { flags, command, cookie: 0, offset: 0, len: 0 };
        let how = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        // A server that is gone already needs no farewell.
        let _ = rustix::net::send(&self.socket, &farewell.encode(), how);
    }
}

impl Debts {
    fn submitted(&mut self, tag: IoTag, op: IoOp, flags: IoFlags) {
        if op.changes_data() && !flags.fua {
            self.watched.push((tag, Watched::Change));
        } else if op == IoOp::Flush {
            self.watched.push((tag, Watched::Flush(self.changed)));
        }
    }

    /// Takes note of a completion that is about to be handed up.
    fn completed(&mut self, end: &Completion) {
        let found = self.watched.iter().position(|(tag, _)| *tag == end.tag);
        let watched = found.map(|at| self.watched.swap_remove(at).1);
        match (watched, &end.result) {
            (Some(Watched::Change), Ok(())) => self.changed += 1,
            (Some(Watched::Flush(covered)), Ok(())) => self.flushed = self.flushed.max(covered),
            (Some(Watched::Notice), _) => {
                self.lost = false;
                self.flushed = self.changed;
            }
            _ => {}
        }
    }
}
