//! `forebay apply`: brings a configuration file into force while the server serves, as a whole or
//! not at all.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use forebay_control::api::{Applied, ApplyRequest, SettingDifference, UpgradeStatus, VolumeShift};
use forebay_control::config::Config;
use forebay_control::units::Size;

use crate::WrongUsage;
use crate::client::{Daemon, upgrade};
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

/// Applies the file, and prints what differed.
pub fn run(args: &ApplyArgs) -> anyhow::Result<()> {
    let config = Config::text(&args.file)?;
    let parsed = Config::parse(&args.file, &config);
    parsed.map_err(|error| WrongUsage(error.to_string()))?;
    let path = args.file.display().to_string();
    let request = ApplyRequest { config, path, dry_run: args.dry_run };
    let client = args.daemon.client();
    let mut answer = client.apply(&request)?;
    if !args.json {
        output::line(&differences(&answer))?;
    }
    if let Some(begun) = answer.hand_over.take() {
        let ended = upgrade::ended(&client, &begun)?;
        answer.applied = ended.error.is_none();
        answer.hand_over = Some(ended);
    }
    if args.json {
        output::line(&serde_json::to_string(&answer)?)?;
    }
    let Some(UpgradeStatus { error, pause_seconds, .. }) = answer.hand_over else {
        return Ok(());
    };
    match error {
        Some(error) if upgrade::serves(&client) => {
            bail!("{error}; the server serves on with its previous configuration")
        }
        Some(error) => bail!("{error}"),
        None if args.json => Ok(()),
        None => {
            let pause = pause_seconds.unwrap_or_default();
            Ok(output::line(&format!("in force: clients waited {pause:.2} s"))?)
        }
    }
}

fn differences(answer: &Applied) -> String {
    let volumes = answer.volumes.iter().map(volume);
    let mut lines: Vec<_> = volumes.chain(answer.differences.iter().map(setting)).collect();
    match &*answer.way {
        _ if lines.is_empty() => lines.push("nothing differs".to_owned()),
        "hand-over" => lines.push(
            "this takes a hand-over: the RAM tier begins empty, and clients wait a moment"
                .to_owned(),
        ),
        "new cache" => lines.push(
            "this takes a new cache: all dirty data is written first, and the blocks of the cache \
             return from the primaries in the background"
                .to_owned(),
        ),
        _ => {}
    }
    lines.join("\n")
}

fn volume(one: &VolumeShift) -> String {
    let VolumeShift { volume, change, from, to } = one;
    let size = |text: &Option<String>| {
        let bytes = text.as_ref().and_then(|text| text.parse().ok());
        bytes.map_or_else(String::new, |bytes| Size(bytes).to_string())
    };
    match &**change {
        "renamed" => format!("{volume}: renamed from {}", from.clone().unwrap_or_default()),
        "grown" => format!("{volume}: grown from {} to {}", size(from), size(to)),
        change => format!("{volume}: {change}"),
    }
}

fn setting(one: &SettingDifference) -> String {
    let SettingDifference { volume, name, from, to } = one;
    let whose = volume.as_ref().map_or(String::new(), |volume| format!("{volume}: "));
    let value = |value: &Option<String>| value.clone().unwrap_or("none".to_owned());
    format!("{whose}{name}: {} -> {}", value(from), value(to))
}
