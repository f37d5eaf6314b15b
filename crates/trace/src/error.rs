//! Errors in a trace, with the place and the offending value.

use std::error::Error;
use std::fmt;
use std::io;

/// Why a trace cannot be read any further.
#[derive(Debug)]
pub enum TraceError {
    /// The input could not be read.
    Io(io::Error),
    /// The trace is in no known format.
    Unknown,
    /// A line does not follow its format.
    Line {
        /// Number of the line, from 1.
        line: u64,
        /// The problem, with the value.
        reason: String,
    },
    /// Bytes do not follow their format.
    Bytes {
        /// Offset from the start of the (uncompressed) trace.
        offset: u64,
        /// The problem, with the value.
        reason: String,
    },
}

impl TraceError {
    /// An error in a line.
    pub(crate) fn line(line: u64, reason: impl Into<String>) -> Self {
        Self::Line { line, reason: reason.into() }
    }

    /// An error at an offset.
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
