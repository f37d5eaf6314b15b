//! A record: one append to a shard's log. It consists of a header page (header, entries, and packed
//! payloads after them), then the page-aligned payloads.
//!
//! The records of a shard form a chain: consecutive LSNs, each with the CRC of the previous header,
//! so that a record of an earlier lap, or one after a torn record, is not mistaken for the next.
//! The header's CRC covers header and entries. Each payload has its own CRC in its entry, which
//! this file does not check.

use crate::bytes::{PREFIX_BYTES, Reader, Writer, check_magic, ensure_len, magic, seal};
use crate::entry::{ENTRY_BYTES, Entry};
use crate::error::{FormatError, ensure_eq, ensure_max, ensure_min};
use crate::{Lsn, PAGE, SEGMENT_SIZE_MAX, SegmentSeq};

/// Length of a record's header before its entries, in bytes.
pub const RECORD_HEADER_BYTES: usize = 96;
/// Maximum number of entries in the header page.
pub const RECORD_ENTRIES_MAX: usize = (PAGE - RECORD_HEADER_BYTES) / ENTRY_BYTES;

const MAGIC: u64 = magic(b"ForebayR");
/// Offset of the entry count, which determines the bytes that the CRC covers.
const COUNT_AT: usize = PREFIX_BYTES + 2;
const RESERVED_BYTES: usize = 16;

/// The fields of a record's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordHeader {
    /// Number of the pool that the log belongs to.
    pub pool: u64,
    /// Number of the shard that the log belongs to.
    pub shard: u16,
    /// Segment that contains the record.
    pub seq: SegmentSeq,
    /// LSN of the record.
    pub lsn: Lsn,
    /// Start of the record, in bytes from the start of its segment; a multiple of [`PAGE`].
    pub at: u32,
    /// CRC of the previous header in the log, even if that is in another segment.
    pub prev_crc: u32,
    /// Length of the record in pages, including the header page.
    pub pages: u16,
    /// Highest LSN known to be durable when the record was written.
    pub durable: Lsn,
    /// Every entry of a record with a lower LSN is clean.
    pub clean: Lsn,
    /// Oldest live segment.
    pub start: SegmentSeq,
    /// Number of the server run that wrote the record.
    pub epoch: u32,
}

/// A decoded record, without its payloads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Its header.
    pub header: RecordHeader,
    /// Its entries, at least one.
    pub entries: Vec<Entry>,
    /// CRC of header and entries: the next record's `prev_crc`.
    pub crc: u32,
}

/// Writes header and entries to the front of `page` and returns their CRC, the next record's
/// `prev_crc`. Bytes after the entries are left unchanged, since packed payloads may be there.
///
/// # Panics
/// If the record would not decode: the page is too short, there are no entries or too many, or
/// [`decode_record`] would reject an entry.
pub fn encode_record(page: &mut [u8], h: &RecordHeader, entries: &[Entry]) -> u32 {
    let covered = RECORD_HEADER_BYTES + entries.len() * ENTRY_BYTES;
    assert!(page.len() >= PAGE, "a record's header needs a page, not {} bytes", page.len());
    if let Err(error) = check(h, entries.iter(), entries.len()) {
        panic!("{} cannot be encoded: {error}", h.lsn);
    }
    let bytes = page.get_mut(..covered).expect("the entries were checked to fit a page");
    let mut w = Writer::new(bytes);
    w.prefix(MAGIC);
    w.u16(h.shard);
    w.u16(u16::try_from(entries.len()).expect("the entries were checked to fit a page"));
    w.u16(h.pages);
    w.u32(h.at);
    w.u64(h.pool);
    w.u64(h.seq.0);
    w.u64(h.lsn.0);
    w.u64(h.durable.0);
    w.u64(h.clean.0);
    w.u64(h.start.0);
    w.u32(h.prev_crc);
    w.u32(h.epoch);
    w.zeros(RESERVED_BYTES);
    for (index, entry) in entries.iter().enumerate() {
        Entry { first: index == 0, ..*entry }.put(&mut w);
    }
    seal(bytes)
}

