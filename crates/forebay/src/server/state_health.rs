//! Whether the state directory can be written, for the status: what the last attempt has shown, and
//! what its file system says of itself.

use std::io;
use std::sync::Mutex;

use forebay_runtime::StateDir;

use crate::server::control::locked;

/// The state directory as the server sees it.
pub struct StateHealth {
    state: StateDir,
    /// Why the last attempt to write failed.
    failed: Mutex<Option<String>>,
}

impl StateHealth {
    /// Of a directory to which no attempt has been made.
    pub fn new(state: StateDir) -> Self {
        Self { state, failed: Mutex::default() }
    }

    /// Notes the outcome of an attempt to write. Only the first failure of several is logged.
    pub fn note(&self, outcome: &io::Result<()>) {
        let now = outcome.as_ref().err().map(ToString::to_string);
        let before = std::mem::replace(&mut *locked(&self.failed), now.clone());
        match (before, now) {
            (None, Some(error)) => tracing::warn!(error, "the state directory cannot be written"),
            (Some(_), None) => tracing::info!("the state directory can be written again"),
            _ => {}
        }
    }

    /// Why it cannot be written, if so.
    pub fn problem(&self) -> Option<String> {
        let failed = locked(&self.failed).clone();
        failed.or_else(|| self.state.is_writable().err().map(|error| error.to_string()))
    }
}
