//! Writes, write-zeroes and discards: from the client to the log, or past it.
//!
//! The way of a write: held back if the dirty limit is near; locks on its blocks; the old content
//! of blocks it covers in part; then the log (`write-back`, `write-only`), the log and after it
//! the primary (`write-through`), or the primary alone once the log says durably that the blocks
//! are not cached any more (`write-around`, `pass-through`, bypass). A block that is dirty always
//! goes to the log, whatever the mode: then the newest version is found after a crash. In every
//! mode but `write-back` and `write-only` such a write, too, waits for the primary.
//!
//! A lock is held from before the old content is read until the index has the new version, or
//! the primary has it. So what is read from a primary or the cache device while a block is locked
//! is never kept.

use std::time::Duration;

use forebay_block::{
    BLOCK_SIZE, BlockRange, ByteRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoFlags,
    IoOp, IoResult, IoTag, SECTOR_SIZE, VolumeId,
};
use forebay_format::{EntryKind, Lsn};

use crate::api::{Bypass, Effects, Health, Mode, Reply, Request, Target};
use crate::cache::Cache;
use crate::key::Key;
use crate::limits::ZEROES_DIRECT_BLOCKS;
use crate::log::builder::Expect;
use crate::note::Note;
use crate::request::merge::{BlockBytes, block_bytes};
use crate::request::op::{Op, Path, ReadOwner, Stage, WriteOp};
use crate::request::{Requests, reply};
use crate::slab::Id;
use crate::ticket::Ticket;

/// Time in a turn of the event loop for making the blocks of writes shorter; the rest of a long
/// write follows in the next turn, so that others need not wait for all of it.
const WRITES_TURN: Duration = Duration::from_micros(200);

