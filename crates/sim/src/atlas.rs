//! The faults that a run may meet, and the consequences they may have.
//!
//! Whatever happens, no read returns data that the model does not allow. The atlas adds the other
//! rules: whether requests may fail, and whether a start may be refused.

use crate::rng::Rng;

/// A fault in a run, in addition to crashes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scenario {
    /// No fault.
    Crashes,
    /// No fault, and modes are switched while serving.
    ModeSwitches,
    /// Some reads of the cache device fail.
    CacheReadErrors,
    /// A few writes of the cache device fail; later ones succeed.
    CacheWriteErrors,
    /// All writes of the cache device fail from some time on.
    CacheWritesFail,
    /// Flushes of the cache device fail.
    CacheFlushErrors,
    /// The cache device is full: writes fail for lack of space.
    CacheFull,
    /// The cache device stops answering, for good.
    CacheVanishes,
    /// Bits of the cache device flip while it serves.
    CacheRot,
    /// The cache device acknowledges writes that it does not store, while it serves.
    CacheLosesWrites,
    /// The cache device stores writes elsewhere, while it serves.
    CacheMisdirects,
    /// Some requests of the cache device take seconds.
    CacheSlow,
    /// Some reads of the primary fail.
    PrimaryReadErrors,
    /// Some writes of the primary fail, a few of them after a partial write.
    PrimaryWriteErrors,
    /// Some flushes of the primary fail.
    PrimaryFlushErrors,
    /// The primary stops answering, and later returns.
    PrimaryVanishes,
    /// The link to a primary breaks at a few requests, and the next ones get through.
    PrimaryReturns,
    /// A primary stops answering and does not return: only in the worlds of [`crate::away`].
    PrimaryStaysAway,
    /// The cache device fails in some way and is then lost for good: only in worlds with ordered
    /// volumes, whose primaries must be left at a moment of the past.
    CacheEnds,
    /// The cache device is lost at a crash.
    CacheLost,
    /// After a crash the cache device holds an older state of its own.
    CacheStale,
    /// Pages of the cache device are damaged while it is not in use: only in the worlds of
    /// [`crate::rest`].
    CacheDamaged,
}

/// The consequences that a fault may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Whether client requests may fail while the fault lasts.
    pub errors: bool,
    /// Whether errors may continue after the fault has ended, until the next start.
    pub errors_stay: bool,
    /// Whether a start may be refused.
    pub refusal: bool,
    /// Whether crashes may come while the fault lasts or after it. A start that was refused because
    /// of the fault must succeed once it has ended: the refusal changed nothing.
    pub crashes: bool,
}

impl Outcome {
    /// The consequences that two faults may have together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            errors: self.errors || other.errors,
            errors_stay: self.errors_stay || other.errors_stay,
            refusal: self.refusal || other.refusal,
            crashes: self.crashes && other.crashes,
        }
    }
}

impl Scenario {
    /// Every scenario, with its weight.
    pub const ALL: [(Self, u64); 22] = [
        (Self::Crashes, 50),
        (Self::ModeSwitches, 8),
        (Self::CacheReadErrors, 3),
        (Self::CacheWriteErrors, 4),
        (Self::CacheWritesFail, 4),
        (Self::CacheFlushErrors, 4),
        (Self::CacheFull, 2),
        (Self::CacheVanishes, 4),
        (Self::CacheRot, 4),
        (Self::CacheLosesWrites, 2),
        (Self::CacheMisdirects, 2),
        (Self::CacheSlow, 2),
        (Self::PrimaryReadErrors, 3),
        (Self::PrimaryWriteErrors, 4),
        (Self::PrimaryFlushErrors, 4),
        (Self::PrimaryVanishes, 3),
        (Self::PrimaryReturns, 0),
        (Self::PrimaryStaysAway, 0),
        (Self::CacheEnds, 0),
        (Self::CacheLost, 4),
        (Self::CacheStale, 3),
        (Self::CacheDamaged, 0),
    ];

    /// The faults that may be combined with another one.
    pub const SECOND: [Self; 8] = [
        Self::CacheReadErrors,
        Self::CacheWriteErrors,
        Self::CacheWritesFail,
        Self::CacheFlushErrors,
        Self::PrimaryReadErrors,
        Self::PrimaryWriteErrors,
        Self::PrimaryFlushErrors,
        Self::PrimaryVanishes,
    ];

    /// A random scenario, by weight.
    pub fn from_rng(rng: &mut Rng) -> Self {
        let total = Self::ALL.iter().map(|(_, weight)| weight).sum();
        let mut at = rng.below(total);
        for (scenario, weight) in Self::ALL {
            if at < weight {
                return scenario;
            }
            at -= weight;
        }
        Self::Crashes
    }

    /// The consequences of this scenario.
    #[must_use]
    pub fn outcome(self) -> Outcome {
        let silent = Outcome { errors: false, errors_stay: false, refusal: false, crashes: true };
        match self {
            Self::Crashes | Self::ModeSwitches | Self::CacheSlow => silent,
            Self::PrimaryReadErrors
            | Self::PrimaryWriteErrors
            | Self::PrimaryFlushErrors
            | Self::PrimaryVanishes
            | Self::PrimaryReturns
            | Self::PrimaryStaysAway => Outcome { errors: true, ..silent },
            // A dirty block that could not be read stays fenced.
            Self::CacheReadErrors => Outcome { errors: true, errors_stay: true, ..silent },
            // Reads work, and writes go to the primary.
            Self::CacheWriteErrors
            | Self::CacheWritesFail
            | Self::CacheFlushErrors
            | Self::CacheFull => Outcome { refusal: true, ..silent },
            Self::CacheDamaged => {
                Outcome { errors: true, errors_stay: true, refusal: true, crashes: true }
            }
            // A lost or rotten record that no later record covers cannot be told from one that a
            // crash undid, so these scenarios have no crashes.
            Self::CacheVanishes
            | Self::CacheEnds
            | Self::CacheRot
            | Self::CacheLosesWrites
            | Self::CacheMisdirects => {
                Outcome { errors: true, errors_stay: true, refusal: true, crashes: false }
            }
            Self::CacheStale => Outcome { refusal: true, ..silent },
            Self::CacheLost => silent,
        }
    }

    /// Whether data on a primary in write-back is only seen through the cache.
    #[must_use]
    pub fn keeps_cache_and_modes(self) -> bool {
        !self.changes_modes() && !self.may_end_cache()
    }

    /// Whether the cache may be lost or detached.
    #[must_use]
    pub fn may_end_cache(self) -> bool {
        let left = matches!(
            self,
            Self::CacheWriteErrors
                | Self::CacheWritesFail
                | Self::CacheFlushErrors
                | Self::CacheFull
        );
        left || self.outcome().errors_stay || self == Self::CacheLost
    }

    /// Whether no device loses what it has acknowledged, so that a server's death is the same with
    /// this fault.
    #[must_use]
    pub fn spares_devices(self) -> bool {
        matches!(
            self,
            Self::Crashes
                | Self::ModeSwitches
                | Self::CacheReadErrors
                | Self::CacheWriteErrors
                | Self::CacheRot
                | Self::CacheSlow
                | Self::PrimaryReadErrors
                | Self::PrimaryReturns
        )
    }

    /// Whether a volume's mode may differ from the one at the start.
    #[must_use]
    pub fn changes_modes(self) -> bool {
        matches!(self, Self::ModeSwitches)
    }
}
