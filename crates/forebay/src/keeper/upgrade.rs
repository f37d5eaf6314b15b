//! An upgrade: another program takes over from the server of the moment. First it checks whether it
//! can; then the server leaves everything; then the other one takes it. If that fails, the program
//! before it is started again.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::{Instant, sleep_until};

use super::child::{Child, Event, Held, Program, told};
use super::line::{Message, Upgrade};

/// Time to check whether it can take over.
const PREPARE_PATIENCE: Duration = Duration::from_secs(30);
/// Time in which the server must have left everything. Then it is killed, as in a crash.
const HAND_OVER_PATIENCE: Duration = Duration::from_secs(20);
/// Time in which the program must serve.
const READY_PATIENCE: Duration = Duration::from_secs(60);
/// A program that dies before it has served for this long is replaced by the one before it.
const TRIAL: Duration = Duration::from_secs(10);

/// The hint about a program that tells nothing.
const NO_WORD: &str = "it is perhaps no program of Forebay";

/// A process that shall take over.
pub struct Successor {
    pub upgrade: Upgrade,
    pub program: Program,
    pub child: Child,
    /// Since when it can take over: the server leaves everything.
    prepared: Option<Instant>,
    limit: Instant,
}

/// What happened to a successor.
pub enum Progress {
    /// It can take over.
    Prepared,
    /// It cannot, for this reason.
    Unable(String),
    /// The server has not left everything in time.
    Late,
}

impl Successor {
    /// Starts a process that checks whether it can take over.
    pub fn start(upgrade: Upgrade, file: OwnedFd, arguments: &[OsString]) -> anyhow::Result<Self> {
        let program = Program::of(file);
        let child = Child::start(&program, arguments)?;
        child.tell(&Message::Prepare);
        let limit = Instant::now() + PREPARE_PATIENCE;
        Ok(Self { upgrade, program, child, prepared: None, limit })
    }

    /// Since when the server leaves everything.
    pub fn prepared(&self) -> Option<Instant> {
        self.prepared
    }

    /// The next progress of a successor, if there is one. May be dropped and called again.
    pub async fn progress_of(successor: Option<&mut Self>) -> Progress {
        match successor {
            Some(successor) => successor.progress().await,
            None => std::future::pending().await,
        }
    }

    async fn progress(&mut self) -> Progress {
        loop {
            let event = tokio::select! {
                event = self.child.event() => event,
                () = sleep_until(self.limit) => match self.prepared {
                    Some(_) => {
                        self.limit += HAND_OVER_PATIENCE;
                        return Progress::Late;
                    }
                    None => {
                        let seconds = PREPARE_PATIENCE.as_secs();
                        return Progress::Unable(format!("no answer in {seconds} s; {NO_WORD}"));
                    }
                },
            };
            match event {
                Event::Message(Message::Prepared { version }, _) if self.prepared.is_none() => {
                    tracing::info!(version, program = self.upgrade.program, "it can take over");
                    let now = Instant::now();
                    (self.prepared, self.limit) = (Some(now), now + HAND_OVER_PATIENCE);
                    return Progress::Prepared;
                }
                Event::Message(Message::Unable { why }, _) => return Progress::Unable(why),
                Event::Message(..) => {}
                Event::Broken(error) => return Progress::Unable(error.to_string()),
                Event::Exited(status) => {
                    return Progress::Unable(format!("{} without a word; {NO_WORD}", told(status)));
                }
            }
        }
    }

    /// Ends it.
    pub fn end(self) {
        self.child.signal(Signal::KILL);
        // Its end must be waited for, but not by anybody who has other work.
        let mut child = self.child;
        tokio::spawn(async move { while !matches!(child.event().await, Event::Exited(_)) {} });
    }
}

/// A program that took over, and the one before it, which comes back if this one fails.
pub struct Trial {
    pub upgrade: Upgrade,
    pub before: Program,
    /// What the server before has left.
    pub held_before: Held,
    /// Since when clients wait, or did.
    pub since: Instant,
    served: Option<Instant>,
    late: bool,
}

impl Trial {
    pub fn new(upgrade: Upgrade, before: Program, held_before: Held, since: Instant) -> Self {
        Self { upgrade, before, held_before, since, served: None, late: false }
    }

    /// It serves.
    pub fn serves(&mut self) {
        self.served = Some(Instant::now());
    }

    /// Whether it may still fail.
    pub fn is_on(&self) -> bool {
        self.served.is_none_or(|since| since.elapsed() < TRIAL)
    }

    /// Waits until it should have served; for ever if it does.
    pub async fn lateness_of(trial: Option<&mut Self>) {
        match trial {
            Some(trial) if trial.served.is_none() && !trial.late => {
                sleep_until(trial.since + HAND_OVER_PATIENCE + READY_PATIENCE).await;
                trial.late = true;
            }
            _ => std::future::pending().await,
        }
    }

    /// Why it has failed.
    pub fn failure(&self, how: &str) -> String {
        match self.served {
            _ if self.late => format!("it did not serve in {} s", READY_PATIENCE.as_secs()),
            Some(since) => {
                format!("it served for {:.1} s, then {how}", since.elapsed().as_secs_f64())
            }
            None => format!("it did not serve: {how}"),
        }
    }
}
