//! Similar blocks (`content = similar`): a block that reclaim copies, or a miss brings in, is
//! stored against another block's payload if the two are similar, and shares that payload if they
//! are equal.
//!
//! No client waits for this. The other block is found by features ([`crate::form::alike`]); its
//! bytes come from RAM or, for a copy, from the cache device. The entry names the payload, not the
//! block that it was written for, because that block may be rewritten at any time. There is one
//! level only: a base is always stored whole. It counts as live in its segment, as the base of a
//! delta does. Reclaim and recovery find it like a shared payload.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, Completion, VolumeId};
use forebay_codec::{SimilarCompressor, dense_max, is_zero};
use forebay_format::EntryKind;

use crate::api::ContentLocality;
use crate::contents::{Place, Stored};
use crate::form::alike::{Alike, Gate, Piece, Sketch};
use crate::form::payload::decode;
use crate::form::{Context, Copied, Forms, Like};
use crate::key::Key;
use crate::log::builder::{Against, Expect, Form};
use crate::log::read::{Reader, SegmentRead};
use crate::slab::{Id, Slab};

/// CPU time for computing the features of a block and looking them up.
const SEARCH: Duration = Duration::from_micros(6);
/// CPU time for encoding a block against another, and decoding both.
const AGAINST: Duration = Duration::from_micros(30);

/// A copy for which a similar block's payload is being read.
#[derive(Debug)]
pub struct Seek {
    copy: Copied,
    sketch: Sketch,
    base: Against,
}

/// State for finding similar blocks.
pub struct Similar {
    /// `None` while similar blocks are not wanted.
    alike: Option<Alike>,
    /// What is left to be freed of tables that are not wanted any more.
    given_up: Vec<Piece>,
    compressor: SimilarCompressor,
    /// Indexed by volume, up to the highest volume searched so far.
    gates: Vec<Gate>,
    seeks: Slab<Seek>,
}

impl Similar {
    /// Starts with nothing known; has room for `blocks` blocks if wanted.
    pub fn new(wanted: bool, blocks: u64) -> Self {
        let mut similar = Self {
            alike: None,
            given_up: Vec::new(),
            compressor: SimilarCompressor::new(),
            gates: Vec::new(),
            seeks: Slab::default(),
        };
        similar.set_wanted(wanted, blocks);
        similar
    }

    /// Starts to learn, or forgets everything. The memory is freed over several turns, by
    /// [`Similar::drop_piece`].
    pub fn set_wanted(&mut self, wanted: bool, blocks: u64) {
        if !wanted {
            self.given_up.extend(self.alike.take().into_iter().flat_map(Alike::into_pieces));
        } else if self.alike.is_none() {
            self.alike = Some(Alike::new(blocks));
        }
    }

    /// Frees some memory that is not used any more.
    pub fn drop_piece(&mut self) {
        if self.given_up.pop().is_some() && self.given_up.is_empty() {
            self.given_up = Vec::new();
        }
    }

    /// Whether there is more of it.
    pub fn has_given_up(&self) -> bool {
        !self.given_up.is_empty()
    }

    fn gate(&mut self, volume: VolumeId) -> &mut Gate {
        let at = usize::from(volume.0);
        if self.gates.len() <= at {
            self.gates.resize(at + 1, Gate::default());
        }
        &mut self.gates[at]
    }

    fn note(&mut self, sketch: &Sketch, key: Key) {
        if let Some(alike) = &mut self.alike {
            alike.note(sketch, key);
        }
    }
}

impl Forms {
    /// Whether to search now for a block similar to one of this volume.
    fn seeks_similar(&mut self, cx: &Context<'_>, volume: VolumeId) -> bool {
        cx.config.content == ContentLocality::Similar
            && !cx.log.is_emergency()
            && self.similar.gate(volume).is_due()
            && self.background.take(cx.now, SEARCH)
    }

    /// Searches for a block similar to the one with this sketch.
    fn find_similar(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        sketch: &Sketch,
    ) -> Option<(Key, Against)> {
        cx.stats.similar_searches += 1;
        let other = self.similar.alike.as_ref()?.find(sketch, key);
        let found = other.and_then(|other| {
            let place = cx.contents.get(other)?;
            let seq = cx.log.seq_of(&place);
            let base = Against { seq, place };
            (place.kind.is_whole() && cx.may_rest_on(&base)).then_some((other, base))
        });
        let blocks = cx.contents.index().capacity();
        self.similar.gate(key.volume()).note(found.is_some(), blocks);
        found
    }

    /// Searches for a block similar to one being copied.
    pub fn seek_like(&mut self, cx: &mut Context<'_>, copy: &Copied) -> Like {
        let Copied { key, place, bytes, .. } = copy;
        if !place.kind.is_whole() || !self.seeks_similar(cx, key.volume()) {
            return Like::Unknown;
        }
        let mut room = [0; BLOCK_SIZE];
        let Some(block) = decode(place, bytes, &mut room) else { return Like::Unknown };
        let sketch = Sketch::of(block);
        let Some((other, base)) = self.find_similar(cx, *key, &sketch) else {
            return Like::None(sketch);
        };
        match cx.peek(other, <[u8]>::to_vec) {
            Some(bytes) => Like::Found(sketch, base, bytes),
            None if cx.log.is_written(base.place.segment, base.place.offset) => {
                Like::OnDevice(sketch, base)
            }
            None => Like::None(sketch),
        }
    }

