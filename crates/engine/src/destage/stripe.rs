//! Filling stripes of the primary. An array with parity writes a whole stripe of its disks as it
//! is, but reads old data and old parity before it writes a part. So where dirty blocks lie here
//! and there in such a stripe and the cache has all others, the others become dirty too, and all of
//! it goes in one write.
//!
//! They become dirty in the log, and durably so, before the write begins: a power failure may leave
//! anything where a write was under way, so after it the cache must know that the primary may lack
//! these blocks. Only blocks of the store are made dirty, since that takes an entry and no payload.
//! They are read and checked first: of a clean block that has become corrupt the primary has the
//! right bytes, and must not be thought to lack them.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, Completion, Instant, STRIPE_BLOCKS, VolumeId};
use forebay_codec::crc32c;

use crate::api::{DestageReason, Effects, Health};
use crate::cache::Cache;
use crate::contents::{Place, Stored};
use crate::destage::Destaging;
use crate::flow::Filling;
use crate::key::Key;
use crate::limits::SEGMENT_READ_MAX;
use crate::log::read::{Near, Reader, SegmentRead};

/// Limit on the stripes of a volume that wait until their blocks are durably dirty: bounds the
/// dirty blocks that are in addition to those of clients.
const FILLING_MAX: usize = 8;
/// Time after which a stripe that could not be filled is written in parts.
const FILLING_TIME: Duration = Duration::from_millis(200);
/// The share of a volume's dirty limit that may be dirty in addition, to fill stripes.
const FILLED_ONE_IN: u64 = 8;

impl Destaging {
    /// Whether as many stripes of a volume are being filled as may be.
    pub(super) fn fills_enough(cache: &Cache, volume: VolumeId) -> bool {
        cache.volume(volume).flow.filling.len() >= FILLING_MAX
    }

    /// Starts to destage the next filled stripe of a volume. Returns false if there is none.
    pub(super) fn start_filled(
        &mut self,
        cache: &mut Cache,
        volume: VolumeId,
        reason: DestageReason,
        fx: &mut Effects,
    ) -> bool {
        let flow = &cache.volume(volume).flow;
        let Some(filling) = flow.filling.front() else { return false };
        let &Filling { start, since, reads, .. } = filling;
        let blocks = filling.filled();
        let is_new = cache.now.since(since) < FILLING_TIME;
        if reads > 0 && is_new {
            return false;
        }
        let unit = cache.contents.dirty().unit_of(volume);
        let keys = (start.0..start.0 + unit).map(Key);
        let dirty: Vec<Key> = keys.filter(|&key| cache.contents.dirty().contains(key)).collect();
        let waits = dirty.iter().copied().find(|&key| Self::may_destage(cache, key).is_none());
        if let Some(key) = waits.filter(|_| is_new) {
            if let Some(place) = cache.contents.get(key) {
                Self::want_block_durable(cache, key, &place);
            }
            return false;
        }
        cache.volume_mut(volume).flow.filling.pop_front();
        // What cannot go now is found again in the next round.
        let first = dirty.first().copied();
        let goes = first.map(|first| self.start_with(cache, first, reason, blocks, fx));
        if !matches!(goes, Some(Ok(_))) {
            cache.volume_mut(volume).flow.filled_blocks -= blocks;
        }
        true
    }

    /// Begins to make the clean blocks dirty that lie in the same full stripe of the primary as a
    /// dirty one, if that is worth it and the cache has all of them. Returns the end of the stripe
    /// if it is being filled.
    pub(super) fn fill(
        cache: &mut Cache,
        key: Key,
        reason: DestageReason,
        fx: &mut Effects,
    ) -> Option<Key> {
        let volume = key.volume();
        let unit = cache.contents.dirty().unit_of(volume);
        // Not where somebody waits.
        let in_turn = matches!(
            reason,
            DestageReason::Age | DestageReason::Level | DestageReason::Idle | DestageReason::Drain
        );
        if unit <= 1 || !in_turn || !Self::may_fill(cache, volume) {
            return None;
        }
        let start = Key(key.0 - key.0 % unit);
        let end = Key(start.0 + unit);
        let mut filling = cache.volume(volume).flow.filling.iter();
        if filling.any(|other| other.start == start) {
            return Some(end);
        }
        let holes = Self::holes(cache, start, unit)?;
        let item = |&key: &Key| Some(Stored { key, place: Self::fills_with(cache, key)? });
        let holes = holes.iter().map(item).collect::<Option<Vec<Stored>>>()?;
        let flow = &cache.volume(volume).flow;
        let checking = flow.filling.iter().map(|other| other.holes.len() as u64 - other.filled());
        if !Self::may_be_dirty(cache, volume, checking.sum::<u64>() + holes.len() as u64) {
            return None;
        }
        let since = cache.now;
        let near = Near::Pages(0, SEGMENT_READ_MAX as u32);
        let reads = SegmentRead::all(Reader::Filling(start, since), near, holes.clone());
        let reads: Vec<SegmentRead> = reads.collect();
        let filling = Filling { start, since, holes, reads: reads.len() as u32 };
        cache.volume_mut(volume).flow.filling.push_back(filling);
        reads.into_iter().for_each(|read| cache.read_payloads(read, fx));
        Some(end)
    }

