//! Which blocks are dirty, in address order and by age.
//!
//! A stripe of 256 blocks has one bitmap, so that the destager finds neighbours at once and a
//! sequential load costs little memory. Ages are kept by stripe: the time of its oldest dirty
//! block, or a little earlier.

use std::collections::{BTreeMap, VecDeque};

use forebay_block::{Instant, STRIPE_BLOCKS, VolumeId};

use crate::index::Key;

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

    /// Whether it has no block.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }
}

#[derive(Debug)]
struct Stripe {
    dirty: Bits,
    destaging: Bits,
    /// Rewritten while dirty, since destaging last came by.
    again: Bits,
    /// A block was passed over since an end of destaging: it is as old as `oldest` says.
    spared: bool,
    oldest: Instant,
}

/// The dirty blocks of one shard.
#[derive(Default, Debug)]
pub struct Dirty {
    stripes: BTreeMap<u64, Stripe>,
    ages: VecDeque<(Instant, u64)>,
    blocks: u64,
}

/// The first block of the stripe a block is in, as a key.
fn stripe_of(key: Key) -> (u64, u64) {
    (key.0 / STRIPE_BLOCKS, key.0 % STRIPE_BLOCKS)
}

impl Dirty {
    /// Number of dirty blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
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

    /// Adds a block that became dirty at `now`, or was rewritten then by a client, or only copied.
    pub fn insert(&mut self, now: Instant, key: Key, by_client: bool) {
        let (number, i) = stripe_of(key);
        let stripe = self.stripes.entry(number).or_insert_with(|| {
            self.ages.push_back((now, number));
            let none = Bits::default();
            Stripe { dirty: none, destaging: none, again: none, spared: false, oldest: now }
        });
        let is_new = stripe.dirty.set(i, true);
        if is_new || by_client {
            stripe.again.set(i, !is_new);
        }
        self.blocks += u64::from(is_new);
    }

    /// Takes a block out: it is clean, or gone.
    pub fn remove(&mut self, key: Key) {
        let (number, i) = stripe_of(key);
        if let Some(stripe) = self.stripes.get_mut(&number) {
            self.blocks -= u64::from(stripe.dirty.set(i, false));
            if stripe.dirty.is_empty() && stripe.destaging.is_empty() {
                self.stripes.remove(&number);
            }
        }
    }

    /// Marks a dirty block as on its way to the primary, or as no longer so. When one ends that
    /// was started at `started`, what is still dirty in the stripe is not older than that, unless
    /// it was passed over.
    pub fn set_destaging(&mut self, key: Key, on: bool, started: Instant) {
        let (number, i) = stripe_of(key);
        let Some(stripe) = self.stripes.get_mut(&number) else { return };
        stripe.destaging.set(i, on);
        if on || !stripe.destaging.is_empty() {
            return;
        }
        if stripe.dirty.is_empty() {
            self.stripes.remove(&number);
        } else if !std::mem::take(&mut stripe.spared) && stripe.oldest < started {
            stripe.oldest = started;
            self.ages.push_back((started, number));
        }
    }

    /// When the oldest dirty block was written, or a little earlier.
    pub fn oldest(&mut self) -> Option<Instant> {
        while let Some(&(at, number)) = self.ages.front() {
            if self.stripes.get(&number).is_some_and(|s| s.oldest == at) {
                return Some(at);
            }
            self.ages.pop_front();
        }
        None
    }

    /// As [`Dirty::oldest`], without tidying up.
    pub fn oldest_if_known(&self) -> Option<Instant> {
        let current = |(at, number): &&(Instant, u64)| {
            self.stripes.get(number).is_some_and(|s| s.oldest == *at)
        };
        self.ages.iter().find(current).map(|&(at, _)| at)
    }

    /// Every dirty block of a volume, in address order.
    pub fn of_volume(&self, volume: VolumeId) -> impl Iterator<Item = Key> {
        let from = Key::new(volume, 0).0 / STRIPE_BLOCKS;
        let to = ((u64::from(volume.0) + 1) << 40) / STRIPE_BLOCKS;
        self.stripes.range(from..to).flat_map(|(&number, stripe)| {
            let dirty = (0..STRIPE_BLOCKS).filter(|&i| stripe.dirty.get(i));
            dirty.map(move |i| Key(number * STRIPE_BLOCKS + i))
        })
    }

