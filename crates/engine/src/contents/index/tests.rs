//! The index beside a plain map; its memory; and the index when memory cannot be had.

use forebay_block::VolumeId;
use forebay_block::testing::Numbers;

use forebay_format::EntryKind;

use super::slot::REST_BITS;
use super::*;
use std::collections::BTreeMap;

fn place(n: u64) -> Place {
    Place {
        segment: (n % SEGMENTS_MAX) as u32,
        offset: (n % (SEGMENT_BYTES_MAX / 8)) as u32 * 8,
        len: (n % 4097) as u16,
        kind: if n.is_multiple_of(3) { EntryKind::Raw } else { EntryKind::Lz4 },
        crc: n as u32,
        dirty: n.is_multiple_of(2),
        meta: (n % 8) as u8,
    }
}

#[test]
fn slots_keep_every_bit_at_the_limits() {
    let full = Place {
        segment: (SEGMENTS_MAX - 1) as u32,
        offset: (SEGMENT_BYTES_MAX - 8) as u32,
        len: 4096,
        kind: EntryKind::Zero,
        crc: u32::MAX,
        dirty: true,
        meta: 7,
    };
    let slot = Slot::pack((1 << REST_BITS) - 1, true, &full);
    assert_eq!(slot.place(), full);
    assert!(slot.holds((1 << REST_BITS) - 1, true));
}

#[test]
fn agrees_with_a_plain_map_up_to_its_capacity() {
    let mut index = Index::new(60_000);
    let mut model = BTreeMap::new();
    let mut numbers = Numbers::new(1);
    for n in 0..400_000u64 {
        let key = Key::new(VolumeId(numbers.below(16) as u8), numbers.below(1 << 14));
        if n % 5 == 4 || (index.is_full() && !model.contains_key(&key)) {
            assert_eq!(index.remove(key), model.remove(&key));
        } else {
            assert_eq!(index.insert(key, place(n)), model.insert(key, place(n)));
        }
        assert_eq!(index.len(), model.len() as u64);
    }
    assert!(model.iter().all(|(&key, &place)| index.get(key) == Some(place)));
    for key in model.keys() {
        index.update(*key, |place| place.dirty = !place.dirty);
    }
    assert!(model.iter().all(|(&key, p)| index.get(key).is_some_and(|q| q.dirty != p.dirty)));
}

#[test]
fn fills_to_its_capacity_without_overflow_within_18_bytes_a_block() {
    let blocks = 500_000;
    let mut index = Index::new(blocks);
    for block in 0..blocks {
        index.insert(Key::new(VolumeId(0), block * 7), place(block));
    }
    assert!(index.overflow.is_empty());
    assert!(index.is_full() && index.bytes() <= 18 * blocks);
    assert!((0..blocks).all(|b| index.get(Key::new(VolumeId(0), b * 7)) == Some(place(b))));
}

fn key(n: u64) -> Key {
    Key::new(VolumeId(0), n * 7)
}

#[test]
fn room_made_at_once_holds_as_many_blocks_as_asked_for_without_a_step() {
    let mut index = Index::new(300_000);
    index.reserve(200_000);
    let bytes = index.bytes();
    assert!((200_000 * 16..200_000 * 18).contains(&bytes), "{bytes} bytes");
    fill(&mut index, 200_000);
    assert_eq!(index.bytes(), bytes, "no step was needed");
    fill(&mut index, 300_000);
    assert!((0..300_000).all(|n| index.get(key(n)) == Some(place(n))));
    assert!(index.bytes() <= bytes_for(300_000));
}

/// Inserts blocks until there are `to`.
fn fill(index: &mut Index, to: u64) {
    for n in index.len()..to {
        assert_eq!(index.insert(key(n), place(n)), None);
    }
}

#[test]
fn memory_follows_the_number_of_blocks() {
    let mut index = Index::new(3_000_000);
    let header = size_of::<Index>() as u64;
    assert!(index.bytes() + header < 64 << 10, "nothing is allocated");
    assert_eq!((index.get(key(1)), index.remove(key(1)), index.iter().count()), (None, None, 0));
    assert_eq!(index.sample(7, 10).count(), 0);
    let fills = [70_000, 100_000, 250_000, 333_333, 1_000_000, 1_234_567, 3_000_000];
    for blocks in fills {
        fill(&mut index, blocks);
        let bytes = index.bytes() as f64 / blocks as f64;
        assert!((16.8..=18.0).contains(&bytes), "{bytes} bytes for each of {blocks} blocks");
        assert!(index.overflow.is_empty());
    }
    assert!(index.is_full() && index.bytes() <= bytes_for(3_000_000));
    assert!((0..3_000_000).all(|n| index.get(key(n)) == Some(place(n))));
    for n in 100_000..3_000_000 {
        assert_eq!(index.remove(key(n)), Some(place(n)));
    }
    let bytes = index.bytes() / index.len();
    assert!(bytes <= 20, "{bytes} bytes for each block that is left");
    assert!((0..100_000).all(|n| index.get(key(n)) == Some(place(n))));
    assert_eq!(index.iter().count(), 100_000);
}

