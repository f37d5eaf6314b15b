//! How the volumes of a cache share its room, with clean and dirty blocks together.
//!
//! A volume may have a guarantee: down to it, no other volume displaces its blocks. It may have a
//! limit: from there on, its new blocks displace its own. Neither reserves anything: room that no
//! volume uses goes to the first that wants it.

use crate::part::{Part, Whole};

/// Most of a cache that may be guaranteed to all volumes together, in percent. The rest is for
/// dirty blocks, which never leave to make room, and for blocks that nothing needs any more.
pub const GUARANTEED_MAX_PERCENT: u8 = 90;

/// The configuration of one volume: parts of the cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct CacheShare {
    /// Guaranteed; nothing when absent.
    pub at_least: Option<Part>,
    /// The limit; none when absent.
    pub at_most: Option<Part>,
}

/// Guarantees and limits of all volumes, in blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheShares {
    /// Guarantee and limit of each volume, in volume order.
    shares: Vec<(u64, u64)>,
    has_guarantee: bool,
    has_limit: bool,
}

impl CacheShares {
    /// Divides a cache among volumes; an unused volume ID is `None`.
    ///
    /// Guarantees that exceed [`GUARANTEED_MAX_PERCENT`] together are scaled down to it. A limit is
    /// at least the guarantee, and at least one block.
    #[must_use]
    pub fn new(cache: Whole, volumes: &[Option<CacheShare>]) -> Self {
        let part = |part: Part| cache.part(part);
        let least = |share: &CacheShare| share.at_least.map_or(0, part);
        let sum: u64 = volumes.iter().flatten().map(least).sum();
        let most = part(Part::Percent(GUARANTEED_MAX_PERCENT));
        let shares = volumes.iter().map(|share| {
            let share = share.unwrap_or_default();
            let guarantee = match sum > most {
                true => (u128::from(least(&share)) * u128::from(most) / u128::from(sum)) as u64,
                false => least(&share),
            };
            let limit = share.at_most.map_or(u64::MAX, part);
            (guarantee, limit.max(guarantee).max(1))
        });
        let shares: Vec<_> = shares.collect();
        let has_guarantee = shares.iter().any(|&(guarantee, _)| guarantee > 0);
        let has_limit = shares.iter().any(|&(_, limit)| limit < u64::MAX);
        Self { shares, has_guarantee, has_limit }
    }

    /// Whether any volume has a guarantee.
    #[must_use]
    pub fn has_guarantee(&self) -> bool {
        self.has_guarantee
    }

    /// Whether any volume has a limit.
    #[must_use]
    pub fn has_limit(&self) -> bool {
        self.has_limit
    }

    /// The guarantee of `volume`, in blocks; 0 if it has none.
    ///
    /// # Panics
    /// If there is no such volume.
    #[must_use]
    pub fn guarantee(&self, volume: usize) -> u64 {
        self.shares[volume].0
    }

    /// The limit of `volume`, in blocks; `None` if it has none.
    ///
    /// # Panics
    /// If there is no such volume.
    #[must_use]
    pub fn limit(&self, volume: usize) -> Option<u64> {
        Some(self.shares[volume].1).filter(|&limit| limit < u64::MAX)
    }

    /// The number of blocks, out of `leaving` of the `held` blocks of `volume`, that must stay for
    /// its guarantee.
    ///
    /// # Panics
    /// If there is no such volume.
    #[must_use]
    pub fn must_stay(&self, volume: usize, held: u64, leaving: u64) -> u64 {
        let rest = held.saturating_sub(leaving);
        self.guarantee(volume).saturating_sub(rest).min(leaving)
    }

    /// The number of blocks by which `volume` exceeds its limit if it holds `held` blocks.
    ///
    /// # Panics
    /// If there is no such volume.
    #[must_use]
    pub fn excess(&self, volume: usize, held: u64) -> u64 {
        held.saturating_sub(self.shares[volume].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn whole(blocks: u64) -> Whole {
        Whole { blocks, shards: 1 }
    }

    fn share(at_least: u8, at_most: u8) -> Option<CacheShare> {
        let some = |percent: u8| Some(Part::Percent(percent)).filter(|_| percent > 0);
        Some(CacheShare { at_least: some(at_least), at_most: some(at_most) })
    }

    #[test]
    fn without_settings_nothing_is_guaranteed_or_limited() {
        let shares = CacheShares::new(whole(1000), &[share(0, 0), None, share(0, 0)]);
        assert!(!shares.has_guarantee() && !shares.has_limit());
        assert_eq!((shares.guarantee(0), shares.limit(2)), (0, None));
        assert_eq!((shares.must_stay(0, 7, 7), shares.excess(0, 1 << 40)), (0, 0));
    }

    #[test]
    fn blocks_stay_down_to_the_guarantee_and_exceed_from_the_limit_on() {
        let shares = CacheShares::new(whole(1000), &[share(30, 0), share(0, 10)]);
        let stay = |held, leaving| shares.must_stay(0, held, leaving);
        assert_eq!([stay(304, 4), stay(303, 4), stay(300, 4), stay(10, 4)], [0, 1, 4, 4]);
        assert_eq!([100, 101, 150].map(|held| shares.excess(1, held)), [0, 1, 50]);
        assert_eq!((shares.limit(0), shares.limit(1)), (None, Some(100)));
    }

    #[test]
    fn a_limit_is_never_below_the_guarantee_or_nothing() {
        let shares = CacheShares::new(whole(1000), &[share(30, 20), None]);
        assert_eq!(shares.limit(0), Some(300));
        assert_eq!(CacheShares::new(whole(10), &[share(0, 1)]).limit(0), Some(1));
    }

    proptest! {
        /// Guarantees never exceed their part of the cache together, whatever is configured.
        #[test]
        fn guarantees_leave_room(
            total in 1u64..1 << 40,
            percents in prop::collection::vec(0u8..=100, 1..9),
        ) {
            let volumes: Vec<_> = percents.iter().map(|&least| share(least, 0)).collect();
            let shares = CacheShares::new(whole(total), &volumes);
            let sum: u64 = (0..volumes.len()).map(|volume| shares.guarantee(volume)).sum();
            let most = u128::from(total) * u128::from(GUARANTEED_MAX_PERCENT);
            prop_assert!(u128::from(sum) * 100 <= most);
        }

        /// A volume that loses only what need not stay keeps its guarantee.
        #[test]
        fn what_need_not_stay_leaves_the_guarantee(
            percent in 0u8..=90,
            held in 0u64..2000,
            leaving in 0u64..2000,
        ) {
            let shares = CacheShares::new(whole(1000), &[share(percent, 0)]);
            let leaving = leaving.min(held);
            let left = held - (leaving - shares.must_stay(0, held, leaving));
            prop_assert!(left >= shares.guarantee(0).min(held));
        }
    }
}
