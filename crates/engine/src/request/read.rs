//! Reads: each block comes from RAM, else from the cache device, else from the primary; the parts
//! are joined in the client's buffer.
//!
//! Bytes from the cache device are verified against their checksum. A corrupt clean block is
//! dropped and read from the primary. A corrupt dirty block is fenced and gives an error, never old
//! data.

use forebay_block::{
    BLOCK_SIZE, BlockRange, ByteRange, Completion, ErrorKind, IoBuf, IoError, VolumeId,
};
use forebay_codec::crc32c;
use forebay_format::EntryKind;
use forebay_policy::Standing;
use smallvec::SmallVec;

use crate::api::primary::Lookup;
use crate::api::{Bypass, Effects, Health, Mode, Request, Tier};
use crate::cache::Cache;
use crate::contents::block_of;
use crate::contents::{Place, Stored};
use crate::form::AssociateOwner;
use crate::form::decode;
use crate::key::Key;
use crate::log::builder::Expect;
use crate::log::read::{Near, Reader, SegmentRead};
use crate::ram::Ram;
use crate::request::fetch::Admit;
use crate::request::op::{Op, ReadOp, ReadOwner};
use crate::request::{Requests, reply};
use crate::slab::Id;

/// Number of blocks of a read that were cached, and of those that were not.
#[derive(Default)]
pub(super) struct Found {
    hits: u64,
    misses: u64,
}

impl Requests {
    /// Takes a client's read.
    pub fn submit_read(&mut self, cache: &mut Cache, request: Request, fx: &mut Effects) {
        let Request { id, volume, range, mut buf, bypass, .. } = request;
        let stats = cache.stats_of(volume);
        stats.reads += 1;
        stats.read_bytes += range.len;
        let mode = cache.volume(volume).config.mode;
        let why = match bypass {
            // A scan of what is to stay is a reason to cache it.
            Some(Bypass::Sequential) if cache.has_pinned(volume, range.blocks()) => None,
            Some(why) => Some(why),
            None if mode == Mode::PassThrough => Some(Bypass::Mode),
            None if cache.health() != Health::Good => Some(Bypass::Degraded),
            None => None,
        };
        if why.is_none() {
            Self::note_asked(cache, volume, range.blocks());
        }
        if why.is_none() && Self::read_block_in_ram(cache, volume, range, &mut buf) {
            cache.note_lookup(volume, Lookup::Hit);
            return reply(fx, id, Ok(()), buf, Some(Tier::Ram));
        }
        let op = self.ops.insert(Op::Read(ReadOp {
            owner: ReadOwner::Client(id),
            range,
            buf,
            parts: 1,
            error: None,
            admit: match why.is_none() && cache.admits_reads(volume) {
                true => Admit::Weighed,
                false => Admit::Never,
            },
            quiet: why == Some(Bypass::Rule),
            tier: Tier::Ram,
        }));
        let found = self.read_blocks(cache, op, volume, range.blocks(), fx);
        let lookup = match why {
            Some(why) => {
                cache.stats_of(volume).bypassed_by[why as usize] += 1;
                Lookup::Bypass
            }
            None if found.misses == 0 => Lookup::Hit,
            None if found.hits == 0 => Lookup::Miss,
            None => Lookup::Partial,
        };
        cache.note_lookup(volume, lookup);
        self.part_done(cache, op, Ok(()), fx);
    }

    /// Tells the policy which blocks a client requested. Reads that bypass the cache are not
    /// counted.
    pub fn note_asked(cache: &mut Cache, volume: VolumeId, blocks: BlockRange) {
        blocks.iter().for_each(|block| cache.policy.asked(Key::new(volume, block).0));
    }

    /// Serves the most common hit: a read within one block that is in RAM.
    fn read_block_in_ram(
        cache: &mut Cache,
        volume: VolumeId,
        range: ByteRange,
        buf: &mut [u8],
    ) -> bool {
        let blocks = range.blocks();
        if blocks.count != 1 {
            return false;
        }
        let key = Key::new(volume, blocks.first);
        if cache.locks.is_locked(key) || cache.is_distrusted(key) {
            return false;
        }
        let Some(bytes) = cache.ram.get(key) else { return false };
        let from = (range.offset % BLOCK_SIZE as u64) as usize;
        buf.copy_from_slice(&bytes[from..from + buf.len()]);
        cache.stats_of(volume).ram_hit_blocks += 1;
        cache.note_hit(key);
        true
    }

