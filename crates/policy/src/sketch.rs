//! Recent request counts of blocks in little memory: a count-min sketch of four-bit counters,
//! halved periodically (Cormode and Muthukrishnan, J. Algorithms 2005; aging as in TinyLFU,
//! Einziger, Friedman and Manes, ACM TOS 2017).
//!
//! The counters of a block lie in one 64-byte line, so a lookup costs one cache miss. A count is
//! never too low, except by halving, and saturates at [`COUNT_MAX`]. There are two for each block:
//! up to fifteen blocks share eight counters within a period, and with four each the lowest is
//! higher.

use forebay_block::prefetch;

/// Value at which a counter saturates.
pub const COUNT_MAX: u8 = 15;
/// Counters per block.
const ROWS: u32 = 2;
/// Words of 64 bits in a line.
const LINE_WORDS: usize = 8;
/// Counters in a line.
const LINE_COUNTERS: u64 = LINE_WORDS as u64 * 16;
/// The lowest three bits of each counter: the bits that remain valid after all are shifted right by
/// one.
const HALVES: u64 = 0x7777_7777_7777_7777;

/// Request counts of one shard's blocks.
///
/// All counts are halved at once, in name: a line is halved when it is next needed, or within the
/// next period by a sweep of a few lines for each request, so that no request waits for all.
#[derive(Clone, Debug)]
pub struct Sketch {
    lines: Box<[[u64; LINE_WORDS]]>,
    /// For each line, the number of the period in which it was halved last.
    periods: Box<[u8]>,
    /// The number of the current period; wraps around.
    period: u8,
    /// Lines swept in this period.
    swept: usize,
    counted: u64,
    /// The number of requests in the period at which the next line is swept.
    sweep_at: u64,
    halve_at: u64,
}

impl Sketch {
    /// A sketch for a cache of `blocks` blocks, with `counters` counters for each. It halves its
    /// counts after every `period` counted requests per block.
    #[must_use]
    pub fn new(blocks: u64, counters: u64, period: u64) -> Self {
        let blocks = blocks.max(LINE_COUNTERS);
        let lines = (blocks * counters).div_ceil(LINE_COUNTERS);
        let lines = usize::try_from(lines).expect("a sketch fits memory");
        Self {
            lines: vec![[0; LINE_WORDS]; lines].into_boxed_slice(),
            periods: vec![0; lines].into_boxed_slice(),
            period: 0,
            swept: 0,
            counted: 0,
            sweep_at: 0,
            halve_at: blocks * period,
        }
    }

    /// Counts one request for the block. Returns true if that halved all counts.
    pub fn count(&mut self, key: u64) -> bool {
        self.add(key);
        self.pass()
    }

    /// Counts one request for the block, without moving on in the period.
    pub fn add(&mut self, key: u64) {
        let (at, spots) = self.spots(key);
        self.settle(at);
        let line = &mut self.lines[at];
        let least = least(line, spots);
        if least < COUNT_MAX {
            for spot in spots {
                let word = &mut line[spot as usize / 16];
                let shift = spot % 16 * 4;
                // Conservative update: only the lowest counters grow.
                if (*word >> shift & 0xf) as u8 == least {
                    *word += 1 << shift;
                }
            }
        }
    }

    /// Moves on by one request in the period. Returns true if that halved all counts.
    pub fn pass(&mut self) -> bool {
        self.counted += 1;
        if self.counted >= self.sweep_at {
            self.sweep();
        }
        let over = self.counted >= self.halve_at;
        if over {
            (self.counted, self.swept, self.sweep_at) = (0, 0, 0);
            self.period = self.period.wrapping_add(1);
        }
        over
    }

    /// Settles the lines that are due by now: all by the end of the period.
    fn sweep(&mut self) {
        let lines = self.lines.len() as u128;
        let due = u128::from(self.counted) * lines;
        while (self.swept as u128 + 1) * u128::from(self.halve_at) <= due {
            self.settle(self.swept);
            self.swept += 1;
        }
        let next = ((self.swept as u128 + 1) * u128::from(self.halve_at)).div_ceil(lines);
        self.sweep_at = u64::try_from(next).unwrap_or(u64::MAX);
    }

    /// Halves a line if the period has changed since it was. A sweep has passed it in each period,
    /// so it is never due twice.
    fn settle(&mut self, line: usize) {
        if self.periods[line] != self.period {
            self.periods[line] = self.period;
            for word in &mut self.lines[line] {
                *word = *word >> 1 & HALVES;
            }
        }
    }

    /// Recent requests for the block, at most [`COUNT_MAX`].
    #[must_use]
    pub fn estimate(&self, key: u64) -> u8 {
        let (line, spots) = self.spots(key);
        least(&self.lines[line], spots) >> u8::from(self.periods[line] != self.period)
    }

    /// Prefetches the block's counters.
    pub fn warm(&self, key: u64) {
        prefetch(&self.lines[self.line(scramble(key))]);
    }

    fn line(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.lines.len() as u128) >> 64) as usize
    }

    /// The block's line, and the positions of its counters in it: one in each half.
    fn spots(&self, key: u64) -> (usize, [u32; ROWS as usize]) {
        let hash = scramble(key);
        let line = self.line(hash);
        let half = LINE_COUNTERS as u32 / ROWS;
        // The upper bits choose the line.
        let spot = |row: u32| row * half + (hash >> (row * 8)) as u32 % half;
        (line, [spot(0), spot(1)])
    }
}

/// The lowest of these counters of a line.
fn least(line: &[u64; LINE_WORDS], spots: [u32; ROWS as usize]) -> u8 {
    let count = |spot: u32| (line[spot as usize / 16] >> (spot % 16 * 4) & 0xf) as u8;
    spots.into_iter().map(count).min().unwrap_or(0)
}

/// Spreads nearby keys (the finalizer of SplitMix64).
fn scramble(key: u64) -> u64 {
    let key = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let key = (key ^ key >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let key = (key ^ key >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    key ^ key >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_right_while_there_is_room_and_stop_at_the_top() {
        let mut sketch = Sketch::new(10_000, 16, 1_000);
        for key in 0..1_000u64 {
            for _ in 0..key % 20 {
                sketch.count(key);
            }
        }
        let wrong = (0..1_000u64)
            .filter(|key| u64::from(sketch.estimate(*key)) != (key % 20).min(15))
            .count();
        assert!(wrong < 5, "{wrong} of 1000");
    }

    #[test]
    fn a_count_is_never_too_low() {
        let mut sketch = Sketch::new(128, 1, 1_000_000);
        for key in 0..5_000u64 {
            for _ in 0..=key % 3 {
                sketch.count(key);
            }
        }
        assert!((0..5_000u64).all(|key| u64::from(sketch.estimate(key)) > key % 3));
    }

    #[test]
    fn halving_comes_when_it_is_due() {
        let mut sketch = Sketch::new(200, 8, 2);
        let halved: Vec<u64> = (1..=800).filter(|_| sketch.count(7)).collect();
        assert_eq!(halved, [400, 800]);
        assert_eq!(sketch.estimate(7), 7);
    }
}
