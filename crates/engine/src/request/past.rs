//! Writes past the log: the primary changes once the log says, durably, that the blocks are not
//! cached.

use forebay_block::{
    BLOCK_SIZE, ByteRange, Completion, ErrorKind, Instant, Io, IoBuf, IoFlags, IoOp, IoTag,
};
use forebay_format::EntryKind;

use crate::api::primary::is_away;
use crate::api::{Effects, Health, Target};
use crate::cache::Cache;
use crate::key::Key;
use crate::limits::INVALIDATED_MAX;
use crate::log::builder::Expect;
use crate::request::Requests;
use crate::request::merge::{BlockBytes, block_bytes};
use crate::request::op::{Path, Stage};
use crate::slab::Id;
use crate::ticket::Ticket;

impl Requests {
    /// Sends a write past the log, once the log says that its blocks are not cached.
    pub fn go_past(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        write.path = Path::Direct;
        let (volume, blocks, keys) = (write.volume, write.blocks, write.keys());
        // After a crash, a block that reclaim evicted is gone only if its segment is gone too, and
        // one that left the store only if an entry says so. Until then the log must invalidate it,
        // or an old version would come back. While the log is being loaded, any block may have an
        // entry.
        let contents = &cache.contents;
        let mut cached =
            cache.log.has_evicted() || contents.has_unlogged() || contents.is_loading();
        for key in keys {
            cache.ram.remove(key);
            cached |= cache.contents.get(key).is_some();
        }
        // An admission that waits in the builder must not outlive the write.
        cached |= cache.log.builder().admits(Key::new(volume, blocks.first), blocks.count);
        if cached && cache.health() == Health::Good {
            cache.log.queue().push_back(id);
        } else {
            self.after_invalidation(cache, id, fx);
        }
    }

    /// Logs that the blocks of a direct write are no longer in the cache.
    pub(super) fn log_invalidation(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) -> bool {
        let write = self.write(id);
        let (volume, blocks) = (write.volume, write.blocks);
        let key = Key::new(volume, blocks.first);
        let count = u32::try_from(blocks.count).expect("a request lies in one stripe");
        // All of them leave the cache when the record is closed, which happens in this turn, or
        // when another one has been written.
        let builder = cache.log.builder();
        if !builder.is_empty() && builder.blocks() + blocks.count > INVALIDATED_MAX {
            return false;
        }
        if !cache.push_bare(fx, key, count, EntryKind::Invalidate, false, Expect::Always) {
            return false;
        }
        self.write(id).logged = blocks.count;
        self.wait_for_builder(cache, id, true);
        true
    }

    /// Continues a direct write whose invalidation is in the log or not needed. Once it is durable,
    /// so is every earlier entry that removed blocks from the cache, and the primary may change.
    pub(super) fn after_invalidation(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        let key = Key::new(write.volume, write.blocks.first);
        if cache.health() != Health::Good {
            return match cache.is_detached(key) {
                true => self.send_direct(cache, id, fx),
                false => self.wait_detached(cache, id, fx),
            };
        }
        let write = self.write(id);
        write.stage = Stage::Durable;
        let lsn = write.lsn.max(cache.log.barrier());
        if cache.log.wait_durable(id, lsn) {
            self.write_durable(cache, id, fx);
        }
    }

    /// Sends a direct write, write-zeroes or discard to the primary.
    pub(super) fn send_direct(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        write.stage = Stage::Primary;
        let (volume, op, blocks) = (write.volume, write.op, write.blocks);
        if op == IoOp::Discard && write.keys().any(|key| cache.contents.dirty().is_destaging(key)) {
            // These destages started while the discard waited for the log.
            return self.on_primary(cache, id, Ok(()), fx);
        }
        // A flush inside a write would bypass the flush gate, which reports a failure to every
        // shard.
        let flags = IoFlags { fua: false, ..write.flags };
        let range = match op == IoOp::Discard || write.is_merged() {
            true => cache.bytes_on_volume(volume, blocks),
            false => write.range,
        };
        let (op, buf) = match write.is_merged() {
            true => (IoOp::Write, self.merged_buffer(cache, id, range)),
            false => (op, std::mem::take(&mut write.buf)),
        };
        cache.note_foreground();
        cache.volume_mut(volume).flow.pacer.begin_foreground();
        let io = |tag: IoTag| Io { tag, op, range, flags, buf };
        cache.send(fx, Target::Primary(volume), Ticket::Direct(id), io);
    }

    /// All bytes of a direct write whose edges were read, in whole blocks.
    fn merged_buffer(&mut self, cache: &Cache, id: Id, range: ByteRange) -> IoBuf {
        let mut out = cache.config.buffers.get(range.len as usize);
        let write = self.write(id);
        for (i, block) in write.blocks.iter().enumerate() {
            let start = i * BLOCK_SIZE;
            let end = (start + BLOCK_SIZE).min(out.len());
            let part = &mut out[start..end];
            match block_bytes(write, &write.buf, &write.edges, block) {
                BlockBytes::Zero => part.fill(0),
                BlockBytes::Whole(bytes) => part.copy_from_slice(&bytes[..part.len()]),
                BlockBytes::Short(bytes) => part.copy_from_slice(&bytes[..part.len()]),
            }
        }
        out
    }

    /// Handles the end of a direct change of the primary.
    pub fn direct_done(
        &mut self,
        cache: &mut Cache,
        id: Id,
        sent: Instant,
        done: Completion,
        fx: &mut Effects,
    ) {
        cache.note_foreground();
        let now = cache.now;
        let write = self.write(id);
        let (volume, op) = (write.volume, write.op);
        if !write.is_merged() {
            write.buf = done.buf;
        }
        let state = cache.volume_mut(volume);
        state.flow.pacer.end_foreground(now, now.since(sent));
        let away = done.result.as_ref().is_err_and(|error| is_away(error.kind()));
        if away && op != IoOp::Discard && cache.may_stand_in(volume) {
            return self.turn_to_cache(cache, id, fx);
        }
        let state = cache.volume_mut(volume);
        state.direct += 1;
        // A discarded range may contain older data in any case.
        let known = (op != IoOp::Discard).then_some(state.flush_failures);
        self.write(id).direct = known;
        let result = match done.result {
            Err(error) if op == IoOp::Discard && error.kind() == ErrorKind::Unsupported => Ok(()),
            other => other,
        };
        self.on_primary(cache, id, result, fx);
    }

    /// Starts a write that was to go past the cache over as one of the cache, since the primary is
    /// away or a block is dirty. The blocks become dirty, so whatever the primary did with the
    /// write will be overwritten. They stay locked: the old content of the edges would otherwise
    /// undo another write.
    pub(super) fn turn_to_cache(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        let (volume, blocks) = (write.volume, write.blocks);
        (write.stage, write.bypass, write.logged) = (Stage::Throttled, None, 0);
        write.keys().for_each(|key| cache.policy.written(key.0));
        if !Self::hold_back(cache, id, volume, blocks) {
            self.lock_blocks(cache, id, fx);
        }
    }
}
