//! `forebay apply`: brings a configuration file into force while the server serves, as a whole or
//! not at all.

use std::path::PathBuf;

use clap::Args;
use forebay_control::api::{Applied, ApplyRequest, SettingDifference};
use forebay_control::config::Config;

use crate::WrongUsage;
use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay apply`.
#[derive(Args, Debug)]
pub struct ApplyArgs {
    /// The configuration file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Only print how it differs from the settings in force
    #[arg(long)]
    pub dry_run: bool,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Applies the file, and prints the settings that differed.
pub fn run(args: &ApplyArgs) -> anyhow::Result<()> {
    let config = Config::text(&args.file)?;
    let parsed = Config::parse(&args.file, &config);
    parsed.map_err(|error| WrongUsage(error.to_string()))?;
    let path = args.file.display().to_string();
    let request = ApplyRequest { config, path, dry_run: args.dry_run };
    let answer = args.daemon.client().apply(&request)?;
    let line = if args.json { serde_json::to_string(&answer)? } else { text(&answer) };
    Ok(output::line(&line)?)
}

fn text(answer: &Applied) -> String {
    if answer.differences.is_empty() {
        return "no setting differs".to_owned();
    }
    answer.differences.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn line(one: &SettingDifference) -> String {
    let SettingDifference { volume, name, from, to } = one;
    let whose = volume.as_ref().map_or(String::new(), |volume| format!("{volume}: "));
    let value = |value: &Option<String>| value.clone().unwrap_or("none".to_owned());
    format!("{whose}{name}: {} -> {}", value(from), value(to))
}
