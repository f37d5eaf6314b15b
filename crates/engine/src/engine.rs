//! The engine of one shard: owns all of its state, takes requests, completions and time.
//!
//! Each file of this crate adds the methods of one path to [`Engine`]. After every call the
//! caller finds what is to be done in [`Effects`]; `poll`, once a turn of the event loop, closes
//! records (group commit), destages, reclaims and sets the next deadline.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use forebay_block::{
    BLOCK_SIZE, BlockRange, ByteRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoOp,
    IoTag, STRIPE_SIZE, VolumeId,
};
use forebay_codec::Compressor;
use forebay_format::{PAGE, SEGMENT_SIZE_MIN};
use forebay_policy::{DirtyShares, EvictionPolicy, ReadAround};

use crate::alone::{Alone, ROUND_TICK};
use crate::api::{
    ContentLocality, Effects, Eviction, Health, Mode, Reply, Request, RequestId, ShardConfig,
    State, Target, Trust, VolumeConfig,
};
use crate::associate::Associate;
use crate::bases::Base;
use crate::builder::Builder;
use crate::compare::Compare;
use crate::dense::{self, Dense};
use crate::destage::Destage;
use crate::detach::Detach;
use crate::dirty::{Dirty, Fenced};
use crate::duplicates::Duplicates;
use crate::event::Events;
use crate::fetch::Fetch;
use crate::flow::{self, Flow};
use crate::flush::Losses;
use crate::index::{Index, Key, SEGMENT_BYTES_MAX, SEGMENTS_MAX};
use crate::limits::{RECORD_PAGES_MAX, SEGMENTS_MIN};
use crate::locks::Locks;
use crate::log::Log;
use crate::op::{InFlight, Op, Ticket};
use crate::overflow::Overflow;
use crate::pace::Pace;
use crate::primary::{Lookups, Primary};
use crate::ram::{KeyMap, Ram};
use crate::reclaim::{Lap, Reclaim};
use crate::recover::Recovery;
use crate::similar::Similar;
use crate::slab::{Id, Slab};
use crate::stats::Stats;
use crate::tries::Tries;

/// A volume's part in one shard.
#[derive(Debug)]
pub(crate) struct Volume {
    pub config: VolumeConfig,
    /// Direct changes of the primary completed, and those that a flush has made durable.
    pub direct: u64,
    pub direct_durable: u64,
    /// Destages written and waiting for a flush.
    pub written: Vec<Id>,
    /// Flush operations and writes waiting for the next flush.
    pub flush_waiters: Vec<Id>,
    pub fua_waiters: Vec<Id>,
    pub flushing: bool,
    /// Blocks that were dirty when the volume came into a mode in which the primary alone must
    /// be complete, in address order; and flushes that wait until none of them is.
    pub leftover: BTreeSet<Key>,
    pub leftover_waiters: Vec<Id>,
    /// How often `leftover` was taken: a destage from before may have an older version.
    pub switches: u64,
    /// What was written and is lost, until clients that flush have been told.
    pub losses: Losses,
    /// A flush after direct changes failed: what is read from the primary is not admitted again.
    pub flush_failed: bool,
    /// Failed flushes of the primary that the shard was told of.
    pub flush_failures: u64,
    /// Its primary was changed without the cache: its clean blocks are not used while they are
    /// being dropped; and that it was found to be so.
    pub distrusted: bool,
    pub changed: bool,
    /// When direct changes were last made durable.
    pub direct_since: Instant,
    /// When `written` got its first.
    pub written_since: Instant,
    /// Destaging rests until then after an error.
    pub retry_at: Instant,
    pub failures: u32,
    /// It is destaged as fast as its primary takes it.
    pub draining: bool,
    pub around: ReadAround,
    pub primary: Primary,
    pub lookups: Lookups,
    pub flow: Flow,
}

