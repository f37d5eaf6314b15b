//! `forebay stop`: asks the server to stop, and waits until it has.

use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use forebay_control::units::Size;
use forebay_control::{Client, ClientError};
use forebay_engine::DRAIN_PATIENCE;

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

/// Interval between two queries for the server's status.
const PERIOD: Duration = Duration::from_millis(100);
/// A drain counts as abandoned if it made no progress for the server's patience, less this.
const SLACK: Duration = Duration::from_secs(5);

/// Stops the server.
pub fn run(args: &StopArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    client.stop(args.drain)?;
    let left = wait(&client);
    let (dirty_bytes, lost_bytes) = (left.dirty, left.lost);
    if args.json {
        let stopped = serde_json::json!({ "dirty_bytes": dirty_bytes, "lost_bytes": lost_bytes });
        output::line(&stopped.to_string())?;
    } else {
        output::line("stopped")?;
    }
    let lost = format!("{} are lost: the cache cannot read them back", Size(lost_bytes));
    let rest = Size(dirty_bytes - lost_bytes);
    if args.drain && left.given_up && dirty_bytes > lost_bytes {
        bail!("not all is drained: a signal to the server ended the drain; {rest} may be left");
    }
    match (args.drain, dirty_bytes - lost_bytes, lost_bytes) {
        (false, ..) | (_, 0, 0) => Ok(()),
        (_, 0, _) => bail!("not all is drained: {lost}"),
        (_, _, 0) => bail!("not all is drained: {rest} stay in the cache; {SEE_LOG}"),
        _ => bail!("not all is drained: {rest} stay in the cache, {lost}; {SEE_LOG}"),
    }
}

const SEE_LOG: &str = "the server's log says of which volume and why";

/// Bytes left in the cache by a stop.
#[derive(Clone, Copy, Default)]
struct Left {
    dirty: u64,
    lost: u64,
    /// Whether a signal ended the drain.
    given_up: bool,
}

/// Waits until the server no longer answers, showing the dirty bytes; returns the bytes left. If
/// their number was still falling at the last query, all that could be read has been written since.
fn wait(client: &Client) -> Left {
    let bar = output::bar(0);
    let (mut last, mut since) = (Left::default(), Instant::now());
    loop {
        match client.status() {
            Err(ClientError::NotRunning(_)) => break,
            // During its exit the server may be too busy to answer, or hang up in the middle.
            Err(_) => {}
            Ok(status) => {
                let (dirty, lost) = (status.cache.dirty_bytes, status.cache.fenced_bytes);
                if dirty != last.dirty {
                    since = Instant::now();
                }
                let given_up = status.drain_given_up;
                last = Left { dirty, lost: lost.min(dirty), given_up };
                output::show_left(&bar, dirty);
            }
        }
        std::thread::sleep(PERIOD);
    }
    bar.finish_and_clear();
    if !last.given_up && since.elapsed() + SLACK < DRAIN_PATIENCE {
        last.dirty = last.lost;
    }
    last
}
