//! Worlds whose volumes and cache change while clients use them: a volume grows, leaves and
//! returns, and the cache is made again, smaller or larger, on its device or on another one.
//!
//! Another configuration comes into force at a start (ADR 25): the server drains what must not stay
//! in the cache, stops in order, and the next one opens everything. While a volume is away its
//! primary is written without the cache.

use forebay_block::{BLOCK_SIZE, ByteRange, VOLUMES_MAX, VolumeId};
use forebay_engine::Trust;
use forebay_model::Change as Content;
use forebay_volume::offline::{ReadError, examine};
use forebay_volume::pool::{Absent, is_removed};

use crate::atlas::Scenario;
use crate::config::Setup;
use crate::failure::{Failure, Kind};
use crate::pages::Pages;
use crate::planted::Bug;
use crate::rng::Rng;
use crate::server::Served;
use crate::world::World;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Most writes to the primary of a volume that has left.
const WRITES_ALONE: u64 = 6;
/// Percentage of removals without a drain, which are refused if anything is dirty.
const UNDRAINED_PERCENT: u64 = 20;
/// How long a drain is waited for in a world with faults, in nanoseconds.
const DRAIN_PATIENCE: u64 = 120_000_000_000;

/// A change of the configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// A volume grows to this size in bytes.
    Grow(usize, u64),
    /// A volume leaves, after a drain or without one.
    Remove {
        /// Its index.
        volume: usize,
        /// Whether it is drained first.
        drained: bool,
    },
    /// A volume returns.
    Add(usize),
    /// The cache is given up and made again.
    Cache {
        /// Segments of each shard, in log and store.
        segments: u64,
        /// Whether it moves to another device.
        moves: bool,
    },
}

impl Change {
    /// A change in the world of a setup.
    #[must_use]
    pub fn from_rng(rng: &mut Rng, setup: &Setup) -> Self {
        let volume = rng.below(setup.volumes.len() as u64) as usize;
        match rng.below(4) {
            0 => {
                let size = setup.volumes[volume].size;
                let sectors = rng.within(1, size / 512);
                Self::Grow(volume, if rng.percent(50) { size } else { sectors * 512 })
            }
            1 => Self::Remove { volume, drained: !rng.percent(UNDRAINED_PERCENT) },
            2 => Self::Add(volume),
            _ => {
                let log = setup.log_segments.map_or(0, u64::from);
                let segments = log + rng.pick(&[8, 9, 12, 16, 24]);
                Self::Cache { segments, moves: rng.percent(50) }
            }
        }
    }
}

/// The volumes as they are configured, and the change that is about to come.
#[derive(Debug)]
pub(crate) struct Steering {
    /// The ID of each volume in the pool, while it is configured.
    pub ids: Vec<Option<VolumeId>>,
    /// The size of each volume when its fingerprint was last recorded, in bytes.
    pub recorded: Vec<u64>,
    /// The volumes that have left.
    pub absent: Vec<Absent>,
    /// Number of dirty blocks of each volume at the last stop, if the cache was in use then.
    dirty: Option<Vec<u64>>,
    next: Option<Change>,
}

impl Steering {
    /// Gives the volumes of a setup their first sizes.
    pub fn begin(setup: &mut Setup) -> Self {
        for (volume, &size) in setup.volumes.iter_mut().zip(setup.steered.iter().flatten()) {
            volume.size = size;
        }
        let count = setup.volumes.len();
        Self {
            ids: (0..count).map(|volume| Some(VolumeId(volume as u8))).collect(),
            recorded: setup.volumes.iter().map(|volume| volume.size).collect(),
            absent: Vec::new(),
            dirty: Some(vec![0; count]),
            next: None,
        }
    }

    /// The configured volumes, with their IDs.
    pub fn served(&self) -> Vec<(usize, VolumeId)> {
        let ids = self.ids.iter().enumerate();
        ids.filter_map(|(volume, id)| id.map(|id| (volume, id))).collect()
    }

    /// The configured volumes.
    pub fn configured(&self) -> Vec<usize> {
        self.served().into_iter().map(|(volume, _)| volume).collect()
    }

    /// Takes the IDs that the pool gives to the configured volumes.
    pub fn take_ids(&mut self, ids: &[VolumeId]) {
        for (volume, &id) in self.configured().into_iter().zip(ids) {
            self.ids[volume] = Some(id);
        }
    }
}

impl World {
    /// The volume with this ID.
    pub(crate) fn volume_of(&self, id: VolumeId) -> usize {
        let at = self.steering.ids.iter().position(|&other| other == Some(id));
        at.expect("only configured volumes are served")
    }

    /// The part of a range that the volume has now, if it is configured.
    pub(crate) fn served(&self, volume: usize, range: ByteRange) -> Option<ByteRange> {
        self.steering.ids[volume]?;
        let here = range.intersection(&ByteRange::new(0, self.setup.volumes[volume].size));
        (range.is_empty() || !here.is_empty()).then_some(here)
    }

