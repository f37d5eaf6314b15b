//! The list of all cached blocks, for the next cache.

use crate::api::listing::{ListedBlock, Listing};
use crate::cache::Cache;
use crate::contents::block_of;
use crate::key::Key;
use crate::limits::step;

/// Buckets of the index, or places of the RAM tier, in a part of the list: a few hundred
/// microseconds of work.
const PART: u64 = step(256) as u64;

impl Cache {
    /// The part of the list that begins at `from`: first the index, then the RAM tier.
    pub fn list(&self, from: u64) -> Listing {
        let index = self.contents.index();
        let buckets = index.buckets();
        let end = from.saturating_add(PART);
        let blocks = if from < buckets {
            index.slots(from..end.min(buckets)).map(|(key, _)| self.listed(key)).collect()
        } else {
            let in_ram = |place| self.ram.recent().at(u32::try_from(place).ok()?);
            let places = from - buckets..end - buckets;
            places.filter_map(in_ram).map(|key| self.listed(Key(key))).collect()
        };
        let next = if from < buckets { end.min(buckets) } else { end };
        Listing { blocks, next: (next < buckets + self.ram.frames() as u64).then_some(next) }
    }

    fn listed(&self, key: Key) -> ListedBlock {
        let key = block_of(key);
        let requests = self.policy.count(key.0).unwrap_or_default();
        ListedBlock { volume: key.volume(), block: key.block(), requests }
    }
}
