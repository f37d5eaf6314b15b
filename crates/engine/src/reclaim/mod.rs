//! Reclaim: the oldest segment is freed. Its dirty blocks and the clean ones worth keeping are
//! copied to the front of the log; the rest leave the cache.
//!
//! A segment is free only when the record that drops it from the log (by a higher `start`) is
//! durable: then everything copied out of it is durable too.

use std::collections::VecDeque;

use forebay_block::{BLOCK_SIZE, Completion, Instant};
use forebay_format::{ENTRY_BYTES, PAGE, SegmentSeq, footer_bytes, footer_entries};
use forebay_policy::{copy_bytes_max, free_segments_wanted};

use crate::api::Effects;
use crate::cache::Cache;
use crate::contents::Stored;
use crate::key::{Key, KeyMap};
use crate::limits::{COPIES_MAX, COPY_BYTES_MAX, RECLAIM_RESERVE, step};
use crate::log::read::{Reader, SegmentRead};
use crate::log::{Log, SegmentState};
use crate::note::Note;

mod copy;
mod join;
mod name;
mod sort;

use copy::READ_PAUSE;
use sort::Sorting;

use crate::form::Copied;

/// The state of reclaim and its recent results.
#[derive(Debug, Default)]
pub struct Reclaim {
    state: State,
    /// Reclaim pauses until this time after `failures` failed reads in a row.
    retry_at: Instant,
    failures: u32,
    /// Bytes reclaimed since the log last had enough room, minus [`RECLAIMED_FOR_ONE`] for each
    /// byte that clients wrote.
    in_vain: u64,
    lap: Lap,
    named: Named,
    /// From then on the blocks of the segment being copied are named at once.
    name_at: Instant,
}

/// Blocks of the store that a segment names, and that later entries have named again. Reclaim may
/// start over several times with one segment; naming all of its blocks each time would fill the
/// log.
#[derive(Debug, Default)]
struct Named {
    seq: SegmentSeq,
    keys: KeyMap<()>,
}

impl Named {
    fn note(&mut self, seq: SegmentSeq, key: Key) {
        if self.seq != seq {
            // The next segment will name as many: the table keeps its size.
            self.keys.clear();
            self.seq = seq;
        }
        self.keys.insert(key, ());
    }

    fn has(&self, seq: SegmentSeq, key: Key) -> bool {
        self.seq == seq && self.keys.contains_key(&key)
    }
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Idle,
    /// The footer of this segment is being read.
    Scanning(SegmentSeq),
    /// The blocks of a segment are being looked up, to decide about each.
    Sorting(Box<Sorting>),
    /// The blocks of a segment that are worth keeping are being copied.
    Copying(Job),
}

/// A segment being copied.
#[derive(Debug)]
struct Job {
    seq: SegmentSeq,
    /// Blocks that must be copied and have not been read.
    to_read: VecDeque<Stored>,
    /// Blocks that have been read and wait for room in the log.
    to_copy: VecDeque<Copied>,
    bytes: usize,
    /// Upper limit on the bytes of log that all copies take.
    needs: u64,
    /// Whether that counts payloads: the store takes none.
    stays: bool,
    reading: bool,
    /// Blocks of the store that entries of the segment name: they must be named again.
    to_name: VecDeque<Stored>,
    /// Clean blocks of the store that leave the cache with the segment: they are not named again.
    to_leave: VecDeque<Stored>,
    /// Whether they have begun to leave.
    leaves: bool,
    /// Blocks stored against a base in the segment: they must be written whole.
    to_rebase: VecDeque<Stored>,
    /// Number of these blocks that are being read.
    rebasing: usize,
    /// Number of copies for which the content of a similar block is being read.
    seeking: usize,
}

/// Segments reclaimed since reclaim last gained anything. If the whole log must stay because a
/// primary takes no blocks, copying it in circles would only wear out the device.
#[derive(Debug, Default)]
struct Lap {
    reclaimed: u64,
    /// The highest number of free segments, and the lowest number of dirty blocks.
    free: u64,
    dirty: u64,
}

impl Reclaim {
    /// When reclaim continues after a failed read.
    pub fn retry_at(&self) -> Instant {
        self.retry_at
    }

