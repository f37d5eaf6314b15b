//! A permutation of the keys that spreads them evenly, and what is derived from it: a key's
//! partition, the rest of the key, and the buckets that its block may be in.

use super::shape::Shape;
use super::slot::REST_BITS;
use crate::key::Key;

/// Bits of a key.
const KEY_BITS: u32 = 48;
/// The smallest logarithm of the number of partitions. Partition and rest are the whole key.
pub const PARTITION_BITS_MIN: u32 = KEY_BITS - REST_BITS;
/// The largest one. It takes 20 bits of the second hash.
pub const PARTITION_BITS_MAX: u32 = 20;

/// The first partition of a key's block, and the rest of the key.
pub fn split(shape: &Shape, key: Key) -> (u64, u64) {
    let mixed = scramble(key.0);
    (mixed & ((1 << shape.bits()) - 1), mixed >> shape.bits())
}

/// The key that has a first partition and a rest.
pub fn join(shape: &Shape, partition: u64, rest: u64) -> Key {
    Key(unscramble(rest << shape.bits() | partition))
}

/// The other partition of a block: the second of the first, and the first of the second.
pub fn other(shape: &Shape, partition: u64, rest: u64) -> u64 {
    partition ^ (second_hash(rest) >> 12 & ((1 << shape.bits()) - 1))
}

/// The bucket of a block in one of its partitions. It is in proportion to a hash: in a larger
/// partition it is the same or a later one.
pub fn bucket(shape: &Shape, partition: u64, rest: u64, second: bool) -> u64 {
    let buckets = shape.buckets(partition);
    if second {
        ((second_hash(rest) >> 32) * buckets) >> 32
    } else {
        (rest * buckets) >> (KEY_BITS - shape.bits())
    }
}

fn second_hash(rest: u64) -> u64 {
    let x = rest.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

const KEY_MASK: u64 = (1 << KEY_BITS) - 1;
const MULTIPLIERS: [u64; 2] = [0x9e37_79b9_7f4b, 0xc2b2_ae3d_27d5];

/// A permutation of the 48-bit numbers.
fn scramble(key: u64) -> u64 {
    let mut x = key & KEY_MASK;
    for m in MULTIPLIERS {
        x ^= x >> 24;
        x = x.wrapping_mul(m) & KEY_MASK;
    }
    x ^ x >> 24
}

/// The inverse of [`scramble`]. A shift by half the width is its own inverse.
fn unscramble(mixed: u64) -> u64 {
    let mut x = mixed ^ mixed >> 24;
    for m in MULTIPLIERS.into_iter().rev() {
        x = x.wrapping_mul(inverse(m)) & KEY_MASK;
        x ^= x >> 24;
    }
    x
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration.
const fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    let mut i = 0;
    while i < 6 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        i += 1;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrambling_is_undone() {
        for key in (0..KEY_MASK).step_by(0x0001_2345_6789) {
            assert_eq!(unscramble(scramble(key)), key);
            for bits in [PARTITION_BITS_MIN, PARTITION_BITS_MAX] {
                let shape = Shape::new(bits);
                let (partition, rest) = split(&shape, Key(key));
                assert_eq!(join(&shape, partition, rest), Key(key));
                assert_eq!(other(&shape, other(&shape, partition, rest), rest), partition);
            }
        }
    }
}
