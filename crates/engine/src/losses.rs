//! Which flushes have to be told of completed writes that are lost.

use forebay_block::IoError;

/// Losses of completed writes of a volume. A flush that does not know of a loss fails: all that
/// wait when it is found, and the first that begins afterwards, for what completed in between.
#[derive(Clone, Debug, Default)]
pub struct Losses {
    count: u64,
    /// How many of them a flush that began after them has been told of.
    told: u64,
    /// The last one.
    error: Option<IoError>,
}

/// The losses that there were when a flush began.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    count: u64,
    told: u64,
}

impl Losses {
    /// Completed writes are lost.
    pub fn note(&mut self, error: IoError) {
        self.count += 1;
        self.error = Some(error);
    }

    /// A flush begins.
    #[must_use]
    pub fn known(&self) -> Known {
        Known { count: self.count, told: self.told }
    }

    /// The error for a flush that is answered, and what was known when it began.
    pub fn tell(&mut self, known: Known) -> Option<IoError> {
        self.told = self.told.max(known.count);
        self.error.clone().filter(|_| known.told < self.count)
    }
}
