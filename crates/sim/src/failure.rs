//! How a run failed: the kind of failure, a description, and the step.
//!
//! A planted bug must be caught by the kind of failure that it causes. Any other failure, such as a
//! start that hangs, says nothing about the check that the bug is meant to prove.

use forebay_model::{Violation, Wrong};

/// A kind of failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A client read bytes that were never written to that place.
    Foreign,
    /// A client read an older content than allowed.
    Stale,
    /// A client read an older content after a crash, although the newer one was durable before.
    Lost,
    /// After a crash a block mixes two versions.
    Mixed,
    /// A primary without its cache holds wrong data.
    Alone,
    /// A start was refused that had to succeed.
    Refused,
    /// A start succeeded that had to be refused.
    Taken,
    /// A request failed without a fault.
    Error,
    /// A request failed without a fault because the cache no longer has the block's newest version.
    Corrupt,
    /// A clean block on the cache device has other bytes than its checksum says, without a fault.
    Rotten,
    /// A request or a start does not end.
    Stuck,
    /// Counters do not add up.
    Counters,
    /// A statistic differs from what disks and clients saw.
    Untrue,
    /// The engine reported no event for a fault.
    Unsaid,
    /// Devices are written although nothing is left to do.
    Restless,
    /// A request that no disk can take, or one answered twice.
    Misuse,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 16] = [
        Self::Foreign,
        Self::Stale,
        Self::Lost,
        Self::Mixed,
        Self::Alone,
        Self::Refused,
        Self::Taken,
        Self::Error,
        Self::Corrupt,
        Self::Rotten,
        Self::Stuck,
        Self::Counters,
        Self::Untrue,
        Self::Unsaid,
        Self::Restless,
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
    /// The kind of failure.
    pub kind: Kind,
    /// A description.
    pub what: String,
    /// The step of the script.
    pub step: usize,
}

impl Failure {
    /// The failure that a client's wrong read shows.
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
