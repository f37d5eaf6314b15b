//! Dense forms: what reclaim copies forward has lived long, and is written as zstd from then on,
//! which holds more of most content than LZ4. No client waits for it, and it is done within a
//! budget.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, Instant};
use forebay_codec::DenseCompressor;
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
/// A dense form must save at least one part in so many of the payload.
const SAVES: usize = 8;

/// What the engine needs for making dense forms.
pub struct Dense {
    compressor: DenseCompressor,
    /// When the blocks made so far are paid for.
    paid_at: Instant,
    tries: Tries,
}

impl Dense {
    /// Nothing has been made.
    pub fn new() -> Self {
        Self { compressor: DenseCompressor::new(), paid_at: Instant(0), tries: Tries::default() }
    }

    /// Whether another block may be tried now.
    fn is_due(&mut self, now: Instant) -> bool {
        let from = self.paid_at.max(now);
        let due = from <= now + AHEAD && self.tries.is_due();
        if due {
            self.paid_at = from + PACE;
        }
        due
    }
}

impl Engine {
    /// Puts a shorter form of a payload that is copied into `codec_buf`; returns its length if
    /// there is one.
    pub(crate) fn make_dense(&mut self, payload: &[u8], place: &Place) -> Option<usize> {
        let packable = matches!(place.kind, EntryKind::Raw | EntryKind::Lz4);
        if !packable || !self.config.compress || !self.dense.is_due(self.now) {
            return None;
        }
        let mut room = [0; BLOCK_SIZE];
        let block = decode(place, payload, &mut room)?;
        let most = payload.len() - payload.len().div_ceil(SAVES);
        let len = self.dense.compressor.compress(block, most, &mut self.codec_buf[..]);
        self.dense.tries.note(len.is_some());
        self.stats.dense_blocks += u64::from(len.is_some());
        len
    }
}
