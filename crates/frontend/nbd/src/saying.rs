//! Pending output: large replies, which are copied only as fast as the client takes them, and small
//! replies made in the meantime.
//!
//! Invariants: a reply that was begun is finished before any other byte; small replies overtake
//! large ones that were not begun; a buffer is released as soon as its last byte is copied.

use std::collections::VecDeque;

use forebay_block::{IoBuf, SLICE};

use crate::in_flight::Asked;
use crate::reply::Replies;

/// A reply with more data than this, in bytes, is sent in slices.
pub(crate) const LARGE: usize = 64 << 10;
/// Bytes of pending small replies from which on no more requests are accepted.
const BESIDE_MAX: usize = SLICE;
/// Bytes of small replies from which on the next ones wait for the next turn of the event loop, so
/// that other connections have their turn. Large replies are bounded as they are sent.
pub(crate) const SMALL_TURN: usize = SLICE;

struct Large {
    asked: Asked,
    buffers: std::vec::IntoIter<IoBuf>,
    /// The buffer being copied, and the number of bytes copied.
    buf: IoBuf,
    copied: usize,
}

/// Replies of one connection that wait for the client to take them.
#[derive(Default)]
pub(crate) struct Saying {
    large: VecDeque<Large>,
    /// Whether the first of them was begun.
    begun: bool,
    /// Small replies made since the first large one was begun.
    beside: Vec<u8>,
}

impl Saying {
    /// Adds a reply with data.
    pub fn push(&mut self, asked: Asked, buffers: Vec<IoBuf>) {
        let (buffers, buf, copied) = (buffers.into_iter(), IoBuf::empty(), 0);
        self.large.push_back(Large { asked, buffers, buf, copied });
    }

    /// Where to append a small reply: to the output, or after the large reply that was begun.
    pub fn place<'a>(&'a mut self, out: &'a mut Vec<u8>) -> &'a mut Vec<u8> {
        if self.begun { &mut self.beside } else { out }
    }

    pub fn is_empty(&self) -> bool {
        self.large.is_empty()
    }

    /// Whether so much output is pending that no more requests are accepted.
    pub fn is_full(&self) -> bool {
        self.beside.len() >= BESIDE_MAX
    }

    /// Discards all output, after the connection is lost.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Appends output until `out` has a slice. Returns the number of bytes of buffers released.
    pub fn speak(&mut self, out: &mut Vec<u8>, structured: bool) -> u64 {
        let mut freed = 0;
        while out.len() < SLICE
            && let Some(reply) = self.large.front_mut()
        {
            if !self.begun {
                let Asked { cookie, offset, bytes, .. } = reply.asked;
                Replies { out, structured }.data_head(cookie, offset, bytes);
                self.begun = true;
            }
            if reply.copied == reply.buf.len() {
                freed += reply.buf.len() as u64;
                reply.copied = 0;
                if let Some(next) = reply.buffers.next() {
                    reply.buf = next;
                } else {
                    self.large.pop_front();
                    self.begun = false;
                    out.append(&mut self.beside);
                }
                continue;
            }
            let count = (SLICE - out.len()).min(reply.buf.len() - reply.copied);
            out.extend_from_slice(&reply.buf[reply.copied..reply.copied + count]);
            reply.copied += count;
        }
        freed
    }
}
