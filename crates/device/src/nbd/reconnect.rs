//! A thread that parts with the old server connection and connects again, with growing pauses,
//! until it succeeds or is no longer wanted.
//!
//! Parting ends with a reset if the server does not hang up. A plain close would leave the kernel
//! to deliver what it has not sent yet, for minutes, and an old change would land over a newer one.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_linger, set_socket_timeout, set_tcp_user_timeout};
use rustix::net::{RecvFlags, Shutdown, connect_unspec, recv, shutdown};

use super::Shared;
use super::handshake::Connection;
use super::line::Parting;
use crate::ring::Waker;

/// The first pause between attempts; each further pause is twice as long.
const PAUSE_LEAST: Duration = Duration::from_millis(100);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Interval at which a parting thread checks whether it is still wanted.
const GLANCE: Duration = Duration::from_millis(100);
/// Size of the buffer for discarded answers, in bytes.
const DREGS: usize = 64 << 10;

/// How long the kernel tries to deliver what the server's kernel does not take, before it breaks
/// the connection: longer than the silence of a server that gets requests.
const UNTAKEN_MAX: Duration = Duration::from_secs(90);
/// Interval at which the log repeats that there is no connection yet, if the reason is the same.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// A broken connection, and how to part with its server.
pub(super) type Old = Option<(OwnedFd, Parting)>;

/// A running reconnection. Dropping it ends the thread at its next pause.
pub(super) struct Reconnect {
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    outcome: Mutex<Outcome>,
    unwanted: Condvar,
}

#[derive(Default)]
struct Outcome {
    /// The old connection, until the thread runs.
    old: Old,
    connection: Option<Connection>,
    /// Whether the server has not hung up on the old connection.
    is_unparted: bool,
    unwanted: bool,
}

impl Reconnect {
    /// Starts the thread. It first parts with the server on the `old` connection; it calls `waker`
    /// when there is a new connection.
    ///
    /// # Errors
    /// The old connection, when the thread cannot be created.
    pub(super) fn start(shared: Arc<Shared>, waker: Waker, old: Old) -> Result<Self, Old> {
        let outcome = Mutex::new(Outcome { old, ..Outcome::default() });
        let state = Arc::new(State { outcome, unwanted: Condvar::new() });
        let theirs = Arc::clone(&state);
        let thread = thread::Builder::new().name("nbd-reconnect".to_owned());
        let started = thread.spawn(move || {
            let old = theirs.lock().old.take();
            if let Some((socket, parting)) = old {
                let is_unparted = !theirs.part(socket, parting);
                theirs.lock().is_unparted = is_unparted;
                // Until it is connected again, nobody knows when these changes are carried out.
                shared.unparted.fetch_add(u32::from(is_unparted), Ordering::Relaxed);
                theirs.pause(parting.grace);
            }
            theirs.run(&shared, &waker);
        });
        match started {
            Ok(_) => Ok(Self { state }),
            Err(_) => Err(state.lock().old.take()),
        }
    }

    /// Takes the new connection, if it exists, and whether the server may still have changes that
    /// it received on the old one: it had some, and did not hang up.
    pub(super) fn take(&self) -> Option<(Connection, bool)> {
        let mut outcome = self.state.lock();
        let is_unparted = outcome.is_unparted;
        Some((outcome.connection.take()?, is_unparted))
    }
}

/// Makes a TCP connection one that ends with a reset, whatever closes it: the end of this process
/// too. What the kernel has not sent by then is discarded. Other sockets have no such queue.
pub(super) fn give_up(socket: &OwnedFd) {
    let _ = set_socket_linger(socket, Some(Duration::ZERO));
}

/// Makes the connection one that ends in order: the kernel delivers what is left to send.
pub(super) fn end_in_order(socket: &OwnedFd) {
    let _ = set_socket_linger(socket, None);
}

/// Prepares a connection for requests.
pub(super) fn begin(socket: &OwnedFd) {
    give_up(socket);
    let millis = UNTAKEN_MAX.as_millis() as u32;
    // Fails for a Unix socket, which needs none.
    let _ = set_tcp_user_timeout(socket, millis);
}

