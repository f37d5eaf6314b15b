//! Destaging: dirty blocks go to the primary in address order, neighbours in one write.
//!
//! A block that was rewritten since destaging last came by is spared this time, and goes the next
//! (as in WOW: Gill and Modha, FAST 2005): it would probably have to be written again soon.
//!
//! Only versions that are durable on the cache device are destaged, so that the primary is never
//! ahead of what a crash leaves in the log. A block becomes clean when the primary has written
//! it and a flush sent afterwards has completed, and only if it has not been rewritten meanwhile.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::{
    BLOCK_SIZE, BlockRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoFlags, IoOp,
    IoResult, IoTag, STRIPE_BLOCKS, VolumeId,
};
use forebay_format::{EntryKind, SegmentSeq};

use crate::api::event::Event;
use crate::api::{Effects, Health, State, Target, Trust};
use crate::cache::Cache;
use crate::contents::Place;
use crate::key::{Key, KeyMap};
use crate::note::Note;
use crate::slab::{Id, Slab};
use crate::ticket::Ticket;

mod gather;
mod pace;

/// One version of a block: where it lies in the log. Places are used again, numbers of segments are
/// not, so the log may go on while a block is on its way to the primary.
#[derive(Clone, Copy, Debug)]
struct Version {
    place: Place,
    seq: SegmentSeq,
    /// What a delta is against.
    base: Option<Place>,
    /// A newer version has set out after this one was written: its destage answers for the block.
    passed: bool,
}

/// Neighbouring dirty blocks on their way to the primary.
#[derive(Debug)]
pub struct Destage {
    volume: VolumeId,
    blocks: BlockRange,
    /// The version of each block that is being written.
    versions: Vec<Version>,
    buf: IoBuf,
    /// Reads outstanding.
    reads: u32,
    /// Blocks, by position, that could not be read back.
    bad: Vec<usize>,
    /// The cache device could not read a block, and those that it could not read.
    error: Option<IoError>,
    unread: Vec<usize>,
    /// Writes that wait for a block.
    through: Vec<Id>,
    /// The primary has it; a flush has not covered it yet.
    written: bool,
    started: Instant,
    /// The volume's `switches` then.
    switches: u64,
}

impl Destage {
    /// Takes a block's bytes, or why there are none.
    fn take(&mut self, block: usize, bytes: Option<&[u8]>, error: Option<IoError>) {
        match (error, bytes) {
            (Some(error), _) => {
                self.error = Some(error);
                self.unread.push(block);
            }
            (None, Some(bytes)) => {
                self.buf[block * BLOCK_SIZE..(block + 1) * BLOCK_SIZE].copy_from_slice(bytes);
            }
            (None, None) => self.bad.push(block),
        }
    }
}

/// What of the dirty blocks is on its way to the primaries, and how fast the rest follows.
#[derive(Default)]
pub struct Destaging {
    destages: Slab<Destage>,
    /// Blocks that a write waits to be on the primary.
    urgent: VecDeque<Key>,
    through_waiters: KeyMap<Vec<Id>>,
    draining: bool,
}

impl Destaging {
    /// Writes to primaries that are under way, or wait for a flush.
    pub fn len(&self) -> usize {
        self.destages.len()
    }

    /// Everything is destaged as fast as the primaries take it, or at the usual pace.
    pub fn drain(&mut self, on: bool) {
        self.draining = on;
    }

    /// A write waits for a dirty block to be on the primary.
    pub fn wait_through(&mut self, key: Key, op: Id) {
        self.through_waiters.entry(key).or_default().push(op);
        self.urgent.push_back(key);
    }
}

/// How long written blocks wait for a flush of the primary that nobody asks for.
const FLUSH_AFTER: Duration = Duration::from_millis(100);
/// Destages written that are worth a flush at once.
const FLUSH_BATCH: usize = 256;
/// Blocks collected at once, about: of more the primary would see the first only when the cache
/// device had read nearly all.
const COLLECTED_MAX: u64 = 8 * STRIPE_BLOCKS;
/// Stripes looked at in one step, and steps in one turn of the event loop.
const STRIPES_LOOKED_AT: usize = 64;
const LOOKS_MAX: usize = 256;
/// First pause after a failed destage write; doubled each time.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_DOUBLINGS_MAX: u32 = 6;

