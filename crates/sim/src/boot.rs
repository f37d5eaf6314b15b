//! How a server starts and stops around its engines, like the real one: it reads the superblocks,
//! the engine's `pool::open` decides, the next superblock is written and flushed, the witness is
//! stored, and then the shards start. After an orderly stop the superblock records the stop and a
//! fingerprint of each primary. A crash may come between any two of these steps.

use std::collections::{BTreeMap, VecDeque};

use forebay_block::{ByteRange, Completion, Io, IoBuf, IoOp, IoTag};
use forebay_codec::crc32c;
use forebay_engine::{DetachedStripe, Health, LastStop, Target, Trust};
use forebay_format::{
    ANNOUNCEMENT_OFFSET, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, ShardArea, Superblock,
};
use forebay_volume::pool::{
    ALL_LOG, Division, OpenRequest, SPARE_PERCENT, VolumeSpec, Witness, closed, open,
};

use crate::atlas::Scenario;
use crate::disk::Discards;
use crate::failure::Kind;
use crate::pages::Pages;
use crate::rng::Rng;
use crate::server::{Server, Start};
use crate::world::{Failure, World};

/// Earlier device states kept, to restore one of them later.
const SNAPSHOTS_MAX: usize = 8;
/// A cache that keeps the format of an earlier build does so until a start with a number that is a
/// multiple of this.
const FORMAT_KEPT: u64 = 3;

/// The steps left before the shards start, or after they have stopped.
#[derive(Debug)]
pub(crate) struct Errand {
    superblock: Superblock,
    steps: VecDeque<Act>,
    /// The shards to start afterwards; `None` after a stop.
    start: Option<Start>,
}

#[derive(Debug)]
enum Act {
    Write(u64, IoBuf),
    Flush,
    Discard(ByteRange),
    /// Store these witnesses, at a start.
    Witnesses(Vec<Witness>),
    /// Record in the witness that nothing is dirty.
    NothingDirty,
    /// Record the ends of the logs.
    Stops(Vec<LastStop>),
}

/// State outside of the server's memory, and a running server's knowledge of its pool.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Witnesses, which are kept outside of the cache device.
    pub witnesses: Vec<Witness>,
    /// The last stop of each shard, by pool.
    pub stops: BTreeMap<[u8; 16], Vec<LastStop>>,
    /// Records of stripes that a failed cache has left: pool, shard, stripe.
    detached: Vec<([u8; 16], usize, DetachedStripe)>,
    /// The superblock of the running server, and the index of the copy to write next.
    current: Option<(Superblock, usize)>,
    errand: Option<Errand>,
    /// Why the last start was refused.
    pub refused: Option<String>,
    /// The UUID of the pool that was last served, after an orderly stop.
    pub last: Option<[u8; 16]>,
    /// Earlier states of the cache device, with the epoch of each.
    snapshots: VecDeque<(u32, Pages)>,
    /// Whether the device was set back, so that the next start must be refused.
    pub stale: bool,
    /// At the last stop a primary was believed to be sound although it had lost data that it still
    /// showed: an earlier server had written them.
    pub believed: bool,
    made: u64,
}

impl World {
    /// Starts a server; `reset`: regardless of the cache device's content.
    pub(crate) fn boot(&mut self, reset: bool) {
        self.pool.errand = None;
        self.pool.refused = None;
        self.forget_wanted_trust();
        if self.cache.is_gone() {
            self.pool.refused = Some("the cache device cannot be read".into());
            return;
        }
        let read = |offset| {
            let mut bytes = vec![0; SUPERBLOCK_BYTES];
            self.cache.view().read(offset, &mut bytes);
            bytes
        };
        let (copies, announcement) = (SUPERBLOCK_OFFSETS.map(read), read(ANNOUNCEMENT_OFFSET));
        self.pool.made += 1;
        let volumes = self.specs();
        let (forgotten, kept_ids) = (self.forgotten(), self.kept_ids());
        let request = OpenRequest {
            device_size: self.cache.size(),
            copies: [&copies[0], &copies[1]],
            announcement: &announcement,
            volumes: &volumes,
            witnesses: &self.pool.witnesses,
            absent: &self.steering.absent,
            division: Division {
                shards: self.setup.shards as u16,
                spare_percent: SPARE_PERCENT,
                log_percent: ALL_LOG,
            },
            kept_ids: &kept_ids,
            forgotten: &forgotten,
            reset,
            keeps_format: self.keeps_format(),
            uuid: u128::from(self.setup.seed << 16 | self.pool.made).to_le_bytes(),
            now_unix: 0,
        };
        let mut opened = match open(&request) {
            Ok(opened) => opened,
            Err(refusal) => {
                self.trace.line(self.now, || format!("refused: {refusal}"));
                self.pool.refused = Some(refusal.to_string());
                return;
            }
        };
        self.steering.take_ids(&opened.ids);
        if opened.fresh {
            // An older copy is not used: the witness says that nothing on it counts.
            self.pool.stale = false;
            self.use_small_geometry(&mut opened.superblock);
        }
        let writes = opened.writes().into_iter();
        let mut steps: VecDeque<Act> =
            writes.flat_map(|(at, bytes)| [Act::Write(at, bytes), Act::Flush]).collect();
        let discards = self.setup.cache.discards != Discards::Never;
        if let Some(range) = opened.discard().filter(|_| discards) {
            steps.push_back(Act::Discard(range));
        }
        steps.push_back(Act::Witnesses(opened.witnesses));
        let next = if opened.fresh { opened.copy } else { 1 - opened.copy };
        let superblock = opened.superblock;
        let start = Start {
            pool: superblock.pool,
            epoch: superblock.epoch,
            fresh: opened.fresh,
            unit_entries: superblock.unit_entries,
            discard: discards,
            trust: opened.trust,
            detached: (self.pool.detached.iter())
                .filter(|(pool, ..)| *pool == superblock.uuid)
                .map(|&(_, shard, stripe)| (shard, stripe))
                .collect(),
            stops: self.pool.stops.get(&superblock.uuid).cloned().unwrap_or_default(),
        };
        self.pool.current = Some((superblock.clone(), next));
        self.pool.errand = Some(Errand { superblock, steps, start: Some(start) });
        self.run_errand();
    }

