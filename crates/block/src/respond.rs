//! The contract between a message protocol, such as FUSE, and the volumes. A [`Responder`] parses a
//! request, decides the next [`Step`], and builds the answer when the work is done. Its only state
//! per request is the [`Ticket`], which the event loop keeps. It does no I/O and serves all
//! threads.

use crate::{BufPool, Endpoint, Io, IoResult};

/// A received request: header, operation structure, and data.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// The header that every request begins with.
    pub header: &'a [u8],
    /// The operation's own structure; more bytes may follow it.
    pub argument: &'a [u8],
    /// A name, or the data to write.
    pub data: &'a [u8],
}

/// State that the responder needs when the request completes; opaque to everyone else.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ticket {
    /// The client's name for the request.
    pub unique: u64,
    /// The responder's notes on the request.
    pub note: [u64; 3],
}

/// How a request continues.
#[derive(Debug)]
pub enum Step {
    /// No work and no answer.
    Silent,
    /// The request is answered at once.
    Answer(Answer),
    /// Submit this I/O to the volumes, and pass its result to [`Responder::finish`]. A read has no
    /// buffer: the event loop reads into the place where the answer will be, and keeps it.
    Pass(Ticket, Endpoint, Io),
    /// Get the text with this number on a thread that may block, and pass it to
    /// [`Responder::told`].
    Ask(Ticket, u64),
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// The header that every answer begins with.
    pub header: [u8; 16],
    /// The bytes after the header.
    pub body: Body,
}

/// The payload of an answer.
#[derive(Debug)]
pub enum Body {
    /// A number of bytes from the front of an array.
    Short([u8; 128], usize),
    /// A number of bytes from the front of the buffer that the read filled.
    Filled(usize),
    /// All bytes of a vector.
    Bytes(Vec<u8>),
}

impl Body {
    /// No payload.
    pub const EMPTY: Self = Self::Short([0; 128], 0);

    /// A copy of at most 128 bytes.
    #[must_use]
    pub fn short(bytes: &[u8]) -> Self {
        let mut short = [0; 128];
        short[..bytes.len()].copy_from_slice(bytes);
        Self::Short(short, bytes.len())
    }

    /// Length of the payload, in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        match self {
            Self::Short(_, length) | Self::Filled(length) => *length,
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// The payload; `filled` is the buffer that a read filled.
    #[must_use]
    pub fn bytes<'a>(&'a self, filled: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Short(bytes, length) => &bytes[..*length],
            Self::Filled(length) => &filled[..*length],
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// A protocol of single messages, without connections.
pub trait Responder: Send + Sync {
    /// Parses a request. Buffers come from `pool`.
    fn request(&self, parts: Parts<'_>, pool: &BufPool) -> Step;

    /// Continues a request whose I/O has completed.
    fn finish(&self, ticket: Ticket, result: IoResult<()>) -> Step;

    /// The answer with the text that [`Step::Ask`] requested.
    fn told(&self, ticket: Ticket, text: Vec<u8>) -> Answer;

    /// The answer to an unparsed request, when the server stops.
    fn refuse(&self, parts: Parts<'_>) -> Step;
}
