//! Writes that are held back near the dirty limit of their volume.

use forebay_block::{BlockRange, ErrorKind, VolumeId};

use crate::api::{Effects, Health};
use crate::cache::Cache;
use crate::key::Key;
use crate::request::Requests;
use crate::slab::Id;

impl Requests {
    /// Delays a write near the dirty limit; returns true if the write has to wait.
    pub fn hold_back(cache: &mut Cache, write: Id, volume: VolumeId, blocks: BlockRange) -> bool {
        let (level, limit) = cache.paced_level(volume);
        let waits = cache.volume(volume).flow.held_writes() > 0;
        if level < limit / 2 && !waits {
            return false;
        }
        // A rewrite of a dirty block adds nothing to the level.
        let keys = blocks.iter().map(|block| Key::new(volume, block));
        let blocks = keys.filter(|key| !cache.contents.dirty().contains(*key)).count() as u64;
        if blocks == 0 {
            return false;
        }
        let (now, target) = (cache.now, cache.target_of(limit));
        let flow = &mut cache.volume_mut(volume).flow;
        let delay = flow.hold(now, write, (level, target, limit), blocks);
        cache.stats_of(volume).throttled_nanos += delay.map_or(0, |delay| delay.as_nanos() as u64);
        delay.is_some()
    }

    /// Releases writes whose delay is over. At the limit itself they wait for room. They fail if
    /// the primary has been away for so long that there may never be room.
    pub fn release_delayed(&mut self, cache: &mut Cache, fx: &mut Effects) {
        for volume in cache.volume_ids() {
            while let Some((at, write)) =
                cache.known_volume(volume).and_then(|volume| volume.flow.first_held())
            {
                let full = cache.health() == Health::Good
                    && cache.contents.dirty_level_of(volume) >= cache.limit_of(volume);
                if at > cache.now {
                    break;
                }
                let hopeless = full
                    && cache.volume(volume).is_stuck(cache.now)
                    && cache.now.since(at) >= cache.config.patience;
                if full && !hopeless {
                    break;
                }
                cache.volume_mut(volume).flow.pop_held();
                if hopeless {
                    cache.stats_of(volume).given_up_writes += 1;
                    self.end_write(cache, write, Err(ErrorKind::DeviceGone.into()), fx);
                } else {
                    self.lock_blocks(cache, write, fx);
                }
            }
        }
    }
}
