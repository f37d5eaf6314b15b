//! Why bytes are not the structure that was looked for. Nothing there is kept apart from
//! something wrong there: the end of a log is the first, damage is the second.

use std::fmt;

use thiserror::Error;

/// Why a structure could not be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FormatError {
    /// Every byte is zero: never written, or discarded.
    #[error("nothing is written here: every byte is zero")]
    Blank,
    /// The bytes are not zero and do not carry the structure's magic number: somebody else's data.
    #[error("not a Forebay {what}: the magic number is {found:#018x}, expected {expected:#018x}")]
    NoMagic {
        /// The structure that was looked for.
        what: &'static str,
        /// The number there.
        found: u64,
        /// The number that should be there.
        expected: u64,
    },
    /// The structure is there, and a field of it cannot be right.
    #[error("{what} at byte {at} of the structure: found {found:#x}, expected {rule}{expected:#x}")]
    Invalid {
        /// The field.
        what: &'static str,
        /// Offset of the field from the start of the structure.
        at: usize,
        /// The value there.
        found: u64,
        /// How it should relate to `expected`.
        rule: Rule,
        /// The value, or the limit, that it was checked against.
        expected: u64,
    },
}

/// How a value that was found should relate to the one expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// It should be the same.
    Exactly,
    /// It should not be less.
    AtLeast,
    /// It should not be more.
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
    /// Whether no such structure is there at all, neither sound nor damaged.
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
