//! The place of each cached block: an exact map from block to place, in one fixed allocation.
//!
//! A table of two-choice buckets with eight 16-byte slots each. A key of 48 bits is scrambled by an
//! invertible function and divided by the number of buckets: the remainder is the home bucket, the
//! quotient is stored. The other bucket is `f(quotient) - home`. So one bit tells which of the two
//! buckets a slot is in, and the key can be rebuilt: there are no false hits. When both buckets are
//! full, slots are moved to their other bucket along a bounded path (cuckoo hashing, Pagh and
//! Rodler, ESA 2001). A block that still finds no slot goes to a small overflow list; the caller
//! keeps the list short by evicting when [`Index::is_full`].
//!
//! A slot is `quotient 36 | segment 20 | kind 3 | meta 3 | dirty 1 | second 1` and
//! `offset/8 19 | length 13 | crc 32`. A kind of zero marks a free slot.

use forebay_block::BLOCK_SIZE;
use forebay_format::{EntryKind, PAGE};

use crate::key::Key;

const SLOTS: usize = 8;
const KEY_BITS: u32 = 48;
const QUOTIENT_BITS: u32 = 36;
const BUCKETS_MIN: u64 = 1 << (KEY_BITS - QUOTIENT_BITS);
const KICKS_MAX: usize = 200;
/// Share of the slots, in percent, that may be used before the index counts as full.
const LOAD_PERCENT: u64 = 92;
/// Slots searched for each block of a sample.
const SAMPLE_SLOTS: usize = 16;
/// Bytes of memory per slot.
pub const SLOT_BYTES: u64 = 16;
/// The largest number of segments in a shard's area.
pub const SEGMENTS_MAX: u64 = 1 << 20;
/// The size of the largest segment, in bytes.
pub const SEGMENT_BYTES_MAX: u64 = 8 << 19;

const _: () = assert!(BLOCK_SIZE < 1 << 13, "a length fits its 13 bits");

/// The place of a block's newest version, with the eviction policy's bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Position of the segment in the shard's area.
    pub segment: u32,
    /// Bytes from the start of the segment, a multiple of 8; for a block without payload, a number
    /// that is unique within the record. Together with `kind` it never repeats for two versions of
    /// a block in one life of the segment. A slot of the store may be used for the same block
    /// again, but not while its pages are held.
    pub offset: u32,
    /// Length of the payload, in bytes.
    pub len: u16,
    /// The form of the payload.
    pub kind: EntryKind,
    /// CRC32C of the payload.
    pub crc: u32,
    /// Whether the block is newer than the primary.
    pub dirty: bool,
    /// Three bits of the eviction policy.
    pub meta: u8,
}

impl Place {
    /// Whether both places are the same version of the block.
    pub fn is_same_version(&self, other: &Self) -> bool {
        self.segment == other.segment && self.offset == other.offset && self.kind == other.kind
    }

    /// The range of pages that the payload covers, in bytes from the start of the segment.
    pub fn pages(&self) -> std::ops::Range<u32> {
        let page = PAGE as u32;
        let end = self.offset + u32::from(self.len);
        self.offset / page * page..end.next_multiple_of(page)
    }
}

#[derive(Clone, Copy, Default)]
struct Slot(u64, u64);

impl Slot {
    fn pack(quotient: u64, second: bool, place: &Place) -> Self {
        debug_assert!(quotient < 1 << QUOTIENT_BITS && place.meta < 8);
        assert!(u64::from(place.segment) < SEGMENTS_MAX && place.offset.is_multiple_of(8));
        let high = quotient << 28
            | u64::from(place.segment) << 8
            | u64::from(kind_bits(place.kind)) << 5
            | u64::from(place.meta) << 2
            | u64::from(place.dirty) << 1
            | u64::from(second);
        let low =
            u64::from(place.offset / 8) << 45 | u64::from(place.len) << 32 | u64::from(place.crc);
        Self(high, low)
    }

    fn is_free(self) -> bool {
        self.0 >> 5 & 7 == 0
    }

    fn quotient(self) -> u64 {
        self.0 >> 28
    }

    fn second(self) -> bool {
        self.0 & 1 == 1
    }

    fn holds(self, quotient: u64, second: bool) -> bool {
        self.quotient() == quotient && self.second() == second && !self.is_free()
    }

    fn place(self) -> Place {
        let kind = match self.0 >> 5 & 7 {
            1 => EntryKind::Raw,
            2 => EntryKind::Lz4,
            3 => EntryKind::Zero,
            4 => EntryKind::Lost,
            5 => EntryKind::Delta,
            6 => EntryKind::Zstd,
            7 => EntryKind::Similar,
            other => unreachable!("kind {other} is never put into the index"),
        };
        Place {
            segment: (self.0 >> 8 & (SEGMENTS_MAX - 1)) as u32,
            kind,
            meta: (self.0 >> 2 & 7) as u8,
            dirty: self.0 >> 1 & 1 == 1,
            offset: (self.1 >> 45) as u32 * 8,
            len: (self.1 >> 32 & 0x1fff) as u16,
            crc: self.1 as u32,
        }
    }
}

