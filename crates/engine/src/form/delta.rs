//! Bases: of a block that is stored as a delta, the older version that the delta is against; and of
//! one stored against a similar block ([`crate::form::similar`]), that one's payload.
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
use crate::contents::Place;
use crate::contents::base_key;
use crate::form::duplicates::fingerprint;
use crate::key::Key;
use crate::limits::BASES_SHARE;
use crate::log::builder::Expect;
use crate::stats::DELTA_SIZES;

impl Engine {
    /// Changes how blocks that are like others are stored from now on.
    pub fn set_content(&mut self, content: ContentLocality) {
        self.config.content = content;
        self.form
            .similar
            .set_wanted(content == ContentLocality::Similar, self.contents.index().capacity());
    }

    /// Encodes a block that a client wrote, as the duplicate of another or as a delta if that can
    /// be; false when there is no room now.
    pub(crate) fn push_written(&mut self, fx: &mut Effects, key: Key, block: &[u8]) -> bool {
        if self.config.content == ContentLocality::Independent || is_zero(block) {
            return self.push_block(fx, key, block, true, Expect::Always);
        }
        if !self.log.builder().fits_block() && !self.close_record(fx) {
            return false;
        }
        let print = fingerprint(block);
        if let Some(place) = self.duplicate_of(key, block, print) {
            self.push_duplicate(key, &place, true, Expect::Always);
            return true;
        }
        if let Some(base) = self.usable_base(key)
            && self.form.delta_tries.is_due()
        {
            self.stats.delta_tries += 1;
            let pushed = self.push_delta(key, block, base);
            self.form.delta_tries.note(pushed);
            if pushed {
                return true;
            }
        }
        let done = self.push_filled(fx, key, block, true, Expect::Always);
        if done {
            self.form.duplicates.note(print, key);
        }
        done
    }

    /// The block's base, if a delta against it is worth making: what has lived long is about to be
    /// reclaimed, and the block would have to be written whole soon.
    fn usable_base(&mut self, key: Key) -> Option<Place> {
        let base = self.contents.base_of(key)?;
        let young = self.is_young(self.log.seq_of(&base));
        let own = self.contents.bases().saturating_sub(self.similar_blocks());
        let room =
            self.contents.has_base(key) || own < self.contents.index().capacity() / BASES_SHARE;
        // What is to happen to the block when the record is closed may take its base away.
        let usable = young
            && room
            && self.ram.contains(self.contents.base_in_ram(key))
            && !self.log.builder().may_change(key);
        usable.then_some(base)
    }

    /// Whether a segment is far enough from being reclaimed for other blocks to rest on it.
    pub(crate) fn is_young(&self, seq: SegmentSeq) -> bool {
        let (all, age) = (self.log.len(), self.log.age(seq));
        !self.reclaim.is_of(seq) && age < all - all / BASES_SHARE
    }

    /// Encodes a block against its base, which is in RAM; false if the delta is too long.
    fn push_delta(&mut self, key: Key, block: &[u8], base: Place) -> bool {
        let kept_at = self.contents.base_in_ram(key);
        let old = self.ram.get(kept_at).expect("a usable base is in RAM");
        let Some(len) = self.form.codec.compress_delta(old, block, &mut self.form.encoded[..])
        else {
            return false;
        };
        let form = self.log.builder().pack(EntryKind::Delta, &self.form.encoded[..len]);
        self.log.builder().push_form(key, form, true, Expect::Over(base));
        if kept_at == key {
            self.ram.rename(key, base_key(key));
        }
        let size = DELTA_SIZES.iter().position(|&most| len <= most);
        self.stats.deltas_by_size[size.expect("a delta is no longer than the longest")] += 1;
        self.stats.delta_blocks += 1;
        self.stats.delta_bytes += len as u64;
        true
    }
}
