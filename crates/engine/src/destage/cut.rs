//! This shard's part of the cut of an ordered volume: taken, staged in memory, written, flushed.
//!
//! | step | begins with | ends when |
//! |---|---|---|
//! | take | the gate's order, and no destage of the volume in flight | at once: the versions are noted, and held in the log |
//! | stage | the cut's newest record durable | the bytes of all versions are in memory |
//! | write | the gate's order: every shard has staged | the primary has flushed all of them |
//!
//! A part in memory can be written whatever happens to the cache device. It is forgotten when a
//! block of it cannot be staged; nothing of the cut has been written then. Once the write is
//! ordered, nothing but the end of the server ends it: what the primary fails is written again.

use std::collections::{BTreeMap, VecDeque};

use forebay_block::{BLOCK_SIZE, BlockRange, Instant, IoBuf, STRIPE_BLOCKS, VolumeId};
use forebay_format::Lsn;

use crate::api::cut::{CutNews, CutReport};
use crate::api::{DestageReason, Effects, Health, State, Trust};
use crate::cache::{Cache, UNREADABLE_PAUSE};
use crate::destage::{COLLECTED_MAX, Destage, Destaging, GATHERED_MAX, RETRY_FIRST, Version};
use crate::key::Key;
use crate::slab::Id;

/// The step that a part has reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Its bytes are being brought into memory.
    Staging,
    /// They are in memory; other shards are not so far.
    Staged,
    /// They are being written.
    Writing,
    /// The part was given up, and waits for the reads that are in flight.
    Over,
}

/// A shard's part of a cut.
#[derive(Debug)]
pub(super) struct Cut {
    number: u64,
    step: Step,
    /// The last record of the log that has a version of it.
    lsn: Lsn,
    /// When it was taken, and when its oldest block became dirty.
    taken_at: Instant,
    oldest: Instant,
    /// It has all dirty blocks of the shard.
    whole: bool,
    reason: DestageReason,
    /// Destages whose bytes have not been requested, in address order.
    taken: VecDeque<Id>,
    /// Number of destages whose bytes are being read.
    gathering: usize,
    /// Destages with their bytes that are not being written, by their first block.
    ready: BTreeMap<u64, Id>,
    /// Number of destages that the primary does not have durably.
    left: usize,
    /// Whether the shard has reported that it cannot stage the part.
    failed: bool,
}

/// Follows the gate's orders.
impl Destaging {
    /// Notes that a cut is to be taken.
    pub fn cut_ordered(&mut self, cache: &mut Cache, volume: VolumeId, number: u64) {
        let order = &mut cache.volume_mut(volume).order;
        order.due = Some(number);
        order.asked = false;
    }

    /// Begins to write a cut: every shard has staged its part.
    pub fn write_ordered(&mut self, cache: &mut Cache, volume: VolumeId, number: u64, last: bool) {
        cache.volume_mut(volume).order.may_leave |= last;
        if let Some(cut) = self.cuts.get_mut(&volume)
            && cut.number == number
            && cut.step == Step::Staged
        {
            cut.step = Step::Writing;
        }
    }

    /// Forgets a cut of which nothing has been written. The next one is requested after a pause,
    /// since one of the shards could not stage its part.
    pub fn abandon_ordered(&mut self, cache: &mut Cache, volume: VolumeId, number: u64) {
        let is_good = cache.health() == Health::Good;
        let retry_at = cache.now + if is_good { RETRY_FIRST } else { UNREADABLE_PAUSE };
        let state = cache.volume_mut(volume);
        state.retry_at = state.retry_at.max(retry_at);
        let order = &mut cache.volume_mut(volume).order;
        order.asked = false;
        order.due = order.due.filter(|&due| due != number);
        if self.cuts.get(&volume).is_some_and(|cut| cut.number == number) {
            self.give_up_cut(cache, volume);
        }
    }

    /// Ends the cuts that a stop has waited for long enough. The next start destages their blocks.
    pub fn give_up_cuts(&mut self, cache: &mut Cache) {
        for volume in self.cuts.keys().copied().collect::<Vec<_>>() {
            self.give_up_cut(cache, volume);
        }
    }

    /// Ends a cut before the primary has it.
    fn give_up_cut(&mut self, cache: &mut Cache, volume: VolumeId) {
        let Some(cut) = self.cuts.get_mut(&volume) else { return };
        cut.step = Step::Over;
        let taken = std::mem::take(&mut cut.taken);
        let ready = std::mem::take(&mut cut.ready);
        for &id in &taken {
            self.release_versions(cache, id);
        }
        for id in taken.into_iter().chain(ready.into_values()) {
            self.forget(cache, id, false);
        }
    }
}

