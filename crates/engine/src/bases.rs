//! Bases: of a block that is stored as a delta, the older version that the delta is against; and of
//! one stored against a similar block ([`crate::similar`]), that one's payload.
//!
//! A delta's base is the newest version of it in the log that is stored whole, so recovery finds it
//! again by reading the log in order, and it lies in a segment at most as new as the delta's. It
//! counts as living in its segment. When that is reclaimed, the block is written whole again or
//! leaves the cache, so a delta never outlives its base.
//!
//! A write becomes a delta if its base is in RAM: as the block's newest version, or kept there for
//! this purpose under a key of its own. While a base waits in the builder nothing changes it: the
//! write holds the block's lock, blocks of the segment being reclaimed are no bases, and
//! [`Engine::start_reclaim`] closes the record first if it has deltas against the segment.

use forebay_codec::is_zero;
use forebay_format::{EntryKind, SegmentSeq};

use crate::Engine;
use crate::api::{ContentLocality, Effects};
use crate::builder::Expect;
use crate::duplicates::fingerprint;
use crate::index::{Key, Place};
use crate::limits::BASES_SHARE;
use crate::stats::DELTA_SIZES;

/// What a block is stored against.
#[derive(Clone, Copy, Debug)]
pub struct Base {
    /// Where that lies; dirty as the block is.
    pub place: Place,
    /// It was written as another block's content, which counts it.
    pub of_another: bool,
}

/// Where the RAM tier keeps a block's base. Keys of blocks have 48 bits.
fn base_key(key: Key) -> Key {
    Key(key.0 | BASE)
}

/// The block whose base, or whose own bytes, the RAM tier keeps under a key.
pub fn block_of(key: Key) -> Key {
    Key(key.0 & !BASE)
}

const BASE: u64 = 1 << 63;

impl Engine {
    /// Changes how blocks that are like others are stored from now on.
    pub(crate) fn set_content(&mut self, content: ContentLocality) {
        self.config.content = content;
        self.similar.set_wanted(content == ContentLocality::Similar, self.index.capacity());
    }

    /// What a delta of the block is against, or would be.
    pub(crate) fn base_of(&self, key: Key) -> Option<Place> {
        let now = self.index.get(key)?;
        match now.kind {
            EntryKind::Delta => self.bases.get(&key).map(|base| base.place),
            kind => kind.is_whole().then_some(now),
        }
    }

    /// Encodes a block that a client wrote, as the duplicate of another or as a delta if that can
    /// be; false when there is no room now.
    pub(crate) fn push_written(&mut self, fx: &mut Effects, key: Key, block: &[u8]) -> bool {
        if self.config.content == ContentLocality::Independent || is_zero(block) {
            return self.push_block(fx, key, block, true, Expect::Always);
        }
        if !self.builder.fits_block() && !self.close_record(fx) {
            return false;
        }
        let print = fingerprint(block);
        if let Some(place) = self.duplicate_of(key, block, print) {
            self.push_duplicate(key, &place, true, Expect::Always);
            return true;
        }
        if let Some(base) = self.usable_base(key)
            && self.delta_tries.is_due()
        {
            self.stats.delta_tries += 1;
            let pushed = self.push_delta(key, block, base);
            self.delta_tries.note(pushed);
            if pushed {
                return true;
            }
        }
        let done = self.push_filled(fx, key, block, true, Expect::Always);
        if done {
            self.duplicates.note(print, key);
        }
        done
    }

    /// The block's base, if a delta against it is worth making: what has lived long is about to be
    /// reclaimed, and the block would have to be written whole soon.
    fn usable_base(&self, key: Key) -> Option<Place> {
        let base = self.base_of(key)?;
        let young = self.is_young(self.log.segments[base.segment as usize].seq);
        let own = (self.bases.len() as u64).saturating_sub(self.similar_blocks());
        let room = self.bases.contains_key(&key) || own < self.index.capacity() / BASES_SHARE;
        // What is to happen to the block when the record is closed may take its base away.
        let usable = young
            && room
            && self.ram.contains(self.base_in_ram(key))
            && !self.builder.may_change(key);
        usable.then_some(base)
    }

    /// Whether a segment is far enough from being reclaimed for other blocks to rest on it.
    pub(crate) fn is_young(&self, seq: SegmentSeq) -> bool {
        let (all, age) = (self.log.segments.len() as u64, self.log.head.0 - seq.0);
        !self.is_reclaiming(seq) && age < all - all / BASES_SHARE
    }

