//! Communication between threads: each has a mailbox, filled in batches and emptied once a turn.
//!
//! A mailbox has no limit of its own and never blocks; its senders bound its content. A thread has
//! at most [`CREDIT`] requests at another thread, each answered once; connections are bounded by
//! the client limit; the sender of a control message waits for the answer. So replies always fit,
//! and two threads cannot deadlock.

use std::mem;
use std::sync::PoisonError;

use forebay_block::sync::{Mutex, MutexGuard, OnceLock};
use forebay_device::Waker;

/// Most unanswered requests from one thread to another.
pub const CREDIT: u32 = 1024;

/// A thread's incoming messages, in order for each sender.
#[derive(Debug)]
pub struct Mailbox<M> {
    /// `None` once the owner is gone.
    messages: Mutex<Option<Vec<M>>>,
    /// Set by the owner before it first reads the mailbox.
    waker: OnceLock<Waker>,
}

impl<M> Default for Mailbox<M> {
    fn default() -> Self {
        Self { messages: Mutex::new(Some(Vec::new())), waker: OnceLock::new() }
    }
}

impl<M> Mailbox<M> {
    /// Sets the ring that senders wake. The owner calls it once, before its first
    /// [`Mailbox::take`].
    ///
    /// # Panics
    /// If it was called before.
    pub fn own(&self, waker: Waker) {
        assert!(self.waker.set(waker).is_ok(), "a mailbox has one owner");
    }

    /// Delivers messages and wakes the owner; drops them if the owner is gone. `batch` is empty
    /// afterwards.
    pub fn send(&self, batch: &mut Vec<M>) {
        if batch.is_empty() {
            return;
        }
        match &mut *self.lock() {
            Some(messages) => messages.append(batch),
            None => batch.clear(),
        }
        // An owner without a waker has not read the mailbox yet: it will see the messages.
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    /// Delivers one message and wakes the owner.
    pub fn send_one(&self, message: M) {
        self.send(&mut vec![message]);
    }

    /// Takes every message. `taken` must be empty; its memory is reused for the next ones.
    pub fn take(&self, taken: &mut Vec<M>) {
        debug_assert!(taken.is_empty());
        if let Some(messages) = &mut *self.lock() {
            mem::swap(taken, messages);
        }
    }

    /// Closes the mailbox: drops its messages, and all later ones.
    pub fn close(&self) {
        let messages = self.lock().take();
        drop(messages);
    }

    /// The list is consistent at any time, so a panic of another thread does not matter.
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
