//! Waking a ring from another thread: the ring always has a read of an eventfd in flight.
//!
//! The flag `rung` limits writes to the eventfd to one per sleep. A waker first makes its message
//! visible, then sets the flag; the ring clears the flag before it looks for messages. So either
//! the ring sees the message, or the waker found the flag clear and wrote to the eventfd.

use std::fmt;
use std::io;
use std::sync::Arc;

use forebay_block::IoBuf;
use forebay_block::sync::atomic::{AtomicBool, Ordering};
use io_uring::{opcode, squeue, types};

#[cfg(not(loom))]
use event::Event;
#[cfg(loom)]
use models::Event;

/// User data of the read from the eventfd.
pub(super) const USER_DATA: u64 = u64::MAX - 1;
const COUNTER_BYTES: u32 = 8;

struct Bell {
    event: Event,
    rung: AtomicBool,
}

/// The kernel's part: an eventfd.
#[cfg(not(loom))]
mod event {
    use std::io;
    use std::os::fd::{AsRawFd, OwnedFd, RawFd};

    use rustix::event::{EventfdFlags, eventfd};

    pub struct Event(OwnedFd);

    impl Event {
        pub fn new() -> io::Result<Self> {
            Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
        }

        pub fn signal(&self) {
            // The counter cannot be full, since every read resets it. Nothing else can fail.
            let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
        }

        pub fn fd(&self) -> RawFd {
            self.0.as_raw_fd()
        }
    }
}

/// Makes one ring's wait return. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Waker {
    bell: Arc<Bell>,
}

impl Waker {
    /// Makes the ring's current or next wait return. Everything written before this call is then
    /// visible to the ring's thread.
    pub fn wake(&self) {
        if !self.bell.rung.swap(true, Ordering::AcqRel) {
            self.bell.event.signal();
        }
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}

/// The ring's side.
pub struct Alarm {
    bell: Arc<Bell>,
    /// Where the kernel stores the counter; leaked if a read might still be in flight.
    counter: IoBuf,
    armed: bool,
    rang: bool,
}

impl Alarm {
    /// An alarm with its waker.
    ///
    /// # Errors
    /// When the eventfd cannot be created.
    pub fn new() -> io::Result<(Self, Waker)> {
        let bell = Arc::new(Bell { event: Event::new()?, rung: AtomicBool::new(false) });
        let waker = Waker { bell: Arc::clone(&bell) };
        let counter = IoBuf::zeroed(COUNTER_BYTES as usize);
        Ok((Self { bell, counter, armed: false, rang: false }, waker))
    }

    /// The read to submit, unless one is in flight.
    pub(super) fn arm(&mut self) -> Option<squeue::Entry> {
        if self.armed {
            return None;
        }
        self.armed = true;
        let fd = types::Fd(self.bell.event.fd());
        let read = opcode::Read::new(fd, self.counter.as_mut_ptr(), COUNTER_BYTES);
        Some(read.build().user_data(USER_DATA))
    }

    pub(super) fn disarm(&mut self) {
        self.armed = false;
    }

    pub(super) fn is_armed(&self) -> bool {
        self.armed
    }

    /// Records that the read completed.
    pub(super) fn ring(&mut self) {
        self.armed = false;
        self.rang = true;
        self.bell.rung.swap(false, Ordering::AcqRel);
    }

    /// Whether a waker rang since the ring's wait last returned.
    pub(super) fn rang(&self) -> bool {
        self.rang
    }

    /// Resets the alarm when the ring's wait is about to return.
    pub(super) fn quiet(&mut self) {
        self.rang = false;
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if self.armed {
            std::mem::forget(std::mem::take(&mut self.counter));
        }
    }
}

/// A ring that only sleeps, for loom models here and in code built on it; run by `tools/loom`.
#[cfg(loom)]
mod models {
    use std::io;
    use std::os::fd::RawFd;

    use loom::sync::{Condvar, Mutex};

    use super::Alarm;

    /// The kernel's counter.
    pub struct Event {
        count: Mutex<u64>,
        counted: Condvar,
    }

    impl Event {
        pub fn new() -> io::Result<Self> {
            Ok(Self { count: Mutex::new(0), counted: Condvar::new() })
        }

        pub fn signal(&self) {
            *self.count.lock().unwrap_or_else(|error| error.into_inner()) += 1;
            self.counted.notify_one();
        }

        pub fn fd(&self) -> RawFd {
            -1
        }

        fn read(&self) {
            let mut count = self.count.lock().unwrap_or_else(|error| error.into_inner());
            while *count == 0 {
                count = self.counted.wait(count).unwrap_or_else(|error| error.into_inner());
            }
            *count = 0;
        }
    }

    impl Alarm {
        /// Waits as the ring does. loom aborts a model in which nobody wakes it any more.
        pub fn sleep(&mut self) {
            self.bell.event.read();
            self.ring();
        }
    }

    #[cfg(test)]
    mod tests {
        use std::sync::Arc;

        use loom::sync::atomic::{AtomicUsize, Ordering};
        use loom::thread;

        use super::*;

        /// Two threads each store a word with a relaxed write, then wake the third, which must see
        /// both.
        #[test]
        fn model_what_was_written_before_a_wake_is_seen_after_it() {
            loom::model(|| {
                let (mut alarm, waker) = Alarm::new().unwrap();
                let words = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
                let threads = [0, 1].map(|at| {
                    let (words, waker) = (Arc::clone(&words), waker.clone());
                    thread::spawn(move || {
                        words[at].store(1, Ordering::Relaxed);
                        waker.wake();
                    })
                });
                while words.iter().any(|word| word.load(Ordering::Relaxed) == 0) {
                    alarm.sleep();
                }
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            });
        }
    }
}
