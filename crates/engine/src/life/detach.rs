//! Writes while a failed cache device is being emptied: the cache is detached stripe by stripe.
//!
//! Nothing can be written to the device any more, not even that its content no longer counts. So
//! before the primary gets a newer version of a block than the log has, a record outside the cache
//! must say that the log does not count for the block. Otherwise the next start would find the
//! older version dirty in the log, and write it over the newer one. A stripe is detached in this
//! order:
//!
//! 1. Its dirty blocks are written to the primary, and flushed there.
//! 2. The record is made durable. It names the blocks of the stripe that are kept: those that
//!    cannot be read back. The log has their newest version, if it exists anywhere.
//! 3. The cache's copies of all other blocks are dropped, and writes go to the primary.
//!
//! Writes to a stripe wait until it is detached. Flushes wait for the stripes with blocks that were
//! written but not durable when the device failed. Which these are is found out first, over several
//! turns; until then no dirty block sets out, and no record is requested. A write over a kept block
//! is answered after the primary has flushed it and a further record says that the block is no
//! longer kept.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use forebay_block::{ErrorKind, Instant, STRIPE_BLOCKS, VolumeId};

use crate::api::{DestageReason, DetachedStripe, Effects, Health, State, Trust};
use crate::cache::Cache;
use crate::contents::Bits;
use crate::contents::Place;
use crate::destage::{Destaging, depth_beside};
use crate::key::Key;
use crate::left::{keys_of, stripe_of, stripes_of, volume_of};
use crate::life::stop::PATIENCE;
use crate::limits::step;
use crate::request::Requests;
use crate::request::op::{Op, Stage};
use crate::slab::Id;

/// Limit on the stripes visited in a turn.
const LOOKED_AT: usize = step(64);
/// Limit on the blocks of which one turn finds out whether they were durable.
const CHECKED_MAX: usize = step(64);
/// Blocks that set out in one turn from which no other do: a stripe more at most.
const STARTED_MAX: u64 = step(256) as u64;
/// Limit on the stripes that are left in a turn.
const LEFT_MAX: usize = step(4);

/// A stripe that is being detached.
#[derive(Debug)]
struct Leaving {
    since: Instant,
    /// Whether the record has been requested.
    asked: bool,
    /// Writes that wait, in order of arrival.
    writes: Vec<Id>,
}

/// The stripes that the cache is leaving, by the number that [`stripe_of`] returns.
#[derive(Debug, Default)]
pub(crate) struct Detach {
    leaving: BTreeMap<u64, Leaving>,
    /// Those of them with writes that wait.
    wanted: BTreeSet<u64>,
    /// Records that are durable, and whose stripes are not left yet.
    recorded: VecDeque<DetachedStripe>,
    /// Blocks that may not have been durable when the device failed, as is still to be found out.
    unchecked: Vec<Key>,
    /// So many blocks set out in this turn that the next one should come at once.
    has_started: bool,
    /// The stripe at which the next turn continues.
    cursor: u64,
    /// Dirty blocks that recovery found at the end of the log of a device that had failed: nothing
    /// proves that they are durable.
    doubted: BTreeSet<Key>,
    /// Stripes with blocks that were not durable when the device failed.
    undurable: BTreeSet<u64>,
    /// Flushes that wait for the undurable stripes of their volume, each with the time since when.
    flushes: Vec<(Instant, VolumeId, Id)>,
    /// Writes over kept blocks that the primary has flushed and whose record has been requested,
    /// each with the time since when.
    restoring: Vec<(Instant, Id)>,
}

impl Detach {
    /// Whether blocks of a volume were, or may have been, not durable when the device failed.
    fn is_undurable(&self, volume: VolumeId) -> bool {
        !self.unchecked.is_empty() || self.undurable.range(stripes_of(volume)).next().is_some()
    }
}

/// The number of a recorded stripe, unique over all volumes.
fn number_of(record: &DetachedStripe) -> u64 {
    stripe_of(Key::new(record.volume, record.stripe * STRIPE_BLOCKS))
}

impl Detach {
    /// Begins to find the blocks that were written but not durable when the device failed: flushes
    /// wait for them.
    pub fn note_undurable(&mut self, cache: &mut Cache) {
        self.unchecked = cache.log.doubtful_blocks();
        self.unchecked.extend(&self.doubted);
        cache.standing.in_doubt = !self.unchecked.is_empty();
    }

