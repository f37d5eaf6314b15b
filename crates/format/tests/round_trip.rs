//! Every structure that can be encoded decodes to itself.

use forebay_block::{VOLUMES_MAX, VolumeId};
use forebay_format::*;
use proptest::prelude::*;

fn payload_free_entry() -> impl Strategy<Value = Entry> {
    let kind = prop_oneof![
        Just(EntryKind::Zero),
        Just(EntryKind::Invalidate),
        Just(EntryKind::Checkpoint)
    ];
    (any::<u8>(), 0..VOLUME_BLOCKS_MAX, kind, any::<bool>(), 1..=ENTRY_BLOCKS_MAX).prop_map(
        |(volume, block, kind, dirty, count)| {
            let most = count.min(VOLUME_BLOCKS_MAX - block) as u32;
            let count = if kind == EntryKind::Checkpoint { 1 } else { most };
            let volume = VolumeId(volume);
            Entry {
                volume,
                block,
                kind,
                dirty,
                first: false,
                offset: 0,
                len: 0,
                count,
                crc: 0,
                shared: None,
                base: None,
                stored: None,
            }
        },
    )
}

fn payload_entry() -> impl Strategy<Value = Entry> {
    let place = prop_oneof![
        (0u32..64).prop_map(|page| (EntryKind::Raw, page * 4096, 4096)),
        ((0u32..64 * 512), (1u16..4096)).prop_map(|(at, len)| (EntryKind::Lz4, at * 8, len)),
    ];
    let shared = prop::option::of(prop_oneof![Just(0), any::<u16>()]);
    (any::<u8>(), 0..VOLUME_BLOCKS_MAX, place, any::<bool>(), any::<u32>(), shared).prop_map(
        |(volume, block, (kind, offset, len), dirty, crc, shared)| {
            let volume = VolumeId(volume);
            let (first, count, base, stored) = (false, 1, None, None);
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
        },
    )
}

/// A block whose payload is in the store.
fn stored_entry() -> impl Strategy<Value = Entry> {
    (payload_entry(), 0u32..1 << 24, 1u8..).prop_map(|(entry, extent, page)| {
        let stored = Some(StoreUnit { extent, page });
        Entry { shared: None, stored, ..entry }
    })
}

/// A block stored against a payload of another segment.
fn similar_entry() -> impl Strategy<Value = Entry> {
    let base = prop_oneof![
        (0u32..1024).prop_map(|page| (EntryKind::Raw, page * 4096, 4096)),
        (0u32..1023 * 512, 1u16..4096).prop_map(|(at, len)| (EntryKind::Lz4, at * 8, len)),
        (0u32..1023 * 512, 1u16..4096).prop_map(|(at, len)| (EntryKind::Zstd, at * 8, len)),
    ];
    (payload_entry(), base, any::<u16>()).prop_map(|(entry, (kind, offset, len), back)| {
        let base = Some(NamedBase { back, offset, len, kind });
        let len = entry.len.min(4095);
        Entry { kind: EntryKind::Similar, len, shared: None, base, ..entry }
    })
}

/// Blocks of two units, mostly in ascending order, so that many are encoded together.
fn unit_entries() -> impl Strategy<Value = Vec<Entry>> {
    let block = (payload_entry(), 0u64..5, any::<[bool; 2]>());
    let blocks = prop::collection::vec(block, 1..7);
    (blocks, 0..VOLUME_BLOCKS_MAX - 5, 0u32..2040, 0u32..1 << 24).prop_map(
        |(mut blocks, first, page, extent)| {
            blocks[1..].sort_by_key(|(_, distance, _)| *distance);
            let entry = |(entry, distance, [other, volume]): (Entry, u64, [bool; 2])| {
                let at = entry.offset % (4 * 4096);
                let other = u32::from(other && distance == 4) * 4;
                Entry {
                    volume: VolumeId(u8::from(volume && distance == 2)),
                    block: first + distance,
                    offset: (page + other) * 4096 + at,
                    shared: None,
                    stored: Some(StoreUnit { extent, page: (at / 4096) as u8 + 1 }),
                    ..entry
                }
            };
            blocks.into_iter().map(entry).collect()
        },
    )
}

