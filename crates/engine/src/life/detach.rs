//! Writes while a failed cache device is emptied: stripe by stripe the cache is detached.
//!
//! Nothing can be written to the device any more, not even that it does not count. So before the
//! primary gets a newer version of a block than the log has, a record outside of the cache says
//! that the log does not count for the block: otherwise the next start would find the older version
//! dirty in the log, and write it over the newer one. A stripe is detached in this order:
//!
//! 1. its dirty blocks are on the primary, and flushed there;
//! 2. the record is durable, with the blocks of the stripe that are kept: those that cannot be read
//!    back, of which the log has the newest version still, if anybody has;
//! 3. what the cache has of the others is forgotten, and writes go to the primary.
//!
//! Writes of a stripe wait until it is detached, as do flushes for the stripes with blocks that
//! were written and not durable when the device failed. A write over a block that was kept is
//! answered when the primary has flushed it and a further record says that it is kept no more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use forebay_block::{ErrorKind, Instant, STRIPE_BLOCKS, VolumeId};

use crate::Engine;
use crate::api::{DetachedStripe, Effects, Health, State, Trust};
use crate::contents::Bits;
use crate::contents::Place;
use crate::key::Key;
use crate::life::stop::PATIENCE;
use crate::request::op::{Op, Path, Stage};
use crate::slab::Id;

/// How long a block that could not be read back is left alone.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(1);
/// Stripes looked at in a turn.
const LOOKED_AT: usize = 64;

/// A stripe on its way to be detached.
#[derive(Debug)]
struct Leaving {
    since: Instant,
    /// The record has been asked for.
    asked: bool,
    /// Writes that wait, in order.
    writes: Vec<Id>,
}

/// Which stripes the cache has left, or is leaving, by the number that [`stripe_of`] gives.
#[derive(Debug, Default)]
pub(crate) struct Detach {
    /// With the blocks that were kept.
    done: BTreeMap<u64, Bits>,
    leaving: BTreeMap<u64, Leaving>,
    /// Where the next turn goes on.
    cursor: u64,
    /// Dirty blocks that recovery found at the end of the log of a device that had failed: nothing
    /// shows that they are durable.
    doubted: BTreeSet<Key>,
    /// Stripes with blocks that were not durable when the device failed.
    undurable: BTreeSet<u64>,
    /// Flushes that wait for those of their volume, with the time since when.
    flushes: Vec<(Instant, VolumeId, Id)>,
    /// Writes over kept blocks that the primary has flushed, whose record has been asked for.
    restoring: Vec<(Instant, Id)>,
}

impl Detach {
    fn is_undurable(&self, volume: VolumeId) -> bool {
        self.undurable.range(stripes_of(volume)).next().is_some()
    }
}

/// The stripe of a block among all volumes.
fn stripe_of(key: Key) -> u64 {
    key.0 / STRIPE_BLOCKS
}

/// The number of a stripe among those of all volumes.
fn number_of(record: &DetachedStripe) -> u64 {
    stripe_of(Key::new(record.volume, record.stripe * STRIPE_BLOCKS))
}

fn stripes_of(volume: VolumeId) -> std::ops::Range<u64> {
    let keys = Key::range(volume);
    keys.start.0 / STRIPE_BLOCKS..keys.end.0 / STRIPE_BLOCKS
}

fn keys_of(stripe: u64) -> impl Iterator<Item = Key> {
    (stripe * STRIPE_BLOCKS..(stripe + 1) * STRIPE_BLOCKS).map(Key)
}

impl Engine {
    /// Whether the log has nothing to say of a block's stripe.
    pub(crate) fn is_detached(&self, key: Key) -> bool {
        match self.life.health {
            Health::Good => false,
            Health::Draining => self.life.detach.done.contains_key(&stripe_of(key)),
            Health::Detached => true,
        }
    }

    /// The device has failed: flushes wait for what was written and is not durable.
    pub(crate) fn note_undurable(&mut self) {
        for volume in self.volume_ids() {
            let keys = self.contents.dirty().of_volume(volume).filter(|&key| !self.is_settled(key));
            let stripes: BTreeSet<u64> = keys.map(stripe_of).collect();
            self.life.detach.undurable.extend(stripes);
        }
        for stripe in self.life.detach.undurable.clone() {
            self.leave(stripe);
        }
    }

