//! Forebay's own format: compact, written in one pass, checked with CRC32C. Little-endian.
//!
//! ```text
//! head, 32 bytes:   0 magic "FOREBAYT" | 8 version u32 = 1 | 12 CRC32C of 16.. u32
//!                  16 bytes of the volume u64 | 24 wall clock at the start, s since 1970 u64
//! then             length u32 | name of the volume, UTF-8
//! chunk, 32 bytes:  0 magic "FBTC" | 4 CRC32C of 8.. and the entries u32
//!                   8 bytes of the entries u32 | 12 number of entries u32
//!                  16 time of the first, ns from the start u64
//!                  24 requests dropped so far because the recorder could not keep up u64
//! then its entries
//! ```
//!
//! An entry is a flag byte followed by variable-length numbers: seven bits per byte, lowest first,
//! the eighth bit set if more bytes follow. Signed numbers are zigzag-encoded (0, -1, 1, -2, ...).
//! The flag byte: operation in bits 0 to 2 (read, write, flush, discard, write-zeroes), force unit
//! access in bit 3; bit 4 is set if offset and length count units of 512 bytes instead of one. The
//! numbers: the time since the previous entry in nanoseconds, signed; then, unless it is a flush,
//! the distance from the end of the previous entry to the offset, signed, and the length. In each
//! chunk "the previous entry" starts as the chunk's time and offset 0, so that a damaged chunk
//! damages no other. The last chunk has no entries; if it is missing, the recording was cut off.

use std::collections::VecDeque;
use std::io::{BufRead, Read};

use crc_fast::{CrcAlgorithm, Digest};
use forebay_block::{ByteRange, IoOp, SECTOR_SIZE};

use crate::TraceError;
use crate::request::TraceRequest;

/// The first bytes of a trace.
pub const MAGIC: [u8; 8] = *b"FOREBAYT";
const CHUNK_MAGIC: [u8; 4] = *b"FBTC";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 32;
/// Longest name of a volume, in bytes.
pub const VOLUME_NAME_MAX: usize = 1024;
/// Most entries in a chunk: bounds the memory of a reader.
const CHUNK_ENTRIES_MAX: usize = 4096;
/// Longest entry, in bytes: its flag byte and three numbers of 64 bits.
const ENTRY_BYTES_MAX: usize = 1 + 3 * 10;
const CHUNK_BYTES_MAX: usize = CHUNK_ENTRIES_MAX * ENTRY_BYTES_MAX;
const OPS: [IoOp; 5] = [IoOp::Read, IoOp::Write, IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes];
const FUA: u8 = 1 << 3;
const SECTORS: u8 = 1 << 4;

const _: () = assert!(CHUNK_BYTES_MAX < 1 << 20);

/// Encodes a trace: its owner writes the bytes appended to `out`, in order.
#[derive(Debug)]
pub struct TraceWriter {
    waiting: Vec<TraceRequest>,
    dropped: u64,
}

impl TraceWriter {
    /// Begins the trace of a volume of `size` bytes, recorded since `seconds` after 1970. Names are
    /// cut to [`VOLUME_NAME_MAX`] bytes.
    #[must_use]
    pub fn new(volume: &str, size: u64, seconds: u64, out: &mut Vec<u8>) -> Self {
        let mut covered = [0; 16];
        covered[..8].copy_from_slice(&size.to_le_bytes());
        covered[8..].copy_from_slice(&seconds.to_le_bytes());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&crc([&covered]).to_le_bytes());
        out.extend_from_slice(&covered);
        let mut end = volume.len().min(VOLUME_NAME_MAX);
        while !volume.is_char_boundary(end) {
            end -= 1;
        }
        out.extend_from_slice(&(end as u32).to_le_bytes());
        out.extend_from_slice(&volume.as_bytes()[..end]);
        Self { waiting: Vec::new(), dropped: 0 }
    }

    /// Adds a request; if it fills the chunk, the chunk is appended to `out`.
    pub fn push(&mut self, request: TraceRequest, out: &mut Vec<u8>) {
        self.waiting.push(request);
        if self.waiting.len() == CHUNK_ENTRIES_MAX {
            self.flush(out);
        }
    }

    /// Sets the number of requests dropped so far.
    pub fn set_dropped(&mut self, dropped: u64) {
        self.dropped = dropped;
    }

    /// Ends the chunk, so that the requests added so far can be read.
    pub fn flush(&mut self, out: &mut Vec<u8>) {
        if !self.waiting.is_empty() {
            self.chunk(out);
        }
    }

    /// Ends the trace.
    pub fn finish(mut self, out: &mut Vec<u8>) {
        self.flush(out);
        self.chunk(out);
    }

    fn chunk(&mut self, out: &mut Vec<u8>) {
        let first = self.waiting.first().map_or(0, |request| request.nanos);
        let mut entries = Vec::new();
        let mut before = (first, 0);
        for request in &self.waiting {
            before = encode(request, before, &mut entries);
        }
        let mut covered = [0; 24];
        covered[..4].copy_from_slice(&(entries.len() as u32).to_le_bytes());
        covered[4..8].copy_from_slice(&(self.waiting.len() as u32).to_le_bytes());
        covered[8..16].copy_from_slice(&first.to_le_bytes());
        covered[16..].copy_from_slice(&self.dropped.to_le_bytes());
        out.extend_from_slice(&CHUNK_MAGIC);
        out.extend_from_slice(&crc([&covered, &entries]).to_le_bytes());
        out.extend_from_slice(&covered);
        out.extend_from_slice(&entries);
        self.waiting.clear();
    }
}