    /// Enters another state, and tells the log.
    fn enter(&mut self, log: &mut Log, state: State) {
        let (seq, needs) = match &state {
            State::Idle => (None, None),
            State::Scanning(seq) => (Some(*seq), None),
            State::Sorting(sorting) => (Some(sorting.job.seq), None),
            State::Copying(job) => (Some(job.seq), Some(job.needs)),
        };
        log.set_leaving(seq, needs);
        self.state = state;
    }

    fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle)
    }

    fn job(&self) -> Option<&Job> {
        match &self.state {
            State::Copying(job) => Some(job),
            _ => None,
        }
    }

    fn job_mut(&mut self) -> Option<&mut Job> {
        match &mut self.state {
            State::Copying(job) => Some(job),
            _ => None,
        }
    }

    /// Whether a segment is being reclaimed.
    pub fn is_busy(&self) -> bool {
        !self.is_idle()
    }

    /// Whether the next turn should come at once: a segment is being sorted, or copies that waited
    /// for others may be queued now.
    pub fn is_cut_short(&self, cache: &Cache) -> bool {
        match &self.state {
            State::Sorting(_) => true,
            State::Copying(job) => {
                let may_go_on = job.takes_more() && self.retry_at <= cache.now;
                may_go_on && job.is_next_bare() && job.takes_bare()
            }
            State::Idle | State::Scanning(_) => false,
        }
    }

    /// Whether there is more to copy, so that a record should become as long as it can.
    pub fn goes_on(&self) -> bool {
        self.job().is_some_and(Job::goes_on)
    }

    /// Takes the count of bytes that clients and admissions have written since the last call.
    fn take_client_bytes(&mut self, log: &mut Log) {
        let bytes = log.take_client_bytes();
        if bytes > 0 {
            self.in_vain = self.in_vain.saturating_sub(bytes * RECLAIMED_FOR_ONE);
            self.lap = Lap::default();
        }
    }

    /// Stops reclaiming: the cache device failed.
    pub fn give_up(&mut self, log: &mut Log) {
        self.enter(log, State::Idle);
    }

    /// Starts over with the oldest segment, not before `at`.
    fn begin_again(&mut self, log: &mut Log, at: Instant) {
        self.enter(log, State::Idle);
        self.retry_at = at;
    }

    /// Whether all of `segments` segments have been reclaimed twice without any gain.
    fn goes_in_circles(&mut self, segments: u64, free: u64, dirty: u64) -> bool {
        if free > self.lap.free || dirty < self.lap.dirty {
            self.lap = Lap { reclaimed: 0, free, dirty };
        }
        self.lap.reclaimed > 2 * segments
    }
}

impl Job {
    fn new(seq: SegmentSeq) -> Self {
        Self {
            seq,
            to_read: VecDeque::new(),
            to_copy: VecDeque::new(),
            bytes: 0,
            needs: 0,
            stays: false,
            reading: false,
            to_name: VecDeque::new(),
            to_leave: VecDeque::new(),
            leaves: false,
            to_rebase: VecDeque::new(),
            rebasing: 0,
            seeking: 0,
        }
    }

    /// Whether more blocks may be read or queued for copying.
    fn takes_more(&self) -> bool {
        !self.reading && self.bytes < COPY_BYTES_MAX
    }

    /// Whether more blocks without payload may be queued for copying.
    fn takes_bare(&self) -> bool {
        self.to_copy.len() < COPIES_MAX
    }

    /// Whether the next block to be copied need not be read.
    fn is_next_bare(&self) -> bool {
        self.to_read.front().is_some_and(|item| !item.place.kind.has_payload())
    }

    fn is_reading(&self) -> bool {
        self.reading || self.rebasing > 0 || self.seeking > 0
    }

    /// Upper limit on the bytes that the copies take, in records of `record_pages` pages except for
    /// the last. Unless the payloads stay in the log, only their entries do.
    fn bytes_at_most(&self, record_pages: usize, stays: bool) -> u64 {
        let read: usize = self.to_read.iter().map(|item| usize::from(item.place.len)).sum();
        let rebased = self.to_rebase.len() * BLOCK_SIZE;
        let entries = self.entries_at_most() * ENTRY_BYTES;
        let payloads = if stays { read + rebased } else { 0 };
        let pages = (payloads + entries).div_ceil(PAGE);
        let headers = pages.div_ceil(record_pages - 1) + 1;
        ((pages + headers) * PAGE) as u64
    }

