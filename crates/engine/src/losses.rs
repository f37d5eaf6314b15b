//! Which flushes must report the loss of completed writes.

use forebay_block::IoError;

/// Losses of completed writes of a volume. A flush that does not know of a loss fails: every flush
/// that is waiting when the loss is found, and the first flush that begins afterwards, for the
/// writes completed in between.
#[derive(Clone, Debug, Default)]
pub struct Losses {
    count: u64,
    /// Number of losses that have been reported to a flush that began after them.
    told: u64,
    /// The error of the last loss.
    error: Option<IoError>,
}

/// The losses that were known when a flush began.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    count: u64,
    told: u64,
}

impl Losses {
    /// Notes that completed writes are lost.
    pub fn note(&mut self, error: IoError) {
        self.count += 1;
        self.error = Some(error);
    }

    /// Whether a loss has been told to no flush that began after it.
    #[must_use]
    pub fn is_untold(&self) -> bool {
        self.told < self.count
    }

    /// Returns the losses known now, for a flush that begins.
    #[must_use]
    pub fn known(&self) -> Known {
        Known { count: self.count, told: self.told }
    }

    /// Returns the error with which to answer a flush that began when `known` were the losses.
    pub fn tell(&mut self, known: Known) -> Option<IoError> {
        self.told = self.told.max(known.count);
        self.error.clone().filter(|_| known.told < self.count)
    }
}
