//! The circular log: segments of block numbers, and the place of each cached block's newest copy.

use std::collections::VecDeque;

use forebay_block::BLOCK_SIZE;
use forebay_policy::{
    Candidate, EvictionPolicy, KeyHash, Touch, copy_bytes_max, free_segments_wanted,
};
use hashbrown::HashMap;

/// Segments of the smallest log, as in the engine.
pub const SEGMENTS_MIN: usize = 8;
/// Segments aimed for, as in a new pool; fewer if a segment would be smaller than a block.
const SEGMENTS_WANTED: u64 = 64;
/// Most blocks in a segment.
const SEGMENT_BLOCKS_MAX: u64 = 1024;
/// Free segments that only reclaim may use, as in the engine.
const RESERVE: u64 = 2;

/// Place of a block's newest copy.
struct Place {
    /// Number of the segment, counted from the first one ever filled.
    segment: u64,
    at: u32,
    meta: u8,
}

/// A log, and the blocks in it.
pub struct Log {
    segment_blocks: usize,
    /// Segments that may be in use before the oldest is reclaimed.
    in_use_max: usize,
    /// Segments in use, oldest first; the last one is open.
    segments: VecDeque<Vec<u64>>,
    /// Number of the oldest segment.
    first: u64,
    index: HashMap<u64, Place, KeyHash>,
    /// Blocks copied forward so far.
    pub copied: u64,
}

impl Log {
    /// An empty log with room for `blocks` blocks.
    pub fn new(blocks: u64) -> Self {
        let mut segment = SEGMENT_BLOCKS_MAX;
        while segment > 1 && blocks / segment < SEGMENTS_WANTED {
            segment /= 2;
        }
        let total = blocks / segment;
        let in_use = total - free_segments_wanted(total, RESERVE);
        Self {
            segment_blocks: usize::try_from(segment).expect("bounded above"),
            in_use_max: usize::try_from(in_use).expect("a log fits memory"),
            segments: VecDeque::from([Vec::new()]),
            first: 0,
            index: HashMap::default(),
            copied: 0,
        }
    }

    /// Number of cached blocks.
    pub fn len(&self) -> u64 {
        self.index.len() as u64
    }

    /// Whether the block is cached.
    pub fn contains(&self, key: u64) -> bool {
        self.index.contains_key(&key)
    }

    /// Tells the policy that a block was hit, if it is cached; returns whether it is.
    pub fn hit(&mut self, key: u64, policy: &dyn EvictionPolicy) -> bool {
        let place = self.index.get_mut(&key);
        place.map(|place| place.meta = policy.hit(place.meta)).is_some()
    }

    /// Writes a block's newest version.
    pub fn append(&mut self, key: u64, policy: &mut dyn EvictionPolicy) {
        self.place(key, policy.inserted(Touch::Read), policy);
        while self.segments.len() > self.in_use_max {
            self.reclaim(policy);
        }
    }

    fn place(&mut self, key: u64, meta: u8, policy: &mut dyn EvictionPolicy) {
        let open = self.segments.back_mut().expect("one is always open");
        open.push(key);
        let segment = self.first + self.segments.len() as u64 - 1;
        let open = self.segments.back().expect("one is always open");
        let place = Place { segment, at: open.len() as u32 - 1, meta };
        self.index.insert(key, place);
        if open.len() == self.segment_blocks {
            self.segments.push_back(Vec::with_capacity(self.segment_blocks));
            policy.sealed(self.in_use_max as u64);
        }
    }

    /// Frees the oldest segment.
    fn reclaim(&mut self, policy: &mut dyn EvictionPolicy) {
        let keys = self.segments.pop_front().expect("there are more than are wanted");
        let number = self.first;
        self.first += 1;
        let newest = |&(at, key): &(usize, u64)| {
            let place = self.index.get(&key);
            place.is_some_and(|place| (place.segment, place.at as usize) == (number, at))
        };
        let bytes = BLOCK_SIZE as u32;
        let mut blocks: Vec<Candidate> = keys
            .into_iter()
            .enumerate()
            .filter(newest)
            .map(|(_, key)| Candidate { key, meta: self.index[&key].meta, bytes, keep: false })
            .collect();
        policy.choose(&mut blocks, copy_bytes_max((self.segment_blocks * BLOCK_SIZE) as u64));
        for block in blocks {
            if block.keep {
                self.copied += 1;
                self.place(block.key, policy.inserted(Touch::Read), policy);
            } else {
                self.index.remove(&block.key);
            }
        }
    }

    /// Removes a block.
    pub fn forget(&mut self, key: u64) {
        self.index.remove(&key);
    }

    /// Removes all blocks but those that `keep` accepts.
    pub fn retain(&mut self, keep: impl Fn(u64) -> bool) {
        self.index.retain(|&key, _| keep(key));
    }
}
