//! `forebay stop`: asks the server to stop, and waits until it has.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use forebay_control::api::StopStatus;
use forebay_control::units::Size;
use forebay_control::{Client, ClientError};

use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay stop`.
#[derive(Args, Debug)]
pub struct StopArgs {
    /// First write everything dirty to the primaries
    #[arg(long)]
    pub drain: bool,
    /// Print the data left in the cache as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Interval between two queries.
const PERIOD: Duration = Duration::from_millis(100);

/// Stops the server.
pub fn run(args: &StopArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    let pid = client.status().map(|status| status.pid);
    client.stop(args.drain)?;
    let stopped = wait(&client, pid.ok())?;
    let StopStatus { dirty_bytes, lost_bytes } = stopped.left;
    let rest = Size(dirty_bytes.saturating_sub(lost_bytes));
    if args.json {
        output::line(&serde_json::to_string(&stopped.left)?)?;
    } else if stopped.is_told || !args.drain {
        output::line("stopped")?;
    }
    if !args.drain {
        return Ok(());
    }
    if stopped.given_up && rest.0 > 0 {
        bail!("not all is drained: a signal or another stop ended the drain; {rest} may be left");
    }
    if !stopped.is_told {
        bail!(
            "the server ended without telling whether all is drained: {rest} were left when it \
             last answered; the next start finds what is in the cache; see its log"
        );
    }
    let lost = format!("{} are lost: the cache cannot read them back", Size(lost_bytes));
    match (rest.0, lost_bytes) {
        (0, 0) => Ok(()),
        (0, _) => bail!("not all is drained: {lost}"),
        (_, 0) => bail!("not all is drained: {rest} stay in the cache; {SEE_LOG}"),
        _ => bail!("not all is drained: {rest} stay in the cache, {lost}; {SEE_LOG}"),
    }
}

const SEE_LOG: &str = "the server's log says of which volume and why";

/// The end of a server.
struct Stopped {
    /// What is left in the cache: what the server has told at its end, or what was left at the last
    /// query before it.
    left: StopStatus,
    /// Whether the server has told it.
    is_told: bool,
    /// Whether a signal or another stop ended the drain.
    given_up: bool,
}

/// Waits until the server no longer answers, showing the dirty bytes.
///
/// # Errors
/// If another process than `pid` answers: a hand-over came before the stop.
fn wait(client: &Client, pid: Option<u32>) -> anyhow::Result<Stopped> {
    let bar = output::bar(0);
    let left = StopStatus { dirty_bytes: 0, lost_bytes: 0 };
    let mut stopped = Stopped { left, is_told: false, given_up: false };
    loop {
        match client.status() {
            Err(ClientError::NotRunning(_)) => break,
            // During its exit the server may be too busy to answer, or hang up in the middle.
            Err(_) => {}
            Ok(status) if pid.is_some_and(|pid| pid != status.pid) => {
                bar.finish_and_clear();
                bail!("another process took over meanwhile, and serves: stop it again");
            }
            Ok(status) => {
                let (dirty_bytes, lost) = (status.cache.dirty_bytes, status.cache.fenced_bytes);
                stopped.left = StopStatus { dirty_bytes, lost_bytes: lost.min(dirty_bytes) };
                stopped.given_up = status.drain_given_up;
                output::show_left(&bar, dirty_bytes);
            }
        }
        // Asked from the beginning, so that the server knows that somebody waits for it.
        if let Ok(left) = client.left() {
            (stopped.left, stopped.is_told) = (left, true);
        }
        std::thread::sleep(PERIOD);
    }
    bar.finish_and_clear();
    Ok(stopped)
}