fn crc<const N: usize>(parts: [&[u8]; N]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}

/// Appends an entry; returns its time and end, which the next entry is relative to.
fn encode(request: &TraceRequest, before: (u64, u64), out: &mut Vec<u8>) -> (u64, u64) {
    let TraceRequest { nanos, op, fua, range } = *request;
    let kind = OPS.iter().position(|known| *known == op).expect("every operation is listed");
    let unit = SECTOR_SIZE as u64;
    let sectors = range.is_aligned(unit) && before.1.is_multiple_of(unit) && op != IoOp::Flush;
    let unit = if sectors { unit } else { 1 };
    out.push(kind as u8 | if fua { FUA } else { 0 } | if sectors { SECTORS } else { 0 });
    number(fold(nanos.wrapping_sub(before.0)), out);
    if op == IoOp::Flush {
        return (nanos, before.1);
    }
    number(fold((range.offset / unit).wrapping_sub(before.1 / unit)), out);
    number(range.len / unit, out);
    (nanos, range.end())
}

fn fold(difference: u64) -> u64 {
    let signed = difference as i64;
    ((signed << 1) ^ (signed >> 63)) as u64
}

fn unfold(folded: u64) -> u64 {
    (folded >> 1) ^ (folded & 1).wrapping_neg()
}

