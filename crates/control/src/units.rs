//! Sizes and times as people write them: "10GiB", "512M", "30s". Parsing is strict, and an error
//! says what would be accepted.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use forebay_engine::Part;
use forebay_policy::size_text;

/// Suffixes of sizes: powers of 1024, or of 1000 for a `B` without an `i`.
const SIZES: [(&str, u64); 14] = [
    ("", 1),
    ("B", 1),
    ("K", 1 << 10),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("M", 1 << 20),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("G", 1 << 30),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("T", 1 << 40),
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
];
/// Suffixes of times, with their length in milliseconds.
const TIMES: [(&str, u64); 5] =
    [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// A number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Size(pub u64);

/// A duration.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub Duration);

/// A share of something, 0 to 100.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Percent(pub u8);

/// A part of something in percent, or in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Share(pub Part);

impl Default for Share {
    fn default() -> Self {
        Self(Part::Percent(0))
    }
}

/// The latency of requests at a primary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Latency {
    /// As disks answer.
    Disks,
    /// As SSDs answer.
    Ssd,
    /// Another.
    Time(Time),
}

impl Latency {
    const NAMES: [(&'static str, Self); 2] = [("disks", Self::Disks), ("ssd", Self::Ssd)];

    /// The latency as a time.
    #[must_use]
    pub fn time(self) -> Duration {
        match self {
            Self::Disks => forebay_policy::LATENCY_OF_DISKS,
            Self::Ssd => forebay_policy::LATENCY_OF_SSDS,
            Self::Time(time) => time.0,
        }
    }
}

/// Why a text is not a size, a time or a share, and what would be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{value:?} is not {wanted}")]
pub struct UnitError {
    value: String,
    wanted: &'static str,
}

impl FromStr for Size {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        number_with_unit(text, &SIZES).map(Self).ok_or_else(|| UnitError {
            value: text.to_owned(),
            wanted: "a size: a whole number of bytes, or one with K, M, G, T (KiB, MiB, GiB, TiB)",
        })
    }
}

impl FromStr for Time {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let millis = number_with_unit(text, &TIMES);
        millis.map(|millis| Self(Duration::from_millis(millis))).ok_or_else(|| UnitError {
            value: text.to_owned(),
            wanted: "a time: a whole number with ms, s, m, h or d, as in \"30s\"",
        })
    }
}

impl FromStr for Percent {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let digits = text.trim().strip_suffix('%').unwrap_or(text.trim());
        let share = digits.trim_end().parse::<u8>().ok().filter(|&share| share <= 100);
        share.map(Self).ok_or_else(|| UnitError {
            value: text.to_owned(),
            wanted: "a share: a whole number of percent from 0 to 100, as in \"50%\"",
        })
    }
}

/// The fewest bytes that are a part of a cache: with less, a volume would wait at every write.
const SHARE_MIN: u64 = 1 << 20;

impl FromStr for Share {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let wrong = || UnitError {
            value: text.to_owned(),
            wanted: "a share: percent from 0 to 100, as in \"50%\", or 1MiB or more, as in \
                     \"8GiB\"",
        };
        if let Ok(Percent(percent)) = text.parse() {
            return Ok(Self(Part::Percent(percent)));
        }
        // Without a unit it could be either.
        let has_unit = text.ends_with(|last: char| last.is_ascii_alphabetic());
        let size = text.parse::<Size>().ok().filter(|size| has_unit && size.0 >= SHARE_MIN);
        size.map(|size| Self(Part::Bytes(size.0))).ok_or_else(wrong)
    }
}

impl FromStr for Latency {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let named = Self::NAMES.iter().find(|(name, _)| text.trim().eq_ignore_ascii_case(name));
        if let Some(&(_, latency)) = named {
            return Ok(latency);
        }
        text.parse().map(Self::Time).map_err(|_| UnitError {
            value: text.to_owned(),
            wanted: "a time, as in \"5ms\", \"disks\" or \"ssd\"",
        })
    }
}

