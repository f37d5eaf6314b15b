//! The state of a queue's connection without its I/O: how requests, answers, breaks and new
//! connections affect requests and debts. `queue.rs` transfers the bytes through the ring, the
//! simulator through its own network.

use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::time::Duration;

use forebay_block::{
    Completion, DeviceInfo, ErrorKind, Instant, Io, IoError, IoFlags, IoOp, IoTag,
};

use super::debts::Ledger;
use super::session::Session;
use super::terms::Terms;

/// Maximum number of requests in one queue, without changes that must wait.
const QUEUE_MAX: usize = 256;
/// Maximum silence of a server that has requests of ours.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long the server may take to close a broken connection, if it still had changes of ours.
const PARTING_MAX: Duration = Duration::from_secs(5);
/// Additional time for such changes to land before anything is written again.
const GRACE: Duration = Duration::from_secs(1);
/// How long requests of a user that was killed may still be carried out: as long as those of a
/// broken connection.
pub const STRAGGLE_MAX: Duration = PARTING_MAX.saturating_add(GRACE);

/// How to part with a broken connection. A change that the server received but did not answer may
/// land late, over data written after it on the next connection. So the old connection is closed
/// for sending, which a server answers by closing it once it has finished its work, and only then
/// is the next connection made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parting {
    /// How long to wait for the server to close.
    pub patience: Duration,
    /// How long to wait after that.
    pub grace: Duration,
    /// Whether this host has given up the connection, as after a timeout. Then it is closed for
    /// this host, and whether the server has closed it is not known.
    pub failed_here: bool,
}

/// The requests of one queue, and their session while there is a connection.
#[derive(Debug)]
pub struct Line {
    info: DeviceInfo,
    ledger: Ledger,
    session: Option<Box<Session>>,
    /// Requests in flight whose completion affects the debts.
    watched: Vec<(IoTag, Watched)>,
    finished: Vec<Completion>,
    /// Changes that must wait.
    held: Option<Box<Held>>,
    /// Whether the connection broke since the last poll.
    broke: bool,
    heard: Instant,
}

/// Changes that wait until those of a former user can no longer be carried out.
#[derive(Debug)]
struct Held {
    /// How long they wait from the first call on.
    time: Duration,
    until: Option<Instant>,
    /// Whether that time is over, and what is left waits for room in the queue.
    is_over: bool,
    /// Bounded by the requests that the queue's owner has in flight: a full queue would block the
    /// reads behind.
    changes: VecDeque<Io>,
}

