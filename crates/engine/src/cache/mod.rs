//! The cache proper, on which requests, destaging, reclaim, life and recovery work: the cached
//! blocks and their places, the paths into the log and back, the devices, and the volumes.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, BlockRange, ByteRange, Instant, Io, IoBuf, VolumeId};
use forebay_format::{PAGE, SegmentSeq};
use forebay_policy::{EvictionPolicy, RateBound, WearBudget};

use crate::api::stats::Stats;
use crate::api::{ContentLocality, Effects, Eviction, Health, Mode, ShardConfig, State, Target};
use crate::contents::{Contents, Place};
use crate::contents::{SEGMENT_BYTES_MAX, SEGMENTS_MAX};
use crate::form::Forms;
use crate::key::Key;
use crate::left::Left;
use crate::limits::{RECORD_PAGES_MAX, SEGMENT_BYTES_MIN, SEGMENTS_MIN, step};
use crate::locks::Locks;
use crate::log::Log;
use crate::log::builder::Builder;
use crate::log::read::SegmentRead;
use crate::out::Out;
use crate::ram::Ram;
use crate::store::Store;
use crate::ticket::Ticket;
use crate::volume::{Leftover, Volume};

pub(crate) mod admission;
mod append;
mod associate;
mod discard;
mod evict;
mod limit;
mod listing;
mod pins;
mod probe;
mod send;
mod share;
mod standing;
mod store;
mod tell;
mod wear;

use limit::{DirtyLimit, fill_bound};
use pins::Pins;
use share::Shares;
pub(crate) use standing::Standing;
use wear::wear_budget;

/// Limit on the stripes in which one turn looks for leftover dirty blocks of a volume.
const LEFTOVER_STRIPES: usize = step(64);

const KNOWN: &str = "requests name volumes there are";

/// Pause before a block that could not go to the primary is tried again.
pub(crate) const IMMOVABLE_PAUSE: Duration = Duration::from_secs(1);

/// The cached blocks and the paths to them. Each field is a room, or a fact that all rooms need.
pub(crate) struct Cache {
    pub config: ShardConfig,
    pub now: Instant,
    pub standing: Standing,
    pub contents: Contents,
    pub ram: Ram,
    pub form: Forms,
    pub log: Log,
    pub store: Store,
    pub policy: Box<dyn EvictionPolicy + Send>,
    /// Indexed by volume ID, up to the highest ID only: every turn visits all of them.
    pub volumes: Vec<Option<Volume>>,
    /// The locks on blocks.
    pub locks: Locks,
    /// Stripes that the failed cache has left.
    pub left: Left,
    limit: DirtyLimit,
    /// Blocks that stay.
    pub pins: Pins,
    shares: Shares,
    /// Bounds the missed blocks that enter the cache device.
    fill: RateBound,
    /// Groups of missed blocks that were admitted so far.
    admitted_units: u64,
    wear: WearBudget,
    pub out: Out,
    pub stats: Stats,
}

