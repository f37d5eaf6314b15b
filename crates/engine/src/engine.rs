//! The engine of one shard: owns the rooms, takes requests, completions and time, and passes on
//! what one room has for another.
//!
//! Callers pass in requests, completions and the time, and find the work to do in [`Effects`].
//! `submit` and `complete` do what follows at once. `poll`, once a turn of the event loop, does
//! what several requests share: closes records (group commit), frees segments, destages, and sets
//! the next deadline. Its order matters: what makes room in the log comes before what needs it, and
//! the log comes once more at the end, since reclaim and destaging may have fed it.
//!
//! Between two calls this holds:
//!
//! - Every block in the index has its place counted in its segment, and its base, if it has one;
//!   the dirty set and the index agree ([`Engine::check`]).
//! - A block is clean only if its primary has its newest version durably.
//! - A dirty block is written to its primary only in a version that is durable in the log.
//! - A segment is used again only when nothing in it is needed, the record that says so is durable,
//!   and no read of it is under way.
//! - A block that is locked has one writer; nothing that is read of it meanwhile is kept.

use std::time::Duration;

use forebay_block::{
    BLOCK_SIZE, BlockRange, ByteRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoOp,
    STRIPE_SIZE, VolumeId,
};
use forebay_format::{PAGE, SEGMENT_SIZE_MIN};
use forebay_policy::EvictionPolicy;

use crate::admission::ROUND_TICK;
use crate::api::stats::Stats;
use crate::api::{
    ContentLocality, Effects, Eviction, Health, Mode, Reply, Request, RequestId, ShardConfig,
    State, Target,
};
use crate::contents::Contents;
use crate::contents::{SEGMENT_BYTES_MAX, SEGMENTS_MAX};
use crate::destage::Destaging;
use crate::form::Forms;
use crate::key::Key;
use crate::life::Life;
use crate::limits::{RECORD_PAGES_MAX, SEGMENTS_MIN};
use crate::log::Log;
use crate::log::builder::Builder;
use crate::log::read::{Reader, SegmentRead};
use crate::out::Out;
use crate::ram::Ram;
use crate::reclaim::Reclaim;
use crate::recovery::Start;
use crate::request::Requests;
use crate::slab::Id;
use crate::ticket::{InFlight, Ticket};
use crate::volume::Volume;