fn entries(max: usize) -> impl Strategy<Value = Vec<Entry>> {
    let alone = prop_oneof![payload_entry(), payload_free_entry(), similar_entry(), stored_entry()];
    let some = prop_oneof![2 => alone.prop_map(|entry| vec![entry]), 1 => unit_entries()];
    prop::collection::vec(some, 1..=max)
        .prop_map(move |some| some.into_iter().flatten().take(max).collect())
}

fn header() -> impl Strategy<Value = RecordHeader> {
    (any::<[u64; 4]>(), any::<[u32; 2]>(), any::<u16>(), 0u32..1024, any::<[u64; 2]>()).prop_map(
        |([pool, seq, lsn, clean], [prev_crc, epoch], shard, page, [start, durable])| {
            let (seq, lsn) = (seq % NUMBER_MAX + 1, lsn % NUMBER_MAX + 1);
            RecordHeader {
                pool,
                shard,
                seq: SegmentSeq(seq),
                lsn: Lsn(lsn),
                at: page * 4096,
                prev_crc,
                pages: 67,
                durable: Lsn(durable % lsn),
                clean: Lsn(clean),
                start: SegmentSeq(start % (seq + 1)),
                epoch,
                unit_entries: epoch.is_multiple_of(2),
            }
        },
    )
}

/// The entry in a record of segment `seq` that starts at `at`, with its payload moved after the
/// header page. A shared payload stays where it is if an earlier record can be there.
fn placed(entry: &Entry, seq: SegmentSeq, at: u32) -> Entry {
    let older = match entry.shared {
        Some(0) => entry.payload_end() <= u64::from(at),
        Some(back) => u64::from(back) < seq.0,
        None => false,
    };
    if older || entry.stored.is_some() {
        return *entry;
    }
    let offset = if entry.kind.has_payload() { entry.offset + at + 4096 } else { 0 };
    let base = entry.base.filter(|base| base.back > 0 && u64::from(base.back) < seq.0);
    let kind = match (entry.kind, base) {
        (EntryKind::Similar, None) => EntryKind::Delta,
        (kind, _) => kind,
    };
    Entry { kind, offset, shared: None, base, ..*entry }
}

