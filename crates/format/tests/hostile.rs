//! Bytes that the encoder did not write: flipped, torn, foreign, or crafted. None of them makes a
//! decoder panic, and only the encoder's own bytes are accepted.

mod common;

use common::reseal;
use forebay_block::NAME_BYTES_MAX;
use forebay_format::*;
use proptest::prelude::*;

/// Decodes bytes as each structure. Returns whether any succeeded.
fn any_decodes(bytes: &[u8]) -> bool {
    let record = decode_record(bytes).is_ok();
    let footer = decode_footer_trailer(bytes).is_ok() && decode_footer(bytes).is_ok();
    record || footer || Superblock::decode(bytes).is_ok()
}

/// The field and offset in the error of decoding a structure with one changed field and a corrected
/// CRC.
fn invalid(result: Result<impl std::fmt::Debug, FormatError>) -> (&'static str, usize) {
    match result {
        Err(FormatError::Invalid { what, at, .. }) => (what, at),
        other => panic!("decoded to {other:?}"),
    }
}

#[test]
fn every_flipped_bit_of_a_record_is_seen() {
    let sound = common::record_page();
    let covered = RECORD_HEADER_BYTES + common::record().1.len() * ENTRY_BYTES;
    for bit in 0..covered * 8 {
        let mut page = sound.clone();
        page[bit / 8] ^= 1 << (bit % 8);
        assert!(decode_record(&page).is_err(), "bit {bit}");
    }
}

#[test]
fn every_flipped_bit_of_a_footer_is_seen() {
    let sound = common::footer_page();
    for bit in 0..sound.len() * 8 {
        let mut page = sound.clone();
        page[bit / 8] ^= 1 << (bit % 8);
        assert!(decode_footer(&page).is_err(), "bit {bit}");
    }
}

#[test]
fn every_flipped_byte_of_a_superblock_is_seen() {
    let sound = common::superblock_bytes();
    for at in 0..sound.len() {
        let mut bytes = sound.clone();
        bytes[at] ^= 1 << (at % 8);
        assert!(Superblock::decode(&bytes).is_err(), "byte {at}");
    }
}

/// Sectors are written atomically but in any order, and a crash may come after any of them.
#[test]
fn a_torn_write_over_an_older_structure_is_seen() {
    let older = {
        let mut superblock = common::superblock();
        superblock.generation -= 1;
        superblock.volumes[1].size += 4096;
        let mut bytes = vec![0; SUPERBLOCK_BYTES];
        superblock.encode(&mut bytes);
        bytes
    };
    let newer = common::superblock_bytes();
    let differs: Vec<usize> = (0..SUPERBLOCK_BYTES / 512)
        .filter(|s| older[s * 512..][..512] != newer[s * 512..][..512])
        .collect();
    assert_eq!(differs.len(), 2, "the head and the second volume");
    for sector in differs {
        let mut torn = older.clone();
        torn[sector * 512..][..512].copy_from_slice(&newer[sector * 512..][..512]);
        assert!(Superblock::decode(&torn).is_err(), "only sector {sector} was written");
    }
}

#[test]
fn blank_and_foreign_bytes_are_told_from_damage() {
    let blank = vec![0; SUPERBLOCK_BYTES];
    assert_eq!(decode_record(&blank), Err(FormatError::Blank));
    assert_eq!(decode_footer(&blank[..PAGE]), Err(FormatError::Blank));
    assert_eq!(Superblock::decode(&blank), Err(FormatError::Blank));
    let mut foreign = blank.clone();
    foreign[1080] = 0x53; // The magic number of ext4 is here.
    let error = Superblock::decode(&foreign).expect_err("it is not a superblock");
    assert!(matches!(error, FormatError::NoMagic { .. }) && error.is_absent(), "{error}");
    let mut damaged = common::superblock_bytes();
    damaged[100] ^= 1;
    let error = Superblock::decode(&damaged).expect_err("a bit was flipped");
    assert!(!error.is_absent() && error.to_string().starts_with("CRC at byte 8"), "{error}");
}

