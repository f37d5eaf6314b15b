//! The footer: the end of a sealed segment, with all entries of the segment's records. A trailer
//! fills the end of the segment's last page; the entries start at a page boundary, far enough
//! before it to fit.
//!
//! A footer is written only after a flush has covered every record of its segment. So a valid
//! footer proves that its records are durable, and recovery need not read any of them. An entry
//! marked first begins a record, so the n-th of them belongs to the n-th LSN.

use crate::bytes::{PREFIX_BYTES, Reader, Writer, crc32c, ensure_len, magic, seal};
use crate::entry::{ENTRY_BYTES, Entry};
use crate::error::{FormatError, ensure_eq, ensure_max, ensure_min};
use crate::{Lsn, PAGE, SEGMENT_SIZE_MAX, SegmentSeq};

/// Length of the trailer at the end of the segment's last page, in bytes.
pub const FOOTER_TRAILER_BYTES: usize = 128;
/// Maximum number of entries: the longest segment cannot have held more.
pub const FOOTER_ENTRIES_MAX: usize = SEGMENT_SIZE_MAX as usize / (2 * ENTRY_BYTES);

const MAGIC: u64 = magic(b"ForebayF");
/// Offset of the entry count in the trailer.
const COUNT_AT: usize = PREFIX_BYTES + 2;
const RESERVED_BYTES: usize = 48;

/// The fields of a footer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footer {
    /// Number of the pool that the log belongs to.
    pub pool: u64,
    /// Number of the shard that the log belongs to.
    pub shard: u16,
    /// Number of the segment.
    pub seq: SegmentSeq,
    /// LSN of its first record.
    pub first_lsn: Lsn,
    /// LSN of its last record; the LSN before `first_lsn` if it has none.
    pub last_lsn: Lsn,
    /// CRC of the last record's header: the next segment's first `prev_crc`.
    pub last_crc: u32,
    /// The first record's `prev_crc`.
    pub first_prev_crc: u32,
    /// Oldest live segment when the footer was written.
    pub start: SegmentSeq,
    /// Every entry of a record with a lower LSN is clean.
    pub clean: Lsn,
    /// Number of entries. [`encode_footer`] sets it from the entries.
    pub entries: u32,
}

impl Footer {
    /// Number of records in the segment.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.last_lsn.next().0.saturating_sub(self.first_lsn.0)
    }
}

/// A decoded trailer: the footer's fields, and the length of the footer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FooterTrailer {
    /// The footer's fields.
    pub footer: Footer,
    /// Length of the whole footer in bytes, counted back from the segment's end; a multiple of
    /// [`PAGE`]. The caller checks that it fits the segment.
    pub bytes: usize,
    /// CRC32C of all bytes before the trailer.
    pub entries_crc: u32,
}

/// Length in bytes of a footer with `entries` entries, trailer included; a multiple of [`PAGE`].
#[must_use]
pub fn footer_bytes(entries: usize) -> usize {
    (entries * ENTRY_BYTES + FOOTER_TRAILER_BYTES).next_multiple_of(PAGE)
}

/// Encodes a footer over all of `buf`.
///
/// # Panics
/// If `buf` is not [`footer_bytes`] long, or the footer would not decode.
pub fn encode_footer(buf: &mut [u8], f: &Footer, entries: &[Entry]) {
    let bytes = footer_bytes(entries.len());
    assert!(buf.len() == bytes, "a footer of {bytes} bytes in a buffer of {}", buf.len());
    let firsts = entries.iter().filter(|entry| entry.first).count();
    if let Err(error) = check(f, entries.len()).and_then(|()| check_firsts(f, entries, firsts)) {
        panic!("the footer of {} cannot be encoded: {error}", f.seq);
    }
    let (front, trailer) = buf
        .split_at_mut_checked(bytes - FOOTER_TRAILER_BYTES)
        .expect("a footer has room for its trailer");
    let padding = front.len() - entries.len() * ENTRY_BYTES;
    let mut w = Writer::new(&mut *front);
    for (index, entry) in entries.iter().enumerate() {
        if let Err(error) = entry.check(index * ENTRY_BYTES) {
            panic!("the footer of {} cannot be encoded: {error}", f.seq);
        }
        entry.put(&mut w);
    }
    w.zeros(padding);
    let entries_crc = crc32c(front);

    let mut w = Writer::new(&mut *trailer);
    w.prefix(MAGIC);
    w.u16(f.shard);
    w.u32(u32::try_from(entries.len()).expect("the number of entries was checked"));
    w.u32(entries_crc);
    w.u64(f.pool);
    w.u64(f.seq.0);
    w.u64(f.first_lsn.0);
    w.u64(f.last_lsn.0);
    w.u64(f.start.0);
    w.u64(f.clean.0);
    w.u32(f.first_prev_crc);
    w.u32(f.last_crc);
    w.zeros(RESERVED_BYTES);
    seal(trailer);
}

