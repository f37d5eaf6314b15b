//! Which blocks are dirty, in address order and by age.
//!
//! A stripe of 256 blocks has one bitmap, so that the destager finds neighbours at once and a
//! sequential load costs little memory. Ages are kept by stripe: the time of its oldest dirty
//! block, or earlier.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use forebay_block::{Instant, STRIPE_BLOCKS, VolumeId};

use crate::key::Key;

const WORDS: usize = (STRIPE_BLOCKS / 64) as usize;
const _: () = assert!(STRIPE_BLOCKS.is_multiple_of(64));

/// A set of blocks of one stripe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bits([u64; WORDS]);

impl Bits {
    /// Whether block `i` of the stripe is in it.
    pub fn get(&self, i: u64) -> bool {
        self.0[(i / 64) as usize] >> (i % 64) & 1 == 1
    }

    /// Puts block `i` in or out; says whether that changed it.
    pub fn set(&mut self, i: u64, on: bool) -> bool {
        let word = &mut self.0[(i / 64) as usize];
        let was = *word >> (i % 64) & 1 == 1;
        *word = *word & !(1 << (i % 64)) | u64::from(on) << (i % 64);
        was != on
    }

    /// The set as words, block 0 in the lowest bit of the first.
    pub fn words(&self) -> [u64; WORDS] {
        self.0
    }

    /// The set that has these words.
    pub fn from_words(words: [u64; WORDS]) -> Self {
        Self(words)
    }

    /// Whether it has no block.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }
}

/// The dirty blocks of a stripe. Ages are exact for two generations: every block of `old` is dirty
/// since `oldest` or later, every other one since `since` or later. When the last of `old` is
/// clean, the others take its place.
#[derive(Debug)]
struct Stripe {
    dirty: Bits,
    destaging: Bits,
    /// Rewritten while dirty, since destaging last came by.
    again: Bits,
    old: Bits,
    oldest: Instant,
    since: Instant,
}

impl Stripe {
    fn new() -> Self {
        let (none, since) = (Bits::default(), Instant::NEVER);
        Self { dirty: none, destaging: none, again: none, old: none, oldest: since, since }
    }

    /// A block is dirty since `at` at the earliest, and not of the old ones.
    fn is_dirty_since(&mut self, i: u64, at: Instant) {
        self.old.set(i, false);
        self.since = self.since.min(at);
    }

    /// Lets the younger ones be the old ones if there are no old ones; whether that changed
    /// anything.
    fn grow_old(&mut self) -> bool {
        let due = self.old.is_empty() && !self.dirty.is_empty();
        if due {
            self.old = self.dirty;
            self.oldest = std::mem::replace(&mut self.since, Instant::NEVER);
        }
        due
    }

    fn is_empty(&self) -> bool {
        self.dirty.is_empty() && self.destaging.is_empty()
    }
}

/// The dirty blocks of one shard.
#[derive(Default, Debug)]
pub struct Dirty {
    stripes: BTreeMap<u64, Stripe>,
    blocks: u64,
    volumes: Vec<Part>,
}

/// The dirty blocks of one volume.
#[derive(Default, Debug)]
struct Part {
    /// `oldest` and the number of each stripe with a dirty block.
    ages: BTreeSet<(Instant, u64)>,
    blocks: u64,
}

/// Stripes of one volume: the numbers of stripes have the volume above these bits.
const STRIPES_BITS: u32 = 32;
const _: () = assert!(STRIPE_BLOCKS << STRIPES_BITS == 1 << 40, "where a key has the volume");

/// The first block of the stripe a block is in, as a key.
fn stripe_of(key: Key) -> (u64, u64) {
    (key.0 / STRIPE_BLOCKS, key.0 % STRIPE_BLOCKS)
}

impl Dirty {
    /// Number of dirty blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Number of dirty blocks of a volume.
    pub fn blocks_of(&self, volume: VolumeId) -> u64 {
        self.volumes.get(usize::from(volume.0)).map_or(0, |part| part.blocks)
    }

    fn part(&mut self, stripe: u64) -> &mut Part {
        let at = (stripe >> STRIPES_BITS) as usize;
        if at >= self.volumes.len() {
            self.volumes.resize_with(at + 1, Part::default);
        }
        &mut self.volumes[at]
    }

    /// Whether the block is dirty.
    pub fn contains(&self, key: Key) -> bool {
        let (stripe, i) = stripe_of(key);
        self.stripes.get(&stripe).is_some_and(|s| s.dirty.get(i))
    }

    /// Whether the block is on its way to the primary.
    pub fn is_destaging(&self, key: Key) -> bool {
        let (stripe, i) = stripe_of(key);
        self.stripes.get(&stripe).is_some_and(|s| s.destaging.get(i))
    }

