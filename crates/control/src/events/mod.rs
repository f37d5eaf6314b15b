//! Events: what an operator must know, kept over restarts.
//!
//! They come from the monitor, which compares the pool with the second before, and from the start
//! of the server. A thread writes them to the state directory, then tells the consumers; so no
//! event has a number that was given before a crash to another one that somebody knows. Nothing
//! here is in the path of a request, and everything is bounded: the events, the queue of each
//! consumer, and the time for which an event is kept.

mod consumers;
pub(crate) mod detect;
mod log;

pub use consumers::{Consumer, Webhook};
pub(crate) use detect::Detector;
pub use log::{EventLog, EventStore, STORED_BYTES_MAX, Update};

use crate::api::Severity;

/// The end of a text that was cut.
const CUT: &str = " [...]";

/// The first `most` bytes of a text that is longer, with [`CUT`] as its end.
fn cut(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let kept = text.floor_char_boundary(most - CUT.len());
    format!("{}{CUT}", &text[..kept])
}

/// A new event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct News {
    /// What has happened, as a word.
    pub kind: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// The volume.
    pub volume: Option<String>,
    /// What else tells it from others of its kind: the setting, the shard. Empty if nothing does.
    pub subject: String,
    /// What has happened, with the values.
    pub text: String,
    /// What to do.
    pub remedy: &'static str,
}

impl News {
    /// Of the server.
    #[must_use]
    pub fn new(kind: &'static str, severity: Severity, text: String, remedy: &'static str) -> Self {
        Self { kind, severity, volume: None, subject: String::new(), text, remedy }
    }

    /// Of a volume.
    #[must_use]
    pub fn of(self, volume: &str) -> Self {
        Self { volume: Some(volume.to_owned()), ..self }
    }

    /// Told from others of its kind by `subject`.
    #[must_use]
    pub fn about(self, subject: &str) -> Self {
        Self { subject: subject.to_owned(), ..self }
    }
}
