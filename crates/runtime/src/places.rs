//! The places of clients: their number, who may take them, and who has one.
//!
//! Invariants: as long as there is a Unix socket to connect to, TCP clients leave a part of the
//! places to its clients. TCP clients that have not chosen a volume yet leave a part of TCP's
//! places to the others. A client without a place never takes one; it is told the reason, unless
//! too many are being told already. A client of a server before has had a place, and keeps one.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use forebay_block::{CLIENTS_MAX, Instant};

/// The places reserved for clients of Unix sockets are all places divided by this, at least one.
pub const KEPT_FOR_UNIX: usize = 8;
/// TCP clients that have not chosen a volume yet may have TCP's places divided by this.
const NEWCOMERS: usize = 2;
/// Clients without a place that are told so at the same time; further ones are disconnected without
/// a reason.
pub const TOLD_MAX: usize = 16;
/// Least time between two lines about refusals in the log.
const REFUSALS_TIME: Duration = Duration::from_secs(60);

/// How a client connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Over a Unix socket.
    Unix,
    /// Over TCP.
    Tcp,
}

/// The place that a connection takes up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seat {
    /// A place of a Unix socket's client.
    Unix,
    /// A place of a TCP client that has not chosen a volume yet.
    Newcomer,
    /// A place of a TCP client.
    Tcp,
    /// No place: the client is only told so.
    Told,
}

/// Why there is no place for a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Full {
    /// All places are taken.
    All,
    /// All places that TCP clients may have are taken.
    Tcp,
    /// Too many TCP clients have not chosen a volume yet.
    Newcomers,
}

impl Full {
    /// The reason as text, for the client and the log.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::All => "all places for clients are taken; try again later (max_clients)",
            Self::Tcp => {
                "all places for clients over TCP are taken; try again later (max_clients, of which \
                 a part is kept for Unix sockets)"
            }
            Self::Newcomers => {
                "too many clients over TCP are in their handshake; try again (max_clients)"
            }
        }
    }
}

/// The places and their use; shared by all threads.
#[derive(Debug)]
pub struct Places {
    by_thread: Vec<AtomicUsize>,
    limit: usize,
    tcp: AtomicUsize,
    newcomers: AtomicUsize,
    told: AtomicUsize,
    refused: AtomicU64,
}

