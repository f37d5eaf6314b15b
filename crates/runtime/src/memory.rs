//! The memory of clients: one budget for all, of which a part is reserved for each client. A small
//! budget is a minimum: see [`client_memory_max`].
//!
//! Requests beyond a client's own part use the shared rest. When that is used up, clients wait in a
//! line, first come first served, and their connections are not read. A client that needs more than
//! the whole rest waits until it has all of it.
//!
//! Invariants: no client overtakes the line; bytes are either granted to a client or free, never
//! both; returning bytes wakes the clients that can now continue. Requests that fit in a client's
//! own part never get here, and without a line taking memory is one atomic operation.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_block::REQUEST_MAX;

use crate::mailbox::Mailbox;
use crate::message::Message;

/// Default for the memory of all clients, in bytes.
pub const CLIENT_MEMORY: u64 = 256 << 20;
/// All clients' own parts together are the budget divided by this.
const OWN: u64 = 4;
/// Bounds of a client's own part, in bytes: enough for small requests.
const OWN_MIN: u64 = 64 << 10;
const OWN_MAX: u64 = 1 << 20;

/// The parts into which a budget is divided, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Parts {
    /// Each client's own.
    own: u64,
    /// The shared rest.
    rest: u64,
}

impl Parts {
    /// Those of a budget of `bytes` for `places` clients. With many places, the own parts may
    /// exceed the budget: then the rest is a minimum, in addition.
    fn of(bytes: u64, places: usize) -> Self {
        let places = places.max(1) as u64;
        let own = (bytes / OWN / places).clamp(OWN_MIN, OWN_MAX);
        Self { own, rest: bytes.saturating_sub(own * places).max(bytes / OWN) }
    }
}

/// Most bytes that `places` clients hold with a budget of `bytes`. More than the budget if it is
/// small: each client has its own part, and the longest request is served, although it is larger
/// than the rest.
#[must_use]
pub fn client_memory_max(bytes: u64, places: usize) -> u64 {
    let Parts { own, rest } = Parts::of(bytes, places);
    rest.max(REQUEST_MAX).saturating_add(own * places.max(1) as u64)
}

/// Identifies a waiting request for memory; the grant comes as a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket(u64);

/// Bytes for a client that waited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The client's index in the table of its thread.
    pub client: u32,
    /// The ticket of its request.
    pub ticket: Ticket,
    /// Number of bytes granted.
    pub bytes: u64,
}

/// The memory of all clients; shared by all threads.
pub struct Memory {
    parts: Parts,
    taken: AtomicU64,
    /// Whether the line is not empty; changed only under its lock.
    waited_for: AtomicBool,
    line: Mutex<Line>,
    mailboxes: Arc<[Mailbox<Message>]>,
}

#[derive(Default)]
struct Line {
    last: u64,
    waiting: VecDeque<(usize, Grant)>,
}

impl Memory {
    /// Creates a budget of `bytes` for `places` clients, served by the threads of `mailboxes`.
    #[must_use]
    pub fn new(bytes: u64, places: usize, mailboxes: Arc<[Mailbox<Message>]>) -> Self {
        Self {
            parts: Parts::of(bytes, places),
            taken: AtomicU64::new(0),
            waited_for: AtomicBool::new(false),
            line: Mutex::default(),
            mailboxes,
        }
    }

    /// Bytes reserved for each client.
    #[must_use]
    pub fn own(&self) -> u64 {
        self.parts.own
    }

    /// Whether clients wait in the line, except for the one with this ticket.
    #[must_use]
    pub fn is_waited_for(&self, except: Option<Ticket>) -> bool {
        let line = self.lock();
        line.waiting.iter().any(|(_, grant)| Some(grant.ticket) != except)
    }

    /// Takes bytes for the client at index `client` of `thread`.
    ///
    /// # Errors
    /// If fewer bytes are left, or others are already waiting. The client is then in the line, and
    /// a [`Message::Memory`] with this ticket follows when it is its turn.
    pub fn take(&self, thread: usize, client: u32, bytes: u64) -> Result<(), Ticket> {
        if !self.waited_for.load(Ordering::SeqCst) && self.try_take(bytes) {
            return Ok(());
        }
        let mut line = self.lock();
        // From here on, threads that give bytes back take the lock.
        self.waited_for.store(true, Ordering::SeqCst);
        if line.waiting.is_empty() && self.try_take(bytes) {
            self.waited_for.store(false, Ordering::SeqCst);
            return Ok(());
        }
        line.last += 1;
        let ticket = Ticket(line.last);
        line.waiting.push_back((thread, Grant { client, ticket, bytes }));
        Err(ticket)
    }

