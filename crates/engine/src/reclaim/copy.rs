//! What is worth keeping of the segment being reclaimed is read, checked, and put into the record
//! being built at the front of the log.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, Completion, IoError};
use forebay_codec::crc32c;
use forebay_format::EntryKind;

use super::Reclaim;
use crate::Engine;
use crate::api::Effects;
use crate::contents::Place;
use crate::form::delta_read::AssociateOwner;
use crate::form::similar::Like;
use crate::key::Key;
use crate::limits::{COPY_BYTES_MAX, REBASES_MAX, SEGMENT_READ_MAX};
use crate::log::builder::Expect;
use crate::log::read::{Near, Reader, SegmentRead};
use crate::op::SsdItem;

/// A block to be copied forward.
#[derive(Debug)]
pub struct Copied {
    pub key: Key,
    /// Where it was, and how `bytes` are to be read.
    pub place: Place,
    pub bytes: Vec<u8>,
    /// What is known of blocks like it.
    pub like: Like,
}

impl Copied {
    fn new(key: Key, place: Place, bytes: Vec<u8>) -> Self {
        Self { key, place, bytes, like: Like::Unsought }
    }
}

impl Engine {
    /// Reads the next blocks whose base is in the segment, to be written whole.
    pub(super) fn read_rebases(&mut self, fx: &mut Effects) {
        loop {
            let Some(reclaim) = self.reclaim.as_mut() else { return };
            let busy = reclaim.rebasing >= REBASES_MAX || reclaim.bytes >= COPY_BYTES_MAX;
            if busy || self.reclaim_retry_at > self.now {
                return;
            }
            let Some(item) = reclaim.to_rebase.pop_front() else { return };
            let SsdItem { key, place } = item;
            if self.contents.same_version(key, &place).is_none() {
                continue;
            }
            let base = self.contents.base_of_associate(key);
            if let Some(block) = self.peek_applied(key, <[u8]>::to_vec) {
                self.rebase(&item, block);
            } else if self.is_associate_written(&base, &place) {
                self.reclaim.as_mut().expect("it goes on").rebasing += 1;
                self.read_associate(AssociateOwner::Rebase, item, base, fx);
            } else {
                self.reclaim.as_mut().expect("it goes on").to_rebase.push_front(item);
                return;
            }
        }
    }

    /// A block to be written whole has been put together, or could not be.
    pub(crate) fn rebase_read(
        &mut self,
        item: &SsdItem,
        block: Option<&[u8]>,
        error: Option<&IoError>,
        fx: &mut Effects,
    ) {
        let Some(reclaim) = self.reclaim.as_mut() else { return };
        reclaim.rebasing -= 1;
        let now = self.contents.same_version(item.key, &item.place);
        match (now, block, error) {
            (None, ..) => {}
            (Some(_), Some(block), _) => {
                self.reclaim_failures = 0;
                self.rebase(item, block.to_vec());
            }
            (Some(_), None, Some(_)) => {
                reclaim.to_rebase.push_front(*item);
                return self.pause_reclaim(fx);
            }
            (Some(now), None, None) if now.dirty => {
                let mut reclaim = self.reclaim.take().expect("it goes on");
                self.rescue(&mut reclaim, item.key, now);
                self.reclaim = Some(reclaim);
            }
            (Some(_), None, None) => {
                self.note_corrupt_clean(item.key);
                self.contents.forget(item.key, &mut self.ram);
            }
        }
        self.read_rebases(fx);
        self.pump_copies(fx);
        self.finish_reclaim();
    }

    /// Hands a block over to be written whole.
    fn rebase(&mut self, item: &SsdItem, block: Vec<u8>) {
        self.stats.rebased_blocks += 1;
        let (len, crc) = (block.len() as u16, crc32c(&block));
        let whole = Place { kind: EntryKind::Raw, len, crc, ..item.place };
        let reclaim = self.reclaim.as_mut().expect("it goes on");
        reclaim.bytes += block.len();
        reclaim.to_copy.push_back(Copied::new(item.key, whole, block));
    }

    /// Reads the next payloads to copy, neighbours in one go.
    pub(super) fn read_copies(&mut self, fx: &mut Effects) {
        let Some(mut reclaim) = self.reclaim.take() else { return };
        while !reclaim.reading
            && reclaim.bytes < COPY_BYTES_MAX
            && self.reclaim_retry_at <= self.now
        {
            let without = |item: &mut SsdItem| !item.place.kind.has_payload();
            if let Some(SsdItem { key, place }) = reclaim.to_read.pop_front_if(without) {
                reclaim.to_copy.push_back(Copied::new(key, place, Vec::new()));
                continue;
            }
            let to_read = &mut reclaim.to_read;
            let next = |good: &dyn Fn(&SsdItem) -> bool| {
                to_read.pop_front_if(|item| item.place.kind.has_payload() && good(item))
            };
            let near = Near::Pages(COPY_GAP, SEGMENT_READ_MAX as u32);
            let Some(read) = SegmentRead::next(Reader::Copies, near, next) else { break };
            reclaim.reading = true;
            self.read_payloads(read, fx);
        }
        self.reclaim = Some(reclaim);
    }