impl Drop for Reconnect {
    fn drop(&mut self) {
        self.state.lock().unwanted = true;
        self.state.unwanted.notify_one();
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the old connection for sending, and waits for the server to close it as far as
    /// `parting` requires. Returns whether the server did, or need not.
    fn part(&self, socket: OwnedFd, parting: Parting) -> bool {
        // If the server has closed the socket already, this fails harmlessly.
        let _ = shutdown(&socket, Shutdown::Write);
        let _ = set_socket_timeout(&socket, Timeout::Recv, Some(GLANCE));
        let until = Instant::now() + parting.patience;
        let mut has_hung_up = false;
        let mut dregs = vec![0; DREGS];
        while Instant::now() < until && !self.lock().unwanted {
            match recv(&socket, &mut dregs[..], RecvFlags::empty()) {
                Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => {}
                Ok((_, 0)) | Err(Errno::CONNRESET) => {
                    has_hung_up = true;
                    break;
                }
                // Such as a timeout, which says nothing of the server.
                Err(_) => break,
            }
        }
        give_up(&socket);
        // Resets the connection and drops its unsent data even while a ring's table still has the
        // socket: before Linux 6.13 the table keeps it until older requests have ended.
        let _ = connect_unspec(&socket);
        let _ = shutdown(&socket, Shutdown::Both);
        drop(socket);
        (has_hung_up && !parting.failed_here) || parting.patience.is_zero()
    }

    /// Waits for this time, or until it is no longer wanted.
    fn pause(&self, time: Duration) {
        let waited = self.unwanted.wait_timeout_while(self.lock(), time, |o| !o.unwanted);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn run(&self, shared: &Shared, waker: &Waker) {
        let mut pause = PAUSE_LEAST;
        let (began, primary) = (Instant::now(), &shared.info.identity);
        let mut said: Option<(Instant, String)> = None;
        loop {
            if self.lock().unwanted {
                return;
            }
            match shared.find_again() {
                Ok(connection) => {
                    let seconds = began.elapsed().as_secs_f64();
                    tracing::info!(%primary, seconds, "connected to the NBD server again");
                    self.lock().connection = Some(connection);
                    return waker.wake();
                }
                Err(error) => {
                    let why = error.to_string();
                    let again =
                        |(at, last): &(Instant, String)| at.elapsed() >= SAY_AGAIN || *last != why;
                    if said.as_ref().is_none_or(again) {
                        let seconds = began.elapsed().as_secs_f64();
                        tracing::warn!(
                            %primary, seconds, error = why,
                            "no connection to the NBD server; it is tried until there is one"
                        );
                        said = Some((Instant::now(), why));
                    }
                }
            }
            self.pause(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};

    use forebay_block::IoError;

    use super::*;
    use crate::nbd::line::failed_here;

    /// A connection for requests, and the other end, which takes nothing yet: a proxy that stalls,
    /// or a server that is stopped.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let ours = TcpStream::connect(address).expect("it listens");
        let (theirs, _) = listener.accept().expect("it has connected");
        let ours = OwnedFd::from(ours);
        begin(&ours);
        (ours.into(), theirs)
    }

    /// Sends until the kernel takes no more; returns the number of bytes.
    fn fill(ours: &mut TcpStream) -> usize {
        ours.set_nonblocking(true).expect("it is a socket");
        let mut sent = 0;
        loop {
            match ours.write(&[7; 64 << 10]) {
                Ok(count) => sent += count,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    ours.set_nonblocking(false).expect("it is a socket");
                    return sent;
                }
            }
        }
    }

    /// Reads to the end; returns the number of bytes, and whether it was an end in order.
    fn drain(theirs: &mut TcpStream) -> (usize, bool) {
        let (mut arrived, mut bytes) = (0, vec![0; 64 << 10]);
        loop {
            match theirs.read(&mut bytes) {
                Ok(0) => return (arrived, true),
                Ok(count) => arrived += count,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                    return (arrived, false);
                }
            }
        }
    }

    const PARTING: Parting =
        Parting { patience: Duration::from_millis(150), grace: Duration::ZERO, failed_here: false };

    /// Regression: the kernel went on delivering what a broken connection had not sent, after the
    /// next connection was in use: an old write could land over a newer one.
    #[test]
    fn what_was_not_sent_when_a_connection_is_given_up_never_arrives() {
        let (mut ours, mut theirs) = connection();
        let sent = fill(&mut ours);
        assert!(!State::default().part(ours.into(), PARTING), "it has not hung up");
        let (arrived, in_order) = drain(&mut theirs);
        assert!(arrived < sent && !in_order, "{arrived} of {sent} bytes");
    }

    /// As when the process is killed.
    #[test]
    fn what_was_not_sent_when_a_connection_just_ends_never_arrives() {
        let (mut ours, mut theirs) = connection();
        let sent = fill(&mut ours);
        drop(ours);
        let (arrived, in_order) = drain(&mut theirs);
        assert!(arrived < sent && !in_order, "{arrived} of {sent} bytes");
    }

    #[test]
    fn a_server_that_hangs_up_in_time_has_got_everything() {
        let (mut ours, mut theirs) = connection();
        ours.write_all(&[7; 5000]).expect("it is sent");
        let server = thread::spawn(move || drain(&mut theirs));
        let patience = Duration::from_secs(10);
        assert!(State::default().part(ours.into(), Parting { patience, ..PARTING }));
        assert_eq!(server.join().expect("it reads"), (5000, true));
    }

    /// Regression: after a timeout of the kernel, the next call on the socket sees an end, as if
    /// the server had hung up. But the server has what it received, and may carry it out late.
    #[test]
    fn a_connection_that_timed_out_here_was_not_closed_by_the_server() {
        let (mut ours, theirs) = connection();
        fill(&mut ours);
        let millis = 100;
        set_tcp_user_timeout(&ours, millis).expect("it is a TCP socket");
        let error = ours.write(&[7; 64 << 10]).expect_err("nothing is taken");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let error = IoError::with_source(forebay_block::ErrorKind::DeviceGone, error);
        let parting = Parting { failed_here: failed_here(&error), ..PARTING };
        assert!(!State::default().part(ours.into(), parting), "nobody knows");
        drop(theirs);

        let (mut ours, theirs) = connection();
        theirs.shutdown(std::net::Shutdown::Both).expect("it is connected");
        ours.write_all(&[7; 64]).expect("it is sent");
        drop(theirs);
        let error = loop {
            if let Err(error) = ours.write(&[7; 64]) {
                break error;
            }
        };
        let error = IoError::with_source(forebay_block::ErrorKind::DeviceGone, error);
        let parting = Parting { failed_here: failed_here(&error), ..PARTING };
        assert!(State::default().part(ours.into(), parting), "it has hung up: {error:?}");
    }

    #[test]
    fn a_goodbye_arrives() {
        let (mut ours, mut theirs) = connection();
        let sent = fill(&mut ours);
        let ours = OwnedFd::from(ours);
        end_in_order(&ours);
        drop(ours);
        assert_eq!(drain(&mut theirs), (sent, true));
    }
}
