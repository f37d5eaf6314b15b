//! The engine of one shard: owns the rooms and passes notes and completions between them.
//!
//! Callers pass in requests, completions and the time, and find the resulting work in [`Effects`].
//! `submit` and `complete` do the immediate work. `poll`, called once per turn of the event loop,
//! does the work that several requests share: it closes records (group commit), frees segments,
//! destages, and sets the next deadline. Its order matters: a step that makes room in the log comes
//! before the steps that need room, and the log is pumped again at the end because reclaim and
//! destaging may have given it more to do.
//!
//! These invariants hold between two calls:
//!
//! - Every block in the index has its place counted in its segment, and so has its base, if any.
//!   The dirty set and the index agree ([`Shard::check`]).
//! - A block is clean only if its primary durably has its newest version.
//! - A dirty block is written to its primary only in a version that is durable in the log.
//! - A segment is reused only when nothing in it is needed, the record that drops it from the log
//!   is durable, and no read of it is in flight.
//! - A locked block has one writer. Data read for the block while it is locked is never kept.

use std::time::Duration;

use forebay_block::{
    BLOCK_SIZE, BlockRange, Completion, ErrorKind, Instant, IoError, IoOp, VolumeId,
};
use forebay_format::Lsn;

use crate::api::cut::CutOrder;
use crate::api::listing::Listing;
use crate::api::primary::VolumeState;
use crate::api::stats::Stats;
use crate::api::{
    DetachedStripe, Effects, Health, Reply, Request, Setting, ShardConfig, State, Target, Trust,
};
use crate::cache::Cache;
use crate::destage::Destaging;
use crate::key::Key;
use crate::life::Life;
use crate::life::compare::Compare;
use crate::life::detach::Detach;
use crate::limits::WARM_BLOCKS;
use crate::log::read::{Reader, SegmentRead};
use crate::note::Note;
use crate::reclaim::Reclaim;
use crate::recovery::Start;
use crate::recovery::salvage::{Hole, LostRange};
use crate::request::Requests;
use crate::shard::Shard;
use crate::slab::Id;
use crate::ticket::{InFlight, PrimaryFlush, Ticket};
use crate::volume::Volume;

/// The cache of one shard. Each field is a room, whose own fields are private to it;
/// `docs/internals/engine.md` says what each room decides.
pub struct Engine {
    pub(crate) cache: Cache,
    pub(crate) life: Life,
    pub(crate) detach: Detach,
    pub(crate) compare: Compare,
    pub(crate) requests: Requests,
    pub(crate) destaging: Destaging,
    pub(crate) reclaim: Reclaim,
    pub(crate) recovery: Start,
}

impl Engine {
    /// Returns an engine that has not started.
    ///
    /// # Panics
    /// If the geometry is outside the limits; a pool of crate `volume` never has such a geometry.
    #[must_use]
    pub fn new(config: ShardConfig, now: Instant) -> Self {
        Self {
            life: Life::new(config.trust),
            detach: Detach::default(),
            compare: Compare::default(),
            requests: Requests::default(),
            destaging: Destaging::default(),
            reclaim: Reclaim::default(),
            recovery: Start::default(),
            cache: Cache::new(config, now),
        }
    }

    /// Returns the ranges known to be lost, at most `most`, in address order. Reads of them fail
    /// until they are overwritten.
    #[must_use]
    pub fn lost_ranges(&self, most: usize) -> Vec<LostRange> {
        let mut ranges: Vec<LostRange> = Vec::new();
        for key in self.cache.contents.fenced().iter() {
            let volume = key.volume();
            let range = BlockRange { first: key.block(), count: 1 };
            let range = self.cache.bytes_on_volume(volume, range);
            let full = ranges.len() == most;
            match ranges.last_mut() {
                Some(last) if last.volume == volume && last.range.end() == range.offset => {
                    last.range.len += range.len;
                }
                _ if full => break,
                _ => ranges.push(LostRange { volume, range }),
            }
        }
        ranges
    }

    /// Returns the holes in the log found at the start. Any block may have been in the lost
    /// records.
    #[must_use]
    pub fn lost_records(&self) -> &[Hole] {
        self.recovery.lost_records()
    }
}

