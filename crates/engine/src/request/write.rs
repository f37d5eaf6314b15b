//! Writes, write-zeroes and discards: from the client to the log, or past it.
//!
//! A write passes through these stages: it is held back if the dirty limit is near; its blocks are
//! locked; the old content of partly covered blocks is read. Then it goes to the log (`write-back`,
//! `write-only`), to the log and then the primary (`write-through`), or to the primary alone once
//! the log durably says that the blocks are no longer cached (`write-around`, `pass-through`,
//! bypass). A dirty block always goes to the log, so that recovery finds the newest version; in
//! every mode except `write-back` and `write-only` that write also waits for the primary.
//!
//! A lock is held from before the old content is read until the index has the new version, or the
//! primary has it. So data read from a primary or the cache device while a block is locked is never
//! kept.

use std::time::Duration;

use forebay_block::{
    BLOCK_SIZE, BlockRange, ByteRange, IoBuf, IoError, IoOp, IoResult, SECTOR_SIZE, VolumeId,
};
use forebay_format::{EntryKind, Lsn};
use forebay_policy::Standing;

use crate::api::{Bypass, Effects, Health, Mode, Reply, Request, Tier};
use crate::cache::Cache;
use crate::key::Key;
use crate::limits::{ZEROES_DIRECT_BLOCKS, step};
use crate::log::builder::Expect;
use crate::note::Note;
use crate::request::merge::{BlockBytes, block_bytes};
use crate::request::op::{Op, Path, ReadOwner, Stage, WriteOp};
use crate::request::{Requests, reply};
use crate::slab::Id;

/// Limit on the writes that go on at once after one that held their blocks.
const FOLLOWERS_MAX: usize = step(1024);
/// CPU time per turn of the event loop for making the blocks of writes dense. The rest of a long
/// write follows in the next turn, so that other requests need not wait for all of it.
const WRITES_TURN: Duration = Duration::from_micros(200);

impl Requests {
    /// Takes a client's write, write-zeroes or discard.
    pub fn submit_write(&mut self, cache: &mut Cache, request: Request, fx: &mut Effects) {
        let Request { id, volume, op, range, flags, buf, bypass } = request;
        match op {
            IoOp::Discard => cache.stats_of(volume).discards += 1,
            _ => {
                let stats = cache.stats_of(volume);
                stats.writes += 1;
                stats.write_bytes += range.len;
                // While clients write, dirty blocks may be rewritten or get dirty neighbors.
                cache.note_foreground();
            }
        }
        let blocks = if op == IoOp::Discard {
            Self::whole_blocks(cache, volume, range)
        } else {
            range.blocks()
        };
        let ordered = cache.is_ordered(volume);
        let discards = cache.volume(volume).config.discard && !ordered;
        if blocks.count == 0 || op == IoOp::Discard && !discards {
            reply(fx, id, Ok(()), buf, None);
            return;
        }
        // What goes past the log is out of order.
        let bypass = bypass.filter(|_| !ordered);
        let streams = op == IoOp::Write && bypass == Some(Bypass::Sequential);
        let stays = streams && cache.has_pinned(volume, blocks);
        let bypass =
            bypass.filter(|_| !streams || !stays && !Self::is_rewritten(cache, volume, blocks));
        let mode = cache.volume(volume).config.mode;
        let write = self.ops.insert(Op::Write(WriteOp {
            id,
            volume,
            op,
            flags,
            range,
            buf,
            edges: [None, None],
            bypass,
            blocks,
            locked: 0,
            logged: 0,
            outstanding: 0,
            lsn: Lsn(0),
            stage: Stage::Throttled,
            path: Path::Cached,
            through: mode.is_complete(),
            direct: None,
            failed_flushes: 0,
            error: None,
            tier: Tier::Cache,
        }));
        let dirties = op != IoOp::Discard
            && bypass.is_none()
            && !matches!(mode, Mode::WriteAround | Mode::PassThrough);
        if dirties {
            blocks.iter().for_each(|block| cache.policy.written(Key::new(volume, block).0));
        }
        if dirties
            && cache.health() == Health::Good
            && Self::hold_back(cache, write, volume, blocks)
        {
            return;
        }
        self.lock_blocks(cache, write, fx);
    }

