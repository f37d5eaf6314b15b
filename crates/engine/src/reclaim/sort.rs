//! Which blocks of the oldest segment are still needed, and what becomes of each. A segment may
//! have nearly 100,000 entries, so this takes several turns; in between, blocks may change.

use std::cmp::Reverse;

use forebay_block::IoBuf;
use forebay_format::{ENTRY_BYTES, Entry, EntryKind, FooterTrailer, SegmentSeq, TablePosition};
use forebay_policy::Candidate;

use super::copy::READ_PAUSE;
use super::join::Joining;
use super::name::NAME_PATIENCE;
use super::{Job, Named, Reclaim, State};
use crate::api::Effects;
use crate::cache::Cache;
use crate::contents::{Place, Stored};
use crate::key::{Key, KeyMap};
use crate::limits::{COMPARED_ONE_IN, JOINED_ONE_IN, SORTED_ONE_IN, WARM_BLOCKS};
use crate::note::Note;
use crate::store::UNIT_BLOCKS;

/// A segment whose blocks are being looked up.
#[derive(Debug)]
pub(super) struct Sorting {
    /// What must be copied so far.
    pub job: Job,
    /// The footer, and the part of its entries that has been looked at.
    footer: IoBuf,
    trailer: FooterTrailer,
    looked: TablePosition,
    /// The blocks to which later segments gave a payload in this one, as far as they have not been
    /// looked at, in reverse order.
    sharers: Option<Vec<Key>>,
    /// Blocks that live in the segment.
    seen: KeyMap<()>,
    /// The clean blocks that live there.
    clean: Vec<Candidate>,
    /// Total length of the dirty blocks, in bytes.
    dirty_bytes: u64,
    /// Number of clean blocks that have been decided about.
    decided: usize,
    /// The search for what the store has beside the copies.
    joining: Option<Joining>,
    /// Whether no clean block may be kept, except for pinned ones.
    must_gain: bool,
    /// Number of pinned blocks, or of others in the store, that may leave nevertheless.
    gives: u64,
}

impl Sorting {
    /// Begins with the entries of a segment's footer.
    pub fn new(footer: IoBuf, trailer: FooterTrailer, (must_gain, gives): (bool, u64)) -> Self {
        Self {
            job: Job::new(trailer.footer.seq),
            footer,
            trailer,
            looked: TablePosition::default(),
            sharers: None,
            seen: KeyMap::default(),
            clean: Vec::new(),
            dirty_bytes: 0,
            decided: 0,
            joining: None,
            must_gain,
            gives,
        }
    }
}

impl Reclaim {
    /// Looks up the next blocks of the segment, or decides about them; at last begins to copy.
    pub(super) fn sort(&mut self, cache: &mut Cache, fx: &mut Effects) {
        let State::Sorting(sorting) = &mut self.state else { return };
        // The base of a delta in the record being built counts only when that is closed.
        if Self::rests_on_store(cache) && !cache.close_record(fx) {
            return self.begin_again(&mut cache.log, cache.now + READ_PAUSE);
        }
        let stays = !cache.store.exists() || cache.store.is_full();
        let joins = !stays && !sorting.must_gain && cache.wear_pressure() <= 0.0;
        let Some(is_looked_up) = sorting.look_up(cache, &self.named) else {
            return cache.out.note(Note::CacheFailed);
        };
        let is_over = is_looked_up && sorting.decide(cache) && (!joins || sorting.join(cache));
        if !is_over {
            return;
        }
        let gives = sorting.gives;
        let mut job = std::mem::replace(&mut sorting.job, Job::new(SegmentSeq(0)));
        job.stays = stays;
        job.needs = job.bytes_at_most(cache.log.builder().pages_max(), stays);
        let segment = cache.config.segment_size;
        let fits = !cache.log.is_emergency() || cache.log.would_fit(job.needs, segment);
        let gives = if fits { gives } else { u64::MAX };
        if gives > 0 {
            job.leave_named(gives);
            job.needs = job.bytes_at_most(cache.log.builder().pages_max(), stays);
        }
        if !cache.log.fits_last(job.needs, job.entries_at_most(), segment) {
            // What is dirty is destaged meanwhile.
            return self.begin_again(&mut cache.log, cache.now + READ_PAUSE);
        }
        let at = |item: &Stored| (item.place.segment, item.place.offset);
        job.to_read.make_contiguous().sort_unstable_by_key(at);
        self.enter(&mut cache.log, State::Copying(job));
        self.name_at = cache.now + NAME_PATIENCE;
        self.name_again(cache, fx);
        self.read_copies(cache, fx);
        self.read_rebases(cache, fx);
    }
}