#[test]
fn structures_of_another_version_are_refused() {
    let mut page = common::record_page();
    page[12] = 3;
    reseal(&mut page[..RECORD_HEADER_BYTES + 5 * ENTRY_BYTES]);
    assert_eq!(invalid(decode_record(&page)), ("format version", 12));
    for version in [0, 4] {
        let mut bytes = common::superblock_bytes();
        bytes[12] = version;
        reseal(&mut bytes);
        assert_eq!(invalid(Superblock::decode(&bytes)), ("format version", 12));
    }
    let mut page = common::footer_page();
    let trailer = PAGE - FOOTER_TRAILER_BYTES;
    page[trailer + 12] = 3;
    reseal(&mut page[trailer..]);
    assert_eq!(invalid(decode_footer(&page)), ("format version", 12));
}

/// A description, the offset in a record's page, the new bytes, and the offset that the error
/// names.
const RECORD_FIELDS: [(&str, usize, &[u8], usize); 29] = [
    ("no entries", 16, &[0], 16),
    ("more entries than fit", 16, &[167], 16),
    ("no pages", 18, &[0, 0], 18),
    ("offset not of a page", 20, &[1, 16], 20),
    ("end after the longest segment", 20, &[0, 0xf0, 0xff, 3], 20),
    ("LSN not after the durable one", 40, &[0xe6, 3], 48),
    ("an LSN above the greatest", 40, &[1, 0, 0, 0, 0, 0, 0, 0x40], 40),
    ("segment 0", 32, &[0], 32),
    ("a segment above the greatest", 32, &[1, 0, 0, 0, 0, 0, 0, 0x40], 32),
    ("oldest segment after this one", 64, &[10], 64),
    ("reserved bytes of the header", 95, &[1], 95),
    ("the first kind that there is not", 96 + 6, &[10], 96 + 6),
    ("unknown kind", 96 + 6, &[99], 96 + 6),
    ("unknown flag", 96 + 7, &[0x83], 96 + 7),
    ("base of a block in the store", 96 + 7, &[0x2b], 96 + 7),
    ("shared payload in the store", 96 + 7, &[0x27], 96 + 7),
    ("slot of no pages", 96 + 7, &[0x23], 96 + 17),
    ("first entry not marked", 96 + 7, &[1], 96 + 7),
    ("shared payload in its own record", 96 + 7, &[7], 96 + 8),
    (
        "shared payload of before the first segment",
        96 + 7,
        &[7, 0, 0, 0, 0, 0, 16, 1, 0, 0, 0, 0, 0, 0, 0, 10],
        96 + 22,
    ),
    (
        "shared payload of segment 0",
        96 + 7,
        &[7, 0, 0, 0, 0, 0, 16, 1, 0, 0, 0, 0, 0, 0, 0, 9],
        96 + 22,
    ),
    ("base of a block that needs none", 96 + 7, &[0xb], 96 + 7),
    ("raw payload not of a page", 96 + 8, &[8], 96 + 8),
    ("raw payload over the header", 96 + 8, &[0, 0x10], 96 + 8),
    ("raw payload after the record", 96 + 8, &[0, 0x40], 96 + 8),
    ("short raw payload", 96 + 12, &[0xff, 0x0f], 96 + 12),
    ("two blocks in one payload", 96 + 14, &[2], 96 + 14),
    ("reserved bytes of an entry", 96 + 23, &[1], 96 + 23),
    ("second entry marked first", 120 + 7, &[3], 120 + 7),
];