    /// Upper limit on the entries that the copies take.
    fn entries_at_most(&self) -> usize {
        2 * (self.to_read.len() + self.to_rebase.len() + self.to_name.len())
    }

    /// Lets up to `most` of the clean blocks leave that would have to be named again.
    fn leave_named(&mut self, mut most: u64) {
        let mut leaves = |item: &Stored| {
            let leaves = !item.place.dirty && most > 0;
            most -= u64::from(leaves);
            leaves
        };
        let (leaving, staying) =
            std::mem::take(&mut self.to_name).into_iter().partition(|item| leaves(item));
        (self.to_leave, self.to_name) = (leaving, staying);
    }

    /// Whether there is more to read or to copy.
    fn goes_on(&self) -> bool {
        let waits = [&self.to_read, &self.to_name, &self.to_rebase];
        self.is_reading() || !self.to_copy.is_empty() || waits.iter().any(|list| !list.is_empty())
    }

    /// Whether it has more that may go to the store.
    fn moves_more(&self) -> bool {
        self.is_reading() || !self.to_read.is_empty() || !self.to_copy.is_empty()
    }

    /// Queues a block to be copied.
    fn take(&mut self, copy: Copied) {
        self.bytes += copy.bytes.len();
        self.to_copy.push_back(copy);
    }
}

/// Limit on the blocks that leave in one turn since nothing names them again.
const LEFT_MAX: usize = step(1024);
/// Shares of the dirty limit, in percent. Up to the first, copying forward uses the policy's full
/// allowance; from the second on nothing is copied, so that copies do not take the room that writes
/// wait for.
const COPY_FULL_TO: u64 = 60;
const COPY_NONE_FROM: u64 = 85;
/// Share of the dirty limit, in percent, from which a segment that is mostly dirty is not copied
/// forward but waits until it has been destaged. The same applies when reclaim has gained little
/// for some time, even with a store that takes its blocks.
const PRESSED_FROM: u64 = 75;
/// Share of the segments, in percent, that are kept free beyond [`free_segments_wanted`] when the
/// dirty limit is reached. Down to that number, a segment waits until its blocks on the way to the
/// primary are clean, which a flush there may delay by a second; below it, they are copied.
const FREE_PERCENT_MORE: u64 = 3;
/// With a store, one segment in this many is kept free in addition, of a short log. To free one
/// takes two flushes of the device, for its blocks in the store and for the records that name them,
/// and clients write on.
const STORE_AHEAD: u64 = 8;
const STORE_AHEAD_MAX: u64 = 16;

/// Segments reclaimed beyond the clients' need before one is freed without copying clean blocks
/// forward.
const IN_VAIN_SEGMENTS_MAX: u64 = 8;
/// Bytes that may be reclaimed for each byte that clients write: reclaiming a segment gains at
/// least an eighth of it, usually more than a quarter.
const RECLAIMED_FOR_ONE: u64 = 8;

impl Reclaim {
    /// Starts or continues to free the oldest segment when few segments are free.
    pub fn pump(&mut self, cache: &mut Cache, fx: &mut Effects) {
        if !cache.makes_room() || cache.contents.is_loading() || self.retry_at > cache.now {
            return;
        }
        if self.is_idle() && !self.begin(cache, fx) {
            return;
        }
        self.sort(cache, fx);
        self.name_again(cache, fx);
        self.read_copies(cache, fx);
        self.read_rebases(cache, fx);
        self.give_up_copying(cache, fx);
        self.finish(cache);
        cache.store.expect_more(self.job().is_some_and(Job::moves_more));
    }

    /// Starts over, evicting and destaging, when copies have no room except in the last segment.
    fn give_up_copying(&mut self, cache: &mut Cache, fx: &mut Effects) {
        let Some(job) = self.job() else { return };
        let index = cache.log.position(job.seq);
        let waits = cache.contents.live_in(index) > 0 || cache.store.exists() && job.goes_on();
        let settled = waits && !job.is_reading() && !cache.store.waits_for_device();
        let may_close = settled && cache.log.is_emergency() && !cache.log.is_busy();
        if may_close && !cache.close_record(fx) {
            self.begin_again(&mut cache.log, cache.now + READ_PAUSE);
        }
    }

