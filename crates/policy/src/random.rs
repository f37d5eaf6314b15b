//! A fixed sequence of numbers that look random, for samples.

/// The next number of the sequence (xorshift*, Vigna, ACM TOMS 2016). The state is not zero.
fn next_random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

/// The next number, scaled to below `end`.
pub fn random_below(state: &mut u64, end: usize) -> usize {
    ((u128::from(next_random(state)) * end as u128) >> 64) as usize
}
