//! Destaging: dirty blocks go to the primary in address order, neighbors in one write.
//!
//! On a primary without moving parts, a block that was rewritten since destaging last passed it is
//! spared once and goes in the next round (as in WOW: Gill and Modha, FAST 2005), because it will
//! probably be rewritten again soon. A disk turns past such a block anyway: to spare it means to
//! come by sooner again.
//!
//! Only versions that are durable on the cache device are destaged, so that the primary is never
//! ahead of the log that a crash leaves behind. A block becomes clean when the primary has written
//! it and a flush sent afterwards has completed, and only if it was not rewritten in between.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use forebay_block::{
    BLOCK_SIZE, BlockRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoFlags, IoOp,
    IoResult, IoTag, STRIPE_BLOCKS, VolumeId,
};
use forebay_format::{EntryKind, SegmentSeq};

use crate::api::event::Event;
use crate::api::primary::is_away;
use crate::api::{DestageReason, Effects, Health, State, Target, Trust};
use crate::cache::Cache;
use crate::contents::Place;
use crate::key::{Key, KeyMap};
use crate::limits::step;
use crate::note::Note;
use crate::slab::Id;
use crate::ticket::Ticket;
use crate::volume::Leftover;

mod cut;
mod flight;
mod gather;
mod pace;
mod stripe;

use flight::Flight;
pub use pace::depth_beside;

/// One version of a block: its place in the log. Places are reused but segment numbers are not, so
/// the log may advance while a block is on its way to the primary.
#[derive(Clone, Copy, Debug)]
struct Version {
    place: Place,
    seq: SegmentSeq,
    /// The base, if the version is stored against one.
    base: Option<Place>,
    /// A newer version was started after this one was written; its destage now decides about the
    /// block.
    passed: bool,
}

/// A run of adjacent dirty blocks on its way to the primary.
#[derive(Debug)]
pub struct Destage {
    volume: VolumeId,
    blocks: BlockRange,
    reason: DestageReason,
    /// The version of each block that is written.
    versions: Vec<Version>,
    buf: IoBuf,
    /// Number of outstanding reads.
    reads: u32,
    /// Positions of blocks that are corrupt on the cache device.
    bad: Vec<usize>,
    /// The error with which the cache device failed a read, and the positions of the blocks that it
    /// failed.
    error: Option<IoError>,
    unread: Vec<usize>,
    /// Write-through writes, each with the block that it waits for.
    through: Vec<(Key, Id)>,
    /// The primary has written it, but no flush has covered it yet.
    written: bool,
    /// The flush failed: it ends in this turn or in a later one, and its blocks stay dirty.
    unflushed: bool,
    started: Instant,
    /// It is a part of a cut.
    in_cut: bool,
    /// The number of its blocks that are dirty only to fill a stripe of the primary.
    filled: u64,
}

impl Destage {
    /// Stores a block's bytes, or notes why there are none.
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

/// The destages in flight, and the pace of starting more.
#[derive(Default)]
pub struct Destaging {
    destages: Flight,
    /// The cut of each ordered volume that is being destaged.
    cuts: BTreeMap<VolumeId, cut::Cut>,
    /// Blocks for which a write-through write waits, and those writes by block.
    urgent: VecDeque<Key>,
    through_waiters: KeyMap<Vec<Id>>,
    /// Destages whose flush has ended. Those whose blocks the primary has durably do not count as
    /// clean yet.
    covered: VecDeque<Id>,
    /// Blocks gathered, blocks of destages that ended with their flush or with a cut that was given
    /// up, and blocks taken into cuts, in this turn.
    gathered: u64,
    ended: u64,
    taken: u64,
    draining: bool,
    /// A stop has waited long enough: no destage begins.
    is_over: bool,
}

impl Destaging {
    /// Number of destages whose write is in flight or waits for a flush.
    pub fn len(&self) -> usize {
        self.destages.len()
    }

    /// Switches between destaging as fast as the primaries allow and the usual pace.
    pub fn drain(&mut self, on: bool) {
        self.draining = on;
    }

    /// Begins no further destage.
    pub fn end(&mut self) {
        self.is_over = true;
    }

