//! Sizes and times as people write them: "10GiB", "512M", "30s". Parsing is strict, and an error
//! says what would be accepted.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

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
