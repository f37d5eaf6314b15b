//! What a place of the cache gains with a block in it, learned from a sample of the requests.
//!
//! Blocks are told apart by how often they were read recently, by the kind of the last request for
//! them, and by its age. For each such class the sample shows how many reads there are in a time,
//! and how many stays end, by a read or by a write. A block is worth the most reads per time that
//! it can save from now on, for the best time to keep it: the index of Gittins (J. R. Stat. Soc. B
//! 1979), which for caches is the hit density of LHD (Beckmann, Chen and Cidon, NSDI 2018) without
//! the assumption that a block stays until it is read. Unlike LHD this learns also from blocks that
//! are not cached, so it needs no blocks that are kept for the sake of trying.

use hashbrown::HashMap;

use crate::random::random_below;
use crate::recent::KeyHash;
use crate::sketch::COUNT_MAX;

/// Ages that are told apart; the last has no end.
const AGES: usize = 34;
/// Ages for each doubling, from [`YOUNGEST`] on.
const PER_OCTAVE: f32 = 3.0;
/// The end of the first age, in fills of the cache.
const YOUNGEST: f32 = 1.0 / 64.0;
/// Classes of counts.
const COUNTS: usize = 8;
/// The class of each count.
const COUNT_CLASS: [u8; COUNT_MAX as usize + 1] = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 7, 7, 7, 7, 7];
const CLASSES: usize = COUNTS * Touch::ALL.len();
/// Blocks remembered, for each place of the sampled share of the cache.
const REMEMBERED: usize = 12;
/// Remembered blocks looked at for each request, to see how old blocks are.
const LOOKED_AT: usize = 4;
/// Blocks compared to forget an old one.
const COMPARED: usize = 8;
/// Requests between two calculations, for each place; and the fewest.
const LEARN_AFTER: f32 = 0.5;
const LEARN_AFTER_MIN: u64 = 512;
/// Share of the past that is forgotten at a calculation.
const FORGOTTEN: f32 = 0.04;
/// Time of blocks, in fills, for which a class counts as the mean of all classes.
const PRIOR: f32 = 4.0;

/// A request for a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Touch {
    /// A read.
    #[default]
    Read,
    /// A write of a block that was not cached.
    Written,
    /// A write of a block that was cached.
    Rewritten,
}

impl Touch {
    /// Every kind, by its number.
    pub const ALL: [Self; 3] = [Self::Read, Self::Written, Self::Rewritten];

    /// The kind of a request.
    #[must_use]
    pub fn of(is_write: bool, was_cached: bool) -> Self {
        match (is_write, was_cached) {
            (false, _) => Self::Read,
            (true, false) => Self::Written,
            (true, true) => Self::Rewritten,
        }
    }

    /// The kind with a number: of its two lowest bits.
    #[must_use]
    pub fn from_bits(bits: u8) -> Self {
        Self::ALL.get(usize::from(bits & 3)).copied().unwrap_or_default()
    }
}

/// The last request for a block, or for one of the blocks of a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LastTouch {
    /// When, by the policy's stamps, which wrap around.
    pub stamp: u8,
    /// What it was.
    pub touch: Touch,
}

impl LastTouch {
    /// The three bits that the index keeps of it for a block of the log.
    #[must_use]
    pub fn meta(self) -> u8 {
        self.stamp & 1 | (self.touch as u8) << 1
    }

    /// The request from these bits, for a block that was requested at most one stamp before `now`.
    #[must_use]
    pub fn from_meta(meta: u8, now: u8) -> Self {
        Self { stamp: now.wrapping_sub((now ^ meta) & 1), touch: Touch::from_bits(meta >> 1) }
    }
}

/// A block that was requested.
#[derive(Clone, Copy, Debug)]
struct Remembered {
    key: u64,
    /// When, by the owner's clock.
    at: u32,
    touch: Touch,
}

/// Figures of each class at each age.
type Table = [[f32; AGES]; CLASSES];

/// The values of blocks, and what they were learned from.
#[derive(Clone, Debug)]
pub struct Learned {
    remembered: Vec<Remembered>,
    position: HashMap<u64, u32, KeyHash>,
    most: usize,
    /// Reads, and ends of stays of either kind.
    reads: Box<Table>,
    ends: Box<Table>,
    /// Time that blocks spent, in fills of the cache.
    time: Box<Table>,
    values: Box<Table>,
    /// Fills of the cache in a unit of the clock.
    unit: f32,
    looked: u32,
    requests: u64,
    learn_after: u64,
    random: u64,
}

