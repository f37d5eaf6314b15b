//! The settings of a server. [`TABLE`] has one entry for each: its place in the file, its flag,
//! type, range, default, help, and how a running server changes it. The file, the flags, the
//! control API, the help, the OpenAPI schema and the tables of `docs/user/configuration.md` are
//! derived from it.
//!
//! To add a setting, add an entry to the table and a field to [`Config`].

mod differences;
mod table;
mod value;

use forebay_block::VolumeId;

use crate::config::{Config, PinList, VolumeConfig};
use crate::pool::SettingSnapshot;

pub use differences::{Difference, Differences, VolumeChange, VolumeDifference, Way};
pub use table::TABLE;
pub use value::{Field, Named, Value, parse_named};

/// The word for the configured value, when a setting is changed while serving.
pub const DEFAULT: &str = "default";

/// A setting: an entry of the table.
#[derive(Debug)]
pub struct Spec {
    /// Its section of the file.
    pub section: Section,
    /// Its key in that section, and its name for `forebay set`.
    pub key: &'static str,
    /// Its flag of `forebay serve`.
    pub flag: Flag,
    /// Its type and range.
    pub kind: Kind,
    /// Default value.
    pub default: Initial,
    /// How a running server changes it.
    pub online: Online,
    /// Description of the setting, one sentence of plain text.
    pub help: &'static str,
    /// Additional text of the reference, in Markdown; may be empty.
    pub more: &'static str,
    /// Its field in the configuration.
    pub field: Place,
}

/// A section of the configuration file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Section {
    /// `[cache]`
    Cache,
    /// `[memory]`
    Memory,
    /// `[server]`
    Server,
    /// `[control]`
    Control,
    /// `[web]`
    Web,
    /// `[events]`
    Events,
    /// `[[volume]]`, once for each volume.
    Volume,
}

impl Section {
    /// Every section with its name, in the order of the reference.
    pub const NAMES: [(&'static str, Self); 7] = [
        ("cache", Self::Cache),
        ("memory", Self::Memory),
        ("server", Self::Server),
        ("volume", Self::Volume),
        ("control", Self::Control),
        ("web", Self::Web),
        ("events", Self::Events),
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        let found = Self::NAMES.iter().find(|&&(_, section)| section == self);
        found.expect("every section has a name").0
    }

    /// Its settings, in the order of the table.
    pub fn settings(self) -> impl Iterator<Item = &'static Spec> {
        TABLE.iter().filter(move |spec| spec.section == self)
    }
}

