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
use crate::table::{CELL_BYTES, ENTRY_CELLS, Entries, TableLen, cells_of, put_entries, version_of};
use crate::{Lsn, NUMBER_MAX, PAGE, SEGMENT_SIZE_MAX, SegmentSeq};

/// Length of a record's header before its entries, in bytes.
pub const RECORD_HEADER_BYTES: usize = 96;
/// Maximum length of the entries in the header page, in cells.
pub const RECORD_CELLS_MAX: usize = (PAGE - RECORD_HEADER_BYTES) / CELL_BYTES;
/// Maximum number of entries in the header page, if no two of them are encoded together.
pub const RECORD_ENTRIES_MAX: usize = (PAGE - RECORD_HEADER_BYTES) / ENTRY_BYTES;

const MAGIC: u64 = magic(b"ForebayR");
/// Offset of the field that determines the bytes that the CRC covers: the number of entries or, in
/// a record with unit entries, their cells.
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
    /// Whether entries of blocks of one unit are encoded together.
    pub unit_entries: bool,
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
/// `prev_crc`. Bytes after the entries are left unchanged, since packed payloads may be there. The
/// first entry, and no other, is marked as such.
///
/// # Panics
/// If the record would not decode: the page is too short, there are no entries or too many, or
/// [`decode_record`] would reject an entry.
pub fn encode_record(page: &mut [u8], h: &RecordHeader, entries: &[Entry]) -> u32 {
    let cells = cells_of(entries, h.unit_entries);
    let covered = RECORD_HEADER_BYTES + cells * CELL_BYTES;
    assert!(page.len() >= PAGE, "a record's header needs a page, not {} bytes", page.len());
    if let Err(error) = check(h, entries, cells) {
        panic!("{} cannot be encoded: {error}", h.lsn);
    }
    let count = if h.unit_entries { cells } else { entries.len() };
    let bytes = page.get_mut(..covered).expect("the entries were checked to fit a page");
    let mut w = Writer::new(bytes);
    w.prefix(MAGIC, version_of(h.unit_entries));
    w.u16(h.shard);
    w.u16(u16::try_from(count).expect("the entries were checked to fit a page"));
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
    put_entries(&mut w, entries, h.unit_entries);
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
    let mut field = Reader::new(page);
    field.take(PREFIX_BYTES - 2)?;
    let version = field.u16()?;
    field.take(COUNT_AT - PREFIX_BYTES)?;
    let count = usize::from(field.u16()?);
    let unit_entries = version == version_of(true);
    let cells = if unit_entries { count } else { count * ENTRY_CELLS };
    ensure_fits(cells)?;
    let covered = page.get(..RECORD_HEADER_BYTES + cells * CELL_BYTES).unwrap_or(page);

    let mut r = Reader::new(page);
    let (crc, _) = r.prefix("record", MAGIC, covered, version_of(true))?;
    let (shard, _count, pages, at) = (r.u16()?, r.u16()?, r.u16()?, r.u32()?);
    let (pool, seq, lsn) = (r.u64()?, SegmentSeq(r.u64()?), Lsn(r.u64()?));
    let (durable, clean, start) = (Lsn(r.u64()?), Lsn(r.u64()?), SegmentSeq(r.u64()?));
    let (prev_crc, epoch) = (r.u32()?, r.u32()?);
    r.reserved(RESERVED_BYTES)?;
    let header = RecordHeader {
        pool,
        shard,
        seq,
        lsn,
        at,
        prev_crc,
        pages,
        durable,
        clean,
        start,
        epoch,
        unit_entries,
    };
    let table = RECORD_HEADER_BYTES..covered.len();
    let mut entries = Vec::with_capacity(count);
    for entry in Entries::new(covered, table, unit_entries) {
        entries.push(entry?);
    }
    check(&header, &entries, cells)?;
    Ok(Record { header, entries, crc })
}

fn ensure_fits(cells: usize) -> Result<(), FormatError> {
    let (found, most) = (cells as u64, RECORD_CELLS_MAX as u64);
    ensure_min("cells of a record's entries", COUNT_AT, found, ENTRY_CELLS as u64)?;
    ensure_max("cells of a record's entries", COUNT_AT, found, most)
}

/// Checks header and entries against each other; used by encoder and decoder.
fn check(h: &RecordHeader, entries: &[Entry], cells: usize) -> Result<(), FormatError> {
    ensure_fits(cells)?;
    ensure_eq("record's offset within a page", 20, u64::from(h.at) % PAGE as u64, 0)?;
    ensure_min("pages of a record", 18, u64::from(h.pages), 1)?;
    let end = u64::from(h.at) + u64::from(h.pages) * PAGE as u64;
    let limit = u64::from(SEGMENT_SIZE_MAX);
    ensure_max("end of a record", 20, end, limit)?;
    ensure_min("segment number", 32, h.seq.0, 1)?;
    ensure_max("segment number", 32, h.seq.0, NUMBER_MAX)?;
    ensure_min("LSN", 40, h.lsn.0, 1)?;
    ensure_max("LSN", 40, h.lsn.0, NUMBER_MAX)?;
    ensure_max("durable LSN", 48, h.durable.0, h.lsn.0 - 1)?;
    ensure_max("oldest live segment", 64, h.start.0, h.seq.0)?;
    let payloads = u64::from(h.at) + (RECORD_HEADER_BYTES + cells * CELL_BYTES) as u64;
    let mut len = TableLen::new(h.unit_entries);
    for (nth, entry) in entries.iter().enumerate() {
        let at = RECORD_HEADER_BYTES + len.cells() * CELL_BYTES;
        len.push_entry(entry);
        let (first, wanted) = (u64::from(entry.first), u64::from(nth == 0));
        ensure_eq("first-entry flag", at + 7, first, wanted)?;
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
    ensure_max("segments back to a payload", at + 22, u64::from(back), h.seq.0 - 1)?;
    let limit = if back == 0 { h.at } else { SEGMENT_SIZE_MAX };
    ensure_max("end of an older payload", at + 8, end, u64::from(limit))
}

const _: () =
    assert!(PREFIX_BYTES + 2 + 2 + 2 + 4 + 6 * 8 + 2 * 4 + RESERVED_BYTES == RECORD_HEADER_BYTES);
const _: () = assert!(RECORD_HEADER_BYTES + RECORD_CELLS_MAX * CELL_BYTES <= PAGE);
