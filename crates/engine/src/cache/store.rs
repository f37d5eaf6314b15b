//! The way into the store: units are written, and the log names them.

use std::borrow::Cow;

use forebay_block::{Completion, Io};
use forebay_format::{EntryKind, PAGE, StoreUnit};
use forebay_policy::{LastTouch, Touch};

use crate::api::{Effects, Health, Target};
use crate::cache::Cache;
use crate::contents::Place;
use crate::form::Copied;
use crate::key::Key;
use crate::limits::{ENTRIES_HELD, PAGES_FREED_MAX, PAGES_HELD, WRITE_TRIES};
use crate::log::builder::{Expect, Stored};
use crate::note::Note;
use crate::slab::Id;
use crate::store::{Unit, UnitBlock, unit_pages};
use crate::ticket::Ticket;

/// The payload of a block on its way into a unit.
struct Coming<'a> {
    key: Key,
    kind: EntryKind,
    bytes: Cow<'a, [u8]>,
    crc: u32,
    /// The condition under which the block still enters.
    expect: Expect,
}

impl Cache {
    /// Writes neighboring blocks into the store, in their densest form. Returns those that find no
    /// room now. What a full store has already stays as it is, and is not among them. `copies` are
    /// not empty, and each has a payload; `now` are their places.
    pub(crate) fn send_to_store(
        &mut self,
        mut copies: Vec<(Copied, Place)>,
        fx: &mut Effects,
    ) -> Result<(), Vec<(Copied, Place)>> {
        let takes = self.makes_room() && self.store.takes_units() && !self.contents.is_loading();
        if takes && self.send_unit(&copies, fx) {
            self.stats.copied_blocks += copies.len() as u64;
            return Ok(());
        }
        if !self.store.is_full() {
            return Err(copies);
        }
        let apart = takes && copies.len() > 1;
        copies.retain(|(_, now)| !self.contents.is_in_store(now));
        if apart { self.send_apart(copies, fx) } else { Err(copies) }
    }

    /// Writes copies into the store, as one unit. Returns false if there is no room now.
    fn send_unit(&mut self, copies: &[(Copied, Place)], fx: &mut Effects) -> bool {
        let mut payloads = Vec::with_capacity(copies.len());
        for (copy, now) in copies {
            let (forms, mut cx) = self.forms();
            let (kind, bytes, crc) = forms.densest(&mut cx, copy, *now);
            payloads.push(Coming { key: copy.key, kind, bytes, crc, expect: Expect::At(*now) });
        }
        let last = self.last_of(copies.iter().map(|(_, place)| place.meta));
        self.write_unit(payloads, last, false, fx)
    }

    /// Writes neighboring blocks that were missed into the store, as one unit. Returns false if
    /// there is no room now, or if they belong into the log. `blocks` are not empty, and not on the
    /// device.
    pub(crate) fn admit_to_store(&mut self, blocks: &[(Key, &[u8])], fx: &mut Effects) -> bool {
        if !self.makes_room() || !self.store.takes_admitted() || self.contents.is_loading() {
            return false;
        }
        let mut payloads = Vec::with_capacity(blocks.len());
        for &(key, block) in blocks {
            let (forms, mut cx) = self.forms();
            let Some((kind, bytes, crc)) = forms.admitted(&mut cx, block) else { return false };
            payloads.push(Coming { key, kind, bytes, crc, expect: Expect::Absent });
        }
        let last = self.policy.touched(Touch::Read);
        self.write_unit(payloads, Some(last), true, fx)
    }

