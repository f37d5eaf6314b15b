//! A block that reclaim copies forward.

use crate::contents::Place;
use crate::form::alike::Sketch;
use crate::key::Key;
use crate::log::builder::Against;

/// A block to be copied forward.
#[derive(Debug)]
pub struct Copied {
    pub key: Key,
    /// The place the block was read from, which says how to decode `bytes`.
    pub place: Place,
    pub bytes: Vec<u8>,
    /// The result of searching for a similar block.
    pub like: Like,
    /// Whether it stays in the log, since the store has no room for it.
    pub stays: bool,
}

impl Copied {
    pub fn new(key: Key, place: Place, bytes: Vec<u8>) -> Self {
        Self { key, place, bytes, like: Like::Unsought, stays: false }
    }
}

/// The result of searching for a block similar to one being copied.
#[derive(Debug)]
pub enum Like {
    /// Not searched yet.
    Unsought,
    /// Searching is not worthwhile.
    Unknown,
    /// No similar block was found.
    None(Sketch),
    /// A similar block was found; its bytes are not in RAM.
    OnDevice(Sketch, Against),
    /// A similar block was found, with these bytes.
    Found(Sketch, Against, Vec<u8>),
}
