//! The journal: a circular log that takes all writes of clients and the entries of the mapping.
//!
//! Its oldest segment is freed when no other is left; the blocks whose newest version it holds are
//! handed out, to be moved to the store. Entries of the mapping take room of their own.

use std::collections::VecDeque;

/// Segments aimed for.
const SEGMENTS_WANTED: u64 = 32;
/// Size of the smallest segment, in bytes: a block and its entry fit.
const SEGMENT_BYTES_MIN: u64 = 8192;

/// A journal of block numbers.
pub struct Journal {
    segment_bytes: u64,
    in_use_max: usize,
    /// Segments in use, oldest first; the last one is open.
    segments: VecDeque<Vec<u64>>,
    /// Number of the oldest segment, counted from the first one ever filled.
    first: u64,
    /// Bytes used of the open segment.
    used: u64,
}

impl Journal {
    /// An empty journal of about `bytes` bytes.
    pub fn new(bytes: u64) -> Self {
        let segment_bytes = (bytes / SEGMENTS_WANTED).max(SEGMENT_BYTES_MIN);
        let in_use_max = (bytes / segment_bytes).saturating_sub(1).max(1);
        Self {
            segment_bytes,
            in_use_max: usize::try_from(in_use_max).expect("few"),
            segments: VecDeque::from([Vec::new()]),
            first: 0,
            used: 0,
        }
    }

    /// Bytes of the device that a journal of about `bytes` bytes takes.
    pub fn bytes(&self) -> u64 {
        (self.in_use_max as u64 + 1) * self.segment_bytes
    }

    /// Number of segments in a lap.
    pub fn lap(&self) -> u64 {
        self.in_use_max as u64
    }

    /// Appends a block of `bytes` bytes; returns the number of its segment and its place there.
    pub fn append(&mut self, key: u64, bytes: u64) -> (u64, u32) {
        self.fill(bytes);
        let number = self.first + self.segments.len() as u64 - 1;
        let open = self.segments.back_mut().expect("one is always open");
        open.push(key);
        (number, u32::try_from(open.len() - 1).expect("a segment has few blocks"))
    }

    /// Appends `bytes` bytes that are no block.
    pub fn fill(&mut self, bytes: u64) {
        self.used += bytes;
        while self.used > self.segment_bytes {
            self.used -= self.segment_bytes;
            self.segments.push_back(Vec::new());
        }
    }

    /// Frees the oldest segment if there are too many. Returns its number and its blocks, newest
    /// versions or not.
    pub fn free_oldest(&mut self) -> Option<(u64, Vec<u64>)> {
        if self.segments.len() <= self.in_use_max {
            return None;
        }
        let number = self.first;
        self.first += 1;
        self.segments.pop_front().map(|keys| (number, keys))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_segment_is_freed_when_all_are_used() {
        let mut journal = Journal::new(4 * SEGMENT_BYTES_MIN);
        assert_eq!((journal.bytes(), journal.lap()), (4 * SEGMENT_BYTES_MIN, 3));
        let places: Vec<_> = (0..6).map(|key| journal.append(key, 4096)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
        assert!(journal.free_oldest().is_none());
        journal.fill(100);
        assert_eq!(journal.free_oldest(), Some((0, vec![0, 1])));
        assert!(journal.free_oldest().is_none());
        assert_eq!(journal.append(7, 4096), (3, 0));
    }
}