/// The same for later entries: LZ4, zeros and invalidation.
const ENTRY_FIELDS: [(&str, usize, &[u8], usize); 11] = [
    ("compressed payload not of 8 bytes", 120 + 8, &[4], 120 + 8),
    ("empty compressed payload", 120 + 12, &[0, 0], 120 + 12),
    ("compressed payload of a block", 120 + 12, &[0, 0x10], 120 + 12),
    ("compressed payload over the record's end", 120 + 8, &[0xf8, 0x3f], 120 + 8),
    ("zeroes above the largest volume", 144 + 14, &[1], 144 + 1),
    ("zeroes that share a payload", 144 + 7, &[4], 144 + 7),
    ("zeroes in the store", 144 + 7, &[0x20], 144 + 7),
    ("zeroes with an offset", 144 + 8, &[8], 144 + 8),
    ("zeroes with a CRC", 144 + 18, &[1], 144 + 18),
    ("no blocks", 168 + 14, &[0, 0], 168 + 14),
    ("more blocks than a request has", 168 + 14, &[1, 1], 168 + 14),
];

/// The same for a record whose only block is stored against another one.
const SIMILAR_FIELDS: [(&str, usize, &[u8], usize); 8] = [
    ("similar to nothing", 96 + 7, &[2], 96 + 22),
    ("similar, and shared", 96 + 7, &[0x16], 96 + 7),
    ("an empty base", 96 + 14, &[0, 6, 0, 0], 96 + 14),
    ("a compressed base of a block", 96 + 14, &[0, 6, 0, 0x80], 96 + 14),
    ("a raw base not of a page", 96 + 7, &[0xa, 120, 0, 0, 0, 99, 0, 1, 0, 0, 0x80], 96 + 14),
    ("a base in its own record", 96 + 22, &[0], 96 + 8),
    ("a base of segment 0", 96 + 22, &[10], 96 + 22),
    ("a base of before the first segment", 96 + 22, &[11], 96 + 22),
];

#[test]
fn each_field_of_a_base_is_checked() {
    let sound = common::similar_page();
    assert!(decode_record(&sound).is_ok());
    for (case, at, bytes, error_at) in SIMILAR_FIELDS {
        let mut page = sound.clone();
        page[at..at + bytes.len()].copy_from_slice(bytes);
        reseal(&mut page[..RECORD_HEADER_BYTES + ENTRY_BYTES]);
        assert_eq!(invalid(decode_record(&page)).1, error_at, "{case}");
    }
}

/// The same for a record with a unit entry, and a mapping of its first block after it.
const UNIT_FIELDS: [(&str, usize, &[u8], usize); 18] = [
    ("a unit entry in a record without", 12, &[1, 0, 2, 1, 2], 96 + 6),
    ("cells of less than an entry", 16, &[2], 16),
    ("more cells than fit", 16, &[0xf5, 1], 16),
    ("cells that end in an entry", 16, &[7], 96 + 40 + 14),
    ("the first kind that there is not", 96 + 6, &[11], 96 + 6),
    ("a dirty unit", 96 + 7, &[3], 96 + 7),
    ("first entry not marked", 96 + 7, &[0], 96 + 7),
    ("a unit of one block", 96 + 11, &[1], 96 + 11),
    ("a unit of five blocks", 96 + 11, &[5], 96 + 11),
    ("a page after the longest extent", 96 + 12, &[0, 0x40], 96 + 12),
    ("a block of no kind", 96 + 16 + 7, &[0], 96 + 20),
    ("a first block after the first", 96 + 16 + 7, &[5], 96 + 20),
    ("reserved bits", 96 + 16 + 7, &[0x21], 96 + 20),
    ("raw payload not of a page", 96 + 20, &[1], 96 + 16 + 8),
    ("empty compressed payload", 96 + 28, &[0x7e, 2, 0], 96 + 24 + 12),
    ("compressed payload of a block", 96 + 28, &[0x7e, 2, 0x80], 96 + 24 + 12),
    ("a block twice", 96 + 24 + 7, &[2], 96 + 28),
    ("a block of the unit apart", 136 + 1, &[0x9a], 136),
];

