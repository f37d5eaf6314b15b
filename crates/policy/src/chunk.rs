//! How much is read around a miss: a length that is tried out.
//!
//! A request of 256 KiB costs a volume that limits requests as much as one of 64 KiB, and a single
//! disk little more; on an array it moves several disks instead of one. So lengths take turns, each
//! for some reads, and the cost of a read tells which one pays: the time that the primary is busy
//! for each read that ends. Reads in flight when the length changes count for neither.

use std::time::Duration;

/// The lengths, in blocks, and which comes first: the unit that arrays usually put on one disk. The
/// last is the longest request that cloud volumes count as one.
const LENGTHS: [u64; 4] = [8, 16, 32, 64];
const FIRST: usize = 1;
/// Reads of a turn.
const TURN: u32 = 64;
/// How much more a read of the next length may cost, in percent. It brings twice as much, but other
/// reads wait for it.
const WORTH: u32 = 130;
/// Turns before the first trial, and most turns between two trials that changed nothing.
const REST_MIN: u32 = 2;
const REST_MAX: u32 = 32;

/// The length of an aligned chunk.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The length that pays, and the one in use: another one while that is on trial.
    settled: usize,
    used: usize,
    /// Cost of a read in the last turn of the settled length.
    cost: Duration,
    /// Turns before the next trial, and before the one after it if that changes nothing.
    rest: u32,
    patience: u32,
    /// Whether the next trial is of a longer one, if there are both.
    longer: bool,
    /// Reads of before the turn that have not ended.
    older: u32,
    /// Reads that ended in this turn, reads sent in it that were extended, and busy time.
    ended: u32,
    extended: u32,
    busy: Duration,
}

impl Default for Chunk {
    fn default() -> Self {
        Self {
            settled: FIRST,
            used: FIRST,
            cost: Duration::ZERO,
            rest: REST_MIN,
            patience: REST_MIN * 2,
            longer: true,
            older: 0,
            ended: 0,
            extended: 0,
            busy: Duration::ZERO,
        }
    }
}

impl Chunk {
    /// Length in blocks.
    pub fn blocks(&self) -> u64 {
        LENGTHS[self.used]
    }

    /// Records that a read is sent with neighbors of what was missed.
    pub fn extend(&mut self) {
        self.extended += 1;
    }

    /// Records that a read ended, for which the primary was busy for `took`; `in_flight` others
    /// have not ended.
    pub fn end(&mut self, took: Duration, in_flight: u32) {
        if self.older > 0 {
            self.older -= 1;
            return;
        }
        self.ended += 1;
        self.busy += took;
        // A longer one that costs too much even if the rest cost nothing is not tried any longer.
        let is_dear = self.used > self.settled && self.busy * 100 > self.cost * TURN * WORTH;
        if self.ended == TURN || is_dear {
            self.end_turn(in_flight);
            (self.ended, self.extended, self.busy) = (0, 0, Duration::ZERO);
        }
    }

    fn end_turn(&mut self, in_flight: u32) {
        let cost = self.busy / TURN;
        // Of reads that were not extended no length can be judged.
        let counts = self.extended * 2 >= self.ended;
        if self.used == self.settled {
            if !counts {
                return;
            }
            self.cost = cost;
            match self.rest.checked_sub(1) {
                Some(rest) => return self.rest = rest,
                None => self.used = self.next_trial(),
            }
        } else {
            let is_longer = self.used > self.settled;
            let (short, long) = if is_longer { (self.cost, cost) } else { (cost, self.cost) };
            if counts && (long * 100 <= short * WORTH) == is_longer {
                (self.settled, self.rest, self.patience) = (self.used, 0, REST_MIN);
                self.longer = is_longer;
            } else {
                (self.used, self.rest) = (self.settled, self.patience);
                self.patience = (self.patience * 2).min(REST_MAX);
                self.longer = !is_longer;
            }
        }
        self.older = in_flight;
    }

    fn next_trial(&self) -> usize {
        match self.settled {
            0 => 1,
            last if last + 1 == LENGTHS.len() => last - 1,
            one if self.longer => one + 1,
            one => one - 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::random_below;

    /// The share of reads of each length, of `reads` with these costs in microseconds, each with
    /// noise: 50 to 150 %. Half of them are extended, or none.
    fn shares(chunk: &mut Chunk, reads: u32, costs: [u64; 4], extends: bool) -> [f64; 4] {
        let (mut counts, mut random) = ([0; 4], 1);
        for read in 0..reads {
            let used = chunk.used;
            counts[used] += 1;
            if extends && read % 2 == 0 {
                chunk.extend();
            }
            let percent = 50 + random_below(&mut random, 101) as u64;
            chunk.end(Duration::from_micros(costs[used] * percent / 100), 20);
        }
        counts.map(|count| f64::from(count) / f64::from(reads))
    }

    #[test]
    fn a_volume_that_limits_requests_is_read_in_long_ones() {
        let mut chunk = Chunk::default();
        assert!(shares(&mut chunk, 4000, [2000; 4], true)[3] > 0.7);
        assert!(
            shares(&mut chunk, 2000, [11_800, 12_000, 12_400, 13_200], true)[3] > 0.7,
            "a disk"
        );
        assert_eq!(chunk.settled, 3);
    }

    #[test]
    fn an_array_is_read_from_one_disk_at_a_time() {
        let mut chunk = Chunk::default();
        assert!(shares(&mut chunk, 4000, [2000, 2200, 4000, 8000], true)[1] > 0.7);
        assert_eq!(chunk.settled, 1);
        let mut pairs = Chunk::default();
        assert!(
            shares(&mut pairs, 4000, [2100, 2200, 2300, 4500], true)[2] > 0.7,
            "chunks of 128 KiB"
        );
    }

    #[test]
    fn where_bytes_are_the_cost_short_ones_do() {
        let mut chunk = Chunk::default();
        assert!(shares(&mut chunk, 4000, [1000, 2000, 4000, 8000], true)[0] > 0.7);
    }

    #[test]
    fn what_pays_no_more_is_given_up() {
        let mut chunk = Chunk::default();
        shares(&mut chunk, 3000, [2000; 4], true);
        assert!(shares(&mut chunk, 6000, [2000, 2200, 4000, 8000], true)[1] > 0.5);
        assert_eq!(chunk.settled, 1);
        shares(&mut chunk, 9000, [2000; 4], true);
        assert_eq!(chunk.settled, 3);
    }

    #[test]
    fn reads_that_were_not_extended_prove_nothing() {
        let mut chunk = Chunk::default();
        let costs = [4000, 2000, 2000, 2000];
        assert!(shares(&mut chunk, 4000, costs, false)[1] == 1.0);
    }

    #[test]
    fn reads_of_before_count_for_no_turn() {
        let mut chunk = Chunk { rest: 0, ..Chunk::default() };
        let mut end = |took, extends| {
            if extends {
                chunk.extend();
            }
            chunk.end(Duration::from_millis(took), 3);
            chunk.used
        };
        assert_eq!((0..TURN).map(|_| end(1, true)).last(), Some(2), "on trial");
        // Three long ones of before, then those of the trial.
        assert_eq!((0..3).map(|_| end(900, false)).last(), Some(2));
        assert_eq!((0..TURN).map(|_| end(1, true)).last(), Some(2));
        assert_eq!(chunk.settled, 2);
    }
}
