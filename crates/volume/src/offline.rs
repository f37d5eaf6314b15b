//! Looking at a cache device that no server uses: `check` verifies every structure and every
//! payload of the log, `dump` lists what is in it. Only reads, through a function that the caller
//! gives.

use std::collections::BTreeMap;

use forebay_block::VolumeId;
use forebay_codec::crc32c;
use forebay_engine::Key;
use forebay_engine::survey::{Owner, Survey};
use forebay_format::{
    AREA_OFFSET, Entry, EntryKind, Lsn, PAGE, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, SegmentSeq,
    ShardArea, Superblock, newest,
};

use crate::pool::is_removed;

/// Reads exactly the buffer's length from an offset of the cache device.
pub type ReadAt<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), String> + 'a;

/// Something wrong with the content of a cache device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// Where, for people.
    pub place: String,
    /// What.
    pub what: String,
    /// Whether dirty blocks are concerned: data may be lost.
    pub dirty: bool,
}

/// The newest version of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockInfo {
    /// Its volume.
    pub volume: VolumeId,
    /// Its number there.
    pub block: u64,
    /// How it is stored.
    pub kind: EntryKind,
    /// Bytes it takes.
    pub len: u16,
    /// Newer than the primary.
    pub dirty: bool,
    /// The record it is from.
    pub lsn: Lsn,
    /// Where its payload lies on the device.
    pub offset: u64,
}

/// What was found in a shard's area.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ShardReport {
    /// Oldest and newest segment of the log.
    pub segments: Option<(SegmentSeq, SegmentSeq)>,
    /// Segments without a footer, which the next start reads record by record.
    pub unsealed: u64,
    /// Last record.
    pub last_lsn: Lsn,
    /// The newest version of every block in the log.
    pub blocks: Vec<BlockInfo>,
}

/// What was found on a cache device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The newest superblock.
    pub superblock: Superblock,
    /// The shards.
    pub shards: Vec<ShardReport>,
    /// What is wrong.
    pub problems: Vec<Problem>,
}

impl Report {
    /// Dirty blocks of a volume, or of all.
    #[must_use]
    pub fn dirty_blocks(&self, volume: Option<VolumeId>) -> u64 {
        let blocks = self.shards.iter().flat_map(|shard| &shard.blocks);
        blocks.filter(|b| b.dirty && volume.is_none_or(|id| id == b.volume)).count() as u64
    }
}

/// Reads the superblocks.
///
/// # Errors
/// When the device cannot be read or holds no pool.
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
/// When the device cannot be read or holds no pool. What is damaged is in the report.
pub fn examine(read: &mut ReadAt, payloads: bool) -> Result<Report, String> {
    let superblock = superblock(read)?;
    let removed = superblock.volumes.iter().filter(|volume| is_removed(volume));
    let removed: Vec<VolumeId> = removed.map(|volume| volume.id).collect();
    let mut report = Report { superblock, shards: Vec::new(), problems: Vec::new() };
    for (shard, area) in report.superblock.shards.clone().into_iter().enumerate() {
        assert!(area.offset >= AREA_OFFSET, "decoding checked the areas");
        let mut examiner = Examiner::new(&report.superblock, shard as u16, area, payloads);
        let mut found = examiner.examine(read)?;
        found.blocks.retain(|block| !removed.contains(&block.volume));
        report.shards.push(found);
        report.problems.append(&mut examiner.problems);
    }
    Ok(report)
}

struct Examiner {
    shard: u16,
    area: ShardArea,
    segment: usize,
    payloads: bool,
    survey: Survey,
    problems: Vec<Problem>,
}

impl Examiner {
    fn new(superblock: &Superblock, shard: u16, area: ShardArea, payloads: bool) -> Self {
        let segment = superblock.segment_size as usize;
        let segments = (area.len / segment as u64) as usize;
        let owner = Owner { pool: superblock.pool, shard };
        let survey = Survey::new(owner, segments, superblock.segment_size);
        Self { shard, area, segment, payloads, survey, problems: Vec::new() }
    }

    fn offset(&self, i: usize) -> u64 {
        self.area.offset + (i * self.segment) as u64
    }

    fn problem(&mut self, place: impl ToString, what: impl ToString, dirty: bool) {
        let place = format!("shard {}, {}", self.shard, place.to_string());
        self.problems.push(Problem { place, what: what.to_string(), dirty });
    }

    fn examine(&mut self, read: &mut ReadAt) -> Result<ShardReport, String> {
        let mut page = vec![0; PAGE];
        for i in 0..self.survey.found.len() {
            read(self.offset(i), &mut page)?;
            self.survey.take_head(i, &page);
            read(self.offset(i + 1) - PAGE as u64, &mut page)?;
            self.survey.take_tail(i, &page);
        }
        self.survey.classify();
        let mut bytes = vec![0; self.segment];
        for i in self.survey.to_scan() {
            read(self.offset(i), &mut bytes)?;
            self.survey.take_segment(i, &bytes);
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
            read(self.offset(i), &mut bytes)?;
            report.unsealed += u64::from(self.survey.found[i].scanned.is_some());
            self.segment(seq, i, &bytes, &mut blocks);
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
        Ok(report)
    }

    fn segment(
        &mut self,
        seq: SegmentSeq,
        i: usize,
        bytes: &[u8],
        blocks: &mut BTreeMap<Key, BlockInfo>,
    ) {
        if let Some(bytes_of_footer) = self.survey.found[i].tail.map(|tail| tail.bytes)
            && self.survey.found[i].sealed
        {
            self.survey.take_footer(i, &bytes[bytes.len() - bytes_of_footer..]);
            if self.survey.found[i].unreadable_footer {
                self.problem(seq, "the footer is damaged", false);
                self.survey.take_segment(i, bytes);
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
            let dirty = entry.dirty && lsn >= clean;
            if self.payloads && !payload_is_good(entry, bytes) {
                let what = format!("{} block {}: bad payload", entry.volume, entry.block);
                self.problem(seq, what, dirty);
            }
            // Where a shared payload or a base was; nowhere, once its segment has left the log.
            let back = entry.base.map(|base| base.back).or(entry.shared).unwrap_or(0);
            let from = seq.0.checked_sub(u64::from(back)).map(SegmentSeq);
            let live = from.filter(|from| *from >= self.survey.start);
            let at = live.and_then(|from| self.survey.log.get(&from)).map(|&i| self.offset(i));
            let at = at.map(|older| if entry.base.is_some() { self.offset(i) } else { older });
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
        let Entry { volume, kind, len, .. } = *entry;
        blocks.insert(key, BlockInfo { volume, block, kind, len, dirty, lsn, offset });
    }
}
