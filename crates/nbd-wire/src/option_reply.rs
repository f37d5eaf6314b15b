//! A server's answers to options.

use crate::numbers::codes;
use crate::option::len_u32;
use crate::read::Reader;
use crate::{InfoKind, OptionCode, TransmissionFlags, WireError, WireResult};

const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

codes! {
    /// The kind of an answer to an option.
    pub struct OptionReplyKind: u32 {
        /// Success, and the last answer.
        ACK = 1,
        /// One export of the list.
        SERVER = 2,
        /// One piece of information about an export.
        INFO = 3,
        /// One metadata context.
        META_CONTEXT = 4,
        /// The option is unknown.
        ERR_UNSUP = 1 << 31 | 1,
        /// The option is forbidden by policy.
        ERR_POLICY = 1 << 31 | 2,
        /// The option is malformed.
        ERR_INVALID = 1 << 31 | 3,
        /// The option is not supported on this platform.
        ERR_PLATFORM = 1 << 31 | 4,
        /// TLS must be started first.
        ERR_TLS_REQD = 1 << 31 | 5,
        /// There is no such export.
        ERR_UNKNOWN = 1 << 31 | 6,
        /// The server is stopping.
        ERR_SHUTDOWN = 1 << 31 | 7,
        /// The client must ask for the block size first.
        ERR_BLOCK_SIZE_REQD = 1 << 31 | 8,
        /// The option, or its answer, is too long.
        ERR_TOO_BIG = 1 << 31 | 9,
        /// Extended headers must be negotiated first.
        ERR_EXT_HEADER_REQD = 1 << 31 | 10,
    }
}

impl OptionReplyKind {
    /// Whether it is an error; its data is then a message for people.
    #[must_use]
    pub fn is_error(self) -> bool {
        self.0 & 1 << 31 != 0
    }

    /// Whether no further answer to the same option follows.
    #[must_use]
    pub fn is_final(self) -> bool {
        self == Self::ACK || self.is_error()
    }
}

/// The header of each answer to an option; `len` bytes of data follow.
///
/// ```text
/// 0           8            12         16        20
/// magic u64   | option u32 | kind u32 | len u32 |
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OptionReplyHeader {
    /// The option that is answered.
    pub option: OptionCode,
    /// The kind of answer.
    pub kind: OptionReplyKind,
    /// Length of the data in bytes, as announced: check it against a limit.
    pub len: u32,
}

impl OptionReplyHeader {
    /// Length of the header, in bytes.
    pub const BYTES: usize = 20;

    /// The encoded header.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.0.to_be_bytes());
        out[12..16].copy_from_slice(&self.kind.0.to_be_bytes());
        out[16..20].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// When the magic number is wrong: the stream is out of sync beyond recovery.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> WireResult<Self> {
        let mut r = Reader(bytes);
        WireError::expect("option reply magic", r.u64("option reply")?, OPTION_REPLY_MAGIC)?;
        let option = OptionCode(r.u32("option reply")?);
        let kind = OptionReplyKind(r.u32("option reply")?);
        Ok(Self { option, kind, len: r.u32("option reply")? })
    }
}

/// Appends an answer to `option`: header, and the data that `body` appends.
pub fn encode_option_reply(
    out: &mut Vec<u8>,
    option: OptionCode,
    kind: OptionReplyKind,
    body: impl FnOnce(&mut Vec<u8>),
) {
    let start = out.len();
    out.resize(start + OptionReplyHeader::BYTES, 0);
    body(out);
    let len = out.len() - start - OptionReplyHeader::BYTES;
    let len = u32::try_from(len).expect("answers to options are short");
    let header = OptionReplyHeader { option, kind, len }.encode();
    if let Some(place) = out.get_mut(start..start + OptionReplyHeader::BYTES) {
        place.copy_from_slice(&header);
    }
}

/// The data of `SERVER`: one export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerEntry<'a> {
    /// The export's name.
    pub name: &'a str,
    /// A description for people; may be empty.
    pub description: &'a str,
}

impl<'a> ServerEntry<'a> {
    /// Appends the encoded data.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&len_u32(self.name.len()));
        out.extend_from_slice(self.name.as_bytes());
        out.extend_from_slice(self.description.as_bytes());
    }

    /// Decodes the data.
    ///
    /// # Errors
    /// When lengths are inconsistent or a string is invalid.
    pub fn decode(data: &'a [u8]) -> WireResult<Self> {
        let mut r = Reader(data);
        let len = r.u32("export name length")?;
        let name = r.string(len as usize, "export name")?;
        Ok(Self { name, description: r.rest("export description")? })
    }
}

/// The data of `META_CONTEXT`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MetaContext<'a> {
    /// The number that identifies the context in replies; zero in the answer to a list request.
    pub id: u32,
    /// The context's name.
    pub name: &'a str,
}

impl<'a> MetaContext<'a> {
    /// Appends the encoded data.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.id.to_be_bytes());
        out.extend_from_slice(self.name.as_bytes());
    }

    /// Decodes the data.
    ///
    /// # Errors
    /// When it is too short, or the name is not a valid string.
    pub fn decode(data: &'a [u8]) -> WireResult<Self> {
        let mut r = Reader(data);
        Ok(Self { id: r.u32("context number")?, name: r.rest("context name")? })
    }
}

