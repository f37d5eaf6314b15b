//! Rewrites records and footers on their way to the cache device, with valid checksums: as an
//! engine would write them that has a mistake in how it encodes or reads its log.

use std::collections::BTreeMap;

use forebay_block::{Io, SECTOR_SIZE};
use forebay_codec::crc32c;
use forebay_format::{
    Entry, EntryKind, Lsn, PAGE, decode_footer, decode_footer_trailer, decode_record,
    encode_footer, encode_record,
};

/// What is changed in every entry or header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Forgery {
    /// Dirty entries are marked clean.
    Clean,
    /// Invalidations are of a volume that does not exist.
    NoInvalidations,
    /// Deltas are of a volume that does not exist.
    NoDeltas,
    /// Blocks stored against similar ones are of a volume that does not exist.
    NoSimilar,
    /// Entries that share a payload are of a volume that does not exist.
    NoDuplicates,
    /// Everything before the record is said to be clean.
    AllClean,
    /// Entries with a payload are of the next block.
    NextBlock,
}

/// Whether this is a footer on its way to the device.
pub fn is_footer(buf: &[u8]) -> bool {
    buf.len() >= PAGE && decode_footer_trailer(&buf[buf.len() - PAGE..]).is_ok()
}

/// Turns the order of the records round in a footer that was read. Returns whether it was one.
pub fn backwards(buf: &mut [u8]) -> bool {
    let Ok((footer, entries)) = decode_footer(buf) else { return false };
    let records: Vec<&[Entry]> = entries.chunk_by(|_, next| !next.first).collect();
    let turned: Vec<Entry> = records.into_iter().rev().flatten().copied().collect();
    encode_footer(buf, &footer, &turned);
    records_differ(&entries, &turned)
}

/// Makes the checksums of a torn record, in a segment that was read, fit what is there. Returns
/// whether there was one.
pub fn accept_torn(segment: &mut [u8]) -> bool {
    let mut at = 0;
    while let Some(Ok(mut record)) = segment.get(at..at + PAGE).map(decode_record) {
        if record.header.at as usize != at || record.header.pages == 0 {
            return false;
        }
        let mut torn = false;
        for entry in record.entries.iter_mut().filter(|entry| entry.has_own_payload()) {
            let from = entry.offset as usize;
            let Some(payload) = segment.get(from..from + usize::from(entry.len)) else {
                return false;
            };
            let crc = crc32c(payload);
            torn |= crc != entry.crc;
            entry.crc = crc;
        }
        if torn {
            encode_record(&mut segment[at..at + PAGE], &record.header, &record.entries);
            return true;
        }
        at += usize::from(record.header.pages) * PAGE;
    }
    false
}

fn records_differ(one: &[Entry], other: &[Entry]) -> bool {
    one.iter().zip(other).any(|(a, b)| (a.volume, a.block) != (b.volume, b.block))
}

/// Forges, and keeps the chain of checksums whole.
#[derive(Debug)]
pub struct Forger {
    forgery: Forgery,
    /// From the checksum that the engine knows to that on the device, by shard.
    crcs: BTreeMap<(u16, u32), u32>,
}

impl Forger {
    /// A forger of this kind.
    #[must_use]
    pub fn new(forgery: Forgery) -> Self {
        Self { forgery, crcs: BTreeMap::new() }
    }

    /// After a crash the engine knows what it finds on the device.
    pub fn crash(&mut self) {
        self.crcs.clear();
    }

    /// Changes what is about to be written. Returns whether something was changed.
    pub fn forge(&mut self, io: &mut Io) -> bool {
        debug_assert!(io.range.is_aligned(SECTOR_SIZE as u64));
        if io.buf.len() < PAGE {
            return false;
        }
        self.record(io).or_else(|| self.footer(io)).unwrap_or(false)
    }

    fn record(&mut self, io: &mut Io) -> Option<bool> {
        let mut record = decode_record(&io.buf[..PAGE]).ok()?;
        let shard = record.header.shard;
        let mut changed = self.entries(&mut record.entries);
        if self.forgery == Forgery::AllClean && record.header.clean < record.header.lsn {
            record.header.clean = record.header.lsn;
            changed = true;
        }
        record.header.prev_crc = self.known(shard, record.header.prev_crc);
        let crc = encode_record(&mut io.buf[..PAGE], &record.header, &record.entries);
        self.crcs.insert((shard, record.crc), crc);
        Some(changed)
    }

    fn footer(&mut self, io: &mut Io) -> Option<bool> {
        let from = io.buf.len() - PAGE;
        decode_footer_trailer(&io.buf[from..]).ok()?;
        let (mut footer, mut entries) = decode_footer(&io.buf).ok()?;
        let changed = self.entries(&mut entries);
        if self.forgery == Forgery::AllClean {
            footer.clean = Lsn(footer.last_lsn.0.max(footer.clean.0));
        }
        footer.last_crc = self.known(footer.shard, footer.last_crc);
        footer.first_prev_crc = self.known(footer.shard, footer.first_prev_crc);
        encode_footer(&mut io.buf, &footer, &entries);
        Some(changed)
    }

    fn known(&self, shard: u16, crc: u32) -> u32 {
        self.crcs.get(&(shard, crc)).copied().unwrap_or(crc)
    }

    fn entries(&self, entries: &mut [Entry]) -> bool {
        let mut changed = false;
        for entry in entries {
            match self.forgery {
                Forgery::Clean if entry.dirty => entry.dirty = false,
                Forgery::NoInvalidations if entry.kind == EntryKind::Invalidate => {
                    entry.volume.0 = 63;
                }
                Forgery::NoDeltas if entry.kind == EntryKind::Delta => entry.volume.0 = 63,
                Forgery::NoSimilar if entry.base.is_some() => entry.volume.0 = 63,
                Forgery::NoDuplicates if entry.shared.is_some() => entry.volume.0 = 63,
                Forgery::NextBlock if entry.kind.has_payload() => entry.block += 1,
                _ => continue,
            }
            changed = true;
        }
        changed
    }
}
