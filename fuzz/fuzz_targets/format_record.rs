//! Records: decoding any bytes ends in a result. A valid record with any fields changed is
//! rejected, or is another valid one that encodes to exactly the same bytes.
#![no_main]

use forebay_block::VolumeId;
use forebay_format::{
    CELL_BYTES, ENTRY_CELLS, Entry, EntryKind, Lsn, NamedBase, PAGE, RECORD_CELLS_MAX,
    RECORD_ENTRIES_MAX, RECORD_HEADER_BYTES, RecordHeader, SegmentSeq, StoreUnit, decode_record,
    encode_record,
};
use forebay_fuzz::{change, reseal};
use libfuzzer_sys::fuzz_target;

fn sound(entries: usize, unit_entries: bool) -> Vec<u8> {
    let header = RecordHeader {
        pool: 1,
        shard: 2,
        seq: SegmentSeq(3),
        lsn: Lsn(4),
        at: 4096,
        prev_crc: 5,
        pages: 9,
        durable: Lsn(3),
        clean: Lsn(2),
        start: SegmentSeq(1),
        epoch: 6,
        unit_entries,
    };
    let kinds = [
        (EntryKind::Raw, 8192, 4096, None),
        (EntryKind::Lz4, 12288, 99, None),
        (EntryKind::Zero, 0, 0, None),
        (EntryKind::Zstd, 1024, 3000, Some(0)),
        (EntryKind::Raw, 4096, 4096, Some(2)),
        (EntryKind::Similar, 12288, 99, None),
        (EntryKind::Lz4, 4096 + 16, 99, None),
        (EntryKind::Zstd, 8192 + 16, 99, None),
        (EntryKind::Zstd, 4096 + 800, 99, None),
    ];
    let named = NamedBase { back: 2, offset: 800, len: 77, kind: EntryKind::Zstd };
    let entries: Vec<Entry> = (0..entries)
        .map(|i| {
            let (kind, offset, len, shared) = kinds[i % kinds.len()];
            let (volume, block, crc) = (VolumeId(7), i as u64, u32::from(len));
            let (dirty, first, count) = (true, i == 0, 1);
            let base = (kind == EntryKind::Similar).then_some(named);
            // The last three are one unit, from page 1 on.
            let page = (offset / 4096) as u8;
            let in_store = i % kinds.len() >= 6;
            let stored = in_store.then_some(StoreUnit { extent: 3, page });
            Entry {
                volume,
                block,
                kind,
                dirty,
                first,
                offset,
                len,
                count,
                crc,
                shared,
                base,
                stored,
            }
        })
        .collect();
    let mut page = vec![0; PAGE];
    encode_record(&mut page, &header, &entries);
    page
}

fuzz_target!(|data: &[u8]| {
    let _ = decode_record(data);
    let Some((count, changes)) = data.split_first() else { return };
    let mut page = sound(1 + usize::from(*count) % RECORD_ENTRIES_MAX, count % 2 == 0);
    change(&mut page, changes);
    page[..8].copy_from_slice(b"ForebayR");
    let count = usize::from(u16::from_le_bytes([page[16], page[17]]));
    let cells = if page[12] == 2 { count } else { count * ENTRY_CELLS };
    let covered = RECORD_HEADER_BYTES + cells.min(RECORD_CELLS_MAX) * CELL_BYTES;
    reseal(&mut page[..covered]);
    if let Ok(record) = decode_record(&page) {
        let mut again = page.clone();
        again[..covered].fill(0xee);
        assert_eq!(encode_record(&mut again, &record.header, &record.entries), record.crc);
        assert!(again == page);
    }
});
