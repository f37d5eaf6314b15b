//! Makes a stopped cache full without writing its blocks: the log gets entries that say that every
//! page of the store holds a clean block. A start reads these entries, and no payload.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use forebay_block::VolumeId;
use forebay_format::{
    ENTRY_CELLS, Entry, EntryKind, EntryTable, Footer, Lsn, PAGE, RECORD_ENTRIES_MAX,
    SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, SegmentSeq, ShardArea, StoreUnit, Superblock,
    encode_footer, footer_bytes, newest,
};

/// One segment of the log in this many stays free.
const FREE_ONE_IN: u32 = 8;
/// Distance, in pages of the store, between blocks that follow each other: a prime number.
const STRIDE: u64 = 1_000_003;

/// Fills the cache in this file, which has a store; returns the number of its blocks.
pub fn fill(path: &Path) -> anyhow::Result<u64> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let copy = |at: u64| {
        let mut bytes = vec![0; SUPERBLOCK_BYTES];
        file.read_exact_at(&mut bytes, at).map(|()| bytes)
    };
    let [a, b] = SUPERBLOCK_OFFSETS.map(copy);
    let (superblock, _) = newest(Superblock::decode(&a?), Superblock::decode(&b?))
        .map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    let mut blocks = 0;
    for (shard, area) in superblock.shards.iter().enumerate() {
        blocks += fill_shard(&file, &superblock, shard as u16, *area, blocks)?;
    }
    file.sync_all()?;
    Ok(blocks)
}

/// Fills the area of a shard with blocks from number `first` on; returns their number.
fn fill_shard(
    file: &File,
    superblock: &Superblock,
    shard: u16,
    area: ShardArea,
    first: u64,
) -> anyhow::Result<u64> {
    let size = u64::from(superblock.segment_size);
    let log = superblock.log_segments.context("the cache has no store")?;
    let per_extent = size / PAGE as u64;
    let pages = (area.len / size - u64::from(log)) * per_extent;
    let segments = u64::from(log - log.div_ceil(FREE_ONE_IN));
    let per_segment = pages.div_ceil(segments);
    ensure!(
        footer_bytes(per_segment as usize * ENTRY_CELLS) as u64 <= size / 2,
        "{segments} segments of the log do not hold the entries of {pages} blocks"
    );
    let entry = |i: u64| {
        let page = i * STRIDE % pages;
        let extent = (page / per_extent) as u32;
        Entry {
            volume: VolumeId(0),
            block: first + i,
            kind: EntryKind::Raw,
            dirty: false,
            first: (i % per_segment).is_multiple_of(RECORD_ENTRIES_MAX as u64),
            offset: (page % per_extent) as u32 * PAGE as u32,
            len: PAGE as u16,
            count: 1,
            crc: i as u32,
            shared: None,
            stored: Some(StoreUnit { extent, page: 1 }),
            base: None,
        }
    };
    let records = |i: u64| {
        let whole = i / per_segment * per_segment.div_ceil(RECORD_ENTRIES_MAX as u64);
        whole + (i % per_segment).div_ceil(RECORD_ENTRIES_MAX as u64)
    };
    for n in 0..pages.div_ceil(per_segment) {
        let (from, to) = (n * per_segment, ((n + 1) * per_segment).min(pages));
        let entries: Vec<Entry> = (from..to).map(entry).collect();
        let (before, last) = (records(from), records(to));
        let seq = SegmentSeq(n + 1);
        let footer = Footer {
            pool: superblock.pool,
            shard,
            seq,
            first_lsn: Lsn(before + 1),
            last_lsn: Lsn(last),
            last_crc: last as u32,
            first_prev_crc: before as u32,
            start: SegmentSeq(1),
            clean: Lsn(last + 1),
            entries: entries.len() as u32,
            unit_entries: superblock.unit_entries,
        };
        let entries = EntryTable::of(superblock.unit_entries, &entries);
        let mut bytes = vec![0; footer_bytes(entries.cells())];
        encode_footer(&mut bytes, &footer, &entries);
        let end = area.offset + (seq.0 % u64::from(log) + 1) * size;
        file.write_all_at(&bytes, end - bytes.len() as u64)?;
    }
    Ok(pages)
}
