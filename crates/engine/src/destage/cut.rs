//! This shard's part of the cut of an ordered volume: taken, staged in memory, written, flushed.
//!
//! | step | begins with | ends when |
//! |---|---|---|
//! | take | the gate's order, and no destage of the volume in flight | the versions are noted, and held in the log |
//! | stage | the cut's newest record durable | the bytes of all versions are in memory |
//! | write | the gate's order: every shard has staged | the primary has flushed all of them |
//!
//! A part is taken over several turns, in address order, while clients write, so it is not of one
//! moment. It need not be: from its beginning on, answers are withheld. A flush that is answered
//! before all parts are taken came to every shard before that shard began, so all parts have the
//! writes that it covers. Of later writes a part may have any, as a disk after a power failure.
//!
//! A part in memory can be written whatever happens to the cache device. It is forgotten when a
//! block of it cannot be staged; nothing of the cut has been written then. Once the write is
//! ordered, nothing but the end of the server ends it: what the primary fails is written again.

use std::collections::{BTreeMap, VecDeque};

use forebay_block::{BLOCK_SIZE, BlockRange, Instant, IoBuf, STRIPE_BLOCKS, VolumeId};
use forebay_format::Lsn;

use crate::api::cut::{CutNews, CutReport};
use crate::api::{DestageReason, Effects, Health, State, Trust};
use crate::cache::{Cache, IMMOVABLE_PAUSE};
use crate::destage::{
    COLLECTED_MAX, Destage, Destaging, ENDED_MAX, GATHERED_MAX, RETRY_FIRST, TAKEN_MAX, Version,
};
use crate::key::Key;
use crate::slab::Id;

/// The step that a part has reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Its versions are being noted; those from this block on have not been.
    Taking(Key),
    /// Its bytes are being brought into memory.
    Staging,
    /// They are in memory; other shards are not so far.
    Staged,
    /// They are being written.
    Writing,
    /// The part was given up: what is left of it ends, and what is being read once it has been.
    Over,
}

