//! Rewrites records and footers on their way to the cache device, with valid checksums, as an
//! engine would write them that encodes or reads its log incorrectly.

use std::collections::{BTreeMap, BTreeSet};

use forebay_block::{Io, SECTOR_SIZE, VolumeId};
use forebay_codec::crc32c;
use forebay_format::{
    Entry, EntryKind, EntryTable, Lsn, PAGE, SegmentSeq, decode_footer, decode_footer_trailer,
    decode_record, encode_footer, encode_record,
};

/// The change to every entry or header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Forgery {
    /// Dirty entries are marked clean.
    Clean,
    /// Invalidations name a volume that does not exist.
    NoInvalidations,
    /// Deltas name a volume that does not exist.
    NoDeltas,
    /// Blocks stored against similar ones name a volume that does not exist.
    NoSimilar,
    /// Entries that share a payload name a volume that does not exist.
    NoDuplicates,
    /// Records claim that everything before them is clean.
    AllClean,
    /// Entries with a payload name the next block.
    NextBlock,
    /// Entries that name a block of the store again name a volume that does not exist.
    NoSecondMappings,
    /// Entries of blocks in the store name the neighboring page.
    NextPage,
    /// Invalidations of blocks in the store name a volume that does not exist.
    NoEvictions,
    /// Dirty entries of blocks in the store are marked clean.
    CleanStored,
}

/// Whether this is a footer on its way to the device.
pub fn is_footer(buf: &[u8]) -> bool {
    buf.len() >= PAGE && decode_footer_trailer(&buf[buf.len() - PAGE..]).is_ok()
}

/// Reverses the order of the records in a footer that was read. Returns whether it was a footer.
pub fn backwards(buf: &mut [u8]) -> bool {
    let Ok((footer, entries)) = decode_footer(buf) else { return false };
    let records: Vec<&[Entry]> = entries.chunk_by(|_, next| !next.first).collect();
    let turned: Vec<Entry> = records.into_iter().rev().flatten().copied().collect();
    encode_footer(buf, &footer, &EntryTable::of(footer.unit_entries, &turned));
    records_differ(&entries, &turned)
}

/// Gives a torn record in a segment that was read checksums that match its content. Returns whether
/// there was one.
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

/// Forges entries, and keeps the chain of checksums valid.
#[derive(Debug)]
pub struct Forger {
    forgery: Forgery,
    segment_size: u32,
    memory: Memory,
    /// For each shard, maps checksums as the engine knows them to those on the device.
    crcs: BTreeMap<(u16, u32), u32>,
}

impl Forger {
    /// Creates a forger of this kind.
    #[must_use]
    pub fn new(forgery: Forgery, segment_size: u32) -> Self {
        Self { forgery, segment_size, memory: Memory::default(), crcs: BTreeMap::new() }
    }

    /// Forgets the mapping: after a crash the engine knows only the checksums on the device.
    pub fn crash(&mut self) {
        self.crcs.clear();
        self.memory.crash();
    }

    /// Changes a buffer before it is written. Returns whether anything changed.
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
        let header = &record.header;
        self.memory.note(self.forgery, (shard, header.lsn), header.seq, &record.entries);
        let mut changed = self.entries((shard, header.lsn), &mut record.entries);
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
        let changed = self.entries((footer.shard, footer.first_lsn), &mut entries);
        if self.forgery == Forgery::AllClean {
            footer.clean = Lsn(footer.last_lsn.0.max(footer.clean.0));
        }
        footer.last_crc = self.known(footer.shard, footer.last_crc);
        footer.first_prev_crc = self.known(footer.shard, footer.first_prev_crc);
        let entries = EntryTable::of(footer.unit_entries, &entries);
        encode_footer(&mut io.buf, &footer, &entries);
        Some(changed)
    }

    fn known(&self, shard: u16, crc: u32) -> u32 {
        self.crcs.get(&(shard, crc)).copied().unwrap_or(crc)
    }

    /// Changes the entries of records, the first of which is `first`.
    fn entries(&self, (shard, first): (u16, Lsn), entries: &mut [Entry]) -> bool {
        let mut changed = false;
        let (mut lsn, mut ordinal) = (first, 0);
        for (i, entry) in entries.iter_mut().enumerate() {
            (lsn, ordinal) = match entry.first && i > 0 {
                true => (lsn.next(), 0),
                false => (lsn, ordinal + usize::from(i > 0)),
            };
            match self.forgery {
                Forgery::Clean if entry.dirty => entry.dirty = false,
                Forgery::CleanStored if entry.dirty && entry.stored.is_some() => {
                    entry.dirty = false;
                }
                Forgery::NoInvalidations if entry.kind == EntryKind::Invalidate => {
                    entry.volume.0 = 63;
                }
                Forgery::NoDeltas if entry.kind == EntryKind::Delta => entry.volume.0 = 63,
                Forgery::NoSimilar if entry.base.is_some() => entry.volume.0 = 63,
                Forgery::NoDuplicates if entry.shared.is_some() => entry.volume.0 = 63,
                Forgery::NextBlock if entry.kind.has_payload() => entry.block += 1,
                Forgery::NextPage => match neighbor(entry, self.segment_size) {
                    Some(offset) => entry.offset = offset,
                    None => continue,
                },
                Forgery::NoSecondMappings | Forgery::NoEvictions
                    if self.memory.has(shard, lsn, ordinal) =>
                {
                    entry.volume.0 = 63;
                }
                _ => continue,
            }
            changed = true;
        }
        changed
    }
}

