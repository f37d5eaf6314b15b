//! Planted bugs: deliberate mistakes between the engine and its disks, to prove that the simulator
//! finds them. The engine is the real one and knows nothing of this.
//!
//! Each bug stands for a mistake that an engine could make: a step that it forgets is omitted here,
//! and a wrong step is done wrong here.

use std::collections::{BTreeMap, BTreeSet};

use forebay_block::{ByteRange, Completion, ErrorKind, Io, IoBuf, IoOp};
use forebay_engine::{CutNews, CutOrder, Stats, Target, VolumeState};

use crate::atlas::Scenario;
use crate::config::{
    MIXED_SEEDS, ORDERED_SEEDS, STEERED_SEEDS, STORE_SEEDS, STRIPED_SEEDS, Setup, TAKEOVER_SEEDS,
};
use crate::disk::Slot;
use crate::failure::Kind;
use crate::forge::{self, Forger, Forgery};
use crate::rng::Rng;
use crate::units::{Layout, Slots, Uncovered};

/// A deliberate mistake.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Bug {
    /// A flush of the log is acknowledged without flushing the cache device.
    CacheFlushSkipped,
    /// Blocks become clean when the primary has written them, instead of when it has flushed them.
    PrimaryFlushSkipped,
    /// Force unit access is ignored.
    FuaIgnored,
    /// A record counts as written when it is submitted.
    RecordAckedEarly,
    /// A destage is acknowledged before it is complete, so that a later one may overtake it.
    DestageAckedEarly,
    /// Some destage writes are never carried out.
    DestageDropped,
    /// A miss is filled with the primary's content from before the last write.
    StaleFill,
    /// The last pages of some records are not written.
    RecordTruncated,
    /// A read of the primary returns the neighboring block.
    WrongBlockRead,
    /// Recovery treats dirty blocks as clean.
    DirtyForgotten,
    /// Recovery ignores invalidations.
    InvalidationForgotten,
    /// Recovery ignores deltas, and treats the base as the newest version.
    DeltaForgotten,
    /// Recovery ignores blocks stored against similar ones.
    SimilarForgotten,
    /// Recovery ignores blocks that share another's payload.
    DuplicateForgotten,
    /// Records claim that everything before them is clean.
    CleanTooEarly,
    /// Entries name the next block.
    EntryOffByOne,
    /// Recovery applies the records of a segment from the last to the first.
    ReplayedBackwards,
    /// Footers are never written.
    FooterSkipped,
    /// Recovery accepts a torn record at the end of the log.
    TornRecordAccepted,
    /// The engine keeps its old mode after a switch.
    SwitchForgotten,
    /// Stripes that a failed cache has left are not recorded.
    DetachedForgotten,
    /// The log names units of the store that no flush has covered.
    UnitFlushSkipped,
    /// A slot of the store is written again before the record that frees it is durable.
    SlotReusedEarly,
    /// An extent of the store is discarded before the record that frees it is durable.
    DiscardedEarly,
    /// The last page of some units is not written.
    UnitTruncated,
    /// Recovery ignores blocks of the store that the log names again.
    MappingForgotten,
    /// Recovery looks for blocks of the store in the neighboring page.
    MappingOffByOne,
    /// Recovery ignores invalidations of blocks in the store.
    EvictionForgotten,
    /// A server that takes over forgets one of the requests under way.
    RequestForgotten,
    /// A server that takes over does an answered write again, after a newer one.
    WriteRepeated,
    /// Writes are answered when their record is in the memory of the process; only a flush hands it
    /// to the cache device.
    AnsweredFromMemory,
    /// A server that takes over answers flushes of a primary that it has not written to itself,
    /// unlike the server before.
    DeadWritesUnflushed,
    /// A shard writes its part of a cut before the others have staged theirs.
    CutWrittenEarly,
    /// Answers are not withheld until all shards have taken their part of a cut.
    CutReleasedEarly,
    /// Stripes leave a failed cache before the last cut of an ordered volume is staged.
    LeftBeforeLastCut,
    /// The primary is not flushed after a cut.
    CutUnflushed,
    /// Ordered volumes are cut without regard to the write-cache depth.
    DepthForgotten,
    /// The log does not say that blocks have become dirty that fill a stripe of the primary.
    FillingForgotten,
    /// A volume is removed before its dirty blocks are on its primary.
    LeftUndrained,
    /// A cache is given up before its dirty blocks are on the primaries.
    GivenUpUndrained,
    /// The ID of a removed volume is used again while the log has entries of it.
    IdUsedAgain,
    /// A volume that has grown is served with its first size.
    GrowthForgotten,
    /// Blocks are not destaged because of their age.
    AgeIgnored,
    /// Bytes written to the store are not counted.
    StoreUncounted,
    /// Blocks that reads take from the cache device are counted twice.
    HitsCountedTwice,
    /// One of the dirty blocks of a volume is not counted.
    DirtyUncounted,
    /// The oldest dirty block has no age.
    OldestForgotten,
    /// The primary of an ordered volume has no age.
    PrimaryAgeForgotten,
    /// After an error of a primary, a read of another one fails.
    ErrorSpread,
}

