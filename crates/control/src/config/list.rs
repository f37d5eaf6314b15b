//! Values of a setting that are written in one text, separated by semicolons.

use std::fmt::Display;
use std::str::FromStr;

/// Separates values in one text.
const BETWEEN: &str = "; ";

/// One of these values.
pub trait ListItem: FromStr<Err = String> + Display {
    /// Checks all values of a setting against each other.
    ///
    /// # Errors
    /// When they are too many, or conflict.
    fn check(_all: &[Self]) -> Result<(), String>
    where
        Self: Sized,
    {
        Ok(())
    }
}

/// Values in their order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TextList<T>(pub Vec<T>);

impl<T> Default for TextList<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: ListItem> TextList<T> {
    /// Adds the values of a text.
    ///
    /// # Errors
    /// When one is malformed, or [`ListItem::check`] refuses them together.
    pub fn add(&mut self, text: &str) -> Result<(), String> {
        let parts = text.split(BETWEEN.trim()).map(str::trim).filter(|part| !part.is_empty());
        for part in parts {
            self.0.push(part.parse()?);
        }
        T::check(&self.0)
    }

    /// The values as one text; `None` if there are none.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        let all: Vec<String> = self.texts().collect();
        (!all.is_empty()).then(|| all.join(BETWEEN))
    }

    /// Each value as text.
    pub fn texts(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(ToString::to_string)
    }
}
