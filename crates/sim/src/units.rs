//! What passes of the store on its way to the cache device: units, and what the log says of them.
//! Planted bugs take from it the pages that an engine would have got wrong.

use std::collections::{BTreeMap, BTreeSet};

use forebay_block::{ByteRange, Io, VolumeId};
use forebay_format::{EntryKind, Lsn, PAGE, StoreUnit, decode_record};

use crate::config::Setup;

/// Offset of the first shard's area, in bytes.
const AREAS: u64 = 1 << 20;
const PAGE_BYTES: u64 = PAGE as u64;

/// Where the stores of the shards are on the cache device.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Bytes of a shard's area, of its log, and of a segment.
    area: u64,
    log: u64,
    segment: u64,
    shards: u64,
}

impl Layout {
    /// The layout of a setup with a store.
    #[must_use]
    pub fn of(setup: &Setup) -> Option<Self> {
        let segment = u64::from(setup.segment_size);
        let log = u64::from(setup.log_segments?) * segment;
        Some(Self { area: setup.segments * segment, log, segment, shards: setup.shards as u64 })
    }

    /// Whether the page at an offset of the device is in a store.
    #[must_use]
    pub fn is_store(&self, at: u64) -> bool {
        let Some(at) = at.checked_sub(AREAS) else { return false };
        at / self.area < self.shards && at % self.area >= self.log
    }

    /// Number of the segment or extent of a page in an area.
    fn extent_of(&self, at: u64) -> u64 {
        (at - AREAS) / self.segment
    }

    /// The pages of a payload in the store of a shard.
    fn pages(&self, shard: u16, unit: StoreUnit, offset: u32, len: u16) -> Vec<u64> {
        let extent = AREAS + u64::from(shard) * self.area + self.log;
        let at = extent + u64::from(unit.extent) * self.segment + u64::from(offset);
        pages_of(at, u64::from(len)).collect()
    }
}

/// Offsets of the pages that a range covers.
fn pages_of(at: u64, len: u64) -> impl Iterator<Item = u64> {
    (at / PAGE_BYTES..(at + len).div_ceil(PAGE_BYTES)).map(|page| page * PAGE_BYTES)
}

/// Pages of units that only one flush has covered: for an engine that sends none for its units, no
/// flush has.
#[derive(Debug, Default)]
pub struct Uncovered {
    /// The content of each page that was ever written.
    content: BTreeMap<u64, Vec<u8>>,
    /// The content before the last write, and how many flushes have begun since it ended: `None`
    /// while it is in flight.
    pages: BTreeMap<u64, (Vec<u8>, Option<u32>)>,
}

impl Uncovered {
    /// Notes that a unit is being written.
    pub fn write(&mut self, io: &Io) {
        for (at, bytes) in pages_of(io.range.offset, io.range.len).zip(io.buf.chunks(PAGE)) {
            let before = self.content.insert(at, bytes.to_vec());
            self.pages.insert(at, (before.unwrap_or_else(|| vec![0; PAGE]), None));
        }
    }

    /// Notes that a unit has been written.
    pub fn written(&mut self, range: ByteRange) {
        for at in pages_of(range.offset, range.len) {
            if let Some((_, flushes)) = self.pages.get_mut(&at) {
                *flushes = Some(0);
            }
        }
    }

    /// Notes that a flush begins. The second one counts.
    pub fn flush(&mut self) {
        self.pages.retain(|_, (_, flushes)| {
            *flushes = flushes.map(|count| count + 1);
            flushes.is_none_or(|count| count < 2)
        });
    }

    /// The pages whose last write the power failure has undone, with their content.
    pub fn crash(&self) -> Vec<(u64, Vec<u8>)> {
        let written = self.pages.iter().filter(|(_, (_, flushes))| flushes.is_some());
        written.map(|(&at, (before, _))| (at, before.clone())).collect()
    }

    /// Forgets what is in flight.
    pub fn clear(&mut self) {
        self.pages.clear();
    }
}

/// The pages of the store that the log names.
#[derive(Debug, Default)]
pub struct Slots {
    /// The blocks of each page, and the shard and record since which the log names the block
    /// elsewhere or nowhere.
    uses: BTreeMap<u64, BTreeMap<Block, Option<(u16, Lsn)>>>,
    /// The pages that have each block among their uses, and maybe others.
    pages: BTreeMap<Block, BTreeSet<u64>>,
    /// The last record of each shard that is known to be durable.
    durable: BTreeMap<u16, Lsn>,
    /// A page of the last unit.
    unit: Vec<u8>,
}