    /// Notes that a write waits until a dirty block is on the primary.
    pub fn wait_through(&mut self, key: Key, op: Id) {
        self.through_waiters.entry(key).or_default().push(op);
        self.urgent.push_back(key);
    }
}

/// How long written blocks wait for a flush of the primary when nothing else requests one.
const FLUSH_AFTER: Duration = Duration::from_millis(100);
/// Number of written destages that make a flush due immediately.
const FLUSH_BATCH: usize = 256;
/// Approximate limit on the blocks gathered at the same time. With more, the primary would get the
/// first block only after the cache device had read nearly all of them.
const COLLECTED_MAX: u64 = 8 * STRIPE_BLOCKS;
/// Blocks gathered in one turn from which no destage is started, and blocks of destages that ended
/// in one turn from which no other do: a stripe more at most.
const GATHERED_MAX: u64 = step(256) as u64;
const ENDED_MAX: u64 = step(256) as u64;
/// Blocks taken into cuts in one turn from which no others are: a stripe more at most.
const TAKEN_MAX: u64 = step(256) as u64;
/// Destages that a primary may answer with errors in a row before destaging of its volume pauses.
const REFUSALS_MAX: u32 = 8;
/// Limit on the stripes visited in one step, and on the steps in one turn of the event loop, which
/// volumes share.
const STRIPES_LOOKED_AT: usize = step(32);
const LOOKS_MAX: usize = step(256);
/// Pause after the first failed destage write, and the number of times that it doubles.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_DOUBLINGS_MAX: u32 = 4;

impl Destaging {
    /// Starts the destages that the pacer allows. `is_idle` says that no client request is in
    /// flight.
    pub fn pump(&mut self, cache: &mut Cache, is_idle: bool, fx: &mut Effects) {
        (self.gathered, self.ended, self.taken) = (0, 0, 0);
        self.end_covered(cache);
        self.start_urgent(cache, fx);
        for volume in cache.volume_ids() {
            if cache.known_volume(volume).is_some_and(|v| v.order.blocks_max.is_some()) {
                self.pump_cut(cache, volume, is_idle, fx);
            }
        }
        if cache.health() == Health::Detached || cache.contents.dirty().blocks() == 0 {
            return;
        }
        let volumes = cache.volume_ids().filter(|&volume| {
            cache.contents.dirty().blocks_of(volume) > 0 && !self.follows_order(cache, volume)
        });
        let volumes: Vec<VolumeId> = volumes.collect();
        let looks = (LOOKS_MAX / volumes.len().max(1)).max(1);
        for volume in volumes {
            self.destage_volume(cache, volume, looks, is_idle, fx);
        }
    }

