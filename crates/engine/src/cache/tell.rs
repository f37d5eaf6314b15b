//! Reporting: events, counters and levels.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, BlockRange, ByteRange, Instant, VolumeId};
use forebay_format::EntryKind;

use crate::api::Health;
use crate::api::event::{Event, Recovered};
use crate::api::primary::{LOST_RANGES_MAX, Lookup};
use crate::api::stats::{DIRTY_AGES, STATISTICS, Stats};
use crate::cache::Cache;
use crate::key::Key;
use crate::volume::Volume;

/// The classes of ages of dirty blocks.
const AGES: usize = DIRTY_AGES.len() + 1;

impl Cache {
    /// The statistics of a volume, to count something in.
    pub(crate) fn stats_of(&mut self, volume: VolumeId) -> &mut Stats {
        &mut self.volume_mut(volume).stats
    }

    /// Queues an event; it is handed out at the end of the turn.
    pub(crate) fn tell(&mut self, event: Event) {
        self.out.tell(event);
    }

    /// Changes the health of the cache device and reports the change.
    pub(crate) fn set_health(&mut self, to: Health) {
        let from = std::mem::replace(&mut self.standing.health, to);
        if from != to {
            self.tell(Event::Health { from, to });
        }
    }

    /// Reports that a clean block was found corrupt.
    pub(crate) fn note_corrupt_clean(&mut self, key: Key) {
        self.stats_of(key.volume()).corrupt_clean += 1;
        let blocks = BlockRange { first: key.block(), count: 1 };
        self.tell(Event::CleanCorrupt { volume: key.volume(), blocks });
    }

    /// Fences a dirty block that cannot be read back: reads of it fail until it is overwritten.
    pub(crate) fn fence(&mut self, key: Key) {
        if self.contents.fence(key) {
            self.stats_of(key.volume()).corrupt_dirty += 1;
            let blocks = BlockRange { first: key.block(), count: 1 };
            self.tell(Event::Fenced { volume: key.volume(), blocks });
        }
    }

    /// Reports the results of recovery, and the blocks that are lost.
    pub(crate) fn tell_recovered(&mut self, found: Recovered) {
        let recovered = Recovered {
            blocks: self.contents.index().len(),
            is_loading: self.contents.is_loading(),
            dirty_blocks: self.contents.dirty().blocks(),
            lost_blocks: self.contents.fenced().len() as u64,
            ..found
        };
        self.tell(Event::Recovered(recovered));
        for key in self.contents.fenced().iter() {
            let blocks = BlockRange { first: key.block(), count: 1 };
            self.out.tell(Event::Fenced { volume: key.volume(), blocks });
        }
    }

    /// Counts the result of a read's cache lookup.
    pub(crate) fn note_lookup(&mut self, volume: VolumeId, found: Lookup) {
        let stats = self.stats_of(volume);
        stats.lookups += 1;
        let count = match found {
            Lookup::Hit => &mut stats.hits,
            Lookup::Partial => &mut stats.partial_hits,
            Lookup::Miss => &mut stats.misses,
            Lookup::Bypass => &mut stats.bypasses,
        };
        *count += 1;
    }

    /// The number of a volume's blocks that cannot be read back, and their first ranges.
    pub(crate) fn lost_of(&self, volume: VolumeId) -> (u64, Vec<ByteRange>) {
        let mut ranges: Vec<ByteRange> = Vec::new();
        let mut count = 0;
        for key in self.contents.fenced().range(Key::range(volume)) {
            count += 1;
            let block = BlockRange { first: key.block(), count: 1 }.bytes();
            let last = ranges.last_mut().filter(|last| last.end() == block.offset);
            if let Some(last) = last {
                last.len += BLOCK_SIZE as u64;
            } else if ranges.len() < LOST_RANGES_MAX {
                ranges.push(block);
            }
        }
        (count, ranges)
    }

    /// The counters and levels of a volume: the rows that are kept by volume.
    pub(crate) fn stats_by(&self, volume: &Volume, now: Instant) -> Stats {
        let id = volume.config.id;
        // The volume was as its primary is until the first block became dirty since the last cut.
        let changed_since = self.contents.dirty().oldest_of(id).filter(|_| self.is_ordered(id));
        let primary_age = changed_since
            .map_or(0, |at| now.since(at.max(volume.order.primary_since)).as_nanos() as u64);
        Stats {
            dirty_by_age: self.dirty_by_age(id, now),
            cached_blocks: self.contents.held_by(id),
            cut_blocks: volume.order.cut_blocks,
            primary_age_nanos: primary_age,
            ..volume.stats.clone()
        }
    }

    /// The dirty blocks of a volume by age, as in the row `dirty_by_age`.
    fn dirty_by_age(&self, volume: VolumeId, now: Instant) -> [u64; AGES] {
        let bounds = DIRTY_AGES.map(Duration::from_secs);
        let (counts, older) = self.contents.dirty().by_age(volume, now, bounds);
        let mut all = [older; AGES];
        all[..counts.len()].copy_from_slice(&counts);
        all
    }

    /// Counters and levels.
    #[must_use]
    pub fn stats(&self, now: Instant) -> Stats {
        let oldest = self.contents.dirty().oldest();
        let stored = |kind| self.contents.stored(kind);
        let mut stats = Stats {
            dirty_blocks: self.contents.dirty().blocks(),
            dirty_limit_blocks: self.dirty_limit_in_force(),
            fenced_blocks: self.contents.fenced().len() as u64,
            associate_blocks: self.contents.bases(),
            raw_blocks: stored(EntryKind::Raw),
            lz4_blocks: stored(EntryKind::Lz4),
            zstd_blocks: stored(EntryKind::Zstd),
            similar_blocks: stored(EntryKind::Similar),
            zero_blocks: stored(EntryKind::Zero),
            payload_bytes: self.contents.payload_bytes(),
            store_used_bytes: self.store.used_pages() * BLOCK_SIZE as u64,
            log_used_bytes: (self.log.len() - self.log.free())
                * u64::from(self.config.segment_size),
            index_bytes: self.contents.index().bytes(),
            index_capacity: self.contents.index().capacity(),
            segments: self.log.len(),
            segments_free: self.log.free(),
            oldest_dirty_nanos: oldest.map_or(0, |at| now.since(at).as_nanos() as u64),
            slow_cache_ios: self.out.slow_cache_ios(),
            wear_pressure_percent: (100.0 * self.wear_pressure()).floor() as u64,
            ..self.counters(now)
        };
        self.ram.report(&mut stats);
        stats
    }

    /// The counters of the shard: its own, and those of its volumes.
    pub(crate) fn counters(&self, now: Instant) -> Stats {
        let mut by_volume = STATISTICS.iter().filter(|row| row.by_volume);
        let uncounted = by_volume.all(|row| row.of(&self.stats).iter().all(|count| *count == 0));
        debug_assert!(uncounted, "what is kept by volume is counted there only");
        let volumes = self.volumes.iter().flatten();
        volumes.fold(self.stats.clone(), |mut all, volume| {
            all.merge(&self.stats_by(volume, now));
            all
        })
    }
}
