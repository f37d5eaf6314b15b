//! Kills and upgrades of a server at random times. Upgrades go to another program and back.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use forebay_block::testing::Numbers;

use crate::rig::kept::{Kept, Serving};
use crate::rig::place::Place;

/// One kill in this number follows the event before it at once.
const SOON: u64 = 8;
/// Maximum time until such a kill, and until the kill in an upgrade, in milliseconds.
const SOON_MILLIS: u64 = 400;
/// Interval between checks of whether to stop.
const STEP: Duration = Duration::from_millis(20);
/// Name of the copy of the program in the place.
const COPY: &str = "forebay-next";

/// What happens to the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// SIGKILL.
    Kill,
    /// An upgrade to the other program.
    Upgrade,
    /// An upgrade during which the server, or the one that takes over, gets SIGKILL.
    Interrupted,
}

impl Kind {
    /// Its name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Upgrade => "upgrade",
            Self::Interrupted => "kill in an upgrade",
        }
    }
}

/// A kill or an upgrade that happened.
#[derive(Clone, Debug)]
pub struct Event {
    pub kind: Kind,
    /// When it began.
    pub begin: Instant,
    /// When a server was seen to serve again.
    pub end: Instant,
    /// The version that served then.
    pub version: String,
}

/// The two programs that take over from each other.
#[derive(Debug)]
pub struct Programs([PathBuf; 2]);

impl Programs {
    /// The program that is started, and the other one: `next`, or a copy of the first.
    pub fn new(binary: &Path, next: Option<&Path>, place: &Place) -> anyhow::Result<Self> {
        let next = match next {
            Some(next) => next.to_owned(),
            None => {
                let copy = place.path(COPY);
                fs::copy(binary, &copy).with_context(|| copy.display().to_string())?;
                copy
            }
        };
        let real =
            |path: &Path| fs::canonicalize(path).with_context(|| format!("{}", path.display()));
        Ok(Self([real(binary)?, real(&next)?]))
    }

    /// The one that does not serve.
    fn other(&self, serving: &Serving) -> &Path {
        let Self([first, second]) = self;
        if serving.program == *first { second } else { first }
    }
}

/// Makes things happen to a server.
pub struct Events<'a> {
    pub kept: &'a Kept,
    pub programs: &'a Programs,
    /// Minimum time between two events; up to half of it more.
    pub interval: Duration,
    pub numbers: Numbers,
    /// Ends the wait for the next event.
    pub stop: &'a AtomicBool,
}

impl Events<'_> {
    /// Kills and upgrades in random order until all have happened, or the load has stopped. Calls
    /// `told` after each.
    pub fn all(
        &mut self,
        mut kinds: Vec<Kind>,
        mut told: impl FnMut(&[Event]),
    ) -> anyhow::Result<Vec<Event>> {
        let mut done = Vec::new();
        while !kinds.is_empty() {
            let kind = kinds.swap_remove(self.numbers.below(kinds.len() as u64) as usize);
            self.wait(kind);
            if self.stop.load(Relaxed) {
                break;
            }
            let event = self.one(kind);
            done.push(event.with_context(|| format!("event {}: {}", done.len() + 1, kind.name()))?);
            told(&done);
        }
        Ok(done)
    }

    fn wait(&mut self, kind: Kind) {
        let most = self.interval.as_millis() as u64;
        let millis = if kind == Kind::Kill && self.numbers.below(SOON) == 0 {
            self.numbers.below(SOON_MILLIS)
        } else {
            most + self.numbers.below(most / 2 + 1)
        };
        let end = Instant::now() + Duration::from_millis(millis);
        while Instant::now() < end && !self.stop.load(Relaxed) {
            std::thread::sleep(STEP.min(end.saturating_duration_since(Instant::now())));
        }
    }

    fn one(&mut self, kind: Kind) -> anyhow::Result<Event> {
        let before = self.kept.wait_for_another(None)?;
        let begin = Instant::now();
        let after = match kind {
            Kind::Kill => {
                ensure!(self.kept.strike(0), "there is no server to kill");
                self.kept.wait_for_another(Some(before.pid))?
            }
            Kind::Upgrade => {
                let program = self.programs.other(&before);
                self.kept.upgrade(program)?;
                let after = self.kept.wait_for_another(Some(before.pid))?;
                ensure!(
                    after.program == program,
                    "after an upgrade to {} the program {} serves",
                    program.display(),
                    after.program.display()
                );
                after
            }
            Kind::Interrupted => self.interrupted(&before)?,
        };
        Ok(Event { kind, begin, end: Instant::now(), version: after.version })
    }

    /// Either program may serve afterwards.
    fn interrupted(&mut self, before: &Serving) -> anyhow::Result<Serving> {
        let program = self.programs.other(before);
        let delay = Duration::from_millis(self.numbers.below(SOON_MILLIS));
        let which = self.numbers.below(2) as usize;
        std::thread::scope(|scope| {
            let upgrade = scope.spawn(|| self.kept.upgrade(program));
            std::thread::sleep(delay);
            // The successor may just have been started, or the server just have left.
            self.kept.strike(which);
            drop(upgrade.join());
        });
        self.kept.wait_for_another(None)
    }
}
