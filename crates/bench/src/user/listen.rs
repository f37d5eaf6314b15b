//! Programs that put a load on a database and report each second: run, and read line by line.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;

use crate::rig::cleanup::Process;

/// How long a program may take to end after its last line.
const PATIENCE: Duration = Duration::from_secs(60);
/// Seconds that may be missing in the report of a program.
const MISSING_MAX: u64 = 5;

/// The report of a program, as far as it has been read.
pub trait Said: Default {
    /// Takes in a line.
    fn line(&mut self, line: &str);

    /// The unit's count in each second.
    fn per_second(&mut self) -> &mut Vec<f64>;

    /// The last line that told of an error.
    fn last_error(&self) -> &str;
}

/// Runs a program that loads for `seconds`, and shows the number of the second and its count after
/// each line.
///
/// # Errors
/// When it fails, or leaves seconds out.
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
    // The last line may be missing, or be one too many.
    let found = said.per_second().len() as u64;
    ensure!(
        found + MISSING_MAX >= seconds,
        "{name} reported {found} of {seconds} seconds: {errors}"
    );
    said.per_second().truncate(seconds as usize);
    Ok(said)
}
