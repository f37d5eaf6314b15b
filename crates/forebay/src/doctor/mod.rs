//! `forebay doctor`: problems of this host, each with a line that says how to fix it. Reads only. A
//! check is a function of the facts; `checks.rs` has those of the host, `config.rs` those of a
//! configuration.

mod checks;
mod config;

use std::path::{Path, PathBuf};

use clap::Args;
use forebay_control::ClientError;
use forebay_control::api::PoolStatus;
use forebay_control::config::Config;
use serde::Serialize;

use crate::client::Daemon;
use crate::host::Host;
use crate::keeper::Ended;
use crate::output;
use crate::setup::CONFIG;

/// Arguments of `forebay doctor`.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// The configuration of the server [default: /etc/forebay/forebay.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    /// It does not work, or data is in danger.
    Wrong,
    /// It works, and could be better or safer.
    Unwise,
}

/// Something that a check has found.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Finding {
    severity: Severity,
    /// The name of the check.
    check: &'static str,
    /// The problem, with the value.
    what: String,
    /// How to fix it, in one line.
    remedy: String,
}

fn wrong(check: &'static str, what: String, remedy: impl Into<String>) -> Finding {
    Finding { severity: Severity::Wrong, check, what, remedy: remedy.into() }
}

fn unwise(check: &'static str, what: String, remedy: impl Into<String>) -> Finding {
    Finding { severity: Severity::Unwise, check, what, remedy: remedy.into() }
}

/// The facts that checks judge.
struct Facts<'a> {
    host: &'a Host,
    /// The configuration, if there is one that can be read.
    config: Option<&'a Config>,
    /// The status of the running server, if there is one.
    status: Option<&'a PoolStatus>,
}

/// Shows every finding, the worst first. Exit code 1 if something is wrong.
pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let host = Host::default();
    let mut found = Vec::new();
    let given = args.config.clone();
    let path = given.or_else(|| Some(PathBuf::from(CONFIG)).filter(|path| path.exists()));
    let config = path.as_deref().and_then(|path| read(path, &mut found));
    let status = match args.daemon.client().status() {
        Ok(status) => Some(status),
        Err(ClientError::NotRunning(_)) => None,
        Err(error) => {
            found.push(wrong("control", error.to_string(), "see journalctl -u forebay"));
            None
        }
    };
    let facts = Facts { host: &host, config: config.as_ref(), status: status.as_ref() };
    found.extend(checks::all(&facts));
    found.extend(config::all(&facts, path.as_deref()));
    found.sort_by_key(|finding| finding.severity);
    output::print(&if args.json { json(&found)? } else { text(&found, path.as_deref(), &facts) })?;
    match found.iter().any(|finding| finding.severity == Severity::Wrong) {
        true => Err(Ended(1).into()),
        false => Ok(()),
    }
}

/// The configuration, as `forebay serve` reads it.
fn read(path: &Path, found: &mut Vec<Finding>) -> Option<Config> {
    let config = Config::text(path).and_then(|text| Config::parse(path, &text));
    let edit = format!("edit {}; forebay.toml(5) has every key", path.display());
    config.map_err(|error| found.push(wrong("configuration", error.to_string(), edit))).ok()
}

fn json(found: &[Finding]) -> anyhow::Result<String> {
    let wrong = found.iter().any(|finding| finding.severity == Severity::Wrong);
    let all = serde_json::json!({ "wrong": wrong, "findings": found });
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

fn text(found: &[Finding], path: Option<&Path>, facts: &Facts<'_>) -> String {
    let config = path.map_or("no configuration".to_owned(), |path| path.display().to_string());
    let server = if facts.status.is_some() { "a server runs" } else { "no server runs" };
    let mut out = format!("checked: this host, {config}; {server}\n");
    for Finding { severity, check, what, remedy } in found {
        let severity = match severity {
            Severity::Wrong => "wrong ",
            Severity::Unwise => "unwise",
        };
        out += &format!("{severity}  {check}: {what}\n        {remedy}\n");
    }
    let count = |severity| found.iter().filter(|finding| finding.severity == severity).count();
    out + &match (count(Severity::Wrong), count(Severity::Unwise)) {
        (0, 0) => "nothing found\n".to_owned(),
        (wrong, unwise) => format!("{wrong} wrong, {unwise} unwise\n"),
    }
}
