//! How a protocol meets the volumes: a [`Session`] is one client connection as a state machine
//! without I/O. The event loop feeds it bytes and completions; it emits bytes and requests.

use crate::{Completion, DeviceInfo, Io};

/// Bytes for a client at hand from which on a session adds no more of a large answer.
pub const SLICE: usize = 256 << 10;

/// A volume offered to clients.
#[derive(Clone, Debug)]
pub struct Export {
    /// The name clients ask for.
    pub name: String,
    /// A sentence for people.
    pub description: String,
    /// Size and capabilities, as the client is told.
    pub info: DeviceInfo,
    /// The size of request that serves best, in bytes; a power of two.
    pub preferred_block: u32,
}

/// Which export a session's request is for: its place in the list of exports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Endpoint(pub usize);

/// What a session wants done, collected while it runs and taken by the event loop afterwards.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Bytes for the client, in order.
    pub bytes: Vec<u8>,
    /// Requests for the volumes.
    pub ios: Vec<(Endpoint, Io)>,
    /// Set when the connection must be closed once `bytes` are sent.
    pub close: bool,
}

/// One client connection. Bounded: it keeps at most a fixed number of requests in flight and
/// stops asking for input beyond that.
pub trait Session {
    /// Called once, before anything else: where the server speaks first, it greets here.
    fn start(&mut self, _out: &mut Outbox) {}

    /// Takes bytes from the client; returns how many were used. Bytes not used are offered again
    /// with more behind them, so a session never stores what it cannot yet parse; they are also
    /// offered again, without more, when a completion makes `wants_input` true. At most 64 KiB
    /// are ever left when input is still wanted.
    fn receive(&mut self, bytes: &[u8], out: &mut Outbox) -> usize;

    /// Takes the completion of a request this session emitted.
    fn complete(&mut self, done: Completion, out: &mut Outbox);

    /// Adds to the bytes for the client as long as there are fewer than [`SLICE`]: a large answer
    /// is copied as the client takes it. The event loop calls it when it can send.
    fn speak(&mut self, _out: &mut Outbox) {}

    /// Whether [`Session::speak`] has more to say. A closed session is dropped when it has not.
    fn has_more_to_say(&self) -> bool {
        false
    }

    /// Whether more input is welcome now.
    fn wants_input(&self) -> bool;

    /// Whether the client has yet to say which volume it wants. The event loop closes connections
    /// that stay here too long.
    fn is_negotiating(&self) -> bool {
        false
    }

    /// How many requests are in flight; a closed session is dropped when there are none.
    fn in_flight(&self) -> usize;

    /// Bytes of memory that it holds for data: of requests in flight, of a write that is coming
    /// in, of answers that are not said.
    fn memory(&self) -> u64 {
        0
    }

    /// How many bytes it would hold with the next request, when that waits for memory.
    fn wants_memory(&self) -> Option<u64> {
        None
    }

    /// Sets how many bytes it may hold: without a bound until the first call. If they are enough,
    /// what waits for memory goes on.
    fn allow_memory(&mut self, _bytes: u64, _out: &mut Outbox) {}

    /// Whether a request has begun whose data has not all come.
    fn is_owed(&self) -> bool {
        false
    }

    /// The client closed its side, or the server stops: no new requests; say farewell if the
    /// protocol has one.
    fn shutdown(&mut self, out: &mut Outbox);
}