/// The cache of one shard. Each field is a room, or what all of them share; a room's own fields are
/// private to it. `docs/internals/engine.md` says what each room decides.
pub struct Engine {
    pub(crate) config: ShardConfig,
    pub(crate) now: Instant,
    pub(crate) life: Life,
    pub(crate) contents: Contents,
    pub(crate) ram: Ram,
    pub(crate) form: Forms,
    pub(crate) log: Log,
    pub(crate) policy: Box<dyn EvictionPolicy + Send>,
    /// By id, up to the highest: every turn looks at all of them.
    pub(crate) volumes: Vec<Option<Volume>>,
    pub(crate) requests: Requests,
    pub(crate) destaging: Destaging,
    pub(crate) reclaim: Reclaim,
    pub(crate) recovery: Start,
    pub(crate) out: Out,
    pub(crate) stats: Stats,
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
        let segments = usize::try_from(segments).expect("segments fit memory");
        let contents = Contents::new(config.index_blocks, segments, volumes.len());
        let builder = Builder::new(config.buffers.clone(), pages_max);
        Self {
            now,
            life: Life::new(config.trust),
            contents,
            ram: Ram::new(config.ram_bytes, config.compress_ram),
            form: Forms::new(is_similar, config.index_blocks),
            log: Log::new(segments, builder),
            policy: config.eviction.policy(config.area.len / BLOCK_SIZE as u64),
            volumes,
            requests: Requests::default(),
            destaging: Destaging::new(&config, now),
            reclaim: Reclaim::default(),
            recovery: Start::default(),
            out: Out::new(now),
            stats: Stats::default(),
            config,
        }
    }

    /// Begins to read the log, or to serve at once when there is none.
    pub fn start(&mut self, now: Instant, fx: &mut Effects) {
        self.now = now;
        if self.config.fresh {
            self.life.set_state(State::Serving);
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
                self.contents.index().warm(key);
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
        match self.state() {
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
        let sent = self.out.take(id);
        self.note_ended(target, &sent, &done);
        let InFlight { ticket, at, .. } = sent;
        match ticket {
            Ticket::Record { lsn, tries } => self.record_written(lsn, tries, done, fx),
            Ticket::CacheFlush => self.cache_flushed(done.result, fx),
            Ticket::Footer { seq, tries } => self.footer_written(seq, tries, &done.result, fx),
            Ticket::Payloads(read) => self.payloads_read(&read, &done, fx),
            Ticket::Fetch(fetch) => self.fetched(fetch, at, done, fx),
            Ticket::DestageWrite(destage) => self.destage_written(destage, done, fx),
            ticket @ Ticket::PrimaryFlush { .. } => self.primary_flushed(ticket, done.result, fx),
            Ticket::Direct(op) => self.direct_done(op, at, done, fx),
            Ticket::ComparePrimary => self.compare_primary(&done, fx),
            Ticket::Recovery(step) => self.recovery_step(step, done, fx),
            Ticket::StopFlush => self.stop_flushed(done, fx),
        }
    }

    /// Hands payloads that were read, or could not be, to those who wanted them.
    fn payloads_read(&mut self, read: &SegmentRead, done: &Completion, fx: &mut Effects) {
        self.log.end_read(read);
        match read.reader {
            Reader::Read(op) => self.ssd_read(op, read, done, fx),
            Reader::Associate(id, part) => self.associate_read(id, part, read, done, fx),
            Reader::Destage(id) => self.destage_read(id, read, done, fx),
            Reader::Compare(item) => self.compare_read(item, read, done, fx),
            Reader::Similar(seek) => {
                let copy = self.form.end_seek(seek, read, done);
                self.similar_sought(copy, fx);
            }
            Reader::Footer => self.reclaim_footer_read(done, fx),
            Reader::Copies => self.reclaim_copy_read(read, done, fx),
        }
    }

    /// Does what is due: call it after the requests and completions of a turn, and at the
    /// deadline.
    pub fn poll(&mut self, now: Instant, fx: &mut Effects) {
        self.now = now;
        self.form.begin_turn();
        self.ram.begin_turn(now);
        self.pump_unanswered();
        if matches!(self.state(), State::Serving | State::Stopping) {
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
        self.out.hand_out(fx);
        self.set_deadline(fx);
    }

    /// Verifies what holds between calls. It takes time in proportion to the cache: for tests and
    /// the simulator.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.contents.check()
    }

    /// Where it is in its life.
    #[must_use]
    pub fn state(&self) -> &State {
        self.life.state()
    }

    /// How the cache device is doing.
    #[must_use]
    pub fn health(&self) -> Health {
        self.life.health()
    }

    /// Dirty blocks, those that cannot be read back any more included.
    #[must_use]
    pub fn dirty_blocks(&self) -> u64 {
        self.contents.dirty().blocks()
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
        self.life.begin_stop(now);
        self.set_deadline(fx);
    }

    // What the paths share.

    pub(crate) fn known_volume(&self, id: VolumeId) -> Option<&Volume> {
        self.volumes.get(usize::from(id.0)).and_then(Option::as_ref)
    }

    pub(crate) fn volume(&self, id: VolumeId) -> &Volume {
        self.known_volume(id).expect("requests name volumes there are")
    }

    pub(crate) fn volume_mut(&mut self, id: VolumeId) -> &mut Volume {
        self.volumes[usize::from(id.0)].as_mut().expect("requests name volumes there are")
    }

    /// Where a segment starts on the cache device.
    pub(crate) fn segment_offset(&self, index: usize) -> u64 {
        self.config.area.offset + index as u64 * u64::from(self.config.segment_size)
    }

    /// Sends a read of a segment; it ends in [`Engine::complete`].
    pub(crate) fn read_payloads(&mut self, read: SegmentRead, fx: &mut Effects) {
        self.log.begin_read(&read);
        let (index, range) = read.place();
        self.read_segment(fx, index, range.start, range.len(), Ticket::Payloads(read));
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
        if matches!(self.state(), State::Serving | State::Stopping)
            && (self.contents.dirty().blocks() > 0 || held)
        {
            deadline = deadline.min(self.now + DESTAGE_TICK);
        }
        if let Some(at) = self.out.next_look() {
            deadline = deadline.min(at);
        }
        if let Some(at) = self.next_compare() {
            deadline = deadline.min(at);
        }
        if self.reclaim.retry_at() > self.now {
            deadline = deadline.min(self.reclaim.retry_at().max(self.now + DESTAGE_TICK));
        }
        if self.form.background().turn_is_over() {
            let wait = if self.log.queued() == 0 { COPY_TICK } else { Duration::ZERO };
            deadline = deadline.min(self.now + wait);
        }
        if *self.state() == State::Stopping || self.is_detaching() {
            deadline = deadline.min(self.now + FLUSH_TICK);
        }
        if self.volumes.iter().flatten().any(|v| v.direct > v.direct_durable) {
            deadline = deadline.min(self.now + FLUSH_TICK);
        }
        if self.volumes.iter().flatten().any(|v| !v.written.is_empty()) {
            deadline = deadline.min(self.now + DESTAGE_TICK);
        }
        if *self.state() == State::Serving && self.ram.has_alone() {
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
