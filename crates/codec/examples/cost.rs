//! CPU time per 4 KiB block of each operation of this crate, on blocks that resemble real data:
//! `cargo run --release -p forebay-codec --example cost [FILE]...`. Each FILE is measured too, cut
//! into blocks. Times are the best of several rounds; sizes are shares of the original, with blocks
//! that do not shrink by an eighth counted in full. The columns after that: size and time of
//! `lz4_flex`'s own compressor; size, compression time and decoding time of zstd, where any saving
//! counts; time to compute a block's features; and size, compression time and decoding time of zstd
//! against a similar block.

use std::hint::black_box;
use std::time::Instant;

use forebay_block::testing::Numbers;
use forebay_codec::{
    BLOCK_BYTES, COMPRESSED_MAX, Compressor, DenseCompressor, SimilarCompressor, apply_similar,
    crc32c, decompress, decompress_dense, features, is_zero,
};
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};

const BLOCKS: usize = 2048;
const ROUNDS: usize = 9;

fn main() {
    println!(
        "{:24} {:>7} {:>6} {:>10} {:>8} {:>8} {:>8} {:>16} {:>24} {:>9} {:>24}",
        "blocks",
        "shrunk",
        "size",
        "compress",
        "decode",
        "crc32c",
        "is_zero",
        "lz4_flex",
        "zstd",
        "features",
        "similar"
    );
    let kinds: [(&str, Maker); 5] = [
        ("random", random),
        ("text", text),
        ("database rows", rows),
        ("database, half full", half_full),
        ("zero", |_| vec![0; BLOCK_BYTES]),
    ];
    for (name, make) in kinds {
        let mut random = Numbers::new(1);
        let blocks: Vec<_> = (0..BLOCKS).map(|_| make(&mut random)).collect();
        report(name, &blocks);
    }
    for path in std::env::args().skip(1) {
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => {
                eprintln!("cannot read {path}: {error}");
                continue;
            }
        };
        let (blocks, _) = bytes.as_chunks::<BLOCK_BYTES>();
        let blocks: Vec<_> = blocks.iter().take(16 * BLOCKS).map(|b| b.to_vec()).collect();
        if blocks.is_empty() {
            eprintln!("{path} is shorter than a block");
            continue;
        }
        report(&path, &blocks);
    }
}

/// Measures one kind of block and prints a line of microseconds per block, best of the rounds.
fn report(name: &str, blocks: &[Vec<u8>]) {
    let mut compressor = Compressor::new();
    let mut out = vec![0; BLOCK_BYTES];
    let payloads: Vec<Vec<u8>> = blocks
        .iter()
        .filter_map(|block| compressor.compress(block, &mut out).map(|len| out[..len].to_vec()))
        .collect();
    let kept = (blocks.len() - payloads.len()) * BLOCK_BYTES;
    let size = share(payloads.iter().map(Vec::len).sum::<usize>() + kept, blocks);
    let compress = best(blocks, |block| {
        black_box(compressor.compress(black_box(block), &mut out));
    });
    let decode = best(&payloads, |payload| {
        decompress(black_box(payload), &mut out).expect("it was compressed a moment ago");
    });
    let crc = best(blocks, |block| {
        black_box(crc32c(black_box(block)));
    });
    let zero = best(blocks, |block| {
        black_box(is_zero(black_box(block)));
    });
    let mut table = CompressTable::small();
    let mut flex_out = vec![0; get_maximum_output_size(BLOCK_BYTES)];
    let mut flex_size = 0;
    let flex = best(blocks, |block| {
        let len = compress_into_with_table(black_box(block), &mut flex_out, &mut table);
        let len = len.expect("there is room for the worst");
        flex_size += if len > COMPRESSED_MAX { BLOCK_BYTES } else { len };
    });
    let flex_size = share(flex_size / ROUNDS, blocks);
    let shrunk = 100.0 * payloads.len() as f64 / blocks.len() as f64;
    let name = name.rsplit('/').next().unwrap_or(name);
    let mut dense = DenseCompressor::new();
    let most = BLOCK_BYTES - 1;
    let payloads: Vec<Vec<u8>> = blocks
        .iter()
        .filter_map(|block| dense.compress(block, most, &mut out).map(|len| out[..len].to_vec()))
        .collect();
    let kept = (blocks.len() - payloads.len()) * BLOCK_BYTES;
    let dense_size = share(payloads.iter().map(Vec::len).sum::<usize>() + kept, blocks);
    let dense_encode = best(blocks, |block| {
        black_box(dense.compress(black_box(block), most, &mut out));
    });
    let dense_decode = best(&payloads, |payload| {
        assert!(decompress_dense(black_box(payload), &mut out), "compressed a moment ago");
    });
    let sketch = best(blocks, |block| {
        black_box(features(black_box(block)));
    });
    // Each is a block with some bytes inserted and some changed.
    let likes: Vec<Vec<u8>> = blocks.iter().map(|block| like(block)).collect();
    let mut similar = SimilarCompressor::new();
    let mut lens = Vec::new();
    let mut bases = blocks.iter().cycle();
    let similar_encode = best(&likes, |like| {
        let base = bases.next().expect("there are as many");
        lens.push(similar.compress(base, black_box(like), most, &mut out).unwrap_or(most));
    });
    let payloads: Vec<Vec<u8>> = blocks
        .iter()
        .zip(&likes)
        .map(|(base, like)| {
            let len = similar.compress(base, like, most, &mut out).expect("it is like its base");
            out[..len].to_vec()
        })
        .collect();
    let mut bases = blocks.iter().cycle();
    let similar_decode = best(&payloads, |payload| {
        let base = bases.next().expect("there are as many");
        assert!(apply_similar(base, black_box(payload), &mut out), "compressed a moment ago");
    });
    let similar_size = share(lens.iter().take(blocks.len()).sum(), blocks);
    println!(
        "{name:24.24} {shrunk:6.1}% {size:6.3} {compress:7.2} us {decode:5.2} us {crc:5.2} us \
         {zero:5.3} us {flex_size:6.3} {flex:6.2} us {dense_size:6.3} {dense_encode:6.2} us \
         {dense_decode:5.2} us {sketch:6.2} us {similar_size:6.3} {similar_encode:6.2} us \
         {similar_decode:5.2} us"
    );
}

