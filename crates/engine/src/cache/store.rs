//! Ways into the store and out of it: units are written, named by the log, and evicted.

use forebay_block::{Completion, Io};
use forebay_format::{EntryKind, PAGE, StoreSlot};

use crate::api::{Effects, Health, State, Target};
use crate::cache::Cache;
use crate::contents::Place;
use crate::form::Copied;
use crate::key::Key;
use crate::limits::{EVICT_SAMPLE, EVICTIONS_MAX, WRITE_TRIES};
use crate::log::builder::{Expect, Stored};
use crate::note::Note;
use crate::slab::Id;
use crate::store::{GROUP_BLOCKS, SLOT_PAGES_MAX, Unit, UnitBlock, unit_pages};
use crate::ticket::Ticket;

/// One slot in this many of a class is kept free, so that units do not wait.
const SLOTS_FREE: u64 = 64;
/// The same as a number, at least and at most.
const SLOTS_FREE_MIN: usize = 8;
const SLOTS_FREE_MAX: usize = 1024;

impl Cache {
    /// Writes blocks of one group into the store, in their densest form. Returns them if there is
    /// no free slot now. `copies` are not empty, and each has a payload; `now` are their places.
    pub(crate) fn send_to_store(
        &mut self,
        copies: Vec<(Copied, Place)>,
        fx: &mut Effects,
    ) -> Result<(), Vec<(Copied, Place)>> {
        // A stop waits for writes in flight, not for what could still be moved.
        if !self.is_serving() || !self.store.takes_units() {
            return Err(copies);
        }
        let mut payloads = Vec::with_capacity(copies.len());
        for (copy, now) in &copies {
            let (forms, mut cx) = self.forms();
            payloads.push(forms.densest(&mut cx, copy, *now));
        }
        let pages = unit_pages(payloads.iter().map(|(_, bytes, _)| bytes.len()));
        let Some(slot) = self.store.take_slot(pages, self.contents.pages()) else {
            return Err(copies);
        };
        let pages = slot.start..slot.start + pages as u32;
        let (segment, start) = self.contents.pages().place(slot.start);
        let len = (pages.end - pages.start) as usize * PAGE;
        let mut buf = self.config.buffers.get(len);
        buf[..].fill(0);
        let mut blocks = Vec::with_capacity(copies.len());
        // Uncompressed blocks first, so that each has a page of its own.
        let mut order: Vec<usize> = (0..copies.len()).collect();
        order.sort_by_key(|&i| payloads[i].0 != EntryKind::Raw);
        let mut at = 0;
        for i in order {
            let ((copy, now), (kind, bytes, crc)) = (&copies[i], &payloads[i]);
            buf[at..at + bytes.len()].copy_from_slice(bytes);
            let (key, kind, crc) = (copy.key, *kind, *crc);
            let (offset, len) = (start + at as u32, bytes.len() as u16);
            let expect = Expect::At(*now);
            blocks.push(UnitBlock { key, kind, offset, len, crc, expect });
            at += bytes.len().next_multiple_of(8);
        }
        self.store.note_busy(&pages);
        for block in &blocks {
            let bytes = block.offset..block.offset + u32::from(block.len);
            let pages = self.contents.pages();
            pages.hold(pages.covered(segment, bytes));
        }
        self.stats.store_bytes += len as u64;
        self.stats.stored_blocks += blocks.len() as u64;
        let id = self.store.begin(Unit { segment, pages, blocks });
        let offset = self.segment_offset(segment as usize) + u64::from(start);
        let ticket = Ticket::Unit { id, tries: 1 };
        self.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, buf));
        Ok(())
    }

    /// Handles the end of a unit's write.
    pub(crate) fn unit_written(&mut self, id: Id, tries: u32, done: Completion, fx: &mut Effects) {
        if self.health() != Health::Good {
            return;
        }
        match done.result {
            Ok(()) => self.store.end_write(id, !self.config.cache_volatile),
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

    /// Names durable units in the log, logs what has left the store, evicts, and frees slots.
    pub(crate) fn pump_store(&mut self, fx: &mut Effects) {
        let serves = *self.state() == State::Serving && self.health() == Health::Good;
        if !self.store.exists() || !serves {
            return;
        }
        self.name_units(fx);
        self.log_departures(fx);
        self.free_slots();
        self.evict(fx);
        // Freed pages wait for a record; there may be no other reason for one.
        let waits = self.store.is_short() && self.contents.pages().freed() > 0;
        if waits && self.log.builder_ref().is_empty() {
            self.push_bare(fx, Key(0), 1, EntryKind::Checkpoint, false, Expect::Always);
        }
    }

    /// Puts the entries of durable units into the record being built.
    fn name_units(&mut self, fx: &mut Effects) {
        while let Some(id) = self.store.first_ready() {
            if self.store.unit(id).blocks.is_empty() {
                self.store.take_ready();
                continue;
            }
            let segment = self.store.unit(id).segment;
            if !self.make_bare_room(fx) {
                return;
            }
            let Some(block) = self.store.next_block(id) else { return };
            let slot = self.slot_at(segment);
            let stored = Stored { segment, offset: block.offset, slot, is_new: true };
            let UnitBlock { key, kind, len, crc, expect, .. } = block;
            self.log.builder().push_stored(key, (kind, len, crc), expect, stored);
        }
    }

    /// Names a block of the store again, at its `place`. Returns false if there is no room now.
    pub(crate) fn push_mapping(&mut self, fx: &mut Effects, key: Key, place: Place) -> bool {
        let room = self.make_bare_room(fx);
        if room {
            let Place { segment, offset, kind, len, crc, .. } = place;
            let slot = self.slot_at(segment);
            let stored = Stored { segment, offset, slot, is_new: false };
            self.log.builder().push_stored(key, (kind, len, crc), Expect::At(place), stored);
        }
        room
    }

    fn slot_at(&self, segment: u32) -> StoreSlot {
        self.store.slot(segment - self.log.len() as u32)
    }

    /// Logs that blocks have left the store without an entry that says so.
    fn log_departures(&mut self, fx: &mut Effects) {
        while self.contents.has_unlogged() && self.make_bare_room(fx) {
            let Some(key) = self.contents.take_unlogged() else { return };
            let kind = EntryKind::Invalidate;
            self.log.builder().push_bare(key, 1, kind, false, Expect::Absent);
            self.log.raise_barrier();
        }
    }

    /// Frees the pages whose last use ended durably.
    fn free_slots(&mut self) {
        while let Some(page) = self.store.next_free(self.log.durable()) {
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

    /// Evicts units of each class of which slots are sought and few are left.
    fn evict(&mut self, fx: &mut Effects) {
        let tight = self.index_is_tight();
        let (mut evicted, mut wanted) = (false, false);
        for class in 1..=SLOT_PAGES_MAX {
            let all = self.store.slots(class) as u64;
            let few = (all / SLOTS_FREE) as usize;
            let few = few.clamp(SLOTS_FREE_MIN, SLOTS_FREE_MAX);
            let coming = self.store.freeing() / class + self.contents.pages().freed() / class;
            let left = self.store.free_slots(class) + coming + self.store.leaving(class);
            if tight || self.store.is_sought(class) && left < few {
                let most = if tight { EVICTIONS_MAX } else { (few - left).min(EVICTIONS_MAX) };
                wanted |= left == 0 || tight;
                for _ in 0..most {
                    let Some(keys) = self.victim(class) else { break };
                    evicted = true;
                    self.stats.evicted_blocks += keys.len() as u64;
                    self.store.note_leaving(class, keys[0].0);
                    for (key, place) in keys {
                        let (kind, expect) = (EntryKind::Invalidate, Expect::At(place));
                        if !self.push_bare(fx, key, 1, kind, false, expect) {
                            return;
                        }
                        self.log.raise_barrier();
                    }
                }
            }
        }
        let coming = self.store.freeing() + self.contents.pages().freed() > 0;
        self.store.note_full(wanted && !evicted && !coming);
    }

    /// Whether the index is nearly full and has clean blocks to evict.
    pub(crate) fn index_is_tight(&self) -> bool {
        let index = self.contents.index();
        let margin = index.capacity() / INDEX_MARGIN;
        index.len() + margin >= index.capacity() && index.len() > self.contents.dirty().blocks()
    }

    /// The blocks of the least wanted unit, among some chosen at random, in slots of a class.
    fn victim(&mut self, class: usize) -> Option<Vec<(Key, Place)>> {
        let mut least: Option<(Key, Place)> = None;
        let random = self.store.random();
        let mut candidates = 0;
        for (key, place) in self.contents.index().sample(random, EVICT_SAMPLE * 4) {
            let pages = self.contents.pages_and_index().0;
            if !pages.has(&place)
                || self.store.class_at(place.segment - self.log.len() as u32) != class
            {
                continue;
            }
            if !self.may_leave(key, &place) {
                continue;
            }
            candidates += 1;
            if least.is_none_or(|(other, _)| self.policy.prefers(other.0, key.0)) {
                least = Some((key, place));
            }
            if candidates == EVICT_SAMPLE {
                break;
            }
        }
        let (key, place) = least?;
        Some(self.unit_of(key, &place))
    }

    /// Whether the unit of a block is clean, and nothing but its blocks needs it.
    fn may_leave(&self, key: Key, place: &Place) -> bool {
        let unit = self.unit_of(key, place);
        let free = |(key, place): &(Key, Place)| {
            !place.dirty && !self.log.builder_ref().has_entry_of(*key)
        };
        unit.iter().all(free)
    }

    /// The blocks of the same group in the same slot.
    fn unit_of(&self, key: Key, place: &Place) -> Vec<(Key, Place)> {
        let (pages, index) = self.contents.pages_and_index();
        let slot = self.store.slot_of(pages.of(place).start);
        let first = key.0 / GROUP_BLOCKS * GROUP_BLOCKS;
        let all = (first..first + GROUP_BLOCKS).map(Key);
        let found = all.filter_map(|key| index.get(key).map(|place| (key, place)));
        found
            .filter(|(_, other)| {
                pages.has(other) && self.store.slot_of(pages.of(other).start) == slot
            })
            .collect()
    }

    /// Whether a clean block that leaves the log stays in the cache, in the store.
    pub(crate) fn keeps_in_store(&self, key: Key) -> bool {
        if self.index_is_tight() {
            return false;
        }
        let plenty = self.store.free_pages() > u64::from(self.store.pages()) / 32;
        plenty || self.store.last_victim().is_none_or(|gone| self.policy.prefers(key.0, gone.0))
    }
}

/// One part in this many of the index is kept free, by reclaiming or evicting even when there is
/// room on the device.
const INDEX_MARGIN: u64 = 64;
