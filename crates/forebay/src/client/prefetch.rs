//! `forebay prefetch`: brings bytes of a volume into the cache before anybody asks for them.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use forebay_control::Client;
use forebay_control::api::{PrefetchRequest, PrefetchStatus};
use forebay_control::config::Pin;
use forebay_control::units::Size;

use crate::WrongUsage;
use crate::client::Daemon;
use crate::client::place::Places;
use crate::output;

/// Interval between two queries for the progress.
const PERIOD: Duration = Duration::from_millis(100);

/// Arguments of `forebay prefetch`.
#[derive(Args, Debug)]
pub struct PrefetchArgs {
    /// The volume
    pub volume: String,
    #[command(flatten)]
    pub places: Places,
    /// All of the volume
    #[arg(long, conflicts_with_all = ["ranges", "files", "cancel", "show"])]
    pub all: bool,
    /// The most bytes per second that are read
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<Size>,
    /// Return at once
    #[arg(long)]
    pub background: bool,
    /// Show how far the running or the last one is
    #[arg(long, conflicts_with_all = ["ranges", "files", "cancel", "background", "rate"])]
    pub show: bool,
    /// End the running one; what it brought in stays
    #[arg(long, conflicts_with_all = ["ranges", "files", "background", "rate"])]
    pub cancel: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Starts, shows or cancels a prefetch.
pub fn run(args: &PrefetchArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    let name = args.volume.as_str();
    if args.show || args.cancel {
        let status =
            if args.show { client.prefetched(name)? } else { client.stop_prefetch(name)? };
        return say(args, &status);
    }
    let volume = client.volume(name)?;
    let places = match args.all {
        true => vec![Pin { name: None, ranges: std::iter::once(0..volume.size).collect() }],
        false => args.places.on(&volume)?,
    };
    if places.is_empty() && args.places.is_empty() {
        return Err(WrongUsage("name what to bring in: --range, --file, or --all".into()).into());
    }
    let rate = args.rate.map(|Size(bytes)| bytes);
    if args.background {
        return say(args, &client.prefetch(name, &request(&places, rate))?);
    }
    say(args, &bring_in(&client, name, &places, rate)?)
}

fn request(places: &[Pin], rate: Option<u64>) -> PrefetchRequest {
    let ranges = places.iter().flat_map(|place| &place.ranges);
    PrefetchRequest { ranges: ranges.map(|range| [range.start, range.end]).collect(), rate }
}

/// Brings places of a volume into the cache, and shows the progress.
pub fn bring_in(
    client: &Client,
    volume: &str,
    places: &[Pin],
    rate: Option<u64>,
) -> anyhow::Result<PrefetchStatus> {
    let mut status = client.prefetch(volume, &request(places, rate))?;
    let bar = output::bar(status.total_bytes);
    while status.state == "running" {
        bar.set_position(status.bytes);
        std::thread::sleep(PERIOD);
        status = client.prefetched(volume)?;
    }
    bar.finish_and_clear();
    match status.state.as_str() {
        "done" => Ok(status),
        "cancelled" => bail!("cancelled after {}", Size(status.bytes)),
        _ => bail!("after {}: {}", Size(status.bytes), status.error.unwrap_or_default()),
    }
}

fn say(args: &PrefetchArgs, status: &PrefetchStatus) -> anyhow::Result<()> {
    if args.json {
        return Ok(output::line(&serde_json::to_string(status)?)?);
    }
    let PrefetchStatus { state, bytes, total_bytes, seconds, error } = status;
    let mut text = format!("{state}: {} of {} in {seconds:.1} s", Size(*bytes), Size(*total_bytes));
    text.extend(error.iter().map(|why| format!("; {why}")));
    Ok(output::line(&text)?)
}