    /// Reads one block whole, for a write that covers it in part.
    pub fn read_for_merge(
        &mut self,
        cache: &mut Cache,
        owner: ReadOwner,
        key: Key,
        fx: &mut Effects,
    ) {
        let blocks = BlockRange { first: key.block(), count: 1 };
        let volume = key.volume();
        let op = self.ops.insert(Op::Read(ReadOp {
            owner,
            range: blocks.bytes(),
            buf: cache.config.buffers.get(BLOCK_SIZE),
            parts: 1,
            error: None,
            admit: Admit::Never,
            quiet: false,
            tier: Tier::Ram,
        }));
        self.read_blocks(cache, op, volume, blocks, fx);
        self.part_done(cache, op, Ok(()), fx);
    }

    /// Looks up every block of a read, and starts the I/O for blocks that are not in RAM.
    pub(super) fn read_blocks(
        &mut self,
        cache: &mut Cache,
        op: Id,
        volume: VolumeId,
        blocks: BlockRange,
        fx: &mut Effects,
    ) -> Found {
        let distrusts = cache.volume(volume).distrusted;
        let merges = self.is_merge(op);
        let mut found = Found::default();
        let mut from_ram = 0;
        let mut ssd = Items::new();
        let mut missing = BlockRange::default();
        for block in blocks.iter() {
            let key = Key::new(volume, block);
            let Op::Read(read) = self.ops.get_mut(op) else {
                unreachable!("a read's id names a read");
            };
            // A write puts its bytes into RAM before they have a place in the log, and may fail
            // until it gets one. Only the holder of the lock knows that its write has not done so
            // yet.
            let quiet = read.quiet;
            let sees_ram = merges || !cache.locks.is_locked(key);
            let trusted = !distrusts || cache.contents.dirty().contains(key);
            if sees_ram && trusted && copy_from_ram(&mut cache.ram, read, key) {
                found.hits += 1;
                from_ram += 1;
                if !quiet {
                    cache.note_hit(key);
                }
                continue;
            }
            let Some(place) = cache.contents.get(key).filter(|_| trusted) else {
                found.misses += 1;
                if missing.end() != block || missing.count == 0 {
                    self.fetch_missing(cache, op, volume, missing, fx);
                    missing = BlockRange { first: block, count: 0 };
                }
                missing.count += 1;
                continue;
            };
            found.hits += 1;
            if !quiet {
                cache.note_device_hit(key, &place);
            }
            if cache.contents.fenced().contains(&key) {
                self.read_failed(op, ErrorKind::Corrupt.into());
            } else if place.kind == EntryKind::Zero {
                from_ram += 1;
                self.fill_read(op, block, &[0; BLOCK_SIZE]);
            } else if place.kind.is_associate() {
                self.read_delta(cache, op, Stored { key, place }, fx);
            } else if self.read_from_failed_record(cache, op, key, &place) {
                from_ram += 1;
            } else {
                ssd.push(Stored { key, place });
            }
        }
        self.fetch_missing(cache, op, volume, missing, fx);
        self.read_ssd(cache, op, ssd, fx);
        self.note_taken(cache, op, volume, (Tier::Ram, from_ram));
        found
    }

    /// Counts blocks that a read took from a tier.
    pub(super) fn note_taken(
        &self,
        cache: &mut Cache,
        op: Id,
        volume: VolumeId,
        (tier, blocks): (Tier, u64),
    ) {
        let merges = self.is_merge(op);
        let stats = cache.stats_of(volume);
        let count = match tier {
            _ if merges => &mut stats.merge_read_blocks,
            Tier::Ram => &mut stats.ram_hit_blocks,
            Tier::Cache => &mut stats.ssd_hit_blocks,
            Tier::Primary => &mut stats.primary_read_blocks,
        };
        *count += blocks;
    }

