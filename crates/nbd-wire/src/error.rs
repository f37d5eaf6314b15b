//! Decoding errors, and the error numbers carried by replies.

use std::fmt;

use crate::numbers::codes;

/// The result of decoding.
pub type WireResult<T> = Result<T, WireError>;

/// Bytes that violate the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WireError {
    /// The field, and the violated rule unless it is equality.
    pub what: &'static str,
    /// How it violates the protocol.
    pub flaw: Flaw,
}

/// How a field violates the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// A wrong number.
    Number {
        /// The value found.
        found: u64,
        /// The value, or the limit, that the protocol requires.
        expected: u64,
    },
    /// A string with a NUL.
    Nul {
        /// Its position.
        at: usize,
    },
    /// A string that is not UTF-8.
    NotUtf8 {
        /// Position of the first wrong byte.
        at: usize,
    },
}

impl WireError {
    pub(crate) fn new(what: &'static str, found: u64, expected: u64) -> Self {
        Self { what, flaw: Flaw::Number { found, expected } }
    }

    /// Checks that `found` is `expected`.
    pub(crate) fn expect(what: &'static str, found: u64, expected: u64) -> WireResult<()> {
        if found == expected { Ok(()) } else { Err(Self::new(what, found, expected)) }
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.what;
        match self.flaw {
            Flaw::Number { found, expected } if found > 0xffff && what.contains("magic") => {
                write!(f, "{what}: found {found:#x}, expected {expected:#x}")
            }
            Flaw::Number { found, expected } => {
                write!(f, "{what}: found {found}, expected {expected}")
            }
            Flaw::Nul { at } => write!(f, "{what}: byte {at} is NUL"),
            Flaw::NotUtf8 { at } => write!(f, "{what}: byte {at} is not UTF-8"),
        }
    }
}

impl std::error::Error for WireError {}

codes! {
    /// The error field of a reply; zero is success. The specification allows only these values.
    pub struct NbdError: u32 {
        /// Success.
        OK = 0,
        /// Operation not permitted: the export is read-only.
        EPERM = 1,
        /// Input/output error.
        EIO = 5,
        /// Out of memory.
        ENOMEM = 12,
        /// Invalid argument; clients treat unknown numbers as this one.
        EINVAL = 22,
        /// No space left, or a write beyond the end.
        ENOSPC = 28,
        /// The request is larger than the server supports.
        EOVERFLOW = 75,
        /// Writing zeros would not be fast.
        ENOTSUP = 95,
        /// The server is stopping.
        ESHUTDOWN = 108,
    }
}
