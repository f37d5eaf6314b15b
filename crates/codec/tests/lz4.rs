//! The compressor against an independent decoder, on blocks of every texture.

use forebay_codec::{
    BLOCK_BYTES, COMPRESSED_MAX, Compressor, DELTA_MAX, DecodeError, apply_delta, decompress,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

/// Compresses, decodes and compares. Returns the payload's length, if there was a payload.
fn round_trip(compressor: &mut Compressor, block: &[u8]) -> Option<usize> {
    let mut out = [0xee; BLOCK_BYTES];
    let len = compressor.compress(block, &mut out)?;
    assert!(len <= COMPRESSED_MAX);
    let mut back = [0xdd; BLOCK_BYTES];
    decompress(&out[..len], &mut back).expect("a payload decodes");
    assert!(back == *block, "a payload decodes to its block");
    Some(len)
}

/// Pieces that a block is made of: noise, runs, and copies of earlier bytes.
#[derive(Clone, Debug)]
enum Piece {
    Noise(Vec<u8>),
    Run(u8, usize),
    Copy(usize, usize),
}

fn piece() -> impl Strategy<Value = Piece> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 1..400).prop_map(Piece::Noise),
        (any::<u8>(), 1usize..600).prop_map(|(byte, len)| Piece::Run(byte, len)),
        (1usize..4096, 1usize..600).prop_map(|(back, len)| Piece::Copy(back, len)),
        (1usize..40, 1usize..30).prop_map(|(back, len)| Piece::Copy(back, len)),
    ]
}

fn block() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(piece(), 1..60).prop_map(|pieces| {
        let mut block = Vec::with_capacity(BLOCK_BYTES);
        for piece in pieces.iter().cycle() {
            match piece {
                Piece::Noise(bytes) => block.extend_from_slice(bytes),
                Piece::Run(byte, len) => block.extend(std::iter::repeat_n(*byte, *len)),
                Piece::Copy(back, len) => {
                    for _ in 0..*len {
                        let byte = block.len().checked_sub(*back).map_or(0, |at| block[at]);
                        block.push(byte);
                    }
                }
            }
            if block.len() >= BLOCK_BYTES {
                break;
            }
        }
        block.truncate(BLOCK_BYTES);
        block
    })
}

/// A change to a block before it is written again.
#[derive(Clone, Debug)]
enum Edit {
    Replace(usize, Vec<u8>),
    Insert(usize, Vec<u8>),
    Remove(usize, usize),
}

impl Edit {
    /// Bytes of the edit that no base contains.
    fn noise(&self) -> usize {
        match self {
            Edit::Replace(_, bytes) | Edit::Insert(_, bytes) => bytes.len(),
            Edit::Remove(..) => 0,
        }
    }
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let bytes = || prop::collection::vec(any::<u8>(), 1..60);
    let at = || 0..BLOCK_BYTES;
    let edit = prop_oneof![
        (at(), bytes()).prop_map(|(at, bytes)| Edit::Replace(at, bytes)),
        (at(), bytes()).prop_map(|(at, bytes)| Edit::Insert(at, bytes)),
        (at(), 1usize..60).prop_map(|(at, len)| Edit::Remove(at, len)),
    ];
    prop::collection::vec(edit, 0..12)
}

fn edited(base: &[u8], edits: &[Edit]) -> Vec<u8> {
    let mut block = base.to_vec();
    for edit in edits {
        match edit {
            Edit::Replace(at, bytes) => {
                let end = (at + bytes.len()).min(block.len());
                block.splice(*at..end, bytes.iter().copied().take(end - at));
            }
            Edit::Insert(at, bytes) => drop(block.splice(at..at, bytes.iter().copied())),
            Edit::Remove(at, len) => drop(block.drain(*at..(at + len).min(BLOCK_BYTES))),
        }
        block.resize(BLOCK_BYTES, 0);
    }
    block
}

fn delta(base: &[u8], block: &[u8]) -> Option<Vec<u8>> {
    let mut out = [0xee; BLOCK_BYTES];
    let len = Compressor::new().compress_delta(base, block, &mut out)?;
    assert!(len <= DELTA_MAX);
    Some(out[..len].to_vec())
}

