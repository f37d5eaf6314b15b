//! zstd payloads decode to their block, and nothing else decodes.

use forebay_block::testing::noise;
use forebay_codec::{BLOCK_BYTES, DenseCompressor, decompress_dense};
use proptest::prelude::*;

fn block(alphabet: u8, seed: u64) -> Vec<u8> {
    let bytes = noise(seed, BLOCK_BYTES).into_iter();
    bytes.map(|byte| b'0' + byte % alphabet.max(1)).collect()
}

#[test]
fn letters_without_repetition_become_shorter() {
    let mut out = [0; BLOCK_BYTES];
    let text = block(36, 7);
    let len = DenseCompressor::new().compress(&text, BLOCK_BYTES - 1, &mut out);
    let len = len.expect("36 letters need little more than five bits each");
    assert!(len < BLOCK_BYTES * 3 / 4, "{len} bytes");
    assert_eq!(DenseCompressor::new().compress(&text, len - 1, &mut out), None, "one byte less");
}

proptest! {
    #[test]
    fn a_block_comes_back(alphabet in 1u8..=200, seed: u64, most in 0..=BLOCK_BYTES) {
        let given = block(alphabet, seed);
        let (mut payload, mut back) = ([0; BLOCK_BYTES], [1; BLOCK_BYTES]);
        if let Some(len) = DenseCompressor::new().compress(&given, most, &mut payload) {
            prop_assert!(len <= most);
            prop_assert!(decompress_dense(&payload[..len], &mut back));
            prop_assert_eq!(&given[..], &back[..]);
            prop_assert!(!decompress_dense(&payload[..len - 1], &mut back), "cut short");
        }
    }

    #[test]
    fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut out = [0; BLOCK_BYTES];
        let _ = decompress_dense(&bytes, &mut out);
        let framed = [&[0x28, 0xb5, 0x2f, 0xfd][..], &bytes].concat();
        let _ = decompress_dense(&framed, &mut out);
    }
}

#[test]
fn two_blocks_are_not_one() {
    let mut whole = Vec::new();
    for seed in [1, 2] {
        let mut out = [0; BLOCK_BYTES];
        let len = DenseCompressor::new().compress(&block(20, seed), BLOCK_BYTES, &mut out);
        whole.extend_from_slice(&out[..len.expect("20 letters compress")]);
    }
    assert!(!decompress_dense(&whole, &mut [0; BLOCK_BYTES]));
}