impl Sorting {
    /// Looks up the blocks of the next entries; returns whether there are no more, or `None` if
    /// they are not those of a footer.
    fn look_up(&mut self, cache: &mut Cache, named: &Named) -> Option<bool> {
        let index = cache.log.position(self.job.seq);
        let most = (cache.config.segment_size / SORTED_ONE_IN) as usize;
        let found = self.trailer.some_entries(&self.footer, self.looked, most);
        let (entries, past) = found.ok()?;
        self.looked = past;
        let (looked, all) = (self.looked.entries(), self.trailer.footer.entries);
        if looked > all || looked < all && entries.is_empty() {
            return None;
        }
        let mappings = entries.iter().filter_map(|entry| {
            let segment = cache.log.len() as u32 + entry.stored?.extent;
            Some((Key::new(entry.volume, entry.block), (segment, entry.offset)))
        });
        let mappings: Vec<_> = mappings.collect();
        for some in mappings.chunks(WARM_BLOCKS) {
            cache.warm_index(some.iter().map(|&(key, _)| key));
            some.iter().for_each(|&(key, at)| self.find_named(cache, named, key, at));
        }
        let places = |entry: &&Entry| {
            let bare = matches!(entry.kind, EntryKind::Invalidate | EntryKind::Checkpoint);
            !bare && entry.stored.is_none()
        };
        let keys = entries.iter().filter(places).flat_map(|entry| {
            let blocks = entry.block..entry.block + u64::from(entry.count);
            blocks.map(|block| Key::new(entry.volume, block))
        });
        let keys: Vec<Key> = keys.collect();
        for some in keys.chunks(WARM_BLOCKS) {
            cache.warm_index(some.iter().copied());
            some.iter().for_each(|&key| self.find_living(cache, index, key));
        }
        if looked < all {
            return Some(false);
        }
        let reversed = || cache.contents.sharers_in(index).iter().rev().copied().collect();
        let sharers = self.sharers.get_or_insert_with(reversed);
        let rest = sharers.len().saturating_sub(most);
        for key in sharers.split_off(rest).into_iter().rev() {
            self.find_living(cache, index, key);
        }
        Some(rest == 0)
    }

    /// Notes a block of the store that an entry names, at segment and offset `at`, or one that is
    /// stored against a base there. Those that reclaim has already `named` again need no other
    /// entry.
    fn find_named(&mut self, cache: &mut Cache, named: &Named, key: Key, at: (u32, u32)) {
        let is_named = |place: &Place| (place.segment, place.offset) == at;
        // One that is not named yet may have been there before: the entry tells of that time.
        let Some(place) = cache.contents.get(key).filter(|_| !cache.contents.is_unnamed(key))
        else {
            return;
        };
        let base = place.kind.is_associate().then(|| cache.contents.base_of_associate(key));
        let list = match () {
            () if is_named(&place) => &mut self.job.to_name,
            () if base.is_some_and(|base| is_named(&base)) => &mut self.job.to_rebase,
            () => return,
        };
        let is_new = cache.log.note_named(key);
        if is_new && (base.is_some() || !named.has(self.job.seq, key)) {
            list.push_back(Stored { key, place });
        }
    }

    /// Notes a block that lives in the segment at position `index`: its newest version is there or,
    /// for a block stored against a base, the base, which is never newer.
    fn find_living(&mut self, cache: &Cache, index: usize, key: Key) {
        let Some((place, base)) = living(cache, index, key) else { return };
        if self.seen.insert(key, ()).is_some() {
            return;
        }
        // A block of zeros costs at least its entry, so that without room none is kept.
        let parts = [base.map_or(0, |base| base.len), place.len].map(u32::from);
        let bytes = parts.iter().sum::<u32>() + ENTRY_BYTES as u32;
        match (place.dirty, base) {
            (true, Some(_)) => self.job.to_rebase.push_back(Stored { key, place }),
            (true, None) => self.job.to_read.push_back(Stored { key, place }),
            (false, _) => {
                let (key, meta) = (key.0, place.meta);
                return self.clean.push(Candidate { key, meta, bytes, keep: false });
            }
        }
        self.dirty_bytes += u64::from(bytes);
    }

    /// Decides about the next clean blocks, and evicts those that are not kept; returns whether
    /// there are no more.
    fn decide(&mut self, cache: &mut Cache) -> bool {
        // A direct write must wait until this is durable, no matter what happens next.
        cache.log.note_evicted(self.job.seq);
        let index = cache.log.position(self.job.seq);
        let from = self.decided;
        let to = match cache.store.exists() {
            true => {
                let gives = &mut self.gives;
                from + keep_in_store(cache, &mut self.clean[from..], self.must_gain, gives)
            }
            false => {
                if from == 0 {
                    self.choose(cache);
                }
                let most = (cache.config.segment_size / SORTED_ONE_IN) as usize;
                self.clean.len().min(from + most)
            }
        };
        for block in &self.clean[from..to] {
            let key = Key(block.key);
            // It may have been written again since it was looked up.
            let Some((place, _)) = living(cache, index, key) else { continue };
            if place.dirty {
                continue;
            }
            if block.keep && place.kind.is_associate() {
                self.job.to_rebase.push_back(Stored { key, place });
            } else if block.keep {
                self.job.to_read.push_back(Stored { key, place });
            } else {
                cache.stats.evicted_blocks += 1;
                cache.contents.forget(key, &mut cache.ram);
            }
        }
        self.decided = to;
        to == self.clean.len()
    }