    /// Finds out of more blocks whether they were durable. A dirty block stays what it was until
    /// then: it does not set out, and its stripe is not left.
    fn check_some(&mut self, cache: &mut Cache) {
        let rest = self.unchecked.len().saturating_sub(CHECKED_MAX);
        for key in self.unchecked.split_off(rest) {
            let stripe = stripe_of(key);
            let is_new = !self.undurable.contains(&stripe);
            if is_new && cache.contents.dirty().contains(key) && !self.is_settled(cache, key) {
                self.undurable.insert(stripe);
                self.leave(cache, stripe);
            }
        }
        if self.unchecked.is_empty() && cache.standing.in_doubt {
            cache.standing.in_doubt = false;
            self.unchecked = Vec::new();
        }
    }

    fn leave(&mut self, cache: &mut Cache, stripe: u64) -> &mut Leaving {
        let since = cache.now;
        let volume = volume_of(stripe);
        cache.volume_mut(volume).is_leaving = true;
        let new = || Leaving { since, asked: false, writes: Vec::new() };
        self.leaving.entry(stripe).or_insert_with(new)
    }

    /// Makes a write wait until the stripe of a block is detached.
    pub fn add_write(&mut self, cache: &mut Cache, key: Key, write: Id) {
        self.leave(cache, stripe_of(key)).writes.push(write);
        self.wanted.insert(stripe_of(key));
    }

    /// Makes a flush wait for the blocks of its volume that were not durable when the device
    /// failed, if there are any.
    pub fn add_flush(
        &mut self,
        cache: &mut Cache,
        requests: &mut Requests,
        id: Id,
        volume: VolumeId,
        fx: &mut Effects,
    ) {
        if cache.health() == Health::Draining && self.is_undurable(volume) {
            self.flushes.push((cache.now, volume, id));
        } else {
            requests.flush_part_done(cache, id, Ok(()), fx);
        }
    }

    /// Destages the stripes that are being detached, and requests their records.
    pub fn pump(
        &mut self,
        cache: &mut Cache,
        requests: &mut Requests,
        destaging: &mut Destaging,
        fx: &mut Effects,
    ) {
        self.has_started = false;
        self.check_some(cache);
        for _ in 0..LEFT_MAX {
            let Some(record) = self.recorded.pop_front() else { break };
            self.leave_recorded(cache, requests, &record, fx);
        }
        match cache.health() {
            Health::Good => {}
            Health::Draining => {
                self.empty_stripes(cache, requests, destaging, fx);
                self.give_up_detaching(cache, requests, fx);
            }
            Health::Detached => {
                for _ in 0..LEFT_MAX {
                    let Some((&stripe, _)) = self.leaving.first_key_value() else { break };
                    Self::drop_unkept(cache, stripe);
                    self.left(cache, requests, stripe, fx);
                }
                self.pump_flushes(cache, requests, None, fx);
                self.note_leaving(cache);
                cache.contents.drop_given_up();
            }
        }
    }

    /// Whether the next turn should come at once, since this one has done enough.
    pub fn goes_on(&self, cache: &Cache) -> bool {
        let leaves = cache.health() == Health::Detached && !self.leaving.is_empty();
        !self.unchecked.is_empty()
            || !self.recorded.is_empty()
            || self.has_started
            || leaves
            || cache.contents.has_given_up()
    }

    /// Destages some of the stripes that are being detached, and requests the records of those
    /// that are empty.
    fn empty_stripes(
        &mut self,
        cache: &mut Cache,
        requests: &Requests,
        destaging: &mut Destaging,
        fx: &mut Effects,
    ) {
        if cache.standing.trust == Trust::Full || cache.standing.in_doubt {
            return;
        }
        self.note_leaving(cache);
        let (cursor, leaving, mut started) = (self.cursor, &self.leaving, 0);
        // Clients wait for these.
        let wanted: Vec<u64> = self.wanted.iter().copied().take(LOOKED_AT).collect();
        let after = leaving.range(cursor..).map(|(&stripe, _)| stripe).take(LOOKED_AT);
        let before = leaving.range(..cursor).map(|(&stripe, _)| stripe);
        let others: Vec<u64> = after.chain(before).take(LOOKED_AT).collect();
        self.empty_some(cache, requests, destaging, (&wanted, &mut started), fx);
        let rest = self.empty_some(cache, requests, destaging, (&others, &mut started), fx);
        self.cursor = rest.unwrap_or(others.last().map_or(0, |last| last + 1));
    }