    fn leave(&mut self, stripe: u64) -> &mut Leaving {
        let since = self.now;
        let new = || Leaving { since, asked: false, writes: Vec::new() };
        self.life.detach.leaving.entry(stripe).or_insert_with(new)
    }

    /// A write waits until its stripe is detached. One that is in the log already is done then; any
    /// other starts over.
    pub(crate) fn wait_detached(&mut self, id: Id, fx: &mut Effects) {
        let Op::Write(write) = self.requests.get_mut(id) else {
            unreachable!("a write's id names a write");
        };
        let placed =
            write.path == Path::Cached && matches!(write.stage, Stage::Logged | Stage::Durable);
        write.stage = if placed { Stage::Leaving } else { Stage::Anew };
        write.outstanding = 0;
        let stripe = stripe_of(Key::new(write.volume, write.blocks.first));
        if !placed {
            write.logged = 0;
            write.edges = [None, None];
        }
        self.leave(stripe).writes.push(id);
        if !placed {
            self.unlock_blocks(id, fx);
        }
    }

    /// A flush waits for the blocks of its volume that were not durable when the device failed;
    /// true if there are any.
    pub(crate) fn flush_waits_detached(&mut self, id: Id, volume: VolumeId) -> bool {
        let waits = self.life.health == Health::Draining && self.life.detach.is_undurable(volume);
        if waits {
            self.life.detach.flushes.push((self.now, volume, id));
        }
        waits
    }

    /// Brings stripes that are to be detached to their primaries, and asks for their records.
    pub(crate) fn pump_detach(&mut self, fx: &mut Effects) {
        if self.life.health == Health::Detached {
            for stripe in self.life.detach.leaving.keys().copied().collect::<Vec<_>>() {
                self.left(stripe, fx);
            }
        }
        if self.life.health != Health::Draining {
            return;
        }
        let cursor = self.life.detach.cursor;
        let leaving = &self.life.detach.leaving;
        let mut stripes: Vec<u64> =
            leaving.range(cursor..).map(|(&stripe, _)| stripe).take(LOOKED_AT).collect();
        stripes.extend(leaving.range(..cursor).map(|(&s, _)| s).take(LOOKED_AT - stripes.len()));
        self.life.detach.cursor = stripes.last().map_or(0, |last| last + 1);
        for stripe in stripes {
            if !self.life.detach.leaving[&stripe].asked && self.empty_stripe(stripe, fx) {
                self.ask_to_detach(stripe, fx);
            }
        }
        self.give_up_detaching(fx);
    }

    /// Destages a stripe's dirty blocks, whatever the pace; true when none is left that can be
    /// read back.
    fn empty_stripe(&mut self, stripe: u64, fx: &mut Effects) -> bool {
        let (dirty, destaging) = self.contents.dirty().in_stripe(stripe);
        let mut empty = destaging.is_empty();
        for key in keys_of(stripe) {
            let at = key.0 % STRIPE_BLOCKS;
            let contents = &self.contents;
            let unreadable = contents.unreadable_until(key).is_some();
            let kept = contents.fenced().contains(&key) || unreadable;
            if !dirty.get(at) || kept {
                continue;
            }
            empty = false;
            let flow = &self.volume(key.volume()).flow;
            if flow.destage_writes < self.config.destage_depth
                && !self.contents.dirty().is_destaging(key)
            {
                let _ = self.start_destage(key, fx);
            }
        }
        empty && self.life.trust > Trust::Full
    }

    fn ask_to_detach(&mut self, stripe: u64, fx: &mut Effects) {
        if let Some(leaving) = self.life.detach.leaving.get_mut(&stripe) {
            leaving.asked = true;
        }
        let kept = self.kept_in(stripe).words();
        let volume = Key(stripe * STRIPE_BLOCKS).volume();
        let stripe = Key(stripe * STRIPE_BLOCKS).block() / STRIPE_BLOCKS;
        fx.detach.push(DetachedStripe { volume, stripe, kept });
    }

