//! Blocks that are stored without another's help: as zstd, as LZ4, or as they are.

use forebay_codec::{crc32c, is_zero};
use forebay_format::EntryKind;

use crate::Engine;
use crate::api::Effects;
use crate::contents::Place;
use crate::key::Key;
use crate::log::builder::{Expect, Form};
use crate::reclaim::Copied;

impl Engine {
    /// Encodes a block into the builder; false when there is no room now.
    pub(crate) fn push_block(
        &mut self,
        fx: &mut Effects,
        key: Key,
        block: &[u8],
        dirty: bool,
        expect: Expect,
    ) -> bool {
        if is_zero(block) {
            return self.push_bare(fx, key, 1, EntryKind::Zero, dirty, expect);
        }
        self.push_filled(fx, key, block, dirty, expect)
    }

    /// The same of a block that is known not to be zero.
    pub(crate) fn push_filled(
        &mut self,
        fx: &mut Effects,
        key: Key,
        block: &[u8],
        dirty: bool,
        expect: Expect,
    ) -> bool {
        if !self.log.builder().fits_block() && !self.close_record(fx) {
            return false;
        }
        let form = self.push_alone(block, dirty);
        self.log.builder().push_form(key, form, dirty, expect);
        true
    }

    /// Adds a block that is stored without another's help, without an entry. There is room.
    fn push_alone(&mut self, block: &[u8], dirty: bool) -> Form {
        if let Some(len) = self.make_block_dense(block, dirty) {
            return self.log.builder().pack(EntryKind::Zstd, &self.form.encoded[..len]);
        }
        let out = &mut self.form.encoded[..];
        let packed = self.config.compress.then(|| self.form.codec.compress(block, out));
        match packed.flatten() {
            Some(len) => self.log.builder().pack(EntryKind::Lz4, &self.form.encoded[..len]),
            None => self.log.builder().push_raw(block, crc32c(block)),
        }
    }

    /// Adds what reclaim copies, as densely as it can be stored now; `now` is where the block is.
    /// False when there is no room.
    pub(crate) fn push_copy(&mut self, fx: &mut Effects, copy: &Copied, now: Place) -> bool {
        let Copied { key, place, bytes, .. } = copy;
        let (dirty, expect) = (now.dirty, Expect::At(now));
        if !place.kind.has_payload() {
            return self.push_bare(fx, *key, 1, place.kind, dirty, expect);
        }
        if !self.log.builder().fits_block() && !self.close_record(fx) {
            return false;
        }
        if self.push_copy_as_similar(copy, now) {
            return true;
        }
        if place.kind != now.kind {
            return self.push_block(fx, *key, bytes, dirty, expect);
        }
        let form = match self.make_dense(bytes, place) {
            Some(len) => self.log.builder().pack(EntryKind::Zstd, &self.form.encoded[..len]),
            None if place.kind == EntryKind::Raw => self.log.builder().push_raw(bytes, place.crc),
            // Keep the original CRC, so that corruption since the first write is still detected.
            None => Form { crc: place.crc, ..self.log.builder().pack(place.kind, bytes) },
        };
        self.log.builder().push_form(*key, form, dirty, expect);
        true
    }
}