/// A block similar to another one: a line inserted, and one byte changed at regular distances.
fn like(block: &[u8]) -> Vec<u8> {
    let mut out =
        [&block[..1000], b"a line that the other one does not have", &block[1000..]].concat();
    out.truncate(BLOCK_BYTES);
    out.iter_mut().step_by(401).for_each(|byte| *byte ^= 0x55);
    out
}

/// `bytes` as a share of the blocks' total size.
fn share(bytes: usize, blocks: &[Vec<u8>]) -> f64 {
    bytes as f64 / (blocks.len() * BLOCK_BYTES) as f64
}

fn best(items: &[Vec<u8>], mut each: impl FnMut(&[u8])) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        items.iter().for_each(|item| each(item));
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / items.len().max(1) as f64);
    }
    if items.is_empty() { 0.0 } else { best }
}

/// Makes a block of one kind.
type Maker = fn(&mut Numbers) -> Vec<u8>;

fn random(random: &mut Numbers) -> Vec<u8> {
    (0..BLOCK_BYTES / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// Words of a small vocabulary, frequent ones first.
fn text(random: &mut Numbers) -> Vec<u8> {
    let mut block = Vec::with_capacity(BLOCK_BYTES + 16);
    while block.len() < BLOCK_BYTES {
        let word = random.below(400).min(random.below(400)).min(random.below(400));
        let mut letters = Numbers::new(word + 1);
        for _ in 0..2 + word % 9 {
            block.push(b"etaoinshrdlucmfwypvbgkqjxz"[letters.below(26) as usize]);
        }
        block.push(if random.below(12) == 0 { b'\n' } else { b' ' });
    }
    block.truncate(BLOCK_BYTES);
    block
}

/// Rows as a database stores them: a header, keys in order, counters, padded text, random digests.
fn rows(random: &mut Numbers) -> Vec<u8> {
    let mut block = vec![0; 24];
    let mut key = random.below(1 << 30);
    while block.len() < BLOCK_BYTES {
        key += 1;
        block.extend_from_slice(&(key as u32).to_le_bytes());
        block.extend_from_slice(&[3, 0, 4, 0, 2, 9, 24, 0]);
        block.extend_from_slice(&(random.below(100_000) as u32).to_le_bytes());
        block.extend_from_slice(format!("{:-<24}", random.below(10_000_000)).as_bytes());
        block.extend_from_slice(&random.next().to_le_bytes());
        block.extend_from_slice(b"2026-11-21 12:00:0");
        block.extend_from_slice(random.below(60).to_string().as_bytes());
    }
    block.truncate(BLOCK_BYTES);
    block
}

/// A page that is half free, as after a split.
fn half_full(random: &mut Numbers) -> Vec<u8> {
    let mut block = rows(random);
    block[512..2600].fill(0);
    block
}