/// A shard's part of a cut.
#[derive(Debug)]
pub(super) struct Cut {
    number: u64,
    step: Step,
    /// The last record of the log that has a version of it.
    lsn: Lsn,
    /// When taking it began, and when its oldest block became dirty.
    taken_at: Instant,
    oldest: Instant,
    /// It has all dirty blocks of the shard.
    whole: bool,
    /// No block became dirty any more when taking it began.
    last: bool,
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
        let retry_at = cache.now + if is_good { RETRY_FIRST } else { IMMOVABLE_PAUSE };
        let state = cache.volume_mut(volume);
        state.retry_at = state.retry_at.max(retry_at);
        let order = &mut cache.volume_mut(volume).order;
        order.asked = false;
        order.due = order.due.filter(|&due| due != number);
        if self.cuts.get(&volume).is_some_and(|cut| cut.number == number) {
            self.give_up_cut(volume);
        }
    }

    /// Ends the cuts that a stop has waited for long enough. The next start destages their blocks.
    pub fn give_up_cuts(&mut self) {
        for cut in self.cuts.values_mut() {
            cut.step = Step::Over;
        }
    }

    /// Ends a cut before the primary has it.
    fn give_up_cut(&mut self, volume: VolumeId) {
        if let Some(cut) = self.cuts.get_mut(&volume) {
            cut.step = Step::Over;
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
        self.take_some(cache, volume, fx);
        let Some(step) = self.cuts.get(&volume).map(|cut| cut.step) else {
            return self.request_cut(cache, volume, is_idle, fx);
        };
        match step {
            Step::Staging => self.stage(cache, volume, fx),
            Step::Writing => self.write_cut(cache, volume, is_idle, fx),
            Step::Over => self.forget_some(cache, volume),
            Step::Taking(_) | Step::Staged => {}
        }
        if Self::closes(cache) && !matches!(step, Step::Writing | Step::Over) {
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

    /// Begins to take the cut that is due, unless destages of the volume are in flight.
    fn take_due(&mut self, cache: &mut Cache, volume: VolumeId, is_idle: bool, fx: &mut Effects) {
        let Some(number) = cache.volume(volume).order.due else { return };
        if Self::closes(cache) {
            cache.volume_mut(volume).order.due = None;
            let news = CutNews::Abandoned(number);
            return fx.cuts.push(CutReport { volume, news });
        }
        let whole = self.follows_order(cache, volume);
        if whole && self.destages.iter().any(|(_, destage)| destage.volume == volume) {
            return;
        }
        if self.cuts.contains_key(&volume) {
            return;
        }
        let state = self.state(cache, volume, is_idle);
        let cut = Cut {
            number,
            step: Step::Taking(Key::range(volume).start),
            lsn: Lsn(0),
            taken_at: cache.now,
            oldest: cache.contents.dirty().oldest_of(volume).unwrap_or(cache.now),
            whole,
            last: cache.health() != Health::Good && cache.standing.trust > Trust::Full,
            reason: self.reason(cache, volume, &state),
            taken: VecDeque::new(),
            gathering: 0,
            ready: BTreeMap::new(),
            left: 0,
            failed: false,
        };
        self.cuts.insert(volume, cut);
        let order = &mut cache.volume_mut(volume).order;
        order.due = None;
        order.withholds = Some(number);
    }

    /// Notes and holds the newest versions of more dirty blocks, as many as one turn allows. A
    /// shard that does not follow the order has no part, or none beyond what it has taken.
    fn take_some(&mut self, cache: &mut Cache, volume: VolumeId, fx: &mut Effects) {
        let follows = self.follows_order(cache, volume);
        let Some(cut) = self.cuts.get_mut(&volume).filter(|cut| !cut.failed) else { return };
        let Step::Taking(from) = cut.step else { return };
        cut.whole &= follows;
        let mut next = Some(from).filter(|_| cut.whole);
        while self.taken < TAKEN_MAX
            && let Some(from) = next
        {
            next = self.take_stripe(cache, volume, from);
        }
        let cut = self.cuts.get_mut(&volume).expect("seen just now");
        if let Some(from) = next {
            cut.step = Step::Taking(from);
            return;
        }
        cut.lsn = Lsn(cache.log.next_lsn().0 - 1);
        cut.step = Step::Staging;
        let &mut Cut { number, last, whole, .. } = cut;
        let news = CutNews::Taken { number, last, whole };
        fx.cuts.push(CutReport { volume, news });
    }

    /// Takes the dirty blocks that can be read of the first stripe from `from` on that has any.
    /// Returns where the one after it begins; `None` if there was none.
    fn take_stripe(&mut self, cache: &mut Cache, volume: VolumeId, from: Key) -> Option<Key> {
        let (stripe, dirty, destaging) = cache.contents.dirty().next_stripe(volume, from)?;
        let cut = self.cuts.get_mut(&volume).expect("a cut is being taken");
        // One that set out meanwhile, in another mode, is not held: a part without it is not whole.
        let goes = |i| dirty.get(i) && !destaging.get(i);
        cut.whole &= !(0..STRIPE_BLOCKS).any(|i| dirty.get(i) && destaging.get(i));
        let reason = cut.reason;
        let key = |i| Key(stripe * STRIPE_BLOCKS + i);
        let is_readable = |cache: &Cache, i| goes(i) && !cache.contents.fenced().contains(&key(i));
        let mut i = 0;
        while i < STRIPE_BLOCKS {
            let mut versions = Vec::new();
            let first = key(i);
            while i < STRIPE_BLOCKS && is_readable(cache, i) {
                versions.push(Self::hold_version(cache, key(i)));
                i += 1;
            }
            i += 1;
            if !versions.is_empty() {
                self.take_run(cache, first, reason, versions);
            }
        }
        self.taken += dirty.len();
        Some(key(STRIPE_BLOCKS))
    }

    /// Adds a run of blocks to a part.
    fn take_run(
        &mut self,
        cache: &mut Cache,
        first: Key,
        reason: DestageReason,
        versions: Vec<Version>,
    ) {
        let volume = first.volume();
        let blocks = BlockRange { first: first.block(), count: versions.len() as u64 };
        let destage = Self::destage(cache, (volume, blocks), reason, versions);
        cache.volume_mut(volume).order.cut_blocks += blocks.count;
        let id = self.destages.insert(Destage { in_cut: true, ..destage });
        let cut = self.cuts.get_mut(&volume).expect("a cut is being taken");
        cut.taken.push_back(id);
        cut.left += 1;
    }

    /// Ends destages of a cut that was given up, as many as one turn allows.
    fn forget_some(&mut self, cache: &mut Cache, volume: VolumeId) {
        while self.ended < ENDED_MAX
            && let Some(cut) = self.cuts.get_mut(&volume)
        {
            let id = match (cut.taken.pop_front(), cut.ready.first_key_value()) {
                (Some(id), _) => {
                    self.release_versions(cache, id);
                    id
                }
                (None, Some((&first, &id))) => {
                    cut.ready.remove(&first);
                    id
                }
                (None, None) => return,
            };
            self.ended += self.destages.get(id).blocks.count;
            self.forget(cache, id, false);
        }
    }

    /// Whether the next turn should come at once, since parts are being taken or given up.
    pub(super) fn cuts_go_on(&self) -> bool {
        self.cuts.values().any(|cut| match cut.step {
            Step::Taking(_) => !cut.failed,
            Step::Over => !cut.taken.is_empty() || !cut.ready.is_empty(),
            Step::Staging | Step::Staged | Step::Writing => false,
        })
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
            return self.give_up_cut(volume);
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
