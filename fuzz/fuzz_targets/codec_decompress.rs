//! Arbitrary payloads, and valid ones with any bytes changed: an error, or a whole block.
#![no_main]

use forebay_codec::{
    BLOCK_BYTES, Compressor, DenseCompressor, SimilarCompressor, apply_similar, decompress,
    decompress_dense,
};
use forebay_fuzz::{block, change};
use libfuzzer_sys::fuzz_target;

/// Number of input bytes that change a valid payload.
const CHANGES: usize = 9;

/// Decodings into two differently filled buffers must agree, so every byte of a block is written.
fn check(payload: &[u8], decode: impl Fn(&[u8], &mut [u8]) -> bool) {
    let (mut a, mut b) = ([0x00; BLOCK_BYTES], [0xff; BLOCK_BYTES]);
    let decoded = decode(payload, &mut a);
    assert_eq!(decode(payload, &mut b), decoded);
    if decoded {
        assert!(a == b);
    }
}

fn lz4(payload: &[u8], block: &mut [u8]) -> bool {
    decompress(payload, block).is_ok()
}

fuzz_target!(|data: &[u8]| {
    check(data, lz4);
    check(data, decompress_dense);
    let base = block(&data[data.len() / 2..]);
    let against = |payload: &[u8], block: &mut [u8]| apply_similar(&base[..], payload, block);
    check(data, against);
    let Some((changes, texture)) = data.split_at_checked(CHANGES) else { return };
    let mut payload = [0; BLOCK_BYTES];
    if let Some(len) = Compressor::new().compress(&block(texture), &mut payload) {
        change(&mut payload[..len], changes);
        check(&payload[..len], lz4);
        check(&payload[..len - usize::from(changes[0]) % len], lz4);
    }
    let most = BLOCK_BYTES - 1;
    if let Some(len) = DenseCompressor::new().compress(&block(texture), most, &mut payload) {
        change(&mut payload[..len], changes);
        check(&payload[..len], decompress_dense);
        check(&payload[..len - usize::from(changes[0]) % len], decompress_dense);
    }
    let mut similar = SimilarCompressor::new();
    if let Some(len) = similar.compress(&base[..], &block(texture)[..], most, &mut payload) {
        change(&mut payload[..len], changes);
        check(&payload[..len], against);
    }
});
