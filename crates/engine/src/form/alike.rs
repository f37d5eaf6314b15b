//! Similarity search: a table from features to the blocks that last had them, and a gate that stops
//! searching when it does not pay.

use forebay_codec::{FEATURES, NO_FEATURE, crc32c, features};

use crate::key::Key;

/// Fingerprint of a block's content: the checksum of the whole block, and its features.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sketch([u32; 1 + FEATURES]);

impl Sketch {
    /// The sketch of a block.
    pub fn of(block: &[u8]) -> Self {
        let mut all = [crc32c(block); 1 + FEATURES];
        all[1..].copy_from_slice(&features(block));
        Self(all)
    }

    /// The checksum and the features, hashed to 64 bits; features are tagged so that they never
    /// match a checksum.
    fn spread(&self) -> impl Iterator<Item = u64> {
        let present = self.0.into_iter().enumerate().filter(|&(i, n)| i == 0 || n != NO_FEATURE);
        present.map(|(i, n)| {
            let tagged = u64::from(n) << 1 | u64::from(i > 0);
            let mixed = tagged.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        })
    }
}

/// Low bits of a slot that tell features apart; the 48 bits of a block's key are above them. A slot
/// is stored inverted, so that zeroed memory is empty slots.
const TAG_BITS: u32 = 16;
const EMPTY: u64 = 0;
/// The logarithm of the slots of a piece of 4 MiB, of which the allocator makes a mapping.
const PIECE_LOG: u32 = 19;

/// Some slots of a table.
pub type Piece = Box<[u64]>;

/// Blocks by feature: each slot holds the last block with a feature that hashes to it. The slots
/// lie in pieces, each of which takes memory from its first use on: to make a large table, or to
/// free all of it, would take long.
#[derive(Debug)]
pub struct Alike {
    pieces: Vec<Option<Piece>>,
    slots: u64,
}

impl Alike {
    /// A table for a cache of `blocks` blocks, which takes up to 8 bytes of memory for each.
    pub fn new(blocks: u64) -> Self {
        let slots = blocks.max(1);
        let pieces = usize::try_from(slots.div_ceil(1 << PIECE_LOG)).expect("a table fits memory");
        Self { pieces: vec![None; pieces], slots }
    }

    /// The pieces that take memory.
    pub fn into_pieces(self) -> impl Iterator<Item = Piece> {
        self.pieces.into_iter().flatten()
    }

    /// The piece of a number's slot, and the slot's position there.
    fn place(&self, number: u64) -> (usize, usize) {
        let slot = ((u128::from(number) * u128::from(self.slots)) >> 64) as u64;
        ((slot >> PIECE_LOG) as usize, (slot & ((1 << PIECE_LOG) - 1)) as usize)
    }

    fn slot_mut(&mut self, number: u64) -> &mut u64 {
        let (piece, within) = self.place(number);
        let rest = self.slots - ((piece as u64) << PIECE_LOG);
        let slots = rest.min(1 << PIECE_LOG) as usize;
        let piece = &mut self.pieces[piece];
        &mut piece.get_or_insert_with(|| vec![EMPTY; slots].into_boxed_slice())[within]
    }

    /// Notes that a block with this sketch is stored whole.
    pub fn note(&mut self, sketch: &Sketch, key: Key) {
        for number in sketch.spread() {
            *self.slot_mut(number) = !(key.0 << TAG_BITS | number & ((1 << TAG_BITS) - 1));
        }
    }

    /// The block that has the most in common with the sketch, other than `key`.
    pub fn find(&self, sketch: &Sketch, key: Key) -> Option<Key> {
        let mut found = [(Key(0), 0); 1 + FEATURES];
        for number in sketch.spread() {
            let (piece, within) = self.place(number);
            let stored = self.pieces[piece].as_ref().map_or(EMPTY, |piece| piece[within]);
            let slot = !stored;
            let same = (slot ^ number) & ((1 << TAG_BITS) - 1) == 0;
            let other = Key(slot >> TAG_BITS);
            if stored == EMPTY || !same || other == key {
                continue;
            }
            let place = found.iter_mut().find(|(known, n)| *n == 0 || *known == other);
            let place = place.expect("there is a place for each number");
            *place = (other, place.1 + 1);
        }
        // On a tie the first one wins, which the checksum may have found.
        let best = found.into_iter().rev().max_by_key(|&(_, votes)| votes);
        best.filter(|&(_, votes)| votes > 0).map(|(other, _)| other)
    }
}