    /// Whether `blocks` more blocks of a volume may be dirty, to fill stripes.
    fn may_be_dirty(cache: &Cache, volume: VolumeId, blocks: u64) -> bool {
        let filled = cache.volume(volume).flow.filled_blocks + blocks;
        let most = cache.limit_of(volume) / FILLED_ONE_IN;
        filled <= most && cache.contents.dirty().blocks() + blocks <= cache.dirty_max()
    }

    /// Takes clean blocks that were read to check them. After the last of a stripe they become
    /// dirty, or the stripe is not filled.
    pub fn checked(
        cache: &mut Cache,
        start: Key,
        since: Instant,
        read: &SegmentRead,
        done: &Completion,
        fx: &mut Effects,
    ) {
        for item in &read.items {
            let is_right = |bytes: &[u8]| crc32c(bytes) == item.place.crc;
            let is_good = read.payload(done, item).is_some_and(is_right);
            if is_good || !Self::still_fills(cache, item) {
                continue;
            }
            // The primary has it. If it stayed, the stripe would be tried again and again.
            if done.result.is_ok() {
                cache.note_corrupt_clean(item.key);
            }
            cache.contents.drop(item.key, &mut cache.ram);
        }
        let volume = start.volume();
        let all = &mut cache.volume_mut(volume).flow.filling;
        let is_it = |one: &Filling| (one.start, one.since) == (start, since);
        let Some(at) = all.iter().position(is_it) else { return };
        let filling = &mut all[at];
        filling.reads -= 1;
        if filling.reads > 0 {
            return;
        }
        let holes = filling.holes.clone();
        if !Self::dirty_all(cache, volume, &holes, fx) {
            cache.volume_mut(volume).flow.filling.remove(at);
        } else {
            let state = cache.volume_mut(volume);
            state.stats.stripe_filled_blocks += holes.len() as u64;
            state.flow.filled_blocks += holes.len() as u64;
        }
    }

    /// Makes clean blocks dirty, unless something has changed. Returns false if one is not dirty.
    fn dirty_all(cache: &mut Cache, volume: VolumeId, holes: &[Stored], fx: &mut Effects) -> bool {
        let blocks = holes.len() as u64;
        let may = Self::may_fill(cache, volume)
            && Self::may_be_dirty(cache, volume, blocks)
            && holes.iter().all(|hole| Self::still_fills(cache, hole));
        let dirty = may && holes.iter().all(|hole| cache.push_dirtied(fx, hole.key, hole.place));
        if dirty {
            cache.close_record(fx);
        }
        dirty
    }

    /// Whether stripes of a volume are filled: not where the primary or the cache is in doubt.
    fn may_fill(cache: &Cache, volume: VolumeId) -> bool {
        let state = cache.volume(volume);
        cache.health() == Health::Good
            && cache.has_client_space()
            && !cache.contents.is_loading()
            && !state.config.suspect
            && !state.distrusted
            && !state.config.mode.is_complete()
            && state.leftover.is_none()
    }

    /// The blocks that are not dirty of the full stripe of `unit` blocks at `start`, if it is worth
    /// writing all of it: at least half of it is dirty; on disks, which turn once more for each
    /// part, it is dirty in two places.
    fn holes(cache: &Cache, start: Key, unit: u64) -> Option<Vec<Key>> {
        let config = &cache.volume(start.volume()).config;
        let blocks = config.size.div_ceil(BLOCK_SIZE as u64);
        let count = unit.min(blocks.saturating_sub(start.block()));
        let first = start.0 % STRIPE_BLOCKS;
        let (dirty, destaging) = cache.contents.dirty().in_stripe(start.0 / STRIPE_BLOCKS);
        let within = first..first + count;
        if within.clone().any(|i| destaging.get(i)) {
            return None;
        }
        let key = |i| Key(start.0 - first + i);
        // One that stays dirty would have the stripe filled and written again and again.
        let stays = |i| dirty.get(i) && cache.contents.has_failed(key(i));
        if within.clone().any(stays) {
            return None;
        }
        let holes: Vec<Key> = within.clone().filter(|&i| !dirty.get(i)).map(key).collect();
        let begins = |i: &u64| dirty.get(*i) && (*i == first || !dirty.get(*i - 1));
        let runs = within.filter(begins).count();
        let is_worth_it = holes.len() as u64 * 2 <= count || config.rotational && runs > 1;
        (!holes.is_empty() && is_worth_it).then_some(holes)
    }

    /// Whether a clean block can be made dirty, and is the same version as it was.
    fn still_fills(cache: &Cache, hole: &Stored) -> bool {
        let place = Self::fills_with(cache, hole.key);
        place.is_some_and(|place| place.is_same_version(&hole.place))
    }

    /// The place of a clean block that can be made dirty.
    fn fills_with(cache: &Cache, key: Key) -> Option<Place> {
        let place = cache.contents.get(key)?;
        let changes = cache.locks.is_locked(key)
            || cache.contents.unsettled(key).is_some()
            || cache.contents.is_unnamed(key)
            || cache.log.builder_ref().has_entry_of(key);
        let is_plain = cache.contents.is_in_store(&place)
            && place.kind.has_payload()
            && !place.kind.is_associate();
        let fits = is_plain && !changes && !place.dirty;
        (fits && !cache.contents.fenced().contains(&key)).then_some(place)
    }
}
