//! The configurations that came into force, in the state directory: to return to one of them, copy
//! it back and apply it.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_control::config::FILE_BYTES_MAX;
use forebay_control::text::utc;
use forebay_runtime::StateDir;

/// Beginning and end of a file's name; the date is between them.
const PREFIX: &str = "configuration-";
const SUFFIX: &str = ".toml";
/// How many are kept.
const KEPT: usize = 16;

/// Keeps a configuration that has come into force. The server does not depend on it.
pub fn keep_or_warn(state: &StateDir, text: &str) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    if let Err(error) = keep(state, text, now) {
        tracing::warn!(%error, "the configuration is in force, but not kept for later");
    }
}

/// Keeps a configuration that came into force `now`, in seconds since 1970, unless it is the last
/// one that did. The oldest ones are removed.
///
/// # Errors
/// If it cannot be made durable.
fn keep(state: &StateDir, text: &str, now: u64) -> io::Result<()> {
    let mut names = names(state)?;
    if let Some(last) = names.last()
        && state.read(last, FILE_BYTES_MAX)?.as_deref() == Some(text)
    {
        return Ok(());
    }
    // Two in one second: the first one was in force for less than that.
    let name = format!("{PREFIX}{}{SUFFIX}", utc(now).replace([' ', ':'], "-"));
    state.replace(&name, text)?;
    names.retain(|known| *known != name);
    let many = (names.len() + 1).saturating_sub(KEPT);
    names.drain(..many).try_for_each(|old| state.remove(&old))
}

/// The names of the kept ones, oldest first.
fn names(state: &StateDir) -> io::Result<Vec<String>> {
    let mut names = state.names()?;
    names.retain(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX));
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_kept() {
        let directory = std::env::temp_dir().join(format!("forebay-kept-{}", std::process::id()));
        let state = StateDir::open(&directory).expect("it is made");
        state.replace("other", "stays").expect("it is written");
        let kept = || names(&state).expect("a directory");
        for number in 0..20 {
            for _twice in 0..2 {
                keep(&state, &format!("text {number}"), 1_700_000_000 + number)
                    .expect("it is kept");
            }
            assert_eq!(kept().len(), KEPT.min(number as usize + 1));
        }
        let texts =
            kept().into_iter().map(|name| state.read(&name, 99).expect("ours").expect("ours"));
        assert!(texts.eq((4..20).map(|number| format!("text {number}"))));
        // The clock may stand still or go back.
        keep(&state, "again", 1_700_000_019).expect("it is kept");
        assert_eq!(kept().len(), KEPT);
        for name in kept().iter().map(String::as_str).chain(["other"]) {
            state.remove(name).expect("it is ours");
        }
        std::fs::remove_dir(&directory).expect("it is empty");
    }
}
