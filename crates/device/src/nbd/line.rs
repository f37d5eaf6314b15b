//! A connection's queue without its I/O: what a request, an answer, a break and a new connection
//! do to requests and debts. `queue.rs` moves the bytes through the ring, the simulator through a
//! network of its own.

use std::io;
use std::time::Duration;

use forebay_block::{
    Completion, DeviceInfo, ErrorKind, Instant, Io, IoError, IoFlags, IoOp, IoTag,
};

use super::debts::Ledger;
use super::session::Session;
use super::terms::Terms;

/// Most requests that one queue holds.
const QUEUE_MAX: usize = 256;
/// How long a server may say nothing while it has requests.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long a broken connection's server may take to hang up, when it still had changes of ours.
const PARTING_MAX: Duration = Duration::from_secs(5);
/// How long such changes are given to land after that, before anything is written again.
const GRACE: Duration = Duration::from_secs(1);

/// How to leave a connection that broke. A change that the server had and did not answer may land
/// late, over what is written again after it on the next connection. So the old connection is
/// closed for sending, which a server answers by hanging up when it has done with the rest, and
/// only then is there a next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parting {
    /// How long to wait for the server to hang up.
    pub patience: Duration,
    /// How long to wait after that.
    pub grace: Duration,
}

/// The requests of one queue, and the session that they go through while there is a connection.
#[derive(Debug)]
pub struct Line {
    info: DeviceInfo,
    ledger: Ledger,
    session: Option<Box<Session>>,
    /// Requests in flight whose completion matters to the debts.
    watched: Vec<(IoTag, Watched)>,
    finished: Vec<Completion>,
    /// The connection broke since the last poll.
    broke: bool,
    heard: Instant,
}

#[derive(Clone, Copy, Debug)]
enum Watched {
    /// A change, and the flushes that had failed when it was sent.
    Change(u64),
    /// A flush, and the changes that it covers.
    Flush(u64),
    /// A flush that was not sent, because changes may be lost.
    Refused,
}

impl Line {
    /// A line without a connection.
    #[must_use]
    pub fn new(info: DeviceInfo, ledger: Ledger) -> Self {
        Self {
            info,
            ledger,
            session: None,
            watched: Vec::new(),
            finished: Vec::new(),
            broke: false,
            heard: Instant(0),
        }
    }

    /// What the device is and can do.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// There is a connection.
    pub fn connected(&mut self, now: Instant, terms: Terms) {
        self.session = Some(Box::new(Session::new(terms)));
        self.heard = now;
    }

    /// Takes a request; call [`Line::send`] for what it makes.
    ///
    /// # Errors
    /// Gives it back when the queue is full.
    pub fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        if self.finished.len() >= QUEUE_MAX {
            return Err(io);
        }
        if let Err(error) = crate::device::check(&self.info, &io) {
            self.finished.push(io.complete(Err(error)));
            return Ok(());
        }
        let Some(session) = &mut self.session else {
            self.watch(io.tag, io.op, io.flags);
            self.finished.push(io.complete(Err(ErrorKind::DeviceGone.into())));
            return Ok(());
        };
        if session.in_flight() >= QUEUE_MAX {
            return Err(io);
        }
        if io.op == IoOp::Flush && self.ledger.is_lost() {
            self.watched.push((io.tag, Watched::Refused));
            let error = io::Error::other("the server was gone since writes were completed");
            let error = IoError::with_source(ErrorKind::DeviceGone, error);
            self.finished.push(io.complete(Err(error)));
            return Ok(());
        }
        if session.in_flight() == 0 {
            self.heard = now;
        }
        let (tag, op, flags) = (io.tag, io.op, io.flags);
        session.submit(io, &mut self.finished);
        self.watch(tag, op, flags);
        Ok(())
    }

    fn watch(&mut self, tag: IoTag, op: IoOp, flags: IoFlags) {
        if op.changes_data() && !flags.fua {
            self.watched.push((tag, Watched::Change(self.ledger.failures())));
        } else if op == IoOp::Flush {
            self.watched.push((tag, Watched::Flush(self.ledger.covered())));
        }
    }

    /// Appends the bytes that are ready to be sent.
    pub fn send(&mut self, out: &mut Vec<u8>) {
        if let Some(session) = &mut self.session {
            session.send(out);
        }
    }

    /// Takes bytes from the server; returns how many were used. Bytes left over are offered again
    /// with more behind them.
    ///
    /// # Errors
    /// When the server broke the protocol: give up the connection.
    pub fn receive(&mut self, now: Instant, bytes: &[u8]) -> Result<usize, IoError> {
        let Some(session) = &mut self.session else { return Ok(bytes.len()) };
        self.heard = now;
        let used = session.receive(bytes, &mut self.finished);
        used.map_err(|broken| IoError::with_source(ErrorKind::DeviceGone, broken))
    }

    /// The error to give up the connection with, if the server has been silent for too long.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Option<IoError> {
        let waits = self.session.as_ref().is_some_and(|session| session.in_flight() > 0);
        let silent = waits && now >= self.heard + SILENCE_MAX;
        let error = || io::Error::from(io::ErrorKind::TimedOut);
        silent.then(|| IoError::with_source(ErrorKind::DeviceGone, error()))
    }

    /// The connection is given up: everything in flight fails.
    pub fn broken(&mut self, error: &IoError) -> Parting {
        let Some(mut session) = self.session.take() else { return Parting::default() };
        let parting = if session.has_changes() { Parting::FULL } else { Parting::default() };
        session.fail_all(error, &mut self.finished);
        self.broke = true;
        parting
    }

    /// Appends the requests that have completed.
    pub fn poll(&mut self, done: &mut Vec<Completion>) {
        for end in &self.finished {
            let found = self.watched.iter().position(|(tag, _)| *tag == end.tag);
            let watched = found.map(|at| self.watched.swap_remove(at).1);
            match (watched, &end.result) {
                (Some(Watched::Change(failures)), Ok(())) => self.ledger.changed(failures),
                (Some(Watched::Flush(covered)), Ok(())) => self.ledger.flushed(covered),
                (Some(Watched::Flush(_)), Err(_)) => self.ledger.failed(),
                (Some(Watched::Refused), _) => self.ledger.told(),
                _ => {}
            }
        }
        if std::mem::take(&mut self.broke) {
            self.ledger.broke();
        }
        done.append(&mut self.finished);
    }

    /// When [`Line::poll`] must be called although no bytes came.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        if !self.finished.is_empty() {
            return Some(Instant(0));
        }
        let waits = self.session.as_ref().is_some_and(|session| session.in_flight() > 0);
        waits.then(|| self.heard + SILENCE_MAX)
    }
}

impl Parting {
    /// When the server had changes that it did not answer.
    const FULL: Self = Self { patience: PARTING_MAX, grace: GRACE };
}

impl Default for Parting {
    /// Nothing is waited for.
    fn default() -> Self {
        Self { patience: Duration::ZERO, grace: Duration::ZERO }
    }
}
