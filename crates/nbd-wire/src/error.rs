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
    /// The value found.
    pub found: u64,
    /// The value, or the limit, that the protocol requires.
    pub expected: u64,
}

impl WireError {
    pub(crate) fn new(what: &'static str, found: u64, expected: u64) -> Self {
        Self { what, found, expected }
    }

    /// Checks that `found` is `expected`.
    pub(crate) fn expect(what: &'static str, found: u64, expected: u64) -> WireResult<()> {
        if found == expected { Ok(()) } else { Err(Self::new(what, found, expected)) }
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, found, expected } = self;
        if *found > 0xffff && what.contains("magic") {
            write!(f, "{what}: found {found:#x}, expected {expected:#x}")
        } else {
            write!(f, "{what}: found {found}, expected {expected}")
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
