//! The dirty blocks, in address order and by age.
//!
//! A stripe of 256 blocks has one bitmap, so that the destager finds neighbors quickly and a
//! sequential load costs little memory. Ages are kept per stripe: the time of its oldest dirty
//! block, or earlier. A stripe takes up to [`DIRTY_STRIPE_BYTES`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use forebay_block::{Instant, STRIPE_BLOCKS, VolumeId};

use crate::key::Key;

/// Most bytes of memory that a stripe with dirty blocks takes. Measured with a million: 221 if they
/// became dirty in order, 210 if at random; 144 more if a block was written again.
pub const DIRTY_STRIPE_BYTES: u64 = 368;

const WORDS: usize = (STRIPE_BLOCKS / 64) as usize;
const _: () = assert!(STRIPE_BLOCKS.is_multiple_of(64));

/// A set of blocks of one stripe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bits([u64; WORDS]);

impl Bits {
    /// Whether block `i` of the stripe is in the set.
    pub fn get(&self, i: u64) -> bool {
        self.0[(i / 64) as usize] >> (i % 64) & 1 == 1
    }

    /// Adds block `i` if `on`, else removes it; returns whether that changed the set.
    pub fn set(&mut self, i: u64, on: bool) -> bool {
        let word = &mut self.0[(i / 64) as usize];
        let was = *word >> (i % 64) & 1 == 1;
        *word = *word & !(1 << (i % 64)) | u64::from(on) << (i % 64);
        was != on
    }

    /// The set as bitmap words; block 0 is the lowest bit of the first word.
    pub fn words(&self) -> [u64; WORDS] {
        self.0
    }

    /// The set with these bitmap words.
    pub fn from_words(words: [u64; WORDS]) -> Self {
        Self(words)
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    /// The first block in the set.
    fn first(&self) -> Option<u64> {
        let word = self.0.iter().position(|&word| word != 0)?;
        Some(64 * word as u64 + u64::from(self.0[word].trailing_zeros()))
    }

    /// The set without the blocks of another.
    fn without(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] & !other.0[at]))
    }

    /// The part of the set in a range of blocks.
    fn within(&self, blocks: Range<u64>) -> Self {
        let lowest = |bits: u64| u64::MAX.checked_shr(64 - bits as u32).unwrap_or(0);
        let bits_of = |at: usize, end: u64| lowest(end.saturating_sub(64 * at as u64).min(64));
        let mask = |at| bits_of(at, blocks.end) & !bits_of(at, blocks.start);
        Self(std::array::from_fn(|at| self.0[at] & mask(at)))
    }

    /// The number of blocks in the set.
    pub fn len(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// The dirty blocks of a stripe. Ages are exact for two generations: every block of `old` has been
/// dirty since `oldest` or later, every other block since `since` or later. When the last block of
/// `old` is clean, the others become `old`.
#[derive(Debug)]
struct Stripe {
    dirty: Bits,
    old: Bits,
    oldest: Instant,
    since: Instant,
    /// `None` if all of it is empty, as in most stripes.
    progress: Option<Box<Progress>>,
}

/// The progress of a stripe's blocks to the primary.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Progress {
    /// On their way to the primary.
    destaging: Bits,
    /// Of these, those that were written again since they set out.
    newer: Bits,
    /// Rewritten while dirty, since destaging last passed.
    again: Bits,
    /// The first blocks of full stripes of the primary that destaging has left to be filled.
    left: Bits,
}

impl Progress {
    const NONE: Self = {
        let none = Bits([0; WORDS]);
        Self { destaging: none, newer: none, again: none, left: none }
    };
}

impl Stripe {
    fn new() -> Self {
        let since = Instant::NEVER;
        Self { dirty: Bits::default(), old: Bits::default(), oldest: since, since, progress: None }
    }

    fn progress(&self) -> &Progress {
        self.progress.as_deref().unwrap_or(&Progress::NONE)
    }

    fn progress_mut(&mut self) -> &mut Progress {
        self.progress.get_or_insert_with(|| Box::new(Progress::NONE))
    }

    /// Frees what is empty.
    fn shrink(&mut self) {
        if self.progress.as_deref() == Some(&Progress::NONE) {
            self.progress = None;
        }
    }

