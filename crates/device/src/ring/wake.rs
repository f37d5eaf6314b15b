//! Waking a ring from another thread: an eventfd that the ring always has a read in flight on.
//!
//! The flag `rung` keeps writes to the eventfd to one per sleep. Whoever wakes first makes its
//! message visible, then sets the flag; the ring clears the flag before it looks for messages.
//! So a message is either seen by that look, or its waker found the flag clear and wrote.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_block::IoBuf;
use io_uring::{opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

/// User data of the read of the eventfd.
pub(super) const USER_DATA: u64 = u64::MAX - 1;
const COUNTER_BYTES: u32 = 8;

struct Bell {
    event: OwnedFd,
    rung: AtomicBool,
}

/// Makes the wait of one ring return. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Waker {
    bell: Arc<Bell>,
}

impl Waker {
    /// Makes the ring's present or next wait return. Everything written before this call is
    /// visible to the ring's thread after that return.
    pub fn wake(&self) {
        if !self.bell.rung.swap(true, Ordering::AcqRel) {
            // A full counter cannot be: it is reset by every read. Nothing else can fail.
            let _ = rustix::io::write(&self.bell.event, &1u64.to_ne_bytes());
        }
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}

/// The ring's side.
pub(super) struct Alarm {
    bell: Arc<Bell>,
    /// Where the kernel puts the counter; leaked when a read might still be in flight.
    counter: IoBuf,
    armed: bool,
    rang: bool,
}

impl Alarm {
    pub(super) fn new() -> io::Result<(Self, Waker)> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let bell = Arc::new(Bell { event, rung: AtomicBool::new(false) });
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
        let fd = types::Fd(self.bell.event.as_raw_fd());
        let read = opcode::Read::new(fd, self.counter.as_mut_ptr(), COUNTER_BYTES);
        Some(read.build().user_data(USER_DATA))
    }

    pub(super) fn disarm(&mut self) {
        self.armed = false;
    }

    pub(super) fn is_armed(&self) -> bool {
        self.armed
    }

    /// The read completed.
    pub(super) fn ring(&mut self) {
        self.armed = false;
        self.rang = true;
        self.bell.rung.swap(false, Ordering::AcqRel);
    }

    /// Whether it rang since the last return of the ring's wait.
    pub(super) fn rang(&self) -> bool {
        self.rang
    }

    /// The ring's wait is about to return.
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