impl Destaging {
    /// Whether blocks of the volume are destaged in cuts only.
    pub(super) fn follows_order(&self, cache: &mut Cache, volume: VolumeId) -> bool {
        let dirty = cache.contents.dirty_level_of(volume);
        let order = &mut cache.volume_mut(volume).order;
        order.is_behind &= order.blocks_max.is_some_and(|most| dirty > most);
        let (is_behind, may_leave) = (order.is_behind, order.may_leave);
        cache.is_ordered(volume) && !is_behind && !(may_leave && cache.health() != Health::Good)
    }

    /// Continues the cut of a volume, or requests one.
    pub(super) fn pump_cut(
        &mut self,
        cache: &mut Cache,
        volume: VolumeId,
        is_idle: bool,
        fx: &mut Effects,
    ) {
        self.end_cut(cache, volume, fx);
        if cache.volume(volume).order.due.is_some() {
            self.take_due(cache, volume, is_idle, fx);
        }
        let Some(step) = self.cuts.get(&volume).map(|cut| cut.step) else {
            return self.request_cut(cache, volume, is_idle, fx);
        };
        match step {
            Step::Staging => self.stage(cache, volume, fx),
            Step::Writing => self.write_cut(cache, volume, is_idle, fx),
            Step::Staged | Step::Over => {}
        }
        if Self::closes(cache) && matches!(step, Step::Staging | Step::Staged) {
            self.fail_cut(volume, fx);
        }
        self.end_cut(cache, volume, fx);
    }

    /// Whether the shard stops and leaves its dirty blocks to the next start.
    pub(super) fn closes(cache: &Cache) -> bool {
        *cache.state() == State::Stopping && cache.health() == Health::Good
    }

    /// Requests a cut if blocks should be destaged, or if stripes wait until all are.
    fn request_cut(
        &mut self,
        cache: &mut Cache,
        volume: VolumeId,
        is_idle: bool,
        fx: &mut Effects,
    ) {
        let order = &cache.volume(volume).order;
        let (waits, asked) = (!order.may_leave, order.asked || order.due.is_some());
        let rests = cache.volume(volume).retry_at > cache.now;
        if asked || rests || Self::closes(cache) || !self.follows_order(cache, volume) {
            return;
        }
        let leaves = waits && cache.health() == Health::Draining;
        let state = self.state(cache, volume, is_idle);
        let is_due =
            cache.contents.dirty_level_of(volume) > 0 && self.allowance(cache, volume, &state) > 0;
        if leaves || is_due {
            cache.volume_mut(volume).order.asked = true;
            fx.cuts.push(CutReport { volume, news: CutNews::Wanted });
        }
    }

    /// Takes the cut that is due, unless destages of the volume are in flight.
    fn take_due(&mut self, cache: &mut Cache, volume: VolumeId, is_idle: bool, fx: &mut Effects) {
        let Some(number) = cache.volume(volume).order.due else { return };
        let mut tell = |news| fx.cuts.push(CutReport { volume, news });
        if Self::closes(cache) {
            cache.volume_mut(volume).order.due = None;
            return tell(CutNews::Abandoned(number));
        }
        let whole = self.follows_order(cache, volume);
        if whole && self.destages.iter().any(|(_, destage)| destage.volume == volume) {
            return;
        }
        if self.cuts.contains_key(&volume) {
            return;
        }
        let cut = match whole {
            true => self.take(cache, (volume, number), is_idle),
            false => self.take_nothing(cache, number),
        };
        self.cuts.insert(volume, cut);
        let order = &mut cache.volume_mut(volume).order;
        order.due = None;
        order.withholds = Some(number);
        let last = cache.health() != Health::Good && cache.standing.trust > Trust::Full;
        tell(CutNews::Taken { number, last, whole });
    }

    /// An empty part, of a shard that does not follow the order at this time.
    fn take_nothing(&self, cache: &Cache, number: u64) -> Cut {
        Cut {
            number,
            step: Step::Staging,
            lsn: Lsn(0),
            taken_at: cache.now,
            oldest: cache.now,
            whole: false,
            reason: DestageReason::Age,
            taken: VecDeque::new(),
            gathering: 0,
            ready: BTreeMap::new(),
            left: 0,
            failed: false,
        }
    }