    /// Notes that a block has been dirty since `at` or later, and is not one of the old ones.
    fn is_dirty_since(&mut self, i: u64, at: Instant) {
        self.old.set(i, false);
        self.since = self.since.min(at);
    }

    /// Promotes the younger blocks to `old` if `old` is empty; returns whether that changed
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
        self.dirty.is_empty() && self.progress().destaging.is_empty()
    }

    /// Whether destaging leaves block `i` to a later round, so that the full stripe of `unit`
    /// blocks around it may be filled until then. It does so once until nothing of that is dirty.
    fn leaves(&mut self, i: u64, unit: u64) -> bool {
        let first = i - i % unit;
        let is_full = || self.dirty.within(first..first + unit).len() == unit;
        unit > 1 && !is_full() && self.progress_mut().left.set(first, true)
    }

    /// The next block from `from` on that is dirty and not on its way to the primary. With
    /// `spares`, skips each rewritten block once, and all of a full stripe of the primary that is
    /// left to be filled. If there is none, returns the number of the latter.
    fn next_from(&mut self, from: u64, unit: u64, spares: bool) -> Result<u64, usize> {
        let (mut from, mut left) = (from, 0);
        loop {
            let Progress { destaging, again, .. } = self.progress();
            let goes = self.dirty.without(destaging).within(from..STRIPE_BLOCKS);
            let spared = if spares { *again } else { Bits::default() };
            let next = goes.without(&spared).first();
            if let Some(progress) = &mut self.progress {
                let passed = goes.within(from..next.map_or(STRIPE_BLOCKS, |next| next + 1));
                progress.again = progress.again.without(&passed);
            }
            match next {
                None => return Err(left),
                Some(next) if spares && self.leaves(next, unit) => {
                    from = next + unit - next % unit;
                    left += 1;
                }
                Some(next) => return Ok(next),
            }
        }
    }

    /// How many blocks have been dirty since when, for both generations.
    fn counts(&self) -> [(u64, u64); 2] {
        let old = self.old.len();
        [(tick_of(self.oldest), old), (tick_of(self.since), self.dirty.len() - old)]
    }
}

/// Bits of the nanoseconds in a tick of 8.6 s, in which dirty blocks are counted by their age.
const TICK_BITS: u32 = 33;

fn tick_of(at: Instant) -> u64 {
    at.0 >> TICK_BITS
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
    /// Entries of `oldest` and stripe number, for each stripe with a dirty block.
    ages: BTreeSet<(Instant, u64)>,
    blocks: u64,
    /// The number of blocks that have been dirty since each tick; none is zero.
    since: BTreeMap<u64, u64>,
    /// Blocks of a full stripe of the primary, a divisor of those of a stripe; 0 if it has none.
    unit: u64,
}

impl Part {
    /// Counts a stripe as it is `after` a change, and no more as it was before.
    fn recount(&mut self, before: [(u64, u64); 2], after: [(u64, u64); 2]) {
        for ((tick, blocks), now) in before.into_iter().zip(after).filter(|(was, now)| was != now) {
            if now.1 > 0 {
                *self.since.entry(now.0).or_default() += now.1;
            }
            if blocks == 0 {
                continue;
            }
            let count = self.since.get_mut(&tick).expect("it was counted there");
            *count -= blocks;
            if *count == 0 {
                self.since.remove(&tick);
            }
        }
    }
}

/// Bits of a stripe number within its volume; the bits above them are the volume.
const STRIPES_BITS: u32 = 32;
const _: () = assert!(STRIPE_BLOCKS << STRIPES_BITS == 1 << 40, "where a key has the volume");

/// Splits a key into its stripe number and the position of the block in the stripe.
fn stripe_of(key: Key) -> (u64, u64) {
    (key.0 / STRIPE_BLOCKS, key.0 % STRIPE_BLOCKS)
}

impl Dirty {
    /// The number of dirty blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The number of dirty blocks of a volume.
    pub fn blocks_of(&self, volume: VolumeId) -> u64 {
        self.volumes.get(usize::from(volume.0)).map_or(0, |part| part.blocks)
    }