impl Shard for Engine {
    fn start(&mut self, now: Instant, fx: &mut Effects) {
        self.cache.now = now;
        if self.cache.config.fresh {
            self.cache.standing.state = State::Serving;
        } else {
            self.recovery.begin(&mut self.cache, &mut self.detach, &mut self.compare, fx);
        }
        self.set_deadline(fx);
    }

    fn warm(&self, requests: &[Request]) {
        if let [alone] = requests
            && alone.range.len <= BLOCK_SIZE as u64
        {
            return;
        }
        let cached = requests.iter().filter(|r| r.bypass.is_none());
        let cached = cached.filter(|r| matches!(r.op, IoOp::Read | IoOp::Write));
        let cached = cached.filter(|r| self.refusal(r).is_ok());
        let keys = cached.flat_map(|r| r.range.blocks().iter().map(|b| Key::new(r.volume, b)));
        let Cache { ram, policy, contents, .. } = &self.cache;
        let mut blocks = [(Key(0), None); WARM_BLOCKS];
        let count = blocks.iter_mut().zip(keys).map(|(block, key)| block.0 = key).count();
        let blocks = &mut blocks[..count];
        // Nothing else in this loop: the processor waits for several lookups at a time.
        blocks.iter_mut().for_each(|(key, slot)| *slot = ram.find(*key));
        for (key, slot) in blocks.iter() {
            policy.warm(key.0);
            if slot.is_none() || policy.notes_hits() {
                contents.index().warm(*key);
            }
        }
        let slots = || blocks.iter().filter_map(|&(_, slot)| slot);
        slots().for_each(|slot| ram.warm(slot));
        slots().for_each(|slot| ram.warm_neighbours(slot));
    }

    fn rested(&mut self, rest: Duration) {
        self.cache.form.rested(rest);
    }

    fn submit(&mut self, now: Instant, request: Request, fx: &mut Effects) {
        self.cache.now = now;
        if let Err(kind) = self.refusal(&request) {
            let Request { id, buf, .. } = request;
            fx.replies.push(Reply { id, result: Err(kind.into()), buf, direct: None, tier: None });
            return;
        }
        match request.op {
            IoOp::Read => self.requests.submit_read(&mut self.cache, request, fx),
            IoOp::Flush => self.requests.submit_flush(&mut self.cache, request, fx),
            IoOp::Prefetch => self.requests.submit_prefetch(&mut self.cache, request, fx),
            IoOp::Write | IoOp::WriteZeroes | IoOp::Discard => {
                self.requests.submit_write(&mut self.cache, request, fx)
            }
        }
        self.deliver(fx);
    }

    fn complete(&mut self, now: Instant, target: Target, mut done: Completion, fx: &mut Effects) {
        self.cache.now = now;
        let id = Id(u32::try_from(done.tag.0).expect("tags are those the engine gave"));
        let sent = self.cache.out.take(id);
        self.cache.note_ended(target, &sent, &done);
        let InFlight { ticket, at, .. } = sent;
        match ticket {
            Ticket::Record { lsn, tries } => self.record_written(lsn, tries, done, fx),
            Ticket::CacheFlush => self.cache_flushed(done.result, fx),
            Ticket::Footer { seq, tries } => self.footer_written(seq, tries, &done.result, fx),
            Ticket::Unit { id, tries } => self.cache.unit_written(id, tries, done, fx),
            Ticket::Discard => self.cache.extent_discarded(done.result.is_ok()),
            Ticket::Payloads(read) => self.payloads_read(&read, &mut done, fx),
            Ticket::Fetch(fetch) => self.requests.fetched(&mut self.cache, fetch, at, done, fx),
            Ticket::DestageWrite(destage) => self.destaging.written(&mut self.cache, destage, done),
            Ticket::PrimaryFlush(flush) => self.primary_flushed(*flush, &done.result, fx),
            Ticket::Direct(op) => self.requests.direct_done(&mut self.cache, op, at, done, fx),
            Ticket::ComparePrimary => self.compare.primary_read(&mut self.cache, &done, fx),
            Ticket::Recovery(step) => self.recovery.step_done(
                &mut self.cache,
                &mut self.detach,
                &mut self.compare,
                step,
                done,
                fx,
            ),
            Ticket::LateFooter(index) => {
                self.recovery.late_footer_read(&mut self.cache, index, done);
            }
            // Its outcome is all.
            Ticket::PrimaryProbe => {}
            Ticket::StopFlush => Life::stop_flushed(&mut self.cache, &done),
        }
        self.deliver(fx);
    }

