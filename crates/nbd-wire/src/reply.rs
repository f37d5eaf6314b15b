//! Replies of the transmission phase: simple ones, and the chunks of structured ones.

use crate::numbers::{codes, flags};
use crate::option::len_u32;
use crate::read::Reader;
use crate::{NbdError, STRING_MAX, WireError, WireResult};

const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// A simple reply; after a successful `READ` the data follows.
///
/// ```text
/// 0           4           8            16
/// magic u32   | error u32 | cookie u64 |
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SimpleReply {
    /// Success, or the error.
    pub error: NbdError,
    /// The cookie of the request.
    pub cookie: u64,
}

impl SimpleReply {
    /// Length of the reply's header, in bytes.
    pub const BYTES: usize = 16;

    /// The encoded reply.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        out[4..8].copy_from_slice(&self.error.0.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out
    }
}

flags! {
    /// Modifiers of a chunk.
    pub struct ReplyFlags: u16 {
        /// The last chunk of its reply.
        DONE = 0,
    }
}

codes! {
    /// The kind of a chunk.
    pub struct ChunkKind: u16 {
        /// No content: the end of the reply.
        NONE = 0,
        /// Data at an offset.
        OFFSET_DATA = 1,
        /// Zeros at an offset.
        OFFSET_HOLE = 2,
        /// The extents of one metadata context.
        BLOCK_STATUS = 5,
        /// Like `BLOCK_STATUS` with 64-bit lengths; not supported.
        BLOCK_STATUS_EXT = 6,
        /// The request failed.
        ERROR = 1 << 15 | 1,
        /// The request failed at an offset.
        ERROR_OFFSET = 1 << 15 | 2,
    }
}

impl ChunkKind {
    /// Whether it is an error, known or not.
    #[must_use]
    pub fn is_error(self) -> bool {
        self.0 & 1 << 15 != 0
    }
}

/// The header of each chunk of a structured reply; `len` bytes of payload follow.
///
/// ```text
/// 0           4           6          8            16        20
/// magic u32   | flags u16 | kind u16 | cookie u64 | len u32 |
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkHeader {
    /// Whether it is the last chunk.
    pub flags: ReplyFlags,
    /// The kind of payload.
    pub kind: ChunkKind,
    /// The cookie of the request.
    pub cookie: u64,
    /// Length of the payload in bytes, as announced: check it against a limit.
    pub len: u32,
}

impl ChunkHeader {
    /// Length of the header, in bytes.
    pub const BYTES: usize = 20;

    /// The encoded header.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.0.to_be_bytes());
        out[6..8].copy_from_slice(&self.kind.0.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..20].copy_from_slice(&self.len.to_be_bytes());
        out
    }
}

/// The header at the start of a reply, as a client receives it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplyHead {
    /// A simple reply.
    Simple(SimpleReply),
    /// One chunk of a structured reply.
    Chunk(ChunkHeader),
}

impl ReplyHead {
    /// Decodes the header at the start of `bytes`; returns it with its length in bytes. `None` if
    /// it is incomplete.
    ///
    /// # Errors
    /// When the magic number is unknown: the stream is out of sync beyond recovery.
    pub fn decode(bytes: &[u8]) -> WireResult<Option<(Self, usize)>> {
        let mut r = Reader(bytes);
        let Ok(magic) = r.u32("reply") else { return Ok(None) };
        match magic {
            SIMPLE_REPLY_MAGIC if bytes.len() >= SimpleReply::BYTES => {
                let error = NbdError(r.u32("reply")?);
                let reply = SimpleReply { error, cookie: r.u64("reply")? };
                Ok(Some((Self::Simple(reply), SimpleReply::BYTES)))
            }
            CHUNK_MAGIC if bytes.len() >= ChunkHeader::BYTES => {
                let chunk = ChunkHeader {
                    flags: ReplyFlags(r.u16("chunk")?),
                    kind: ChunkKind(r.u16("chunk")?),
                    cookie: r.u64("chunk")?,
                    len: r.u32("chunk")?,
                };
                Ok(Some((Self::Chunk(chunk), ChunkHeader::BYTES)))
            }
            SIMPLE_REPLY_MAGIC | CHUNK_MAGIC => Ok(None),
            other => Err(WireError::new("reply magic", other.into(), CHUNK_MAGIC.into())),
        }
    }
}

/// The header of a structured reply with one chunk of data at `offset`; `len` bytes follow it.
#[must_use]
pub fn encode_data_header(cookie: u64, offset: u64, len: u32) -> [u8; ChunkHeader::BYTES + 8] {
    let (flags, kind) = (ReplyFlags::DONE, ChunkKind::OFFSET_DATA);
    let len = len.checked_add(8).expect("a payload is at most PAYLOAD_MAX");
    let mut out = [0; ChunkHeader::BYTES + 8];
    out[..20].copy_from_slice(&ChunkHeader { flags, kind, cookie, len }.encode());
    out[20..].copy_from_slice(&offset.to_be_bytes());
    out
}