    /// Whether a record should become as long as it can: the last segment takes copies, and there
    /// are more copies.
    pub fn fills_last(&self, cache: &mut Cache) -> bool {
        let copies = cache.log.free() == 0 && cache.log.builder().waiters.is_empty();
        copies && self.goes_on()
    }

    /// Whether reclaim has gained too little for some time. Copies may fill as many segments as
    /// reclaim frees, since a record that does not fit leaves the end of a segment unused.
    fn reclaims_in_vain(&mut self, cache: &mut Cache) -> bool {
        self.take_client_bytes(&mut cache.log);
        let in_vain = self.in_vain >= Self::vain(cache, 1);
        if in_vain {
            self.in_vain = 0;
        }
        in_vain
    }

    /// One part in `parts` of the bytes at which reclaim counts as gaining too little.
    fn vain(cache: &Cache, parts: u64) -> u64 {
        u64::from(cache.config.segment_size) * IN_VAIN_SEGMENTS_MAX / parts
    }

    /// The number of segments that are kept free for what clients write while one is freed.
    fn ahead(cache: &Cache) -> u64 {
        let ahead = (cache.log.len() / STORE_AHEAD).clamp(1, STORE_AHEAD_MAX);
        if cache.store.exists() { ahead } else { 0 }
    }

    fn begin(&mut self, cache: &mut Cache, fx: &mut Effects) -> bool {
        self.take_client_bytes(&mut cache.log);
        let total = cache.log.len();
        let reserve = RECLAIM_RESERVE + Self::ahead(cache);
        let low = free_segments_wanted(total, reserve) + cache.stuck_reserve();
        let (dirty, limit) = (cache.contents.dirty().blocks(), cache.dirty_limit());
        let high = low + total * FREE_PERCENT_MORE / 100 * dirty.min(limit) / limit;
        let coming = cache.log.freeing();
        let free = cache.log.free() + coming;
        // The store evicts as long as it can.
        let tight = cache.index_is_tight() && (!cache.store.exists() || cache.store.is_full());
        if free > high {
            self.in_vain = 0;
        }
        let wanted = free <= high || tight && coming == 0;
        if !wanted {
            // Nothing waits for the dirty blocks of the oldest segment any more.
            cache.log.press(false);
            return false;
        }
        let in_circles = self.goes_in_circles(total, cache.log.free(), dirty);
        let Some(seq) = cache.log.oldest().filter(|_| !in_circles) else { return false };
        let index = cache.log.position(seq);
        match cache.log.segment(index).state {
            SegmentState::Sealed => {}
            SegmentState::Open if tight => {
                cache.seal_open_segment();
                return false;
            }
            // The footer is on its way.
            _ => return false,
        }
        // When much is dirty, copying a mostly dirty segment forward gains little room for much
        // wear, so destaging goes first; moved to the store, it gains all. Lost blocks are never
        // destaged: they are copied when everything else is clean. Blocks of a stuck primary are
        // copied immediately: waiting would gain nothing.
        let segment = *cache.log.segment(index);
        let moves = cache.store.exists() && !cache.store.is_full();
        let much =
            !moves && dirty > limit * PRESSED_FROM / 100 || self.in_vain >= Self::vain(cache, 2);
        let dirty_here = cache.destageable_in(index);
        let mostly_dirty = much && dirty_here * 2 > segment.entries;
        let any_dirty = free <= 1 && dirty_here > 0;
        let pressed = (mostly_dirty || any_dirty) && cache.contents.dirty_level() > 0;
        cache.log.press(pressed);
        if cache.log.is_emergency() && coming > 0 {
            // Room is on its way, and no block needs to leave the cache for it.
            return false;
        }
        if pressed || segment.destaging > 0 && free > low && !tight {
            return false;
        }
        if cache.log.builder().rests_on(index as u32) && !cache.close_record(fx) {
            return false;
        }
        let has_names = cache.store.exists();
        let bytes = footer_bytes(cache.log.segment(index).cells as usize);
        let at = cache.config.segment_size - bytes as u32;
        if cache.contents.live_in(index) == 0 && !has_names {
            self.enter(&mut cache.log, State::Copying(Job::new(seq)));
            return true;
        }
        self.enter(&mut cache.log, State::Scanning(seq));
        let range = at..cache.config.segment_size;
        cache.read_payloads(SegmentRead::part(Reader::Footer, index, range), fx);
        true
    }

