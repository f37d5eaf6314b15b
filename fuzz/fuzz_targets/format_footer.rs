//! Footers: decoding any bytes ends in a result. A valid footer with any fields changed is
//! rejected, or is another valid one that encodes to exactly the same bytes.
#![no_main]

use forebay_block::VolumeId;
use forebay_format::{
    Entry, EntryKind, EntryTable, FOOTER_TRAILER_BYTES, Footer, Lsn, SegmentSeq, StoreUnit,
    decode_footer, decode_footer_trailer, encode_footer, footer_bytes,
};
use forebay_fuzz::{change, reseal};
use libfuzzer_sys::fuzz_target;

fn sound(count: usize, unit_entries: bool) -> Vec<u8> {
    let entries: Vec<Entry> = (0..count)
        .map(|i| Entry {
            volume: VolumeId(1),
            block: i as u64,
            kind: EntryKind::Lz4,
            dirty: false,
            first: i % 4 == 0,
            offset: 3 * 4096,
            len: 64,
            count: 1,
            crc: 0,
            shared: (i % 3 == 0).then_some(i as u16),
            base: None,
            stored: (i % 3 > 0).then_some(StoreUnit { extent: i as u32 / 3, page: 4 }),
        })
        .collect();
    let footer = Footer {
        pool: 1,
        shard: 2,
        seq: SegmentSeq(3),
        first_lsn: Lsn(10),
        last_lsn: Lsn(9 + count.div_ceil(4) as u64),
        last_crc: 4,
        first_prev_crc: 5,
        start: SegmentSeq(2),
        clean: Lsn(1),
        entries: count as u32,
        unit_entries,
    };
    let entries = EntryTable::of(unit_entries, &entries);
    let mut bytes = vec![0; footer_bytes(entries.cells())];
    encode_footer(&mut bytes, &footer, &entries);
    bytes
}

fuzz_target!(|data: &[u8]| {
    let _ = decode_footer_trailer(data);
    let _ = decode_footer(data);
    let Some((count, changes)) = data.split_first() else { return };
    let mut bytes = sound(usize::from(*count), count % 2 == 0);
    let trailer_at = bytes.len() - FOOTER_TRAILER_BYTES;
    let (front, trailer) = bytes.split_at_mut(trailer_at);
    // Half of the changes go to the entries, half to the trailer.
    let (to_front, to_trailer) = changes.split_at(changes.len() / 2);
    change(front, to_front);
    change(trailer, to_trailer);
    trailer[..8].copy_from_slice(b"ForebayF");
    trailer[20..24].copy_from_slice(&crc_fast::crc32_iscsi(front).to_le_bytes());
    reseal(trailer);
    if let Ok((footer, entries)) = decode_footer(&bytes) {
        let entries = EntryTable::of(footer.unit_entries, &entries);
        let mut again = vec![0xee; footer_bytes(entries.cells())];
        encode_footer(&mut again, &footer, &entries);
        // With a changed count it may be a shorter footer, at the end of the bytes.
        assert!(bytes.ends_with(&again));
    }
});