#[test]
fn agrees_with_a_plain_map_while_it_grows_and_shrinks() {
    let mut index = Index::new(1 << 20);
    let mut model = BTreeMap::new();
    let mut numbers = Numbers::new(2);
    for n in 0..1_200_000u64 {
        // Mostly inserts, then mostly removals, and again.
        let grows = n / 300_000 % 2 == 0;
        let key = Key::new(VolumeId(numbers.below(3) as u8), numbers.below(1 << 16));
        if numbers.below(8) == 0 || !grows {
            assert_eq!(index.remove(key), model.remove(&key));
        } else {
            assert_eq!(index.insert(key, place(n)), model.insert(key, place(n)));
        }
        assert_eq!(index.len(), model.len() as u64);
        if n % 100_000 == 99_999 {
            let all: BTreeMap<Key, Place> = index.iter().collect();
            assert!(all == model && index.iter().count() == model.len());
            assert!(model.iter().all(|(&key, &place)| index.get(key) == Some(place)));
        }
    }
    assert!(index.overflow.is_empty());
}

/// A sample is as likely from a partition that has grown as from one that has not.
#[test]
fn each_block_is_in_a_sample_with_about_the_same_chance() {
    let mut index = Index::new(100_000);
    fill(&mut index, 50_000);
    let mut drawn = BTreeMap::new();
    let mut numbers = Numbers::new(3);
    let draws = 50_000;
    for _ in 0..draws {
        let sample: Vec<(Key, Place)> = index.sample(numbers.next(), 32).collect();
        assert_eq!(sample.len(), 32);
        for (key, place) in sample {
            assert_eq!(index.get(key), Some(place));
            *drawn.entry(key).or_insert(0) += 1;
        }
    }
    // Each block is expected 32 times.
    assert!(drawn.len() > 49_990, "{} blocks were drawn", drawn.len());
    let often = drawn.values().filter(|&&times| !(8..=72).contains(&times)).count();
    assert!(often < 50, "{often} blocks were drawn too often or too seldom");
}

#[test]
fn without_memory_it_is_full_and_loses_nothing() {
    let no_memory: Reserve = |piece, _| piece.try_reserve_exact(usize::MAX);
    let mut index = Index::with(1_000_000, no_memory);
    index.reserve(1_000);
    assert!(!index.is_full() && index.bytes() == 0);
    fill(&mut index, 10);
    assert!(index.is_full() && index.bytes() == 0, "not even its first buckets");
    (0..10).for_each(|n| assert_eq!(index.remove(key(n)), Some(place(n))));
    assert!(!index.is_full(), "it asks for memory again");

    let mut index = Index::new(1_000_000);
    fill(&mut index, 200_000);
    index.table.reserve = no_memory;
    let mut blocks = index.len();
    while !index.is_full() {
        fill(&mut index, blocks + 1);
        blocks += 1;
    }
    assert!(blocks < 400_000 && index.capacity() < blocks, "what fits is the capacity");
    // Requests in progress still insert, into the last free slots and beyond.
    let slots = index.bytes() / SLOT_BYTES;
    fill(&mut index, slots + 100);
    assert!(index.overflow.len() > 100 && index.is_full());
    let all = |index: &Index| (0..slots + 100).all(|n| index.get(key(n)) == Some(place(n)));
    assert!(all(&index));
    assert_eq!(index.iter().count() as u64, slots + 100);

    // It has room when enough is removed, and its whole capacity when there is memory again.
    let mut removed = 0;
    while index.is_full() {
        assert_eq!(index.remove(key(removed)), Some(place(removed)));
        removed += 1;
    }
    assert!(index.overflow.is_empty() && index.len() < slots);
    index.table.reserve = Vec::try_reserve_exact;
    for n in 0..removed {
        assert_eq!(index.insert(key(n), place(n)), None);
    }
    assert!(all(&index) && !index.is_full() && index.capacity() == 1_000_000);
    fill(&mut index, 1_000_000);
    assert!(index.is_full() && index.overflow.is_empty());
}

#[test]
fn the_memory_for_a_number_of_blocks_is_enough_and_used() {
    for bytes in [4 << 20, 100 << 20, 1 << 30, 12 << 30_u64] {
        let blocks = blocks_in(bytes);
        let taken = bytes_for(blocks);
        assert!((bytes / 100 * 90..=bytes).contains(&taken), "{taken} of {bytes}");
    }
}