/// The stored number of a kind that may be in the index; zero marks a free slot.
fn kind_bits(kind: EntryKind) -> u8 {
    match kind {
        EntryKind::Raw => 1,
        EntryKind::Lz4 => 2,
        EntryKind::Zero => 3,
        EntryKind::Lost => 4,
        EntryKind::Delta => 5,
        EntryKind::Zstd => 6,
        EntryKind::Similar => 7,
        other => unreachable!("{other:?} is never put into the index"),
    }
}

/// Number of buckets of an index for `blocks` blocks.
fn buckets(blocks: u64) -> u64 {
    (blocks * 100).div_ceil(LOAD_PERCENT).div_ceil(SLOTS as u64).max(BUCKETS_MIN)
}

/// Bytes of memory that an index for `blocks` blocks takes.
pub fn bytes_for(blocks: u64) -> u64 {
    buckets(blocks) * SLOTS as u64 * SLOT_BYTES
}

/// The largest number of blocks whose index fits in `bytes` bytes of memory.
pub fn blocks_in(bytes: u64) -> u64 {
    bytes / SLOT_BYTES / 100 * LOAD_PERCENT
}

/// The index of one shard.
pub struct Index {
    slots: Box<[Slot]>,
    buckets: u64,
    len: u64,
    limit: u64,
    overflow: Vec<(Key, Place)>,
}

impl Index {
    /// Returns an empty index with room for at least `blocks` blocks.
    pub fn new(blocks: u64) -> Self {
        let buckets = buckets(blocks);
        let total = usize::try_from(buckets).expect("the index fits memory") * SLOTS;
        Self {
            slots: vec![Slot::default(); total].into_boxed_slice(),
            buckets,
            len: 0,
            limit: blocks,
            overflow: Vec::new(),
        }
    }

    /// The number of blocks in the index.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The number of blocks that the index was made for.
    pub fn capacity(&self) -> u64 {
        self.limit
    }

    /// Bytes of memory that the index takes.
    pub fn bytes(&self) -> u64 {
        self.slots.len() as u64 * SLOT_BYTES
    }

    /// Whether the caller should evict before adding more blocks.
    pub fn is_full(&self) -> bool {
        self.len >= self.limit
    }

    fn home(&self, key: Key) -> (u64, u64) {
        let mixed = scramble(key.0);
        (mixed % self.buckets, mixed / self.buckets)
    }

    fn other(&self, bucket: u64, quotient: u64) -> u64 {
        let step = scramble(quotient ^ 0x5bd1_e995) % self.buckets;
        (step + self.buckets - bucket) % self.buckets
    }

    fn find(&self, key: Key) -> Option<usize> {
        let (home, quotient) = self.home(key);
        let first = home as usize * SLOTS;
        let in_first = (first..first + SLOTS).find(|&i| self.slots[i].holds(quotient, false));
        in_first.or_else(|| {
            let second = self.other(home, quotient) as usize * SLOTS;
            (second..second + SLOTS).find(|&i| self.slots[i].holds(quotient, true))
        })
    }

    /// Prefetches a block's buckets before a lookup: a lookup spends most of its time waiting for
    /// memory, and the processor can wait for many accesses at the same time.
    pub fn warm(&self, key: Key) {
        let (home, quotient) = self.home(key);
        let second = self.other(home, quotient);
        for bucket in [home, second] {
            let start = bucket as usize * SLOTS;
            // The bucket spans two cache lines of 64 bytes.
            std::hint::black_box(self.slots[start].0 ^ self.slots[start + SLOTS - 1].0);
        }
    }

    /// The place of a block, if it is cached.
    pub fn get(&self, key: Key) -> Option<Place> {
        match self.find(key) {
            Some(i) => Some(self.slots[i].place()),
            None if self.overflow.is_empty() => None,
            None => self.overflow.iter().find(|(k, _)| *k == key).map(|&(_, place)| place),
        }
    }

    /// Changes the place of a block that is in the index; its version stays the same.
    pub fn update(&mut self, key: Key, change: impl FnOnce(&mut Place)) {
        if let Some(i) = self.find(key) {
            let slot = self.slots[i];
            let mut place = slot.place();
            change(&mut place);
            self.slots[i] = Slot::pack(slot.quotient(), slot.second(), &place);
        } else if let Some(pair) = self.overflow.iter_mut().find(|(k, _)| *k == key) {
            change(&mut pair.1);
        }
    }