/// The cache of one shard.
pub struct Engine {
    pub(crate) config: ShardConfig,
    pub(crate) now: Instant,
    pub(crate) state: State,
    pub(crate) health: Health,
    /// What has been recorded outside of the cache, and what ought to be.
    pub(crate) trust: Trust,
    pub(crate) trust_wanted: Trust,
    pub(crate) index: Index,
    pub(crate) ram: Ram,
    /// What the blocks are stored against that are not stored whole.
    pub(crate) bases: KeyMap<Base>,
    pub(crate) duplicates: Duplicates,
    pub(crate) associates: Slab<Associate>,
    /// How making deltas went of late.
    pub(crate) delta_tries: Tries,
    pub(crate) dirty: Dirty,
    pub(crate) locks: Locks,
    pub(crate) log: Log,
    pub(crate) builder: Builder,
    pub(crate) codec: Compressor,
    pub(crate) dense: Dense,
    pub(crate) similar: Similar,
    /// What may be spent on what no client waits for.
    pub(crate) background: Pace,
    pub(crate) policy: Box<dyn EvictionPolicy + Send>,
    /// Dirty blocks that there may be, and how the volumes share them.
    pub(crate) dirty_limit: u64,
    pub(crate) dirty_shares: DirtyShares,
    /// By id, up to the highest: every turn looks at all of them.
    pub(crate) volumes: Vec<Option<Volume>>,
    pub(crate) ops: Slab<Op>,
    pub(crate) ios: Slab<InFlight>,
    pub(crate) fetches: Slab<Fetch>,
    pub(crate) fetching: KeyMap<Id>,
    /// Operations waiting for room in the log, in order.
    pub(crate) log_queue: VecDeque<Id>,
    pub(crate) destages: Slab<Destage>,
    /// Blocks that a write waits to be on the primary.
    pub(crate) urgent: VecDeque<Key>,
    pub(crate) through_waiters: KeyMap<Vec<Id>>,
    /// Blocks that cannot be read back: all of them are dirty.
    pub(crate) fenced: Fenced,
    /// Those of which the log does not say so yet.
    pub(crate) to_fence: VecDeque<Key>,
    /// Records that recovery found to be gone, and that may have held dirty blocks.
    pub(crate) lost_records: Vec<crate::salvage::Hole>,
    /// Which clean blocks are compared with their primaries.
    pub(crate) compare: Compare,
    /// Which stripes a failed cache has left.
    pub(crate) detach: Detach,
    pub(crate) draining: bool,
    pub(crate) reclaim: Option<Reclaim>,
    /// Reclaim rests until then after a failed read, of so many in a row.
    pub(crate) reclaim_retry_at: Instant,
    pub(crate) reclaim_failures: u32,
    /// Bytes reclaimed since there was room enough, less those for which clients need as many.
    pub(crate) reclaimed_in_vain: u64,
    pub(crate) lap: Lap,
    pub(crate) overflow: Overflow,
    pub(crate) alone: Alone,
    /// When the cache device may next be asked whether it can still be written.
    pub(crate) probe_at: Instant,
    /// The oldest segment cannot be freed before more of it has been destaged.
    pub(crate) log_pressed: bool,
    pub(crate) recovery: Option<Box<Recovery>>,
    pub(crate) last_foreground: Instant,
    /// When it is next looked for requests that are not answered, and those of the cache device.
    pub(crate) look_at: Instant,
    pub(crate) slow_cache_ios: u64,
    pub(crate) stop_step: crate::stop::StopStep,
    pub(crate) stop_since: Instant,
    pub(crate) stats: Stats,
    pub(crate) events: Events,
    pub(crate) codec_buf: Box<[u8; BLOCK_SIZE]>,
}