    /// Whether a pool keeps the format of an earlier build at this start.
    fn keeps_format(&self) -> bool {
        self.setup.keeps_format && !self.pool.made.is_multiple_of(FORMAT_KEPT)
    }

    /// Shrinks the segments of a simulated pool below those of a real one.
    fn use_small_geometry(&self, superblock: &mut Superblock) {
        let len = self.setup.segments * u64::from(self.setup.segment_size);
        let area = |i| ShardArea { offset: (1 << 20) + i * len, len };
        superblock.segment_size = self.setup.segment_size;
        superblock.log_segments = self.setup.log_segments;
        superblock.unit_entries = self.setup.log_segments.is_some() && !self.keeps_format();
        superblock.shards = (0..self.setup.shards as u64).map(area).collect();
    }

    fn specs(&self) -> Vec<VolumeSpec> {
        let spec = |i: usize| VolumeSpec {
            name: format!("volume{i}"),
            size: self.setup.volumes[i].size,
            identity: format!("primary{i}"),
            path: format!("primary{i}"),
            fingerprint: self.fingerprint(i, self.steering.recorded[i]),
            blank: false,
            sampled: None,
            accepted: false,
            was_here: None,
        };
        self.steering.configured().into_iter().map(spec).collect()
    }

    /// A digest of the data in the first `size` bytes of a primary that clients may have changed,
    /// if it answers.
    fn fingerprint(&self, volume: usize, size: u64) -> Option<u64> {
        if self.primaries[volume].is_gone() {
            return None;
        }
        let mut bytes = Vec::new();
        for window in &self.setup.volumes[volume].windows {
            let window = window.intersection(&ByteRange::new(0, size));
            let from = bytes.len();
            bytes.resize(from + window.len as usize, 0);
            self.primaries[volume].view().read(window.offset, &mut bytes[from..]);
        }
        Some(u64::from(crc32c(&bytes)))
    }

    /// Records that the server stopped in order. Returns false if the device is out of use.
    pub(crate) fn close(&mut self) -> bool {
        let health = self.server.as_ref().map_or(Health::Detached, Server::health);
        let Some((last, copy)) = self.pool.current.take() else { return false };
        if health != Health::Good {
            self.note_uncached();
            return false;
        }
        let mut prints = Vec::new();
        self.pool.believed = false;
        self.note_dirty();
        for (volume, id) in self.steering.served() {
            // A fingerprint must be of the content that survives a power failure.
            let sound = self.primaries[volume].flush_at_once() && !self.has_failed_flush(id);
            self.pool.believed |= sound && self.primaries[volume].lost().next().is_some();
            prints.push((
                id,
                sound.then(|| self.fingerprint(volume, self.steering.recorded[volume])).flatten(),
            ));
        }
        self.pool.last = Some(last.uuid);
        let superblock = closed(last, &prints);
        let mut bytes = IoBuf::zeroed(SUPERBLOCK_BYTES);
        superblock.encode(&mut bytes);
        let mut steps = VecDeque::from([Act::Write(SUPERBLOCK_OFFSETS[copy], bytes), Act::Flush]);
        let before = self.pool.stops.get(&superblock.uuid).map_or(&[][..], Vec::as_slice);
        let stops = self.server.as_ref().map(|server| server.stops(self.now, before));
        steps.extend(stops.map(Act::Stops));
        let stats = self.server.as_ref().map(|server| server.stats(self.now));
        if stats.is_some_and(|all| all.iter().all(|shard| shard.dirty_blocks == 0)) {
            steps.push_back(Act::NothingDirty);
        }
        self.pool.errand = Some(Errand { superblock, steps, start: None });
        self.run_errand();
        true
    }

    /// Whether a start or stop is in progress.
    pub(crate) fn is_on_errand(&self) -> bool {
        self.pool.errand.is_some()
    }

    /// Drops everything in memory.
    pub(crate) fn drop_errand(&mut self) {
        self.pool.errand = None;
        self.pool.current = None;
    }

