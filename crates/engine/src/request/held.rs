//! Writes that are held back near the dirty limit of their volume.

use forebay_block::{BlockRange, ErrorKind, Instant, VolumeId};

use crate::Engine;
use crate::api::{Effects, Health};
use crate::key::Key;
use crate::slab::Id;

impl Engine {
    /// Delays a write when the dirty limit is near; true when it waits.
    pub(crate) fn hold_back(&mut self, write: Id, volume: VolumeId, blocks: BlockRange) -> bool {
        let (level, limit) = self.cache.paced_level(volume);
        let waits = self.cache.volume(volume).flow.held_writes() > 0;
        if level < limit / 2 && !waits {
            return false;
        }
        // A rewrite of a dirty block adds nothing to the level.
        let keys = blocks.iter().map(|block| Key::new(volume, block));
        let blocks = keys.filter(|key| !self.cache.contents.dirty().contains(*key)).count() as u64;
        if blocks == 0 {
            return false;
        }
        let now = self.cache.now;
        let flow = &mut self.cache.volume_mut(volume).flow;
        let delay = flow.hold(now, write, (level, limit), blocks);
        self.cache.stats.throttled_nanos += delay.map_or(0, |delay| delay.as_nanos() as u64);
        delay.is_some()
    }

    /// Lets writes go on whose delay is over. At the limit itself they wait for room, and get an
    /// error when the primary has been away for so long that there may never be any.
    pub(crate) fn release_delayed(&mut self, fx: &mut Effects) {
        for volume in self.cache.volume_ids() {
            while let Some((at, write)) =
                self.cache.known_volume(volume).and_then(|volume| volume.flow.first_held())
            {
                let full = self.cache.health() == Health::Good
                    && self.cache.contents.dirty_level_of(volume) >= self.cache.limit_of(volume);
                if at > self.cache.now {
                    break;
                }
                let hopeless = full
                    && self.cache.volume(volume).is_stuck(self.cache.now)
                    && self.cache.now.since(at) >= self.cache.config.patience;
                if full && !hopeless {
                    break;
                }
                self.cache.volume_mut(volume).flow.pop_held();
                if hopeless {
                    self.cache.stats.given_up_writes += 1;
                    self.end_write(write, Err(ErrorKind::DeviceGone.into()), fx);
                } else {
                    self.lock_blocks(write, fx);
                }
            }
        }
    }

    /// Takes one of the writes that are held back, whatever they wait for.
    pub(crate) fn pop_delayed(&mut self) -> Option<Id> {
        let mut volumes = self.cache.volumes.iter_mut().flatten();
        volumes.find_map(|volume| volume.flow.pop_held())
    }

    /// When the next write may go on that is held back. Those of a primary that takes nothing are
    /// looked at with the blocks that wait for it.
    pub(crate) fn next_delayed(&self) -> Option<Instant> {
        let moving = self.cache.volumes.iter().flatten().filter(|v| !v.is_stuck(self.cache.now));
        let fronts = moving.filter_map(|v| v.flow.first_held());
        fronts.map(|(at, _)| at).min()
    }
}