/// The payload of `OFFSET_HOLE`: `len` zero bytes at `offset`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hole {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u32,
}

impl Hole {
    /// Length of the payload, in bytes.
    pub const BYTES: usize = 12;

    /// The encoded payload.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..8].copy_from_slice(&self.offset.to_be_bytes());
        out[8..12].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Decodes the payload.
    ///
    /// # Errors
    /// When it has the wrong length, or the hole is empty.
    pub fn decode(payload: &[u8]) -> WireResult<Self> {
        let mut r = Reader(payload);
        let hole = Self { offset: r.u64("hole offset")?, len: r.u32("hole length")? };
        r.end("bytes after the hole")?;
        if hole.len == 0 { Err(WireError::new("hole length", 0, 1)) } else { Ok(hole) }
    }
}

flags! {
    /// The status of an extent in `base:allocation`.
    pub struct AllocationFlags: u32 {
        /// No space is allocated.
        HOLE = 0,
        /// It reads as zeros.
        ZERO = 1,
    }
}

/// Consecutive bytes with the same status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Number of bytes.
    pub len: u32,
    /// Their status; its meaning depends on the context.
    pub status: u32,
}

/// The payload of `BLOCK_STATUS`: the extents of one metadata context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockStatus<'a> {
    /// The context's number.
    pub context: u32,
    extents: &'a [[u8; 8]],
}

impl<'a> BlockStatus<'a> {
    /// Decodes the payload.
    ///
    /// # Errors
    /// When it does not hold a context and at least one extent, or an extent is empty.
    pub fn decode(payload: &'a [u8]) -> WireResult<Self> {
        let mut r = Reader(payload);
        let context = r.u32("context number")?;
        let (extents, rest) = r.0.as_chunks::<8>();
        WireError::expect("bytes after the extents", rest.len() as u64, 0)?;
        if extents.is_empty() {
            return Err(WireError::new("number of extents", 0, 1));
        }
        let status = Self { context, extents };
        if status.extents().any(|extent| extent.len == 0) {
            return Err(WireError::new("extent length", 0, 1));
        }
        Ok(status)
    }

    /// The extents in order.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + use<'a> {
        self.extents.iter().map(|&[a, b, c, d, e, f, g, h]| Extent {
            len: u32::from_be_bytes([a, b, c, d]),
            status: u32::from_be_bytes([e, f, g, h]),
        })
    }
}

/// Appends a chunk with the extents of one metadata context.
pub fn encode_block_status(
    out: &mut Vec<u8>,
    cookie: u64,
    flags: ReplyFlags,
    context: u32,
    extents: &[Extent],
) {
    let len = u32::from_be_bytes(len_u32(4 + 8 * extents.len()));
    let kind = ChunkKind::BLOCK_STATUS;
    out.extend_from_slice(&ChunkHeader { flags, kind, cookie, len }.encode());
    out.extend_from_slice(&context.to_be_bytes());
    for extent in extents {
        out.extend_from_slice(&extent.len.to_be_bytes());
        out.extend_from_slice(&extent.status.to_be_bytes());
    }
}

/// The payload of `ERROR` and `ERROR_OFFSET`, and of unknown error chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ErrorChunk<'a> {
    /// The error of the request.
    pub error: NbdError,
    /// A message for people; may be empty.
    pub message: &'a str,
    /// Offset of the error, if the chunk has one.
    pub offset: Option<u64>,
}

impl<'a> ErrorChunk<'a> {
    /// Decodes the payload of an error chunk of `kind`.
    ///
    /// # Errors
    /// When lengths are inconsistent, the error is zero, or the message is not a valid string.
    pub fn decode(kind: ChunkKind, payload: &'a [u8]) -> WireResult<Self> {
        let mut r = Reader(payload);
        let error = NbdError(r.u32("error")?);
        if error == NbdError::OK {
            return Err(WireError::new("error", 0, 1));
        }
        let len = r.u16("error message length")?;
        let message = r.string(usize::from(len), "error message")?;
        let offset = match kind {
            ChunkKind::ERROR_OFFSET => Some(r.u64("error offset")?),
            _ => None,
        };
        if kind == ChunkKind::ERROR || kind == ChunkKind::ERROR_OFFSET {
            r.end("bytes after the error")?;
        }
        Ok(Self { error, message, offset })
    }
}

