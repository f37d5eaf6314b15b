//! Reading a segment record by record: recovery does this if a segment has no footer, the offline
//! tools if its footer is damaged too.

use forebay_codec::crc32c;
use forebay_format::{Entry, Lsn, PAGE, Record, SegmentSeq, decode_record};

/// The identity of a record, as the header of the next record gives it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// LSN of the record.
    pub lsn: Lsn,
    /// CRC of its header and entries.
    pub crc: u32,
}

/// A segment that was read record by record, up to the point where the chain breaks.
#[derive(Debug, Default)]
pub struct Scanned {
    /// The record before the first good one.
    pub before: Option<Link>,
    /// The last good record.
    pub last: Option<Link>,
    /// LSN of the first good record.
    pub first_lsn: Lsn,
    /// Entries of the good records; `first` marks the first entry of a record.
    pub entries: Vec<Entry>,
    /// Length of the good records, in bytes.
    pub used: u32,
    /// The epoch in which the last good record was written. It never decreases from record to
    /// record.
    pub epoch: u32,
    /// Whether the good records cover the segment from its beginning to the break; false if they
    /// were pieced together.
    pub is_whole: bool,
    /// The highest `start` in a good record.
    pub start: SegmentSeq,
    /// The `clean` of the last good record. It decreases when a delta is made against a clean
    /// block.
    pub clean: Lsn,
    /// The highest durable LSN in any record, including those beyond the break.
    pub durable: Lsn,
    /// Records beyond the break, in order of their places: used if the break is damage.
    pub beyond: Vec<Beyond>,
}

/// A record beyond a break of the chain.
#[derive(Debug)]
pub struct Beyond {
    /// The record.
    pub record: Record,
    /// Whether all of its payloads match their CRCs.
    pub good: bool,
}

/// The pool and shard whose records count.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The pool's ID.
    pub pool: u64,
    /// The shard's number.
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
    // Records beyond the break are not used unless the break is damage, but their `durable` counts.
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

/// The record at offset `at`, if it continues the chain and all of its payloads are good.
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