#[test]
fn each_field_of_a_unit_entry_is_checked() {
    let sound = common::page_of(&common::unit(), true);
    let covered = |page: &[u8]| {
        let cell = if page[12] == 2 { CELL_BYTES } else { ENTRY_BYTES };
        RECORD_HEADER_BYTES + usize::from(page[16]) * cell
    };
    assert_eq!((sound[12], covered(&sound)), (2, 96 + 40 + 24));
    for (case, at, bytes, error_at) in UNIT_FIELDS {
        let mut page = sound.clone();
        page[at..at + bytes.len()].copy_from_slice(bytes);
        let covered = covered(&page).min(PAGE);
        reseal(&mut page[..covered]);
        let (what, at) = invalid(decode_record(&page));
        assert_eq!(at, error_at, "{case}: {what}");
    }
}

#[test]
fn each_field_of_a_footer_with_a_unit_entry_is_checked() {
    let trailer_at = PAGE - FOOTER_TRAILER_BYTES;
    let cases: [(&str, usize, &[u8], usize); 6] = [
        ("more entries than cells", 16, &[9], 16),
        ("more entries than there are", 16, &[5], 16),
        ("fewer cells than there are", 80, &[5], 40),
        ("more cells than there are", 80, &[9], 64 + 6),
        ("cells of a footer of the first version", 12, &[1], 80),
        ("more cells than a segment can have", 80, &[0, 0, 0, 1], 80),
    ];
    for (case, at, bytes, error_at) in cases {
        let (_, mut page) = common::unit_footer(true);
        let trailer = &mut page[trailer_at..];
        trailer[at..at + bytes.len()].copy_from_slice(bytes);
        reseal(trailer);
        let (what, at) = invalid(decode_footer(&page));
        assert_eq!(at, error_at, "{case}: {what}");
    }
}

#[test]
fn each_field_of_a_record_is_checked() {
    for (case, at, bytes, error_at) in RECORD_FIELDS.into_iter().chain(ENTRY_FIELDS) {
        let mut page = common::record_page();
        page[at..at + bytes.len()].copy_from_slice(bytes);
        let entries = usize::from(page[16]).min(RECORD_ENTRIES_MAX);
        reseal(&mut page[..RECORD_HEADER_BYTES + entries * ENTRY_BYTES]);
        let (what, at) = invalid(decode_record(&page));
        assert_eq!(at, error_at, "{case}: {what}");
    }
}

#[test]
fn each_field_of_a_trailer_is_checked() {
    let cases: [(&str, usize, &[u8], usize); 11] = [
        ("more entries than a segment can have", 16, &[0xff; 4], 16),
        ("fewer entries than records", 16, &[1], 16),
        ("more entries than bytes", 16, &[0, 1], 0),
        ("another CRC of the entries", 20, &[0], 0),
        ("segment 0", 32, &[0], 32),
        ("a segment above the greatest", 32, &[1, 0, 0, 0, 0, 0, 0, 0x40], 32),
        ("an LSN above the greatest", 48, &[1, 0, 0, 0, 0, 0, 0, 0x40], 48),
        ("first LSN 0", 40, &[0; 8], 40),
        ("last LSN before the first", 48, &[1, 0], 48),
        ("oldest segment after this one", 56, &[10], 56),
        ("reserved bytes", 127, &[1], 127),
    ];
    for (case, at, bytes, error_at) in cases {
        let mut page = common::footer_page();
        let trailer = &mut page[PAGE - FOOTER_TRAILER_BYTES..];
        trailer[at..at + bytes.len()].copy_from_slice(bytes);
        reseal(trailer);
        let (what, at) = invalid(decode_footer(&page));
        assert_eq!(at, error_at, "{case}: {what}");
    }
}

#[test]
fn a_footers_records_are_as_many_as_its_lsns() {
    let (footer, entries) = common::footer();
    let page = |change: fn(&mut [u8])| {
        let mut page = common::footer_page();
        let (front, trailer) = page.split_at_mut(PAGE - FOOTER_TRAILER_BYTES);
        change(front);
        trailer[20..24].copy_from_slice(&common::crc32c(front).to_le_bytes());
        reseal(trailer);
        page
    };
    assert_eq!(decode_footer(&page(|_| {})), Ok((footer, entries)));
    assert_eq!(invalid(decode_footer(&page(|front| front[24 + 7] = 1))).1, 16, "one fewer");
    assert_eq!(invalid(decode_footer(&page(|front| front[48 + 7] |= 2))).1, 16, "one more");
    let moved = page(|front| (front[7], front[48 + 7]) = (0, 2));
    assert_eq!(invalid(decode_footer(&moved)).1, 7, "entries before the first record");
    assert_eq!(invalid(decode_footer(&page(|front| front[200] = 1))).1, 200, "padding");
}