impl Engine {
    /// An engine that has not started.
    ///
    /// # Panics
    /// If the geometry is outside the limits; [`crate::pool`] makes none that is.
    #[must_use]
    pub fn new(config: ShardConfig, now: Instant) -> Self {
        let segments = config.area.len / u64::from(config.segment_size);
        assert!((SEGMENTS_MIN..=SEGMENTS_MAX).contains(&segments), "{segments} segments");
        let segment = config.segment_size;
        assert!(segment >= SEGMENT_SIZE_MIN && u64::from(segment) <= SEGMENT_BYTES_MAX);
        assert!((segment as usize).is_multiple_of(PAGE) && config.area.is_aligned(PAGE as u64));
        let pages_max = RECORD_PAGES_MAX.min(segment as usize / PAGE / 2);
        let last = config.volumes.iter().map(|volume| volume.id.0).max().unwrap_or(0);
        let mut volumes: Vec<Option<Volume>> = (0..=last).map(|_| None).collect();
        let is_similar = config.content == ContentLocality::Similar;
        for volume in &config.volumes {
            let depth = config.destage_depth;
            volumes[usize::from(volume.id.0)] = Some(Volume::new(volume.clone(), depth));
        }
        let index = Index::new(config.index_blocks);
        let dirty_limit = flow::dirty_limit(&config, index.capacity());
        Self {
            now,
            state: State::Recovering,
            health: Health::Good,
            trust: config.trust,
            trust_wanted: config.trust,
            index,
            ram: Ram::new(config.ram_bytes, config.compress_ram),
            bases: KeyMap::default(),
            duplicates: Duplicates::new(),
            associates: Slab::default(),
            delta_tries: Tries::default(),
            dirty: Dirty::default(),
            locks: Locks::default(),
            log: Log::new(usize::try_from(segments).expect("segments fit memory"), volumes.len()),
            builder: Builder::new(config.buffers.clone(), pages_max),
            codec: Compressor::new(),
            dense: Dense::new(),
            similar: Similar::new(is_similar, config.index_blocks),
            background: dense::background(),
            policy: config.eviction.policy(config.area.len / BLOCK_SIZE as u64),
            dirty_limit,
            dirty_shares: flow::shares(&config, dirty_limit),
            volumes,
            ops: Slab::default(),
            ios: Slab::default(),
            fetches: Slab::default(),
            fetching: KeyMap::default(),
            log_queue: VecDeque::new(),
            destages: Slab::default(),
            urgent: VecDeque::new(),
            through_waiters: KeyMap::default(),
            fenced: Fenced::default(),
            to_fence: VecDeque::new(),
            lost_records: Vec::new(),
            compare: Compare::default(),
            detach: Detach::default(),
            draining: false,
            reclaim: None,
            reclaim_retry_at: Instant::default(),
            reclaim_failures: 0,
            reclaimed_in_vain: 0,
            lap: Lap::default(),
            overflow: Overflow::default(),
            alone: Alone::default(),
            probe_at: Instant::default(),
            log_pressed: false,
            recovery: None,
            last_foreground: now,
            look_at: now,
            slow_cache_ios: 0,
            stop_step: crate::stop::StopStep::default(),
            stop_since: now,
            stats: Stats::default(),
            events: Events::default(),
            codec_buf: Box::new([0; BLOCK_SIZE]),
            config,
        }
    }

    /// Begins to read the log, or to serve at once when there is none.
    pub fn start(&mut self, now: Instant, fx: &mut Effects) {
        self.now = now;
        if self.config.fresh {
            self.state = State::Serving;
        } else {
            self.start_recovery(fx);
        }
        self.set_deadline(fx);
    }

    /// Looks at the memory that requests will need which come next, and changes nothing. A block
    /// lies in a random place, as does all that is known of it, so that each step of a read waits
    /// for memory; steps of different reads can wait together.
    pub fn warm(&self, requests: &[Request]) {
        if let [alone] = requests
            && alone.range.len <= BLOCK_SIZE as u64
        {
            return;
        }
        let reads = requests.iter().filter(|r| r.op == IoOp::Read && r.bypass.is_none());
        let reads = reads.filter(|read| self.refusal(read).is_ok());
        let keys = reads.flat_map(|r| r.range.blocks().iter().map(|b| Key::new(r.volume, b)));
        let mut slots = [0; WARM_BLOCKS];
        let mut found = 0;
        for key in keys.take(WARM_BLOCKS) {
            self.policy.warm(key.0);
            let slot = self.ram.find(key);
            if slot.is_none() || self.policy.notes_hits() {
                self.index.warm(key);
            }
            if let Some(slot) = slot {
                slots[found] = slot;
                found += 1;
            }
        }
        let slots = &slots[..found];
        slots.iter().for_each(|&slot| self.ram.warm(slot));
        slots.iter().for_each(|&slot| self.ram.warm_neighbours(slot));
    }