    fn poll(&mut self, now: Instant, fx: &mut Effects) {
        self.cache.now = now;
        self.cache.form.begin_turn();
        self.requests.begin_turn();
        self.cache.ram.begin_turn(now);
        self.cache.note_wear();
        self.cache.pump_unanswered();
        self.cache.probe_primaries(fx);
        self.recovery.retry(&mut self.cache, fx);
        if matches!(self.cache.state(), State::Serving | State::Stopping) {
            let rooms: [fn(&mut Self, &mut Effects); 20] = [
                |engine, fx| engine.recovery.pump_fences(&mut engine.cache, fx),
                |engine, fx| engine.requests.follow_unlocked(&mut engine.cache, fx),
                |engine, fx| engine.requests.release_delayed(&mut engine.cache, fx),
                Self::pump_log,
                Self::pump_durability,
                Self::pump_late,
                |engine, fx| engine.requests.pump_parked(&mut engine.cache, fx),
                |engine, fx| engine.reclaim.pump(&mut engine.cache, fx),
                |engine, fx| engine.cache.pump_store(fx),
                |engine, fx| engine.cache.pump_excess(fx),
                Self::pump_detach,
                Self::pump_destage,
                |engine, fx| engine.requests.pump_leftover(&mut engine.cache, fx),
                Self::pump_primary_flushes,
                |engine, fx| engine.cache.pump_alone(fx),
                |engine, fx| engine.compare.pump(&mut engine.cache, fx),
                // Reclaim and destaging may have given the log more to do.
                Self::pump_log,
                Self::pump_durability,
                |engine, fx| engine.life.pump(&engine.cache, &engine.destaging, fx),
                Self::pump_stop,
            ];
            for pump in rooms {
                pump(self, fx);
                self.deliver(fx);
            }
        }
        self.cache.out.hand_out(fx);
        self.set_deadline(fx);
    }

    fn stop(&mut self, now: Instant, fx: &mut Effects) {
        self.cache.now = now;
        self.life.begin_stop(&mut self.cache);
        self.set_deadline(fx);
    }

    fn state(&self) -> &State {
        self.cache.state()
    }

    fn health(&self) -> Health {
        self.cache.health()
    }

    fn check(&self) -> Result<(), String> {
        self.cache.contents.check()?;
        let is_loaded = *self.cache.state() == State::Serving && !self.cache.contents.is_loading();
        let pages = self.cache.contents.pages_and_index().0;
        if is_loaded { self.cache.store.check(pages) } else { Ok(()) }
    }

    fn stats(&self, now: Instant) -> Stats {
        let requests_in_flight = self.requests.unanswered() as u64;
        let unloaded_segments = match self.cache.contents.is_loading() {
            true => self.recovery.unloaded_segments(),
            false => 0,
        };
        Stats { requests_in_flight, unloaded_segments, ..self.cache.stats(now) }
    }

    fn set_drain(&mut self, on: bool) {
        self.destaging.drain(on);
    }

    fn drain_volume(&mut self, volume: VolumeId, on: bool) {
        if self.cache.known_volume(volume).is_some() {
            self.cache.volume_mut(volume).draining = on;
        }
    }

    fn retire(&mut self) {
        self.life.want_trust(Trust::DirtyOnly);
    }

    fn dirty_blocks(&self) -> u64 {
        self.cache.contents.dirty().blocks()
    }

    fn has_unflushed(&self) -> bool {
        self.cache.has_unflushed()
    }

    fn untold(&self) -> u64 {
        let untold = self.cache.volumes.iter().flatten().filter(|one| one.losses.is_untold());
        untold.fold(0, |bits, one| bits | 1 << one.config.id.0)
    }