    /// Whether a write that looks like part of a stream rewrites the same place again and again, as
    /// a database does with its log and doublewrite buffer: bypassing would write to the primary
    /// each time. One block per request is counted, so a real stream hardly disturbs the policy.
    fn is_rewritten(cache: &mut Cache, volume: VolumeId, blocks: BlockRange) -> bool {
        let first = Key::new(volume, blocks.first).0;
        cache.policy.asked(first);
        cache.policy.is_frequent(first)
    }

    /// The whole blocks inside a range; the short last block of a volume counts as whole.
    fn whole_blocks(cache: &Cache, volume: VolumeId, range: ByteRange) -> BlockRange {
        let block = BLOCK_SIZE as u64;
        let first = range.offset.div_ceil(block);
        let to_end = range.end() == cache.volume(volume).config.size;
        let end = if to_end { range.end().div_ceil(block) } else { range.end() / block };
        BlockRange { first, count: end.saturating_sub(first) }
    }

    pub(crate) fn write(&mut self, id: Id) -> &mut WriteOp {
        match self.ops.get_mut(id) {
            Op::Write(write) => write,
            _ => unreachable!("a write's id names a write"),
        }
    }

    /// Locks the remaining blocks in ascending order; stops at one that another operation holds.
    pub fn lock_blocks(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        write.stage = Stage::Locking;
        let (volume, blocks, mut locked) = (write.volume, write.blocks, write.locked);
        while locked < blocks.count {
            let key = Key::new(volume, blocks.first + locked);
            // Counted immediately: the holder's release hands the lock over.
            locked += 1;
            self.write(id).locked = locked;
            let free = cache.locks.acquire(key, id);
            self.spoil_fetch(key);
            cache.store.spoil(key);
            if !free {
                return;
            }
        }
        self.choose_path(cache, id, fx);
    }

    /// Makes a write wait until its stripe is detached. A write that is already in the log is
    /// complete then; any other starts over.
    pub fn wait_detached(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        let placed =
            write.path == Path::Cached && matches!(write.stage, Stage::Logged | Stage::Durable);
        write.stage = if placed { Stage::Leaving } else { Stage::Anew };
        write.outstanding = 0;
        let key = Key::new(write.volume, write.blocks.first);
        if !placed {
            write.logged = 0;
            write.edges = [None, None];
        }
        cache.out.note(Note::WaitDetached(key, id));
        if !placed {
            self.unlock_blocks(cache, id, fx);
        }
    }

    pub fn unlock_blocks(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        let (volume, blocks, locked) = (write.volume, write.blocks, write.locked);
        write.locked = 0;
        for block in blocks.first..blocks.first + locked {
            let key = Key::new(volume, block);
            if let Some(next) = cache.locks.release(key, id) {
                self.spoil_fetch(key);
                self.unlocked.push_back(next);
            }
        }
        // Whoever goes on may end at once and unlock more: that is not nested, however many wait.
        if !self.follows {
            self.follow_unlocked(cache, fx);
        }
    }

    /// Lets writes go on that have got the lock they waited for; those that are too many for a turn
    /// go on in the next.
    pub fn follow_unlocked(&mut self, cache: &mut Cache, fx: &mut Effects) {
        self.follows = true;
        for _ in 0..FOLLOWERS_MAX {
            let Some(next) = self.unlocked.pop_front() else { break };
            self.lock_blocks(cache, next, fx);
        }
        self.follows = false;
    }

    /// Whether writes have got a lock and have not gone on.
    pub fn has_unlocked(&self) -> bool {
        !self.unlocked.is_empty()
    }

