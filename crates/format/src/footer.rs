//! The footer: the end of a sealed segment, with all entries of the segment's records. A trailer
//! fills the end of the segment's last page; the entries start at a page boundary, far enough
//! before it to fit.
//!
//! A footer is written only after a flush has covered every record of its segment. So a valid
//! footer proves that its records are durable, and recovery need not read any of them. An entry
//! marked first begins a record, so the n-th of them belongs to the n-th LSN.

use crate::bytes::{PREFIX_BYTES, Reader, Writer, crc32c, ensure_len, magic, seal};
use crate::entry::Entry;
use crate::error::{FormatError, ensure_eq, ensure_max, ensure_min};
use crate::table::{
    CELL_BYTES, ENTRY_CELLS, Entries, EntryTable, TablePosition, firsts_of, version_of,
};
use crate::{Lsn, NUMBER_MAX, PAGE, SEGMENT_SIZE_MAX, SegmentSeq};

/// Length of the trailer at the end of the segment's last page, in bytes.
pub const FOOTER_TRAILER_BYTES: usize = 128;
/// Maximum length of the entries, in cells: the longest segment cannot have held more, since its
/// records have them, too.
const CELLS_MAX: usize = SEGMENT_SIZE_MAX as usize / (2 * CELL_BYTES);

const MAGIC: u64 = magic(b"ForebayF");
/// Offset of the entry count in the trailer.
const COUNT_AT: usize = PREFIX_BYTES + 2;
/// Offset of the length of the entries in the trailer, in cells; zero without unit entries.
const CELLS_AT: usize = PREFIX_BYTES + 2 + 4 + 4 + 6 * 8 + 2 * 4;
const RESERVED_BYTES: usize = 44;

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
    /// Whether entries of blocks of one unit are encoded together.
    pub unit_entries: bool,
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
    /// Length of the entries, in cells.
    pub cells: usize,
}

impl FooterTrailer {
    /// The entries of the footer at the end of `bytes`, which have been checked against their CRC.
    ///
    /// # Panics
    /// If `bytes` are fewer than the footer has.
    #[must_use]
    pub fn entries<'a>(&self, bytes: &'a [u8]) -> Entries<'a> {
        let from = bytes.len() - self.bytes;
        let front = bytes.get(from..).expect("the footer's length was checked");
        Entries::new(front, 0..self.cells * CELL_BYTES, self.footer.unit_entries)
    }

    /// Decodes up to `most` entries from a position on; returns them with the position after them.
    ///
    /// # Errors
    /// The damaged entry.
    ///
    /// # Panics
    /// As [`FooterTrailer::entries`].
    pub fn some_entries(
        &self,
        bytes: &[u8],
        from: TablePosition,
        most: usize,
    ) -> Result<(Vec<Entry>, TablePosition), FormatError> {
        let mut found = self.entries(bytes).from(from);
        let entries = found.by_ref().take(most).collect::<Result<_, _>>()?;
        Ok((entries, found.position()))
    }
}

/// Length in bytes of a footer whose entries have this length in [cells](EntryTable::cells),
/// trailer included; a multiple of [`PAGE`].
#[must_use]
pub fn footer_bytes(cells: usize) -> usize {
    (cells * CELL_BYTES + FOOTER_TRAILER_BYTES).next_multiple_of(PAGE)
}