    /// The next block at or after `from`, in address order, that is dirty and not on its way;
    /// stops after looking at `stripes_max` stripes and says where to go on. In stripes that
    /// became dirty after `spare_after`, it passes over what was rewritten, once.
    pub fn next_from(
        &mut self,
        from: Key,
        stripes_max: usize,
        spare_after: Instant,
    ) -> Result<Key, Option<Key>> {
        let (first, skip) = stripe_of(from);
        for (seen, (&number, stripe)) in self.stripes.range_mut(first..).enumerate() {
            if seen == stripes_max {
                return Err(Some(Key(number * STRIPE_BLOCKS)));
            }
            let start = if number == first { skip } else { 0 };
            let found = (start..STRIPE_BLOCKS).find(|&i| {
                if !stripe.dirty.get(i) || stripe.destaging.get(i) {
                    return false;
                }
                let spared = stripe.again.set(i, false) && stripe.oldest > spare_after;
                stripe.spared |= spared;
                !spared
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
        dirty.set_destaging(Key(4), true, Instant(1));
        let mut next = |from, stripes_max| dirty.next_from(Key(from), stripes_max, Instant(0));
        assert_eq!(next(0, 9), Ok(Key(3)));
        assert_eq!(next(4, 9), Ok(Key(300)));
        assert_eq!(next(301, 9), Ok(Key(700)));
        assert_eq!(next(701, 9), Err(None));
        assert_eq!(next(4, 1), Err(Some(Key(256))));
        assert_eq!(dirty.blocks(), 4);
    }

    #[test]
    fn what_was_passed_over_keeps_its_age() {
        let mut dirty = Dirty::default();
        for (at, n) in [(5, 0), (6, 0), (7, 1)] {
            dirty.insert(Instant(at), Key(n), true);
        }
        assert_eq!(dirty.next_from(Key(0), 9, Instant(0)), Ok(Key(1)));
        for (key, started, oldest) in [(1, 8, Some(5)), (0, 9, None)] {
            dirty.set_destaging(Key(key), true, Instant(started));
            dirty.remove(Key(key));
            dirty.set_destaging(Key(key), false, Instant(started));
            assert_eq!(dirty.oldest(), oldest.map(Instant));
        }
    }

    #[test]
    fn what_was_rewritten_is_passed_over_once() {
        let mut dirty = Dirty::default();
        for n in [3, 4, 5] {
            dirty.insert(Instant(10), Key(n), true);
        }
        dirty.insert(Instant(11), Key(3), true);
        dirty.insert(Instant(11), Key(4), false);
        assert_eq!(dirty.next_from(Key(0), 9, Instant(9)), Ok(Key(4)), "a copy is no rewrite");
        assert_eq!(dirty.next_from(Key(0), 9, Instant(9)), Ok(Key(3)), "it was spared before");
        dirty.insert(Instant(12), Key(3), true);
        assert_eq!(dirty.next_from(Key(0), 9, Instant(10)), Ok(Key(3)), "dirty for too long");
        dirty.remove(Key(3));
        dirty.insert(Instant(13), Key(3), true);
        assert_eq!(dirty.next_from(Key(0), 9, Instant(9)), Ok(Key(3)), "it was clean meanwhile");
    }

    #[test]
    fn age_is_that_of_the_oldest_block_left() {
        let mut dirty = Dirty::default();
        dirty.insert(Instant(5), Key(0), true);
        dirty.insert(Instant(7), Key(999), true);
        dirty.insert(Instant(9), Key(1), true);
        assert_eq!(dirty.oldest(), Some(Instant(5)));
        dirty.set_destaging(Key(0), true, Instant(8));
        dirty.remove(Key(0));
        dirty.set_destaging(Key(0), false, Instant(8));
        assert_eq!(dirty.oldest(), Some(Instant(7)));
        dirty.remove(Key(999));
        assert_eq!((dirty.oldest(), dirty.contains(Key(1))), (Some(Instant(8)), true));
        dirty.remove(Key(1));
        assert_eq!((dirty.oldest(), dirty.blocks()), (None, 0));
    }
}
