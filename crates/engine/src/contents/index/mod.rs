//! The place of each cached block: an exact map from block to place, whose memory follows the
//! number of blocks.
//!
//! A table of two-choice buckets with eight 16-byte slots each. A key of 48 bits is scrambled by an
//! invertible function. Its low bits are the block's first partition, and a slot stores the rest,
//! so the key can be rebuilt: there are no false hits. The second partition is the first one
//! combined with a hash of the rest, and one bit tells which of the two a slot is in. When both
//! buckets are full, slots are moved to their other bucket along a bounded path (cuckoo hashing,
//! Pagh and Rodler, ESA 2001). A block that still finds no slot goes to a small overflow list; the
//! caller keeps the list short by evicting when [`Index::is_full`].
//!
//! Partitions grow and shrink one by one, in turn ([`shape`]): a step rebuilds one of them, and
//! all others stay where they are. Since most blocks may be in either of two
//! partitions, the blocks spread evenly although the partitions differ in size, and the whole table
//! is as full as is wanted at any time. An index without blocks takes no memory. When memory for a
//! step cannot be had, nothing changes, and the index counts as full.

mod hash;
mod shape;
mod slot;
mod table;

use forebay_block::prefetch;

use crate::key::Key;

use shape::Shape;
use slot::{BUCKET_BYTES, Bucket, SLOTS, Slot};
pub use slot::{Place, SEGMENT_BYTES_MAX, SEGMENTS_MAX};
use table::{Reserve, Table, bytes_in_pieces};

const KICKS_MAX: usize = 200;
/// Share of the slots, in percent, that is used before the table grows.
const LOAD_PERCENT: u64 = 92;
/// Share of the slots, in percent, below which the table shrinks.
const SPARSE_PERCENT: u64 = 80;
/// The most blocks of a partition, on average: a step takes about as many moves.
const PARTITION_BLOCKS: u64 = 8192;
/// Removals from a table that is not too full after which a lack of memory is forgotten.
const HUNGRY_REMOVALS: u32 = 1024;
/// Slots searched for each block of a sample.
const SAMPLE_SLOTS: usize = 16;
/// Bytes of memory per slot.
pub const SLOT_BYTES: u64 = 16;
/// The share of a table, in percent, that a step and the rest of a piece may take.
const UNUSED_PERCENT: u64 = 4;

/// Most bytes of memory that an index for `blocks` blocks takes.
pub fn bytes_for(blocks: u64) -> u64 {
    bytes_in_pieces(shape_for(Shape::new(bits_for(blocks)), blocks).total() * BUCKET_BYTES)
}

/// The smallest shape with room for `blocks` blocks that an empty one grows to.
fn shape_for(empty: Shape, blocks: u64) -> Shape {
    let buckets = (blocks * 100).div_ceil(LOAD_PERCENT * SLOTS as u64);
    let mut shape = empty.grown().0;
    while shape.total() < buckets {
        shape = shape.grown().0;
    }
    shape
}

/// The largest number of blocks whose index fits in `bytes` bytes of memory.
pub fn blocks_in(bytes: u64) -> u64 {
    bytes / SLOT_BYTES / 100 * (100 - UNUSED_PERCENT) / 100 * LOAD_PERCENT
}

/// The logarithm of the number of partitions for `blocks` blocks.
fn bits_for(blocks: u64) -> u32 {
    let partitions = blocks.div_ceil(PARTITION_BLOCKS).max(1).next_power_of_two();
    partitions.ilog2().clamp(hash::PARTITION_BITS_MIN, hash::PARTITION_BITS_MAX)
}

/// The index of one shard.
pub struct Index {
    shape: Shape,
    table: Table,
    len: u64,
    limit: u64,
    /// The table grows for more blocks, and shrinks for fewer.
    room: std::ops::Range<u64>,
    /// Removals during which the index is full with the room that it has: memory was short.
    hungry: u32,
    overflow: Vec<(Key, Place)>,
}

impl Index {
    /// Returns an empty index for up to `blocks` blocks.
    pub fn new(blocks: u64) -> Self {
        Self::with(blocks, Vec::try_reserve_exact)
    }

    fn with(blocks: u64, reserve: Reserve) -> Self {
        Self {
            shape: Shape::new(bits_for(blocks)),
            table: Table::new(blocks * SLOT_BYTES, reserve),
            len: 0,
            limit: blocks,
            room: 0..0,
            hungry: 0,
            overflow: Vec::new(),
        }
    }

    /// Makes room in an empty index for about `blocks` blocks at once, which takes less time than
    /// step by step, if there is memory.
    pub fn reserve(&mut self, blocks: u64) {
        let shape = shape_for(self.shape, blocks.min(self.limit));
        if self.shape.is_empty() && self.table.extend(shape.total()) {
            self.reshape(shape);
        }
    }

    /// Frees a piece of the memory of an index that is not used any more; returns whether there was
    /// one.
    pub fn drop_piece(&mut self) -> bool {
        self.table.drop_piece()
    }

