//! The keeper: the process that `forebay serve` starts as. It starts the server as a child, holds
//! for it what must outlive it, and starts it again when it dies. Then its clients see a pause and
//! no error.
//!
//! It holds descriptors only: the mount's `/dev/fuse`, listening sockets, the text of the
//! configuration. It does no I/O, and its memory is small, so that whatever kills the server leaves
//! the keeper alone. See `docs/internals/keeper.md`.

mod attempts;
mod line;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use sd_notify::NotifyState;
use tokio::process::Command;
use tokio::signal::unix::{self, SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::server::process;
use attempts::Attempts;
pub use line::{Line, Message, Received};

/// The program that this process runs, also after its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// The hidden flag of a server that has a keeper.
const KEPT: &str = "--kept";
/// The variable with systemd's socket: the keeper is the service's main process.
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// The server has ended, and this process must end with the same exit code. The server has said
/// why.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended(pub u8);

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the server ended with exit code {}", self.0)
    }
}

impl std::error::Error for Ended {}

/// Keeps a server with this process's own arguments until it ends in order.
///
/// # Errors
/// [`Ended`] if the server failed; another error if it died and cannot be started again.
pub fn run() -> anyhow::Result<()> {
    // Both best effort; the server says so if it cannot.
    let _ = process::become_flusher();
    let _ = process::lock_memory();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async { Keeper::new()?.keep().await })
}

/// How the service of one server process ended.
enum End {
    /// It exited by itself, or in the course of a stop.
    Over(ExitStatus),
    /// It died.
    Died(ExitStatus),
    /// It could not start.
    Refused(ExitStatus),
}

struct Keeper {
    arguments: Vec<OsString>,
    /// By name: the descriptor and its note.
    held: BTreeMap<String, (OwnedFd, String)>,
    signals: [(Signal, unix::Signal); 3],
    attempts: Attempts,
    /// A server has served.
    served: bool,
    /// Since when clients wait.
    died: Option<Instant>,
}

impl Keeper {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            arguments: std::env::args_os().skip(1).collect(),
            held: BTreeMap::new(),
            signals: [
                (Signal::TERM, signal(SignalKind::terminate())?),
                (Signal::INT, signal(SignalKind::interrupt())?),
                (Signal::HUP, signal(SignalKind::hangup())?),
            ],
            attempts: Attempts::default(),
            served: false,
            died: None,
        })
    }

    async fn keep(mut self) -> anyhow::Result<()> {
        loop {
            let status = match self.serve_once().await? {
                End::Over(status) => return outcome(status),
                // No client waits.
                End::Died(status) | End::Refused(status) if !self.served => {
                    return outcome(status);
                }
                End::Died(status) => {
                    self.died.get_or_insert_with(Instant::now);
                    tracing::error!("{}: clients wait while it is started again", told(status));
                    status
                }
                End::Refused(status) => {
                    tracing::error!("the server does not start: {}", told(status));
                    status
                }
            };
            let Some(pause) = self.attempts.next() else {
                let count = self.attempts.count();
                bail!(
                    "{}, and it did not come back in {count} starts: its clients are cut off now; \
                     see the log for the reason, then start it again",
                    told(status)
                );
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                name = stop_signal(&mut self.signals) => {
                    bail!("{name} while the server is down: its clients are cut off");
                }
            }
        }
    }

    /// Starts a server and keeps it to its end.
    async fn serve_once(&mut self) -> anyhow::Result<End> {
        let (line, servers) = Line::pair().context("a line to the server")?;
        for (name, (descriptor, note)) in &self.held {
            let held = Message::Held { name: name.clone(), note: note.clone() };
            line.send(&held, Some(descriptor.as_fd())).context("the line to the server")?;
        }
        line.send(&Message::AllHeld, None).context("the line to the server")?;
        let mut command = Command::new(OWN_PROGRAM);
        command.arg0("forebay").args(&self.arguments).arg(KEPT).stdin(Stdio::from(servers));
        // A terminal's signals reach only the keeper, which passes them on.
        command.env_remove(NOTIFY_SOCKET).process_group(0);
        let mut server = command.spawn().context("the server's process")?;
        // The server's end of the line must be closed here, to notice its end.
        drop(command);
        let pid = server.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        let pid = pid.context("the server's process")?;
        let mut messages = read(line)?;
        let mut serving = Serving { ready: false, stopping: false };
        let status = loop {
            tokio::select! {
                status = server.wait() => break status?,
                signal = any_signal(&mut self.signals) => {
                    // It may have ended in the meantime.
                    let _ = kill_process(pid, signal);
                }
                Some(received) = messages.recv() => match received {
                    Ok(received) => self.take(received, &mut serving),
                    Err(error) => {
                        tracing::error!(%error, "the server is killed");
                        // It may have ended in the meantime.
                        let _ = server.start_kill();
                    }
                },
            }
        };
        // Its last messages may still be on the line.
        while let Some(Ok(received)) = messages.recv().await {
            self.take(received, &mut serving);
        }
        Ok(match (status.code(), serving) {
            (_, Serving { stopping: true, .. }) => End::Over(status),
            (Some(_), Serving { ready: true, .. }) => End::Over(status),
            (Some(_), _) => End::Refused(status),
            (None, _) => End::Died(status),
        })
    }

    fn take(&mut self, (message, descriptor): Received, serving: &mut Serving) {
        match message {
            Message::Held { name, note } => {
                if let Some(descriptor) = descriptor {
                    self.held.insert(name, (descriptor, note));
                }
            }
            Message::Ready => {
                serving.ready = true;
                self.served = true;
                self.attempts.serves();
                if let Some(died) = self.died.take() {
                    let seconds = died.elapsed().as_secs_f64();
                    tracing::warn!("the server serves again, {seconds:.2} s after it died");
                }
                process::notify(NotifyState::Ready);
            }
            Message::Stopping => {
                serving.stopping = true;
                process::notify(NotifyState::Stopping);
            }
            Message::AllHeld => {}
        }
    }
}