/// The value of a whole number followed by one of `units`.
fn number_with_unit(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let factor = units.iter().find(|(known, _)| *known == unit.trim_start())?.1;
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

impl fmt::Display for Size {
    /// Whole multiples of a unit are printed as such, others rounded to a tenth unless that is
    /// zero.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        // A value that rounds to 1024 of a unit is printed as one of the next unit.
        let fits = |&(unit, _): &(u64, &str)| self.0 >= unit - unit / 20_480;
        let Some((unit, name)) = units.into_iter().find(fits) else {
            return write!(f, "{} B", self.0);
        };
        if self.0.is_multiple_of(unit) {
            return write!(f, "{} {name}", self.0 / unit);
        }
        let tenths = format!("{:.1}", self.0 as f64 / unit as f64);
        write!(f, "{} {name}", tenths.strip_suffix(".0").unwrap_or(&tenths))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        if millis == 0 {
            return f.write_str("0s");
        }
        let fits = |&&(_, unit): &&(&str, u64)| millis >= unit && millis.is_multiple_of(unit);
        let (name, unit) = TIMES.iter().rev().find(fits).unwrap_or(&TIMES[0]);
        write!(f, "{}{name}", millis / unit)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Part::Percent(percent) => write!(f, "{percent}%"),
            Part::Bytes(bytes) => {
                let text = size_text(bytes).to_string();
                let unit = if text.ends_with('B') { "" } else { "B" };
                write!(f, "{text}{unit}")
            }
        }
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time(time) => time.fmt(f),
            named => {
                let found = Self::NAMES.iter().find(|(_, latency)| latency == named);
                f.write_str(found.expect("the others have names").0)
            }
        }
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let known = [
            ("0", 0),
            ("4096", 4096),
            ("512B", 512),
            ("1K", 1024),
            ("10GiB", 10 << 30),
            (" 3 MiB ", 3 << 20),
            ("2MB", 2_000_000),
            ("1T", 1 << 40),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in known {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "GiB", "-1", "1.5G", "1X", "1gib", "1 G B", "18446744073709551615K"] {
            let error = text.parse::<Size>().expect_err(text).to_string();
            assert!(error.contains(text) && error.contains("a whole number"), "{error}");
        }
    }

    #[test]
    fn times_and_shares_are_read() {
        assert_eq!("30s".parse(), Ok(Time(Duration::from_secs(30))));
        assert_eq!("250 ms".parse(), Ok(Time(Duration::from_millis(250))));
        assert_eq!("2h".parse(), Ok(Time(Duration::from_secs(7200))));
        for text in ["30", "s", "1.5s", "-1s", "1w"] {
            assert!(text.parse::<Time>().is_err(), "{text}");
        }
        assert_eq!("50%".parse(), Ok(Percent(50)));
        assert_eq!("100".parse(), Ok(Percent(100)));
        for text in ["101%", "-1", "half", "%"] {
            assert!(text.parse::<Percent>().is_err(), "{text}");
        }
    }

    #[test]
    fn parts_are_percent_or_bytes() {
        let known = [
            ("0%", Part::Percent(0), "0%"),
            ("50", Part::Percent(50), "50%"),
            ("8GiB", Part::Bytes(8 << 30), "8GiB"),
            ("1500 MB", Part::Bytes(1_500_000_000), "1500000000B"),
        ];
        for (text, part, printed) in known {
            assert_eq!(text.parse(), Ok(Share(part)), "{text}");
            assert_eq!(Share(part).to_string(), printed);
            assert_eq!(printed.parse(), Ok(Share(part)), "{printed}");
        }
        for text in ["101%", "4194304", "512KiB", "0B", "half", "8 apples", ""] {
            let error = text.parse::<Share>().expect_err(text).to_string();
            assert!(error.contains(text) && error.contains("1MiB or more"), "{error}");
        }
    }

    #[test]
    fn latencies_have_names() {
        for (text, printed, millis) in
            [("disks", "disks", 75), ("SSD", "ssd", 2), ("75ms", "75ms", 75), ("1s", "1s", 1000)]
        {
            let latency: Latency = text.parse().expect(text);
            assert_eq!(latency.time(), Duration::from_millis(millis));
            assert_eq!(latency.to_string(), printed);
        }
        let error = "tape".parse::<Latency>().expect_err("it is no latency").to_string();
        assert_eq!(error, "\"tape\" is not a time, as in \"5ms\", \"disks\" or \"ssd\"");
    }

    #[test]
    fn what_is_printed_can_be_read_again() {
        for bytes in [0, 1, 1023, 1024, 3 << 20, 7 << 40] {
            assert_eq!(Size(bytes).to_string().parse(), Ok(Size(bytes)));
        }
        assert_eq!(Size(1536).to_string(), "1.5 KiB");
        assert_eq!(Size((64 << 20) - 4096).to_string(), "64 MiB");
        assert_eq!(Size((1 << 30) - 1).to_string(), "1 GiB");
        assert_eq!(Time::default().to_string(), "0s");
        for millis in [0, 1, 999, 1000, 60_000, 90_000, 86_400_000] {
            let time = Time(Duration::from_millis(millis));
            assert_eq!(time.to_string().parse(), Ok(time), "{time}");
        }
    }
}