impl Learned {
    /// For a cache that is filled once in `fill` units of the clock, whose share that is sampled
    /// has `places` places.
    pub fn new(places: usize, fill: u64) -> Self {
        let most = places.max(1) * REMEMBERED;
        let mut values = Box::new([[0.0; AGES]; CLASSES]);
        // Until anything is known, the most recent block is worth most.
        for values in values.iter_mut() {
            values.iter_mut().enumerate().for_each(|(age, value)| *value = 1.0 / (1 + age) as f32);
        }
        Self {
            remembered: Vec::with_capacity(most),
            position: HashMap::with_capacity_and_hasher(most, KeyHash::default()),
            most,
            reads: Box::new([[0.0; AGES]; CLASSES]),
            ends: Box::new([[0.0; AGES]; CLASSES]),
            time: Box::new([[0.0; AGES]; CLASSES]),
            values,
            unit: 1.0 / fill.max(1) as f32,
            looked: 0,
            requests: 0,
            learn_after: ((LEARN_AFTER * places as f32) as u64).max(LEARN_AFTER_MIN),
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// A sampled block is requested; `count` tells how often a block was read before.
    pub fn on_request(&mut self, key: u64, touch: Touch, now: u32, count: impl Fn(u64) -> u8) {
        self.look_around(now, &count);
        let new = Remembered { key, at: now, touch };
        if let Some(&at) = self.position.get(&key) {
            let before = std::mem::replace(&mut self.remembered[at as usize], new);
            let class = class(count(key), before.touch);
            let age = self.age(now.wrapping_sub(before.at));
            self.reads[class][age] += f32::from(u8::from(touch == Touch::Read));
            self.ends[class][age] += 1.0;
        } else if self.remembered.len() < self.most {
            self.position.insert(key, self.remembered.len() as u32);
            self.remembered.push(new);
        } else {
            let at = self.oldest_of_some(now);
            let forgotten = std::mem::replace(&mut self.remembered[at], new);
            self.position.remove(&forgotten.key);
            self.position.insert(key, at as u32);
        }
        self.requests += 1;
        if self.requests >= self.learn_after {
            self.requests = 0;
            self.learn();
        }
    }

    /// What a place gains with a block: reads per fill of the cache. `age` is in units of the
    /// clock.
    pub fn value(&self, count: u8, touch: Touch, age: u32) -> f32 {
        self.values[class(count, touch)][self.age(age)]
    }

    /// Adds the time since the last look to the classes of a few blocks, as much as all have spent.
    fn look_around(&mut self, now: u32, count: impl Fn(u64) -> u8) {
        let since = now.wrapping_sub(std::mem::replace(&mut self.looked, now));
        if self.remembered.is_empty() || since == 0 {
            return;
        }
        let share = self.remembered.len() as f32 / LOOKED_AT as f32;
        let spent = since as f32 * self.unit * share;
        for _ in 0..LOOKED_AT {
            let any = self.any();
            let one = self.remembered[any];
            let age = self.age(now.wrapping_sub(one.at));
            self.time[class(count(one.key), one.touch)][age] += spent;
        }
    }

    fn any(&mut self) -> usize {
        random_below(&mut self.random, self.remembered.len())
    }

    fn oldest_of_some(&mut self, now: u32) -> usize {
        let some: [usize; COMPARED] = std::array::from_fn(|_| self.any());
        let age = |&at: &usize| now.wrapping_sub(self.remembered[at].at);
        some.into_iter().max_by_key(age).unwrap_or(0)
    }

    /// The number of an age in units of the clock.
    pub(crate) fn age(&self, age: u32) -> usize {
        let octaves = (age as f32 * self.unit / YOUNGEST).log2();
        if octaves < 0.0 { 0 } else { ((octaves * PER_OCTAVE) as usize + 1).min(AGES - 1) }
    }

    /// Calculates the values, and forgets a part of the past.
    fn learn(&mut self) {
        let (reads, ends, time) = (sum(&self.reads), sum(&self.ends), sum(&self.time));
        let widths: [f32; AGES] = std::array::from_fn(width);
        for class in 0..CLASSES {
            // By age: the chance that a block which gets so old is read, and that its stay ends.
            let (mut read, mut end) = ([0.0; AGES], [0.0; AGES]);
            for age in 0..AGES {
                let width = widths[age];
                let prior = PRIOR * width;
                let known = self.time[class][age] + prior;
                let all = time[age].max(f32::MIN_POSITIVE);
                let rate = |own: f32, of_all: f32| (own + prior * of_all / all) / known;
                let reads = rate(self.reads[class][age], reads[age]);
                let ends = rate(self.ends[class][age], ends[age]).max(reads);
                end[age] = 1.0 - (-ends * width).exp();
                read[age] = if ends > 0.0 { end[age] * reads / ends } else { 0.0 };
            }
            for from in 0..AGES {
                self.values[class][from] =
                    best_density(&read[from..], &end[from..], &widths[from..]);
            }
        }
        for table in [&mut self.reads, &mut self.ends, &mut self.time] {
            table.iter_mut().flatten().for_each(|figure| *figure *= 1.0 - FORGOTTEN);
        }
    }
}

/// The most reads per time that a block gives, over all times to keep it. By age, from its own on:
/// the chances that it is read and that its stay ends, and the length of the age.
fn best_density(read: &[f32], end: &[f32], widths: &[f32]) -> f32 {
    let (mut stays, mut reads, mut time, mut best) = (1.0, 0.0, 0.0f32, 0.0f32);
    for ((read, end), width) in read.iter().zip(end).zip(widths) {
        reads += stays * read;
        time += stays * width * (1.0 - end / 2.0);
        stays *= 1.0 - end;
        best = best.max(reads / time.max(f32::MIN_POSITIVE));
    }
    best
}

/// The length of an age, in fills.
fn width(age: usize) -> f32 {
    let end = |age: usize| YOUNGEST * (age as f32 / PER_OCTAVE).exp2();
    match age {
        0 => YOUNGEST,
        last if last == AGES - 1 => end(last),
        age => end(age) - end(age - 1),
    }
}

fn class(count: u8, touch: Touch) -> usize {
    usize::from(COUNT_CLASS[usize::from(count.min(COUNT_MAX))]) * Touch::ALL.len() + touch as usize
}

fn sum(table: &Table) -> [f32; AGES] {
    std::array::from_fn(|age| table.iter().map(|class| class[age]).sum())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PLACES: usize = 200;

    /// What is learned from requests, each of which is one unit of the clock. Counts are exact.
    fn learned(requests: impl IntoIterator<Item = (u64, Touch)>) -> Learned {
        let mut learned = Learned::new(PLACES, PLACES as u64);
        let mut counts = std::collections::BTreeMap::new();
        for (now, (key, touch)) in (0..).zip(requests) {
            let count = |key| counts.get(&key).copied().unwrap_or(0u8);
            learned.on_request(key, touch, now, count);
            if touch == Touch::Read {
                let count = counts.entry(key).or_insert(0u8);
                *count = (*count + 1).min(COUNT_MAX);
            }
            assert!(learned.remembered.len() <= PLACES * REMEMBERED);
            assert_eq!(learned.position.len(), learned.remembered.len());
        }
        let known = |(at, one): (usize, &Remembered)| learned.position[&one.key] == at as u32;
        assert!(learned.remembered.iter().enumerate().all(known));
        learned
    }

    /// A number of fills of the cache, in units of the clock.
    fn fills(fills: f32) -> u32 {
        (fills * PLACES as f32) as u32
    }

    #[test]
    fn in_a_loop_the_oldest_is_worth_most() {
        let looped = learned((0..40_000).map(|at| (at % (3 * PLACES as u64), Touch::Read)));
        let worth = [0.1, 1.5, 2.5].map(|age| looped.value(COUNT_MAX, Touch::Read, fills(age)));
        assert!(worth.is_sorted(), "{worth:?}");
        assert!(worth[2] > 3.0 * worth[0], "{worth:?}");
    }

    #[test]
    fn what_is_read_soon_or_never_is_most_worth_while_it_is_new() {
        // Each block is read again after half a fill; half of them never.
        let reads = (0..40_000).map(|at: u64| {
            let back = at.is_multiple_of(4) && at > PLACES as u64;
            (if back { at - PLACES as u64 / 2 - 1 } else { at }, Touch::Read)
        });
        let soon = learned(reads);
        let worth = [0.4, 1.0, 4.0].map(|age| soon.value(0, Touch::Read, fills(age)));
        assert!(worth[0] > 2.0 * worth[1] && worth[1] >= worth[2], "{worth:?}");
    }

    #[test]
    fn what_is_written_and_not_read_is_worth_nothing() {
        // A journal, which only grows; and pages that are read and written in turn.
        let requests = (0..40_000u64).map(|at| match at % 4 {
            0 | 1 => (1_000_000 + at, Touch::Written),
            2 => (at / 4 % 150, Touch::Rewritten),
            _ => ((at / 4 + 75) % 150, Touch::Read),
        });
        let mixed = learned(requests);
        let journal = mixed.value(0, Touch::Written, fills(0.2));
        let page = mixed.value(COUNT_MAX, Touch::Rewritten, fills(0.2));
        assert!(page > 20.0 * journal, "{page} {journal}");
    }

    #[test]
    fn ages_cover_all_time() {
        let some = Learned::new(PLACES, 6400);
        let from = |age: usize| (0..age).map(width).sum::<f32>() * 6400.0;
        for age in 0..AGES - 1 {
            let (first, last) = (from(age).ceil() as u32 + 1, from(age + 1) as u32 - 1);
            assert!([first, last].iter().all(|&time| some.age(time) == age), "{age}");
        }
        assert_eq!((some.age(0), some.age(u32::MAX)), (0, AGES - 1));
    }

    proptest! {
        #[test]
        fn values_are_finite_and_not_negative(
            requests in prop::collection::vec((0u64..50, 0u8..3), 600..2000),
        ) {
            let requests = requests.into_iter().map(|(key, bits)| (key, Touch::from_bits(bits)));
            let some = learned(requests);
            let all = some.values.iter().flatten();
            prop_assert!(all.clone().all(|value| value.is_finite() && *value >= 0.0));
        }
    }
}