impl Cache {
    /// Returns an empty cache.
    ///
    /// # Panics
    /// If the geometry is outside the limits; a pool of crate `volume` never has such a geometry.
    pub fn new(config: ShardConfig, now: Instant) -> Self {
        let segments = config.area.len / u64::from(config.segment_size);
        assert!((SEGMENTS_MIN..=SEGMENTS_MAX).contains(&segments), "{segments} segments");
        let segment = config.segment_size;
        assert!((SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&u64::from(segment)));
        assert!((segment as usize).is_multiple_of(PAGE) && config.area.is_aligned(PAGE as u64));
        let pages_max = RECORD_PAGES_MAX.min(segment as usize / PAGE / 2);
        let last = config.volumes.iter().map(|volume| volume.id.0).max().unwrap_or(0);
        let mut volumes: Vec<Option<Volume>> = (0..=last).map(|_| None).collect();
        let is_similar = config.content == ContentLocality::Similar;
        for volume in &config.volumes {
            let depth = config.destage_depth;
            volumes[usize::from(volume.id.0)] =
                Some(Volume::new(volume.clone(), depth, config.shards, now));
        }
        let all = usize::try_from(segments).expect("segments fit memory");
        let segments = config.log_segments.map_or(all, |log| log as usize);
        assert!((SEGMENTS_MIN as usize..=all).contains(&segments), "{segments} log segments");
        let extent_pages = segment as usize / PAGE;
        let mut contents = Contents::new(config.index_blocks, segments, volumes.len());
        contents.add_store(all - segments, extent_pages);
        for volume in &config.volumes {
            contents.set_unit(volume.id, limit::full_stripe_blocks(volume.pace, volume.optimal_io));
        }
        let mut store = Store::new(all - segments, extent_pages);
        if config.fresh && !config.discarded {
            store.set_undiscarded();
        }
        let builder = Builder::new(config.buffers.clone(), pages_max, config.unit_entries);
        Self {
            now,
            standing: Standing::new(config.trust, now),
            contents,
            ram: Ram::new(config.ram_bytes, config.compress_ram),
            form: Forms::new(is_similar, config.index_blocks),
            log: Log::new(segments, builder),
            store,
            policy: policy(&config, config.eviction),
            volumes,
            locks: Locks::default(),
            left: Left::default(),
            limit: DirtyLimit::new(&config),
            pins: Pins::default(),
            shares: Shares::new(&config, now),
            fill: fill_bound(&config),
            admitted_units: 0,
            wear: WearBudget::new(wear_budget(&config), now),
            out: Out::new(now),
            stats: Stats::default(),
            config,
        }
    }

    /// The stage of the shard's life.
    pub fn state(&self) -> &State {
        &self.standing.state
    }

    /// The health of the cache device.
    pub fn health(&self) -> Health {
        self.standing.health
    }

    /// Whether a client's flush would have to wait for a device.
    pub fn has_unflushed(&self) -> bool {
        self.log.has_undurable()
            || self.health() != Health::Good
            || self.volumes.iter().flatten().any(Volume::has_unflushed)
    }

    /// Prefetches the index's buckets for a few blocks that will be looked up.
    pub(crate) fn warm_index(&self, keys: impl Iterator<Item = Key>) {
        keys.for_each(|key| self.contents.index().warm(key));
    }

    /// Notes client activity: destaging depends on the quiet time since then.
    pub fn note_foreground(&mut self) {
        self.standing.last_foreground = self.now;
    }

    /// Whether clients are served.
    pub fn is_serving(&self) -> bool {
        self.standing.state == State::Serving
    }

    /// Whether the log is given room: with a good device, while the shard serves, and while a stop
    /// waits for writes that wait for room.
    pub(crate) fn makes_room(&self) -> bool {
        let stops = self.standing.state == State::Stopping;
        self.health() == Health::Good && (self.is_serving() || stops && self.log.queued() > 0)
    }

    pub(crate) fn known_volume(&self, id: VolumeId) -> Option<&Volume> {
        self.volumes.get(usize::from(id.0)).and_then(Option::as_ref)
    }

    pub(crate) fn volume(&self, id: VolumeId) -> &Volume {
        self.known_volume(id).expect(KNOWN)
    }

    pub(crate) fn volume_mut(&mut self, id: VolumeId) -> &mut Volume {
        self.volumes[usize::from(id.0)].as_mut().expect(KNOWN)
    }

    /// Offset of a segment on the cache device, in bytes.
    pub(crate) fn segment_offset(&self, index: usize) -> u64 {
        self.config.area.offset + index as u64 * u64::from(self.config.segment_size)
    }

    /// Sends a read of payloads; it ends in [`crate::Shard::complete`].
    pub(crate) fn read_payloads(&mut self, read: SegmentRead, fx: &mut Effects) {
        let buf = self.config.buffers.get(read.place().1.len());
        self.read_payloads_into(buf, read, fx);
    }

