//! Shared by tests and benchmarks of every crate: pseudo-random numbers and bytes, the same in
//! every run.

/// The xorshift generator of Marsaglia, with a multiplied output (Vigna, 2016).
#[derive(Clone, Debug)]
pub struct Numbers(u64);

impl Numbers {
    /// The sequence named by `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    #[expect(clippy::should_implement_trait, reason = "a sequence without an end is no iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`, which must be above zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Fills `bytes` with pseudo-random data.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }
}

/// `len` bytes that do not compress.
#[must_use]
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Numbers::new(seed).fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_spread_evenly_below_their_bound() {
        let mut numbers = Numbers::new(7);
        let mut counts = [0u32; 10];
        (0..100_000).for_each(|_| counts[numbers.below(10) as usize] += 1);
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
    }

    #[test]
    fn noise_follows_from_its_seed_and_has_every_byte() {
        assert_eq!(noise(3, 1003), noise(3, 1003));
        assert_ne!(noise(3, 100), noise(4, 100));
        let mut counts = [0u32; 256];
        noise(5, 1 << 16).iter().for_each(|&byte| counts[usize::from(byte)] += 1);
        assert!(counts.iter().all(|count| (150..400).contains(count)), "{counts:?}");
    }
}
