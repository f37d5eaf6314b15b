//! How much of a turn large requests may take, so that they never hold up small ones.
//!
//! A request, a completion or an answer of more than [`LARGE`] bytes costs its copying: it waits
//! in a line of its own while those of other sizes pass. Each turn works off about [`TURN`] bytes
//! of each line; a client has at most [`WINDOW`] bytes of large requests at the shards, so the
//! lines are short and every client's requests come up in turn.

/// Bytes of data beyond which a request waits in the line of the large ones.
pub const LARGE: usize = 64 << 10;
/// Bytes of large requests, of large completions and of large answers worked off in a turn; the
/// last one begun may exceed it. Copying so much takes well below a millisecond.
pub const TURN: usize = 1 << 20;
/// Bytes of large requests that a client may have at the shards at once.
pub const WINDOW: u64 = 8 << 20;

const _: () = assert!(LARGE < TURN);
const _: () = assert!(WINDOW >= forebay_block::STRIPE_SIZE);

/// What is left of a turn's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowance(usize);

impl Allowance {
    /// That of a whole turn.
    pub const FULL: Self = Self(TURN);

    /// Whether something may be begun.
    #[must_use]
    pub fn is_left(self) -> bool {
        self.0 > 0
    }

    /// Takes `bytes` off it, or all that is left.
    pub fn spend(&mut self, bytes: usize) {
        self.0 = self.0.saturating_sub(bytes);
    }
}
