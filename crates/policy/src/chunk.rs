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
/// A turn takes this many reads, and this much busy time: several times the time between bursts.
const TURN: u32 = 64;
const TURN_TIME: Duration = Duration::from_millis(400);
/// Volumes that limit requests often let them pass in bursts, with this much time in between.
const BURST: Duration = Duration::from_millis(100);
/// How much more a read of the next length may cost, in percent. It brings twice as much, but other
/// reads wait for it.
const WORTH: u32 = 130;
/// Turns of rest for a length: after a longer or shorter one has replaced it, after its first trial
/// that failed, and after each later one.
const REPLACED: u32 = 4;
const FAILED: u32 = 8;
const FAILED_AGAIN: u32 = 32;

/// The length of an aligned chunk.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The length that pays, and the one in use: another one while that is on trial.
    settled: usize,
    used: usize,
    /// Cost of a read in the last turn of the settled length.
    cost: Duration,
    /// Turns of settled lengths so far after which no length was tried.
    turns: u32,
    /// For each length, the turn from which on it may be tried, and how long it rests if it fails.
    due: [u32; LENGTHS.len()],
    patience: [u32; LENGTHS.len()],
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
            turns: 0,
            due: [0; LENGTHS.len()],
            patience: [FAILED; LENGTHS.len()],
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
        let has_time = self.ended >= TURN && self.busy >= TURN_TIME;
        if has_time || self.is_dear() {
            self.end_turn(in_flight);
            (self.ended, self.extended, self.busy) = (0, 0, Duration::ZERO);
        }
    }

    /// Whether a longer one on trial has cost so much that the rest of its turn cannot matter.
    fn is_dear(&self) -> bool {
        let most = self.cost * TURN * WORTH / 100 + BURST;
        self.used > self.settled && self.ended < TURN && self.busy > most
    }

    fn end_turn(&mut self, in_flight: u32) {
        let cost = self.busy / self.ended;
        // Of reads that were not extended no length can be judged.
        let counts = self.extended * 2 >= self.ended;
        if self.used == self.settled {
            if !counts {
                return;
            }
            self.cost = cost;
            let Some(next) = self.next_trial() else {
                self.turns += 1;
                return;
            };
            self.used = next;
        } else {
            let is_longer = self.used > self.settled;
            let (short, long) = if is_longer { (self.cost, cost) } else { (cost, self.cost) };
            if counts && (long * 100 <= short * WORTH) == is_longer {
                self.due[self.settled] = self.turns + REPLACED;
                self.settled = self.used;
            } else {
                self.due[self.used] = self.turns + self.patience[self.used];
                self.patience[self.used] = FAILED_AGAIN;
                self.used = self.settled;
            }
        }
        self.older = in_flight;
    }

    /// The next length to try, if one is due. The longer one comes first: where it pays, it halves
    /// the time to warm up.
    fn next_trial(&self) -> Option<usize> {
        let shorter = self.settled.checked_sub(1);
        let longer = Some(self.settled + 1).filter(|&next| next < LENGTHS.len());
        longer.into_iter().chain(shorter).find(|&next| self.due[next] <= self.turns)
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

    /// The share of reads of each length on a volume that lets as many requests pass in each tenth
    /// of a second as `tokens` pay for.
    fn shares_in_bursts(tokens: u32, in_flight: u32, prices: [u32; 4]) -> [f64; 4] {
        let (mut chunk, mut counts, mut left) = (Chunk::default(), [0; 4], tokens);
        let reads = 4000.max(tokens * 100);
        for _ in 0..reads {
            counts[chunk.used] += 1;
            chunk.extend();
            let mut took = Duration::from_micros(20);
            while left < prices[chunk.used] {
                (took, left) = (took + Duration::from_millis(98), left + tokens);
            }
            left -= prices[chunk.used];
            chunk.end(took, in_flight);
        }
        counts.map(|count| f64::from(count) / f64::from(reads))
    }

    #[test]
    fn bursts_make_no_length_look_dear_or_cheap() {
        for (tokens, in_flight) in (20..80).flat_map(|n| (0..64).map(move |m| (n, m))) {
            let requests = shares_in_bursts(tokens, in_flight, [1; 4])[3];
            assert!(requests > 0.7, "{tokens}, {in_flight}: requests count, {requests}");
            let pieces = shares_in_bursts(tokens, in_flight, [1, 1, 2, 4])[1];
            assert!(pieces > 0.75, "{tokens}, {in_flight}: 64 KiB is one, {pieces}");
        }
    }

    #[test]
    fn reads_that_were_not_extended_prove_nothing() {
        let mut chunk = Chunk::default();
        let costs = [4000, 2000, 2000, 2000];
        assert!(shares(&mut chunk, 4000, costs, false)[1] == 1.0);
    }

    #[test]
    fn reads_of_before_count_for_no_turn() {
        let mut chunk = Chunk::default();
        let mut end = |took, extends| {
            if extends {
                chunk.extend();
            }
            chunk.end(Duration::from_millis(took), 3);
            chunk.used
        };
        assert_eq!((0..TURN).map(|_| end(7, true)).last(), Some(2), "on trial");
        // Three long ones of before, then those of the trial.
        assert_eq!((0..3).map(|_| end(900, false)).last(), Some(2));
        assert_eq!((0..TURN).map(|_| end(7, true)).last(), Some(2));
        assert_eq!(chunk.settled, 2);
    }
}