    /// Whether a read is of the old content of a block, for a write.
    pub(super) fn is_merge(&self, op: Id) -> bool {
        matches!(self.ops.get(op), Op::Read(ReadOp { owner: ReadOwner::Merge(..), .. }))
    }

    /// Notes that a read waits for a tier.
    pub(super) fn wait_for(&mut self, op: Id, tier: Tier) {
        if let Op::Read(read) = self.ops.get_mut(op) {
            read.tier = read.tier.max(tier);
        }
    }

    pub(super) fn fetch_missing(
        &mut self,
        cache: &mut Cache,
        op: Id,
        volume: VolumeId,
        run: BlockRange,
        fx: &mut Effects,
    ) {
        if run.count > 0 {
            let Op::Read(read) = self.ops.get(op) else {
                unreachable!("a read's id names a read");
            };
            let admit = read.admit;
            self.fetch(cache, op, volume, run, admit, fx);
        }
    }

    /// Reads a block from a record that could not be written, which is still in memory.
    fn read_from_failed_record(&mut self, cache: &Cache, op: Id, key: Key, place: &Place) -> bool {
        let payload = cache.log.failed_payload(place.segment, place.offset, place.len);
        let Some(payload) = payload else { return false };
        let mut room = [0; BLOCK_SIZE];
        let Some(block) = decode(place, payload, &mut room) else { return false };
        if let Op::Read(read) = self.ops.get_mut(op) {
            copy_into(read, key.block(), block);
        }
        true
    }

    /// Reads a block that is stored as a delta, once its record has been written.
    fn read_delta(&mut self, cache: &mut Cache, op: Id, item: Stored, fx: &mut Effects) {
        let base = cache.contents.base_of_associate(item.key);
        self.wait_for(op, Tier::Cache);
        self.add_part(op);
        if cache.is_associate_written(&base, &item.place) {
            cache.read_associate(AssociateOwner::Read(op), item, base, fx);
        } else {
            cache.log.wait_written(op, item.key);
        }
    }

    /// Reads payloads from the cache device, neighbors with one read. The device guarantees no
    /// order, so blocks whose record is still being written are read after that write has ended.
    fn read_ssd(&mut self, cache: &mut Cache, op: Id, mut items: Items, fx: &mut Effects) {
        if !items.is_empty() {
            self.wait_for(op, Tier::Cache);
        }
        items.retain(|item| {
            let is_written = cache.log.is_written(item.place.segment, item.place.offset);
            if !is_written {
                self.add_part(op);
                cache.log.wait_written(op, item.key);
            }
            is_written
        });
        if let [item] = items[..] {
            let lent = self.lend(op, &item);
            let buf = lent.unwrap_or_else(|| cache.config.buffers.get(item.place.pages().len()));
            self.add_part(op);
            return cache.read_payloads_into(buf, SegmentRead::one(Reader::Read(op), item), fx);
        }
        for read in SegmentRead::all(Reader::Read(op), Near::Bytes(PACK_GAP), items.into_vec()) {
            self.add_part(op);
            cache.read_payloads(read, fx);
        }
    }

    /// Takes the buffer of a read that consists of just one block, which is stored as it is: the
    /// device reads into it. [`Requests::ssd_read`] gives it back.
    fn lend(&mut self, op: Id, item: &Stored) -> Option<IoBuf> {
        let Op::Read(read) = self.ops.get_mut(op) else { return None };
        let block = BlockRange { first: item.key.block(), count: 1 };
        let is_all = read.range == block.bytes() && read.buf.len() == BLOCK_SIZE;
        let lends = is_all && read.parts == 1 && item.place.kind == EntryKind::Raw;
        lends.then(|| std::mem::take(&mut read.buf))
    }

    /// Whether the buffer of a read was lent to the device.
    fn has_lent(&self, op: Id) -> bool {
        let Op::Read(read) = self.ops.get(op) else { return false };
        read.buf.is_empty() && !matches!(read.owner, ReadOwner::Prefetch(_))
    }