/// Encodes the footer of a segment with these entries over all of `buf`.
///
/// # Panics
/// If `buf` is not [`footer_bytes`] long, or the footer would not decode.
pub fn encode_footer(buf: &mut [u8], f: &Footer, table: &EntryTable) {
    let cells = table.cells();
    let bytes = footer_bytes(cells);
    assert!(buf.len() == bytes, "a footer of {bytes} bytes in a buffer of {}", buf.len());
    let units = (u64::from(table.unit_entries()), u64::from(f.unit_entries));
    let checked = ensure_eq("unit entries", PREFIX_BYTES - 2, units.0, units.1)
        .and_then(|()| check(f, table.len(), cells))
        .and_then(|()| check_firsts(f, table.firsts()));
    if let Err(error) = checked {
        panic!("the footer of {} cannot be encoded: {error}", f.seq);
    }
    let (front, trailer) = buf
        .split_at_mut_checked(bytes - FOOTER_TRAILER_BYTES)
        .expect("a footer has room for its trailer");
    let padding = front.len() - table.bytes().len();
    let mut w = Writer::new(&mut *front);
    w.put(table.bytes());
    w.zeros(padding);
    let entries_crc = crc32c(front);

    let cells = if f.unit_entries { cells } else { 0 };
    let mut w = Writer::new(&mut *trailer);
    w.prefix(MAGIC, version_of(f.unit_entries));
    w.u16(f.shard);
    w.u32(u32::try_from(table.len()).expect("the number of entries was checked"));
    w.u32(entries_crc);
    w.u64(f.pool);
    w.u64(f.seq.0);
    w.u64(f.first_lsn.0);
    w.u64(f.last_lsn.0);
    w.u64(f.start.0);
    w.u64(f.clean.0);
    w.u32(f.first_prev_crc);
    w.u32(f.last_crc);
    w.u32(u32::try_from(cells).expect("the number of cells was checked"));
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
    let (_, version) = r.prefix("footer", MAGIC, trailer, version_of(true))?;
    let unit_entries = version == version_of(true);
    let (shard, entries, entries_crc) = (r.u16()?, r.u32()?, r.u32()?);
    let (pool, seq) = (r.u64()?, SegmentSeq(r.u64()?));
    let (first_lsn, last_lsn) = (Lsn(r.u64()?), Lsn(r.u64()?));
    let (start, clean) = (SegmentSeq(r.u64()?), Lsn(r.u64()?));
    let (first_prev_crc, last_crc) = (r.u32()?, r.u32()?);
    let cells = match unit_entries {
        true => r.u32()? as usize,
        false => r.reserved(4).map(|()| (entries as usize).saturating_mul(ENTRY_CELLS))?,
    };
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
        unit_entries,
    };
    check(&footer, entries as usize, cells)?;
    Ok(FooterTrailer { footer, bytes: footer_bytes(cells), entries_crc, cells })
}

/// Decodes a whole footer at the end of `bytes`, which may be longer.
///
/// # Errors
/// As [`decode_footer_trailer`], or the damaged entry.
pub fn decode_footer(bytes: &[u8]) -> Result<(Footer, Vec<Entry>), FormatError> {
    let (FooterTrailer { footer, .. }, found) = footer_entries(bytes)?;
    let mut entries = Vec::with_capacity(footer.entries as usize);
    for entry in found {
        entries.push(entry?);
    }
    let (found, count) = (entries.len() as u64, u64::from(footer.entries));
    ensure_eq("entries of a footer", COUNT_AT, count, found)?;
    check_firsts(&footer, firsts_of(&entries))?;
    Ok((footer, entries))
}

/// Checks a whole footer at the end of `bytes`, except for its entries and their number, which it
/// returns to be decoded one by one.
///
/// # Errors
/// As [`decode_footer_trailer`], or damaged bytes of the entries.
pub fn footer_entries(bytes: &[u8]) -> Result<(FooterTrailer, Entries<'_>), FormatError> {
    let trailer = decode_footer_trailer(bytes)?;
    let FooterTrailer { bytes: len, entries_crc, cells, .. } = trailer;
    ensure_len(bytes, len)?;
    let front = bytes
        .get(bytes.len() - len..bytes.len() - FOOTER_TRAILER_BYTES)
        .expect("the footer's length was checked");
    ensure_eq("CRC of the entries", 0, u64::from(crc32c(front)), u64::from(entries_crc))?;
    let mut r = Reader::new(front);
    r.take(cells * CELL_BYTES)?;
    r.reserved(front.len() - r.at())?;
    Ok((trailer, trailer.entries(bytes)))
}

/// Checks the fields against each other; used by encoder and decoder.
fn check(f: &Footer, count: usize, cells: usize) -> Result<(), FormatError> {
    let cells_at = if f.unit_entries { CELLS_AT } else { COUNT_AT };
    ensure_max("cells of a footer", cells_at, cells as u64, CELLS_MAX as u64)?;
    let (found, most) = (count as u64, cells as u64);
    ensure_max("entries of a footer", COUNT_AT, found, most)?;
    let (first, last) = (f.first_lsn.0, f.last_lsn.0);
    ensure_min("first LSN", 40, first, 1)?;
    ensure_min("last LSN", 48, last, first - 1)?;
    ensure_max("last LSN", 48, last, NUMBER_MAX)?;
    ensure_min("segment number", 32, f.seq.0, 1)?;
    ensure_max("segment number", 32, f.seq.0, NUMBER_MAX)?;
    ensure_max("oldest live segment", 56, f.start.0, f.seq.0)?;
    ensure_min("entries of a footer", COUNT_AT, found, f.records())
}

/// Checks that the entries begin with the first entry of a record, and have as many of them as the
/// footer has records.
fn check_firsts(f: &Footer, (firsts, begins): (u64, bool)) -> Result<(), FormatError> {
    ensure_eq("entries marked first", COUNT_AT, firsts, f.records())?;
    ensure_eq("first-entry flag of the first entry", 7, u64::from(begins), 1)
}

const _: () = assert!(CELLS_AT + 4 + RESERVED_BYTES == FOOTER_TRAILER_BYTES);