    /// Takes a client's request. It is answered through [`Effects::replies`].
    pub fn submit(&mut self, now: Instant, request: Request, fx: &mut Effects) {
        self.now = now;
        if let Err(kind) = self.refusal(&request) {
            let Request { id, buf, .. } = request;
            fx.replies.push(Reply { id, result: Err(kind.into()), buf, direct: None });
            return;
        }
        match request.op {
            IoOp::Read => self.submit_read(request, fx),
            IoOp::Flush => self.submit_flush(request, fx),
            IoOp::Write | IoOp::WriteZeroes | IoOp::Discard => self.submit_write(request, fx),
        }
    }

    /// Why a request cannot be taken at all.
    fn refusal(&self, request: &Request) -> Result<(), ErrorKind> {
        match self.state {
            State::Serving => {}
            State::Recovering | State::Refused(_) => return Err(ErrorKind::DeviceGone),
            State::Stopping | State::Stopped => return Err(ErrorKind::ShuttingDown),
        }
        let Some(volume) = self.known_volume(request.volume) else {
            return Err(ErrorKind::OutOfRange);
        };
        let range = request.range;
        let stripes =
            range.is_empty() || range.offset / STRIPE_SIZE == (range.end() - 1) / STRIPE_SIZE;
        let carries = matches!(request.op, IoOp::Read | IoOp::Write);
        if range.end() > volume.config.size
            || !stripes
            || (carries && request.buf.len() as u64 != range.len)
        {
            return Err(ErrorKind::OutOfRange);
        }
        Ok(())
    }

    /// Takes the completion of an effect.
    pub fn complete(&mut self, now: Instant, target: Target, done: Completion, fx: &mut Effects) {
        self.now = now;
        let id = Id(u32::try_from(done.tag.0).expect("tags are those the engine gave"));
        let sent = self.ios.remove(id);
        self.note_ended(target, &sent, &done);
        let InFlight { ticket, at, .. } = sent;
        match ticket {
            Ticket::Record { lsn, tries } => self.record_written(lsn, tries, done, fx),
            Ticket::CacheFlush => self.cache_flushed(done.result, fx),
            Ticket::Footer { seq, tries } => self.footer_written(seq, tries, done, fx),
            Ticket::SsdRead { op, index, at, items } => {
                self.ssd_read(op, index, at, &items, done, fx);
            }
            Ticket::Associate { associate, index, part, at } => {
                self.associate_read(associate, index, part, at, done, fx);
            }
            Ticket::Fetch(fetch) => self.fetched(fetch, at, done, fx),
            Ticket::DestageRead { destage, index, at, blocks } => {
                self.destage_read(destage, index, at, &blocks, done, fx);
            }
            Ticket::DestageWrite(destage) => self.destage_written(destage, done, fx),
            ticket @ Ticket::PrimaryFlush { .. } => self.primary_flushed(ticket, done.result, fx),
            Ticket::Direct(op) => self.direct_done(op, at, done, fx),
            Ticket::ComparePrimary => self.compare_primary(&done, fx),
            Ticket::CompareRead { index, at, item } => {
                self.compare_read(index, at, item, &done, fx);
            }
            Ticket::ReclaimFooter => self.reclaim_footer_read(done, fx),
            Ticket::Similar { seek, index } => self.similar_read(seek, index, done, fx),
            Ticket::ReclaimCopy { at, items } => self.reclaim_copy_read(at, &items, done, fx),
            Ticket::Recovery(step) => self.recovery_step(step, done, fx),
            Ticket::StopFlush => self.stop_flushed(done, fx),
        }
    }

