//! After a crash the log normally continues in a new segment, and the one that was being written
//! gets its footer although it is not full. If few segments are free, that would use them up, crash
//! by crash, while nothing can be reclaimed because blocks of a primary that is away stay dirty. In
//! this case the log continues in its last segment, after the last accepted record.
//!
//! The remains of a torn tail after that record are overwritten with zeros, durably, before the log
//! continues, so that none of them can be taken for a later record. A segment may therefore hold
//! records of several starts, in order.

use std::ops::Range;

use forebay_format::{ENTRY_CELLS, EntryTable, PAGE, cells_of, footer_bytes};

use crate::api::Trust;
use crate::cache::Cache;
use crate::limits::RECLAIM_RESERVE;
use crate::recovery::{Recovery, Start};

impl Start {
    /// The segment in which the log continues: its last one, if segments are few, all records in it
    /// are good, and it has room for another record.
    pub(super) fn find_resumed(&self, cache: &Cache) -> Option<usize> {
        let survey = &self.log.as_ref()?.survey;
        let (_, &i) = survey.log.last_key_value()?;
        let found = &survey.found[i];
        let scanned = found.scanned.as_ref().filter(|scanned| scanned.is_whole)?;
        let footer = footer_bytes(
            cells_of(found.entries.as_ref()?, cache.config.unit_entries) + ENTRY_CELLS,
        );
        let has_room = scanned.used as usize + PAGE + footer <= cache.config.segment_size as usize;
        let is_open = !found.sealed && has_room && cache.config.trust == Trust::Full;
        let few = cache.log.free()
            <= RECLAIM_RESERVE + cache.reserve_for(cache.contents.dirty().blocks());
        (is_open && few).then_some(i)
    }

    /// The range of a segment that is erased, in bytes from its start.
    pub(super) fn erased(&self, cache: &Cache, i: usize) -> Range<u32> {
        let r = self.log();
        let scanned = r.survey.found[i].scanned.as_ref().filter(|_| r.resumed == Some(i));
        scanned.map_or(0..PAGE as u32, |scanned| scanned.used..cache.config.segment_size)
    }

    /// Reopens the chosen segment.
    pub(super) fn resume(cache: &mut Cache, r: &mut Recovery) {
        let Some(index) = r.resumed else { return };
        let found = &mut r.survey.found[index];
        let entries = found.entries.take().expect("kept for its footer");
        let entries = EntryTable::of(cache.config.unit_entries, &entries);
        let first_prev_crc = found.first().expect("an accepted segment has records").crc;
        cache.log.resume(index, entries, first_prev_crc, cache.config.segment_size);
    }
}