impl Destaging {
    /// Starts the destages that the pacer allows; whether no request of a client is under way.
    pub fn pump(&mut self, cache: &mut Cache, is_idle: bool, fx: &mut Effects) {
        self.start_urgent(cache, fx);
        if cache.health() == Health::Detached || cache.contents.dirty().blocks() == 0 {
            return;
        }
        for volume in cache.volume_ids() {
            if cache.contents.dirty().blocks_of(volume) > 0 {
                self.destage_volume(cache, volume, is_idle, fx);
            }
        }
    }

    fn destage_volume(
        &mut self,
        cache: &mut Cache,
        volume: VolumeId,
        is_idle: bool,
        fx: &mut Effects,
    ) {
        let state = self.state(cache, volume, is_idle);
        let allowed = self.allowance(cache, volume, &state);
        // Half of the write-cache depth is left for what was spared to be destaged in.
        let spare_after = cache.now - cache.config.write_cache_depth / 2;
        let spare_after = if state.is_urgent() { Instant::NEVER } else { spare_after };
        let all = Key::range(volume);
        let mut from = cache.volume(volume).flow.cursor;
        let mut wrapped = false;
        for _ in 0..LOOKS_MAX {
            let flow = &cache.volume(volume).flow;
            if flow.destage_writes >= allowed || flow.collecting >= COLLECTED_MAX {
                break;
            }
            match cache.contents.next_dirty(from..all.end, STRIPES_LOOKED_AT, spare_after) {
                Ok(key) => match self.start(cache, key, fx) {
                    Ok(past) | Err(past) => from = past.min(all.end),
                },
                Err(Some(further)) => from = further,
                Err(None) if wrapped => break,
                Err(None) => {
                    wrapped = true;
                    from = all.start;
                }
            }
        }
        cache.volume_mut(volume).flow.cursor = from;
    }

    /// Starts what writes wait for, whatever the pace.
    fn start_urgent(&mut self, cache: &mut Cache, fx: &mut Effects) {
        for _ in 0..self.urgent.len() {
            let Some(key) = self.urgent.pop_front() else { return };
            if !self.through_waiters.contains_key(&key) {
                continue;
            }
            if !cache.contents.dirty().contains(key) {
                // Gone meanwhile: discarded, or destaged by the usual round.
                self.wake_through(cache, key, &Ok(()));
            } else if cache.contents.fenced().contains(&key) {
                self.wake_through(cache, key, &Err(ErrorKind::Corrupt.into()));
            } else if cache.contents.dirty().is_destaging(key) && !self.pass_written(cache, key) {
                self.join_destage(cache, key);
            } else if self.start(cache, key, fx).is_err() {
                self.urgent.push_back(key);
            }
        }
    }

    /// Lets the writes that wait for a block wait for the destage it is in, if that has the newest
    /// version; else they wait for the next one.
    fn join_destage(&mut self, cache: &mut Cache, key: Key) {
        let found = self.destages.iter().find_map(|(id, destage)| {
            let at = key.block().checked_sub(destage.blocks.first)?;
            let version = destage.versions.get(at as usize)?;
            let same = destage.volume == key.volume() && Self::is_newest(cache, key, version);
            same.then_some((id, destage.written))
        });
        match found {
            Some((_, true)) => self.wake_through(cache, key, &Ok(())),
            Some((id, false)) => {
                let waiters = self.through_waiters.remove(&key).unwrap_or_default();
                self.destages.get_mut(id).through.extend(waiters);
            }
            None => self.urgent.push_back(key),
        }
    }