    /// Makes a copy wait for the payload of a similar block; returns the read of that payload.
    pub fn begin_seek(&mut self, copy: Copied, sketch: Sketch, base: Against) -> SegmentRead {
        let item = Stored { key: copy.key, place: base.place };
        let seek = self.similar.seeks.insert(Seek { copy, sketch, base });
        SegmentRead::one(Reader::Similar(seek), item)
    }

    /// Takes the payload, or the failure to read it; returns the copy that waited for it.
    pub fn end_seek(&mut self, seek: Id, read: &SegmentRead, done: &Completion) -> Copied {
        let Seek { mut copy, sketch, base } = self.similar.seeks.remove(seek);
        let mut room = [0; BLOCK_SIZE];
        let payload = read.payload(done, &read.items[0]);
        // Corruption is left to readers that need the block.
        let block = payload.and_then(|payload| decode(&base.place, payload, &mut room));
        copy.like = match block {
            Some(block) => Like::Found(sketch, base, block.to_vec()),
            None => Like::None(sketch),
        };
        copy
    }

    /// Adds a copy against the block similar to it, if that makes it shorter; returns whether it
    /// did. The record must have room.
    pub(super) fn store_copy_as_similar(
        &mut self,
        cx: &mut Context<'_>,
        copy: &Copied,
        now: Place,
    ) -> bool {
        let Copied { key, place, bytes, like, .. } = copy;
        let sketch = match like {
            Like::None(sketch) => sketch,
            Like::Found(sketch, base, base_bytes) => {
                let most = match place.kind {
                    EntryKind::Zstd => dense_max(bytes.len()),
                    _ if place.kind != now.kind => REBASED_MAX,
                    _ => similar_max(bytes.len()),
                };
                let mut room = [0; BLOCK_SIZE];
                let block = decode(place, bytes, &mut room).expect("it was decoded before");
                let expect = Expect::At(now);
                if self.store_similar(cx, *key, block, base, base_bytes, most, now.dirty, expect) {
                    return true;
                }
                sketch
            }
            _ => return false,
        };
        self.similar.note(sketch, *key);
        false
    }

    /// Stores a block that a miss brought in.
    pub fn store_admitted(&mut self, cx: &mut Context<'_>, key: Key, block: &[u8]) {
        let (dirty, expect) = (false, Expect::Absent);
        if is_zero(block) {
            return self.store_block(cx, key, block, dirty, expect);
        }
        let in_time = !self.background.turn_is_over();
        if in_time && self.seeks_similar(cx, key.volume()) {
            let sketch = Sketch::of(block);
            if let Some((other, base)) = self.find_similar(cx, key, &sketch)
                && let Some(bytes) = cx.peek(other, <[u8]>::to_vec)
                && self.store_similar(cx, key, block, &base, &bytes, ADMITTED_MAX, dirty, expect)
            {
                return;
            }
            self.similar.note(&sketch, key);
        }
        self.store_filled(cx, key, block, dirty, expect);
    }

    /// Adds a block against another one, or shares the payload if both are equal, if that takes at
    /// most `most` bytes; returns whether it did. The record must have room.
    #[expect(clippy::too_many_arguments, reason = "a block, its base, and how it is entered")]
    fn store_similar(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        block: &[u8],
        base: &Against,
        base_bytes: &[u8],
        most: usize,
        dirty: bool,
        expect: Expect,
    ) -> bool {
        if !cx.may_rest_on(base) {
            return false;
        }
        cx.stats.similar_tries += 1;
        self.background.charge(cx.now, AGAINST);
        if block == base_bytes {
            self.similar.gate(key.volume()).note_worth();
            self.store_duplicate(cx, key, &base.place, dirty, expect);
            return true;
        }
        let out = &mut self.encoded[..];
        let Some(len) = self.similar.compressor.compress(base_bytes, block, most, out) else {
            return false;
        };
        let form = cx.log.builder().pack(EntryKind::Similar, &self.encoded[..len]);
        cx.log.builder().push_form(key, Form { against: Some(*base), ..form }, dirty, expect);
        self.similar.gate(key.volume()).note_worth();
        cx.stats.similar_written += 1;
        cx.stats.similar_bytes += len as u64;
        true
    }
}

/// Limit on the bytes that a block may take against a similar one, if LZ4 alone takes `len`: five
/// eighths, since zstd alone would take about seven tenths.
#[must_use]
pub fn similar_max(len: usize) -> usize {
    len * 5 / 8
}

/// The same limit for a block whose base is being reclaimed: its own compressed size is unknown.
const REBASED_MAX: usize = BLOCK_SIZE / 4;
/// The same limit for a block that a miss brought in.
const ADMITTED_MAX: usize = BLOCK_SIZE / 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_is_not_wanted_is_freed_piece_by_piece() {
        let mut similar = Similar::new(true, 1 << 32);
        let sketches: Vec<Sketch> = (1..4).map(|fill| Sketch::of(&[fill; BLOCK_SIZE])).collect();
        for (i, sketch) in sketches.iter().enumerate() {
            similar.note(sketch, Key(i as u64));
        }
        similar.set_wanted(false, 1 << 32);
        let pieces = similar.given_up.len();
        assert!(pieces > 1, "{pieces}");
        // It is wanted again meanwhile, and knows nothing.
        similar.set_wanted(true, 1 << 32);
        let alike = similar.alike.as_ref().expect("it is wanted");
        assert_eq!(alike.find(&sketches[0], Key(9)), None);
        for left in (0..pieces).rev() {
            similar.drop_piece();
            assert_eq!((similar.given_up.len(), similar.has_given_up()), (left, left > 0));
        }
        similar.drop_piece();
    }
}