impl Bug {
    /// Every planted bug.
    pub const ALL: [Self; 49] = [
        Self::CacheFlushSkipped,
        Self::PrimaryFlushSkipped,
        Self::FuaIgnored,
        Self::RecordAckedEarly,
        Self::DestageAckedEarly,
        Self::DestageDropped,
        Self::StaleFill,
        Self::RecordTruncated,
        Self::WrongBlockRead,
        Self::DirtyForgotten,
        Self::InvalidationForgotten,
        Self::DeltaForgotten,
        Self::SimilarForgotten,
        Self::DuplicateForgotten,
        Self::CleanTooEarly,
        Self::EntryOffByOne,
        Self::ReplayedBackwards,
        Self::FooterSkipped,
        Self::TornRecordAccepted,
        Self::SwitchForgotten,
        Self::DetachedForgotten,
        Self::UnitFlushSkipped,
        Self::SlotReusedEarly,
        Self::DiscardedEarly,
        Self::UnitTruncated,
        Self::MappingForgotten,
        Self::MappingOffByOne,
        Self::EvictionForgotten,
        Self::RequestForgotten,
        Self::WriteRepeated,
        Self::AnsweredFromMemory,
        Self::DeadWritesUnflushed,
        Self::CutWrittenEarly,
        Self::CutReleasedEarly,
        Self::LeftBeforeLastCut,
        Self::CutUnflushed,
        Self::DepthForgotten,
        Self::FillingForgotten,
        Self::LeftUndrained,
        Self::GivenUpUndrained,
        Self::IdUsedAgain,
        Self::GrowthForgotten,
        Self::AgeIgnored,
        Self::StoreUncounted,
        Self::HitsCountedTwice,
        Self::DirtyUncounted,
        Self::OldestForgotten,
        Self::PrimaryAgeForgotten,
        Self::ErrorSpread,
    ];

    /// The first seed whose world can show it.
    #[must_use]
    pub fn first_seed(self) -> u64 {
        match self {
            Self::FillingForgotten => STRIPED_SEEDS,
            Self::AgeIgnored => MIXED_SEEDS,
            _ if self.needs_changes() => STEERED_SEEDS,
            _ if self.needs_order() => ORDERED_SEEDS,
            _ if self.needs_takeover() => TAKEOVER_SEEDS,
            _ if self.needs_store() => STORE_SEEDS,
            _ => 0,
        }
    }

    /// Whether only a world in which servers take over can show it.
    fn needs_takeover(self) -> bool {
        matches!(
            self,
            Self::RequestForgotten
                | Self::WriteRepeated
                | Self::AnsweredFromMemory
                | Self::DeadWritesUnflushed
        )
    }

    /// Whether only a world whose volumes and cache change can show it.
    fn needs_changes(self) -> bool {
        matches!(
            self,
            Self::LeftUndrained
                | Self::GivenUpUndrained
                | Self::IdUsedAgain
                | Self::GrowthForgotten
        )
    }

