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

use crate::Engine;
use crate::api::event::Event;
use crate::api::{Effects, Health, State, Target, Trust};
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

impl Engine {
    /// Starts the destages that the pacer allows.
    pub(crate) fn pump_destage(&mut self, fx: &mut Effects) {
        self.destage_urgent(fx);
        if self.cache.health() == Health::Detached || self.cache.contents.dirty().blocks() == 0 {
            return;
        }
        for volume in self.cache.volume_ids() {
            if self.cache.contents.dirty().blocks_of(volume) > 0 {
                self.destage_volume(volume, fx);
            }
        }
    }

    fn destage_volume(&mut self, volume: VolumeId, fx: &mut Effects) {
        let state = self.destage_state(volume);
        let allowed = self.destage_allowance(volume, &state);
        // Half of the write-cache depth is left for what was spared to be destaged in.
        let spare_after = self.cache.now - self.cache.config.write_cache_depth / 2;
        let spare_after = if state.is_urgent() { Instant::NEVER } else { spare_after };
        let all = Key::range(volume);
        let mut from = self.cache.volume(volume).flow.cursor;
        let mut wrapped = false;
        for _ in 0..LOOKS_MAX {
            let flow = &self.cache.volume(volume).flow;
            if flow.destage_writes >= allowed || flow.collecting >= COLLECTED_MAX {
                break;
            }
            match self.cache.contents.next_dirty(from..all.end, STRIPES_LOOKED_AT, spare_after) {
                Ok(key) => match self.start_destage(key, fx) {
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
        self.cache.volume_mut(volume).flow.cursor = from;
    }

    /// Starts what writes wait for, whatever the pace.
    fn destage_urgent(&mut self, fx: &mut Effects) {
        for _ in 0..self.destaging.urgent.len() {
            let Some(key) = self.destaging.urgent.pop_front() else { return };
            if !self.destaging.through_waiters.contains_key(&key) {
                continue;
            }
            if !self.cache.contents.dirty().contains(key) {
                // Gone meanwhile: discarded, or destaged by the usual round.
                self.wake_through(key, &Ok(()));
            } else if self.cache.contents.fenced().contains(&key) {
                self.wake_through(key, &Err(ErrorKind::Corrupt.into()));
            } else if self.cache.contents.dirty().is_destaging(key) && !self.pass_written(key) {
                self.join_destage(key);
            } else if self.start_destage(key, fx).is_err() {
                self.destaging.urgent.push_back(key);
            }
        }
    }

    /// Lets the writes that wait for a block wait for the destage it is in, if that has the newest
    /// version; else they wait for the next one.
    fn join_destage(&mut self, key: Key) {
        let found = self.destaging.destages.iter().find_map(|(id, destage)| {
            let at = key.block().checked_sub(destage.blocks.first)?;
            let version = destage.versions.get(at as usize)?;
            let same = destage.volume == key.volume() && self.is_newest(key, version);
            same.then_some((id, destage.written))
        });
        match found {
            Some((_, true)) => self.wake_through(key, &Ok(())),
            Some((id, false)) => {
                let waiters = self.destaging.through_waiters.remove(&key).unwrap_or_default();
                self.destaging.destages.get_mut(id).through.extend(waiters);
            }
            None => self.destaging.urgent.push_back(key),
        }
    }

    /// Lets a newer version of a block set out while the primary has an older one that it has not
    /// flushed: that one is written, so the newer one cannot come before it. Otherwise each rewrite
    /// of a block would wait for a flush. False if it cannot.
    fn pass_written(&mut self, key: Key) -> bool {
        let found = self.destaging.destages.iter().find_map(|(id, destage)| {
            let at = key.block().checked_sub(destage.blocks.first)? as usize;
            let version = destage.versions.get(at)?;
            let here = destage.volume == key.volume() && !version.passed;
            let passes = destage.written && !self.is_newest(key, version);
            here.then_some((id, at, passes))
        });
        let Some((id, at, true)) = found else { return false };
        self.destaging.destages.get_mut(id).versions[at].passed = true;
        self.cache.contents.end_destaging(key, None);
        true
    }

    fn wake_through(&mut self, key: Key, result: &IoResult<()>) {
        for op in self.destaging.through_waiters.remove(&key).unwrap_or_default() {
            self.cache.out.note(Note::OnPrimary(op, result.clone()));
        }
    }

    /// Whether a block may go to the primary now.
    fn may_destage(&self, key: Key) -> Option<Version> {
        if !self.cache.contents.dirty().contains(key)
            || self.cache.contents.dirty().is_destaging(key)
            || self.cache.contents.fenced().contains(&key)
        {
            return None;
        }
        if self.cache.rests(key) {
            return None;
        }
        let place = self.cache.contents.get(key)?;
        // After the device failed nothing becomes durable any more, and once that is recorded
        // nothing in the log is trusted over the primary but what is dirty now.
        let base = place.kind.is_associate().then(|| self.cache.contents.base_of_associate(key));
        let ready = match self.cache.health() {
            Health::Good => {
                self.cache.log.is_durable(place.segment, place.offset)
                    && self.cache.contents.unsettled(key).is_none()
            }
            _ => {
                self.cache.standing.trust > Trust::Full
                    && self.cache.is_associate_written(&base.unwrap_or(place), &place)
            }
        };
        let seq = self.cache.log.seq_of(&place);
        ready.then_some(Version { place, seq, base, passed: false })
    }

    /// Whether a version is what the log has of a block now. Of one that was passed the primary may
    /// have another, although the block shares its payload again.
    fn is_newest(&self, key: Key, version: &Version) -> bool {
        let same =
            !version.passed && self.cache.contents.same_version(key, &version.place).is_some();
        same && self.cache.log.seq_of(&version.place) == version.seq
    }

    /// Starts to destage a block with its neighbours in the stripe; returns where to go on, as an
    /// error when the block cannot go now.
    pub(crate) fn start_destage(&mut self, key: Key, fx: &mut Effects) -> Result<Key, Key> {
        let volume = key.volume();
        if self.cache.volume(volume).retry_at > self.cache.now {
            return Err(Key::range(volume).end);
        }
        let Some(first) = self.may_destage(key) else {
            if self.cache.contents.dirty().contains(key)
                && let Some(place) = self.cache.contents.get(key)
            {
                self.want_block_durable(key, &place);
            }
            return Err(Key(key.0 + 1));
        };
        let stripe_end = (key.0 / STRIPE_BLOCKS + 1) * STRIPE_BLOCKS;
        let mut versions = vec![first];
        while key.0 + (versions.len() as u64) < stripe_end {
            let next = Key(key.0 + versions.len() as u64);
            match self.may_destage(next) {
                Some(version) => versions.push(version),
                None => break,
            }
        }
        let blocks = BlockRange { first: key.block(), count: versions.len() as u64 };
        for version in &versions {
            self.cache.log.begin_destaging(version.place.segment);
        }
        let mut through = Vec::new();
        for key in (key.0..key.0 + blocks.count).map(Key) {
            self.cache.contents.begin_destaging(key);
            if !self.destaging.through_waiters.is_empty() {
                through.extend(self.destaging.through_waiters.remove(&key).unwrap_or_default());
            }
        }
        let buf = self.cache.config.buffers.get(versions.len() * BLOCK_SIZE);
        let started = self.cache.now;
        let switches = self.cache.volume(volume).switches;
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
        let id = self.destaging.destages.insert(destage);
        let flow = &mut self.cache.volume_mut(volume).flow;
        flow.destage_writes += 1;
        flow.collecting += blocks.count;
        self.gather(id, fx);
        Ok(next)
    }

    /// Asks for a flush of the cache device, so that a block can go to the primary.
    fn want_block_durable(&mut self, key: Key, place: &Place) {
        let last = self.cache.log.segment(place.segment as usize).last_lsn;
        let last = self.cache.contents.unsettled(key).map_or(last, |lsn| lsn.max(last));
        let lsn = last.min(self.cache.log.completed());
        self.cache.log.want_durable(lsn);
    }

    /// One source of a destage is in; writes when it was the last.
    pub(super) fn gathered(&mut self, id: Id, fx: &mut Effects) {
        let destage = self.destaging.destages.get_mut(id);
        destage.reads -= 1;
        if destage.reads > 0 {
            return;
        }
        let (volume, blocks, error) = (destage.volume, destage.blocks, destage.error.take());
        self.cache.volume_mut(volume).flow.collecting -= blocks.count;
        if let Some(error) = error {
            // Tried again after a pause.
            self.cache.probe_cache(fx);
            if self.cache.health() == Health::Good {
                self.back_off(id, &error);
            } else {
                for at in std::mem::take(&mut self.destaging.destages.get_mut(id).unread) {
                    self.cache.note_unreadable(Key::new(volume, blocks.first + at as u64));
                }
            }
            self.destage_ended(id, &Err(error));
            return self.drop_destage(id, false);
        }
        let destage = self.destaging.destages.get(id);
        if destage.bad.is_empty() {
            return self.write_destage(id, fx);
        }
        // What cannot be read back is fenced; its neighbours go another time.
        let error = ErrorKind::Corrupt.into();
        let version = |&i: &usize| {
            (Key::new(destage.volume, destage.blocks.first + i as u64), destage.versions[i])
        };
        let bad: Vec<(Key, Version)> = destage.bad.iter().map(version).collect();
        for (key, version) in bad {
            if self.is_newest(key, &version) {
                self.cache.fence(key);
            }
        }
        self.destage_ended(id, &Err(error));
        self.drop_destage(id, false);
    }

    fn write_destage(&mut self, id: Id, fx: &mut Effects) {
        let destage = self.destaging.destages.get_mut(id);
        let (volume, blocks) = (destage.volume, destage.blocks);
        let mut buf = std::mem::take(&mut destage.buf);
        let zero = destage.versions.iter().all(|version| version.place.kind == EntryKind::Zero);
        let range = self.cache.bytes_on_volume(volume, blocks);
        let ticket = Ticket::DestageWrite(id);
        self.cache.stats.destage_writes += 1;
        if zero {
            let flags = IoFlags { no_hole: true, ..IoFlags::default() };
            let buf = IoBuf::empty();
            let io = |tag: IoTag| Io { tag, op: IoOp::WriteZeroes, range, flags, buf };
            return self.cache.send(fx, Target::Primary(volume), ticket, io);
        }
        buf.set_len(range.len as usize);
        self.cache
            .send(fx, Target::Primary(volume), ticket, |tag| Io::write(tag, range.offset, buf));
    }

    /// A destage write ended.
    pub(crate) fn destage_written(&mut self, id: Id, done: Completion) {
        self.destage_ended(id, &done.result);
        let volume = self.destaging.destages.get(id).volume;
        if let Err(error) = &done.result {
            self.back_off(id, error);
            return self.drop_destage(id, false);
        }
        let (now, blocks) = (self.cache.now, self.destaging.destages.get(id).blocks.count);
        self.destaging.destages.get_mut(id).written = true;
        self.cache.stats.destaged_blocks += blocks;
        let volume = self.cache.volume_mut(volume);
        volume.flow.destaged(now, blocks);
        volume.failures = 0;
        if volume.written.is_empty() {
            volume.written_since = now;
        }
        volume.written.push(id);
    }

    /// Tells the writes that wait for the blocks; the device has no more to do with them.
    fn destage_ended(&mut self, id: Id, result: &IoResult<()>) {
        let volume = self.destaging.destages.get(id).volume;
        self.cache.volume_mut(volume).flow.destage_writes -= 1;
        if let Err(error) = result {
            self.note_failed(id, error);
        }
        for op in std::mem::take(&mut self.destaging.destages.get_mut(id).through) {
            self.cache.out.note(Note::OnPrimary(op, result.clone()));
        }
    }

    /// In a mode that promises that the primary alone is complete, a flush must not succeed before
    /// blocks are there whose destage failed.
    fn note_failed(&mut self, id: Id, error: &IoError) {
        let Destage { volume, blocks, .. } = *self.destaging.destages.get(id);
        if !self.cache.volume(volume).config.mode.is_complete() {
            return;
        }
        let keys = blocks.iter().map(|block| Key::new(volume, block));
        let state = self.cache.volume_mut(volume);
        state.leftover.extend(keys);
        for op in std::mem::take(&mut state.leftover_waiters) {
            self.cache.out.note(Note::FlushPart(op, Err(error.clone())));
        }
    }

    /// A destage failed: the volume's next ones wait.
    fn back_off(&mut self, id: Id, error: &IoError) {
        let Destage { volume, blocks, .. } = *self.destaging.destages.get(id);
        let now = self.cache.now;
        let state = self.cache.volume_mut(volume);
        let pause = RETRY_FIRST * (1 << state.failures.min(RETRY_DOUBLINGS_MAX));
        state.retry_at = now + pause;
        state.failures += 1;
        self.cache.tell(Event::DestageFailed { volume, blocks, kind: error.kind(), pause });
    }

    /// Whether enough has been written to the primary for a flush.
    pub(crate) fn destage_flush_is_due(&self, volume: usize) -> bool {
        let Some(volume) = self.cache.volumes[volume].as_ref() else { return false };
        let written = volume.written.len();
        let impatient = self.destaging.draining
            || volume.draining
            || *self.cache.state() == State::Stopping
            || !volume.leftover_waiters.is_empty()
            || volume.is_leaving;
        // Near the limit writes wait for blocks to become clean.
        let crowded = self.cache.is_crowded(volume.config.id);
        written >= FLUSH_BATCH
            || written > 0
                && (self.cache.now.since(volume.written_since) >= FLUSH_AFTER
                    || crowded
                    || impatient && volume.flow.destage_writes == 0)
    }

    /// A flush of the primary that covers a destage ended.
    pub(crate) fn destage_flushed(&mut self, id: Id, result: &IoResult<()>) {
        let Destage { volume, blocks, .. } = *self.destaging.destages.get(id);
        self.cache.volume_mut(volume).flow.unflushed_blocks -= blocks.count;
        if let Err(error) = result {
            self.back_off(id, error);
            self.note_failed(id, error);
        }
        self.drop_destage(id, result.is_ok());
    }

    /// Forgets a destage; its blocks become clean if the primary has them durably.
    fn drop_destage(&mut self, id: Id, durable: bool) {
        let destage = self.destaging.destages.remove(id);
        let started = durable.then_some(destage.started);
        let state = self.cache.volume_mut(destage.volume);
        let settles = durable && state.switches == destage.switches && !state.leftover.is_empty();
        for (block, version) in destage.blocks.iter().zip(&destage.versions) {
            let key = Key::new(destage.volume, block);
            let newest = self.is_newest(key, version);
            self.cache.log.end_destaging(version.place.segment, version.seq);
            // Of a block that was passed the newer version may have failed.
            if settles && !version.passed {
                self.cache.volume_mut(destage.volume).leftover.remove(&key);
            }
            if durable && newest && self.cache.contents.dirty().contains(key) {
                self.cache.contents.mark_clean(key, &version.place);
            }
            if !version.passed {
                self.cache.contents.end_destaging(key, started);
            }
        }
    }
}
