//! Options that are valid for one start: `--reset-cache` left in a unit file must not discard the
//! cache at every boot. A start that uses such an option leaves a mark in the state directory, with
//! the UUID of the pool that it created. As long as the pool is there, the option is valid again
//! only after a start without it.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use forebay_runtime::file_of;

/// The mark of a reset.
pub const RESET: &str = "reset";
/// The mark of an accepted loss.
pub const ACCEPTED: &str = "accepted";

fn path(directory: &Path, uuid: [u8; 16], what: &str) -> PathBuf {
    directory.join(file_of(uuid, what))
}

/// Whether an option is valid at this start; a start without it removes its mark.
///
/// # Errors
/// If the state directory cannot be changed.
pub fn counts(directory: &Path, uuid: [u8; 16], what: &str, given: bool) -> anyhow::Result<bool> {
    let path = path(directory, uuid, what);
    if given {
        return Ok(fs::symlink_metadata(&path).is_err());
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| path.display().to_string())
        }
        _ => Ok(false),
    }
}

/// Leaves the mark of a used option durably, with a note on its use.
///
/// # Errors
/// If the state directory cannot be written.
pub fn mark(directory: &Path, uuid: [u8; 16], what: &str, note: &str) -> anyhow::Result<()> {
    let path = path(directory, uuid, what);
    let write = || {
        // Never writes to an existing file or through a link.
        let mut file = File::options().write(true).create_new(true).open(&path)?;
        writeln!(file, "{note}")?;
        file.sync_all()?;
        File::open(directory)?.sync_all()
    };
    write().with_context(|| path.display().to_string())
}
