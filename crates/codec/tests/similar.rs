//! A block stored against another one decodes to itself; a wrong base is detected.

use forebay_block::testing;
use forebay_codec::{
    BLOCK_BYTES, FEATURES, NO_FEATURE, SimilarCompressor, apply_similar, features,
};
use proptest::prelude::*;

fn noise(alphabet: u8, seed: u64) -> Vec<u8> {
    let bytes = testing::noise(seed, BLOCK_BYTES).into_iter();
    bytes.map(|byte| byte % alphabet.max(1)).collect()
}

/// The block with `bytes` inserted at `at` and the rest shifted.
fn shifted(block: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut out = [&block[..at], bytes, &block[at..]].concat();
    out.truncate(BLOCK_BYTES);
    out
}

#[test]
fn what_is_alike_at_other_places_is_found_and_packs() {
    let mut found = 0;
    for seed in 0..100 {
        let base = noise(255, seed);
        let block = shifted(&base, 100 + seed as usize * 20, b"some bytes more");
        let (a, b) = (features(&base), features(&block));
        found += u32::from(a.iter().any(|feature| b.contains(feature)));
        let mut out = [0; BLOCK_BYTES];
        let len = SimilarCompressor::new().compress(&base, &block, 200, &mut out);
        assert!(len.is_some(), "a move costs a few bytes");
    }
    assert_eq!(found, 100);
}

#[test]
fn after_one_that_is_too_long_the_next_is_made() {
    let mut compressor = SimilarCompressor::new();
    let mut out = [0; BLOCK_BYTES];
    let base = noise(255, 1);
    for seed in 2..20 {
        assert_eq!(compressor.compress(&base, &noise(255, seed), 500, &mut out), None);
        let like = shifted(&base, 50, b"more");
        assert!(compressor.compress(&base, &like, 500, &mut out).is_some());
    }
}

#[test]
fn what_is_not_alike_has_nothing_in_common() {
    let sketches: Vec<_> = (0..200).map(|seed| features(&noise(255, seed))).collect();
    let common = |a: &[u32; FEATURES], b: &[u32; FEATURES]| a.iter().any(|f| b.contains(f));
    let pairs = (1..200).filter(|&i| common(&sketches[i - 1], &sketches[i])).count();
    assert_eq!(pairs, 0);
    assert!(sketches.iter().all(|sketch| sketch.is_sorted() && sketch[FEATURES - 1] != NO_FEATURE));
}

#[test]
fn a_block_of_one_byte_has_few_features() {
    for byte in 0..=255 {
        let sketch = features(&[byte; BLOCK_BYTES]);
        let known = sketch.iter().filter(|&&feature| feature != NO_FEATURE).count();
        assert!(sketch.is_sorted() && known < FEATURES, "{byte}: {sketch:?}");
    }
}

/// zstd treats a base that begins with its magic number as a structured dictionary.
#[test]
fn a_base_that_looks_like_a_dictionary_does_no_harm() {
    let mut base = noise(255, 3);
    base[..4].copy_from_slice(&0xec30_a437_u32.to_le_bytes());
    let block = shifted(&base, 5, b"x");
    let (mut out, mut back) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
    if let Some(len) = SimilarCompressor::new().compress(&base, &block, 2000, &mut out) {
        assert!(apply_similar(&base, &out[..len], &mut back) && back[..] == block[..]);
    }
    assert!(!apply_similar(&base, &out[..300], &mut back));
}

proptest! {
    #[test]
    fn a_block_comes_back(
        alphabet in 1u8..=255,
        seed: u64,
        at in 0..BLOCK_BYTES,
        more in prop::collection::vec(any::<u8>(), 0..600),
        most in 0..=BLOCK_BYTES,
    ) {
        let base = noise(alphabet, seed);
        let block = shifted(&base, at, &more);
        let (mut payload, mut back) = ([0; BLOCK_BYTES], [1; BLOCK_BYTES]);
        let mut compressor = SimilarCompressor::new();
        if let Some(len) = compressor.compress(&base, &block, most, &mut payload) {
            prop_assert!(len <= most);
            prop_assert!(apply_similar(&base, &payload[..len], &mut back));
            prop_assert_eq!(&back[..], &block[..]);
            prop_assert!(!apply_similar(&base, &payload[..len - 1], &mut back), "cut short");
            let other = noise(alphabet, seed ^ 0xffff);
            let made = apply_similar(&other, &payload[..len], &mut back);
            prop_assert!(!made || back[..] == block[..], "another base makes no other block");
        }
    }

    #[test]
    fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let base = noise(255, 1);
        let mut out = [0; BLOCK_BYTES];
        let _ = apply_similar(&base, &bytes, &mut out);
        let framed = [&[1, 2, 3, 4, 0x28, 0xb5, 0x2f, 0xfd][..], &bytes].concat();
        let _ = apply_similar(&base, &framed, &mut out);
    }
}
