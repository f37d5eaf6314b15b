//! Deltas: a block that is stored as a delta has an older version as its base. (The base of a block
//! stored against a similar one is that block's payload: [`crate::form::similar`].)
//!
//! A delta's base is the newest whole version of the block in the log. So recovery finds it again
//! by reading the log in order, and it lies in a segment at most as new as the delta's. It counts
//! as live in its segment. When that segment is reclaimed, the block is written whole again or
//! leaves the cache, so a delta never outlives its base.
//!
//! A write becomes a delta if its base is in RAM: either as the block's newest version, or kept for
//! this purpose under a key of its own. While a delta waits in the builder, nothing changes its
//! base: the write holds the block's lock, blocks in the segment being reclaimed are not used as
//! bases, and reclaim first closes a record that has deltas against its segment.

use forebay_codec::is_zero;
use forebay_format::EntryKind;

use crate::api::ContentLocality;
use crate::api::stats::DELTA_SIZES;
use crate::contents::Place;
use crate::contents::base_key;
use crate::form::duplicates::fingerprint;
use crate::form::{Context, Forms};
use crate::key::Key;
use crate::limits::BASES_SHARE;
use crate::log::builder::Expect;

impl Forms {
    /// Turns the search for similar blocks on or off; the table has room for `blocks` blocks.
    pub fn set_similar(&mut self, wanted: bool, blocks: u64) {
        self.similar.set_wanted(wanted, blocks);
    }

    /// Stores a block that a client wrote, as a duplicate of another block or as a delta if
    /// possible.
    pub fn store_written(&mut self, cx: &mut Context<'_>, key: Key, block: &[u8]) {
        if cx.config.content == ContentLocality::Independent || is_zero(block) {
            return self.store_block(cx, key, block, true, Expect::Always);
        }
        let print = fingerprint(block);
        if let Some(place) = self.duplicate_of(cx, key, block, print) {
            return self.store_duplicate(cx, key, &place, true, Expect::Always);
        }
        if let Some(base) = usable_base(cx, key)
            && self.delta_tries.is_due()
        {
            cx.stats.delta_tries += 1;
            let stored = self.store_delta(cx, key, block, base);
            self.delta_tries.note(stored);
            if stored {
                return;
            }
        }
        self.store_filled(cx, key, block, true, Expect::Always);
        self.duplicates.note(print, key);
    }

    /// Encodes a block against its base, which is in RAM. Returns false if the delta is too long.
    fn store_delta(&mut self, cx: &mut Context<'_>, key: Key, block: &[u8], base: Place) -> bool {
        let kept_at = cx.contents.base_in_ram(key);
        let old = cx.ram.get(kept_at).expect("a usable base is in RAM");
        let Some(len) = self.codec.compress_delta(old, block, &mut self.encoded[..]) else {
            return false;
        };
        let form = cx.log.builder().pack(EntryKind::Delta, &self.encoded[..len]);
        cx.log.builder().push_form(key, form, true, Expect::Over(base));
        if kept_at == key {
            cx.ram.rename(key, base_key(key));
        }
        let size = DELTA_SIZES.iter().position(|&most| len <= most);
        cx.stats.deltas_by_size[size.expect("a delta is no longer than the longest")] += 1;
        cx.stats.delta_blocks += 1;
        cx.stats.delta_bytes += len as u64;
        true
    }
}

/// The block's base, if a delta against it is worth making: an old base is about to be reclaimed,
/// and the block would soon have to be written whole.
fn usable_base(cx: &mut Context<'_>, key: Key) -> Option<Place> {
    let base = cx.contents.base_of(key)?;
    let young = cx.is_young(cx.log.seq_of(&base));
    let own = cx.contents.bases().saturating_sub(cx.similar_blocks());
    let room = cx.contents.has_base(key) || own < cx.contents.index().capacity() / BASES_SHARE;
    // An entry that waits in the builder may take the base away when the record is closed: a copy
    // forward, or the word that the clean block is gone, since its primary was changed.
    let usable = young
        && room
        && !cx.log.is_named_leaving(key)
        && !cx.contents.is_unnamed(key)
        && cx.ram.contains(cx.contents.base_in_ram(key))
        && !cx.log.builder().has_entry_of(key);
    usable.then_some(base)
}
