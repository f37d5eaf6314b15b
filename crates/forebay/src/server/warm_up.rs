//! The warm-up of a new cache. A server that gives its cache up lists the cached blocks in the
//! state directory; the next one brings them into the new cache in the background, those first that
//! were requested the most. The list is named after the cache before. It is a hint: the blocks
//! themselves come from the primaries.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;

use anyhow::Context as _;
use forebay_block::{BLOCK_SIZE, ByteRange, VolumeId};
use forebay_engine::ListedBlock;
use forebay_runtime::{Pool, StateDir, file_of, sealed, unsealed};

/// Kind of the file.
const KIND: &str = "warm-up";
/// Its first line.
const HEADING: &str = "forebay warm-up 1";
/// The line before the pieces.
const PIECES: &str = "pieces";
/// Blocks of a piece, the bits of its mask.
const PIECE_BLOCKS: u64 = 64;
const PIECE_BYTES: u64 = PIECE_BLOCKS * BLOCK_SIZE as u64;
/// Most pieces of a list: 1 TiB if all their blocks are cached.
const PIECES_MAX: usize = 4 << 20;
/// Longest file that is read, in bytes.
const BYTES_MAX: u64 = 64 * PIECES_MAX as u64;

/// A part of a volume, some of whose blocks are cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece {
    /// Index of the volume's name.
    volume: usize,
    /// Offset on the volume, in pieces.
    number: u64,
    /// The blocks, the first one in the lowest bit.
    blocks: u64,
}

/// The blocks that a cache had when it was given up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WarmUp {
    /// Size of its device, in bytes.
    device: u64,
    /// The names of the volumes in the new configuration.
    volumes: Vec<String>,
    /// In the order in which they come into the new cache.
    pieces: Vec<Piece>,
}

impl WarmUp {
    /// Lists the blocks of a cache on a device of this size, of the volumes that stay. `None` if
    /// the pool has stopped.
    pub fn of(pool: &Pool, device: u64, ids: &[(VolumeId, String)]) -> Option<Self> {
        let mut list = List::default();
        let place = |id| ids.iter().position(|&(known, _)| known == id);
        let is_whole = pool.list(|block| {
            if let Some(volume) = place(block.volume) {
                list.add(volume, &block);
            }
        });
        let volumes = ids.iter().map(|(_, name)| name.clone()).collect();
        is_whole.then(|| Self { device, volumes, pieces: list.sorted() })
    }

    /// Takes the one of this cache on record, so that no later start finds it.
    ///
    /// # Errors
    /// If the state directory cannot be read or written.
    pub fn take(state: &StateDir, cache: [u8; 16]) -> io::Result<Option<Self>> {
        let name = file_of(cache, KIND);
        let found = state.read(&name, BYTES_MAX)?;
        state.remove(&name)?;
        Ok(found.as_deref().and_then(parse))
    }

    /// Puts it on record as that of this cache.
    ///
    /// # Errors
    /// If it cannot be made durable.
    pub fn store(&self, state: &StateDir, cache: [u8; 16]) -> anyhow::Result<()> {
        let mut body = format!("{HEADING}\ndevice {}\n", self.device);
        for name in &self.volumes {
            writeln!(body, "volume {name}")?;
        }
        writeln!(body, "{PIECES}")?;
        for Piece { volume, number, blocks } in &self.pieces {
            writeln!(body, "{volume} {number:x} {blocks:x}")?;
        }
        state.replace(&file_of(cache, KIND), &sealed(&body)).context("the blocks of the cache")
    }

