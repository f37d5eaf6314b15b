//! Reads a configuration file: TOML, with every key looked up in the table of settings.

use std::fs;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeInteger, DeString, DeTable, DeValue};

use crate::settings::{Initial, Kind, Section, Spec};

use super::{Config, ConfigError};

/// Maximum length of a configuration, in bytes: of one that is started with, and of one that is
/// applied.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// Advice for a file with `[volume]` instead of `[[volume]]`.
const ONE_VOLUME: &str = "[volume] is one section; write [[volume]], there may be several";

/// A mistake in the file: its byte range, and what is wrong.
struct Mistake(Range<usize>, String);

impl Config {
    /// Reads the text of the file at `path`, for [`Config::parse`].
    ///
    /// # Errors
    /// When the file cannot be read, or is too long.
    pub fn text(path: &Path) -> Result<String, ConfigError> {
        let failed = |source| ConfigError::Read { path: path.to_owned(), source };
        check_length(path, fs::metadata(path).map_err(failed)?.len())?;
        fs::read_to_string(path).map_err(failed)
    }

    /// Parses and checks `text`; `path` is for messages.
    ///
    /// # Errors
    /// When it is too long, a key is unknown, or a value is unusable.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        check_length(path, text.len() as u64)?;
        let broken = |error: toml::de::Error| {
            Mistake(error.span().unwrap_or(0..0), error.message().trim().replace('\n', " "))
        };
        let document = DeTable::parse(text).map_err(broken);
        let config = document.and_then(|document| whole(document.get_ref()));
        let config = config.map_err(|Mistake(at, what)| {
            let before = &text.as_bytes()[..at.start.min(text.len())];
            let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
            // After a [[volume]], TOML reports [volume] as a duplicate key.
            let written = text.lines().nth(line - 1).unwrap_or_default().trim_start();
            let what = if written.starts_with("[volume]") { ONE_VOLUME.to_owned() } else { what };
            ConfigError::Syntax { path: path.to_owned(), line, what }
        })?;
        config.check()?;
        Ok(config)
    }
}

fn check_length(path: &Path, bytes: u64) -> Result<(), ConfigError> {
    if bytes > FILE_BYTES_MAX {
        return Err(ConfigError::TooLong { path: path.to_owned(), bytes });
    }
    Ok(())
}

type Item<'a, 'i> = (&'a Spanned<DeString<'i>>, &'a Spanned<DeValue<'i>>);

/// The keys of a table with their values, in file order.
fn in_order<'a, 'i>(table: &'a DeTable<'i>) -> Vec<Item<'a, 'i>> {
    let mut items: Vec<_> = table.iter().collect();
    items.sort_by_key(|(key, _)| key.span().start);
    items
}

fn whole(document: &DeTable<'_>) -> Result<Config, Mistake> {
    let volumes = document.get("volume").and_then(|volumes| volumes.get_ref().as_array());
    let mut config = Config::defaults(volumes.map_or(0, |volumes| volumes.len()));
    for (name, value) in in_order(document) {
        let found = Section::NAMES.iter().find(|(known, _)| *known == name.get_ref());
        let &(_, section) =
            found.ok_or_else(|| unknown(name, Section::NAMES.iter().map(|s| s.0)))?;
        match (section, value.get_ref()) {
            (Section::Volume, DeValue::Array(volumes)) => {
                for (at, volume) in volumes.iter().enumerate() {
                    read_section(&mut config, section, at, volume)?;
                }
            }
            (Section::Volume, _) => {
                return Err(Mistake(name.span(), ONE_VOLUME.to_owned()));
            }
            _ => read_section(&mut config, section, 0, value)?,
        }
    }
    match document.get("cache") {
        Some(_) => Ok(config),
        None => Err(Mistake(0..0, "missing section [cache]; it names the cache device".to_owned())),
    }
}

/// Reads a section into `config`; `volume` is the index of its volume.
fn read_section(
    config: &mut Config,
    section: Section,
    volume: usize,
    value: &Spanned<DeValue<'_>>,
) -> Result<(), Mistake> {
    let DeValue::Table(table) = value.get_ref() else {
        let what = format!("{0} is a section; write [{0}]", section.name());
        return Err(Mistake(value.span(), what));
    };
    for (key, value) in in_order(table) {
        let spec = Spec::find(section, key.get_ref())
            .ok_or_else(|| unknown(key, section.settings().map(|spec| spec.key)))?;
        let named =
            |what| Mistake(value.span(), format!("{}.{}: {what}", section.name(), spec.key));
        for text in texts(spec, value.get_ref()).map_err(named)? {
            spec.set(config, volume, &text).map_err(named)?;
        }
    }
    for spec in section.settings() {
        if spec.default == Initial::Required && !table.contains_key(spec.key) {
            let what = format!("missing key `{}` of [{}]", spec.key, section.name());
            return Err(Mistake(value.span(), what));
        }
    }
    Ok(())
}

fn unknown(key: &Spanned<DeString<'_>>, known: impl Iterator<Item = &'static str>) -> Mistake {
    let known: Vec<String> = known.map(|name| format!("`{name}`")).collect();
    let what = format!("unknown key `{}`; known here: {}", key.get_ref(), known.join(", "));
    Mistake(key.span(), what)
}

/// The value of a setting as texts; more than one only for a list.
fn texts(spec: &Spec, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    if let (Kind::List(_), DeValue::Array(values)) = (&spec.kind, value) {
        return values.iter().map(|value| text(&spec.kind, value.get_ref())).collect();
    }
    Ok(vec![text(&spec.kind, value)?])
}

/// A value as text, if its TOML type matches the setting's kind.
fn text(kind: &Kind, value: &DeValue<'_>) -> Result<String, String> {
    match (kind, value) {
        (Kind::Bool, DeValue::Boolean(on)) => Ok(on.to_string()),
        (
            Kind::Number(_) | Kind::Size(_) | Kind::Percent(_) | Kind::Share(_),
            DeValue::Integer(number),
        ) => decimal(number),
        (Kind::Bool | Kind::Number(_), _) | (_, DeValue::Array(_) | DeValue::Table(_)) => {
            Err(format!("{} is not {}", described(value), kind_in_words(kind)))
        }
        (_, DeValue::String(text)) => Ok(text.to_string()),
        _ => Err(format!("{} is not {}", described(value), kind_in_words(kind))),
    }
}

fn decimal(number: &DeInteger<'_>) -> Result<String, String> {
    let value = i128::from_str_radix(number.as_str(), number.radix());
    value.map(|value| value.to_string()).map_err(|_| format!("{number} is not a whole number"))
}

fn described(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("the text {text:?}"),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Boolean(on) => on.to_string(),
        other => format!("this {}", other.type_str()),
    }
}

fn kind_in_words(kind: &Kind) -> &'static str {
    match kind {
        Kind::Size(_) => "a size, as in \"10GiB\"",
        Kind::Percent(_) => "a share, as in \"50%\"",
        Kind::Share(_) => "a share, as in \"50%\" or \"8GiB\"",
        Kind::Time(_) => "a time, as in \"30s\"",
        Kind::Number(_) => "a whole number",
        Kind::Bool => "a boolean: true or false",
        Kind::Choice(_) | Kind::Text(_) => "a text in quotes",
        Kind::List(_) => "a list of texts in quotes",
    }
}