    fn try_take(&self, bytes: u64) -> bool {
        let fits = |taken: u64| {
            let sum = taken.saturating_add(bytes);
            (taken == 0 || sum <= self.parts.rest).then_some(sum)
        };
        self.taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits).is_ok()
    }

    /// Gives bytes back.
    pub fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::SeqCst);
        if self.waited_for.load(Ordering::SeqCst) {
            self.serve(&mut self.lock());
        }
    }

    /// Leaves the line. Returns false if the grant is already on its way: its bytes must be given
    /// back when it arrives.
    pub fn leave(&self, ticket: Ticket) -> bool {
        let mut line = self.lock();
        let before = line.waiting.len();
        line.waiting.retain(|(_, grant)| grant.ticket != ticket);
        // The next client in the line may need less.
        self.serve(&mut line);
        line.waiting.len() < before
    }

    fn serve(&self, line: &mut Line) {
        while let Some(&(thread, grant)) = line.waiting.front() {
            if !self.try_take(grant.bytes) {
                return;
            }
            line.waiting.pop_front();
            self.mailboxes[thread].send_one(Message::Memory(grant));
        }
        self.waited_for.store(false, Ordering::SeqCst);
    }

    /// The line is consistent at any time, so a panic of another thread does not matter.
    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// 12 MiB for all, and 1 MiB of it for each of four clients.
    fn memory() -> Memory {
        let mailboxes: Arc<[_]> = (0..2).map(|_| Mailbox::default()).collect();
        let memory = Memory::new(16 * MIB, 4, mailboxes);
        assert_eq!(memory.parts, Parts { own: MIB, rest: 12 * MIB });
        memory
    }

    /// The grants that a thread received: client and bytes.
    fn granted(memory: &Memory, thread: usize) -> Vec<(u32, u64)> {
        let mut messages = Vec::new();
        memory.mailboxes[thread].take(&mut messages);
        let grants = messages.into_iter().map(|message| match message {
            Message::Memory(grant) => (grant.client, grant.bytes / MIB),
            _ => panic!("only grants are sent"),
        });
        grants.collect()
    }

    #[test]
    fn own_parts_and_the_rest_are_the_whole() {
        for (bytes, places, own, rest) in [
            (256 * MIB, 128, 512 << 10, 192 * MIB),
            (256 * MIB, 900, 74565, 256 * MIB - 900 * 74565),
            (16 * MIB, 900, OWN_MIN, 4 * MIB),
            (1 << 30, 1, OWN_MAX, (1 << 30) - MIB),
        ] {
            assert_eq!(Parts::of(bytes, places), Parts { own, rest }, "{bytes} for {places}");
        }
    }

    /// Own parts of 900 clients used to count as parts of a budget that they exceed.
    #[test]
    fn a_small_budget_for_many_clients_is_exceeded_by_a_known_amount() {
        for (bytes, places, most) in [
            (256 * MIB, 128, 256 * MIB),
            (256 * MIB, 900, 256 * MIB),
            (16 * MIB, 900, 900 * OWN_MIN + REQUEST_MAX),
            (16 * MIB, 1, MIB + REQUEST_MAX),
        ] {
            assert_eq!(client_memory_max(bytes, places), most, "{bytes} for {places}");
        }
    }

    #[test]
    fn what_does_not_fit_waits_its_turn() {
        let memory = memory();
        memory.take(0, 1, 8 * MIB).unwrap();
        memory.take(1, 2, 8 * MIB).unwrap_err();
        memory.take(0, 3, MIB).expect_err("it would fit, and does not pass the line");
        memory.take(0, 4, 6 * MIB).unwrap_err();
        memory.give_back(2 * MIB);
        assert!(granted(&memory, 1).is_empty(), "6 and 8 are more than 12");
        memory.give_back(6 * MIB);
        assert_eq!((granted(&memory, 1), granted(&memory, 0)), (vec![(2, 8)], vec![(3, 1)]));
        memory.give_back(9 * MIB);
        assert_eq!(granted(&memory, 0), [(4, 6)]);
        memory.take(0, 1, 6 * MIB).expect("nobody waits");
    }

    #[test]
    fn more_than_there_is_is_granted_alone() {
        let memory = memory();
        memory.take(0, 1, MIB).unwrap();
        memory.take(0, 2, 32 * MIB).unwrap_err();
        memory.give_back(MIB);
        assert_eq!(granted(&memory, 0), [(2, 32)]);
        memory.take(0, 1, MIB).expect_err("that one is alone");
        memory.give_back(32 * MIB);
        assert_eq!(granted(&memory, 0), [(1, 1)]);
    }

    #[test]
    fn who_leaves_the_line_makes_way_for_the_next() {
        let memory = memory();
        memory.take(0, 1, 8 * MIB).unwrap();
        let large = memory.take(0, 2, 8 * MIB).unwrap_err();
        assert!(memory.is_waited_for(None) && !memory.is_waited_for(Some(large)));
        let small = memory.take(1, 3, 4 * MIB).unwrap_err();
        assert!(memory.is_waited_for(Some(large)));
        assert!(memory.leave(large));
        assert_eq!(granted(&memory, 1), [(3, 4)]);
        assert!(!memory.leave(small), "it has its grant");
        memory.give_back(4 * MIB);
        memory.take(0, 2, 4 * MIB).expect("nobody waits");
    }

    #[test]
    fn nothing_is_lost_or_granted_twice_between_threads() {
        let mailboxes: Arc<[_]> = (0..4).map(|_| Mailbox::default()).collect();
        let memory = Memory::new(16 * MIB, 4, mailboxes);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let memory = &memory;
                scope.spawn(move || {
                    for turn in 1..2000 {
                        let bytes = turn % 16 * MIB;
                        let Err(ticket) = memory.take(thread, 7, bytes) else {
                            memory.give_back(bytes);
                            continue;
                        };
                        let mut got = Vec::new();
                        while got.is_empty() {
                            std::thread::yield_now();
                            memory.mailboxes[thread].take(&mut got);
                        }
                        let Message::Memory(grant) = &got[0] else { panic!("only grants") };
                        assert_eq!(*grant, Grant { client: 7, ticket, bytes });
                        memory.give_back(bytes);
                    }
                });
            }
        });
        assert_eq!(memory.taken.load(Ordering::SeqCst), 0);
        assert!(!memory.waited_for.load(Ordering::SeqCst));
    }
}