    /// Whether only a world with ordered volumes can show it.
    fn needs_order(self) -> bool {
        matches!(
            self,
            Self::CutWrittenEarly
                | Self::CutReleasedEarly
                | Self::LeftBeforeLastCut
                | Self::CutUnflushed
                | Self::DepthForgotten
                | Self::PrimaryAgeForgotten
        )
    }

    /// Whether only a world with a store can show it.
    fn needs_store(self) -> bool {
        matches!(
            self,
            Self::UnitFlushSkipped
                | Self::SlotReusedEarly
                | Self::DiscardedEarly
                | Self::UnitTruncated
                | Self::MappingForgotten
                | Self::MappingOffByOne
                | Self::EvictionForgotten
                | Self::StoreUncounted
        )
    }

    /// Whether the world of this setup can show it.
    #[must_use]
    pub fn fits(self, setup: &Setup) -> bool {
        match self {
            _ if self.needs_order() => setup.meets(Scenario::CacheEnds),
            Self::AnsweredFromMemory => setup.cache.volatile,
            _ => !self.needs_store() || setup.log_segments.is_some(),
        }
    }

    /// The kind of failure that it causes, by which it must be caught.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            Self::CacheFlushSkipped
            | Self::RecordAckedEarly
            | Self::RecordTruncated
            | Self::DirtyForgotten
            | Self::InvalidationForgotten
            | Self::DeltaForgotten
            | Self::SimilarForgotten
            | Self::DuplicateForgotten
            | Self::CleanTooEarly
            | Self::ReplayedBackwards
            | Self::DetachedForgotten
            | Self::MappingForgotten
            | Self::EvictionForgotten
            | Self::AnsweredFromMemory => Kind::Lost,
            Self::PrimaryFlushSkipped
            | Self::FuaIgnored
            | Self::SwitchForgotten
            | Self::DeadWritesUnflushed
            | Self::CutWrittenEarly
            | Self::CutReleasedEarly
            | Self::LeftBeforeLastCut
            | Self::CutUnflushed
            | Self::DepthForgotten
            | Self::LeftUndrained
            | Self::GivenUpUndrained => Kind::Alone,
            Self::DestageAckedEarly
            | Self::DestageDropped
            | Self::StaleFill
            | Self::WriteRepeated
            | Self::IdUsedAgain => Kind::Stale,
            Self::RequestForgotten | Self::AgeIgnored => Kind::Stuck,
            // A power failure leaves garbage where the primary was being written.
            Self::WrongBlockRead
            | Self::EntryOffByOne
            | Self::TornRecordAccepted
            | Self::FillingForgotten => Kind::Foreign,
            // The checksum in the log does not fit. A clean block is read from the primary instead,
            // but the newest version of a dirty one is gone.
            Self::UnitFlushSkipped
            | Self::SlotReusedEarly
            | Self::DiscardedEarly
            | Self::UnitTruncated
            | Self::MappingOffByOne => Kind::Corrupt,
            // Reclaim thinks that the device has failed.
            Self::FooterSkipped => Kind::Error,
            Self::GrowthForgotten | Self::ErrorSpread => Kind::Error,
            Self::StoreUncounted
            | Self::HitsCountedTwice
            | Self::DirtyUncounted
            | Self::OldestForgotten
            | Self::PrimaryAgeForgotten => Kind::Untrue,
        }
    }

    fn forgery(self) -> Option<Forgery> {
        match self {
            Self::DirtyForgotten => Some(Forgery::Clean),
            Self::InvalidationForgotten => Some(Forgery::NoInvalidations),
            Self::DeltaForgotten => Some(Forgery::NoDeltas),
            Self::SimilarForgotten => Some(Forgery::NoSimilar),
            Self::DuplicateForgotten => Some(Forgery::NoDuplicates),
            Self::CleanTooEarly => Some(Forgery::AllClean),
            Self::EntryOffByOne => Some(Forgery::NextBlock),
            Self::MappingForgotten => Some(Forgery::NoSecondMappings),
            Self::MappingOffByOne => Some(Forgery::NextPage),
            Self::EvictionForgotten => Some(Forgery::NoEvictions),
            Self::FillingForgotten => Some(Forgery::CleanStored),
            _ => None,
        }
    }
}