    /// The number of blocks in the index.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The number of blocks that the index was made for; fewer while memory is short.
    pub fn capacity(&self) -> u64 {
        if self.hungry > 0 { self.limit.min(self.room.end) } else { self.limit }
    }

    /// Bytes of memory that the index takes now.
    pub fn bytes(&self) -> u64 {
        self.shape.total() * BUCKET_BYTES
    }

    /// Whether the caller should evict before adding more blocks.
    pub fn is_full(&self) -> bool {
        self.len >= self.capacity()
    }

    /// Prefetches a block's buckets before a lookup: a lookup spends most of its time waiting for
    /// memory, and the processor can wait for many accesses at the same time.
    pub fn warm(&self, key: Key) {
        if self.shape.is_empty() {
            return;
        }
        let (first, rest) = hash::split(&self.shape, key);
        let second = hash::other(&self.shape, first, rest);
        for (partition, second) in [(first, false), (second, true)] {
            let Bucket(slots) = self.table.get(self.address(partition, rest, second));
            // The bucket spans two cache lines of 64 bytes.
            prefetch(&slots[0]);
            prefetch(&slots[SLOTS - 1]);
        }
    }

    /// The place of a block, if it is cached.
    pub fn get(&self, key: Key) -> Option<Place> {
        match self.find(key) {
            Some((address, i)) => Some(self.table.get(address).0[i].place()),
            None if self.overflow.is_empty() => None,
            None => self.overflow.iter().find(|(k, _)| *k == key).map(|&(_, place)| place),
        }
    }

    /// Changes the place of a block that is in the index; its version stays the same.
    pub fn update(&mut self, key: Key, change: impl FnOnce(&mut Place)) {
        if let Some((address, i)) = self.find(key) {
            let slot = &mut self.table.get_mut(address).0[i];
            let mut place = slot.place();
            change(&mut place);
            *slot = Slot::pack(slot.rest(), slot.second(), &place);
        } else if let Some(pair) = self.overflow.iter_mut().find(|(k, _)| *k == key) {
            change(&mut pair.1);
        }
    }

    /// Adds a block or replaces its place; returns the old place.
    pub fn insert(&mut self, key: Key, place: Place) -> Option<Place> {
        if let Some((address, i)) = self.find(key) {
            let slot = &mut self.table.get_mut(address).0[i];
            let new = Slot::pack(slot.rest(), slot.second(), &place);
            return Some(std::mem::replace(slot, new).place());
        }
        if let Some(pair) = self.overflow.iter_mut().find(|(k, _)| *k == key) {
            return Some(std::mem::replace(&mut pair.1, place));
        }
        self.len += 1;
        if self.len > self.room.end {
            self.grow();
        }
        let (partition, rest) = hash::split(&self.shape, key);
        if let Err(homeless) = self.settle(partition, Slot::pack(rest, false, &place)) {
            self.overflow.push(homeless);
            if self.len > self.room.start {
                self.grow();
            }
        }
        None
    }

    /// Removes a block; returns its place.
    pub fn remove(&mut self, key: Key) -> Option<Place> {
        let was = if let Some((address, i)) = self.find(key) {
            std::mem::take(&mut self.table.get_mut(address).0[i]).place()
        } else {
            let i = self.overflow.iter().position(|(k, _)| *k == key)?;
            self.overflow.swap_remove(i).1
        };
        self.len -= 1;
        if self.len == 0 {
            // Otherwise an index without buckets would stay full for good.
            self.hungry = 0;
        } else if self.len <= self.room.end {
            self.hungry = self.hungry.saturating_sub(1);
        }
        if self.len < self.room.start {
            self.shrink();
        }
        self.relieve_overflow();
        Some(was)
    }

