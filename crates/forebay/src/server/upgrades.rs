//! Upgrades as the server of the moment sees them: it passes the wish on to the keeper, and hears
//! how it ended.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_control::{ControlError, ControlErrorKind, UpgradeSnapshot, UpgradeState};
use rustix::fs::{Mode, OFlags};

use crate::keeper::{Line, Message, Outcome, Upgrade};
use crate::server::control::locked;

const KEEPER_GONE: &str = "the keeper is gone";
const STOPPING: &str = "the server is stopping";

/// The line to the keeper, and the last upgrade.
pub struct Upgrades {
    line: Option<Arc<Line>>,
    /// Why no more upgrades can be carried out.
    closed: OnceLock<&'static str>,
    last: Mutex<Option<Upgrading>>,
}

/// An upgrade, and its program until the keeper has it.
struct Upgrading {
    now: UpgradeSnapshot,
    file: Option<OwnedFd>,
    /// Whether the server has changed something for it that is put back before a failure is told.
    restores: bool,
}

impl Upgrading {
    fn is_running(&self) -> bool {
        self.now.state == UpgradeState::Running
    }

    /// Whether the server is as it was, or another one serves.
    fn is_over(&self) -> bool {
        !self.is_running() && !self.restores
    }

    /// The upgrade as others see it.
    fn shown(&self) -> UpgradeSnapshot {
        let now = self.now.clone();
        match self.is_over() {
            true => now,
            false => UpgradeSnapshot { state: UpgradeState::Running, error: None, ..now },
        }
    }

    fn fail(&mut self, why: String) {
        if self.is_running() {
            tracing::error!("no hand-over: {why}");
            (self.now.state, self.now.to_drain) = (UpgradeState::Failed, None);
            (self.now.error, self.file) = (Some(why), None);
        }
    }
}

fn conflict(what: &str, hint: &str) -> ControlError {
    ControlError::new(ControlErrorKind::Conflict, what, hint)
}

fn idle(last: &Option<Upgrading>) -> Result<(), ControlError> {
    match last.as_ref().is_none_or(Upgrading::is_over) {
        true => Ok(()),
        false => Err(conflict("an upgrade is under way", "wait until it has ended")),
    }
}

impl Upgrades {
    /// Of a server with this line to a keeper, if it has one.
    pub fn new(line: Option<Arc<Line>>) -> Self {
        Self { line, closed: OnceLock::new(), last: Mutex::default() }
    }

    /// Asks the keeper to start `program` in place of this server.
    ///
    /// # Errors
    /// If there is no keeper, an upgrade is under way, or the program cannot be one.
    pub fn begin(&self, program: &Path) -> Result<UpgradeSnapshot, ControlError> {
        let begun = self.reserve(program, program, false)?;
        self.go(begun.id, false).inspect_err(|error| self.fail(begun.id, error.to_string()))?;
        Ok(begun)
    }

    /// Checks whether an upgrade can begin.
    ///
    /// # Errors
    /// If there is no keeper, or one is under way.
    pub fn check(&self) -> Result<(), ControlError> {
        self.free(&locked(&self.last)).map(drop)
    }

    fn free(&self, last: &Option<Upgrading>) -> Result<&Arc<Line>, ControlError> {
        let Some(line) = &self.line else {
            return Err(conflict(
                "the server has no keeper",
                "stop the server, and start it again",
            ));
        };
        if let Some(why) = self.closed.get() {
            return Err(conflict(why, "stop the server, and start it again"));
        }
        idle(last)?;
        Ok(line)
    }

    /// Refuses what the next program would not learn of while an upgrade is under way.
    ///
    /// # Errors
    /// If one is.
    pub fn refuse_under_way(&self) -> Result<(), ControlError> {
        idle(&locked(&self.last))
    }

    /// Begins an upgrade to `program`, for people `shown`; [`Upgrades::go`] asks the keeper, after
    /// what comes before. If it `restores`, a failure is told after [`Upgrades::restored`].
    ///
    /// # Errors
    /// As for [`Upgrades::begin`].
    pub fn reserve(
        &self,
        program: &Path,
        shown: &Path,
        restores: bool,
    ) -> Result<UpgradeSnapshot, ControlError> {
        let mut last = locked(&self.last);
        self.free(&last)?;
        let file = open(program)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = UpgradeSnapshot {
            id: u64::try_from(since.as_micros()).unwrap_or_default(),
            program: shown.to_owned(),
            state: UpgradeState::Running,
            to_drain: None,
            pause: None,
            error: None,
        };
        Ok(last.insert(Upgrading { now, file: Some(file), restores }).now.clone())
    }

    /// The server is again as it was before an upgrade that has failed.
    pub fn restored(&self, id: u64) {
        if let Some(last) = locked(&self.last).as_mut().filter(|last| last.now.id == id) {
            last.restores = false;
        }
    }