    /// The number of stripes of a volume with dirty blocks.
    pub fn stripes_of(&self, volume: VolumeId) -> u64 {
        self.volumes.get(usize::from(volume.0)).map_or(0, |part| part.ages.len() as u64)
    }

    fn part(&mut self, stripe: u64) -> &mut Part {
        let at = (stripe >> STRIPES_BITS) as usize;
        if at >= self.volumes.len() {
            self.volumes.resize_with(at + 1, Part::default);
        }
        &mut self.volumes[at]
    }

    /// The same units of volumes, and no dirty blocks.
    pub fn emptied(&self) -> Self {
        let part = |part: &Part| Part { unit: part.unit, ..Part::default() };
        Self { volumes: self.volumes.iter().map(part).collect(), ..Self::default() }
    }

    /// Sets the number of blocks of a full stripe of a volume's primary: 1, or another divisor of a
    /// stripe's.
    pub fn set_unit(&mut self, volume: VolumeId, unit: u64) {
        self.part(u64::from(volume.0) << STRIPES_BITS).unit = unit;
    }

    /// The number of blocks of a full stripe of a volume's primary; 1 if it has none.
    pub fn unit_of(&self, volume: VolumeId) -> u64 {
        self.volumes.get(usize::from(volume.0)).map_or(1, |part| part.unit.max(1))
    }

    /// Whether the block is dirty.
    pub fn contains(&self, key: Key) -> bool {
        let (stripe, i) = stripe_of(key);
        self.stripes.get(&stripe).is_some_and(|s| s.dirty.get(i))
    }

    /// Whether the block is on its way to the primary.
    pub fn is_destaging(&self, key: Key) -> bool {
        let (stripe, i) = stripe_of(key);
        self.stripes.get(&stripe).is_some_and(|s| s.progress().destaging.get(i))
    }

    /// Whether the newest version of a dirty block is on its way to the primary. Where it is on the
    /// cache device does not matter: reclaim may have copied it.
    pub fn is_newest_destaging(&self, key: Key) -> bool {
        let (stripe, i) = stripe_of(key);
        let of_stripe = self.stripes.get(&stripe);
        of_stripe.is_some_and(|s| {
            let Progress { destaging, newer, .. } = s.progress();
            s.dirty.get(i) && destaging.get(i) && !newer.get(i)
        })
    }

    /// Whether the primary lacks the newest version of a block, or may still receive an older one.
    pub fn is_unsettled(&self, key: Key) -> bool {
        self.contains(key) || self.is_destaging(key)
    }

    /// The dirty blocks of a stripe, and those that are on their way to the primary.
    pub fn in_stripe(&self, stripe: u64) -> (Bits, Bits) {
        self.stripes
            .get(&stripe)
            .map_or_else(Default::default, |s| (s.dirty, s.progress().destaging))
    }

    /// Adds a block at `now`; `by_client` says that a client wrote it, rather than reclaim copying
    /// it.
    pub fn insert(&mut self, now: Instant, key: Key, by_client: bool) {
        let (number, i) = stripe_of(key);
        let unit = self.unit_of(key.volume());
        let stripe = self.stripes.entry(number).or_insert_with(Stripe::new);
        let is_new = !stripe.dirty.get(i);
        let is_rewritten = by_client && !is_new;
        if is_rewritten || stripe.progress.is_some() {
            let first = i - i % unit;
            let has_none = stripe.dirty.within(first..first + unit).is_empty();
            let progress = stripe.progress_mut();
            if has_none {
                progress.left.set(first, false);
            }
            if is_new || by_client {
                progress.again.set(i, !is_new);
                progress.newer.set(i, progress.destaging.get(i));
            }
        }
        if is_new {
            let before = stripe.counts();
            stripe.dirty.set(i, true);
            stripe.is_dirty_since(i, now);
            let age = stripe.grow_old().then_some((stripe.oldest, number));
            let after = stripe.counts();
            self.blocks += 1;
            let part = self.part(number);
            part.blocks += 1;
            part.ages.extend(age);
            part.recount(before, after);
        }
    }

