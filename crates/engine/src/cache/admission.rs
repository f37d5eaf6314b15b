//! Admission from RAM: a miss brings blocks into RAM first. They enter the store when their place
//! in RAM is needed, if they are worth it by then ([`forebay_policy::Window`]). Some enter the log,
//! and all do in a cache without a store.
//!
//! While RAM has room, nothing would ever leave it. So that a crash or restart loses no more than
//! the misses of the last minute, every place in RAM is also visited periodically.

use std::ops::Range;
use std::time::Duration;

use forebay_block::{Instant, VolumeId};
use forebay_policy::{Touch, Window};

use crate::api::{Effects, Health, Refusal};
use crate::cache::Cache;
use crate::contents::Index;
use crate::contents::block_of;
use crate::key::Key;
use crate::limits::step;
use crate::locks::Locks;
use crate::ram::Round;
use crate::store::{Store, UNIT_BLOCKS};

/// Time in which every place of the RAM tier is visited, while there may be blocks to admit.
const ROUND: Duration = Duration::from_secs(60);
/// Limits on the places visited in one turn of the event loop, and on the blocks that are weighed:
/// to encode one takes up to 15 microseconds. To weigh few together takes as long as if they were
/// [`UNIT_BLOCKS`].
const PLACES_MAX: u64 = step(1024) as u64;
const WEIGHED_MAX: u64 = step(64) as u64;
/// Of this many groups of missed blocks, one goes through the log.
const THROUGH_LOG_ONE_IN: u64 = 4;
/// Intervals between visits when nothing else happens: usually, and when the round is late.
const ROUND_TICK: Duration = Duration::from_millis(100);
const LATE_TICK: Duration = Duration::from_millis(1);

impl Cache {
    /// Makes room in RAM for a block. The blocks that lose their place enter the cache device if
    /// they are not there and are worth it.
    pub(crate) fn make_way(&mut self, key: Key, fx: &mut Effects) {
        if self.ram.has_room_for(key) {
            return;
        }
        let (index, locks, store) = (self.contents.index(), &self.locks, &self.store);
        let run = self.ram.leaving(|key| is_alone(index, locks, store, key));
        if let Some(oldest) = self.ram.oldest_read() {
            self.note_left_ram(block_of(oldest));
        }
        let (volume, blocks) = (Key(run.start).volume(), run.end - run.start);
        if blocks > 0
            && let Err(why) = self.weigh(run, fx)
        {
            self.note_unadmitted(volume, why, blocks);
        }
    }

    /// Visits the next places of the RAM tier, looking for blocks that have long been in RAM but
    /// not on the cache device.
    pub(crate) fn pump_alone(&mut self, fx: &mut Effects) {
        if self.contents.is_loading() {
            return;
        }
        let Some(Round { since, place: from, .. }) = self.ram.alone().round(self.now) else {
            return;
        };
        let frames = self.ram.frames() as u64;
        let so_far = self.now.since(since).as_millis() * u128::from(frames) / ROUND.as_millis();
        let due = u64::try_from(so_far).unwrap_or(frames).min(frames);
        let end = due.min(from + PLACES_MAX);
        let (mut place, mut weighed, mut done) = (from, 0..0, 0);
        while place < end && done < WEIGHED_MAX && !self.form.background().turn_is_over() {
            let recent = self.ram.recent();
            let alone = |key: u64| self.is_alone(key);
            let at = u32::try_from(place).expect("places have 32 bits");
            if let Some(key) = recent.at(at).filter(|&key| !weighed.contains(&key) && alone(key)) {
                weighed = Window::around(recent, key, at, alone);
                done += UNIT_BLOCKS.max(weighed.end - weighed.start);
                // What is refused stays in RAM, and may be admitted later.
                if self.weigh(weighed.clone(), fx).is_ok() {
                    let index = self.contents.index();
                    let there = |key: &Key| index.get(*key).is_some();
                    weighed
                        .clone()
                        .map(Key)
                        .filter(there)
                        .for_each(|key| self.ram.note_doubled(key));
                }
            }
            place += 1;
        }
        let round = Round { since, place, is_late: place < due };
        self.ram.alone().set_round((place < frames).then_some(round));
    }

    /// When places of the RAM tier must be visited again, if there are blocks to admit.
    pub(crate) fn next_visit(&self) -> Option<Instant> {
        let tick = if self.ram.is_round_late() { LATE_TICK } else { ROUND_TICK };
        (self.is_serving() && self.ram.has_alone()).then(|| self.now + tick)
    }

    /// Puts blocks that are only in RAM into the store, or into the log, if they may enter.
    pub(crate) fn weigh(&mut self, run: Range<u64>, fx: &mut Effects) -> Result<(), Refusal> {
        if !self.admits_reads(Key(run.start).volume()) {
            return Err(Refusal::Mode);
        }
        self.may_enter(run.clone())?;
        for first in run.clone().step_by(UNIT_BLOCKS as usize) {
            self.admit_unit(first..run.end.min(first + UNIT_BLOCKS), fx);
        }
        Ok(())
    }

