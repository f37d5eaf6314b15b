//! The figures of a benchmark for developers, kept as `target/bench/NAME.json`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{command, utc};

/// A figure with its target, for the table of results.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The name of the figure.
    pub figure: String,
    /// The result, with its unit.
    pub result: String,
    /// The target, such as `>= 0.9`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Whether the result meets the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub met: Option<bool>,
}

impl Row {
    /// A figure without a target.
    pub fn new(figure: impl Into<String>, result: impl Into<String>) -> Self {
        Self { figure: figure.into(), result: result.into(), target: None, met: None }
    }

    /// The same with a target.
    pub fn with_target(self, target: impl Into<String>, met: bool) -> Self {
        Self { target: Some(target.into()), met: Some(met), ..self }
    }
}

/// The figures of one run.
#[derive(Serialize, Deserialize)]
pub struct Kept {
    /// When it ended, in UTC.
    pub when: String,
    /// Its command line.
    pub command: String,
    /// The rows of the table of results.
    pub rows: Vec<Row>,
    /// All figures, in a form of the benchmark's own.
    pub figures: Value,
}

/// Keeps the figures of a run, and prints where.
///
/// # Errors
/// When the file cannot be written.
pub fn keep(name: &str, rows: Vec<Row>, figures: Value) -> anyhow::Result<()> {
    let path = directory()?.join(format!("{name}.json"));
    let (when, command) = (utc(SystemTime::now()), command("forebay-bench"));
    let text = serde_json::to_string_pretty(&Kept { when, command, rows, figures })?;
    fs::write(&path, text + "\n").with_context(|| format!("{}", path.display()))?;
    println!("kept in {}", path.display());
    Ok(())
}

/// `target/bench`, in the target directory that contains this program.
fn directory() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("the program's own path")?;
    let profile = program.parent().unwrap_or(Path::new("."));
    let directory = profile.parent().unwrap_or(Path::new(".")).join("bench");
    fs::create_dir_all(&directory).with_context(|| format!("{}", directory.display()))?;
    Ok(directory)
}