/// What the server of the moment has told.
#[derive(Clone, Copy)]
struct Serving {
    ready: bool,
    stopping: bool,
}

/// Reads the server's messages until its end of the line is closed.
fn read(line: Line) -> std::io::Result<UnboundedReceiver<std::io::Result<Received>>> {
    let (send, messages) = unbounded_channel();
    let read = move || {
        while let Some(received) = line.receive().transpose() {
            let failed = received.is_err();
            if send.send(received).is_err() || failed {
                return;
            }
        }
    };
    std::thread::Builder::new().name("line".into()).spawn(read)?;
    Ok(messages)
}

/// The next signal, which the server shall get.
async fn any_signal(signals: &mut [(Signal, unix::Signal); 3]) -> Signal {
    let [(term, a), (int, b), (hup, c)] = signals;
    tokio::select! {
        _ = a.recv() => *term,
        _ = b.recv() => *int,
        _ = c.recv() => *hup,
    }
}

/// The next signal that means to stop.
async fn stop_signal(signals: &mut [(Signal, unix::Signal); 3]) -> &'static str {
    loop {
        match any_signal(signals).await {
            Signal::TERM => return "SIGTERM",
            Signal::INT => return "SIGINT",
            _ => {}
        }
    }
}

fn outcome(status: ExitStatus) -> anyhow::Result<()> {
    match status.code() {
        Some(0) => Ok(()),
        Some(code) => Err(Ended(u8::try_from(code).unwrap_or(1)).into()),
        None => bail!("{}; the next start will recover", told(status)),
    }
}

fn told(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (_, Some(signal)) => format!("the server was killed by {}", name_of(signal)),
        (Some(code), _) => format!("exit code {code}"),
        _ => status.to_string(),
    }
}

fn name_of(signal: i32) -> String {
    let known = [
        (Signal::KILL, "SIGKILL"),
        (Signal::ABORT, "SIGABRT, it found a mistake in itself"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::BUS, "SIGBUS"),
        (Signal::ILL, "SIGILL"),
        (Signal::TERM, "SIGTERM"),
    ];
    let found = known.iter().find(|(known, _)| known.as_raw() == signal);
    found.map_or_else(|| format!("signal {signal}"), |(_, name)| (*name).to_owned())
}
