//! Comparison of clean blocks with their primary, after a start at which nothing proved that the
//! primary was not changed without the cache.
//!
//! Comparison runs in the background: first the ends of the volume, where partition tables are,
//! then stripes spread over all of it, so that a change in many places shows soon. After the first
//! difference, clean blocks of the volume are no longer used: reads of them go to the primary
//! immediately, while invalidations are logged stripe by stripe. Dirty blocks stay.
//!
//! A difference counts only if the same version of a block differs twice in a row, since a write
//! may come between the two reads.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::{BLOCK_SIZE, BlockRange, Completion, Instant, Io, STRIPE_BLOCKS, VolumeId};
use forebay_format::{EntryKind, Lsn, SegmentSeq};

use crate::api::event::Event;
use crate::api::primary::is_away;
use crate::api::{Effects, Health, State, Target};
use crate::cache::Cache;
use crate::contents::{Place, Stored};
use crate::form::AssociateOwner;
use crate::form::decode;
use crate::key::Key;
use crate::life::purge::Purge;
use crate::limits::{INVALIDATED_MAX, WARM_BLOCKS, step};
use crate::log::builder::Expect;
use crate::log::read::{Reader, SegmentRead};
use crate::pace::Pace;
use crate::ticket::Ticket;

/// Number of blocks compared in one round.
const ROUND_BLOCKS: usize = step(64);
/// Limit on the stripes visited in a turn while searching for clean blocks, and while dropping
/// them.
const STRIPES_SEARCHED: u64 = step(16) as u64;
const STRIPES_DROPPED: usize = step(16);
/// Dropping takes one part in this many of a CPU, and at most this time in a turn.
const DROP_SHARE: u32 = 4;
const DROP_TURN: Duration = Duration::from_micros(400);
/// Time to look up the blocks of a stripe in a large index, and to drop a block.
const STRIPE_COST: Duration = Duration::from_micros(40);
const BLOCK_COST: Duration = Duration::from_nanos(400);
/// The pause after a round, as a multiple of the time that the primary took for it, so that other
/// requests have nine tenths of the primary's time; and the bounds of the pause.
const PAUSE: u32 = 9;
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(5);
const _: () = assert!(STRIPE_BLOCKS.is_multiple_of(WARM_BLOCKS as u64));

/// The volumes to compare, and the progress.
#[derive(Debug, Default)]
pub(crate) struct Compare {
    /// Volumes to compare; the first is being compared.
    volumes: VecDeque<OfVolume>,
    round: Option<Round>,
    next_at: Instant,
    /// Volumes whose clean blocks are being dropped.
    drops: VecDeque<Drop>,
}

/// The progress of a volume that is compared.
#[derive(Debug)]
struct OfVolume {
    id: VolumeId,
    /// Number of its stripes visited, in the order of [`nth_stripe`].
    looked: u64,
    /// Clean blocks of the current stripe that must still be compared.
    keys: VecDeque<Key>,
    /// How many of them are compared one by one, since the primary could not read all at once.
    alone: usize,
    /// Number of blocks that have been compared.
    compared: u64,
}

impl OfVolume {
    /// The number of blocks to compare in the next round.
    fn next(&self) -> usize {
        let most = if self.alone > 0 { 1 } else { ROUND_BLOCKS };
        self.keys.len().min(most)
    }

    /// Notes that a round of `blocks` blocks has ended, of which `compared` were compared.
    fn pass(&mut self, blocks: usize, compared: usize) {
        self.keys.drain(..blocks);
        self.alone = self.alone.saturating_sub(blocks);
        self.compared += compared as u64;
    }
}

/// The blocks of a round.
#[derive(Debug)]
struct Round {
    blocks: BlockRange,
    items: Vec<Item>,
    primary: Option<Vec<u8>>,
    /// Whether the primary did not answer, so that nothing was compared.
    away: bool,
    outstanding: u32,
    sent: Instant,
    /// Whether the blocks differed in the round before.
    again: bool,
}