    /// Where the RAM tier has a block's base, if it has it.
    fn base_in_ram(&self, key: Key) -> Key {
        if self.bases.contains_key(&key) { base_key(key) } else { key }
    }

    /// Encodes a block against its base, which is in RAM; false if the delta is too long.
    fn push_delta(&mut self, key: Key, block: &[u8], base: Place) -> bool {
        let kept_at = self.base_in_ram(key);
        let old = self.ram.get(kept_at).expect("a usable base is in RAM");
        let Some(len) = self.codec.compress_delta(old, block, &mut self.codec_buf[..]) else {
            return false;
        };
        let form = self.builder.pack(EntryKind::Delta, &self.codec_buf[..len]);
        self.builder.push_form(key, form, true, Expect::Over(base));
        if kept_at == key {
            self.ram.rename(key, base_key(key));
        }
        let size = DELTA_SIZES.iter().position(|&most| len <= most);
        self.stats.deltas_by_size[size.expect("a delta is no longer than the longest")] += 1;
        self.stats.delta_blocks += 1;
        self.stats.delta_bytes += len as u64;
        true
    }

    /// Makes `place` the newest version of a block: a client's, or a copy; `against` is what a
    /// similar block is stored against.
    pub(crate) fn place_block(
        &mut self,
        key: Key,
        place: Place,
        against: Option<Place>,
        by_client: bool,
    ) {
        let was = self.index.insert(key, place);
        self.count_in(key, &place);
        match was {
            Some(was) if place.kind == EntryKind::Delta && was.kind.is_whole() => {
                self.bases.insert(key, Base { place: was, of_another: false });
            }
            Some(was) => self.count_out(key, &was),
            None => {}
        }
        if place.kind != EntryKind::Delta {
            self.release_base(key);
        }
        if let Some(base) = against {
            self.log.segments[base.segment as usize].live += 1;
            let place = Place { dirty: false, ..base };
            self.bases.insert(key, Base { place, of_another: true });
        }
        self.set_base_dirty(key, place.dirty);
        if place.dirty {
            // A copy forward keeps its age; a rewrite is as old as its stripe says.
            self.dirty.insert(self.now, key, by_client);
        } else {
            self.dirty.remove(key);
        }
        if place.kind == EntryKind::Lost && place.dirty {
            self.fenced.insert(key);
        } else if !self.fenced.is_empty() {
            self.fenced.remove(&key);
        }
    }

    /// Takes a block out of the cache.
    pub(crate) fn forget_block(&mut self, key: Key) {
        if let Some(was) = self.index.remove(key) {
            self.count_out(key, &was);
            if was.dirty {
                self.dirty.remove(key);
            }
            self.release_base(key);
        }
        self.fenced.remove(&key);
        self.forget_unreadable(key);
    }

    /// Notes that the primary has a block's newest version.
    pub(crate) fn mark_clean(&mut self, key: Key, place: &Place) {
        self.log.change_dirty(place.segment, key.volume(), true, false);
        self.index.update(key, |place| place.dirty = false);
        self.set_base_dirty(key, false);
        self.dirty.remove(key);
        // A reader may have found its copy here bad meanwhile: the primary has it now.
        self.fenced.remove(&key);
        self.forget_unreadable(key);
    }

    /// A base counts as dirty while its delta is: so its segment is not held to be dispensable.
    fn set_base_dirty(&mut self, key: Key, dirty: bool) {
        let Some(Base { place: base, .. }) = self.bases.get_mut(&key) else { return };
        self.log.change_dirty(base.segment, key.volume(), base.dirty, dirty);
        base.dirty = dirty;
    }

    fn release_base(&mut self, key: Key) {
        let Some(Base { place, of_another }) = self.bases.remove(&key) else { return };
        if of_another {
            self.log.segments[place.segment as usize].live -= 1;
            self.log.change_dirty(place.segment, key.volume(), place.dirty, false);
        } else {
            self.count_out(key, &place);
            self.ram.remove(base_key(key));
        }
    }

    fn count_in(&mut self, key: Key, place: &Place) {
        self.log.segments[place.segment as usize].live += 1;
        self.log.change_dirty(place.segment, key.volume(), false, place.dirty);
        self.log.stored[place.kind as usize] += 1;
        self.log.payload_bytes += u64::from(place.len);
    }

    fn count_out(&mut self, key: Key, place: &Place) {
        self.log.segments[place.segment as usize].live -= 1;
        self.log.change_dirty(place.segment, key.volume(), place.dirty, false);
        self.log.stored[place.kind as usize] -= 1;
        self.log.payload_bytes -= u64::from(place.len);
    }
}
