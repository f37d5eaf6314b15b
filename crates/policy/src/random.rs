//! A fixed sequence of numbers that look random, for samples.

/// The next number of the sequence (xorshift*, Vigna, ACM TOMS 2016). The state is not zero.
pub fn next_random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}
