//! The set-ups that a load runs on: the modeled disks alone, Forebay in each mode, the bare SSD,
//! another cache.

use std::str::FromStr;

/// The modes that can be measured.
const MODES: [&str; 4] = ["write-back", "write-through", "write-around", "write-only"];
/// A target of a load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetUp {
    /// The modeled disks alone, accessed in the same way: Forebay in pass-through.
    NoCache,
    /// The modeled disks with Forebay in this mode.
    Mode(&'static str),
    /// Write-back with another way of storing blocks, for comparison.
    Stored(&'static Stored),
    /// The SSD alone: the upper bound.
    BareSsd,
    /// The modeled disks behind nbdkit's cache filter, in write-through.
    Nbdkit,
}

/// A way of storing blocks.
#[derive(PartialEq, Eq, Debug)]
pub struct Stored {
    name: &'static str,
    flags: &'static [&'static str],
}

/// All of them: also against similar blocks; each block by itself, compressed or not; in a cache
/// without a store.
const STORED: [Stored; 4] = [
    Stored { name: "similar", flags: &["--content=similar"] },
    Stored { name: "independent", flags: &["--content=independent"] },
    Stored { name: "raw", flags: &["--content=independent", "--no-compression"] },
    Stored { name: "one-log", flags: &["--log-share=100%"] },
];

impl SetUp {
    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoCache => crate::report::BASELINE,
            Self::Mode(mode) => mode,
            Self::Stored(stored) => stored.name,
            Self::BareSsd => "bare-ssd",
            Self::Nbdkit => "nbdkit",
        }
    }

    /// The mode of Forebay's cache, if there is one.
    pub fn mode(self) -> Option<&'static str> {
        match self {
            Self::Mode(mode) => Some(mode),
            Self::Stored(_) => Some("write-back"),
            Self::NoCache | Self::BareSsd | Self::Nbdkit => None,
        }
    }

    /// Additional flags for the server.
    pub fn flags(self) -> impl Iterator<Item = String> {
        let flags = if let Self::Stored(stored) = self { stored.flags } else { &[] };
        flags.iter().map(|&flag| flag.to_owned())
    }
}

impl FromStr for SetUp {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::NoCache, Self::BareSsd, Self::Nbdkit].into_iter();
        let all = all.chain(MODES.map(Self::Mode)).chain(STORED.iter().map(Self::Stored));
        let found = all.clone().find(|setup| setup.name() == text);
        let names: Vec<&str> = all.map(Self::name).collect();
        found.ok_or_else(|| format!("{text:?} is not a set-up; use {}", names.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_ups_have_one_name_each() {
        for name in ["no-cache", "write-back", "write-through", "bare-ssd", "nbdkit", "raw"] {
            assert_eq!(name.parse::<SetUp>().map(SetUp::name), Ok(name));
        }
        let raw = "raw".parse::<SetUp>().expect("it is one");
        assert_eq!((raw.mode(), raw.flags().count()), (Some("write-back"), 2));
        let message = "writeback".parse::<SetUp>().expect_err("no such set-up");
        assert!(message.contains("write-back") && message.contains("\"writeback\""), "{message}");
    }
}
