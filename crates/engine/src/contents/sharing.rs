//! Shared payloads: a block may have the place of another block's payload in the index, or have its
//! base there.
//!
//! When a segment is reclaimed, its footer names the blocks written in it. The blocks to which a
//! later segment gave a payload in it are listed here; recovery rebuilds the list. The place of
//! such a block may be durable before its entry is. Until its entry is durable the block is
//! *unsettled*, and must not be written to the primary.

use forebay_format::{Lsn, SegmentSeq};

use crate::contents::Contents;
use crate::key::{Key, KeyMap};

/// The blocks that use payloads written for other blocks.
#[derive(Debug)]
pub(super) struct Sharing {
    /// By position of the segment: blocks to which a later segment has given a payload in it. Some
    /// may have received another payload since.
    sharers: Vec<Vec<Key>>,
    /// Total number of blocks in `sharers`.
    count: u64,
    /// Blocks whose entry is not durable although its payload may be, with the entry's record.
    unsettled: KeyMap<Lsn>,
}

impl Sharing {
    pub fn new(segments: usize) -> Self {
        Self { sharers: vec![Vec::new(); segments], count: 0, unsettled: KeyMap::default() }
    }

    /// Forgets which blocks are unsettled.
    pub fn forget_unsettled(&mut self) {
        self.unsettled = KeyMap::default();
    }
}

impl Contents {
    /// Notes that an entry in segment `now` gives a block a payload in segment `old`, at position
    /// `index`. Does nothing if both are the same segment, since the footer will name the block.
    pub fn note_sharer(&mut self, key: Key, index: usize, old: SegmentSeq, now: SegmentSeq) {
        let seq = self.segments[index].seq;
        assert_eq!(seq, old, "a segment stays until what rests on it is in the log");
        if old != now {
            self.sharing.sharers[index].push(key);
            self.sharing.count += 1;
        }
    }

    /// The blocks to which later segments have given a payload in the segment at a position.
    pub fn sharers_in(&self, index: usize) -> &[Key] {
        &self.sharing.sharers[index]
    }

    /// Forgets these blocks.
    pub fn drop_sharers(&mut self, index: usize) {
        let sharers = std::mem::take(&mut self.sharing.sharers[index]);
        self.sharing.count -= sharers.len() as u64;
    }

    /// The number of these blocks in all segments.
    pub fn sharers(&self) -> u64 {
        self.sharing.count
    }

    /// Whether the count matches the lists.
    pub(super) fn sharers_add_up(&self) -> bool {
        let all: usize = self.sharing.sharers.iter().map(Vec::len).sum();
        self.sharing.count == all as u64
    }

    /// Notes that a block shares a payload from this record on.
    pub fn note_unsettled(&mut self, key: Key, lsn: Lsn) {
        self.sharing.unsettled.insert(key, lsn);
    }

    /// Notes that every record up to `lsn` is durable.
    pub fn settle(&mut self, lsn: Lsn) {
        self.sharing.unsettled.retain(|_, at| *at > lsn);
    }

    /// The record that must be durable before the block may be destaged, in addition to the one
    /// that holds its payload.
    pub fn unsettled(&self, key: Key) -> Option<Lsn> {
        self.sharing.unsettled.get(&key).copied()
    }
}