type Block = (VolumeId, u64);
/// A page, and the record since which it is not needed for one of its blocks.
type PageUse = (u64, Option<(u16, Lsn)>);

impl Slots {
    /// Notes that a unit is being written: nothing needs its pages.
    pub fn write(&mut self, io: &Io) {
        for at in pages_of(io.range.offset, io.range.len) {
            self.uses.remove(&at);
        }
        self.unit = io.buf[..PAGE].to_vec();
    }

    /// Notes what a record says of the store.
    pub fn log(&mut self, io: &Io, layout: &Layout) {
        let Some(Ok(record)) = io.buf.get(..PAGE).map(decode_record) else { return };
        let header = &record.header;
        let shard = header.shard;
        self.durable.insert(shard, header.durable);
        for entry in &record.entries {
            // The base of a delta stays.
            if matches!(entry.kind, EntryKind::Checkpoint | EntryKind::Delta) {
                continue;
            }
            for block in entry.block..entry.block + u64::from(entry.count) {
                self.end_uses((entry.volume, block), (shard, header.lsn));
            }
            let Some(unit) = entry.stored else { continue };
            let block = (entry.volume, entry.block);
            for at in layout.pages(shard, unit, entry.offset, entry.len) {
                self.uses.entry(at).or_default().insert(block, None);
                self.pages.entry(block).or_default().insert(at);
            }
        }
    }

    fn end_uses(&mut self, block: Block, record: (u16, Lsn)) {
        for at in self.pages.remove(&block).unwrap_or_default() {
            if let Some(end) = self.uses.get_mut(&at).and_then(|uses| uses.get_mut(&block)) {
                end.get_or_insert(record);
            }
        }
    }

    fn is_durable(&self, (shard, lsn): (u16, Lsn)) -> bool {
        self.durable.get(&shard).is_some_and(|&durable| lsn <= durable)
    }

    /// The pages that another unit has overwritten too early, with their content: nothing needs
    /// them, but the crash may undo the record that says so.
    pub fn crash(&self) -> Vec<(u64, Vec<u8>)> {
        let is_early = |uses: &BTreeMap<Block, Option<(u16, Lsn)>>| {
            let are_over = uses.values().all(Option::is_some);
            are_over && uses.values().flatten().any(|&end| !self.is_durable(end))
        };
        let early = self.uses.iter().filter(|(_, uses)| !self.unit.is_empty() && is_early(uses));
        early.map(|(&at, _)| (at, self.unit.clone())).collect()
    }

    /// The pages of the extents that nothing needs, if the crash may undo a record that says so,
    /// with the content that a discard has left.
    pub fn discarded(&self, layout: &Layout) -> Vec<(u64, Vec<u8>)> {
        let mut extents: BTreeMap<u64, Vec<PageUse>> = BTreeMap::new();
        for (&at, uses) in &self.uses {
            let ends = uses.values().map(|&end| (at, end));
            extents.entry(layout.extent_of(at)).or_default().extend(ends);
        }
        let is_early = |uses: &Vec<PageUse>| {
            let are_over = uses.iter().all(|(_, end)| end.is_some());
            are_over && uses.iter().any(|&(_, end)| end.is_some_and(|end| !self.is_durable(end)))
        };
        let early = extents.into_values().filter(is_early).flatten();
        early.map(|(at, _)| (at, vec![0xdb; PAGE])).collect()
    }

    /// The engine starts again: records that may be gone say nothing.
    pub fn restart(&mut self) {
        let mut uses = std::mem::take(&mut self.uses);
        for blocks in uses.values_mut() {
            blocks.retain(|_, end| end.is_none_or(|end| !self.is_durable(end)));
            blocks.values_mut().for_each(|end| *end = None);
        }
        uses.retain(|_, blocks| !blocks.is_empty());
        for (&at, blocks) in &uses {
            for &block in blocks.keys() {
                self.pages.entry(block).or_default().insert(at);
            }
        }
        self.uses = uses;
        self.durable.clear();
    }
}