    /// Chooses the path of a write, now that no other operation can change its blocks.
    fn choose_path(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        let (volume, op, blocks, bypass) = (write.volume, write.op, write.blocks, write.bypass);
        let keys = write.keys();
        let dirty = keys.clone().any(|key| cache.contents.dirty().is_unsettled(key));
        if cache.health() == Health::Draining {
            if op == IoOp::Discard {
                // A discard may leave the old bytes.
                return self.end_write(cache, id, Ok(()), fx);
            }
            let destaging = keys.clone().any(|key| cache.contents.dirty().is_destaging(key));
            if destaging || !cache.is_detached(Key::new(volume, blocks.first)) {
                return self.wait_detached(cache, id, fx);
            }
        }
        let mode = cache.volume(volume).config.mode;
        let stands_in = cache.may_stand_in(volume) && cache.is_stuck(volume);
        let direct = match op {
            IoOp::Discard => true,
            _ if cache.health() != Health::Good => true,
            _ if dirty || stands_in => false,
            IoOp::WriteZeroes if blocks.count >= ZEROES_DIRECT_BLOCKS => !cache.is_ordered(volume),
            _ => bypass.is_some() || matches!(mode, Mode::WriteAround | Mode::PassThrough),
        };
        if op == IoOp::Discard && keys.clone().any(|key| cache.contents.dirty().is_destaging(key)) {
            // Old bytes are on their way to the primary; a discard may leave them.
            return self.end_write(cache, id, Ok(()), fx);
        }
        if direct && op != IoOp::Discard {
            let why = match (cache.health(), bypass) {
                (Health::Draining | Health::Detached, _) => Some(Bypass::Degraded),
                (_, None) if matches!(mode, Mode::WriteAround | Mode::PassThrough) => {
                    Some(Bypass::Mode)
                }
                // Long zeroes go to the primary in every mode.
                (_, why) => why,
            };
            if let Some(why) = why {
                cache.stats_of(volume).bypassed_by[why as usize] += 1;
            }
        }
        if !direct && bypass.is_some() {
            // It was not held back, since it was to go past the cache.
            return self.turn_to_cache(cache, id, fx);
        }
        self.write(id).path = if direct { Path::Direct } else { Path::Cached };
        // The primary's bytes of a kept block are not its content, so whole blocks are written.
        let by_sector = direct && !self.restores(cache, id);
        let unit = if by_sector { SECTOR_SIZE } else { BLOCK_SIZE } as u64;
        self.merge_edges(cache, id, unit, fx);
    }

    /// Reads the old content of the first and the last block where the write covers them in part.
    fn merge_edges(&mut self, cache: &mut Cache, id: Id, unit: u64, fx: &mut Effects) {
        let write = self.write(id);
        let (volume, op, range, blocks) = (write.volume, write.op, write.range, write.blocks);
        let size = cache.volume(volume).config.size;
        let aligned = |unit: u64| {
            (
                range.offset.is_multiple_of(unit),
                range.end().is_multiple_of(unit) || range.end() == size,
            )
        };
        // If one edge has to be merged, whole blocks are written, so both edges have to be merged.
        let unit = if aligned(unit) == (true, true) { unit } else { BLOCK_SIZE as u64 };
        let (head, tail) = aligned(unit);
        let (head, tail) = (!head, !tail);
        let first = Key::new(volume, blocks.first);
        let last = Key::new(volume, blocks.end() - 1);
        let write = self.write(id);
        if op == IoOp::Discard || !(head || tail) || write.is_merged() {
            return self.merged(cache, id, fx);
        }
        write.stage = Stage::Merging;
        let both = head && tail && first != last;
        write.outstanding = if both { 2 } else { 1 };
        if head {
            self.read_for_merge(cache, ReadOwner::Merge(id, true), first, fx);
        }
        if tail && (both || !head) {
            self.read_for_merge(cache, ReadOwner::Merge(id, false), last, fx);
        }
    }

    /// The old content of an edge has arrived.
    pub fn merge_read(
        &mut self,
        cache: &mut Cache,
        id: Id,
        first: bool,
        result: Result<(), IoError>,
        buf: IoBuf,
        fx: &mut Effects,
    ) {
        let write = self.write(id);
        write.outstanding -= 1;
        match result {
            Ok(()) => write.edges[usize::from(!first)] = Some(buf),
            Err(error) => {
                write.error.get_or_insert(error);
            }
        }
        if write.outstanding == 0 {
            match write.error.take() {
                Some(error) => self.end_write(cache, id, Err(error), fx),
                None => self.merged(cache, id, fx),
            }
        }
    }

    /// Sends a write whose data is complete to the log or to the primary.
    fn merged(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        write.merge();
        let (volume, blocks, path) = (write.volume, write.blocks, write.path);
        write.stage = Stage::Logging;
        match (path, cache.health()) {
            (Path::Cached, Health::Good) => return cache.log.queue().push_back(id),
            (_, Health::Draining) if !cache.is_detached(Key::new(volume, blocks.first)) => {
                return self.wait_detached(cache, id, fx);
            }
            _ => {}
        }
        self.go_past(cache, id, fx);
    }