    /// Asks the keeper for the upgrade that was begun; if it `stays`, this program does not come
    /// back once the other one serves.
    ///
    /// # Errors
    /// If there is no keeper any more, or it has ended otherwise.
    pub fn go(&self, id: u64, stays: bool) -> Result<(), ControlError> {
        let mut last = locked(&self.last);
        let begun = last.as_mut().filter(|last| last.now.id == id);
        let file = begun.and_then(|begun| {
            begun.now.to_drain = None;
            Some((begun.now.program.display().to_string(), begun.file.take()?))
        });
        let Some((line, (program, file))) = self.line.as_ref().zip(file) else {
            return Err(conflict("it has ended already", "see the log"));
        };
        tracing::info!(program, "an upgrade begins");
        let upgrade = Message::Upgrade(Upgrade { id, program, stays });
        line.send(&upgrade, Some(file.as_fd()))
            .map_err(|_| conflict(KEEPER_GONE, "stop the server, and start the other program"))
    }

    /// Tells how many bytes must be written to the primaries before the upgrade goes on.
    pub fn set_to_drain(&self, id: u64, bytes: u64) {
        let mut last = locked(&self.last);
        if let Some(last) = last.as_mut().filter(|last| last.now.id == id) {
            last.now.to_drain = Some(bytes);
        }
    }

    /// Whether this upgrade is under way.
    pub fn runs(&self, id: u64) -> bool {
        locked(&self.last).as_ref().is_some_and(|last| last.now.id == id && last.is_running())
    }

    /// Ends an upgrade that the keeper does not end, if it is under way.
    pub fn fail(&self, id: u64, why: String) {
        let mut last = locked(&self.last);
        if let Some(last) = last.as_mut().filter(|last| last.now.id == id) {
            last.fail(why);
        }
    }

    /// Ends the upgrade that is under way, if there is one, and refuses any other: nobody is left
    /// to carry it out.
    pub fn lose_keeper(&self) {
        self.close(KEEPER_GONE);
    }

    /// The same, since the server stops, perhaps after a long drain.
    pub fn stop(&self) {
        self.close(STOPPING);
    }

    /// Whether the server stops.
    pub fn is_stopping(&self) -> bool {
        self.closed.get() == Some(&STOPPING)
    }

    fn close(&self, why: &'static str) {
        let mut last = locked(&self.last);
        // The first reason counts.
        let _ = self.closed.set(why);
        if let Some(last) = last.as_mut() {
            last.fail(why.to_owned());
        }
    }

    /// Notes how an upgrade ended.
    pub fn ended(&self, outcome: &Outcome) {
        let Outcome { upgrade: Upgrade { id, program, .. }, why, pause } = outcome;
        match why {
            None => tracing::info!(program, pause, "upgraded: this program serves now"),
            Some(why) => tracing::error!(program, "not upgraded: {why}"),
        }
        let state = if why.is_none() { UpgradeState::Done } else { UpgradeState::Failed };
        let now = UpgradeSnapshot {
            id: *id,
            program: program.into(),
            state,
            to_drain: None,
            pause: (*pause > 0.0).then_some(*pause),
            error: why.clone(),
        };
        let mut last = locked(&self.last);
        let restores = last.as_ref().is_some_and(|last| last.now.id == *id && last.restores);
        *last = Some(Upgrading { now, file: None, restores });
    }

    /// The last upgrade that is known.
    pub fn last(&self) -> Option<UpgradeSnapshot> {
        locked(&self.last).as_ref().map(Upgrading::shown)
    }
}

/// Opens a program. Who may use the control socket must not thereby run others' programs as the
/// server's user, so it must belong to root or that user, and nobody else may write it.
fn open(program: &Path) -> Result<OwnedFd, ControlError> {
    let shown = program.display();
    let invalid =
        |what: String, hint: &str| ControlError::new(ControlErrorKind::Invalid, what, hint);
    let opened = rustix::fs::open(program, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let file: OwnedFd = opened.map_err(|error| {
        invalid(format!("{shown}: {error}"), "name a program that the server can open")
    })?;
    let found = fs::File::from(
        file.try_clone().map_err(|error| invalid(format!("{shown}: {error}"), "try again"))?,
    );
    let found =
        found.metadata().map_err(|error| invalid(format!("{shown}: {error}"), "try again"))?;
    if !found.is_file() || found.mode() & 0o111 == 0 {
        return Err(invalid(format!("{shown} is no program"), "name an executable file"));
    }
    let own = rustix::process::geteuid().as_raw();
    if found.uid() != 0 && found.uid() != own {
        let what = format!("{shown} belongs to user {}", found.uid());
        return Err(invalid(what, "it must belong to root or to the server's user"));
    }
    if found.mode() & 0o022 != 0 {
        let what = format!("{shown}: others may write it");
        return Err(invalid(what, "take that permission away (chmod go-w)"));
    }
    Ok(file)
}
