//! A thread that parts with the old server connection and connects again, with growing pauses,
//! until it succeeds or is no longer wanted.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

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

/// Interval at which the log repeats that there is no connection yet.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// A broken connection, and how to part with its server.
pub(super) type Old = Option<(OwnedFd, Parting)>;

/// A running reconnection. Dropping it ends the thread at its next pause.
pub(super) struct Reconnect {
    state: Arc<State>,
}

struct State {
    outcome: Mutex<Outcome>,
    unwanted: Condvar,
}

#[derive(Default)]
struct Outcome {
    /// The old connection, until the thread runs.
    old: Old,
    connection: Option<Connection>,
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
                theirs.part(socket, parting);
            }
            theirs.run(&shared, &waker);
        });
        match started {
            Ok(_) => Ok(Self { state }),
            Err(_) => Err(state.lock().old.take()),
        }
    }

    /// Takes the new connection, if it exists.
    pub(super) fn take(&self) -> Option<Connection> {
        self.state.lock().connection.take()
    }
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
    /// `parting` requires.
    fn part(&self, socket: OwnedFd, parting: Parting) {
        // If the server has closed the socket already, this fails harmlessly.
        let _ = shutdown(&socket, Shutdown::Write);
        let _ = set_socket_timeout(&socket, Timeout::Recv, Some(GLANCE));
        let until = Instant::now() + parting.patience;
        let mut dregs = vec![0; DREGS];
        while Instant::now() < until && !self.lock().unwanted {
            match recv(&socket, &mut dregs[..], RecvFlags::empty()) {
                Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => {}
                Ok((_, 0)) | Err(_) => break,
            }
        }
        let _ = shutdown(&socket, Shutdown::Both);
        drop(socket);
        let outcome = self.lock();
        let waited = self.unwanted.wait_timeout_while(outcome, parting.grace, |o| !o.unwanted);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn run(&self, shared: &Shared, waker: &Waker) {
        let mut pause = PAUSE_LEAST;
        let (began, primary) = (Instant::now(), &shared.info.identity);
        let mut said: Option<Instant> = None;
        loop {
            if self.lock().unwanted {
                return;
            }
            match shared.connect_again() {
                Ok(connection) => {
                    let seconds = began.elapsed().as_secs_f64();
                    tracing::info!(%primary, seconds, "connected to the NBD server again");
                    self.lock().connection = Some(connection);
                    return waker.wake();
                }
                Err(error) if said.is_none_or(|at| at.elapsed() >= SAY_AGAIN) => {
                    said = Some(Instant::now());
                    let seconds = began.elapsed().as_secs_f64();
                    tracing::warn!(
                        %primary, seconds, %error,
                        "no connection to the NBD server; it is tried until there is one"
                    );
                }
                Err(_) => {}
            }
            let outcome = self.lock();
            let waited = self.unwanted.wait_timeout_while(outcome, pause, |o| !o.unwanted);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}