    /// Adds a block or replaces its place; returns the old place.
    pub fn insert(&mut self, key: Key, place: Place) -> Option<Place> {
        if let Some(i) = self.find(key) {
            let slot = self.slots[i];
            self.slots[i] = Slot::pack(slot.quotient(), slot.second(), &place);
            return Some(slot.place());
        }
        if let Some(pair) = self.overflow.iter_mut().find(|(k, _)| *k == key) {
            return Some(std::mem::replace(&mut pair.1, place));
        }
        self.len += 1;
        let (home, quotient) = self.home(key);
        let slot = Slot::pack(quotient, false, &place);
        if let Err(homeless) = self.settle(home, slot) {
            self.overflow.push(homeless);
        }
        None
    }

    /// All blocks in the index, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (Key, Place)> {
        let used = self.slots.iter().enumerate().filter(|(_, slot)| !slot.is_free());
        let used = used.map(|(i, &slot)| (self.key_of((i / SLOTS) as u64, slot), slot.place()));
        used.chain(self.overflow.iter().copied())
    }

    /// Up to `most` blocks at a place that `random` chooses, in no particular order.
    pub fn sample(&self, random: u64, most: usize) -> impl Iterator<Item = (Key, Place)> {
        let slots = self.slots.len();
        let first = (random % slots as u64) as usize;
        let near = (first..slots).chain(0..first).take(most * SAMPLE_SLOTS);
        let used = near.filter(|&i| !self.slots[i].is_free());
        let found = used.map(|i| {
            let slot = self.slots[i];
            (self.key_of((i / SLOTS) as u64, slot), slot.place())
        });
        found.take(most)
    }

    /// Removes a block; returns its place.
    pub fn remove(&mut self, key: Key) -> Option<Place> {
        let was = if let Some(i) = self.find(key) {
            std::mem::take(&mut self.slots[i]).place()
        } else {
            let i = self.overflow.iter().position(|(k, _)| *k == key)?;
            self.overflow.swap_remove(i).1
        };
        self.len -= 1;
        self.relieve_overflow();
        Some(was)
    }

    /// Retries the overflow's last block after a slot became free.
    fn relieve_overflow(&mut self) {
        if let Some((key, place)) = self.overflow.pop() {
            let (home, quotient) = self.home(key);
            if let Err(homeless) = self.settle(home, Slot::pack(quotient, false, &place)) {
                self.overflow.push(homeless);
            }
        }
    }

    /// Places a slot whose home is `bucket`, moving other slots as needed; returns the slot that is
    /// left without a place in the end, if any.
    fn settle(&mut self, mut bucket: u64, mut slot: Slot) -> Result<(), (Key, Place)> {
        for kick in 0..KICKS_MAX {
            for (bucket, slot) in [(bucket, slot), self.moved(bucket, slot)] {
                let start = bucket as usize * SLOTS;
                if let Some(i) = (start..start + SLOTS).find(|&i| self.slots[i].is_free()) {
                    self.slots[i] = slot;
                    return Ok(());
                }
            }
            let victim = bucket as usize * SLOTS + kick % SLOTS;
            std::mem::swap(&mut slot, &mut self.slots[victim]);
            (bucket, slot) = self.moved(bucket, slot);
        }
        Err((self.key_of(bucket, slot), slot.place()))
    }

    /// The same block in its other bucket.
    fn moved(&self, bucket: u64, slot: Slot) -> (u64, Slot) {
        (self.other(bucket, slot.quotient()), Slot(slot.0 ^ 1, slot.1))
    }

    fn key_of(&self, bucket: u64, slot: Slot) -> Key {
        let quotient = slot.quotient();
        let home = if slot.second() { self.other(bucket, quotient) } else { bucket };
        Key(unscramble(quotient * self.buckets + home))
    }
}

const KEY_MASK: u64 = (1 << KEY_BITS) - 1;
const MULTIPLIERS: [u64; 2] = [0x9e37_79b9_7f4b, 0xc2b2_ae3d_27d5];

/// A permutation of the 48-bit numbers.
fn scramble(key: u64) -> u64 {
    let mut x = key & KEY_MASK;
    for m in MULTIPLIERS {
        x ^= x >> 24;
        x = x.wrapping_mul(m) & KEY_MASK;
    }
    x ^ x >> 24
}

/// The inverse of [`scramble`]. A shift by half the width is its own inverse.
fn unscramble(mixed: u64) -> u64 {
    let mut x = mixed ^ mixed >> 24;
    for m in MULTIPLIERS.into_iter().rev() {
        x = x.wrapping_mul(inverse(m)) & KEY_MASK;
        x ^= x >> 24;
    }
    x
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration.
const fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    let mut i = 0;
    while i < 6 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        i += 1;
    }
    x
}

#[cfg(test)]
mod tests {
    use forebay_block::VolumeId;
    use forebay_block::testing::Numbers;

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
    fn scrambling_is_undone() {
        for key in (0..KEY_MASK).step_by(0x0001_2345_6789) {
            assert_eq!(unscramble(scramble(key)), key);
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
        let slot = Slot::pack((1 << QUOTIENT_BITS) - 1, true, &full);
        assert_eq!(slot.place(), full);
        assert!(slot.holds((1 << QUOTIENT_BITS) - 1, true));
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
}
