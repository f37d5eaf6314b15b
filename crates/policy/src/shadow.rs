//! Small caches without data, one for each rule, that show which rule would miss least.
//!
//! They see the requests for a sample of the blocks, chosen by a hash of the key, and have places
//! for the same share of the cache's blocks (SHARDS: Waldspurger, Park, Garthwaite and Ahmad, FAST
//! 2015; a contest of policies over samples: Waldspurger, Saemundsson, Ahmad and Park, ATC 2017).
//! When a block was asked for last is the same in all of them, so they share their entries.

use hashbrown::HashMap;

use crate::learned::{Learned, Touch};
use crate::random::random_below;
use crate::recent::KeyHash;
use crate::rule::{Rule, Traits};

/// Number of shadows: one for each rule.
pub const SHADOWS: usize = Rule::ALL.len();
/// Blocks compared to choose one that goes.
const SAMPLE: usize = 16;
/// The position of a block that a shadow does not hold.
const ABSENT: u32 = u32::MAX;

/// A request for a block.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// The block.
    pub key: u64,
    /// Whether it is written.
    pub is_write: bool,
    /// When, by the clock of [`Learned`].
    pub at: u32,
}

/// A block that at least one shadow holds.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// When it was asked for last, in requests, and by the clock of [`Learned`].
    stamp: u32,
    at: u32,
    touch: Touch,
    /// Its position in each shadow.
    places: [u32; SHADOWS],
}

/// The shadows.
#[derive(Clone, Debug)]
pub struct Shadows {
    entries: HashMap<u64, Entry, KeyHash>,
    held: [Vec<u64>; SHADOWS],
    places: usize,
    now: u32,
    random: u64,
    learned: Learned,
}

impl Shadows {
    /// Empty shadows of `places` places each, of a cache that is filled once in `fill` units of the
    /// clock.
    pub fn new(places: usize, fill: u64) -> Self {
        Self {
            // Never more, so that the table is never copied to grow.
            entries: HashMap::with_capacity_and_hasher((places + 1) * SHADOWS, KeyHash::default()),
            held: std::array::from_fn(|_| Vec::new()),
            places: places.max(1),
            now: 0,
            random: 0x9e37_79b9_7f4a_7c15,
            learned: Learned::new(places, fill),
        }
    }

    /// What was learned from the requests so far.
    pub fn learned(&self) -> &Learned {
        &self.learned
    }

    /// Learns from a request that [`Shadows::ask`] gets next; `count` tells how often a block was
    /// read before it.
    pub fn learn(&mut self, asked: Asked, count: impl Fn(u64) -> u8) {
        let worth = |entry: &Entry| entry.places[Rule::WORTH] != ABSENT;
        let was_held = self.entries.get(&asked.key).is_some_and(worth);
        let touch = Touch::of(asked.is_write, was_held);
        self.learned.on_request(asked.key, touch, asked.at, count);
    }

    /// A block is asked for; `count` tells how often a block was read, this time included. Returns
    /// which shadows hold it.
    pub fn ask(&mut self, asked: Asked, count: impl Fn(u64) -> u8) -> [bool; SHADOWS] {
        self.now = self.now.wrapping_add(1);
        let (key, at, stamp) = (asked.key, asked.at, self.now);
        let new = Entry { stamp, at, touch: Touch::Read, places: [ABSENT; SHADOWS] };
        let entry = self.entries.entry(key).or_insert(new);
        let held = entry.places.map(|place| place != ABSENT);
        let touch = Touch::of(asked.is_write, held[Rule::WORTH]);
        (entry.stamp, entry.at, entry.touch) = (stamp, at, touch);
        for shadow in (0..SHADOWS).filter(|&shadow| !held[shadow]) {
            self.enter(shadow, key);
            if self.held[shadow].len() > self.places {
                self.evict(shadow, key, &count);
            }
        }
        held
    }

    fn enter(&mut self, shadow: usize, key: u64) {
        let at = self.held[shadow].len() as u32;
        self.held[shadow].push(key);
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.places[shadow] = at;
        }
    }

    /// Removes one block of a shadow; `newest` may be the one.
    fn evict(&mut self, shadow: usize, newest: u64, count: impl Fn(u64) -> u8) {
        let mut keys = [newest; SAMPLE + 1];
        for key in &mut keys[1..] {
            let held = &self.held[shadow];
            *key = held[random_below(&mut self.random, held.len())];
        }
        let at = self.entries.get(&newest).map_or(0, |entry| entry.at);
        let sample = keys.map(|key| {
            let Some(entry) = self.entries.get(&key) else { return Traits::default() };
            let age = self.now.wrapping_sub(entry.stamp);
            let time = at.wrapping_sub(entry.at);
            Traits { age, time, count: count(key), touch: entry.touch }
        });
        self.remove(shadow, keys[Rule::ALL[shadow].victim(&sample, &self.learned)]);
    }

    fn remove(&mut self, shadow: usize, key: u64) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let at = std::mem::replace(&mut entry.places[shadow], ABSENT);
        if entry.places == [ABSENT; SHADOWS] {
            self.entries.remove(&key);
        }
        let held = &mut self.held[shadow];
        held.swap_remove(at as usize);
        if let Some(moved) = held.get(at as usize).and_then(|moved| self.entries.get_mut(moved)) {
            moved.places[shadow] = at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hits of each shadow.
    fn hits(places: usize, keys: impl IntoIterator<Item = u64>) -> [u32; SHADOWS] {
        let (mut shadows, mut hits) = (Shadows::new(places, places as u64), [0; SHADOWS]);
        let mut counts = std::collections::BTreeMap::new();
        for (at, key) in (0..).zip(keys) {
            let asked = Asked { key, is_write: false, at };
            shadows.learn(asked, |key| counts.get(&key).copied().unwrap_or(0));
            *counts.entry(key).or_insert(0u8) += 1;
            let held = shadows.ask(asked, |key| counts.get(&key).copied().unwrap_or(0));
            hits.iter_mut().zip(held).for_each(|(hits, held)| *hits += u32::from(held));
            for (shadow, held) in shadows.held.iter().enumerate() {
                assert!(held.len() <= places);
                let known =
                    |(at, key): (usize, &u64)| shadows.entries[key].places[shadow] == at as u32;
                assert!(held.iter().enumerate().all(known));
            }
            assert!(shadows.entries.len() <= places * SHADOWS);
        }
        hits
    }

    #[test]
    fn what_fits_is_held_by_all() {
        assert_eq!(hits(10, (0..50).map(|at| at % 10)), [40; SHADOWS]);
    }

    #[test]
    fn a_loop_is_for_frequency_and_a_shift_for_recency() {
        let looped = hits(50, (0..200).map(|at| at % 60));
        assert!(looped[Rule::RECENCY] < 40 && looped[Rule::FREQUENCY] > 80, "{looped:?}");
        // Ten requests of each of forty blocks, then of forty others, and so on.
        let shifted = hits(50, (0..4000).map(|at| at / 400 * 40 + at % 40));
        assert!(shifted[Rule::RECENCY] > shifted[Rule::FREQUENCY] + 500, "{shifted:?}");
    }
}
