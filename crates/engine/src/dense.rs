//! Dense forms: what reclaim copies forward has lived long, and is written as zstd from then on,
//! which holds more of most content than LZ4. No client waits for it, and it is done within a
//! budget.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, Instant};
use forebay_codec::{DenseCompressor, dense_max};
use forebay_format::EntryKind;

use crate::Engine;
use crate::index::Place;
use crate::read::decode;
use crate::tries::Tries;

/// Time between two blocks, on average: with 13 to 20 microseconds for each, some 6 % of a
/// processor. Beyond that blocks are copied as they are.
const PACE: Duration = Duration::from_micros(250);
/// How far ahead of that it may be: reclaim copies in bursts.
const AHEAD: Duration = Duration::from_millis(100);
/// Blocks in a turn of the event loop: a tenth of a millisecond, for which clients wait.
const TURN_MAX: u32 = 8;

/// What the engine needs for making dense forms.
pub struct Dense {
    compressor: DenseCompressor,
    /// When the blocks made so far are paid for.
    paid_at: Instant,
    tries: Tries,
    /// Blocks tried in this turn.
    in_turn: u32,
}

impl Dense {
    /// Nothing has been made.
    pub fn new() -> Self {
        let (paid_at, tries) = (Instant(0), Tries::default());
        Self { compressor: DenseCompressor::new(), paid_at, tries, in_turn: 0 }
    }

    /// A turn of the event loop begins.
    pub fn begin_turn(&mut self) {
        self.in_turn = 0;
    }

    /// Whether copying goes on in the next turn.
    pub fn turn_is_over(&self) -> bool {
        self.in_turn >= TURN_MAX
    }

    /// Whether another block may be tried now.
    fn is_due(&mut self, now: Instant) -> bool {
        let from = self.paid_at.max(now);
        let due = from <= now + AHEAD && self.tries.is_due();
        if due {
            self.paid_at = from + PACE;
            self.in_turn += 1;
        }
        due
    }
}

impl Engine {
    /// Puts a shorter form of a payload that is copied into `codec_buf`; returns its length if
    /// there is one.
    pub(crate) fn make_dense(&mut self, payload: &[u8], place: &Place) -> Option<usize> {
        let packable = matches!(place.kind, EntryKind::Raw | EntryKind::Lz4);
        let wanted = packable && self.config.compress && !self.is_emergency();
        if !wanted || !self.dense.is_due(self.now) {
            return None;
        }
        let mut room = [0; BLOCK_SIZE];
        let block = decode(place, payload, &mut room)?;
        let most = dense_max(payload.len());
        let len = self.dense.compressor.compress(block, most, &mut self.codec_buf[..]);
        self.dense.tries.note(len.is_some());
        self.stats.dense_tries += 1;
        self.stats.dense_blocks += u64::from(len.is_some());
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_spread_over_turns_and_paid_for() {
        let mut dense = Dense::new();
        let start = Instant(1_000_000_000);
        let mut made = 0;
        for _ in 0..1000 {
            dense.begin_turn();
            while !dense.turn_is_over() && dense.is_due(start) {
                made += 1;
            }
            assert!(dense.in_turn <= TURN_MAX);
        }
        let burst = AHEAD.as_nanos() / PACE.as_nanos();
        assert!((burst..burst + 2).contains(&made), "{made} at one time");
        dense.begin_turn();
        assert!(dense.is_due(start + PACE * 2) && !dense.is_due(start));
    }
}