    /// Does so with some stripes; returns the first that had to be left for the next turn, if any.
    fn empty_some(
        &mut self,
        cache: &mut Cache,
        requests: &Requests,
        destaging: &mut Destaging,
        (stripes, started): (&[u64], &mut u64),
        fx: &mut Effects,
    ) -> Option<u64> {
        for &stripe in stripes {
            if *started >= STARTED_MAX {
                self.has_started = true;
                return Some(stripe);
            }
            let is_wanted = self.wanted.contains(&stripe);
            if !self.leaving[&stripe].asked
                && Self::empty_stripe(cache, destaging, (stripe, is_wanted), started, fx)
            {
                self.ask_to_detach(cache, requests, stripe, fx);
            }
        }
        None
    }

    /// Destages a stripe's dirty blocks, regardless of pace, and counts those `started`; returns
    /// true if no block is left that can be read back.
    fn empty_stripe(
        cache: &mut Cache,
        destaging: &mut Destaging,
        (stripe, is_wanted): (u64, bool),
        started: &mut u64,
        fx: &mut Effects,
    ) -> bool {
        let (dirty, on_way) = cache.contents.dirty().in_stripe(stripe);
        let volume = volume_of(stripe);
        let depth = match is_wanted {
            true => cache.config.destage_depth,
            false => cache.volume(volume).unwanted_depth,
        };
        let order = &cache.volume(volume).order;
        let may_leave = order.may_leave || order.is_behind || !cache.is_ordered(volume);
        let may_start = may_leave && cache.volume(volume).retry_at <= cache.now;
        let mut empty = on_way.is_empty() && may_leave;
        let mut next = Key(stripe * STRIPE_BLOCKS);
        for key in keys_of(stripe).filter(|key| dirty.get(key.0 % STRIPE_BLOCKS)) {
            if cache.contents.has_failed(key) {
                continue;
            }
            empty = false;
            let flow = &cache.volume(volume).flow;
            // The blocks of an ordered volume leave in cuts, until the last is staged.
            if !may_start || flow.destage_writes >= depth {
                break;
            }
            if key >= next
                && !on_way.get(key.0 % STRIPE_BLOCKS)
                && let Ok(past) = destaging.start(cache, key, DestageReason::Fault, fx)
            {
                *started += past.0 - key.0;
                next = past;
            }
        }
        empty
    }

    fn ask_to_detach(&mut self, cache: &Cache, requests: &Requests, stripe: u64, fx: &mut Effects) {
        if let Some(leaving) = self.leaving.get_mut(&stripe) {
            leaving.asked = true;
        }
        let kept = self.kept_in(cache, requests, stripe).words();
        let volume = volume_of(stripe);
        let stripe = Key(stripe * STRIPE_BLOCKS).block() / STRIPE_BLOCKS;
        fx.detach.push(DetachedStripe { volume, stripe, kept });
    }

    /// The blocks of a stripe that only the cache has, except those that have been overwritten
    /// since.
    fn kept_in(&self, cache: &Cache, requests: &Requests, stripe: u64) -> Bits {
        let (mut kept, _) = cache.contents.dirty().in_stripe(stripe);
        for &(_, id) in &self.restoring {
            let Op::Write(write) = requests.get(id) else { continue };
            for key in write.keys() {
                if stripe_of(key) == stripe {
                    kept.set(key.0 % STRIPE_BLOCKS, false);
                }
            }
        }
        kept
    }

    /// Notes that records requested by [`Effects::detach`] are durable. Their stripes are left in
    /// this turn and in later ones.
    pub fn detached(&mut self, records: &[DetachedStripe]) {
        self.recorded.extend(records);
    }

    fn leave_recorded(
        &mut self,
        cache: &mut Cache,
        requests: &mut Requests,
        record: &DetachedStripe,
        fx: &mut Effects,
    ) {
        let stripe = number_of(record);
        cache.volume_mut(record.volume).progress = cache.now;
        cache.left.add(stripe, Bits::from_words(record.kept));
        Self::drop_unkept(cache, stripe);
        self.restored(cache, requests, stripe, fx);
        self.left(cache, requests, stripe, fx);
    }

