//! A shard's queue to the simulated server: the line of the real one, with the network instead of
//! the ring, and virtual time instead of the reconnecting thread.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use forebay_block::{Completion, DeviceInfo, ErrorKind, Instant, Io, IoError, IoQueue};
use forebay_device::{Line, Parting, Terms};

use super::net::{MS, Net};

/// Pause between two attempts to connect.
const PAUSE: u64 = 100 * MS;

/// A queue on a simulated connection.
pub struct SimQueue {
    net: Rc<RefCell<Net>>,
    shard: usize,
    line: Line,
    terms: Terms,
    link: State,
    /// Whether it waits for requests of an old connection to land.
    waits: bool,
    /// Bytes of an incomplete answer.
    kept: Vec<u8>,
}

enum State {
    Up(usize),
    /// Closing an old connection: link, deadline, and the wait after it.
    Parting(usize, u64, u64),
    /// Time of the next attempt to connect.
    Down(u64),
}

impl SimQueue {
    /// Creates a queue that is not connected yet.
    pub fn new(
        net: &Rc<RefCell<Net>>,
        shard: usize,
        line: Line,
        terms: Terms,
        waits: bool,
    ) -> Self {
        let link = State::Down(0);
        Self { net: Rc::clone(net), shard, line, terms, link, waits, kept: Vec::new() }
    }

    fn pump(&mut self) {
        let State::Up(link) = self.link else { return };
        let mut out = Vec::new();
        self.line.send(&mut out);
        if !out.is_empty() {
            self.net.borrow_mut().send(link, out);
        }
    }

    fn hear(&mut self, now: Instant, link: usize) {
        let (bytes, ended) = self.net.borrow_mut().receive(link);
        self.kept.extend(bytes);
        let mut error = None;
        if !self.kept.is_empty() {
            match self.line.receive(now, &self.kept) {
                Ok(used) => drop(self.kept.drain(..used)),
                Err(broken) => error = Some(broken),
            }
        }
        let gone = || IoError::with_source(ErrorKind::DeviceGone, io::Error::other("hung up"));
        error = error.or_else(|| ended.then(gone)).or_else(|| self.line.silence(now));
        let Some(error) = error else { return self.pump() };
        let parting = self.line.broken(&error);
        let Parting { patience, grace, .. } = if self.waits { parting } else { Parting::default() };
        self.kept.clear();
        self.net.borrow_mut().part(link);
        let patience = now.0 + patience.as_nanos() as u64;
        self.link = State::Parting(link, patience, grace.as_nanos() as u64);
        self.reconnect(now);
    }

    fn reconnect(&mut self, now: Instant) {
        if let State::Parting(link, until, grace) = self.link
            && (self.net.borrow_mut().receive(link).1 || now.0 >= until)
        {
            self.link = State::Down(now.0 + grace);
        }
        if let State::Down(at) = self.link
            && now.0 >= at
        {
            let found = self.net.borrow_mut().connect(self.shard);
            self.link = found.map_or(State::Down(now.0 + PAUSE), State::Up);
            if found.is_some() {
                self.line.connected(now, self.terms);
            }
        }
    }
}

impl IoQueue for SimQueue {
    fn info(&self) -> &DeviceInfo {
        self.line.info()
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        self.line.submit(now, io)?;
        self.pump();
        Ok(())
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        match self.link {
            State::Up(link) => self.hear(now, link),
            _ => self.reconnect(now),
        }
        if self.line.release(now) {
            self.pump();
        }
        self.line.poll(done);
    }

    fn deadline(&self) -> Option<Instant> {
        let link = match self.link {
            State::Up(_) => None,
            State::Parting(_, at, _) | State::Down(at) => Some(Instant(at)),
        };
        link.into_iter().chain(self.line.deadline()).min()
    }
}
