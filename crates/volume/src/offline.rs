//! Examines a cache device that no server is using: `check` verifies every structure and every
//! payload of the log, `dump` lists its contents. Only reads, through a function supplied by the
//! caller.

use std::collections::{BTreeMap, BTreeSet};

use forebay_block::VolumeId;
use forebay_codec::crc32c;
use forebay_engine::Key;
use forebay_engine::survey::{Owner, SegmentForm, Survey};
use forebay_format::{
    AREA_OFFSET, Entry, EntryKind, Lsn, PAGE, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, SegmentSeq,
    ShardArea, Superblock, newest,
};

use crate::pool::{check_geometry, is_removed};

/// Fills the buffer from an offset of the cache device, in bytes.
pub type ReadAt<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), ReadError> + 'a;

/// Why bytes of a cache device cannot be read, as text for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReadError {
    /// The device failed to read this range; other ranges may work.
    Media(String),
    /// The device does not answer, or has no such range.
    Device(String),
}

impl From<ReadError> for String {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Media(text) | ReadError::Device(text) => text,
        }
    }
}

/// A fault in the content of a cache device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// Location of the fault, as text for people.
    pub place: String,
    /// Description of the fault.
    pub what: String,
    /// Whether dirty blocks are affected, so that data may be lost.
    pub dirty: bool,
}

/// The newest version of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockInfo {
    /// Volume of the block.
    pub volume: VolumeId,
    /// Number of the block on its volume.
    pub block: u64,
    /// The form in which the block is stored.
    pub kind: EntryKind,
    /// Length of the payload, in bytes.
    pub len: u16,
    /// Whether the block is newer than the primary.
    pub dirty: bool,
    /// LSN of the record that holds the version.
    pub lsn: Lsn,
    /// Offset of the payload on the device, in bytes.
    pub offset: u64,
    /// CRC32C of the payload, if it is in the store.
    pub stored: Option<u32>,
}

/// The findings in a shard's area.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ShardReport {
    /// Oldest and newest segment of the log, if it has any.
    pub segments: Option<(SegmentSeq, SegmentSeq)>,
    /// Segments without a footer, which the next start must read record by record.
    pub unsealed: u64,
    /// LSN of the last record.
    pub last_lsn: Lsn,
    /// The newest version of every block in the log.
    pub blocks: Vec<BlockInfo>,
    /// The volumes with an entry of any kind in the log.
    pub named: BTreeSet<VolumeId>,
}

/// The findings on a cache device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The newest superblock.
    pub superblock: Superblock,
    /// One report per shard.
    pub shards: Vec<ShardReport>,
    /// The faults that were found.
    pub problems: Vec<Problem>,
}

impl Report {
    /// Returns the number of dirty blocks of a volume, or of all volumes.
    #[must_use]
    pub fn dirty_blocks(&self, volume: Option<VolumeId>) -> u64 {
        let blocks = self.shards.iter().flat_map(|shard| &shard.blocks);
        blocks.filter(|b| b.dirty && volume.is_none_or(|id| id == b.volume)).count() as u64
    }

    /// The removed volumes of which the log has no entry any more. None if a part of it is damaged,
    /// which may have some.
    #[must_use]
    pub fn forgotten(&self) -> Vec<VolumeId> {
        let removed = self.superblock.volumes.iter().filter(|volume| is_removed(volume));
        let named = |id: &VolumeId| self.shards.iter().any(|shard| shard.named.contains(id));
        let ids = removed.map(|volume| volume.id).filter(|id| !named(id));
        if self.problems.is_empty() { ids.collect() } else { Vec::new() }
    }
}

/// Reads the superblocks and returns the newest.
///
/// # Errors
/// If the device cannot be read or holds no pool.
pub fn superblock(read: &mut ReadAt) -> Result<Superblock, String> {
    let mut copies = Vec::new();
    for offset in SUPERBLOCK_OFFSETS {
        let mut bytes = vec![0; SUPERBLOCK_BYTES];
        read(offset, &mut bytes)?;
        copies.push(Superblock::decode(&bytes));
    }
    let second = copies.pop().expect("two copies were read");
    let first = copies.pop().expect("two copies were read");
    let found = newest(first, second);
    found.map(|(superblock, _)| superblock).map_err(|e| format!("no Forebay cache there: {e}"))
}

