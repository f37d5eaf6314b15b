//! `forebay status`: the server's JSON, or a short summary of it for people.

use clap::Args;
use forebay_control::text;

use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Only this volume
    pub volume: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Shows the pool, or one volume.
pub fn run(args: &StatusArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    if let Some(name) = &args.volume {
        let volume = client.volume(name)?;
        return print(args.json, &volume, || text::volume(&volume));
    }
    let status = client.status()?;
    print(args.json, &status, || text::pool(&status))
}

fn print<T: serde::Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    let shown = if json { serde_json::to_string_pretty(value)? + "\n" } else { text() };
    Ok(output::print(&shown)?)
}