/// The data of `INFO`: one piece of information about an export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Info<'a> {
    /// Size and capabilities of the export.
    Export {
        /// Size of the export, in bytes.
        size: u64,
        /// Supported operations.
        flags: TransmissionFlags,
    },
    /// The canonical name.
    Name(&'a str),
    /// A description for people.
    Description(&'a str),
    /// Constraints on requests, in bytes.
    BlockSize {
        /// Offsets and lengths must be multiples of this.
        minimum: u32,
        /// Offsets and lengths should be multiples of this.
        preferred: u32,
        /// Maximum length of the payload of a read or write.
        maximum: u32,
    },
    /// An unknown kind, to be ignored.
    Other(InfoKind),
}

impl<'a> Info<'a> {
    /// Appends the encoded data.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut kind = |kind: InfoKind| out.extend_from_slice(&kind.0.to_be_bytes());
        match *self {
            Self::Export { size, flags } => {
                kind(InfoKind::EXPORT);
                out.extend_from_slice(&size.to_be_bytes());
                out.extend_from_slice(&flags.0.to_be_bytes());
            }
            Self::Name(name) => {
                kind(InfoKind::NAME);
                out.extend_from_slice(name.as_bytes());
            }
            Self::Description(text) => {
                kind(InfoKind::DESCRIPTION);
                out.extend_from_slice(text.as_bytes());
            }
            Self::BlockSize { minimum, preferred, maximum } => {
                kind(InfoKind::BLOCK_SIZE);
                out.extend_from_slice(&minimum.to_be_bytes());
                out.extend_from_slice(&preferred.to_be_bytes());
                out.extend_from_slice(&maximum.to_be_bytes());
            }
            Self::Other(other) => kind(other),
        }
    }

    /// Decodes the data.
    ///
    /// # Errors
    /// When a known kind has the wrong length or a string is invalid.
    pub fn decode(data: &'a [u8]) -> WireResult<Self> {
        let mut r = Reader(data);
        let info = match InfoKind(r.u16("information kind")?) {
            InfoKind::EXPORT => {
                let size = r.u64("export size")?;
                Self::Export { size, flags: TransmissionFlags(r.u16("transmission flags")?) }
            }
            InfoKind::NAME => Self::Name(r.rest("export name")?),
            InfoKind::DESCRIPTION => Self::Description(r.rest("export description")?),
            InfoKind::BLOCK_SIZE => Self::BlockSize {
                minimum: r.u32("minimum block size")?,
                preferred: r.u32("preferred block size")?,
                maximum: r.u32("maximum payload")?,
            },
            other => return Ok(Self::Other(other)),
        };
        r.end("bytes after the information")?;
        Ok(info)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_is_the_one_of_the_specification() {
        let mut out = vec![0xaa];
        encode_option_reply(&mut out, OptionCode::LIST, OptionReplyKind::SERVER, |out| {
            ServerEntry { name: "a", description: "bc" }.encode(out);
        });
        assert_eq!(
            out,
            b"\xaa\x00\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x03\0\0\0\x02\0\0\0\x07\0\0\0\x01abc"
        );
        let header = OptionReplyHeader::decode(out[1..21].try_into().unwrap()).unwrap();
        assert_eq!((header.option, header.len), (OptionCode::LIST, 7));
        assert!(!header.kind.is_final());
        let entry = ServerEntry::decode(&out[21..]).unwrap();
        assert_eq!(entry, ServerEntry { name: "a", description: "bc" });
    }

    #[test]
    fn kinds_know_their_place() {
        assert!(OptionReplyKind::ACK.is_final() && !OptionReplyKind::ACK.is_error());
        assert_eq!(OptionReplyKind::ERR_UNSUP.0, 0x8000_0001);
        assert!(OptionReplyKind(0x8000_1234).is_error() && OptionReplyKind(0x8000_1234).is_final());
    }

    #[test]
    fn information_round_trips() {
        let all = [
            Info::Export { size: u64::MAX, flags: TransmissionFlags(0xabcd) },
            Info::Name("disk"),
            Info::Description(""),
            Info::BlockSize { minimum: 1, preferred: 4096, maximum: 32 << 20 },
            Info::Other(InfoKind(77)),
        ];
        for info in all {
            let mut data = Vec::new();
            info.encode(&mut data);
            assert_eq!(Info::decode(&data), Ok(info));
            if !matches!(info, Info::Name(_) | Info::Description(_) | Info::Other(_)) {
                assert!(Info::decode(&data[..data.len() - 1]).is_err());
                data.push(0);
                assert_eq!(Info::decode(&data).unwrap_err().what, "bytes after the information");
            }
        }
    }

    #[test]
    fn meta_context_round_trips() {
        let context = MetaContext { id: 7, name: "base:allocation" };
        let mut data = Vec::new();
        context.encode(&mut data);
        assert_eq!(MetaContext::decode(&data), Ok(context));
        assert_eq!(MetaContext::decode(&data[..3]).unwrap_err().what, "context number");
    }
}
