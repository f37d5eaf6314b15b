//! Why a trace cannot be read: where, and what is there.

use std::error::Error;
use std::fmt;
use std::io;

/// Why a trace cannot be read any further.
#[derive(Debug)]
pub enum TraceError {
    /// The bytes could not be had.
    Io(io::Error),
    /// It is in no format that is known.
    Unknown,
    /// A line is not as its format says.
    Line {
        /// Which, counted from 1.
        line: u64,
        /// What is wrong, with the value.
        reason: String,
    },
    /// Bytes are not as their format says.
    Bytes {
        /// Where, from the start of the (uncompressed) trace.
        offset: u64,
        /// What is wrong, with the value.
        reason: String,
    },
}

impl TraceError {
    /// What is wrong with a line.
    pub(crate) fn line(line: u64, reason: impl Into<String>) -> Self {
        Self::Line { line, reason: reason.into() }
    }

    /// What is wrong at an offset.
    pub(crate) fn bytes(offset: u64, reason: impl Into<String>) -> Self {
        Self::Bytes { offset, reason: reason.into() }
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "cannot read the trace: {error}"),
            Self::Unknown => {
                let names = crate::Format::NAMES.map(|(name, _)| name).join(", ");
                write!(f, "the trace is in no known format; if it is in one of {names}, say which")
            }
            Self::Line { line, reason } => write!(f, "line {line} of the trace: {reason}"),
            Self::Bytes { offset, reason } => write!(f, "byte {offset} of the trace: {reason}"),
        }
    }
}

impl Error for TraceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for TraceError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
