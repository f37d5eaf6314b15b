//! How threads talk: a mailbox each, filled in batches, emptied once a turn.
//!
//! A mailbox has no limit of its own and never blocks; what can be in it is bounded by its
//! senders. A thread has at most [`CREDIT`] requests at another thread, each answered once;
//! connections are bounded by the client limit; control messages by whoever waits for their
//! answers. So replies always fit, and two threads cannot wait for each other.

use std::mem;
use std::sync::PoisonError;

use forebay_block::sync::{Mutex, MutexGuard, OnceLock};
use forebay_device::Waker;

/// Most requests that one thread has at another.
pub const CREDIT: u32 = 1024;

/// Where a thread finds its messages, in the order of each sender.
#[derive(Debug)]
pub struct Mailbox<M> {
    /// `None` once the owner is gone.
    messages: Mutex<Option<Vec<M>>>,
    /// Set by the owner before it looks into the mailbox for the first time.
    waker: OnceLock<Waker>,
}

impl<M> Default for Mailbox<M> {
    fn default() -> Self {
        Self { messages: Mutex::new(Some(Vec::new())), waker: OnceLock::new() }
    }
}

impl<M> Mailbox<M> {
    /// Makes the senders wake this ring. The owner calls it once, before its first
    /// [`Mailbox::take`].
    ///
    /// # Panics
    /// If it was called before.
    pub fn own(&self, waker: Waker) {
        assert!(self.waker.set(waker).is_ok(), "a mailbox has one owner");
    }

    /// Puts messages in and wakes the owner; drops them when the owner is gone. `batch` is empty
    /// afterwards.
    pub fn send(&self, batch: &mut Vec<M>) {
        if batch.is_empty() {
            return;
        }
        match &mut *self.lock() {
            Some(messages) => messages.append(batch),
            None => batch.clear(),
        }
        // An owner without a waker has not looked yet: it will see the messages.
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    /// Puts one message in and wakes the owner.
    pub fn send_one(&self, message: M) {
        self.send(&mut vec![message]);
    }

    /// Takes every message. `taken` must be empty; its memory is used for the next ones.
    pub fn take(&self, taken: &mut Vec<M>) {
        debug_assert!(taken.is_empty());
        if let Some(messages) = &mut *self.lock() {
            mem::swap(taken, messages);
        }
    }

    /// The owner goes: drops what is in it, and what comes later.
    pub fn close(&self) {
        let messages = self.lock().take();
        drop(messages);
    }

    /// A list of messages is whole at any time: a panic elsewhere does not matter.
    fn lock(&self) -> MutexGuard<'_, Option<Vec<M>>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use forebay_device::{Clock, Ring};

    use super::*;

    #[test]
    fn what_is_sent_to_nobody_is_dropped() {
        let mailbox = Mailbox::default();
        let message = Arc::new(());
        mailbox.send_one(Arc::clone(&message));
        mailbox.close();
        mailbox.send_one(Arc::clone(&message));
        assert_eq!(Arc::strong_count(&message), 1);
    }

    #[test]
    fn nothing_is_lost_or_reordered_between_sleeping_threads() {
        const SENDERS: u64 = 3;
        const EACH: u64 = 20_000;
        let mailbox = Arc::new(Mailbox::default());
        let threads: Vec<_> = (0..SENDERS)
            .map(|sender| {
                let mailbox = Arc::clone(&mailbox);
                thread::spawn(move || {
                    let mut batch = Vec::new();
                    for i in 0..EACH {
                        batch.push((sender, i));
                        if i % (sender + 2) == 0 || i + 1 == EACH {
                            mailbox.send(&mut batch);
                        }
                    }
                })
            })
            .collect();
        let ring = Ring::new(8, None).unwrap();
        mailbox.own(ring.waker());
        let clock = Clock::start();
        let mut next = [0u64; SENDERS as usize];
        let mut taken = Vec::new();
        while next.iter().sum::<u64>() < SENDERS * EACH {
            mailbox.take(&mut taken);
            if taken.is_empty() {
                let asleep = clock.now();
                ring.wait(&clock, Some(asleep + Duration::from_secs(20))).unwrap();
                assert!(clock.now().since(asleep) < Duration::from_secs(19), "a wake-up was lost");
            }
            for (sender, i) in taken.drain(..) {
                assert_eq!(next[sender as usize], i);
                next[sender as usize] += 1;
            }
        }
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