/// Reads the whole log of every shard and verifies it; with `payloads`, every payload too.
///
/// # Errors
/// If the superblocks cannot be read, if the device does not answer, or if it holds no pool.
/// Damage, or a part that the device fails to read, is not an error: it is in the report.
pub fn examine(read: &mut ReadAt, payloads: bool) -> Result<Report, String> {
    let superblock = superblock(read)?;
    check_geometry(&superblock).map_err(|refusal| refusal.to_string())?;
    let mut report = Report { superblock, shards: Vec::new(), problems: Vec::new() };
    for (shard, area) in report.superblock.shards.clone().into_iter().enumerate() {
        assert!(area.offset >= AREA_OFFSET, "decoding checked the areas");
        let mut examiner = Examiner::new(&report.superblock, shard as u16, area, payloads);
        report.shards.push(examiner.examine(read)?);
        report.problems.append(&mut examiner.problems);
    }
    Ok(report)
}

struct Examiner {
    shard: u16,
    area: ShardArea,
    segment: usize,
    payloads: bool,
    /// Volumes whose entries count no more: others use their places in the store.
    removed: Vec<VolumeId>,
    survey: Survey,
    problems: Vec<Problem>,
}

impl Examiner {
    fn new(superblock: &Superblock, shard: u16, area: ShardArea, payloads: bool) -> Self {
        let segment = superblock.segment_size as usize;
        let segments = superblock.log_segments_of(&area) as usize;
        let owner = Owner { pool: superblock.pool, shard };
        let Superblock { segment_size: size, unit_entries, .. } = *superblock;
        let survey = Survey::new(owner, segments, SegmentForm { size, unit_entries });
        let removed = superblock.volumes.iter().filter(|volume| is_removed(volume));
        let removed = removed.map(|volume| volume.id).collect();
        Self { shard, area, segment, payloads, removed, survey, problems: Vec::new() }
    }

    fn offset(&self, i: usize) -> u64 {
        self.area.offset + (i * self.segment) as u64
    }

    fn problem(&mut self, place: impl ToString, what: impl ToString, dirty: bool) {
        let place = format!("shard {}, {}", self.shard, place.to_string());
        self.problems.push(Problem { place, what: what.to_string(), dirty });
    }

