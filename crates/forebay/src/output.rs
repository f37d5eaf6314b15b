//! Standard output, for people and for pipes: a reader that closes the pipe early is no error.
//! Progress is shown on standard error.

use std::fmt;
use std::io::{ErrorKind, Write};

use forebay_control::units::Size;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};

/// Prints `text` as it is.
///
/// # Errors
/// If it cannot be written, except when the reader has closed the pipe.
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
/// As [`print()`].
pub fn line(text: &str) -> std::io::Result<()> {
    print(&format!("{text}\n"))
}

/// Prints `text` as a line on standard error. If that takes none, the line is lost: what it is
/// about goes on.
pub fn say(text: &str) {
    let _ = std::io::stderr().lock().write_all(format!("{text}\n").as_bytes());
}

/// A progress bar over bytes, on standard error; nothing where that is not a terminal.
pub fn bar(total: u64) -> ProgressBar {
    let template = "{bar:40} {done} of {all}, {pace}/s, {eta} left";
    let style = ProgressStyle::with_template(template).expect("the template is sound");
    let size = |value: u64, out: &mut dyn fmt::Write| {
        // A writer that takes no text shows none.
        let _ = write!(out, "{}", Size(value));
    };
    let style = style
        .with_key("done", move |state: &ProgressState, out: &mut dyn fmt::Write| {
            size(state.pos(), out)
        })
        .with_key("all", move |state: &ProgressState, out: &mut dyn fmt::Write| {
            size(state.len().unwrap_or_default(), out);
        })
        .with_key("pace", move |state: &ProgressState, out: &mut dyn fmt::Write| {
            size(state.per_sec() as u64, out);
        });
    ProgressBar::new(total).with_style(style)
}

/// Shows in a bar how many bytes are left; all of them are the most that were left so far.
pub fn show_left(bar: &ProgressBar, left: u64) {
    let total = bar.length().unwrap_or(0).max(left);
    bar.set_length(total);
    bar.set_position(total - left);
}
