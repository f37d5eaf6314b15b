//! One structure of each kind, with distinct values in all fields, for the tests that need bytes.

#![allow(dead_code, reason = "each test file uses a part")]

use forebay_block::VolumeId;
use forebay_format::*;

/// CRC32C as the format uses it.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Corrects the CRC of a structure after a field was changed; without that, the checks after the
/// CRC check would not be reached.
pub fn reseal(structure: &mut [u8]) {
    let crc = crc32c(&structure[12..]);
    structure[8..12].copy_from_slice(&crc.to_le_bytes());
}

fn entry(kind: EntryKind, block: u64, offset: u32, len: u16) -> Entry {
    let (count, crc) = if len == 0 { (1, 0) } else { (1, 0xc0de_0000 | u32::from(len)) };
    let volume = VolumeId(3);
    let (dirty, first, shared, base, stored) = (false, false, None, None, None);
    Entry { volume, block, kind, dirty, first, offset, len, count, crc, shared, base, stored }
}

/// A record of three pages at the second page of its segment, with entries of five kinds.
pub fn record() -> (RecordHeader, Vec<Entry>) {
    let header = RecordHeader {
        pool: 0x1122_3344_5566_7788,
        shard: 0x0102,
        seq: SegmentSeq(9),
        lsn: Lsn(1000),
        at: 4096,
        prev_crc: 0xaabb_ccdd,
        pages: 3,
        durable: Lsn(998),
        clean: Lsn(700),
        start: SegmentSeq(4),
        epoch: 17,
        unit_entries: false,
    };
    let entries = vec![
        Entry { first: true, dirty: true, ..entry(EntryKind::Raw, 0x12_3456_789a, 8192, 4096) },
        Entry { dirty: true, ..entry(EntryKind::Lz4, 7, 12288, 1001) },
        Entry { count: 256, ..entry(EntryKind::Zero, VOLUME_BLOCKS_MAX - 256, 0, 0) },
        Entry { count: 200, ..entry(EntryKind::Invalidate, 1, 0, 0) },
        entry(EntryKind::Checkpoint, 0, 0, 0),
    ];
    (header, entries)
}

/// A record at the start of the next segment, whose only block is stored against the LZ4 one.
pub fn similar_page() -> Vec<u8> {
    let (header, _) = record();
    let header = RecordHeader { seq: SegmentSeq(10), lsn: Lsn(1001), at: 0, pages: 1, ..header };
    let base = NamedBase { back: 1, offset: 12288, len: 1001, kind: EntryKind::Lz4 };
    let similar = Entry { first: true, base: Some(base), ..entry(EntryKind::Similar, 8, 120, 99) };
    let mut page = vec![0; PAGE];
    encode_record(&mut page, &header, &[similar]);
    page
}

/// A record whose only block is in the store.
pub fn stored_page() -> Vec<u8> {
    let stored = Entry {
        first: true,
        dirty: true,
        stored: Some(StoreUnit { extent: 0x02_0304, page: 3 }),
        ..entry(EntryKind::Zstd, 8, 120, 99)
    };
    page_of(&[stored], false)
}

/// Blocks of one unit of two pages, which begins at page 6 of an extent: a raw one, one of each
/// compressed form, and the first of them again.
pub fn unit() -> Vec<Entry> {
    let stored = |page| Some(StoreUnit { extent: 0x02_0304, page });
    let block = 0x12_3456_7897;
    let raw = Entry { stored: stored(1), ..entry(EntryKind::Raw, block, 6 * 4096, 4096) };
    vec![
        Entry { first: true, ..raw },
        Entry { stored: stored(2), ..entry(EntryKind::Lz4, block + 1, 7 * 4096 + 1008, 77) },
        Entry {
            dirty: true,
            stored: stored(2),
            ..entry(EntryKind::Zstd, block + 2, 7 * 4096, 1001)
        },
        raw,
    ]
}

/// A record of one page whose entries are these, with or without unit entries.
pub fn page_of(entries: &[Entry], unit_entries: bool) -> Vec<u8> {
    let (header, _) = record();
    let mut page = vec![0; PAGE];
    encode_record(&mut page, &RecordHeader { pages: 1, unit_entries, ..header }, entries);
    page
}

/// The footer of a segment with one record, whose entries are the blocks of the unit, together or
/// not.
pub fn unit_footer(unit_entries: bool) -> (Footer, Vec<u8>) {
    let footer = Footer { first_lsn: Lsn(1000), entries: 4, unit_entries, ..footer().0 };
    let entries = EntryTable::of(unit_entries, &unit());
    let mut bytes = vec![0; footer_bytes(entries.cells())];
    encode_footer(&mut bytes, &footer, &entries);
    (footer, bytes)
}

/// The record's header page; bytes that the encoder leaves unchanged are zero.
pub fn record_page() -> Vec<u8> {
    let (header, entries) = record();
    let mut page = vec![0; PAGE];
    encode_record(&mut page, &header, &entries);
    page
}

/// The footer of a segment with two records; the second is the one above.
pub fn footer() -> (Footer, Vec<Entry>) {
    let first = Entry { first: true, ..entry(EntryKind::Lz4, 5, 96 + 24, 64) };
    let entries: Vec<Entry> = [first].into_iter().chain(record().1).collect();
    let footer = Footer {
        pool: 0x1122_3344_5566_7788,
        shard: 0x0102,
        seq: SegmentSeq(9),
        first_lsn: Lsn(999),
        last_lsn: Lsn(1000),
        last_crc: 0x0bad_cafe,
        first_prev_crc: 0x0123_4567,
        start: SegmentSeq(4),
        clean: Lsn(700),
        entries: 6,
        unit_entries: false,
    };
    (footer, entries)
}

/// The footer's bytes.
pub fn footer_page() -> Vec<u8> {
    let (footer, entries) = footer();
    let entries = EntryTable::of(false, &entries);
    let mut bytes = vec![0; footer_bytes(entries.cells())];
    encode_footer(&mut bytes, &footer, &entries);
    bytes
}

/// A pool of two shards and two volumes.
pub fn superblock() -> Superblock {
    let volume = |id, name: &str, fingerprint| VolumeRecord {
        id: VolumeId(id),
        name: name.to_owned(),
        size: 10 << 30,
        identity: format!("file:{name}.img"),
        fingerprint,
    };
    Superblock {
        pool: 0x1122_3344_5566_7788,
        uuid: *b"\x88\x77\x66\x55\x44\x33\x22\x11sixteen.",
        generation: 42,
        epoch: 17,
        segment_size: 4 << 20,
        device_size: 1 << 30,
        shards: vec![
            ShardArea { offset: AREA_OFFSET, len: 400 << 20 },
            ShardArea { offset: AREA_OFFSET + (400 << 20), len: 500 << 20 },
        ],
        log_segments: None,
        unit_entries: false,
        volumes: vec![volume(0, "database", Some(0xfeed_f00d)), volume(63, "größer", None)],
        clean: true,
        created_unix: 1_795_264_000,
    }
}

/// The same pool with a store.
pub fn superblock_with_store() -> Superblock {
    Superblock { log_segments: Some(8), unit_entries: true, ..superblock() }
}

/// The superblock's bytes.
pub fn superblock_bytes() -> Vec<u8> {
    let mut bytes = vec![0xff; SUPERBLOCK_BYTES];
    superblock().encode(&mut bytes);
    bytes
}
