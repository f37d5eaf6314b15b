//! The bytes of one structure of each kind, as the first version wrote them. A change that breaks
//! these tests breaks every existing cache: it needs a new format version.

mod common;

use std::fmt::Write;

use forebay_format::*;

/// Lines of an offset and 32 bytes in hex; lines of zeros are omitted.
fn dump(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (line, bytes) in bytes.chunks(32).enumerate() {
        if bytes.iter().any(|byte| *byte != 0) {
            write!(text, "{:04x}:", line * 32).expect("a string takes all");
            bytes.iter().for_each(|byte| write!(text, " {byte:02x}").expect("a string takes all"));
            text.push('\n');
        }
    }
    text
}

/// The `len` bytes of a dump.
fn undump(text: &str, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for line in text.lines() {
        let (offset, line) = line.split_once(':').expect("a line begins with an offset");
        let offset = usize::from_str_radix(offset, 16).expect("an offset is hex");
        for (i, byte) in line.split_whitespace().enumerate() {
            bytes[offset + i] = u8::from_str_radix(byte, 16).expect("a byte is hex");
        }
    }
    bytes
}

fn assert_golden(name: &str, golden: &str, bytes: &[u8]) {
    let text = dump(bytes);
    assert!(text == golden, "{name} differs from tests/golden/{name}.hex:\n{text}");
    assert_eq!(undump(golden, bytes.len()), bytes);
}

#[test]
fn a_record_is_as_the_first_version_wrote_it() {
    let golden = include_str!("golden/record.hex");
    assert_golden("record", golden, &common::record_page());
    let record = decode_record(&undump(golden, PAGE)).expect("a golden record is sound");
    assert_eq!((record.header, record.entries), common::record());
}

#[test]
fn a_similar_block_is_as_it_was_written_first() {
    assert_golden("similar", include_str!("golden/similar.hex"), &common::similar_page());
}

#[test]
fn a_footer_is_as_the_first_version_wrote_it() {
    let golden = include_str!("golden/footer.hex");
    assert_golden("footer", golden, &common::footer_page());
    assert_eq!(decode_footer(&undump(golden, PAGE)), Ok(common::footer()));
}

#[test]
fn a_superblock_is_as_the_first_version_wrote_it() {
    let golden = include_str!("golden/superblock.hex");
    assert_golden("superblock", golden, &common::superblock_bytes());
    let bytes = undump(golden, SUPERBLOCK_BYTES);
    assert_eq!(Superblock::decode(&bytes), Ok(common::superblock()));
}

#[test]
fn a_block_in_the_store_is_as_its_first_version_wrote_it() {
    let page = common::stored_page();
    assert_golden("stored", include_str!("golden/stored.hex"), &page);
    let entry = decode_record(&page).expect("just encoded").entries[0];
    assert_eq!(entry.stored, Some(StoreUnit { extent: 0x02_0304, page: 3 }));
    assert_eq!((entry.count, entry.has_own_payload()), (1, false));
}

#[test]
fn blocks_of_a_unit_are_as_they_were_first_written_together() {
    let golden = include_str!("golden/unit.hex");
    assert_golden("unit", golden, &common::page_of(&common::unit(), true));
    let record = decode_record(&undump(golden, PAGE)).expect("a golden record is sound");
    assert_eq!((record.header.unit_entries, record.entries), (true, common::unit()));
    let golden = include_str!("golden/unit_footer.hex");
    let (footer, bytes) = common::unit_footer(true);
    assert_golden("unit_footer", golden, &bytes);
    assert_eq!(decode_footer(&undump(golden, PAGE)), Ok((footer, common::unit())));
}

/// Where the superblock is of version 2, each block of a unit has an entry of its own.
#[test]
fn blocks_of_a_unit_are_written_apart_as_before() {
    let golden = include_str!("golden/unit_apart.hex");
    assert_golden("unit_apart", golden, &common::page_of(&common::unit(), false));
    let record = decode_record(&undump(golden, PAGE)).expect("a golden record is sound");
    assert_eq!((record.header.unit_entries, record.entries), (false, common::unit()));
}

#[test]
fn a_superblock_with_a_store_is_of_the_second_version_or_the_third() {
    for (unit_entries, name, version, golden) in [
        (false, "stored_superblock", 2, include_str!("golden/stored_superblock.hex")),
        (true, "unit_superblock", 3, include_str!("golden/unit_superblock.hex")),
    ] {
        let superblock = Superblock { unit_entries, ..common::superblock_with_store() };
        let mut bytes = vec![0xff; SUPERBLOCK_BYTES];
        superblock.encode(&mut bytes);
        assert_golden(name, golden, &bytes);
        assert_eq!(bytes[12], version);
        assert_eq!(Superblock::decode(&bytes), Ok(superblock));
    }
}