    /// Starts the destages of a volume in at most `looks` steps.
    fn destage_volume(
        &mut self,
        cache: &mut Cache,
        volume: VolumeId,
        looks: usize,
        is_idle: bool,
        fx: &mut Effects,
    ) {
        if cache.volume(volume).retry_at > cache.now {
            return;
        }
        let state = self.state(cache, volume, is_idle);
        let allowed = self.allowance(cache, volume, &state);
        let spares = !state.is_urgent() && !cache.volume(volume).config.rotational;
        // Half of the write-cache depth is left for destaging blocks that were spared.
        let spare_after = cache.now - cache.config.write_cache_depth / 2;
        let spare_after = if spares { spare_after } else { Instant::NEVER };
        let all = Key::range(volume);
        let mut from = cache.volume(volume).flow.cursor;
        let mut wrapped = false;
        let bound = Self::is_bound(cache, volume);
        for _ in 0..looks {
            let flow = &cache.volume(volume).flow;
            let is_full = flow.destage_writes >= allowed || flow.collecting >= COLLECTED_MAX;
            if is_full || self.gathered >= GATHERED_MAX {
                break;
            }
            let now = cache.now;
            if bound && !cache.volume_mut(volume).flow.bound.allows(now) {
                break;
            }
            let reason = self.reason(cache, volume, &state);
            let before = self.gathered;
            if self.start_filled(cache, volume, reason, fx) {
                cache.volume_mut(volume).flow.bound.take(self.gathered - before);
                continue;
            }
            if Self::fills_enough(cache, volume) {
                break;
            }
            match cache.contents.next_dirty(from..all.end, STRIPES_LOOKED_AT, spare_after) {
                Ok(key) => {
                    if let Some(past) = Self::fill(cache, key, reason, fx) {
                        from = past.min(all.end);
                        continue;
                    }
                    let past = self.start(cache, key, reason, fx).unwrap_or_else(|past| past);
                    cache.volume_mut(volume).flow.bound.take(self.gathered - before);
                    from = past.min(all.end);
                }
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

    /// Starts the blocks that writes wait for, regardless of pace.
    fn start_urgent(&mut self, cache: &mut Cache, fx: &mut Effects) {
        for _ in 0..self.urgent.len() {
            let Some(key) = self.urgent.pop_front() else { return };
            if !self.through_waiters.contains_key(&key) {
                continue;
            }
            if !cache.contents.dirty().contains(key) {
                // No longer dirty: discarded, or destaged by the usual round.
                self.wake_through(cache, key, &Ok(()));
            } else if cache.contents.fenced().contains(&key) {
                self.wake_through(cache, key, &Err(ErrorKind::Corrupt.into()));
            } else if cache.contents.dirty().is_destaging(key) && !self.pass_written(cache, key) {
                self.join_destage(cache, key);
            } else if self.start(cache, key, DestageReason::Through, fx).is_err() {
                self.urgent.push_back(key);
            }
        }
    }

    /// If the destage in flight has the newest version of a block, makes the writes that wait for
    /// the block wait for that destage; otherwise they wait for the next one.
    fn join_destage(&mut self, cache: &mut Cache, key: Key) {
        let joined = self.destages.deciding(key).and_then(|(id, _, version)| {
            let destage = self.destages.get(id);
            let joins = Self::is_newest(cache, key, version) && self.will_be_written(destage);
            joins.then_some((id, destage.written))
        });
        match joined {
            Some((_, true)) => self.wake_through(cache, key, &Ok(())),
            Some((id, false)) => {
                let waiters = self.take_through(key);
                self.destages.get_mut(id).through.extend(waiters);
            }
            None => self.urgent.push_back(key),
        }
    }

    /// Allows a newer version of a block to start while the primary has an unflushed older one. The
    /// older version is already written, so the newer one cannot overtake it. Otherwise each
    /// rewrite of a block would wait for a flush. Returns false if it is not allowed.
    fn pass_written(&mut self, cache: &mut Cache, key: Key) -> bool {
        let Some((id, at, version)) = self.destages.deciding(key) else { return false };
        let destage = self.destages.get(id);
        // A cut may have to be written again.
        let is_written = destage.written && !destage.in_cut;
        if !is_written || Self::is_newest(cache, key, version) {
            return false;
        }
        self.destages.pass(id, at);
        cache.contents.end_destaging(key, None);
        true
    }

    fn take_through(&mut self, key: Key) -> impl Iterator<Item = (Key, Id)> + use<> {
        let waiters = self.through_waiters.remove(&key).unwrap_or_default();
        waiters.into_iter().map(move |op| (key, op))
    }

    fn wake_through(&mut self, cache: &mut Cache, key: Key, result: &IoResult<()>) {
        for op in self.through_waiters.remove(&key).unwrap_or_default() {
            cache.out.note(Note::OnPrimary(op, result.clone()));
        }
    }

    /// The version of a block to destage, if the block may go to the primary now.
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
        // After the device has failed, nothing becomes durable any more. Once the failure is
        // recorded, the log takes precedence over the primary only for blocks that are dirty now.
        let base = place.kind.is_associate().then(|| cache.contents.base_of_associate(key));
        let ready = match cache.health() {
            Health::Good => {
                cache.log.is_durable(place.segment, place.offset)
                    && cache.contents.unsettled(key).is_none()
            }
            _ => {
                cache.standing.trust > Trust::Full
                    && !cache.standing.in_doubt
                    && cache.is_associate_written(&base.unwrap_or(place), &place)
            }
        };
        let seq = cache.log.seq_of(&place);
        ready.then_some(Version { place, seq, base, passed: false })
    }

    /// Whether a version is the newest one of its block. A passed version never is.
    fn is_newest(cache: &Cache, key: Key, version: &Version) -> bool {
        !version.passed && cache.contents.dirty().is_newest_destaging(key)
    }

    /// Starts to destage a block with its neighbors in the stripe. Returns the key at which to
    /// continue, as an error if the block cannot go now.
    pub fn start(
        &mut self,
        cache: &mut Cache,
        key: Key,
        reason: DestageReason,
        fx: &mut Effects,
    ) -> Result<Key, Key> {
        self.start_with(cache, key, reason, 0, fx)
    }

    /// The same; `filled` blocks are dirty only to fill a stripe of the primary.
    fn start_with(
        &mut self,
        cache: &mut Cache,
        key: Key,
        reason: DestageReason,
        filled: u64,
        fx: &mut Effects,
    ) -> Result<Key, Key> {
        let volume = key.volume();
        if self.is_over || cache.volume(volume).retry_at > cache.now {
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
        // One that could not go before goes alone, so that neighbors do not fail with it.
        let is_alone = |cache: &Cache, key| cache.contents.goes_alone(key);
        while !is_alone(cache, key) && key.0 + (versions.len() as u64) < stripe_end {
            let next = Key(key.0 + versions.len() as u64);
            match Self::may_destage(cache, next) {
                Some(version) if !is_alone(cache, next) => versions.push(version),
                _ => break,
            }
        }
        let blocks = BlockRange { first: key.block(), count: versions.len() as u64 };
        for version in &versions {
            cache.begin_destaging(&version.place);
        }
        let mut through = Vec::new();
        for key in (key.0..key.0 + blocks.count).map(Key) {
            cache.contents.begin_destaging(key);
            if !self.through_waiters.is_empty() {
                through.extend(self.take_through(key));
            }
        }
        let buf = cache.config.buffers.get(versions.len() * BLOCK_SIZE);
        let next = Key(key.0 + blocks.count);
        let destage = Self::destage(cache, (volume, blocks), reason, versions);
        let id = self.destages.insert(Destage { buf, reads: 1, through, filled, ..destage });
        self.gathered += blocks.count;
        let flow = &mut cache.volume_mut(volume).flow;
        flow.destage_writes += 1;
        flow.collecting += blocks.count;
        self.gather(cache, id, fx);
        Ok(next)
    }

    /// A destage that has not begun, of these versions of blocks.
    fn destage(
        cache: &Cache,
        (volume, blocks): (VolumeId, BlockRange),
        reason: DestageReason,
        versions: Vec<Version>,
    ) -> Destage {
        Destage {
            volume,
            blocks,
            reason,
            versions,
            buf: IoBuf::empty(),
            reads: 0,
            bad: Vec::new(),
            error: None,
            unread: Vec::new(),
            through: Vec::new(),
            written: false,
            unflushed: false,
            started: cache.now,
            in_cut: false,
            filled: 0,
        }
    }

    /// Requests a flush of the cache device, so that a block can go to the primary.
    fn want_block_durable(cache: &mut Cache, key: Key, place: &Place) {
        let in_log = !cache.contents.is_in_store(place);
        let last = in_log.then(|| cache.log.segment(place.segment as usize).last_lsn);
        let last = last.unwrap_or_default();
        let last = cache.contents.unsettled(key).map_or(last, |lsn| lsn.max(last));
        let lsn = last.min(cache.log.completed());
        cache.log.want_durable(lsn);
    }

    /// Notes that one source of a destage has been read; starts the write after the last.
    pub(super) fn gathered(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let destage = self.destages.get_mut(id);
        destage.reads -= 1;
        if destage.reads > 0 {
            return;
        }
        let (volume, blocks, in_cut) = (destage.volume, destage.blocks, destage.in_cut);
        cache.volume_mut(volume).flow.collecting -= blocks.count;
        if in_cut {
            return self.staged(cache, id, fx);
        }
        if let Some(error) = self.destages.get_mut(id).error.take() {
            // The blocks are read again after a pause; the others of the volume need not wait.
            cache.probe_cache(fx);
            self.fail_reads(cache, id, &error);
            self.ended(cache, id, &Err(error));
            return self.forget(cache, id, false);
        }
        if self.destages.get(id).bad.is_empty() {
            return self.write(cache, id, fx);
        }
        // Corrupt blocks are fenced; their neighbors go in a later destage.
        self.fence_bad(cache, id);
        self.ended(cache, id, &Err(ErrorKind::Corrupt.into()));
        self.forget(cache, id, false);
    }

    /// Notes which blocks the cache device could not read back.
    fn fail_reads(&mut self, cache: &mut Cache, id: Id, error: &IoError) {
        let destage = self.destages.get_mut(id);
        let (volume, first) = (destage.volume, destage.blocks.first);
        for at in std::mem::take(&mut destage.unread) {
            let key = Key::new(volume, first + at as u64);
            let is_new = cache.contents.immovable_until(key).is_none();
            let pause = cache.note_immovable(key);
            if is_new && cache.health() == Health::Good {
                let blocks = BlockRange { first: key.block(), count: 1 };
                cache.tell(Event::DestageFailed { volume, blocks, kind: error.kind(), pause });
            }
        }
    }

    /// Fences the blocks whose newest version is corrupt.
    fn fence_bad(&self, cache: &mut Cache, id: Id) {
        let destage = self.destages.get(id);
        for &at in &destage.bad {
            let key = Key::new(destage.volume, destage.blocks.first + at as u64);
            // A copy of it may be good.
            let Version { place, seq, .. } = &destage.versions[at];
            let same = cache.contents.same_version(key, place).is_some();
            if same && cache.log.seq_of(place) == *seq {
                cache.fence(key);
            }
        }
    }

    fn write(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let destage = self.destages.get_mut(id);
        let (volume, blocks) = (destage.volume, destage.blocks);
        let mut buf = std::mem::take(&mut destage.buf);
        let zero = destage.versions.iter().all(|version| version.place.kind == EntryKind::Zero);
        let range = cache.bytes_on_volume(volume, blocks);
        let ticket = Ticket::DestageWrite(id);
        cache.stats_of(volume).destage_writes += 1;
        if zero {
            let flags = IoFlags { no_hole: true, ..IoFlags::default() };
            let buf = IoBuf::empty();
            let io = |tag: IoTag| Io { tag, op: IoOp::WriteZeroes, range, flags, buf };
            return cache.send(fx, Target::Primary(volume), ticket, io);
        }
        buf.set_len(range.len as usize);
        cache.send(fx, Target::Primary(volume), ticket, |tag| Io::write(tag, range.offset, buf));
    }

    /// Handles the end of a destage write.
    pub fn written(&mut self, cache: &mut Cache, id: Id, done: Completion) {
        let Destage { volume, in_cut, .. } = *self.destages.get(id);
        if let Err(error) = &done.result {
            match in_cut || is_away(error.kind()) {
                true => self.back_off(cache, id, error),
                false => self.refused(cache, id, error),
            }
        }
        self.ended(cache, id, &done.result);
        if in_cut {
            self.destages.get_mut(id).buf = done.buf;
        }
        if done.result.is_err() {
            return match in_cut {
                true => self.write_again(cache, id),
                false => self.forget(cache, id, false),
            };
        }
        let destage = self.destages.get_mut(id);
        destage.written = true;
        let (now, blocks, reason) = (cache.now, destage.blocks.count, destage.reason);
        let filled = std::mem::take(&mut destage.filled);
        let volume = cache.volume_mut(volume);
        volume.stats.destaged_blocks += blocks;
        volume.stats.destaged_by[reason as usize] += blocks;
        volume.flow.destaged(now, blocks, filled);
        (volume.failures, volume.progress) = (0, now);
        if volume.written.is_empty() {
            volume.written_since = now;
        }
        volume.written.push(id);
    }

    /// Notifies the writes that wait for the blocks, and takes the destage out of those in flight.
    fn ended(&mut self, cache: &mut Cache, id: Id, result: &IoResult<()>) {
        let volume = self.destages.get(id).volume;
        cache.volume_mut(volume).flow.destage_writes -= 1;
        if let Err(error) = result {
            self.note_failed(cache, id, error);
        }
        for (_, op) in std::mem::take(&mut self.destages.get_mut(id).through) {
            cache.out.note(Note::OnPrimary(op, result.clone()));
        }
    }

    /// In a mode that promises that the primary alone is complete, fails the waiting flushes after
    /// a failed destage, and makes later ones wait until its blocks are on the primary.
    fn note_failed(&self, cache: &mut Cache, id: Id, error: &IoError) {
        let volume = self.destages.get(id).volume;
        if !cache.volume(volume).config.mode.is_complete() {
            return;
        }
        let now = cache.now;
        let state = cache.volume_mut(volume);
        state.leftover = Some(Leftover::at(now));
        for op in std::mem::take(&mut state.leftover_waiters) {
            cache.out.note(Note::FlushPart(op, Err(error.clone())));
        }
    }

    /// Notes that the primary answered a destage with an error, which may be that of one block: its
    /// blocks go alone from now on, and one that went alone rests. If nothing else goes through,
    /// destaging of the volume pauses.
    fn refused(&mut self, cache: &mut Cache, id: Id, error: &IoError) {
        let Destage { volume, blocks, .. } = *self.destages.get(id);
        let first = Key::new(volume, blocks.first);
        let is_new = cache.contents.immovable_until(first).is_none();
        let pause = if blocks.count == 1 { cache.note_immovable(first) } else { Duration::ZERO };
        if cache.volume(volume).failures >= REFUSALS_MAX {
            return self.back_off(cache, id, error);
        }
        cache.volume_mut(volume).failures += 1;
        if blocks.count > 1 {
            (first.0..first.0 + blocks.count).for_each(|key| cache.contents.isolate(Key(key)));
            for (key, op) in std::mem::take(&mut self.destages.get_mut(id).through) {
                self.wait_through(key, op);
            }
        }
        if is_new {
            cache.tell(Event::DestageFailed { volume, blocks, kind: error.kind(), pause });
        }
    }

    /// Pauses destaging of the volume after a failure.
    fn back_off(&self, cache: &mut Cache, id: Id, error: &IoError) {
        let Destage { volume, blocks, .. } = *self.destages.get(id);
        let now = cache.now;
        let state = cache.volume_mut(volume);
        let pause = RETRY_FIRST * (1 << state.failures.min(RETRY_DOUBLINGS_MAX));
        state.retry_at = now + pause;
        state.failures += 1;
        cache.tell(Event::DestageFailed { volume, blocks, kind: error.kind(), pause });
    }

    /// Whether the primary should be flushed for the blocks written to it.
    pub fn flush_is_due(&self, cache: &Cache, volume: usize) -> bool {
        let Some(volume) = cache.volumes[volume].as_ref() else { return false };
        let written = volume.written.len();
        let impatient = self.draining
            || volume.draining
            || *cache.state() == State::Stopping
            || !volume.leftover_waiters.is_empty()
            || volume.is_leaving;
        // Near the limit, writes wait for blocks to become clean.
        let crowded = cache.is_crowded(volume.config.id);
        written >= FLUSH_BATCH
            || written > 0
                && volume.flow.destage_writes == 0
                && self.ends_with_flush(volume.config.id)
            || written > 0
                && (cache.now.since(volume.written_since) >= FLUSH_AFTER
                    || crowded
                    || impatient && volume.flow.destage_writes == 0)
    }

    /// Handles the end of the primary's flush that covers a destage.
    pub fn flushed(&mut self, cache: &mut Cache, id: Id, result: &IoResult<()>) {
        if let Err(error) = result {
            self.back_off(cache, id, error);
            self.note_failed(cache, id, error);
            let destage = self.destages.get_mut(id);
            (destage.written, destage.unflushed) = (false, true);
        }
        self.covered.push_back(id);
        self.end_covered(cache);
    }

    /// Ends destages whose flush has ended, as many as one turn allows: blocks that are durable
    /// become clean, others may set out again.
    fn end_covered(&mut self, cache: &mut Cache) {
        while self.ended < ENDED_MAX
            && let Some(id) = self.covered.pop_front()
        {
            let destage = self.destages.get_mut(id);
            let (blocks, failed) = (destage.blocks.count, destage.unflushed);
            destage.unflushed = false;
            self.ended += blocks;
            cache.volume_mut(destage.volume).flow.unflushed_blocks -= blocks;
            match failed && destage.in_cut {
                true => self.write_again(cache, id),
                false => self.forget(cache, id, !failed),
            }
        }
    }

    /// Whether the next turn should come at once: this one has done enough, or has ended destages
    /// for which others wait that had their turn before.
    pub fn goes_on(&self) -> bool {
        let ended = self.ended > 0 || !self.covered.is_empty();
        self.gathered >= GATHERED_MAX || ended || self.cuts_go_on()
    }

    /// Drops a destage; its blocks become clean if the primary has them durably.
    fn forget(&mut self, cache: &mut Cache, id: Id, durable: bool) {
        let destage = self.destages.remove(id);
        let started = durable.then_some(destage.started);
        let state = cache.volume_mut(destage.volume);
        state.flow.filled_blocks -= destage.filled;
        for (block, version) in destage.blocks.iter().zip(&destage.versions) {
            let key = Key::new(destage.volume, block);
            let newest = Self::is_newest(cache, key, version);
            cache.end_destaging(&version.place, version.seq);
            if durable && newest {
                cache.contents.mark_clean(key, &mut cache.ram);
            }
            // The newer version of a passed block may have failed.
            if !version.passed {
                cache.contents.end_destaging(key, started);
            }
        }
        if destage.in_cut {
            self.ended_in_cut(cache, &destage);
        }
    }
}

#[cfg(test)]
mod tests;