    /// Chooses the clean blocks that stay in the log.
    fn choose(&mut self, cache: &mut Cache) {
        let most = match self.must_gain {
            true => 0,
            false => {
                let most = Reclaim::keep_bytes(cache, self.dirty_bytes);
                (most as f64 * (1.0 - cache.wear_pressure())) as u64
            }
        };
        keep_in_log(cache, &mut self.clean, most);
    }

    /// Takes along what the store has beside the next copies, where all of it together takes fewer
    /// pages; returns whether there are no more.
    fn join(&mut self, cache: &Cache) -> bool {
        let most = (cache.config.segment_size / JOINED_ONE_IN) as usize;
        let joining = self.joining.get_or_insert_with(|| Joining::new(&self.job));
        joining.join(cache, most, &mut self.job.to_read)
    }
}

/// The place of a block, and its base if it has one, if it lives in the segment at position
/// `index`.
fn living(cache: &Cache, index: usize, key: Key) -> Option<(Place, Option<Place>)> {
    let place = cache.contents.get(key)?;
    let base = place.kind.is_associate().then(|| cache.contents.base_of_associate(key));
    (base.unwrap_or(place).segment as usize == index).then_some((place, base))
}

/// Decides which clean blocks are copied forward, at most `most` bytes: first the pinned ones, then
/// those that guarantees protect, the most frequent of each volume first, and then those that the
/// policy chooses.
fn keep_in_log(cache: &mut Cache, clean: &mut [Candidate], mut most: u64) {
    let volume_of = |block: &Candidate| Key(block.key).volume();
    let mut kept = 0;
    if cache.has_guarantee() || !cache.pins.is_empty() {
        let mut leaving = vec![0; cache.volumes.len()];
        clean.iter().for_each(|block| leaving[usize::from(volume_of(block).0)] += 1);
        let stay = cache.volume_ids().zip(leaving).map(|(id, blocks)| cache.must_stay(id, blocks));
        let mut stay: Vec<u64> = stay.collect();
        let is_pinned = |block: &Candidate| cache.pins.has(Key(block.key));
        let mut order: Vec<usize> = (0..clean.len()).collect();
        let frequent = |at: usize| Reverse(cache.policy.count(clean[at].key));
        order.sort_by_cached_key(|&at| (!is_pinned(&clean[at]), frequent(at)));
        for at in order {
            let stay = &mut stay[usize::from(volume_of(&clean[at]).0)];
            let bytes = u64::from(clean[at].bytes);
            clean[at].keep = (is_pinned(&clean[at]) || *stay > 0) && bytes <= most;
            if clean[at].keep {
                (*stay, most, kept) = (stay.saturating_sub(1), most - bytes, kept + 1);
            }
        }
        clean.sort_by_key(|block| !block.keep);
    }
    cache.policy.choose(&mut clean[kept..], most);
}

/// Decides which of the next clean blocks go to the store: neighbors that were logged together
/// share a decision, as they will share a unit. Returns the number of blocks decided about.
fn keep_in_store(
    cache: &mut Cache,
    clean: &mut [Candidate],
    must_gain: bool,
    gives: &mut u64,
) -> usize {
    let most = (cache.config.segment_size / COMPARED_ONE_IN) as usize;
    let runs = clean.chunk_by_mut(|a, b| b.key == a.key + 1);
    let (mut decided, mut leaving) = (0, 0);
    for run in runs.flat_map(|run| run.chunks_mut(UNIT_BLOCKS as usize)).take(most) {
        let keys = run[0].key..run[0].key + run.len() as u64;
        let last = cache.last_of(run.iter().map(|block| block.meta));
        // The log must have room for a pinned block's new entry, and the index for clients.
        let mut pinned = cache.pins.has_any(keys.clone()) && !cache.log.is_emergency();
        if pinned && *gives >= run.len() as u64 {
            *gives -= run.len() as u64;
            pinned = false;
        }
        let guarded = cache.guards(Key(keys.start).volume(), leaving + run.len() as u64);
        let may_stay = pinned || !must_gain && cache.is_worth_wear(keys.clone());
        let deserve = |last| guarded || cache.deserve_store(keys, last);
        let keep = may_stay && last.is_some_and(deserve);
        leaving += if keep { 0 } else { run.len() as u64 };
        run.iter_mut().for_each(|block| block.keep = keep);
        decided += run.len();
    }
    decided
}