/// The flag of `forebay serve` for a setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flag {
    /// No flag: the setting is available in the file only.
    None,
    /// The key, with dashes.
    Key,
    /// Another name.
    Named(&'static str),
    /// A flag that turns the setting off, with its help.
    Off(&'static str, &'static str),
    /// A part of a flag that `forebay serve` declares itself.
    Part(&'static str),
}

/// The type of a setting.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Bytes.
    Size(Range),
    /// A percentage.
    Percent(Range),
    /// A percentage, for which the range is, or bytes.
    Share(Range),
    /// A duration; the range is in milliseconds.
    Time(Range),
    /// A whole number.
    Number(Range),
    /// A boolean.
    Bool,
    /// One of a list of names.
    Choice(fn() -> Vec<&'static str>),
    /// A text, with its placeholder in the help.
    Text(&'static str),
    /// Several texts, with the placeholder of one in the help.
    List(&'static str),
}

/// The valid numbers of a setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    least: u64,
    most: u64,
    power_of_two: bool,
    zero: bool,
    or: &'static str,
}

impl Range {
    /// Every number.
    pub const ANY: Self = Self::least(0);

    /// `least` or more.
    #[must_use]
    pub const fn least(least: u64) -> Self {
        Self::within(least, u64::MAX)
    }

    /// `least` to `most`.
    #[must_use]
    pub const fn within(least: u64, most: u64) -> Self {
        Self { least, most, power_of_two: false, zero: false, or: "" }
    }

    /// Allows only powers of two.
    #[must_use]
    pub const fn power_of_two(self) -> Self {
        Self { power_of_two: true, ..self }
    }

    /// Also allows zero, with its meaning: "0 for never".
    #[must_use]
    pub const fn or_zero(self, or: &'static str) -> Self {
        Self { zero: true, or, ..self }
    }

    /// Adds advice for numbers out of the range.
    #[must_use]
    pub const fn or_else(self, or: &'static str) -> Self {
        Self { or, ..self }
    }

    fn contains(self, number: u64) -> bool {
        let within = (self.least..=self.most).contains(&number);
        within && (!self.power_of_two || number.is_power_of_two()) || self.zero && number == 0
    }
}

/// The default of a setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Initial {
    /// This value.
    Value(&'static str),
    /// No value, with its meaning for the help; empty if there is nothing to say.
    Unset(&'static str),
    /// No default: the setting is required.
    Required,
}

/// How a setting is changed in a running server.
#[derive(Clone, Copy, Debug)]
pub enum Online {
    /// It is not; a stop and a start change it.
    Restart,
    /// By handing over to a server that starts with the new value.
    HandOver,
    /// The same, with a new cache: the value of an existing cache is fixed.
    NewCache,
    /// For the whole cache, by this message to the shards.
    Cache(fn(&Config) -> forebay_engine::Setting),
    /// For one volume, by this message to the shards.
    Volume(fn(VolumeId, &VolumeConfig) -> forebay_engine::Setting),
    /// For one volume: which streams bypass the cache.
    Streams,
    /// For all clients: how long they may take.
    Clients,
    /// For the whole cache: the rules for requests.
    Rules,
    /// For one volume: its bytes that stay in the cache.
    Pins,
}

impl Online {
    /// Whether the running server itself can change the setting.
    #[must_use]
    pub fn is_live(self) -> bool {
        !matches!(self, Self::Restart | Self::HandOver | Self::NewCache)
    }

    /// The word for it in the reference.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Restart => "restart",
            Self::HandOver => "hand-over",
            Self::NewCache => "new cache",
            Self::Cache(_) | Self::Volume(_) | Self::Streams | Self::Clients => "at once",
            Self::Rules | Self::Pins => "at once",
        }
    }
}

/// Where a setting is stored in the configuration.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// Once for the server.
    Server(fn(&mut Config) -> &mut dyn Field),
    /// Once for each volume.
    Volume(fn(&mut VolumeConfig) -> &mut dyn Field),
}

impl Kind {
    /// The placeholder of the value in a flag's help; `None` for a flag without a value.
    #[must_use]
    pub fn placeholder(&self, key: &str) -> Option<String> {
        match self {
            Self::Size(_) => Some("SIZE".to_owned()),
            Self::Percent(_) => Some("PERCENT".to_owned()),
            Self::Share(_) => Some("SHARE".to_owned()),
            Self::Time(_) => Some("TIME".to_owned()),
            Self::Number(_) => Some("N".to_owned()),
            Self::Bool => None,
            Self::Choice(_) => Some(key.to_uppercase()),
            Self::Text(name) | Self::List(name) => Some((*name).to_owned()),
        }
    }

    /// The valid names of a choice; empty for other kinds.
    #[must_use]
    pub fn names(&self) -> Vec<&'static str> {
        if let Self::Choice(names) = self { names() } else { Vec::new() }
    }

    /// The range in words: "64KiB or more, or 0 for never". `None` if every value is valid.
    #[must_use]
    pub fn range(&self) -> Option<String> {
        let (range, text): (_, fn(u64) -> String) = match self {
            Self::Size(range) => (range, value::size),
            Self::Time(range) => (range, value::time),
            Self::Percent(range) | Self::Share(range) => (range, |share| format!("{share}%")),
            Self::Number(range) => (range, |number| number.to_string()),
            _ => return None,
        };
        let Range { least, most, power_of_two, or, .. } = *range;
        let within = match (least, most) {
            (0, u64::MAX) => return None,
            (_, u64::MAX) => format!("{} or more", text(least)),
            _ => format!("{} to {}", text(least), text(most)),
        };
        let bytes = if matches!(self, Self::Share(_)) { ", or 1MiB or more" } else { "" };
        let power = if power_of_two { ", a power of two" } else { "" };
        let within = format!("{within}{power}{bytes}");
        Some(if or.is_empty() { within } else { format!("{within}, or {or}") })
    }

    fn contains(&self, number: Option<u64>) -> bool {
        match (self, number) {
            (Self::Size(range) | Self::Time(range), Some(number))
            | (Self::Percent(range) | Self::Share(range) | Self::Number(range), Some(number)) => {
                range.contains(number)
            }
            _ => true,
        }
    }
}

