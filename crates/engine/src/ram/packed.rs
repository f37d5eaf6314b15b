//! The compressed part of the RAM tier: blocks that have left the raw part, as LZ4; the oldest
//! leave first.
//!
//! The part is one stream of bytes over frames of 4 KiB, with addresses that only grow:
//!
//! ```text
//!       start                                         end
//!       |  frame 17  |  frame 3   |  frame 40  |  frame 8|  |
//!       | A | B |  C    | D | E |      F   | G |   H     |
//! ```
//!
//! A payload may span two frames. When the first frame is dropped, the entries that begin in it are
//! dropped too. A block that is removed earlier leaves a hole until then.
//!
//! Invariants: entries are in address order; an entry counts only while `known` names its number;
//! no payload spans more than two frames. The owner holds the bytes and passes them in, and assigns
//! the frames' numbers.

use std::collections::VecDeque;

use forebay_block::BLOCK_SIZE;
use forebay_codec::decompress;

use crate::key::{Key, LargeMap};
use crate::ram::split::Age;

/// Length of the longest payload worth keeping, in bytes.
pub const PACKED_MAX: usize = BLOCK_SIZE / 4 * 3;
/// The length, in bytes, that a payload counts for at least: bounds the number of entries per
/// frame.
const PACKED_MIN: usize = 128;
const FRAME: u64 = BLOCK_SIZE as u64;

/// Place of a block's payload in the stream.
#[derive(Clone, Copy, Debug)]
struct Entry {
    key: Key,
    at: u64,
    len: u16,
}

/// Blocks in compressed form. Each takes about 50 bytes in addition to its payload.
#[derive(Default)]
pub struct Packed {
    entries: VecDeque<Entry>,
    /// The number of the first entry; entries are numbered consecutively.
    first: u64,
    /// Entry numbers by block.
    known: LargeMap<u64>,
    frames: VecDeque<u32>,
    /// Address of the first frame, and of the byte after the last payload.
    start: u64,
    end: u64,
}

impl Packed {
    /// The number of blocks in it.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// The number of frames that it has.
    pub fn frames(&self) -> usize {
        self.frames.len()
    }

    /// Whether a block is in it.
    pub fn contains(&self, key: Key) -> bool {
        self.known.contains_key(&key)
    }

    /// Up to `most` blocks from the one numbered `from` on, and the number to continue at; `None`
    /// if there are no more. Numbers are in the order in which blocks came.
    pub fn keys_from(&self, from: u64, most: usize) -> Option<(Vec<Key>, u64)> {
        let skipped = from.saturating_sub(self.first) as usize;
        let end = (skipped + most).min(self.entries.len());
        let from = skipped.min(end);
        let known = (self.first + from as u64..).zip(self.entries.range(from..end));
        let known = known.filter(|(number, entry)| self.known.get(&entry.key) == Some(number));
        let keys = known.map(|(_, entry)| entry.key).collect();
        (skipped < end).then(|| (keys, self.first + end as u64))
    }

    /// Decodes a block into `room`; returns the block's age in the stream.
    pub fn get(&self, bytes: &[u8], key: Key, room: &mut [u8; BLOCK_SIZE]) -> Option<Age> {
        let number = self.known.get(&key)?;
        let entry = self.entries[(number - self.first) as usize];
        let mut joined: [u8; PACKED_MAX];
        let len = usize::from(entry.len);
        let [(first, head), (second, tail)] = self.pieces(entry.at, len);
        let head = &bytes[first..first + head];
        let payload = if tail == 0 {
            head
        } else {
            joined = [0; PACKED_MAX];
            joined[..head.len()].copy_from_slice(head);
            joined[head.len()..len].copy_from_slice(&bytes[second..second + tail]);
            &joined[..len]
        };
        decompress(payload, room).expect("what was compressed here can be decoded");
        Some(self.age(entry.at))
    }

    fn age(&self, at: u64) -> Age {
        let quarter = (self.end - self.start) / 4;
        match at - self.start {
            from_start if from_start < quarter => Age::Oldest,
            from_start if from_start >= 3 * quarter => Age::Newest,
            _ => Age::Between,
        }
    }

    /// Whether a payload fits without another frame.
    pub fn fits(&self, len: usize) -> bool {
        let all = self.start + self.frames.len() as u64 * FRAME;
        all - self.end >= len.max(PACKED_MIN) as u64
    }

    /// Adds a block that is not in it yet, as the newest.
    ///
    /// # Panics
    /// If the payload does not fit.
    pub fn append(&mut self, bytes: &mut [u8], key: Key, payload: &[u8]) {
        assert!(self.fits(payload.len()) && payload.len() <= PACKED_MAX, "room was made");
        let at = self.end;
        let [(first, head), (second, tail)] = self.pieces(at, payload.len());
        bytes[first..first + head].copy_from_slice(&payload[..head]);
        bytes[second..second + tail].copy_from_slice(&payload[head..]);
        self.end += payload.len().max(PACKED_MIN) as u64;
        let number = self.first + self.entries.len() as u64;
        let other = self.known.insert(key, number);
        assert!(other.is_none(), "a block has one payload");
        self.entries.push_back(Entry { key, at, len: payload.len() as u16 });
    }

    /// The two pieces of a payload, each as offset in the owner's bytes and length; the second may
    /// be empty.
    fn pieces(&self, at: u64, len: usize) -> [(usize, usize); 2] {
        let (frame, from) = ((at - self.start) / FRAME, (at - self.start) % FRAME);
        let offset = |frame: u64| self.frames[frame as usize] as usize * BLOCK_SIZE;
        let head = len.min(BLOCK_SIZE - from as usize);
        let second = if head < len { offset(frame + 1) } else { 0 };
        [(offset(frame) + from as usize, head), (second, len - head)]
    }

    /// Moves a block's payload to another key, which must not have one.
    pub fn rename(&mut self, from: Key, to: Key) {
        if let Some(number) = self.known.remove(&from) {
            self.entries[(number - self.first) as usize].key = to;
            self.known.insert(to, number);
        }
    }

    /// Removes a block.
    pub fn forget(&mut self, key: Key) {
        self.known.remove(&key);
    }

    /// Adds a frame.
    pub fn add_frame(&mut self, frame: u32) {
        self.frames.push_back(frame);
    }

    /// Drops the oldest frame and the entries that begin in it; returns its number. The only frame
    /// is never dropped, since it is being filled.
    pub fn drop_frame(&mut self) -> Option<u32> {
        if self.frames.len() < 2 {
            return None;
        }
        let frame = self.frames.pop_front();
        self.start += FRAME;
        self.end = self.end.max(self.start);
        while let Some(entry) = self.entries.pop_front_if(|entry| entry.at < self.start) {
            if self.known.get(&entry.key) == Some(&self.first) {
                self.known.remove(&entry.key);
            }
            self.first += 1;
        }
        frame
    }
}