/// Number of searches after which the gate decides whether they pay: one for this many blocks that
/// the cache can hold, so that the table knows some of them.
const WINDOW_SHARE: u64 = 16;
/// Bounds of that number.
const WINDOW: std::ops::Range<u32> = 1024..65536;
/// If searches do not pay, this many times as many blocks are skipped before the next try.
const REST: u32 = 16;
/// Searches pay if one in this many gains something, and one in this many of those that found a
/// block.
const WORTH_ONE_IN: u32 = 32;
const WORTH_OF_FOUND_ONE_IN: u32 = 2;

/// Decides whether searching pays for a volume.
#[derive(Clone, Copy, Default, Debug)]
pub struct Gate {
    searched: u32,
    found: u32,
    worth: u32,
    /// Number of blocks still to skip.
    rest: u32,
}

impl Gate {
    /// Whether to search for the next block.
    pub fn is_due(&mut self) -> bool {
        self.rest = self.rest.saturating_sub(1);
        self.rest == 0
    }

    /// Notes a search, and whether it found a block. `blocks` is the capacity of the cache.
    pub fn note(&mut self, found: bool, blocks: u64) {
        self.searched += 1;
        self.found += u32::from(found);
        let window = (blocks / WINDOW_SHARE).clamp(WINDOW.start.into(), WINDOW.end.into());
        if u64::from(self.searched) < window {
            return;
        }
        let pays = self.worth * WORTH_ONE_IN >= self.searched
            && self.worth * WORTH_OF_FOUND_ONE_IN >= self.found;
        let rest = if pays { 0 } else { self.searched * REST };
        *self = Self { rest, ..Self::default() };
    }

    /// Notes that the block found by a search was worth it.
    pub fn note_worth(&mut self) {
        self.worth += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_block::BLOCK_SIZE;

    fn noise(seed: u64) -> Vec<u8> {
        forebay_block::testing::noise(seed, BLOCK_SIZE)
    }

    #[test]
    fn the_block_with_most_in_common_is_found() {
        let mut alike = Alike::new(10_000);
        for seed in 0..100 {
            alike.note(&Sketch::of(&noise(seed)), Key(seed));
        }
        for seed in 0..100 {
            let mut block = noise(seed);
            assert_eq!(alike.find(&Sketch::of(&block), Key(1000)), Some(Key(seed)), "the same");
            assert_eq!(alike.find(&Sketch::of(&block), Key(seed)), None, "only itself");
            block.rotate_right(33);
            assert_eq!(alike.find(&Sketch::of(&block), Key(1000)), Some(Key(seed)), "moved");
        }
        assert_eq!(alike.find(&Sketch::of(&noise(500)), Key(1000)), None);
    }

    #[test]
    fn a_large_table_takes_memory_as_it_is_used() {
        let mut alike = Alike::new(1 << 32);
        let sketches: Vec<Sketch> = (0..9).map(|seed| Sketch::of(&noise(seed))).collect();
        assert_eq!(alike.find(&sketches[0], Key(1000)), None);
        for (key, sketch) in sketches.iter().enumerate() {
            alike.note(sketch, Key(key as u64));
        }
        for (key, sketch) in sketches.iter().enumerate() {
            assert_eq!(alike.find(sketch, Key(1000)), Some(Key(key as u64)));
        }
        let pieces: Vec<Piece> = alike.into_pieces().collect();
        assert!((2..=9 * (1 + FEATURES)).contains(&pieces.len()), "{}", pieces.len());
        assert!(pieces.iter().all(|piece| piece.len() == 1 << PIECE_LOG));
    }

    #[test]
    fn the_last_one_is_kept() {
        let mut alike = Alike::new(1);
        let (a, b) = (Sketch::of(&noise(1)), Sketch::of(&noise(2)));
        alike.note(&a, Key(1));
        alike.note(&b, Key(2));
        assert_eq!((alike.find(&a, Key(9)), alike.find(&b, Key(9))), (None, Some(Key(2))));
    }

    #[test]
    fn the_gate_rests_where_nothing_is_gained_and_tries_again() {
        let mut gate = Gate::default();
        let mut searches = 0;
        for _ in 0..20_000 {
            if gate.is_due() {
                searches += 1;
                gate.note(true, 1000);
            }
        }
        assert_eq!(searches, 2 * 1024, "two windows of 17");
        let mut gate = Gate::default();
        for i in 0..20_000 {
            assert!(gate.is_due());
            if i % 30 == 0 {
                gate.note_worth();
            }
            gate.note(i % 20 == 0, 1000);
        }
    }
}
