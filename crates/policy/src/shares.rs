//! How the volumes of a cache share the dirty limit.
//!
//! Each volume has a guarantee, which no other volume can take, and a ceiling. The room that is not
//! guaranteed goes to volumes below their ceiling, first come, first served. So a volume whose
//! primary accepts no writes fills up to its ceiling and stalls its own writes, not those of the
//! others.

use crate::part::{Part, Whole};

/// The configuration of one volume: parts of the dirty limit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct DirtyShare {
    /// Guaranteed; an equal part of half the limit when absent.
    pub at_least: Option<Part>,
    /// The ceiling; what the guarantees of the others leave when absent.
    pub at_most: Option<Part>,
}

/// Guarantees and ceilings of all volumes, in blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DirtyShares {
    total: u64,
    /// Guarantee and ceiling of each volume, in volume order.
    shares: Vec<(u64, u64)>,
}

/// Share of the limit that is guaranteed by default, in percent, to all volumes together.
const GUARANTEED_PERCENT: u8 = 50;

impl DirtyShares {
    /// Divides a limit among volumes; an unused volume ID is `None`.
    ///
    /// Guarantees that exceed the limit together are scaled down to it. A volume may always have
    /// one dirty block.
    #[must_use]
    pub fn new(limit: Whole, volumes: &[Option<DirtyShare>]) -> Self {
        let count = volumes.iter().flatten().count().max(1) as u64;
        let total = limit.blocks;
        let part = |part: Part| limit.part(part);
        let equal =
            if count == 1 { total } else { part(Part::Percent(GUARANTEED_PERCENT)) / count };
        let wanted = |share: &DirtyShare| match (share.at_least, share.at_most) {
            (Some(least), _) => part(least),
            (None, Some(most)) => equal.min(part(most)),
            (None, None) => equal,
        };
        let sum: u64 = volumes.iter().flatten().map(wanted).sum();
        let scaled = |blocks: u64| match sum > total {
            true => (u128::from(blocks) * u128::from(total) / u128::from(sum)) as u64,
            false => blocks,
        };
        let sum: u64 = volumes.iter().flatten().map(|share| scaled(wanted(share))).sum();
        let shares = volumes.iter().map(|share| {
            let Some(share) = share else { return (0, 0) };
            let least = scaled(wanted(share));
            let left = total - (sum - least);
            let most = share.at_most.map_or(left, part);
            (least.max(1), most.max(least).max(1))
        });
        Self { total, shares: shares.collect() }
    }

    /// Maximum number of dirty blocks of `volume` now, when `levels` are the volumes' dirty blocks.
    ///
    /// # Panics
    /// If there is no such volume.
    #[must_use]
    pub fn limit(&self, volume: usize, levels: impl Fn(usize) -> u64) -> u64 {
        let (least, most) = self.shares[volume];
        if self.shares.len() == 1 {
            return most;
        }
        let others = (self.shares.iter().enumerate()).filter(|&(other, _)| other != volume);
        let taken: u64 = others.map(|(other, &(least, _))| levels(other).max(least)).sum();
        most.min(self.total.saturating_sub(taken)).max(least)
    }

    /// Maximum number of dirty blocks that `volume` can ever have.
    ///
    /// # Panics
    /// If there is no such volume.
    #[must_use]
    pub fn ceiling(&self, volume: usize) -> u64 {
        self.shares[volume].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain(count: usize) -> Vec<Option<DirtyShare>> {
        vec![Some(DirtyShare::default()); count]
    }

    fn whole(blocks: u64) -> Whole {
        Whole { blocks, shards: 2 }
    }

    #[test]
    fn one_volume_has_all() {
        let shares = DirtyShares::new(whole(1000), &plain(1));
        assert_eq!(shares.limit(0, |_| 0), 1000);
        let gap = DirtyShares::new(whole(1000), &[None, Some(DirtyShare::default())]);
        assert_eq!(gap.limit(1, |_| 0), 1000);
    }

    #[test]
    fn two_volumes_leave_each_other_a_quarter() {
        let shares = DirtyShares::new(whole(1000), &plain(2));
        assert_eq!(shares.limit(0, |_| 0), 750);
        assert_eq!(shares.limit(1, |at| [750, 0][at]), 250);
        assert_eq!(shares.limit(1, |at| [500, 0][at]), 500);
    }

    #[test]
    fn what_is_configured_counts() {
        let share = |least: Option<u8>, most: Option<u8>| {
            let (at_least, at_most) = (least.map(Part::Percent), most.map(Part::Percent));
            Some(DirtyShare { at_least, at_most })
        };
        let shares = DirtyShares::new(whole(1000), &[share(Some(60), None), share(None, Some(10))]);
        assert_eq!((shares.limit(0, |_| 0), shares.limit(1, |_| 0)), (900, 100));
        // The guarantees exceed the limit and are scaled down in proportion.
        let shares = DirtyShares::new(whole(1000), &[share(Some(90), None), share(Some(90), None)]);
        assert_eq!((shares.limit(0, |_| 0), shares.limit(1, |_| 0)), (500, 500));
        // 100 blocks of each of two shards.
        let bytes = Some(DirtyShare { at_least: None, at_most: Some(Part::Bytes(800 << 10)) });
        let shares = DirtyShares::new(whole(1000), &[bytes, share(Some(40), None)]);
        assert_eq!((shares.limit(0, |_| 0), shares.limit(1, |_| 0)), (100, 900));
    }

    proptest! {
        /// Volumes that grow whenever allowed never exceed the limit together, and no volume is
        /// denied its guarantee by the others.
        #[test]
        fn nobody_takes_what_is_guaranteed_to_others(
            count in 1usize..9,
            steps in prop::collection::vec((0usize..9, 1u64..200), 0..200),
        ) {
            let total = 1000;
            let shares = DirtyShares::new(whole(total), &plain(count));
            let mut levels = vec![0u64; count];
            for (volume, more) in steps {
                let volume = volume % count;
                let limit = shares.limit(volume, |at| levels[at]);
                prop_assert!(limit >= total / 2 / count as u64);
                levels[volume] = levels[volume].max((levels[volume] + more).min(limit));
                prop_assert!(levels.iter().sum::<u64>() <= total);
            }
        }
    }
}