    /// Handles the end of a read of the cache device.
    pub fn ssd_read(
        &mut self,
        cache: &mut Cache,
        op: Id,
        read: &SegmentRead,
        done: &mut Completion,
        fx: &mut Effects,
    ) {
        if self.has_lent(op) {
            return self.lent_read(cache, op, read, done, fx);
        }
        let mut room = [0; BLOCK_SIZE];
        for item in &read.items {
            let payload = read.payload(done, item);
            match payload.and_then(|payload| decode(&item.place, payload, &mut room)) {
                Some(block) => {
                    self.fill_read(op, item.key.block(), block);
                    self.promote(cache, op, item, block, fx);
                }
                None => self.bad_payload(cache, op, item, done.result.as_ref().err(), fx),
            }
        }
        self.part_done(cache, op, Ok(()), fx);
    }

    /// Handles the end of a read of the cache device into the buffer of a client.
    fn lent_read(
        &mut self,
        cache: &mut Cache,
        op: Id,
        read: &SegmentRead,
        done: &mut Completion,
        fx: &mut Effects,
    ) {
        let item = &read.items[0];
        let payload = read.payload(done, item);
        let is_good = payload.is_some_and(|payload| crc32c(payload) == item.place.crc);
        if is_good {
            self.promote(cache, op, item, &done.buf, fx);
        }
        if let Op::Read(read) = self.ops.get_mut(op) {
            read.buf = std::mem::take(&mut done.buf);
        }
        if !is_good {
            self.bad_payload(cache, op, item, done.result.as_ref().err(), fx);
        }
        self.part_done(cache, op, Ok(()), fx);
    }

    /// Takes a block that is stored as a delta and has been decoded, or could not be.
    pub fn block_read(
        &mut self,
        cache: &mut Cache,
        op: Id,
        item: &Stored,
        block: Option<&[u8]>,
        error: Option<&IoError>,
        fx: &mut Effects,
    ) {
        match block {
            Some(block) => {
                self.fill_read(op, item.key.block(), block);
                self.promote(cache, op, item, block, fx);
            }
            None => self.bad_payload(cache, op, item, error, fx),
        }
        self.part_done(cache, op, Ok(()), fx);
    }

    /// Counts a block that was read from the cache device, and brings it into RAM, if it is still
    /// the newest version and the read may leave traces.
    fn promote(&self, cache: &mut Cache, op: Id, item: &Stored, block: &[u8], fx: &mut Effects) {
        self.note_taken(cache, op, item.key.volume(), (Tier::Cache, 1));
        if matches!(self.ops.get(op), Op::Read(read) if read.quiet) {
            return;
        }
        let current = cache.contents.same_version(item.key, &item.place).is_some();
        let current = current && !cache.is_distrusted(item.key);
        let wanted = cache.ram.has_room_for(item.key) || Self::is_preferred(cache, item.key);
        if current && wanted && !cache.locks.is_locked(item.key) {
            cache.make_way(item.key, fx);
            cache.ram.put(item.key, block, Standing::Doubled);
        }
    }

    /// Whether a block deserves the place of the least recent block in RAM that the cache device
    /// has, too.
    fn is_preferred(cache: &Cache, key: Key) -> bool {
        let oldest = cache.ram.recent().oldest_of(Standing::Doubled);
        oldest.is_none_or(|(oldest, _)| cache.policy.prefers(key.0, block_of(Key(oldest)).0))
    }

    /// Handles a payload that could not be read or does not match its checksum.
    fn bad_payload(
        &mut self,
        cache: &mut Cache,
        op: Id,
        item: &Stored,
        error: Option<&IoError>,
        fx: &mut Effects,
    ) {
        let now = cache.contents.same_version(item.key, &item.place);
        match now {
            // A failed read may succeed another time; a bad checksum will not.
            Some(now) if now.dirty => match error {
                Some(error) => {
                    self.read_failed(op, error.clone());
                    cache.probe_cache(fx);
                }
                None => {
                    cache.fence(item.key);
                    self.read_failed(op, ErrorKind::Corrupt.into());
                }
            },
            Some(now) => {
                Self::drop_corrupt_clean(cache, item.key, now, fx);
                let blocks = BlockRange { first: item.key.block(), count: 1 };
                self.fetch(cache, op, item.key.volume(), blocks, Admit::Never, fx);
            }
            // The block has moved or changed in the meantime.
            None => self.read_again(cache, op, item.key, fx),
        }
    }