    /// Lets a newer version of a block set out while the primary has an older one that it has not
    /// flushed: that one is written, so the newer one cannot come before it. Otherwise each rewrite
    /// of a block would wait for a flush. False if it cannot.
    fn pass_written(&mut self, cache: &mut Cache, key: Key) -> bool {
        let found = self.destages.iter().find_map(|(id, destage)| {
            let at = key.block().checked_sub(destage.blocks.first)? as usize;
            let version = destage.versions.get(at)?;
            let here = destage.volume == key.volume() && !version.passed;
            let passes = destage.written && !Self::is_newest(cache, key, version);
            here.then_some((id, at, passes))
        });
        let Some((id, at, true)) = found else { return false };
        self.destages.get_mut(id).versions[at].passed = true;
        cache.contents.end_destaging(key, None);
        true
    }

    fn wake_through(&mut self, cache: &mut Cache, key: Key, result: &IoResult<()>) {
        for op in self.through_waiters.remove(&key).unwrap_or_default() {
            cache.out.note(Note::OnPrimary(op, result.clone()));
        }
    }

    /// Whether a block may go to the primary now.
    fn may_destage(cache: &Cache, key: Key) -> Option<Version> {
        if !cache.contents.dirty().contains(key)
            || cache.contents.dirty().is_destaging(key)
            || cache.contents.fenced().contains(&key)
        {
            return None;
        }
        if cache.rests(key) {
            return None;
        }
        let place = cache.contents.get(key)?;
        // After the device failed nothing becomes durable any more, and once that is recorded
        // nothing in the log is trusted over the primary but what is dirty now.
        let base = place.kind.is_associate().then(|| cache.contents.base_of_associate(key));
        let ready = match cache.health() {
            Health::Good => {
                cache.log.is_durable(place.segment, place.offset)
                    && cache.contents.unsettled(key).is_none()
            }
            _ => {
                cache.standing.trust > Trust::Full
                    && cache.is_associate_written(&base.unwrap_or(place), &place)
            }
        };
        let seq = cache.log.seq_of(&place);
        ready.then_some(Version { place, seq, base, passed: false })
    }

    /// Whether a version is what the log has of a block now. Of one that was passed the primary may
    /// have another, although the block shares its payload again.
    fn is_newest(cache: &Cache, key: Key, version: &Version) -> bool {
        let same = !version.passed && cache.contents.same_version(key, &version.place).is_some();
        same && cache.log.seq_of(&version.place) == version.seq
    }

    /// Starts to destage a block with its neighbours in the stripe; returns where to go on, as an
    /// error when the block cannot go now.
    pub fn start(&mut self, cache: &mut Cache, key: Key, fx: &mut Effects) -> Result<Key, Key> {
        let volume = key.volume();
        if cache.volume(volume).retry_at > cache.now {
            return Err(Key::range(volume).end);
        }
        let Some(first) = Self::may_destage(cache, key) else {
            if cache.contents.dirty().contains(key)
                && let Some(place) = cache.contents.get(key)
            {
                Self::want_block_durable(cache, key, &place);
            }
            return Err(Key(key.0 + 1));
        };
        let stripe_end = (key.0 / STRIPE_BLOCKS + 1) * STRIPE_BLOCKS;
        let mut versions = vec![first];
        while key.0 + (versions.len() as u64) < stripe_end {
            let next = Key(key.0 + versions.len() as u64);
            match Self::may_destage(cache, next) {
                Some(version) => versions.push(version),
                None => break,
            }
        }
        let blocks = BlockRange { first: key.block(), count: versions.len() as u64 };
        for version in &versions {
            cache.log.begin_destaging(version.place.segment);
        }
        let mut through = Vec::new();
        for key in (key.0..key.0 + blocks.count).map(Key) {
            cache.contents.begin_destaging(key);
            if !self.through_waiters.is_empty() {
                through.extend(self.through_waiters.remove(&key).unwrap_or_default());
            }
        }
        let buf = cache.config.buffers.get(versions.len() * BLOCK_SIZE);
        let started = cache.now;
        let switches = cache.volume(volume).switches;
        let next = Key(key.0 + blocks.count);
        let (bad, error, unread, written) = (Vec::new(), None, Vec::new(), false);
        let destage = Destage {
            volume,
            blocks,
            versions,
            buf,
            reads: 1,
            bad,
            error,
            unread,
            through,
            written,
            started,
            switches,
        };
        let id = self.destages.insert(destage);
        let flow = &mut cache.volume_mut(volume).flow;
        flow.destage_writes += 1;
        flow.collecting += blocks.count;
        self.gather(cache, id, fx);
        Ok(next)
    }