impl Places {
    /// `limit` places for the clients of `threads` threads.
    #[must_use]
    pub fn new(threads: usize, limit: usize) -> Self {
        Self {
            by_thread: (0..threads).map(|_| AtomicUsize::new(0)).collect(),
            limit: limit.min(CLIENTS_MAX),
            tcp: AtomicUsize::new(0),
            newcomers: AtomicUsize::new(0),
            told: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// Number of places, taken or not.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Number of places taken.
    #[must_use]
    pub fn connected(&self) -> usize {
        self.by_thread.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Number of clients refused so far.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Places that TCP clients may have; `unix`: clients may also come over Unix sockets.
    fn for_tcp(&self, unix: bool) -> usize {
        let kept = (self.limit / KEPT_FOR_UNIX).max(1).min(self.limit - 1);
        self.limit - if unix { kept } else { 0 }
    }

    /// Takes a place for a new client, on the thread with the fewest clients. Only the thread with
    /// the listeners calls this.
    ///
    /// # Errors
    /// If there is no place for the client; the refusal is counted.
    pub fn take(&self, way: Way, unix: bool) -> Result<(usize, Seat), Full> {
        let full = self.is_full_for(way, unix);
        if let Some(full) = full {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(full);
        }
        let (thread, mut seat) = self.count(way);
        if seat == Seat::Tcp {
            self.newcomers.fetch_add(1, Ordering::Relaxed);
            seat = Seat::Newcomer;
        }
        Ok((thread, seat))
    }

    /// Takes a place for a client of a server before, which has chosen a volume there, even if the
    /// limit is lower now or others came first. `None` if there are as many as a server can have.
    pub fn take_over(&self, way: Way) -> Option<(usize, Seat)> {
        (self.connected() < CLIENTS_MAX).then(|| self.count(way))
    }

    /// Counts a client that has chosen a volume, on the thread with the fewest.
    fn count(&self, way: Way) -> (usize, Seat) {
        let load = |at: &usize| self.by_thread[*at].load(Ordering::Relaxed);
        let thread = (0..self.by_thread.len()).min_by_key(load).expect("there are threads");
        self.by_thread[thread].fetch_add(1, Ordering::Relaxed);
        match way {
            Way::Unix => (thread, Seat::Unix),
            Way::Tcp => {
                self.tcp.fetch_add(1, Ordering::Relaxed);
                (thread, Seat::Tcp)
            }
        }
    }

    fn is_full_for(&self, way: Way, unix: bool) -> Option<Full> {
        if self.connected() >= self.limit {
            return Some(Full::All);
        }
        if way == Way::Unix {
            return None;
        }
        let for_tcp = self.for_tcp(unix);
        if self.tcp.load(Ordering::Relaxed) >= for_tcp {
            return Some(Full::Tcp);
        }
        let newcomers = self.newcomers.load(Ordering::Relaxed);
        (newcomers >= for_tcp.div_ceil(NEWCOMERS)).then_some(Full::Newcomers)
    }

    /// Reserves the right to tell a client that it has no place, if few are being told; must be
    /// given back with [`Places::release`].
    #[must_use]
    pub fn tell(&self) -> Option<Seat> {
        if self.told.load(Ordering::Relaxed) >= TOLD_MAX {
            return None;
        }
        self.told.fetch_add(1, Ordering::Relaxed);
        Some(Seat::Told)
    }

    /// Records that a client has chosen a volume.
    pub fn settle(&self, seat: &mut Seat) {
        if *seat == Seat::Newcomer {
            self.newcomers.fetch_sub(1, Ordering::Relaxed);
            *seat = Seat::Tcp;
        }
    }

    /// Gives back the place of a connection of a thread.
    pub fn release(&self, thread: usize, mut seat: Seat) {
        self.settle(&mut seat);
        match seat {
            Seat::Told => {
                self.told.fetch_sub(1, Ordering::Relaxed);
                return;
            }
            Seat::Tcp => drop(self.tcp.fetch_sub(1, Ordering::Relaxed)),
            Seat::Unix | Seat::Newcomer => {}
        }
        self.by_thread[thread].fetch_sub(1, Ordering::Relaxed);
    }
}

/// Combines many refusals into one line of the log.
#[derive(Debug, Default)]
pub struct Refusals {
    said: Option<Instant>,
    since: u64,
}

impl Refusals {
    /// Counts a refusal. Returns the number since the last line if another line is due.
    pub fn count(&mut self, now: Instant) -> Option<u64> {
        self.since += 1;
        if self.said.is_some_and(|said| now.since(said) < REFUSALS_TIME) {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_of_a_server_before_keep_their_places() {
        let places = Places::new(2, 4);
        let newcomer = places.take(Way::Tcp, true).expect("the first");
        let seats: Vec<_> = (0..4).map(|_| places.take_over(Way::Tcp).expect("a place")).collect();
        assert!(seats.iter().all(|&(_, seat)| seat == Seat::Tcp));
        assert_eq!((places.connected(), places.take(Way::Unix, true)), (5, Err(Full::All)));
        seats.into_iter().chain([newcomer]).for_each(|(at, seat)| places.release(at, seat));
        assert_eq!(places.connected(), 0);
        places.take(Way::Tcp, true).expect("no newcomer is left");
    }

    #[test]
    fn tcp_leaves_places_to_unix_sockets() {
        let places = Places::new(2, 16);
        let mut seats = Vec::new();
        while let Ok((thread, mut seat)) = places.take(Way::Tcp, true) {
            places.settle(&mut seat);
            seats.push((thread, seat));
        }
        assert_eq!((seats.len(), places.take(Way::Tcp, true)), (14, Err(Full::Tcp)));
        assert!((0..2).all(|_| places.take(Way::Unix, true).is_ok()));
        assert_eq!(places.take(Way::Unix, true), Err(Full::All));
        assert_eq!((places.connected(), places.refused()), (16, 3));
        seats.drain(..).for_each(|(thread, seat)| places.release(thread, seat));
        assert_eq!(places.connected(), 2);
        assert!(places.take(Way::Tcp, true).is_ok());
    }

    #[test]
    fn what_is_kept_is_never_all_and_never_nothing() {
        for (limit, with_unix, alone) in [(1, 1, 1), (2, 1, 2), (7, 6, 7), (128, 112, 128)] {
            let places = Places::new(1, limit);
            assert_eq!((places.for_tcp(true), places.for_tcp(false)), (with_unix, alone));
        }
    }

    #[test]
    fn handshakes_leave_places_to_those_who_finish_theirs() {
        let places = Places::new(1, 9);
        let mut seats: Vec<_> = (0..4).map(|_| places.take(Way::Tcp, true).unwrap()).collect();
        assert_eq!(places.take(Way::Tcp, true), Err(Full::Newcomers));
        assert!(places.take(Way::Unix, true).is_ok(), "those are others");
        places.settle(&mut seats[0].1);
        assert_eq!(seats[0].1, Seat::Tcp);
        assert!(places.take(Way::Tcp, true).is_ok(), "one has finished");
        assert_eq!(places.take(Way::Tcp, true), Err(Full::Newcomers));
        places.release(0, seats[1].1);
        assert!(places.take(Way::Tcp, true).is_ok(), "one has gone");
    }

    #[test]
    fn few_are_told_and_they_take_no_place() {
        let places = Places::new(1, 1);
        let told: Vec<_> = (0..TOLD_MAX).map(|_| places.tell().unwrap()).collect();
        assert_eq!((places.tell(), places.connected()), (None, 0));
        told.into_iter().for_each(|seat| places.release(0, seat));
        assert!(places.tell().is_some() && places.take(Way::Unix, true).is_ok());
    }

    #[test]
    fn refusals_are_counted_between_lines() {
        let mut refusals = Refusals::default();
        let start = Instant(0);
        assert_eq!(refusals.count(start), Some(1));
        assert!((0..5).all(|_| refusals.count(start + Duration::from_secs(59)).is_none()));
        assert_eq!(refusals.count(start + Duration::from_secs(60)), Some(6));
    }
}
