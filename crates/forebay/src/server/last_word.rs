//! What a stop has left in the cache, for `forebay stop`: it asks again and again, and the server
//! waits for it before it goes. A server that dies leaves the question open.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_control::LeftSnapshot;

/// How long to wait for the first question, and for the next one of who has asked before.
const UNASKED: Duration = Duration::from_secs(1);
const ASKED: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(10);

/// The last word of a server.
#[derive(Default)]
pub struct LastWord {
    left: OnceLock<LeftSnapshot>,
    asked: AtomicBool,
    told: AtomicBool,
}

impl LastWord {
    /// The answer to the question; `None` until the server has stopped.
    pub fn ask(&self) -> Option<LeftSnapshot> {
        self.asked.store(true, Ordering::SeqCst);
        let left = self.left.get().copied();
        self.told.fetch_or(left.is_some(), Ordering::SeqCst);
        left
    }

    /// Tells this from now on, and waits a short time until somebody has heard it.
    pub fn tell(&self, left: LeftSnapshot) {
        let since = Instant::now();
        self.left.get_or_init(|| left);
        let limit = || if self.asked.load(Ordering::SeqCst) { ASKED } else { UNASKED };
        while !self.told.load(Ordering::SeqCst) && since.elapsed() < limit() {
            std::thread::sleep(STEP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_hears_it_and_nobody_is_waited_for_longer() {
        let (word, left) =
            (LastWord::default(), LeftSnapshot { dirty_bytes: 8192, lost_bytes: 4096 });
        assert_eq!(word.ask(), None);
        std::thread::scope(|scope| {
            let begun = Instant::now();
            let telling = scope.spawn(|| word.tell(left));
            while word.ask().is_none() {
                std::thread::sleep(STEP);
            }
            telling.join().expect("it ends");
            assert!(begun.elapsed() < ASKED);
        });
        assert_eq!(word.ask(), Some(left));
    }
}