#[derive(Clone, Copy, Debug)]
enum Watched {
    /// A change, with the number of failed flushes when it was sent.
    Change(u64),
    /// A flush, with the number of changes that it covers.
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
            held: None,
            broke: false,
            heard: Instant(0),
        }
    }

    /// Properties of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Holds changes back for this time from the next call on; those that wait already, too.
    pub fn hold_changes(&mut self, time: Duration) {
        let changes = self.held.take().map_or_else(VecDeque::new, |held| held.changes);
        let (until, is_over) = (None, false);
        self.held = Some(Box::new(Held { time, until, is_over, changes }));
    }

    /// Passes changes on that have waited for long enough. If it returns true, there were some:
    /// call [`Line::send`].
    pub fn release(&mut self, now: Instant) -> bool {
        let Some(mut held) = self.held.take() else { return false };
        let before = held.changes.len();
        held.is_over |= now >= *held.until.get_or_insert(now + held.time);
        while held.is_over
            && let Some(io) = held.changes.pop_front()
        {
            if let Err(io) = self.pass(now, io) {
                held.changes.push_front(io);
                break;
            }
        }
        let passed = held.changes.len() < before;
        if !held.is_over || !held.changes.is_empty() {
            self.held = Some(held);
        }
        passed
    }

    /// Starts a session on a new connection.
    pub fn connected(&mut self, now: Instant, terms: Terms) {
        self.session = Some(Box::new(Session::new(terms)));
        self.heard = now;
    }

    /// Accepts a request. Call [`Line::send`] afterwards to get the bytes to send.
    ///
    /// # Errors
    /// Returns the request if the queue is full.
    pub fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        if self.finished.len() >= QUEUE_MAX {
            return Err(io);
        }
        if let Err(error) = crate::device::check(&self.info, &io) {
            self.finished.push(io.complete(Err(error)));
            return Ok(());
        }
        if let Some(held) = &mut self.held
            && io.op.changes_data()
        {
            held.until.get_or_insert(now + held.time);
            held.changes.push_back(io);
            return Ok(());
        }
        self.pass(now, io)
    }

    /// Passes a request to the session.
    fn pass(&mut self, now: Instant, io: Io) -> Result<(), Io> {
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
            let error =
                gone("the connection was lost after completed writes; they may be lost too");
            self.finished.push(io.complete(Err(error)));
            return Ok(());
        }
        if session.in_flight() == 0 {
            self.heard = now;
        }
        let (tag, op, flags) = (io.tag, io.op, io.flags);
        session.submit(now, io, &mut self.finished);
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

    /// Takes bytes from the server and returns the number consumed. Unconsumed bytes are offered
    /// again with more appended.
    ///
    /// # Errors
    /// When the server violated the protocol, or answers all requests but one: give up the
    /// connection.
    pub fn receive(&mut self, now: Instant, bytes: &[u8]) -> Result<usize, IoError> {
        let Some(session) = &mut self.session else { return Ok(bytes.len()) };
        self.heard = now;
        let used = session.receive(bytes, &mut self.finished);
        let used = used.map_err(|broken| IoError::with_source(ErrorKind::DeviceGone, broken))?;
        if session.is_overtaken() {
            return Err(gone("the server answers other requests, but one of them never"));
        }
        Ok(used)
    }

    /// The error with which to give up the connection, if the server has been silent for too long.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Option<IoError> {
        let waits = self.session.as_ref().is_some_and(|session| session.in_flight() > 0);
        let silent = waits && now >= self.heard + SILENCE_MAX;
        silent.then(|| gone("the server has not answered for a minute"))
    }

    /// Gives up the connection: everything in flight fails.
    pub fn broken(&mut self, error: &IoError) -> Parting {
        let Some(mut session) = self.session.take() else { return Parting::default() };
        let parting = match session.has_changes() {
            true => Parting { failed_here: failed_here(error), ..Parting::FULL },
            false => Parting::default(),
        };
        session.fail_all(error, &mut self.finished);
        self.broke = true;
        parting
    }

    /// Appends the completed requests to `done`.
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

    /// When [`Line::poll`] must be called even if no bytes arrive.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        if !self.finished.is_empty() {
            return Some(Instant(0));
        }
        let waits = self.session.as_ref().is_some_and(|session| session.in_flight() > 0);
        let silence = waits.then(|| self.heard + SILENCE_MAX);
        // What is left after its time waits for an answer, which makes room.
        let held = self.held.as_ref().filter(|held| !held.is_over && !held.changes.is_empty());
        silence.into_iter().chain(held.and_then(|held| held.until)).min()
    }
}

/// The error of a connection that is given up.
fn gone(why: &'static str) -> IoError {
    IoError::with_source(ErrorKind::DeviceGone, io::Error::other(why))
}

/// Whether a connection broke by an error of this host, rather than by the server or by us. The
/// first request of ours that fails gets the kernel's reason; later ones see just an end.
pub(super) fn failed_here(error: &IoError) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|source| {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        source.raw_os_error().is_some() && !matches!(source.kind(), BrokenPipe | ConnectionReset)
    })
}

impl Parting {
    /// For a server that had unanswered changes of ours.
    const FULL: Self = Self { patience: PARTING_MAX, grace: GRACE, failed_here: false };
}

impl Default for Parting {
    /// Parting without waiting.
    fn default() -> Self {
        Self { patience: Duration::ZERO, grace: Duration::ZERO, failed_here: false }
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::{ByteRange, IoBuf};

    use super::*;

    /// Regression: reads waited behind the 257th change that was held back.
    #[test]
    fn a_read_passes_any_number_of_changes_that_wait() {
        let ledger = Ledger::open(&std::sync::Arc::default());
        let mut line = Line::new(DeviceInfo::plain(1 << 20, "nbd://test"), ledger);
        line.hold_changes(STRAGGLE_MAX);
        let mut done = Vec::new();
        let count = 4 * QUEUE_MAX as u64;
        for tag in 0..count {
            let change = Io::write(IoTag(tag), 0, IoBuf::zeroed(512));
            assert!(line.submit(Instant(0), change).is_ok(), "{tag}");
        }
        let read = Io::read(IoTag(count), ByteRange::new(0, 512), IoBuf::zeroed(512));
        assert!(line.submit(Instant(0), read).is_ok());
        line.poll(&mut done);
        assert_eq!(done.drain(..).map(|end| end.tag).collect::<Vec<_>>(), [IoTag(count)]);
        assert!(!line.release(Instant(0)) && line.release(Instant(0) + STRAGGLE_MAX));
        line.poll(&mut done);
        assert_eq!(done.len() as u64, count);
    }
}