    /// Does what is due: call it after the requests and completions of a turn, and at the
    /// deadline.
    pub fn poll(&mut self, now: Instant, fx: &mut Effects) {
        self.now = now;
        self.background.begin_turn();
        self.ram.begin_turn(now);
        self.pump_unanswered();
        if matches!(self.state, State::Serving | State::Stopping) {
            self.pump_fences(fx);
            self.release_delayed(fx);
            self.pump_log(fx);
            self.pump_durability(fx);
            self.pump_reclaim(fx);
            self.pump_leftover(fx);
            self.pump_detach(fx);
            self.pump_destage(fx);
            self.pump_primary_flushes(fx);
            self.pump_alone(fx);
            self.pump_compare(fx);
            // Reclaim and destaging may have given the log something to do.
            self.pump_log(fx);
            self.pump_durability(fx);
            self.pump_health(fx);
            self.pump_stop(fx);
        }
        self.hand_out_events(fx);
        self.set_deadline(fx);
    }

    /// Where it is in its life.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// How the cache device is doing.
    #[must_use]
    pub fn health(&self) -> Health {
        self.health
    }

    /// Dirty blocks, those that cannot be read back any more included.
    #[must_use]
    pub fn dirty_blocks(&self) -> u64 {
        self.dirty.blocks()
    }

    /// Changes what the cache does for a volume; requests from now on follow it.
    pub(crate) fn set_mode(&mut self, volume: VolumeId, mode: Mode) {
        if self.known_volume(volume).is_some() {
            self.volume_mut(volume).config.mode = mode;
            self.note_leftover(volume);
        }
    }

    /// Changes how clean blocks are chosen to enter and to leave. What the new policy knows of
    /// the blocks is little at first.
    pub(crate) fn set_eviction(&mut self, eviction: Eviction) {
        self.policy = eviction.policy(self.config.area.len / BLOCK_SIZE as u64);
    }

    /// Answers what was taken, takes nothing new, makes the log complete and durable.
    pub fn stop(&mut self, now: Instant, fx: &mut Effects) {
        self.now = now;
        self.stop_since = now;
        self.state = match self.state {
            State::Serving => State::Stopping,
            _ => State::Stopped,
        };
        self.set_deadline(fx);
    }

    // What the paths share.

    /// What `look` makes of a block's newest applied bytes, if RAM has them.
    pub(crate) fn peek_applied<T>(&self, key: Key, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        // While it is locked, RAM may have a version that has no place in the log yet.
        let sees_ram = !self.locks.is_locked(key);
        if sees_ram { self.ram.peek(key, look) } else { None }
    }

    pub(crate) fn known_volume(&self, id: VolumeId) -> Option<&Volume> {
        self.volumes.get(usize::from(id.0)).and_then(Option::as_ref)
    }

    pub(crate) fn volume(&self, id: VolumeId) -> &Volume {
        self.known_volume(id).expect("requests name volumes there are")
    }

    pub(crate) fn volume_mut(&mut self, id: VolumeId) -> &mut Volume {
        self.volumes[usize::from(id.0)].as_mut().expect("requests name volumes there are")
    }

    /// Sends an I/O and remembers what it belongs to.
    pub(crate) fn send(
        &mut self,
        fx: &mut Effects,
        target: Target,
        ticket: Ticket,
        io: impl FnOnce(IoTag) -> Io,
    ) {
        let io = io(IoTag(u64::from(self.ios.next_id().0)));
        debug_assert!(!io.flags.fua, "durability is asked for by a flush");
        let (op, range) = (io.op, io.range);
        self.ios.insert(InFlight { ticket, at: self.now, op, range, target });
        fx.ios.push((target, io));
    }

    /// Where a segment starts on the cache device.
    pub(crate) fn segment_offset(&self, index: usize) -> u64 {
        self.config.area.offset + index as u64 * u64::from(self.config.segment_size)
    }

    /// Reads `len` bytes from `at` of a segment.
    pub(crate) fn read_segment(
        &mut self,
        fx: &mut Effects,
        index: usize,
        at: u32,
        len: usize,
        ticket: Ticket,
    ) {
        let range = ByteRange::new(self.segment_offset(index) + u64::from(at), len as u64);
        let buf = self.config.buffers.get(len);
        self.send(fx, Target::Cache, ticket, |tag| Io::read(tag, range, buf));
    }

