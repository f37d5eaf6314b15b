//! Which shard gets which stripe.
//!
//! A volume's stripes of 1 MiB are spread over the shards by a fixed hash. The mapping decides in
//! which shard's log a block lives, so it is part of the format of a pool: for a given number of
//! shards it never changes.

use forebay_block::{SHARDS_MAX, VolumeId};

/// The shard that owns a stripe of a volume.
#[must_use]
pub fn shard_of(volume: VolumeId, stripe: u64, shards: usize) -> usize {
    assert!((1..=SHARDS_MAX).contains(&shards), "a pool has 1 to {SHARDS_MAX} shards");
    if shards == 1 {
        return 0;
    }
    // The finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
    // generators", 2014), then a multiplication instead of a division.
    let mut x = stripe ^ (u64::from(volume.0) << 56);
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    let shard = (u128::from(x) * shards as u128) >> 64;
    usize::try_from(shard).expect("below the number of shards")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mapping is part of the format: these values may never change.
    #[test]
    fn the_mapping_is_frozen() {
        let of = |volume, shards| {
            (0..16).map(|stripe| shard_of(VolumeId(volume), stripe, shards)).collect::<Vec<_>>()
        };
        assert_eq!(of(0, 1), [0; 16]);
        assert_eq!(of(0, 2), FROZEN_2);
        assert_eq!(of(3, 5), FROZEN_5);
    }

    const FROZEN_2: [usize; 16] = [1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1];
    const FROZEN_5: [usize; 16] = [0, 0, 2, 3, 3, 3, 2, 3, 1, 3, 3, 1, 3, 0, 2, 3];

    #[test]
    fn stripes_spread_evenly() {
        for shards in [2usize, 3, 7, 16] {
            let mut count = vec![0u64; shards];
            for stripe in 0..10_000 {
                count[shard_of(VolumeId(1), stripe, shards)] += 1;
            }
            let even = 10_000 / shards as u64;
            assert!(count.iter().all(|&n| n.abs_diff(even) < even / 5), "{shards}: {count:?}");
        }
    }
}