/// A block being compared.
#[derive(Debug)]
struct Item {
    key: Key,
    place: Place,
    seq: SegmentSeq,
    bytes: Option<Box<[u8]>>,
}

/// Clean blocks of a volume that are being dropped.
#[derive(Debug)]
struct Drop {
    volume: VolumeId,
    next: u64,
    /// Stripes to visit again, because blocks in them were being written or the log had no room.
    again: VecDeque<u64>,
    /// The drop is complete when this record is in the log.
    until: Lsn,
    /// The same in RAM; nothing of this has begun while there is none.
    purge: Option<Purge>,
    pace: Pace,
    /// The last turn was too short for stripes that have not been visited.
    goes_on: bool,
}

/// The `n`th stripe to visit of `count`: both ends first, then in strides of the golden ratio,
/// which spread evenly for every `n`.
fn nth_stripe(n: u64, count: u64) -> u64 {
    let mut stride = (count as f64 * 0.618_033_988_75) as u64;
    stride = stride.max(1);
    while gcd(stride, count) != 1 {
        stride += 1;
    }
    match n {
        0 => count - 1,
        _ => ((u128::from(n - 1) * u128::from(stride)) % u128::from(count)) as u64,
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Compare {
    /// Begins to compare the volumes whose primary is suspect.
    pub fn begin(&mut self, cache: &Cache) {
        let suspect = cache.config.volumes.iter().filter(|volume| volume.suspect);
        let start = |id| OfVolume { id, looked: 0, keys: VecDeque::new(), alone: 0, compared: 0 };
        self.volumes = suspect.map(|volume| start(volume.id)).collect();
    }

    /// Whether clean blocks can be found: until all are loaded, none but a few are visible.
    fn may_work(cache: &Cache) -> bool {
        let serves = cache.health() == Health::Good && *cache.state() == State::Serving;
        serves && !cache.contents.is_loading()
    }

    /// Continues to compare, and to drop blocks that must not be used.
    pub fn pump(&mut self, cache: &mut Cache, fx: &mut Effects) {
        if !Self::may_work(cache) {
            return;
        }
        self.drop_clean(cache, fx);
        if self.round.is_some() || cache.now < self.next_at {
            return;
        }
        let Some(volume) = self.volumes.front() else { return };
        if volume.keys.is_empty() && !self.find_clean(cache) {
            self.next_at = cache.now + PAUSE_MIN;
            return;
        }
        self.start_round(cache, false, fx);
    }

    /// When [`Compare::pump`] has more to do.
    pub fn next(&self, cache: &Cache) -> Option<Instant> {
        if !Self::may_work(cache) {
            return None;
        }
        if let Some(job) = self.drops.front() {
            let next = if job.goes_on { job.pace.due_at() } else { cache.now + PAUSE_MIN };
            return Some(next.max(cache.now));
        }
        (self.round.is_none() && !self.volumes.is_empty()).then_some(self.next_at)
    }

    fn stripes(cache: &Cache, volume: VolumeId) -> u64 {
        let blocks = cache.volume(volume).config.size.div_ceil(BLOCK_SIZE as u64);
        blocks.div_ceil(STRIPE_BLOCKS)
    }

    /// Searches for a stripe with clean blocks; returns false if it found none in this turn.
    fn find_clean(&mut self, cache: &mut Cache) -> bool {
        let Some(volume) = self.volumes.front_mut() else { return false };
        let count = Self::stripes(cache, volume.id);
        for _ in 0..STRIPES_SEARCHED {
            if volume.looked > count {
                cache.tell(Event::Compared { volume: volume.id, blocks: volume.compared });
                self.volumes.pop_front();
                return false;
            }
            let stripe = nth_stripe(volume.looked, count);
            volume.looked += 1;
            volume.keys = Self::clean_in(cache, volume.id, stripe).collect();
            if !volume.keys.is_empty() {
                return true;
            }
        }
        false
    }

    fn clean_in(cache: &Cache, volume: VolumeId, stripe: u64) -> impl Iterator<Item = Key> {
        let blocks = stripe * STRIPE_BLOCKS..(stripe + 1) * STRIPE_BLOCKS;
        let keys = blocks.step_by(WARM_BLOCKS).flat_map(move |first| {
            let keys = (first..first + WARM_BLOCKS as u64).map(move |at| Key::new(volume, at));
            cache.warm_index(keys.clone());
            keys
        });
        keys.filter(|&key| cache.contents.get(key).is_some_and(|place| !place.dirty))
    }

    /// Starts a round: reads the next blocks from the cache and from the primary.
    fn start_round(&mut self, cache: &mut Cache, again: bool, fx: &mut Effects) {
        let Some(compared) = self.volumes.front_mut() else { return };
        let count = compared.next();
        let keys: Vec<Key> = compared.keys.iter().take(count).copied().collect();
        let items = keys.iter().filter(|key| !cache.locks.is_locked(**key));
        let items: Vec<Item> = items
            .filter_map(|&key| {
                let place = cache.contents.get(key).filter(|place| !place.dirty)?;
                let seq = cache.log.seq_of(&place);
                Some(Item { key, place, seq, bytes: None })
            })
            .collect();
        let (Some(first), Some(last)) = (items.first(), items.last()) else {
            return compared.pass(count, 0);
        };
        let volume = first.key.volume();
        let (first, end) = (first.key.block(), last.key.block() + 1);
        let blocks = BlockRange { first, count: end - first };
        let range = cache.bytes_on_volume(volume, blocks);
        let buf = cache.config.buffers.get(range.len as usize);
        let sent = cache.now;
        let waiting: Vec<(Key, Place)> = items.iter().map(|item| (item.key, item.place)).collect();
        self.round =
            Some(Round { blocks, items, primary: None, away: false, outstanding: 2, sent, again });
        let ticket = Ticket::ComparePrimary;
        cache.send(fx, Target::Primary(volume), ticket, |tag| Io::read(tag, range, buf));
        for (at, (key, place)) in waiting.into_iter().enumerate() {
            self.read_compared(cache, at, key, place, fx);
        }
        self.compare_part(cache, fx);
    }

    /// Reads a block of the round from the cache.
    fn read_compared(
        &mut self,
        cache: &mut Cache,
        at: usize,
        key: Key,
        place: Place,
        fx: &mut Effects,
    ) {
        if let Some(bytes) = cache.peek_applied(key, <[u8]>::to_vec) {
            return self.take_compared(at, Some(&bytes));
        }
        if place.kind == EntryKind::Zero {
            return self.take_compared(at, Some(&[0; BLOCK_SIZE]));
        }
        let base = place.kind.is_associate().then(|| cache.contents.base_of_associate(key));
        if !cache.is_associate_written(&base.unwrap_or(place), &place) {
            return;
        }
        self.round().outstanding += 1;
        if let Some(base) = base {
            return cache.read_associate(
                AssociateOwner::Compare(at),
                Stored { key, place },
                base,
                fx,
            );
        }
        let read = SegmentRead::one(Reader::Compare(at), Stored { key, place });
        cache.read_payloads(read, fx);
    }

    fn round(&mut self) -> &mut Round {
        self.round.as_mut().expect("its reads end before it does")
    }

    fn take_compared(&mut self, at: usize, bytes: Option<&[u8]>) {
        self.round().items[at].bytes = bytes.map(Box::from);
    }

    /// Takes a block of the round that has been read from the cache device.
    pub fn read(
        &mut self,
        cache: &mut Cache,
        item: usize,
        read: &SegmentRead,
        done: &Completion,
        fx: &mut Effects,
    ) {
        let mut room = [0; BLOCK_SIZE];
        // Read errors are left to readers that need the block.
        let payload = read.payload(done, &read.items[0]);
        let bytes = payload.and_then(|payload| decode(&read.items[0].place, payload, &mut room));
        self.take_compared(item, bytes);
        self.compare_part(cache, fx);
    }

    /// Takes a block of the round that is stored against another one.
    pub fn put_together(
        &mut self,
        cache: &mut Cache,
        item: usize,
        bytes: Option<&[u8]>,
        fx: &mut Effects,
    ) {
        self.take_compared(item, bytes);
        self.compare_part(cache, fx);
    }

    /// Takes the primary's bytes of the round.
    pub fn primary_read(&mut self, cache: &mut Cache, done: &Completion, fx: &mut Effects) {
        let now = cache.now;
        let round = self.round();
        round.primary = done.result.is_ok().then(|| done.buf.to_vec());
        round.away = done.result.as_ref().is_err_and(|error| is_away(error.kind()));
        let pause = if round.away { PAUSE_MAX } else { now.since(round.sent) * PAUSE };
        self.next_at = now + pause.clamp(PAUSE_MIN, PAUSE_MAX);
        self.compare_part(cache, fx);
    }

    /// Notes that a part of the round has been read; compares after the last part.
    fn compare_part(&mut self, cache: &mut Cache, fx: &mut Effects) {
        let round = self.round();
        round.outstanding -= 1;
        if round.outstanding > 0 {
            return;
        }
        let Some(round) = self.round.take() else { return };
        let volume = round.items[0].key.volume();
        let Some(compared) = self.volumes.front_mut().filter(|one| one.id == volume) else {
            return;
        };
        if *cache.state() != State::Serving {
            return;
        }
        let differs = round.items.iter().find(|item| Self::differs(cache, &round, item));
        match differs.map(|item| item.key) {
            Some(key) if round.again => {
                self.volumes.pop_front();
                let blocks = BlockRange { first: key.block(), count: 1 };
                cache.tell(Event::PrimaryChanged { volume, blocks });
                fx.changed.push(volume);
                self.distrust(cache, volume);
            }
            Some(_) => self.start_round(cache, true, fx),
            // The same blocks are compared again when the primary may be back; meanwhile others.
            None if round.away => self.volumes.rotate_left(1),
            None if round.primary.is_none() && compared.next() > 1 => {
                compared.alone = compared.next();
            }
            None => {
                let read = if round.primary.is_some() { round.items.len() } else { 0 };
                compared.pass(compared.next(), read);
            }
        }
    }

    /// Whether the primary's bytes of a block differ from the cache's, and the cache still has the
    /// version that was read.
    fn differs(cache: &Cache, round: &Round, item: &Item) -> bool {
        let same = cache.contents.get(item.key).is_some_and(|now| {
            // A slot of the store may have been used for the same block again.
            now.is_same_version(&item.place)
                && (now.crc, now.dirty) == (item.place.crc, false)
                && cache.log.seq_of(&now) == item.seq
        });
        let (Some(cached), Some(primary)) = (&item.bytes, &round.primary) else { return false };
        let from = (item.key.block() - round.blocks.first) as usize * BLOCK_SIZE;
        let part = &primary[from..(from + BLOCK_SIZE).min(primary.len())];
        same && !cache.locks.is_locked(item.key) && cached[..part.len()] != *part
    }

    /// Stops using clean blocks of a volume: its primary was changed without the cache, as this
    /// shard or another one found.
    pub fn distrust(&mut self, cache: &mut Cache, volume: VolumeId) {
        if cache.known_volume(volume).is_none_or(|volume| volume.distrusted || volume.changed) {
            return;
        }
        self.volumes.retain(|other| other.id != volume);
        cache.store.spoil_volume(volume);
        let state = cache.volume_mut(volume);
        (state.distrusted, state.changed) = (true, true);
        self.drops.push_back(Drop {
            volume,
            next: 0,
            again: VecDeque::new(),
            until: Lsn(0),
            purge: None,
            pace: Pace::new(DROP_SHARE, Duration::ZERO, DROP_TURN),
            goes_on: false,
        });
    }

    /// Logs that clean blocks are gone.
    fn drop_clean(&mut self, cache: &mut Cache, fx: &mut Effects) {
        let Some(mut job) = self.drops.pop_front() else { return };
        // The record being built may have blocks that were admitted before; no more are.
        if job.purge.is_none() && !cache.close_record(fx) {
            return self.drops.push_front(job);
        }
        let purged = job.purge.get_or_insert_with(|| Purge::new(job.volume)).step(cache);
        let count = Self::stripes(cache, job.volume);
        let dirty = cache.contents.dirty().blocks_of(job.volume);
        if cache.contents.held_by(job.volume) == dirty {
            // The rest of the volume need not be visited: no clean block is left.
            job.next = count;
        }
        Self::drop_some(cache, count, &mut job, fx);
        let dropped = job.next >= count && job.again.is_empty();
        if purged && dropped && cache.log.next_lsn() > job.until {
            cache.volume_mut(job.volume).distrusted = false;
        } else {
            self.drops.push_front(job);
        }
    }

    /// Drops clean blocks of the next of `count` stripes, as many as one turn allows; then of the
    /// stripes that must be visited again, each once.
    fn drop_some(cache: &mut Cache, count: u64, job: &mut Drop, fx: &mut Effects) {
        if !job.pace.is_due(cache.now) {
            return;
        }
        job.pace.begin_turn();
        job.goes_on = false;
        let mut again = job.again.len();
        for _ in 0..STRIPES_DROPPED {
            let is_new = job.next < count;
            if !is_new && again == 0 || !cache.has_client_space() {
                return;
            }
            if job.pace.turn_is_over() {
                break;
            }
            let stripe = match is_new {
                true => job.next,
                false => {
                    again -= 1;
                    job.again.pop_front().expect("there was one more")
                }
            };
            if !Self::drop_clean_in(cache, stripe, job, fx) {
                if !is_new {
                    job.again.push_back(stripe);
                }
                return;
            }
            job.next = job.next.max(stripe + 1);
        }
        job.goes_on = job.next < count;
    }

    /// Logs that clean blocks of a stripe are gone; returns false if the log has no room now.
    fn drop_clean_in(cache: &mut Cache, stripe: u64, job: &mut Drop, fx: &mut Effects) -> bool {
        let keys: Vec<Key> = Self::clean_in(cache, job.volume, stripe).collect();
        job.pace.charge(cache.now, STRIPE_COST + BLOCK_COST * keys.len() as u32);
        let mut rest = keys.into_iter().peekable();
        let mut locked = false;
        while let Some(first) = rest.next() {
            if cache.locks.is_locked(first) {
                // The write that holds the lock may fail, and leave the block as it was.
                locked = true;
                continue;
            }
            let mut count = 1;
            let follows = |key: &Key, count: u32, locks: &crate::locks::Locks| {
                key.0 == first.0 + u64::from(count) && !locks.is_locked(*key)
            };
            while rest.next_if(|key| follows(key, count, &cache.locks)).is_some() {
                count += 1;
            }
            // All blocks of a record leave the cache when it is closed.
            let builder = cache.log.builder_ref();
            let is_full = builder.blocks() + u64::from(count) > INVALIDATED_MAX;
            if !builder.is_empty() && is_full && !cache.close_record(fx) {
                return false;
            }
            let kind = EntryKind::Invalidate;
            if !cache.push_bare(fx, first, count, kind, false, Expect::Always) {
                return false;
            }
            // A direct write that finds the block gone must wait until this entry is durable.
            cache.log.raise_barrier();
            job.until = cache.log.next_lsn();
        }
        if locked {
            job.again.push_back(stripe);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::Id;
    use crate::testing::VOLUME;
    use crate::testing::rooms::{Rooms, key};

    #[test]
    fn every_stripe_is_looked_at_the_ends_first() {
        for count in [1, 2, 3, 7, 64, 1000, 4093] {
            let order: Vec<u64> = (0..=count).map(|n| nth_stripe(n, count)).collect();
            assert_eq!(order[..2], [count - 1, 0], "the ends of {count}");
            let mut all = order[1..].to_vec();
            all.sort_unstable();
            assert_eq!(all, (0..count).collect::<Vec<_>>(), "of {count}");
        }
    }

    /// 16 stripes in 10 ms took 41 s for these 65,536.
    #[test]
    fn clean_blocks_are_dropped_as_fast_as_a_share_of_the_time_allows() {
        let mut rooms = Rooms::new(0);
        let size = 64 << 30;
        let last = size / BLOCK_SIZE as u64 - 1;
        rooms.clean([0, 1, 2, 3, 4, 5, last]);
        rooms.volume_mut(VOLUME).config.size = size;
        let (began, mut stripes, mut turns) = (rooms.now, 0, 0);
        let mut compare = Compare::default();
        compare.distrust(&mut rooms.cache, VOLUME);
        while let Some(at) = compare.next(&rooms.cache) {
            let before = compare.drops[0].next;
            rooms.now = at;
            let Rooms { cache, fx, .. } = &mut rooms;
            compare.pump(cache, fx);
            rooms.log_record();
            let visited = compare.drops.front().map_or(0, |job| job.next - before);
            (stripes, turns) = (visited.max(stripes), turns + 1);
        }
        assert_eq!(rooms.contents.held_by(VOLUME), 0);
        let time = rooms.now.since(began);
        assert!(time < Duration::from_secs(11), "{time:?}, {turns} turns");
        assert!(STRIPE_COST * stripes as u32 <= DROP_TURN + STRIPE_COST, "{stripes} in a turn");
    }

    #[test]
    fn stripes_after_the_last_clean_block_are_not_visited() {
        let mut rooms = Rooms::new(0);
        rooms.clean([0]);
        rooms.dirty([1]);
        rooms.volume_mut(VOLUME).config.size = 1 << 50;
        let mut compare = Compare::default();
        compare.distrust(&mut rooms.cache, VOLUME);
        for _ in 0..3 {
            let Rooms { cache, fx, .. } = &mut rooms;
            compare.pump(cache, fx);
            rooms.log_record();
        }
        assert!(!rooms.volume(VOLUME).distrusted);
        assert_eq!(rooms.contents.held_by(VOLUME), 1);
    }

    #[test]
    fn a_stripe_with_a_locked_block_does_not_keep_the_thread_busy() {
        let mut turns = 0;
        let mut rooms = Rooms::new(0);
        rooms.clean(0..7);
        assert!(rooms.locks.acquire(key(3), Id(1)));
        let began = rooms.now;
        let mut compare = Compare::default();
        compare.distrust(&mut rooms.cache, VOLUME);
        while rooms.now.since(began) < Duration::from_secs(1) {
            rooms.now = compare.next(&rooms.cache).expect("a block is left");
            let Rooms { cache, fx, .. } = &mut rooms;
            compare.pump(cache, fx);
            rooms.log_record();
            turns += 1;
        }
        assert_eq!(rooms.contents.held_by(VOLUME), 1);
        assert!(turns < 110, "{turns} turns");
    }

    #[test]
    fn what_was_looked_at_lies_all_over_the_volume() {
        let mut first: Vec<u64> = (0..100).map(|n| nth_stripe(n, 100_000)).collect();
        first.sort_unstable();
        let widest = first.windows(2).map(|pair| pair[1] - pair[0]).max();
        assert!(widest < Some(2_700), "{widest:?}");
    }
}
