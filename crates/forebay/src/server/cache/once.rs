//! Options that are good for one start: `--reset-cache` left in a unit file must not discard the
//! cache at every boot. A start that used one leaves a mark in the state directory, with the name
//! of the pool that it made; while that pool is there, the option counts again only after a start
//! without it.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

/// The mark of a reset.
pub const RESET: &str = "reset";
/// The mark of a loss that was accepted.
pub const ACCEPTED: &str = "accepted";

fn path(directory: &Path, uuid: [u8; 16], what: &str) -> PathBuf {
    directory.join(format!("{:032x}.{what}", u128::from_be_bytes(uuid)))
}

/// Whether an option that was given counts; one that was not given loses its mark.
///
/// # Errors
/// When the state directory cannot be changed.
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

/// Leaves the mark of an option that was used, durably, with a note about its use.
///
/// # Errors
/// When the state directory cannot be written.
pub fn mark(directory: &Path, uuid: [u8; 16], what: &str, note: &str) -> anyhow::Result<()> {
    let path = path(directory, uuid, what);
    let write = || {
        // An existing file, or a link, is never written through.
        let mut file = File::options().write(true).create_new(true).open(&path)?;
        writeln!(file, "{note}")?;
        file.sync_all()?;
        File::open(directory)?.sync_all()
    };
    write().with_context(|| path.display().to_string())
}