proptest! {
    // Miri takes a thousand times as long.
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 2000 }))]

    #[test]
    fn a_delta_makes_the_block_of_its_base(base in block(), edits in edits()) {
        let block = edited(&base, &edits);
        if let Some(delta) = delta(&base, &block) {
            let mut back = [0xdd; BLOCK_BYTES];
            apply_delta(&base, &delta, &mut back).expect("a delta decodes");
            prop_assert!(back == *block, "a delta makes its block");
        }
    }

    #[test]
    fn a_delta_of_bytes_replaced_is_as_long_as_they_are(base in block(), edits in edits()) {
        let edits: Vec<_> =
            edits.into_iter().filter(|edit| matches!(edit, Edit::Replace(..))).collect();
        let block = edited(&base, &edits);
        let noise: usize = edits.iter().map(Edit::noise).sum();
        // Bytes that were not replaced are found at the same position, whatever else resembles
        // them: one match up to the next edit, after a search step at most as long as the previous
        // edit allowed.
        let most = 64 + noise + 64 * edits.len();
        prop_assert!(delta(&base, &block).map_or(DELTA_MAX, |delta| delta.len()) <= most);
    }

    #[test]
    fn a_delta_on_another_base_is_an_error(
        base in block(), edits in edits(), at in any::<prop::sample::Index>(), bit in 0u32..8,
    ) {
        let block = edited(&base, &edits);
        let Some(delta) = delta(&base, &block) else { return Ok(()) };
        let mut other = base;
        other[at.index(BLOCK_BYTES)] ^= 1u8 << bit;
        let mut back = [0; BLOCK_BYTES];
        match apply_delta(&other, &delta, &mut back) {
            // The byte that differs is one that the delta replaces.
            Ok(()) => prop_assert!(back == *block),
            Err(error) => prop_assert!(matches!(error, DecodeError::OtherBase)),
        }
    }

    #[test]
    fn any_delta_is_answered(
        base in block(), delta in prop::collection::vec(any::<u8>(), 0..1500),
    ) {
        let mut block = [0; BLOCK_BYTES];
        let _ = apply_delta(&base, &delta, &mut block);
    }

    #[test]
    fn a_payload_decodes_to_its_block(first in block(), second in block()) {
        let mut compressor = Compressor::new();
        let fresh = round_trip(&mut compressor, &first);
        round_trip(&mut compressor, &second);
        prop_assert_eq!(round_trip(&mut compressor, &first), fresh, "a block leaves no trace");
    }

    #[test]
    fn any_payload_is_answered(payload in prop::collection::vec(any::<u8>(), 0..5000)) {
        let mut block = [0; BLOCK_BYTES];
        let _ = decompress(&payload, &mut block);
    }

    #[test]
    fn a_damaged_payload_is_an_error_or_a_block(
        block in block(), at in any::<prop::sample::Index>(), bit in 0u32..8, cut in 0usize..20,
    ) {
        let mut out = [0; BLOCK_BYTES];
        if let Some(len) = Compressor::new().compress(&block, &mut out) {
            out[at.index(len)] ^= 1u8 << bit;
            let mut back = [0; BLOCK_BYTES];
            let _ = decompress(&out[..len.saturating_sub(cut)], &mut back);
        }
    }
}

/// Where bytes repeat, a match may be short and with the wrong occurrence, so no bound holds for
/// every base. For bases without repetition, the test bounds the total length of the deltas.
#[test]
fn what_is_moved_is_found() {
    let mut runner = TestRunner::deterministic();
    let base = prop::collection::vec(any::<u8>(), BLOCK_BYTES);
    let (mut bytes, mut most) = (0, 0);
    for _ in 0..300 {
        let base = base.new_tree(&mut runner).expect("no base is refused").current();
        let edits = edits().new_tree(&mut runner).expect("no edit is refused").current();
        let noise: usize = edits.iter().map(Edit::noise).sum();
        bytes += delta(&base, &edited(&base, &edits)).map_or(DELTA_MAX, |delta| delta.len());
        most += (16 + noise + 16 * edits.len()).min(DELTA_MAX);
    }
    assert!(bytes <= most, "{bytes} bytes of deltas, expected {most}");
}

#[test]
fn runs_of_every_length_at_both_ends_come_back() {
    let mut compressor = Compressor::new();
    for run in 0..=BLOCK_BYTES {
        let noise = |i: usize| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0];
        let mut block: Vec<u8> = (0..BLOCK_BYTES).map(noise).collect();
        block[..run].fill(7);
        round_trip(&mut compressor, &block);
        block.reverse();
        round_trip(&mut compressor, &block);
    }
}

#[test]
fn what_does_not_save_an_eighth_is_refused() {
    let mut compressor = Compressor::new();
    let mut state = 1u32;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(BLOCK_BYTES)
    .collect();
    assert_eq!(round_trip(&mut compressor, &noise), None);
    let with_zeroes = |zeroes: usize| {
        let mut block = noise.clone();
        block[1000..1000 + zeroes].fill(0);
        block
    };
    assert_eq!(round_trip(&mut compressor, &with_zeroes(500)), None);
    let len = round_trip(&mut compressor, &with_zeroes(600)).expect("it saves an eighth");
    assert!((BLOCK_BYTES - 600..COMPRESSED_MAX).contains(&len), "{len}");
    assert!(round_trip(&mut compressor, &[0; BLOCK_BYTES]).expect("zeroes shrink") < 32);
}

#[test]
fn a_short_or_long_payload_is_refused() {
    let mut out = [0; BLOCK_BYTES];
    let len = Compressor::new().compress(&[0; BLOCK_BYTES], &mut out).expect("zeroes shrink");
    let mut block = [1; BLOCK_BYTES];
    assert!(decompress(&[], &mut block).is_err());
    for shorter in 0..len {
        assert!(decompress(&out[..shorter], &mut block).is_err(), "{shorter} of {len} bytes");
    }
    let twice = [&out[..len], &out[..len]].concat();
    assert!(decompress(&twice, &mut block).is_err());
}