    /// Puts as much of an operation into the record being built as fits and as this turn has time
    /// for; returns true if all of it is in.
    pub fn log_op(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) -> bool {
        let write = self.write(id);
        if write.path == Path::Direct {
            return self.log_invalidation(cache, id, fx);
        }
        let (volume, blocks) = (write.volume, write.blocks);
        let mut next = cache.log.next_lsn();
        while self.write(id).logged < blocks.count {
            // The records that it has filled may have taken the room. What is in the record being
            // built must never need the reserve.
            let lsn = cache.log.next_lsn();
            if lsn != next && !self.has_room(cache, id) {
                return false;
            }
            next = lsn;
            if cache.form.background().in_turn() >= WRITES_TURN || self.has_logged_enough() {
                return false;
            }
            let write = self.write(id);
            let block = blocks.first + write.logged;
            let key = Key::new(volume, block);
            let data = std::mem::take(&mut write.buf);
            let edges = std::mem::take(&mut write.edges);
            let bytes = block_bytes(self.write(id), &data, &edges, block);
            cache.make_way(key, fx);
            let room = match &bytes {
                BlockBytes::Zero => {
                    cache.push_bare(fx, key, 1, EntryKind::Zero, true, Expect::Always)
                }
                BlockBytes::Whole(bytes) => cache.push_written(fx, key, bytes),
                BlockBytes::Short(bytes) => cache.push_written(fx, key, &bytes[..]),
            };
            if room {
                match &bytes {
                    BlockBytes::Zero => cache.ram.put(key, &[0; BLOCK_SIZE], Standing::Doubled),
                    BlockBytes::Whole(bytes) => cache.ram.put(key, bytes, Standing::Doubled),
                    BlockBytes::Short(bytes) => cache.ram.put(key, &bytes[..], Standing::Doubled),
                }
            }
            let write = self.write(id);
            write.buf = data;
            write.edges = edges;
            if !room {
                return false;
            }
            write.logged += 1;
            let complete = write.logged == blocks.count;
            self.logged += 1;
            self.wait_for_builder(cache, id, complete);
        }
        true
    }

    /// Notes that `op` waits for the record being built, and whether this is its last record.
    pub(super) fn wait_for_builder(&mut self, cache: &mut Cache, op: Id, complete: bool) {
        if cache.log.builder().add_waiter(op)
            && let Op::Write(write) = self.get_mut(op)
        {
            write.outstanding += 1;
        }
        if complete {
            cache.log.builder().complete.push(op);
        }
    }

    /// Handles the placing of the last record of a write: the index now has all of the write.
    pub fn write_applied(&mut self, cache: &mut Cache, id: Id, lsn: Lsn, fx: &mut Effects) {
        let write = self.write(id);
        debug_assert_eq!(write.stage, Stage::Logging);
        write.lsn = lsn;
        write.stage = Stage::Logged;
        if write.path == Path::Cached {
            self.unlock_blocks(cache, id, fx);
        }
    }

    /// Continues a write after one of its records has been written, if that was the last one.
    pub fn advance_write(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        if write.outstanding > 0 || write.stage != Stage::Logged {
            return;
        }
        if let Some(error) = write.error.take() {
            return self.end_write(cache, id, Err(error), fx);
        }
        let (lsn, path, fua) = (write.lsn, write.path, write.flags.fua);
        let waits = self.goes_through(cache, id) || fua;
        if path == Path::Direct {
            return self.after_invalidation(cache, id, fx);
        }
        if !waits {
            return self.end_write(cache, id, Ok(()), fx);
        }
        self.write(id).stage = Stage::Durable;
        if cache.log.wait_durable(id, lsn) {
            self.write_durable(cache, id, fx);
        }
    }

    /// Whether a write waits for the primary, by the mode set now: a mode switch notes the blocks
    /// that are dirty at that moment, but not the writes in flight.
    fn goes_through(&mut self, cache: &Cache, id: Id) -> bool {
        let volume = self.write(id).volume;
        let complete = cache.volume(volume).config.mode.is_complete();
        let write = self.write(id);
        write.through |= complete;
        write.through
    }

