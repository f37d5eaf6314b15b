//! The one error of the pool's control side: a kind, a sentence with the value, and what to do.

use std::fmt;

/// What the asker can do about it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ControlErrorKind {
    /// There is no such volume or job.
    NotFound,
    /// The value cannot be used.
    Invalid,
    /// It cannot be done in the state that the pool is in.
    Conflict,
    /// The pool did not answer.
    Unavailable,
}

/// Why something asked of the pool was not done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ControlError {
    /// What the asker can do about it.
    pub kind: ControlErrorKind,
    /// What is wrong, with the value.
    pub what: String,
    /// What to do.
    pub hint: String,
}

impl ControlError {
    /// An error of these parts.
    pub fn new(kind: ControlErrorKind, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { kind, what: what.into(), hint: hint.into() }
    }

    /// There is no volume `name`; `known` are those that there are.
    pub fn no_volume<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        let known: Vec<&str> = known.into_iter().collect();
        let hint = format!("the volumes are: {}", known.join(", "));
        Self::new(ControlErrorKind::NotFound, format!("no volume is named {name:?}"), hint)
    }

    /// The volume has not been recorded.
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
