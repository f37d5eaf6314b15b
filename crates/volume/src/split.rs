//! Where a request is cut, and which shard gets each piece.
//!
//! A volume's stripes of 1 MiB are spread over the shards by a fixed hash. The mapping decides in
//! which shard's log a block lives, so it is part of the format of a pool: for a given number of
//! shards it never changes.

use forebay_block::{ByteRange, SHARDS_MAX, STRIPE_SIZE, VolumeId};

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

/// The first piece of a non-empty range: up to the end of its stripe.
#[must_use]
pub fn next_piece(range: ByteRange) -> ByteRange {
    debug_assert!(!range.is_empty());
    let stripe_end = (range.offset / STRIPE_SIZE + 1) * STRIPE_SIZE;
    ByteRange { offset: range.offset, len: range.end().min(stripe_end) - range.offset }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(mut range: ByteRange) -> Vec<ByteRange> {
        let mut all = Vec::new();
        while !range.is_empty() {
            let piece = next_piece(range);
            all.push(piece);
            range = ByteRange { offset: piece.end(), len: range.len - piece.len };
        }
        all
    }

    #[test]
    fn pieces_tile_the_range_and_stay_in_their_stripe() {
        let edges = [0, 1, 511, 512, 4096, STRIPE_SIZE - 1, STRIPE_SIZE, STRIPE_SIZE + 1];
        for &base in &edges {
            for stripes in 0..3 {
                for &tail in &edges {
                    let len = stripes * STRIPE_SIZE + tail;
                    let range = ByteRange::new(base, len);
                    let all = pieces(range);
                    let mut at = range.offset;
                    for piece in &all {
                        assert_eq!(piece.offset, at);
                        assert!(!piece.is_empty());
                        assert_eq!(
                            piece.offset / STRIPE_SIZE,
                            (piece.end() - 1) / STRIPE_SIZE,
                            "{piece} crosses a stripe"
                        );
                        at = piece.end();
                    }
                    assert_eq!(at, range.end());
                    let first = range.offset / STRIPE_SIZE;
                    let least =
                        if len == 0 { 0 } else { (range.end() - 1) / STRIPE_SIZE - first + 1 };
                    assert_eq!(all.len() as u64, least, "as few pieces as possible");
                }
            }
        }
    }

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
