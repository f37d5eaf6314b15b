//! How a run failed: the kind of wrong, in words, and when.
//!
//! A planted bug must be caught by the kind of wrong that it causes. Any other failure, such as a
//! start that hangs, says nothing about the check that is to be proved.

use forebay_model::{Violation, Wrong};

/// A kind of wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A client read bytes that nobody wrote to that place.
    Foreign,
    /// A client read an older content than it had to.
    Stale,
    /// The same after a crash, where the newer content was durable before it.
    Lost,
    /// A block is of two times after a crash.
    Mixed,
    /// A primary without its cache holds wrong data.
    Alone,
    /// A start was refused that had to succeed.
    Refused,
    /// A start succeeded that had to be refused.
    Taken,
    /// A request failed although nothing was broken.
    Error,
    /// A request or a start does not end.
    Stuck,
    /// Counters do not add up.
    Counters,
    /// A fault of which the engine told nobody.
    Unsaid,
    /// A disk was asked for something impossible, or a request was answered twice.
    Misuse,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 12] = [
        Self::Foreign,
        Self::Stale,
        Self::Lost,
        Self::Mixed,
        Self::Alone,
        Self::Refused,
        Self::Taken,
        Self::Error,
        Self::Stuck,
        Self::Counters,
        Self::Unsaid,
        Self::Misuse,
    ];
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({self:?})")
    }
}

/// Why a run failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The kind of wrong.
    pub kind: Kind,
    /// What was wrong.
    pub what: String,
    /// At which step of the script.
    pub step: usize,
}

impl Failure {
    /// The failure that a client's read shows.
    #[must_use]
    pub fn of_read(violation: &Violation, step: usize) -> Self {
        let kind = match violation.wrong {
            Wrong::Foreign => Kind::Foreign,
            Wrong::Stale => Kind::Stale,
            Wrong::Lost => Kind::Lost,
            Wrong::Mixed => Kind::Mixed,
        };
        Self { kind, what: violation.to_string(), step }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at step {} {}: {}", self.step, self.kind, self.what)
    }
}