    /// Continues a write whose records are durable.
    pub fn write_durable(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        if write.path == Path::Direct {
            return self.send_direct(cache, id, fx);
        }
        if !self.goes_through(cache, id) {
            let volume = self.write(id).volume;
            let order = &mut cache.volume_mut(volume).order;
            if order.withholds.is_some() {
                return order.withheld.push(id);
            }
            return self.end_write(cache, id, Ok(()), fx);
        }
        let write = self.write(id);
        write.stage = Stage::Primary;
        write.failed_flushes = cache.volume(write.volume).failed_flushes;
        let keys = write.keys();
        let mut outstanding = 0;
        for key in keys {
            if cache.contents.dirty().contains(key) {
                outstanding += 1;
                cache.out.note(Note::WaitPrimary(key, id));
            }
        }
        self.write(id).outstanding = outstanding;
        if outstanding == 0 {
            self.through_done(cache, id, fx);
        }
    }

    /// Notes that the primary has a block of a write-through write, or could not write it.
    pub fn through_part_done(
        &mut self,
        cache: &mut Cache,
        id: Id,
        result: &Result<(), IoError>,
        fx: &mut Effects,
    ) {
        let write = self.write(id);
        write.outstanding -= 1;
        if let Err(error) = result {
            write.error.get_or_insert(error.clone());
        }
        if write.outstanding == 0 {
            self.through_done(cache, id, fx);
        }
    }

    fn through_done(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        let error = write.error.take();
        // A flush that failed since may have lost the first blocks while the last were on their
        // way. What it lost is dirty still.
        let lost = write.failed_flushes != cache.volume(write.volume).failed_flushes;
        if error.is_none() && write.flags.fua && lost {
            return self.write_durable(cache, id, fx);
        }
        self.on_primary(cache, id, error.map_or(Ok(()), Err), fx);
    }

    /// Ends a write that the primary has, or could not write; with FUA, waits for a flush first.
    pub(super) fn on_primary(
        &mut self,
        cache: &mut Cache,
        id: Id,
        result: IoResult<()>,
        fx: &mut Effects,
    ) {
        let write = self.write(id);
        let (volume, fua) = (write.volume, write.flags.fua);
        let restores = self.restores(cache, id);
        if result.is_err() || !fua && !restores {
            return self.end_write(cache, id, result, fx);
        }
        if !restores {
            // Operations that wait for the blocks need not wait for the flush.
            self.unlock_blocks(cache, id, fx);
        }
        cache.volume_mut(volume).fua_waiters.push(id);
    }

    /// Whether a write touches kept blocks, which stay kept until a new record of their stripe.
    pub(super) fn restores(&self, cache: &Cache, id: Id) -> bool {
        if cache.health() != Health::Draining {
            return false;
        }
        let Op::Write(write) = self.get(id) else { return false };
        write.keys().any(|key| cache.left.keeps(key))
    }

    /// Handles the end of the flush after a write.
    pub fn write_flushed(
        &mut self,
        cache: &mut Cache,
        id: Id,
        result: IoResult<()>,
        fx: &mut Effects,
    ) {
        if result.is_ok() {
            // No later failure can lose it.
            self.write(id).direct = None;
            if self.restores(cache, id) {
                return cache.out.note(Note::Restore(id));
            }
        }
        self.end_write(cache, id, result, fx);
    }

    /// Answers a write and unblocks the operations that wait for its blocks.
    pub fn end_write(
        &mut self,
        cache: &mut Cache,
        id: Id,
        result: Result<(), IoError>,
        fx: &mut Effects,
    ) {
        self.unlock_blocks(cache, id, fx);
        let Op::Write(write) = self.ops.remove(id) else {
            unreachable!("a write's id names a write");
        };
        let on_primary = write.through || write.path == Path::Direct;
        let tier = if on_primary { Tier::Primary } else { write.tier };
        let tier = (write.op == IoOp::Write).then_some(tier);
        let WriteOp { id, buf, direct, .. } = write;
        fx.replies.push(Reply { id, result, buf, direct, tier });
    }
}

#[cfg(test)]
mod tests;