/// What happens to a request to a disk.
pub enum Deed {
    /// It goes to the disk.
    Pass(Io),
    /// It is answered at once and never reaches the disk.
    Answer(Io),
    /// It is answered at once with this completion, and reaches the disk at its normal time.
    Both(Io, Completion),
}

/// A planted bug in action; without one, every request passes.
pub struct Mischief {
    bug: Option<Bug>,
    rng: Rng,
    /// Requests that were already answered.
    swallowed: BTreeSet<(Target, Slot)>,
    /// For each range of the primary, the data that its first read returned.
    earlier: BTreeMap<(Target, u64, u64), Vec<u8>>,
    forger: Option<Forger>,
    layout: Option<Layout>,
    uncovered: Uncovered,
    slots: Slots,
    /// Primaries to which a server that took over has written nothing.
    inherited: BTreeSet<Target>,
    /// The primary that failed a request last, until another one's read has failed, too.
    failed: Option<Target>,
    /// Number of times that the bug interfered.
    pub deeds: u64,
}

impl Mischief {
    /// Without a bug.
    #[must_use]
    pub fn none() -> Self {
        Self {
            bug: None,
            rng: Rng::new(0),
            swallowed: BTreeSet::new(),
            earlier: BTreeMap::new(),
            forger: None,
            layout: None,
            uncovered: Uncovered::default(),
            slots: Slots::default(),
            inherited: BTreeSet::new(),
            failed: None,
            deeds: 0,
        }
    }

    /// With this bug, if any, in the world of a setup.
    #[must_use]
    pub fn planted(bug: Option<Bug>, setup: &Setup) -> Self {
        let forgery = bug.and_then(Bug::forgery);
        Self {
            bug,
            rng: Rng::new(setup.seed ^ 0x0bad_cafe),
            forger: forgery.map(|forgery| Forger::new(forgery, setup.segment_size)),
            layout: Layout::of(setup),
            ..Self::none()
        }
    }

    /// Whether this bug interferes with what the server does; counts it.
    pub fn interferes(&mut self, bug: Bug) -> bool {
        let interferes = self.bug == Some(bug);
        self.deeds += u64::from(interferes);
        interferes
    }

    /// Whether statistics are to be judged: most bugs make them wrong as well, but are to be found
    /// by what they do to data.
    pub fn lets_judge_statistics(&self) -> bool {
        self.bug.is_none_or(|bug| bug.kind() == Kind::Untrue)
    }

    /// Changes the statistics that a server shows, of its shards and of its volumes.
    pub fn showing(&self, shards: &mut [Stats], volumes: &mut [VolumeState]) {
        let of_volumes = volumes.iter_mut();
        match self.bug {
            Some(Bug::StoreUncounted) => shards.iter_mut().for_each(|stats| stats.store_bytes = 0),
            Some(Bug::OldestForgotten) => {
                shards.iter_mut().for_each(|stats| stats.oldest_dirty_nanos = 0);
            }
            Some(Bug::HitsCountedTwice) => of_volumes.for_each(|one| one.stats.ssd_hit_blocks *= 2),
            Some(Bug::DirtyUncounted) => {
                of_volumes.for_each(|one| one.dirty_blocks = one.dirty_blocks.saturating_sub(1));
            }
            Some(Bug::PrimaryAgeForgotten) => {
                of_volumes.for_each(|one| one.stats.primary_age_nanos = 0);
            }
            _ => {}
        }
    }

    /// The next server gets these devices with the writes of the one that has died.
    pub fn leave(&mut self, targets: impl Iterator<Item = Target>) {
        self.inherited = targets.collect();
    }

