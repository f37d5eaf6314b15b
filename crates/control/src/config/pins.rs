//! The pinned bytes of a volume, as the configuration has them.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use forebay_policy::{range_text, read_range};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::list::{ListItem, TextList};
use super::{Config, ConfigError, invalid};

/// Most ranges of one volume.
pub const PINNED_RANGES_MAX: usize = 1024;

/// Bytes of a volume that stay in the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pin {
    /// The name to find it by, usually the path of a file.
    pub name: Option<String>,
    /// Where the bytes are.
    pub ranges: Vec<Range<u64>>,
}

impl Pin {
    /// Its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let lengths = self.ranges.iter().map(|range| range.end - range.start);
        lengths.fold(0, u64::saturating_add)
    }

    /// What it is called: its name, or its text without one.
    #[must_use]
    pub fn title(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.to_string())
    }
}

impl FromStr for Pin {
    type Err = String;

    /// Reads `NAME=FROM..TO,FROM..TO`, or the ranges alone.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, ranges) = match text.rsplit_once('=') {
            Some((name, ranges)) => (Some(name.trim()), ranges),
            None => (None, text),
        };
        if name.is_some_and(|name| name.is_empty() || name.contains(['=', ';'])) {
            return Err(format!("{text:?}: a name is not empty, and has no '=' and no ';'"));
        }
        if text.chars().any(char::is_control) {
            return Err(format!("{text:?} has a control character"));
        }
        let read = |range: &str| {
            let read = read_range(range.trim()).map_err(|what| format!("{range:?}: {what}"))?;
            match read.end {
                u64::MAX => Err(format!("{range:?}: a pinned range has an end")),
                _ => Ok(read),
            }
        };
        let ranges = ranges.split(',').map(read).collect::<Result<_, _>>()?;
        Ok(Self { name: name.map(str::to_owned), ranges })
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}=")?;
        }
        for (at, range) in self.ranges.iter().enumerate() {
            let before = if at == 0 { "" } else { "," };
            write!(f, "{before}{}", range_text(range))?;
        }
        Ok(())
    }
}

/// The pins of a volume.
pub type PinList = TextList<Pin>;

/// The name for all pins of a volume.
const ALL: &str = "all";

/// A change of a volume's pins, whatever else is pinned by then.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PinEdit {
    /// Pin this too, a text as in the setting `pinned`; a pin of the same name goes.
    Add(String),
    /// Unpin this name, or `all`.
    Remove(String),
}

impl ListItem for Pin {
    /// At most [`PINNED_RANGES_MAX`] ranges.
    fn check(all: &[Self]) -> Result<(), String> {
        let count: usize = all.iter().map(|pin| pin.ranges.len()).sum();
        if count > PINNED_RANGES_MAX {
            let most = format!("{PINNED_RANGES_MAX} ranges of a volume can be pinned");
            return Err(format!("{count} ranges, but {most}; pin what lies between, too"));
        }
        Ok(())
    }
}

impl PinList {
    /// These pins after a change.
    ///
    /// # Errors
    /// When the new text is malformed, there are too many pins then, or none has the name.
    pub fn edited(&self, edit: &PinEdit) -> Result<Self, String> {
        let mut pins = self.clone();
        match edit {
            PinEdit::Add(text) => {
                let mut new = Self::default();
                new.add(text)?;
                for pin in new.0 {
                    // The same file again: it may have grown.
                    pins.0.retain(|known| known.title() != pin.title());
                    pins.0.push(pin);
                }
                Pin::check(&pins.0)?;
            }
            PinEdit::Remove(name) if name == ALL => pins.0.clear(),
            PinEdit::Remove(name) => {
                pins.0.retain(|pin| pin.title() != *name);
                if pins == *self {
                    return Err(format!("nothing is pinned as {name:?}"));
                }
            }
        }
        Ok(pins)
    }

