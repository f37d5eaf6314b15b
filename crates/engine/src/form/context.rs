//! The other rooms that storing a block needs.

use forebay_block::Instant;
use forebay_format::{EntryKind, SegmentSeq};

use crate::api::ShardConfig;
use crate::api::stats::Stats;
use crate::contents::{Contents, IN_STORE};
use crate::key::Key;
use crate::limits::{BASES_SHARE, SHARERS_ONE_IN, SIMILAR_SHARE};
use crate::locks::Locks;
use crate::log::Log;
use crate::log::builder::Against;
use crate::ram::Ram;

/// The other rooms, as far as storing a block needs them.
pub struct Context<'a> {
    pub now: Instant,
    pub config: &'a ShardConfig,
    pub contents: &'a Contents,
    pub ram: &'a mut Ram,
    pub log: &'a mut Log,
    pub locks: &'a Locks,
    pub stats: &'a mut Stats,
}

impl Context<'_> {
    /// Applies `look` to a block's newest applied bytes, if RAM has them.
    pub fn peek<T>(&self, key: Key, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        self.ram.peek_applied(self.locks, key, look)
    }

    /// Whether a segment is far enough from being reclaimed for other blocks to rest on it.
    pub fn is_young(&self, seq: SegmentSeq) -> bool {
        let (all, age) = (self.log.len(), self.log.age(seq));
        self.log.leaving() != Some(seq) && age < all - all / BASES_SHARE
    }

    /// Whether an entry in the open segment can name a payload in segment `seq`: the distance fits
    /// 16 bits.
    pub fn is_near(&self, seq: SegmentSeq) -> bool {
        seq != IN_STORE && self.log.age(seq) < u64::from(u16::MAX)
    }

    /// Whether another block may use payloads in the segment at a position, which is not the open
    /// one. Reclaim of the segment may have to write each of these blocks whole.
    pub fn takes_sharer(&self, segment: u32) -> bool {
        let most = u64::from(self.config.segment_size / SHARERS_ONE_IN);
        (self.contents.sharers_in(segment as usize).len() as u64) < most
    }

    /// The number of blocks that are stored against similar ones.
    pub fn similar_blocks(&self) -> u64 {
        self.contents.stored(EntryKind::Similar)
    }

    /// Whether another block may be stored against this payload.
    pub fn may_rest_on(&self, base: &Against) -> bool {
        let most = self.contents.index().capacity() / SIMILAR_SHARE;
        self.log.seq_of(&base.place) == base.seq
            && self.log.is_after_oldest(base.seq)
            && self.is_young(base.seq)
            && self.is_near(base.seq)
            && self.takes_sharer(base.place.segment)
            && self.similar_blocks().max(self.contents.sharers()) < most
    }
}
