//! Copying forward: the blocks worth keeping in the segment being reclaimed are read, verified, and
//! put into the record being built at the front of the log.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, Completion, IoError};
use forebay_codec::crc32c;
use forebay_format::EntryKind;

use super::{Job, Reclaim, State};
use crate::api::Effects;
use crate::cache::Cache;
use crate::contents::{Place, Stored};
use crate::form::AssociateOwner;
use crate::form::{Copied, Like};
use crate::key::Key;
use crate::limits::{COPY_BYTES_MAX, REBASES_MAX, SEGMENT_READ_MAX};
use crate::log::builder::Expect;
use crate::log::read::{Near, Reader, SegmentRead};
use crate::note::Note;
use crate::store::UNIT_BLOCKS;

impl Reclaim {
    /// Reads the next blocks whose base is in the segment, to write them whole.
    pub(super) fn read_rebases(&mut self, cache: &mut Cache, fx: &mut Effects) {
        loop {
            let retry_at = self.retry_at;
            let Some(job) = self.job_mut() else { return };
            let busy = job.rebasing >= REBASES_MAX || job.bytes >= COPY_BYTES_MAX;
            if busy || retry_at > cache.now {
                return;
            }
            let Some(item) = job.to_rebase.pop_front() else { return };
            let Stored { key, place } = item;
            if cache.contents.same_version(key, &place).is_none() {
                continue;
            }
            let base = cache.contents.base_of_associate(key);
            if let Some(block) = cache.peek_applied(key, <[u8]>::to_vec) {
                self.rebase(cache, &item, block);
            } else if cache.is_associate_written(&base, &place) {
                self.going().rebasing += 1;
                cache.read_associate(AssociateOwner::Rebase, item, base, fx);
            } else {
                self.going().to_rebase.push_front(item);
                return;
            }
        }
    }

    /// Takes a block to be written whole that has been decoded, or could not be.
    pub fn put_together(
        &mut self,
        cache: &mut Cache,
        item: &Stored,
        block: Option<&[u8]>,
        error: Option<&IoError>,
        fx: &mut Effects,
    ) {
        let Some(job) = self.job_mut() else { return };
        job.rebasing -= 1;
        let now = cache.contents.same_version(item.key, &item.place);
        match (now, block, error) {
            (None, ..) => {}
            (Some(_), Some(block), _) => {
                self.failures = 0;
                self.rebase(cache, item, block.to_vec());
            }
            (Some(_), None, Some(_)) => {
                job.to_rebase.push_front(*item);
                return self.pause(cache);
            }
            (Some(now), None, None) if now.dirty => {
                self.rescue(cache, item.key, now);
            }
            (Some(_), None, None) => {
                cache.note_corrupt_clean(item.key);
                // Its base may be in the store, and named once more by a later entry.
                cache.contents.drop(item.key, &mut cache.ram);
            }
        }
        self.read_rebases(cache, fx);
        self.pump_copies(cache, fx);
        self.finish(cache);
    }

    /// Queues a block to be written whole.
    fn rebase(&mut self, cache: &mut Cache, item: &Stored, block: Vec<u8>) {
        cache.stats.rebased_blocks += 1;
        let (len, crc) = (block.len() as u16, crc32c(&block));
        let whole = Place { kind: EntryKind::Raw, len, crc, ..item.place };
        self.going().take(Copied::new(item.key, whole, block));
    }

    /// Reads the next payloads to copy, neighbors with one read.
    pub(super) fn read_copies(&mut self, cache: &mut Cache, fx: &mut Effects) {
        let retry_at = self.retry_at;
        loop {
            let Some(job) = self.job_mut() else { return };
            if !job.takes_more() || retry_at > cache.now {
                return;
            }
            // Pages of the store may be free since the block was found there.
            let is_stale = |item: &Stored| {
                cache.contents.is_in_store(&item.place)
                    && cache.contents.same_version(item.key, &item.place).is_none()
            };
            if job.to_read.pop_front_if(|item| is_stale(item)).is_some() {
                continue;
            }
            if job.is_next_bare() {
                if !job.takes_bare() {
                    return;
                }
                if let Some(Stored { key, place }) = job.to_read.pop_front() {
                    job.take(Copied::new(key, place, Vec::new()));
                }
                continue;
            }
            let next = |good: &dyn Fn(&Stored) -> bool| {
                job.to_read.pop_front_if(|item| {
                    item.place.kind.has_payload() && good(item) && !is_stale(item)
                })
            };
            let near = Near::Pages(COPY_GAP, SEGMENT_READ_MAX as u32);
            let Some(read) = SegmentRead::next(Reader::Copies, near, next) else { return };
            job.reading = true;
            cache.read_payloads(read, fx);
        }
    }