    /// Takes the footer of the segment, and begins to sort its blocks.
    pub fn footer_read(&mut self, cache: &mut Cache, done: &mut Completion, fx: &mut Effects) {
        let State::Scanning(seq) = self.state else { return };
        if done.result.is_err() {
            return self.later(cache);
        }
        self.failures = 0;
        let footer = footer_entries(&done.buf).ok().map(|(trailer, _)| trailer);
        let Some(trailer) = footer.filter(|trailer| trailer.footer.seq == seq) else {
            // It was written and is now unreadable: the device cannot be relied on to keep the log.
            return cache.out.note(Note::CacheFailed);
        };
        if Self::rests_on_store(cache) && !cache.close_record(fx) {
            return self.begin_again(&mut cache.log, cache.now + READ_PAUSE);
        }
        let must = (self.must_gain(cache), self.gives(cache));
        let sorting = Sorting::new(std::mem::take(&mut done.buf), trailer, must);
        self.enter(&mut cache.log, State::Sorting(Box::new(sorting)));
        self.sort(cache, fx);
    }

    fn rests_on_store(cache: &mut Cache) -> bool {
        let first = cache.log.len() as u32;
        cache.log.builder().rests_on_store(first)
    }

    /// Whether no clean block may be kept, since that would not make room.
    fn must_gain(&mut self, cache: &mut Cache) -> bool {
        let in_vain = self.reclaims_in_vain(cache);
        cache.index_is_tight() || cache.log.is_emergency() || in_vain
    }

    /// Number of blocks that leave although they are pinned: a few, if the index has no room for
    /// clients, and the segments before this one held nothing else that could leave.
    fn gives(&self, cache: &Cache) -> u64 {
        let is_full = cache.contents.index().is_full();
        let in_vain = is_full && self.lap.reclaimed >= IN_VAIN_SEGMENTS_MAX;
        if in_vain { cache.index_margin() + 1 } else { 0 }
    }

    /// Limit on the bytes of the oldest segment's clean blocks that may be copied forward in
    /// addition to its dirty blocks.
    fn keep_bytes(cache: &Cache, dirty_bytes: u64) -> u64 {
        let limit = cache.dirty_limit();
        let (full, none) = (limit * COPY_FULL_TO / 100, limit * COPY_NONE_FROM / 100);
        let left = none.saturating_sub(cache.contents.dirty().blocks()).min(none - full);
        let most = copy_bytes_max(u64::from(cache.config.segment_size)).saturating_sub(dirty_bytes);
        most * left / (none - full).max(1)
    }

    /// Whether blocks of the store have to leave that one turn was too short for.
    pub fn leaves_more(&self) -> bool {
        self.job().is_some_and(|job| job.leaves)
    }

    /// Frees the segment when no block lives in it any more, and those that it names have left.
    fn finish(&mut self, cache: &mut Cache) {
        let Some(job) = self.job() else { return };
        let index = cache.log.position(job.seq);
        let moves = cache.store.exists() && (job.goes_on() || cache.store.is_moving());
        let waits = moves || job.is_reading() || cache.contents.live_in(index) > 0;
        self.going().leaves = false;
        if waits {
            return;
        }
        for _ in 0..LEFT_MAX {
            let Some(Stored { key, place }) = self.going().to_leave.pop_front() else { break };
            let now = cache.contents.same_version(key, &place);
            // A later entry may have made it dirty. Another may name it, too: from before a crash,
            // or from the time when it was dirty.
            if now.is_some_and(|now| !now.dirty) {
                cache.stats.evicted_blocks += 1;
                cache.contents.drop(key, &mut cache.ram);
            }
        }
        let job = self.going();
        job.leaves = !job.to_leave.is_empty();
        if job.leaves {
            return;
        }
        self.enter(&mut cache.log, State::Idle);
        self.take_client_bytes(&mut cache.log);
        cache.contents.drop_sharers(index);
        cache.log.free_oldest();
        cache.stats.segments_reclaimed += 1;
        self.lap.reclaimed += 1;
        self.in_vain += u64::from(cache.config.segment_size);
    }
}

#[cfg(test)]
mod tests;
