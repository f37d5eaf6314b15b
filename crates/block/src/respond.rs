//! How a protocol of single messages meets the volumes: a [`Responder`] reads a request and says
//! what is to be done, and makes the answer when it is done. It keeps nothing of a request but
//! the [`Ticket`] that the event loop keeps for it, does no I/O, and serves all threads.

use crate::{BufPool, Endpoint, Io, IoResult};

/// A request as it came: a header, the structure of its operation, and data.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// What every request has in front.
    pub header: &'a [u8],
    /// The structure of the operation; more may be behind it.
    pub argument: &'a [u8],
    /// A name, or what is written.
    pub data: &'a [u8],
}

/// What the responder must know of a request when it is done; nobody else reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ticket {
    /// The client's name for the request.
    pub unique: u64,
    /// What was asked.
    pub note: [u64; 3],
}

/// What is to be done about a request.
#[derive(Debug)]
pub enum Step {
    /// Nothing; there is no answer.
    Silent,
    /// This is the answer.
    Answer(Answer),
    /// Hand this to the volumes, and how it went to [`Responder::finish`]. A read comes without a
    /// buffer: the event loop has one where the answer will be, and keeps it.
    Pass(Ticket, Endpoint, Io),
    /// Ask for this text where waiting is allowed, and hand it to [`Responder::told`].
    Ask(Ticket, u64),
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// What every answer has in front.
    pub header: [u8; 16],
    /// What is behind it.
    pub body: Body,
}

/// What an answer returns.
#[derive(Debug)]
pub enum Body {
    /// So many of these bytes.
    Short([u8; 128], usize),
    /// So many of the bytes that the read filled.
    Filled(usize),
    /// All of these.
    Bytes(Vec<u8>),
}

impl Body {
    /// Nothing.
    pub const EMPTY: Self = Self::Short([0; 128], 0);

    /// A copy of at most 128 bytes.
    #[must_use]
    pub fn short(bytes: &[u8]) -> Self {
        let mut short = [0; 128];
        short[..bytes.len()].copy_from_slice(bytes);
        Self::Short(short, bytes.len())
    }

    /// How many bytes it has.
    #[must_use]
    pub fn length(&self) -> usize {
        match self {
            Self::Short(_, length) | Self::Filled(length) => *length,
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// The bytes; `filled` is what a read filled.
    #[must_use]
    pub fn bytes<'a>(&'a self, filled: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Short(bytes, length) => &bytes[..*length],
            Self::Filled(length) => &filled[..*length],
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// A protocol of single messages.
pub trait Responder: Send + Sync {
    /// Reads a request. Buffers come from `pool`.
    fn request(&self, parts: Parts<'_>, pool: &BufPool) -> Step;

    /// A request that was passed on is done.
    fn finish(&self, ticket: Ticket, result: IoResult<()>) -> Step;

    /// The text that was asked for.
    fn told(&self, ticket: Ticket, text: Vec<u8>) -> Answer;

    /// The answer to a request that is not even looked at: the server stops.
    fn refuse(&self, parts: Parts<'_>) -> Step;
}