    /// Removes the one of this cache on record, if there is one.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn end(state: &StateDir, cache: [u8; 16]) -> io::Result<()> {
        state.remove(&file_of(cache, KIND))
    }

    /// Bytes of its blocks.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| bytes_of(piece.blocks)).sum()
    }

    /// Leaves out the last blocks if the new cache, on a device of this size, has no room for all.
    pub fn fit(&mut self, device: u64) {
        if device >= self.device {
            return;
        }
        let room = u128::from(self.bytes()) * u128::from(device) / u128::from(self.device);
        let mut room = u64::try_from(room).expect("less than the bytes");
        let fits = |piece: &&Piece| {
            let left = room.checked_sub(bytes_of(piece.blocks));
            room = left.unwrap_or_default();
            left.is_some()
        };
        let kept = self.pieces.iter().take_while(fits).count();
        self.pieces.truncate(kept);
    }

    /// The blocks of a volume of this size: their bytes, and their ranges.
    pub fn of_volume(
        &self,
        name: &str,
        size: u64,
    ) -> (u64, impl Iterator<Item = ByteRange> + Send + use<>) {
        let volume = self.volumes.iter().position(|known| known == name);
        let ours = self.pieces.iter().filter(|piece| Some(piece.volume) == volume);
        // No more than a few bytes for each piece, as it may last for hours.
        let ours: Vec<(u64, u64)> = ours.map(|piece| (piece.number, piece.blocks)).collect();
        let ranges = move |(number, blocks): (u64, u64)| {
            let on_it = move |range: ByteRange| {
                let end = range.end().min(size);
                (range.offset < end).then(|| ByteRange::new(range.offset, end - range.offset))
            };
            runs(blocks).map(move |(first, count)| range_of(number, first, count)).filter_map(on_it)
        };
        let bytes = ours.iter().flat_map(|&piece| ranges(piece)).map(|range| range.len).sum();
        (bytes, ours.into_iter().flat_map(ranges))
    }
}

/// The pieces of a list that is being made, with their requests.
#[derive(Default)]
struct List(HashMap<(usize, u64), (u64, u32)>);

impl List {
    fn add(&mut self, volume: usize, block: &ListedBlock) {
        let key = (volume, block.block / PIECE_BLOCKS);
        if self.0.len() == PIECES_MAX && !self.0.contains_key(&key) {
            // Blocks come in no particular order, so that it is not always the same part.
            return;
        }
        let (blocks, requests) = self.0.entry(key).or_default();
        let bit = 1 << (block.block % PIECE_BLOCKS);
        if *blocks & bit == 0 {
            *blocks |= bit;
            *requests += u32::from(block.requests);
        }
    }

    /// By classes of requests for each block, each of them twice as many as the next, and in a
    /// class by address, as disks like it.
    fn sorted(self) -> Vec<Piece> {
        let piece = |((volume, number), (blocks, requests)): ((usize, u64), (u64, u32))| {
            let class = (requests / u64::count_ones(blocks)).checked_ilog2();
            (Reverse(class), Piece { volume, number, blocks })
        };
        let mut all: Vec<_> = self.0.into_iter().map(piece).collect();
        all.sort_unstable_by_key(|&(class, piece)| (class, piece.volume, piece.number));
        all.into_iter().map(|(_, piece)| piece).collect()
    }
}

fn bytes_of(blocks: u64) -> u64 {
    u64::from(blocks.count_ones()) * BLOCK_SIZE as u64
}

/// The runs of blocks: the first one, and their number.
fn runs(mut blocks: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if blocks == 0 {
            return None;
        }
        let skipped = blocks.trailing_zeros();
        blocks >>= skipped;
        let count = blocks.trailing_ones();
        blocks = blocks.checked_shr(count).unwrap_or(0);
        let first = at + u64::from(skipped);
        at = first + u64::from(count);
        Some((first, u64::from(count)))
    })
}

/// The bytes of blocks of a piece.
fn range_of(number: u64, first: u64, count: u64) -> ByteRange {
    let block = BLOCK_SIZE as u64;
    ByteRange::new(number * PIECE_BYTES + first * block, count * block)
}

