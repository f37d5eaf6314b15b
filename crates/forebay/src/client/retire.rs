//! `forebay retire`: the server gives up its cache device, which is emptied first.

use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use forebay_control::units::Size;
use forebay_engine::DrainProgress;

use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay retire`.
#[derive(Args, Debug)]
pub struct RetireArgs {
    /// Do not wait until the device is empty
    #[arg(long)]
    pub background: bool,
    /// Print health and dirty bytes as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Interval between two queries.
const PERIOD: Duration = Duration::from_millis(100);

/// Retires the cache device, and waits until nothing needs it.
pub fn run(args: &RetireArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    client.retire()?;
    let (began, mut progress) = (Instant::now(), DrainProgress::default());
    let bar = output::bar(0);
    loop {
        let status = client.status()?;
        let (health, dirty) = (&status.health, status.cache.dirty_bytes);
        if args.background || health == "detached" {
            bar.finish_and_clear();
            let line = match args.json {
                true => serde_json::json!({ "health": health, "dirty_bytes": dirty }).to_string(),
                false if args.background => "the cache device is being emptied".to_owned(),
                false => "the cache device is out of use: it can be taken out".to_owned(),
            };
            return Ok(output::line(&line)?);
        }
        let lost = status.cache.fenced_bytes;
        if lost > 0 && dirty == lost {
            bail!("{} of dirty data cannot be read back from the device", Size(lost));
        }
        if progress.is_stalled(began.elapsed(), dirty) {
            bail!(
                "{} of dirty data are not on the primaries yet, without progress; see the \
                 server's log; it goes on with the attempt",
                Size(dirty)
            );
        }
        output::show_left(&bar, dirty);
        std::thread::sleep(PERIOD);
    }
}
