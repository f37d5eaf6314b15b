//! `forebay pin`: bytes of a volume that stay in the cache. They are the volume's setting `pinned`.

use std::collections::BTreeMap;

use anyhow::bail;
use clap::Args;
use forebay_control::config::{Pin, PinList};
use forebay_control::units::Size;
use serde::Serialize;

use crate::WrongUsage;
use crate::client::Daemon;
use crate::client::place::Places;
use crate::client::prefetch;
use crate::output;

/// The setting.
const PINNED: &str = "pinned";

/// Arguments of `forebay pin`.
#[derive(Args, Debug)]
pub struct PinArgs {
    /// The volume
    pub volume: String,
    #[command(flatten)]
    pub places: Places,
    /// Also bring these bytes into the cache now, as `forebay prefetch` does
    #[arg(long)]
    pub prefetch: bool,
    /// Unpin what `--list` shows under this name, or `all`; it stays in the cache as long as it is
    /// worth its place
    #[arg(long, value_name = "NAME", conflicts_with_all = ["ranges", "files", "prefetch"])]
    pub remove: Option<String>,
    /// List the pins; so does the command without other flags
    #[arg(long, conflicts_with_all = ["ranges", "files", "prefetch", "remove"])]
    pub list: bool,
    /// Print the pins as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// A pin in JSON.
#[derive(Serialize)]
struct Shown {
    name: String,
    bytes: u64,
    ranges: Vec<[u64; 2]>,
}

/// Pins, unpins or lists.
pub fn run(args: &PinArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    let status = client.status()?;
    let volume = client.volume(&args.volume)?;
    let is_it = |name: &str, of: Option<&str>| name == PINNED && of == Some(&volume.name);
    let mut settings = status.settings.iter();
    let now = settings.find(|one| is_it(&one.name, one.volume.as_deref()));
    let mut pins = PinList::default();
    let now = now.map_or("", |setting| setting.value.as_str());
    pins.add(now).map_err(anyhow::Error::msg)?;
    let before = pins.clone();
    let new = args.places.on(&volume)?;
    if args.places.is_empty() && args.prefetch {
        return Err(WrongUsage("--prefetch needs --range or --file".to_owned()).into());
    }
    match args.remove.as_deref() {
        Some("all") => pins.0.clear(),
        Some(name) => {
            pins.0.retain(|pin| pin.title() != name);
            if pins == before {
                bail!("nothing is pinned as {name:?}; see `forebay pin {} --list`", volume.name);
            }
        }
        None => {
            for pin in &new {
                // The same file again: it may have grown.
                pins.0.retain(|known| known.title() != pin.title());
                pins.0.push(pin.clone());
            }
        }
    }
    if pins != before {
        let text = pins.text().unwrap_or_default();
        // What the server would refuse is refused here, with the same words.
        PinList::default().add(&text).map_err(anyhow::Error::msg)?;
        let to = BTreeMap::from([(PINNED.to_owned(), text)]);
        client.set(Some(&volume.name), &to)?;
    }
    if args.prefetch {
        prefetch::bring_in(&client, &volume.name, &new, None)?;
    }
    Ok(output::line(&shown(&pins.0, args.json)?)?)
}

fn shown(pins: &[Pin], json: bool) -> anyhow::Result<String> {
    if json {
        let one = |pin: &Pin| Shown {
            name: pin.title(),
            bytes: pin.bytes(),
            ranges: pin.ranges.iter().map(|range| [range.start, range.end]).collect(),
        };
        return Ok(serde_json::to_string(&pins.iter().map(one).collect::<Vec<_>>())?);
    }
    if pins.is_empty() {
        return Ok("nothing is pinned".to_owned());
    }
    let line = |pin: &Pin| format!("{:>10}  {}", Size(pin.bytes()).to_string(), pin.title());
    Ok(pins.iter().map(line).collect::<Vec<_>>().join("\n"))
}