    /// The footer could not be read: begin again after a pause.
    pub(super) fn reclaim_later(&mut self, fx: &mut Effects) {
        self.reclaim = None;
        self.pause_reclaim(fx);
    }

    /// A read failed. It is tried again for some seconds; then the device counts as failed, since
    /// a log that cannot be reclaimed cannot be written.
    fn pause_reclaim(&mut self, fx: &mut Effects) {
        self.reclaim_failures += 1;
        if self.reclaim_failures > READ_TRIES {
            return self.fail_cache(fx);
        }
        self.reclaim_retry_at = self.now + READ_PAUSE * (1 << self.reclaim_failures);
    }

    /// Payloads to copy have been read: checked here, so that a bad one does not spread.
    pub(crate) fn reclaim_copy_read(
        &mut self,
        read: &SegmentRead,
        done: &Completion,
        fx: &mut Effects,
    ) {
        let Some(mut reclaim) = self.reclaim.take() else { return };
        reclaim.reading = false;
        if done.result.is_err() {
            read.items.iter().rev().for_each(|item| reclaim.to_read.push_front(*item));
            self.reclaim = Some(reclaim);
            return self.pause_reclaim(fx);
        }
        self.reclaim_failures = 0;
        for item in &read.items {
            let current = self.contents.same_version(item.key, &item.place);
            let Some(now) = current else { continue };
            match read.payload(done, item).filter(|payload| crc32c(payload) == item.place.crc) {
                Some(payload) => {
                    reclaim.bytes += payload.len();
                    reclaim.to_copy.push_back(Copied::new(item.key, now, payload.to_vec()));
                }
                None if now.dirty => self.rescue(&mut reclaim, item.key, now),
                None => {
                    self.note_corrupt_clean(item.key);
                    self.contents.forget(item.key, &mut self.ram);
                }
            }
        }
        self.reclaim = Some(reclaim);
        self.read_copies(fx);
        self.pump_copies(fx);
        self.finish_reclaim();
    }

    /// A dirty block's bytes are bad. If RAM has them, they are written from there; else the log
    /// goes on to say that they are lost.
    fn rescue(&mut self, reclaim: &mut Reclaim, key: Key, place: Place) {
        match self.peek_applied(key, <[u8]>::to_vec) {
            Some(bytes) => {
                reclaim.bytes += bytes.len();
                debug_assert_eq!(bytes.len(), BLOCK_SIZE);
                let (len, crc) = (BLOCK_SIZE as u16, crc32c(&bytes));
                let raw = Place { kind: EntryKind::Raw, len, crc, ..place };
                reclaim.to_copy.push_back(Copied::new(key, raw, bytes));
            }
            None => {
                self.fence(key);
                let lost = Place { kind: EntryKind::Lost, ..place };
                reclaim.to_copy.push_back(Copied::new(key, lost, Vec::new()));
            }
        }
    }

    /// Moves payloads that were read into the record being built.
    pub(crate) fn pump_copies(&mut self, fx: &mut Effects) {
        while !self.background.turn_is_over()
            && let Some(reclaim) = self.reclaim.as_mut().filter(|r| r.seeking < REBASES_MAX)
            && let Some(mut copy) = reclaim.to_copy.pop_front()
        {
            let Copied { key, place, .. } = copy;
            let now = self.contents.get(key);
            let same = |now: &Place| now.segment == place.segment && now.offset == place.offset;
            let Some(now) = now.filter(same) else {
                reclaim.bytes -= copy.bytes.len();
                continue;
            };
            if matches!(copy.like, Like::Unsought) {
                copy.like = self.seek_like(&copy);
            }
            if let Like::OnDevice(sketch, base) = copy.like {
                self.reclaim.as_mut().expect("it goes on").seeking += 1;
                self.read_similar(copy, sketch, base, fx);
                continue;
            }
            let done = match place.kind {
                EntryKind::Lost => {
                    self.push_bare(fx, key, 1, EntryKind::Lost, true, Expect::At(now))
                }
                _ => self.push_copy(fx, &copy, now),
            };
            let is_emergency = self.is_emergency();
            let Some(reclaim) = self.reclaim.as_mut() else { return };
            if !done {
                reclaim.to_copy.push_front(copy);
                if is_emergency && !reclaim.is_reading() {
                    // Begin again, evicting and destaging instead of copying.
                    self.reclaim_retry_at = self.now + READ_PAUSE;
                    self.reclaim = None;
                }
                return;
            }
            reclaim.bytes -= copy.bytes.len();
            self.stats.copied_blocks += 1;
        }
    }

    /// The content of a block that is like one to be copied has been read, or could not be.
    pub(crate) fn similar_sought(&mut self, copy: Copied, fx: &mut Effects) {
        let Some(reclaim) = self.reclaim.as_mut() else { return };
        reclaim.seeking -= 1;
        reclaim.to_copy.push_front(copy);
        self.pump_copies(fx);
        self.finish_reclaim();
    }
}

/// How often a failed read of the oldest segment is tried again, and the first pause; they double.
const READ_TRIES: u32 = 8;
pub(super) const READ_PAUSE: Duration = Duration::from_millis(10);
/// Unneeded bytes that are read rather than make two reads of it.
const COPY_GAP: u32 = 16 << 10;
