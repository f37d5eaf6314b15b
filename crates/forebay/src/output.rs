//! Standard output, for people and for pipes: whoever stops reading early has what they wanted.

use std::io::{ErrorKind, Write};

/// Prints `text` as it is.
///
/// # Errors
/// When it cannot be written, except because nobody reads it any more.
pub fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome,
    }
}

/// Prints `text` as a line.
///
/// # Errors
/// As for [`print()`].
pub fn line(text: &str) -> std::io::Result<()> {
    print(&format!("{text}\n"))
}