/// Superblocks with some bytes changed: the change, where it is, its bytes, and where the error is.
fn each_is_refused(cases: &[(&str, usize, &[u8], usize)]) {
    for &(case, at, bytes, error_at) in cases {
        let mut superblock = common::superblock_bytes();
        superblock[at..at + bytes.len()].copy_from_slice(bytes);
        reseal(&mut superblock);
        let (what, at) = invalid(Superblock::decode(&superblock));
        assert_eq!(at, error_at, "{case}: {what}");
    }
}

#[test]
fn each_field_of_a_superblock_is_checked() {
    let volumes = 128 + SHARD_AREAS * 16;
    // From the version on, the head of the pool with this number of log segments.
    let log_of = |segments: u32| {
        let mut head = common::superblock_bytes()[12..80].to_vec();
        head[0] = 3;
        head[64..68].copy_from_slice(&segments.to_le_bytes());
        head
    };
    let (one, all) = (log_of(1), log_of(100));
    let cases: [(&str, usize, &[u8], usize); 23] = [
        ("unknown flag", 14, &[2], 14),
        ("segment of no pages", 52, &[0; 4], 52),
        ("segment above the longest", 52, &[0, 0, 0, 8], 52),
        ("segment not of pages", 52, &[1], 52),
        ("device shorter than the areas", 56, &[0, 0, 0, 0x30], 128 + 16),
        ("no shards", 72, &[0], 72),
        ("more shards than fit", 72, &[1, 1], 72),
        ("more volumes than fit", 74, &[65], 74),
        ("log segments without a store", 76, &[1], 76),
        ("a store without log segments", 12, &[2], 76),
        ("a log of one segment", 12, &one, 76),
        ("a log of all segments", 12, &all, 76),
        ("reserved bytes of the head", 80, &[1], 80),
        ("area in the superblocks", 128, &[0; 8], 128),
        ("area not of a page", 128, &[1], 128),
        ("area not of segments", 128 + 8, &[1], 128 + 8),
        ("area of one segment", 128 + 8, &[0, 0, 64, 0], 128 + 8),
        ("area over the one before", 128 + 16 + 3, &[0x18], 128 + 16),
        ("area past the end of addresses", 128 + 24 + 6, &[0xff, 0xff], 128 + 16),
        ("bytes after the last area", 128 + 32, &[1], 128 + 32),
        ("volume id above the last", volumes, &[64], volumes),
        ("name of no bytes", volumes + 2, &[0], volumes + 24),
        ("bytes after the last volume", SUPERBLOCK_BYTES - 1, &[1], SUPERBLOCK_BYTES - 1),
    ];
    each_is_refused(&cases);
}

#[test]
fn each_field_of_a_volume_is_checked() {
    let (first, second) = (128 + SHARD_AREAS * 16, 128 + SHARD_AREAS * 16 + 384);
    let cases: [(&str, usize, &[u8], usize); 8] = [
        ("the same id twice", second, &[0], second),
        ("unknown flag", first + 1, &[2], first + 1),
        ("name longer than its field", first + 2, &[65], first + 24),
        ("reserved bytes", first + 4, &[1], first + 4),
        ("volume larger than block numbers go", first + 8 + 6, &[0xff], first + 8),
        ("fingerprint though absent", second + 16, &[1], second + 16),
        ("name that is not UTF-8", first + 24, &[0xff], first + 24),
        ("bytes after the identity", first + 24 + 64 + 200, &[1], first + 24 + 64 + 200),
    ];
    each_is_refused(&cases);
}

