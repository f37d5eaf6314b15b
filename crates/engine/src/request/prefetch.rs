//! Prefetches: blocks come into the cache that no client has asked for yet.
//!
//! They go from the primary straight to the log, past RAM and past the policy. What is cached
//! already is left alone.

use forebay_block::{BlockRange, ErrorKind, IoBuf, VolumeId};

use crate::api::{Effects, Request, Tier};
use crate::cache::Cache;
use crate::key::Key;
use crate::request::fetch::Admit;
use crate::request::op::{Op, ReadOp, ReadOwner};
use crate::request::{Requests, reply};
use crate::slab::Id;

/// Most blocks that are read from the primary at once.
const RUN_MAX: u64 = 64;

impl Requests {
    /// Whether an operation only brings blocks into the cache.
    pub(super) fn is_prefetch(&self, op: Id) -> bool {
        matches!(self.ops.get(op), Op::Read(ReadOp { owner: ReadOwner::Prefetch(_), .. }))
    }

    /// Takes a request to bring blocks into the cache. Fails with `NoSpace` if some of them have no
    /// room now or may not enter, and with `Unsupported` if the volume's mode lets none in. While
    /// none may enter, nothing is read for it.
    pub fn submit_prefetch(&mut self, cache: &mut Cache, request: Request, fx: &mut Effects) {
        let Request { id, volume, range, buf, .. } = request;
        if !cache.admits_reads(volume) {
            return reply(fx, id, Err(ErrorKind::Unsupported.into()), buf, None);
        }
        let blocks = range.blocks();
        let is_missing = |block| Self::is_missing(cache, Key::new(volume, block));
        if blocks.iter().any(is_missing) && !cache.may_prefetch(volume) {
            return reply(fx, id, Err(ErrorKind::NoSpace.into()), buf, None);
        }
        let op = self.ops.insert(Op::Read(ReadOp {
            owner: ReadOwner::Prefetch(id),
            range: blocks.bytes(),
            buf: IoBuf::empty(),
            parts: 1,
            error: None,
            admit: Admit::Always,
            quiet: true,
            tier: Tier::Ram,
        }));
        self.fetch_uncached(cache, op, volume, blocks, fx);
        self.part_done(cache, op, Ok(()), fx);
    }

    /// Whether a block is neither cached nor on its way into the cache.
    fn is_missing(cache: &Cache, key: Key) -> bool {
        cache.contents.get(key).is_none()
            && !cache.ram.contains(key)
            && !cache.store.is_entering(key)
            && !cache.log.builder_ref().admits(key, 1)
    }

    /// Reads the blocks from the primary that are not cached yet.
    pub(super) fn fetch_uncached(
        &mut self,
        cache: &mut Cache,
        op: Id,
        volume: VolumeId,
        blocks: BlockRange,
        fx: &mut Effects,
    ) {
        let mut missing = BlockRange::default();
        for block in blocks.iter() {
            let is_missing = Self::is_missing(cache, Key::new(volume, block));
            if !is_missing || missing.count == RUN_MAX {
                self.fetch_missing(cache, op, volume, missing, fx);
                missing = BlockRange::default();
            }
            if is_missing {
                missing.first = if missing.count == 0 { block } else { missing.first };
                missing.count += 1;
            }
        }
        self.fetch_missing(cache, op, volume, missing, fx);
    }
}