proptest! {
    #[test]
    fn record_round_trip(h in header(), entries in entries(RECORD_ENTRIES_MAX)) {
        let marked = entries.iter().enumerate().map(|(nth, entry)| {
            Entry { first: nth == 0, ..placed(entry, h.seq, h.at) }
        });
        let entries: Vec<Entry> = marked.collect();
        let mut page = vec![0xa5; PAGE];
        let crc = encode_record(&mut page, &h, &entries);
        let used = RECORD_HEADER_BYTES + cells_of(&entries, h.unit_entries) * CELL_BYTES;
        prop_assert!(page[used..].iter().all(|byte| *byte == 0xa5), "wrote past the entries");
        let record = decode_record(&page).expect("just encoded");
        prop_assert_eq!((record.header, record.crc), (h, crc));
        prop_assert_eq!(record.entries, entries);
    }

    #[test]
    fn footer_round_trip(
        records in prop::collection::vec(entries(40), 0..12),
        first in 1..NUMBER_MAX / 2,
        numbers in any::<[u64; 3]>(),
        crcs in any::<[u32; 2]>(),
    ) {
        let count = records.len() as u64;
        let seq = numbers[1] % NUMBER_MAX + 1;
        let entries: Vec<Entry> = records
            .iter()
            .flat_map(|r| r.iter().enumerate().map(|(i, e)| Entry { first: i == 0, ..*e }))
            .map(|entry| placed(&entry, SegmentSeq(seq), 0))
            .collect();
        let footer = Footer {
            pool: numbers[0],
            shard: 7,
            seq: SegmentSeq(seq),
            first_lsn: Lsn(first),
            last_lsn: Lsn(first + count - 1),
            last_crc: crcs[0],
            first_prev_crc: crcs[1],
            start: SegmentSeq(numbers[2] % (seq + 1)),
            clean: Lsn(numbers[2]),
            entries: u32::try_from(entries.len()).unwrap(),
            unit_entries: crcs[0].is_multiple_of(2),
        };
        let table = EntryTable::of(footer.unit_entries, &entries);
        prop_assert!(table.iter().eq(entries.iter().copied()));
        let mut bytes = vec![0xa5; footer_bytes(table.cells())];
        encode_footer(&mut bytes, &footer, &table);
        let trailer = decode_footer_trailer(&bytes[bytes.len() - PAGE..]).expect("just encoded");
        prop_assert_eq!((trailer.footer, trailer.bytes), (footer, bytes.len()));
        // The decoder may be given more of the segment than the footer.
        let mut segment = vec![0x5a; 3 * PAGE];
        segment.extend_from_slice(&bytes);
        prop_assert_eq!(decode_footer(&bytes).expect("just encoded"), (footer, entries.clone()));
        // Decoding can go on anywhere.
        let mut at = TablePosition::default();
        for (nth, entry) in (1..).zip(&entries) {
            let mut rest = trailer.entries(&bytes).from(at);
            prop_assert_eq!(rest.next(), Some(Ok(*entry)));
            at = rest.position();
            prop_assert_eq!(at.entries(), nth);
        }
        prop_assert_eq!(trailer.entries(&bytes).from(at).next(), None);
        prop_assert_eq!(decode_footer(&segment).expect("just encoded"), (footer, entries));
    }

    #[test]
    fn superblock_round_trip(superblock in superblock()) {
        let mut bytes = vec![0xa5; SUPERBLOCK_BYTES];
        superblock.encode(&mut bytes);
        prop_assert_eq!(Superblock::decode(&bytes), Ok(superblock));
    }
}

fn volume() -> impl Strategy<Value = VolumeRecord> {
    let name = "[a-z][a-zé -]{0,31}";
    let identity = "[ -~]{0,255}";
    (name, identity, 0..=VOLUME_BLOCKS_MAX * 4096, any::<Option<u64>>()).prop_map(
        |(name, identity, size, fingerprint)| VolumeRecord {
            id: VolumeId(0),
            name,
            size,
            identity,
            fingerprint,
        },
    )
}

fn superblock() -> impl Strategy<Value = Superblock> {
    let shards = prop::collection::vec((0..9u64, 2..9u64), 1..=SHARD_AREAS);
    let volumes = prop::collection::btree_map(0u8..64, volume(), 0..VOLUMES_MAX);
    (any::<[u64; 3]>(), any::<[u8; 16]>(), 4u32..2048, any::<u32>(), shards, volumes, any::<bool>())
        .prop_map(|(numbers, uuid, pages, epoch, shards, volumes, clean)| {
            let segment_size = pages * 4096;
            let mut end = AREA_OFFSET;
            let mut area = |(gap, segments): (u64, u64)| {
                let offset = end + gap * 4096;
                let len = segments * u64::from(segment_size);
                end = offset + len;
                ShardArea { offset, len }
            };
            let shards: Vec<_> = shards.into_iter().map(&mut area).collect();
            let volumes = volumes
                .into_iter()
                .map(|(id, volume)| VolumeRecord { id: VolumeId(id), ..volume })
                .collect();
            let [pool, generation, created_unix] = numbers;
            let fits = shards.iter().all(|area: &ShardArea| area.len > 2 * u64::from(segment_size));
            Superblock {
                pool,
                uuid,
                generation,
                epoch,
                segment_size,
                device_size: end + u64::from(epoch),
                log_segments: fits.then_some(2),
                unit_entries: fits && epoch.is_multiple_of(2),
                shards,
                volumes,
                clean,
                created_unix,
            }
        })
}
