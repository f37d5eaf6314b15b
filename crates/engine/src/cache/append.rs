//! Appending to the log: blocks that clients write, blocks that misses bring in, blocks that
//! reclaim copies, and entries without payload. A full record is closed and sent.

use forebay_block::Io;
use forebay_codec::is_zero;
use forebay_format::EntryKind;

use crate::api::{Effects, Health, Target};
use crate::cache::Cache;
use crate::contents::Place;
use crate::form::{Context, Copied, Forms};
use crate::key::Key;
use crate::limits::RECLAIM_RESERVE;
use crate::log::append::{Closed, Closing};
use crate::log::builder::Expect;
use crate::note::Note;
use crate::ticket::Ticket;

impl Cache {
    /// Whether clients and admissions may use the log; the last free segments are reserved for
    /// reclaim.
    pub(crate) fn has_client_space(&self) -> bool {
        self.log.free() > RECLAIM_RESERVE + self.stuck_reserve() && !self.contents.index().is_full()
    }

    /// The number of free segments above which a freed one may wait for company on its way. In a
    /// small log beside a store there are many. With a tight index reclaim waits for each.
    pub(crate) fn patient_from(&self) -> u64 {
        match self.store.exists() && !self.index_is_tight() {
            true => RECLAIM_RESERVE + 1 + self.stuck_reserve(),
            false => u64::MAX,
        }
    }

    /// The forms, with a context of the other rooms that they need.
    pub(crate) fn forms(&mut self) -> (&mut Forms, Context<'_>) {
        let cx = Context {
            now: self.now,
            config: &self.config,
            contents: &self.contents,
            ram: &mut self.ram,
            log: &mut self.log,
            locks: &self.locks,
            stats: &mut self.stats,
        };
        (&mut self.form, cx)
    }

    /// Makes room in the record being built for a payload of up to one block. Returns false if
    /// there is no room now.
    fn make_room(&mut self, fx: &mut Effects) -> bool {
        self.log.builder().fits_block() || self.close_record(fx)
    }

    /// Makes room for an entry without payload.
    pub(super) fn make_bare_room(&mut self, fx: &mut Effects) -> bool {
        self.log.builder().fits_bare() || self.close_record(fx)
    }

    /// Makes room for a block, which needs no payload if it is all zeros.
    fn make_room_for(&mut self, block: &[u8], fx: &mut Effects) -> bool {
        if is_zero(block) { self.make_bare_room(fx) } else { self.make_room(fx) }
    }

    /// Adds a block that a client wrote. Returns false if there is no room now.
    pub(crate) fn push_written(&mut self, fx: &mut Effects, key: Key, block: &[u8]) -> bool {
        let room = self.make_room_for(block, fx);
        if room {
            let (forms, mut cx) = self.forms();
            forms.store_written(&mut cx, key, block);
        }
        room
    }

    /// Adds a block that a miss brought in. Returns false if there is no room now.
    pub(crate) fn push_admitted(&mut self, fx: &mut Effects, key: Key, block: &[u8]) -> bool {
        let room = self.make_room_for(block, fx);
        if room {
            let (forms, mut cx) = self.forms();
            forms.store_admitted(&mut cx, key, block);
        }
        room
    }

    /// Adds a block that reclaim copies; `now` is its current place. Returns false if there is no
    /// room now.
    pub(crate) fn push_copy(&mut self, fx: &mut Effects, copy: &Copied, now: Place) -> bool {
        if !copy.place.kind.has_payload() {
            let (kind, expect) = (copy.place.kind, Expect::At(now));
            return self.push_bare(fx, copy.key, 1, kind, now.dirty, expect);
        }
        let room = self.make_room(fx);
        if room {
            let (forms, mut cx) = self.forms();
            forms.store_copy(&mut cx, copy, now);
        }
        room
    }

    /// Adds an entry without payload. Returns false if there is no room now.
    pub(crate) fn push_bare(
        &mut self,
        fx: &mut Effects,
        key: Key,
        count: u32,
        kind: EntryKind,
        dirty: bool,
        expect: Expect,
    ) -> bool {
        let room = self.make_bare_room(fx);
        if room {
            self.log.builder().push_bare(key, count, kind, dirty, expect);
        }
        room
    }

    /// Closes the record being built, places it and sends it. Returns true if the builder is empty
    /// afterwards.
    pub(crate) fn close_record(&mut self, fx: &mut Effects) -> bool {
        if self.health() != Health::Good {
            return self.log.builder().is_empty();
        }
        let mut cx = Closing {
            now: self.now,
            config: &self.config,
            frees_with_one: self.makes_room() && self.log.copies_fit(self.config.segment_size),
            contents: &mut self.contents,
            locks: &self.locks,
            ram: &mut self.ram,
            policy: &mut *self.policy,
            stats: &mut self.stats,
        };
        let record = match self.log.close(&mut cx) {
            Closed::Empty => {
                self.shares.note_closed();
                return true;
            }
            Closed::NoRoom => return false,
            Closed::Record(record) => record,
        };
        self.shares.note_closed();
        if !self.contents.has_unlogged() {
            self.store.note_freed(record.lsn, self.contents.pages().take_freed());
        }
        if record.has_news {
            self.log.note_client_bytes(record.buf.len() as u64);
        }
        let offset = self.config.area.offset + record.offset;
        let ticket = Ticket::Record { lsn: record.lsn, tries: 1 };
        self.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, record.buf));
        for op in record.complete {
            self.out.note(Note::Placed(op, record.lsn));
        }
        true
    }

    /// Seals the open segment; its footer follows when its records are durable.
    pub(crate) fn seal_open_segment(&mut self) {
        self.log.seal_open(&mut *self.policy);
    }
}
