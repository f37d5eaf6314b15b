//! The share of a turn that large requests may take, so that they never delay small ones.
//!
//! A request, a completion or an answer of more than [`LARGE`] bytes costs time for copying: it
//! waits in a line of its own while smaller ones pass. So does a long request without data, such as
//! a piece of a discard, which costs time for its blocks. Each turn processes about [`TURN`] bytes
//! of each line. A client has at most [`WINDOW`] bytes of large requests at the shards, so the
//! lines are short and every client gets its turn.

/// Length in bytes above which a request counts as large.
pub const LARGE: usize = 64 << 10;
/// Bytes of large requests, of large completions and of large answers processed in each turn; the
/// last one begun may exceed it. Copying this amount takes well below a millisecond.
pub const TURN: usize = 1 << 20;
/// Most bytes of large requests that a client may have at the shards.
pub const WINDOW: u64 = 8 << 20;

const _: () = assert!(LARGE < TURN);
const _: () = assert!(WINDOW >= forebay_block::STRIPE_SIZE);

/// The bytes left in a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowance(usize);

impl Allowance {
    /// The allowance of a whole turn.
    pub const FULL: Self = Self(TURN);

    /// Whether another large request may be begun.
    #[must_use]
    pub fn is_left(self) -> bool {
        self.0 > 0
    }

    /// Deducts `bytes`, or everything that is left.
    pub fn spend(&mut self, bytes: usize) {
        self.0 = self.0.saturating_sub(bytes);
    }
}
