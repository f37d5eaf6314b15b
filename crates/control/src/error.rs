//! The error type of the pool's control side: a kind, the problem with the value, and the remedy.

use std::fmt;

/// The kind of an error, by what the caller can do about it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ControlErrorKind {
    /// There is no such volume or job.
    NotFound,
    /// The value is unusable.
    Invalid,
    /// It is not possible in the current state of the pool.
    Conflict,
    /// The pool did not answer.
    Unavailable,
    /// This machine or this server cannot do it.
    Unsupported,
}

/// Why the pool did not carry out a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ControlError {
    /// The kind of the error.
    pub kind: ControlErrorKind,
    /// The problem, with the value.
    pub what: String,
    /// The remedy.
    pub hint: String,
}

impl ControlError {
    /// An error with these parts.
    pub fn new(kind: ControlErrorKind, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { kind, what: what.into(), hint: hint.into() }
    }

    /// There is no volume `name`; `known` are the existing ones.
    pub fn no_volume<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        let known: Vec<&str> = known.into_iter().collect();
        let hint = format!("the volumes are: {}", known.join(", "));
        Self::new(ControlErrorKind::NotFound, format!("no volume is named {name:?}"), hint)
    }

    /// The volume has never been recorded.
    pub fn no_trace(volume: &str) -> Self {
        let what = format!("volume {volume:?} is not being recorded, and has not been");
        Self::new(ControlErrorKind::NotFound, what, "start with `forebay trace record`")
    }
}

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what, self.hint)
    }
}

impl std::error::Error for ControlError {}
