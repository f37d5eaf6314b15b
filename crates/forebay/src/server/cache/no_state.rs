//! Advice for a state directory that cannot be used, and what a start finds missing in it.

use std::io::{self, ErrorKind};

use forebay_control::api::Severity;
use forebay_control::events::News;
use forebay_format::Superblock;
use forebay_runtime::{Witness, is_full};

use crate::server::primaries::has_old_samples;

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

/// What the state directory should have of the cache that a start has found, and has not.
pub fn missing(newest: &Superblock, witness: &Witness) -> Vec<News> {
    let mut news = Vec::new();
    if has_old_samples(newest, witness.state()) {
        let text = "the samples of the primaries are of before the last use of the cache, since \
                    the state directory could not be written then, and were not compared"
            .to_owned();
        let remedy = "if a primary may have been changed without the cache, check its content";
        news.push(News::new("primary-not-compared", Severity::Warning, text, remedy));
    }
    news
}