    /// The orders of a cut gate for each shard, after the report `news` of one of them.
    pub fn ordering(
        &mut self,
        news: CutNews,
        order: Option<CutOrder>,
        from: usize,
        shards: usize,
    ) -> Vec<(usize, CutOrder)> {
        let mut orders: Vec<_> =
            order.into_iter().flat_map(|order| (0..shards).map(move |to| (to, order))).collect();
        let early = match (self.bug, news) {
            (Some(Bug::CutWrittenEarly), CutNews::Staged(number)) => {
                Some(CutOrder::Write { number, last: false })
            }
            (Some(Bug::CutReleasedEarly), CutNews::Taken { number, .. }) => {
                Some(CutOrder::Release(number))
            }
            _ => None,
        };
        if self.bug == Some(Bug::LeftBeforeLastCut) {
            for (_, order) in &mut orders {
                if let CutOrder::Write { last, .. } = order {
                    *last = true;
                    self.deeds += 1;
                }
            }
        }
        if let Some(early) = early {
            self.deeds += 1;
            orders.insert(0, (from, early));
        }
        orders
    }

    /// Whether an engine is not told of its volume's new mode; counts it.
    pub fn forgets_switch(&mut self) -> bool {
        let forgets = self.bug == Some(Bug::SwitchForgotten);
        self.deeds += u64::from(forgets);
        forgets
    }

    /// Whether the record of stripes that a cache has left is dropped; counts it.
    pub fn forgets_detached(&mut self) -> bool {
        let forgets = self.bug == Some(Bug::DetachedForgotten);
        self.deeds += u64::from(forgets);
        forgets
    }

    /// Passes a client's request on its way to the server.
    pub fn asking(&mut self, io: &mut Io) {
        if self.bug == Some(Bug::FuaIgnored) && std::mem::take(&mut io.flags.fua) {
            self.deeds += 1;
        }
    }

    /// Passes a request on its way to a disk.
    pub fn beginning(&mut self, target: Target, mut io: Io) -> Deed {
        let Some(bug) = self.bug else { return Deed::Pass(io) };
        let cache = target == Target::Cache;
        let write = io.op == IoOp::Write;
        let is_unit = cache && write && self.has_unit(io.range.offset);
        match bug {
            Bug::UnitTruncated if is_unit && self.rng.percent(20) => self.truncate(io),
            Bug::UnitFlushSkipped if is_unit => {
                self.uncovered.write(&io);
                Deed::Pass(io)
            }
            Bug::UnitFlushSkipped if cache && io.op == IoOp::Flush => {
                self.uncovered.flush();
                Deed::Pass(io)
            }
            Bug::SlotReusedEarly | Bug::DiscardedEarly if cache && write => {
                match &self.layout {
                    Some(_) if is_unit => self.slots.write(&io),
                    Some(layout) => self.slots.log(&io, layout),
                    None => {}
                }
                Deed::Pass(io)
            }
            Bug::DeadWritesUnflushed if io.op.changes_data() => {
                self.inherited.remove(&target);
                Deed::Pass(io)
            }
            Bug::DeadWritesUnflushed if self.inherited.contains(&target) => match io.op {
                IoOp::Flush => self.answer(io),
                _ => Deed::Pass(io),
            },
            Bug::CacheFlushSkipped if cache && io.op == IoOp::Flush => self.answer(io),
            Bug::PrimaryFlushSkipped | Bug::CutUnflushed if !cache && io.op == IoOp::Flush => {
                self.answer(io)
            }
            Bug::DestageDropped if !cache && write && self.rng.percent(20) => self.answer(io),
            Bug::FooterSkipped if cache && write && forge::is_footer(&io.buf) => self.answer(io),
            Bug::RecordAckedEarly if cache && write => self.both(io),
            Bug::DestageAckedEarly if !cache && write => self.both(io),
            Bug::RecordTruncated if cache && write && self.rng.percent(5) => self.truncate(io),
            Bug::WrongBlockRead
                if !cache
                    && io.op == IoOp::Read
                    && io.range.offset >= 4096
                    && self.rng.percent(10) =>
            {
                self.deeds += 1;
                io.range.offset -= 4096;
                Deed::Pass(io)
            }
            _ if cache && write => {
                if let Some(forger) = &mut self.forger {
                    self.deeds += u64::from(forger.forge(&mut io));
                }
                Deed::Pass(io)
            }
            _ => Deed::Pass(io),
        }
    }

