//! Runs database load programs that report each second, and reads their output line by line.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;

use crate::rig::cleanup::Process;

/// Time limit for a program to exit after its last line.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum number of seconds missing in a program's report.
const MISSING_MAX: u64 = 5;

/// A program's report, as far as it has been read.
pub trait Said: Default {
    /// Parses a line.
    fn line(&mut self, line: &str);

    /// The rate in each second, in the benchmark's unit.
    fn per_second(&mut self) -> &mut Vec<f64>;

    /// The last line that reported an error.
    fn last_error(&self) -> &str;
}

/// Runs a program that loads for `seconds`; after each line, shows the number of the second and its
/// rate.
///
/// # Errors
/// When the program fails, or omits seconds.
pub fn listen<S: Said>(
    name: &str,
    command: Command,
    log: &Path,
    seconds: u64,
    shown: impl Fn(usize, f64),
) -> anyhow::Result<S> {
    let mut said = S::default();
    let process = Process::start(command, log, true)?;
    for line in BufReader::new(process.output()?).lines() {
        said.line(&line?);
        let counts = said.per_second();
        if let Some(count) = counts.last() {
            shown(counts.len(), *count);
        }
    }
    let status = process.wait(PATIENCE)?;
    let errors = [process.said(), said.last_error().to_owned()].join(" ");
    ensure!(status.success(), "{name}: {status}: {errors}");
    // The report may have one line too few or too many.
    let found = said.per_second().len() as u64;
    ensure!(
        found + MISSING_MAX >= seconds,
        "{name} reported {found} of {seconds} seconds: {errors}"
    );
    said.per_second().truncate(seconds as usize);
    Ok(said)
}
