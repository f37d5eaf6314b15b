//! The keeper: the process that `forebay serve` starts as. It starts the server as a child, holds
//! for it what must outlive it, and starts it again when it dies. Then its clients see a pause and
//! no error.
//!
//! It holds descriptors only: the mount's `/dev/fuse`, listening sockets, the text of the
//! configuration. It does no I/O, and its memory is small, so that whatever kills the server leaves
//! the keeper alone. See `docs/internals/keeper.md`.

mod attempts;
mod child;
mod line;
mod upgrade;

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::sync::Arc;

use anyhow::bail;
use rustix::process::Signal;
use sd_notify::NotifyState;
use tokio::signal::unix::{self, SignalKind, signal};
use tokio::time::Instant;

use crate::server::kept::{CONFIGURATION, content};
use crate::server::process;
use attempts::Attempts;
use child::{Child, Event, Held, Program, told};
pub use line::{Line, Message, Outcome, Upgrade};
use upgrade::{Progress, Successor, Trial};

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
    process::raise_file_limit();
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
    /// It has left everything to this one.
    HandedOver(Box<Successor>),
}

struct Keeper {
    arguments: Vec<OsString>,
    program: Program,
    held: Held,
    signals: [(Signal, unix::Signal); 3],
    attempts: Attempts,
    /// A server has served.
    served: bool,
    /// Since when clients wait.
    waiting: Option<Instant>,
    /// A program that took over a short time ago, or the last one that did.
    trial: Option<Trial>,
    /// The end of an upgrade, for the next server that serves.
    outcome: Option<Outcome>,
    /// A signal that came while one server took over from another.
    deferred: Option<Signal>,
    /// Why the last server could not start, as it said itself.
    unable: Option<String>,
}

