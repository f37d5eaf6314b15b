//! The rooms of a small shard without an engine: a [`Cache`], the effects, and the devices that
//! carry them out. A test of a room calls it with these, and takes from them the I/O that the room
//! sent, its answers and its notes.

use std::ops::{Deref, DerefMut};

use forebay_block::testing::noise;
use forebay_block::{BLOCK_SIZE, Completion, Instant, Io, IoOp, IoResult};
use forebay_format::Lsn;
use forebay_policy::Fifo;

use crate::api::stats::Stats;
use crate::api::{Effects, Eviction, Reply, ShardConfig, State, Target};
use crate::cache::Cache;
use crate::key::Key;
use crate::log::append::{Closed, Closing, Record};
use crate::note::Note;
use crate::slab::Id;
use crate::testing::{Devices, SEGMENT, VOLUME, config};
use crate::ticket::{InFlight, Ticket};

/// Number of segments in the log.
pub const SEGMENTS: u64 = 8;
/// Number of blocks that the index has room for.
pub const BLOCKS: u64 = 1000;
/// Bytes of a block.
pub const BLOCK: u64 = BLOCK_SIZE as u64;
/// Blocks of the primary.
pub const PRIMARY_BLOCKS: u64 = 4000;
/// Blocks in the longest record.
pub const IN_RECORD: u64 = 7;
/// The first block of those that [`Rooms::fill_to`] fills the log with.
pub const FILL: u64 = 2000;
/// The only primary.
pub const PRIMARY: Target = Target::Primary(VOLUME);

/// The rooms, all of them empty at first, of a shard that serves.
pub(crate) struct Rooms {
    pub cache: Cache,
    pub fx: Effects,
    pub devices: Devices,
    pub frees_with_one: bool,
}

impl Deref for Rooms {
    type Target = Cache;

    fn deref(&self) -> &Cache {
        &self.cache
    }
}

impl DerefMut for Rooms {
    fn deref_mut(&mut self) -> &mut Cache {
        &mut self.cache
    }
}

impl Rooms {
    /// The counters of the shard.
    pub fn counters(&self) -> Stats {
        self.cache.counters(self.cache.now)
    }

    /// Rooms with `ram_blocks` blocks of RAM.
    pub fn new(ram_blocks: u64) -> Self {
        let (cache, primary) = (SEGMENTS * u64::from(SEGMENT), PRIMARY_BLOCKS * BLOCK);
        let (ram_bytes, eviction) = (ram_blocks * BLOCK, Eviction::Fifo);
        let config = ShardConfig { ram_bytes, eviction, ..config(cache, primary) };
        Self::with(ShardConfig { index_blocks: BLOCKS, ..config }, Devices::new(cache, primary))
    }

    /// Rooms with these settings, on these devices.
    pub fn with(config: ShardConfig, devices: Devices) -> Self {
        let mut cache = Cache::new(config, Instant(1_000_000_000));
        cache.standing.state = State::Serving;
        // The first flush of the primary has been made.
        cache.volume_mut(VOLUME).direct_durable = 1;
        Self { cache, fx: Effects::default(), devices, frees_with_one: false }
    }

    pub fn close(&mut self) -> Closed {
        let Cache { log, now, config, contents, locks, ram, stats, .. } = &mut self.cache;
        let (now, frees_with_one) = (*now, self.frees_with_one);
        let policy = &mut Fifo;
        let mut closing =
            Closing { now, config, contents, locks, ram, policy, stats, frees_with_one };
        log.close(&mut closing)
    }

    /// Closes the record, which must have entries and room.
    pub fn closed(&mut self) -> Record {
        match self.close() {
            Closed::Record(record) => record,
            Closed::Empty => panic!("the record is empty"),
            Closed::NoRoom => panic!("there is no room"),
        }
    }

    /// Completes all outstanding device work: records, flush, footers.
    pub fn settle(&mut self) {
        self.carry_out_records();
        while !self.log.is_idle() {
            let lsn = self.log.completed().next();
            self.log.end_record(lsn);
            self.log.complete_next().expect("the oldest record has ended");
        }
        if self.log.begin_wanted_flush() {
            let covered = self.log.end_flush();
            assert!(self.log.advance_durable(covered));
            self.contents.settle(covered);
        }
        while let Some(footer) = self.cache.log.next_footer(&self.cache.config) {
            let at = footer.offset as usize;
            self.devices.cache[at..at + footer.buf.len()].copy_from_slice(&footer.buf);
            self.log.end_footer(footer.seq);
        }
        self.log.finish_freeing(u64::MAX);
    }

