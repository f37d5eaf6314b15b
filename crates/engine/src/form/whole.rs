//! Blocks that are stored by themselves: as zstd, as LZ4, or uncompressed.

use std::borrow::Cow;

use forebay_codec::{crc32c, is_zero};
use forebay_format::EntryKind;

use crate::api::ContentLocality;
use crate::contents::Place;
use crate::form::{Context, Copied, Forms};
use crate::key::Key;
use crate::log::builder::{Expect, Form};

impl Forms {
    /// Stores a block by itself, in the densest form for which there is time.
    pub(super) fn store_block(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        block: &[u8],
        dirty: bool,
        expect: Expect,
    ) {
        if is_zero(block) {
            return cx.log.builder().push_bare(key, 1, EntryKind::Zero, dirty, expect);
        }
        self.store_filled(cx, key, block, dirty, expect);
    }

    /// Stores a block that is known not to be all zeros.
    pub(super) fn store_filled(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        block: &[u8],
        dirty: bool,
        expect: Expect,
    ) {
        let form = self.store_alone(cx, block, dirty);
        cx.log.builder().push_form(key, form, dirty, expect);
    }

    /// Adds the payload of a block that is not all zeros, without an entry.
    fn store_alone(&mut self, cx: &mut Context<'_>, block: &[u8], dirty: bool) -> Form {
        match self.encode_alone(cx, block, dirty) {
            Some((kind, len)) => cx.log.builder().pack(kind, &self.encoded[..len]),
            None => cx.log.builder().push_raw(block, crc32c(block)),
        }
    }

    /// Encodes a block by itself into `encoded`; returns kind and length of the form, or `None` if
    /// none is shorter than the block.
    fn encode_alone(
        &mut self,
        cx: &mut Context<'_>,
        block: &[u8],
        dirty: bool,
    ) -> Option<(EntryKind, usize)> {
        if let Some(len) = self.make_block_dense(cx, block, dirty) {
            return Some((EntryKind::Zstd, len));
        }
        let out = &mut self.encoded[..];
        let packed = cx.config.compress.then(|| self.codec.compress(block, out));
        packed.flatten().map(|len| (EntryKind::Lz4, len))
    }

    /// The payload of a block that a miss brought in, as dense as possible now: its form, bytes and
    /// CRC. `None` if the block belongs into the log: all zeros need no payload, and a block may be
    /// stored against a similar one only there.
    pub fn admitted<'a>(
        &mut self,
        cx: &mut Context<'_>,
        block: &'a [u8],
    ) -> Option<(EntryKind, Cow<'a, [u8]>, u32)> {
        if is_zero(block) || cx.config.content == ContentLocality::Similar {
            return None;
        }
        let (kind, bytes) = match self.encode_alone(cx, block, false) {
            Some((kind, len)) => (kind, Cow::Owned(self.encoded[..len].to_vec())),
            None => (EntryKind::Raw, Cow::Borrowed(block)),
        };
        let crc = crc32c(&bytes);
        Some((kind, bytes, crc))
    }

    /// The payload of a copy, as dense as possible now: its form, bytes and CRC. `now` is the
    /// block's current place.
    pub fn densest<'a>(
        &mut self,
        cx: &mut Context<'_>,
        copy: &'a Copied,
        now: Place,
    ) -> (EntryKind, Cow<'a, [u8]>, u32) {
        let Copied { place, bytes, .. } = copy;
        if let Some(len) = self.make_dense(cx, bytes, place) {
            let dense = self.encoded[..len].to_vec();
            let crc = crc32c(&dense);
            return (EntryKind::Zstd, Cow::Owned(dense), crc);
        }
        if place.kind != now.kind && cx.config.compress {
            let packed = self.codec.compress(bytes, &mut self.encoded[..]);
            if let Some(len) = packed {
                let packed = self.encoded[..len].to_vec();
                let crc = crc32c(&packed);
                return (EntryKind::Lz4, Cow::Owned(packed), crc);
            }
        }
        // Keep the original CRC, so that corruption since the first write is still detected.
        (place.kind, Cow::Borrowed(bytes), place.crc)
    }

    /// Stores a copy with a payload as densely as possible now; `now` is the block's current place.
    pub fn store_copy(&mut self, cx: &mut Context<'_>, copy: &Copied, now: Place) {
        let Copied { key, place, bytes, .. } = copy;
        let (dirty, expect) = (now.dirty, Expect::At(now));
        if self.store_copy_as_similar(cx, copy, now) {
            return;
        }
        if place.kind != now.kind {
            return self.store_block(cx, *key, bytes, dirty, expect);
        }
        let form = match self.make_dense(cx, bytes, place) {
            Some(len) => cx.log.builder().pack(EntryKind::Zstd, &self.encoded[..len]),
            None if place.kind == EntryKind::Raw => cx.log.builder().push_raw(bytes, place.crc),
            // Keep the original CRC, so that corruption since the first write is still detected.
            None => Form { crc: place.crc, ..cx.log.builder().pack(place.kind, bytes) },
        };
        cx.log.builder().push_form(*key, form, dirty, expect);
    }
}