    /// Drops the cache's copies of a stripe's blocks, except those that are kept. Of a stripe that
    /// was left before, these are blocks that were kept until now: they have been overwritten, or
    /// were read back after all, and are on the primary.
    fn drop_unkept(cache: &mut Cache, stripe: u64) {
        let kept = cache.left.kept(stripe);
        for key in keys_of(stripe).filter(|key| !kept.get(key.0 % STRIPE_BLOCKS)) {
            cache.ram.remove(key);
            cache.contents.forget(key, &mut cache.ram);
        }
    }

    /// Leaves a stripe, whose blocks have been dropped: resumes its writes.
    fn left(&mut self, cache: &mut Cache, requests: &mut Requests, stripe: u64, fx: &mut Effects) {
        let Some(Leaving { writes, .. }) = self.leaving.remove(&stripe) else { return };
        self.wanted.remove(&stripe);
        if self.undurable.contains(&stripe) {
            let kept = cache.left.kept(stripe);
            let kept = keys_of(stripe).filter(|key| kept.get(key.0 % STRIPE_BLOCKS));
            kept.for_each(|key| self.note_lost(cache, key));
        }
        self.undurable.remove(&stripe);
        self.pump_flushes(cache, requests, None, fx);
        for id in writes {
            let Op::Write(write) = requests.get(id) else {
                unreachable!("a write waits until it is told");
            };
            match write.stage {
                Stage::Leaving => Self::end_placed(cache, requests, id, fx),
                _ => requests.lock_blocks(cache, id, fx),
            }
        }
    }

    /// Ends a write whose blocks were in the log when the device failed: they are on the primary
    /// now, unless one was lost on the way.
    fn end_placed(cache: &mut Cache, requests: &mut Requests, id: Id, fx: &mut Effects) {
        let Op::Write(write) = requests.get(id) else {
            unreachable!("a write's id names a write");
        };
        let mut keys = write.keys();
        let lost = keys.any(|key| cache.contents.dirty().contains(key));
        let result = if lost { Err(ErrorKind::Corrupt.into()) } else { Ok(()) };
        requests.end_write(cache, id, result, fx);
    }

    /// Ends the flushes that no longer have to wait, and fails those that have waited since before
    /// `deadline`.
    fn pump_flushes(
        &mut self,
        cache: &mut Cache,
        requests: &mut Requests,
        deadline: Option<Instant>,
        fx: &mut Effects,
    ) {
        let mut i = 0;
        while let Some(&(since, volume, id)) = self.flushes.get(i) {
            let since = since.max(cache.volume(volume).progress);
            let late = deadline.is_some_and(|deadline| since <= deadline);
            if self.is_undurable(volume) && !late {
                i += 1;
                continue;
            }
            self.flushes.remove(i);
            let result = if late { Err(ErrorKind::DeviceGone.into()) } else { Ok(()) };
            requests.flush_part_done(cache, id, result, fx);
        }
    }

    /// Fails operations that have waited too long for a primary that is away, or for a record that
    /// cannot be made. While the primary takes blocks of their volume, they wait.
    fn give_up_detaching(&mut self, cache: &mut Cache, requests: &mut Requests, fx: &mut Effects) {
        let patience = match *cache.state() {
            State::Stopping => PATIENCE.min(cache.config.patience),
            _ => cache.config.patience,
        };
        let deadline = Instant(cache.now.0.saturating_sub(patience.as_nanos() as u64));
        let mut late: Vec<Id> = Vec::new();
        let (leaving, undurable) = (&mut self.leaving, &self.undurable);
        let progress = |volume: VolumeId| cache.volume(volume).progress;
        self.wanted.retain(|stripe| {
            let one = leaving.get_mut(stripe).expect("its writes wait there");
            let volume = volume_of(*stripe);
            if one.since.max(progress(volume)) > deadline {
                return true;
            }
            late.append(&mut one.writes);
            if !one.asked && !undurable.contains(stripe) {
                leaving.remove(stripe);
            }
            false
        });
        let restoring = &mut self.restoring;
        let is_late = |(since, id): &mut (Instant, Id)| {
            let Op::Write(write) = requests.get(*id) else { return false };
            (*since).max(progress(write.volume)) <= deadline
        };
        late.extend(restoring.extract_if(.., is_late).map(|(_, id)| id));
        for id in late {
            let volume = requests.write(id).volume;
            cache.stats_of(volume).given_up_writes += 1;
            requests.end_write(cache, id, Err(ErrorKind::DeviceGone.into()), fx);
        }
        self.note_leaving(cache);
        self.pump_flushes(cache, requests, Some(deadline), fx);
    }