impl Spec {
    /// The setting with this section and key.
    #[must_use]
    pub fn find(section: Section, key: &str) -> Option<&'static Self> {
        section.settings().find(|spec| spec.key == key)
    }

    /// The settings that can be changed in a running server; those of volumes first.
    pub fn online() -> impl Iterator<Item = &'static Self> {
        let all = || TABLE.iter().filter(|spec| spec.online.is_live());
        let of_volume = all().filter(|spec| spec.is_of_volume());
        of_volume.chain(all().filter(|spec| !spec.is_of_volume()))
    }

    /// Whether each volume has its own value.
    #[must_use]
    pub fn is_of_volume(&self) -> bool {
        self.section == Section::Volume
    }

    /// The settings that a request can change which names a volume: those of the volume, and those
    /// of the cache that no setting of volumes has the name of. Without a volume, those of the
    /// cache.
    pub fn changeable(volume: bool) -> impl Iterator<Item = &'static Self> {
        Self::online().filter(move |spec| {
            let hidden = || Self::find(Section::Volume, spec.key).is_some();
            if volume { spec.is_of_volume() || !hidden() } else { !spec.is_of_volume() }
        })
    }

    /// The name of its flag; `None` if it has none of its own.
    #[must_use]
    pub fn flag_name(&self) -> Option<String> {
        match self.flag {
            Flag::None | Flag::Part(_) => None,
            Flag::Key => Some(self.key.replace('_', "-")),
            Flag::Named(name) | Flag::Off(name, _) => Some(name.to_owned()),
        }
    }

    /// Its field in `config`; `volume` is ignored for settings of the server.
    ///
    /// # Panics
    /// If it is a setting of volumes and there is no volume with this index.
    pub fn field<'a>(&self, config: &'a mut Config, volume: usize) -> &'a mut dyn Field {
        match self.field {
            Place::Server(field) => field(config),
            Place::Volume(field) => field(&mut config.volumes[volume]),
        }
    }

    /// Parses `text` and stores the value in `config`.
    ///
    /// # Errors
    /// When the text is invalid or out of range; the message names the value and the range.
    pub fn set(&self, config: &mut Config, volume: usize, text: &str) -> Result<(), String> {
        let field = self.field(config, volume);
        field.set(text)?;
        if self.kind.contains(field.number()) {
            return Ok(());
        }
        let range = self.kind.range().unwrap_or_default();
        Err(format!("{text} is out of range; use {range}"))
    }

    /// Stores the value that `text` stands for, as [`Spec::set`]; without a text, the setting has
    /// no value afterwards.
    ///
    /// # Errors
    /// As for [`Spec::set`], and when it cannot be without a value.
    pub fn restore(
        &self,
        config: &mut Config,
        volume: usize,
        text: Option<&str>,
    ) -> Result<(), String> {
        match text {
            Some(text) => {
                // A list is replaced, not appended to.
                self.field(config, volume).clear();
                self.set(config, volume, text)
            }
            None if self.field(config, volume).clear() => Ok(()),
            None => Err("it must have a value".to_owned()),
        }
    }

    /// Checks that `text` is a valid value of this setting.
    ///
    /// # Errors
    /// As for [`Spec::set`].
    pub fn check(&self, text: &str) -> Result<(), String> {
        self.set(&mut Config::defaults(1), 0, text)
    }

    /// The value in `config` as text; `None` if it is unset.
    #[must_use]
    pub fn text(&self, config: &Config, volume: usize) -> Option<String> {
        self.field(&mut config.clone(), volume).text()
    }
}

