//! Values of settings as text: how each type is parsed from a file, a flag or a request, and
//! printed. Ranges belong to the table; see [`super::Range`].

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use forebay_engine::{ContentLocality, Eviction, Mode, Part};
use forebay_policy::size_text;

use crate::access::SocketMode;
use crate::config::{FuseTransport, ListItem, TextList, TlsPolicy, WebListen};
use crate::endpoint::Listen;
use crate::peer::ChangesBy;
use crate::units::{Latency, Percent, Share, Size, Time, UnitError};

/// A type whose values have names: one table for parsing, printing and listing them.
pub trait Named: Copy + PartialEq + 'static {
    /// The noun for the type in messages.
    const NOUN: &'static str;
    /// Every value with its name.
    const NAMES: &'static [(&'static str, Self)];

    /// The names, in table order.
    fn names() -> Vec<&'static str> {
        Self::NAMES.iter().map(|&(name, _)| name).collect()
    }
}

impl Named for Mode {
    const NOUN: &'static str = "mode";
    const NAMES: &'static [(&'static str, Self)] = &Mode::NAMES;
}

impl Named for Eviction {
    const NOUN: &'static str = "eviction policy";
    const NAMES: &'static [(&'static str, Self)] = &Eviction::NAMES;
}

impl Named for ContentLocality {
    const NOUN: &'static str = "content setting";
    const NAMES: &'static [(&'static str, Self)] = &ContentLocality::NAMES;
}

impl Named for TlsPolicy {
    const NOUN: &'static str = "TLS policy";
    const NAMES: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("allowed", Self::Allowed), ("required", Self::Required)];
}

impl Named for FuseTransport {
    const NOUN: &'static str = "FUSE transport";
    const NAMES: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("io-uring", Self::IoUring), ("device", Self::Device)];
}

impl Named for ChangesBy {
    const NOUN: &'static str = "group of users";
    const NAMES: &'static [(&'static str, Self)] =
        &[("owner", Self::Owner), ("anyone", Self::Anyone)];
}

/// The value with this name.
///
/// # Errors
/// When no value has that name; the message lists the names.
pub fn parse_named<T: Named>(name: &str) -> Result<T, String> {
    let found = T::NAMES.iter().find(|(known, _)| *known == name);
    found.map(|&(_, value)| value).ok_or_else(|| {
        format!("unknown {} {name:?}; use one of: {}", T::NOUN, T::names().join(", "))
    })
}

/// The type of a setting.
pub trait Value: Sized {
    /// The value that `text` stands for.
    ///
    /// # Errors
    /// When the text is not valid; the message names it and says what would be.
    fn read(text: &str) -> Result<Self, String>;

    /// The text that [`Value::read`] turns into this value again.
    fn text(&self) -> String;

    /// The value in the unit of its kind's [`super::Range`]: bytes, milliseconds or percent; `None`
    /// if the type has no range.
    fn number(&self) -> Option<u64> {
        None
    }
}

impl<T: Named> Value for T {
    fn read(text: &str) -> Result<Self, String> {
        parse_named(text)
    }

    fn text(&self) -> String {
        let found = T::NAMES.iter().find(|(_, value)| value == self);
        found.expect("every value has a name").0.to_owned()
    }
}

/// The size, time or share that a text stands for.
fn parsed<T: FromStr<Err = UnitError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: UnitError| error.to_string())
}

impl Value for Size {
    fn read(text: &str) -> Result<Self, String> {
        parsed(text)
    }

    fn text(&self) -> String {
        size_text(self.0).to_string()
    }

    fn number(&self) -> Option<u64> {
        Some(self.0)
    }
}

impl Value for Time {
    fn read(text: &str) -> Result<Self, String> {
        parsed(text)
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn number(&self) -> Option<u64> {
        u64::try_from(self.0.as_millis()).ok()
    }
}

impl Value for Percent {
    fn read(text: &str) -> Result<Self, String> {
        parsed(text)
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn number(&self) -> Option<u64> {
        Some(self.0.into())
    }
}

impl Value for Share {
    fn read(text: &str) -> Result<Self, String> {
        parsed(text)
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn number(&self) -> Option<u64> {
        // Bytes have no range: the cache's size bounds them.
        match self.0 {
            Part::Percent(percent) => Some(percent.into()),
            Part::Bytes(_) => None,
        }
    }
}

impl Value for Latency {
    fn read(text: &str) -> Result<Self, String> {
        parsed(text)
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn number(&self) -> Option<u64> {
        Value::number(&Time(self.time()))
    }
}

macro_rules! whole_numbers {
    ($($number:ty),+) => {
        $(impl Value for $number {
            fn read(text: &str) -> Result<Self, String> {
                let wrong = || format!("{text:?} is not a whole number up to {}", Self::MAX);
                text.parse().map_err(|_| wrong())
            }

            fn text(&self) -> String {
                self.to_string()
            }

            fn number(&self) -> Option<u64> {
                Some((*self).into())
            }
        })+
    };
}

whole_numbers!(u16, u32);

impl Value for bool {
    fn read(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("{text:?} is neither true nor false"))
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

impl Value for String {
    fn read(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }

    fn text(&self) -> String {
        self.clone()
    }
}

impl Value for PathBuf {
    fn read(text: &str) -> Result<Self, String> {
        Ok(Self::from(text))
    }

    fn text(&self) -> String {
        self.display().to_string()
    }
}

impl Value for SocketMode {
    fn read(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn text(&self) -> String {
        format!("{:04o}", self.0)
    }
}

/// The field of a setting in the configuration.
pub trait Field {
    /// Stores the value that `text` stands for; a list appends it.
    ///
    /// # Errors
    /// As for [`Value::read`].
    fn set(&mut self, text: &str) -> Result<(), String>;

    /// Removes the value; returns whether the field can be without one.
    fn clear(&mut self) -> bool;

    /// The value as text; `None` if it is unset.
    fn text(&self) -> Option<String>;

    /// As [`Value::number`]; `None` if the value is unset.
    fn number(&self) -> Option<u64> {
        None
    }
}

impl<T: Value> Field for T {
    fn set(&mut self, text: &str) -> Result<(), String> {
        *self = T::read(text)?;
        Ok(())
    }

    fn clear(&mut self) -> bool {
        false
    }

    fn text(&self) -> Option<String> {
        Some(Value::text(self))
    }

    fn number(&self) -> Option<u64> {
        Value::number(self)
    }
}

impl<T: Value> Field for Option<T> {
    fn set(&mut self, text: &str) -> Result<(), String> {
        *self = Some(T::read(text)?);
        Ok(())
    }

    fn clear(&mut self) -> bool {
        *self = None;
        true
    }

    fn text(&self) -> Option<String> {
        self.as_ref().map(Value::text)
    }

    fn number(&self) -> Option<u64> {
        self.as_ref().and_then(Value::number)
    }
}

impl Value for WebListen {
    fn read(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

impl Field for Vec<String> {
    fn set(&mut self, text: &str) -> Result<(), String> {
        self.push(text.to_owned());
        Ok(())
    }

    fn clear(&mut self) -> bool {
        Vec::clear(self);
        true
    }

    fn text(&self) -> Option<String> {
        let quoted = |item: &String| match item.contains(|c: char| c.is_whitespace() || c == '"') {
            true => format!("{item:?}"),
            false => item.clone(),
        };
        (!self.is_empty()).then(|| self.iter().map(quoted).collect::<Vec<_>>().join(" "))
    }
}

impl Field for Vec<Listen> {
    fn set(&mut self, text: &str) -> Result<(), String> {
        self.push(text.parse()?);
        Ok(())
    }

    fn clear(&mut self) -> bool {
        Vec::clear(self);
        true
    }

    fn text(&self) -> Option<String> {
        let all: Vec<String> = self.iter().map(Listen::to_string).collect();
        (!all.is_empty()).then(|| all.join(" "))
    }
}

impl<T: ListItem> Field for TextList<T> {
    fn set(&mut self, text: &str) -> Result<(), String> {
        self.add(text)
    }

    fn clear(&mut self) -> bool {
        self.0.clear();
        true
    }

    fn text(&self) -> Option<String> {
        Self::text(self)
    }
}

/// A number of bytes in words.
pub(super) fn size(bytes: u64) -> String {
    if bytes == 1 { "1 byte".to_owned() } else { Value::text(&Size(bytes)) }
}

/// A number of milliseconds in words.
pub(super) fn time(millis: u64) -> String {
    Time(Duration::from_millis(millis)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_written_exactly() {
        for (bytes, text) in
            [(0, "0"), (1000, "1000"), (1536, "1536"), (3 << 20, "3MiB"), (1 << 40, "1TiB")]
        {
            assert_eq!(Value::text(&Size(bytes)), text);
            assert_eq!(Size::read(text), Ok(Size(bytes)));
        }
    }

    #[test]
    fn a_name_is_read_and_written() {
        for &(name, value) in <Mode as Named>::NAMES {
            assert_eq!(parse_named::<Mode>(name), Ok(value));
            assert_eq!(Value::text(&value), name);
        }
        let error = parse_named::<Eviction>("mru").expect_err("there is no such policy");
        assert_eq!(error, "unknown eviction policy \"mru\"; use one of: fifo, lru, frequency");
    }
}