    /// Removes a block that is clean or no longer cached.
    pub fn remove(&mut self, key: Key) {
        self.change(key, |stripe, i| {
            let was = stripe.dirty.set(i, false);
            stripe.old.set(i, false);
            u64::from(was)
        });
    }

    /// Notes that a dirty block is on its way to the primary.
    pub fn begin_destaging(&mut self, key: Key) {
        let (number, i) = stripe_of(key);
        if let Some(stripe) = self.stripes.get_mut(&number) {
            let progress = stripe.progress_mut();
            progress.destaging.set(i, true);
            progress.newer.set(i, false);
        }
    }

    /// Notes that a block is no longer on its way to the primary. With `started`, the primary has
    /// the version that set out then: the block is clean, or has been dirty since later than that.
    pub fn end_destaging(&mut self, key: Key, started: Option<Instant>) {
        self.change(key, |stripe, i| {
            if let Some(progress) = &mut stripe.progress {
                progress.destaging.set(i, false);
                progress.newer.set(i, false);
                stripe.shrink();
            }
            if let Some(started) = started.filter(|_| stripe.dirty.get(i)) {
                stripe.is_dirty_since(i, started);
            }
            0
        });
    }

    /// Changes the state of a block; `change` returns how many blocks that made clean. Then updates
    /// the stripe's age.
    fn change(&mut self, key: Key, change: impl FnOnce(&mut Stripe, u64) -> u64) {
        let (number, i) = stripe_of(key);
        let Some(stripe) = self.stripes.get_mut(&number) else { return };
        let (before, counts) = ((stripe.oldest, number), stripe.counts());
        let cleaned = change(stripe, i);
        let age = stripe.grow_old().then_some((stripe.oldest, number));
        let aged = age.is_some() || stripe.dirty.is_empty();
        let after = stripe.counts();
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
        part.recount(counts, after);
    }

    /// The dirty blocks of a volume by age: up to each of `bounds`, in ascending order, and older.
    /// An age may be too high, by a tick, or since it is that of an older neighbor.
    pub fn by_age<const N: usize>(
        &self,
        volume: VolumeId,
        now: Instant,
        bounds: [Duration; N],
    ) -> ([u64; N], u64) {
        let (mut counts, mut older) = ([0; N], 0);
        let since = self.volumes.get(usize::from(volume.0)).map(|part| &part.since);
        for (&tick, &blocks) in since.into_iter().flatten() {
            let age = now.since(Instant(tick << TICK_BITS));
            match bounds.iter().position(|&bound| age <= bound) {
                Some(class) => counts[class] += blocks,
                None => older += blocks,
            }
        }
        (counts, older)
    }

    /// When the oldest dirty block was written, or an earlier time.
    pub fn oldest(&self) -> Option<Instant> {
        let parts = self.volumes.iter().filter_map(|part| part.ages.first());
        parts.map(|&(at, _)| at).min()
    }

    /// When the oldest dirty block of a volume was written, or an earlier time.
    pub fn oldest_of(&self, volume: VolumeId) -> Option<Instant> {
        self.volumes.get(usize::from(volume.0))?.ages.first().map(|&(at, _)| at)
    }

    /// The first stripe of a volume with dirty blocks, by age and number, that is not before
    /// `from`: when its oldest block was written, or an earlier time, and its number.
    pub fn next_by_age(&self, volume: VolumeId, from: (Instant, u64)) -> Option<(Instant, u64)> {
        self.volumes.get(usize::from(volume.0))?.ages.range(from..).next().copied()
    }

    /// The first stripe of a volume with dirty blocks that is not before the stripe of `from`: its
    /// number, its dirty blocks, and those that are on their way to the primary.
    pub fn next_stripe(&self, volume: VolumeId, from: Key) -> Option<(u64, Bits, Bits)> {
        let end = Key::range(volume).end.0 / STRIPE_BLOCKS;
        let mut stripes = self.stripes.range(from.0 / STRIPE_BLOCKS..end);
        let (&number, stripe) = stripes.find(|(_, stripe)| !stripe.dirty.is_empty())?;
        Some((number, stripe.dirty, stripe.progress().destaging))
    }