    fn volumes(&self, now: Instant) -> Vec<VolumeState> {
        let state = |volume: &crate::volume::Volume| {
            let id = volume.config.id;
            let (lost_blocks, lost) = self.cache.lost_of(id);
            VolumeState {
                id,
                stats: self.cache.stats_by(volume, now),
                primary: volume.primary,
                dirty_blocks: self.cache.contents.dirty().blocks_of(id),
                lost_blocks,
                lost,
                dirty_limit_blocks: self.cache.limit_of(id),
                cache_guarantee_blocks: self.cache.guarantee_of(id),
                cache_limit_blocks: self.cache.cache_limit_of(id),
                changed: volume.changed,
                held_writes: volume.flow.held_writes(),
                slow_ios: volume.flow.slow_ios,
                oldest_io: volume.flow.oldest_io,
            }
        };
        self.cache.volumes.iter().flatten().map(state).collect()
    }

    fn log_end(&self) -> Lsn {
        let ended = *self.cache.state() == State::Stopped && self.cache.health() == Health::Good;
        if ended { Lsn(self.cache.log.next_lsn().0 - 1) } else { Lsn(0) }
    }

    fn lost_blocks(&self) -> u64 {
        self.cache.contents.fenced().len() as u64
    }

    fn pin(&mut self, volume: VolumeId, blocks: &[BlockRange]) {
        self.cache.set_pins(volume, blocks);
    }

    fn list(&self, from: u64) -> Listing {
        self.cache.list(from)
    }

    fn set(&mut self, setting: Setting) {
        match setting {
            Setting::Mode(volume, mode) => self.cache.set_mode(volume, mode),
            Setting::Eviction(eviction) => self.cache.set_eviction(eviction),
            Setting::Content(content) => self.cache.set_content(content),
            Setting::DirtyLimit(limit) => self.cache.set_dirty_limit(limit),
            Setting::DirtyShare(volume, share) => self.cache.set_dirty_share(volume, share),
            Setting::CacheShare(volume, share) => self.cache.set_cache_share(volume, share),
            Setting::WriteCacheDepth(depth) => self.cache.config.write_cache_depth = depth,
            Setting::DirtyTarget(target) => self.cache.config.dirty_target = target,
            Setting::IdleDestage(after) => self.cache.config.idle_destage = after,
            Setting::Pace(volume, pace) => self.cache.set_pace(volume, pace),
            Setting::WearBudget(budget) => self.cache.set_wear_budget(budget),
            Setting::FillRate(rate) => self.cache.set_fill_rate(rate),
            Setting::Patience(patience) => self.cache.config.patience = patience,
        }
    }

    fn trust_recorded(&mut self, now: Instant, trust: Trust, fx: &mut Effects) {
        self.cache.now = now;
        self.cache.standing.trust = self.cache.standing.trust.max(trust);
        if self.cache.standing.trust > Trust::Full && self.cache.health() == Health::Good {
            self.fail_cache(fx);
            self.deliver(fx);
        }
        if self.cache.standing.trust == Trust::Nothing && self.cache.contents.dirty().blocks() == 0
        {
            self.cache.set_health(Health::Detached);
            self.cache.contents.give_up();
        }
        self.poll(now, fx);
    }

    fn detached(&mut self, now: Instant, stripes: &[DetachedStripe], fx: &mut Effects) {
        self.cache.now = now;
        self.detach.detached(stripes);
        self.set_deadline(fx);
    }

    fn cut(&mut self, now: Instant, volume: VolumeId, order: CutOrder, fx: &mut Effects) {
        self.follow_order(now, volume, order, fx);
    }

    fn distrust(&mut self, volume: VolumeId) {
        self.compare.distrust(&mut self.cache, volume);
    }

    fn flush_failed(&mut self, now: Instant, target: Target, error: &IoError, fx: &mut Effects) {
        self.cache.now = now;
        let Target::Primary(volume) = target else {
            self.fail_cache(fx);
            return self.deliver(fx);
        };
        self.cache.volume_mut(volume).flush_failures += 1;
        let Volume { flushing, direct, .. } = *self.cache.volume(volume);
        let (destages, flushes, writes) = Default::default();
        let covered = PrimaryFlush { volume, direct, destages, flushes, writes };
        self.primary_flushed(covered, &Err(error.clone()), fx);
        // If the shard has a flush of its own in flight, that one fails too and reports it itself.
        self.cache.volume_mut(volume).flushing = flushing;
        self.deliver(fx);
    }
}

