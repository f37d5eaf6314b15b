//! The compressor: its output for any block decodes to that block.
#![no_main]

use forebay_codec::{
    BLOCK_BYTES, COMPRESSED_MAX, Compressor, SimilarCompressor, apply_similar, decompress, features,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let block = forebay_fuzz::block(data);
    let mut payload = [0; BLOCK_BYTES];
    if let Some(len) = Compressor::new().compress(&block, &mut payload) {
        assert!(len <= COMPRESSED_MAX);
        let mut back = [0; BLOCK_BYTES];
        decompress(&payload[..len], &mut back).expect("a payload decodes");
        assert!(back == *block);
    }
    let base = forebay_fuzz::block(&data[data.len() / 3..]);
    assert!(features(&block[..]).is_sorted());
    let mut similar = SimilarCompressor::new();
    if let Some(len) = similar.compress(&base[..], &block[..], BLOCK_BYTES - 1, &mut payload) {
        let mut back = [0; BLOCK_BYTES];
        assert!(apply_similar(&base[..], &payload[..len], &mut back) && back == *block);
    }
});
