//! `forebay set`: changes settings of a volume while it serves.

use std::str::FromStr;

use clap::Args;
use forebay_control::api::VolumeSettings;
use forebay_control::config::{parse_content, parse_eviction, parse_mode};

use crate::WrongUsage;
use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay set`.
#[derive(Args, Debug)]
pub struct SetArgs {
    /// The volume
    pub volume: String,
    #[arg(required = true, value_name = "KEY=VALUE", help = Setting::help())]
    pub settings: Vec<Setting>,
    /// Print what is in force now as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// One `KEY=VALUE`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    pub key: String,
    pub value: String,
}

/// What is wrong with a value, if anything is.
type CheckValue = fn(&str) -> Result<(), String>;

/// What `set` can change, and what refuses a value of it.
const SETTINGS: [(&str, CheckValue); 3] = [
    ("mode", |value| parse_mode(value).map(drop)),
    ("eviction", |value| parse_eviction(value).map(drop)),
    ("content", |value| parse_content(value).map(drop)),
];
/// The value that goes back to the configuration's own.
const DEFAULT: &str = "default";

impl Setting {
    fn names() -> String {
        SETTINGS.map(|(name, _)| name).join(", ")
    }

    fn help() -> String {
        format!("The settings; known: {}", Self::names())
    }
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("there is no '='; write KEY=VALUE")?;
        let known = SETTINGS.iter().find(|(name, _)| *name == key);
        let (_, check) = known
            .ok_or_else(|| format!("unknown setting {key:?}; use one of: {}", Self::names()))?;
        if value != DEFAULT {
            check(value)?;
        }
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

/// Changes the settings.
pub fn run(args: &SetArgs) -> anyhow::Result<()> {
    let settings = settings(&args.settings)?;
    let client = args.daemon.client();
    let volume = client.set(&args.volume, &settings)?;
    let cache = client.status()?.cache;
    let (mode, eviction, content) = (volume.mode, cache.eviction, cache.content);
    let name = volume.name;
    let line = match args.json {
        true => serde_json::json!({
            "volume": name, "mode": mode, "eviction": eviction, "content": content,
        })
        .to_string(),
        false => format!("{name}: mode={mode} eviction={eviction} content={content}"),
    };
    Ok(output::line(&line)?)
}

fn settings(given: &[Setting]) -> Result<VolumeSettings, WrongUsage> {
    let mut settings = VolumeSettings::default();
    for Setting { key, value } in given {
        let place = match key.as_str() {
            "mode" => &mut settings.mode,
            "eviction" => &mut settings.eviction,
            "content" => &mut settings.content,
            _ => unreachable!("a setting is one of SETTINGS"),
        };
        if place.replace(value.clone()).is_some() {
            return Err(WrongUsage(format!("{key} is given twice; give it once")));
        }
    }
    Ok(settings)
}