    /// The volumes that the next server serves.
    pub(crate) fn serves(&mut self) -> Vec<Served> {
        let first = self.setup.steered.as_ref();
        let first = first.filter(|_| self.mischief.interferes(Bug::GrowthForgotten));
        let size = |volume: usize| {
            let size = self.setup.volumes[volume].size;
            first.map_or(size, |sizes| sizes[volume])
        };
        let served = self.steering.served().into_iter();
        served.map(|(volume, id)| Served { volume, id, size: size(volume) }).collect()
    }

    /// The IDs that a new cache keeps.
    pub(crate) fn kept_ids(&self) -> Vec<(VolumeId, String)> {
        let served = self.steering.served().into_iter();
        let served = served.filter(|_| self.setup.steered.is_some());
        // Not that of a volume that the pool has not seen yet.
        let served = served.filter(|(_, id)| usize::from(id.0) < VOLUMES_MAX);
        served.map(|(volume, id)| (id, format!("volume{volume}"))).collect()
    }

    /// The removed volumes of which the log has no entry any more.
    pub(crate) fn forgotten(&mut self) -> Vec<VolumeId> {
        if self.setup.steered.is_none() {
            return Vec::new();
        }
        let mut read = |at: u64, bytes: &mut [u8]| {
            if at + bytes.len() as u64 > self.cache.size() {
                return Err(ReadError::Device("the device has shrunk".to_owned()));
            }
            self.cache.view().read(at, bytes);
            Ok(())
        };
        let Ok(report) = examine(&mut read, false) else { return Vec::new() };
        if !self.mischief.interferes(Bug::IdUsedAgain) {
            return report.forgotten();
        }
        let removed = report.superblock.volumes.iter().filter(|volume| is_removed(volume));
        removed.map(|volume| volume.id).collect()
    }

    /// Notes at a stop how much is dirty, and the sizes for which fingerprints are recorded.
    pub(crate) fn note_dirty(&mut self) {
        let states = self.volume_states();
        let mut dirty = vec![0; self.models.len()];
        for (volume, id) in self.steering.served() {
            let own = states.iter().filter(|state| state.id == id);
            dirty[volume] = own.map(|state| state.dirty_blocks).sum();
            self.steering.recorded[volume] = self.setup.volumes[volume].size;
        }
        self.steering.dirty = Some(dirty);
    }

    /// Notes a stop without a cache in use.
    pub(crate) fn note_uncached(&mut self) {
        self.steering.dirty = None;
    }

    /// Brings a change into force, unless a crash comes first.
    pub(crate) fn steer(&mut self, change: &Change) -> Result<(), Failure> {
        self.settle()?;
        if self.server.is_none() || !self.is_possible(change) {
            return Ok(());
        }
        let crashes = self.tally.crashes;
        let drained = match change {
            Change::Remove { drained: false, .. } => Vec::new(),
            Change::Remove { .. } if self.mischief.interferes(Bug::LeftUndrained) => Vec::new(),
            Change::Remove { volume, .. } => vec![*volume],
            Change::Cache { .. } if self.mischief.interferes(Bug::GivenUpUndrained) => Vec::new(),
            Change::Cache { .. } => self.steering.configured(),
            Change::Grow(..) | Change::Add(_) => Vec::new(),
        };
        let drained: Vec<VolumeId> =
            drained.into_iter().filter_map(|volume| self.steering.ids[volume]).collect();
        let drain = |world: &mut Self, on: bool| {
            if let Some(server) = world.server.as_mut() {
                server.each(|engine| drained.iter().for_each(|&id| engine.drain_volume(id, on)));
            }
        };
        let is_drained = |world: &Self| {
            let states = world.volume_states();
            let mut own = states.iter().filter(|state| drained.contains(&state.id));
            own.all(|state| state.dirty_blocks == 0)
        };
        drain(self, true);
        // Blocks that a fault keeps from the primary are not waited for: the volume stays.
        let until = self.now + DRAIN_PATIENCE;
        let faulty = !matches!(self.setup.scenario, Scenario::Crashes | Scenario::ModeSwitches);
        self.wait("volumes to be drained", |world| {
            let is_over = faulty && world.now > until;
            is_drained(world) || is_over || world.tally.crashes > crashes
        })?;
        if self.tally.crashes > crashes {
            return Ok(());
        }
        if !is_drained(self) {
            drain(self, false);
            return Ok(());
        }
        self.steering.next = Some(change.clone());
        self.restart()?;
        self.steering.next = None;
        Ok(())
    }

    fn is_possible(&self, change: &Change) -> bool {
        let is_here = |volume: usize| self.steering.ids[volume].is_some();
        match *change {
            Change::Grow(volume, size) => size > self.setup.volumes[volume].size,
            Change::Remove { volume, .. } => {
                is_here(volume) && self.steering.configured().len() > 1
            }
            Change::Add(volume) => !is_here(volume),
            Change::Cache { segments, .. } => segments != self.setup.segments,
        }
    }

