//! Dense forms: blocks are written as zstd, which holds more of most content than LZ4, as far as a
//! budget of processor time goes: what clients write, what a miss brings in, and what reclaim
//! copies forward if it is not yet.

use std::time::Duration;

use forebay_block::BLOCK_SIZE;
use forebay_codec::{DenseCompressor, dense_max};
use forebay_format::EntryKind;

use crate::contents::Place;
use crate::form::payload::decode;
use crate::form::{Context, Forms};
use crate::pace::Pace;
use crate::tries::Tries;

/// Decoding a block and encoding it by zstd.
const COST: Duration = Duration::from_micros(15);

/// What may be spent on dense forms and on looking for similar blocks: one part in this many of a
/// processor; reclaim copies in bursts of a segment. A turn is for what nobody waits for.
pub fn background() -> Pace {
    Pace::new(12, Duration::from_secs(1), Duration::from_micros(50))
}

/// What the engine needs for making dense forms.
pub struct Dense {
    compressor: DenseCompressor,
    tries: Tries,
}

impl Dense {
    /// Nothing has been made.
    pub fn new() -> Self {
        Self { compressor: DenseCompressor::new(), tries: Tries::default() }
    }
}

impl Forms {
    /// Puts a shorter form of a payload that is copied into `encoded`; returns its length if
    /// there is one.
    pub(super) fn make_dense(
        &mut self,
        cx: &mut Context<'_>,
        payload: &[u8],
        place: &Place,
    ) -> Option<usize> {
        let packable = matches!(place.kind, EntryKind::Raw | EntryKind::Lz4);
        if !packable || !self.may_make_dense(cx) {
            return None;
        }
        let mut room = [0; BLOCK_SIZE];
        let block = decode(place, payload, &mut room)?;
        self.encode_dense(cx, block, dense_max(payload.len()))
    }

    /// The same for a block that a client wrote, or that a miss brought in, which is not dirty.
    pub(super) fn make_block_dense(
        &mut self,
        cx: &mut Context<'_>,
        block: &[u8],
        dirty: bool,
    ) -> Option<usize> {
        let in_time = dirty || !self.background.turn_is_over();
        if !in_time || !self.may_make_dense(cx) {
            return None;
        }
        self.encode_dense(cx, block, dense_max(BLOCK_SIZE))
    }

    fn may_make_dense(&mut self, cx: &Context<'_>) -> bool {
        cx.config.compress
            && !cx.log.is_emergency()
            && self.dense.tries.is_due()
            && self.background.take(cx.now, COST)
    }

    fn encode_dense(&mut self, cx: &mut Context<'_>, block: &[u8], most: usize) -> Option<usize> {
        let len = self.dense.compressor.compress(block, most, &mut self.encoded[..]);
        self.dense.tries.note(len.is_some());
        cx.stats.dense_tries += 1;
        cx.stats.dense_blocks += u64::from(len.is_some());
        len
    }
}
