//! `forebay config`: every setting in force, and where its value comes from.

use anyhow::bail;
use clap::Args;
use forebay_control::api::SettingStatus;
use forebay_control::config::Config;
use forebay_control::settings::{Section, Spec};
use serde::Serialize;

use crate::client::Daemon;
use crate::output;
use forebay_control::text::date;

/// Arguments of `forebay config`.
#[derive(Args, Debug)]
pub struct ConfigArgs {
    /// Only the settings of this volume
    #[arg(value_name = "VOLUME")]
    pub volume: Option<String>,
    /// Print the settings as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// A setting, and where its value comes from.
#[derive(Serialize)]
struct Shown<'a> {
    volume: Option<&'a str>,
    section: &'static str,
    name: &'a str,
    value: &'a str,
    /// `default`, `configuration` or `set`.
    from: &'static str,
    /// The configured value, if it was set.
    configured: Option<&'a str>,
    /// When it was set.
    set_unix_seconds: Option<u64>,
}

/// Prints the settings.
pub fn run(args: &ConfigArgs) -> anyhow::Result<()> {
    let status = args.daemon.client().status()?;
    let defaults = Config::defaults(1);
    let all = status.settings.iter().filter_map(|setting| shown(setting, &defaults));
    let wanted = args.volume.as_deref();
    if let Some(name) = wanted
        && !status.volumes.iter().any(|volume| volume.name == name)
    {
        let known: Vec<_> = status.volumes.iter().map(|volume| volume.name.as_str()).collect();
        bail!("no volume {name:?}; use one of: {}", known.join(", "));
    }
    let all: Vec<_> = all.filter(|one| wanted.is_none() || one.volume == wanted).collect();
    let text = if args.json { serde_json::to_string(&all)? } else { text(&all) };
    Ok(output::line(&text)?)
}

fn shown<'a>(setting: &'a SettingStatus, defaults: &Config) -> Option<Shown<'a>> {
    let SettingStatus { volume, name, value, configured, set_unix_seconds } = setting;
    let of = |section: &&(&str, Section)| {
        (section.1 == Section::Volume) == volume.is_some() && Spec::find(section.1, name).is_some()
    };
    let &(section, found) = Section::NAMES.iter().find(of)?;
    let default = Spec::find(found, name)?.text(defaults, 0);
    let is_default = default.as_ref() == Some(value);
    let from = match (configured, is_default) {
        (Some(_), _) => "set",
        (None, true) => "default",
        (None, false) => "configuration",
    };
    Some(Shown {
        volume: volume.as_deref(),
        section,
        name,
        value,
        from,
        configured: configured.as_deref(),
        set_unix_seconds: *set_unix_seconds,
    })
}

/// Section by section, as in the file.
fn text(all: &[Shown<'_>]) -> String {
    let mut lines = Vec::new();
    let mut before = None;
    let width = all.iter().map(|one| one.name.len() + one.value.len()).max().unwrap_or(0);
    for one in all {
        let heading = match one.volume {
            Some(volume) => format!("[volume {volume}]"),
            None => format!("[{}]", one.section),
        };
        if before.as_ref() != Some(&heading) {
            lines.push(heading.clone());
            before = Some(heading);
        }
        let gap = " ".repeat(width - one.name.len() - one.value.len());
        lines.push(format!("{} = {}{gap}  {}", one.name, one.value, origin(one)));
    }
    lines.join("\n")
}

fn origin(one: &Shown<'_>) -> String {
    match (one.configured, one.set_unix_seconds) {
        (Some(configured), Some(seconds)) => {
            let configured = if configured.is_empty() { "none" } else { configured };
            format!("set on {}; configured: {configured}", date(seconds))
        }
        _ => one.from.to_owned(),
    }
}