    /// Does the next step of a start or stop; the last one lets the shards start.
    fn run_errand(&mut self) {
        let Some(errand) = &mut self.pool.errand else { return };
        match errand.steps.pop_front() {
            Some(Act::Write(at, bytes)) => self.errand_io(Io::write(IoTag(0), at, bytes)),
            Some(Act::Discard(range)) => {
                self.errand_io(Io::bare(Self::DISCARD, IoOp::Discard, range));
            }
            Some(Act::Flush) => self.errand_io(Io::flush(IoTag(0))),
            Some(Act::Witnesses(stored)) => {
                let epoch = errand.superblock.epoch;
                for one in stored {
                    self.pool.witnesses.retain(|witness| witness.uuid != one.uuid);
                    self.pool.witnesses.push(one);
                }
                self.keep_snapshot(epoch);
                self.run_errand();
            }
            Some(Act::NothingDirty) => {
                let uuid = errand.superblock.uuid;
                let own = self.pool.witnesses.iter_mut().find(|one| one.uuid == uuid);
                own.into_iter().for_each(|own| own.dirty = false);
                self.run_errand();
            }
            Some(Act::Stops(stops)) => {
                self.pool.stops.insert(errand.superblock.uuid, stops);
                self.run_errand();
            }
            None => {
                let start = self.pool.errand.take().and_then(|errand| errand.start);
                if let Some(start) = start {
                    self.start_server(start);
                }
            }
        }
    }

    /// The tag of the discard of a new pool, which may fail.
    const DISCARD: IoTag = IoTag(1);

    fn errand_io(&mut self, io: Io) {
        self.start_io(Self::ERRAND, Target::Cache, io);
    }

    /// Takes the completion of a step.
    pub(crate) fn errand_done(&mut self, done: &Completion) {
        match &done.result {
            Ok(()) => self.run_errand(),
            Err(_) if done.tag == Self::DISCARD => {
                let start = self.pool.errand.as_mut().and_then(|errand| errand.start.as_mut());
                start.expect("a start discards").discard = false;
                self.run_errand();
            }
            Err(error) => {
                let starting = self.pool.errand.take().is_some_and(|e| e.start.is_some());
                if starting {
                    self.pool.refused = Some(format!("the superblock cannot be written: {error}"));
                }
            }
        }
    }

    /// Records how far the device may be trusted.
    pub(crate) fn store_trust(&mut self, trust: Trust) -> Trust {
        let uuid = self.pool.current.as_ref().map(|(superblock, _)| superblock.uuid);
        let witness = self.pool.witnesses.iter_mut().find(|w| Some(w.uuid) == uuid);
        let Some(witness) = witness else { return trust };
        witness.trust = witness.trust.max(trust);
        witness.trust
    }

    /// Records stripes that the cache of a shard has left.
    pub(crate) fn store_detached(&mut self, shard: usize, stripes: &[DetachedStripe]) {
        let Some((superblock, _)) = &self.pool.current else { return };
        let uuid = superblock.uuid;
        self.pool.detached.extend(stripes.iter().map(|&stripe| (uuid, shard, stripe)));
        self.tally.detached += stripes.len() as u64;
    }

    fn keep_snapshot(&mut self, epoch: u32) {
        let kept = [Scenario::CacheStale, Scenario::CacheDamaged];
        if !kept.into_iter().any(|scenario| self.setup.meets(scenario)) {
            return;
        }
        self.pool.snapshots.push_back((epoch, self.cache.image()));
        if self.pool.snapshots.len() > SNAPSHOTS_MAX {
            self.pool.snapshots.pop_front();
        }
    }

    /// Sets the cache device back to its content at an earlier start, if there was one.
    pub(crate) fn set_back(&mut self) {
        let Some((newest, _)) = self.pool.snapshots.back() else { return };
        let newest = *newest;
        let earlier: Vec<_> = self.pool.snapshots.iter().filter(|(e, _)| *e < newest).collect();
        if earlier.is_empty() {
            return;
        }
        let (_, image) = earlier[self.rng.below(earlier.len() as u64) as usize].clone();
        self.cache.replace(image);
        self.pool.stale = true;
    }

    /// Copies the cache device's content at `at` as of one of its earlier starts.
    pub(crate) fn earlier(&self, rng: &mut Rng, at: u64, out: &mut [u8]) {
        if let Some(last) = self.pool.snapshots.len().checked_sub(1) {
            let (_, image) = &self.pool.snapshots[rng.within(0, last as u64) as usize];
            image.read(at, out);
        }
    }

    /// Why the start was refused, by the pool or by an engine.
    pub(crate) fn refusal(&self) -> Option<String> {
        let of_engine = || self.server.as_ref().and_then(Server::refusal);
        self.pool.refused.clone().or_else(of_engine)
    }

    /// Fails if a device that was set back was accepted.
    pub(crate) fn check_stale(&self) -> Result<(), Failure> {
        if self.pool.stale {
            return Err(self.fail(Kind::Taken, "an older copy of the cache device was not refused"));
        }
        Ok(())
    }
}