    /// The next block in the stripes of `range`, in address order from its start, that is dirty and
    /// not on its way to the primary. Stops after `stripes_max` stripes and returns the key at
    /// which to continue; a full stripe of the primary that is left to be filled counts as one
    /// more. In stripes that became dirty after `spare_after`, skips each rewritten block once, and
    /// all of a full stripe of the primary that is not yet full.
    pub fn next_from(
        &mut self,
        range: Range<Key>,
        stripes_max: usize,
        spare_after: Instant,
    ) -> Result<Key, Option<Key>> {
        let (first, skip) = stripe_of(range.start);
        let unit = self.unit_of(range.start.volume());
        let last = range.end.0.div_ceil(STRIPE_BLOCKS).max(first);
        let mut seen = 0;
        for (&number, stripe) in self.stripes.range_mut(first..last) {
            if seen >= stripes_max {
                return Err(Some(Key(number * STRIPE_BLOCKS)));
            }
            let from = if number == first { skip } else { 0 };
            let found = stripe.next_from(from, unit, stripe.oldest > spare_after);
            stripe.shrink();
            match found {
                Ok(i) => return Ok(Key(number * STRIPE_BLOCKS + i)),
                Err(left) => seen += 1 + left,
            }
        }
        Err(None)
    }
}

impl Dirty {
    /// Compares the counts with the stripes.
    ///
    /// # Errors
    /// What differs.
    pub fn check(&self) -> Result<(), String> {
        let mut found = Self::default();
        for (&number, stripe) in &self.stripes {
            let part = found.part(number);
            part.recount([(0, 0); 2], stripe.counts());
            part.blocks += stripe.dirty.len();
        }
        for (volume, part) in self.volumes.iter().enumerate() {
            let found = found.volumes.get(volume).map(|part| (part.blocks, &part.since));
            let found = found.unwrap_or((0, &NONE));
            if found != (part.blocks, &part.since) {
                return Err(format!("volume {volume} counts other dirty blocks than it has"));
            }
        }
        Ok(())
    }
}

/// The counts of a volume without dirty blocks.
static NONE: BTreeMap<u64, u64> = BTreeMap::new();