/// The offset of an entry's payload if it began in the neighboring page of its extent, if it is in
/// the store.
fn neighbor(entry: &Entry, segment_size: u32) -> Option<u32> {
    let offset = entry.stored.map(|_| entry.offset ^ PAGE as u32)?;
    (offset + u32::from(entry.len) <= segment_size).then_some(offset)
}

/// What the log has said about blocks of the store, as far as later forgeries depend on it.
#[derive(Debug, Default)]
struct Memory {
    /// The place of each block in the store, and the segment that named it there first.
    named: BTreeMap<(VolumeId, u64), ((u32, u32), SegmentSeq)>,
    /// Whether the newest version of a block is in the store; otherwise it is in the log.
    stored: BTreeMap<(VolumeId, u64), bool>,
    /// Entries that are changed, by shard, record and position: a footer repeats them.
    chosen: BTreeSet<(u16, Lsn, usize)>,
}

impl Memory {
    /// Chooses the entries of a record that are changed.
    fn note(
        &mut self,
        forgery: Forgery,
        (shard, lsn): (u16, Lsn),
        seq: SegmentSeq,
        entries: &[Entry],
    ) {
        if !matches!(forgery, Forgery::NoSecondMappings | Forgery::NoEvictions) {
            return;
        }
        for (ordinal, entry) in entries.iter().enumerate() {
            let chosen = match forgery {
                Forgery::NoSecondMappings => self.is_second(seq, entry),
                _ => self.is_eviction(entry),
            };
            match chosen {
                true => self.chosen.insert((shard, lsn, ordinal)),
                false => self.chosen.remove(&(shard, lsn, ordinal)),
            };
        }
    }

    /// Whether an entry names a block of the store where an earlier segment has named it.
    fn is_second(&mut self, seq: SegmentSeq, entry: &Entry) -> bool {
        // The base of a delta stays.
        if matches!(entry.kind, EntryKind::Checkpoint | EntryKind::Delta) {
            return false;
        }
        let Some(unit) = entry.stored else {
            for block in entry.block..entry.block + u64::from(entry.count) {
                self.named.remove(&(entry.volume, block));
            }
            return false;
        };
        let (block, at) = ((entry.volume, entry.block), (unit.extent, entry.offset));
        match self.named.get(&block) {
            Some(&(before, first)) if before == at => first < seq,
            _ => {
                self.named.insert(block, (at, seq));
                false
            }
        }
    }

    /// Whether an entry invalidates blocks of the store, and none of the log.
    fn is_eviction(&mut self, entry: &Entry) -> bool {
        let keys =
            (entry.block..entry.block + u64::from(entry.count)).map(|block| (entry.volume, block));
        match entry.kind {
            EntryKind::Checkpoint => false,
            EntryKind::Invalidate => {
                let known: Vec<bool> = keys.filter_map(|key| self.stored.remove(&key)).collect();
                !known.is_empty() && known.into_iter().all(|stored| stored)
            }
            _ => {
                self.stored.extend(keys.map(|key| (key, entry.stored.is_some())));
                false
            }
        }
    }

    fn has(&self, shard: u16, lsn: Lsn, ordinal: usize) -> bool {
        self.chosen.contains(&(shard, lsn, ordinal))
    }

    /// Forgets what the crash may have undone.
    fn crash(&mut self) {
        self.stored.clear();
        self.chosen.clear();
    }
}
