//! The first message of a mount: kernel and server agree on a version and on capabilities.

use std::fmt;

use forebay_fuse_wire::{Header, Init, Op, OutHeader, Request, WireError, init_out, split};

/// Maximum length of a read or write, in bytes; also the payload size of each ring entry.
pub const REQUEST_BYTES: u32 = 256 << 10;
/// Maximum number of background requests that the kernel may have in flight, as for a loop device.
const BACKGROUND: u16 = 1024;
/// The server's protocol version. The kernel adapts to an older server, but not to a newer one.
const VERSION: (u32, u32) = (7, 42);
/// The oldest supported version: Linux 5.4.
const OLDEST: (u32, u32) = (7, 31);

/// The result of the handshake.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Agreement {
    /// Whether requests come over io_uring.
    pub ring: bool,
    /// Whether the next server can ask for the requests of one that died. On io_uring they are
    /// lost.
    pub resends: bool,
    /// The kernel's version.
    pub version: (u32, u32),
    /// The answer to send.
    pub reply: Vec<u8>,
}

/// Why the handshake failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HandshakeError {
    /// The message is malformed.
    Wire(WireError),
    /// The first message is not an init request.
    Unexpected(Op),
    /// The kernel is too old.
    Version(u32, u32),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wire(error) => write!(f, "the kernel's first message cannot be read: {error}"),
            Self::Unexpected(op) => write!(f, "the kernel began with {}", op.name()),
            Self::Version(major, minor) => write!(
                f,
                "the kernel speaks FUSE {major}.{minor}; {}.{} (Linux 5.4) is needed",
                OLDEST.0, OLDEST.1
            ),
        }
    }
}

impl std::error::Error for HandshakeError {}

impl From<WireError> for HandshakeError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// The message by which a server asks for the requests that the server before it left unanswered.
#[must_use]
pub fn resend() -> [u8; OutHeader::BYTES] {
    OutHeader::resend().encode()
}

/// Parses the kernel's first message. With `ring`, io_uring is agreed on if the kernel offers it.
///
/// # Errors
/// When the message is not a valid init request.
pub fn negotiate(message: &[u8], ring: bool) -> Result<Agreement, HandshakeError> {
    let parts = split(message)?;
    let header = Header::decode(parts.header)?;
    let Request::Init(init) = Request::decode(header.op(), &parts)? else {
        return Err(HandshakeError::Unexpected(header.op()));
    };
    let version = (init.major, init.minor);
    if version < OLDEST {
        return Err(HandshakeError::Version(init.major, init.minor));
    }
    let offers = |flag| init.offers() & flag != 0;
    let resends = offers(Init::HAS_RESEND);
    let ring = ring && offers(Init::OVER_IO_URING);
    let flags = wanted(ring) & init.offers();
    let body = init_out(VERSION.min(version), flags, init.max_readahead, REQUEST_BYTES, BACKGROUND);
    let mut reply = OutHeader::new(header.unique, 0, body.len()).encode().to_vec();
    reply.extend_from_slice(&body);
    Ok(Agreement { ring, resends: resends && !ring, version, reply })
}

fn wanted(ring: bool) -> u64 {
    let always = Init::ASYNC_READ
        | Init::BIG_WRITES
        | Init::ASYNC_DIO
        | Init::PARALLEL_DIROPS
        | Init::MAX_PAGES
        | Init::INIT_EXT
        | Init::HAS_RESEND;
    if ring { always | Init::OVER_IO_URING } else { always }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(op: Op, minor: u32, offers: u64) -> Vec<u8> {
        let mut bytes = vec![0; 104];
        bytes[..4].copy_from_slice(&104u32.to_ne_bytes());
        bytes[4..8].copy_from_slice(&op.0.to_ne_bytes());
        bytes[40..44].copy_from_slice(&7u32.to_ne_bytes());
        bytes[44..48].copy_from_slice(&minor.to_ne_bytes());
        bytes[52..56].copy_from_slice(&(offers as u32).to_ne_bytes());
        bytes[56..60].copy_from_slice(&((offers >> 32) as u32).to_ne_bytes());
        bytes
    }

    #[test]
    fn io_uring_is_taken_when_it_is_offered_and_wanted() {
        let offer = init(Op::INIT, 45, Init::OVER_IO_URING | Init::INIT_EXT);
        assert!(negotiate(&offer, true).expect("a good offer").ring);
        assert!(!negotiate(&offer, false).expect("a good offer").ring);
        let none = init(Op::INIT, 39, Init::ASYNC_DIO | 1 << 12);
        let agreed = negotiate(&none, true).expect("a good offer");
        assert!(!agreed.ring);
        // Capabilities that were not offered, or are not useful, are not agreed on.
        assert_eq!(agreed.reply[28..32], (Init::ASYNC_DIO as u32).to_ne_bytes());
        assert_eq!(agreed.reply[20..24], 39u32.to_ne_bytes());
    }

    #[test]
    fn requests_of_a_dead_server_come_again_over_the_device_only() {
        let both = Init::OVER_IO_URING | Init::HAS_RESEND | Init::INIT_EXT;
        let resends = |offers, ring| {
            negotiate(&init(Op::INIT, 45, offers), ring).expect("a good offer").resends
        };
        assert!(resends(both, false));
        assert!(!resends(both, true));
        assert!(!resends(Init::INIT_EXT, false));
    }

    #[test]
    fn an_old_kernel_and_another_message_are_refused() {
        let old = negotiate(&init(Op::INIT, 23, 0), true);
        assert_eq!(old, Err(HandshakeError::Version(7, 23)));
        let other = negotiate(&init(Op(9), 45, 0), true);
        assert_eq!(other, Err(HandshakeError::Unexpected(Op(9))));
        assert!(matches!(negotiate(&[1, 2], true), Err(HandshakeError::Wire(_))));
    }
}
