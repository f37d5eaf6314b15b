//! Payloads that several blocks share, or that a block is stored against: in the index such a block
//! has another one's place, or a base there.
//!
//! When a segment is reclaimed, its footer names the blocks written in it. Those to which a later
//! segment gave a payload in it are listed here, and found again by recovery. Such a block's place
//! may be durable before its entry is: until then the block is *unsettled*, and nothing may be
//! written to the primary.

use forebay_format::{Lsn, SegmentSeq};

use crate::contents::Contents;
use crate::key::{Key, KeyMap};

/// Which payloads have further users.
#[derive(Debug)]
pub(super) struct Sharing {
    /// By the position of the segment: blocks to which a later segment has given a payload that
    /// lies in it, unless they have got another since.
    sharers: Vec<Vec<Key>>,
    /// The number of all of them.
    count: u64,
    /// Blocks whose entry is not durable although its payload may be, and that entry's record.
    unsettled: KeyMap<Lsn>,
}

impl Sharing {
    pub fn new(segments: usize) -> Self {
        Self { sharers: vec![Vec::new(); segments], count: 0, unsettled: KeyMap::default() }
    }
}

impl Contents {
    /// Notes, unless the footer will, that an entry in segment `now` gives a block a payload in
    /// segment `old`, at position `index`.
    pub fn note_sharer(&mut self, key: Key, index: usize, old: SegmentSeq, now: SegmentSeq) {
        let seq = self.segments[index].seq;
        assert_eq!(seq, old, "a segment stays until what rests on it is in the log");
        if old != now {
            self.sharing.sharers[index].push(key);
            self.sharing.count += 1;
        }
    }

    /// Blocks to which later segments have given a payload in the segment at a position.
    pub fn sharers_in(&self, index: usize) -> &[Key] {
        &self.sharing.sharers[index]
    }

    /// Forgets them.
    pub fn drop_sharers(&mut self, index: usize) {
        let sharers = std::mem::take(&mut self.sharing.sharers[index]);
        self.sharing.count -= sharers.len() as u64;
    }

    /// The number of these in all segments.
    pub fn sharers(&self) -> u64 {
        self.sharing.count
    }

    /// Whether their number is right.
    pub(super) fn sharers_add_up(&self) -> bool {
        let all: usize = self.sharing.sharers.iter().map(Vec::len).sum();
        self.sharing.count == all as u64
    }

    /// A block shares a payload from this record on.
    pub fn note_unsettled(&mut self, key: Key, lsn: Lsn) {
        self.sharing.unsettled.insert(key, lsn);
    }

    /// Every record up to `lsn` is durable.
    pub fn settle(&mut self, lsn: Lsn) {
        self.sharing.unsettled.retain(|_, at| *at > lsn);
    }

    /// The record that has to be durable before the block may be destaged, beside the one that its
    /// payload lies in.
    pub fn unsettled(&self, key: Key) -> Option<Lsn> {
        self.sharing.unsettled.get(&key).copied()
    }
}
