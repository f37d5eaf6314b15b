//! A thread that takes leave of a server and connects again, with growing pauses, until it
//! succeeds or is not wanted.

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

/// The first pause between attempts; each is twice the one before.
const PAUSE_LEAST: Duration = Duration::from_millis(100);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How often a thread that takes leave looks whether it is still wanted.
const GLANCE: Duration = Duration::from_millis(100);
/// Bytes of answers thrown away at a time.
const DREGS: usize = 64 << 10;

/// How often it is said that there is no connection yet.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// An attempt under way. Dropping it ends the thread at its next pause.
pub(super) struct Reconnect {
    state: Arc<State>,
}

struct State {
    outcome: Mutex<Outcome>,
    unwanted: Condvar,
}

#[derive(Default)]
struct Outcome {
    connection: Option<Connection>,
    unwanted: bool,
}

impl Reconnect {
    /// Begins, by taking leave of the server on the `old` connection; `waker` is told when there
    /// is a new one.
    ///
    /// # Errors
    /// When no thread can be made.
    pub(super) fn start(
        shared: Arc<Shared>,
        waker: Waker,
        old: Option<(OwnedFd, Parting)>,
    ) -> std::io::Result<Self> {
        let state = Arc::new(State { outcome: Mutex::default(), unwanted: Condvar::new() });
        let theirs = Arc::clone(&state);
        let thread = thread::Builder::new().name("nbd-reconnect".to_owned());
        thread.spawn(move || {
            if let Some((socket, parting)) = old {
                theirs.part(socket, parting);
            }
            theirs.run(&shared, &waker);
        })?;
        Ok(Self { state })
    }

    /// The connection, once there is one.
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

    /// Closes the old connection, and waits for the server to do so too when it must.
    fn part(&self, socket: OwnedFd, parting: Parting) {
        // A socket that the server has left already is closed all the same.
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
        tracing::warn!(%primary, "the connection to the NBD server broke; connecting again");
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