fn number(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The head of a trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Head {
    /// The volume's name.
    pub volume: String,
    /// The volume's size, in bytes.
    pub size: u64,
    /// Start of the recording, in seconds since 1970.
    pub seconds: u64,
}

/// Reads a trace.
#[derive(Debug)]
pub struct OwnReader {
    /// The head; `None` before the first request is read.
    pub head: Option<Head>,
    /// Requests that the recorder dropped, according to the chunks read so far.
    pub dropped: u64,
    /// Bytes read so far.
    offset: u64,
    ready: VecDeque<TraceRequest>,
    ended: bool,
}

impl OwnReader {
    /// A reader at the start of a trace.
    pub fn new() -> Self {
        Self { head: None, dropped: 0, offset: 0, ready: VecDeque::new(), ended: false }
    }

    /// The next request; `None` at the end.
    pub fn next(&mut self, input: &mut impl BufRead) -> Result<Option<TraceRequest>, TraceError> {
        if self.head.is_none() {
            self.head = Some(self.read_head(input)?);
        }
        while self.ready.is_empty() && !self.ended {
            self.read_chunk(input)?;
        }
        Ok(self.ready.pop_front())
    }

    /// Offset of the end of the last chunk read, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    fn take<const N: usize>(
        &mut self,
        input: &mut impl Read,
        what: &str,
    ) -> Result<[u8; N], TraceError> {
        let mut bytes = [0; N];
        self.fill(input, &mut bytes, what)?;
        Ok(bytes)
    }

    fn fill(
        &mut self,
        input: &mut impl Read,
        bytes: &mut [u8],
        what: &str,
    ) -> Result<(), TraceError> {
        match input.read_exact(bytes) {
            Ok(()) => {
                self.offset += bytes.len() as u64;
                Ok(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(TraceError::bytes(self.offset, format!("it ends within {what}")))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn read_head(&mut self, input: &mut impl Read) -> Result<Head, TraceError> {
        let head: [u8; HEAD_BYTES] = self.take(input, "the head")?;
        if head[..8] != MAGIC {
            return Err(TraceError::bytes(0, "no trace of Forebay begins here"));
        }
        let version = u32_at(&head, 8);
        if version != VERSION {
            let reason = format!("version {version} of the format; this program reads {VERSION}");
            return Err(TraceError::bytes(8, reason));
        }
        if u32_at(&head, 12) != crc([&head[16..]]) {
            return Err(TraceError::bytes(12, "the head does not match its checksum"));
        }
        let len = u32::from_le_bytes(self.take(input, "the volume's name")?) as usize;
        if len > VOLUME_NAME_MAX {
            let reason = format!("a name of {len} bytes; {VOLUME_NAME_MAX} at most");
            return Err(TraceError::bytes(HEAD_BYTES as u64, reason));
        }
        let mut name = vec![0; len];
        self.fill(input, &mut name, "the volume's name")?;
        let volume = String::from_utf8_lossy(&name).into_owned();
        Ok(Head { volume, size: u64_at(&head, 16), seconds: u64_at(&head, 24) })
    }

    fn read_chunk(&mut self, input: &mut impl BufRead) -> Result<(), TraceError> {
        if input.fill_buf()?.is_empty() {
            self.ended = true;
            return Ok(());
        }
        let at = self.offset;
        let head: [u8; HEAD_BYTES] = self.take(input, "the head of a chunk")?;
        if head[..4] != CHUNK_MAGIC {
            return Err(TraceError::bytes(at, "no chunk begins here"));
        }
        let (bytes, count) = (u32_at(&head, 8) as usize, u32_at(&head, 12) as usize);
        if bytes > CHUNK_BYTES_MAX || count > CHUNK_ENTRIES_MAX {
            let reason = format!("a chunk of {count} entries in {bytes} bytes; too large");
            return Err(TraceError::bytes(at + 8, reason));
        }
        let mut entries = vec![0; bytes];
        self.fill(input, &mut entries, "a chunk")?;
        if u32_at(&head, 4) != crc([&head[8..], &entries]) {
            return Err(TraceError::bytes(at + 4, "the chunk does not match its checksum"));
        }
        self.dropped = u64_at(&head, 24);
        self.ended = count == 0;
        let mut rest = &entries[..];
        let mut before = (u64_at(&head, 16), 0);
        for _ in 0..count {
            let here = at + (HEAD_BYTES + bytes - rest.len()) as u64;
            let (request, next) = decode(&mut rest, before)
                .ok_or_else(|| TraceError::bytes(here, "this entry is not a request"))?;
            before = next;
            self.ready.push_back(request);
        }
        if !rest.is_empty() {
            let reason = format!("{} bytes after the last entry of the chunk", rest.len());
            return Err(TraceError::bytes(self.offset - rest.len() as u64, reason));
        }
        Ok(())
    }
}

fn u32_at(bytes: &[u8; HEAD_BYTES], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().expect("within a head"))
}

fn u64_at(bytes: &[u8; HEAD_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("within a head"))
}

/// Decodes the next number of `rest`.
fn read_number(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            return None;
        }
        value |= part << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn decode(rest: &mut &[u8], before: (u64, u64)) -> Option<(TraceRequest, (u64, u64))> {
    let (&kind, after) = rest.split_first()?;
    *rest = after;
    let op = *OPS.get(usize::from(kind & 7))?;
    if kind & !(7 | FUA | SECTORS) != 0 {
        return None;
    }
    let fua = kind & FUA != 0;
    let nanos = before.0.wrapping_add(unfold(read_number(rest)?));
    if op == IoOp::Flush {
        let request = TraceRequest { fua, ..TraceRequest::flush(nanos) };
        return Some((request, (nanos, before.1)));
    }
    let unit = if kind & SECTORS != 0 { SECTOR_SIZE as u64 } else { 1 };
    let offset = (before.1 / unit).wrapping_add(unfold(read_number(rest)?));
    let range =
        ByteRange::checked(offset.checked_mul(unit)?, read_number(rest)?.checked_mul(unit)?)?;
    Some((TraceRequest { nanos, op, fua, range }, (nanos, range.end())))
}