    /// Puts neighboring blocks that are only in RAM into the store or, if it does not take them,
    /// into the log.
    fn admit_unit(&mut self, run: Range<u64>, fx: &mut Effects) {
        let mut blocks = Vec::with_capacity(UNIT_BLOCKS as usize);
        for key in run.map(Key).filter(|&key| self.is_alone(key.0)) {
            blocks.extend(self.ram.peek(key, |bytes| (key, bytes.to_vec())));
        }
        let blocks: Vec<_> = blocks.iter().map(|(key, block)| (*key, &block[..])).collect();
        self.admit_group(&blocks, fx);
    }

    /// Puts neighboring blocks that were read from the primary, and are not on the device, into the
    /// store or, if it does not take them, into the log. Returns the number of those that are on
    /// their way.
    pub(crate) fn admit_group(&mut self, blocks: &[(Key, &[u8])], fx: &mut Effects) -> u64 {
        let Some(&(first, _)) = blocks.first() else { return 0 };
        if self.skips_log() && self.may_admit(first.volume()) && self.admit_to_store(blocks, fx) {
            self.note_admitted(first.volume(), blocks.len() as u64);
            return blocks.len() as u64;
        }
        blocks.iter().map(|(key, block)| u64::from(self.admit(*key, block, fx))).sum()
    }

    /// Whether the next missed blocks go past the log. A few go into it, so that its room is used
    /// while clients write little.
    fn skips_log(&mut self) -> bool {
        self.admitted_units = self.admitted_units.wrapping_add(1);
        self.store.exists() && !self.admitted_units.is_multiple_of(THROUGH_LOG_ONE_IN)
    }

    /// Counts missed blocks that do not enter the cache device.
    pub(crate) fn note_unadmitted(&mut self, volume: VolumeId, why: Refusal, blocks: u64) {
        let stats = self.stats_of(volume);
        stats.unadmitted_blocks += blocks;
        stats.unadmitted_by[why as usize] += blocks;
    }

    /// Whether missed blocks, which were requested together, enter the cache device.
    pub(crate) fn may_enter(&mut self, run: Range<u64>) -> Result<(), Refusal> {
        if self.contents.is_loading() {
            return Err(Refusal::Loading);
        }
        self.is_worth_room(run.clone())?;
        match () {
            () if !self.is_worth_wear(run) => Err(Refusal::Wear),
            () if !self.fill.allows(self.now) => Err(Refusal::Rate),
            () => Ok(()),
        }
    }

    /// Whether prefetched blocks of a volume may enter the cache device now, whatever their worth.
    pub(crate) fn may_prefetch(&mut self, volume: VolumeId) -> bool {
        // Any block may be in the log, and just not loaded yet.
        !self.contents.is_loading()
            && !self.is_at_limit(volume)
            && self.wear_pressure() < 1.0
            && self.fill.allows(self.now)
    }

    /// Whether missed blocks are worth the room that they would take.
    fn is_worth_room(&mut self, run: Range<u64>) -> Result<(), Refusal> {
        let (volume, last) = (Key(run.start).volume(), self.policy.touched(Touch::Read));
        if self.is_at_limit(volume) {
            let displaces = self.displace_own(run, last);
            return if displaces { Ok(()) } else { Err(Refusal::Limit) };
        }
        if self.pins.has_any(run.clone()) {
            return Ok(());
        }
        let blocks = run.end - run.start;
        let enters = match self.store.exists() {
            _ if self.is_below_guarantee(volume) => true,
            true => self.deserve_store(run, last),
            // A guarantee is room for its volume, even if the blocks of others are more frequent.
            false => {
                self.policy.admits(run.clone())
                    || self.guards(volume, blocks) && self.displace_own(run, last)
            }
        };
        if enters { Ok(()) } else { Err(Refusal::Frequency) }
    }

    /// Puts a block read from the primary into the log, unless more writes wait for the log than
    /// the one being logged. Returns whether it is there.
    pub(crate) fn admit(&mut self, key: Key, block: &[u8], fx: &mut Effects) -> bool {
        let admitted = self.may_admit(key.volume())
            && self.log.queued() <= 1
            && self.push_admitted(fx, key, block);
        self.note_admitted(key.volume(), u64::from(admitted));
        admitted
    }

    /// Whether blocks of a volume that were read from its primary may enter the device now.
    fn may_admit(&self, volume: VolumeId) -> bool {
        // The primary may lose unflushed writes; a clean copy on the device must not outlive them.
        let volume = self.volume(volume);
        let settled = !volume.has_unflushed() && !volume.unsettled && !volume.flush_failed;
        settled && self.health() == Health::Good && self.has_client_space()
    }

    fn note_admitted(&mut self, volume: VolumeId, blocks: u64) {
        self.stats_of(volume).admitted_blocks += blocks;
        self.fill.take(blocks);
    }

    /// Whether a block is in RAM, if it is in the cache, and not on its way to the device, and no
    /// operation is changing it.
    pub(crate) fn is_alone(&self, key: u64) -> bool {
        is_alone(self.contents.index(), &self.locks, &self.store, key)
    }
}

fn is_alone(index: &Index, locks: &Locks, store: &Store, key: u64) -> bool {
    let key = Key(key);
    let elsewhere = || index.get(key).is_some() || store.is_entering(key);
    block_of(key) == key && !locks.is_locked(key) && !elsewhere()
}
