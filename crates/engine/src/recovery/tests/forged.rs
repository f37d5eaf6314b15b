//! Starts on a device whose log was forged: each checksum is right, and no engine has written it.

use forebay_codec::crc32c;
use forebay_format::{
    ENTRY_BLOCKS_MAX, Entry, FOOTER_TRAILER_BYTES, NUMBER_MAX, RecordHeader, SegmentSeq,
    encode_record,
};

use super::*;
use crate::recovery::salvage::placeholder;
use crate::testing::rooms::PRIMARY_BLOCKS;

/// Dirty zeros from a block on.
fn zeros(block: u64, count: u32) -> Entry {
    Entry { block, kind: EntryKind::Zero, count, ..placeholder() }
}

/// The bytes of a segment's place.
fn place(rooms: &mut Rooms, seq: u64) -> &mut [u8] {
    let index = seq % rooms.log.len();
    let bytes = segment(index);
    &mut rooms.devices.cache[bytes.start as usize..bytes.end as usize]
}

/// Corrects the checksum of a structure.
fn reseal(structure: &mut [u8]) {
    let crc = crc32c(&structure[12..]);
    structure[8..12].copy_from_slice(&crc.to_le_bytes());
}

/// Begins a segment with the first record of a log, of one entry. Returns header and entry.
fn begun(rooms: &mut Rooms, seq: u64, entry: Entry) -> &mut [u8] {
    let header = RecordHeader {
        pool: rooms.config.pool,
        shard: rooms.config.shard,
        seq: SegmentSeq(seq),
        lsn: Lsn(1),
        at: 0,
        prev_crc: 0,
        pages: 1,
        durable: Lsn(0),
        clean: Lsn(0),
        start: SegmentSeq(1),
        epoch: 1,
        unit_entries: false,
    };
    let page = &mut place(rooms, seq)[..PAGE];
    encode_record(page, &header, &[entry]);
    &mut page[..96 + 24]
}

/// Makes a segment with one record of one entry the whole log. Returns its footer's trailer.
fn sealed(rooms: &mut Rooms, seq: u64, lsn: u64, entry: Entry) -> &mut [u8] {
    let footer = Footer {
        pool: rooms.config.pool,
        shard: rooms.config.shard,
        seq: SegmentSeq(seq),
        first_lsn: Lsn(lsn),
        last_lsn: Lsn(lsn),
        last_crc: 0,
        first_prev_crc: 0,
        start: SegmentSeq(seq),
        clean: Lsn(0),
        entries: 0,
        unit_entries: false,
    };
    let entries = EntryTable::of(false, &[entry]);
    let footer = Footer { entries: entries.len() as u32, ..footer };
    let mut bytes = vec![0; footer_bytes(entries.cells())];
    encode_footer(&mut bytes, &footer, &entries);
    let place = place(rooms, seq);
    let at = place.len() - bytes.len();
    place[at..].copy_from_slice(&bytes);
    let at = place.len() - FOOTER_TRAILER_BYTES;
    &mut place[at..]
}

/// A start on the device, which must serve no block.
fn serves_nothing(rooms: Rooms) {
    let bed = Bed::after(rooms).serving();
    assert_eq!((bed.rooms.contents.index().len(), bed.rooms.log.next_lsn()), (0, Lsn(1)));
}

#[test]
fn a_record_is_accepted_if_an_engine_may_have_written_it() {
    let mut rooms = Rooms::new(0);
    begun(&mut rooms, 1, zeros(7, 2));
    let bed = Bed::after(rooms).serving();
    assert_eq!([6, 7, 8, 9].map(|block| bed.block(block)), [None, Some(true), Some(true), None]);
    let mut rooms = Rooms::new(0);
    sealed(&mut rooms, 10, 99, zeros(7, 2));
    let bed = Bed::after(rooms).serving();
    assert_eq!([7, 8].map(|block| bed.block(block)), [Some(true); 2]);
    assert_eq!(bed.rooms.log.next_lsn(), Lsn(100));
}

/// With a count of 2^32 - 1, one entry filled all memory.
#[test]
fn an_entry_of_more_blocks_than_a_request_has_is_none() {
    let count = (ENTRY_BLOCKS_MAX as u32 + 1).to_le_bytes();
    let mut rooms = Rooms::new(0);
    let record = begun(&mut rooms, 1, zeros(7, 2));
    record[96 + 14..96 + 18].copy_from_slice(&count);
    reseal(record);
    serves_nothing(rooms);
}

#[test]
fn an_entry_of_blocks_past_the_end_of_the_volume_does_not_count() {
    let last = PRIMARY_BLOCKS - 1;
    for in_record in [false, true] {
        let mut rooms = Rooms::new(0);
        match in_record {
            true => _ = begun(&mut rooms, 1, zeros(last, 2)),
            false => _ = sealed(&mut rooms, 1, 1, zeros(last, 2)),
        }
        let bed = Bed::after(rooms).serving();
        assert_eq!((bed.rooms.contents.index().len(), bed.rooms.log.next_lsn()), (0, Lsn(2)));
    }
}

/// The number wrapped around, and the start looked for all segments from 0 on.
#[test]
fn a_segment_of_a_number_that_no_log_reaches_is_none() {
    for number in [u64::MAX - 1, NUMBER_MAX + 1] {
        let mut rooms = Rooms::new(0);
        let at = number % rooms.log.len();
        let record = begun(&mut rooms, at, zeros(7, 1));
        record[32..40].copy_from_slice(&number.to_le_bytes());
        reseal(record);
        serves_nothing(rooms);
        let mut rooms = Rooms::new(0);
        let trailer = sealed(&mut rooms, at, 1, zeros(7, 1));
        trailer[32..40].copy_from_slice(&number.to_le_bytes());
        reseal(trailer);
        serves_nothing(rooms);
    }
    // This one might exist, but nothing leads to it.
    let mut rooms = Rooms::new(0);
    begun(&mut rooms, NUMBER_MAX, zeros(7, 1));
    serves_nothing(rooms);
}

/// The first record that followed could not be encoded.
#[test]
fn a_log_that_could_not_go_on_is_refused() {
    for (seq, lsn) in [(1, NUMBER_MAX), (NUMBER_MAX, 1)] {
        let mut rooms = Rooms::new(0);
        sealed(&mut rooms, seq, lsn, zeros(7, 1));
        let mut bed = Bed::after(rooms);
        let State::Refused(why) = bed.run(|_| Ok(())) else { panic!("it is served") };
        assert!(why.ends_with("no log is that long"), "{why}");
        assert!(bed.changes.is_empty());
    }
    let mut rooms = Rooms::new(0);
    let trailer = sealed(&mut rooms, 1, 1, zeros(7, 1));
    trailer[40..48].copy_from_slice(&(u64::MAX - 1).to_le_bytes());
    trailer[48..56].copy_from_slice(&(u64::MAX - 1).to_le_bytes());
    reseal(trailer);
    serves_nothing(rooms);
}

/// A position without a segment counted as segment 0.
#[test]
fn no_entry_shares_a_payload_of_segment_0() {
    let shared = |back| Entry {
        kind: EntryKind::Raw,
        len: BLOCK_SIZE as u16,
        shared: Some(back),
        ..zeros(7, 1)
    };
    for back in [1, 2] {
        let mut rooms = Rooms::new(0);
        sealed(&mut rooms, 1, 1, shared(back));
        let bed = Bed::after(rooms).serving();
        assert_eq!((bed.block(7), bed.rooms.contents.live_in(0)), (None, 0));
    }
}