    /// The ranges of all pins.
    pub fn ranges(&self) -> impl Iterator<Item = &Range<u64>> {
        self.0.iter().flat_map(|pin| &pin.ranges)
    }
}

impl Config {
    /// Checks that no more than half of a cache of this many bytes is pinned.
    ///
    /// # Errors
    /// Says how much is pinned.
    pub fn check_pins(&self, cache_bytes: u64) -> Result<(), ConfigError> {
        let pins = self.volumes.iter().flat_map(|volume| &volume.pinned.0);
        let bytes = pins.map(Pin::bytes).fold(0, u64::saturating_add);
        if bytes <= cache_bytes / 2 {
            return Ok(());
        }
        let size = crate::units::Size;
        let what = format!("{} in all, of a cache of {}", size(bytes), size(cache_bytes));
        Err(invalid("volume.pinned", what, "pin half of the cache at most"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_written_as_they_are_read() {
        let mut pins = PinList::default();
        pins.add("0..1GiB; /srv/my db/t.ibd=4096..8192,1MiB..2MiB;").expect("pins");
        let text = pins.text().expect("there are some");
        assert_eq!(text, "..1GiB; /srv/my db/t.ibd=4KiB..8KiB,1MiB..2MiB");
        let mut again = PinList::default();
        again.add(&text).expect("its own text");
        assert_eq!(again, pins);
        assert_eq!(pins.0[1].bytes(), 4096 + (1 << 20));
        assert_eq!(pins.0[1].title(), "/srv/my db/t.ibd");
        assert_eq!(PinList::default().text(), None);
    }

    #[test]
    fn wrong_pins_are_refused() {
        for (text, says) in [
            ("x", "use two places"),
            ("=0..1", "a name is not empty"),
            ("a=b=0..1", "no '='"),
            ("1GiB..", "has an end"),
            ("a=2..1", "ends before it begins"),
            ("a\nb=0..1", "control character"),
        ] {
            let error = PinList::default().add(text).expect_err(text);
            assert!(error.contains(says), "{text:?}: {error}");
        }
        let many: Vec<String> = (0..1025).map(|at| format!("{at}..{}", at + 1)).collect();
        assert!(PinList::default().add(&many.join(",")).is_err());
    }

    #[test]
    fn a_change_leaves_the_other_pins() {
        let mut pins = PinList::default();
        pins.add("..1GiB; a=..4KiB").expect("pins");
        let edited = |edit: PinEdit| pins.edited(&edit).map(|pins| pins.text().unwrap_or_default());
        let (add, remove) = (|text: &str| PinEdit::Add(text.into()), PinEdit::Remove);
        assert_eq!(edited(add("b=..8KiB")).expect("a pin"), "..1GiB; a=..4KiB; b=..8KiB");
        assert_eq!(edited(add("a=..8KiB")).expect("a pin"), "..1GiB; a=..8KiB", "it has grown");
        assert_eq!(edited(remove("..1GiB".into())).expect("it is one"), "a=..4KiB");
        assert_eq!(edited(remove("all".into())).expect("there are some"), "");
        assert!(edited(remove("b".into())).expect_err("there is none").contains("pinned as \"b\""));
        assert!(edited(add("b")).is_err());
        let many: Vec<String> = (0..1023).map(|at| format!("{at}..{}", at + 1)).collect();
        let error = edited(add(&many.join(","))).expect_err("with those that are there");
        assert!(error.contains("1025 ranges"), "{error}");
    }

    #[test]
    fn half_of_the_cache_can_be_pinned() {
        let mut config = Config::defaults(2);
        config.volumes[0].pinned.add("0..1GiB").expect("a pin");
        config.volumes[1].pinned.add("0..1GiB").expect("a pin");
        assert!(config.check_pins(4 << 30).is_ok());
        let error = config.check_pins(3 << 30).expect_err("too much").to_string();
        assert!(error.contains("2 GiB in all, of a cache of 3 GiB"), "{error}");
    }
}
