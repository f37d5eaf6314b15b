//! `forebay status`: the server's JSON, or a short summary of it for people.

use clap::Args;
use clap::builder::PossibleValuesParser;
use forebay_control::api::StatisticsStatus;
use forebay_control::statistics::Window;
use forebay_control::{ControlError, text};

use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Only this volume
    pub volume: Option<String>,
    /// Show what happened in a window that ends now, rather than the state: now, 5m, 1h, 1d, start
    #[arg(long, value_name = "WINDOW", value_parser = window())]
    pub window: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Shows the pool, or one volume.
pub fn run(args: &StatusArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    if let Some(window) = args.window.as_deref().and_then(Window::named) {
        return statistics(args, &client.statistics(window)?);
    }
    if let Some(name) = &args.volume {
        let volume = client.volume(name)?;
        return print(args.json, &volume, || text::volume(&volume));
    }
    let status = client.status()?;
    print(args.json, &status, || text::pool(&status))
}

/// The names of windows.
fn window() -> PossibleValuesParser {
    PossibleValuesParser::new(Window::ALL.map(Window::name))
}

/// Shows what happened in a window, to all volumes or to one.
fn statistics(args: &StatusArgs, all: &StatisticsStatus) -> anyhow::Result<()> {
    let Some(name) = &args.volume else {
        return print(args.json, all, || text::statistics(all));
    };
    let found = all.volumes.iter().find(|volume| volume.name == *name);
    let volume = found.ok_or_else(|| {
        let known = all.volumes.iter().map(|volume| volume.name.as_str());
        ControlError::no_volume(name, known)
    })?;
    let one = StatisticsStatus { volumes: vec![volume.clone()], ..all.clone() };
    print(args.json, volume, || text::statistics(&one))
}

/// Prints JSON, or the text.
pub fn print<T: serde::Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    let shown = if json { serde_json::to_string_pretty(value)? + "\n" } else { text() };
    Ok(output::print(&shown)?)
}
