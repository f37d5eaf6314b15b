//! Small caches without data, one for each rule, that show which rule would miss least.
//!
//! They see the requests for a sample of the blocks, chosen by a hash of the key, and have places
//! for the same share of the cache's blocks (SHARDS: Waldspurger, Park, Garthwaite and Ahmad, FAST
//! 2015; a contest of policies over samples: Waldspurger, Saemundsson, Ahmad and Park, ATC 2017).
//! When a block was asked for last is the same in all of them, so they share their entries.

use hashbrown::HashMap;

use crate::recent::KeyHash;
use crate::rule::{Rule, Traits};

/// Number of shadows.
pub const SHADOWS: usize = Rule::ALL.len();
/// Blocks compared to choose one that goes.
const SAMPLE: usize = 16;
/// The position of a block that a shadow does not hold.
const ABSENT: u32 = u32::MAX;

/// A block that at least one shadow holds.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// When it was asked for last.
    stamp: u32,
    /// Its position in each shadow.
    at: [u32; SHADOWS],
}

/// The shadows.
#[derive(Clone, Debug)]
pub struct Shadows {
    entries: HashMap<u64, Entry, KeyHash>,
    held: [Vec<u64>; SHADOWS],
    places: usize,
    now: u32,
    random: u64,
}

impl Shadows {
    /// Empty shadows of `places` places each.
    pub fn new(places: usize) -> Self {
        Self {
            // Never more, so that the table is never copied to grow.
            entries: HashMap::with_capacity_and_hasher((places + 1) * SHADOWS, KeyHash::default()),
            held: std::array::from_fn(|_| Vec::new()),
            places: places.max(1),
            now: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// A block is asked for; `count` tells how often a block was. Returns which shadows hold it.
    pub fn ask(&mut self, key: u64, count: impl Fn(u64) -> u8) -> [bool; SHADOWS] {
        self.now = self.now.wrapping_add(1);
        let now = self.now;
        let entry = self.entries.entry(key).or_insert(Entry { stamp: now, at: [ABSENT; SHADOWS] });
        entry.stamp = now;
        let held = entry.at.map(|at| at != ABSENT);
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
            entry.at[shadow] = at;
        }
    }

    /// Removes one block of a shadow; `newest` may be the one.
    fn evict(&mut self, shadow: usize, newest: u64, count: impl Fn(u64) -> u8) {
        let mut keys = [newest; SAMPLE + 1];
        for key in &mut keys[1..] {
            let held = self.held[shadow].len() as u64;
            let at = (u128::from(next_random(&mut self.random)) * u128::from(held)) >> 64;
            *key = self.held[shadow][at as usize];
        }
        let sample = keys.map(|key| {
            let stamp = self.entries.get(&key).map_or(self.now, |entry| entry.stamp);
            Traits { age: self.now.wrapping_sub(stamp), count: count(key) }
        });
        self.remove(shadow, keys[Rule::ALL[shadow].victim(&sample)]);
    }

    fn remove(&mut self, shadow: usize, key: u64) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let at = std::mem::replace(&mut entry.at[shadow], ABSENT);
        if entry.at == [ABSENT; SHADOWS] {
            self.entries.remove(&key);
        }
        let held = &mut self.held[shadow];
        held.swap_remove(at as usize);
        if let Some(moved) = held.get(at as usize).and_then(|moved| self.entries.get_mut(moved)) {
            moved.at[shadow] = at;
        }
    }
}

/// The next number of a fixed sequence (xorshift*, Vigna, ACM TOMS 2016).
fn next_random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hits of each shadow.
    fn hits(places: usize, keys: impl IntoIterator<Item = u64>) -> [u32; SHADOWS] {
        let (mut shadows, mut hits) = (Shadows::new(places), [0; SHADOWS]);
        let mut counts = std::collections::BTreeMap::new();
        for key in keys {
            *counts.entry(key).or_insert(0u8) += 1;
            let held = shadows.ask(key, |key| counts.get(&key).copied().unwrap_or(0));
            hits.iter_mut().zip(held).for_each(|(hits, held)| *hits += u32::from(held));
            for (shadow, held) in shadows.held.iter().enumerate() {
                assert!(held.len() <= places);
                let known = |(at, key): (usize, &u64)| shadows.entries[key].at[shadow] == at as u32;
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