    /// Whether the primary lacks the newest version of a block, or may still receive an older one.
    pub fn is_unsettled(&self, key: Key) -> bool {
        self.contains(key) || self.is_destaging(key)
    }

    /// The dirty blocks of a stripe, and those on their way to the primary.
    pub fn in_stripe(&self, stripe: u64) -> (Bits, Bits) {
        self.stripes.get(&stripe).map_or_else(Default::default, |s| (s.dirty, s.destaging))
    }

    /// Adds a block that became dirty at `now`, or was rewritten then by a client, or only copied.
    pub fn insert(&mut self, now: Instant, key: Key, by_client: bool) {
        let (number, i) = stripe_of(key);
        let stripe = self.stripes.entry(number).or_insert_with(Stripe::new);
        let is_new = stripe.dirty.set(i, true);
        if is_new || by_client {
            stripe.again.set(i, !is_new);
        }
        if is_new {
            stripe.is_dirty_since(i, now);
            let age = stripe.grow_old().then_some((stripe.oldest, number));
            self.blocks += 1;
            let part = self.part(number);
            part.blocks += 1;
            part.ages.extend(age);
        }
    }

    /// Takes a block out: it is clean, or gone.
    pub fn remove(&mut self, key: Key) {
        self.change(key, |stripe, i| {
            let was = stripe.dirty.set(i, false);
            stripe.old.set(i, false);
            u64::from(was)
        });
    }

    /// A dirty block is on its way to the primary.
    pub fn begin_destaging(&mut self, key: Key) {
        let (number, i) = stripe_of(key);
        if let Some(stripe) = self.stripes.get_mut(&number) {
            stripe.destaging.set(i, true);
        }
    }

    /// A block is not on its way to the primary any more. If the primary has the version that went
    /// there from `started` on, the block is clean, or dirty since later than that.
    pub fn end_destaging(&mut self, key: Key, started: Option<Instant>) {
        self.change(key, |stripe, i| {
            stripe.destaging.set(i, false);
            if let Some(started) = started.filter(|_| stripe.dirty.get(i)) {
                stripe.is_dirty_since(i, started);
            }
            0
        });
    }

    /// Changes what is known of a block, which makes this many clean, and brings its stripe up to
    /// date.
    fn change(&mut self, key: Key, change: impl FnOnce(&mut Stripe, u64) -> u64) {
        let (number, i) = stripe_of(key);
        let Some(stripe) = self.stripes.get_mut(&number) else { return };
        let before = (stripe.oldest, number);
        let cleaned = change(stripe, i);
        let age = stripe.grow_old().then_some((stripe.oldest, number));
        let aged = age.is_some() || stripe.dirty.is_empty();
        if stripe.is_empty() {
            self.stripes.remove(&number);
        }
        self.blocks -= cleaned;
        let part = self.part(number);
        part.blocks -= cleaned;
        if aged {
            part.ages.remove(&before);
        }
        part.ages.extend(age);
    }

    /// When the oldest dirty block was written, or earlier.
    pub fn oldest(&self) -> Option<Instant> {
        let parts = self.volumes.iter().filter_map(|part| part.ages.first());
        parts.map(|&(at, _)| at).min()
    }

    /// The same of one volume.
    pub fn oldest_of(&self, volume: VolumeId) -> Option<Instant> {
        self.volumes.get(usize::from(volume.0))?.ages.first().map(|&(at, _)| at)
    }

    /// Every dirty block of a volume, in address order.
    pub fn of_volume(&self, volume: VolumeId) -> impl Iterator<Item = Key> {
        let Range { start, end } = Key::range(volume);
        let stripes = start.0 / STRIPE_BLOCKS..end.0 / STRIPE_BLOCKS;
        self.stripes.range(stripes).flat_map(|(&number, stripe)| {
            let dirty = (0..STRIPE_BLOCKS).filter(|&i| stripe.dirty.get(i));
            dirty.map(move |i| Key(number * STRIPE_BLOCKS + i))
        })
    }

