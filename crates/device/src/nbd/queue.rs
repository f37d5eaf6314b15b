//! One thread's connection to an export: transfers bytes between the line and the ring, and
//! replaces a broken connection.

use std::error::Error;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_block::{Completion, DeviceInfo, ErrorKind, Instant, Io, IoError, IoQueue};
use forebay_nbd_wire::{Command, CommandFlags, Request};
use rustix::net::SendFlags;

use super::Shared;
use super::handshake::Connection;
use super::line::{Line, STRAGGLE_MAX};
use super::reconnect::{Old, Reconnect, begin, end_in_order};
use crate::ring::{Client, Done, Op, Payload, Ring, RingFile};

/// Size of the receive buffer, in bytes.
const RECEIVE_BYTES: usize = 256 << 10;
/// Delay before retrying when no thread can be created.
const CUT_PAUSE: Duration = Duration::from_secs(1);
/// Delay before retrying when the ring is full.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// A thread's queue to an export.
pub(super) struct NbdQueue {
    shared: Arc<Shared>,
    ring: Rc<Ring>,
    line: Line,
    link: Link,
    retry_at: Option<Instant>,
}

enum Link {
    Up(Box<Wire>),
    Down(Reconnect),
    /// The thread for reconnecting could not be created; retried at the next poll.
    Cut(Old),
}

/// A connection on the ring. Dropping it cancels its pending operations.
struct Wire {
    /// `None` after it was handed to a thread that parts with the server.
    socket: Option<OwnedFd>,
    file: RingFile,
    client: Client,
    /// Bytes to send after the current send.
    out: Vec<u8>,
    /// A partly sent buffer, and the number of bytes sent.
    unsent: Option<(Vec<u8>, usize)>,
    /// While a send is in flight, its start in the buffer.
    sending: Option<usize>,
    /// The receive buffer while no receive is in flight; its first `kept` bytes are not yet
    /// consumed.
    room: Option<Vec<u8>>,
    kept: usize,
    fetched: Vec<Done>,
}

const SEND: u64 = 0;
const RECEIVE: u64 = 1;

impl IoQueue for NbdQueue {
    fn info(&self) -> &DeviceInfo {
        self.line.info()
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        self.line.submit(now, io)?;
        self.pump(now);
        Ok(())
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.retry_at = None;
        match &mut self.link {
            Link::Up(_) => self.hear(now),
            Link::Down(reconnect) => {
                if let Some((connection, is_unparted)) = reconnect.take() {
                    if is_unparted {
                        // The server runs again, and reads what it had received.
                        self.shared.expect_stragglers(STRAGGLE_MAX);
                        self.line.hold_changes(STRAGGLE_MAX);
                        self.shared.unparted.fetch_sub(1, Ordering::Relaxed);
                    }
                    self.connected(now, connection);
                }
            }
            Link::Cut(old) => {
                let old = old.take();
                self.reconnect(now, old);
            }
        }
        if self.line.release(now) {
            self.pump(now);
        }
        self.line.poll(done);
    }

    fn deadline(&self) -> Option<Instant> {
        self.retry_at.into_iter().chain(self.line.deadline()).min()
    }
}

impl NbdQueue {
    pub(super) fn new(
        shared: &Arc<Shared>,
        mut line: Line,
        ring: &Rc<Ring>,
        connection: Connection,
    ) -> io::Result<Self> {
        line.connected(Instant(0), connection.terms);
        let link = Link::Up(Box::new(Wire::new(ring, connection)?));
        let (shared, ring) = (Arc::clone(shared), Rc::clone(ring));
        Ok(Self { shared, ring, line, link, retry_at: None })
    }

    /// Processes the ring's completions for the connection.
    fn hear(&mut self, now: Instant) {
        let Link::Up(wire) = &mut self.link else { return };
        let heard = wire.hear(now, &mut self.line);
        match heard.err().or_else(|| self.line.silence(now)) {
            Some(error) => self.broken(now, &error),
            None => self.pump(now),
        }
    }

    fn pump(&mut self, now: Instant) {
        let Link::Up(wire) = &mut self.link else { return };
        if !wire.pump(&mut self.line) {
            self.retry_at = Some(now + RETRY_AFTER);
        }
    }

    /// Gives up the connection.
    fn broken(&mut self, now: Instant, error: &IoError) {
        let (primary, why) = (&self.shared.info.identity, error.source().unwrap_or(error));
        tracing::warn!(
            %primary, error = %why,
            "the connection to the NBD server broke; connecting again"
        );
        let parting = self.line.broken(error);
        let socket = match &mut self.link {
            Link::Up(wire) => wire.socket.take(),
            _ => None,
        };
        self.reconnect(now, socket.map(|socket| (socket, parting)));
    }

    fn reconnect(&mut self, now: Instant, old: Old) {
        if let Some((_, parting)) = &old {
            self.shared.expect_stragglers(parting.patience + parting.grace);
        }
        match Reconnect::start(Arc::clone(&self.shared), self.ring.waker(), old) {
            Ok(reconnect) => self.link = Link::Down(reconnect),
            Err(old) => {
                self.link = Link::Cut(old);
                self.retry_at = Some(now + CUT_PAUSE);
            }
        }
    }

    fn connected(&mut self, now: Instant, connection: Connection) {
        let terms = connection.terms;
        match Wire::new(&self.ring, connection) {
            Ok(wire) => {
                self.link = Link::Up(Box::new(wire));
                self.line.connected(now, terms);
                self.pump(now);
            }
            // The ring has no room for another file now; start over.
            Err(_) => self.reconnect(now, None),
        }
    }
}

impl Wire {
    fn new(ring: &Rc<Ring>, connection: Connection) -> io::Result<Self> {
        begin(&connection.socket);
        Ok(Self {
            file: ring.register(&connection.socket)?,
            socket: Some(connection.socket),
            client: ring.client(),
            out: Vec::new(),
            unsent: None,
            sending: None,
            room: Some(vec![0; RECEIVE_BYTES]),
            kept: 0,
            fetched: Vec::new(),
        })
    }

    fn hear(&mut self, now: Instant, line: &mut Line) -> Result<(), IoError> {
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
                self.received(now, bytes, moved, line)?;
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
            // The buffer is reused.
            bytes.clear();
            self.out = bytes;
        }
    }

    fn received(
        &mut self,
        now: Instant,
        mut bytes: Vec<u8>,
        moved: usize,
        line: &mut Line,
    ) -> Result<(), IoError> {
        if moved == 0 {
            let error = io::Error::other("the server hung up");
            return Err(IoError::with_source(ErrorKind::DeviceGone, error));
        }
        let end = self.kept + moved;
        let used = line.receive(now, &bytes[..end])?;
        bytes.copy_within(used..end, 0);
        self.kept = end - used;
        self.room = Some(bytes);
        Ok(())
    }

    /// Starts a send and a receive if none is in flight. Returns false if the ring was full.
    fn pump(&mut self, line: &mut Line) -> bool {
        line.send(&mut self.out);
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

    /// Starts the next send. Returns false if the ring was full.
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
    /// Says goodbye as the protocol requires, if that is possible without waiting.
    fn drop(&mut self) {
        let Some(socket) = &self.socket else { return };
        if self.sending.is_some() || self.unsent.is_some() || !self.out.is_empty() {
            return;
        }
        let (flags, command) = (CommandFlags::NONE, Command::DISC);
        let farewell = Request { flags, command, cookie: 0, offset: 0, len: 0 };
        end_in_order(socket);
        let how = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        // A server that is already gone needs no goodbye.
        let _ = rustix::net::send(socket, &farewell.encode(), how);
    }
}