    fn has_unit(&self, at: u64) -> bool {
        self.layout.as_ref().is_some_and(|layout| layout.is_store(at))
    }

    fn answer(&mut self, io: Io) -> Deed {
        self.deeds += 1;
        Deed::Answer(io)
    }

    fn both(&mut self, io: Io) -> Deed {
        self.deeds += 1;
        let early = Completion { tag: io.tag, result: Ok(()), buf: IoBuf::copy_of(&io.buf) };
        Deed::Both(io, early)
    }

    fn truncate(&mut self, io: Io) -> Deed {
        if io.range.len <= 4096 {
            return Deed::Pass(io);
        }
        let early = Completion { tag: io.tag, result: Ok(()), buf: IoBuf::copy_of(&io.buf) };
        self.deeds += 1;
        let kept = io.range.len - 4096;
        let range = ByteRange::new(io.range.offset, kept);
        let buf = IoBuf::copy_of(&io.buf[..kept as usize]);
        Deed::Both(Io { range, buf, ..io }, early)
    }

    /// Notes that this request was already answered.
    pub fn swallow(&mut self, target: Target, slot: Slot) {
        self.swallowed.insert((target, slot));
    }

    /// Whether this request was already answered; forgets it.
    pub fn is_swallowed(&mut self, target: Target, slot: Slot) -> bool {
        self.swallowed.remove(&(target, slot))
    }

    /// The pages of the cache device that are not as the engine believes after a crash, by offset.
    /// `power` is whether completed writes were lost that no flush had covered.
    pub fn pages_after_crash(&mut self, power: bool) -> Vec<(u64, Vec<u8>)> {
        let pages = match self.bug {
            Some(Bug::UnitFlushSkipped) if power => self.uncovered.crash(),
            Some(Bug::SlotReusedEarly) => self.slots.crash(),
            Some(Bug::DiscardedEarly) => {
                self.layout.as_ref().map(|all| self.slots.discarded(all)).unwrap_or_default()
            }
            _ => Vec::new(),
        };
        self.deeds += pages.len() as u64;
        pages
    }

    /// Passes a completion on its way back.
    pub fn ending(
        &mut self,
        target: Target,
        op: IoOp,
        range: ByteRange,
        mut done: Completion,
    ) -> Completion {
        let is_unit = target == Target::Cache && op == IoOp::Write && self.has_unit(range.offset);
        match self.bug {
            Some(Bug::UnitFlushSkipped) if is_unit => {
                self.uncovered.written(range);
                done
            }
            Some(Bug::StaleFill) if target != Target::Cache && op == IoOp::Read => {
                let key = (target, range.offset, range.len);
                let first = self.earlier.entry(key).or_insert_with(|| done.buf.to_vec());
                if **first != *done.buf {
                    self.deeds += 1;
                    done.buf.copy_from_slice(first);
                }
                done
            }
            Some(Bug::ReplayedBackwards)
                if target == Target::Cache
                    && op == IoOp::Read
                    && forge::backwards(&mut done.buf) =>
            {
                self.deeds += 1;
                done
            }
            Some(Bug::ErrorSpread) if target != Target::Cache && done.result.is_err() => {
                self.failed = Some(target);
                done
            }
            Some(Bug::ErrorSpread)
                if target != Target::Cache
                    && op == IoOp::Read
                    && self.failed.take_if(|failed| *failed != target).is_some() =>
            {
                self.deeds += 1;
                done.result = Err(ErrorKind::Media.into());
                done
            }
            Some(Bug::TornRecordAccepted)
                if target == Target::Cache
                    && op == IoOp::Read
                    && forge::accept_torn(&mut done.buf) =>
            {
                self.deeds += 1;
                done
            }
            _ => done,
        }
    }

    /// Forgets everything in memory.
    pub fn crash(&mut self) {
        self.swallowed.clear();
        self.earlier.clear();
        self.uncovered.clear();
        self.slots.restart();
        self.inherited.clear();
        self.failed = None;
        if let Some(forger) = &mut self.forger {
            forger.crash();
        }
    }
}
