//! Why bytes do not decode to the expected structure. An absent structure is distinguished from a
//! damaged one: the first is the end of a log, the second is damage.

use std::fmt;

use thiserror::Error;

/// Why a structure could not be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FormatError {
    /// Every byte is zero: never written, or discarded.
    #[error("nothing is written here: every byte is zero")]
    Blank,
    /// The bytes are not zero and do not have the structure's magic number: foreign data.
    #[error("not a Forebay {what}: the magic number is {found:#018x}, expected {expected:#018x}")]
    NoMagic {
        /// The expected structure.
        what: &'static str,
        /// The magic number found.
        found: u64,
        /// The magic number expected.
        expected: u64,
    },
    /// The structure is there, but one of its fields is invalid.
    #[error("{what} at byte {at} of the structure: found {found:#x}, expected {rule}{expected:#x}")]
    Invalid {
        /// Name of the field.
        what: &'static str,
        /// Offset of the field from the start of the structure.
        at: usize,
        /// The value found.
        found: u64,
        /// The required relation to `expected`.
        rule: Rule,
        /// The required value, or its limit.
        expected: u64,
    },
}

/// The required relation between the value found and the one expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// It must be equal.
    Exactly,
    /// It must not be less.
    AtLeast,
    /// It must not be more.
    AtMost,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exactly => "",
            Self::AtLeast => "at least ",
            Self::AtMost => "at most ",
        })
    }
}

impl FormatError {
    /// Whether no such structure is there at all, neither valid nor damaged.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Blank | Self::NoMagic { .. })
    }
}

/// An error unless the field at byte `at` is `expected`.
pub(crate) fn ensure_eq(
    what: &'static str,
    at: usize,
    found: u64,
    expected: u64,
) -> Result<(), FormatError> {
    ensure(found == expected, what, at, found, Rule::Exactly, expected)
}

/// An error if the field at byte `at` is less than `least`.
pub(crate) fn ensure_min(
    what: &'static str,
    at: usize,
    found: u64,
    least: u64,
) -> Result<(), FormatError> {
    ensure(found >= least, what, at, found, Rule::AtLeast, least)
}

/// An error if the field at byte `at` is more than `most`.
pub(crate) fn ensure_max(
    what: &'static str,
    at: usize,
    found: u64,
    most: u64,
) -> Result<(), FormatError> {
    ensure(found <= most, what, at, found, Rule::AtMost, most)
}

fn ensure(
    holds: bool,
    what: &'static str,
    at: usize,
    found: u64,
    rule: Rule,
    expected: u64,
) -> Result<(), FormatError> {
    if holds { Ok(()) } else { Err(FormatError::Invalid { what, at, found, rule, expected }) }
}
