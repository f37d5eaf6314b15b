//! Similar blocks (`content = similar`): a block that reclaim copies, or a miss brings in, is
//! stored against another block's payload if that is like it, or by that payload alone if it is
//! equal.
//!
//! No client waits for it. The block with which it is compared is found by features
//! ([`crate::form::alike`]); its bytes come from RAM, or for a copy from the cache device. The
//! entry names the payload, not the block that it was written for, which may be written again at
//! any time. One level: only what is stored whole is a base. It counts as living in its segment, as
//! the base of a delta does, and is found again by reclaim and recovery as a shared payload is.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, Completion, VolumeId};
use forebay_codec::{SimilarCompressor, dense_max, is_zero};
use forebay_format::{EntryKind, NamedBase};

use crate::Engine;
use crate::api::{ContentLocality, Effects};
use crate::contents::Place;
use crate::form::alike::{Alike, Gate, Sketch};
use crate::form::payload::decode;
use crate::key::Key;
use crate::limits::SIMILAR_SHARE;
use crate::log::builder::{Against, Expect, Form};
use crate::log::read::{Reader, SegmentRead};
use crate::op::SsdItem;
use crate::reclaim::Copied;
use crate::slab::{Id, Slab};

/// Taking the features of a block, and looking them up.
const SEARCH: Duration = Duration::from_micros(6);
/// Encoding a block against another, and decoding both.
const AGAINST: Duration = Duration::from_micros(30);

/// What is known of blocks like one that is copied.
#[derive(Debug)]
pub enum Like {
    /// It has not been looked.
    Unsought,
    /// It is not worth looking.
    Unknown,
    /// There is none.
    None(Sketch),
    /// There is one, whose bytes are not in RAM.
    OnDevice(Sketch, Against),
    /// There is one, with its bytes.
    Found(Sketch, Against, Vec<u8>),
}

/// A copy for which a similar block's payload is being read.
#[derive(Debug)]
pub struct Seek {
    copy: Copied,
    sketch: Sketch,
    base: Against,
}

/// What the engine needs for finding similar blocks.
pub struct Similar {
    /// Empty while it is not wanted.
    alike: Option<Alike>,
    compressor: SimilarCompressor,
    /// By volume, as far as any was looked at.
    gates: Vec<Gate>,
    seeks: Slab<Seek>,
}

impl Similar {
    /// Nothing is known; room for `blocks` blocks if it is wanted.
    pub fn new(wanted: bool, blocks: u64) -> Self {
        let mut similar = Self {
            alike: None,
            compressor: SimilarCompressor::new(),
            gates: Vec::new(),
            seeks: Slab::default(),
        };
        similar.set_wanted(wanted, blocks);
        similar
    }

    /// Begins to learn, or forgets all.
    pub fn set_wanted(&mut self, wanted: bool, blocks: u64) {
        match (wanted, &self.alike) {
            (true, None) => self.alike = Some(Alike::new(blocks)),
            (false, Some(_)) => self.alike = None,
            _ => {}
        }
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

impl Engine {
    /// Blocks that are stored against similar ones.
    pub(crate) fn similar_blocks(&self) -> u64 {
        self.contents.stored(EntryKind::Similar)
    }

    /// Whether to look now for what is like a block of that volume.
    fn seeks_similar(&mut self, volume: VolumeId) -> bool {
        self.config.content == ContentLocality::Similar
            && !self.log.is_emergency()
            && self.form.similar.gate(volume).is_due()
            && self.form.background.take(self.now, SEARCH)
    }

    /// Looks for a block that is like one with this sketch.
    fn find_similar(&mut self, key: Key, sketch: &Sketch) -> Option<(Key, Against)> {
        self.stats.similar_searches += 1;
        let other = self.form.similar.alike.as_ref()?.find(sketch, key);
        let found = other.and_then(|other| {
            let place = self.contents.get(other)?;
            let seq = self.log.seq_of(&place);
            let base = Against { seq, place };
            (place.kind.is_whole() && self.may_rest_on(&base)).then_some((other, base))
        });
        let blocks = self.contents.index().capacity();
        self.form.similar.gate(key.volume()).note(found.is_some(), blocks);
        found
    }

    /// Whether another block may still be stored against that payload.
    fn may_rest_on(&self, base: &Against) -> bool {
        let most = self.contents.index().capacity() / SIMILAR_SHARE;
        self.log.seq_of(&base.place) == base.seq
            && self.log.is_after_oldest(base.seq)
            && self.is_young(base.seq)
            && self.is_near(base.seq)
            && self.similar_blocks().max(self.contents.sharers()) < most
    }

    /// Looks for a block that is like one to be copied.
    pub(crate) fn seek_like(&mut self, copy: &Copied) -> Like {
        let Copied { key, place, bytes, .. } = copy;
        if !place.kind.is_whole() || !self.seeks_similar(key.volume()) {
            return Like::Unknown;
        }
        let mut room = [0; BLOCK_SIZE];
        let Some(block) = decode(place, bytes, &mut room) else { return Like::Unknown };
        let sketch = Sketch::of(block);
        let Some((other, base)) = self.find_similar(*key, &sketch) else {
            return Like::None(sketch);
        };
        match self.peek_applied(other, <[u8]>::to_vec) {
            Some(bytes) => Like::Found(sketch, base, bytes),
            None if self.log.is_written(base.place.segment, base.place.offset) => {
                Like::OnDevice(sketch, base)
            }
            None => Like::None(sketch),
        }
    }

    /// Reads the payload of a block that is like one to be copied.
    pub(crate) fn read_similar(
        &mut self,
        copy: Copied,
        sketch: Sketch,
        base: Against,
        fx: &mut Effects,
    ) {
        let item = SsdItem { key: copy.key, place: base.place };
        let seek = self.form.similar.seeks.insert(Seek { copy, sketch, base });
        self.read_payloads(SegmentRead::one(Reader::Similar(seek), item), fx);
    }

    /// That payload has been read, or could not be.
    pub(crate) fn similar_read(
        &mut self,
        seek: Id,
        read: &SegmentRead,
        done: &Completion,
        fx: &mut Effects,
    ) {
        let Seek { mut copy, sketch, base } = self.form.similar.seeks.remove(seek);
        let mut room = [0; BLOCK_SIZE];
        let payload = read.payload(done, &read.items[0]);
        // Bad bytes are for those to find who need the block.
        let block = payload.and_then(|payload| decode(&base.place, payload, &mut room));
        copy.like = match block {
            Some(block) => Like::Found(sketch, base, block.to_vec()),
            None => Like::None(sketch),
        };
        self.similar_sought(copy, fx);
    }

    /// Adds a copy by what is like it, if that is shorter; false if it is not. There is room.
    pub(crate) fn push_copy_as_similar(&mut self, copy: &Copied, now: Place) -> bool {
        let Copied { key, place, bytes, like } = copy;
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
                if self.push_similar(*key, block, base, base_bytes, most, now.dirty, expect) {
                    return true;
                }
                sketch
            }
            _ => return false,
        };
        self.form.similar.note(sketch, *key);
        false
    }