impl Engine {
    /// Checks a request; the error says why it cannot be accepted at all.
    fn refusal(&self, request: &Request) -> Result<(), ErrorKind> {
        match self.cache.state() {
            State::Serving => {}
            State::Recovering | State::Refused(_) => return Err(ErrorKind::DeviceGone),
            State::Stopping | State::Stopped => return Err(ErrorKind::ShuttingDown),
        }
        let Some(volume) = self.cache.known_volume(request.volume) else {
            return Err(ErrorKind::OutOfRange);
        };
        let range = request.range;
        let carries = matches!(request.op, IoOp::Read | IoOp::Write);
        if range.end() > volume.config.size
            || !range.is_in_one_stripe()
            || (carries && request.buf.len() as u64 != range.len)
        {
            return Err(ErrorKind::OutOfRange);
        }
        Ok(())
    }

    /// Hands the payloads of a completed or failed read to the room that requested them.
    fn payloads_read(&mut self, read: &SegmentRead, done: &mut Completion, fx: &mut Effects) {
        self.cache.end_read(read);
        match read.reader {
            Reader::Read(op) => self.requests.ssd_read(&mut self.cache, op, read, done, fx),
            Reader::Associate(id, part) => {
                if let Some(made) = self.cache.form.associate_read(id, part, read, done) {
                    self.associate_made(&made, fx);
                }
            }
            Reader::Destage(id) => self.destaging.read_back(&mut self.cache, id, read, done, fx),
            Reader::Filling(start, since) => {
                Destaging::checked(&mut self.cache, start, since, read, done, fx);
            }
            Reader::Compare(item) => self.compare.read(&mut self.cache, item, read, done, fx),
            Reader::Similar(seek) => {
                let copy = self.cache.form.end_seek(seek, read, done);
                self.reclaim.similar_sought(&mut self.cache, copy, fx);
            }
            Reader::Footer => self.reclaim.footer_read(&mut self.cache, done, fx),
            Reader::Copies => self.reclaim.copies_read(&mut self.cache, read, done, fx),
        }
    }

    /// Delivers the notes that rooms have left, and the notes that result from delivering them.
    pub(crate) fn deliver(&mut self, fx: &mut Effects) {
        while let Some(note) = self.cache.out.next_note() {
            match note {
                Note::Placed(op, lsn) => self.requests.write_applied(&mut self.cache, op, lsn, fx),
                Note::Made(made) => self.associate_made(&made, fx),
                Note::OnPrimary(op, result) => {
                    self.requests.through_part_done(&mut self.cache, op, &result, fx)
                }
                Note::FlushPart(op, result) => {
                    self.requests.flush_part_done(&mut self.cache, op, result, fx)
                }
                Note::WaitPrimary(key, op) => self.destaging.wait_through(key, op),
                Note::WaitDetached(key, op) => self.detach.add_write(&mut self.cache, key, op),
                Note::FlushDetached(volume, op) => {
                    self.detach.add_flush(&mut self.cache, &mut self.requests, op, volume, fx)
                }
                Note::Restore(op) => self.detach.restore(&self.cache, &self.requests, op, fx),
                Note::CacheFailed => self.fail_cache(fx),
            }
        }
    }

    fn pump_detach(&mut self, fx: &mut Effects) {
        self.detach.pump(&mut self.cache, &mut self.requests, &mut self.destaging, fx);
    }

    fn pump_stop(&mut self, fx: &mut Effects) {
        self.life.pump_stop(&mut self.cache, &mut self.requests, &mut self.destaging, fx);
    }

    fn pump_destage(&mut self, fx: &mut Effects) {
        let is_idle = self.requests.len() == 0;
        self.destaging.pump(&mut self.cache, is_idle, fx);
    }

    fn pump_late(&mut self, fx: &mut Effects) {
        let is_idle = self.requests.len() == 0;
        self.recovery.pump_late(&mut self.cache, is_idle, fx);
    }