impl Config {
    /// A configuration with `volumes` volumes, in which every setting has its default.
    ///
    /// # Panics
    /// If a default of the table is invalid; a test checks all of them.
    #[must_use]
    pub fn defaults(volumes: usize) -> Self {
        let volumes = vec![VolumeConfig::default(); volumes];
        let mut config = Self { volumes, ..Self::default() };
        for spec in TABLE {
            let Initial::Value(text) = spec.default else { continue };
            let places = if spec.is_of_volume() { config.volumes.len() } else { 1 };
            for at in 0..places {
                spec.set(&mut config, at, text).expect("a default can be read");
            }
        }
        config
    }
}

/// A setting to change while serving.
#[derive(Clone, Debug)]
pub struct Change {
    /// The setting.
    pub spec: &'static Spec,
    /// The volume, for a setting of volumes.
    pub volume: Option<String>,
    /// The new value.
    pub value: NewValue,
}

/// The new value of a setting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NewValue {
    /// The configured one.
    Configured,
    /// None.
    Unset,
    /// This one.
    Is(String),
}

impl Change {
    /// The change of a volume's pins to these.
    #[must_use]
    pub fn pins(volume: &str, pins: &PinList) -> Self {
        let spec = Spec::online().find(|spec| matches!(spec.online, Online::Pins));
        let spec = spec.expect("the table has it");
        let value = pins.text().map_or(NewValue::Unset, NewValue::Is);
        Self { spec, volume: Some(volume.to_owned()), value }
    }

    /// The change of setting `key` to the value `text`, of `volume` or of the whole cache. With a
    /// volume, settings of the cache are accepted too.
    ///
    /// # Errors
    /// When there is no such setting, or the value is invalid; the message lists the valid ones.
    pub fn parse(volume: Option<&str>, key: &str, text: &str) -> Result<Self, String> {
        let mut known = Spec::changeable(volume.is_some());
        let spec = known.find(|spec| spec.key == key).ok_or_else(|| unknown(key))?;
        let value = match text {
            DEFAULT => NewValue::Configured,
            _ => {
                spec.check(text).map_err(|what| format!("{key}: {what}"))?;
                NewValue::Is(text.to_owned())
            }
        };
        let volume = volume.filter(|_| spec.is_of_volume()).map(str::to_owned);
        Ok(Self { spec, volume, value })
    }
}

fn unknown(key: &str) -> String {
    let known = Spec::changeable(true).map(|spec| spec.key).collect::<Vec<_>>().join(", ");
    if Spec::online().any(|spec| spec.key == key) {
        return format!("{key} is a setting of a volume; name the volume");
    }
    if let Some(spec) = TABLE.iter().find(|spec| spec.key == key) {
        let remedy = match spec.online {
            Online::Restart => "change the configuration, and restart",
            _ => "change the configuration, and apply it (forebay apply FILE)",
        };
        return format!("{key} cannot be set while serving, only {known}; {remedy}");
    }
    format!("unknown setting {key:?}; use one of: {known}")
}

/// Settings that the status shows in dedicated fields.
const ELSEWHERE: [&str; 6] = ["path", "size", "nbd", "fuse", "name", "primary"];

/// Every setting in `config` that has a value and is not shown elsewhere in the status: those of
/// the server, then those of each volume.
#[must_use]
pub fn in_force(config: &Config) -> Vec<SettingSnapshot> {
    // Fields are accessible through exclusive references only.
    let mut config = config.clone();
    let hidden = [Section::Control, Section::Web, Section::Events];
    let elsewhere = |spec: &&Spec| hidden.contains(&spec.section) || ELSEWHERE.contains(&spec.key);
    let shown = || TABLE.iter().filter(move |spec| !elsewhere(spec));
    let mut all = Vec::new();
    for spec in shown().filter(|spec| !spec.is_of_volume()) {
        let value = spec.field(&mut config, 0).text();
        all.extend(value.map(|value| SettingSnapshot { spec, volume: None, value, changed: None }));
    }
    for at in 0..config.volumes.len() {
        for spec in shown().filter(|spec| spec.is_of_volume()) {
            let value = spec.field(&mut config, at).text();
            let volume = Some(config.volumes[at].name.clone());
            all.extend(value.map(|value| SettingSnapshot { spec, volume, value, changed: None }));
        }
    }
    all
}
