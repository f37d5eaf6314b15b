//! Payloads of any bytes, and sound ones with any bytes changed: an error, or a whole block.
#![no_main]

use forebay_codec::{BLOCK_BYTES, Compressor, decompress};
use forebay_fuzz::{block, change};
use libfuzzer_sys::fuzz_target;

/// Bytes of the input that change a sound payload.
const CHANGES: usize = 9;

/// Two decodings into different bytes agree, so every byte of a block is written.
fn check(payload: &[u8]) {
    let (mut a, mut b) = ([0x00; BLOCK_BYTES], [0xff; BLOCK_BYTES]);
    let decoded = decompress(payload, &mut a).is_ok();
    assert_eq!(decompress(payload, &mut b).is_ok(), decoded);
    if decoded {
        assert!(a == b);
    }
}

fuzz_target!(|data: &[u8]| {
    check(data);
    let Some((changes, texture)) = data.split_at_checked(CHANGES) else { return };
    let mut payload = [0; BLOCK_BYTES];
    if let Some(len) = Compressor::new().compress(&block(texture), &mut payload) {
        change(&mut payload[..len], changes);
        check(&payload[..len]);
        check(&payload[..len - usize::from(changes[0]) % len]);
    }
});
