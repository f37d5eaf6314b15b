//! After a crash the log goes on in a new segment, and the one that was being written gets its
//! footer although it is not full. Where few segments are free that would use them up, crash by
//! crash, while nothing can be reclaimed: blocks of a primary that is away stay dirty. There the
//! log goes on in its last segment, behind the last record that was accepted.
//!
//! What a torn tail left behind that record is overwritten with zeros, durably, before the log goes
//! on: nothing of it can be taken for a later record. So a segment may hold records of several
//! starts, in their order.

use std::ops::Range;

use forebay_format::{PAGE, footer_bytes};

use crate::api::Trust;
use crate::cache::Cache;
use crate::limits::RECLAIM_RESERVE;
use crate::recovery::{Recovery, Start};

impl Start {
    /// The segment that the log goes on in: its last one, if segments are few, and all records of
    /// it are good, and another has room.
    pub(super) fn find_resumed(&self, cache: &Cache) -> Option<usize> {
        let survey = &self.log.as_ref()?.survey;
        let (_, &i) = survey.log.last_key_value()?;
        let found = &survey.found[i];
        let scanned = found.scanned.as_ref().filter(|scanned| scanned.is_whole)?;
        let footer = footer_bytes(found.entries.as_ref()?.len() + 1);
        let has_room = scanned.used as usize + PAGE + footer <= cache.config.segment_size as usize;
        let is_open = !found.sealed && has_room && cache.config.trust == Trust::Full;
        let few = cache.log.free()
            <= RECLAIM_RESERVE + cache.reserve_for(cache.contents.dirty().blocks());
        (is_open && few).then_some(i)
    }

    /// What is erased of a segment, in bytes from its beginning.
    pub(super) fn erased(&self, cache: &Cache, i: usize) -> Range<u32> {
        let r = self.log();
        let scanned = r.survey.found[i].scanned.as_ref().filter(|_| r.resumed == Some(i));
        scanned.map_or(0..PAGE as u32, |scanned| scanned.used..cache.config.segment_size)
    }

    /// Goes on in the segment that was chosen.
    pub(super) fn resume(cache: &mut Cache, r: &mut Recovery) {
        let Some(index) = r.resumed else { return };
        let found = &mut r.survey.found[index];
        let entries = found.entries.take().expect("kept for its footer");
        let first_prev_crc = found.first().expect("an accepted segment has records").crc;
        cache.log.resume(index, entries, first_prev_crc, cache.config.segment_size);
    }
}
