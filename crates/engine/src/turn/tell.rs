//! What an engine tells of itself.

use forebay_block::{BlockRange, Instant};

use crate::Engine;
use crate::api::primary::VolumeState;
use crate::api::stats::Stats;
use crate::recovery::salvage::{Hole, LostRange};

impl Engine {
    /// Verifies what holds between calls. It takes time in proportion to the cache: for tests and
    /// the simulator.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.cache.contents.check()
    }

    /// Dirty blocks, those that cannot be read back any more included.
    #[must_use]
    pub fn dirty_blocks(&self) -> u64 {
        self.cache.contents.dirty().blocks()
    }

    /// How each volume stands.
    #[must_use]
    pub fn volumes(&self) -> Vec<VolumeState> {
        let state = |volume: &crate::volume::Volume| {
            let id = volume.config.id;
            let (lost_blocks, lost) = self.cache.lost_of(id);
            VolumeState {
                id,
                lookups: volume.lookups,
                primary: volume.primary,
                dirty_blocks: self.cache.contents.dirty().blocks_of(id),
                lost_blocks,
                lost,
                dirty_limit_blocks: self.cache.limit_of(id),
                changed: volume.changed,
                held_writes: volume.flow.held_writes(),
                slow_ios: volume.flow.slow_ios,
                oldest_io: volume.flow.oldest_io,
            }
        };
        self.cache.volumes.iter().flatten().map(state).collect()
    }

    /// Counters and levels.
    #[must_use]
    pub fn stats(&self, now: Instant) -> Stats {
        let requests_in_flight = self.requests.unanswered() as u64;
        Stats { requests_in_flight, ..self.cache.stats(now) }
    }

    /// What is known to be lost, in order: reads of it are errors until it is written again. At
    /// most `most` ranges.
    #[must_use]
    pub fn lost_ranges(&self, most: usize) -> Vec<LostRange> {
        let mut ranges: Vec<LostRange> = Vec::new();
        for key in self.cache.contents.fenced().iter() {
            let volume = key.volume();
            let range = BlockRange { first: key.block(), count: 1 };
            let range = self.cache.bytes_on_volume(volume, range);
            let full = ranges.len() == most;
            match ranges.last_mut() {
                Some(last) if last.volume == volume && last.range.end() == range.offset => {
                    last.range.len += range.len;
                }
                _ if full => break,
                _ => ranges.push(LostRange { volume, range }),
            }
        }
        ranges
    }

    /// Records that were found to be gone at the start: any block may have been in them.
    #[must_use]
    pub fn lost_records(&self) -> &[Hole] {
        self.recovery.lost_records()
    }
}
