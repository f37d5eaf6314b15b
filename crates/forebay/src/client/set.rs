//! `forebay set`: changes settings of a volume or of the whole cache while it serves.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Args, Command};
use forebay_control::api::InForce;
use forebay_control::settings::{Change, Spec};

use crate::WrongUsage;
use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay set`.
#[derive(Args, Debug)]
pub struct SetArgs {
    #[arg(required = true, value_name = "[VOLUME] KEY=VALUE", help = settings_help())]
    #[arg(value_parser = Word, hide_possible_values = true)]
    pub words: Vec<String>,
    /// Print the settings in force as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Takes every word, since the first may be a volume; shells complete settings and their values.
#[derive(Clone)]
struct Word;

impl TypedValueParser for Word {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        word: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, arg, word)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let settings = |spec: &'static Spec| {
            let values = spec.kind.names().into_iter().chain(["default"]);
            values.map(|value| PossibleValue::new(format!("{}={value}", spec.key)))
        };
        Some(Box::new(Spec::changeable(true).flat_map(settings)))
    }
}

/// The settings that `set` accepts, with their values.
fn settings_help() -> String {
    let one = |spec: &Spec| {
        let volume = if spec.is_of_volume() { ", of a volume" } else { "" };
        let values = match spec.kind.names() {
            names if names.is_empty() => spec.kind.range().unwrap_or("any".to_owned()),
            names => names.join(", "),
        };
        format!("\n- {}{volume}: {values}", spec.key)
    };
    let each: String = Spec::online().map(one).collect();
    format!("The settings:{each}")
}

/// Changes the settings, and prints those that were changed, or as JSON all, as they are then in
/// force.
pub fn run(args: &SetArgs) -> anyhow::Result<()> {
    let (volume, settings) = understood(&args.words)?;
    let answer = args.daemon.client().set(volume, &settings)?;
    let line = if args.json { json(volume, &answer) } else { text(volume, &settings, &answer) };
    Ok(output::line(&line)?)
}

/// Splits the words into the volume, if the first word names one, and the settings.
fn understood(words: &[String]) -> Result<(Option<&str>, BTreeMap<String, String>), WrongUsage> {
    let (volume, settings) = match words {
        [volume, settings @ ..] if !volume.contains('=') => (Some(volume.as_str()), settings),
        settings => (None, settings),
    };
    if settings.is_empty() {
        return Err(WrongUsage("no setting is given; write KEY=VALUE".to_owned()));
    }
    let mut all = BTreeMap::new();
    for word in settings {
        let (key, value) = word
            .split_once('=')
            .ok_or_else(|| WrongUsage(format!("{word:?} has no '='; write KEY=VALUE")))?;
        Change::parse(volume, key, value).map_err(WrongUsage)?;
        if all.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(WrongUsage(format!("{key} is given twice; give it once")));
        }
    }
    Ok((volume, all))
}

/// The settings that `set` can change, with their values in force.
fn changeable(answer: &InForce) -> Vec<(&'static str, &str)> {
    let of_volume = answer.settings.iter().any(|setting| setting.volume.is_some());
    let value = |spec: &'static Spec| {
        let same = |name: &str, of_volume| name == spec.key && of_volume == spec.is_of_volume();
        let mut all = answer.settings.iter();
        let found = all.find(|setting| same(&setting.name, setting.volume.is_some()))?;
        Some((spec.key, found.value.as_str()))
    };
    Spec::changeable(of_volume).filter_map(value).collect()
}

fn text(volume: Option<&str>, asked: &BTreeMap<String, String>, answer: &InForce) -> String {
    let in_force = changeable(answer);
    let known = |key: &str| in_force.iter().find(|(known, _)| *known == key).map(|found| found.1);
    let values = Spec::changeable(volume.is_some()).filter(|spec| asked.contains_key(spec.key));
    let values = values.map(|spec| format!("{}={}", spec.key, known(spec.key).unwrap_or("none")));
    let values = values.collect::<Vec<_>>().join(" ");
    volume.map_or(values.clone(), |volume| format!("{volume}: {values}"))
}

fn json(volume: Option<&str>, answer: &InForce) -> String {
    let volume = volume.map(|volume| ("volume", volume));
    volume.into_iter().chain(changeable(answer)).collect::<serde_json::Value>().to_string()
}