    /// Does the same with a buffer of the length of the read.
    pub(crate) fn read_payloads_into(&mut self, buf: IoBuf, read: SegmentRead, fx: &mut Effects) {
        self.log.begin_read(&read);
        let (index, range) = read.place();
        // Only the pages of payloads: one between them may be free, and must stay so.
        let pages = self.contents.pages();
        read.items.iter().for_each(|item| pages.hold_place(&item.place));
        self.read_segment_into(fx, index, range.start, buf, Ticket::Payloads(read));
    }

    /// Notes that a read of payloads has ended.
    pub(crate) fn end_read(&mut self, read: &SegmentRead) {
        self.log.end_read(read);
        let pages = self.contents.pages();
        read.items.iter().for_each(|item| pages.release_place(&item.place));
    }

    /// Notes that a block is on its way to its primary: its place must stay until it is there.
    pub(crate) fn begin_destaging(&mut self, place: &Place) {
        self.log.begin_destaging(place.segment);
        self.contents.pages().hold_place(place);
    }

    /// Notes that a block is no longer on its way.
    pub(crate) fn end_destaging(&mut self, place: &Place, seq: SegmentSeq) {
        self.log.end_destaging(place.segment, seq);
        self.contents.pages().release_place(place);
    }

    /// Keeps the bytes at a place until [`Cache::release`], as a read in flight does.
    pub(crate) fn hold(&mut self, place: &Place) {
        if self.contents.is_in_store(place) {
            self.contents.pages().hold_place(place);
        } else {
            self.log.pin(place.segment);
        }
    }

    /// Ends [`Cache::hold`].
    pub(crate) fn release(&mut self, place: &Place) {
        if self.contents.is_in_store(place) {
            self.contents.pages().release_place(place);
        } else {
            self.log.unpin(place.segment);
        }
    }

    /// Reads `len` bytes at offset `at` of a segment.
    pub(crate) fn read_segment(
        &mut self,
        fx: &mut Effects,
        index: usize,
        at: u32,
        len: usize,
        ticket: Ticket,
    ) {
        let buf = self.config.buffers.get(len);
        self.read_segment_into(fx, index, at, buf, ticket);
    }

    fn read_segment_into(
        &mut self,
        fx: &mut Effects,
        index: usize,
        at: u32,
        buf: IoBuf,
        ticket: Ticket,
    ) {
        let start = self.segment_offset(index) + u64::from(at);
        let range = ByteRange::new(start, buf.len() as u64);
        self.send(fx, Target::Cache, ticket, |tag| Io::read(tag, range, buf));
    }

    /// The byte range of a block range that exists on the volume: the last block may be short.
    pub(crate) fn bytes_on_volume(&self, volume: VolumeId, blocks: BlockRange) -> ByteRange {
        let whole = ByteRange { offset: 0, len: self.volume(volume).config.size };
        blocks.bytes().intersection(&whole)
    }

    /// Changes the mode of a volume, for requests from now on.
    pub fn set_mode(&mut self, volume: VolumeId, mode: Mode) {
        if self.known_volume(volume).is_some() {
            self.volume_mut(volume).config.mode = mode;
            self.note_leftover(volume);
        }
    }

    /// Changes the eviction policy. The new policy knows little about the blocks at first.
    pub fn set_eviction(&mut self, eviction: Eviction) {
        self.policy = policy(&self.config, eviction);
    }

    /// Changes how blocks that resemble other blocks are stored from now on.
    pub(crate) fn set_content(&mut self, content: ContentLocality) {
        self.config.content = content;
        let wanted = content == ContentLocality::Similar;
        self.form.set_similar(wanted, self.contents.index().capacity());
    }

    /// Remembers the leftover dirty blocks of a volume whose mode promises that the primary alone
    /// is complete: they come from a crash or from another mode. Later writes wait for the primary
    /// themselves.
    pub(crate) fn note_leftover(&mut self, id: VolumeId) {
        let now = self.now;
        let volume = self.volume_mut(id);
        volume.leftover = volume.config.mode.is_complete().then(|| Leftover::at(now));
    }