    /// The next block in the stripes of `range`, in address order and not before its start, that is
    /// dirty and not on its way; stops after `stripes_max` stripes and returns where to go on. In
    /// stripes that became dirty after `spare_after`, it passes over rewritten blocks, once.
    pub fn next_from(
        &mut self,
        range: Range<Key>,
        stripes_max: usize,
        spare_after: Instant,
    ) -> Result<Key, Option<Key>> {
        let (first, skip) = stripe_of(range.start);
        let last = range.end.0.div_ceil(STRIPE_BLOCKS).max(first);
        for (seen, (&number, stripe)) in self.stripes.range_mut(first..last).enumerate() {
            if seen == stripes_max {
                return Err(Some(Key(number * STRIPE_BLOCKS)));
            }
            let start = if number == first { skip } else { 0 };
            let found = (start..STRIPE_BLOCKS).find(|&i| {
                if !stripe.dirty.get(i) || stripe.destaging.get(i) {
                    return false;
                }
                !(stripe.again.set(i, false) && stripe.oldest > spare_after)
            });
            if let Some(i) = found {
                return Ok(Key(number * STRIPE_BLOCKS + i));
            }
        }
        Err(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_order_skips_what_is_on_its_way() {
        let mut dirty = Dirty::default();
        for n in [700, 3, 4, 300] {
            dirty.insert(Instant(1), Key(n), true);
        }
        dirty.begin_destaging(Key(4));
        let mut next =
            |from, stripes_max| dirty.next_from(Key(from)..Key(4096), stripes_max, Instant(0));
        assert_eq!(next(0, 9), Ok(Key(3)));
        assert_eq!(next(4, 9), Ok(Key(300)));
        assert_eq!(next(301, 9), Ok(Key(700)));
        assert_eq!(next(701, 9), Err(None));
        assert_eq!(next(4, 1), Err(Some(Key(256))));
        assert_eq!(dirty.next_from(Key(4)..Key(256), 9, Instant(0)), Err(None));
        assert_eq!(dirty.blocks(), 4);
    }

    #[test]
    fn what_was_rewritten_is_passed_over_once() {
        let mut dirty = Dirty::default();
        for n in [3, 4, 5] {
            dirty.insert(Instant(10), Key(n), true);
        }
        dirty.insert(Instant(11), Key(3), true);
        dirty.insert(Instant(11), Key(4), false);
        assert_eq!(
            dirty.next_from(Key(0)..Key(256), 9, Instant(9)),
            Ok(Key(4)),
            "a copy is no rewrite"
        );
        assert_eq!(
            dirty.next_from(Key(0)..Key(256), 9, Instant(9)),
            Ok(Key(3)),
            "it was spared before"
        );
        dirty.insert(Instant(12), Key(3), true);
        assert_eq!(
            dirty.next_from(Key(0)..Key(256), 9, Instant(10)),
            Ok(Key(3)),
            "dirty for too long"
        );
        dirty.remove(Key(3));
        dirty.insert(Instant(13), Key(3), true);
        assert_eq!(
            dirty.next_from(Key(0)..Key(256), 9, Instant(9)),
            Ok(Key(3)),
            "it was clean meanwhile"
        );
    }

    /// Destages a block that was not rewritten meanwhile.
    fn destage(dirty: &mut Dirty, key: u64, started: u64) {
        dirty.begin_destaging(Key(key));
        dirty.remove(Key(key));
        dirty.end_destaging(Key(key), Some(Instant(started)));
    }

    #[test]
    fn age_is_that_of_the_oldest_block_left() {
        let mut dirty = Dirty::default();
        dirty.insert(Instant(5), Key(0), true);
        dirty.insert(Instant(7), Key(999), true);
        dirty.insert(Instant(9), Key(1), true);
        assert_eq!(dirty.oldest(), Some(Instant(5)));
        destage(&mut dirty, 0, 8);
        assert_eq!(dirty.oldest(), Some(Instant(7)));
        destage(&mut dirty, 999, 10);
        assert_eq!((dirty.oldest(), dirty.contains(Key(1))), (Some(Instant(9)), true));
        destage(&mut dirty, 1, 11);
        assert_eq!((dirty.oldest(), dirty.blocks()), (None, 0));
    }

    #[test]
    fn a_block_that_its_neighbours_leave_behind_keeps_its_age() {
        let mut dirty = Dirty::default();
        for (at, key) in [(5, 0), (6, 1), (7, 2)] {
            dirty.insert(Instant(at), Key(key), true);
        }
        destage(&mut dirty, 0, 20);
        assert_eq!(dirty.oldest(), Some(Instant(6)));
        destage(&mut dirty, 2, 21);
        assert_eq!(dirty.oldest(), Some(Instant(6)), "1 is still there");
        // It is tried, but the primary fails.
        dirty.begin_destaging(Key(1));
        dirty.end_destaging(Key(1), None);
        assert_eq!(dirty.oldest(), Some(Instant(6)));
        // It is rewritten on its way, so what was old of it is on the primary.
        dirty.begin_destaging(Key(1));
        dirty.insert(Instant(31), Key(1), true);
        dirty.end_destaging(Key(1), Some(Instant(30)));
        assert_eq!(dirty.oldest(), Some(Instant(30)));
    }
}