    /// Asks for a flush of the cache device, so that a block can go to the primary.
    fn want_block_durable(cache: &mut Cache, key: Key, place: &Place) {
        let last = cache.log.segment(place.segment as usize).last_lsn;
        let last = cache.contents.unsettled(key).map_or(last, |lsn| lsn.max(last));
        let lsn = last.min(cache.log.completed());
        cache.log.want_durable(lsn);
    }

    /// One source of a destage is in; writes when it was the last.
    pub(super) fn gathered(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let destage = self.destages.get_mut(id);
        destage.reads -= 1;
        if destage.reads > 0 {
            return;
        }
        let (volume, blocks, error) = (destage.volume, destage.blocks, destage.error.take());
        cache.volume_mut(volume).flow.collecting -= blocks.count;
        if let Some(error) = error {
            // Tried again after a pause.
            cache.probe_cache(fx);
            if cache.health() == Health::Good {
                self.back_off(cache, id, &error);
            } else {
                for at in std::mem::take(&mut self.destages.get_mut(id).unread) {
                    cache.note_unreadable(Key::new(volume, blocks.first + at as u64));
                }
            }
            self.ended(cache, id, &Err(error));
            return self.forget(cache, id, false);
        }
        let destage = self.destages.get(id);
        if destage.bad.is_empty() {
            return self.write(cache, id, fx);
        }
        // What cannot be read back is fenced; its neighbours go another time.
        let error = ErrorKind::Corrupt.into();
        let version = |&i: &usize| {
            (Key::new(destage.volume, destage.blocks.first + i as u64), destage.versions[i])
        };
        let bad: Vec<(Key, Version)> = destage.bad.iter().map(version).collect();
        for (key, version) in bad {
            if Self::is_newest(cache, key, &version) {
                cache.fence(key);
            }
        }
        self.ended(cache, id, &Err(error));
        self.forget(cache, id, false);
    }

    fn write(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let destage = self.destages.get_mut(id);
        let (volume, blocks) = (destage.volume, destage.blocks);
        let mut buf = std::mem::take(&mut destage.buf);
        let zero = destage.versions.iter().all(|version| version.place.kind == EntryKind::Zero);
        let range = cache.bytes_on_volume(volume, blocks);
        let ticket = Ticket::DestageWrite(id);
        cache.stats.destage_writes += 1;
        if zero {
            let flags = IoFlags { no_hole: true, ..IoFlags::default() };
            let buf = IoBuf::empty();
            let io = |tag: IoTag| Io { tag, op: IoOp::WriteZeroes, range, flags, buf };
            return cache.send(fx, Target::Primary(volume), ticket, io);
        }
        buf.set_len(range.len as usize);
        cache.send(fx, Target::Primary(volume), ticket, |tag| Io::write(tag, range.offset, buf));
    }

    /// A destage write ended.
    pub fn written(&mut self, cache: &mut Cache, id: Id, done: Completion) {
        self.ended(cache, id, &done.result);
        let volume = self.destages.get(id).volume;
        if let Err(error) = &done.result {
            self.back_off(cache, id, error);
            return self.forget(cache, id, false);
        }
        let (now, blocks) = (cache.now, self.destages.get(id).blocks.count);
        self.destages.get_mut(id).written = true;
        cache.stats.destaged_blocks += blocks;
        let volume = cache.volume_mut(volume);
        volume.flow.destaged(now, blocks);
        volume.failures = 0;
        if volume.written.is_empty() {
            volume.written_since = now;
        }
        volume.written.push(id);
    }

