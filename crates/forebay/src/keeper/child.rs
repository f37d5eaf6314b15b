//! One server process: its start, its messages, its end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::line::{Line, Message, Received};

/// The program that this process runs, also after its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// The hidden flag of a server that has a keeper.
const KEPT: &str = "--kept";
/// The variable with systemd's socket: the keeper is the service's main process.
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// A program that can be started, also after its file was replaced.
#[derive(Clone, Debug)]
pub struct Program {
    path: String,
    _file: Option<Arc<OwnedFd>>,
}

impl Program {
    /// The keeper's own.
    pub fn own() -> Self {
        Self { path: OWN_PROGRAM.to_owned(), _file: None }
    }

    /// The one in an open file.
    pub fn of(file: OwnedFd) -> Self {
        // Not "self": an interpreter must find its script too.
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Self { path, _file: Some(Arc::new(file)) }
    }
}

/// What servers have left, by name: the descriptor and its note.
pub type Held = BTreeMap<String, (Arc<OwnedFd>, String)>;

/// A server process.
pub struct Child {
    process: tokio::process::Child,
    pid: Pid,
    line: Arc<Line>,
    messages: UnboundedReceiver<io::Result<Received>>,
    /// What it has left before it was ready.
    pub left: Held,
    pub ready: bool,
    pub stopping: bool,
    /// It leaves everything to another server.
    pub leaving: bool,
}

/// What happened to a server process.
pub enum Event {
    Message(Message, Option<OwnedFd>),
    /// Its messages make no sense.
    Broken(io::Error),
    /// It has ended, after all its messages.
    Exited(ExitStatus),
}

impl Child {
    /// Starts a server. It waits for its first message.
    pub fn start(program: &Program, arguments: &[OsString]) -> anyhow::Result<Self> {
        let (line, servers) = Line::pair().context("a line to the server")?;
        let mut command = Command::new(&program.path);
        command.arg0("forebay").args(arguments).arg(KEPT).stdin(Stdio::from(servers));
        // A terminal's signals reach only the keeper, which passes them on.
        command.env_remove(NOTIFY_SOCKET).process_group(0);
        let process = command.spawn().context("the server's process")?;
        // The server's end of the line must be closed here, to notice its end.
        drop(command);
        let pid = process.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        let pid = pid.context("the server's process")?;
        let line = Arc::new(line);
        let messages = read(Arc::clone(&line))?;
        let (ready, stopping, leaving) = (false, false, false);
        Ok(Self { process, pid, line, messages, left: Held::new(), ready, stopping, leaving })
    }

    /// Gives it all that is held. A server that does not read blocks nobody else.
    pub fn give(&self, held: &Held) -> io::Result<()> {
        let (line, held) = (Arc::clone(&self.line), held.clone());
        let give = move || -> io::Result<()> {
            for (name, (descriptor, note)) in held {
                line.hold(&name, &note, descriptor.as_fd())?;
            }
            line.send(&Message::AllHeld, None)
        };
        // If the server ends in the meantime, that is noticed elsewhere.
        std::thread::Builder::new().name("give".into()).spawn(give)?;
        Ok(())
    }

    /// Sends a message. A server that has ended gets none.
    pub fn tell(&self, message: &Message) {
        if let Err(error) = self.line.send(message, None) {
            tracing::debug!(%error, ?message, "the server is gone");
        }
    }

    /// Sends a signal. A server that has ended gets none.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(self.pid, signal);
    }

    /// The next event. May be dropped and called again; nothing is lost.
    pub async fn event(&mut self) -> Event {
        match self.messages.recv().await {
            Some(Ok((message, descriptor))) => Event::Message(message, descriptor),
            Some(Err(error)) => Event::Broken(error),
            None => match self.process.wait().await {
                Ok(status) => Event::Exited(status),
                Err(error) => {
                    tracing::error!(%error, "the server's end is unknown");
                    Event::Exited(ExitStatus::from_raw(Signal::KILL.as_raw()))
                }
            },
        }
    }
}

/// Reads the server's messages until its end of the line is closed.
fn read(line: Arc<Line>) -> io::Result<UnboundedReceiver<io::Result<Received>>> {
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

/// How a process ended, for people.
pub fn told(status: ExitStatus) -> String {
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
