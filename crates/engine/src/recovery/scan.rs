//! Reading a segment back record by record: what recovery does with one that has no footer, and
//! what the offline tools do with every one.

use forebay_codec::crc32c;
use forebay_format::{Entry, Lsn, PAGE, Record, SegmentSeq, decode_record};

/// What the record before must look like, from the record's own header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// Number of the record before.
    pub lsn: Lsn,
    /// CRC of its header.
    pub crc: u32,
}

/// A segment read record by record, up to where the chain breaks.
#[derive(Debug, Default)]
pub struct Scanned {
    /// The record before the first one.
    pub before: Option<Link>,
    /// The last good record.
    pub last: Option<Link>,
    /// First LSN.
    pub first_lsn: Lsn,
    /// Entries of the good records; `first` marks where a record begins.
    pub entries: Vec<Entry>,
    /// Bytes of the good records.
    pub used: u32,
    /// The start of the server after which the last one was written. It never falls from record to
    /// record.
    pub epoch: u32,
    /// They are all there is, from the segment's beginning to the break: none was pieced together.
    pub is_whole: bool,
    /// The highest start that a good record tells.
    pub start: SegmentSeq,
    /// What the last good record says: it falls when a delta is made against what was clean.
    pub clean: Lsn,
    /// The highest durable LSN that any record tells, also beyond the break.
    pub durable: Lsn,
    /// Records beyond the break, in the order of their places: of use where the break is damage.
    pub beyond: Vec<Beyond>,
}

/// A record behind a break of the chain.
#[derive(Debug)]
pub struct Beyond {
    /// The record.
    pub record: Record,
    /// Whether all of its payloads match their CRCs.
    pub good: bool,
}

/// Whose records count.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The pool.
    pub pool: u64,
    /// The shard.
    pub shard: u16,
}

/// Reads the records of segment `seq` from its bytes.
pub fn scan_segment(bytes: &[u8], owner: Owner, seq: SegmentSeq) -> Scanned {
    let mut out = Scanned { is_whole: true, ..Scanned::default() };
    let mut at = 0;
    while let Some(record) = good_record(bytes, at, owner, seq, out.last) {
        let Record { header, entries, crc } = record;
        if out.last.is_none() {
            out.first_lsn = header.lsn;
            out.before = Some(Link { lsn: Lsn(header.lsn.0 - 1), crc: header.prev_crc });
        }
        out.last = Some(Link { lsn: header.lsn, crc });
        out.start = out.start.max(header.start);
        out.clean = header.clean;
        out.epoch = header.epoch;
        out.durable = out.durable.max(header.durable);
        out.entries.extend(entries);
        at += usize::from(header.pages) * PAGE;
        out.used = at as u32;
    }
    // Beyond the break nothing is used unless the break is damage; what the records there know of
    // durability tells.
    for (i, page) in bytes.chunks_exact(PAGE).enumerate().skip(at / PAGE) {
        if let Ok(record) = decode_record(page)
            && is_ours(&record, owner, seq)
        {
            out.durable = out.durable.max(record.header.durable);
            if record.header.at as usize == i * PAGE {
                let good = has_good_payloads(&record, bytes);
                out.beyond.push(Beyond { record, good });
            }
        }
    }
    out
}

fn is_ours(record: &Record, owner: Owner, seq: SegmentSeq) -> bool {
    let header = &record.header;
    header.pool == owner.pool && header.shard == owner.shard && header.seq == seq
}

/// The record at `at`, if it continues the chain and all of its payloads are good.
fn good_record(
    bytes: &[u8],
    at: usize,
    owner: Owner,
    seq: SegmentSeq,
    last: Option<Link>,
) -> Option<Record> {
    let record = decode_record(bytes.get(at..at + PAGE)?).ok()?;
    let header = &record.header;
    let linked =
        last.is_none_or(|last| header.lsn == last.lsn.next() && header.prev_crc == last.crc);
    if !is_ours(&record, owner, seq) || header.at as usize != at || header.lsn.0 == 0 || !linked {
        return None;
    }
    has_good_payloads(&record, bytes).then_some(record)
}

fn has_good_payloads(record: &Record, segment: &[u8]) -> bool {
    record.entries.iter().filter(|entry| entry.has_own_payload()).all(|entry| {
        let start = entry.offset as usize;
        let payload = segment.get(start..start + usize::from(entry.len));
        payload.is_some_and(|payload| crc32c(payload) == entry.crc)
    })
}