    /// Handles the primary's flush of a write over kept blocks.
    pub fn restore(&mut self, cache: &Cache, requests: &Requests, id: Id, fx: &mut Effects) {
        let Op::Write(write) = requests.get(id) else {
            unreachable!("a write's id names a write");
        };
        let stripe = stripe_of(Key::new(write.volume, write.blocks.first));
        self.restoring.push((cache.now, id));
        self.ask_to_detach(cache, requests, stripe, fx);
    }

    /// Ends the writes for which a record now says that their blocks are no longer kept.
    fn restored(
        &mut self,
        cache: &mut Cache,
        requests: &mut Requests,
        stripe: u64,
        fx: &mut Effects,
    ) {
        let kept = cache.left.kept(stripe);
        let mut ended = Vec::new();
        for &(_, id) in &self.restoring {
            let Op::Write(write) = requests.get(id) else { continue };
            let mut keys = write.keys();
            if keys.all(|key| stripe_of(key) == stripe && !kept.get(key.0 % STRIPE_BLOCKS)) {
                ended.push(id);
            }
        }
        for id in ended {
            self.restoring.retain(|&(_, other)| other != id);
            requests.end_write(cache, id, Ok(()), fx);
        }
    }

    /// At a start, drops the blocks of detached stripes: the log's versions of them are stale.
    pub fn forget_recorded(cache: &mut Cache) {
        // The last record of a stripe counts.
        let detached = cache
            .config
            .detached
            .iter()
            .map(|record| (number_of(record), Bits::from_words(record.kept)));
        for (stripe, kept) in detached.collect::<BTreeMap<_, _>>() {
            if cache.known_volume(volume_of(stripe)).is_none() {
                continue;
            }
            cache.left.add(stripe, kept);
            for key in keys_of(stripe).filter(|key| !kept.get(key.0 % STRIPE_BLOCKS)) {
                cache.contents.forget(key, &mut cache.ram);
            }
        }
    }

    /// Whether the newest version of a block is durable: its bytes and, if it shares them with
    /// another block, its entry.
    fn is_settled(&self, cache: &Cache, key: Key) -> bool {
        let durable = |at: Place| cache.log.is_durable(at.segment, at.offset);
        cache.contents.get(key).is_some_and(durable)
            && cache.contents.unsettled(key).is_none()
            && !self.doubted.contains(&key)
    }

    /// Notes that a block's version in the log may be gone after the next crash.
    pub fn doubt(&mut self, key: Key) {
        self.doubted.insert(key);
    }

    /// Reports a loss to flushes if a block that cannot be read back was not durable when the
    /// device failed.
    fn note_lost(&self, cache: &mut Cache, key: Key) {
        if !self.is_settled(cache, key) {
            cache.volume_mut(key.volume()).losses.note(ErrorKind::Corrupt.into());
        }
    }

    /// Notes which volumes have stripes that are being detached, and for which of them requests
    /// wait for blocks on their way to the primary.
    fn note_leaving(&self, cache: &mut Cache) {
        let (now, depth) = (cache.now, cache.config.destage_depth);
        for volume in cache.volumes.iter_mut().flatten() {
            let id = volume.config.id;
            volume.is_leaving = self.leaving.range(stripes_of(id)).next().is_some();
            let mut wanted = self.wanted.range(stripes_of(id));
            let write_waits = wanted.any(|stripe| !self.leaving[stripe].asked);
            let flush_waits = self.flushes.iter().any(|&(_, of, _)| of == id);
            volume.flow.pacer.set_awaited(now, write_waits || flush_waits);
            volume.unwanted_depth = match (write_waits, flush_waits) {
                (false, _) => depth,
                (true, true) => depth_beside(depth),
                (true, false) => 0,
            };
        }
    }

    /// Whether stripes are to be detached, or may be, or a flush waits for some.
    pub fn is_detaching(&self) -> bool {
        !self.unchecked.is_empty() || !self.leaving.is_empty() || !self.flushes.is_empty()
    }
}
