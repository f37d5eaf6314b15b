//! Dense forms: what reclaim copies forward has lived long, and is written as zstd from then on,
//! which holds more of most content than LZ4. No client waits for it, and it is done within a
//! budget.

use forebay_block::BLOCK_SIZE;
use forebay_codec::{DenseCompressor, dense_max};
use forebay_format::EntryKind;

use crate::Engine;
use crate::index::Place;
use crate::read::decode;
use crate::tries::Tries;

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

impl Engine {
    /// Puts a shorter form of a payload that is copied into `codec_buf`; returns its length if
    /// there is one.
    pub(crate) fn make_dense(&mut self, payload: &[u8], place: &Place) -> Option<usize> {
        let packable = matches!(place.kind, EntryKind::Raw | EntryKind::Lz4);
        let wanted = packable && self.config.compress && !self.is_emergency();
        if !wanted || !self.dense.tries.is_due() || !self.background.take(self.now) {
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