#[cfg(test)]
mod tests {
    use forebay_block::testing::Numbers;

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
    fn a_full_stripe_of_the_primary_goes_before_those_that_may_still_be_filled() {
        let mut dirty = Dirty::default();
        dirty.set_unit(VolumeId(0), 4);
        for n in [1, 3, 4, 5, 6, 7, 9] {
            dirty.insert(Instant(10), Key(n), true);
        }
        let next = |dirty: &mut Dirty, from| dirty.next_from(Key(from)..Key(256), 9, Instant(9));
        assert_eq!(next(&mut dirty, 0), Ok(Key(4)));
        assert_eq!(next(&mut dirty, 8), Err(None), "9 is left once, too");
        assert_eq!(next(&mut dirty, 0), Ok(Key(1)), "it was left once");
        (4..8).for_each(|n| destage(&mut dirty, n, 11));
        assert_eq!(next(&mut dirty, 2), Ok(Key(3)), "and so was its neighbor");
        destage(&mut dirty, 9, 11);
        dirty.insert(Instant(12), Key(8), true);
        dirty.insert(Instant(12), Key(10), true);
        assert_eq!(next(&mut dirty, 8), Err(None), "it was clean meanwhile");
        assert_eq!(dirty.next_from(Key(8)..Key(256), 9, Instant::NEVER), Ok(Key(8)));
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

    /// To test each block of 16,384 stripes took 3 to 12 ms.
    #[test]
    fn the_next_block_is_found_without_a_test_of_each() {
        for seed in 0..3000 {
            let mut numbers = Numbers::new(seed);
            let any = |numbers: &mut Numbers| {
                let few = numbers.below(2) == 0;
                Bits(std::array::from_fn(|_| {
                    let word = numbers.below(u64::MAX);
                    if few {
                        word & numbers.below(u64::MAX) & numbers.below(u64::MAX)
                    } else {
                        word
                    }
                }))
            };
            let mut stripe = Stripe { dirty: any(&mut numbers), ..Stripe::new() };
            let progress = stripe.progress_mut();
            (progress.destaging, progress.again) = (any(&mut numbers), any(&mut numbers));
            let unit = 1 << numbers.below(9);
            let (from, spares) = (numbers.below(STRIPE_BLOCKS), numbers.below(2) == 0);
            let Progress { destaging, mut again, mut left, .. } = stripe.progress().clone();
            let (mut i, mut units) = (from, 0);
            let expected = loop {
                let first = i - i % unit;
                let goes = i < STRIPE_BLOCKS && stripe.dirty.get(i) && !destaging.get(i);
                let is_full = || (first..first + unit).all(|i| stripe.dirty.get(i));
                if i == STRIPE_BLOCKS {
                    break Err(units);
                } else if !goes || again.set(i, false) && spares {
                    i += 1;
                } else if spares && unit > 1 && !is_full() && left.set(first, true) {
                    (i, units) = (first + unit, units + 1);
                } else {
                    break Ok(i);
                }
            };
            assert_eq!(stripe.next_from(from, unit, spares), expected, "seed {seed}");
            let progress = stripe.progress();
            assert_eq!((progress.again, progress.left), (again, left), "seed {seed}");
        }
    }

    #[test]
    fn a_step_ends_earlier_where_it_leaves_much_to_be_filled() {
        let mut dirty = Dirty::default();
        dirty.set_unit(VolumeId(0), 16);
        (0..40 * 16).for_each(|n| dirty.insert(Instant(10), Key(16 * n), true));
        let all = Key(0)..Key(40 * STRIPE_BLOCKS);
        let mut from = 0;
        for _ in 0..10 {
            let past = from + 4 * STRIPE_BLOCKS;
            let found = dirty.next_from(Key(from)..all.end, 64, Instant(9));
            let end = if past < all.end.0 { Err(Some(Key(past))) } else { Err(None) };
            assert_eq!(found, end, "each has 16 to be filled");
            from = past;
        }
        let found = dirty.next_from(all, 64, Instant(9));
        assert_eq!(found, Ok(Key(0)), "it was left once");
    }

    /// Destages a block that is not rewritten meanwhile.
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
        assert_eq!(dirty.check(), Ok(()));
    }

    #[test]
    fn blocks_are_counted_by_age() {
        let second = |second: u64| Instant(0) + Duration::from_secs(second);
        let mut dirty = Dirty::default();
        dirty.insert(second(100), Key(0), true);
        dirty.insert(second(150), Key(1), true);
        dirty.insert(second(150), Key(1), true);
        dirty.insert(second(200), Key(999), true);
        let bounds = [20, 60].map(Duration::from_secs);
        let at = |dirty: &Dirty, time| {
            dirty.check().expect("it counts right");
            dirty.by_age(VolumeId(0), second(time), bounds)
        };
        assert_eq!(at(&dirty, 201), ([1, 1], 1));
        assert_eq!(at(&dirty, 280), ([0, 0], 3));
        // The old one leaves, and the other one of its stripe keeps its own age.
        destage(&mut dirty, 0, 202);
        assert_eq!(at(&dirty, 202), ([1, 1], 0));
        // Rewritten on its way: dirty since it set out.
        dirty.begin_destaging(Key(1));
        dirty.insert(second(206), Key(1), true);
        dirty.end_destaging(Key(1), Some(second(205)));
        assert_eq!(at(&dirty, 208), ([2, 0], 0));
        dirty.remove(Key(1));
        dirty.remove(Key(999));
        assert_eq!(at(&dirty, 208), ([0, 0], 0));
        assert_eq!(dirty.by_age(VolumeId(9), second(208), bounds), ([0, 0], 0));
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
        // A destage is tried, but the primary fails.
        dirty.begin_destaging(Key(1));
        dirty.end_destaging(Key(1), None);
        assert_eq!(dirty.oldest(), Some(Instant(6)));
        // The block is rewritten while on its way, so its old version is on the primary.
        dirty.begin_destaging(Key(1));
        dirty.insert(Instant(31), Key(1), true);
        dirty.end_destaging(Key(1), Some(Instant(30)));
        assert_eq!(dirty.oldest(), Some(Instant(30)));
    }
}