/// Decodes a record from its first page; checks its CRC, and its entries against its length. The
/// payloads are not read.
///
/// # Errors
/// [`FormatError::is_absent`] if no record was ever written there; otherwise the damaged field.
pub fn decode_record(page: &[u8]) -> Result<Record, FormatError> {
    ensure_len(page, PAGE)?;
    let page = page.get(..PAGE).unwrap_or(page);
    check_magic("record", Reader::new(page).u64()?, MAGIC, page)?;
    let mut count = Reader::new(page);
    count.take(COUNT_AT)?;
    let count = usize::from(count.u16()?);
    ensure_count(count)?;
    let covered = page.get(..RECORD_HEADER_BYTES + count * ENTRY_BYTES).unwrap_or(page);

    let mut r = Reader::new(page);
    let crc = r.prefix("record", MAGIC, covered)?;
    let (shard, _count, pages, at) = (r.u16()?, r.u16()?, r.u16()?, r.u32()?);
    let (pool, seq, lsn) = (r.u64()?, SegmentSeq(r.u64()?), Lsn(r.u64()?));
    let (durable, clean, start) = (Lsn(r.u64()?), Lsn(r.u64()?), SegmentSeq(r.u64()?));
    let (prev_crc, epoch) = (r.u32()?, r.u32()?);
    r.reserved(RESERVED_BYTES)?;
    let header =
        RecordHeader { pool, shard, seq, lsn, at, prev_crc, pages, durable, clean, start, epoch };
    let mut entries = Vec::with_capacity(count);
    for index in 0..count {
        let entry = Entry::take(&mut r)?;
        let first = index == 0;
        let flag_at = r.at() - ENTRY_BYTES + 7;
        ensure_eq("first-entry flag", flag_at, u64::from(entry.first), u64::from(first))?;
        entries.push(entry);
    }
    check(&header, entries.iter(), count)?;
    Ok(Record { header, entries, crc })
}

fn ensure_count(count: usize) -> Result<(), FormatError> {
    let (found, most) = (count as u64, RECORD_ENTRIES_MAX as u64);
    ensure_min("entries of a record", COUNT_AT, found, 1)?;
    ensure_max("entries of a record", COUNT_AT, found, most)
}

/// Checks header and entries against each other; used by encoder and decoder.
fn check<'a>(
    h: &RecordHeader,
    entries: impl Iterator<Item = &'a Entry>,
    count: usize,
) -> Result<(), FormatError> {
    ensure_count(count)?;
    ensure_eq("record's offset within a page", 20, u64::from(h.at) % PAGE as u64, 0)?;
    ensure_min("pages of a record", 18, u64::from(h.pages), 1)?;
    let end = u64::from(h.at) + u64::from(h.pages) * PAGE as u64;
    let limit = u64::from(SEGMENT_SIZE_MAX);
    ensure_max("end of a record", 20, end, limit)?;
    ensure_max("segment number", 32, h.seq.0, u64::MAX - 1)?;
    ensure_min("LSN", 40, h.lsn.0, 1)?;
    ensure_max("LSN", 40, h.lsn.0, u64::MAX - 1)?;
    ensure_max("durable LSN", 48, h.durable.0, h.lsn.0 - 1)?;
    ensure_max("oldest live segment", 64, h.start.0, h.seq.0)?;
    let payloads = u64::from(h.at) + (RECORD_HEADER_BYTES + count * ENTRY_BYTES) as u64;
    for (index, entry) in entries.enumerate() {
        let at = RECORD_HEADER_BYTES + index * ENTRY_BYTES;
        entry.check(at)?;
        let (start, stop) = (u64::from(entry.offset), entry.payload_end());
        if entry.has_own_payload() {
            ensure_min("start of a payload", at + 8, start, payloads)?;
            ensure_max("end of a payload", at + 8, stop, end)?;
        }
        if let Some(back) = entry.shared {
            check_older(h, at, back, stop)?;
        }
        if let Some(base) = entry.base {
            check_older(h, at, base.back, base.end())?;
        }
    }
    Ok(())
}

/// Checks that a payload of an older record, which the entry at `at` refers to, lies in an earlier
/// segment or before this record.
fn check_older(h: &RecordHeader, at: usize, back: u16, end: u64) -> Result<(), FormatError> {
    ensure_max("segments back to a payload", at + 22, u64::from(back), h.seq.0)?;
    let limit = if back == 0 { h.at } else { SEGMENT_SIZE_MAX };
    ensure_max("end of an older payload", at + 8, end, u64::from(limit))
}

const _: () =
    assert!(PREFIX_BYTES + 2 + 2 + 2 + 4 + 6 * 8 + 2 * 4 + RESERVED_BYTES == RECORD_HEADER_BYTES);
const _: () = assert!(RECORD_HEADER_BYTES + RECORD_ENTRIES_MAX * ENTRY_BYTES <= PAGE);