/// Whatever is not whole is none.
fn parse(file: &str) -> Option<WarmUp> {
    let body = unsealed(file)?.strip_prefix(HEADING)?.strip_prefix('\n')?;
    let (head, pieces) = body.split_once(&format!("\n{PIECES}\n"))?;
    let mut head = head.lines();
    let device = head.next()?.strip_prefix("device ")?.parse().ok().filter(|&device| device > 0)?;
    let name = |line: &str| Some(line.strip_prefix("volume ")?.to_owned());
    let volumes: Vec<String> = head.map(name).collect::<Option<_>>()?;
    let piece = |line: &str| {
        let mut words = line.split(' ');
        let volume = words.next()?.parse().ok().filter(|&volume| volume < volumes.len())?;
        let number = u64::from_str_radix(words.next()?, 16).ok()?;
        let blocks = u64::from_str_radix(words.next()?, 16).ok().filter(|&blocks| blocks > 0)?;
        let is_there = number < u64::MAX / PIECE_BYTES && words.next().is_none();
        is_there.then_some(Piece { volume, number, blocks })
    };
    let pieces = pieces.lines().map(piece).collect::<Option<_>>()?;
    Some(WarmUp { device, volumes, pieces })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list of blocks of two volumes, with the requests for each.
    fn list(blocks: &[(usize, u64, u8)]) -> WarmUp {
        let mut list = List::default();
        for &(volume, block, requests) in blocks {
            list.add(volume, &ListedBlock { volume: VolumeId(0), block, requests });
        }
        let volumes = ["a", "pieces b"].map(str::to_owned).into();
        WarmUp { device: 1 << 20, volumes, pieces: list.sorted() }
    }

    fn ranges(list: &WarmUp, name: &str, size: u64) -> Vec<(u64, u64)> {
        let (bytes, ranges) = list.of_volume(name, size);
        let ranges: Vec<_> = ranges.map(|range| (range.offset, range.len)).collect();
        assert_eq!(bytes, ranges.iter().map(|range| range.1).sum::<u64>());
        ranges
    }

    #[test]
    fn blocks_come_by_requests_and_then_by_address() {
        let mut blocks = vec![(0, 200, 1), (0, 3, 1), (0, 1, 1), (0, 0, 1), (1, 5, 0), (0, 300, 9)];
        blocks.push((0, 300, 9));
        let list = list(&blocks);
        let expected = [(300 * 4096, 4096), (0, 8192), (3 * 4096, 4096), (200 * 4096, 4096)];
        assert_eq!(ranges(&list, "a", 1 << 30), expected);
        assert_eq!(ranges(&list, "pieces b", 1 << 30), [(5 * 4096, 4096)]);
        assert_eq!(ranges(&list, "c", 1 << 30), []);
        assert_eq!(list.bytes(), 6 * 4096);
        // The volume may be smaller, and end within a block.
        assert_eq!(ranges(&list, "a", 5000), [(0, 5000)]);
    }

    #[test]
    fn runs_are_those_of_the_mask() {
        let of = |blocks| runs(blocks).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(u64::MAX), [(0, 64)]);
        assert_eq!(of(1 << 63 | 0b110), [(1, 2), (63, 1)]);
        for blocks in [0x5555_5555_5555_5555, 0xf0f0_0000_ffff_0001, 1, u64::MAX << 1] {
            let bits = |(first, count)| (first..first + count).map(|bit| 1_u64 << bit).sum::<u64>();
            assert_eq!(runs(blocks).map(bits).sum::<u64>(), blocks);
        }
    }

    #[test]
    fn a_smaller_cache_gets_the_first_blocks() {
        let whole = list(&[(0, 0, 9), (0, 64, 4), (0, 65, 4), (1, 0, 0)]);
        for (device, blocks) in [(2 << 20, 4), (1 << 20, 4), (3 << 18, 3), (1 << 19, 1), (1, 0)] {
            let mut fitted = whole.clone();
            fitted.fit(device);
            assert_eq!(fitted.bytes(), blocks * 4096, "{device}");
        }
    }

    #[test]
    fn only_a_whole_list_is_taken_and_only_once() {
        let name = format!("forebay-warm-up-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let state = StateDir::open(&directory).expect("it is made");
        let one = list(&[(0, 7, 0), (1, 1 << 30, 3)]);
        one.store(&state, [7; 16]).expect("it is stored");
        assert_eq!(WarmUp::take(&state, [8; 16]).expect("it can be read"), None, "another cache");
        let name = file_of([7; 16], KIND);
        let text = state.read(&name, BYTES_MAX).expect("it can be read").expect("it is there");
        assert_eq!(WarmUp::take(&state, [7; 16]).expect("it can be read"), Some(one));
        assert_eq!(WarmUp::take(&state, [7; 16]).expect("it can be read"), None);
        for cut in 0..text.len() {
            assert_eq!(parse(&text[..cut]), None, "{cut} bytes");
        }
        for wrong in ["2 0 1", "0 0", "0 0 0", "0 x 1", "0 0 1 1", "0 ffffffffffffffff 1"] {
            let text = sealed(&format!("{HEADING}\ndevice 1\nvolume a\n{PIECES}\n{wrong}\n"));
            assert_eq!(parse(&text), None, "{wrong}");
        }
        let text = sealed(&format!("{HEADING}\ndevice 0\nvolume a\n{PIECES}\n0 0 1\n"));
        assert_eq!(parse(&text), None);
        std::fs::remove_dir(&directory).expect("it is empty");
    }
}