    /// Looks up a block again for a read in flight.
    pub fn read_again(&mut self, cache: &mut Cache, op: Id, key: Key, fx: &mut Effects) {
        let blocks = BlockRange { first: key.block(), count: 1 };
        self.read_blocks(cache, op, key.volume(), blocks, fx);
    }

    /// Drops a corrupt clean block from the cache, durably, so that it does not come back after a
    /// crash when the primary has newer data. If the log has no room the block stays, and the next
    /// reader finds the same.
    pub fn drop_corrupt_clean(cache: &mut Cache, key: Key, place: Place, fx: &mut Effects) {
        cache.note_corrupt_clean(key);
        if cache.health() == Health::Good
            && cache.push_bare(fx, key, 1, EntryKind::Invalidate, false, Expect::At(place))
        {
            // A direct write that finds the block gone must wait until this entry is durable.
            cache.log.raise_barrier();
        }
    }

    pub fn add_part(&mut self, op: Id) {
        if let Op::Read(read) = self.ops.get_mut(op) {
            read.parts += 1;
        }
    }

    /// Copies a block's bytes into the buffer of a read.
    pub fn fill_read(&mut self, op: Id, block: u64, bytes: &[u8]) {
        if let Op::Read(read) = self.ops.get_mut(op)
            && !matches!(read.owner, ReadOwner::Prefetch(_))
        {
            copy_into(read, block, bytes);
        }
    }

    pub fn read_failed(&mut self, op: Id, error: IoError) {
        if let Op::Read(read) = self.ops.get_mut(op) {
            read.error.get_or_insert(error);
        }
    }

    /// Notes that a part of a read has arrived; the last part ends the read.
    pub fn part_done(
        &mut self,
        cache: &mut Cache,
        op: Id,
        result: Result<(), IoError>,
        fx: &mut Effects,
    ) {
        if let Err(error) = result {
            self.read_failed(op, error);
        }
        let Op::Read(read) = self.ops.get_mut(op) else {
            unreachable!("a read's id names a read");
        };
        read.parts -= 1;
        if read.parts > 0 {
            return;
        }
        let Op::Read(read) = self.ops.remove(op) else {
            unreachable!("a read's id names a read");
        };
        let result = read.error.map_or(Ok(()), Err);
        match read.owner {
            ReadOwner::Client(id) => reply(fx, id, result, read.buf, Some(read.tier)),
            ReadOwner::Prefetch(id) => reply(fx, id, result, IoBuf::empty(), None),
            ReadOwner::Merge(write, first) => {
                self.write(write).wait_for(read.tier);
                self.merge_read(cache, write, first, result, read.buf, fx)
            }
        }
    }
}

/// Copies a block that is in RAM into the buffer of a read, and returns whether it is there.
fn copy_from_ram(ram: &mut Ram, read: &mut ReadOp, key: Key) -> bool {
    if read.quiet {
        return ram.peek(key, |bytes| copy_into(read, key.block(), bytes)).is_some();
    }
    ram.get(key).map(|bytes| copy_into(read, key.block(), bytes)).is_some()
}

/// Blocks to read from the cache device, mostly one.
type Items = SmallVec<[Stored; 1]>;

/// Payloads with fewer bytes than this between them are read together.
const PACK_GAP: u32 = 8;

/// Copies the part of a block that a read wants into its buffer.
fn copy_into(read: &mut ReadOp, block: u64, bytes: &[u8]) {
    let whole = BlockRange { first: block, count: 1 }.bytes();
    let part = whole.intersection(&read.range);
    let from = (part.offset - whole.offset) as usize;
    let to = (part.offset - read.range.offset) as usize;
    let len = part.len as usize;
    read.buf[to..to + len].copy_from_slice(&bytes[from..from + len]);
}

#[cfg(test)]
mod tests;
