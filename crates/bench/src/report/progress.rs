//! The current activity, shown on standard error.

use std::io::{IsTerminal as _, Write as _};

/// Shows the current activity in place of the previous one; on a terminal only.
pub fn progress(text: &str) {
    let mut out = std::io::stderr();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[K{text}");
        let _ = out.flush();
    }
}
