//! `forebay upgrade`: another program takes over from the server, without an error for its clients.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use forebay_control::api::UpgradeStatus;
use forebay_control::{Client, ClientError};

use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay upgrade`.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// The program that shall take over [default: the one that runs this command]
    #[arg(value_name = "BINARY")]
    pub program: Option<PathBuf>,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Interval between two queries.
const PERIOD: Duration = Duration::from_millis(50);
/// The keeper's own limits, with a reserve.
const PATIENCE: Duration = Duration::from_secs(150);
/// For how long no socket may be there between two servers.
const GONE_MAX: Duration = Duration::from_secs(20);

/// Upgrades the server, and waits for the outcome.
pub fn run(args: &UpgradeArgs) -> anyhow::Result<()> {
    let program = match &args.program {
        Some(program) => {
            std::path::absolute(program).with_context(|| program.display().to_string())?
        }
        None => std::env::current_exe().context("the path of this program")?,
    };
    let client = args.daemon.client();
    let begun = client.upgrade(&program)?;
    let ended = ended(&client, &begun)?;
    if args.json {
        output::line(&serde_json::to_string(&ended)?)?;
    }
    let UpgradeStatus { program, pause_seconds, error, .. } = ended;
    match error {
        Some(error) if serves(&client) => {
            bail!("{program}: {error}; the previous program serves on")
        }
        Some(error) => bail!("{program}: {error}"),
        None if args.json => Ok(()),
        None => {
            let version = client.status()?.version;
            let pause = pause_seconds.unwrap_or_default();
            let line = format!("upgraded to version {version}: clients waited {pause:.2} s");
            Ok(output::line(&line)?)
        }
    }
}

/// Whether a server serves, and does not stop.
pub fn serves(client: &Client) -> bool {
    client.status().is_ok_and(|status| status.state == "serving")
}

/// Waits until an upgrade has ended. While something must be written to the primaries first, it
/// shows how much, and the wait has no limit.
pub fn ended(client: &Client, begun: &UpgradeStatus) -> anyhow::Result<UpgradeStatus> {
    let bar = output::bar(0);
    let mut limit = Instant::now() + PATIENCE;
    let mut there = Instant::now();
    loop {
        let answer = client.last_upgrade();
        if !matches!(answer, Err(ClientError::NotRunning(_))) {
            there = Instant::now();
        } else if there.elapsed() > GONE_MAX {
            bail!("the server has ended, and none serves in its place; see the log");
        }
        match answer {
            Ok(now) if now.id == begun.id && now.state != "running" => {
                bar.finish_and_clear();
                return Ok(now);
            }
            Ok(now) if now.id != begun.id && now.id != 0 => {
                bail!("another upgrade came after this one; see `forebay status` and the log")
            }
            Ok(now) => {
                if let Some(bytes) = now.to_drain_bytes {
                    output::show_left(&bar, bytes);
                    limit = Instant::now() + PATIENCE;
                }
            }
            // For a moment nobody may answer.
            Err(
                ClientError::NotRunning(_)
                | ClientError::Denied(_)
                | ClientError::Io { .. }
                | ClientError::Timeout { .. },
            ) => {}
            Err(error) => return Err(error.into()),
        }
        if Instant::now() > limit {
            bail!("no outcome in {} s; see `forebay status` and the log", PATIENCE.as_secs());
        }
        std::thread::sleep(PERIOD);
    }
}
