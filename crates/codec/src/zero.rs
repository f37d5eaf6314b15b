//! Detects zero blocks without reading more of a block than needed.

/// Bytes checked before the first decision: most nonzero blocks are recognized within them.
const STEP: usize = 128;

/// Whether every byte is zero.
#[must_use]
pub fn is_zero(block: &[u8]) -> bool {
    let (steps, rest) = block.as_chunks::<STEP>();
    steps.iter().all(|step| {
        let (words, _) = step.as_chunks::<8>();
        words.iter().fold(0, |all, word| all | u64::from_ne_bytes(*word)) == 0
    }) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_set_bit_anywhere_is_seen() {
        for len in [0, 1, 127, 128, 129, 4096] {
            let mut block = vec![0u8; len];
            assert!(is_zero(&block), "{len} zero bytes");
            for at in 0..len {
                block[at] = 1 << (at % 8);
                assert!(!is_zero(&block), "a bit of byte {at} of {len}");
                block[at] = 0;
            }
        }
    }
}