/// Decodes the trailer from the segment's last page.
///
/// # Errors
/// [`FormatError::is_absent`] if no footer was ever written there; otherwise the damaged field.
pub fn decode_footer_trailer(last_page: &[u8]) -> Result<FooterTrailer, FormatError> {
    ensure_len(last_page, PAGE)?;
    let trailer = last_page
        .get(last_page.len() - FOOTER_TRAILER_BYTES..)
        .expect("a page is longer than a trailer");
    let mut r = Reader::new(trailer);
    r.prefix("footer", MAGIC, trailer)?;
    let (shard, entries, entries_crc) = (r.u16()?, r.u32()?, r.u32()?);
    let (pool, seq) = (r.u64()?, SegmentSeq(r.u64()?));
    let (first_lsn, last_lsn) = (Lsn(r.u64()?), Lsn(r.u64()?));
    let (start, clean) = (SegmentSeq(r.u64()?), Lsn(r.u64()?));
    let (first_prev_crc, last_crc) = (r.u32()?, r.u32()?);
    r.reserved(RESERVED_BYTES)?;
    let footer = Footer {
        pool,
        shard,
        seq,
        first_lsn,
        last_lsn,
        last_crc,
        first_prev_crc,
        start,
        clean,
        entries,
    };
    let count = entries as usize;
    check(&footer, count)?;
    Ok(FooterTrailer { footer, bytes: footer_bytes(count), entries_crc })
}

/// Decodes a whole footer; `bytes` end at the end of the segment.
///
/// # Errors
/// As [`decode_footer_trailer`], and when the entries do not match the trailer.
pub fn decode_footer(bytes: &[u8]) -> Result<(Footer, Vec<Entry>), FormatError> {
    let (footer, found) = footer_entries(bytes)?;
    let mut entries = Vec::with_capacity(footer.entries as usize);
    for entry in found {
        entries.push(entry?);
    }
    let firsts = entries.iter().filter(|entry| entry.first).count();
    check_firsts(&footer, &entries, firsts)?;
    Ok((footer, entries))
}

/// Decodes a footer but for its entries, of which the checksum is verified; `bytes` end at the end
/// of the segment.
///
/// # Errors
/// As [`decode_footer_trailer`], and when the bytes of the entries do not match the trailer.
pub fn footer_entries(bytes: &[u8]) -> Result<(Footer, FooterEntries<'_>), FormatError> {
    let FooterTrailer { footer, bytes: len, entries_crc } = decode_footer_trailer(bytes)?;
    ensure_len(bytes, len)?;
    let front = bytes
        .get(bytes.len() - len..bytes.len() - FOOTER_TRAILER_BYTES)
        .expect("the footer's length was checked");
    ensure_eq("CRC of the entries", 0, u64::from(crc32c(front)), u64::from(entries_crc))?;
    let mut r = Reader::new(front);
    r.take(footer.entries as usize * ENTRY_BYTES)?;
    r.reserved(front.len() - r.at())?;
    Ok((footer, FooterEntries::of(bytes, footer.entries, 0)))
}

/// The entries of a footer, decoded one at a time.
#[derive(Clone, Debug)]
pub struct FooterEntries<'a> {
    reader: Reader<'a>,
}

impl<'a> FooterEntries<'a> {
    /// The entries, without the first `skipped`, of a footer of `entries` entries that
    /// [`footer_entries`] has verified; `bytes` are the same as there.
    ///
    /// # Panics
    /// If `bytes` are fewer than the footer has.
    #[must_use]
    pub fn of(bytes: &'a [u8], entries: u32, skipped: u32) -> Self {
        let count = entries as usize;
        let from = bytes.len() - footer_bytes(count);
        let from = from + skipped.min(entries) as usize * ENTRY_BYTES;
        let to = bytes.len() - footer_bytes(count) + count * ENTRY_BYTES;
        let entries = bytes.get(from..to).expect("the footer's length was checked");
        Self { reader: Reader::new(entries) }
    }
}

impl Iterator for FooterEntries<'_> {
    type Item = Result<Entry, FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        (!self.reader.is_at_end()).then(|| Entry::take(&mut self.reader))
    }
}

fn check(f: &Footer, count: usize) -> Result<(), FormatError> {
    let (found, most) = (count as u64, FOOTER_ENTRIES_MAX as u64);
    ensure_max("entries of a footer", COUNT_AT, found, most)?;
    let (first, last) = (f.first_lsn.0, f.last_lsn.0);
    ensure_min("first LSN", 40, first, 1)?;
    ensure_min("last LSN", 48, last, first - 1)?;
    ensure_max("last LSN", 48, last, u64::MAX - 1)?;
    ensure_max("segment number", 32, f.seq.0, u64::MAX - 1)?;
    ensure_max("oldest live segment", 56, f.start.0, f.seq.0)?;
    ensure_min("entries of a footer", COUNT_AT, found, f.records())
}

/// Checks that every record begins with an entry marked first, and no entry precedes the first
/// record.
fn check_firsts(f: &Footer, entries: &[Entry], firsts: usize) -> Result<(), FormatError> {
    ensure_eq("entries marked first", COUNT_AT, firsts as u64, f.records())?;
    let begins = entries.first().is_none_or(|entry| entry.first);
    ensure_eq("first-entry flag of the first entry", 7, u64::from(begins), 1)
}

const _: () =
    assert!(PREFIX_BYTES + 2 + 4 + 4 + 6 * 8 + 2 * 4 + RESERVED_BYTES == FOOTER_TRAILER_BYTES);
