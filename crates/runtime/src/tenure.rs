//! How long a client holds shared memory while the server waits for it.
//!
//! A client that takes its answers slowly, or sends the data of a write slowly, keeps memory from
//! others. So it has a time in which it must move as many bytes as it held at first: the patience,
//! and a second for each [`RATE`] bytes. Then a new time begins. Only the time in which the server
//! waits for the client counts. Who exceeds it is disconnected if others wait for memory.

use std::time::Duration;

/// Bytes for which a client gets a second more.
const RATE: u64 = 1 << 20;

/// The current time of one client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tenure {
    /// Bytes held at the beginning, and how many are still to be moved.
    held: u64,
    left: u64,
    /// For how long the server has waited for the client.
    waited: Duration,
}

impl Tenure {
    /// A time that begins now, for a client that holds this many bytes.
    #[must_use]
    pub fn of(held: u64) -> Self {
        Self { held, left: held, waited: Duration::ZERO }
    }

    /// Counts time in which the server waited for the client.
    pub fn wait(&mut self, time: Duration) {
        self.waited += time;
    }

    /// Counts bytes that the client took or sent. If they were the last ones, another time begins,
    /// for the `held` bytes of now.
    pub fn moved(&mut self, bytes: u64, held: u64) {
        self.left = self.left.saturating_sub(bytes);
        if self.left == 0 {
            *self = Self::of(held);
        }
    }

    /// For how much longer the server waits.
    #[must_use]
    pub fn left(&self, patience: Duration) -> Duration {
        let all = patience + Duration::from_secs_f64(self.held as f64 / RATE as f64);
        all.saturating_sub(self.waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_ends_when_all_that_was_held_is_moved() {
        let (patience, second) = (Duration::from_secs(60), Duration::from_secs(1));
        let mut tenure = Tenure::of(32 * RATE);
        assert_eq!(tenure.left(patience), 92 * second);
        tenure.wait(50 * second);
        tenure.moved(31 * RATE, RATE);
        tenure.wait(41 * second);
        assert_eq!(tenure.left(patience), second, "a trickle wins no time");
        tenure.moved(RATE, 4 * RATE);
        assert_eq!(tenure.left(patience), 64 * second);
        tenure.wait(99 * second);
        assert_eq!(tenure.left(patience), Duration::ZERO);
    }
}
