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
        let (level, limit) = cache.level_and_limit(volume);
        let is_full = cache.health() == Health::Good && level >= limit;
        let (level, limit) = cache.paced(volume, (level, limit));
        let waits = cache.volume(volume).flow.held_writes() > 0;
        if level < limit / 2 && !waits && !is_full {
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
        flow.hold(now, write, (level, target, limit), blocks, is_full)
    }

    /// Releases writes whose delay is over, or for which there is room by now. At the limit itself
    /// they wait for room. They fail if the primary has been away for so long that there may never
    /// be room.
    pub fn release_delayed(&mut self, cache: &mut Cache, fx: &mut Effects) {
        for volume in cache.volume_ids() {
            let Some((level, free)) = cache.free_level(volume) else { continue };
            // What is released here may not be dirty yet.
            let mut released = 0;
            while let Some(held) = cache.volume(volume).flow.first_held() {
                if held.at > cache.now && level + released > free {
                    break;
                }
                let full =
                    cache.health() == Health::Good && cache.is_full_of_dirty(volume, released);
                let hopeless = full
                    && cache.volume(volume).is_stuck(cache.now)
                    && cache.now.since(held.at) >= cache.config.patience;
                if full && !hopeless {
                    break;
                }
                released += cache.dirty_level_by(held.blocks);
                let now = cache.now;
                let write = cache.volume_mut(volume).take_held(now).expect("it is the first");
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
