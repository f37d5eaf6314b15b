//! Dense forms: blocks are stored as zstd, which takes less room than LZ4 for most content, as far
//! as a CPU budget allows. This applies to blocks that clients write, blocks that a miss brings in,
//! and blocks that reclaim copies forward in a less dense form.

use std::time::Duration;

use forebay_block::BLOCK_SIZE;
use forebay_codec::{DenseCompressor, dense_max};
use forebay_format::EntryKind;

use crate::contents::Place;
use crate::form::payload::decode;
use crate::form::{Context, Forms};
use crate::pace::Pace;
use crate::tries::Tries;

/// CPU time for decoding a block and encoding it as zstd.
const COST: Duration = Duration::from_micros(15);

/// One part in this many of the time in which the thread rests is added to the budget: so a thread
/// that waits for disks makes dense what it can, and one that is busy leaves its time to clients.
pub const REST_SHARE: u32 = 3;

/// The CPU budget for dense forms and for searching similar blocks: a twelfth of the time, and a
/// part of the rest. Its burst allowance is large because reclaim copies a segment at a time. The
/// cap per turn applies to work that no client waits for.
pub fn background() -> Pace {
    Pace::new(12, Duration::from_secs(1), Duration::from_micros(50))
}

/// State for making dense forms.
pub struct Dense {
    compressor: DenseCompressor,
    tries: Tries,
}

impl Dense {
    /// Starts with no history of tries.
    pub fn new() -> Self {
        Self { compressor: DenseCompressor::new(), tries: Tries::default() }
    }
}

impl Forms {
    /// Encodes a payload being copied into `encoded` in a shorter form; returns the length if there
    /// is one.
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

    /// Does the same for a block that a client wrote (`dirty`) or that a miss brought in.
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
