//! The contract between a stream protocol and the volumes: a [`Session`] is one client connection
//! as a state machine without I/O. The event loop feeds it bytes and completions; it emits bytes
//! and requests.

use crate::{Completion, DeviceInfo, Io};

/// Once this many bytes for a client are pending, a session adds no more of a large answer.
pub const SLICE: usize = 256 << 10;

/// A volume offered to clients.
#[derive(Clone, Debug)]
pub struct Export {
    /// The name by which clients select it.
    pub name: String,
    /// A description for people, one sentence.
    pub description: String,
    /// Size and capabilities, as announced to the client.
    pub info: DeviceInfo,
    /// Preferred request size, in bytes; a power of two.
    pub preferred_block: u32,
}

/// The export that a session's request is for: its index in the list of exports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Endpoint(pub usize);

/// Output of a session, collected while it runs and taken by the event loop afterwards.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Bytes for the client, in order.
    pub bytes: Vec<u8>,
    /// Requests for the volumes.
    pub ios: Vec<(Endpoint, Io)>,
    /// Set when the connection must be closed once `bytes` are sent.
    pub close: bool,
    /// Why, if the client made a mistake. The event loop logs it with the client's name, and limits
    /// such lines; a session itself logs nothing.
    pub why: Option<String>,
}

/// One client connection. Bounded: it keeps at most a fixed number of requests in flight and wants
/// no input beyond that.
pub trait Session {
    /// Called once, before anything else. A protocol in which the server speaks first sends its
    /// greeting.
    fn start(&mut self, _out: &mut Outbox) {}

    /// Takes bytes from the client and returns the number consumed. Unconsumed bytes are offered
    /// again with more appended, so a session never stores a partial message; they are also offered
    /// again, without more, when a completion makes `wants_input` true. At most 64 KiB are left
    /// unconsumed while input is wanted.
    fn receive(&mut self, bytes: &[u8], out: &mut Outbox) -> usize;

    /// Takes the completion of a request that this session emitted.
    fn complete(&mut self, done: Completion, out: &mut Outbox);

    /// Adds bytes for the client while fewer than [`SLICE`] are pending: a large answer is copied
    /// only as fast as the client takes it. The event loop calls this when it can send.
    fn speak(&mut self, _out: &mut Outbox) {}

    /// Whether [`Session::speak`] has more to send. A closed session is dropped once it has not.
    fn has_more_to_say(&self) -> bool {
        false
    }

    /// Begins a turn of the event loop: small answers have a bound in each. Returns whether a
    /// request has waited for this one.
    fn next_turn(&mut self) -> bool {
        false
    }

    /// Whether the session accepts more input now.
    fn wants_input(&self) -> bool;

    /// Whether the client has yet to choose a volume. The event loop closes connections that stay
    /// in this state too long.
    fn is_negotiating(&self) -> bool {
        false
    }

    /// The names in the client's certificate, once it has chosen a volume; empty without one.
    fn certificate_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// Requests in flight. A closed session is dropped when there are none.
    fn in_flight(&self) -> usize;

    /// Memory held for data, in bytes: requests in flight, a write being received, and unsent
    /// answers.
    fn memory(&self) -> u64 {
        0
    }

    /// Bytes that it would hold with the next request; `None` unless that request waits for memory.
    fn wants_memory(&self) -> Option<u64> {
        None
    }

    /// Sets the bytes of memory that it may hold; there is no bound until the first call. A request
    /// that waits for memory continues if the new bound is enough.
    fn allow_memory(&mut self, _bytes: u64, _out: &mut Outbox) {}

    /// Whether the data of a request that has begun is still incomplete.
    fn is_owed(&self) -> bool {
        false
    }

    /// Takes no more requests, so that another server can go on with the connection. Returns false
    /// if none could.
    fn hold(&mut self) -> bool {
        false
    }

    /// What client and server have agreed on, as text for the server that goes on; `None` while the
    /// data of a request that has begun is incomplete, or if no server could.
    fn agreed(&self) -> Option<String> {
        None
    }

    /// The client closed its side, or the server stops: accept no new requests, and send the
    /// protocol's farewell if it has one.
    fn shutdown(&mut self, out: &mut Outbox);
}