    /// Adds what a miss brought in; false when there is no room now.
    pub(crate) fn push_admitted(&mut self, fx: &mut Effects, key: Key, block: &[u8]) -> bool {
        let (dirty, expect) = (false, Expect::Absent);
        if is_zero(block) {
            return self.push_block(fx, key, block, dirty, expect);
        }
        if !self.log.builder().fits_block() && !self.close_record(fx) {
            return false;
        }
        let in_time = !self.form.background.turn_is_over();
        if in_time && self.seeks_similar(key.volume()) {
            let sketch = Sketch::of(block);
            if let Some((other, base)) = self.find_similar(key, &sketch)
                && let Some(bytes) = self.peek_applied(other, <[u8]>::to_vec)
                && self.push_similar(key, block, &base, &bytes, ADMITTED_MAX, dirty, expect)
            {
                return true;
            }
            self.form.similar.note(&sketch, key);
        }
        self.push_filled(fx, key, block, dirty, expect)
    }

    /// Adds a block against another one, or by its payload if it is equal, if that takes at most
    /// `most` bytes. There is room.
    #[expect(clippy::too_many_arguments, reason = "a block, its base, and how it is entered")]
    fn push_similar(
        &mut self,
        key: Key,
        block: &[u8],
        base: &Against,
        base_bytes: &[u8],
        most: usize,
        dirty: bool,
        expect: Expect,
    ) -> bool {
        if !self.may_rest_on(base) {
            return false;
        }
        self.stats.similar_tries += 1;
        self.form.background.charge(self.now, AGAINST);
        if block == base_bytes {
            self.form.similar.gate(key.volume()).note_worth();
            self.push_duplicate(key, &base.place, dirty, expect);
            return true;
        }
        let out = &mut self.form.encoded[..];
        let Some(len) = self.form.similar.compressor.compress(base_bytes, block, most, out) else {
            return false;
        };
        let form = self.log.builder().pack(EntryKind::Similar, &self.form.encoded[..len]);
        self.log.builder().push_form(key, Form { against: Some(*base), ..form }, dirty, expect);
        self.form.similar.gate(key.volume()).note_worth();
        self.stats.similar_written += 1;
        self.stats.similar_bytes += len as u64;
        true
    }

    /// A block is stored against a payload from the record on that is being placed in the segment
    /// at position `index`.
    pub(crate) fn name_base(&mut self, key: Key, base: &Against, index: usize) -> NamedBase {
        let Place { segment, offset, len, kind, .. } = base.place;
        let back = self.name_payload(key, segment, base.seq, index);
        NamedBase { back, offset, len, kind }
    }
}

/// Bytes that a block may take against a similar one, of which LZ4 made `len`: five parts of eight,
/// since zstd alone would make some seven tenths of them.
#[must_use]
pub fn similar_max(len: usize) -> usize {
    len * 5 / 8
}

/// The same for a block whose base goes: what it would take alone is not known.
const REBASED_MAX: usize = BLOCK_SIZE / 4;
/// And for one that a miss brought in.
const ADMITTED_MAX: usize = BLOCK_SIZE / 4;
