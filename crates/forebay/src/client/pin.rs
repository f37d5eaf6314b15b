//! `forebay pin`: bytes of a volume that stay in the cache. They are the volume's setting `pinned`.

use clap::Args;
use forebay_control::api::SettingStatus;
use forebay_control::config::{Pin, PinEdit, PinList, TextList};
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
    let volume = client.volume(&args.volume)?;
    let new = args.places.on(&volume)?;
    if args.places.is_empty() && args.prefetch {
        return Err(WrongUsage("--prefetch needs --range or --file".to_owned()).into());
    }
    let add = TextList(new.clone()).text().map(PinEdit::Add);
    let edit = args.remove.clone().map(PinEdit::Remove).or(add);
    let settings = match &edit {
        Some(edit) => client.pin(&volume.name, edit)?.settings,
        None => client.status()?.settings,
    };
    if args.prefetch {
        prefetch::bring_in(&client, &volume.name, &new, None)?;
    }
    Ok(output::line(&shown(&pins_of(&settings, &volume.name)?.0, args.json)?)?)
}

/// The pins of a volume among the settings in force.
fn pins_of(settings: &[SettingStatus], volume: &str) -> anyhow::Result<PinList> {
    let is_it = |one: &&SettingStatus| one.name == PINNED && one.volume.as_deref() == Some(volume);
    let mut pins = PinList::default();
    if let Some(found) = settings.iter().find(is_it) {
        pins.add(&found.value).map_err(anyhow::Error::msg)?;
    }
    Ok(pins)
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