    /// Blocks of a stripe that the cache alone has, but for those that were written since.
    fn kept_in(&self, stripe: u64) -> Bits {
        let (mut kept, _) = self.contents.dirty().in_stripe(stripe);
        for &(_, id) in &self.life.detach.restoring {
            let Op::Write(write) = self.requests.get(id) else { continue };
            for key in write.keys() {
                if stripe_of(key) == stripe {
                    kept.set(key.0 % STRIPE_BLOCKS, false);
                }
            }
        }
        kept
    }

    /// What [`Effects::detach`] asked for is durable.
    pub fn detached(&mut self, now: Instant, stripes: &[DetachedStripe], fx: &mut Effects) {
        self.now = now;
        for record in stripes {
            let stripe = number_of(record);
            self.life.detach.done.insert(stripe, Bits::from_words(record.kept));
            self.restored(stripe, fx);
            self.left(stripe, fx);
        }
    }

    /// The cache has left a stripe: what it has of it is forgotten, and writes go on.
    fn left(&mut self, stripe: u64, fx: &mut Effects) {
        let Some(Leaving { writes, .. }) = self.life.detach.leaving.remove(&stripe) else { return };
        let kept = self.life.detach.done.get(&stripe).copied().unwrap_or_default();
        for key in keys_of(stripe) {
            if !kept.get(key.0 % STRIPE_BLOCKS) {
                self.ram.remove(key);
                self.contents.forget(key, &mut self.ram);
            } else if self.life.detach.undurable.contains(&stripe) {
                self.note_lost(key);
            }
        }
        self.life.detach.undurable.remove(&stripe);
        self.pump_detach_flushes(None, fx);
        for id in writes {
            let Op::Write(write) = self.requests.get(id) else {
                unreachable!("a write waits until it is told");
            };
            match write.stage {
                Stage::Leaving => self.end_placed(id, fx),
                _ => self.lock_blocks(id, fx),
            }
        }
    }

    /// A write whose blocks were in the log when the device failed is on the primary, unless a
    /// block was lost on the way.
    fn end_placed(&mut self, id: Id, fx: &mut Effects) {
        let Op::Write(write) = self.requests.get(id) else {
            unreachable!("a write's id names a write");
        };
        let mut keys = write.keys();
        let lost = keys.any(|key| self.contents.dirty().contains(key));
        let result = if lost { Err(ErrorKind::Corrupt.into()) } else { Ok(()) };
        self.end_write(id, result, fx);
    }

    /// Lets flushes go on, or gives up those that have waited since before `deadline`.
    fn pump_detach_flushes(&mut self, deadline: Option<Instant>, fx: &mut Effects) {
        let mut i = 0;
        while let Some(&(since, volume, id)) = self.life.detach.flushes.get(i) {
            let late = deadline.is_some_and(|deadline| since <= deadline);
            if self.life.detach.is_undurable(volume) && !late {
                i += 1;
                continue;
            }
            self.life.detach.flushes.remove(i);
            let result = if late { Err(ErrorKind::DeviceGone.into()) } else { Ok(()) };
            self.flush_part_done(id, result, fx);
        }
    }

    /// Nobody waits for ever for a primary that is away, or a record that cannot be made.
    fn give_up_detaching(&mut self, fx: &mut Effects) {
        let patience = match self.life.state {
            State::Stopping => PATIENCE.min(self.config.patience),
            _ => self.config.patience,
        };
        let deadline = Instant(self.now.0.saturating_sub(patience.as_nanos() as u64));
        let late =
            self.life.detach.leaving.iter_mut().filter(|(_, leaving)| leaving.since <= deadline);
        let mut late: Vec<Id> =
            late.flat_map(|(_, leaving)| std::mem::take(&mut leaving.writes)).collect();
        let restoring = &mut self.life.detach.restoring;
        late.extend(restoring.extract_if(.., |(since, _)| *since <= deadline).map(|(_, id)| id));
        for id in late {
            self.stats.given_up_writes += 1;
            self.end_write(id, Err(ErrorKind::DeviceGone.into()), fx);
        }
        let undurable = &self.life.detach.undurable;
        let kept = |stripe: &u64, leaving: &Leaving| {
            leaving.asked || !leaving.writes.is_empty() || undurable.contains(stripe)
        };
        self.life.detach.leaving.retain(|stripe, leaving| kept(stripe, leaving));
        self.pump_detach_flushes(Some(deadline), fx);
    }