    pub(super) fn going(&mut self) -> &mut Job {
        self.job_mut().expect("it goes on")
    }

    /// Starts over after a pause: the footer could not be read.
    pub(super) fn later(&mut self, cache: &mut Cache) {
        self.enter(&mut cache.log, State::Idle);
        self.pause(cache);
    }

    /// Handles a failed read. It is retried for some seconds; then the device counts as failed,
    /// since a log that cannot be reclaimed cannot be written. Reads in flight that fail together
    /// count once.
    fn pause(&mut self, cache: &mut Cache) {
        if self.retry_at > cache.now {
            return;
        }
        self.failures += 1;
        if self.failures > READ_TRIES {
            return cache.out.note(Note::CacheFailed);
        }
        self.retry_at = cache.now + READ_PAUSE * (1 << self.failures);
    }

    /// Takes payloads that were read for copying; verifies them, so that corruption does not
    /// spread.
    pub fn copies_read(
        &mut self,
        cache: &mut Cache,
        read: &SegmentRead,
        done: &Completion,
        fx: &mut Effects,
    ) {
        let Some(job) = self.job_mut() else { return };
        job.reading = false;
        // What was to be moved along stays where it is if that cannot be read.
        let in_store = read.items.iter().any(|item| cache.contents.is_in_store(&item.place));
        if done.result.is_err() && !in_store {
            read.items.iter().rev().for_each(|item| job.to_read.push_front(*item));
            return self.pause(cache);
        }
        self.failures = 0;
        for item in &read.items {
            let Some(now) = cache.contents.same_version(item.key, &item.place) else {
                continue;
            };
            match read.payload(done, item).filter(|payload| crc32c(payload) == item.place.crc) {
                None if in_store => {}
                Some(payload) => self.going().take(Copied::new(item.key, now, payload.to_vec())),
                None if now.dirty => self.rescue(cache, item.key, now),
                None => {
                    cache.note_corrupt_clean(item.key);
                    cache.contents.forget(item.key, &mut cache.ram);
                }
            }
        }
        self.read_copies(cache, fx);
        self.pump_copies(cache, fx);
        self.finish(cache);
    }

    /// Handles a dirty block that is corrupt. If RAM has its bytes, they are written; otherwise the
    /// log continues to say that the block is lost.
    fn rescue(&mut self, cache: &mut Cache, key: Key, place: Place) {
        let copy = match cache.peek_applied(key, <[u8]>::to_vec) {
            Some(bytes) => {
                debug_assert_eq!(bytes.len(), BLOCK_SIZE);
                let (len, crc) = (BLOCK_SIZE as u16, crc32c(&bytes));
                Copied::new(key, Place { kind: EntryKind::Raw, len, crc, ..place }, bytes)
            }
            None => {
                cache.fence(key);
                Copied::new(key, Place { kind: EntryKind::Lost, ..place }, Vec::new())
            }
        };
        self.going().take(copy);
    }

    /// Moves payloads that were read into the record being built, or into the store.
    pub fn pump_copies(&mut self, cache: &mut Cache, fx: &mut Effects) {
        if cache.store.exists() && !self.gather() {
            return;
        }
        while !cache.form.background().turn_is_over() {
            if cache.store.exists() && self.first_has_payload() {
                match self.move_unit(cache, fx) {
                    true => continue,
                    false => return,
                }
            }
            let Some(job) = self.job_mut().filter(|job| job.seeking < REBASES_MAX) else { return };
            let Some(mut copy) = job.to_copy.pop_front() else { return };
            let Copied { key, place, .. } = copy;
            let Some(now) = place_of(cache, &copy) else {
                job.bytes -= copy.bytes.len();
                continue;
            };
            if matches!(copy.like, Like::Unsought) {
                let (forms, mut cx) = cache.forms();
                copy.like = forms.seek_like(&mut cx, &copy);
            }
            if let Like::OnDevice(sketch, base) = copy.like {
                self.going().seeking += 1;
                let read = cache.form.begin_seek(copy, sketch, base);
                cache.read_payloads(read, fx);
                continue;
            }
            let done = match place.kind {
                EntryKind::Lost => {
                    cache.push_bare(fx, key, 1, EntryKind::Lost, true, Expect::At(now))
                }
                _ => cache.push_copy(fx, &copy, now),
            };
            // Records in flight end by themselves; to start over costs the entries made so far.
            let is_stuck = cache.log.is_emergency() && !cache.log.is_busy();
            let Some(job) = self.job_mut() else { return };
            if !done {
                job.to_copy.push_front(copy);
                if is_stuck && !job.is_reading() {
                    // Start over, evicting and destaging instead of copying.
                    self.begin_again(&mut cache.log, cache.now + READ_PAUSE);
                }
                return;
            }
            job.bytes -= copy.bytes.len();
            cache.stats.copied_blocks += 1;
        }
    }

