//! The first bytes that each side sends, and the answer to `EXPORT_NAME` that ends an old
//! handshake.

use crate::numbers::flags;
use crate::read::Reader;
use crate::{TransmissionFlags, WireError, WireResult};

/// "NBDMAGIC", the first eight bytes a server sends.
const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT": follows in the greeting of a newstyle server, and starts each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

flags! {
    /// The server's capabilities in the handshake.
    pub struct HandshakeFlags: u16 {
        /// Options are answered one by one.
        FIXED_NEWSTYLE = 0,
        /// The zeros after the answer to `EXPORT_NAME` can be left out.
        NO_ZEROES = 1,
    }
}

flags! {
    /// The client's choice among the server's handshake flags.
    pub struct ClientFlags: u32 {
        /// The client sends options and reads their answers.
        FIXED_NEWSTYLE = 0,
        /// The client wants no zeros after the answer to `EXPORT_NAME`.
        NO_ZEROES = 1,
    }
}

/// The first bytes that a server sends.
///
/// ```text
/// 0        8           16          18
/// NBDMAGIC | IHAVEOPT  | flags u16 |
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Greeting {
    /// The server's handshake flags.
    pub flags: HandshakeFlags,
}

impl Greeting {
    /// Length of the greeting, in bytes.
    pub const BYTES: usize = 18;

    /// The encoded greeting.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
        out[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        out[16..18].copy_from_slice(&self.flags.0.to_be_bytes());
        out
    }

    /// Decodes a greeting.
    ///
    /// # Errors
    /// When the peer is not an NBD server, or supports only the old handshake without options.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> WireResult<Self> {
        let mut r = Reader(bytes);
        WireError::expect("greeting magic", r.u64("greeting")?, GREETING_MAGIC)?;
        WireError::expect("newstyle magic", r.u64("greeting")?, OPTION_MAGIC)?;
        Ok(Self { flags: HandshakeFlags(r.u16("greeting")?) })
    }
}

impl ClientFlags {
    /// Length of the flags, in bytes.
    pub const BYTES: usize = 4;

    /// The encoded flags.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        self.0.to_be_bytes()
    }

    /// Decodes the flags. A server must close the connection on unknown flags.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        Self(u32::from_be_bytes(*bytes))
    }
}

/// The answer to `EXPORT_NAME`; the transmission phase follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExportReply {
    /// Size of the export, in bytes.
    pub size: u64,
    /// Supported operations.
    pub flags: TransmissionFlags,
}

impl ExportReply {
    /// Length of the answer without the zeros, in bytes.
    pub const BYTES: usize = 10;
    /// Number of zero bytes that follow, unless both sides agreed to omit them.
    pub const ZEROES: usize = 124;

    /// The encoded answer, without the zeros.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..8].copy_from_slice(&self.size.to_be_bytes());
        out[8..10].copy_from_slice(&self.flags.0.to_be_bytes());
        out
    }

    /// Decodes an answer, without the zeros.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j] = *bytes;
        let size = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        Self { size, flags: TransmissionFlags(u16::from_be_bytes([i, j])) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greeting_is_the_one_of_the_specification() {
        let flags = HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES;
        let bytes = Greeting { flags }.encode();
        assert_eq!(&bytes, b"NBDMAGICIHAVEOPT\x00\x03");
        assert_eq!(Greeting::decode(&bytes), Ok(Greeting { flags }));
    }

    #[test]
    fn an_old_server_is_told_apart() {
        let mut bytes = Greeting { flags: HandshakeFlags::NONE }.encode();
        bytes[8..16].copy_from_slice(&0x0000_4202_8186_1253u64.to_be_bytes());
        assert_eq!(Greeting::decode(&bytes).unwrap_err().what, "newstyle magic");
        bytes[0] = b'X';
        assert_eq!(Greeting::decode(&bytes).unwrap_err().what, "greeting magic");
    }

    #[test]
    fn export_reply_and_client_flags_round_trip() {
        let reply = ExportReply { size: 0x0102_0304_0506_0708, flags: TransmissionFlags(0x090a) };
        assert_eq!(reply.encode(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(ExportReply::decode(&reply.encode()), reply);
        let flags = ClientFlags::NO_ZEROES;
        assert_eq!(flags.encode(), [0, 0, 0, 2]);
        assert_eq!(ClientFlags::decode(&flags.encode()), flags);
    }
}