    /// Reads from an offset. The bytes are empty if the device fails to read them, as in recovery;
    /// whether dirty blocks are affected is decided by what else is found.
    fn fill<'a>(
        &mut self,
        read: &mut ReadAt,
        offset: u64,
        bytes: &'a mut [u8],
    ) -> Result<&'a [u8], String> {
        match read(offset, bytes) {
            Ok(()) => Ok(bytes),
            Err(ReadError::Media(error)) => {
                self.problem("log", error, false);
                Ok(&[])
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the segment at position `i`. If the device fails to, the pages are read one by one, as
    /// the footer may be readable; a page that cannot be read is zeros.
    fn fill_pages(&mut self, read: &mut ReadAt, i: usize, bytes: &mut [u8]) -> Result<(), String> {
        let start = self.offset(i);
        match read(start, bytes) {
            Err(ReadError::Media(_)) => {}
            done => return done.map_err(String::from),
        }
        for (at, page) in (start..).step_by(PAGE).zip(bytes.chunks_exact_mut(PAGE)) {
            if self.fill(read, at, page)?.is_empty() {
                page.fill(0);
                self.survey.found[i].unreadable = true;
            }
        }
        Ok(())
    }

    fn examine(&mut self, read: &mut ReadAt) -> Result<ShardReport, String> {
        let mut page = vec![0; PAGE];
        for i in 0..self.survey.found.len() {
            let head = self.fill(read, self.offset(i), &mut page)?;
            self.survey.take_head(i, head);
            let tail = self.fill(read, self.offset(i + 1) - PAGE as u64, &mut page)?;
            self.survey.take_tail(i, tail);
        }
        self.survey.classify();
        let mut bytes = vec![0; self.segment];
        for i in self.survey.to_scan() {
            let segment = self.fill(read, self.offset(i), &mut bytes)?;
            self.survey.take_segment(i, segment);
        }
        if let Err(damage) = self.survey.assemble() {
            self.problem("log", damage, true);
        }
        let mut report = ShardReport { last_lsn: self.survey.last.lsn, ..Default::default() };
        let log: Vec<(SegmentSeq, usize)> =
            self.survey.log.range(self.survey.start..).map(|(&seq, &i)| (seq, i)).collect();
        report.segments = log.first().zip(log.last()).map(|(a, b)| (a.0, b.0));
        let mut blocks = BTreeMap::new();
        for (seq, i) in log {
            self.fill_pages(read, i, &mut bytes)?;
            report.unsealed += u64::from(self.survey.found[i].scanned.is_some());
            self.segment(seq, i, &bytes, (&mut blocks, &mut report.named));
        }
        if let Some(loss) = self.survey.loss() {
            self.problem("log", loss, true);
        }
        for hole in self.survey.holes.clone() {
            if hole.last < self.survey.clean {
                let what = format!("{} records are damaged, all clean", hole.records);
                self.problem(hole.seq, what, false);
            }
        }
        report.blocks = blocks.into_values().collect();
        report.blocks.retain(|block| !self.removed.contains(&block.volume));
        if self.payloads {
            self.verify_stored(&report.blocks, read)?;
        }
        Ok(report)
    }

    /// Verifies the payloads in the store.
    fn verify_stored(&mut self, blocks: &[BlockInfo], read: &mut ReadAt) -> Result<(), String> {
        let mut pages = vec![0; 2 * PAGE];
        for block in blocks {
            let Some(crc) = block.stored else { continue };
            let (page, at) = (block.offset / PAGE as u64, (block.offset % PAGE as u64) as usize);
            let end = at + usize::from(block.len);
            let pages = &mut pages[..end.next_multiple_of(PAGE)];
            let what = match read(page * PAGE as u64, pages) {
                Ok(()) if crc32c(&pages[at..end]) == crc => continue,
                Ok(()) => "bad payload".to_owned(),
                Err(ReadError::Media(error)) => error,
                Err(error) => return Err(error.into()),
            };
            let what = format!("{} block {}: {what}", block.volume, block.block);
            self.problem("store", what, block.dirty);
        }
        Ok(())
    }

    /// Offset on the device of the payload of an entry in the store, unless it is outside of it.
    fn stored_at(&self, entry: &Entry) -> Option<u64> {
        let slot = entry.stored?;
        let extent = self.survey.found.len() as u64 + u64::from(slot.extent);
        let start = extent * self.segment as u64;
        let fits = entry.payload_end() <= self.segment as u64;
        (fits && start + self.segment as u64 <= self.area.len).then(|| self.area.offset + start)
    }

    fn segment(
        &mut self,
        seq: SegmentSeq,
        i: usize,
        bytes: &[u8],
        (blocks, named): (&mut BTreeMap<Key, BlockInfo>, &mut BTreeSet<VolumeId>),
    ) {
        if let Some(bytes_of_footer) = self.survey.found[i].tail.map(|tail| tail.bytes)
            && self.survey.found[i].sealed
        {
            self.survey.take_footer(i, &bytes[bytes.len() - bytes_of_footer..]);
            if self.survey.found[i].unreadable_footer {
                self.problem(seq, "the footer is damaged", false);
                // Recovery reads such a segment whole or not at all.
                let is_whole = !self.survey.found[i].unreadable;
                self.survey.take_segment(i, if is_whole { bytes } else { &[] });
            }
        }
        let clean = self.survey.clean;
        let found = &mut self.survey.found[i];
        let first = found.first().map_or(Lsn(1), |link| link.lsn.next());
        if found.damaged {
            return self.problem(seq, "footer and records are damaged", first >= clean);
        }
        let entries = match (&mut found.scanned, &mut found.entries) {
            (Some(scanned), _) => std::mem::take(&mut scanned.entries),
            (None, Some(entries)) => std::mem::take(entries),
            (None, None) => Vec::new(),
        };
        let mut lsn = Lsn(first.0 - 1);
        for entry in &entries {
            if entry.first {
                lsn = lsn.next();
            }
            named.insert(entry.volume);
            let dirty = entry.dirty && lsn >= clean;
            if self.payloads && !payload_is_good(entry, bytes) {
                let what = format!("{} block {}: bad payload", entry.volume, entry.block);
                self.problem(seq, what, dirty);
            }
            // Segment of the shared payload or the base; none once that segment has left the log.
            let back = entry.base.map(|base| base.back).or(entry.shared).unwrap_or(0);
            let from = seq.0.checked_sub(u64::from(back)).map(SegmentSeq);
            let live = from.filter(|from| *from >= self.survey.start);
            let at = live.and_then(|from| self.survey.log.get(&from)).map(|&i| self.offset(i));
            let at = at.map(|older| if entry.base.is_some() { self.offset(i) } else { older });
            let at = if entry.stored.is_some() { self.stored_at(entry) } else { at };
            if entry.stored.is_some() && at.is_none() {
                let what = format!("{} block {} is outside", entry.volume, entry.block);
                self.problem("store", what, dirty);
            }
            apply(entry, lsn, dirty, at, blocks);
        }
    }
}

fn payload_is_good(entry: &Entry, segment: &[u8]) -> bool {
    let start = entry.offset as usize;
    let payload = segment.get(start..start + usize::from(entry.len));
    !entry.has_own_payload() || payload.is_some_and(|payload| crc32c(payload) == entry.crc)
}

fn apply(
    entry: &Entry,
    lsn: Lsn,
    dirty: bool,
    segment_offset: Option<u64>,
    blocks: &mut BTreeMap<Key, BlockInfo>,
) {
    if entry.kind == EntryKind::Checkpoint {
        return;
    }
    for block in entry.block..entry.block + u64::from(entry.count) {
        let key = Key::new(entry.volume, block);
        let based = |known: &BlockInfo| known.kind.is_whole() || known.kind == EntryKind::Delta;
        let orphan = entry.kind == EntryKind::Delta && !blocks.get(&key).is_some_and(based);
        let offset = segment_offset.map(|at| at + u64::from(entry.offset));
        let (Some(offset), false, false) = (offset, entry.kind == EntryKind::Invalidate, orphan)
        else {
            blocks.remove(&key);
            continue;
        };
        let Entry { volume, kind, len, crc, .. } = *entry;
        let stored = entry.stored.map(|_| crc);
        blocks.insert(key, BlockInfo { volume, block, kind, len, dirty, lsn, offset, stored });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 64 << 10;
    const SEGMENTS: u64 = 8;

    /// The report on a pool with an empty log, on a device that fails to read the byte at `bad`.
    fn report(bad: u64, error: fn(String) -> ReadError) -> Result<Report, String> {
        let area = ShardArea { offset: AREA_OFFSET, len: SEGMENTS * SEGMENT };
        let superblock = Superblock {
            pool: 1,
            uuid: [1; 16],
            generation: 1,
            epoch: 1,
            device_size: AREA_OFFSET + area.len,
            segment_size: SEGMENT as u32,
            log_segments: None,
            unit_entries: false,
            shards: vec![area],
            volumes: Vec::new(),
            created_unix: 0,
            clean: false,
        };
        let mut encoded = vec![0; SUPERBLOCK_BYTES];
        superblock.encode(&mut encoded);
        let mut read = |at: u64, bytes: &mut [u8]| {
            if (at..at + bytes.len() as u64).contains(&bad) {
                return Err(error("bad".to_owned()));
            }
            bytes.fill(0);
            if at == 0 {
                bytes.copy_from_slice(&encoded);
            }
            Ok(())
        };
        examine(&mut read, true)
    }

    /// Regression: one unreadable sector refused `--accept-data-loss` and `check`.
    #[test]
    fn a_part_that_the_device_fails_to_read_is_in_the_report() {
        let dirty = |place: u64| {
            let report = report(AREA_OFFSET + place, ReadError::Media).expect("it answers");
            assert!(!report.problems.is_empty());
            report.problems.iter().any(|problem| problem.dirty)
        };
        // The first record would begin in the second segment's place.
        assert!(dirty(SEGMENT) && dirty(SEGMENT + PAGE as u64));
        assert!(!dirty(5 * SEGMENT) && !dirty(6 * SEGMENT - 1));
        assert_eq!(report(AREA_OFFSET, ReadError::Device), Err("bad".to_owned()));
    }
}