impl Requests {
    /// Takes a client's write, write-zeroes or discard.
    pub fn submit_write(&mut self, cache: &mut Cache, request: Request, fx: &mut Effects) {
        let Request { id, volume, op, range, flags, buf, bypass } = request;
        match op {
            IoOp::Discard => cache.stats.discards += 1,
            _ => {
                cache.stats.writes += 1;
                // While clients write, what is dirty may be rewritten or get neighbours.
                cache.note_foreground();
                cache.stats.write_bytes += range.len;
            }
        }
        let blocks = if op == IoOp::Discard {
            Self::whole_blocks(cache, volume, range)
        } else {
            range.blocks()
        };
        if blocks.count == 0 || (op == IoOp::Discard && !cache.volume(volume).config.discard) {
            reply(fx, id, Ok(()), buf);
            return;
        }
        let streams = op == IoOp::Write && bypass == Some(Bypass::Sequential);
        let bypass = bypass.filter(|_| !streams || !Self::is_rewritten(cache, volume, blocks));
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
            error: None,
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

    /// Whether a write that looks like part of a stream is of a place that is written over and
    /// over, as a database's log and doublewrite buffer are: it would be a write of the primary
    /// each time. Of a stream one block in a request is counted, which disturbs little.
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

    fn write(&mut self, id: Id) -> &mut WriteOp {
        match self.ops.get_mut(id) {
            Op::Write(write) => write,
            _ => unreachable!("a write's id names a write"),
        }
    }

    /// Takes the locks that are missing, from the lowest block up; stops where one is held.
    pub fn lock_blocks(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        write.stage = Stage::Locking;
        let (volume, blocks, mut locked) = (write.volume, write.blocks, write.locked);
        while locked < blocks.count {
            let key = Key::new(volume, blocks.first + locked);
            // Counted at once: whoever releases the lock hands it over.
            locked += 1;
            self.write(id).locked = locked;
            let free = cache.locks.acquire(key, id);
            self.spoil_fetch(key);
            if !free {
                return;
            }
        }
        self.choose_path(cache, id, fx);
    }

    /// A write waits until its stripe is detached. One that is in the log already is done then; any
    /// other starts over.
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
                self.lock_blocks(cache, next, fx);
            }
        }
    }

    /// Decides which way a write goes, now that nobody else may change its blocks.
    fn choose_path(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        let (volume, op, blocks, bypass) = (write.volume, write.op, write.blocks, write.bypass);
        let keys = blocks.iter().map(|block| Key::new(volume, block));
        let dirty = keys.clone().any(|key| {
            cache.contents.dirty().contains(key) || cache.contents.dirty().is_destaging(key)
        });
        if cache.health() == Health::Draining {
            if op == IoOp::Discard {
                // The old bytes stay, a discard allows that.
                return self.end_write(cache, id, Ok(()), fx);
            }
            let destaging = keys.clone().any(|key| cache.contents.dirty().is_destaging(key));
            if destaging || !cache.is_detached(Key::new(volume, blocks.first)) {
                return self.wait_detached(cache, id, fx);
            }
        }
        let mode = cache.volume(volume).config.mode;
        let direct = match op {
            IoOp::Discard => true,
            _ if cache.health() != Health::Good => true,
            _ if dirty => false,
            IoOp::WriteZeroes if blocks.count >= ZEROES_DIRECT_BLOCKS => true,
            _ => bypass.is_some() || matches!(mode, Mode::WriteAround | Mode::PassThrough),
        };
        if op == IoOp::Discard && keys.clone().any(|key| cache.contents.dirty().is_destaging(key)) {
            // Old bytes are on their way to the primary: keep them, a discard allows that.
            return self.end_write(cache, id, Ok(()), fx);
        }
        if direct && op != IoOp::Discard {
            let why = match (cache.health(), bypass) {
                (Health::Draining | Health::Detached, _) => Bypass::Degraded,
                (_, Some(why)) => why,
                _ => Bypass::Mode,
            };
            cache.stats.bypassed_by[why as usize] += 1;
        }
        self.write(id).path = if direct { Path::Direct } else { Path::Cached };
        // What the primary has of a kept block is no part of its content.
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
        // Where one edge has to be merged, whole blocks are written, and so both have to be.
        let unit = if aligned(unit) == (true, true) { unit } else { BLOCK_SIZE as u64 };
        let (head, tail) = aligned(unit);
        let (head, tail) = (!head, !tail);
        let first = Key::new(volume, blocks.first);
        let last = Key::new(volume, blocks.end() - 1);
        let write = self.write(id);
        if op == IoOp::Discard || !(head || tail) {
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

    /// The data is complete: on to the log or to the primary.
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

    /// Sends a write past the log, once the log says that its blocks are not cached.
    pub fn go_past(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        write.path = Path::Direct;
        let (volume, blocks) = (write.volume, write.blocks);
        let keys = blocks.iter().map(|block| Key::new(volume, block));
        // What reclaim takes out of the cache is gone after a crash only when the segment is: until
        // then the log has to say it, or an old version would come back.
        let mut cached = cache.log.has_evicted();
        for key in keys {
            cache.ram.remove(key);
            cached |= cache.contents.get(key).is_some();
        }
        // An admission that waits in the builder must not outlive the write either.
        cached |= cache.log.builder().admits(Key::new(volume, blocks.first), blocks.count);
        if cached && cache.health() == Health::Good {
            cache.log.queue().push_back(id);
        } else {
            self.after_invalidation(cache, id, fx);
        }
    }

    /// Puts as much of an operation into the record being built as fits and this turn has time for;
    /// true when all is in.
    pub fn log_op(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) -> bool {
        let write = self.write(id);
        if write.path == Path::Direct {
            return self.log_invalidation(cache, id, fx);
        }
        let (volume, blocks) = (write.volume, write.blocks);
        while self.write(id).logged < blocks.count {
            if cache.form.background().in_turn() >= WRITES_TURN {
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
                    BlockBytes::Zero => cache.ram.put(key, &[0; BLOCK_SIZE]),
                    BlockBytes::Whole(bytes) => cache.ram.put(key, bytes),
                    BlockBytes::Short(bytes) => cache.ram.put(key, &bytes[..]),
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
            self.wait_for_builder(cache, id, complete);
        }
        true
    }

    /// Notes that `op` waits for the record being built, and whether that is its last.
    fn wait_for_builder(&mut self, cache: &mut Cache, op: Id, complete: bool) {
        if cache.log.builder().add_waiter(op)
            && let Op::Write(write) = self.get_mut(op)
        {
            write.outstanding += 1;
        }
        if complete {
            cache.log.builder().complete.push(op);
        }
    }

    /// Logs that the blocks of a direct write are not in the cache any more.
    fn log_invalidation(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) -> bool {
        let write = self.write(id);
        let (volume, blocks) = (write.volume, write.blocks);
        let key = Key::new(volume, blocks.first);
        let count = u32::try_from(blocks.count).expect("a request lies in one stripe");
        if !cache.push_bare(fx, key, count, EntryKind::Invalidate, false, Expect::Always) {
            return false;
        }
        self.write(id).logged = blocks.count;
        self.wait_for_builder(cache, id, true);
        true
    }

    /// The record with the last part of a write has been placed: the index has all of it.
    pub fn write_applied(&mut self, cache: &mut Cache, id: Id, lsn: Lsn, fx: &mut Effects) {
        let write = self.write(id);
        write.lsn = lsn;
        write.stage = Stage::Logged;
        if write.path == Path::Cached {
            self.unlock_blocks(cache, id, fx);
        }
    }

    /// One thing a write waited for has ended; goes on when it was the last.
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

    /// Whether a write waits for the primary, by the mode that is set now: blocks that are dirty at
    /// a switch are noted then, but not writes on their way.
    fn goes_through(&mut self, cache: &Cache, id: Id) -> bool {
        let volume = self.write(id).volume;
        let complete = cache.volume(volume).config.mode.is_complete();
        let write = self.write(id);
        write.through |= complete;
        write.through
    }

    /// A direct write's invalidation is in the log, or needs none: once it is durable, so is
    /// everything before it that took blocks out of the cache, and the primary may change.
    fn after_invalidation(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
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

    /// What a write put into the log is durable.
    pub fn write_durable(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        if write.path == Path::Direct {
            return self.send_direct(cache, id, fx);
        }
        if !self.goes_through(cache, id) {
            return self.end_write(cache, id, Ok(()), fx);
        }
        let write = self.write(id);
        write.stage = Stage::Primary;
        let (volume, blocks) = (write.volume, write.blocks);
        let mut outstanding = 0;
        for key in blocks.iter().map(|block| Key::new(volume, block)) {
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

    /// The primary has a block of a write-through write, or could not take it.
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
        let (volume, blocks, fua) = (write.volume, write.blocks, write.flags.fua);
        // A failed flush may have given up the first blocks while the last were on their way.
        let given_up =
            |key| cache.contents.dirty().contains(key) && !cache.contents.dirty().is_destaging(key);
        if error.is_none() && fua && blocks.iter().any(|b| given_up(Key::new(volume, b))) {
            return self.write_durable(cache, id, fx);
        }
        self.on_primary(cache, id, error.map_or(Ok(()), Err), fx);
    }

    /// The primary has all of a write, or could not take it: with FUA a flush follows.
    fn on_primary(&mut self, cache: &mut Cache, id: Id, result: IoResult<()>, fx: &mut Effects) {
        let write = self.write(id);
        let (volume, fua) = (write.volume, write.flags.fua);
        let restores = self.restores(cache, id);
        if result.is_err() || !fua && !restores {
            return self.end_write(cache, id, result, fx);
        }
        if !restores {
            // Who waits for the blocks need not wait for the flush.
            self.unlock_blocks(cache, id, fx);
        }
        cache.volume_mut(volume).fua_waiters.push(id);
    }

    /// Whether a write is of blocks that are kept: they are until a record says otherwise.
    fn restores(&self, cache: &Cache, id: Id) -> bool {
        if cache.health() != Health::Draining {
            return false;
        }
        let Op::Write(write) = self.get(id) else { return false };
        write.keys().any(|key| cache.left.keeps(key))
    }

    /// The flush after a write has ended.
    pub fn write_flushed(
        &mut self,
        cache: &mut Cache,
        id: Id,
        result: IoResult<()>,
        fx: &mut Effects,
    ) {
        if result.is_ok() {
            // No later failure takes it.
            self.write(id).direct = None;
            if self.restores(cache, id) {
                return cache.out.note(Note::Restore(id));
            }
        }
        self.end_write(cache, id, result, fx);
    }

    /// Sends a direct write, write-zeroes or discard to the primary.
    fn send_direct(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let write = self.write(id);
        write.stage = Stage::Primary;
        let (volume, op, blocks) = (write.volume, write.op, write.blocks);
        if op == IoOp::Discard && write.keys().any(|key| cache.contents.dirty().is_destaging(key)) {
            // They set out while the discard waited for the log.
            return self.on_primary(cache, id, Ok(()), fx);
        }
        // A flush that hides in a write passes by the gate, where its failure is everybody's.
        let flags = IoFlags { fua: false, ..write.flags };
        let merged = write.edges.iter().any(Option::is_some);
        let buf = std::mem::take(&mut write.buf);
        let range = match op {
            IoOp::Discard => cache.bytes_on_volume(volume, blocks),
            _ if merged => cache.bytes_on_volume(volume, blocks),
            _ => self.write(id).range,
        };
        let (op, buf) = if merged {
            (IoOp::Write, self.merged_buffer(cache, id, &buf, range))
        } else {
            (op, buf)
        };
        cache.note_foreground();
        cache.volume_mut(volume).flow.pacer.begin_foreground();
        let io = |tag: IoTag| Io { tag, op, range, flags, buf };
        cache.send(fx, Target::Primary(volume), Ticket::Direct(id), io);
    }

    /// All bytes of a direct write whose edges were read, from block to block.
    fn merged_buffer(&mut self, cache: &Cache, id: Id, data: &IoBuf, range: ByteRange) -> IoBuf {
        let mut out = cache.config.buffers.get(range.len as usize);
        let write = self.write(id);
        for (i, block) in write.blocks.iter().enumerate() {
            let start = i * BLOCK_SIZE;
            let end = (start + BLOCK_SIZE).min(out.len());
            let part = &mut out[start..end];
            match block_bytes(write, data, &write.edges, block) {
                BlockBytes::Zero => part.fill(0),
                BlockBytes::Whole(bytes) => part.copy_from_slice(&bytes[..part.len()]),
                BlockBytes::Short(bytes) => part.copy_from_slice(&bytes[..part.len()]),
            }
        }
        out
    }

    /// A direct change of the primary ended.
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
        write.buf = done.buf;
        let state = cache.volume_mut(volume);
        state.flow.pacer.end_foreground(now, now.since(sent));
        state.direct += 1;
        // What a discard leaves may always be older.
        let known = (op != IoOp::Discard).then_some(state.flush_failures);
        self.write(id).direct = known;
        let result = match done.result {
            Err(error) if op == IoOp::Discard && error.kind() == ErrorKind::Unsupported => Ok(()),
            other => other,
        };
        self.on_primary(cache, id, result, fx);
    }

    /// Answers a write and lets those behind it go on.
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
        let WriteOp { id, buf, direct, .. } = write;
        fx.replies.push(Reply { id, result, buf, direct });
    }
}

#[cfg(test)]
mod tests;