#[test]
fn names_and_identities_of_users_are_checked_before_encoding() {
    let mut superblock = common::superblock();
    assert_eq!(superblock.check(), Ok(()));
    superblock.volumes[0].name = "x".repeat(NAME_BYTES_MAX + 1);
    let (what, _) = invalid(superblock.check());
    assert_eq!(what, "bytes of a volume's name");
    superblock.volumes[0].name = "x".repeat(NAME_BYTES_MAX);
    superblock.volumes[0].identity = "y".repeat(IDENTITY_BYTES_MAX + 1);
    let (what, _) = invalid(superblock.check());
    assert_eq!(what, "bytes of a primary's identity");
    superblock.volumes[0].identity = "y".repeat(IDENTITY_BYTES_MAX);
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    superblock.encode(&mut bytes);
    assert_eq!(Superblock::decode(&bytes), Ok(superblock));
}

#[test]
fn the_newest_sound_superblock_counts() {
    let of = |generation| Superblock { generation, ..common::superblock() };
    let torn = || {
        Err(FormatError::Invalid { what: "CRC", at: 8, found: 1, rule: Rule::Exactly, expected: 2 })
    };
    let foreign = || Err(FormatError::NoMagic { what: "superblock", found: 1, expected: 2 });
    let blank = || Err(FormatError::Blank);
    assert_eq!(newest(Ok(of(4)), Ok(of(5))), Ok((of(5), 1)));
    assert_eq!(newest(Ok(of(6)), Ok(of(5))), Ok((of(6), 0)));
    assert_eq!(newest(Ok(of(4)), torn()), Ok((of(4), 0)));
    assert_eq!(newest(torn(), Ok(of(3))), Ok((of(3), 1)));
    assert_eq!(newest(blank(), blank()), blank().map(|of: Superblock| (of, 0)));
    for (a, b) in [(blank(), torn()), (torn(), blank()), (foreign(), torn()), (torn(), foreign())] {
        assert_eq!(newest(a, b), torn().map(|of: Superblock| (of, 0)));
    }
    for (a, b) in [(blank(), foreign()), (foreign(), blank())] {
        assert_eq!(newest(a, b), foreign().map(|of: Superblock| (of, 0)));
    }
}

proptest! {
    #[test]
    fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..2 * PAGE)) {
        prop_assert!(!any_decodes(&bytes), "random bytes are no structure");
    }

    /// Any change of a record with a corrected CRC is rejected, or decodes to a record that encodes
    /// to the same bytes: every record has exactly one encoding.
    #[test]
    fn records_have_one_encoding(
        of_unit in any::<bool>(),
        changes in prop::collection::vec((12usize..216, any::<u8>()), 1..4),
    ) {
        let mut page = match of_unit {
            true => common::page_of(&common::unit(), true),
            false => common::record_page(),
        };
        changes.iter().for_each(|(at, byte)| page[*at] = *byte);
        let count = usize::from(u16::from_le_bytes([page[16], page[17]]));
        let cells = if page[12] == 2 { count } else { count * ENTRY_CELLS };
        let covered = RECORD_HEADER_BYTES + cells.min(RECORD_CELLS_MAX) * CELL_BYTES;
        reseal(&mut page[..covered]);
        if let Ok(record) = decode_record(&page) {
            let mut again = page.clone();
            again[..covered].fill(0);
            encode_record(&mut again, &record.header, &record.entries);
            prop_assert_eq!(again, page);
        }
    }

    #[test]
    fn superblocks_have_one_encoding(
        changes in prop::collection::vec(
            (prop_oneof![12usize..200, 4224usize..4960], any::<u8>()), 1..3),
    ) {
        let mut bytes = common::superblock_bytes();
        changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        reseal(&mut bytes);
        if let Ok(superblock) = Superblock::decode(&bytes) {
            let mut again = vec![0; SUPERBLOCK_BYTES];
            superblock.encode(&mut again);
            prop_assert_eq!(again, bytes);
        }
    }
}
