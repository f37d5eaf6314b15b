//! Cache devices that an operator has retired: each has an empty file `UUID.retired` in the state
//! directory. The operator may take the device out at any time. So a server that the keeper starts,
//! or that takes over, retires it again before it serves. It is used again by a start of an
//! operator's, and by a configuration that demands a new cache.

use std::io;

use forebay_runtime::{StateDir, file_of};

use super::Start;
use crate::server::events::Came;

/// The kind of file.
const KIND: &str = "retired";

/// Notes that the device of the cache `uuid` is retired.
///
/// # Errors
/// If the state directory cannot be written.
pub fn mark(state: &StateDir, uuid: [u8; 16]) -> io::Result<()> {
    state.mark(&file_of(uuid, KIND))
}

/// Removes that note.
///
/// # Errors
/// If the file stays.
pub fn forget(state: &StateDir, uuid: [u8; 16]) -> io::Result<()> {
    state.remove(&file_of(uuid, KIND))
}

/// Whether this start must leave the device of the cache `uuid`, which it has found, out of use.
///
/// # Errors
/// If the state directory cannot be read or changed.
pub fn stays(state: &StateDir, uuid: [u8; 16], start: Start<'_>) -> io::Result<bool> {
    // Most starts find none, and must not need to change the directory.
    if state.read(&file_of(uuid, KIND), 0)?.is_none() {
        return Ok(false);
    }
    if start.came == Came::Started || start.applied.is_some_and(|applied| applied.new_cache) {
        return forget(state, uuid).map(|()| false);
    }
    Ok(true)
}
