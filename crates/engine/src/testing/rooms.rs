//! The rooms that storing a block and closing a record need, without an engine.

use forebay_block::{Instant, VolumeId};
use forebay_policy::Fifo;

use crate::api::ShardConfig;
use crate::api::stats::Stats;
use crate::contents::Contents;
use crate::key::Key;
use crate::locks::Locks;
use crate::log::Log;
use crate::log::append::{Closed, Closing, Record};
use crate::log::builder::Builder;
use crate::ram::Ram;
use crate::testing::{SEGMENT, config};

/// Number of segments in the log.
pub const SEGMENTS: u64 = 8;
/// Length of the longest record, in pages.
const RECORD_PAGES: usize = 8;
/// Number of blocks that the index has room for.
pub const BLOCKS: u64 = 1000;

/// The rooms, all of them empty at first.
pub struct Rooms {
    pub config: ShardConfig,
    pub now: Instant,
    pub contents: Contents,
    pub ram: Ram,
    pub log: Log,
    pub locks: Locks,
    pub stats: Stats,
    pub frees_with_one: bool,
}

impl Rooms {
    /// Rooms with `ram_blocks` blocks of RAM.
    pub fn new(ram_blocks: u64) -> Self {
        let config = config(SEGMENTS * u64::from(SEGMENT), 1 << 30);
        let builder = Builder::new(config.buffers.clone(), RECORD_PAGES);
        Self {
            now: Instant(1_000_000_000),
            contents: Contents::new(BLOCKS, SEGMENTS as usize, 1),
            ram: Ram::new(ram_blocks << 12, false),
            log: Log::new(SEGMENTS as usize, builder),
            locks: Locks::default(),
            stats: Stats::default(),
            frees_with_one: false,
            config,
        }
    }

    pub fn close(&mut self) -> Closed {
        self.log.close(&mut Closing {
            now: self.now,
            config: &self.config,
            contents: &mut self.contents,
            ram: &mut self.ram,
            policy: &mut Fifo,
            stats: &mut self.stats,
            frees_with_one: self.frees_with_one,
        })
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
        while !self.log.is_idle() {
            self.log.end_record(self.log.completed().next());
            self.log.complete_next().expect("the oldest record has ended");
        }
        if self.log.begin_wanted_flush() {
            let covered = self.log.end_flush();
            assert!(self.log.advance_durable(covered));
        }
        while let Some(footer) = self.log.next_footer(&self.config) {
            self.log.end_footer(footer.seq);
        }
        self.log.finish_freeing();
    }
}

/// A block of the only volume.
pub fn key(block: u64) -> Key {
    Key::new(VolumeId(0), block)
}