    fn set_deadline(&self, fx: &mut Effects) {
        let makes_room = self.cache.makes_room();
        let mut deadline = Instant::NEVER;
        if let Some(at) = self.cache.next_held() {
            // At the limit a write waits for destaging, not for the time.
            deadline = deadline.min(at.max(self.cache.now + THROTTLE_TICK));
        }
        // Held-back writes may get room even when no dirty block is left to trigger a wakeup.
        let held = self.cache.volumes.iter().flatten().any(|v| v.flow.held_writes() > 0);
        if matches!(self.cache.state(), State::Serving | State::Stopping)
            && (self.cache.contents.dirty().blocks() > 0 || held)
        {
            deadline = deadline.min(self.cache.now + DESTAGE_TICK);
        }
        if makes_room && self.cache.log.queued() > 0 && !cfg!(feature = "short-steps") {
            // Whatever makes room wakes them. If that were forgotten anywhere, they would wait for
            // ever; the simulator, which is to find it, goes without.
            deadline = deadline.min(self.cache.now + DESTAGE_TICK);
        }
        if let Some(at) = self.cache.out.next_look() {
            deadline = deadline.min(at);
        }
        if let Some(at) = self.recovery.retry_at() {
            deadline = deadline.min(at);
        }
        if let Some(at) = self.cache.next_probe() {
            deadline = deadline.min(at);
        }
        if let Some(at) = self.compare.next(&self.cache) {
            deadline = deadline.min(at);
        }
        if self.reclaim.retry_at() > self.cache.now {
            deadline = deadline.min(self.reclaim.retry_at().max(self.cache.now + DESTAGE_TICK));
        }
        if let Some(at) = self.recovery.late_at(&self.cache, self.requests.len() == 0) {
            deadline = deadline.min(at);
        }
        let works = matches!(self.cache.state(), State::Serving | State::Stopping);
        let goes_on = self.destaging.goes_on()
            || self.requests.has_unlocked()
            || self.requests.has_logged_enough()
            || self.detach.goes_on(&self.cache)
            || self.cache.form.has_given_up();
        let frees = self.reclaim.is_cut_short(&self.cache)
            || self.reclaim.leaves_more()
            || self.cache.store.exists() && self.cache.frees_more();
        if makes_room && frees || works && goes_on {
            deadline = deadline.min(self.cache.now);
        }
        if self.cache.store.exists() && self.reclaim.is_busy() {
            // What it waits for may come without an I/O: slots that nothing needs any more.
            deadline = deadline.min(self.cache.now + MOVE_TICK);
        }
        if makes_room && let Some(at) = self.cache.next_excess() {
            deadline = deadline.min(at);
        }
        if makes_room
            && !self.cache.log.is_flushing()
            && let Some(at) = self.cache.store.flush_at()
        {
            deadline = deadline.min(at);
        }
        if makes_room && let Some(at) = self.cache.next_discard() {
            deadline = deadline.min(at.max(self.cache.now));
        }
        if let Some(at) = self.cache.log.held_until().filter(|&at| at > self.cache.now) {
            deadline = deadline.min(at);
        }
        if self.cache.form.background().turn_is_over() {
            let wait = if self.cache.log.queued() == 0 { COPY_TICK } else { Duration::ZERO };
            deadline = deadline.min(self.cache.now + wait);
        }
        if *self.cache.state() == State::Stopping || self.detach.is_detaching() {
            deadline = deadline.min(self.cache.now + FLUSH_TICK);
        }
        if self.cache.volumes.iter().flatten().any(|v| v.has_unflushed() || v.unsettled) {
            deadline = deadline.min(self.cache.now + FLUSH_TICK);
        }
        let waits = |v: &Volume| !v.written.is_empty() || !v.leftover_waiters.is_empty();
        if self.cache.volumes.iter().flatten().any(waits) {
            deadline = deadline.min(self.cache.now + DESTAGE_TICK);
        }
        if let Some(at) = self.cache.next_visit() {
            deadline = deadline.min(at);
        }
        fx.deadline = (deadline != Instant::NEVER).then_some(deadline);
    }
}

/// The shortest wait for a write that is held back.
const THROTTLE_TICK: Duration = Duration::from_micros(100);
/// The wait before the next turn of re-encoding copies into denser forms.
const COPY_TICK: Duration = Duration::from_micros(200);
/// Interval between steps of moving blocks to the store.
const MOVE_TICK: Duration = Duration::from_millis(1);
/// Interval between checks whether a primary needs a flush.
const FLUSH_TICK: Duration = Duration::from_millis(200);
/// Interval between destaging steps while blocks are dirty.
const DESTAGE_TICK: Duration = Duration::from_millis(10);