    /// Notes, at a start, whether more blocks are dirty than a cut of an ordered volume may have.
    pub(crate) fn note_behind(&mut self, id: VolumeId) {
        let dirty = self.contents.dirty_level_of(id);
        let order = &mut self.volume_mut(id).order;
        order.is_behind = order.blocks_max.is_some_and(|most| dirty > most);
    }

    /// Whether leftover dirty blocks of a volume must be destaged immediately.
    pub(crate) fn has_leftover(&self, volume: VolumeId) -> bool {
        let oldest = self.contents.dirty().oldest_of(volume);
        let leftover = self.volume(volume).leftover;
        leftover.zip(oldest).is_some_and(|(leftover, oldest)| oldest <= leftover.until)
    }

    /// Looks for a leftover dirty block of a volume that can be read back, and forgets the others;
    /// returns whether none is left. If there are many others, it continues in the next turn.
    pub(crate) fn settle_leftover(&mut self, id: VolumeId) -> bool {
        let Some(leftover) = &mut self.volumes[usize::from(id.0)].as_mut().expect(KNOWN).leftover
        else {
            return true;
        };
        for _ in 0..LEFTOVER_STRIPES {
            let next = self.contents.dirty().next_by_age(id, leftover.from);
            match next.filter(|(since, _)| *since <= leftover.until) {
                Some((_, stripe)) if self.contents.is_any_readable(stripe) => return false,
                Some((since, stripe)) => leftover.from = (since, stripe + 1),
                None => {
                    self.volume_mut(id).leftover = None;
                    return true;
                }
            }
        }
        false
    }

    /// Whether the volume is destaged cut by cut: not in modes in which each write waits for the
    /// primary.
    pub(crate) fn is_ordered(&self, volume: VolumeId) -> bool {
        let volume = self.volume(volume);
        volume.order.blocks_max.is_some() && !volume.config.mode.is_complete()
    }

    /// Whether the cache may take any write of the volume while the primary is away.
    pub(crate) fn may_stand_in(&self, volume: VolumeId) -> bool {
        !self.volume(volume).config.mode.is_complete() && self.health() == Health::Good
    }

    /// Whether reads of the volume may bring blocks into the cache.
    pub(crate) fn admits_reads(&self, volume: VolumeId) -> bool {
        let volume = self.volume(volume);
        volume.config.mode.admits_reads() && !volume.distrusted && self.health() == Health::Good
    }

    /// Whether the cached copy of a block must not be used.
    pub(crate) fn is_distrusted(&self, key: Key) -> bool {
        self.volume(key.volume()).distrusted && !self.contents.dirty().contains(key)
    }

    /// Notes that a dirty block could not go to the primary, since the cache device could not read
    /// it back or the primary refused it. It is tried again after a pause, which is returned, and
    /// nothing waits for it.
    pub(crate) fn note_immovable(&mut self, key: Key) -> Duration {
        self.contents.note_immovable(key, self.now + IMMOVABLE_PAUSE);
        IMMOVABLE_PAUSE
    }

    /// Whether it is too early to destage a block: that failed a short time ago, or a write to a
    /// failed cache is changing it.
    pub(crate) fn rests(&self, key: Key) -> bool {
        let is_changing = self.health() != Health::Good && self.locks.is_locked(key);
        is_changing || self.contents.immovable_until(key).is_some_and(|until| until > self.now)
    }

    /// Whether the log no longer counts for a block's stripe.
    pub(crate) fn is_detached(&self, key: Key) -> bool {
        match self.health() {
            Health::Good => false,
            Health::Draining => self.left.has(key),
            Health::Detached => true,
        }
    }
}

/// The eviction policy of a shard.
fn policy(config: &ShardConfig, eviction: Eviction) -> Box<dyn EvictionPolicy + Send> {
    let blocks = config.area.len / BLOCK_SIZE as u64;
    match config.log_segments {
        Some(_) => eviction.store_policy(blocks),
        None => eviction.policy(blocks),
    }
}

#[cfg(test)]
mod tests;