    /// Notes and holds the newest version of every dirty block that can be read.
    fn take(&mut self, cache: &mut Cache, (volume, number): (VolumeId, u64), is_idle: bool) -> Cut {
        let state = self.state(cache, volume, is_idle);
        let mut cut = self.take_nothing(cache, number);
        cut.whole = true;
        cut.reason = self.reason(cache, volume, &state);
        cut.oldest = cache.contents.dirty().oldest_of(volume).unwrap_or(cache.now);
        cut.lsn = Lsn(cache.log.next_lsn().0 - 1);
        let keys: Vec<Key> = cache.contents.dirty().of_volume(volume).collect();
        let mut keys = keys.into_iter().peekable();
        while let Some(key) = keys.next() {
            if cache.contents.fenced().contains(&key) {
                continue;
            }
            let mut versions = vec![Self::hold_version(cache, key)];
            let end = |versions: &[Version]| key.0 + versions.len() as u64;
            while let Some(&next) = keys.peek()
                && next.0 == end(&versions)
                && !next.0.is_multiple_of(STRIPE_BLOCKS)
                && !cache.contents.fenced().contains(&next)
            {
                versions.push(Self::hold_version(cache, next));
                keys.next();
            }
            let blocks = BlockRange { first: key.block(), count: versions.len() as u64 };
            let destage = Self::destage(cache, (volume, blocks), cut.reason, versions);
            cache.volume_mut(volume).order.cut_blocks += blocks.count;
            cut.taken.push_back(self.destages.insert(Destage { in_cut: true, ..destage }));
        }
        cut.left = cut.taken.len();
        cut
    }

    /// The newest version of a dirty block, whose bytes stay in the log until they are in memory.
    fn hold_version(cache: &mut Cache, key: Key) -> Version {
        let place = cache.contents.get(key).expect("a dirty block is cached");
        let base = place.kind.is_associate().then(|| cache.contents.base_of_associate(key));
        let seq = cache.log.seq_of(&place);
        cache.begin_destaging(&place);
        cache.contents.begin_destaging(key);
        for place in [Some(place), base].into_iter().flatten() {
            cache.hold(&place);
        }
        Version { place, seq, base, passed: false }
    }

    /// Ends the holds on the versions of a destage.
    fn release_versions(&self, cache: &mut Cache, id: Id) {
        for Version { place, base, .. } in &self.destages.get(id).versions {
            for place in [Some(place), base.as_ref()].into_iter().flatten() {
                cache.release(place);
            }
        }
    }

    /// Brings bytes into memory, as many as one turn allows.
    fn stage(&mut self, cache: &mut Cache, volume: VolumeId, fx: &mut Effects) {
        while let Some(cut) = self.cuts.get_mut(&volume)
            && cut.step == Step::Staging
            && let Some(&id) = cut.taken.front()
        {
            let lsn = cut.lsn;
            let flow = &cache.volume(volume).flow;
            let is_full = flow.collecting >= COLLECTED_MAX || self.gathered >= GATHERED_MAX;
            if is_full || !self.is_readable(cache, id, lsn) {
                return;
            }
            let cut = self.cuts.get_mut(&volume).expect("seen just now");
            cut.taken.pop_front();
            cut.gathering += 1;
            let destage = self.destages.get_mut(id);
            // Not from the arena, which requests of clients need.
            destage.buf = IoBuf::zeroed(destage.versions.len() * BLOCK_SIZE);
            destage.reads = 1;
            let count = destage.blocks.count;
            self.gathered += count;
            cache.volume_mut(volume).flow.collecting += count;
            self.gather(cache, id, fx);
        }
        let Some(cut) = self.cuts.get_mut(&volume) else { return };
        let standing = &cache.standing;
        let is_recorded =
            standing.health == Health::Good || standing.trust > Trust::Full && !standing.in_doubt;
        let is_staged = cut.taken.is_empty() && cut.gathering == 0 && !cut.failed;
        if cut.step == Step::Staging && is_staged && is_recorded {
            cut.step = Step::Staged;
            let news = CutNews::Staged(cut.number);
            fx.cuts.push(CutReport { volume, news });
        }
    }

    /// Whether the versions of a destage can be read, and may go to the primary: with a good device
    /// they must be durable in the log, as all versions that are destaged.
    fn is_readable(&self, cache: &mut Cache, id: Id, lsn: Lsn) -> bool {
        if cache.health() == Health::Good {
            let is_durable = lsn <= cache.log.durable();
            if !is_durable && lsn <= cache.log.completed() {
                cache.log.want_durable(lsn);
            }
            return is_durable;
        }
        let mut versions = self.destages.get(id).versions.iter();
        versions.all(|Version { place, base, .. }| {
            cache.is_associate_written(base.as_ref().unwrap_or(place), place)
        })
    }

