//! Dense forms: what reclaim copies forward has lived long, and is written as zstd from then on,
//! which holds more of most content than LZ4. No client waits for it, and it is done within a
//! budget.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, Instant};
use forebay_codec::{DenseCompressor, dense_max};
use forebay_format::EntryKind;

use crate::Engine;
use crate::index::Place;
use crate::pace::Pace;
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
    pace: Pace,
    tries: Tries,
}

impl Dense {
    /// Nothing has been made.
    pub fn new() -> Self {
        let (pace, tries) = (Pace::new(PACE, AHEAD, TURN_MAX), Tries::default());
        Self { compressor: DenseCompressor::new(), pace, tries }
    }

    /// A turn of the event loop begins.
    pub fn begin_turn(&mut self) {
        self.pace.begin_turn();
    }

    /// Whether copying goes on in the next turn.
    pub fn turn_is_over(&self) -> bool {
        self.pace.turn_is_over()
    }

    /// Whether another block may be tried now.
    fn is_due(&mut self, now: Instant) -> bool {
        self.pace.is_due(now) && self.tries.is_due()
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
        self.dense.pace.pay(self.now);
        let most = dense_max(payload.len());
        let len = self.dense.compressor.compress(block, most, &mut self.codec_buf[..]);
        self.dense.tries.note(len.is_some());
        self.stats.dense_tries += 1;
        self.stats.dense_blocks += u64::from(len.is_some());
        len
    }
}
