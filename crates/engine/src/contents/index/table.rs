//! The buckets of the index, in memory that is obtained and returned piece by piece.
//!
//! The table grows and shrinks at its end. A piece never moves, and is touched from its start, so
//! the part of the last piece that is not in use takes no memory. Large pieces lie in huge pages.
//! When memory cannot be had, the table stays as it is.

use std::collections::TryReserveError;

use super::slot::{BUCKET_BYTES, Bucket};

/// Bytes of the smallest and of the largest piece. The allocator of the programs makes a mapping of
/// the latter.
const PIECE_BYTES: std::ops::Range<u64> = 64 << 10..4 << 20;
/// A piece is at most this share of a table that is as large as it may become.
const PIECE_SHARE: u64 = 32;

/// Obtains memory for a number of buckets.
pub type Reserve = fn(&mut Vec<Bucket>, usize) -> Result<(), TryReserveError>;

/// A sequence of buckets.
pub struct Table {
    pieces: Vec<Vec<Bucket>>,
    /// The logarithm of the number of buckets of a piece.
    piece: u32,
    /// How to obtain memory.
    pub reserve: Reserve,
}

impl Table {
    /// An empty table, which may become about `bytes` long. It allocates nothing.
    pub fn new(bytes: u64, reserve: Reserve) -> Self {
        let piece = piece_bytes(bytes) / BUCKET_BYTES;
        Self { pieces: Vec::new(), piece: piece.ilog2(), reserve }
    }

    /// Extends the table by free buckets; returns false if there is no memory.
    #[must_use]
    pub fn extend(&mut self, buckets: u64) -> bool {
        let before = self.len();
        while self.len() < buckets {
            let piece = 1 << self.piece;
            let is_full = self.pieces.last().is_none_or(|last| last.len() == piece);
            if is_full && !self.add_piece() {
                self.truncate(before);
                return false;
            }
            let missing = (buckets - self.len()) as usize;
            let last = self.pieces.last_mut().expect("the table has a piece");
            last.resize(piece.min(last.len() + missing), Bucket::default());
        }
        true
    }

    fn add_piece(&mut self) -> bool {
        let mut piece = Vec::new();
        let reserved = (self.reserve)(&mut piece, 1 << self.piece);
        let reserved = reserved.and_then(|()| self.pieces.try_reserve(1));
        if reserved.is_ok() {
            self.pieces.push(piece);
        }
        reserved.is_ok()
    }

    /// Removes the buckets from a position on.
    pub fn truncate(&mut self, buckets: u64) {
        while self.len() > buckets {
            let more = (self.len() - buckets) as usize;
            let last = self.pieces.last_mut().expect("the table has a piece");
            last.truncate(last.len().saturating_sub(more));
            if last.is_empty() {
                self.pieces.pop();
            }
        }
    }

    /// Frees the last piece, with its buckets; returns whether there was one.
    pub fn drop_piece(&mut self) -> bool {
        self.pieces.pop().is_some()
    }

    /// Number of buckets.
    pub fn len(&self) -> u64 {
        let last = self.pieces.last().map_or(0, Vec::len);
        (self.pieces.len().saturating_sub(1) << self.piece) as u64 + last as u64
    }

    /// The bucket at a position.
    pub fn get(&self, address: u64) -> &Bucket {
        let (piece, within) = self.split(address);
        &self.pieces[piece][within]
    }

    /// The bucket at a position, to be changed.
    pub fn get_mut(&mut self, address: u64) -> &mut Bucket {
        let (piece, within) = self.split(address);
        &mut self.pieces[piece][within]
    }

    fn split(&self, address: u64) -> (usize, usize) {
        ((address >> self.piece) as usize, (address & ((1 << self.piece) - 1)) as usize)
    }
}

/// Bytes of a piece of a table of `bytes` bytes.
fn piece_bytes(bytes: u64) -> u64 {
    let wanted = (bytes / PIECE_SHARE).clamp(PIECE_BYTES.start, PIECE_BYTES.end);
    1 << wanted.ilog2()
}

/// Bytes of memory that a table of `bytes` bytes takes in whole pieces.
pub fn bytes_in_pieces(bytes: u64) -> u64 {
    bytes.next_multiple_of(piece_bytes(bytes))
}