/// Appends a structured reply with one error chunk. A message longer than [`STRING_MAX`] is
/// truncated.
pub fn encode_error_chunk(out: &mut Vec<u8>, cookie: u64, error: NbdError, message: &str) {
    let message = message.get(..message.floor_char_boundary(STRING_MAX)).unwrap_or_default();
    let [_, _, high, low] = len_u32(message.len());
    let len = u32::from_be_bytes(len_u32(6 + message.len()));
    let (flags, kind) = (ReplyFlags::DONE, ChunkKind::ERROR);
    out.extend_from_slice(&ChunkHeader { flags, kind, cookie, len }.encode());
    out.extend_from_slice(&error.0.to_be_bytes());
    out.extend_from_slice(&[high, low]);
    out.extend_from_slice(message.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(bytes: &[u8]) -> ReplyHead {
        for cut in 0..bytes.len() {
            assert_eq!(ReplyHead::decode(&bytes[..cut]), Ok(None), "cut at {cut}");
        }
        let (head, len) = ReplyHead::decode(bytes).unwrap().unwrap();
        assert_eq!(len, bytes.len());
        head
    }

    #[test]
    fn simple_reply_is_the_one_of_the_specification() {
        let reply = SimpleReply { error: NbdError::EIO, cookie: 0x0102_0304_0506_0708 };
        let bytes = reply.encode();
        assert_eq!(bytes, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(head(&bytes), ReplyHead::Simple(reply));
    }

    #[test]
    fn chunks_are_those_of_the_specification() {
        let bytes = encode_data_header(9, 0x1122, 512);
        assert_eq!(bytes[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1]);
        let ReplyHead::Chunk(chunk) = head(&bytes[..20]) else { panic!("a chunk") };
        assert_eq!((chunk.flags, chunk.kind), (ReplyFlags::DONE, ChunkKind::OFFSET_DATA));
        assert_eq!((chunk.cookie, chunk.len), (9, 520));
        assert_eq!(bytes[20..], 0x1122u64.to_be_bytes());
        assert_eq!(
            ReplyHead::decode(&0x9674_4668u32.to_be_bytes()).unwrap_err().what,
            "reply magic"
        );
    }

    #[test]
    fn holes_round_trip_and_are_never_empty() {
        let hole = Hole { offset: 1 << 40, len: 4096 };
        assert_eq!(Hole::decode(&hole.encode()), Ok(hole));
        let empty = Hole::decode(&Hole { offset: 1, len: 0 }.encode()).unwrap_err();
        assert_eq!(empty.to_string(), "hole length: found 0, expected 1");
        assert!(Hole::decode(&[0; 11]).is_err() && Hole::decode(&[1; 13]).is_err());
    }

    #[test]
    fn block_status_round_trips() {
        let extents = [Extent { len: 512, status: 3 }, Extent { len: 1, status: 0 }];
        let mut out = Vec::new();
        encode_block_status(&mut out, 4, ReplyFlags::DONE, 1, &extents);
        let ReplyHead::Chunk(chunk) = head(&out[..20]) else { panic!("a chunk") };
        assert_eq!(chunk.len as usize, out.len() - 20);
        let status = BlockStatus::decode(&out[20..]).unwrap();
        assert_eq!(status.context, 1);
        assert!(status.extents().eq(extents));
        assert!(BlockStatus::decode(&out[20..24]).is_err(), "no extent");
        assert!(BlockStatus::decode(&out[20..35]).is_err(), "half an extent");
        assert!(BlockStatus::decode(&[0; 12]).is_err(), "an empty extent");
    }

    #[test]
    fn error_chunks_round_trip_and_are_cut() {
        let mut out = Vec::new();
        encode_error_chunk(&mut out, 4, NbdError::EINVAL, "too long");
        let chunk = ErrorChunk::decode(ChunkKind::ERROR, &out[20..]).unwrap();
        assert_eq!((chunk.error, chunk.message), (NbdError::EINVAL, "too long"));
        assert!(ErrorChunk::decode(ChunkKind::ERROR_OFFSET, &out[20..]).is_err());
        out.extend_from_slice(&77u64.to_be_bytes());
        let chunk = ErrorChunk::decode(ChunkKind::ERROR_OFFSET, &out[20..]).unwrap();
        assert_eq!(chunk.offset, Some(77));
        assert!(ErrorChunk::decode(ChunkKind::ERROR, &out[20..]).is_err());
        assert!(ErrorChunk::decode(ChunkKind(0x8099), &out[20..]).is_ok(), "unknown, with more");
        out.clear();
        encode_error_chunk(&mut out, 4, NbdError::EIO, &"é".repeat(3000));
        let chunk = ErrorChunk::decode(ChunkKind::ERROR, &out[20..]).unwrap();
        assert_eq!(chunk.message.len(), STRING_MAX);
    }
}