    /// Carries out the records that were sent. That they have ended is not told.
    fn carry_out_records(&mut self) {
        let is_record = |(target, io): &mut (Target, Io)| {
            *target == Target::Cache && io.op == IoOp::Write && io.range.len > 0
        };
        for (target, io) in self.fx.ios.extract_if(.., is_record).collect::<Vec<_>>() {
            let (sent, _) = self.end((target, io), Ok(()));
            assert!(matches!(sent.ticket, Ticket::Record { .. }), "{:?}", sent.ticket);
        }
    }
}

/// What rooms leave behind.
impl Rooms {
    /// The I/O that was sent since this was last called, in order.
    pub fn sent(&mut self) -> Vec<(Target, Io)> {
        std::mem::take(&mut self.fx.ios)
    }

    /// The only I/O that was sent.
    pub fn only(&mut self) -> (Target, Io) {
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "{sent:?}");
        sent.remove(0)
    }

    /// Ends an I/O; if it succeeds, its device has carried it out. What it was for, and how it
    /// ended: to be told to the room that sent it.
    pub fn end(&mut self, sent: (Target, Io), result: IoResult<()>) -> (InFlight, Completion) {
        let (target, io) = sent;
        let id = Id(u32::try_from(io.tag.0).expect("the tag is an id"));
        let done = match result {
            Ok(()) => self.devices.carry_out(target, io),
            Err(error) => io.complete(Err(error)),
        };
        (self.out.take(id), done)
    }

    /// The answers to clients since this was last called.
    pub fn answers(&mut self) -> Vec<Reply> {
        std::mem::take(&mut self.fx.replies)
    }

    /// The notes for higher rooms.
    pub fn notes(&mut self) -> Vec<Note> {
        std::iter::from_fn(|| self.out.next_note()).collect()
    }
}

/// What tests of rooms begin with.
impl Rooms {
    /// Blocks that clients wrote, in a record that is written. RAM has none of them.
    pub fn dirty(&mut self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            let Self { cache, fx, .. } = self;
            assert!(cache.push_written(fx, key(block), &content(block)), "there is room");
        }
        self.log_record();
    }

    /// The same of blocks that misses brought in.
    pub fn clean(&mut self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            let Self { cache, fx, .. } = self;
            assert!(cache.push_admitted(fx, key(block), &content(block)), "there is room");
        }
        self.log_record();
    }

    /// Closes the record being built; the device has it then.
    pub fn log_record(&mut self) {
        let Self { cache, fx, .. } = self;
        assert!(cache.close_record(fx), "there is room");
        self.settle();
    }

    /// The device flushes what it has.
    pub fn flush_device(&mut self) {
        let lsn = self.log.completed();
        self.log.want_durable(lsn);
        self.settle();
    }

    /// The same as [`Rooms::dirty`], durable.
    pub fn dirty_durable(&mut self, blocks: impl IntoIterator<Item = u64>) -> Lsn {
        self.dirty(blocks);
        self.flush_device();
        self.log.completed()
    }

    /// Fills the log with clean blocks until `free` segments are free and the open one is full.
    pub fn fill_to(&mut self, free: u64) {
        let mut block = FILL;
        loop {
            let last = (0..self.log.len() as usize).max_by_key(|&i| self.log.segment(i).seq);
            let used = self.log.segment(last.expect("a log has segments")).used;
            // But for a record's header and the footer.
            let room = (u64::from(SEGMENT - used) / BLOCK).saturating_sub(2);
            if room == 0 && self.log.free() == free {
                return;
            }
            let count = if room == 0 { IN_RECORD } else { room.min(IN_RECORD) };
            self.clean(block..block + count);
            block += count;
        }
    }

    /// Takes a block out of the cache.
    pub fn forget(&mut self, block: u64) {
        let Cache { contents, ram, .. } = &mut self.cache;
        contents.forget(key(block), ram);
    }

    /// Notes that the primary has a block's newest version.
    pub fn mark_clean(&mut self, block: u64) {
        let Cache { contents, ram, .. } = &mut self.cache;
        contents.mark_clean(key(block), ram);
    }

    /// Makes the bytes of a block on the cache device bad.
    pub fn spoil(&mut self, block: u64) {
        let place = self.contents.get(key(block)).expect("it is cached");
        let at = self.segment_offset(place.segment as usize) + u64::from(place.offset);
        self.devices.cache[at as usize] ^= 1;
    }
}

/// A block of the only volume.
pub fn key(block: u64) -> Key {
    Key::new(VOLUME, block)
}

/// What a block has at first.
pub fn content(block: u64) -> Vec<u8> {
    noise(block, BLOCK_SIZE)
}