    /// Writes payloads into the store, as one unit. `last` is the last request for any of them.
    /// Returns false if there is no room now.
    fn write_unit(
        &mut self,
        mut payloads: Vec<Coming<'_>>,
        last: Option<LastTouch>,
        is_admitted: bool,
        fx: &mut Effects,
    ) -> bool {
        let len = unit_pages(payloads.iter().map(|payload| payload.bytes.len()));
        let Some(pages) = self.store.take(len, self.contents.pages()) else { return false };
        let (segment, start) = self.contents.pages().place(pages.start);
        let len = len * PAGE;
        let mut buf = self.config.buffers.get(len);
        let mut blocks = Vec::with_capacity(payloads.len());
        // Uncompressed blocks first, so that each has a page of its own.
        payloads.sort_by_key(|payload| payload.kind != EntryKind::Raw);
        let mut at = 0;
        for Coming { key, kind, bytes, crc, expect } in payloads {
            let end = at + bytes.len();
            let next = end.next_multiple_of(8);
            buf[at..end].copy_from_slice(&bytes);
            buf[end..next].fill(0);
            let (offset, len) = (start + at as u32, bytes.len() as u16);
            blocks.push(UnitBlock { key, kind, offset, len, crc, expect });
            at = next;
        }
        buf[at..].fill(0);
        if let Some(last) = last {
            self.contents.pages().set_last(pages.start, last);
        }
        for block in &blocks {
            let bytes = block.offset..block.offset + u32::from(block.len);
            let pages = self.contents.pages();
            pages.hold(pages.covered(segment, bytes));
        }
        self.stats.stored_blocks += blocks.len() as u64;
        let id = self.store.begin(Unit { segment, pages, blocks, is_admitted });
        let offset = self.segment_offset(segment as usize) + u64::from(start);
        let ticket = Ticket::Unit { id, tries: 1 };
        self.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, buf));
        true
    }

    /// Writes blocks into the store, each as a unit of its own. Returns those that find no room
    /// now.
    fn send_apart(
        &mut self,
        mut copies: Vec<(Copied, Place)>,
        fx: &mut Effects,
    ) -> Result<(), Vec<(Copied, Place)>> {
        while let Some(copy) = copies.pop() {
            if let Err(mut left) = self.send_to_store(vec![copy], fx) {
                copies.append(&mut left);
                return Err(copies);
            }
        }
        Ok(())
    }

    /// Handles the end of a unit's write.
    pub(crate) fn unit_written(&mut self, id: Id, tries: u32, done: Completion, fx: &mut Effects) {
        if self.health() != Health::Good {
            return;
        }
        match done.result {
            Ok(()) => {
                if self.store.unit(id).is_admitted {
                    self.place_admitted(id);
                }
                self.store.end_write(self.now, id, !self.config.cache_volatile);
            }
            Err(_) if tries < WRITE_TRIES => {
                let unit = self.store.unit(id);
                let (segment, start) = self.contents.pages_and_index().0.place(unit.pages.start);
                let offset = self.segment_offset(segment as usize) + u64::from(start);
                let ticket = Ticket::Unit { id, tries: tries + 1 };
                self.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, done.buf));
            }
            Err(_) => self.out.note(Note::CacheFailed),
        }
    }

    /// Puts the blocks of an admitted unit into the index, unless they have changed while it was
    /// being written.
    fn place_admitted(&mut self, id: Id) {
        let segment = self.store.unit(id).segment;
        let mut blocks = std::mem::take(self.store.blocks_of(id));
        blocks.retain_mut(|block| {
            let UnitBlock { key, kind, offset, len, crc, .. } = *block;
            let enters = self.store.end_entering(key, id)
                && self.contents.get(key).is_none()
                && !self.contents.index().is_full();
            if enters {
                let meta = self.policy.inserted(Touch::Read);
                self.policy.entered();
                let place = Place { segment, offset, len, kind, crc, dirty: false, meta };
                self.contents.place_unnamed(self.now, key, place, &mut self.ram);
                self.ram.note_doubled(key);
                block.expect = Expect::At(place);
            } else {
                let pages = self.contents.pages();
                pages.release(pages.covered(segment, offset..offset + u32::from(len)));
            }
            enters
        });
        *self.store.blocks_of(id) = blocks;
    }

    /// Names durable units in the log, logs what has left the cache, evicts, and frees pages.
    pub(crate) fn pump_store(&mut self, fx: &mut Effects) {
        if !self.makes_room() || self.contents.is_loading() {
            return;
        }
        self.name_units(fx);
        self.log_departures(fx);
        if !self.store.exists() {
            return;
        }
        self.free_pages();
        self.evict(fx);
        self.discard_extent(fx);
        // Freed pages wait for a record; there may be no other reason for one.
        let waits = self.store.is_short() && self.contents.pages().freed() > 0;
        if waits && self.log.builder_ref().is_empty() {
            self.push_bare(fx, Key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
        }
    }

    /// Whether the record being built waits for a client's write to share it, so that it needs no
    /// pages of its own: nothing waits for its entries.
    pub(crate) fn holds_record(&mut self) -> bool {
        let builder = self.log.builder_ref();
        let small = builder.pending.len() < ENTRIES_HELD && builder.pages() < PAGES_HELD;
        let alone = builder.complete.is_empty() && builder.waiters.is_empty();
        let waits = self.log.waits_for_next(self.patient_from())
            || self.log.is_emergency()
            || self.store.is_short();
        let holds = self.store.exists() && self.is_serving() && small && alone && !waits;
        self.log.hold(self.now, holds)
    }

    /// Puts the entries of durable units into the record being built.
    fn name_units(&mut self, fx: &mut Effects) {
        // Nothing waits for blocks that were admitted.
        let all = self.has_client_space();
        while let Some(id) = self.store.first_ready(all) {
            if self.store.unit(id).blocks.is_empty() {
                self.store.end_ready(id);
                continue;
            }
            let segment = self.store.unit(id).segment;
            if !self.make_bare_room(fx) {
                return;
            }
            let Some(block) = self.store.blocks_of(id).pop() else { return };
            let unit = self.unit_at(segment, block.offset);
            let stored = Stored { segment, offset: block.offset, unit, is_new: true };
            let UnitBlock { key, kind, len, crc, expect, .. } = block;
            self.log.builder().push_stored(key, (kind, len, crc), expect, stored);
        }
    }

    /// Names a block of the store again, at its `place`. Returns false if there is no room now.
    pub(crate) fn push_mapping(&mut self, fx: &mut Effects, key: Key, place: Place) -> bool {
        self.push_named(fx, key, place, Expect::At(place))
    }

    /// Names a clean block of the store again, as a dirty one. Returns false if there is no room.
    pub(crate) fn push_dirtied(&mut self, fx: &mut Effects, key: Key, place: Place) -> bool {
        self.push_named(fx, key, place, Expect::Dirties(place))
    }

    fn push_named(&mut self, fx: &mut Effects, key: Key, place: Place, expect: Expect) -> bool {
        let room = self.make_bare_room(fx);
        if room {
            let Place { segment, offset, kind, len, crc, .. } = place;
            let unit = self.unit_at(segment, offset);
            let stored = Stored { segment, offset, unit, is_new: false };
            self.log.builder().push_stored(key, (kind, len, crc), expect, stored);
        }
        room
    }

    /// The unit of a payload, as an entry names it.
    fn unit_at(&self, segment: u32, offset: u32) -> StoreUnit {
        let pages = self.contents.pages_and_index().0;
        let page = pages.covered(segment, offset..offset).start;
        let before = page - pages.unit(page).start;
        StoreUnit { extent: segment - self.log.len() as u32, page: before as u8 + 1 }
    }

    /// Logs that blocks have left the cache without an entry that says so.
    fn log_departures(&mut self, fx: &mut Effects) {
        while self.contents.has_unlogged() && self.make_bare_room(fx) {
            let Some(key) = self.contents.take_unlogged() else { return };
            let kind = EntryKind::Invalidate;
            self.log.builder().push_bare(key, 1, kind, false, Expect::Absent);
            self.log.raise_barrier();
        }
    }

    /// Whether pages can be freed at once: the last turn has freed as many as it may.
    pub(crate) fn frees_more(&self) -> bool {
        self.store.has_next_free(self.log.durable()) && !self.contents.is_loading()
    }

    /// Frees pages whose last use ended durably.
    fn free_pages(&mut self) {
        for _ in 0..PAGES_FREED_MAX {
            let Some(page) = self.store.next_free(self.log.durable()) else { break };
            let pages = self.contents.pages();
            if pages.end_freed(page) {
                self.store.note_free(page, self.contents.pages());
            }
        }
        // Nothing else may ask for it.
        if let Some(lsn) = self.store.freed_by()
            && self.store.is_short()
        {
            self.log.want_durable(lsn);
        }
    }
}