    /// Takes a destage of a cut whose reads have ended.
    pub(super) fn staged(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        self.release_versions(cache, id);
        let destage = self.destages.get_mut(id);
        let (volume, blocks) = (destage.volume, destage.blocks);
        let error = destage.error.take();
        let is_good = error.is_none() && destage.bad.is_empty();
        let cut = self.cuts.get_mut(&volume).expect("a part lives as long as its destages");
        cut.gathering -= 1;
        if is_good && cut.step == Step::Staging {
            cut.ready.insert(blocks.first, id);
            return;
        }
        if let Some(error) = error {
            cache.probe_cache(fx);
            self.fail_reads(cache, id, &error);
        }
        self.fence_bad(cache, id);
        self.forget(cache, id, false);
        self.fail_cut(volume, fx);
    }

    /// Reports, once, that a cut cannot be staged.
    fn fail_cut(&mut self, volume: VolumeId, fx: &mut Effects) {
        let Some(cut) = self.cuts.get_mut(&volume) else { return };
        if std::mem::replace(&mut cut.failed, true) {
            return;
        }
        fx.cuts.push(CutReport { volume, news: CutNews::Abandoned(cut.number) });
    }

    /// Starts the writes of a cut that the pacer allows.
    fn write_cut(&mut self, cache: &mut Cache, volume: VolumeId, is_idle: bool, fx: &mut Effects) {
        if cache.volume(volume).retry_at > cache.now {
            return;
        }
        let state = self.state(cache, volume, is_idle);
        let allowed = self.allowance(cache, volume, &state);
        let bound = Self::is_bound(cache, volume);
        while cache.volume(volume).flow.destage_writes < allowed
            && let Some(cut) = self.cuts.get_mut(&volume)
            && let Some((first, id)) = cut.ready.pop_first()
        {
            let now = cache.now;
            let flow = &mut cache.volume_mut(volume).flow;
            if bound && !flow.bound.allows(now) {
                cut.ready.insert(first, id);
                break;
            }
            flow.bound.take(self.destages.get(id).blocks.count);
            flow.destage_writes += 1;
            self.write(cache, id, fx);
        }
    }

    /// Writes a destage of a cut again: the primary failed it, or the flush after it. A stop does
    /// not wait for a primary that fails.
    pub(super) fn write_again(&mut self, cache: &mut Cache, id: Id) {
        let Destage { volume, blocks, .. } = *self.destages.get(id);
        if Self::closes(cache) {
            self.forget(cache, id, false);
            return self.give_up_cut(cache, volume);
        }
        let cut = self.cuts.get_mut(&volume).expect("a part lives as long as its destages");
        if cut.step == Step::Over {
            return self.forget(cache, id, false);
        }
        cut.ready.insert(blocks.first, id);
    }

    /// Counts a destage of a cut that has ended.
    pub(super) fn ended_in_cut(&mut self, cache: &mut Cache, destage: &Destage) {
        let Destage { volume, blocks, .. } = *destage;
        cache.volume_mut(volume).order.cut_blocks -= blocks.count;
        let cut = self.cuts.get_mut(&volume).expect("a part lives as long as its destages");
        cut.left -= 1;
    }

    /// Ends a cut of which nothing is left.
    fn end_cut(&mut self, cache: &mut Cache, volume: VolumeId, fx: &mut Effects) {
        let Some(cut) = self.cuts.get(&volume) else { return };
        let Cut { number, step, whole, taken_at, .. } = *cut;
        if cut.left > 0 || !matches!(step, Step::Writing | Step::Over) {
            return;
        }
        self.cuts.remove(&volume);
        if step == Step::Writing {
            if whole {
                cache.volume_mut(volume).order.primary_since = taken_at;
            }
            fx.cuts.push(CutReport { volume, news: CutNews::Written(number) });
        }
    }

    /// The state of a cut for the pacer: when its oldest block became dirty, if it is being
    /// written.
    pub(super) fn writing_since(&self, volume: VolumeId) -> Option<Instant> {
        let cut = self.cuts.get(&volume).filter(|cut| cut.step == Step::Writing);
        cut.map(|cut| cut.oldest)
    }

    /// Whether all of a cut is written, so that a flush ends it.
    pub(super) fn ends_with_flush(&self, volume: VolumeId) -> bool {
        self.cuts.get(&volume).is_some_and(|cut| cut.step == Step::Writing && cut.ready.is_empty())
    }

    /// Whether a destage may be joined by writes that wait for its blocks: it will be written, or
    /// has been.
    pub(super) fn will_be_written(&self, destage: &Destage) -> bool {
        let cut = self.cuts.get(&destage.volume).filter(|_| destage.in_cut);
        !destage.unflushed && cut.is_none_or(|cut| cut.step == Step::Writing)
    }
}

#[cfg(test)]
mod tests;
