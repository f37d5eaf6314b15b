//! Requests of the transmission phase.

use crate::numbers::{codes, flags};
use crate::read::Reader;
use crate::{WireError, WireResult};

const REQUEST_MAGIC: u32 = 0x2560_9513;

flags! {
    /// Capabilities of an export, sent at the end of the handshake.
    pub struct TransmissionFlags: u16 {
        /// Always set.
        HAS_FLAGS = 0,
        /// Writes are refused.
        READ_ONLY = 1,
        /// `FLUSH` is supported.
        SEND_FLUSH = 2,
        /// The flag `FUA` is supported.
        SEND_FUA = 3,
        /// The device has seek costs.
        ROTATIONAL = 4,
        /// `TRIM` is supported.
        SEND_TRIM = 5,
        /// `WRITE_ZEROES` is supported.
        SEND_WRITE_ZEROES = 6,
        /// The flag `DF` is supported; only with structured replies.
        SEND_DF = 7,
        /// A flush on one connection covers the writes answered on all.
        CAN_MULTI_CONN = 8,
        /// `RESIZE` is supported; unused here.
        SEND_RESIZE = 9,
        /// `CACHE` is supported.
        SEND_CACHE = 10,
        /// The flag `FAST_ZERO` is supported.
        SEND_FAST_ZERO = 11,
        /// `BLOCK_STATUS` may have a payload; only with extended headers, which are not supported
        /// here.
        BLOCK_STATUS_PAYLOAD = 12,
    }
}

flags! {
    /// Modifiers of a request.
    pub struct CommandFlags: u16 {
        /// Answer only when the change is durable.
        FUA = 0,
        /// `WRITE_ZEROES`: keep the space allocated.
        NO_HOLE = 1,
        /// `READ`: answer in one chunk.
        DF = 2,
        /// `BLOCK_STATUS`: one extent is enough.
        REQ_ONE = 3,
        /// `WRITE_ZEROES`: fail rather than be slow.
        FAST_ZERO = 4,
        /// The length is that of a payload; only with extended headers, which are not supported
        /// here.
        PAYLOAD_LEN = 5,
    }
}

codes! {
    /// The number of a command.
    pub struct Command: u16 {
        /// Read bytes.
        READ = 0,
        /// Write the bytes that follow the request.
        WRITE = 1,
        /// Finish the requests in flight and close the connection; not answered.
        DISC = 2,
        /// Make every answered write durable.
        FLUSH = 3,
        /// Discard bytes that are no longer needed.
        TRIM = 4,
        /// Prefetch bytes that will be needed soon.
        CACHE = 5,
        /// Write zeros.
        WRITE_ZEROES = 6,
        /// Return the status of the bytes in the chosen metadata contexts.
        BLOCK_STATUS = 7,
        /// Change the size; not supported here.
        RESIZE = 8,
    }
}

/// A request with a compact header; for `WRITE`, `len` bytes of data follow.
///
/// ```text
/// 0           4           6             8            16           24        28
/// magic u32   | flags u16 | command u16 | cookie u64 | offset u64 | len u32 |
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Modifiers of the command.
    pub flags: CommandFlags,
    /// The command.
    pub command: Command,
    /// The client's name for the request, repeated in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Number of bytes, as announced: check it against a limit.
    pub len: u32,
}

impl Request {
    /// Length of the header, in bytes.
    pub const BYTES: usize = 28;

    /// The encoded header.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.0.to_be_bytes());
        out[6..8].copy_from_slice(&self.command.0.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..28].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Decodes a request.
    ///
    /// # Errors
    /// When the magic number is wrong: the stream is out of sync beyond recovery.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> WireResult<Self> {
        let mut r = Reader(bytes);
        let magic = r.u32("request")?;
        WireError::expect("request magic", magic.into(), REQUEST_MAGIC.into())?;
        Ok(Self {
            flags: CommandFlags(r.u16("request")?),
            command: Command(r.u16("request")?),
            cookie: r.u64("request")?,
            offset: r.u64("request")?,
            len: r.u32("request")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_the_one_of_the_specification() {
        let request = Request {
            flags: CommandFlags::FUA | CommandFlags::DF,
            command: Command::WRITE,
            cookie: 0x0102_0304_0506_0708,
            offset: 0x1112_1314_1516_1718,
            len: 0x2122_2324,
        };
        let bytes = request.encode();
        assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 5, 0, 1]);
        assert_eq!(bytes[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[16..24], [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
        assert_eq!(bytes[24..], [0x21, 0x22, 0x23, 0x24]);
        assert_eq!(Request::decode(&bytes), Ok(request));
    }

    #[test]
    fn a_foreign_magic_is_refused() {
        let mut bytes = [0; Request::BYTES];
        bytes[..4].copy_from_slice(&0x1256_0953u32.to_be_bytes());
        let error = Request::decode(&bytes).unwrap_err();
        assert_eq!(error.to_string(), "request magic: found 0x12560953, expected 0x25609513");
    }
}