    /// Sorts the copies by block, so that neighbors share a unit. Returns false as long as more
    /// copies are being read, which may be neighbors of these.
    fn gather(&mut self) -> bool {
        let Some(job) = self.job_mut() else { return false };
        let more = job.reading || job.rebasing > 0;
        if more && job.bytes < COPY_BYTES_MAX {
            return false;
        }
        // The sort is stable: of two copies of a block, the first counts.
        job.to_copy.make_contiguous().sort_by_key(|copy| copy.key);
        true
    }

    fn first_has_payload(&self) -> bool {
        let first = self.job().and_then(|job| job.to_copy.front());
        first.is_some_and(|copy| copy.place.kind.has_payload() && !copy.stays)
    }

    /// Moves the first copies, which are neighbors, to the store. Returns false if they must
    /// wait.
    fn move_unit(&mut self, cache: &mut Cache, fx: &mut Effects) -> bool {
        let mut copies: Vec<(Copied, Place)> = Vec::new();
        let job = self.going();
        let (mut lowest, mut highest) = (u64::MAX, 0);
        while let Some(copy) = job.to_copy.pop_front_if(|copy| {
            let has_payload = copy.place.kind.has_payload() && !copy.stays;
            let span = highest.max(copy.key.0) - lowest.min(copy.key.0);
            has_payload && span < UNIT_BLOCKS
        }) {
            (lowest, highest) = (lowest.min(copy.key.0), highest.max(copy.key.0));
            let twice = copies.iter().any(|(other, _)| other.key == copy.key);
            match place_of(cache, &copy).filter(|_| !twice) {
                Some(now) => copies.push((copy, now)),
                None => job.bytes -= copy.bytes.len(),
            }
        }
        if copies.is_empty() {
            return true;
        }
        let size = |copies: &[(Copied, Place)]| -> usize {
            copies.iter().map(|(copy, _)| copy.bytes.len()).sum()
        };
        let bytes = size(&copies);
        let left = cache.send_to_store(copies, fx).err().unwrap_or_default();
        self.going().bytes -= bytes - size(&left);
        if left.is_empty() {
            return true;
        }
        let is_full = cache.store.is_full();
        // They count on the store, and would fill the last segment before it frees another one.
        let stays = is_full && (self.going().stays || !cache.log.is_emergency());
        let waits = is_full && !stays && left.iter().any(|(_, now)| now.dirty);
        if waits && !self.going().is_reading() {
            // Start over: they are destaged.
            self.begin_again(&mut cache.log, cache.now + READ_PAUSE);
            return false;
        }
        for (mut copy, now) in left.into_iter().rev() {
            if is_full && !waits && !now.dirty {
                cache.stats.evicted_blocks += 1;
                self.going().bytes -= copy.bytes.len();
                cache.contents.drop(copy.key, &mut cache.ram);
                continue;
            }
            copy.stays = stays;
            self.going().to_copy.push_front(copy);
        }
        is_full && !waits
    }

    /// Takes back a copy after the read of its similar block has ended.
    pub fn similar_sought(&mut self, cache: &mut Cache, copy: Copied, fx: &mut Effects) {
        let Some(job) = self.job_mut() else { return };
        job.seeking -= 1;
        job.to_copy.push_front(copy);
        self.pump_copies(cache, fx);
        self.finish(cache);
    }
}

/// The current place of the block of a copy, unless it is another version now. A place in the store
/// may have been used for the same block again.
fn place_of(cache: &Cache, copy: &Copied) -> Option<Place> {
    let read = &copy.place;
    let in_store = cache.contents.is_in_store(read);
    cache.contents.get(copy.key).filter(|now| {
        (now.segment, now.offset) == (read.segment, read.offset)
            && (!in_store || (now.kind, now.crc) == (read.kind, read.crc))
    })
}

/// Number of retries of a failed read of the oldest segment, and half the first pause; pauses
/// double.
pub(super) const READ_TRIES: u32 = 8;
pub(super) const READ_PAUSE: Duration = Duration::from_millis(10);
/// Unneeded bytes that are read in order to avoid a second read.
const COPY_GAP: u32 = 16 << 10;
