//! Upgrades as the server of the moment sees them: it passes the wish on to the keeper, and hears
//! how it ended.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_control::{ControlError, ControlErrorKind, UpgradeSnapshot, UpgradeState};
use rustix::fs::{Mode, OFlags};

use crate::keeper::{Line, Message, Outcome, Upgrade};

/// The line to the keeper, and the last upgrade.
pub struct Upgrades {
    line: Option<Arc<Line>>,
    last: Mutex<Option<UpgradeSnapshot>>,
}

impl Upgrades {
    /// Of a server with this line to a keeper, if it has one.
    pub fn new(line: Option<Arc<Line>>) -> Self {
        Self { line, last: Mutex::default() }
    }

    /// Asks the keeper to start `program` in place of this server.
    ///
    /// # Errors
    /// If there is no keeper, an upgrade is under way, or the program cannot be one.
    pub fn begin(&self, program: &Path) -> Result<UpgradeSnapshot, ControlError> {
        let conflict =
            |what: &str, hint: &str| Err(ControlError::new(ControlErrorKind::Conflict, what, hint));
        let Some(line) = &self.line else {
            return conflict("the server has no keeper", "stop it, and start the other program");
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_some_and(|last| last.state == UpgradeState::Running) {
            return conflict("an upgrade is under way", "wait until it has ended");
        }
        let file = open(program)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let id = u64::try_from(since.as_micros()).unwrap_or_default();
        let upgrade = Upgrade { id, program: program.display().to_string() };
        let snapshot = UpgradeSnapshot {
            id,
            program: program.to_owned(),
            state: UpgradeState::Running,
            pause: None,
            error: None,
        };
        if line.send(&Message::Upgrade(upgrade), Some(file.as_fd())).is_err() {
            return conflict("the keeper is gone", "stop the server, and start the other program");
        }
        tracing::info!(program = %program.display(), "an upgrade begins");
        Ok(last.insert(snapshot).clone())
    }

    /// Notes how an upgrade ended.
    pub fn ended(&self, outcome: &Outcome) {
        let Outcome { upgrade: Upgrade { id, program }, why, pause } = outcome;
        match why {
            None => tracing::info!(program, pause, "upgraded: this program serves now"),
            Some(why) => tracing::error!(program, "not upgraded: {why}"),
        }
        let state = if why.is_none() { UpgradeState::Done } else { UpgradeState::Failed };
        let snapshot = UpgradeSnapshot {
            id: *id,
            program: program.into(),
            state,
            pause: (*pause > 0.0).then_some(*pause),
            error: why.clone(),
        };
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(snapshot);
    }

    /// The last upgrade that is known.
    pub fn last(&self) -> Option<UpgradeSnapshot> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
