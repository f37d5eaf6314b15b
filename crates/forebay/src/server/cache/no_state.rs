//! Advice for a state directory that cannot be used, and what a start finds missing in it.

use std::io::{self, ErrorKind};

use anyhow::Context;
use forebay_control::api::Severity;
use forebay_control::events::News;
use forebay_format::Superblock;
use forebay_runtime::{Record, Witness, file_of, is_full};

use crate::server::cache::stops;
use crate::server::primaries::{has_old_samples, samples, users};

/// An error of the state directory, with the remedy.
pub fn no_state(error: io::Error) -> anyhow::Error {
    let advice = match error.kind() {
        _ if is_full(&error) => "free some space in its file system, then try again",
        ErrorKind::ReadOnlyFilesystem => "make its file system writable, then try again",
        ErrorKind::PermissionDenied => {
            "it must belong to the server's user or to root, and no other user may write it"
        }
        _ => {
            "see to its file system, or, for a cache that was never used, name another with \
             --state DIR"
        }
    };
    anyhow::Error::new(error).context(format!("the state directory cannot be used; {advice}"))
}

/// Stores a witness after the superblock of its start. If there is no space, other files make room:
/// the samples, which can be taken again, the stop on record, without which the log alone says what
/// is dirty, and the list of primaries in use, which counts for each of them when it is empty.
/// Returns whether the samples stay.
pub fn store_witness(witness: &Witness, record: &Record, uuid: [u8; 16]) -> anyhow::Result<bool> {
    match witness.store(record) {
        Err(error) if is_full(&error) => {
            let (state, of) = (witness.state(), |kind| file_of(uuid, kind));
            state
                .remove(&of(samples::KIND))
                .and_then(|()| state.remove(&of(stops::KIND)))
                .and_then(|()| state.empty(&of(users::KIND)))
                .map_err(no_state)?;
            witness
                .store(record)
                .map_err(no_state)
                .context("no start without a witness, which tells an old copy of the cache")?;
            Ok(false)
        }
        stored => stored.map(|()| true).map_err(no_state),
    }
}

/// What the state directory should have of the cache that a start has found, and has not.
pub fn missing(newest: &Superblock, witness: &Witness) -> Vec<News> {
    let mut news = Vec::new();
    // A damaged one is refused.
    if matches!(witness.load(newest.uuid), Ok(None)) {
        let text = "the state directory has no record of this cache: an older copy of it, and \
                    changes of the primaries by another cache, are not noticed"
            .to_owned();
        let remedy = "if this is not the previous directory, or its file system is not mounted, \
                      stop the server and start it with that one";
        news.push(News::new("state-lost", Severity::Warning, text, remedy));
    }
    if has_old_samples(newest, witness.state()) {
        let text = "the samples of the primaries are older than the last use of the cache, since \
                    the state directory could not be written then, and were not compared"
            .to_owned();
        let remedy = "if a primary may have been changed without the cache, check its content";
        news.push(News::new("primary-not-compared", Severity::Warning, text, remedy));
    }
    news
}
