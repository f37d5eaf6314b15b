//! Whether optional work that often gains nothing is worth another try.

use crate::limits::{TRIES_REFUSED_MAX, TRY_ONE_IN};

/// The results of recent tries.
#[derive(Clone, Copy, Default, Debug)]
pub struct Tries {
    /// Tries in a row that gained nothing.
    refused: u32,
    /// Opportunities skipped since the last try.
    skipped: u32,
}

impl Tries {
    /// Returns whether to try now: after many tries in a row without gain, only one in a few is
    /// made.
    pub fn is_due(&mut self) -> bool {
        if self.refused < TRIES_REFUSED_MAX {
            return true;
        }
        self.skipped = (self.skipped + 1) % TRY_ONE_IN;
        self.skipped == 0
    }

    /// Notes whether a try was worth it.
    pub fn note(&mut self, worth: bool) {
        self.refused = if worth { 0 } else { self.refused.saturating_add(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_vain_few_are_made_until_one_is_worth_it() {
        let mut tries = Tries::default();
        for _ in 0..TRIES_REFUSED_MAX {
            assert!(tries.is_due());
            tries.note(false);
        }
        let made = (0..10 * TRY_ONE_IN).filter(|_| tries.is_due()).count();
        assert_eq!(made, 10);
        tries.note(true);
        assert!((0..10).all(|_| tries.is_due()));
    }
}
