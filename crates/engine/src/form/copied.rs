//! A block that reclaim copies forward.

use crate::contents::Place;
use crate::form::alike::Sketch;
use crate::key::Key;
use crate::log::builder::Against;

/// A block to be copied forward.
#[derive(Debug)]
pub struct Copied {
    pub key: Key,
    /// Where it was, and how `bytes` are to be read.
    pub place: Place,
    pub bytes: Vec<u8>,
    /// What is known of blocks like it.
    pub like: Like,
}

impl Copied {
    pub fn new(key: Key, place: Place, bytes: Vec<u8>) -> Self {
        Self { key, place, bytes, like: Like::Unsought }
    }
}

/// What is known of blocks like one that is copied.
#[derive(Debug)]
pub enum Like {
    /// It has not been looked.
    Unsought,
    /// It is not worth looking.
    Unknown,
    /// There is none.
    None(Sketch),
    /// There is one, whose bytes are not in RAM.
    OnDevice(Sketch, Against),
    /// There is one, with its bytes.
    Found(Sketch, Against, Vec<u8>),
}