    /// A crash came before the stop was over: the next server is started with the new configuration
    /// if that needs nothing of the one before.
    pub(crate) fn change_after_crash(&mut self) {
        match self.steering.next.take() {
            Some(Change::Grow(volume, size)) => self.grow(volume, size),
            Some(Change::Add(volume)) => self.add(volume),
            _ => {}
        }
    }

    /// Brings the change into force after an orderly stop.
    pub(crate) fn change_at_rest(&mut self) -> Result<(), Failure> {
        match self.steering.next.take() {
            Some(Change::Grow(volume, size)) => self.grow(volume, size),
            Some(Change::Add(volume)) => self.add(volume),
            Some(Change::Remove { volume, .. }) => self.remove(volume)?,
            Some(Change::Cache { segments, moves }) => self.give_up_cache(segments, moves)?,
            None => {}
        }
        Ok(())
    }

    fn grow(&mut self, volume: usize, size: u64) {
        self.trace.line(self.now, || format!("volume {volume} grows to {size}"));
        self.setup.volumes[volume].size = size;
        self.tally.changes += 1;
    }

    fn add(&mut self, volume: usize) {
        self.trace.line(self.now, || format!("volume {volume} returns"));
        // The pool chooses another one.
        self.steering.ids[volume] = Some(VolumeId(u8::MAX - volume as u8));
        self.tally.changes += 1;
    }

    /// Removes a volume. If it has dirty blocks, that is refused, and the volume stays, as it does
    /// with a cache that has failed.
    fn remove(&mut self, volume: usize) -> Result<(), Failure> {
        let Some(dirty) = self.steering.dirty.as_ref().map(|all| all[volume]) else {
            return Ok(());
        };
        let Some(id) = self.steering.ids[volume].take() else { return Ok(()) };
        let dirty = if self.mischief.interferes(Bug::LeftUndrained) { 0 } else { dirty };
        self.trace.line(self.now, || format!("volume {volume} leaves, {dirty} blocks dirty"));
        self.steering.absent.retain(|other| other.id != id);
        self.steering.absent.push(Absent { id, dirty, forget: false });
        if dirty > 0 {
            self.boot(false);
            let refused = self.refusal().is_some_and(|why| why.contains("not on its primary yet"));
            if !refused {
                return Err(self.fail(Kind::Taken, "a volume with dirty blocks was removed"));
            }
            self.tally.refusals += 1;
            self.shut();
            self.steering.absent.pop();
            self.steering.ids[volume] = Some(id);
            return Ok(());
        }
        self.compare(volume, &self.models[volume])?;
        self.tally.changes += 1;
        self.write_alone(volume);
        Ok(())
    }

    /// Writes to the primary of a volume that has left, unless a fault kept it from a last flush.
    fn write_alone(&mut self, volume: usize) {
        if !self.primaries[volume].is_settled() {
            return;
        }
        let mut rng = self.rng.fork();
        let setup = &self.setup.volumes[volume];
        let all = ByteRange::new(0, setup.size);
        let windows = setup.windows.iter().map(|window| window.intersection(&all));
        let windows: Vec<_> = windows.filter(|window| !window.is_empty()).collect();
        if windows.is_empty() {
            return;
        }
        for _ in 0..rng.within(0, WRITES_ALONE) {
            let window = rng.pick(&windows);
            let offset = window.offset + rng.below(window.len.div_ceil(BLOCK)) * BLOCK;
            let range = window.intersection(&ByteRange::new(offset, BLOCK));
            let tag = self.next_tag;
            self.next_tag += 1;
            let model = &mut self.models[volume];
            let Some(bytes) = model.begin_write(tag, range, Content::Stamp) else { continue };
            if let Some(alone) = &mut self.alone[volume] {
                alone.begin_as(model, tag, range, Content::Stamp);
                alone.end_write(tag, true, true);
            }
            model.end_write(tag, true, true);
            self.primaries[volume].put(range.offset, &bytes);
        }
    }

    /// Gives up the cache: the next server makes one of another size.
    fn give_up_cache(&mut self, segments: u64, moves: bool) -> Result<(), Failure> {
        let Some(dirty) = self.steering.dirty.as_ref().map(|all| all.iter().sum::<u64>()) else {
            return Ok(());
        };
        if dirty > 0 && !self.mischief.interferes(Bug::GivenUpUndrained) {
            return Ok(());
        }
        self.trace.line(self.now, || format!("a cache of {segments} segments, moved: {moves}"));
        for volume in self.steering.configured() {
            self.compare(volume, &self.models[volume])?;
        }
        let newest = self.pool.last;
        let own = self.pool.witnesses.iter_mut().find(|witness| Some(witness.uuid) == newest);
        own.into_iter().for_each(|own| own.trust = Trust::Nothing);
        self.setup.set_segments(segments);
        let size = self.setup.cache.size;
        let image = match moves {
            true => Pages::new(size),
            false => self.cache.image().resized(size),
        };
        self.cache.exchange(size, image);
        self.tally.changes += 1;
        Ok(())
    }
}