    /// Whether a write is of blocks that are kept: they are until a record says otherwise.
    pub(crate) fn restores(&self, id: Id) -> bool {
        if self.life.health != Health::Draining {
            return false;
        }
        let Op::Write(write) = self.requests.get(id) else { return false };
        let mut keys = write.keys();
        let kept = |key| self.life.detach.done.get(&stripe_of(key));
        keys.any(|key| kept(key).is_some_and(|kept| kept.get(key.0 % STRIPE_BLOCKS)))
    }

    /// The primary has flushed a write over kept blocks.
    pub(crate) fn restore(&mut self, id: Id, fx: &mut Effects) {
        let Op::Write(write) = self.requests.get(id) else {
            unreachable!("a write's id names a write");
        };
        let stripe = stripe_of(Key::new(write.volume, write.blocks.first));
        self.life.detach.restoring.push((self.now, id));
        self.ask_to_detach(stripe, fx);
    }

    /// A record says that blocks are kept no more.
    fn restored(&mut self, stripe: u64, fx: &mut Effects) {
        let kept = self.life.detach.done[&stripe];
        let mut ended = Vec::new();
        for &(_, id) in &self.life.detach.restoring {
            let Op::Write(write) = self.requests.get(id) else { continue };
            let mut keys = write.keys();
            if keys.all(|key| stripe_of(key) == stripe && !kept.get(key.0 % STRIPE_BLOCKS)) {
                ended.push(id);
            }
        }
        for id in ended {
            self.life.detach.restoring.retain(|&(_, other)| other != id);
            let Op::Write(write) = self.requests.get(id) else { continue };
            for key in write.keys() {
                self.ram.remove(key);
                self.contents.forget(key, &mut self.ram);
            }
            self.end_write(id, Ok(()), fx);
        }
    }

    /// At a start: what the log has of detached stripes is out of date.
    pub(crate) fn forget_detached(&mut self) {
        // The last record of a stripe counts.
        let detached = self
            .config
            .detached
            .iter()
            .map(|record| (number_of(record), Bits::from_words(record.kept)));
        for (stripe, kept) in detached.collect::<BTreeMap<_, _>>() {
            if self.known_volume(Key(stripe * STRIPE_BLOCKS).volume()).is_none() {
                continue;
            }
            self.life.detach.done.insert(stripe, kept);
            for key in keys_of(stripe).filter(|key| !kept.get(key.0 % STRIPE_BLOCKS)) {
                self.contents.forget(key, &mut self.ram);
            }
        }
    }

    /// Whether the newest version of a block is durable: its bytes, and the entry that says so
    /// where they are another block's.
    fn is_settled(&self, key: Key) -> bool {
        let durable = |at: Place| self.log.is_durable(at.segment, at.offset);
        self.contents.get(key).is_some_and(durable)
            && self.contents.unsettled(key).is_none()
            && !self.life.detach.doubted.contains(&key)
    }

    /// Notes that a block's version in the log may be gone after the next crash.
    pub(crate) fn doubt(&mut self, key: Key) {
        self.life.detach.doubted.insert(key);
    }

    /// A block cannot be read back that was not durable when the device failed: those who flush are
    /// told.
    fn note_lost(&mut self, key: Key) {
        if !self.is_settled(key) {
            self.volume_mut(key.volume()).losses.note(ErrorKind::Corrupt.into());
        }
    }

    /// The device could not read a dirty block back: it is tried again after a while, and nothing
    /// waits for it.
    pub(crate) fn note_unreadable(&mut self, key: Key) {
        self.contents.note_unreadable(key, self.now + UNREADABLE_PAUSE);
    }

    /// Whether it is too early to try again to read a block back.
    pub(crate) fn rests(&self, key: Key) -> bool {
        self.life.health != Health::Good
            && (self.requests.is_locked(key)
                || self.contents.unreadable_until(key).is_some_and(|until| until > self.now))
    }

    /// Whether somebody waits for a stripe to be detached.
    pub(crate) fn is_detaching(&self) -> bool {
        !self.life.detach.leaving.is_empty() || !self.life.detach.flushes.is_empty()
    }

    /// Whether writes or flushes of a volume wait for stripes to be detached.
    pub(crate) fn detaches(&self, volume: VolumeId) -> bool {
        self.life.detach.leaving.range(stripes_of(volume)).next().is_some()
    }
}