    /// Tells the writes that wait for the blocks; the device has no more to do with them.
    fn ended(&mut self, cache: &mut Cache, id: Id, result: &IoResult<()>) {
        let volume = self.destages.get(id).volume;
        cache.volume_mut(volume).flow.destage_writes -= 1;
        if let Err(error) = result {
            self.note_failed(cache, id, error);
        }
        for op in std::mem::take(&mut self.destages.get_mut(id).through) {
            cache.out.note(Note::OnPrimary(op, result.clone()));
        }
    }

    /// In a mode that promises that the primary alone is complete, a flush must not succeed before
    /// blocks are there whose destage failed.
    fn note_failed(&self, cache: &mut Cache, id: Id, error: &IoError) {
        let Destage { volume, blocks, .. } = *self.destages.get(id);
        if !cache.volume(volume).config.mode.is_complete() {
            return;
        }
        let keys = blocks.iter().map(|block| Key::new(volume, block));
        let state = cache.volume_mut(volume);
        state.leftover.extend(keys);
        for op in std::mem::take(&mut state.leftover_waiters) {
            cache.out.note(Note::FlushPart(op, Err(error.clone())));
        }
    }

    /// A destage failed: the volume's next ones wait.
    fn back_off(&self, cache: &mut Cache, id: Id, error: &IoError) {
        let Destage { volume, blocks, .. } = *self.destages.get(id);
        let now = cache.now;
        let state = cache.volume_mut(volume);
        let pause = RETRY_FIRST * (1 << state.failures.min(RETRY_DOUBLINGS_MAX));
        state.retry_at = now + pause;
        state.failures += 1;
        cache.tell(Event::DestageFailed { volume, blocks, kind: error.kind(), pause });
    }

    /// Whether enough has been written to the primary for a flush.
    pub fn flush_is_due(&self, cache: &Cache, volume: usize) -> bool {
        let Some(volume) = cache.volumes[volume].as_ref() else { return false };
        let written = volume.written.len();
        let impatient = self.draining
            || volume.draining
            || *cache.state() == State::Stopping
            || !volume.leftover_waiters.is_empty()
            || volume.is_leaving;
        // Near the limit writes wait for blocks to become clean.
        let crowded = cache.is_crowded(volume.config.id);
        written >= FLUSH_BATCH
            || written > 0
                && (cache.now.since(volume.written_since) >= FLUSH_AFTER
                    || crowded
                    || impatient && volume.flow.destage_writes == 0)
    }

    /// A flush of the primary that covers a destage ended.
    pub fn flushed(&mut self, cache: &mut Cache, id: Id, result: &IoResult<()>) {
        let Destage { volume, blocks, .. } = *self.destages.get(id);
        cache.volume_mut(volume).flow.unflushed_blocks -= blocks.count;
        if let Err(error) = result {
            self.back_off(cache, id, error);
            self.note_failed(cache, id, error);
        }
        self.forget(cache, id, result.is_ok());
    }

    /// Forgets a destage; its blocks become clean if the primary has them durably.
    fn forget(&mut self, cache: &mut Cache, id: Id, durable: bool) {
        let destage = self.destages.remove(id);
        let started = durable.then_some(destage.started);
        let state = cache.volume_mut(destage.volume);
        let settles = durable && state.switches == destage.switches && !state.leftover.is_empty();
        for (block, version) in destage.blocks.iter().zip(&destage.versions) {
            let key = Key::new(destage.volume, block);
            let newest = Self::is_newest(cache, key, version);
            cache.log.end_destaging(version.place.segment, version.seq);
            // Of a block that was passed the newer version may have failed.
            if settles && !version.passed {
                cache.volume_mut(destage.volume).leftover.remove(&key);
            }
            if durable && newest && cache.contents.dirty().contains(key) {
                cache.contents.mark_clean(key, &version.place);
            }
            if !version.passed {
                cache.contents.end_destaging(key, started);
            }
        }
    }
}

#[cfg(test)]
mod tests;