impl Keeper {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            arguments: std::env::args_os().skip(1).collect(),
            program: Program::own(),
            held: Held::new(),
            signals: [
                (Signal::TERM, signal(SignalKind::terminate())?),
                (Signal::INT, signal(SignalKind::interrupt())?),
                (Signal::HUP, signal(SignalKind::hangup())?),
            ],
            attempts: Attempts::default(),
            served: false,
            waiting: None,
            trial: None,
            outcome: None,
            deferred: None,
            unable: None,
        })
    }

    async fn keep(mut self) -> anyhow::Result<()> {
        let mut server = self.start()?;
        loop {
            server = match self.watch(server).await {
                End::Over(status) => return outcome(status),
                // No client waits.
                End::Died(status) | End::Refused(status) if !self.served => {
                    return outcome(status);
                }
                End::HandedOver(successor) => self.hand_to(*successor)?,
                End::Died(status) => {
                    self.waiting.get_or_insert_with(Instant::now);
                    tracing::error!("{}: clients wait while it is started again", told(status));
                    self.start_again(status).await?
                }
                End::Refused(status) => {
                    tracing::error!("the server does not start: {}", told(status));
                    self.start_again(status).await?
                }
            }
        }
    }

    fn start(&self) -> anyhow::Result<Child> {
        let server = Child::start(&self.program, &self.arguments)?;
        server.give(&self.held)?;
        Ok(server)
    }

    /// Starts a server after one that ended like this.
    async fn start_again(&mut self, status: ExitStatus) -> anyhow::Result<Child> {
        if let Some(trial) = self.trial.take_if(|trial| trial.is_on()) {
            self.return_from(trial, status);
            return self.start();
        }
        let Some(pause) = self.attempts.next() else {
            let count = self.attempts.count();
            bail!(
                "{}, and it did not come back in {count} starts: its clients are cut off now; see \
                 the log for the reason, then start it again",
                told(status)
            );
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => self.start(),
            name = stop_signal(&mut self.signals) => {
                bail!("{name} while the server is down: its clients are cut off");
            }
        }
    }

    /// Takes everything to the process that shall serve now.
    fn hand_to(&mut self, successor: Successor) -> anyhow::Result<Child> {
        let since = successor.prepared().unwrap_or_else(Instant::now);
        let Successor { upgrade, program, child, .. } = successor;
        child.give(&self.held)?;
        self.waiting.get_or_insert(since);
        self.unable = None;
        let before = std::mem::replace(&mut self.program, program);
        self.trial = Some(Trial::new(upgrade, before, self.held.clone(), since));
        Ok(child)
    }

    /// Goes back to the program before the one that failed.
    fn return_from(&mut self, trial: Trial, status: ExitStatus) {
        let how = self.unable.take().unwrap_or_else(|| told(status));
        let why = trial.failure(&how);
        tracing::error!(program = trial.upgrade.program, "{why}: back to the one before it");
        (self.program, self.held) = (trial.before, trial.held_before);
        self.outcome = Some(Outcome { upgrade: trial.upgrade, why: Some(why), pause: 0.0 });
    }

    /// Keeps a server to its end.
    async fn watch(&mut self, mut server: Child) -> End {
        let mut successor: Option<Successor> = None;
        loop {
            tokio::select! {
                event = server.event() => match event {
                    Event::Message(Message::Upgrade(upgrade), file) => {
                        self.begin(upgrade, file, &mut successor, &server);
                    }
                    Event::Message(Message::Stopping, _) => {
                        self.stops(&mut server, successor.take());
                    }
                    Event::Message(message, descriptor) => {
                        self.take(message, descriptor, &mut server);
                    }
                    Event::Broken(error) => {
                        tracing::error!(%error, "the server is killed");
                        server.signal(Signal::KILL);
                    }
                    Event::Exited(status) => return self.ended(&server, successor, status),
                },
                progress = Successor::progress_of(successor.as_mut()) => match progress {
                    Progress::Prepared => {
                        server.leaving = true;
                        server.tell(&Message::HandOver);
                    }
                    Progress::Unable(why) => self.give_up(&mut successor, &server, why),
                    Progress::Late => {
                        tracing::error!("the server does not leave everything: it is killed");
                        server.signal(Signal::KILL);
                    }
                },
                signal = any_signal(&mut self.signals) => {
                    if server.leaving {
                        self.deferred = Some(later(self.deferred, signal));
                    } else {
                        server.signal(signal);
                    }
                }
                () = Trial::lateness_of(self.trial.as_mut()) => server.signal(Signal::KILL),
            }
        }
    }

    /// Starts the process that is to take over from `server`.
    fn begin(
        &self,
        upgrade: Upgrade,
        file: Option<OwnedFd>,
        successor: &mut Option<Successor>,
        server: &Child,
    ) {
        let refuse = |upgrade, why| {
            server.tell(&Message::Upgraded(Outcome { upgrade, why: Some(why), pause: 0.0 }));
        };
        let Some(file) = file.filter(|_| successor.is_none()) else {
            return refuse(upgrade, "another upgrade is under way".to_owned());
        };
        match Successor::start(upgrade.clone(), file, &self.arguments) {
            Ok(started) => *successor = Some(started),
            Err(error) => refuse(upgrade, format!("{error:#}")),
        }
    }

    /// Ends a successor that has taken nothing, and says why.
    fn give_up(&mut self, successor: &mut Option<Successor>, server: &Child, why: String) {
        let Some(successor) = successor.take() else { return };
        let outcome = Outcome { upgrade: successor.upgrade.clone(), why: Some(why), pause: 0.0 };
        successor.end();
        if server.leaving {
            // It is started again, with what it leaves.
            self.outcome = Some(outcome);
        } else {
            server.tell(&Message::Upgraded(outcome));
        }
    }

    fn ended(&mut self, server: &Child, successor: Option<Successor>, status: ExitStatus) -> End {
        if let Some(successor) = successor {
            if server.leaving && !server.stopping {
                return End::HandedOver(Box::new(successor));
            }
            let why = Some(told(status));
            self.outcome = Some(Outcome { upgrade: successor.upgrade.clone(), why, pause: 0.0 });
            successor.end();
        }
        let on_trial = self.trial.as_ref().is_some_and(Trial::is_on);
        match status.code() {
            _ if server.stopping => End::Over(status),
            _ if server.leaving => End::Died(status),
            Some(code) if server.ready && on_trial && code != 0 => End::Died(status),
            Some(_) if server.ready => End::Over(status),
            Some(_) => End::Refused(status),
            None => End::Died(status),
        }
    }

    fn take(&mut self, message: Message, descriptor: Option<OwnedFd>, server: &mut Child) {
        match message {
            Message::Held { name, note } => {
                if let Some(descriptor) = descriptor {
                    let one = (Arc::new(descriptor), note);
                    if server.ready && name == CONFIGURATION {
                        self.renew_before(&one);
                    }
                    let held = if server.ready { &mut self.held } else { &mut server.left };
                    held.insert(name, one);
                }
            }
            Message::NoReturn => self.rule_out_return(server),
            Message::Ready => self.serves(server),
            Message::Unable { why } if !server.ready => self.unable = Some(why),
            _ => {}
        }
    }

    /// A server stops in order, perhaps after a long drain: no other one takes over from it.
    fn stops(&mut self, server: &mut Child, successor: Option<Successor>) {
        (server.stopping, server.leaving) = (true, false);
        process::notify(NotifyState::Stopping);
        if let Some(successor) = successor {
            tracing::warn!(program = successor.upgrade.program, "no hand-over: the server stops");
            successor.end();
        }
        if let Some(signal) = self.deferred.take() {
            server.signal(signal);
        }
    }

    /// From now on a restart has the program and the configuration of this server, which is on
    /// trial and does not serve yet.
    fn rule_out_return(&mut self, server: &Child) {
        let Some(trial) = self.trial.take_if(|trial| trial.is_on()) else { return };
        if let Some(text) = server.left.get(CONFIGURATION) {
            self.held.insert(CONFIGURATION.to_owned(), text.clone());
        }
        self.outcome = Some(Outcome { upgrade: trial.upgrade, why: None, pause: 0.0 });
    }

    /// A server that serves has another configuration: so has the program before, if it comes back
    /// and had the same one.
    fn renew_before(&mut self, one: &(Arc<OwnedFd>, String)) {
        let before = self.trial.as_mut().and_then(|trial| trial.held_before.get_mut(CONFIGURATION));
        let (Some(before), Some(now)) = (before, self.held.get(CONFIGURATION)) else { return };
        let texts = [&*before, now].map(|(file, _)| file.try_clone().and_then(content).ok());
        if let [Some(was), Some(is)] = texts
            && was == is
        {
            before.clone_from(one);
        }
    }

    /// A server serves.
    fn serves(&mut self, server: &mut Child) {
        server.ready = true;
        self.served = true;
        self.held = std::mem::take(&mut server.left);
        self.attempts.serves();
        let pause = self.waiting.take().map_or(0.0, |since| since.elapsed().as_secs_f64());
        if let Some(trial) = &mut self.trial
            && trial.is_on()
        {
            trial.serves();
            trial.held_before.retain(|name, _| self.held.contains_key(name));
            let upgrade = trial.upgrade.clone();
            if upgrade.stays {
                self.trial = None;
            }
            self.outcome = Some(Outcome { upgrade, why: None, pause });
        } else if pause > 0.0 && self.outcome.as_ref().is_none_or(|end| end.why.is_some()) {
            tracing::warn!("the server serves again, after {pause:.2} s");
        }
        if let Some(outcome) = self.outcome.take() {
            server.tell(&Message::Upgraded(Outcome { pause, ..outcome }));
        }
        if let Some(signal) = self.deferred.take() {
            server.signal(signal);
        }
        process::notify(NotifyState::Ready);
    }
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

/// The signal to defer after `before`: a stop stays one.
fn later(before: Option<Signal>, now: Signal) -> Signal {
    before.filter(|_| now == Signal::HUP).unwrap_or(now)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: SIGHUP during a hand-over made a stop of a moment before forgotten.
    #[test]
    fn a_deferred_stop_outranks_sighup() {
        let (stop, other, reread) = (Signal::TERM, Signal::INT, Signal::HUP);
        assert_eq!(later(None, reread), reread);
        assert_eq!(later(Some(stop), reread), stop);
        assert_eq!(later(Some(reread), stop), stop);
        assert_eq!(later(Some(stop), other), other);
    }
}