    /// The bytes of a block range that exist on the volume: its last block may be short.
    pub(crate) fn bytes_on_volume(&self, volume: VolumeId, blocks: BlockRange) -> ByteRange {
        let whole = ByteRange { offset: 0, len: self.volume(volume).config.size };
        blocks.bytes().intersection(&whole)
    }

    pub(crate) fn reply(
        &mut self,
        fx: &mut Effects,
        id: RequestId,
        result: Result<(), IoError>,
        buf: IoBuf,
    ) {
        fx.replies.push(Reply { id, result, buf, direct: None });
    }

    fn set_deadline(&mut self, fx: &mut Effects) {
        let mut deadline = Instant::NEVER;
        if let Some(at) = self.next_delayed() {
            // At the limit a write waits for destaging, not for the time.
            deadline = deadline.min(at.max(self.now + THROTTLE_TICK));
        }
        // Writes that are held back may have room when no dirty block is left to wait with them.
        let held = self.volumes.iter().flatten().any(|v| v.flow.held_writes() > 0);
        if matches!(self.state, State::Serving | State::Stopping)
            && (self.dirty.blocks() > 0 || held)
        {
            deadline = deadline.min(self.now + DESTAGE_TICK);
        }
        if let Some(at) = self.next_look() {
            deadline = deadline.min(at);
        }
        if let Some(at) = self.next_compare() {
            deadline = deadline.min(at);
        }
        if self.reclaim_retry_at > self.now {
            deadline = deadline.min(self.reclaim_retry_at.max(self.now + DESTAGE_TICK));
        }
        if self.background.turn_is_over() {
            let wait = if self.log_queue.is_empty() { COPY_TICK } else { Duration::ZERO };
            deadline = deadline.min(self.now + wait);
        }
        if self.state == State::Stopping || self.is_detaching() {
            deadline = deadline.min(self.now + FLUSH_TICK);
        }
        if self.volumes.iter().flatten().any(|v| v.direct > v.direct_durable) {
            deadline = deadline.min(self.now + FLUSH_TICK);
        }
        if self.volumes.iter().flatten().any(|v| !v.written.is_empty()) {
            deadline = deadline.min(self.now + DESTAGE_TICK);
        }
        if self.state == State::Serving && self.alone.is_due() {
            deadline = deadline.min(self.now + ROUND_TICK);
        }
        fx.deadline = (deadline != Instant::NEVER).then_some(deadline);
    }
}

/// Blocks that are looked at ahead at most: what is fetched for them fits the nearest cache.
const WARM_BLOCKS: usize = 64;
/// The shortest wait for a write that is held back.
const THROTTLE_TICK: Duration = Duration::from_micros(100);
/// The wait for the next turn of copies that are made denser.
const COPY_TICK: Duration = Duration::from_micros(200);
/// How often it is looked whether a primary wants a flush.
const FLUSH_TICK: Duration = Duration::from_millis(200);
/// How often destaging is looked at while blocks are dirty.
const DESTAGE_TICK: Duration = Duration::from_millis(10);

impl Volume {
    fn new(config: VolumeConfig, depth: u32) -> Self {
        let flow = Flow::new(depth, config.rotational, Key::new(config.id, 0));
        Self {
            config,
            flow,
            // What was written before this start may not be durable there: the first flush counts.
            direct: 1,
            direct_durable: 0,
            written: Vec::new(),
            flush_waiters: Vec::new(),
            fua_waiters: Vec::new(),
            flushing: false,
            losses: Losses::default(),
            flush_failed: false,
            flush_failures: 0,
            distrusted: false,
            changed: false,
            direct_since: Instant::default(),
            leftover: BTreeSet::new(),
            switches: 0,
            leftover_waiters: Vec::new(),
            written_since: Instant::default(),
            retry_at: Instant::default(),
            failures: 0,
            draining: false,
            around: ReadAround::default(),
            primary: Primary::default(),
            lookups: Lookups::default(),
        }
    }
}