    /// All blocks in the index, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (Key, Place)> {
        self.slots(0..self.shape.total()).chain(self.overflow.iter().copied())
    }

    /// Number of buckets.
    pub fn buckets(&self) -> u64 {
        self.shape.total()
    }

    /// Up to `most` blocks at a place that `random` chooses, in no particular order.
    pub fn sample(&self, random: u64, most: usize) -> impl Iterator<Item = (Key, Place)> {
        let buckets = self.shape.total();
        let first = random % buckets.max(1);
        let near = (most * SAMPLE_SLOTS).div_ceil(SLOTS) as u64;
        let end = buckets.min(first + near);
        let again = first.min((first + near).saturating_sub(buckets));
        self.slots(first..end).chain(self.slots(0..again)).take(most)
    }

    /// The blocks in a range of buckets, in no particular order. The few blocks that have found no
    /// place in a bucket are in none.
    pub fn slots(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = (Key, Place)> {
        range.flat_map(move |address| {
            let used = self.table.get(address).0.iter().filter(|slot| !slot.is_free());
            used.map(move |&slot| (self.key_of(self.shape.partition(address), slot), slot.place()))
        })
    }

    /// The position of the bucket that a block has in one of its partitions.
    fn address(&self, partition: u64, rest: u64, second: bool) -> u64 {
        self.shape.address(partition, hash::bucket(&self.shape, partition, rest, second))
    }

    /// The position of a block's bucket, and its slot there.
    fn find(&self, key: Key) -> Option<(u64, usize)> {
        if self.shape.is_empty() {
            return None;
        }
        let (first, rest) = hash::split(&self.shape, key);
        let find_in = |partition, second| {
            let address = self.address(partition, rest, second);
            let Bucket(slots) = self.table.get(address);
            slots.iter().position(|slot| slot.holds(rest, second)).map(|i| (address, i))
        };
        find_in(first, false).or_else(|| find_in(hash::other(&self.shape, first, rest), true))
    }

    /// Retries the overflow's last block after a slot became free; returns whether it has one.
    fn relieve_overflow(&mut self) -> bool {
        let Some((key, place)) = self.overflow.pop() else { return false };
        let (partition, rest) = hash::split(&self.shape, key);
        let settled = self.settle(partition, Slot::pack(rest, false, &place));
        let is_settled = settled.is_ok();
        self.overflow.extend(settled.err());
        is_settled
    }

    /// Places a slot in one of its partitions, moving other slots as needed; returns the slot that
    /// is left without a place in the end, if any.
    fn settle(&mut self, mut partition: u64, mut slot: Slot) -> Result<(), (Key, Place)> {
        if self.shape.is_empty() {
            return Err((self.key_of(partition, slot), slot.place()));
        }
        for kick in 0..KICKS_MAX {
            for (partition, slot) in [(partition, slot), self.moved(partition, slot)] {
                let address = self.address(partition, slot.rest(), slot.second());
                if self.table.get_mut(address).put(slot) {
                    return Ok(());
                }
            }
            let address = self.address(partition, slot.rest(), slot.second());
            let victim = &mut self.table.get_mut(address).0[kick % SLOTS];
            std::mem::swap(&mut slot, victim);
            (partition, slot) = self.moved(partition, slot);
        }
        Err((self.key_of(partition, slot), slot.place()))
    }

    /// The same block in its other partition.
    fn moved(&self, partition: u64, slot: Slot) -> (u64, Slot) {
        (hash::other(&self.shape, partition, slot.rest()), slot.moved())
    }

    fn key_of(&self, partition: u64, slot: Slot) -> Key {
        let rest = slot.rest();
        let first =
            if slot.second() { hash::other(&self.shape, partition, rest) } else { partition };
        hash::join(&self.shape, first, rest)
    }
}

/// Growing and shrinking, by one partition.
impl Index {
    fn grow(&mut self) {
        let (grown, partition) = self.shape.grown();
        if !self.table.extend(grown.total()) {
            self.hungry = HUNGRY_REMOVALS;
            return;
        }
        self.hungry = 0;
        // A bucket's blocks move to the same or a later one, so the last one is first.
        let buckets = (0..self.shape.buckets(partition)).rev();
        let homeless = self.rebuild(grown, partition, buckets);
        self.reshape(grown);
        self.settle_all(partition, homeless);
        while self.relieve_overflow() {}
    }

    fn shrink(&mut self) {
        let Some((shrunk, partition)) = self.shape.shrunk() else { return };
        let homeless = self.rebuild(shrunk, partition, 0..self.shape.buckets(partition));
        self.reshape(shrunk);
        self.table.truncate(shrunk.total());
        self.settle_all(partition, homeless);
    }

    fn reshape(&mut self, shape: Shape) {
        let slots = shape.total() * SLOTS as u64;
        let sparse = if shape.shrunk().is_some() { slots * SPARSE_PERCENT / 100 } else { 0 };
        self.room = sparse..slots * LOAD_PERCENT / 100;
        self.shape = shape;
    }

    /// Moves each slot of some buckets to its bucket in a new shape; returns those that find it
    /// full. A bucket must come before those that its slots move to.
    fn rebuild(
        &mut self,
        shape: Shape,
        partition: u64,
        buckets: impl Iterator<Item = u64>,
    ) -> Vec<Slot> {
        let mut homeless = Vec::new();
        for bucket in buckets {
            let slots = std::mem::take(self.table.get_mut(shape.address(partition, bucket))).0;
            for slot in slots.into_iter().filter(|slot| !slot.is_free()) {
                let to = hash::bucket(&shape, partition, slot.rest(), slot.second());
                if !self.table.get_mut(shape.address(partition, to)).put(slot) {
                    homeless.push(slot);
                }
            }
        }
        homeless
    }

    fn settle_all(&mut self, partition: u64, slots: Vec<Slot>) {
        for slot in slots {
            let settled = self.settle(partition, slot);
            self.overflow.extend(settled.err());
        }
    }
}

#[cfg(test)]
mod tests;
