//! The server's log: structured, to standard error, for people or for machines. `FOREBAY_LOG`
//! selects the lines, in the syntax of tracing's filters: `info`, `debug`, or a module's path and a
//! level. A line that standard error does not take is lost: a full disk below a log file, or a
//! reader that has ended, must not end the service.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// The variable with the filter.
const FILTER: &str = "FOREBAY_LOG";

/// Format of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// Text for people
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

/// Starts the log.
pub fn start(format: LogFormat) -> anyhow::Result<()> {
    let filter = match std::env::var(FILTER) {
        Ok(text) => EnvFilter::try_new(&text)
            .map_err(|error| crate::WrongUsage(format!("{FILTER}={text:?}: {error}; try info")))?,
        Err(_) => EnvFilter::new("info"),
    };
    let terminal = std::io::stderr().is_terminal();
    // Errors of the log would be reported with `eprintln!`, which panics if it fails too.
    let log = tracing_subscriber::fmt().log_internal_errors(false);
    let log = log.with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.with_ansi(terminal).with_target(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    Ok(())
}
